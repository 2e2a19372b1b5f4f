"""Prepares the corpus of scale `small`: tokenizes an archive of books into shards, and packs these for other machines.

    python -m experiments.prepare_corpus books.tar.xz --out build/data/books --archive build/data/books-tokens.tar.xz
    python -m experiments.prepare_corpus build/data/books-tokens.tar.xz --out build/data/books

The first command unpacks `train/*.txt` and `heldout/*.txt`, trains a byte-pair encoding on the training documents and
writes token shards (minutes on two cores); with --archive it also packs the shards, at about seven bits a token. The
second command unpacks such an archive (seconds) and verifies the hash of every shard.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sympow.data import prepare
from sympow.data.formats.shards import ShardDataset
from sympow.data.manifest import MANIFEST_FILE
from sympow.data.tokenizer import SETTINGS_FILE
from sympow.errors import UserError

# Small enough that the embedding is a small part of the model; a book still has more than 65,536 tokens.
VOCAB_SIZE = 4_096
SPLITS = ("train", "heldout")


def make_shards(archive: Path, out: Path, vocab_size: int, workers: int | None) -> None:
    """Tokenizes texts into shards; an interrupted preparation starts over, since the texts are unpacked again."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        for split in SPLITS:
            if not any((Path(folder) / split).glob("*.txt")):
                raise SystemExit(f"{archive} must hold {split}/*.txt, or the shards that this program packs")
        train, heldout = (Path(folder) / split for split in SPLITS)
        options = {"tokenizer": "bpe", "vocab_size": vocab_size, "workers": workers, "overwrite": True}
        prepare([train], out, heldout_sources=[heldout], **options)  # type: ignore[arg-type]


def pack_shards(out: Path, archive: Path) -> None:
    """Packs a prepared folder: the tokenizer's settings first, which identify the archive, and the manifest last."""
    files = sorted(
        (path for path in out.iterdir() if path.is_file()),
        key=lambda path: (path.name != SETTINGS_FILE, path.name == MANIFEST_FILE, path.name),
    )
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as tar:
        for path in files:
            tar.add(path, path.name)


def unpack_shards(archive: Path, out: Path) -> bool:
    """Unpacks what `pack_shards` packed; returns False for any other archive."""
    with tarfile.open(archive) as tar:
        first = tar.next()
        if first is None or first.name != SETTINGS_FILE:
            return False
        out.mkdir(parents=True, exist_ok=True)
        tar.extractall(out, filter="data")
    try:
        for split in SPLITS:
            ShardDataset(out, split).verify()
    except UserError:
        # A folder without its manifest does not count as prepared.
        (out / MANIFEST_FILE).unlink(missing_ok=True)
        raise
    return True


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="archive of texts, or of shards that were packed before")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--archive", type=Path, help="where to pack them, too (.tar.xz)")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    arguments = parser.parse_args(words)
    out: Path = arguments.out
    begin = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    if not unpack_shards(arguments.source, out):
        make_shards(arguments.source, out, arguments.vocab_size, arguments.workers)
    print(f"{out}: ready after {time.monotonic() - begin:.1f} s")
    for split in SPLITS:
        dataset = ShardDataset(out, split)
        print(f"  {split}: {len(dataset.lengths):,} documents, {dataset.lengths.sum():,} tokens")
    if arguments.archive is not None:
        pack_shards(out, arguments.archive)
        print(f"{arguments.archive}: {arguments.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
