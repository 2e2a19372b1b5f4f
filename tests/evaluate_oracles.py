"""Models with a known memory, which the probes must measure correctly."""

from types import SimpleNamespace

import torch
from torch import nn


class Oracle(nn.Module):
    """Predicts the token that followed the last occurrence of the last `order` tokens, if that is recent enough.

    Otherwise it predicts `otherwise`. Its state is the text so far, passed between calls like that of a GPT.
    """

    def __init__(self, vocabulary, order, memory, otherwise=0):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.embedding = nn.Embedding(vocabulary, vocabulary)
        self.embedding.weight.data = 50 * torch.eye(vocabulary)
        self.output_weight = self.embedding.weight
        self.order, self.memory, self.otherwise = order, memory, otherwise

    def features(self, tokens, state=None, *, return_state=True, shards=None):
        before = [] if state is None else state
        texts = [[*old, *new] for old, new in zip(before or [[]] * len(tokens), tokens.tolist(), strict=True)]
        found = torch.tensor([[self._foretell(text[: len(text) - n]) for n in reversed(range(tokens.shape[1]))]
                              for text in texts])  # fmt: skip
        return nn.functional.one_hot(found, self.config.vocab_size).float(), texts if return_state else None

    def _foretell(self, text):
        last = text[-self.order :]
        # The answer is `distance` tokens before its query.
        for distance in range(1, min(self.memory, len(text) - self.order) + 1):
            place = len(text) - distance
            if text[place - self.order : place] == last:
                return text[place]
        return self.otherwise
