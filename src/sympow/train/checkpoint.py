"""Checkpoints: written asynchronously and atomically, verified by checksums, read without unpickling anything.

torch.distributed.checkpoint writes to a temporary folder in the background. `sealed.json` then lists every file with
its checksum, and a rename puts the folder in place. Reading compares the checksums, so that a damaged checkpoint is
found before it is loaded, and the one before it is used. A checkpoint of any number of processes loads on any other
number.

torch keeps a checkpoint's metadata, the list of its tensors, in a pickle, and values other than tensors in pickles too.
Unpickling calls whatever the file names, and checksums do not protect against someone who can recompute them. So a
checkpoint holds only tensors and JSON, and its metadata is read by an unpickler that admits the classes of such
metadata and no others.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from sympow.errors import UserError
from sympow.files import flush
from sympow.train.processes import Place

SEAL = "sealed.json"
PREFIX = "step-"
UNFINISHED = ".unfinished"
# Bytes written to find out why a folder cannot be written to.
PROBE = 1 << 16
# Of torch.distributed.checkpoint.
METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Classes that a checkpoint's metadata may name. None of them does more than hold its arguments.
_ADMITTED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        (_METADATA_MODULE, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class DamagedCheckpointError(UserError):
    """A checkpoint whose files do not match their checksums, or are not those of a checkpoint."""


class UnwrittenCheckpointError(OSError):
    """A checkpoint could not be written, as on a full disk; the message says why and names the last one written."""


class Checkpoints:
    """The checkpoints of a run; as a context manager, it completes a pending one, also when an error ends the run.

    Args:
        folder: of all checkpoints.
        keep: how many to keep.
        place: of this process.
        report: called with a line for the user, in the first process.
    """

    def __init__(self, folder: Path, keep: int, place: Place, report: Callable[[str], None]) -> None:
        self.folder = folder
        self._keep, self._place, self._report = keep, place, report
        self._pending: tuple[Future[Any], Path, dict[str, Any]] | None = None
        # Found by `newest`, in the first process. They stay until the next checkpoint is in place.
        self._damaged: list[Path] = []
        # A separate process group: background collectives must not interleave with those of training.
        self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        if place.first:
            for left in folder.glob(f"{PREFIX}*{UNFINISHED}"):
                shutil.rmtree(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second Ctrl-C (KeyboardInterrupt) does not wait.
        if kind is None or issubclass(kind, Exception):
            self.finish()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
        """Starts to write a checkpoint; a pending one is completed first.

        Args:
            step: updates made so far.
            model: wrapped by DDP or FSDP.
            progress: what else a resumed run needs, as JSON values.
        """
        self.finish()
        target = self.folder / f"{PREFIX}{step:09d}"
        unfinished = target.with_name(target.name + UNFINISHED)
        if self._place.first:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(self._group)
        future = async_save(
            _copied(_tensors(_state(model, optimizer))), checkpoint_id=str(unfinished), process_group=self._group
        )
        assert isinstance(future, Future)
        self._pending = future, target, {"step": step, "world_size": self._place.world_size, "progress": progress}

    def poll(self) -> None:
        """Completes a pending checkpoint if its files have been written; does not wait."""
        if self._pending is not None and self._pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until a pending checkpoint is in place."""
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
                # Its files may be what fills the disk.
                shutil.rmtree(unfinished, ignore_errors=True)
            whole = [path for path in self._found() if path not in self._damaged]
            last = f"the last one is {whole[-1]}" if whole else "there is none before it"
            raise UnwrittenCheckpointError(f"{target} could not be written: {reason}; {last}") from error
        if self._place.first:
            # Their steps may be higher than this one's, so that they would count among those to keep.
            for path in self._damaged:
                if path != target:
                    shutil.rmtree(path)
            self._damaged.clear()
            for old in self._found()[: -self._keep]:
                shutil.rmtree(old)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint and the content of its `sealed.json`; the same for all processes."""
        chosen: list[tuple[Path, dict[str, Any]] | None] = [None]
        if self._place.first:
            for path in reversed(self._found()):
                try:
                    content = read_seal(path)
                    read_metadata(path)
                    chosen[0] = path, content
                    break
                except DamagedCheckpointError as error:
                    self._damaged.append(path)
                    self._report(f"{error}; trying the checkpoint before it")
        dist.broadcast_object_list(chosen)
        return chosen[0]

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Loads model and optimizer in place. The optimizer keeps its own hyperparameters."""
        settings = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
        state = _state(model, optimizer)
        try:
            load(_tensors(state), storage_reader=TensorReader(path))
        except CheckpointException as error:
            raise DamagedCheckpointError(f"{path} cannot be loaded: {_cause(error, None)}") from error
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
        torch.set_rng_state(state["rng"])

    def _found(self) -> list[Path]:
        """Oldest first."""
        found = [path for path in self.folder.iterdir() if re.fullmatch(rf"{PREFIX}\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def seal(unfinished: Path, target: Path, content: dict[str, Any]) -> None:
    """Writes `sealed.json`, the list of files and checksums, and renames the folder into place."""
    files = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
    content = {**content, "files": files}
    (unfinished / SEAL).write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=2), "utf-8")
    for path in (*unfinished.iterdir(), unfinished):
        flush(path)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    flush(target.parent)


def read_seal(path: Path) -> dict[str, Any]:
    """The content of `sealed.json`. Raises unless all checksums match."""
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


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "rng": torch.get_rng_state()}


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Without the optimizer's hyperparameters: a run has its own, and values other than tensors would be pickled."""
    return {**state, "optimizer": {"state": state["optimizer"]["state"]}}


def _copied(state: Any) -> Any:
    """With CPU tensors cloned, since training changes them while they are written."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    assert isinstance(state, Tensor), f"a checkpoint holds only tensors, got {type(state).__name__}"
    return state.clone() if state.device.type == "cpu" else state


def _cause(error: BaseException, written_to: Path | None) -> str:
    """The reason in one line, of the lowest rank that failed.

    Args:
        written_to: the folder that could not be written to, if that is the failure: torch's writer does not report the
            reason.
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
    """Whether `sealed.json` has what a resumed run needs, with the right types."""
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


class TensorReader(FileSystemReader):
    """Reads a checkpoint's metadata safely; torch reads the tensors with `weights_only=True`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint: which file holds which tensor.

    Raises:
        DamagedCheckpointError: it is malformed, or names code to be run.
    """
    damaged = f"{folder} is damaged: {METADATA}"
    try:
        metadata = _MetadataUnpickler((folder / METADATA).read_bytes(), damaged).load()
    except DamagedCheckpointError:
        raise
    # All that a malformed pickle can raise, since it calls admitted classes with any arguments.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DamagedCheckpointError(f"{damaged} is malformed: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpointError(f"{damaged} is not a list of tensors")
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise DamagedCheckpointError(f"{damaged} refers to {name!r}, which is not a file of the checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, damaged: str) -> None:
        super().__init__(io.BytesIO(content))
        self._damaged = damaged

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            # Of the operating system that wrote it; the pure classes exist on all.
            return PurePosixPath if name == "PosixPath" else PureWindowsPath
        admitted = (module, name) in _ADMITTED
        # dtypes are pickled as attributes of torch.
        if admitted or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DamagedCheckpointError(f"{self._damaged} names {module}.{name}, which does not belong to a checkpoint")
