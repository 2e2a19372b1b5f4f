"""Plain text from users, in files, on standard input and on the command line: reading, checking and unescaping.

Text is UTF-8 everywhere. Anything else is refused with the position of the first invalid byte, since replacement
characters would be trained on, or continued, unnoticed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

from sympow.errors import ArgumentError, UserError

STANDARD_INPUT = "-"
# Byte order marks of files that some Windows programs write.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Bytes of a text from a pipe or a device, which may never end.
LONGEST_STREAM = 2**28
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.|$)", re.DOTALL)


def read_text(file: Path | str) -> str:
    """The content of a text file, with line endings unchanged; "-": of standard input.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is no file and too long.
    """
    if str(file) == STANDARD_INPUT:
        return decode(_read_stream(sys.stdin.buffer, "standard input"), "standard input")
    try:
        with Path(file).open("rb") as opened:
            content = opened.read() if Path(file).is_file() else _read_stream(opened, str(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    return decode(content, str(file))


def _read_stream(stream: BinaryIO, name: str) -> bytes:
    content = stream.read(LONGEST_STREAM + 1)
    if len(content) > LONGEST_STREAM:
        raise ArgumentError(name, f"must have at most {LONGEST_STREAM:,} bytes, unless it is a file; got more")
    return content


def decode(content: bytes, name: str) -> str:
    """Decodes UTF-8.

    Args:
        name: of the content, for the message.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith(UTF16_MARKS) else "ENCODING"
        raise ArgumentError(
            name,
            f"is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start:,}; convert it first, "
            f"as with `iconv -f {encoding} -t UTF-8`",
        ) from error


def check_text(name: str, text: str) -> None:
    """Refuses text that has no UTF-8 encoding: Python decodes invalid bytes of arguments as lone surrogates.

    Args:
        name: of the argument.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(name, f"is not UTF-8 text: character {error.start:,} has no UTF-8 encoding") from error


def unescape(name: str, text: str) -> str:
    r"""Replaces the escapes \n, \r, \t, \\, \xNN and \uNNNN, which shells pass on unchanged.

    Args:
        name: of the argument, for messages.

    Example:
        >>> unescape("stop", r"\n\n")
        '\n\n'
        >>> unescape("stop", r"\\n")
        '\\n'
    """

    def unescaped(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            return chr(int(escape[1:], 16))
        if escape not in ESCAPES:
            raise ArgumentError(
                name, rf"must have no escapes but \n, \r, \t, \xNN, \uNNNN and \\ for a backslash; got {found[0]}"
            )
        return ESCAPES[escape]

    return ESCAPE.sub(unescaped, text)
