"""`prepare`: documents to token shards, in parallel, resuming where an interrupted run stopped.

One process reads the documents, in order, and cuts them into portions of about equal size, which depend only on the
sources; others tokenize the portions. A portion becomes at most one shard per split, and a record beside them, which
also says where reading goes on. So a second run does only what is missing and ends with the same files. The manifest is
written last: a folder that has one is complete.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain, count, islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sympow.checks import check_at_least
from sympow.data.dataset import SPLITS
from sympow.data.formats.shards import id_dtype, save_shard
from sympow.data.manifest import (
    INDEX_ENDING,
    MANIFEST_FILE,
    TOKENS_ENDING,
    VERIFIED_FILE,
    WORK_FOLDER,
    Manifest,
    TokenShard,
)
from sympow.data.row_order import permutation
from sympow.data.sources import (
    BY_HASH,
    Document,
    HeldoutRule,
    Reader,
    ReadingPlace,
    Source,
    check_field,
    list_sources,
    sources_fingerprint,
    text_bytes,
)
from sympow.data.tokenizer import (
    MODEL_FILE,
    SETTINGS_FILE,
    Tokenizer,
    check_boundary_token,
    check_vocab_size,
    load_tokenizer,
    train_bpe,
)
from sympow.errors import ArgumentError, UserError
from sympow.files import (
    PARTIAL_ENDING,
    check_can_write,
    missing_folders,
    remove_empty,
    sha256_of,
    write_atomically,
)
from sympow.locks import lock_file
from sympow.parsing import read_json

# A few seconds of work for the slower tokenizers, which is what an interruption costs at most.
SHARD_BYTES = 2**23
BPE_VOCAB_SIZE = 8_192
HELDOUT = 0.02
# More text than this changes a vocabulary of usual size very little.
BPE_TRAINING_BYTES = 2**28
REQUEST_FILE = "request.json"
RECORDS = "portion-*.json"
# Not in the work folder, which is removed while the lock is held.
LOCK_FILE = f"{WORK_FOLDER}.lock"


@dataclass(frozen=True)
class PreparationProgress:
    """Progress of a preparation.

    Attributes:
        stage: "counting words" and "merging pairs", which learn the tokenizer, or "writing shards".
        source_bytes: of text, done so far. Pairs are merged in all of it at once.
        total_bytes: of text in all; None: not known before it has been read, as in tables.
        documents: written so far.
        tokens: written so far.
    """

    stage: str
    source_bytes: int
    total_bytes: int | None
    documents: int = 0
    tokens: int = 0


def prepare(
    sources: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    boundary_token: str | None = None,
    field: str = "text",
    heldout: float | None = None,
    heldout_sources: Sequence[Path | str] = (),
    skip_empty: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[PreparationProgress], None] = lambda progress: None,
) -> Manifest:
    """Tokenizes documents into memory-mapped shards that `open_dataset(out)` reads.

    Run again after an interruption it resumes; run again when done it does nothing.

    Args:
        sources: text files (a document each), tables (.jsonl, .json, .csv, .tsv, .parquet, .arrow: a document a row),
            folders of such files (see `sources.list_sources`), and datasets by the name that `datasets.load_dataset`
            finds them by, as in "hf:NAME" or "hf:NAME,name=CONFIG,split=train".
        out: folder to write, new or left by an earlier run of the same.
        tokenizer: "bytes", "gpt2", "bpe" (trained on the training documents), a tokenizer.json, or a folder with a
            saved tokenizer.
        vocab_size: for "bpe", its number of tokens; by default 8,192.
        boundary_token: for a tokenizer.json, the token that separates documents.
        field: column with the text.
        heldout: fraction of the documents to hold out, chosen by a hash of their text, so that copies stay together: at
            least one of several, and of a single document its end (see `sources.HeldoutRule`). By default 0.02, or
            with heldout_sources none; 0: nothing.
        heldout_sources: files and folders to hold out instead. They may be inside folders of `sources`, which then
            give the other files for training.
        skip_empty: skip and count empty documents, instead of refusing them.
        overwrite: replace what an earlier preparation left in `out`, once all arguments have been checked.
        workers: processes; by default one per core.
        shard_bytes: of text per shard, at most, unless one document has more.
        on_progress: called after every shard.
    """
    if heldout is None:
        heldout = 0.0 if heldout_sources else HELDOUT
    if not 0 <= heldout < 1:
        raise ArgumentError("heldout", f"must be at least 0 and below 1, got {heldout}")
    check_at_least("shard_bytes", shard_bytes, 1)
    if workers is not None:
        check_at_least("workers", workers, 1)
    if heldout and heldout_sources:
        raise ArgumentError("heldout", "and heldout_sources both choose what is held out; give one of them")
    if vocab_size is not None:
        if tokenizer != "bpe":
            raise ArgumentError(
                "vocab_size", f"is for tokenizer='bpe', which is trained here; got tokenizer={tokenizer!r}"
            )
        check_vocab_size(vocab_size)
    check_boundary_token(tokenizer, boundary_token)
    if not sources:
        raise ArgumentError("sources", "must name at least one file or folder")
    out = Path(out)
    check_can_write("out", out, "folder")

    listed, ignored = list_sources(sources, heldout_sources, BY_HASH if heldout else "train", may_be_empty=skip_empty)
    request: dict[str, Any] = {
        "tokenizer": _tokenizer_identity(tokenizer),
        "vocab_size": (vocab_size or BPE_VOCAB_SIZE) if tokenizer == "bpe" else None,
        "boundary_token": boundary_token,
        "field": field,
        "heldout": heldout,
        "skip_empty": skip_empty,
        "portion_bytes": shard_bytes,
        "sources": sources_fingerprint(listed),
    }
    with _locked(out):
        earlier = None if overwrite else _earlier_request(out)
        if earlier is None:
            _check_can_start(out)
            check_field(listed, field)
        else:
            _check_same(out, request, earlier)
            if (out / MANIFEST_FILE).is_file():
                return Manifest.load(out)

        contents = (document.text.encode() for document in Reader(listed, field) if document.text)
        rule = HeldoutRule.for_documents(contents, heldout) if heldout else HeldoutRule(0)
        if earlier is None:
            if tokenizer == "bpe":
                made = _learn_tokenizer(request["vocab_size"], listed, field, rule, on_progress)
            else:
                made = load_tokenizer(tokenizer, boundary_token)
            # Only now, when all arguments are known to be right: `out` may hold earlier data, and this very tokenizer.
            _start(out, request, made)

        written = {done.number: done for done in map(Portion.load, (out / WORK_FOLDER).glob(RECORDS))}
        begin = next(number for number in count() if number not in written)
        reader = Reader(listed, field, written[begin - 1].end if begin else ReadingPlace())
        portions = _portions(reader, rule, skip_empty, shard_bytes, begin)
        total = text_bytes(listed)
        on_progress(_progress(written.values(), total))
        missing = (portion for portion in portions if portion[0].number not in written)
        # Closed at once if this is interrupted, since that ends the workers.
        with closing(_write_all(missing, out, workers or os.cpu_count() or 1)) as writing:
            for done in writing:
                written[done.number] = done
                on_progress(_progress(written.values(), total))

        in_order = [written[number] for number in range(len(written))]
        on_progress(_progress(in_order, sum(done.source_bytes for done in in_order)))
        manifest = _summarize(in_order, listed, ignored, request, load_tokenizer(out), rule)
        manifest.save(out)
        shutil.rmtree(out / WORK_FOLDER)
        for path in out.glob(f"*{PARTIAL_ENDING}"):
            # Left by a killed run.
            path.unlink()
        return manifest


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps other preparations out of the folder; removes the folder again if it is new and nothing was written."""
    made = missing_folders(out)
    # On the way out the lock is released first: its file would keep the folder from being removed.
    with ExitStack() as held:
        held.callback(remove_empty, made)
        try:
            held.enter_context(lock_file(out / LOCK_FILE, wait=False))
        except BlockingIOError as error:
            raise ArgumentError(
                "out",
                f"={str(out)!r} is in use by another preparation; wait until it has ended, or choose another folder",
            ) from error
        yield


def _summarize(
    written: Sequence[Portion],
    listed: Sequence[Source],
    ignored: list[str],
    request: dict[str, Any],
    tokenizer: Tokenizer,
    rule: HeldoutRule,
) -> Manifest:
    splits = {name: tuple(done.splits[name] for done in written if name in done.splits) for name in SPLITS}
    documents = {name: sum(shard.documents for shard in shards) for name, shards in splits.items()}
    heldout_wanted = request["heldout"] or any(source.split == "heldout" for source in listed)
    for name in SPLITS if heldout_wanted else ("train",):
        if not documents[name]:
            raise UserError(
                f"no document for the split {name!r} out of {sum(documents.values()):,}, with "
                f"heldout={request['heldout']}; choose another share (0 holds nothing out) and overwrite"
            )
    return Manifest(
        tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "boundary": tokenizer.boundary},
        dtype=id_dtype(tokenizer.vocab_size).name,
        counts={
            "files": len(listed),
            "files_ignored": ignored,
            "source_bytes": sum(done.source_bytes for done in written),
            "documents": sum(documents.values()),
            "empty_documents_skipped": sum(done.empty_documents_skipped for done in written),
            "tokens": sum(shard.tokens for shards in splits.values() for shard in shards),
            # Each is in both splits: its beginning in one, its end in the other.
            **({"documents_cut_in_two": documents["heldout"]} if rule.tail else {}),
        },
        request=request,
        splits=splits,
    )


def _tokenizer_identity(tokenizer: str) -> str:
    path = Path(tokenizer)
    if path.is_dir():
        path = path / (MODEL_FILE if (path / MODEL_FILE).is_file() else SETTINGS_FILE)
    return f"{path.name} {sha256_of(path)}" if path.is_file() else tokenizer


def _earlier_request(out: Path) -> dict[str, Any] | None:
    """The request of an earlier preparation, finished or not, that wrote shards."""
    if (out / MANIFEST_FILE).is_file():
        return Manifest.load(out).request
    if not any((out / WORK_FOLDER).glob(RECORDS)):
        # A request that was refused before it wrote a shard does not count.
        return None
    path = out / WORK_FOLDER / REQUEST_FILE
    request = read_json(path)
    if not isinstance(request, dict):
        raise UserError(f"{path} is not a request; overwrite what was prepared")
    return request


def _check_same(out: Path, request: dict[str, Any], earlier: dict[str, Any]) -> None:
    different = sorted(key for key in request if request[key] != earlier.get(key))
    if different:
        # The digest of the sources is not readable.
        shown = [
            key if key == "sources" else f"{key} (was {earlier.get(key)}, now {request[key]})" for key in different
        ]
        raise ArgumentError(
            "out",
            f"={str(out)!r} was prepared from something else: {', '.join(shown)} differ; "
            "choose another folder or overwrite it",
        )


def _check_can_start(out: Path) -> None:
    """Refuses a folder of other things. Those beside an earlier preparation are left alone."""
    earlier = (out / WORK_FOLDER).is_dir() or (out / MANIFEST_FILE).is_file()
    if not earlier and any(path.name != LOCK_FILE for path in out.iterdir()):
        raise ArgumentError("out", f"={str(out)!r} must be a new or empty folder, or one that an interrupted run left")


def _start(out: Path, request: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Replaces the files of an earlier preparation, and no others, by a request and its tokenizer."""
    if (out / WORK_FOLDER).is_dir():
        shutil.rmtree(out / WORK_FOLDER)
    # Before anything else is removed: it says that the other files are of a preparation, should this be interrupted.
    write_atomically(out / WORK_FOLDER / REQUEST_FILE, json.dumps(request).encode())
    shards = [f"{split}-*{ending}" for split in SPLITS for ending in (TOKENS_ENDING, INDEX_ENDING)]
    for pattern in (MANIFEST_FILE, VERIFIED_FILE, MODEL_FILE, SETTINGS_FILE, *shards):
        for path in out.glob(pattern):
            path.unlink()
    tokenizer.save(out)


def _learn_tokenizer(
    vocab_size: int,
    listed: Sequence[Source],
    field: str,
    rule: HeldoutRule,
    on_progress: Callable[[PreparationProgress], None],
) -> Tokenizer:
    size = text_bytes(listed)
    total = None if size is None else min(BPE_TRAINING_BYTES, size)
    read = 0

    def training_texts() -> Iterator[str]:
        """Of sources in random order, up to a number of bytes; the trainer merges when it has read them."""
        nonlocal read
        for number in permutation(len(listed), 0).tolist():
            for document in Reader([listed[number]], field):
                yield from (text for split, text in rule.split(document) if split == "train")
                read += len(document.text.encode())
                if read >= BPE_TRAINING_BYTES:
                    break
            on_progress(PreparationProgress("counting words", min(read, BPE_TRAINING_BYTES), total))
            if read >= BPE_TRAINING_BYTES:
                break
        read = min(read, BPE_TRAINING_BYTES)
        on_progress(PreparationProgress("counting words", read, read))
        on_progress(PreparationProgress("merging pairs", 0, read))

    learned = train_bpe(training_texts(), vocab_size)
    on_progress(PreparationProgress("merging pairs", read, read))
    return learned


@dataclass(frozen=True)
class Portion:
    """Consecutive documents, which become a shard of each split; the record of a written one is its end.

    Attributes:
        number: from 0 on.
        source_bytes: of text.
        empty_documents_skipped: how many.
        end: where the next portion begins, and an interrupted preparation goes on.
        splits: its shards, once they are written.
    """

    number: int
    source_bytes: int
    empty_documents_skipped: int
    end: ReadingPlace
    splits: dict[str, TokenShard] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Portion:
        content = read_json(path)
        try:
            splits = {name: TokenShard.from_dict(shard) for name, shard in content.pop("splits").items()}
            return cls(**{**content, "splits": splits, "end": ReadingPlace(**content["end"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not the record of a shard: {error}; overwrite what was prepared") from error


# With their splits; a document of which a part is held out is in it twice.
Documents = list[tuple[str, Document]]


def _portions(
    reader: Reader, rule: HeldoutRule, skip_empty: bool, shard_bytes: int, number: int
) -> Iterator[tuple[Portion, Documents]]:
    """The documents in portions of at most `shard_bytes` of text, or of one larger document; the first has a number."""
    documents: Documents = []
    source_bytes = empty = 0
    for document in reader:
        size = len(document.text.encode())
        if source_bytes + size > shard_bytes and (documents or empty):
            yield Portion(number, source_bytes, empty, reader.place), documents
            number, source_bytes, empty, documents = number + 1, 0, 0, []
        source_bytes += size
        if document.text:
            documents += [(split, replace(document, text=text)) for split, text in rule.split(document)]
        elif skip_empty:
            empty += 1
        else:
            raise UserError(f"{document}: the document is empty; skip_empty leaves such documents out")
    if documents or empty:
        yield Portion(number, source_bytes, empty, reader.place), documents


def write_portion(portion: Portion, documents: Documents, out: Path, tokenizer: Tokenizer) -> Portion:
    """Tokenizes the documents of a portion and writes their shards, then the record."""
    by_split: dict[str, list[tuple[NDArray[Any], str, int]]] = {}
    for split, document in documents:
        ids = tokenizer.encode(document.text)
        if len(ids) and ids.max() >= tokenizer.vocab_size:
            raise UserError(
                f"{document}: token id {ids.max()} is beyond the tokenizer's vocabulary of {tokenizer.vocab_size:,}"
            )
        by_split.setdefault(split, []).append((ids, document.source, document.position))
    shards = {
        split: save_shard(out, f"{split}-{portion.number:05d}", encoded, tokenizer)
        for split, encoded in by_split.items()
    }
    done = replace(portion, splits=shards)
    path = out / WORK_FOLDER / RECORDS.replace("*", f"{portion.number:05d}")
    write_atomically(path, json.dumps(asdict(done)).encode())
    return done


def _write_all(
    portions: Iterator[tuple[Portion, Documents]], out: Path, workers: int
) -> Generator[Portion, None, None]:
    """Writes all portions, a few of them at once."""
    first = list(islice(portions, 2))
    if workers == 1 or len(first) < 2:
        tokenizer = load_tokenizer(out)
        yield from (write_portion(*portion, out, tokenizer) for portion in chain(first, portions))
        return
    # Spawned, not forked: threads of torch and of the tokenizer do not survive a fork.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    running: set[Future[Portion]] = set()
    try:
        for portion in chain(first, portions):
            running.add(executor.submit(_write_in_worker, *portion, out))
            # What is read ahead is held in memory.
            while len(running) > 2 * workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C reaches every process of the terminal; only the parent handles it, and workers finish their portion.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended: killed, the parent cannot tell its workers to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    # Not sys.exit, which would end this thread alone. A shard that is being written leaves a partial file.
    os._exit(1)


_load_once = cache(load_tokenizer)


def _write_in_worker(portion: Portion, documents: Documents, out: Path) -> Portion:
    # A worker is of one preparation, during which the tokenizer stays what it is.
    return write_portion(portion, documents, out, _load_once(out))


def _progress(written: Iterable[Portion], total: int | None) -> PreparationProgress:
    written = list(written)
    shards = [shard for done in written for shard in done.splits.values()]
    return PreparationProgress(
        "writing shards",
        sum(done.source_bytes for done in written),
        total,
        sum(shard.documents for shard in shards),
        sum(shard.tokens for shard in shards),
    )
