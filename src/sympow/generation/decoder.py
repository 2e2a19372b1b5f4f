"""`Decoder`: decodes one token at a time from a prefix, in place, as CUDA graphs on a GPU.

    decoder = Decoder(model, prefix)
    while ...:
        logits = decoder.step(tokens)     # (b,) in, (b, vocabulary) out
    prefix = decoder.close()              # to save, fork or extend

Every layer decodes with a cache of fixed capacity that steps update in place (`sympow.generation.cache`). With
symmetric powers it is a window beside a state (`sympow.Window`): a step reads the state and writes one key and value,
and after every 64 tokens the window is folded into the state; as long as keys and values alone take less memory than a
state, there is no state. With softmax it is a key/value cache.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import CachePolicy, DecodingCache, activation_dtype, mixers_of
from sympow.generation.prefix import Prefix
from sympow.model.gpt import GPT

# torch captures one graph at a time in a process.
_CAPTURING = threading.Lock()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Where the graphs of a device are captured: one stream for all, so that they can share memory."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps Python's garbage collector from running: a CUDA graph that it frees invalidates a capture by its thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedCall:
    """A function of fixed tensors that is captured as a CUDA graph at its second call and replayed from then on.

    The first call runs eagerly: it compiles kernels and builds tables, neither of which can be captured.

    Args:
        function: launches the same work on the current device each time, and does not wait for it.
        capture: whether to capture it at all.
        pool: memory that graphs share which never run at the same time and leave no results there
            (`torch.cuda.graph_pool_handle`); None: the graph has its own.
        optional: whether to warn and run eagerly from then on where a capture fails, as without memory. Only for a
            function that does nothing on the host that matters if it is done again.
    """

    def __init__(
        self, function: Callable[[], None], *, capture: bool, pool: Any = None, optional: bool = False
    ) -> None:
        self._function, self._capture, self._pool, self._optional = function, capture, pool, optional
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False

    def __call__(self) -> None:
        if self._graph is None and self._capture and self._ran:
            self._try_capture()
        if self._graph is None:
            self._function()
            self._ran = True
        else:
            self._graph.replay()

    def _try_capture(self) -> None:
        try:
            self._graph = self._captured()
        except RuntimeError as error:  # torch.OutOfMemoryError and CUDA's own are such
            if not self._optional:
                raise
            # Work that is at fault itself raises the error again when it runs.
            self._capture = False
            warnings.warn(
                "a CUDA graph could not be captured; its kernels are launched one by one from now on, which is slower: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING:
            stream = _capture_stream(torch.cuda.current_device())
            # `torch.cuda.graph` does not leave the stream if the capture fails at its end. In its mode, other threads
            # may use the device meanwhile, for example to load data.
            with (
                _no_garbage_collection(),
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._function()
        return graph


class Decoder:
    """Decodes token by token from a prefix, which is not modified.

    Args:
        model: the model that prefilled the prefix.
        prefix: one or several texts, of any lengths.
        tokens: the number of tokens to be decoded, for which memory is allocated. None: the caches grow as needed.
        cache_policy: "auto": keys and values, if the prefix holds those, until they would take more bytes than a
            state, then a state; "state": keys and values are folded into a state at once; "keys": keys and values only.
        owned: whether the prefix's tensors may be overwritten, which saves a copy.
        graphs: whether to capture steps as CUDA graphs, on a GPU.

    Attributes:
        logits: of the next token, (b, vocabulary). The next step may overwrite them.
        tokens: tokens of the prefix and decoded so far; of texts of different lengths, the longest's.
        seen: which tokens of the vocabulary occurred, (b, vocabulary) bool, updated in place by each step.
    """

    def __init__(
        self,
        model: GPT,
        prefix: Prefix,
        *,
        tokens: int | None = None,
        cache_policy: CachePolicy = "auto",
        owned: bool = False,
        graphs: bool = True,
    ) -> None:
        self.logits = prefix.logits
        self.tokens = prefix.tokens
        self.seen = prefix.seen.clone()
        self._model = model
        self._capture = graphs and prefix.logits.is_cuda
        self._token = torch.zeros(prefix.batch, dtype=torch.int64, device=prefix.logits.device)
        how: dict[str, Any] = {"tokens": tokens, "cache_policy": cache_policy, "owned": owned}
        self._cache = DecodingCache(mixers_of(model), prefix.state, activation_dtype(model), **how)
        self._reset_graphs()

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (b, vocabulary) after one more token of each text.

        Args:
            tokens: (b,), on the model's device.
        """
        self._check_open()
        if tokens.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError("tokens", f"must be int32 or int64, got {tokens.dtype}")
        if tokens.shape != self._token.shape:
            raise ArgumentError(
                "tokens", f"must be ({len(self._token)},), one for each text; got {tuple(tokens.shape)}"
            )
        if self._cache.ensure_capacity(self._fold):
            self._reset_graphs()
        held = self._cache.layers[0].tokens + 1
        self._token.copy_(tokens)
        self._advance()
        for layer in self._cache.layers:
            layer.tokens = held  # a replayed graph does not run the Python code that counts
        self.tokens += 1
        return self.logits

    @property
    def folded(self) -> bool:
        """Whether there is a state, and not only keys and values."""
        return self._cache.folded

    @property
    def nbytes(self) -> int:
        """Bytes allocated by the caches, free positions included."""
        return self._cache.nbytes

    @torch.no_grad()
    def close(self) -> Prefix:
        """The prefix after the last decoded token. The decoder cannot be used afterwards."""
        self._check_open()
        return Prefix(self.logits.clone(), self._cache.close(), self.tokens, self.seen)

    def _check_open(self) -> None:
        if not self._cache.layers:
            raise RuntimeError("the decoder is closed: make another one from the prefix that `close` returned")

    def _reset_graphs(self) -> None:
        """Discards captured graphs, which refer to the tensors of earlier caches."""
        # Windows do not count tokens while they are captured, and `step` sets the count, so a capture may fail.
        # A strong reference would be cyclic: caches would be freed when garbage is collected, not with their decoder.
        step = partial(Decoder._step, weakref.proxy(self))
        self._advance = CapturedCall(step, capture=self._capture, optional=True)
        self._fold = CapturedCall(self._cache.fold, capture=self._capture, optional=True)

    @torch.no_grad()
    def _step(self) -> None:
        self.logits = self._model.step(self._token, self._cache.layers)
        self.seen.scatter_(1, self._token.unsqueeze(1), True)
