"""Throughput of the data loader alone, in tokens per second.

    python benchmarks/loader_throughput.py --out benchmarks/results/loader_throughput.json

Data are generated in a temporary folder: prepared text of long and of short documents, and a zarr store with the layout
of LongCrawl64. A run reads a whole epoch in shuffled batches of 524,288 tokens, as in the paper, from a newly opened
dataset: decoding is included, disk latency is not, since the files are still in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sympow.check.timing import environment, save_results
from sympow.data import Loader, TokenDataset, open_dataset, prepare
from sympow.extras import require

BATCH_TOKENS = 524_288
SMALLEST_RATE = 5e6
LONG_DOCUMENT, SHORT_DOCUMENT = 400_000, 2_000
CRAWL_SHAPE, CRAWL_CHUNKS = (4_096, 65_536), (2_048, 2_048)


def write_text(folder: Path, tokens: int) -> None:
    """Writes text and prepares it as bytes: folder/long and folder/short."""
    letters = np.random.default_rng(0).integers(97, 123, tokens, dtype=np.uint8).tobytes().decode()
    source = folder / "long-text"
    source.mkdir()
    for number, start in enumerate(range(0, tokens, LONG_DOCUMENT)):
        (source / f"{number:05d}.txt").write_text(letters[start : start + LONG_DOCUMENT])
    lines = (
        json.dumps({"text": letters[start : start + SHORT_DOCUMENT]}) for start in range(0, tokens, SHORT_DOCUMENT)
    )
    (folder / "short.jsonl").write_text("\n".join(lines))
    prepare([source], folder / "long", heldout=0, workers=1)
    prepare([folder / "short.jsonl"], folder / "short", heldout=0, workers=1)


def write_crawl(folder: Path) -> None:
    """Writes folder/crawl/train.zarr: two rows of chunks, laid out as in LongCrawl64."""
    zarr, numcodecs = require("zarr", "data"), require("numcodecs", "data")
    array = zarr.create_array(
        str(folder / "crawl" / "train.zarr"),
        shape=CRAWL_SHAPE,
        chunks=CRAWL_CHUNKS,
        dtype="uint16",
        zarr_format=2,
        compressors=numcodecs.Blosc(cname="lz4"),
        fill_value=0,
        attributes={"encoder": "tiktoken-gpt2"},
    )
    generator = np.random.default_rng(0)
    for top in range(0, CRAWL_SHAPE[0], CRAWL_CHUNKS[0]):
        shape = (CRAWL_CHUNKS[0], CRAWL_SHAPE[1])
        # Small ids are frequent, as in text, so that chunks compress alike.
        array[top : top + CRAWL_CHUNKS[0]] = np.minimum(generator.exponential(4_000, shape), 50_256).astype(np.uint16)


def measure_epoch(open_data: Callable[[], TokenDataset], context: int, short: str, runs: int) -> dict[str, Any]:
    """Tokens per second over whole epochs, each with a newly opened dataset and loader."""
    rates, tokens, first = [], 0, 0.0
    for run in range(runs):
        begin = time.perf_counter()
        loader = Loader(open_data(), context, BATCH_TOKENS // context, short=short, seed=run, epochs=1)
        tokens = 0
        for batch in loader:
            first = first if tokens else time.perf_counter() - begin
            tokens += batch.targets.numel()
        rates.append(tokens / (time.perf_counter() - begin))
    return {
        "context": context,
        "short": short,
        "tokens": tokens,
        "million_tokens_per_second": statistics.median(rates) / 1e6,
        "slowest": min(rates) / 1e6,
        "fastest": max(rates) / 1e6,
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
        "seconds_to_first_batch": first,
        "runs": runs,
    }


def main() -> int:
    """Returns 1 if any case is slower than SMALLEST_RATE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64_000_000, help="tokens of each prepared text")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, arguments.tokens)
        write_crawl(folder)
        for data, context, short in (
            ("long", 1_024, "drop"),
            ("long", 65_536, "drop"),
            ("short", 1_024, "join"),
            ("short", 1_024, "pack"),
            ("crawl", 1_024, "refuse"),
            ("crawl", 65_536, "refuse"),
        ):
            row = measure_epoch(partial(open_dataset, folder / data), context, short, arguments.runs)
            rows.append({"data": data, **row})
            print(
                f"{data:>6}, context {context:>6,}, {short:>6}: {row['million_tokens_per_second']:7.1f}M tokens/s "
                f"({row['slowest']:.1f} to {row['fastest']:.1f}), first batch after "
                f"{row['seconds_to_first_batch']:.2f} s",
                flush=True,
            )
    if arguments.out:
        versions = {name: require(name, "data").__version__ for name in ("numpy", "zarr", "numcodecs")}
        machine = {**environment(), "cores": os.cpu_count(), **versions}
        save_results(arguments.out, machine, batch_tokens=BATCH_TOKENS, rows=rows)
    slowest = min(row["slowest"] for row in rows) * 1e6
    return int(slowest < SMALLEST_RATE)


if __name__ == "__main__":
    sys.exit(main())
