"""Plain text from users: UTF-8 or refused, and escapes on the command line."""

import os
import subprocess
import sys
import threading

import pytest

from sympow.data.plain_text import check_text, decode, read_text, unescape


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (r"\n\n", "\n\n"),
        (r"a\tb\r", "a\tb\r"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"\x41\xe9\u2013", "Aé–"),
        ("naïve 光 👩‍🚀", "naïve 光 👩‍🚀"),
        (r"é\né", "é\né"),
        ("\n", "\n"),
        ("", ""),
    ],
)
def test_escapes_stand_for_characters_and_all_else_for_itself(given, meant):
    assert unescape("stop", given) == meant


@pytest.mark.parametrize(("given", "named"), [(r"\d", r"\\d"), (r"\x4", r"\\x"), (r"\u20", r"\\u"), ("a\\", r"\\")])
def test_an_unknown_escape_is_refused(given, named):
    with pytest.raises(ValueError, match=rf"stop must have no escapes but .* for a backslash; got {named}$"):
        unescape("stop", given)


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("größer\r\n".encode())
    assert read_text(path) == "größer\r\n"


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt cannot be read: No such file"):
        read_text(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="a device of Linux and macOS")
def test_a_text_without_end_is_refused():
    # In a process that cannot use more than 4 GB: a test that fails must not fill the machine's memory.
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
from sympow.data.plain_text import read_text
for name in ("/dev/zero", "-"):
    try:
        read_text(name)
    except ValueError as error:
        print(error)
"""
    with open("/dev/zero", "rb") as zeros:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdin=zeros, capture_output=True, text=True, timeout=300)
    said = "must have at most 268,435,456 bytes, unless it is a file; got more"
    assert done.stdout.splitlines() == [f"/dev/zero {said}", f"standard input {said}"], done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_read_to_its_end(tmp_path):
    # As from `--file <(command)`.
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("from a pipe",))
    writer.start()
    assert read_text(tmp_path / "pipe") == "from a pipe"
    writer.join()


def test_text_that_is_not_utf8_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"^notes is not UTF-8 text: byte 0xe9 at offset 3; convert it first"):
        decode(b"caf\xe9 au lait", "notes")
    with pytest.raises(ValueError, match=r"byte 0xe2 at offset 1,000;"):
        decode(b"a" * 1000 + b"\xe2\x80", "notes")
    with pytest.raises(ValueError, match=r"^prompt is not UTF-8 text: character 1 has no UTF-8 encoding"):
        check_text("prompt", b"a\xff".decode(errors="surrogateescape"))
