"""`SwappedGPT`: a transformers model with swapped attention behind the interface of `sympow.GPT`.

`sympow generate`, `sympow serve` and `Engine` decode models that take their past as an explicit state, a segment or a
token at a time. `SwappedGPT` calls the transformers model for both, so that norms, MLPs and whatever else an
architecture has are computed by its own code. A cache with an entry for each layer carries the state in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.hf.swap.attention_parts import attention_modules
from sympow.hf.swap.record import SwapRecord
from sympow.hf.swap.state_layer import StateLayer
from sympow.hf.swap.swapped_attention import MASK, SwappedAttention
from sympow.layers.mixers import LayerCache, LayerState, Mixer
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT, ModelState, project_features
from sympow.parallel.shards import Shards

# Fields of a transformers config that change what a swapped model computes from its parameters, as far as an
# architecture has them; of the swap, the power and the kinds of gates and rotations are in the `GPTConfig`.
_RELEVANT = (
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "norm_epsilon",
    "layer_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "num_experts_per_tok",
    "norm_topk_prob",
)
# Largest relative difference of two computations that launch the same kernels.
_TOLERANCE = 1e-3


class _Segment(StateLayer):
    """A cache entry for one prefill: gives its layer the state before the segment, and takes that after it.

    Args:
        before: the state, or None at the beginning of a text.
        take: called with the state after the segment.
        seen: the number of tokens that the entry reports, which determines the model's positions.
    """

    can_step = False

    def __init__(self, before: LayerState | None, take: Callable[[LayerState], None], seen: int = 0) -> None:
        super().__init__()
        self._given = None if before is None else (before,)
        self._take, self._length = take, seen

    def start(self, mixers: Sequence[Mixer], x: Tensor, device: torch.device | None = None) -> ModelState | None:
        return self._given

    def advance(self, state: ModelState, x: Tensor, mask: Tensor | None) -> None:
        self._take(state[0])


class _Step(StateLayer):
    """A cache entry for one decoding step, which updates the layer's cache in place."""

    can_step = True

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self._given = [cache]

    def step(self, mixers: Sequence[Mixer], x: Tensor) -> list[LayerCache]:
        return self._given


class _Layer(nn.Module):
    """A layer as `GPT.blocks` has them: something with a `mixer`."""

    def __init__(self, mixer: SwappedAttention) -> None:
        super().__init__()
        self.mixer = mixer


class SwappedGPT(GPT):
    """A causal language model of transformers, all of whose layers were swapped, as a `GPT`.

    Args:
        model: from `swap_attention`, or loaded with `AutoModelForCausalLM`. It is not copied.

    Attributes:
        net: the model.
        config: describes attention and the vocabulary; the MLP and norms are the model's own.

    Raises:
        ValueError: layers keep softmax, the embedding has positions, or logits are not a product of the features.

    Example:
        >>> model = SwappedGPT(AutoModelForCausalLM.from_pretrained("converted/model").eval())
        >>> logits, state = model(tokens)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        nn.Module.__init__(self)
        if not isinstance(model, PreTrainedModel):
            raise ArgumentTypeError(
                "model",
                f"must be a model of transformers, got {type(model).__name__}: of a model of peft, give what "
                "merge_and_unload returns",
            )
        found = attention_modules(model)
        kept = [index for index, module in found.items() if not isinstance(module, SwappedAttention)]
        if kept:
            raise ArgumentError(
                "model",
                f"must have swapped attention in all {len(found)} layers, since softmax layers have no state of "
                f"fixed size; these keep softmax: {', '.join(map(str, kept))}. Use the model with transformers",
            )
        layers_in_all = getattr(model.config, "num_hidden_layers", len(found))
        if sorted(found) != list(range(layers_in_all)):
            raise ArgumentError(
                "model",
                f"must have attention in all of its {layers_in_all} layers; {type(model).__name__} has it in "
                f"{len(found)}, and others of another kind",
            )
        self.net: Any = model
        head: Any = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ArgumentError(
                "model", f"must be a causal language model whose head is a matrix; {type(model).__name__} is not"
            )
        self._head = head
        self.embedding = cast("nn.Embedding", model.get_input_embeddings())
        layers = [cast("SwappedAttention", found[index]) for index in sorted(found)]
        self.blocks = nn.ModuleList(map(_Layer, layers))
        record = SwapRecord.of(model.config)
        self.config = _describe(record, layers, head.weight.shape)
        fields = model.config.to_dict()
        relevant = {name: fields[name] for name in _RELEVANT if fields.get(name) is not None}
        self.description = {"transformers": {"base": record.base_model_type, **relevant}}
        self._check_model()

    @property
    def output_weight(self) -> Tensor:
        return self._head.weight

    def reset_parameters(self) -> None:
        raise TypeError("reset_parameters is not for a pretrained model")

    def features(
        self,
        tokens: Tensor,
        state: Sequence[LayerState] | None = None,
        *,
        return_state: bool = True,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        shards: Shards | None = None,
        take_state: Callable[[int, LayerState], None] | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """As `GPT.features`; packed documents and context parallelism are not supported."""
        for name, what, given in (
            ("cu_seqlens", "packed documents", cu_seqlens),
            ("shards", "context parallelism", shards),
        ):
            if given is not None:
                raise ArgumentError(name, f"({what}) must be None with a model of transformers")
        self._check(tokens, state)
        if not return_state and state is None:
            return self._run(tokens, mask, None), None
        after: dict[int, LayerState] = {}
        take: Callable[[int, LayerState], None] = after.__setitem__ if take_state is None else take_state
        entries = [
            _Segment(None if state is None else state[layer], partial(take, layer)) for layer in range(len(self.blocks))
        ]
        x = self._run(tokens, mask, entries)
        if take_state is None and len(after) != len(entries):
            raise ArgumentError(
                "model", "must return states: with gradient checkpointing in training mode it has none; call eval first"
            )
        return x, tuple(after[layer] for layer in sorted(after)) if return_state and take_state is None else None

    def step(self, tokens: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """As `GPT.step`."""
        self._check_step(tokens, caches)
        with torch.no_grad():
            x = self._run(tokens.unsqueeze(1), None, [_Step(cache) for cache in caches])
            return project_features(x.squeeze(1), self.output_weight)

    def _run(self, tokens: Tensor, mask: Tensor | None, entries: Sequence[StateLayer] | None) -> Tensor:
        """Features of the base model, (b, t, width)."""
        cache = None
        if entries is not None:
            cache = DynamicCache()
            cache.layers = list(entries)
        # No layer reads the mask of the attention function, which a 4-D mask replaces; and with MASK given, the hook of
        # the base model, which would wait for the device to look for padding, has nothing to do.
        unused = tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool)
        given = {"attention_mask": unused, MASK: mask, "past_key_values": cache, "use_cache": cache is not None}
        x: Tensor = self.net.base_model(input_ids=tokens, **given).last_hidden_state
        return x

    @torch.no_grad()
    def _check_model(self) -> None:
        """Refuses models that are more than features of tokens and states, times the weight of the head."""
        training = self.net.training
        self.net.eval()
        try:
            self._check_outputs()
        finally:
            self.net.train(training)

    def _check_outputs(self) -> None:
        tokens = torch.arange(2, device=self.embedding.weight.device).unsqueeze(0)
        entries = ([_Segment(None, lambda _: None, seen) for _ in self.blocks] for seen in (0, 7))
        if _differ(*(self._run(tokens, None, some) for some in entries)):
            raise ArgumentError(
                "model",
                "must not depend on positions except through rotary embeddings, since sequences of a batch have "
                f"read different numbers of tokens; {type(self.net).__name__} has position embeddings: use generate of "
                "transformers",
            )
        logits = linear(self._run(tokens, None, None), self.output_weight)
        if _differ(logits, self.net(input_ids=tokens, use_cache=False).logits):
            raise ArgumentError(
                "model",
                f"must have logits that are its features times the weight of its head; {type(self.net).__name__} "
                "changes them afterwards",
            )


def _differ(x: Tensor, y: Tensor) -> bool:
    return bool((x.double() - y.double()).norm() > _TOLERANCE * y.double().norm())


def _describe(record: SwapRecord, layers: Sequence[SwappedAttention], head: torch.Size) -> GPTConfig:
    first = layers[0]
    return GPTConfig(
        vocab_size=head[0],
        layers=len(layers),
        width=head[1],
        heads=first.heads,
        key_value_heads=first.key_value_heads,
        head_dim=first.head_dim,
        power=record.power,
        gating=record.gating,  # type: ignore[arg-type]
        rotary=record.rotary,  # type: ignore[arg-type]
        form=record.form,
        backend=record.backend,
        chunk_size=record.chunk_size,
    )
