"""The command `sympow bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.check import SHAPES, SIZES, Shape
from sympow.checks import check_choice, choose_device
from sympow.cli.common import Device
from sympow.errors import ArgumentError
from sympow.extras import require
from sympow.files import check_can_write
from sympow.invocation import recorded_command


def _by_device(size: str) -> str:
    """The default of a size, as help shows it."""
    gpu, cpu = (
        ", ".join(map(str, value)) if isinstance(value := getattr(SIZES[device], size), tuple) else value
        for device in ("cuda", "cpu")
    )
    return f"[default: {gpu} on a GPU, {cpu} on a CPU]"


def bench(
    context: Annotated[
        list[int] | None, typer.Option(help=f"Sequence length; repeatable. {_by_device('contexts')}")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help=f"Tokens per call, in sequences of that length. {_by_device('tokens')}")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help=f"A model whose heads, key heads and head dimension are timed: {', '.join(SHAPES)}."),
    ] = None,
    heads: Annotated[int | None, typer.Option(help=f"Number of query heads. {_by_device('heads')}")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Number of key and value heads, a divisor of --heads. [default: --heads]")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Head dimension. [default: 64]")] = None,
    power: Annotated[int, typer.Option(help="Power p: 2, 4, 6 or 8.")] = 2,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype of q, k and v: bfloat16, float16 or float32; repeatable, then softmax is timed in the first. "
            f"{_by_device('dtype')}"
        ),
    ] = None,
    gating: Annotated[
        list[str] | None,
        typer.Option(help="Gates: scalar, one per head, the default; vector, one per rotated pair; none. Repeatable."),
    ] = None,
    device: Device = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend: torch, triton or auto, the default; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Time only methods whose name contains this; repeatable.")
    ] = None,
    backward: Annotated[bool, typer.Option(help="Also time forward and backward together.")] = True,
    runs: Annotated[
        int | None, typer.Option(help=f"Rounds; each times every method once. {_by_device('runs')}")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write as rows are timed; a figure is written beside it.")
    ] = None,
) -> None:
    """Benchmark the attention operator against softmax attention.

    On a GPU, the packages retention and fla are timed as well if they are installed. The chunked form is timed where it
    has kernels (p = 2 with heads up to 128, p = 4 with heads up to 32), or with --backend torch. A line says why a
    method cannot run on these heads.

    Keys of grouped heads are not repeated: softmax runs with enable_gqa. A method that has no groups is timed on keys
    that were repeated before, and its name says so.
    """
    import torch

    from sympow.check.operator import Row, Setting, describe, print_rows, progress_bar, run_bench, save_rows
    from sympow.report.figure_files import plot_bench_rows
    from sympow.settings import BACKENDS, check_power

    device = choose_device(device)
    sizes = SIZES[device]
    contexts = context or sizes.contexts
    # At least one sequence of the longest context asked for.
    tokens = max(sizes.tokens, *contexts) if tokens is None else tokens
    given = {"--heads": heads, "--kv-heads": kv_heads, "--dim": dim}
    if shape is None:
        heads = sizes.heads if heads is None else heads
        model = Shape(heads, heads if kv_heads is None else kv_heads, 64 if dim is None else dim)
    else:
        check_choice("shape", shape, SHAPES)
        if combined := [flag for flag, value in given.items() if value is not None]:
            raise ArgumentError("shape", f"cannot be combined with {' or '.join(combined)}: {shape} has its own")
        model = SHAPES[shape]
    runs = sizes.runs if runs is None else runs
    dtypes = list(dict.fromkeys(dtype or [sizes.dtype]))
    backends: list[Any] = backend or ["auto"]
    check_power(power)
    for name in dtypes:
        check_choice("dtype", name, ("bfloat16", "float16", "float32"))
    for name in backends:
        check_choice("backend", name, BACKENDS)
    setting = Setting(
        tokens,
        model.heads,
        model.dim,
        power,
        getattr(torch, dtypes[0]),
        device,
        kv_heads=model.kv_heads,
        shape=shape,
        gating=tuple(gating or ("scalar",)),
        other_dtypes=tuple(getattr(torch, name) for name in dtypes[1:]),
    )
    if out is not None:
        figure = out.with_suffix(".png")
        if figure == out:
            raise ArgumentError("out", f"must name the JSON file, and {out} is the name of the figure beside it")
        check_can_write("out", out, "file")
        check_can_write("out", figure, "file")
        require("matplotlib", "report")
    rows: list[Row] = []
    unsupported: dict[str, str] = {}

    def on_unsupported(method: str, reason: str) -> None:
        unsupported[method] = reason
        typer.echo(f"{method} is not timed. {reason}", err=True)

    command = recorded_command()

    def save() -> None:
        if out is not None:
            save_rows(rows, setting, command, out, unsupported)

    options: dict[str, Any] = {"backward": backward, "runs": runs, "only": only or ()}
    with progress_bar() as on_progress:
        for row in run_bench(
            setting, contexts, backends, on_progress=on_progress, on_unsupported=on_unsupported, **options
        ):
            rows.append(row)
            typer.echo(f"{row.method} at {row.context:,}: {1e3 * row.forward.median:.2f} ms", err=True)
            # After each row: an interrupted benchmark keeps what it has timed.
            save()
    print_rows(rows, describe(setting))
    if out is not None:
        save()
        plot_bench_rows(rows, setting, figure)
        typer.echo(f"wrote {out} and {figure}", err=True)
