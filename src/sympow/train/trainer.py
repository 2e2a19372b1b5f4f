"""The training loop, to be read from top to bottom: `train` sets a run up, `_Run.step` makes one update."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sympow.data.dataset import TokenDataset
from sympow.data.loader import Batch, Loader
from sympow.data.opening import open_dataset
from sympow.extras import require
from sympow.files import write_atomically
from sympow.invocation import command_line
from sympow.model.accounting import check_fits
from sympow.model.config import WAYS_TO_COMPUTE
from sympow.model.gpt import GPT
from sympow.model.storage import save_model
from sympow.train.checkpoint import Checkpoints
from sympow.train.config import TrainConfig
from sympow.train.distributed import (
    Place,
    any_process,
    check_same,
    from_all_processes,
    last_of_batch,
    make_grid,
    mean_over_processes,
    process_group,
    share,
)
from sympow.train.heartbeat import Watch
from sympow.train.introspection import find_nonfinite, gate_and_rotation_metrics, nonfinite_parameters
from sympow.train.metrics import JsonLines, TensorBoard, WeightsAndBiases, Writer
from sympow.train.objective import Objective, compile_blocks, recompute_blocks
from sympow.train.optimizer import Update, make_optimizer, send, set_rate, set_up_rotations, take_step
from sympow.train.progress import Progress
from sympow.train.provenance import TrainedOn
from sympow.train.run_folder import CHECKPOINTS, CONFIG_FILE, EXPORT, METRICS_FILE, claimed_folder
from sympow.train.signals import StopRequest, stop_on_signals
from sympow.train.throughput import Clock, peak_operations, training_operations

# Tokens to look at gates and rotations with.
SAMPLE_TOKENS = 2_048


class NonFiniteLossError(ArithmeticError):
    """A loss or gradient that is not a number, with what is known about it."""


def train(
    config: TrainConfig,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    device: str | None = None,
    dataset: TokenDataset | None = None,
) -> Path:
    """Trains a model and writes all of it into one folder.

    config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, and at the end model/ (safetensors, tokenizer). Under
    torchrun, every process calls this with the same arguments.

    Args:
        config: the run.
        out: the folder; new, unless resumed. None: one under runs/, named by the time. No other run can use it before
            this one ends.
        resume: go on from the newest whole checkpoint in it, or start anew if there is none.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        dataset: what to train on, instead of what the config names.

    Returns:
        the folder.

    Raises:
        NonFiniteLossError: the loss was not a number; the last checkpoint is from before.
        LostProcessError: another process of the run is gone; the message names it.
    """
    if resume and out is None:
        raise ValueError("out must name the run to resume, got None")
    with ExitStack() as held:
        place = held.enter_context(process_group(device))
        check_same({**config.settings(), "resume": resume, "device": place.device.type}, place)
        folder = held.enter_context(claimed_folder(None if out is None else Path(out), resume=resume, place=place))
        named = dataset is None
        dataset = dataset or open_dataset(config.data.data)
        check_same({"data": dataset.fingerprint}, place)
        config = replace(config, model=replace(config.model, vocab_size=dataset.vocab_size))
        stop = held.enter_context(stop_on_signals())
        with _fast_float32(config, place), Watch(place, stop, config.run.hang_after) as watch:
            _Run(config, folder, place, dataset, watch, named=named).run(resume, stop)
    return folder


class _Run:
    def __init__(
        self, config: TrainConfig, out: Path, place: Place, dataset: TokenDataset, watch: Watch, *, named: bool
    ) -> None:
        self.config, self.out, self.place, self.dataset, self.watch = config, out, place, dataset, watch
        self.named = named  # whether the dataset is what the config names
        sharded = config.run.context_parallel > 1
        self.grid = make_grid(place, config.run.context_parallel)
        if config.batch_rows % self.grid.data_size:
            raise ValueError(
                f"batch_tokens must hold as many sequences for each of {self.grid.data_size} "
                f"{'groups of ' if sharded else ''}processes; "
                f"got {config.run.batch_tokens:,}, {config.batch_rows:,} sequences of {config.data.context:,}"
            )
        # Now, although it is for later: what is missing should be said before hours of training.
        _check_extras(config)
        self.tokenizer = dataset.load_tokenizer() if config.run.save else None
        check_fits(config.model, place.device, place.world_size if config.run.parallel == "fsdp" else 1)
        torch.manual_seed(config.run.seed)
        self.model = GPT(config.model).to(place.device)
        set_up_rotations(self.model, config.optimizer)
        if config.run.recompute:
            recompute_blocks(self.model)
        if config.run.compile:
            compile_blocks(self.model, sharded=sharded)
        self.dtype = torch.bfloat16 if config.run.precision == "bf16" else None
        self.shared = share(Objective(self.model, config.run.loss_tokens, self.dtype), place, config.run.parallel)
        self.optimizer = make_optimizer(self.shared, config.optimizer)
        self.loader = self._make_loader(dataset, config.batch_rows, shuffle=True)
        # For the same reason.
        self.heldout = self._open_heldout() if config.run.evaluate_every else None
        self.step_number = 0
        # Whether a step was not taken because its loss or gradients were not finite; the device's own record.
        self.refused = torch.zeros((), dtype=torch.bool, device=place.device)

    def run(self, resume: bool, stop: StopRequest) -> None:
        """All steps, or as many as it is let."""
        run = self.config.run
        with ExitStack() as at_end:
            progress = at_end.enter_context(Progress(run.steps, quiet=not self.place.first))
            self._say = progress.say
            checkpoints = Checkpoints(self.out / CHECKPOINTS, run.keep, self.place, progress.say)
            at_end.enter_context(checkpoints)
            if resume:
                self._resume(checkpoints)
            writers = []
            for writer in self._make_writers():
                at_end.callback(writer.close)
                writers.append(writer)
            if self.place.first:
                # Makes the folder one to resume, and so comes last.
                write_atomically(self.out / CONFIG_FILE, self.config.to_yaml().encode())
            self._describe()
            progress.begin(self.step_number)
            # The modules and graphs there are by now stay: to look through them for garbage would stop the host for
            # longer than it is ahead of the device.
            gc.collect()
            gc.freeze()
            at_end.callback(gc.unfreeze)
            clock = Clock()
            waiting: Update | None = None
            # The loader's position is that of the batches taken, which are those of the steps made.
            for batch in islice(self.loader, run.steps - self.step_number):
                self.watch.mark()
                update = self.step(batch)
                self.step_number += 1
                self.watch.mark()
                clock.count(run.batch_tokens)
                if waiting is not None:
                    # While the device is at the next one.
                    self._write(waiting.step, self._numbers_of(waiting), writers)
                    waiting = None
                checkpoints.poll()
                stopping = any_process(bool(stop), self.place)
                last = stopping or self.step_number == run.steps
                saves = run.save and (last or (run.save_every and self.step_number % run.save_every == 0))
                if update.under_way and not (last or saves or self._logs() or self._evaluates()):
                    waiting = update
                    progress.step(self.step_number, None)
                    continue
                progress.step(self.step_number, self._log(update, clock, writers))
                if saves:
                    self._save(checkpoints, writers)
                if stopping:
                    self.watch.mark(saves=True)
                    checkpoints.finish()
                    who = stop.signal or "a signal to another process"
                    done = "saved" if run.save else "stopped without saving"
                    progress.say(f"{who}: {done} after step {self.step_number:,}")
                    if run.save:
                        progress.say(f"go on with: {command_line('train', '--resume', '--out', self.out)}")
                    break
                self.watch.mark()
            self.watch.mark(saves=True)
            checkpoints.finish()
            if run.save:
                self._export()

    def step(self, batch: Batch) -> Update:
        """One update of the parameters; on a GPU perhaps not at its end when this returns."""
        rate = self.config.optimizer.rate_at(self.step_number, self.config.run.steps)
        set_rate(self.optimizer, rate)
        parts = batch.split(max(1, self.config.run.micro_batch_tokens // batch.context))
        loss = mean_over_processes(self._differentiate(parts), self.place)
        parameters = [parameter for parameter in self.shared.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        take = partial(take_step, self.optimizer, parameters, norm, self.config.optimizer.clip_norm)
        update = Update(self.step_number + 1, batch, parts, rate, *send(loss, full_norm))
        if update.under_way and full_norm is norm:
            # The device decides by itself whether to move: the host will see the numbers when it is further on. Once
            # it did not, it stays where it is.
            self.refused = self.refused | ~(loss.isfinite() & full_norm.isfinite())
            take(unless=self.refused)
        else:
            self._numbers_of(update)
            take()
        self.optimizer.zero_grad(set_to_none=True)
        return update

    def _differentiate(self, parts: list[Batch]) -> Tensor:
        """Adds a batch's gradients to the parameters', and returns its loss."""
        rows = sum(part.rows for part in parts)
        losses = []
        for number, part in enumerate(parts):
            self.watch.mark()
            on_device = part.to(self.place.device)
            with last_of_batch(self.shared, last=number == len(parts) - 1):
                # A part counts by its share of the rows; processes have equally many.
                loss = self._loss(on_device) * (part.rows / rows)
                self.watch.mark()
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _numbers_of(self, update: Update) -> dict[str, float]:
        """Loss, gradient norm and learning rate, once they are known; stops if they are not numbers."""
        loss, norm = update.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse(loss, norm, update)
        return {"loss": loss, "gradient_norm": norm, "learning_rate": update.rate}

    def _loss(self, batch: Batch) -> Tensor:
        """The mean over a batch; where processes share its sequences, a number whose mean over them it is."""
        shards = self.grid.shards(batch)
        if shards is None:
            return self._loss_of_all(batch)
        loss: Tensor = self.shared(shards.take(batch.inputs), shards.take(batch.targets), shards=shards)
        return loss * (shards.length * shards.size / shards.total)

    def _loss_of_all(self, batch: Batch) -> Tensor:
        """The mean over a batch whose sequences this process has from end to end."""
        loss: Tensor = self.shared(batch.inputs, batch.targets, batch.cu_seqlens)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out documents, the same ones every time."""
        heldout = self.heldout or self._open_heldout()
        heldout.load_state_dict({**heldout.state_dict(), "epoch": 0, "batch": 0})
        rows = max(1, self.config.run.evaluate_tokens // self.config.data.context // self.grid.data_size)
        losses = []
        for batch in islice(heldout, rows):
            self.watch.mark()
            losses.append(self._loss(batch.to(self.place.device)))
        return mean_over_processes(torch.stack(losses).mean(), self.place).item()

    def _open_heldout(self) -> Loader:
        """A row at a time for every process, or for those that share it."""
        dataset = open_dataset(self.config.data.data, "heldout")
        return self._make_loader(dataset, self.grid.data_size, shuffle=False)

    def _make_loader(self, dataset: TokenDataset, rows: int, *, shuffle: bool) -> Loader:
        return Loader(
            dataset,
            self.config.data.context,
            rows,
            short=self.config.data.short,
            seed=self.config.run.seed,
            shuffle=shuffle,
            rank=self.grid.data_rank,
            world_size=self.grid.data_size,
            pin_memory=self.place.device.type == "cuda",
            epochs=None if shuffle else 1,
        )

    def _resume(self, checkpoints: Checkpoints) -> None:
        newest = checkpoints.newest()
        if newest is None:
            self._say("no checkpoint to resume from: starting from the beginning")
            return
        path, content = newest
        step, progress = content["step"], content["progress"]
        if step > self.config.run.steps:
            raise ValueError(f"steps must be at least the {step:,} of {path}, got {self.config.run.steps:,}")
        _check_same_model(progress["config"]["model"], asdict(self.config.model), path)
        self.loader.load_state_dict(progress["loader"])
        checkpoints.load(path, self.shared, self.optimizer)
        self.step_number = step
        self._say(f"resumed from {path}")

    def _save(self, checkpoints: Checkpoints, writers: list[Writer]) -> None:
        """Numbers first: a run goes on after its checkpoint, and would lack those of the steps before."""
        shares = from_all_processes(nonfinite_parameters(self.model), self.place)
        if found := sorted({name for share in shares for name in share}):
            raise NonFiniteLossError(
                f"step {self.step_number} left {', '.join(found[:8])} with numbers that are not finite. No checkpoint "
                f"was made of it; the last one is in {self.out / CHECKPOINTS}"
            )
        self.watch.mark(saves=True)
        for writer in writers:
            writer.flush()
        progress = {"loader": self.loader.state_dict(), "config": asdict(self.config)}
        checkpoints.save(self.step_number, self.shared, self.optimizer, progress)

    def _logs(self) -> bool:
        return self.step_number % self.config.run.log_every == 0 or self.step_number == self.config.run.steps

    def _evaluates(self) -> bool:
        every = self.config.run.evaluate_every
        return bool(every) and self.step_number % every == 0

    def _write(self, step: int, numbers: dict[str, float], writers: list[Writer]) -> None:
        for writer in writers:
            writer.write(step, numbers)

    def _log(self, update: Update, clock: Clock, writers: list[Writer]) -> str | None:
        numbers = self._numbers_of(update)
        line = None
        if self._logs():
            rate = clock.read()
            numbers = numbers | {"tokens_per_second": rate}
            line = f"loss {numbers['loss']:.4f}  {rate:,.0f} tokens/s"
            peak = peak_operations(self.place.device)
            if peak is not None:
                used = rate * training_operations(self.config.model, self.config.data.context)
                numbers["utilisation"] = used / peak / self.place.world_size
                line += f"  {numbers['utilisation']:.1%} of peak"
            if self.place.device.type == "cuda":
                numbers["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                line += f"  {numbers['memory_gib']:.1f} GiB"
            sample = _first_tokens(update.batch, SAMPLE_TOKENS).to(self.place.device)
            numbers |= gate_and_rotation_metrics(self.model, lambda: self._loss_of_all(sample))
            clock.restart()
        if self._evaluates():
            numbers = numbers | {"heldout_loss": self.evaluate()}
            self._say(f"step {self.step_number:,}: held-out loss {numbers['heldout_loss']:.4f}")
            clock.restart()
        self._write(update.step, numbers, writers)
        return line

    def _make_writers(self) -> Iterator[Writer]:
        """One by one: if the next cannot be made, those before it are closed."""
        if not self.place.first:
            return
        run = self.config.run
        yield JsonLines(self.out / METRICS_FILE, self.step_number)
        if run.tensorboard:
            yield TensorBoard(self.out / "tensorboard", self.step_number)
        if run.wandb:
            yield WeightsAndBiases(run.wandb, self.out, asdict(self.config))

    def _describe(self) -> None:
        summary, data = self.loader.summary, self.config.data
        together = self.config.run.context_parallel
        where = f"{self.place.world_size} × {self.place.device.type}"
        where += f", {together} to a sequence" if together > 1 else ""
        self._say(
            f"{self.model.count_parameters():,} parameters on {where}; "
            f"{self.dataset.name}: {summary.tokens:,} tokens in {summary.documents:,} documents, "
            f"{summary.batches:,} batches of {self.config.run.batch_tokens:,} tokens at context {data.context:,}"
        )
        left_out = {
            "in documents shorter than the context": summary.tokens_in_documents_dropped,
            "in tails of documents": summary.tokens_in_tails_dropped,
            "too few for a row": summary.tokens_too_few_for_a_row,
            "in rows too few for a batch": summary.tokens_in_rows_left_over,
        }
        if any(left_out.values()):
            parts = ", ".join(f"{tokens:,} {where}" for where, tokens in left_out.items() if tokens)
            self._say(f"left out each epoch: {parts} tokens")

    def _refuse(self, loss: float, norm: float, update: Update) -> None:
        def again() -> None:
            for part in update.parts:
                self._loss(part.to(self.place.device))

        if update.under_way:
            # What gradients there are may be those of another step.
            self.optimizer.zero_grad(set_to_none=True)
            self._differentiate(update.parts)
        # Of every process: what one of them met stops all.
        seen = from_all_processes((find_nonfinite(self.model, again), update.batch.document_ids.tolist()), self.place)
        offending = list(dict.fromkeys(name for names, _ in seen for name in names))
        documents = sorted({document for _, ids in seen for document in ids})
        names = ", ".join(self.dataset.document_name(document) for document in documents[:3])
        raise NonFiniteLossError(
            f"step {update.step}: the loss is {loss} and the gradient's norm {norm}. Not finite: "
            f"{', '.join(offending[:8]) or 'nothing that can be seen again'}. Documents of this batch: "
            f"{_shortened(documents)} ({names}{', …' if len(documents) > 3 else ''}). Parameters are as before the "
            f"step; the last checkpoint is in {self.out / CHECKPOINTS}"
        )

    def _export(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.shared, options=options)
        if self.place.first:
            weights = {name.removeprefix("model."): x for name, x in state.items() if isinstance(x, Tensor)}
            save_model(self.out / EXPORT, self.config.model, weights)
            assert self.tokenizer is not None
            self.tokenizer.save(self.out / EXPORT)
            TrainedOn.of_run(self.config.data, self.dataset, self.tokenizer, named=self.named).save(self.out / EXPORT)
        dist.barrier()


@contextmanager
def _fast_float32(config: TrainConfig, place: Place) -> Iterator[None]:
    """With bf16 on a GPU, lets what is left in float32 (gates, rotations) round its operands to TF32: still finer."""
    before = torch.get_float32_matmul_precision()
    if config.run.precision == "bf16" and place.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check_extras(config: TrainConfig) -> None:
    """Asks for the optional packages that a run comes to need, before it is begun."""
    needed = {"yaml": "train"}
    if config.run.save:
        needed["safetensors"] = "train"
    if config.run.tensorboard:
        needed["tensorboard"] = "train"
    if config.run.wandb:
        needed["wandb"] = "wandb"
    for module, extra in needed.items():
        require(module, extra)


def _check_same_model(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for name, value in wanted.items():
        if name not in WAYS_TO_COMPUTE and saved.get(name) != value:
            raise ValueError(f"{name} must be that of {path}, {saved.get(name)!r}; got {value!r}")


def _first_tokens(batch: Batch, tokens: int) -> Batch:
    """The beginning of a batch's first row."""
    row = batch.split(1)[0]
    tokens = min(tokens, batch.context)
    bounds = row.cu_seqlens
    if bounds is not None:
        bounds = torch.cat([bounds[bounds < tokens], bounds.new_tensor([tokens])])
    return replace(row, inputs=row.inputs[:, :tokens], targets=row.targets[:, :tokens], cu_seqlens=bounds)


def _shortened(numbers: list[int], limit: int = 32) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return shown if len(numbers) <= limit else f"{shown} and {len(numbers) - limit:,} more"
