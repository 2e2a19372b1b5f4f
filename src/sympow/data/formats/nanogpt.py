"""Token files of nanoGPT, of llm.c and of modded-nanogpt: ids in `NAME.bin`, and nothing else.

nanoGPT's are uint16 without a header. Those of the other two have one of 256 int32: a number that says what it is, a
version, and the number of tokens. Documents end in the boundary token, or begin with it, so that the tokenizer must be
known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sympow.data.formats.token_file import TokenFile, file_size, map_array
from sympow.data.tokenizer import Tokenizer
from sympow.errors import UserError

ENDING = ".bin"
HEADER = 256
# By the first two numbers of the header.
DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# Megatron's scripts name their files so.
MEGATRON_NAMES = ("_document", "_sentence")
# Tokens to search for boundaries at a time.
SEARCHED = 2**24


def read_nanogpt(path: Path, tokenizer: Tokenizer) -> TokenFile:
    file_size(path)
    header = np.fromfile(path, "<i4", HEADER).tolist()
    dtype = DTYPES.get((header[0], header[1])) if len(header) == HEADER else None
    if dtype is not None:
        name, tokens = "llm.c", map_array(path, dtype, 4 * HEADER)
        if len(tokens) != header[2]:
            raise UserError(
                f"{path} must have {header[2]:,} tokens by its header, got {len(tokens):,}; it is damaged or incomplete"
            )
    elif path.stem.endswith(MEGATRON_NAMES):
        raise UserError(f"{path} is a file of Megatron by its name, and {path.stem}.idx beside it is missing")
    elif tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{path} must have a header, as files of llm.c do: without one ids are uint16, and the tokenizer has "
            f"{tokenizer.vocab_size:,} of them"
        )
    else:
        name, tokens = "nanoGPT", map_array(path, "<u2")
    found = [np.empty(0, np.int64)]
    for first in range(0, len(tokens), SEARCHED):
        some = tokens[first : first + SEARCHED]
        if (largest := int(some.max())) >= tokenizer.vocab_size:
            raise UserError(
                f"{path} has the id {largest:,}, beyond the tokenizer's vocabulary of {tokenizer.vocab_size:,}: "
                "another tokenizer made it, or its ids are not uint16"
            )
        found.append(np.flatnonzero(some == tokenizer.boundary) + first + 1)
    ends = np.concatenate(found)
    # The last document need not end in a boundary.
    ends = ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))
    if len(ends) > 1 and ends[0] == 1:
        # Where documents begin with the boundary, the first boundary ends none. A loader puts it before the document.
        tokens, ends = tokens[1:], ends[1:] - 1
    return TokenFile(path, name, tokens, ends)
