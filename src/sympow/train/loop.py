"""The training loop: `Training.run` reads batches, makes a step of each, writes metrics, evaluates, saves, and stops.

It knows neither model nor loss: `sympow train` (trainer.py) and the stages of `sympow convert` (convert/stages.py) give
it an objective, batches, and settings. Killed anywhere and resumed, it computes what it would have computed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sympow.data.loader import Batch, Loader
from sympow.errors import ArgumentError, StoppedError, UserError
from sympow.model.config import EXECUTION_OPTIONS
from sympow.train.checkpoint import Checkpoints
from sympow.train.config import OptimizerConfig, RunConfig
from sympow.train.heartbeat import Heartbeat
from sympow.train.metrics import JsonLines, Progress, TensorBoard, WeightsAndBiases, Writer
from sympow.train.monitoring import Throughput, find_nonfinite, nonfinite_parameters, peak_flops
from sympow.train.objective import Objective
from sympow.train.optimizer import Update, make_optimizer, rate_at, send, set_rate, take_step
from sympow.train.parallelize import gradient_sync
from sympow.train.processes import Place, any_process, from_all_processes, mean_over_processes
from sympow.train.run_folder import CHECKPOINTS, EXPORT, METRICS_FILE, TENSORBOARD, Claim
from sympow.train.signals import StopRequest, stop_on_signals


class NonFiniteLossError(StoppedError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the message names the batch and the modules."""


@dataclass(frozen=True)
class Surroundings:
    """What a training shares with others that this process runs one after another.

    Attributes:
        place: of this process among all.
        claim: on the folder of the run.
        stop: the signal to stop, if one arrives.
        heartbeat: of this process.
        dtype: of matrix products under autocast; None: no autocast.
    """

    place: Place
    claim: Claim
    stop: StopRequest
    heartbeat: Heartbeat
    dtype: torch.dtype | None


@contextmanager
def surroundings(place: Place, claim: Claim, precision: str, hang_after: float = 0) -> Iterator[Surroundings]:
    """Handles signals, sets the precision and runs the heartbeat while the block runs.

    Args:
        precision: "bf16" or "fp32".
        hang_after: as of `Heartbeat`.
    """
    dtype = torch.bfloat16 if precision == "bf16" else None
    with ExitStack() as held:
        stop = held.enter_context(stop_on_signals())
        if dtype is not None and place.device.type == "cuda":
            # Products in float32 (gates, rotations) are computed in TF32, which is still finer than bf16.
            held.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        yield Surroundings(place, claim, stop, held.enter_context(Heartbeat(place, stop, hang_after)), dtype)


class Training:
    """A training from its first step, or from its newest checkpoint, to its last: run within `opened`.

    Args:
        objective: the loss, and the model that learns.
        loader: batches; its position is saved with each checkpoint.
        optimizer: AdamW and the schedule of its learning rate.
        run: batches, steps, logging, checkpoints.
        folder: for metrics and checkpoints.
        around: processes, folder, signals.
        record: the settings that checkpoints and Weights & Biases store; those of the "model" must be the same in a
            training that is resumed.
        resume: whether to continue from the newest intact checkpoint.
        saves_last: whether there is a checkpoint after the last step.
        stage: name for messages, of a training in several stages.
    """

    def __init__(
        self,
        objective: Objective,
        loader: Loader,
        optimizer: OptimizerConfig,
        run: RunConfig,
        folder: Path,
        around: Surroundings,
        *,
        record: dict[str, Any],
        resume: bool,
        saves_last: bool = True,
        stage: str = "",
    ) -> None:
        self.objective, self.loader, self.schedule, self.settings = objective, loader, optimizer, run
        self.folder, self.record, self.resume = folder, record, resume
        self.place, self.claim, self.stop, self.heartbeat = around.place, around.claim, around.stop, around.heartbeat
        self.saves_last, self.of_stage = saves_last, f" of stage {stage}" if stage else ""
        self.optimizer = make_optimizer(objective.module, optimizer)
        self.step_number = 0
        # On the device: whether an update was skipped because its loss or gradients were not finite.
        self._skipped = torch.zeros((), dtype=torch.bool, device=self.place.device)
        # An update whose numbers are read while the device computes the next one.
        self._waiting: Update | None = None

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Loads the checkpoint and opens the writers of metrics; at the end completes a pending checkpoint."""
        with ExitStack() as held:
            self.progress = held.enter_context(Progress(self.settings.steps, quiet=not self.place.first))
            self.say = self.progress.say
            folder, keep = self.folder / CHECKPOINTS, self.settings.keep
            self.checkpoints = held.enter_context(Checkpoints(folder, keep, self.place, self.say))
            if self.resume:
                self._resume()
            self.writers: list[Writer] = []
            for writer in self._make_writers():
                held.callback(writer.close)
                self.writers.append(writer)
            yield self

    def run(self) -> bool:
        """All steps, or those until a stop signal; returns whether it made the last one."""
        run, begin = self.settings, self.step_number
        self.progress.begin(begin)
        self._throughput = Throughput()
        with _frozen_garbage():
            # The loader's position counts the batches it has yielded, one for each step.
            for batch in islice(self.loader, run.steps - begin):
                self.heartbeat.report_progress()
                update = self.step(batch)
                self.step_number += 1
                self.heartbeat.report_progress()
                self.claim.keep()
                self._throughput.count(run.batch_tokens)
                self.checkpoints.poll()
                first, last = self.step_number == begin + 1, self.step_number == run.steps
                stopping = any_process(bool(self.stop), self.place)
                periodic = run.save_every > 0 and self.step_number % run.save_every == 0
                saves = run.save and (self.saves_last if last else stopping or periodic)
                self.log(update, first=first, at_once=saves or stopping)
                if saves:
                    self.save()
                if stopping and not last:
                    break
                self.heartbeat.report_progress()
        self.heartbeat.report_progress(saving=True)
        self.checkpoints.finish()
        if self.step_number < run.steps:
            who = self.stop.signal or "a signal to another process"
            done = "saved" if run.save else "stopped without saving"
            self.say(f"{who}: {done} after step {self.step_number:,}{self.of_stage}")
        return self.step_number == run.steps

    def step(self, batch: Batch) -> Update:
        """One update of the parameters; on a GPU it may still be running when this returns."""
        rate = rate_at(self.schedule, self.step_number, self.settings.steps)
        set_rate(self.optimizer, rate)
        micro_batches = batch.split(max(1, self.settings.micro_batch_tokens // batch.context))
        loss = mean_over_processes(self._accumulate_gradients(micro_batches), self.place)
        parameters = [parameter for parameter in self.objective.trained if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        take = partial(take_step, self.optimizer, parameters, norm, self.schedule.clip_norm)
        update = Update(self.step_number + 1, batch, micro_batches, rate, *send(loss, full_norm))
        if update.under_way and full_norm is norm:
            # The host reads loss and norm only during the next step, so the device itself skips an update that is not
            # finite, and all updates after it.
            self._skipped = self._skipped | ~(loss.isfinite() & full_norm.isfinite())
            take(unless=self._skipped)
        else:
            self._numbers_of(update)
            take()
        self.optimizer.zero_grad(set_to_none=True)
        return update

    def log(self, update: Update, *, first: bool, at_once: bool) -> None:
        """Writes the metrics of a step, and shows them every `log_every` steps.

        On a GPU most are read and written after the next step has begun.

        Args:
            first: whether it is the first of this process; its loss is shown as soon as it is there.
            at_once: whether its numbers are to be read now, before a checkpoint or the end.
        """
        run, waiting, self._waiting = self.settings, self._waiting, None
        if waiting is not None:
            self._write(waiting.step, self._numbers_of(waiting))
        shows = self.step_number % run.log_every == 0 or self.step_number == run.steps
        evaluates = self.objective.evaluates and run.evaluates(self.step_number)
        if update.under_way and not (first or at_once or shows or evaluates):
            self._waiting = update
            self.progress.step(self.step_number, None)
            return
        numbers = self._numbers_of(update)
        line = f"loss {numbers['loss']:.4f}" if first else None
        if shows:
            speed, line = self._speed(numbers["loss"])
            numbers |= speed | self.objective.details(update.batch)
        if evaluates:
            numbers["heldout_loss"] = self.objective.evaluate()
            self.say(f"step {self.step_number:,}: held-out loss {numbers['heldout_loss']:.4f}")
        if first or shows or evaluates:
            # The next number is without start-up, such as compilation, and without what was measured here.
            self._throughput.read()
        self._write(update.step, numbers)
        self.progress.step(self.step_number, line)

    def save(self) -> None:
        """Starts to write a checkpoint."""
        self.prepare_to_save()
        progress = {"loader": self.loader.state_dict(), "config": self.record}
        self.checkpoints.save(self.step_number, self.objective.module, self.optimizer, progress)

    def prepare_to_save(self) -> None:
        """Before the model is saved, here or elsewhere: it must be finite, and its metrics on disk.

        A training that is resumed from there would not write the metrics of earlier steps again.
        """
        of_all = from_all_processes(nonfinite_parameters(self.objective.model), self.place)
        if found := sorted({name for names in of_all for name in names}):
            raise NonFiniteLossError(
                f"step {self.step_number}{self.of_stage} left {', '.join(found[:8])} with values that are not finite. "
                f"No checkpoint was written; the last one is in {self.folder / CHECKPOINTS}"
            )
        self.heartbeat.report_progress(saving=True)
        for writer in self.writers:
            writer.flush()

    def _resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is None and (self.folder / EXPORT).exists():
            # Starting from the beginning would replace it.
            raise UserError(
                f"{self.folder} has a trained model, but no checkpoint to resume from: choose another folder"
            )
        if newest is None:
            self.say("no checkpoint to resume from: starting from the beginning")
            return
        path, content = newest
        step, progress = content["step"], content["progress"]
        if step > self.settings.steps:
            raise ArgumentError("steps", f"must be at least the {step:,} of {path}, got {self.settings.steps:,}")
        _check_same_model(progress["config"]["model"], self.record["model"], path)
        self.loader.load_state_dict(progress["loader"])
        self.checkpoints.load(path, self.objective.module, self.optimizer)
        self.step_number = step
        self.say(f"resumed from {path}")

    def _make_writers(self) -> Iterator[Writer]:
        """Created one by one, so that the earlier ones are closed if the next one fails."""
        if not self.place.first:
            return
        yield JsonLines(self.folder / METRICS_FILE, self.step_number)
        if self.settings.tensorboard:
            yield TensorBoard(self.folder / TENSORBOARD, self.step_number)
        if self.settings.wandb:
            yield WeightsAndBiases(self.settings.wandb, self.folder, self.record)

    def _accumulate_gradients(self, micro_batches: list[Batch]) -> Tensor:
        """Runs forward and backward passes of all micro-batches, and returns the loss of the batch."""
        rows = sum(micro_batch.rows for micro_batch in micro_batches)
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            self.heartbeat.report_progress()
            with gradient_sync(self.objective.module, last=number == len(micro_batches) - 1):
                # Weighted by rows, of which all processes have equally many.
                losses.append(self.objective.backward(micro_batch.to(self.place.device), micro_batch.rows / rows))
        return torch.stack(losses).sum()

    def _numbers_of(self, update: Update) -> dict[str, float]:
        """Loss, gradient norm and learning rate, once the device has them; raises if they are not finite."""
        loss, norm = update.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._raise_nonfinite(loss, norm, update)
        return {"loss": loss, "gradient_norm": norm, "learning_rate": update.rate}

    def _speed(self, loss: float) -> tuple[dict[str, float], str]:
        """Throughput and memory since the last call, as metrics, and with the loss as a line."""
        rate = self._throughput.read()
        numbers, line = {"tokens_per_second": rate}, f"loss {loss:.4f}  {rate:,.0f} tokens/s"
        peak, flops = peak_flops(self.place.device), self.objective.flops_per_token
        if peak is not None and flops is not None:
            numbers["utilisation"] = rate * flops / peak / self.place.world_size
            line += f"  MFU {numbers['utilisation']:.1%}"
        if self.place.device.type == "cuda":
            numbers["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            line += f"  {numbers['memory_gib']:.1f} GiB"
        return numbers, line

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, numbers)

    def _raise_nonfinite(self, loss: float, norm: float, update: Update) -> None:
        def repeat() -> None:
            for micro_batch in update.micro_batches:
                self.objective.loss(micro_batch.to(self.place.device))

        if update.under_way:
            # The gradients in memory may be those of a later step.
            self.optimizer.zero_grad(set_to_none=True)
            self._accumulate_gradients(update.micro_batches)
        # From every process: the batch of any one of them may be the cause.
        found = find_nonfinite(self.objective.model, repeat), update.batch.document_ids.tolist()
        seen = from_all_processes(found, self.place)
        offending = list(dict.fromkeys(name for names, _ in seen for name in names))
        documents = sorted({document for _, ids in seen for document in ids})
        names = ", ".join(self.loader.dataset.document_name(document) for document in documents[:3])
        raise NonFiniteLossError(
            f"step {update.step}{self.of_stage}: the loss is {loss} and the gradient's norm {norm}. Not finite: "
            f"{', '.join(offending[:8]) or 'nothing when the step is repeated'}. Documents of this batch: "
            f"{_abbreviated(documents)} ({names}{', …' if len(documents) > 3 else ''}). Parameters are as before the "
            f"step; the last checkpoint is in {self.folder / CHECKPOINTS}"
        )


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Excludes the modules and graphs that exist by now from garbage collection.

    Traversing them takes longer than the host is ahead of the device.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_same_model(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    if missing := [name for name in wanted if name not in saved]:
        raise UserError(f"{path} lacks {', '.join(missing)} of its model's config")
    for name, value in wanted.items():
        if name not in EXECUTION_OPTIONS and saved[name] != value:
            raise ArgumentError(name, f"must be that of {path}, {saved[name]!r}; got {value!r}")


def _abbreviated(numbers: list[int], limit: int = 32) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return shown if len(numbers) <= limit else f"{shown} and {len(numbers) - limit:,} more"
