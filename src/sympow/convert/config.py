"""Configuration of a conversion: frozen dataclasses that check their values.

A field's help text is its entry under "Attributes"; `sympow.cli.flags` makes a command-line flag of every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sympow.checks import Decay, NaturalInt, NonNegative, PositiveInt, check_choice, check_fields
from sympow.errors import ArgumentError
from sympow.settings import (
    GATES,
    INITIAL_GATE,
    WITH_GIVEN_RATES,
    check_initial_gate,
    check_power,
    check_takes_rates,
)
from sympow.train.config import Sections, Tokens


@dataclass(frozen=True)
class SwapConfig:
    """How the teacher's attention is replaced: arguments of `sympow.hf.swap_attention`.

    Attributes:
        layers: layers to convert: all, every-other, or their indices from 0, as in 0,2,5.
        power: p, the power of the scores: 2, 4, 6 or 8.
        gating: kind of gates: none, fixed, learned, scalar (one per head and token), vector, clamped or half.
        rotary: kind of rotation: fixed (the teacher's rotary embedding), learned, scale, pairs, none, or auto:
            fixed if the teacher has a rotary embedding.
        initial_gate: γ of the gates before training, if they learn it: the fraction of the state that each token keeps.
    """

    layers: str = "all"
    power: PositiveInt = 2
    gating: str = "scalar"
    rotary: str = "auto"
    initial_gate: float = INITIAL_GATE

    def __post_init__(self) -> None:
        check_fields(self)
        check_power(self.power)
        self.chosen_layers()
        check_choice("gating", self.gating, GATES)
        check_takes_rates(self.rotary)
        check_choice("rotary", self.rotary, ("auto", *WITH_GIVEN_RATES))
        if self.initial_gate != INITIAL_GATE:
            check_initial_gate(self.initial_gate, self.gating)

    def chosen_layers(self) -> Literal["all", "every-other"] | list[int]:
        """The argument `layers` of `swap_attention`: a name, or a list of indices."""
        if self.layers == "all":
            return "all"
        if self.layers == "every-other":
            return "every-other"
        numbers = [part.strip() for part in self.layers.split(",")]
        if not all(number.isdecimal() for number in numbers):
            raise ArgumentError(
                "layers", f"must be 'all', 'every-other', or numbers from 0 as in '0,2,5'; got {self.layers!r}"
            )
        chosen = [int(number) for number in numbers]
        if len(set(chosen)) < len(chosen):
            raise ArgumentError("layers", f"must name each layer once, got {self.layers!r}")
        return chosen


@dataclass(frozen=True)
class TextConfig:
    """Text for training and evaluation.

    Attributes:
        data: a folder that `sympow data prepare` wrote with the teacher's tokenizer, or another dataset of
            `sympow train`.
        context: tokens per sequence in stages 1 and 2.
        short: what to do with documents and tails shorter than the context: refuse, drop or join.
        evaluate_tokens: held-out tokens of each evaluation, approximately.
        evaluate_factors: contexts to evaluate at, as multiples of the training context; long ones take memory.
    """

    data: str = "stdlib"
    context: Tokens = 2_048
    short: Literal["refuse", "drop", "join"] = "join"
    evaluate_tokens: PositiveInt = 262_144
    evaluate_factors: str = "1,4,16"

    def __post_init__(self) -> None:
        check_fields(self)
        self.factors()

    def factors(self) -> tuple[int, ...]:
        """`evaluate_factors` as numbers, in ascending order; the first is 1."""
        numbers = [part.strip() for part in self.evaluate_factors.split(",")]
        factors = sorted({int(number) for number in numbers if number.isdecimal()})
        if not all(number.isdecimal() for number in numbers) or factors[0] != 1:
            raise ArgumentError(
                "evaluate_factors",
                f"must be 1 and whole numbers above it, as in '1,4,16'; got {self.evaluate_factors!r}",
            )
        return tuple(factors)


@dataclass(frozen=True)
class RecipeConfig:
    """The stages; a stage with 0 tokens is skipped.

    Attributes:
        match_tokens: tokens of stage 1, which matches each converted layer's attention output to the teacher's.
        distill_tokens: tokens of stage 2, which minimizes the KL divergence from the teacher's predictions.
        extend_tokens: tokens of stage 3, which trains on longer sequences with the cross-entropy of the next token.
        extend_context: tokens per sequence in stage 3; 0: 4 times the context.
        match_rate: peak learning rate of stage 1.
        distill_rate: peak learning rate of stage 2.
        extend_rate: peak learning rate of stage 3.
        lora: rank of LoRA adapters in stages 2 and 3, merged at the end of each; 0: all parameters are trained.
        without_match: whether to convert a second student without stage 1, on as many tokens, for comparison.
        warmup: fraction of a stage's steps with linear warmup of the learning rate; cosine decay follows.
        final_rate: learning rate of a stage's last step, relative to its peak.
        beta2: decay of Adam's second moment.
        weight_decay: decoupled weight decay of matrices.
        clip_norm: largest norm of the gradient of all parameters; 0: no clipping.
    """

    match_tokens: NaturalInt = 10_000_000
    distill_tokens: NaturalInt = 40_000_000
    extend_tokens: NaturalInt = 0
    extend_context: NaturalInt = 0
    match_rate: NonNegative = 1e-3
    distill_rate: NonNegative = 3e-4
    extend_rate: NonNegative = 1e-4
    lora: NaturalInt = 0
    without_match: bool = False
    warmup: NonNegative = 0.05
    final_rate: NonNegative = 0.1
    beta2: Decay = 0.95
    weight_decay: NonNegative = 0.0
    clip_norm: NonNegative = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup >= 1:
            raise ArgumentError("warmup", f"must be a share of the steps, below 1; got {self.warmup}")
        if self.without_match and not self.match_tokens:
            raise ArgumentError("without_match", "compares with stage 1, so match_tokens must be above 0; got 0")


@dataclass(frozen=True)
class ExecutionConfig:
    """Execution: batches, precision, checkpoints and logging.

    Attributes:
        batch_tokens: tokens per batch; a multiple of the context, and of the context of stage 3.
        micro_batch_tokens: tokens per forward pass, at least one sequence; gradients accumulate over a batch.
        seed: random seed of new parameters and of the order of the data.
        precision: bf16 (mixed: trained parameters stay in float32), fp32, or auto: bf16 on a GPU, fp32 on a CPU.
        compile: whether to compile the layers (torch.compile).
        recompute: whether to keep only each layer's input for the backward pass (activation checkpointing).
        log_every: steps between lines of progress.
        save_every: steps between checkpoints; 0: only when interrupted and after each stage.
        tensorboard: whether to write TensorBoard events beside metrics.jsonl.
    """

    batch_tokens: Tokens = 65_536
    micro_batch_tokens: Tokens = 16_384
    seed: NaturalInt = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool = False
    recompute: bool = False
    log_every: PositiveInt = 10
    save_every: NaturalInt = 200
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


# Settings that a resumed conversion may change, since they change results by rounding at most. Teacher and data are
# compared by their fingerprints instead of their paths.
FREE = frozenset(
    {
        "teacher",
        "data",
        "evaluate_factors",
        "micro_batch_tokens",
        "compile",
        "recompute",
        "log_every",
        "save_every",
        "tensorboard",
    }
)


@dataclass(frozen=True)
class ConvertConfig(Sections):
    """A conversion.

    Attributes:
        swap: how attention is replaced.
        text: documents.
        recipe: the stages.
        execution: batches, precision, logging.
    """

    swap: SwapConfig = field(default_factory=SwapConfig)
    text: TextConfig = field(default_factory=TextConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        contexts = [("context", self.text.context)]
        if self.recipe.extend_tokens:
            contexts.append(("extend_context", self.extended_context))
        for name, context in contexts:
            if self.execution.batch_tokens % context:
                raise ArgumentError(
                    "batch_tokens",
                    f"must be a multiple of the {name}, {context:,}; got {self.execution.batch_tokens:,}",
                )

    @property
    def extended_context(self) -> int:
        """Tokens per sequence in stage 3."""
        return self.recipe.extend_context or 4 * self.text.context
