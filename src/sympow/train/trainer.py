"""`train`, which `sympow train` calls: opens the data, builds the model, and gives the loop its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from sympow.data.dataset import TokenDataset
from sympow.data.loader import Loader
from sympow.data.open import open_dataset
from sympow.data.provenance import TrainedOn
from sympow.data.tokenizer import Tokenizer
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.extras import require
from sympow.files import write_atomically
from sympow.invocation import command_line
from sympow.model.accounting import check_fits
from sympow.model.gpt import GPT
from sympow.model.storage import save_model
from sympow.train.config import TrainConfig
from sympow.train.loop import Training, surroundings
from sympow.train.objective import CrossEntropy, ModelWithLoss
from sympow.train.optimizer import set_up_rotations
from sympow.train.parallelize import checkpoint_activations, compile_blocks, parallelize
from sympow.train.processes import Mesh, Place, check_same, make_mesh, process_group
from sympow.train.run_folder import CONFIG_FILE, EXPORT, claimed_folder


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
    _check_arguments(config, out, resume, dataset, heldout)
    with ExitStack() as held:
        place = held.enter_context(process_group(device))
        check_same({**config.settings(), "resume": resume, "device": place.device.type}, place)
        claim = held.enter_context(claimed_folder(None if out is None else Path(out), resume=resume, place=place))
        data = _Data.open(config, dataset, heldout, place)
        config = replace(config, model=replace(config.model, vocab_size=data.training.vocab_size))
        run, folder = config.run, claim.folder
        around = held.enter_context(surroundings(place, claim, run.precision, run.hang_after))
        mesh = make_mesh(place, run.context_parallel)
        _check_rows(config, mesh)
        # Checked before hours of training, although some are needed only at its end.
        _check_extras(config)
        tokenizer = _load_tokenizer(data.training) if run.save else None
        check_fits(config.model, place.device, place.world_size if run.parallel == "fsdp" else 1)
        model = _build_model(config, place)
        module = parallelize(ModelWithLoss(model, run.loss_tokens, around.dtype), place, run.parallel)
        loader = _make_loader(
            config, data.training, config.batch_rows, place, rank=mesh.data_rank, world_size=mesh.data_size
        )
        heldout_rows = _make_heldout_loader(config, data, place)
        objective = CrossEntropy(module, model, config, place, mesh, around.heartbeat, heldout_rows)
        record = asdict(config)
        training = Training(objective, loader, config.optimizer, run, folder, around, record=record, resume=resume)
        held.enter_context(training.opened())
        if place.first:
            # Written last: a folder with this file can be resumed.
            write_atomically(folder / CONFIG_FILE, config.to_yaml().encode())
        training.say(f"run folder: {folder}")
        for line in _description(config, model, data, loader, place):
            training.say(line)
        if training.step_number == run.steps:
            training.say(f"this run has finished its {run.steps:,} steps; more steps would continue it")
        if not training.run() and run.save:
            training.say(f"continue with: {command_line('train', '--resume', '--out', folder)}")
        if tokenizer is not None:
            _export(module, config, data, tokenizer, folder / EXPORT, place)
    return claim.folder


@dataclass
class _Data:
    """What a run reads.

    Attributes:
        training: documents to train on.
        heldout: documents to evaluate on; None: there are none.
        named: whether `training` is what the config names.
        unevaluated: why there are no held-out losses, if that is to be said.
    """

    training: TokenDataset
    heldout: TokenDataset | None
    named: bool
    unevaluated: str | None = None

    @classmethod
    def open(
        cls, config: TrainConfig, dataset: TokenDataset | None, heldout: TokenDataset | None, place: Place
    ) -> _Data:
        """Opens what is not given."""
        name, every = config.data.data, config.run.evaluate_every
        data = cls(open_dataset(name) if dataset is None else dataset, heldout, named=dataset is None)
        check_same({"data": data.training.fingerprint}, place)
        # By default not for an address, which takes time to open.
        by_default = every is None and data.named and "://" not in name
        if heldout is None and (every or by_default):
            try:
                data.heldout = open_dataset(name, "heldout")
            except ValueError as error:
                if every:
                    raise
                data.unevaluated = str(error)
        check_same({"heldout": None if data.heldout is None else data.heldout.fingerprint}, place)
        if data.heldout is not None:
            for member in ("vocab_size", "boundary"):
                expected, came = getattr(data.training, member), getattr(data.heldout, member)
                if came != expected:
                    raise ArgumentError(
                        "heldout", f"must have the {member} of what is trained on, {expected}; got {came}"
                    )
        return data


def _check_arguments(
    config: TrainConfig,
    out: Path | str | None,
    resume: bool,
    dataset: TokenDataset | None,
    heldout: TokenDataset | None,
) -> None:
    if not isinstance(config, TrainConfig):
        raise ArgumentTypeError("config", f"must be a TrainConfig, got {type(config).__name__}")
    if out == "":
        raise ArgumentError("out", "must name a folder, got ''")
    if resume and out is None:
        raise ArgumentError("out", "must name the run to resume, got None")
    for name, given in (("dataset", dataset), ("heldout", heldout)):
        if given is not None and not hasattr(given, "fingerprint"):
            raise ArgumentTypeError(
                name,
                f"must be a dataset, such as sympow.data.open_dataset returns, or None for what the config "
                f"names; got {type(given).__name__}",
            )
    if config.run.evaluate_every and heldout is None and dataset is not None:
        raise ArgumentError(
            "heldout",
            "must be given with dataset to evaluate: the config names held-out documents of other data; got "
            f"None and an evaluate_every of {config.run.evaluate_every}",
        )
    if heldout is not None and config.run.evaluate_every == 0:
        raise ArgumentError("heldout", "must be None if evaluate_every is 0: nothing is evaluated")


def _check_rows(config: TrainConfig, mesh: Mesh) -> None:
    """Raises a ValueError unless every process gets as many sequences of a batch."""
    if config.batch_rows % mesh.data_size:
        groups = "groups of " if mesh.sequence_group is not None else ""
        raise ArgumentError(
            "batch_tokens",
            f"must hold as many sequences for each of {mesh.data_size} {groups}processes; "
            f"got {config.run.batch_tokens:,}, {config.batch_rows:,} sequences of {config.data.context:,}",
        )


def _check_extras(config: TrainConfig) -> None:
    """Requires the optional packages of a run before it starts."""
    needed = {"yaml": "train"}
    if config.run.tensorboard:
        needed["tensorboard"] = "train"
    if config.run.wandb:
        needed["wandb"] = "wandb"
    for module, extra in needed.items():
        require(module, extra)


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


def _build_model(config: TrainConfig, place: Place) -> GPT:
    """The model on its device, at the beginning of training."""
    run = config.run
    torch.manual_seed(run.seed)
    model = GPT(config.model).to(place.device)
    set_up_rotations(model, config.optimizer)
    if run.recompute:
        checkpoint_activations(model)
    if run.compile:
        compile_blocks(model, sharded=run.context_parallel > 1, packed=config.data.short == "pack")
    return model


def _make_loader(config: TrainConfig, dataset: TokenDataset, rows: int, place: Place, **how: Any) -> Loader:
    return Loader(
        dataset,
        config.data.context,
        rows,
        short=config.data.short,
        seed=config.run.seed,
        pin_memory=place.device.type == "cuda",
        **how,
    )


def _make_heldout_loader(config: TrainConfig, data: _Data, place: Place) -> Loader | None:
    """Held-out documents in order; None: there are too few, and the config does not ask for an evaluation."""
    if data.heldout is None:
        return None
    try:
        return _make_loader(config, data.heldout, 1, place, shuffle=False, epochs=1)
    except ValueError as error:
        data.unevaluated = f"{data.heldout.name} has {data.heldout.lengths.sum():,} tokens ({error})"
        if config.run.evaluate_every is not None:
            raise ArgumentError(
                "evaluate_every",
                f"needs more held-out text: {data.unevaluated}. Hold out more of it, train with "
                "a shorter context, or do not evaluate",
            ) from error
    return None


def _description(config: TrainConfig, model: GPT, data: _Data, loader: Loader, place: Place) -> Iterator[str]:
    """Lines about a run at its beginning."""
    summary, degree = loader.summary, config.run.context_parallel
    where = f"{place.world_size} × {place.device.type}" + (f", context parallel {degree}" if degree > 1 else "")
    yield (
        f"{model.count_parameters():,} parameters on {where}; "
        f"{data.training.name}: {summary.tokens:,} tokens in {summary.documents:,} documents, "
        f"{summary.batches:,} batches of {config.run.batch_tokens:,} tokens at context {config.data.context:,}"
    )
    dropped = {
        "in documents shorter than the context": summary.tokens_in_documents_dropped,
        "in tails of documents": summary.tokens_in_tails_dropped,
        "too few for a row": summary.tokens_too_few_for_a_row,
        "in rows too few for a batch": summary.tokens_in_rows_left_over,
    }
    if any(dropped.values()):
        counts = ", ".join(f"{tokens:,} {where}" for where, tokens in dropped.items() if tokens)
        yield f"tokens dropped each epoch: {counts}"
    if data.unevaluated is not None:
        yield f"no held-out loss: {data.unevaluated}"


def _export(
    module: nn.Module, config: TrainConfig, data: _Data, tokenizer: Tokenizer, folder: Path, place: Place
) -> None:
    """Writes the model's folder, with parameters gathered from all processes."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if place.first:
        weights = {name.removeprefix("model."): x for name, x in state.items() if isinstance(x, Tensor)}
        save_model(folder, config.model, weights)
        tokenizer.save(folder)
        name, context, short = config.data.data if data.named else None, config.data.context, config.data.short
        TrainedOn.of_run(name, data.training, tokenizer, context=context, short=short).save(folder)
    dist.barrier()
