"""Plain text as users give it: in files, on standard input, and on the command line.

Text is UTF-8 everywhere. Anything else is refused with the place of the first bad byte, since text with replacement
characters in it would be learned, or continued, without anybody noticing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

STANDARD_INPUT = "-"
# Byte order marks of files that some Windows programs write.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.|$)", re.DOTALL)


def read_text(file: Path | str) -> str:
    """All of a text file, line ends as they are; "-": of standard input.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    if str(file) == STANDARD_INPUT:
        return decode(sys.stdin.buffer.read(), "standard input")
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return decode(content, str(file))


def decode(content: bytes, name: str) -> str:
    """Text of UTF-8.

    Args:
        name: what the message calls it.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith(UTF16_MARKS) else "ENCODING"
        raise ValueError(
            f"{name} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start:,}; convert it first, "
            f"as with `iconv -f {encoding} -t UTF-8`"
        ) from error


def check_text(name: str, text: str) -> None:
    """Refuses text that has no UTF-8: arguments of a command hold their bad bytes as lone surrogates.

    Args:
        name: of the argument.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: character {error.start:,} has no UTF-8 encoding") from error


def unescape(name: str, text: str) -> str:
    r"""Text with escapes, as shells pass them on unchanged: \n, \r, \t, \\, \xNN and \uNNNN for what they stand for.

    Args:
        name: of the argument, for messages.

    Example:
        >>> unescape("stop", r"\n\n")
        '\n\n'
        >>> unescape("stop", r"\\n")
        '\\n'
    """

    def meant(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            return chr(int(escape[1:], 16))
        if escape not in ESCAPES:
            raise ValueError(
                rf"{name} must have no escapes but \n, \r, \t, \xNN, \uNNNN and \\ for a backslash; got {found[0]}"
            )
        return ESCAPES[escape]

    return ESCAPE.sub(meant, text)
