"""Configuration of a training run: frozen dataclasses that check their values, presets, and YAML.

A field's help text is its entry under "Attributes"; `sympow.cli.flags` makes a command-line flag of every field.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from sympow.checks import Decay, NaturalInt, NonNegative, PositiveInt, Range, check_fields
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.extras import require
from sympow.model.config import GPTConfig
from sympow.parsing import LARGEST_YAML, parse_yaml
from sympow.settings import DATA_DEPENDENT, Short

# Of a batch or context.
Tokens = Annotated[int, Range(1, largest=2**31 - 1, why="since positions in a batch are 32-bit integers")]
# By default a run is evaluated EVALUATIONS times, each time on a token for every EVALUATED_PART that it trains on, and
# on MOST_EVALUATED at most. This adds 3 % to the run's time: a forward pass takes a third of a step's.
EVALUATIONS = 4
EVALUATED_PART = 50
MOST_EVALUATED = 65_536


@dataclass(frozen=True)
class DataConfig:
    """Training data.

    Attributes:
        data: "stdlib" (this Python's standard library), a folder of `sympow data prepare`, token files of datatrove,
            Megatron or nanoGPT, LongCrawl64's folder or address, or "mqar" (associative recall, a synthetic task), with
            options as in "mqar:pairs=32,length=256".
        context: tokens of a training sequence.
        short: what to do with documents and tails shorter than the context: refuse, drop, join or pack.
    """

    data: str = "stdlib"
    context: Tokens = 1_024
    short: Short = "join"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule.

    Attributes:
        learning_rate: the peak of the schedule.
        rotation_rate: learning rate of the rotation's W_β, relative to the others'.
        rotation_gradient: factor on the gradient through the rotation's scale β, to W_β and its inputs.
        rotation_init: standard deviation of W_β at initialization; 0: β = 1, which is RoPE.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        epsilon: Adam's, added to the denominator.
        weight_decay: decoupled weight decay of matrices; norms, biases and gates have none.
        clip_norm: largest norm of the gradient of all parameters; 0: no clipping.
        warmup_steps: steps over which the learning rate rises from 0.
        schedule: of the learning rate after warm-up: constant, linear or cosine down to final_rate.
        final_rate: learning rate of the last step, relative to learning_rate, with linear and cosine.
    """

    learning_rate: NonNegative = 6e-4
    rotation_rate: NonNegative = 1.0
    rotation_gradient: NonNegative = 1.0
    rotation_init: NonNegative = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    clip_norm: NonNegative = 0.0
    warmup_steps: NaturalInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_rate: NonNegative = 0.1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RunConfig:
    """Execution: batches, precision, parallelism, checkpoints and logging.

    Attributes:
        steps: updates of the parameters.
        batch_tokens: tokens of a batch, over all processes; a multiple of the context.
        micro_batch_tokens: tokens of a forward pass in each process, at least one sequence; gradients accumulate.
        seed: random seed of the parameters and of the order of the data.
        precision: bf16 (mixed: parameters stay in float32) or fp32.
        compile: whether to compile the model's blocks (torch.compile).
        recompute: whether to use activation checkpointing: keep only each block's input for the backward pass.
        loss_tokens: tokens whose logits are in memory at a time.
        parallel: data parallelism, ddp (a replica of the model per process) or fsdp (sharded, FSDP2).
        context_parallel: processes over which each sequence is sharded; a divisor of their number.
        log_every: steps between lines of progress and metrics.
        evaluate_every: steps between evaluations on held-out documents; 0: none; None: a quarter of the run, if the
            data are in a local folder, or generated, and have held-out documents.
        evaluate_tokens: tokens of an evaluation, approximately; None: a fiftieth of those trained on, at most 65,536.
        save: whether to write checkpoints, and the model at the end.
        save_every: steps between checkpoints; 0: only the last.
        keep: number of checkpoints to keep.
        hang_after: seconds without progress after which the heartbeat ends all processes; 0: never.
        tensorboard: whether to write TensorBoard events beside metrics.jsonl.
        wandb: project to log to with Weights & Biases; empty: none.
    """

    steps: PositiveInt = 1_000
    batch_tokens: Tokens = 65_536
    micro_batch_tokens: Tokens = 65_536
    seed: NaturalInt = 0
    precision: Literal["bf16", "fp32"] = "fp32"
    compile: bool = False
    recompute: bool = False
    loss_tokens: PositiveInt = 8_192
    parallel: Literal["ddp", "fsdp"] = "ddp"
    context_parallel: PositiveInt = 1
    log_every: PositiveInt = 10
    evaluate_every: NaturalInt | None = None
    evaluate_tokens: PositiveInt | None = None
    save: bool = True
    save_every: NaturalInt = 100
    keep: PositiveInt = 3
    hang_after: NaturalInt = 600
    tensorboard: bool = True
    wandb: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after so many steps, if there is anything to evaluate on."""
        if self.evaluate_every is None:
            return step == self.steps or step % -(-self.steps // EVALUATIONS) == 0
        return self.evaluate_every > 0 and step % self.evaluate_every == 0

    @property
    def evaluated_tokens(self) -> int:
        """Tokens of an evaluation, approximately."""
        if self.evaluate_tokens is not None:
            return self.evaluate_tokens
        return min(MOST_EVALUATED, self.steps * self.batch_tokens // EVALUATED_PART)


class Sections:
    """A config of sections; their fields have names that are unique in it."""

    def changed(self, **changes: Any) -> Self:
        """A copy with some fields changed, named without their section."""
        made = {}
        for section in fields(self):  # type: ignore[arg-type]
            value = getattr(self, section.name)
            made[section.name] = replace(value, **{name: changes.pop(name) for name in _names(value) & changes.keys()})
        if changes:
            raise ArgumentTypeError(next(iter(changes)), f"is a field of no section of a {type(self).__name__}")
        return type(self)(**made)

    def settings(self) -> dict[str, Any]:
        """All fields of all sections, by the names that `changed` takes."""
        sections = asdict(self)  # type: ignore[call-overload]
        return {name: value for section in sections.values() for name, value in section.items()}


@dataclass(frozen=True)
class TrainConfig(Sections):
    """A training run.

    Attributes:
        model: its vocabulary size becomes that of the data.
        data: documents and context.
        optimizer: AdamW and its schedule.
        run: execution.
    """

    model: GPTConfig = field(default_factory=lambda: GPTConfig.preset("byte-400k"))
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise ArgumentTypeError(name, f"must be a {kind.__name__}, got {type(getattr(self, name)).__name__}")
        if self.run.batch_tokens % self.data.context:
            raise ArgumentError(
                "batch_tokens", f"must be a multiple of the context, {self.data.context}; got {self.run.batch_tokens}"
            )
        if self.run.context_parallel > self.data.context:
            raise ArgumentError(
                "context_parallel",
                f"must leave each process a token of the context, {self.data.context}; got {self.run.context_parallel}",
            )
        if self.model.rotary not in DATA_DEPENDENT:
            for name in ("rotation_rate", "rotation_gradient", "rotation_init"):
                value = getattr(self.optimizer, name)
                if value != OptimizerConfig.__dataclass_fields__[name].default:
                    raise ArgumentError(
                        name,
                        f"is for rotations that depend on the data, such as rotary='scale'; got {value} with "
                        f"rotary={self.model.rotary!r}",
                    )
        if self.run.context_parallel > 1 and self.model.short_conv:
            raise ArgumentError(
                "short_conv",
                f"is not supported with context_parallel above 1, got {self.model.short_conv} and "
                f"{self.run.context_parallel}",
            )

    @property
    def batch_rows(self) -> int:
        """Sequences of a batch."""
        return self.run.batch_tokens // self.data.context

    def to_yaml(self) -> str:
        """The YAML that `from_yaml` reads."""
        return str(require("yaml", "train").safe_dump(asdict(self), sort_keys=False))

    @classmethod
    def from_yaml(cls, text: str) -> TrainConfig:
        """From sections of fields; missing ones have their defaults, unknown ones are refused."""
        content = parse_yaml(text)
        if content is None:
            raise UserError(f"a config must have sections ({', '.join(SECTIONS)}), but this one is empty")
        if not isinstance(content, Mapping):
            raise UserError(f"a config must map sections to fields, got {type(content).__name__}")
        sections = {}
        for title, section in content.items():
            if title not in SECTIONS:
                raise UserError(f"a config has the sections {', '.join(SECTIONS)}; got {title!r}")
            if not isinstance(section, Mapping | None):
                raise ArgumentError(title, f"must map fields to values, got {type(section).__name__}")
            if title == "model" and not section:
                raise ArgumentError(
                    "model",
                    "must have fields, such as layers and width, or be left out for the default model; got none",
                )
            unknown = set(section or {}) - _names(SECTIONS[title])
            if unknown:
                raise ArgumentError(title, f"has no field {', '.join(sorted(map(str, unknown)))}")
            sections[title] = SECTIONS[title](**_with_exponents(SECTIONS[title], section or {}))
        return cls(**sections)

    @classmethod
    def read(cls, path: Path | str) -> TrainConfig:
        """Reads a YAML file; errors name it."""
        try:
            # Not read_text: the file may be a pipe, as shells make for <(command), of any length.
            with Path(path).open(encoding="utf-8") as file:
                return cls.from_yaml(file.read(LARGEST_YAML + 1))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: {error}") from error


SECTIONS: dict[str, type[Any]] = get_type_hints(TrainConfig)


def laptop() -> TrainConfig:
    """A small byte-level model that trains within minutes on a CPU: two million tokens, 4,096 a batch."""
    return TrainConfig(
        data=DataConfig(context=512),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, clip_norm=1.0),
        run=RunConfig(steps=500, batch_tokens=4_096, micro_batch_tokens=4_096),
    )


def paper() -> TrainConfig:
    """The paper's recipe (§4): GPT-2 124M on LongCrawl64, 524,288 tokens a batch, bf16, Adam, 6e-4, no schedule.

    The model is conformal, with the paper's gates and rotation. Only `data`, the address of LongCrawl64, remains to be
    set.
    """
    return TrainConfig(
        model=GPTConfig.preset("gpt2-124m", rotary="scale"),
        data=DataConfig(data="longcrawl64", context=4_096, short="refuse"),
        optimizer=OptimizerConfig(learning_rate=6e-4),
        run=RunConfig(steps=100_000, batch_tokens=524_288, precision="bf16", compile=True, save_every=1_000),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {"laptop": laptop, "paper": paper}


def field_help(kind: type) -> dict[str, str]:
    """The entries under "Attributes" of a config's docstring, by field."""
    text = inspect.getdoc(kind) or ""
    _, _, attributes = text.partition("Attributes:\n")
    helps: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        entry = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            helps |= dict.fromkeys(names, entry[2])
        elif line.startswith("        ") and names:
            helps |= {name: f"{helps[name]} {line.strip()}" for name in names}
    return helps


def _names(section: Any) -> set[str]:
    return {field.name for field in fields(section)}


def _with_exponents(kind: type[Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """With 6e-4 parsed as a number: to YAML it is a string, since it has no decimal point."""
    hints = get_type_hints(kind)
    values = dict(section)
    for name, value in values.items():
        if hints[name] is float and isinstance(value, str):
            try:
                values[name] = float(value)
            except ValueError as error:
                raise ArgumentError(name, f"must be a number, got {value!r}") from error
    return values
