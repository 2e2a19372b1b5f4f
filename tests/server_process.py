"""A server as a user starts it, and a tiny model for it whose texts are plain characters."""

from __future__ import annotations

import os
import re
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import tokenizers
import torch
from prometheus_client.parser import text_string_to_metric_families

from sympow import GPT, GPTConfig
from sympow.data.tokenizer import END_OF_TEXT, JsonTokenizer
from sympow.model.storage import save_model

START_SECONDS = 180
CHARACTERS = [*string.ascii_letters, *string.digits, *" .,:;!?'\"()-\n", "é", "光"]


def character_tokenizer() -> JsonTokenizer:
    """A token for each character, so that random tokens are text; anything else becomes a question mark."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens([END_OF_TEXT])
    return JsonTokenizer(model, "file", END_OF_TEXT)


def save_tiny_model(folder: Path) -> None:
    """A model with random weights, large enough that its choices are clear."""
    tokenizer = character_tokenizer()
    config = GPTConfig(vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=2, rotary="scale")
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    save_model(folder, config, model.state_dict())
    tokenizer.save(folder)


class ServerProcess:
    """`python -m sympow serve` at a free port of 127.0.0.1, from when it answers until the end of a `with` block."""

    def __init__(self, model: Path, *options: object) -> None:
        command = [sys.executable, "-m", "sympow", "serve", str(model), "--port", "0", *map(str, options)]
        source = Path(__file__).parents[1] / "src"
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # A killed server cannot remove its temporary files.
        self._temporary = tempfile.TemporaryDirectory()
        environment["TMPDIR"] = self._temporary.name
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.messages: list[str] = []
        self.url = ""
        self._answering = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=[s]) for s in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()
        if not self._answering.wait(START_SECONDS) or not self.url:
            self.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.messages))

    def _read(self, stream) -> None:
        for line in stream:
            self.messages.append(line)
            if found := re.search(r"^serving .* at (http://\S+)$", line.strip()):
                self.url = found[1]
                self._answering.set()
        self._answering.set()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(START_SECONDS)
        for reader in self._readers:
            reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        self._temporary.cleanup()
        return code

    def kill(self) -> None:
        """Kill -9."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def until(condition, seconds: float = 60.0):
    """Waits for something that happens soon; returns what the condition returned."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def metrics(client, **options) -> dict[str, float]:
    """The server's samples by name and the values of their labels; options of the request."""
    families = text_string_to_metric_families(client.get("/metrics", **options).text)
    samples = [sample for family in families for sample in family.samples]
    return {":".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}
