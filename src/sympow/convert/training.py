"""The training loop of one stage: batches, updates, metrics, checkpoints, and a stop on signals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sympow.convert.config import ConvertConfig
from sympow.convert.objectives import Objective
from sympow.convert.stages import Stage
from sympow.data.dataset import TokenDataset
from sympow.data.loader import Batch, Loader
from sympow.train.checkpoint import Checkpoints
from sympow.train.config import OptimizerConfig
from sympow.train.distributed import Place
from sympow.train.metrics import JsonLines, Progress, TensorBoard, Writer
from sympow.train.monitoring import Throughput, nonfinite_parameters
from sympow.train.optimizer import make_optimizer, send, set_rate, take_step
from sympow.train.run_folder import CHECKPOINTS, METRICS_FILE
from sympow.train.signals import StopRequest
from sympow.train.trainer import NonFiniteLossError

KEEP = 2


def make_loader(stage: Stage, config: ConvertConfig, dataset: TokenDataset, *, pin_memory: bool = False) -> Loader:
    """The batches of a stage.

    Raises:
        ValueError: the dataset has too little text for one batch.
    """
    return Loader(
        dataset,
        stage.context,
        config.execution.batch_tokens // stage.context,
        short=config.text.short,
        seed=stage.seed,
        pin_memory=pin_memory,
    )


class StageTraining:
    """Trains a student for one stage.

    Args:
        stage: the stage.
        config: settings of the conversion.
        folder: folder of the stage, for metrics and checkpoints.
        student: model to train.
        objective: loss of the stage.
        trainable: parameters of the student to train; all others are frozen.
        dataset: documents to train on.
        place: the device.
    """

    def __init__(
        self,
        stage: Stage,
        config: ConvertConfig,
        folder: Path,
        student: nn.Module,
        objective: Objective,
        trainable: list[nn.Parameter],
        dataset: TokenDataset,
        place: Place,
    ) -> None:
        self.stage, self.config, self.folder, self.place = stage, config, folder, place
        self.student, self.objective = student, objective
        self.steps = stage.steps(config.execution.batch_tokens)
        recipe = config.recipe
        self.schedule = OptimizerConfig(
            learning_rate=stage.rate,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            clip_norm=recipe.clip_norm,
            warmup_steps=round(recipe.warmup * self.steps),
            schedule="cosine",
            final_rate=recipe.final_rate,
        )
        student.requires_grad_(False)
        for parameter in trainable:
            parameter.requires_grad_(True)
        self.trainable = trainable
        self.optimizer = make_optimizer(student, self.schedule)
        self.loader = make_loader(stage, config, dataset, pin_memory=place.device.type == "cuda")
        self.step_number = 0
        self.skipped = torch.zeros((), dtype=torch.bool, device=place.device)

    def run(self, stop: StopRequest) -> bool:
        """Trains from the newest checkpoint, or from the start; returns whether the stage is complete (not stopped)."""
        execution = self.config.execution
        with ExitStack() as at_end:
            progress = at_end.enter_context(Progress(self.steps, quiet=False))
            checkpoints = Checkpoints(self.folder / CHECKPOINTS, KEEP, self.place, progress.say)
            at_end.enter_context(checkpoints)
            self._resume(checkpoints, progress)
            writers = []
            for writer in self._make_writers():
                at_end.callback(writer.close)
                writers.append(writer)
            progress.begin(self.step_number)
            throughput = Throughput()
            waiting: _Sent | None = None
            for batch in islice(self.loader, self.steps - self.step_number):
                sent = self._step(batch)
                self.step_number += 1
                throughput.count(execution.batch_tokens)
                if waiting is not None:
                    # The loss of the last step is read while the device computes the next one.
                    self._write(writers, waiting.step, self._numbers(waiting))
                waiting = sent
                last = bool(stop) or self.step_number == self.steps
                saves = bool(stop) or (execution.save_every and self.step_number % execution.save_every == 0)
                line = None
                if last or saves or self.step_number % execution.log_every == 0:
                    numbers, waiting = self._numbers(sent), None
                    numbers |= {name: float(value) for name, value in self.objective.details().items()}
                    numbers["tokens_per_second"] = throughput.read()
                    line = f"loss {numbers['loss']:.4f}  {numbers['tokens_per_second']:,.0f} tokens/s"
                    if self.place.device.type == "cuda":
                        numbers["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                        line += f"  {numbers['memory_gib']:.1f} GiB"
                    self._write(writers, self.step_number, numbers)
                progress.step(self.step_number, line)
                checkpoints.poll()
                if saves and self.step_number < self.steps:
                    self._save(checkpoints, writers)
                    throughput.restart()
                if stop and self.step_number < self.steps:
                    progress.say(f"{stop.signal}: saved after step {self.step_number:,} of stage {self.stage.name}")
                    return False
            for writer in writers:
                writer.flush()
            self._check_finite()
        return True

    def _step(self, batch: Batch) -> _Sent:
        """One update of the parameters; on a GPU it may still be running when this returns."""
        rate = self.schedule.rate_at(self.step_number, self.steps)
        set_rate(self.optimizer, rate)
        micro_batches = batch.split(max(1, self.config.execution.micro_batch_tokens // batch.context))
        losses = [
            self.objective.backward(micro_batch.to(self.place.device), micro_batch.rows / batch.rows)
            for micro_batch in micro_batches
        ]
        loss = torch.stack(losses).sum()
        parameters = [parameter for parameter in self.trainable if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        sent = _Sent(self.step_number + 1, rate, *send(loss, norm))
        clip = self.schedule.clip_norm
        if sent.ready is None:
            self._numbers(sent)
            take_step(self.optimizer, parameters, norm, clip)
        else:
            # The host reads loss and norm later, so the device itself skips an update that is not finite, and all later
            # ones.
            self.skipped = self.skipped | ~(loss.isfinite() & norm.isfinite())
            take_step(self.optimizer, parameters, norm, clip, unless=self.skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return sent

    def _numbers(self, sent: _Sent) -> dict[str, float]:
        """Loss, gradient norm and learning rate, once the device has them; raises if they are not finite."""
        if sent.ready is not None:
            sent.ready.synchronize()
        loss, norm = sent.numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {sent.step} of stage {self.stage.name}: the loss is {loss} and the gradient's norm {norm}. "
                f"Choose a smaller {self.stage.kind}_rate in another folder; the last checkpoint is in "
                f"{self.folder / CHECKPOINTS}"
            )
        return {"loss": loss, "gradient_norm": norm, "learning_rate": sent.rate}

    def _resume(self, checkpoints: Checkpoints, progress: Progress) -> None:
        newest = checkpoints.newest()
        if newest is None:
            return
        path, content = newest
        if content["step"] > self.steps:
            raise ValueError(
                f"{path} is of step {content['step']:,}, and stage {self.stage.name} has {self.steps:,} steps"
            )
        self.loader.load_state_dict(content["progress"]["loader"])
        checkpoints.load(path, self.student, self.optimizer)
        self.step_number = content["step"]
        progress.say(f"resumed from {path}")

    def _save(self, checkpoints: Checkpoints, writers: list[Writer]) -> None:
        self._check_finite()
        # Before the checkpoint: a resumed run does not write the metrics of earlier steps again.
        for writer in writers:
            writer.flush()
        config = {**asdict(self.config), "model": asdict(self.config.swap)}
        checkpoints.save(
            self.step_number, self.student, self.optimizer, {"loader": self.loader.state_dict(), "config": config}
        )

    def _check_finite(self) -> None:
        if found := nonfinite_parameters(self.student):
            raise NonFiniteLossError(
                f"step {self.step_number} of stage {self.stage.name} left {', '.join(found[:8])} with values that are "
                f"not finite; the last checkpoint is in {self.folder / CHECKPOINTS}"
            )

    def _make_writers(self) -> Iterator[Writer]:
        """The writers of metrics; a generator, so that the caller can close the first if the second fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        yield JsonLines(self.folder / METRICS_FILE, self.step_number)
        if self.config.execution.tensorboard:
            yield TensorBoard(self.folder / "tensorboard", self.step_number)

    def _write(self, writers: list[Writer], step: int, numbers: dict[str, float]) -> None:
        for writer in writers:
            writer.write(step, numbers)


class _Sent:
    """Loss and gradient norm of a step, while they are copied to the host."""

    def __init__(self, step: int, rate: float, numbers: Tensor, ready: Any) -> None:
        self.step, self.rate, self.numbers, self.ready = step, rate, numbers, ready
