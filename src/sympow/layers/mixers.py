"""The attention layers: `ConformalAttention` and the softmax baseline, `SoftmaxAttention`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sympow.checks import check_bool, check_choice, check_positive
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.layers.gates import DataDependentGate, Gate, make_gate
from sympow.layers.precision import is_plain_projection, project_together
from sympow.layers.projections import PAIRS, FusedProjections, Pairs, Projections, SeparateProjections
from sympow.layers.rotations import DataDependentRotation, Rotation, make_rotation
from sympow.layers.short_conv import ShortConvolution
from sympow.ops.dispatch import step_gates_unsupported_reason
from sympow.ops.interface import attention
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState, softmax_attention
from sympow.ops.window import Window
from sympow.parallel.shards import Shards
from sympow.settings import (
    BACKENDS,
    FORMS,
    MAX_RATE,
    Backend,
    Form,
    HeadShape,
    acts_on_pairs,
    check_chunk_size,
    check_power,
    check_short_conv,
)

# The state after a prefix, which `forward` takes and returns. A `Window` holds keys and values not yet folded.
LayerState = State | KeyValueState | Window
# What `step` decodes with, and changes in place.
LayerCache = Window | KeyValueCache


class Mixer(nn.Module, ABC):
    """Base class of attention layers: projections, gate and rotation around an operator that subclasses supply.

    Args:
        width: size of x and y.
        heads: query heads h.
        key_value_heads: h_kv, a divisor of heads; None: as many as heads.
        head_dim: size of queries, keys and values; None: width / heads.
        gating: one of `GATES` (`sympow.layers.gates`); "scalar" is the paper's.
        rotary: one of `ROTATIONS` (`sympow.layers.rotations`); "fixed" is RoPE, "scale" the paper's.
        max_document: N of the rotation rates, the longest document expected.
        max_rate: the fastest rotation rate, in radians per token; the paper's is 2π.
        rotary_fraction: the part of the pairs of a head that is rotated, the fastest ones; the others keep their
            direction, so that they match at every distance.
        bias: whether the projections to queries, keys, values and back have biases.
        rates: other rotation rates than those of max_document and max_rate, (head_dim / 2,); not for rotary "signed"
            and "grid".
        initial_gate: γ before training, for gates that learn it; None: about 0.999.
        short_conv: taps of a causal convolution over the queries, keys and values of the last tokens, before the
            rotation (`sympow.layers.short_conv`); 0: none. Not with projections of another layer.
        projections: modules of another layer, which this one takes over, and how they project (`from_projections`);
            None: new ones.

    Attributes:
        projections: how the layer's submodules make queries, keys and values (`sympow.layers.projections`).
    """

    backend: Backend = "auto"
    # Attributes that a constructor sets, which modules of another layer must not replace.
    _own_names: ClassVar[frozenset[str]] = frozenset(
        ("width", "heads", "key_value_heads", "head_dim", "projections", "gate", "rotation", "short_conv")
    )

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_value_heads: int | None = None,
        head_dim: int | None = None,
        gating: str = "scalar",
        rotary: str = "fixed",
        max_document: int = 65_536,
        max_rate: float = MAX_RATE,
        rotary_fraction: float = 1.0,
        bias: bool = True,
        rates: Tensor | None = None,
        initial_gate: float | None = None,
        short_conv: int = 0,
        projections: tuple[Projections, Mapping[str, nn.Module]] | None = None,
    ) -> None:
        super().__init__()
        check_positive("max_document", max_document)
        check_bool("bias", bias)
        shape = HeadShape.resolve(width, heads, key_value_heads, head_dim, in_pairs=acts_on_pairs(gating, rotary))
        self.width = width
        self.heads, self.key_value_heads, self.head_dim = shape.heads, shape.key_value_heads, shape.head_dim
        if projections is None:
            self.projections: Projections = FusedProjections(self.heads, self.key_value_heads, self.head_dim)
            self.qkv_proj = nn.Linear(width, (heads + 2 * self.key_value_heads) * self.head_dim, bias=bias)
            self.out_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        else:
            self.projections, modules = projections
            for name, module in modules.items():
                self.add_module(name, module)
        self.gate = make_gate(gating, width, self.key_value_heads, self.head_dim, initial_gate)
        self.rotation = make_rotation(
            rotary,
            width,
            self.key_value_heads,
            self.head_dim,
            max_document,
            rates,
            max_rate=max_rate,
            fraction=rotary_fraction,
        )
        check_short_conv(short_conv)
        self.short_conv: ShortConvolution | None = None
        if short_conv:
            if projections is not None:
                raise ArgumentError(
                    "short_conv",
                    "is for layers with projections of their own: those of another layer were trained "
                    f"without a convolution; got {short_conv}",
                )
            self.short_conv = ShortConvolution((heads + 2 * self.key_value_heads) * self.head_dim, short_conv)

    @classmethod
    def from_projections(
        cls,
        q: nn.Module,
        k: nn.Module | None,
        v: nn.Module | None,
        o: nn.Module,
        *,
        width: int,
        heads: int,
        key_value_heads: int | None = None,
        head_dim: int | None = None,
        rates: Tensor | None = None,
        rotary: str | None = None,
        pairs: Pairs = "half",
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        out_dropout: nn.Module | None = None,
        names: Mapping[str, str] | None = None,
        **others: Any,
    ) -> Self:
        """A layer around the projections of another one, such as a softmax layer of a pretrained model.

        The modules become submodules of the layer as they are, whatever their class: weights stay what they are, and
        so do their names in a state dict if `names` says so. Gates and rotations are new.

        Args:
            q, k, v: modules from x (b, t, width) to queries (b, t, h d), keys and values (b, t, h_kv d). With k and v
                None, q is one for all three, in this order: (b, t, (h + 2 h_kv) d).
            o: the module from (b, t, h d) to the output (b, t, width).
            width: size of x and of the output.
            heads: h; key_value_heads: h_kv, None: as many; head_dim: d, None: width / heads.
            rates: rotation rates θ (d/2,), such as the `inv_freq` of a rotary embedding.
            rotary: as in `Mixer`, but with rates not "signed" or "grid", which would replace them; None: "fixed" with
                rates, "none" without.
            pairs: which entries of a head are rotated together: "half" (j and j + d/2, as in most models of
                transformers) or "interleaved" (2j and 2j + 1).
            q_norm, k_norm: norms of each query and each key, (…, d) to (…, d), before the rotation.
            out_dropout: a module that is applied to the output of `o`.
            names: names of the modules in this layer, by the names of the arguments; by default q_proj, k_proj, v_proj
                and o_proj, or qkv_proj and o_proj, with q_norm, k_norm and out_dropout. They must differ from each
                other and from the layer's own attributes.
            others: power, gating, initial_gate, form, and so on; not bias, which the modules have or have not.

        Example:
            >>> q, k, v, o = (torch.nn.Linear(64, 64) for _ in range(4))
            >>> layer = ConformalAttention.from_projections(q, k, v, o, width=64, heads=4, gating="none")
        """
        if (k is None) != (v is None):
            raise ArgumentError("k", "and v must both be modules, or both None if q projects to all three")
        if "bias" in others:
            raise ArgumentError(
                "bias", f"must not be given: q, k, v and o keep the biases they have; got {others['bias']!r}"
            )
        if rotary is None:
            rotary = "none" if rates is None else "fixed"
        if rotary != "none" and rates is None and "max_document" not in others:
            raise ArgumentError("rates", f"or max_document must be given for rotary={rotary!r}")
        for argument, needed in (("q", q), ("o", o)):
            if needed is None:
                raise ArgumentTypeError(argument, "must be a module, got None")
        given = {"q": q, "k": k, "v": v, "o": o, "q_norm": q_norm, "k_norm": k_norm, "out_dropout": out_dropout}
        modules = {argument: module for argument, module in given.items() if module is not None}
        for argument, module in modules.items():
            if not isinstance(module, nn.Module):
                raise ArgumentTypeError(argument, f"must be a module, got {type(module).__name__}")
        named = {"q": "qkv_proj" if k is None else "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
        named |= {"q_norm": "q_norm", "k_norm": "k_norm", "out_dropout": "out_dropout"} | dict(names or {})
        if unknown := sorted(named.keys() - given.keys()):
            raise ArgumentError("names", f"must be for {', '.join(given)}; got {', '.join(unknown)}")
        cls._check_names({argument: named[argument] for argument in modules})
        gating = others.get("gating", "scalar")
        shape = HeadShape.resolve(width, heads, key_value_heads, head_dim, in_pairs=acts_on_pairs(gating, rotary))
        how: dict[str, Any] = {
            "heads": shape.heads,
            "key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_dim,
            "out": named["o"],
            "out_dropout": None if out_dropout is None else named["out_dropout"],
            "q_norm": None if q_norm is None else named["q_norm"],
            "k_norm": None if k_norm is None else named["k_norm"],
            # Where nothing acts on pairs, their order does not matter.
            "pairs": pairs if acts_on_pairs(gating, rotary) else "interleaved",
        }
        check_choice("pairs", pairs, PAIRS)
        projections: Projections
        if k is None:
            projections = FusedProjections(qkv=named["q"], **how)
        else:
            projections = SeparateProjections(q=named["q"], k=named["k"], v=named["v"], **how)
        layer = cls(
            width,
            heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            rotary=rotary,
            rates=rates,
            projections=(projections, {named[argument]: module for argument, module in modules.items()}),
            **others,
        )
        weight = next(o.parameters(), None)
        if weight is not None:
            # Gates and rotations stay in float32 or better.
            for new in (layer.gate, layer.rotation):
                new.to(device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        return layer

    @classmethod
    def _check_names(cls, names: Mapping[str, str]) -> None:
        """Raises unless modules can have these names in the layer, by the arguments they came as."""
        bare, by_name = nn.Module(), dict[str, str]()
        for argument, name in names.items():
            if not isinstance(name, str):
                raise ArgumentTypeError("names", f"must hold strings, got {name!r} for {argument}")
            if not name or "." in name:
                raise ArgumentError("names", f"must not be empty or have dots, got {name!r} for {argument}")
            if name in by_name:
                raise ArgumentError("names", f"must differ, got {name!r} for both {by_name[name]} and {argument}")
            if name in cls._own_names or hasattr(cls, name) or hasattr(bare, name):
                raise ArgumentError(
                    "names", f"must not be those of the layer's attributes, got {name!r} for {argument}"
                )
            by_name[name] = argument

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.projections.device(self)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        return_state: bool = True,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """Attends along time.

        Args:
            x: (b, t, width).
            state: the state after the tokens before x, from an earlier call; None: there are none.
            return_state: whether to return the state after x. In training pass False: making it costs as much as
                folding every token into it.
            cu_seqlens: offsets of packed documents, as in `sympow.attention`.
            mask: (b, t) bool, True for tokens, False for padding at any position. y of tokens and the state are what
                they would be without the padding. y of padding is finite, but has no meaning.
            shards: for context parallelism (`sympow.parallel`), which rank holds which tokens of the sequence that x is
                a shard of. It has the offsets of documents, and states are those of the whole sequence.

        Returns:
            y (b, t, width) and the state, or None in its place.
        """
        self._check_input(x)
        if mask is not None:
            _check_mask(mask, x, cu_seqlens)
        if shards is not None and cu_seqlens is not None:
            raise ArgumentError(
                "cu_seqlens", "cannot be combined with shards: pass the offsets of the whole sequence there"
            )
        if shards is not None and self.short_conv is not None:
            raise ArgumentError(
                "short_conv", "does not support shards: the tokens before a shard are on another process"
            )
        q, k, v, conv_state = self._project(x, state, cu_seqlens, mask)
        if getattr(state, "conv_state", None) is not None:
            assert state is not None
            # The operator does not know it.
            state = replace(state, conv_state=None)
        for_gate, for_rotation = project_together(x, [self.gate.projection, self.rotation.projection], q.dtype)
        log_gamma = self.gate(x, for_gate)
        theta, beta = self.rotation(x, for_rotation)
        if mask is not None:
            k, v, log_gamma, beta = _without_padding(mask, k, v, log_gamma, beta, rotated=theta is not None)
        y, after = self._attend(
            q,
            k,
            v,
            mask,
            log_gamma=log_gamma,
            beta=beta,
            theta=theta,
            initial_state=state,
            return_state=return_state,
            **({"cu_seqlens": cu_seqlens} if shards is None else {"shards": shards}),
        )
        if after is not None and conv_state is not None:
            after = replace(after, conv_state=conv_state)
        return self.projections.output(self, y), after

    def _project(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (b, t, h, d), k and v (b, t, h_kv, d), and the `conv_state` after x."""
        # States of other types are refused by the operator.
        past = getattr(state, "conv_state", None)
        if self.short_conv is None:
            if past is not None:
                raise ArgumentError("state", "was made by a layer with short_conv, but this one has none")
            return *self.projections.project(self, x), None
        if state is not None and past is None:
            raise ArgumentError("state", "was made by a layer without short_conv, but this one has it")
        assert isinstance(self.projections, FusedProjections)
        joint, after = self.short_conv(self.projections.joint(self, x), past, cu_seqlens, mask)
        return *self.projections.split(joint), after

    def initial_conv_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The `conv_state` of states before the first token; None without short_conv.

        Args:
            dtype: of queries, keys and values.
        """
        return None if self.short_conv is None else self.short_conv.initial_state(batch, dtype, device)

    def step(self, x: Tensor, cache: LayerCache) -> Tensor:
        """y of one token, (b, 1, width) to (b, 1, width), without gradients; updates the cache in place."""
        # Not by their classes: a batch of several requests has caches of its own.
        if not hasattr(cache, "step"):
            raise ArgumentTypeError("cache", f"must be a Window or a KeyValueCache, got {type(cache).__name__}")
        self._check_input(x, time=1)
        log_gamma, theta, beta = gate_and_rotate(x, self.gate, self.rotation, self.backend)
        if self.short_conv is None:
            if cache.conv_state is not None:
                raise ArgumentError("cache", "was made by a layer with short_conv, but this one has none")
            q, k, v = self.projections.project(self, x)
        else:
            if cache.conv_state is None:
                raise ArgumentError("cache", "was made by a layer without short_conv, but this one has it")
            assert isinstance(self.projections, FusedProjections)
            joint = self.short_conv.step(self.projections.joint(self, x), cache.conv_state)
            q, k, v = self.projections.split(joint)
        y = cache.step(*_in(cache.values.dtype, q, k, v), log_gamma, beta, theta, backend=self.backend)
        return self.projections.output(self, y.to(q.dtype))

    def _check_input(self, x: Tensor, time: int | None = None) -> None:
        """Raises unless x is (b, t, width), with this t unless it is None."""
        if not isinstance(x, Tensor):
            raise ArgumentTypeError("x", f"must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise ArgumentTypeError("x", f"must be floating point, the output of a layer before; got {x.dtype}")
        if x.ndim != 3 or x.shape[-1] != self.width or time not in (None, x.shape[1]):
            expected = f"(batch, {time or 'time'}, {self.width})"
            raise ArgumentError("x", f"must be {expected}, the width of the layer; got {tuple(x.shape)}")

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, return_state: bool, **options: Any
    ) -> tuple[Tensor, LayerState | None]:
        """The operator itself: y (b, t, h, d), and the state if asked for. Keys and values of padding are zero."""


class ConformalAttention(Mixer):
    """Symmetric power attention with gates and RoPE; with `rotary="scale"`, conformal-sympow (paper §3.3).

    Args:
        power: p: 2, 4, 6 or 8.
        form, backend, chunk_size: how to compute it, as in `sympow.attention`.
        others: as in `Mixer`.

    Example:
        >>> layer = ConformalAttention(width=64, heads=4, power=2)
        >>> y, state = layer(torch.randn(1, 100, 64))
        >>> y, state = layer(torch.randn(1, 1, 64), state)
    """

    _own_names = Mixer._own_names | {"power", "form", "chunk_size"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        power: int = 2,
        form: Form = "auto",
        backend: Backend = "auto",
        chunk_size: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(width, heads, **others)
        check_power(power)
        check_choice("form", form, FORMS)
        check_choice("backend", backend, BACKENDS)
        check_chunk_size(chunk_size, form)
        self.power, self.form, self.backend, self.chunk_size = power, form, backend, chunk_size

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, return_state: bool, **options: Any
    ) -> tuple[Tensor, LayerState | None]:
        # Keys of padding are zero and so have no score: no mask is needed.
        if isinstance(options["initial_state"], Window) and "shards" not in options:
            return self._extend(q, k, v, return_state=return_state, **options)
        how: dict[str, Any] = {"form": self.form, "backend": self.backend, "chunk_size": self.chunk_size}
        operator: Any = attention
        if "shards" in options:
            from sympow.parallel.context_parallel import attention as operator
        if return_state:
            return operator(q, k, v, self.power, return_state=True, **how, **options)
        return operator(q, k, v, self.power, **how, **options), None

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        initial_state: Window,
        return_state: bool,
        cu_seqlens: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, LayerState | None]:
        """Continues after a window of keys and values instead of a state, and returns a longer one."""
        if cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "cannot be combined with a state of keys and values: fold it first")
        # A copy, since the given window belongs to the caller. A window has room for a token, even if x has none.
        window = initial_state.resized(max(1, initial_state.tokens + q.shape[1]))
        y = window.read(*_in(window.values.dtype, q, k, v), backend=self.backend, **options)
        return y.to(q.dtype), window if return_state else None


class SoftmaxAttention(Mixer):
    """The softmax baseline, with the same gates and rotations. With gating="fixed" it is ALiBi (paper app. A.1)."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, return_state: bool, **options: Any
    ) -> tuple[Tensor, LayerState | None]:
        if "shards" in options:
            from sympow.parallel.context_parallel import softmax_attention as sharded

            return sharded(q, k, v, mask=mask, return_state=return_state, **options), None
        if return_state:
            return softmax_attention(q, k, v, mask=mask, return_state=True, **options)
        return softmax_attention(q, k, v, mask=mask, **options), None


def gate_and_rotate(
    x: Tensor, gate: Gate, rotation: Rotation, backend: Backend = "auto"
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """log γ, θ and β of one token per sequence, x (b, 1, width), without gradients; None where a layer has none.

    Args:
        backend: "torch": no kernel; "auto" or "triton": one kernel for both, where it supports x and the weights.
    """
    of_gate, of_rotation = gate.projection, rotation.projection
    present = [projection for projection in (of_gate, of_rotation) if projection is not None]
    plain = [projection for projection in present if is_plain_projection(projection, x.device)]
    # The kernel computes what these two do, and not what a subclass does in their place.
    own = (of_gate is not None and type(gate).forward is not DataDependentGate.forward) or (
        of_rotation is not None and type(rotation).forward is not DataDependentRotation.forward
    )
    unsupported = own or len(plain) < len(present) or step_gates_unsupported_reason(x, [p.weight for p in plain])
    if backend == "torch" or unsupported:
        theta, beta = rotation(x)
        return gate(x), theta, beta
    from sympow.kernels.decode.gate_projection import step_gates

    found = step_gates(
        x.flatten(0, -2).contiguous(),
        None if of_gate is None else of_gate.weight,
        None if of_gate is None else of_gate.bias,
        None if of_rotation is None else of_rotation.weight,
    )
    log_gamma, beta = (flat.unflatten(0, x.shape[:-1]) for flat in found)
    log_gamma = gate.by_heads(log_gamma) if isinstance(gate, DataDependentGate) else gate(x)
    if isinstance(rotation, DataDependentRotation):
        return log_gamma, rotation.rates(x.device), rotation.by_heads(beta)
    return log_gamma, *rotation(x)


def _in(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype of the cache, which can differ from theirs, as under autocast."""
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_mask(mask: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError("mask", f"must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise ArgumentTypeError("mask", f"must be bool, True for tokens and False for padding; got {mask.dtype}")
    if mask.shape != x.shape[:2]:
        raise ArgumentError("mask", f"must be (batch, time), {tuple(x.shape[:2])}; got {tuple(mask.shape)}")
    if cu_seqlens is not None:
        raise ArgumentError("mask", "cannot be combined with cu_seqlens: packed documents need no padding")


def _without_padding(
    mask: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, beta: Tensor | None, *, rotated: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values, gates and rotation scales with which padding neither adds to a state nor decays or rotates it."""
    padding = ~mask[:, :, None]
    k, v = (x.masked_fill(padding.unsqueeze(-1), 0.0) for x in (k, v))
    if rotated and beta is None:
        # A fixed rotation would advance at padding.
        beta = mask.to(torch.promote_types(k.dtype, torch.float32)).unsqueeze(-1).expand(-1, -1, k.shape[2])
    gates_and_scales = (
        None if x is None else x.masked_fill(padding if x.ndim == 3 else padding.unsqueeze(-1), 0.0)
        for x in (log_gamma, beta)
    )
    return (k, v, *gates_and_scales)  # type: ignore[return-value]
