"""Files of datatrove's `DocumentTokenizer`: ids in `NAME.ds`, and the end of each document in `NAME.ds.index`.

Ids are uint16, or uint32 for more than 65,536 of them; ends are uint64, counted in tokens. `NAME.ds.metadata` is text:
the tokenizer's name or path, "|" and the bytes of an id; then the number of tokens. `NAME.ds.loss` has a byte for each
token, which says whether it counts in the loss.
"""

from __future__ import annotations

from pathlib import Path

from sympow.data.formats.token_file import TokenFile, file_size, map_array
from sympow.errors import UserError

NAME = "datatrove"
ENDING = ".ds"
DTYPES = {2: "<u2", 4: "<u4"}
LARGEST_METADATA = 2**16


def read_datatrove(path: Path) -> TokenFile:
    index = _beside(path, ".index")
    if not index.exists():
        raise UserError(
            f"{path} has no {index.name} beside it, which says where documents end: datatrove's DocumentTokenizer "
            "writes it with save_index=True, when it is done"
        )
    if _beside(path, ".loss").exists():
        raise UserError(
            f"{path} has a {path.name}.loss, by which some tokens do not count in the loss, and here all do; remove it "
            "to train on all tokens"
        )
    ends, size = map_array(index, "<u8"), file_size(path)
    # Not by the metadata, which need not be there.
    width = size // int(ends[-1]) if len(ends) and ends[-1] else 2
    if (named := tokenizer_of(path)) is not None:
        width = named[1]
    if width not in DTYPES:
        raise UserError(
            f"{index} does not fit {path.name}, which has {size:,} bytes: {int(ends[-1]):,} tokens by the index, of 2 "
            "or 4 bytes each; one of them is damaged or incomplete"
        )
    return TokenFile.cut(path, NAME, map_array(path, DTYPES[width]), ends, index)


def tokenizer_of(path: Path) -> tuple[str, int] | None:
    """The tokenizer's name or path and the bytes of an id, by the metadata of a file; None: there are none."""
    metadata = _beside(path, ".metadata")
    if not metadata.exists():
        return None
    if file_size(metadata) > LARGEST_METADATA:
        raise UserError(f"{metadata} must have at most {LARGEST_METADATA:,} bytes, got {file_size(metadata):,}")
    first = metadata.read_text("utf-8", errors="replace").partition("\n")[0]
    name, _, width = first.rpartition("|")
    if not name or width not in ("2", "4"):
        raise UserError(
            f"{metadata} must begin with a tokenizer's name, | and 2 or 4, the bytes of an id; got {first!r:.80}"
        )
    return name, int(width)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
