"""Models that know exactly what they remember, to see whether the probes find out."""

from types import SimpleNamespace

import torch
from torch import nn


class Oracle(nn.Module):
    """Foretells what came after the last `order` tokens when they last stood in a row, if that is not too long ago.

    Otherwise it foretells `otherwise`. It keeps what it read as its state, as a GPT does.
    """

    def __init__(self, vocabulary, order, memory, otherwise=0):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.embedding = nn.Embedding(vocabulary, vocabulary)
        self.embedding.weight.data = 50 * torch.eye(vocabulary)
        self.order, self.memory, self.otherwise = order, memory, otherwise

    def features(self, tokens, state=None, *, return_state=True, shards=None):
        before = [] if state is None else state
        texts = [[*old, *new] for old, new in zip(before or [[]] * len(tokens), tokens.tolist(), strict=True)]
        found = torch.tensor([[self._foretell(text[: len(text) - n]) for n in reversed(range(tokens.shape[1]))]
                              for text in texts])  # fmt: skip
        return nn.functional.one_hot(found, self.config.vocab_size).float(), texts if return_state else None

    def _foretell(self, text):
        last = text[-self.order :]
        # The answer lies `distance` tokens before the place it is asked for.
        for distance in range(1, min(self.memory, len(text) - self.order) + 1):
            place = len(text) - distance
            if text[place - self.order : place] == last:
                return text[place]
        return self.otherwise
