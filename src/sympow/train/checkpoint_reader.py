"""Reading a checkpoint without running what is in it.

torch.distributed.checkpoint keeps the list of its tensors in a pickle, and objects other than tensors in pickles too.
Unpickling calls whatever the file names, and a checksum does not help: whoever changes a file can compute it anew. So
the list is read by an unpickler that knows the classes of such a list and no others, and nothing but tensors is read.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# By name: some are private to torch, and none of them does more than hold what it is given.
_ADMITTED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        (_METADATA_MODULE, name)
        for name in (
            "BytesStorageMetadata",
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


class UnreadableMetadataError(ValueError):
    """The list of a checkpoint's tensors is not one."""


class TensorReader(FileSystemReader):
    """Reads tensors from a folder. Tensors themselves torch reads with `weights_only=True`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


class TensorPlanner(DefaultLoadPlanner):
    """Plans to load tensors, and refuses a checkpoint that has a pickled object in the place of one."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise UnreadableMetadataError(f"{read_item.dest_index.fqn} is not a tensor")


def read_metadata(folder: Path) -> Metadata:
    """Where each tensor of a checkpoint is.

    Raises:
        UnreadableMetadataError: it is something else, perhaps something that was put there to be run.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    except UnreadableMetadataError:
        raise
    # What a malformed pickle may raise: the classes named in it are called with whatever it gives them.
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
        raise UnreadableMetadataError(f"{METADATA} is malformed: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UnreadableMetadataError(f"{METADATA} is not a list of tensors")
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise UnreadableMetadataError(f"{METADATA} refers to {name!r}, which is not a file of the checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        admitted = (module, name) in _ADMITTED
        # Data types are attributes of the module.
        if admitted or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise UnreadableMetadataError(f"{METADATA} names {module}.{name}, which is no part of a checkpoint")
