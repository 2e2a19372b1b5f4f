"""Checkpoints that are whole or not there.

A checkpoint is written beside its place (torch.distributed.checkpoint, in the background), sealed with a list of its
files and their checksums, and moved into place last. Reading checks the seal, so a damaged one is found before it is
loaded, and the one before it is taken. Any number of processes can read what any other number wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from sympow.train.distributed import Place

SEAL = "sealed.json"
PREFIX = "step-"
UNFINISHED = ".unfinished"


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files are not those it was sealed with."""


class Checkpoints:
    """The checkpoints of a run.

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
        folder.mkdir(parents=True, exist_ok=True)

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
        dist.barrier()
        future = async_save(_copied(_state(shared, optimizer)), checkpoint_id=str(unfinished))
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
        future.result()
        if self._place.first:
            seal(target.with_name(target.name + UNFINISHED), target, content)
            for old in self._found()[: -self._keep]:
                shutil.rmtree(old)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; the same for all processes."""
        chosen: list[str | None] = [None]
        if self._place.first:
            for path in reversed(self._found()):
                try:
                    check_seal(path)
                except DamagedCheckpointError as error:
                    self._report(f"{error}; trying the checkpoint before it")
                    continue
                chosen[0] = str(path)
                break
        dist.broadcast_object_list(chosen)
        return None if chosen[0] is None else Path(chosen[0])

    def load(self, path: Path, shared: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Fills model and optimiser from a checkpoint; returns what else it remembers."""
        state = _state(shared, optimizer)
        load(state, checkpoint_id=str(path))
        set_state_dict(shared, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state["rng"])
        return dict(json.loads((path / SEAL).read_text())["progress"])

    def _found(self) -> list[Path]:
        """Oldest first."""
        found = [path for path in self.folder.glob(f"{PREFIX}*") if not path.name.endswith(UNFINISHED)]
        return sorted(found, key=lambda path: path.name)


def seal(unfinished: Path, target: Path, content: dict[str, Any]) -> None:
    """Writes the list of files and checksums, and moves the folder into place."""
    files = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
    (unfinished / SEAL).write_text(json.dumps({**content, "files": files}, indent=2))
    for path in unfinished.iterdir():
        _flush(path)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    _flush(target.parent)


def check_seal(path: Path) -> None:
    """Raises unless every file is as it was when the checkpoint was sealed."""
    try:
        files = json.loads((path / SEAL).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {SEAL} is missing or unreadable") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{path} is damaged: {name} is missing")
        if _fingerprint(file) != expected:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not what was written")


def _state(shared: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(shared, optimizer)
    return {"model": model, "optimizer": optim, "rng": torch.get_rng_state()}


def _copied(state: Any) -> Any:
    """With tensors of the CPU copied: they are written while training goes on to change them."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) and state.device.type == "cpu" else state


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def _flush(path: Path) -> None:
    """Onto the disk, not only to the system: a machine may stop."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
