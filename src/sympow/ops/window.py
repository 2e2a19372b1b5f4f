"""`Window`: decoding from a state with the recent tokens as keys and values, which are folded into it in blocks.

A recurrent step reads and writes the whole state for one token. With a window of W tokens, a step only reads it: the
recent tokens, those not yet folded into the state, contribute by their scores, as in the attention form. After every W
tokens all of them are folded into the state at once, as at the end of a chunk. Before the first fold there may be no
state at all: then a window is a cache of keys and values, which takes less memory than a state for up to about D
tokens.

    y, state = sympow.attention(q, k, v, ..., return_state=True)     # prefill
    window = Window.open(state, dtype=q.dtype)
    for ...:
        y = window.step(q, k, v, log_gamma, beta, theta)             # one token each, (b, 1, h, d)
    state = window.close()                                           # a state like any other
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sympow.checks import check_choice
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.ops.compilation import register_as_pytree
from sympow.ops.dispatch import Request, choose_backend
from sympow.ops.inputs import Inputs
from sympow.ops.interface import attention
from sympow.ops.numerics import without_autocast
from sympow.ops.state import State
from sympow.ops.symmetric import feature_indices, multinomial_weights
from sympow.ops.validation import check_tensors
from sympow.ops.window_batch import WindowBatch
from sympow.settings import BACKENDS, symmetric_dim

# Inputs with which steps of the kernels read a 16-bit copy of the state, for p = 2: its rounding is finer than that of
# outputs in this dtype. For p = 4 single rows can be off by several times the rounding of outputs, where gates leave
# weight to few tokens.
COPY_DTYPES = (torch.bfloat16,)
COPY_POWER = 2


class Window(WindowBatch):
    """The recent tokens of a batch of sequences, and the state of all earlier ones. Steps update it in place.

    It is made by `open` from a state, or by `empty` without one. A step does not synchronize with the device: the
    number of tokens that the window holds is the tensor `count`, so that one captured CUDA graph of a step, and one of
    a fold, can be replayed however full the window is. Eager steps fold a full window by themselves. Steps in a graph
    or under torch.compile do not: the caller replays a fold after every `capacity` steps. A step into a full window
    returns NaN.
    """

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """y (b, 1, h, e) of one token, which is added to the window.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, one token long; without gradients.
            backend: as in `sympow.attention`.

        Raises:
            ValueError, TypeError: where an argument does not fit; the message names it.
        """
        inputs = self._check(q, k, v, log_gamma, beta, theta)
        if inputs.length != 1:
            raise ArgumentError("q", f", k and v must be one token long, (b, 1, h, d); got {inputs.length}")
        chosen = self._backend(backend, q.device.type, q.dtype)
        if _on_host():
            if self.tokens == self.capacity:
                self.fold(backend)
            self.tokens += 1
        # Under autocast the products below would silently run in half precision.
        with torch.no_grad(), without_autocast(q.device):
            return self._fused_step(inputs) if chosen == "triton" else self._portable_step(inputs)

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """y (b, t, h, e) of any number of tokens within the capacity, which are added to the window.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, without gradients.
            backend: as in `sympow.attention`, for attention among the new tokens; attention to those in the window runs
                in plain PyTorch.
        """
        inputs = self._check(q, k, v, log_gamma, beta, theta)
        check_choice("backend", backend, BACKENDS)
        self._check_room(inputs.length)
        if not inputs.length:
            return q.new_empty(*q.shape[:3], self.value_dim)
        if self.kv is None and self.tokens == 0:
            with torch.no_grad():
                y = attention(q, k, v, self.power, log_gamma, beta, theta, backend=backend)  # type: ignore[call-overload]
            self.extend(k, v, log_gamma, beta, theta)
            return y
        with torch.no_grad(), without_autocast(q.device):
            y = self._portable_read(inputs)
        self.tokens += inputs.length
        return y

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
    ) -> None:
        """Adds tokens to the window without computing outputs.

        Args:
            k, v, log_gamma, beta, theta: as in `sympow.attention`, any number of tokens within the capacity.
        """
        inputs = self._check(k, k, v, log_gamma, beta, theta)
        self._check_room(inputs.length)
        if not inputs.length:
            return
        with torch.no_grad(), without_autocast(k.device):
            self._portable_extend(inputs)
        self.tokens += inputs.length

    def fold(self, backend: str = "auto", *, only_full: bool = False) -> None:
        """Folds the window's tokens into the state, which is made if there was none, and empties the window.

        Args:
            backend: as in `sympow.attention`.
            only_full: whether sequences keep their tokens unless they are as many as the capacity.
        """
        chosen = self._backend(backend, self.keys.device.type, self.values.dtype)
        count = self.count
        with torch.no_grad(), without_autocast(self.keys.device):
            if only_full:
                # The fold sees the others as empty.
                full = count >= self.capacity
                self.count = count * full
            if chosen == "triton":
                self._fused_fold()
            else:
                self._portable_fold()
                self.refresh_copy()
            if only_full:
                self.count = count.masked_fill_(full, 0)
        if _on_host():
            self.tokens = min(self.tokens, self.capacity - 1) if only_full else 0

    def close(self, backend: str = "auto") -> State:
        """The exact state after the last token. It shares the window's memory; to continue with both, `clone` first.

        Args:
            backend: as in `sympow.attention`.
        """
        self.fold(backend)
        assert self.kv is not None
        assert self.normalizer is not None
        return State(
            self.kv,
            self.normalizer,
            self.phase,
            power=self.power,
            key_dim=self.key_dim,
            conv_state=self.conv_state,
        )

    def folded(self, backend: str = "auto") -> State:
        """As `close`, without modifying the window.

        Args:
            backend: as in `sympow.attention`.
        """
        return replace(self, **self._copies_of_what_folds_change()).close(backend)

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None,
        beta: Tensor | None,
        theta: Tensor | None,
    ) -> Inputs:
        check_tensors(q, k, v, log_gamma, beta, theta)
        expectations = (
            ("batch", k.shape[0], self.keys.shape[0]),
            ("heads", k.shape[2], self.keys.shape[1]),
            ("head dim", k.shape[3], self.key_dim),
        )
        for what, came, expected in expectations:
            if came != expected:
                raise ArgumentError("k", f"has {what} {came}, but the window was made for {expected}")
        if v.shape[3] != self.value_dim:
            raise ArgumentError("v", f"has head dim {v.shape[3]}, but the window was made for {self.value_dim}")
        if v.dtype != self.values.dtype:
            raise ArgumentTypeError("v", f"is in {v.dtype}, but the window was made for {self.values.dtype}")
        if v.device != self.values.device:
            raise ArgumentError("v", f"is on {v.device}, but the window is on {self.values.device}")
        if (theta is None) != (self.phase is None):
            made, used = ("without", "with") if self.phase is None else ("with", "without")
            raise UserError(f"theta: the window was made {made} rotation, but is used {used}")
        if log_gamma is not None and log_gamma.ndim == 4 and log_gamma.shape[-1] != self.decay.shape[-1]:
            raise ArgumentError("log_gamma", "has a gate per rotated pair, but the window was made for one per head")
        inputs = Inputs(q, k, v, log_gamma, beta, theta, self.power)
        if inputs.needs_grad:
            raise UserError("the inputs of a window's step must not require gradients: steps are not differentiable")
        return inputs

    def _check_room(self, tokens: int) -> None:
        if self.tokens + tokens > self.capacity:
            raise ArgumentError(
                "k",
                f"holds {tokens} tokens, but the window has room for {self.capacity - self.tokens} of its "
                f"{self.capacity}",
            )

    def _backend(self, backend: str, device: str, dtype: torch.dtype) -> str:
        check_choice("backend", backend, BACKENDS)
        request = Request(
            device=device,
            dtype=dtype,
            power=self.power,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            vector_gate=self.decay.shape[-1] > 1,
            step=True,
        )
        return choose_backend(backend, request)

    def _fused_step(self, inputs: Inputs) -> Tensor:
        from sympow.kernels.decode.op import fused_window_step
        from sympow.kernels.decode.window_step import window_workspace

        index = weight = None
        if self.kv is not None:
            index, weight = self._feature_tables()
            self._ensure_copy()
        length = window_workspace(
            inputs.batch,
            inputs.key_heads,
            inputs.group,
            self.key_dim,
            self.value_dim,
            0 if weight is None else weight.shape[0],
            self.capacity,
            has_state=self.kv is not None,
            copied=self.kv_half is not None,
            split_batch=self._split_batch(),
        )
        if self.workspace is None or self.workspace.numel() < length:
            batch = inputs.batch
            self.workspace = self.decay.new_empty(batch, -(-length // batch), dtype=torch.float32)
        y: Tensor = fused_window_step(
            *inputs.one_token(),
            self.kv if self.kv_half is None else self.kv_half,
            self.normalizer,
            self.kv_scale,
            self.keys,
            self.values,
            self.decay,
            self.count,
            self.phase,
            self.arrivals,
            self.workspace,
            index,
            weight,
            self.power,
            self._split_batch(),
        )
        return y.unsqueeze(1)

    def _split_batch(self) -> int:
        """The batch by whose size the kernels split their sums among CTAs; 0: this window's own."""
        return 0

    def _ensure_copy(self) -> None:
        """Makes the 16-bit copy that steps with bfloat16 inputs and p = 2 read, unless there is one or no state."""
        copied = self.values.dtype in COPY_DTYPES and self.power == COPY_POWER
        if self.kv is None or self.kv_half is not None or not copied:
            return
        if _captured():
            raise UserError("a window's copy of its state cannot be made inside a CUDA graph: call step once before")
        self.kv_half = torch.empty_like(self.kv, dtype=torch.float16)
        self.kv_scale = torch.empty_like(self.kv[..., 0], memory_format=torch.contiguous_format)
        self.refresh_copy()

    def _fused_fold(self) -> None:
        from sympow.kernels.decode.op import fused_fold

        if _captured():
            self._ensure_copy()  # replays of this fold would not write to a copy that is made later
        if self.kv is None or self.normalizer is None:
            if not _on_host():
                raise UserError(
                    "a window's first state cannot be made inside a CUDA graph or torch.compile: call fold once before"
                )
            heads = (*self.keys.shape[:2], symmetric_dim(self.key_dim, self.power))
            self.kv = self.decay.new_zeros(*heads, self.value_dim, dtype=torch.float32)
            self.normalizer = self.decay.new_zeros(heads, dtype=torch.float32)
        fused_fold(
            self.kv,
            self.normalizer,
            self.kv_half,
            self.kv_scale,
            self.keys,
            self.values,
            self.decay,
            self.count,
            self.arrivals,
            *self._feature_tables(),
        )

    def _feature_tables(self) -> tuple[Tensor, Tensor]:
        device = self.keys.device
        index = feature_indices(self.key_dim, self.power, device)
        return index, multinomial_weights(self.key_dim, self.power, torch.float32, device)


register_as_pytree(Window, "power", "tokens")


def _on_host() -> bool:
    """Whether a call runs eagerly, and is not traced by torch.compile or captured into a CUDA graph."""
    return not (torch.compiler.is_compiling() or _captured())


def _captured() -> bool:
    """Whether a call is captured into a CUDA graph, and not traced by torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
