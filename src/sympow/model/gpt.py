"""GPT-2 with symmetric power attention (paper §4): pre-norm blocks, GELU, tied embeddings, no learned positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.layers.gates import Gate
from sympow.layers.mixers import ConformalAttention, LayerCache, LayerState, Mixer, SoftmaxAttention
from sympow.layers.precision import FloatLinear
from sympow.layers.rotations import Rotation
from sympow.layers.short_conv import ShortConvolution
from sympow.model.config import GPTConfig
from sympow.model.losses import ALIGNMENT
from sympow.ops.compilation import Sealed
from sympow.parallel.shards import Shards

ModelState = tuple[LayerState, ...]
# Default number of tokens that are prefilled at a time: memory depends on it, and not on the length of a text.
SEGMENT_SIZE = 8_192
# Modules that initialize their parameters themselves, beside gates and rotations.
_SELF_INITIALISING = (nn.LayerNorm, FloatLinear, ShortConvolution)


class Mlp(nn.Module):
    """Two linear layers with the tanh approximation of GELU between them, as in GPT-2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=config.bias)
        self.out_proj = nn.Linear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(gelu(self.up_proj(x), approximate="tanh"))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). States are passed as `Sealed`, so that FSDP2 does not cast them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mixer = make_mixer(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = Mlp(config)

    def forward(
        self,
        x: Tensor,
        state: Sealed[LayerState] | None,
        return_state: bool,
        cu_seqlens: Tensor | None,
        mask: Tensor | None = None,
        shards: Shards | None = None,
        cache: Sealed[LayerCache] | None = None,
    ) -> tuple[Tensor, Sealed[LayerState] | None]:
        """As `Mixer.forward`; with a cache as `step`, but as a module call, which runs the hooks of the block."""
        if cache is not None:
            return self.step(x, cache.record), None
        before = None if state is None else state.record
        mixed, after = self.mixer(
            self.mixer_norm(x), before, return_state=return_state, cu_seqlens=cu_seqlens, mask=mask, shards=shards
        )
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), None if after is None else Sealed(after)

    def step(self, x: Tensor, cache: LayerCache) -> Tensor:
        """One token, (b, 1, width); updates the cache in place."""
        x = x + self.mixer.step(self.mixer_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A language model whose past is an explicit state, passed in and returned.

    Example:
        >>> model = GPT(GPTConfig.preset("byte-400k"))
        >>> logits, state = model(torch.randint(256, (1, 100)))
        >>> logits, state = model(torch.randint(256, (1, 1)), state)  # continues the first call

    Attributes:
        description: what else than the config and the parameters determines the outputs, for fingerprints.
    """

    description: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise ArgumentTypeError("config", f"must be a GPTConfig, got {type(config).__name__}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.reset_parameters()

    @property
    def output_weight(self) -> Tensor:
        """The matrix whose product with features is the logits, (vocab_size, width): the tied embedding."""
        return self.embedding.weight

    def reset_parameters(self) -> None:
        """GPT-2's initialization: std 0.02, divided by √(2 layers) for projections into the residual stream.

        Norms, gates, rotations and short convolutions initialize themselves. A model made on the meta device is
        initialized by `to_empty` and then this.
        """
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, _SELF_INITIALISING):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                into_residual = name.endswith("out_proj")
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Last: a gate or rotation may hold linear maps, whose initial values it sets.
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if isinstance(module, Gate | Rotation) and callable(reset):
                reset()

    def forward(
        self,
        tokens: Tensor,
        state: Sequence[LayerState] | None = None,
        *,
        return_state: bool = True,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """Logits of the token after each of `tokens`.

        Args:
            tokens: (b, t) integers below vocab_size.
            state: the state that an earlier call returned, one entry for each layer; None: the text begins here.
            return_state: whether to return the state after the tokens. Pass False in training: computing it takes time
                and memory for every token.
            cu_seqlens: offsets of packed documents, as in `sympow.attention`; batch 1.
            mask: (b, t) bool, False for padding, for texts of different lengths in a batch. The padding has no
                influence on the logits of tokens and on the state.
            shards: for context parallelism, which tokens of the sequences each process has (`sympow.parallel.Shards`).
                Document offsets are those of the shards; states are those of the whole sequence.

        Returns:
            logits (b, t, vocab_size) and the state, or None if it was not asked for.
        """
        x, after = self.features(
            tokens, state, return_state=return_state, cu_seqlens=cu_seqlens, mask=mask, shards=shards
        )
        return linear(x, self.output_weight), after

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
        """As `forward`, with the output of the final norm, (b, t, width), in place of the logits.

        Args:
            take_state: called after each layer with its number and its state after the tokens, and may overwrite that
                before them. Then no state is returned, and there is only one layer's in memory at a time.
        """
        self._check(tokens, state)
        x = self.embedding_norm(self.embedding(tokens))
        after: list[LayerState] = []
        for layer, block in enumerate(self.blocks):
            before = None if state is None else Sealed(state[layer])
            x, sealed = block(x, before, return_state, cu_seqlens, mask, shards)
            if sealed is not None and take_state is not None:
                take_state(layer, sealed.record)
            elif sealed is not None:
                after.append(sealed.record)
            # Not kept while the next layer runs.
            del sealed
        return self.final_norm(x), tuple(after) if return_state and take_state is None else None

    def step(self, tokens: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Logits (b, vocab_size) after one more token (b,), without gradients; updates the caches, one a layer."""
        self._check_step(tokens, caches)
        with torch.no_grad():
            x = self.embedding_norm(self.embedding(tokens.unsqueeze(1)))
            for block, cache in zip(self.blocks, caches, strict=True):
                assert isinstance(block, Block)
                x = block.step(x, cache)
            return project_features(self.final_norm(x.squeeze(1)), self.output_weight)

    def count_parameters(self) -> int:
        """The number of parameters; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def _check_step(self, tokens: Tensor, caches: Sequence[LayerCache]) -> None:
        if not isinstance(tokens, Tensor):
            raise ArgumentTypeError("tokens", f"must be a tensor, got {type(tokens).__name__}")
        if tokens.ndim != 1:
            raise ArgumentError("tokens", f"must be (batch,), one for each sequence; got shape {tuple(tokens.shape)}")
        self._check(tokens.unsqueeze(1), None)
        if not isinstance(caches, tuple | list):
            raise ArgumentTypeError(
                "caches", f"must be a list with an entry for each layer, got {type(caches).__name__}"
            )
        if len(caches) != len(self.blocks):
            raise ArgumentError(
                "caches", f"must have an entry for each of {len(self.blocks)} layers, got {len(caches)}"
            )

    def _check(self, tokens: Tensor, state: Sequence[LayerState] | None) -> None:
        if not isinstance(tokens, Tensor):
            raise ArgumentTypeError("tokens", f"must be a tensor, got {type(tokens).__name__}")
        if tokens.ndim != 2:
            raise ArgumentError("tokens", f"must be (batch, time), got shape {tuple(tokens.shape)}")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError("tokens", f"must be int32 or int64, got {tokens.dtype}")
        if not torch.compiler.is_compiling() and tokens.device.type == "cpu" and tokens.numel():
            low, high = (x.item() for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ArgumentError(
                    "tokens", f"must lie between 0 and {self.config.vocab_size - 1}; got {low if low < 0 else high}"
                )
        if state is not None:
            if not isinstance(state, tuple | list):
                raise ArgumentTypeError(
                    "state", f"must be a tuple with an entry for each layer, got {type(state).__name__}"
                )
            if len(state) != len(self.blocks):
                raise ArgumentError(
                    "state", f"must have an entry for each of {len(self.blocks)} layers, got {len(state)}"
                )


def project_features(features: Tensor, weight: Tensor) -> Tensor:
    """Logits: features (b, width) times weightᵀ (width, vocabulary), without gradients.

    In half precision on a GPU the output's rows are aligned to 16 bytes: without that, cuBLAS takes a kernel that loads
    the weights one number at a time, and this product is bound by those loads.
    """
    vocabulary = weight.shape[0]
    padding = -vocabulary % ALIGNMENT
    half = features.dtype == weight.dtype and features.dtype in (torch.bfloat16, torch.float16)
    if not (features.is_cuda and padding and half):
        return linear(features, weight)
    padded = features.new_empty(len(features), vocabulary + padding)
    return torch.mm(features, weight.mT, out=padded[:, :vocabulary])


def make_mixer(config: GPTConfig) -> Mixer:
    """The attention layer that a config describes."""
    shape: dict[str, Any] = {
        "key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "gating": config.gating,
        "rotary": config.rotary,
        "max_document": config.max_document,
        "max_rate": config.max_rate,
        "rotary_fraction": config.rotary_fraction,
        "bias": config.bias,
        "short_conv": config.short_conv,
    }
    if config.mixer == "softmax":
        return SoftmaxAttention(config.width, config.heads, **shape)
    return ConformalAttention(
        config.width,
        config.heads,
        power=config.power,
        form=config.form,
        backend=config.backend,
        chunk_size=config.chunk_size,
        **shape,
    )
