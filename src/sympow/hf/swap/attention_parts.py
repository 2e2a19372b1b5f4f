"""Finds the self-attention modules of a transformers model, and the parts of them that a swapped layer takes over.

Modules are recognized by the names of their submodules, and the result is verified: a probe takes the place of the
attention function, and the queries, keys and values that it receives are compared with those computed from the parts.
So a model whose attention computes something else, such as another layout of rotated pairs, is refused.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sympow.errors import ArgumentError, UserError
from sympow.hf.swap.attention_function import UNSUPPORTED
from sympow.hf.swap.swapped_attention import SwappedAttention
from sympow.layers.mixers import ConformalAttention
from sympow.ops.rotary import rotate, wrap_angle

# Types of rotary embeddings whose rates are the same for texts of any length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Names of submodules → the arguments of `from_projections` that they become: for separate projections of queries, keys
# and values (SEPARATE, optionally NORMS), and for one fused projection (FUSED, optionally OUT_DROPOUT).
SEPARATE = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}
FUSED = {"c_attn": "q", "c_proj": "o"}
OUT_DROPOUT = {"resid_dropout": "out_dropout"}
# A submodule that swapped layers do without.
WEIGHTS_DROPOUT = "attn_dropout"
# The largest error of a probe, relative to the largest entry: the rounding of a few operations with an 8-bit mantissa.
TOLERANCE = 0.03
# Standard deviations of inputs that a layer is probed with: that of a norm's output, and one so large that a clamp
# shows; the latter is smaller in float16, so that nothing overflows.
SIZES = (1.0, 100.0)
FLOAT16_SIZES = (1.0, 10.0)


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The self-attention modules of a transformers model by layer index, swapped or not.

    Args:
        model: a model of transformers, or one that wraps it, such as peft's.

    Raises:
        ValueError: there are none, or a layer has several; the message says what was found.
    """
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        alike = children.keys() >= {"q_proj", "k_proj", "v_proj"} or "c_attn" in children
        if not (isinstance(module, SwappedAttention) or alike):
            continue
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise ArgumentError("model", f"has attention without a layer_idx, {name} ({type(module).__name__})")
        if index in found:
            raise ArgumentError(
                "model",
                f"has two attention modules in layer {index}, of which the second is {name} "
                f"({type(module).__name__}); cross-attention and encoders are not supported",
            )
        found[index] = module
    if not found:
        raise ArgumentError(
            "model",
            f"must have self-attention with {', '.join(sorted(SEPARATE))} or with {' and '.join(sorted(FUSED))}; "
            f"in {type(model).__name__} there is none{_attention_like(model)}",
        )
    return dict(sorted(found.items()))


def read_attention(model: PreTrainedModel, index: int, attention: nn.Module) -> dict[str, Any]:
    """The parts that a swapped layer takes over from the softmax attention of layer `index`.

    Returns:
        arguments of `SwappedAttention.from_projections`: the submodules with their names, the sizes, and the rotation
        rates θ (d/2,) in float64, or None without a rotation.

    Raises:
        ValueError: the module is not supported; the message says why.
    """
    where = f"layer {index} of model ({type(attention).__name__})"
    children = dict(attention.named_children())
    if own := sorted(name for name, _ in attention.named_parameters(recurse=False)):
        raise UserError(f"{where} has parameters of its own, {', '.join(own)}, which a swapped layer would drop")
    if not (getattr(attention, "is_causal", True) and getattr(model.config.get_text_config(), "is_causal", True)):
        raise UserError(f"{where} attends to later tokens too (is_causal is False); a swapped layer would not")
    fused = children.keys() >= FUSED.keys()
    if not fused and not children.keys() >= SEPARATE.keys():
        raise UserError(
            f"{where} must have {', '.join(sorted(SEPARATE))} or {' and '.join(sorted(FUSED))}; "
            f"it has {', '.join(sorted(children))}"
        )
    arguments = FUSED | OUT_DROPOUT if fused else SEPARATE | NORMS
    if unknown := sorted(children.keys() - arguments.keys() - {WEIGHTS_DROPOUT}):
        raise UserError(f"{where} has {', '.join(unknown)}, which a swapped layer would drop")
    names = {argument: name for name, argument in arguments.items() if name in children}
    heads, key_value_heads, head_dim = _head_shape(model, attention)
    for name in NORMS.keys() & children.keys():
        sizes = {tuple(parameter.shape) for parameter in children[name].parameters()}
        if sizes - {(head_dim,)}:
            raise UserError(f"{where} must have a {name} of each head, of size {head_dim}; its is of {sorted(sizes)}")
    rates = None if fused else _rates(model, head_dim)
    modules: dict[str, nn.Module | None] = {"k": None, "v": None}
    modules |= {argument: children[name] for argument, name in names.items()}
    if "out_dropout" not in names and (p := getattr(attention, "residual_dropout", 0.0)):
        # Some attention modules apply dropout to their output without a submodule.
        names["out_dropout"], modules["out_dropout"] = "out_dropout", nn.Dropout(p)
    parts = {
        **modules,
        "names": names,
        "width": model.config.get_text_config().hidden_size,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "rates": rates,
        "pairs": "half",
    }
    if not any(parameter.is_meta for parameter in attention.parameters()):
        _verify(parts, model, attention, where)
    return parts


def weights_dropout(attention: nn.Module) -> float:
    """The probability of dropping attention weights in training, which a swapped layer cannot apply."""
    fused = getattr(attention, WEIGHTS_DROPOUT, None)
    return (
        float(getattr(attention, "attention_dropout", 0.0) or 0.0) if fused is None else float(getattr(fused, "p", 0.0))
    )


def _head_shape(model: PreTrainedModel, attention: nn.Module) -> tuple[int, int, int]:
    """h, h_kv and d."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim


def _rotary_embedding(model: PreTrainedModel) -> nn.Module:
    found = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    if len(found) != 1 or not hasattr(found[0], "inv_freq"):
        kinds = ", ".join(sorted({type(module).__name__ for module in found})) or "none"
        raise ArgumentError("model", f"must have one rotary embedding with an inv_freq for all layers; found {kinds}")
    return found[0]


def _rates(model: PreTrainedModel, head_dim: int) -> Tensor:
    """The rotation rates of the model's config, (d/2,) float64."""
    rotary: Any = _rotary_embedding(model)
    kind = getattr(rotary, "rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ArgumentError(
            "model",
            f"must have a rope_type of {', '.join(ROPE_TYPES)}, whose rates are the same for texts of any "
            f"length, since a state holds keys that were rotated before; got {kind!r}",
        )
    # Computed from the config: the model's own rates may be on the meta device, or rounded with its weights.
    with torch.device("cpu"):
        rates = type(rotary)(rotary.config).inv_freq.detach().to(torch.float64)
    if len(rates) != head_dim // 2:
        raise ArgumentError(
            "model", f"must rotate heads as a whole, by {head_dim // 2} rates for {head_dim} entries; got {len(rates)}"
        )
    present = rotary.inv_freq
    if not present.is_meta and not torch.allclose(present.detach().to("cpu", torch.float64), rates, 0.01, 0.0):
        raise ArgumentError(
            "model", "has an inv_freq that is not that of its config, so that it could not be loaded again"
        )
    return rates


def _attention_like(model: nn.Module) -> str:
    """A list of the modules called attention and of their submodules, for an error message."""
    kinds = {}
    for module in model.modules():
        if "attention" in type(module).__name__.lower():
            kinds[type(module).__name__] = ", ".join(name for name, _ in module.named_children())
    return "".join(f"; {kind} has {children or 'no submodules'}" for kind, children in kinds.items())


_PROBE = "sympow_probe"
# What the probe received: queries, keys and values, and the names of unsupported arguments that were given.
_CAPTURED: list[tuple[tuple[Tensor, Tensor, Tensor], list[str]]] = []


def _probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **others: Any) -> tuple[Tensor, None]:
    """An attention function that records its inputs and returns the queries."""
    _CAPTURED.append(((query, key, value), [name for name in UNSUPPORTED if others.get(name) is not None]))
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(_PROBE, _probe)


@torch.no_grad()
def _verify(parts: dict[str, Any], model: PreTrainedModel, attention: nn.Module, where: str) -> None:
    """Raises unless the module computes the queries, keys, values and outputs that `parts` describe."""
    training = attention.training
    attention.eval()
    try:
        layer = ConformalAttention.from_projections(**parts, gating="none").eval()
        for size in FLOAT16_SIZES if model.dtype == torch.float16 else SIZES:
            _verify_for(size, layer, parts, model, attention, where)
    finally:
        attention.train(training)


def _verify_for(
    size: float,
    layer: ConformalAttention,
    parts: dict[str, Any],
    model: PreTrainedModel,
    attention: nn.Module,
    where: str,
) -> None:
    """`_verify` for inputs of one size, and a layer of the parts."""
    weight = next(attention.parameters())
    length, how = 5, layer.projections
    generator = torch.Generator().manual_seed(0)
    # The model's dtype and not that of the weights, which may be quantized.
    x = (size * torch.randn(1, length, layer.width, generator=generator)).to(weight.device, model.dtype)
    expected = [y.transpose(1, 2) for y in how.project(layer, x)]
    taken = inspect.signature(attention.forward).parameters
    positions = torch.arange(length, device=x.device).unsqueeze(0)
    arguments: dict[str, Any] = {"attention_mask": None}
    if "position_ids" in taken:
        # Ministral 3 scales queries by them, which dividing by the sum of scores cancels.
        arguments["position_ids"] = positions
    if parts["rates"] is not None:
        rotary: Any = _rotary_embedding(model)
        arguments["position_embeddings"] = rotary(x, positions)
        angles = wrap_angle(torch.arange(length, dtype=torch.float64)[:, None] * parts["rates"]).to(x.device)
        scale = float(getattr(rotary, "attention_scaling", 1.0))
        # The probe receives entries in the model's order; `project` and `rotate` interleave pairs.
        expected[:2] = [_halves(rotate(y, angles)) * scale for y in expected[:2]]
    if missing := sorted(arguments.keys() - taken.keys()):
        raise UserError(f"{where} must take {', '.join(missing)}, as attention of transformers does")
    config: Any = attention.config
    probed = copy.copy(config)
    probed._attn_implementation = _PROBE
    _CAPTURED.clear()
    try:
        attention.config = probed
        y = attention(x, **arguments)[0]
    finally:
        attention.config = config
        captured, _CAPTURED[:] = list(_CAPTURED), []
    if len(captured) != 1:
        raise UserError(f"{where} must call transformers' attention interface once, got {len(captured)} calls")
    [(found, unsupported)] = captured
    if unsupported:
        raise UserError(
            f"{where} passes {', '.join(unsupported)} to its attention function, which a swapped layer would drop"
        )
    wanted = [*expected, how.output(layer, found[0].transpose(1, 2))]
    for what, got, want in zip(("queries", "keys", "values", "outputs"), (*found, y), wanted, strict=True):
        if got.shape != want.shape or not bool((got - want).abs().amax() <= TOLERANCE * want.abs().amax()):
            raise UserError(
                f"{where} does not make its {what} in the way that its submodules suggest "
                f"({', '.join(parts['names'].values())}): a swapped layer would compute something else"
            )


def _halves(x: Tensor) -> Tensor:
    """Reorders interleaved pairs, entries 2j and 2j + 1 of (…, d), to entries j and j + d/2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
