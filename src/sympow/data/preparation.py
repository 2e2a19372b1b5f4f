"""`prepare`: text files to token shards, in parallel, resuming where an interrupted run stopped.

Source files are cut into ranges and these are grouped (`sympow.data.sources`), depending only on the files; each group
becomes at most one shard per split. A finished group leaves a record beside its shards, so a second run does only what
is missing and ends with the same files. The manifest is written last: a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sympow.checks import check_at_least
from sympow.data.dataset import SPLITS, check_fraction
from sympow.data.manifest import (
    INDEX_ENDING,
    MANIFEST_FILE,
    TOKENS_ENDING,
    VERIFIED_FILE,
    WORK_FOLDER,
    Manifest,
    Shard,
)
from sympow.data.plain_text import check_text
from sympow.data.rows import permutation
from sympow.data.sources import (
    BY_HASH,
    Document,
    FileRange,
    HeldoutRule,
    check_field,
    describe_position,
    file_ranges,
    find_files,
    group_ranges,
    read_documents,
)
from sympow.data.token_shards import ShardWriter, id_dtype
from sympow.data.tokenizer import (
    MODEL_FILE,
    SETTINGS_FILE,
    Tokenizer,
    check_boundary_token,
    check_vocab_size,
    load_tokenizer,
    train_bpe,
)
from sympow.exceptions import raised_by_sympow
from sympow.files import (
    PARTIAL_ENDING,
    check_can_write,
    missing_folders,
    remove_empty,
    sha256_of,
    write_atomically,
)
from sympow.locks import LOCK_ENDING, lock_file
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
LOCK_FILE = f"{WORK_FOLDER}{LOCK_ENDING}"


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation.

    Attributes:
        stage: "counting words" and "merging pairs", which learn the tokenizer, or "writing shards".
        source_bytes: of the sources, done so far. Pairs are merged in all of them at once.
        total_bytes: of the sources in all.
        documents: written so far.
        tokens: written so far.
    """

    stage: str
    source_bytes: int
    total_bytes: int
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
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Tokenizes documents into memory-mapped shards that `open_dataset(out)` reads.

    Run again after an interruption it resumes; run again when done it does nothing.

    Args:
        sources: .jsonl files (a document a line), .parquet files (a document a row), text files of any other name (a
            document each), and folders (see `sources.find_files`).
        out: folder to write, new or left by an earlier run of the same.
        tokenizer: "bytes", "gpt2", "bpe" (trained on the training documents), a tokenizer.json, or a folder with a
            saved tokenizer.
        vocab_size: for "bpe", its number of tokens; by default 8,192.
        boundary_token: for a tokenizer.json, the token that separates documents.
        field: key or column with the text.
        heldout: fraction of the documents to hold out, chosen by a hash of their text, so that copies stay together: at
            least one of several, and of a single document its end (see `sources.HeldoutRule`). By default 0.02, or
            with heldout_sources none; 0: nothing.
        heldout_sources: files and folders to hold out instead. They may be inside folders of `sources`, which then
            give the other files for training.
        skip_empty: skip and count empty documents, instead of refusing them.
        overwrite: replace what an earlier preparation left in `out`, once all arguments have been checked.
        workers: processes; by default one per core.
        shard_bytes: source bytes per shard, at most, unless one document or row group has more.
        on_progress: called after every shard.
    """
    if heldout is None:
        heldout = 0.0 if heldout_sources else HELDOUT
    check_fraction("heldout", heldout)
    check_at_least("shard_bytes", shard_bytes, 1)
    if workers is not None:
        check_at_least("workers", workers, 1)
    if heldout and heldout_sources:
        raise ValueError("heldout and heldout_sources both choose what is held out; give one of them")
    if vocab_size is not None:
        if tokenizer != "bpe":
            raise ValueError(f"vocab_size is for tokenizer='bpe', which is trained here; got tokenizer={tokenizer!r}")
        check_vocab_size(vocab_size)
    check_boundary_token(tokenizer, boundary_token)
    if not sources:
        raise ValueError("sources must name at least one file or folder")
    out = Path(out)
    check_can_write("out", out, "folder")

    listing, ignored = _list_sources(
        sources, heldout_sources, BY_HASH if heldout else "train", shard_bytes, may_be_empty=skip_empty
    )
    groups = group_ranges(listing, shard_bytes)
    request: dict[str, Any] = {
        "tokenizer": _tokenizer_identity(tokenizer),
        "vocab_size": (vocab_size or BPE_VOCAB_SIZE) if tokenizer == "bpe" else None,
        "boundary_token": boundary_token,
        "field": field,
        "heldout": heldout,
        "skip_empty": skip_empty,
        "portion_bytes": shard_bytes,
        "sources": _digest(groups),
    }
    with _locked(out):
        earlier, finished = (None, None) if overwrite else _find_earlier(out)
        if earlier is None:
            _check_can_start(out)
            check_field(listing, field)
        else:
            _check_same(out, request, earlier)
            if finished is not None:
                return finished

        rule = HeldoutRule.for_documents(_contents(listing, field), heldout) if heldout else HeldoutRule(0)
        job = Job(out, field, rule, skip_empty)
        if earlier is None:
            made = _make_tokenizer(tokenizer, request["vocab_size"], boundary_token, groups, job, on_progress)
            # Only now, when all arguments are known to be right: `out` may hold earlier data, and this very tokenizer.
            _start(out, request, made)
        records = _write_all(groups, job, workers, on_progress)

        manifest = _summarize(records, listing, ignored, request, load_tokenizer(out), rule)
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
            raise ValueError(
                f"out={str(out)!r} is in use by another preparation; wait until it has ended, or choose another folder"
            ) from error
        yield


def _summarize(
    records: Sequence[Record],
    listing: Sequence[FileRange],
    ignored: Sequence[Path],
    request: dict[str, Any],
    tokenizer: Tokenizer,
    rule: HeldoutRule,
) -> Manifest:
    splits = {name: tuple(done.splits[name] for done in records if name in done.splits) for name in SPLITS}
    documents = {name: sum(shard.documents for shard in shards) for name, shards in splits.items()}
    heldout_wanted = request["heldout"] or any(file_range.split == "heldout" for file_range in listing)
    for name in SPLITS if heldout_wanted else ("train",):
        if not documents[name]:
            raise ValueError(
                f"no document for the split {name!r} out of {sum(documents.values()):,}, with "
                f"heldout={request['heldout']}; choose another share (0 holds nothing out) and overwrite"
            )
    return Manifest(
        tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "boundary": tokenizer.boundary},
        dtype=id_dtype(tokenizer.vocab_size).name,
        counts={
            "files": len({file_range.file for file_range in listing}),
            "files_ignored": list(map(str, ignored)),
            "source_bytes": sum(record.source_bytes for record in records),
            "documents": sum(documents.values()),
            "empty_documents_skipped": sum(record.empty_documents_skipped for record in records),
            "tokens": sum(shard.tokens for shards in splits.values() for shard in shards),
            # Each is in both splits: its beginning in one, its end in the other.
            **({"documents_cut_in_two": documents["heldout"]} if rule.tail else {}),
        },
        request=request,
        splits=splits,
    )


def _list_sources(
    sources: Sequence[Path | str],
    heldout_sources: Sequence[Path | str],
    split: str,
    shard_bytes: int,
    *,
    may_be_empty: bool,
) -> tuple[list[FileRange], list[Path]]:
    """Ranges of all files, each with its split, and the files that are not documents.

    A file of a folder among the sources that is held out is in the held-out split alone.

    Args:
        split: of the sources that are not held out.
    """
    found, heldout = find_files(sources), find_files(heldout_sources)
    held = {path.resolve() for path in heldout.files}
    for source in map(Path, sources):
        if source.is_file() and source.resolve() in held:
            raise ValueError(
                f"sources and heldout_sources both contain {source}; name its folder among the sources to train on "
                "the others of its files"
            )
    files = [path for path in found.files if path.resolve() not in held]
    if not files:
        raise ValueError("heldout_sources must leave a file of the sources for training, and contain all of them")

    listing: list[FileRange] = []
    seen: dict[Path, Path] = {}
    for files_split, group in ((split, files), ("heldout", heldout.files)):
        for path in group:
            if (other := seen.setdefault(path.resolve(), path)) is not path:
                raise ValueError(f"sources contain {path} twice, also as {other}")
            listing += file_ranges(path, files_split, shard_bytes, may_be_empty=may_be_empty)
    ignored = {path.resolve(): path for path in (*found.ignored, *heldout.ignored)}
    return listing, [path for resolved, path in ignored.items() if resolved not in seen]


def _contents(listing: Iterable[FileRange], field: str) -> Iterator[bytes]:
    """Of all documents that will be written, in order."""
    for file_range in listing:
        yield from (document.text.encode() for document in _documents_of(file_range, field) if document.text)


def _digest(groups: Iterable[tuple[FileRange, ...]]) -> str:
    """Changes when a source does (its name, size, modification time, split) or when ranges do."""
    state = [
        [(e.file, e.begin, e.end, e.split == "heldout", Path(e.file).stat().st_mtime_ns) for e in group]
        for group in groups
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _tokenizer_identity(tokenizer: str) -> str:
    path = Path(tokenizer)
    if path.is_dir():
        path = path / (MODEL_FILE if (path / MODEL_FILE).is_file() else SETTINGS_FILE)
    return f"{path.name} {sha256_of(path)}" if path.is_file() else tokenizer


def _find_earlier(out: Path) -> tuple[dict[str, Any] | None, Manifest | None]:
    """The request of an earlier preparation that wrote shards, and its manifest if it is finished."""
    if (out / MANIFEST_FILE).is_file():
        manifest = Manifest.load(out)
        return manifest.request, manifest
    if not any((out / WORK_FOLDER).glob(RECORDS)):
        # A request that was refused before it wrote a shard does not count.
        return None, None
    path = out / WORK_FOLDER / REQUEST_FILE
    request = read_json(path)
    if not isinstance(request, dict):
        raise ValueError(f"{path} is not a request; overwrite what was prepared")
    return request, None


def _check_same(out: Path, request: dict[str, Any], earlier: dict[str, Any]) -> None:
    different = sorted(key for key in request if request[key] != earlier.get(key))
    if different:
        # The digest of the sources is not readable.
        shown = [
            key if key == "sources" else f"{key} (was {earlier.get(key)}, now {request[key]})" for key in different
        ]
        raise ValueError(
            f"out={str(out)!r} was prepared from something else: {', '.join(shown)} differ; "
            "choose another folder or overwrite it"
        )


def _check_can_start(out: Path) -> None:
    """Refuses a folder of other things. Those beside an earlier preparation are left alone."""
    earlier = (out / WORK_FOLDER).is_dir() or (out / MANIFEST_FILE).is_file()
    if not earlier and any(path.name != LOCK_FILE for path in out.iterdir()):
        raise ValueError(f"out={str(out)!r} must be a new or empty folder, or one that an interrupted run left")


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


def _make_tokenizer(
    name: str,
    vocab_size: int | None,
    boundary_token: str | None,
    groups: Sequence[tuple[FileRange, ...]],
    job: Job,
    on_progress: Callable[[Progress], None],
) -> Tokenizer:
    if name != "bpe":
        return load_tokenizer(name, boundary_token)
    assert vocab_size is not None
    total = min(BPE_TRAINING_BYTES, sum(file_range.size for group in groups for file_range in group))
    learned = train_bpe(_training_texts(groups, job, total, on_progress), vocab_size)
    on_progress(Progress("merging pairs", total, total))
    return learned


def _training_texts(
    groups: Sequence[tuple[FileRange, ...]], job: Job, total: int, on_progress: Callable[[Progress], None]
) -> Iterator[str]:
    """Training documents of randomly chosen groups, up to `total` bytes; the trainer merges when it has read them."""
    read = 0
    for file_range in (file_range for index in permutation(len(groups), 0).tolist() for file_range in groups[index]):
        yield from (document.text for split, document in _split_documents(file_range, job) if split == "train")
        read += file_range.size
        on_progress(Progress("counting words", min(read, total), total))
        if read >= total:
            break
    on_progress(Progress("merging pairs", 0, total))


def _write_all(
    groups: Sequence[tuple[FileRange, ...]], job: Job, workers: int | None, on_progress: Callable[[Progress], None]
) -> list[Record]:
    sizes = [sum(file_range.size for file_range in group) for group in groups]
    records: dict[int, Record] = {}
    missing = []
    for number in range(len(groups)):
        path = _record_path(job.out, number)
        if path.is_file():
            records[number] = Record.load(path)
        else:
            missing.append(number)

    def report() -> None:
        shards = [shard for record in records.values() for shard in record.splits.values()]
        on_progress(
            Progress(
                "writing shards",
                sum(sizes[number] for number in records),
                sum(sizes),
                sum(shard.documents for shard in shards),
                sum(shard.tokens for shard in shards),
            )
        )

    report()
    workers = min(workers or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        tokenizer = load_tokenizer(job.out)
        for number in missing:
            records[number] = write_shards(groups[number], number, job, tokenizer)
            report()
        return [records[number] for number in range(len(groups))]
    # Spawned, not forked: threads of torch and of the tokenizer do not survive a fork.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
    try:
        futures = {executor.submit(_run_in_worker, groups[number], number): number for number in missing}
        for future in as_completed(futures):
            done = future.result()
            if isinstance(done, ValueError):
                raise done
            records[futures[future]] = done
            report()
    finally:
        executor.shutdown(cancel_futures=True)
    return [records[number] for number in range(len(groups))]


_worker: tuple[Job, Tokenizer] | None = None


def _start_worker(job: Job) -> None:
    global _worker
    # Ctrl-C reaches every process of the terminal; only the parent handles it, and workers finish their group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = job, load_tokenizer(job.out)


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended: killed, the parent cannot tell its workers to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    # Not sys.exit, which would end this thread alone. A shard that is being written leaves a partial file.
    os._exit(1)


def _run_in_worker(group: tuple[FileRange, ...], number: int) -> Record | ValueError:
    """As `write_shards`, but returns sympow's own errors for the parent to raise.

    An exception that leaves a worker loses its frames, by which a command tells a bad document from a bug.
    """
    assert _worker is not None
    try:
        return write_shards(group, number, *_worker)
    except ValueError as error:
        if not raised_by_sympow(error):
            raise
        return error


@dataclass(frozen=True)
class Job:
    """Settings that are the same for all groups."""

    out: Path
    field: str
    rule: HeldoutRule
    skip_empty: bool


@dataclass(frozen=True)
class Record:
    """The record of a finished group, from which an interrupted preparation resumes."""

    splits: dict[str, Shard]
    source_bytes: int
    empty_documents_skipped: int

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Record:
        content = read_json(path)
        try:
            splits = {name: Shard.from_dict(shard) for name, shard in content.pop("splits").items()}
            return cls(**content, splits=splits)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the record of a shard: {error}; overwrite what was prepared") from error


def _split_documents(file_range: FileRange, job: Job) -> Iterator[tuple[str, Document]]:
    """The documents of a file range, each with its split; a single document may be cut in two."""
    for document in _documents_of(file_range, job.field):
        if file_range.split != BY_HASH:
            yield file_range.split, document
            continue
        for split, text in job.rule.split(document.text):
            yield split, replace(document, text=text)


def _documents_of(file_range: FileRange, field: str) -> Iterator[Document]:
    """The documents of a file range. Text without a UTF-8 encoding (lone surrogates in JSON) is refused."""
    for document in read_documents(file_range, field):
        check_text(describe_position(file_range.file, document.position), document.text)
        yield document


def write_shards(group: tuple[FileRange, ...], number: int, job: Job, tokenizer: Tokenizer) -> Record:
    """Tokenizes a group of file ranges and writes its shards, then its record."""
    writers: dict[str, ShardWriter] = {}
    skipped = 0
    for file_range in group:
        for split, document in _split_documents(file_range, job):
            where = describe_position(file_range.file, document.position)
            if not document.text:
                if not job.skip_empty:
                    raise ValueError(f"{where}: the document is empty; skip_empty leaves such documents out")
                skipped += 1
                continue
            ids = tokenizer.encode(document.text)
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                raise ValueError(
                    f"{where}: token id {ids.max()} is beyond the tokenizer's vocabulary of {tokenizer.vocab_size:,}"
                )
            if split not in writers:
                writers[split] = ShardWriter(id_dtype(tokenizer.vocab_size), tokenizer.boundary)
            writers[split].add(ids, file_range.file, document.position)
    shards = {split: writer.save(job.out, f"{split}-{number:05d}") for split, writer in writers.items()}
    record = Record(shards, sum(file_range.size for file_range in group), skipped)
    record.save(_record_path(job.out, number))
    return record


def _record_path(out: Path, number: int) -> Path:
    return out / WORK_FOLDER / RECORDS.replace("*", f"{number:05d}")
