"""The command `sympow`. Thin: each command reads its options and calls the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sympow import __version__
from sympow.bench.operator import SIZES
from sympow.checks import check_choice
from sympow.cli.check import check
from sympow.cli.common import App, print_json
from sympow.cli.data import app as data_app
from sympow.cli.train import train
from sympow.data.plain_text import check_text, read_text, unescape
from sympow.devices import choose_device
from sympow.experiment.cli import experiment
from sympow.extras import require
from sympow.files import check_can_write
from sympow.generation.cache import MEMORIES
from sympow.invocation import first_process, program, recorded_command, under_torchrun
from sympow.layers.gates import GATES
from sympow.layers.rotations import ROTATIONS
from sympow.model.config import MIXERS, PRESETS, GPTConfig
from sympow.model.gpt import PIECE
from sympow.ops.validation import BACKENDS, check_power
from sympow.train.run_folder import EXPORT

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sympow.generation.prefix import Reading
    from sympow.generation.text import TextModel

MEMORY_HELP = (
    "What to keep of what was read: state, keys (and values), or auto: keys until they would take more than a state."
)
app = App(help="Conformal symmetric power transformers.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.command()(train)
app.command()(experiment)
app.command()(check)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sympow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def info(
    preset: Annotated[str, typer.Argument(help=f"Model to describe: {', '.join(PRESETS)}.")] = "gpt2-124m",
    power: Annotated[int | None, typer.Option(help="p, even.")] = None,
    mixer: Annotated[str | None, typer.Option(help=f"Attention operator: {', '.join(MIXERS)}.")] = None,
    gating: Annotated[str | None, typer.Option(help=f"Kind of gate: {', '.join(GATES)}.")] = None,
    rotary: Annotated[str | None, typer.Option(help=f"Kind of rotation: {', '.join(ROTATIONS)}.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Size of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    key_value_heads: Annotated[int | None, typer.Option(help="Key/value heads, a divisor of heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head; by default width / heads.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Number of tokens.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Chunk of the chunked form; by default by cost.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context to count at; by default several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Shows parameters, state size and operations of a model.

    Options change the preset; by default its own values are taken.
    """
    from sympow.report.model_info import CONTEXTS, model_info, print_info

    changes: dict[str, Any] = {
        "power": power,
        "mixer": mixer,
        "gating": gating,
        "rotary": rotary,
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "chunk_size": chunk_size,
    }
    config = GPTConfig.preset(preset, **{k: v for k, v in changes.items() if v is not None})
    if context and min(context) < 1:
        raise ValueError(f"context must be at least 1, got {min(context)}")
    described = model_info(config, tuple(context) if context else CONTEXTS)
    if as_json:
        print_json(described)
    else:
        print_info(described, title=preset)


def _by_device(size: str) -> str:
    """What help says about a size of `bench`."""
    gpu, cpu = (
        ", ".join(map(str, value)) if isinstance(value := getattr(SIZES[device], size), tuple) else value
        for device in ("cuda", "cpu")
    )
    return f"[default: {gpu} on a GPU, {cpu} on a CPU]"


@app.command()
def bench(
    context: Annotated[
        list[int] | None, typer.Option(help=f"Sequence length; repeat for more. {_by_device('contexts')}")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of a call, in as many sequences as fit. {_by_device('tokens')}")
    ] = None,
    heads: Annotated[int | None, typer.Option(help=f"Heads. {_by_device('heads')}")] = None,
    dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    power: Annotated[int, typer.Option(help="p, even.")] = 2,
    dtype: Annotated[str | None, typer.Option(help=f"bfloat16, float16 or float32. {_by_device('dtype')}")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="torch, triton or auto, the default; repeat for more.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Time only methods with this in their name.")] = None,
    backward: Annotated[bool, typer.Option(help="Time forward and backward together, too.")] = True,
    runs: Annotated[
        int | None, typer.Option(help=f"Rounds, each with a sample of every method. {_by_device('runs')}")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write; a figure goes beside it.")] = None,
) -> None:
    """Times the operator's forms beside softmax attention.

    The packages retention and fla are timed too, on a GPU, where they are installed. The chunked form is timed where
    it has kernels for the power and the size of a head (p = 2 up to 128, p = 4 up to 32), or with --backend torch.
    """
    import torch

    from sympow.bench.operator import Setting, describe, print_rows, progress_bar, run_bench, save_rows
    from sympow.report.figures import plot_bench_rows

    device = choose_device(device)
    sizes = SIZES[device]
    contexts = context or sizes.contexts
    # At least one sequence of the longest context asked for.
    tokens = max(sizes.tokens, *contexts) if tokens is None else tokens
    heads = sizes.heads if heads is None else heads
    runs = sizes.runs if runs is None else runs
    dtype = dtype or sizes.dtype
    backends: list[Any] = backend or ["auto"]
    check_power(power)
    check_choice("dtype", dtype, ("bfloat16", "float16", "float32"))
    for name in backends:
        check_choice("backend", name, BACKENDS)
    setting = Setting(tokens, heads, dim, power, getattr(torch, dtype), device)
    if out is not None:
        check_can_write("out", out, "file")
        require("matplotlib", "report")
    rows = []
    options: dict[str, Any] = {"backward": backward, "runs": runs, "only": only or ()}
    with progress_bar() as on_progress:
        for row in run_bench(setting, contexts, backends, on_progress=on_progress, **options):
            rows.append(row)
            typer.echo(f"{row.method} at {row.context:,}: {1e3 * row.forward.median:.2f} ms", err=True)
    print_rows(rows, describe(setting))
    if out is not None:
        save_rows(rows, setting, recorded_command(), out)
        plot_bench_rows(rows, setting, out.with_suffix(".png"))
        typer.echo(f"wrote {out} and {out.with_suffix('.png')}", err=True)


@app.command()
def evaluate(
    checkpoints: Annotated[list[Path], typer.Argument(help="The model folders of one or more runs.")],
    data: Annotated[
        str | None, typer.Option(help="Read held-out documents of this instead of what the models were trained on.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens to read of each document; by default 4 times the training context, or as many as there are."
        ),
    ] = None,
    documents: Annotated[int, typer.Option(help="How many documents.")] = 16,
    probe: Annotated[list[str] | None, typer.Option(help="Probe the state, too: recall, passkey; repeatable.")] = None,
    pairs: Annotated[list[int] | None, typer.Option(help="Pairs for the probe recall; by default 4, 16, 64.")] = None,
    distance: Annotated[
        list[int] | None, typer.Option(help="Tokens for the probe passkey; by default to 4096.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON and figures.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens read at a time; memory depends on it.")] = PIECE,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16 on a GPU.")] = None,
) -> None:
    """Measures the loss on held-out documents by position.

    Probes measure what the state holds. Under torchrun, processes read each document together:

        torchrun --nproc-per-node 8 -m sympow evaluate RUN/model
    """
    import torch

    from sympow.report.model_evaluation import (
        Setting,
        choose_sample,
        evaluate_model,
        print_evaluations,
        save_evaluations,
    )

    device, dtype = _device_and_dtype(device, dtype)
    if out is not None:
        check_can_write("out", out, "folder")
        require("matplotlib", "report")
    sample = choose_sample(checkpoints, data, length)
    given = {"pairs": tuple(pairs or ()), "distances": tuple(distance or ())}
    setting = Setting(
        sample.data,
        sample.length,
        documents,
        tuple(probe or ()),
        piece=piece,
        device=device,
        dtype=torch.bfloat16 if dtype == "bfloat16" else None,
        **{name: values for name, values in given.items() if values},
    )
    names = [_name_of(path) for path in checkpoints]
    if len(set(names)) < len(names):
        raise ValueError(f"checkpoints must be of runs with different names, got {', '.join(names)}")
    if first_process():
        typer.echo(sample.title)
        for note in sample.notes:
            typer.echo(note, err=True)
    with _processes(device) as group:
        found = {name: evaluate_model(path, setting, group) for name, path in zip(names, checkpoints, strict=True)}
    if not first_process():
        return
    print_evaluations(found, sample.length)
    if out is not None:
        facts = {"command": recorded_command(), "data": sample.data, "device": device, "dtype": dtype}
        written = save_evaluations(found, facts, out)
        typer.echo(f"wrote {', '.join(map(str, written))}", err=True)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="The model folder of a run.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from, printed before what follows; repeat for several.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file to read before the prompt; - for standard input.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="A file of `sympow state` to go on from.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Choose among so many tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among tokens with this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens rarer than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens that were read or generated become less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"String that ends the text, with \n, \t, \xNN, \uNNNN and \\ for a backslash; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choices; by default another each time.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens of a prompt read at a time; memory depends on it.")] = PIECE,
    memory: Annotated[str, typer.Option(help=MEMORY_HELP)] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16 on a GPU.")] = None,
) -> None:
    """Continues a text.

    What was read is kept in a state whose size does not depend on how much it was.
    """
    from sympow.generation.sampling import Sampling
    from sympow.report.generated_text import print_continuations, print_stream

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    check_choice("memory", memory, MEMORIES)
    if file is None and state is None and not prompt:
        raise ValueError("give a --prompt, a --file or a --state to go on from")
    for text in prompt or ():
        check_text("prompt", text)
    stops = [unescape("stop", text) for text in stop or ()]
    text_before = None if file is None else read_text(file)
    text_model = _load_text_model(checkpoint, device, dtype)
    how: dict[str, Any] = {"piece": piece, "memory": memory}
    before = _read_before(text_model, text_before, state, how)
    readings = [
        text_model.read(text, **how) if before is None else text_model.read_on(before, text, **how)
        for text in prompt or [""]
    ]
    options: dict[str, Any] = {
        "tokens": tokens,
        "sampling": sampling,
        "stop": stops,
        "seed": seed,
        "memory": memory,
    }
    if len(readings) == 1:
        print_stream(text_model, readings[0], "".join(prompt or ()), **options)
    else:
        print_continuations(text_model, readings, prompt or [], **options)


@app.command(name="state")
def state_(
    checkpoint: Annotated[Path, typer.Argument(help="The model folder of a run.")],
    file: Annotated[Path, typer.Argument(help="The text file to read; - for standard input.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    after: Annotated[Path | None, typer.Option(help="A file of this command: read on from there.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens read at a time; memory depends on it.")] = PIECE,
    memory: Annotated[str, typer.Option(help=MEMORY_HELP)] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16 on a GPU.")] = None,
) -> None:
    """Reads a text and saves the state, to generate from later.

    The file is what `sympow generate` takes as --state.
    """
    from sympow.report.generated_text import describe_memory

    check_choice("memory", memory, MEMORIES)
    check_can_write("out", out, "file")
    text = read_text(file)
    text_model = _load_text_model(checkpoint, device, dtype)
    reading = _read_before(text_model, text, after, {"piece": piece, "memory": memory})
    assert reading is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    reading.save(out, text_model.model)
    typer.echo(f"{out}: {reading.tokens:,} tokens in {describe_memory(reading, memory)}")  # type: ignore[arg-type]


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, folders of runs however deep, or an experiment's results.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the page, figures and numbers.")],
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Training runs",
    heads: Annotated[
        bool, typer.Option(help="Measure what heads learned, where it is not known yet; kept in the run's folder.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu, for that; by default what there is.")] = None,
) -> None:
    """Writes a page with figures that compares runs.

    It shows losses, curves, speed and settings, and what gates and rotations learned.
    """
    from sympow.report.run_report import write_report

    device = choose_device(device)
    check_can_write("out", out, "folder")
    require("matplotlib", "report")
    require("plotly", "report")
    written = write_report(runs, out, title=title, heads=heads, device=device)
    typer.echo(f"wrote {written[0]}, {written[1].name} and {len(written) - 2} figures", err=True)


@app.command(name="inspect")
def inspect_(
    checkpoint: Annotated[Path, typer.Argument(help="The model folder of a run.")],
    file: Annotated[Path | None, typer.Argument(help="The text file to read; - for standard input.")] = None,
    text: Annotated[str | None, typer.Option(help="The text itself, instead of a file.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("inspect.html"),
    tokens: Annotated[int, typer.Option(help="Tokens to read at most; the page grows with them.")] = 8_192,
    piece: Annotated[int, typer.Option(help="Tokens read at a time; memory depends on it.")] = PIECE,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16 on a GPU.")] = None,
) -> None:
    """Writes a page that shows gates and rotations along a text.

    Each token is coloured by how much a head forgot (γ) and turned (β) there.
    """
    from sympow.files import write_atomically
    from sympow.report.inspection import build_inspection_page, inspect_text

    if text is not None and file is None:
        check_text("text", text)
        content = text
    elif file is not None and text is None:
        content = read_text(file)
    else:
        raise ValueError("give either a file (- for standard input) or a --text")
    check_can_write("out", out, "file")
    require("plotly", "report")
    inspection = inspect_text(_load_text_model(checkpoint, device, dtype), content, tokens=tokens, piece=piece)
    named = "a text" if file is None or str(file) == "-" else file.name
    title = f"{named}, as {checkpoint} reads it"
    write_atomically(out, build_inspection_page(inspection, title).encode())
    if inspection.left_out:
        typer.echo(
            f"the text has {tokens + inspection.left_out:,} tokens; the first {tokens:,} are shown (--tokens)", err=True
        )
    typer.echo(f"wrote {out}", err=True)


@contextmanager
def _processes(device: str) -> Iterator[ProcessGroup | None]:
    """The processes that torchrun started; None: this is the only one."""
    if not under_torchrun():
        yield None
        return
    import torch.distributed as dist

    from sympow.train.distributed import process_group

    with process_group(device):
        yield dist.group.WORLD


def _load_text_model(checkpoint: Path, device: str | None, dtype: str | None) -> TextModel:
    import torch

    from sympow.generation.text import TextModel

    device, dtype = _device_and_dtype(device, dtype)
    return TextModel.load(checkpoint, device, getattr(torch, dtype))


def _device_and_dtype(device: str | None, dtype: str | None) -> tuple[str, str]:
    """As asked for, or a GPU if there is one, and bfloat16 on it."""
    device = choose_device(device)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    check_choice("dtype", dtype, ("bfloat16", "float32"))
    return device, dtype


def _name_of(checkpoint: Path) -> str:
    """A run's name: that of its folder, not that of the model folder within."""
    path = checkpoint.resolve()
    return path.parent.name if path.name == EXPORT else path.name


def _read_before(text_model: TextModel, text: str | None, state: Path | None, how: dict[str, Any]) -> Reading | None:
    """What comes before a prompt: a saved state, then a text."""
    from sympow.generation.prefix import Reading

    reading = None if state is None else Reading.load(state, text_model.model)
    if text is None:
        return reading
    return text_model.read(text, **how) if reading is None else text_model.read_on(reading, text, **how)


def main() -> None:
    """Reads the command line; `sympow.__main__` calls it."""
    app(prog_name=program())


if __name__ == "__main__":
    main()
