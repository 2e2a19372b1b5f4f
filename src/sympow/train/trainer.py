"""The training loop: `train` sets up a run, `_Run.run` loops over steps, `_Run.step` makes one update."""

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
from sympow.data.open import open_dataset
from sympow.data.tokenizer import Tokenizer
from sympow.extras import require
from sympow.files import write_atomically
from sympow.invocation import command_line
from sympow.model.accounting import check_fits
from sympow.model.config import EXECUTION_OPTIONS
from sympow.model.gpt import GPT
from sympow.model.storage import save_model
from sympow.train.checkpoint import Checkpoints
from sympow.train.config import TrainConfig
from sympow.train.distributed import (
    Place,
    any_process,
    check_same,
    from_all_processes,
    make_mesh,
    mean_over_processes,
    process_group,
)
from sympow.train.heartbeat import Heartbeat
from sympow.train.metrics import JsonLines, Progress, TensorBoard, WeightsAndBiases, Writer
from sympow.train.monitoring import (
    Throughput,
    find_nonfinite,
    gate_and_rotation_metrics,
    nonfinite_parameters,
    peak_flops,
    training_flops,
)
from sympow.train.optimizer import Update, make_optimizer, send, set_rate, set_up_rotations, take_step
from sympow.train.parallelize import (
    Objective,
    checkpoint_activations,
    compile_blocks,
    gradient_sync,
    parallelize,
)
from sympow.train.provenance import TrainedOn
from sympow.train.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EXPORT,
    METRICS_FILE,
    TENSORBOARD,
    Claim,
    claimed_folder,
)
from sympow.train.signals import StopRequest, stop_on_signals

# Tokens for the statistics of gates and rotations.
SAMPLE_TOKENS = 2_048


class NonFiniteLossError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the message names the batch and the modules."""


def train(
    config: TrainConfig,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    device: str | None = None,
    dataset: TokenDataset | None = None,
    heldout: TokenDataset | None = None,
) -> Path:
    """Trains a model and writes everything into one run folder.

    It holds config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, and at the end model/ (safetensors,
    tokenizer). Under torchrun, every process calls this with the same arguments.

    Args:
        config: the run.
        out: the run folder; new or empty, unless resumed. None: one under runs/, named by the time. It is locked until
            the run ends.
        resume: continue from the newest intact checkpoint in it, or start from the beginning if there is none.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        dataset: what to train on, instead of what the config names.
        heldout: what to evaluate on, instead of the held-out documents of what the config names. With `dataset`, an
            evaluation needs it; without it none is made by default.

    Returns:
        the folder.

    Raises:
        NonFiniteLossError: the loss or a gradient is not finite; the last checkpoint is from before.
        LostProcessError: another process of the run is dead or hangs; the message names it.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(f"config must be a TrainConfig, got {type(config).__name__}")
    if out == "":
        raise ValueError("out must name a folder, got ''")
    if resume and out is None:
        raise ValueError("out must name the run to resume, got None")
    for name, given in (("dataset", dataset), ("heldout", heldout)):
        _check_dataset(name, given)
    asked, named = bool(config.run.evaluate_every), dataset is None
    if asked and heldout is None and not named:
        raise ValueError(
            "heldout must be given with dataset to evaluate: the config names held-out documents of other data; got "
            f"None and an evaluate_every of {config.run.evaluate_every}"
        )
    if heldout is not None and config.run.evaluate_every == 0:
        raise ValueError("heldout must be None if evaluate_every is 0: nothing is evaluated")
    with ExitStack() as held:
        place = held.enter_context(process_group(device))
        check_same({**config.settings(), "resume": resume, "device": place.device.type}, place)
        claim = held.enter_context(claimed_folder(None if out is None else Path(out), resume=resume, place=place))
        if dataset is None:
            dataset = open_dataset(config.data.data)
        check_same({"data": dataset.fingerprint}, place)
        unevaluated = None
        # By default not for an address, which takes time to open.
        by_default = config.run.evaluate_every is None and named and "://" not in config.data.data
        if heldout is None and (asked or by_default):
            try:
                heldout = open_dataset(config.data.data, "heldout")
            except ValueError as error:
                if asked:
                    raise
                unevaluated = str(error)
        check_same({"heldout": None if heldout is None else heldout.fingerprint}, place)
        if heldout is not None:
            _check_same_tokens(dataset, heldout)
        config = replace(config, model=replace(config.model, vocab_size=dataset.vocab_size))
        stop = held.enter_context(stop_on_signals())
        with fast_float32(config.run.precision, place), Heartbeat(place, stop, config.run.hang_after) as heartbeat:
            training = _Run(config, claim, place, dataset, heldout, heartbeat, named=named, unevaluated=unevaluated)
            training.run(resume, stop)
    return claim.folder


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        claim: Claim,
        place: Place,
        dataset: TokenDataset,
        heldout: TokenDataset | None,
        heartbeat: Heartbeat,
        *,
        named: bool,
        unevaluated: str | None,
    ) -> None:
        self.config, self.claim, self.out = config, claim, claim.folder
        self.place, self.dataset, self.heartbeat = place, dataset, heartbeat
        self.named = named  # whether the dataset is what the config names
        self.unevaluated = unevaluated  # why there are no held-out losses
        sharded = config.run.context_parallel > 1
        self.mesh = make_mesh(place, config.run.context_parallel)
        if config.batch_rows % self.mesh.data_size:
            raise ValueError(
                f"batch_tokens must hold as many sequences for each of {self.mesh.data_size} "
                f"{'groups of ' if sharded else ''}processes; "
                f"got {config.run.batch_tokens:,}, {config.batch_rows:,} sequences of {config.data.context:,}"
            )
        # Checked before hours of training, although some are needed only at its end.
        _check_extras(config)
        self.tokenizer = _load_tokenizer(dataset) if config.run.save else None
        check_fits(config.model, place.device, place.world_size if config.run.parallel == "fsdp" else 1)
        torch.manual_seed(config.run.seed)
        self.model = GPT(config.model).to(place.device)
        set_up_rotations(self.model, config.optimizer)
        if config.run.recompute:
            checkpoint_activations(self.model)
        if config.run.compile:
            compile_blocks(self.model, sharded=sharded, packed=config.data.short == "pack")
        self.dtype = torch.bfloat16 if config.run.precision == "bf16" else None
        objective = Objective(self.model, config.run.loss_tokens, self.dtype)
        self.parallel_model = parallelize(objective, place, config.run.parallel)
        self.optimizer = make_optimizer(self.parallel_model, config.optimizer)
        groups = {"rank": self.mesh.data_rank, "world_size": self.mesh.data_size}
        self.loader = self._make_loader(dataset, config.batch_rows, **groups)
        # Made now for the same reason.
        self.heldout = None
        if heldout is not None:
            try:
                self.heldout = self._make_loader(heldout, 1, shuffle=False, epochs=1)
            except ValueError as error:
                self.unevaluated = f"{heldout.name} has {heldout.lengths.sum():,} tokens ({error})"
                if config.run.evaluate_every is not None:
                    raise ValueError(
                        f"evaluate_every needs more held-out text: {self.unevaluated}. Hold out more of it, train with "
                        "a shorter context, or do not evaluate"
                    ) from error
        self.step_number = 0
        # On the device: whether an update was skipped because its loss or gradients were not finite.
        self.skipped = torch.zeros((), dtype=torch.bool, device=place.device)

    def run(self, resume: bool, stop: StopRequest) -> None:
        """All steps, or those until a stop signal."""
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
                # Written last: a folder with this file can be resumed.
                write_atomically(self.out / CONFIG_FILE, self.config.to_yaml().encode())
            self._describe()
            begin = self.step_number
            progress.begin(begin)
            if begin == run.steps:
                progress.say(f"this run has finished its {run.steps:,} steps; more steps would continue it")
            # Excludes the modules and graphs that exist by now from garbage collection: traversing them takes longer
            # than the host is ahead of the device.
            gc.collect()
            gc.freeze()
            at_end.callback(gc.unfreeze)
            throughput = Throughput()
            waiting: Update | None = None
            # The loader's position counts the batches it has yielded, one for each step.
            for batch in islice(self.loader, run.steps - self.step_number):
                self.heartbeat.report_progress()
                update = self.step(batch)
                self.step_number += 1
                self.heartbeat.report_progress()
                self.claim.keep()
                throughput.count(run.batch_tokens)
                if waiting is not None:
                    # Read while the device computes the next step.
                    self._write(waiting.step, self._numbers_of(waiting), writers)
                    waiting = None
                checkpoints.poll()
                stopping = any_process(bool(stop), self.place)
                last = stopping or self.step_number == run.steps
                saves = run.save and (last or (run.save_every and self.step_number % run.save_every == 0))
                # Its loss is shown as soon as it is there.
                first = self.step_number == begin + 1
                if update.under_way and not (first or last or saves or self._logs() or self._evaluates()):
                    waiting = update
                    progress.step(self.step_number, None)
                    continue
                progress.step(self.step_number, self._log(update, throughput, writers, first))
                if first:
                    # Without start-up, such as compilation.
                    throughput.restart()
                if saves:
                    self._save(checkpoints, writers)
                if stopping:
                    self.heartbeat.report_progress(saving=True)
                    checkpoints.finish()
                    who = stop.signal or "a signal to another process"
                    done = "saved" if run.save else "stopped without saving"
                    progress.say(f"{who}: {done} after step {self.step_number:,}")
                    if run.save:
                        progress.say(f"continue with: {command_line('train', '--resume', '--out', self.out)}")
                    break
                self.heartbeat.report_progress()
            self.heartbeat.report_progress(saving=True)
            checkpoints.finish()
            if run.save:
                self._export()

    def step(self, batch: Batch) -> Update:
        """One update of the parameters; on a GPU it may still be running when this returns."""
        rate = self.config.optimizer.rate_at(self.step_number, self.config.run.steps)
        set_rate(self.optimizer, rate)
        micro_batches = batch.split(max(1, self.config.run.micro_batch_tokens // batch.context))
        loss = mean_over_processes(self._accumulate_gradients(micro_batches), self.place)
        parameters = [parameter for parameter in self.parallel_model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        take = partial(take_step, self.optimizer, parameters, norm, self.config.optimizer.clip_norm)
        update = Update(self.step_number + 1, batch, micro_batches, rate, *send(loss, full_norm))
        if update.under_way and full_norm is norm:
            # The host reads loss and norm only during the next step, so the device itself skips an update that is not
            # finite, and all updates after it.
            self.skipped = self.skipped | ~(loss.isfinite() & full_norm.isfinite())
            take(unless=self.skipped)
        else:
            self._numbers_of(update)
            take()
        self.optimizer.zero_grad(set_to_none=True)
        return update

    def _accumulate_gradients(self, micro_batches: list[Batch]) -> Tensor:
        """Runs forward and backward passes of all micro-batches, and returns the loss of the batch."""
        rows = sum(micro_batch.rows for micro_batch in micro_batches)
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            self.heartbeat.report_progress()
            on_device = micro_batch.to(self.place.device)
            with gradient_sync(self.parallel_model, last=number == len(micro_batches) - 1):
                # Weighted by rows, of which all processes have equally many.
                loss = self._loss(on_device) * (micro_batch.rows / rows)
                self.heartbeat.report_progress()
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _numbers_of(self, update: Update) -> dict[str, float]:
        """Loss, gradient norm and learning rate, once the device has them; raises if they are not finite."""
        loss, norm = update.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._raise_nonfinite(loss, norm, update)
        return {"loss": loss, "gradient_norm": norm, "learning_rate": update.rate}

    def _loss(self, batch: Batch) -> Tensor:
        """The mean over a batch; of sharded sequences, a number whose mean over the processes is that mean."""
        shards = self.mesh.shards(batch)
        if shards is None:
            return self._unsharded_loss(batch)
        loss: Tensor = self.parallel_model(shards.take(batch.inputs), shards.take(batch.targets), shards=shards)
        return loss * (shards.length * shards.size / shards.total)

    def _unsharded_loss(self, batch: Batch) -> Tensor:
        """The mean over a batch whose sequences are not sharded."""
        loss: Tensor = self.parallel_model(batch.inputs, batch.targets, batch.cu_seqlens)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out documents: the same ones every time, and for any number of processes."""
        assert self.heldout is not None
        self.heldout.load_state_dict({**self.heldout.state_dict(), "epoch": 0, "batch": 0})
        rows = islice(self.heldout, max(1, self.config.run.evaluated_tokens // self.config.data.context))
        total, count, rank = torch.zeros((), device=self.place.device), 0, self.mesh.data_rank
        while batches := list(islice(rows, self.mesh.data_size)):
            self.heartbeat.report_progress()
            # Of the last rows some processes have none. They repeat one that does not count: a forward pass of sharded
            # parameters needs all processes.
            counts = rank < len(batches)
            loss = self._loss(batches[rank if counts else 0].to(self.place.device))
            total += loss * counts
            count += len(batches)
        return mean_over_processes(total * self.mesh.data_size / count, self.place).item()

    def _make_loader(self, dataset: TokenDataset, rows: int, **how: Any) -> Loader:
        return Loader(
            dataset,
            self.config.data.context,
            rows,
            short=self.config.data.short,
            seed=self.config.run.seed,
            pin_memory=self.place.device.type == "cuda",
            **how,
        )

    def _resume(self, checkpoints: Checkpoints) -> None:
        newest = checkpoints.newest()
        if newest is None and (self.out / EXPORT).exists():
            # Starting from the beginning would replace it.
            raise ValueError(f"{self.out} has a trained model, but no checkpoint to resume from: choose another folder")
        if newest is None:
            self._say("no checkpoint to resume from: starting from the beginning")
            return
        path, content = newest
        step, progress = content["step"], content["progress"]
        if step > self.config.run.steps:
            raise ValueError(f"steps must be at least the {step:,} of {path}, got {self.config.run.steps:,}")
        _check_same_model(progress["config"]["model"], asdict(self.config.model), path)
        self.loader.load_state_dict(progress["loader"])
        checkpoints.load(path, self.parallel_model, self.optimizer)
        self.step_number = step
        self._say(f"resumed from {path}")

    def _save(self, checkpoints: Checkpoints, writers: list[Writer]) -> None:
        """Flushes metrics first: a resumed run would not write those of earlier steps again."""
        of_all = from_all_processes(nonfinite_parameters(self.model), self.place)
        if found := sorted({name for names in of_all for name in names}):
            raise NonFiniteLossError(
                f"step {self.step_number} left {', '.join(found[:8])} with values that are not finite. No checkpoint "
                f"was written; the last one is in {self.out / CHECKPOINTS}"
            )
        self.heartbeat.report_progress(saving=True)
        for writer in writers:
            writer.flush()
        progress = {"loader": self.loader.state_dict(), "config": asdict(self.config)}
        checkpoints.save(self.step_number, self.parallel_model, self.optimizer, progress)

    def _logs(self) -> bool:
        return self.step_number % self.config.run.log_every == 0 or self.step_number == self.config.run.steps

    def _evaluates(self) -> bool:
        return self.heldout is not None and self.config.run.evaluates(self.step_number)

    def _write(self, step: int, numbers: dict[str, float], writers: list[Writer]) -> None:
        for writer in writers:
            writer.write(step, numbers)

    def _log(self, update: Update, throughput: Throughput, writers: list[Writer], first: bool) -> str | None:
        numbers = self._numbers_of(update)
        line = f"loss {numbers['loss']:.4f}" if first else None
        if self._logs():
            rate = throughput.read()
            numbers = numbers | {"tokens_per_second": rate}
            line = f"loss {numbers['loss']:.4f}  {rate:,.0f} tokens/s"
            peak = peak_flops(self.place.device)
            if peak is not None:
                used = rate * training_flops(self.config.model, self.config.data.context)
                numbers["utilisation"] = used / peak / self.place.world_size
                line += f"  MFU {numbers['utilisation']:.1%}"
            if self.place.device.type == "cuda":
                numbers["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                line += f"  {numbers['memory_gib']:.1f} GiB"
            sample = _first_tokens(update.batch, SAMPLE_TOKENS).to(self.place.device)
            numbers |= gate_and_rotation_metrics(self.model, lambda: self._unsharded_loss(sample))
            throughput.restart()
        if self._evaluates():
            numbers = numbers | {"heldout_loss": self.evaluate()}
            self._say(f"step {self.step_number:,}: held-out loss {numbers['heldout_loss']:.4f}")
            throughput.restart()
        self._write(update.step, numbers, writers)
        return line

    def _make_writers(self) -> Iterator[Writer]:
        """Created one by one, so that the caller can close the earlier ones if the next one fails."""
        if not self.place.first:
            return
        run = self.config.run
        yield JsonLines(self.out / METRICS_FILE, self.step_number)
        if run.tensorboard:
            yield TensorBoard(self.out / TENSORBOARD, self.step_number)
        if run.wandb:
            yield WeightsAndBiases(run.wandb, self.out, asdict(self.config))

    def _describe(self) -> None:
        summary, data = self.loader.summary, self.config.data
        degree = self.config.run.context_parallel
        self._say(f"run folder: {self.out}")
        where = f"{self.place.world_size} × {self.place.device.type}"
        where += f", context parallel {degree}" if degree > 1 else ""
        self._say(
            f"{self.model.count_parameters():,} parameters on {where}; "
            f"{self.dataset.name}: {summary.tokens:,} tokens in {summary.documents:,} documents, "
            f"{summary.batches:,} batches of {self.config.run.batch_tokens:,} tokens at context {data.context:,}"
        )
        dropped = {
            "in documents shorter than the context": summary.tokens_in_documents_dropped,
            "in tails of documents": summary.tokens_in_tails_dropped,
            "too few for a row": summary.tokens_too_few_for_a_row,
            "in rows too few for a batch": summary.tokens_in_rows_left_over,
        }
        if any(dropped.values()):
            counts = ", ".join(f"{tokens:,} {where}" for where, tokens in dropped.items() if tokens)
            self._say(f"tokens dropped each epoch: {counts}")
        if self.unevaluated is not None:
            self._say(f"no held-out loss: {self.unevaluated}")

    def _raise_nonfinite(self, loss: float, norm: float, update: Update) -> None:
        def repeat() -> None:
            for micro_batch in update.micro_batches:
                self._loss(micro_batch.to(self.place.device))

        if update.under_way:
            # The gradients in memory may be those of a later step.
            self.optimizer.zero_grad(set_to_none=True)
            self._accumulate_gradients(update.micro_batches)
        # From every process: the batch of any one of them may be the cause.
        seen = from_all_processes((find_nonfinite(self.model, repeat), update.batch.document_ids.tolist()), self.place)
        offending = list(dict.fromkeys(name for names, _ in seen for name in names))
        documents = sorted({document for _, ids in seen for document in ids})
        names = ", ".join(self.dataset.document_name(document) for document in documents[:3])
        raise NonFiniteLossError(
            f"step {update.step}: the loss is {loss} and the gradient's norm {norm}. Not finite: "
            f"{', '.join(offending[:8]) or 'nothing when the step is repeated'}. Documents of this batch: "
            f"{_abbreviated(documents)} ({names}{', …' if len(documents) > 3 else ''}). Parameters are as before the "
            f"step; the last checkpoint is in {self.out / CHECKPOINTS}"
        )

    def _export(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.parallel_model, options=options)
        if self.place.first:
            weights = {name.removeprefix("model."): x for name, x in state.items() if isinstance(x, Tensor)}
            save_model(self.out / EXPORT, self.config.model, weights)
            assert self.tokenizer is not None
            self.tokenizer.save(self.out / EXPORT)
            TrainedOn.of_run(self.config.data, self.dataset, self.tokenizer, named=self.named).save(self.out / EXPORT)
        dist.barrier()


@contextmanager
def fast_float32(precision: str, place: Place) -> Iterator[None]:
    """With bf16 on a GPU, computes float32 products (gates, rotations) in TF32, which is still finer than bf16."""
    if precision != "bf16" or place.device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check_extras(config: TrainConfig) -> None:
    """Requires the optional packages of a run before it starts."""
    needed = {"yaml": "train"}
    if config.run.tensorboard:
        needed["tensorboard"] = "train"
    if config.run.wandb:
        needed["wandb"] = "wandb"
    for module, extra in needed.items():
        require(module, extra)


def _check_dataset(name: str, dataset: TokenDataset | None) -> None:
    """Raises a TypeError for what is no dataset, such as the name of one."""
    if dataset is not None and not hasattr(dataset, "fingerprint"):
        raise TypeError(
            f"{name} must be a dataset, such as sympow.data.open_dataset returns, or None for what the config names; "
            f"got {type(dataset).__name__}"
        )


def _load_tokenizer(dataset: TokenDataset) -> Tokenizer:
    tokenizer = dataset.load_tokenizer()
    members = ("kind", "vocab_size", "boundary", "encode", "decode", "save")
    missing = [name for name in members if not hasattr(tokenizer, name)]
    if missing:
        raise TypeError(
            "load_tokenizer of dataset must return a sympow.data.Tokenizer, which is saved with the model; got "
            f"{type(tokenizer).__name__}, which has no {', '.join(missing)}"
        )
    return tokenizer


def _check_same_tokens(dataset: TokenDataset, heldout: TokenDataset) -> None:
    for name in ("vocab_size", "boundary"):
        expected, came = getattr(dataset, name), getattr(heldout, name)
        if came != expected:
            raise ValueError(f"heldout must have the {name} of what is trained on, {expected}; got {came}")


def _check_same_model(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    if missing := [name for name in wanted if name not in saved]:
        raise ValueError(f"{path} lacks {', '.join(missing)} of its model's config")
    for name, value in wanted.items():
        if name not in EXECUTION_OPTIONS and saved[name] != value:
            raise ValueError(f"{name} must be that of {path}, {saved[name]!r}; got {value!r}")


def _first_tokens(batch: Batch, tokens: int) -> Batch:
    """The beginning of a batch's first row."""
    row = batch.split(1)[0]
    tokens = min(tokens, batch.context)
    bounds = row.cu_seqlens
    if bounds is not None:
        bounds = torch.cat([bounds[bounds < tokens], bounds.new_tensor([tokens])])
    return replace(row, inputs=row.inputs[:, :tokens], targets=row.targets[:, :tokens], cu_seqlens=bounds)


def _abbreviated(numbers: list[int], limit: int = 32) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return shown if len(numbers) <= limit else f"{shown} and {len(numbers) - limit:,} more"
