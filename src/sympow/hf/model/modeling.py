"""The models of transformers: `SympowModel`, `SympowForCausalLM` and `SympowForSequenceClassification`.

Modules and parameters have the names of `sympow.GPT`, so that a checkpoint of one is a checkpoint of the other with
"model." in front.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.hf.model.cache import SympowCache
from sympow.hf.model.config import SympowConfig
from sympow.hf.model.packing import check_continuation, packed_offsets
from sympow.hf.past import uncompiled
from sympow.layers.gates import LearnedGate
from sympow.layers.mixers import LayerState, Mixer
from sympow.layers.precision import FloatLinear
from sympow.layers.rotations import LearnedRotation
from sympow.layers.short_conv import ShortConvolution
from sympow.model.config import GPTConfig
from sympow.model.gpt import Block, ModelState
from sympow.ops.compilation import Sealed

logger = logging.get_logger(__name__)

# Marks projections into the residual stream, whose initial weights are smaller.
INTO_RESIDUAL = "_into_residual"


class SympowBlock(GradientCheckpointingLayer, Block):
    """A block with gradient checkpointing."""

    def __init__(self, config: GPTConfig) -> None:
        Block.__init__(self, config)
        # transformers initializes a module without telling its name.
        for into_residual in (self.mixer.out_proj, self.mlp.out_proj):
            setattr(into_residual, INTO_RESIDUAL, True)


def initialize_own_module(module: nn.Module) -> bool:
    """Initializes a gate, rotation or short convolution; returns whether the module has the weights of one."""
    if isinstance(module, FloatLinear):
        init.zeros_(module.weight)
        if module.initial_bias is not None:
            init.constant_(module.bias, module.initial_bias)
    elif isinstance(module, LearnedGate):
        init.constant_(module.logit, module.initial_logit)
    elif isinstance(module, LearnedRotation):
        init.copy_(module.theta, module.initial(module.theta.device))
    elif isinstance(module, ShortConvolution):
        init.copy_(module.weight, module.initial())
    else:
        return False
    return True


class SympowPreTrainedModel(PreTrainedModel):
    """The base class of the models, with their initialization."""

    config_class = SympowConfig
    config: SympowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SympowBlock"]  # noqa: RUF012 - as transformers declares them
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Errors of gates and rotations accumulate over a sequence; in float32 these small modules cost nothing.
    _keep_in_fp32_modules_strict = ["gate", "rotation"]  # noqa: RUF012
    # Quantizers use this list. transformers requires that no name is in both.
    _keep_in_fp32_modules = ["gamma_proj", "beta_proj"]  # noqa: RUF012
    # transformers refuses assisted generation for stateful models since they cannot remove tokens; SympowCache can.
    _is_stateful = False

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Does nothing: transformers would copy this package's source into every saved folder."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As `GPT.reset_parameters`."""
        if initialize_own_module(module):
            return
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and hasattr(module, INTO_RESIDUAL):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, std=std)


class SympowModel(SympowPreTrainedModel):
    """Embedding, blocks and final norm: `GPT` without the logits."""

    _input_embed_layer = "embedding"

    def __init__(self, config: SympowConfig) -> None:
        super().__init__(config)
        native = config.to_native()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, bias=config.use_bias)
        self.blocks = nn.ModuleList(SympowBlock(native) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, bias=config.use_bias)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SympowCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **ignored: Any,
    ) -> BaseModelOutputWithPast:
        """Features of tokens.

        Args:
            input_ids: (b, t) integers below vocab_size.
            attention_mask: (b, t), or (b, past length + t); 0 for padding, at any place. Padding enters neither state
                nor normalizer nor phase; its outputs are meaningless.
            position_ids: (b, t) or (1, t). The model counts positions itself and uses these only to find packed
                documents, which start where they do not increase. Positions with gaps are refused, and after a cache
                those that do not continue it.
            past_key_values: the past; updated in place unless use_cache is False.
            inputs_embeds: (b, t, hidden_size), in place of input_ids.
            use_cache: whether to return the cache; None: as in the config, but never in training. With gradient
                checkpointing in training it is always False.
            output_hidden_states: whether to return the input of every block, and the output of the last.
            cu_seq_lens_q: offsets of packed documents, as transformers' collators call them; batch 1, without a cache.
                The values of `position_ids` and `seq_idx` are then not used, which saves a synchronization with a GPU.
            seq_idx: (b, t) or (1, t), numbers of packed documents, as an alternative to `position_ids`.
            ignored: arguments of other models.
        """
        weights = ignored.get("output_attentions")
        if self.config.output_attentions if weights is None else weights:
            raise ArgumentError("output_attentions", "must not be set: attention weights are never materialized")
        shape, past_length = _shape(input_ids, inputs_embeds), _past_length(past_key_values)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not isinstance(output_hidden_states, bool):
            raise ArgumentError(
                "output_hidden_states", f"must be True or False, for all layers; got {output_hidden_states}"
            )
        mask = _real_tokens(attention_mask, shape, past_length)
        offsets, packed_by = cu_seq_lens_q, "cu_seq_lens_q"
        if offsets is None:
            offsets, packed_by = packed_offsets(position_ids, seq_idx, mask, shape), "position_ids or seq_idx"
        if offsets is not None and (use_cache or past_key_values is not None):
            raise ArgumentError(
                "use_cache", f"and past_key_values are not supported with packed documents; {packed_by} has some"
            )
        if past_length and position_ids is not None:
            check_continuation(position_ids, attention_mask, mask, past_length, shape)
        if inputs_embeds is None:
            assert input_ids is not None
            # The id of padding need not be in the vocabulary.
            inputs_embeds = self.embedding(input_ids if mask is None else input_ids.masked_fill(~mask, 0))
        if mask is not None:
            # So that the outputs for padding, too, are the same from ids and from their embeddings.
            inputs_embeds = inputs_embeds.masked_fill(~mask.unsqueeze(-1), 0.0)
        if offsets is not None and cu_seq_lens_q is None:
            # All rows as one sequence of documents; each padding token is a separate document.
            inputs_embeds, mask = inputs_embeds.flatten(0, 1).unsqueeze(0), None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and offsets is None
        if use_cache and self.gradient_checkpointing and self.training:
            logger.warning_once(
                "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
            )
            use_cache = False
        cache = past_key_values
        if use_cache and cache is None:
            cache = SympowCache()
        if cache is not None and cache.pending is not None:
            before = cache.start(self.mixers, cache.pending.inputs)
            _, state, _ = self._prefill(cache.pending.inputs, cache.pending.mask, before, True, None, False)
            assert state is not None
            cache.catch_up(state)
        one_more = cache is not None and cache.can_step and shape[1] == 1 and bool(use_cache) and mask is None
        if cache is not None and one_more and not torch.is_grad_enabled():
            x, hidden = uncompiled(self._step, inputs_embeds, cache, output_hidden_states)
            after = None
        else:
            before = None if cache is None else cache.start(self.mixers, inputs_embeds)
            x, after, hidden = self._prefill(
                inputs_embeds, mask, before, bool(use_cache), offsets, output_hidden_states
            )
        if offsets is not None:
            x, hidden = x.reshape(*shape, -1), None if hidden is None else tuple(h.reshape(*shape, -1) for h in hidden)
        if cache is not None and after is not None:
            cache.advance(after, inputs_embeds, mask)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=hidden,
        )

    @property
    def mixers(self) -> list[Mixer]:
        """The attention layers."""
        return [cast("SympowBlock", block).mixer for block in self.blocks]

    def _prefill(
        self,
        inputs: Tensor,
        mask: Tensor | None,
        state: ModelState | None,
        return_state: bool,
        cu_seqlens: Tensor | None,
        return_hidden: bool,
    ) -> tuple[Tensor, ModelState | None, tuple[Tensor, ...] | None]:
        """Features, the state after the inputs, and the input of every block."""
        x = self.embedding_norm(inputs)
        after: list[LayerState] = []
        hidden = []
        for layer, block in enumerate(self.blocks):
            hidden.append(x)
            before = None if state is None else Sealed(state[layer])
            x, sealed = block(x, before, return_state, cu_seqlens, mask)
            if sealed is not None:
                after.append(sealed.record)
        x = self.final_norm(x)
        return x, tuple(after) if return_state else None, (*hidden, x) if return_hidden else None

    def _step(
        self, inputs: Tensor, cache: SympowCache, return_hidden: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The same for one token of each sequence, without gradients, with the caches of the layers."""
        x = self.embedding_norm(inputs)
        hidden = []
        for block, layer_cache in zip(self.blocks, cache.step(self.mixers, inputs), strict=True):
            hidden.append(x)
            x, _ = block(x, None, False, None, cache=Sealed(layer_cache))
        x = self.final_norm(x)
        return x, (*hidden, x) if return_hidden else None


class SympowForCausalLM(SympowPreTrainedModel, GenerationMixin):
    """A language model: `GPT`.

    Example:
        >>> model = SympowForCausalLM(SympowConfig(vocab_size=257, hidden_size=64, num_hidden_layers=2))
        >>> model.generate(torch.tensor([list(b"def ")]), max_new_tokens=8).shape
        torch.Size([1, 12])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012
    _input_embed_layer = "embedding"

    def __init__(self, config: SympowConfig) -> None:
        super().__init__(config)
        self.model = SympowModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SympowCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the token after each of the inputs.

        Args:
            labels: (b, t), usually the input_ids: the loss compares the logits of each token with the next label.
                Labels of −100 are ignored, and so are predictions from padding.
            use_cache: as in `SympowModel`; None with labels: False.
            logits_to_keep: the number of last tokens to compute logits for, or their indices; 0: all.
            others: for the loss, such as `num_items_in_batch`.
            the rest: as in `SympowModel`.
        """
        if use_cache is None and labels is not None and past_key_values is None:
            use_cache = False
        features = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            output_attentions=others.pop("output_attentions", None),
        )
        x = features.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.lm_head(x if isinstance(kept, int) else x[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                # The first token after padding is the first of its text, which nothing predicts.
                after_padding = attention_mask[:, -labels.shape[1] : -1] == 0
                labels = labels.masked_fill(torch.nn.functional.pad(after_padding, (1, 0)), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=features.past_key_values, hidden_states=features.hidden_states
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """What `generate` calls to make a cache; what else it passes is for caches of other kinds."""
        given = model_kwargs.get("past_key_values")
        if given is not None and not isinstance(given, SympowCache):
            raise ArgumentTypeError("past_key_values", f"must be a SympowCache, got {type(given).__name__}")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ArgumentError(
                "cache_implementation",
                f"must not be set: a state has one implementation, {SympowCache.__name__}; "
                f"got {generation_config.cache_implementation!r}",
            )
        if given is not None:
            # Read by `generate`: this cache outlives the call.
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = SympowCache()
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()


class SympowForSequenceClassification(SympowPreTrainedModel):
    """Scores of a text for `config.num_labels` labels: a classifier, or with one label a reward model."""

    _input_embed_layer = "embedding"

    def __init__(self, config: SympowConfig) -> None:
        super().__init__(config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.model = SympowModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SympowCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Scores after the last token of each text, (b, num_labels).

        Args:
            attention_mask: 0 for padding; None: texts end where only the config's pad_token_id follows.
            labels: (b,) classes, numbers or, for several labels at once, (b, num_labels); see `config.problem_type`.
            use_cache: whether to return the cache; None: False.
            the rest: as in `SympowModel`. Packed documents are refused.
        """
        shape, seq_idx = _shape(input_ids, inputs_embeds), others.get("seq_idx")
        offsets = others.get("cu_seq_lens_q")
        # The mask is not read where nothing can mark documents: that would synchronize with a GPU.
        if offsets is None and (position_ids is not None or seq_idx is not None):
            mask = _real_tokens(attention_mask, shape, _past_length(past_key_values))
            offsets = packed_offsets(position_ids, seq_idx, mask, shape)
        if offsets is not None:
            raise ArgumentError(
                "input_ids", "must have one text in each row: scores of packed documents are not supported"
            )
        features = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=bool(use_cache),
            return_dict=True,
            **others,
        )
        x = features.last_hidden_state
        real = x.new_ones(shape, dtype=torch.bool)
        if attention_mask is not None:
            real = attention_mask[:, -shape[1] :] != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        last = torch.arange(shape[1], device=x.device).where(real, 0).amax(1)
        logits = self.score(x[torch.arange(len(x), device=x.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, past_key_values=features.past_key_values, hidden_states=features.hidden_states
        )


def _shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> torch.Size:
    """(b, t) of the inputs, input_ids (b, t) or inputs_embeds (b, t, hidden_size).

    Raises:
        ValueError, TypeError: none or both are given, or not as a tensor of this form.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("exactly one of input_ids and inputs_embeds must be given")
    name, inputs, sizes = (
        ("input_ids", input_ids, ("batch", "tokens"))
        if inputs_embeds is None
        else ("inputs_embeds", inputs_embeds, ("batch", "tokens", "hidden_size"))
    )
    if not isinstance(inputs, Tensor):
        raise ArgumentTypeError(name, f"must be a tensor, got {type(inputs).__name__}")
    if inputs.ndim != len(sizes):
        raise ArgumentError(name, f"must be ({', '.join(sizes)}), got {tuple(inputs.shape)}")
    return inputs.shape[:2]


def _past_length(past_key_values: SympowCache | None) -> int:
    """The number of tokens in a cache, 0 without one."""
    if past_key_values is None:
        return 0
    if not isinstance(past_key_values, SympowCache):
        raise ArgumentTypeError("past_key_values", f"must be a SympowCache, got {type(past_key_values).__name__}")
    return past_key_values.get_seq_length()


def _real_tokens(attention_mask: Tensor | None, shape: torch.Size, past_length: int) -> Tensor | None:
    """Which of the new tokens are not padding, (b, t) bool; None: all."""
    if attention_mask is None:
        return None
    batch, length = shape
    # Not a set: symbolic lengths under torch.compile cannot be hashed.
    expected = [(batch, length), *([(batch, past_length + length)] if past_length else [])]
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) not in expected:
        came = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ArgumentError("attention_mask", f"must be {' or '.join(map(str, expected))}, 0 for padding; got {came}")
    mask = attention_mask[:, attention_mask.shape[1] - length :] != 0
    if not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask
