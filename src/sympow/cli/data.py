"""The commands `sympow data prepare` and `sympow data info`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.cli.common import App, counted, print_json

app = App(help="Tokenize text for training, and describe datasets.", no_args_is_help=True)


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Text files, tables (.jsonl, .json, .csv, .tsv, .parquet, .arrow), folders of such files, and what "
            "the library datasets finds by name, as hf:NAME or hf:NAME,name=CONFIG,split=train.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; if it holds an interrupted run, that is resumed.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, gpt2, bpe (trained here), a tokenizer.json, or a folder with a saved tokenizer.")
    ] = "bytes",
    vocab_size: Annotated[int | None, typer.Option(help="For bpe: number of tokens; by default 8,192.")] = None,
    boundary_token: Annotated[
        str | None, typer.Option(help="For a tokenizer.json: its token between documents.")
    ] = None,
    field: Annotated[str, typer.Option(help="Column of a table, or key of a line, with the text.")] = "text",
    heldout: Annotated[
        float | None,
        typer.Option(help="Share of the documents to hold out, chosen by hash; by default 0.02; 0: none."),
    ] = None,
    heldout_source: Annotated[
        list[str] | None,
        typer.Option(help="Source to hold out instead of a share, also a file or folder in a SOURCE; repeatable."),
    ] = None,
    skip_empty: Annotated[bool, typer.Option("--skip-empty", help="Skip empty documents, and count them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier dataset in the folder.")] = False,
    workers: Annotated[int | None, typer.Option(help="Number of processes; by default one per core.")] = None,
) -> None:
    """Tokenize text into shards to train on.

    If the command is interrupted, running it again resumes it.
    """
    from sympow.data.preparation import PreparationProgress
    from sympow.data.preparation import prepare as run
    from sympow.extras import require

    columns = require("rich.progress", "cli")
    bar = columns.Progress(
        columns.TextColumn("{task.description}"),
        # All of it fits in 80 columns, up to terabytes.
        columns.BarColumn(bar_width=16),
        columns.DownloadColumn(),
        columns.TimeRemainingColumn(),
        columns.TextColumn("{task.fields[written]}"),
        console=require("rich.console", "cli").Console(stderr=True),
    )
    tasks: dict[str, Any] = {}

    def show(progress: PreparationProgress) -> None:
        if progress.stage not in tasks:
            # Until a part of it is done, the bar only moves.
            tasks[progress.stage] = bar.add_task(progress.stage, start=False, total=progress.total_bytes, written="")
        task, done = tasks[progress.stage], progress.source_bytes
        if done:
            bar.start_task(task)
        bar.update(
            task,
            completed=done,
            total=progress.total_bytes,
            written=f"{progress.tokens:,} tokens" if progress.tokens else "",
        )

    try:
        with bar:
            manifest = run(
                sources,
                out,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                boundary_token=boundary_token,
                field=field,
                heldout=heldout,
                heldout_sources=heldout_source or (),
                skip_empty=skip_empty,
                overwrite=overwrite,
                workers=workers,
                on_progress=show,
            )
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command to resume", err=True)
        raise typer.Exit(130) from None
    counts = manifest.counts
    in_all = f"{counted(counts['documents'], 'document')}, {counts['tokens']:,} tokens"
    typer.echo(f"{out}: {in_all} ({manifest.tokenizer['kind']})")
    for name, shards in manifest.splits.items():
        documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
        in_shards = counted(len(shards), "shard")
        typer.echo(f"  {name}: {counted(documents, 'document')}, {tokens:,} tokens in {in_shards}")
    if "documents_cut_in_two" in counts:
        typer.echo("  the end of the only document is held out; --heldout 0 keeps all of it for training")
    if counts["empty_documents_skipped"]:
        typer.echo(f"  skipped: {counted(counts['empty_documents_skipped'], 'empty document')}")
    if counts["files_ignored"]:
        first = counts["files_ignored"][0]
        typer.echo(f"  left out: {counted(len(counts['files_ignored']), 'file')} of unknown types, such as {first}")


@app.command()
def tokenizer(
    folder: Annotated[Path, typer.Argument(help="Folder with token files of datatrove, Megatron or nanoGPT.")],
    tokenizer: Annotated[str, typer.Argument(help="gpt2, a tokenizer.json, or a folder with a saved tokenizer.")],
    boundary_token: Annotated[
        str | None, typer.Option(help="For a tokenizer.json: its token between documents.")
    ] = None,
) -> None:
    """Say which tokenizer made the token files in a folder: it is saved beside them."""
    from sympow.data.formats.token_files import name_tokenizer

    made = name_tokenizer(folder, tokenizer, boundary_token)
    typer.echo(f"{folder}: {made.kind}, {made.vocab_size:,} tokens, boundary token {made.boundary:,}")


@app.command()
def info(
    source: Annotated[
        str,
        typer.Argument(
            help="A prepared folder, token files of datatrove, Megatron or nanoGPT, LongCrawl64's folder or address, "
            "mqar (as in mqar:pairs=32,length=256), or stdlib."
        ),
    ] = "stdlib",
    tokens: Annotated[int, typer.Option(help="Tokens to show of the first documents.")] = 32,
    verify: Annotated[bool, typer.Option("--verify", help="Read all shards and compare their hashes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Describe a dataset: counts, lengths and first tokens."""
    from sympow.data.describe import describe, print_description

    described = describe(source, shown_tokens=tokens, verify=verify)
    if as_json:
        print_json(described)
    else:
        print_description(described)
