"""One token after another, from what was read: the fast way to generate.

decoder = Decoder(model, reading)
while ...:
    logits = decoder.step(tokens)     # (b,) in, (b, vocabulary) out
reading = decoder.close()             # as any reading: to save, to fork, to go on from

Every layer decodes with a memory of fixed room that steps change in place. With symmetric powers it is a window behind
a state (`sympow.Window`): a step reads the state and writes one key and value, and after every 64 tokens all are
folded in. Or it is keys and values alone, as long as they take less than a state would
(`sympow.generation.cache`). With softmax it is a cache with room for all tokens to come.
On a GPU, a step of the whole model is captured as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sympow.generation.cache import Memories, Memory
from sympow.generation.prefix import Reading
from sympow.model.gpt import GPT


class Recorded:
    """Work on fixed tensors: recorded as a CUDA graph at the second call, replayed from then on.

    The first call runs as it is, since it compiles kernels and makes tables, neither of which can be recorded.

    Args:
        work: what to do; on the device alone, always the same.
        record: whether to record it at all.
    """

    def __init__(self, work: Callable[[], None], *, record: bool) -> None:
        self._work, self._record = work, record
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False

    def __call__(self) -> None:
        if self._graph is None and self._record and self._ran:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, say to load data.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._work()
            self._graph = graph
        if self._graph is None:
            self._work()
            self._ran = True
        else:
            self._graph.replay()


class Decoder:
    """Decodes token by token behind a reading, which stays as it is.

    Args:
        model: the one that has read.
        reading: what was read; of one or several texts, of any lengths.
        tokens: how many are to come, as far as known: room is made for as many. None: room grows as needed.
        memory: "auto": keys and values, if that is what the reading holds, until they would take more bytes than a
            state; "state": folded at once; "keys": kept, however many.
        owned: whether the reading may be used up, where it is not needed any more; saves a copy.
        graphs: whether to record steps as CUDA graphs, on a GPU.

    Attributes:
        logits: of the next token, (b, vocabulary). The next step may overwrite them.
        tokens: how many were read, and decoded; of texts of different lengths, the longest's.
        seen: which tokens were read or decoded, (b, vocabulary) bool; None where the reading does not say. The next
            step changes it in place.
    """

    def __init__(
        self,
        model: GPT,
        reading: Reading,
        *,
        tokens: int | None = None,
        memory: Memory = "auto",
        owned: bool = False,
        graphs: bool = True,
    ) -> None:
        self.logits = reading.logits
        self.tokens = reading.tokens
        self.seen = None if reading.seen is None else reading.seen.clone()
        self._model = model
        self._record = graphs and reading.logits.is_cuda
        self._token = torch.zeros(reading.batch, dtype=torch.int64, device=reading.logits.device)
        self._memories = Memories(model, reading.state, tokens=tokens, memory=memory, owned=owned)
        self._start_afresh()

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (b, vocabulary) after one more token of each text.

        Args:
            tokens: (b,), on the model's device.
        """
        if tokens.shape != self._token.shape:
            raise ValueError(f"tokens must be ({len(self._token)},), one for each text; got {tuple(tokens.shape)}")
        if self._memories.make_room(self._fold):
            self._start_afresh()
        held = self._memories.layers[0].tokens + 1
        self._token.copy_(tokens)
        self._advance()
        for memory in self._memories.layers:
            memory.tokens = held  # replays do not count
        self.tokens += 1
        return self.logits

    @property
    def folded(self) -> bool:
        """Whether there is a state, rather than keys and values alone."""
        return self._memories.folded

    @property
    def nbytes(self) -> int:
        """Bytes of the memories, the room in them included."""
        return self._memories.nbytes

    @torch.no_grad()
    def close(self) -> Reading:
        """What was read and decoded, as a reading. The decoder is used up."""
        return Reading(self.logits.clone(), self._memories.close(), self.tokens, self.seen)

    def _start_afresh(self) -> None:
        """For memories that were not there before."""
        self._advance = Recorded(self._step, record=self._record)
        self._fold = Recorded(self._memories.fold, record=self._record)

    @torch.no_grad()
    def _step(self) -> None:
        self.logits = self._model.step(self._token, self._memories.layers)
        if self.seen is not None:
            self.seen.scatter_(1, self._token.unsqueeze(1), True)


def decode(model: GPT, reading: Reading, tokens: Tensor, **options: object) -> tuple[Tensor, Reading]:
    """Reads given tokens one at a time: logits after each, (b, t, vocabulary), and the reading after the last.

    Args:
        tokens: (b, t).
        options: as in `Decoder`.
    """
    decoder = Decoder(model, reading, tokens=tokens.shape[1], **options)  # type: ignore[arg-type]
    logits = [decoder.step(token).clone() for token in tokens.unbind(1)]
    return torch.stack(logits, dim=1), decoder.close()
