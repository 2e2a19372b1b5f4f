"""Checkpoints that are whole or not there.

A checkpoint is written beside its place (torch.distributed.checkpoint, in the background), sealed with a list of its
files and their checksums, and moved into place last. Reading checks the seal, so a damaged one is found before it is
loaded, and the one before it is taken. Any number of processes can read what any other number wrote. A checkpoint holds
tensors and JSON alone, and reading one runs nothing that is in it (`sympow.train.checkpoint_reader`).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from sympow.files import flush
from sympow.train.checkpoint_reader import TensorPlanner, TensorReader, UnreadableMetadataError, read_metadata
from sympow.train.distributed import Place

SEAL = "sealed.json"
PREFIX = "step-"
UNFINISHED = ".unfinished"
DAMAGED = ".damaged"
# Bytes to find out with why a folder cannot be written to.
PROBE = 1 << 16


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files are not those it was sealed with, or not those of a checkpoint."""


class UnwrittenCheckpointError(OSError):
    """A checkpoint that could not be written, as on a full disk; the message says why, and which one is the last."""


class Checkpoints:
    """The checkpoints of a run; as a context, it finishes what was begun, also when an error ends the run.

    Args:
        folder: where they are.
        keep: how many to keep.
        place: of this process.
        report: called with a line for the user, in the first process.
    """

    def __init__(self, folder: Path, keep: int, place: Place, report: Callable[[str], None]) -> None:
        self.folder = folder
        self._keep, self._place, self._report = keep, place, report
        self._pending: tuple[Future[Any], Path, dict[str, Any]] | None = None
        # A group for this alone: what is exchanged in the background must not mix with what training exchanges.
        self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        if place.first:
            for left in folder.glob(f"{PREFIX}*{UNFINISHED}"):
                shutil.rmtree(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Someone who insists on stopping does not want to wait.
        if kind is None or issubclass(kind, Exception):
            self.finish()

    def save(self, step: int, shared: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
        """Begins to write a checkpoint; the previous one is finished first.

        Args:
            step: updates made so far.
            shared: the model as processes share it.
            progress: what else to remember, as JSON would have it.
        """
        self.finish()
        target = self.folder / f"{PREFIX}{step:09d}"
        unfinished = target.with_name(target.name + UNFINISHED)
        if self._place.first:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(self._group)
        future = async_save(
            _copied(_tensors(_state(shared, optimizer))), checkpoint_id=str(unfinished), process_group=self._group
        )
        assert isinstance(future, Future)
        self._pending = future, target, {"step": step, "world_size": self._place.world_size, "progress": progress}

    def poll(self) -> None:
        """Finishes a checkpoint that has been written meanwhile; does not wait."""
        if self._pending is not None and self._pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until what was begun is in place."""
        if self._pending is None:
            return
        future, target, content = self._pending
        self._pending = None
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            future.result()
            if self._place.first:
                seal(unfinished, target, content)
        except (CheckpointException, OSError) as error:
            reason = _cause(error, self.folder)
            if self._place.first:
                # What there is of it may be what fills the disk.
                shutil.rmtree(unfinished, ignore_errors=True)
            whole = self._found()
            last = f"the last one is {whole[-1]}" if whole else "there is none before it"
            raise UnwrittenCheckpointError(f"{target} could not be written: {reason}; {last}") from error
        if self._place.first:
            for old in self._found()[: -self._keep]:
                shutil.rmtree(old)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is whole, and its seal; the same for all processes.

        Damaged ones are renamed: they would be counted among those to keep, in place of whole ones.
        """
        chosen: list[tuple[Path, dict[str, Any]] | None] = [None]
        if self._place.first:
            for path in reversed(self._found()):
                try:
                    chosen[0] = path, check(path)
                    break
                except DamagedCheckpointError as error:
                    aside = path.with_name(path.name + DAMAGED)
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                    self._report(f"{error}. It is now {aside.name}; trying the checkpoint before it")
        dist.broadcast_object_list(chosen)
        return chosen[0]

    def load(self, path: Path, shared: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills model and optimiser from a checkpoint. What the optimiser is set to stays: rates, decay and so on."""
        settings = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
        state = _state(shared, optimizer)
        try:
            # In place.
            load(_tensors(state), storage_reader=TensorReader(path), planner=TensorPlanner())
        except CheckpointException as error:
            raise DamagedCheckpointError(f"{path} cannot be loaded: {_cause(error, None)}") from error
        set_state_dict(shared, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
        torch.set_rng_state(state["rng"])

    def _found(self) -> list[Path]:
        """Oldest first."""
        found = [path for path in self.folder.iterdir() if re.fullmatch(rf"{PREFIX}\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def seal(unfinished: Path, target: Path, content: dict[str, Any]) -> None:
    """Writes the list of files and checksums, and moves the folder into place."""
    files = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
    content = {**content, "files": files}
    (unfinished / SEAL).write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=2), "utf-8")
    for path in (*unfinished.iterdir(), unfinished):
        flush(path)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    flush(target.parent)


def check(path: Path) -> dict[str, Any]:
    """What a checkpoint remembers beside its tensors. Raises unless the whole checkpoint can be read."""
    content = read_seal(path)
    try:
        read_metadata(path)
    except UnreadableMetadataError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return content


def read_seal(path: Path) -> dict[str, Any]:
    """What a checkpoint remembers beside its tensors. Raises unless every file is as it was when it was sealed."""
    try:
        content: dict[str, Any] = dict(json.loads((path / SEAL).read_text("utf-8")))
        checksum, files = content.pop("checksum"), dict(content["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {SEAL} is missing or unreadable") from error
    if checksum != _checksum(content):
        raise DamagedCheckpointError(f"{path} is damaged: {SEAL} is not what was written")
    if not _has_all(content):
        raise DamagedCheckpointError(f"{path} is damaged: {SEAL} is not that of a checkpoint")
    for name, expected in files.items():
        if Path(name).name != name:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not a file of the checkpoint")
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{path} is damaged: {name} is missing")
        try:
            found = _fingerprint(file)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {name} cannot be read: {error.strerror}") from error
        if found != expected:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not what was written")
    return content


def _state(shared: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(shared, optimizer)
    return {"model": model, "optimizer": optim, "rng": torch.get_rng_state()}


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Without the optimiser's settings: a run has its own, and objects other than tensors would be pickled."""
    return {**state, "optimizer": {"state": state["optimizer"]["state"]}}


def _copied(state: Any) -> Any:
    """With tensors of the CPU copied: they are written while training goes on to change them."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    assert isinstance(state, Tensor), f"a checkpoint holds tensors alone, and not {type(state).__name__}"
    return state.clone() if state.device.type == "cpu" else state


def _cause(error: BaseException, written_to: Path | None) -> str:
    """What went wrong in one line, in the first process to which something happened.

    Args:
        written_to: the folder that could not be written to, if that is what went wrong. torch's writer of tensors does
            not tell why it failed.
    """
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    if not isinstance(error, OSError) and written_to is not None:
        try:
            with tempfile.TemporaryFile(dir=written_to) as file:
                file.write(bytes(PROBE))
        except OSError as why:
            error = why
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _has_all(content: dict[str, Any]) -> bool:
    """Whether a seal has what a resumed run reads, each of its kind."""
    progress = content.get("progress")
    if not isinstance(content.get("step"), int) or not isinstance(progress, dict):
        return False
    config = progress.get("config")
    return (
        isinstance(progress.get("loader"), dict) and isinstance(config, dict) and isinstance(config.get("model"), dict)
    )


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]
