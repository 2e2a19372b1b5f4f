"""Run folders with made-up numbers."""

import json
from itertools import product
from pathlib import Path

from sympow.report.grouping import group_runs
from sympow.report.run_collection import collect
from sympow.train import TrainConfig

VARIANTS = {
    "softmax": {"mixer": "softmax", "gating": "none", "rotary": "fixed"},
    "sympow": {"gating": "none", "rotary": "fixed"},
    "gating": {"gating": "scalar", "rotary": "fixed"},
    "conformal": {"gating": "scalar", "rotary": "scale"},
}


def write_run(folder, losses, *, lines=None, evaluation=None, probes=None, head_table=None, **changes):
    """Writes a run folder as training does, from given numbers.

    Args:
        losses: the loss of every step.
        lines: further metrics, by step.
        evaluation: the loss at each position.
        probes: further entries of the evaluation.
        head_table: quantities by layer and head.
        changes: settings that differ from the config's defaults; `steps` is the number of losses by default, and
            the model is conformal.
    """
    folder.mkdir(parents=True)
    changes = {"steps": len(losses), "rotary": "scale", "context": 64, "batch_tokens": 128, **changes}
    (folder / "config.yaml").write_text(TrainConfig().changed(**changes).to_yaml())
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, start=1):
            file.write(json.dumps({"step": step, "loss": loss, **(lines or {}).get(step, {})}) + "\n")
    if evaluation is not None:
        write_evaluation(folder / "evaluation.json", {folder.name: evaluation}, **(probes or {}))
    if head_table is not None:
        (folder / "heads.json").write_text(json.dumps({"tokens": 4096, "data": "stdlib", "quantities": head_table}))
    return folder


def grid(powers, contexts, rates=(6e-4,)):
    """Of the runs of four variants with two seeds: folder, place of the variant, its name, a loss, and settings."""
    for place, (name, variant) in enumerate(VARIANTS.items()):
        for context, power, rate, seed in product(contexts, powers, rates, (0, 1)):
            if name == "softmax" and power != powers[0]:
                continue
            loss = 3 - 0.1 * place - 0.05 * power + 0.02 * seed
            settings = {"seed": seed, "context": context, "learning_rate": rate, **variant}
            if name != "softmax":
                settings["power"] = power
            folder = f"{name}-p{power}-{context}" + (f"-{rate}" if len(rates) > 1 else "")
            yield Path(folder) / f"seed{seed}", place, name, loss, settings


def write_evaluation(path, means, **probes):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"documents": 3, "by_context": {}, "error": [], **probes}
    models = {name: {**content, "mean": mean} for name, mean in means.items()}
    path.write_text(json.dumps({"data": "stdlib", "models": models}))


def groups_of(folder):
    """The runs below a folder, as figures and pages take them."""
    return group_runs(collect([folder]).runs)
