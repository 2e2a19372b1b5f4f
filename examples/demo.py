"""The main job end to end, on a CPU, within five minutes: train, evaluate, compare, generate.

Four small byte-level models (softmax, sympow, with gating, conformal) learn from the sources of Python's standard
library at two contexts, each on the same tokens. Held-out sources then show what each makes of contexts longer than
those it was trained on, and the conformal one writes some Python.

python examples/demo.py --out build/demo
"""

from __future__ import annotations

import argparse
import shutil
import time
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sympow.data import Loader, load_tokenizer, open_dataset
from sympow.evaluate import PositionLosses, loss_by_position
from sympow.generate import Sampling, generate
from sympow.model.storage import load_model
from sympow.model.variants import PAPER_VARIANTS
from sympow.report.figures import plot_loss_by_position
from sympow.report.grouping import LABELS
from sympow.train.config import laptop
from sympow.train.run_files import EXPORT
from sympow.train.trainer import train

# By what figures call them.
VARIANTS = {LABELS[name]: fields for name, fields in PAPER_VARIANTS.items()}
CONTEXTS = (128, 512)
EVALUATED = 2_048
DOCUMENTS = 8


def train_all(out: Path, steps: int, console: Console) -> dict[tuple[int, str], Path]:
    """A run for every context and variant."""
    runs = {}
    for context in CONTEXTS:
        for name, changes in VARIANTS.items():
            console.rule(f"{name}, context {context}")
            config = laptop().changed(
                **changes,
                context=context,
                steps=steps,
                batch_tokens=2_048,
                learning_rate=3e-3,
                warmup_steps=steps // 10,
                clip_norm=1.0,
                log_every=max(1, steps // 4),
                save_every=0,
            )
            folder = out / f"{name.replace(' + ', '-')}-{context}"
            runs[context, name] = train(config, folder, device="cpu")
    return runs


def evaluate_all(runs: dict[tuple[int, str], Path]) -> dict[tuple[int, str], PositionLosses]:
    """Loss by position on held-out sources, up to EVALUATED bytes."""
    heldout = Loader(open_dataset("stdlib", "heldout"), EVALUATED, 1, short="drop", shuffle=False, epochs=1)
    documents = [(batch.inputs, batch.targets) for batch in islice(heldout, DOCUMENTS)]
    return {key: loss_by_position(load_model(folder / EXPORT), documents) for key, folder in runs.items()}


def show_losses(losses: dict[tuple[int, str], PositionLosses], console: Console) -> None:
    title = f"Loss on {DOCUMENTS} held-out stretches, nats a byte: trained at a context → evaluated on"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for context in CONTEXTS:
        for part in (f"{context}", f"{EVALUATED:,}", "its end"):
            table.add_column(f"{context} → {part}", justify="right")
    for name in VARIANTS:
        cells = []
        for context in CONTEXTS:
            found = losses[context, name]
            numbers = (found.average(0, context), found.average(), found.average(EVALUATED - 256))
            cells += [f"{number:.3f}" for number in numbers]
        table.add_row(name, *cells)
    console.print(table)


def write_some_python(folder: Path, console: Console) -> None:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    text = 'import os\n\n\ndef read(path):\n    """'
    prompt = torch.from_numpy(tokenizer.encode(text).copy()).long().unsqueeze(0)
    tokens = [int(token) for token in generate(model, 240, Sampling(temperature=0.7), prompt=prompt, seed=0)]
    console.rule("the conformal model goes on after a prompt")
    console.print(text + tokenizer.decode(tokens), markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for runs and the figure")
    parser.add_argument("--steps", type=int, default=75, help="updates of each model; its cost is proportional")
    arguments = parser.parse_args()
    out: Path = arguments.out
    console, start = Console(), time.monotonic()
    shutil.rmtree(out / "runs", ignore_errors=True)
    runs = train_all(out / "runs", arguments.steps, console)
    losses = evaluate_all(runs)
    console.print()
    show_losses(losses, console)
    figure = out / "loss_by_position.png"
    plot_loss_by_position(
        {f"trained at {context}": {name: losses[context, name].mean for name in VARIANTS} for context in CONTEXTS},
        figure,
    )
    longest = CONTEXTS[-1]
    write_some_python(runs[longest, "conformal"] / EXPORT, console)
    console.rule(f"{time.monotonic() - start:.0f} seconds")
    console.print(f"Figure:       {figure}")
    console.print(
        f"Runs:         {out / 'runs'}  (metrics.jsonl, checkpoints, model; tensorboard --logdir {out / 'runs'})"
    )
    console.print(f"Go on:        sympow train --resume --out {runs[longest, 'conformal']} --steps 1000")
    console.print(f"A page:       sympow report {out / 'runs'} -o {out / 'report'}")
    console.print("Your text:    sympow data prepare TEXT… --out DIR, then sympow train --data DIR")
    console.print("The operator: make forms, README.md, docs/mathematics.md")


if __name__ == "__main__":
    main()
