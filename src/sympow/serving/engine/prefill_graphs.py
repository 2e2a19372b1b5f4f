"""`PrefillGraphs`: prefill of segments as CUDA graphs.

A segment of the 124M model launches 600 kernels, and launching them one by one takes the host ten times as long as an
H200 takes to run them. A graph has fixed shapes, so there is one graph for each of a few lengths, and a segment is
padded to the next length under a mask. A graph also reads and writes fixed addresses, so the state is copied in before
a call and out after it (`StateBuffer`). Before the first token the state is zero, which gives the same result as none.

The length of a segment alone determines which graph computes it, so rounding does not depend on which graphs were
captured or on other requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import empty_state
from sympow.layers.mixers import ConformalAttention, LayerState
from sympow.model.gpt import GPT, ModelState
from sympow.ops.compilation import conv_shape
from sympow.ops.state import State
from sympow.ops.validation import values_are_checked_on_devices
from sympow.serving.engine.captured import CapturedCalls

# The shortest captured length. Kernels work on tiles of this many tokens, so shorter segments would take no less time.
SHORTEST = 128


def recorded_lengths(segment_size: int) -> tuple[int, ...]:
    """The lengths that segments of up to `segment_size` tokens are padded to.

    Each length is twice the one before, so that less than half of a padded segment is padding (from SHORTEST on), and
    the last is `segment_size`, so that whole segments are not padded.
    """
    lengths = []
    length = SHORTEST
    while length < segment_size:
        lengths.append(length)
        length *= 2
    return (*lengths, segment_size)


def unsupported_reason(model: GPT) -> str | None:
    """Why a model's segments cannot be CUDA graphs; None: they can."""
    device = model.embedding.weight.device
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {device}."
    if model.config.mixer == "softmax":
        return "Keys and values of a softmax model grow with the text, and the shapes of a graph are fixed."
    if model.config.form == "recurrent":
        return "The recurrent form launches kernels for every token, and a graph would hold them all."
    if any(parameter.device != device for parameter in model.parameters()):
        return f"A graph runs on one device, and not all parameters are on {device}."
    if values_are_checked_on_devices():
        return "SYMPOW_CHECK_VALUES=1 asks for checks for which the host waits, which a graph cannot."
    return None


class StateBuffer:
    """The state of one sequence at a fixed place in memory, where graphs read and write it; zero at first.

    Graphs that run one after the other can share one. Copies in and out are one launch for all layers.

    Args:
        model: with symmetric power attention.

    Attributes:
        layers: the state, whose tensors stay where they are.
    """

    def __init__(self, model: GPT) -> None:
        mixers, dtype = [block.mixer for block in model.blocks], model.embedding.weight.dtype
        self.layers = tuple(empty_state(mixer, 1, dtype) for mixer in mixers if isinstance(mixer, ConformalAttention))
        assert len(self.layers) == len(mixers)

    def load(self, state: ModelState | None) -> None:
        """Copies a state into the buffer; None: that before the first token.

        Raises:
            ValueError, TypeError: the state is that of another model, or holds keys and values.
        """
        if state is None:
            for group in _by_member(self.layers):
                torch._foreach_zero_(group)
        else:
            self._check(state)
            _copy(state, self.layers)

    def load_layer(self, number: int, layer: LayerState) -> None:
        """Copies the state of one layer into the buffer; of the same model, which is not checked."""
        assert isinstance(layer, State)
        _copy((layer,), self.layers[number : number + 1])

    def copy(self) -> ModelState:
        """A copy of what is in the buffer."""
        copied = tuple(layer._map(torch.empty_like) for layer in self.layers)
        _copy(self.layers, copied)
        return copied

    def _check(self, state: ModelState) -> None:
        """Refuses what a copy might broadcast."""
        if len(state) != len(self.layers):
            raise ArgumentError("state", f"must have an entry for each of {len(self.layers)} layers, got {len(state)}")
        for number, (layer, own) in enumerate(zip(state, self.layers, strict=True)):
            if not isinstance(layer, State):
                raise ArgumentTypeError(
                    "state", f"must hold a State for each layer, got {type(layer).__name__} for layer {number}"
                )
            kinds = [(x.power, x.key_dim, tuple(x.kv.shape), x.phase is not None, conv_shape(x)) for x in (layer, own)]
            if kinds[0] != kinds[1]:
                raise ArgumentError(
                    "state",
                    "must agree with the model in (power, key dim, shape of kv, rotated, short_conv); "
                    f"layer {number} has {kinds[0]}, expected {kinds[1]}",
                )


class PrefillGraphs:
    """Prefills segments of one sequence, with a captured graph for each of a few lengths.

    If a graph cannot be captured, for lack of memory for example, the same kernels run eagerly, with the same bits as
    the result. On a CPU, in tests, they always do.

    Args:
        model: a model for which `unsupported_reason` is None.
        segment_size: the most tokens of a segment.
        buffer: where graphs read and write the state; other code may use it between calls.

    Attributes:
        lengths: the lengths that segments are padded to.
        calls: the graphs.
    """

    def __init__(self, model: GPT, segment_size: int, buffer: StateBuffer) -> None:
        weight = model.embedding.weight
        device = weight.device
        self._model, self._buffer = model, buffer
        self.lengths = recorded_lengths(segment_size)
        self._positions = torch.arange(segment_size, device=device)
        self._tokens = torch.zeros(1, segment_size, dtype=torch.int64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._features = torch.zeros(1, segment_size, model.config.width, dtype=weight.dtype, device=device)
        self.calls = CapturedCalls(capture=weight.is_cuda, optional=True)

    def padded(self, count: int) -> int:
        """The length that a segment of `count` tokens is padded to."""
        longest = self.lengths[-1]
        if not 1 <= count <= longest:
            raise ArgumentError("tokens", f"must be 1 to {longest} of a segment, got {count}")
        return next(length for length in self.lengths if length >= count)

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], state: ModelState | None) -> tuple[Tensor, Tensor, ModelState]:
        """Launches the prefill of a segment, without waiting for the device.

        Args:
            tokens: the segment, 1 to `segment_size` ids.
            state: the state of one sequence before the segment, which is not modified. None: the text begins here.

        Returns:
            the tokens (1, t) on the model's device and their features (1, t, width), both of which the next call
            overwrites; and the state after the segment, which belongs to the caller.
        """
        count = len(tokens)
        length = self.padded(count)
        # Pinned memory, so that the copy does not wait for kernels launched before.
        staged = torch.zeros(length, dtype=torch.int64, pin_memory=self._tokens.is_cuda)
        staged[:count] = torch.tensor(tokens)
        self._tokens[0, :length].copy_(staged, non_blocking=True)
        self._count.fill_(count)
        self._buffer.load(state)
        self.calls(self._prefill_padded, length)
        return self._tokens[:, :count], self._features[:, :count], self._buffer.copy()

    def record(self) -> None:
        """Captures all graphs, the longest first: the shorter ones then fit into its memory."""
        for length in reversed(self.lengths):
            # The first call runs eagerly, the second is captured, the third replayed.
            for _ in range(3):
                self.prefill((0,) * length, None)

    def _prefill_padded(self, length: int) -> None:
        """Prefills the first `length` tokens, of which those from `_count` on are padding."""
        mask = (self._positions[:length] < self._count).unsqueeze(0)
        # As soon as a layer's new state is computed, it overwrites the old one in the buffer. A graph keeps the memory
        # of all its temporary tensors, and would otherwise keep that of a whole second state.
        features, _ = self._model.features(
            self._tokens[:, :length], self._buffer.layers, mask=mask, take_state=self._buffer.load_layer
        )
        self._features[:, :length] = features


def _by_member(state: Sequence[State] | ModelState) -> list[list[Tensor]]:
    """The tensors of all layers, grouped by what they are: each group has one dtype, and is copied in one launch."""
    members = [layer._tensors() for layer in state]
    return [[layer[name] for layer in members] for name in members[0]]


def _copy(source: ModelState, target: Sequence[State] | ModelState) -> None:
    for from_group, to_group in zip(_by_member(source), _by_member(target), strict=True):
        torch._foreach_copy_(to_group, from_group)
