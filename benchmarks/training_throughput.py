"""Training speed of the paper's 124M model on one GPU: conformal p = 2 beside softmax, in the same trainer.

    python benchmarks/training_throughput.py --out benchmarks/results/h200_training.json

The data are random tokens of GPT-2's vocabulary, so that loading costs nothing; 65,536 tokens per step, bf16, compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sympow.check.timing import environment, save_results
from sympow.data.tokenizer import ByteTokenizer, Tokenizer
from sympow.model.config import VARIANTS
from sympow.train.config import paper
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import METRICS_FILE
from sympow.train.trainer import train

TIMED = ("softmax", "conformal")
TOKENS = 65_536


@dataclass(frozen=True)
class RandomTokens:
    """A dataset of random tokens with a fixed seed."""

    documents: int = 64
    length: int = TOKENS
    vocab_size: int = 50_257
    boundary: int = 50_256
    name: str = "random tokens"
    fingerprint: str = "random tokens, seed 0"
    _tokens: Any = field(default_factory=lambda: np.random.default_rng(0).integers(50_256, size=2**22, dtype=np.uint16))

    @property
    def lengths(self) -> Any:
        return np.full(self.documents, self.length, dtype=np.int64)

    @property
    def blocks(self) -> Any:
        return np.array([0, self.documents], dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> Any:
        return self._tokens[document * self.length + start : document * self.length + stop]

    def document_name(self, document: int) -> str:
        return f"document {document}"

    def load_tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


def time_training(variant: str, context: int, steps: int, device: str | None) -> dict[str, Any]:
    """A row with the tokens per second of a run, without its first samples."""
    config = paper().changed(
        **VARIANTS[variant],
        context=context,
        short="drop",
        steps=steps,
        batch_tokens=TOKENS,
        save=False,
        log_every=max(1, steps // 6),
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", device=device, dataset=RandomTokens())
        lines = read_metrics(Path(folder) / "run" / METRICS_FILE)
    # The first samples compile and warm up.
    samples = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][2:]
    return {
        "variant": variant,
        "context": context,
        "tokens_per_second": statistics.median(samples),
        "slowest": min(samples),
        "fastest": max(samples),
        "memory_gib": lines[-1].get("memory_gib"),
        "utilisation": lines[-1].get("utilisation"),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_024, 16_384, 65_536])
    parser.add_argument("--variants", nargs="+", choices=TIMED, default=TIMED)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--device", help="cuda or cpu; by default a GPU if there is one")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for context in arguments.contexts:
        for variant in arguments.variants:
            rows.append(time_training(variant, context, arguments.steps, arguments.device))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.out is not None:
                save_results(arguments.out, environment(arguments.device or "cuda"), rows=rows)


if __name__ == "__main__":
    main()
