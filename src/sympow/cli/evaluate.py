"""The command `sympow evaluate`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from sympow.cli.common import SEGMENT_SIZE, Device, Dtype, SegmentSize, device_and_dtype, name_of
from sympow.errors import ArgumentError, UserError
from sympow.extras import require
from sympow.files import check_can_write
from sympow.invocation import first_process, recorded_command, under_torchrun


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Model folders of one or more runs or conversions, or others in Hugging Face format."),
    ],
    data: Annotated[
        str | None, typer.Option(help="Dataset to evaluate on; by default the one that the models were trained on.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; by default 4 times the training context, or the longest document."),
    ] = None,
    documents: Annotated[
        int, typer.Option(help="Number of sequences: one of each document that is long enough, then further ones.")
    ] = 16,
    probe: Annotated[
        list[str] | None, typer.Option(help="Probe of the state to run: recall or passkey; repeatable.")
    ] = None,
    pairs: Annotated[
        list[int] | None, typer.Option(help="Number of pairs of the recall probe; by default 4, 16 and 64; repeatable.")
    ] = None,
    distance: Annotated[
        list[int] | None,
        typer.Option(
            help="Distance of the passkey probe in tokens; by default 64 to 4096, as far as documents have room; "
            "repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write evaluation.json and figures to.")] = None,
    segment_size: SegmentSize = SEGMENT_SIZE,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Evaluate models on held-out documents, by position.

    The probes measure what the state holds. Under torchrun, the processes share each document (context parallelism):

        torchrun --nproc-per-node 8 -m sympow evaluate RUN/model
    """
    import torch
    import torch.distributed as dist

    from sympow.evaluate.model_evaluation import (
        EvaluationSetting,
        check_probes,
        check_tokenizer,
        choose_sample,
        evaluate_model,
    )
    from sympow.generation.load import in_transformers_format, load_model, load_tokenizer
    from sympow.report.evaluation_summary import print_evaluations, save_evaluations
    from sympow.train.processes import process_group

    device, dtype = device_and_dtype(device, dtype)
    for path in checkpoints if under_torchrun() else ():
        if in_transformers_format(path):
            raise UserError(f"{path} is in Hugging Face format: evaluate it in one process, without torchrun")
    if out is not None:
        check_can_write("out", out, "folder")
        require("matplotlib", "report")
    sample = choose_sample(checkpoints, data, length, documents)
    setting = EvaluationSetting(
        sample.data,
        sample.length,
        documents,
        tuple(probe or ()),
        tuple(pairs) if pairs else None,
        tuple(distance) if distance else None,
        segment_size=segment_size,
        device=device,
        dtype=torch.bfloat16 if dtype == "bfloat16" else None,
    )
    setting = check_probes(setting)
    names = [name_of(path) for path in checkpoints]
    if len(set(names)) < len(names):
        raise ArgumentError("checkpoints", f"must be of runs with different names, got {', '.join(names)}")
    tokenizers = [load_tokenizer(path) for path in checkpoints]
    for path, tokenizer in zip(checkpoints, tokenizers, strict=True):
        check_tokenizer(path, tokenizer, setting)
    if first_process():
        typer.echo(sample.title)
        for note in sample.notes:
            typer.echo(note, err=True)
    with process_group(device) if under_torchrun() else nullcontext():
        found = {
            name: evaluate_model(
                path,
                setting,
                # None if there is no group of processes.
                dist.group.WORLD,
                # Not kept in a variable, which would hold one model while the next is loaded.
                model=load_model(path, device, torch.float32) if in_transformers_format(path) else None,
                tokenizer=tokenizer,
            )
            for name, path, tokenizer in zip(names, checkpoints, tokenizers, strict=True)
        }
    if not first_process():
        return
    print_evaluations(found, sample.length, sample.size)
    if out is not None:
        facts = {"command": recorded_command(), "data": sample.data, "device": device, "dtype": dtype}
        written = save_evaluations(found, facts, out)
        typer.echo(f"wrote {', '.join(map(str, written))}", err=True)
