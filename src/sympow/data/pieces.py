"""`pieces`: a long text in pieces whose tokens, one after another, are those of the whole text.

Tokenizers of the library `tokenizers` need some hundred times the bytes of a text while they encode it, and cannot be
stopped. A text is therefore cut, where pre-tokenization cuts it: before a space after another character, before a line
break after a letter or digit, and before a punctuation mark after a Chinese or Japanese character. In the
pre-tokenizations below no match extends over such a place and none depends on what is on its other side, so that both
sides have the same tokens alone. With other tokenizers a text is one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sympow.errors import ArgumentError

# Characters after which a piece ends at the next cut.
PIECE = 2**14
# The most characters of a piece, which is longer than PIECE if there is no cut.
LONGEST_PIECE = 2**22
ANYWHERE = re.compile("")
# Python's white space includes that of the library, and letters and digits of ASCII are those of every Unicode.
CUTS = re.compile("(?<=\\S)(?= )|(?<=[0-9A-Za-z])(?=\n)|(?<=[ぁ-ゖァ-ヺ一-龥])(?=[。，、！？])")
# Patterns of GPT-2, of Qwen (Llama 3) and of Mistral (GPT-4o), without the differences that `_simplified` removes.
PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def pieces(name: str, text: str, cuts: re.Pattern[str] | None) -> Iterator[str]:
    """The pieces of a text.

    Args:
        name: of the text, for messages.
        cuts: matches where the text may be cut; None: nowhere.

    Raises:
        ValueError: a piece has more than LONGEST_PIECE characters.
    """
    start = 0
    while start < len(text):
        found = None if cuts is None else cuts.search(text, start + PIECE)
        end = len(text) if found is None else found.start()
        if end - start > LONGEST_PIECE:
            where = "with this tokenizer, which takes a text as a whole" if cuts is None else "without a space"
            raise ArgumentError(name, f"must have at most {LONGEST_PIECE:,} characters {where}; got {end - start:,}")
        yield text[start:end]
        start = end


def known_cuts(model: Any) -> re.Pattern[str] | None:
    """Where a `tokenizers.Tokenizer` surely cuts a text; None: not known.

    Byte-level tokenizers with the pattern of GPT-2 or one of PATTERNS are known, unless added tokens take up spaces.
    """
    parts = (model.normalizer, model.pre_tokenizer)
    normalizer, splitter = (None if part is None else json.loads(part.__getstate__()) for part in parts)
    added = model.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or CUTS.search(token.content) for token in added):
        return None
    # NFC changes neither spaces and line breaks nor what they follow, as far as CUTS asks for it.
    if splitter is None or (normalizer is not None and normalizer["type"] != "NFC"):
        return None
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return CUTS
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if _simplified(pattern) in PATTERNS:
            return CUTS
    return None


def _simplified(pattern: str) -> str:
    """A pattern without differences that do not matter here: groups of digits, contractions after words, and marks.

    Nor do the longest runs that a pattern allows, since no run begins before a cut and ends after it.
    """
    pattern = pattern.replace(r"\p{N}{1,3}", r"\p{N}").replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
    pattern = re.sub(r"\{1,\d+\}", "+", pattern)
    return pattern.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{L}\p{M}\p{N}", r"\p{L}\p{N}")
