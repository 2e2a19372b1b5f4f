"""The command `sympow train`, also as `python -m sympow.train`. Its flags are the fields of `TrainConfig`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.checks import check_choice
from sympow.cli.common import App, Command, Device, Mistake
from sympow.cli.flags import flags_of
from sympow.errors import ArgumentError, UserError
from sympow.invocation import first_process, may_be_restarted
from sympow.model.config import PRESETS as MODELS
from sympow.train.config import PRESETS, SECTIONS, TrainConfig

# The preset whose values --help shows as defaults.
DEFAULT_PRESET = "laptop"
DEFAULT = PRESETS[DEFAULT_PRESET]()


# The data determine the vocabulary size.
@flags_of({name.capitalize(): getattr(DEFAULT, name) for name in SECTIONS}, without=("vocab_size",))
def train(
    preset: Annotated[str | None, typer.Option(help="Config to start from: laptop or paper. [default: laptop]")] = None,
    model: Annotated[str | None, typer.Option(help=f"Model to train instead: {', '.join(MODELS)}.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Config file to start from; each run writes its own as config.yaml.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out, or the latest run.")] = False,
    device: Device = None,
    **changes: Any,
) -> None:
    """Train a model, with checkpoints and metrics.

    Every field of a run's config is a flag; the defaults shown are those of --preset laptop. An interrupted run is
    resumed with --resume. Under torchrun, the processes share the work:

        torchrun --nproc-per-node 8 -m sympow train --preset paper --data DATA
    """
    from sympow.train.loop import NonFiniteLossError
    from sympow.train.run_folder import CONFIG_FILE
    from sympow.train.trainer import train as run

    if preset is not None and config is not None:
        raise UserError(
            f"--preset and --config are both configs to start from: give one of them; got {preset!r} and {config}"
        )
    if preset is not None and resume:
        raise UserError(f"--preset is for a new run: --resume continues one with its own settings; got {preset!r}")
    if may_be_restarted():
        if out is None:
            raise ArgumentError("out", "must be given with torchrun's --max-restarts, so that a restart finds the run")
        # torchrun counts restarts on each machine separately, but all machines see the same run folder.
        resume = resume or (out / CONFIG_FILE).exists()
    if resume:
        out = out or _latest()
        config = config or out / CONFIG_FILE
    preset = preset or DEFAULT_PRESET
    check_choice("preset", preset, PRESETS)
    # The config of a run that is resumed began with its preset.
    settings = PRESETS[preset]() if config is None else TrainConfig.read(config)
    if model is not None:
        check_choice("model", model, MODELS)
        settings = replace(settings, model=MODELS[model])
    changes = {name: value for name, value in changes.items() if value is not None}
    settings = settings.changed(**changes)
    if "final_rate" in changes and settings.optimizer.schedule == "constant":
        raise UserError(
            f"--final-rate has no effect with the schedule constant: give --schedule too; got {changes['final_rate']}"
        )
    try:
        folder = run(settings, out, resume=resume, device=device)
    except NonFiniteLossError:
        # All processes stop with the same message.
        if first_process():
            raise
        raise typer.Exit(1) from None
    if first_process():
        typer.echo(f"{folder}")


# Names that other programs have for flags.
HABITS = {
    "--learning-rate": ("--lr", "--rate"),
    "--batch-tokens": ("--batch-size", "--batch", "--bs", "--global-batch-size"),
    "--micro-batch-tokens": ("--micro-batch-size", "--gradient-accumulation-steps", "--accumulate", "--grad-accum"),
    "--steps": ("--epochs", "--num-epochs", "--max-steps", "--num-steps", "--iters", "--max-iters", "--train-steps"),
    "--context": ("--seq-len", "--seqlen", "--sequence-length", "--context-length", "--block-size", "--max-length"),
    "--width": ("--dim", "--d-model", "--hidden-size", "--n-embd", "--embed-dim"),
    "--layers": ("--depth", "--n-layer", "--n-layers", "--num-layers", "--num-hidden-layers"),
    "--heads": ("--n-head", "--n-heads", "--num-heads", "--num-attention-heads"),
    "--key-value-heads": ("--kv-heads", "--n-kv-heads", "--num-key-value-heads"),
    "--weight-decay": ("--wd",),
    "--warmup-steps": ("--warmup", "--warmup-iters"),
    "--schedule": ("--scheduler", "--lr-scheduler", "--lr-schedule", "--lr-scheduler-type"),
    "--clip-norm": ("--clip", "--grad-clip", "--gradient-clip", "--max-grad-norm"),
    "--precision": ("--dtype", "--bf16", "--amp", "--fp16"),
    "--recompute": ("--gradient-checkpointing", "--grad-checkpointing", "--activation-checkpointing"),
    "--evaluate-every": ("--eval-every", "--eval-interval", "--eval-steps", "--val-every"),
    "--save-every": ("--save-interval", "--save-steps", "--checkpoint-every"),
    "--log-every": ("--log-interval", "--logging-steps"),
    "--data": ("--dataset", "--data-dir", "--train-data"),
    "--out": ("--output", "--output-dir", "--out-dir", "--save-dir"),
}


class TrainCommand(Command):
    """A command that knows what its flags are called in other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag: parameter for parameter in self.params for flag in parameter.opts}
        ours = {other: flag for flag, others in HABITS.items() for other in others}
        for arg in args:
            name = arg.partition("=")[0]
            if name in ours and name not in flags:
                # Its help, since it may count in other units: tokens of a batch instead of sequences.
                raise Mistake(
                    f"there is no {name}; use {ours[name]}: {getattr(flags[ours[name]], 'help', '')}", ctx=ctx
                )
        return super().parse_args(ctx, args)


def main() -> None:
    """Entry point of `python -m sympow.train`, for torchrun."""
    app = App()
    app.command(cls=TrainCommand)(train)
    app(prog_name=f"{Path(sys.executable).name} -m sympow.train")


def _latest() -> Path:
    """The folder of the run that was trained last."""
    from sympow.train.run_folder import CONFIG_FILE, RUNS

    found = sorted(RUNS.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"there is no run in {RUNS}/ to resume; name one with --out")
    return found[-1].parent
