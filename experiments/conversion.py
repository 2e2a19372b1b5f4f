"""A real conversion: a Llama-shaped teacher is trained on books, and becomes symmetric power transformers.

    python -m experiments.conversion --corpus books-tokens.tar.xz --out build/conversion --results RESULTS

The steps: `data` unpacks the corpus (an archive of `prepare_corpus.py`, or a folder that it prepared), `teacher` trains
the teacher, `all-0` to `all-2` convert every layer with three seeds (the first also without stage 1), `hybrid-0` to
`hybrid-2` every other layer, `chosen-0` to `chosen-2` the half of the layers whose attention outputs stage 1 of `all-0`
matched best, `extended` spends a part of its tokens on longer contexts, and `results` writes tables and figures of what
there is. They run in this order, but for `hybrid-0`, which comes before `all-1`: students with all layers converted and
with half of them are there early. Each step is skipped if it is done and continues where it was interrupted, so the
same command may be called again. --only chooses steps.

Each student sees at most a fifth of the teacher's tokens, in all its stages together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.grid import read_setting
from experiments.prepare_corpus import unpack_shards
from experiments.text_run import condense
from sympow.checks import choose_device
from sympow.convert import ConvertConfig, convert
from sympow.convert.evaluation import ModelLosses, difference
from sympow.convert.objectives import NextToken
from sympow.convert.report import draw_by_context, draw_by_position, layer_errors
from sympow.convert.stages import EVALUATIONS, STAGES, START, TEACHER, WITHOUT_MATCH, plan, train_stage
from sympow.data import open_dataset
from sympow.data.manifest import MANIFEST_FILE
from sympow.errors import UserError
from sympow.files import write_atomically
from sympow.parsing import read_json
from sympow.train.loop import surroundings
from sympow.train.metrics import read_metrics
from sympow.train.processes import process_group
from sympow.train.run_folder import CHECKPOINTS, METRICS_FILE, claimed_folder

STEPS = (
    "data",
    "teacher",
    "all-0",
    "hybrid-0",
    "all-1",
    "all-2",
    "hybrid-1",
    "hybrid-2",
    "chosen-0",
    "chosen-1",
    "chosen-2",
    "extended",
    "results",
)
# In the teacher's folder: what it was trained with, which a later call may not say again.
TRAINED_FILE = "trained.json"


@dataclass(frozen=True)
class ConversionScale:
    """Sizes of the experiment.

    Attributes:
        shape: arguments of `LlamaConfig`.
        teacher: settings of the teacher's training, by the names of a conversion's.
        teacher_tokens: tokens that the teacher is trained on.
        teacher_rate: its peak learning rate.
        student: settings of all conversions.
        extend_tokens: tokens of `extended` in stage 3, which it takes from stage 2.
    """

    shape: dict[str, Any]
    teacher: dict[str, Any]
    teacher_tokens: int
    teacher_rate: float
    student: dict[str, Any]
    extend_tokens: int


SCALES = {
    # 30.2M parameters with the embedding of 4,096 tokens; 10 layers, 8 query and 2 key heads of 64.
    "small": ConversionScale(
        shape={
            "hidden_size": 512,
            "intermediate_size": 1_408,
            "num_hidden_layers": 10,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2_048,
        },
        teacher={"context": 2_048, "batch_tokens": 131_072, "micro_batch_tokens": 32_768, "weight_decay": 0.1},
        teacher_tokens=200_000_000,
        teacher_rate=1.5e-3,
        student={
            "context": 2_048,
            "batch_tokens": 32_768,
            "micro_batch_tokens": 32_768,
            "match_tokens": 8_000_000,
            "distill_tokens": 32_000_000,
            "match_rate": 2e-3,
            "distill_rate": 3e-4,
            "final_rate": 0.02,
            "evaluate_tokens": 524_288,
        },
        extend_tokens=8_000_000,
    ),
    # Minutes on a CPU: checks that everything runs, and nothing about quality.
    "smoke": ConversionScale(
        shape={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
        },
        teacher={"context": 64, "batch_tokens": 1_024, "micro_batch_tokens": 1_024, "weight_decay": 0.1},
        teacher_tokens=51_200,
        teacher_rate=3e-3,
        student={
            "context": 64,
            "batch_tokens": 512,
            "micro_batch_tokens": 512,
            "match_tokens": 2_048,
            "distill_tokens": 8_192,
            "distill_rate": 1e-3,
            "evaluate_tokens": 4_096,
        },
        extend_tokens=2_048,
    ),
}


class Conversions:
    """The steps of one scale in a folder.

    Args:
        scale: sizes.
        corpus: archive of token shards, or their folder.
        out: where everything is kept.
        device: "cpu", "cuda" or None.
        compile: whether to compile layers.
        label: of a set of conversions, the folder in `out` that they go to.
        changes: settings of all conversions to change.
    """

    def __init__(
        self,
        scale: ConversionScale,
        corpus: Path,
        out: Path,
        device: str | None,
        compile: bool,
        label: str,
        changes: dict[str, Any],
    ) -> None:
        self.scale, self.corpus, self.out, self.device, self.compile = scale, corpus, out, device, compile
        self.students, self.changes = out / label, changes
        self.data = corpus if corpus.is_dir() else out / "data"
        self.teacher_folder = out / "teacher" / "model"

    def run(self, step: str) -> bool:
        """Whether the step is complete."""
        if step == "data":
            prepared = self.corpus.is_dir() or (self.data / MANIFEST_FILE).is_file()
            if not prepared and not unpack_shards(self.corpus, self.data):
                raise SystemExit(f"{self.corpus} holds no token shards: pack them with prepare_corpus.py --archive")
            return True
        if step == "teacher":
            return self._train_teacher()
        return convert(self.teacher_folder, self.conversion(step), self.students / step, device=self.device)

    def teacher_tokens(self) -> int:
        """Tokens that the teacher was trained on, or will be."""
        trained = self.teacher_folder / TRAINED_FILE
        return int(read_json(trained)["teacher_tokens"]) if trained.is_file() else self.scale.teacher_tokens

    def conversion(self, step: str) -> ConvertConfig:
        """The settings of a conversion by its step."""
        kind, _, seed = step.partition("-")
        settings = {
            "data": str(self.data),
            "compile": self.compile,
            "save_every": 0,
            "tensorboard": False,
            **self.scale.student,
            "layers": self._layers(kind),
            "seed": int(seed or 0),
            "without_match": step == "all-0",
            **self.changes,
        }
        if kind == "extended":
            # Within the same number of tokens.
            settings["distill_tokens"] -= self.scale.extend_tokens
            settings["extend_tokens"] = self.scale.extend_tokens
        config = ConvertConfig().changed(**settings)
        seen = max(stage.seen for stage in plan(config))
        of_teacher = self.teacher_tokens()
        if 5 * seen > of_teacher:
            raise SystemExit(f"{step} would see {seen:,} tokens, more than a fifth of {of_teacher:,}")
        return config

    def _layers(self, kind: str) -> str:
        """The layers to convert, by the kind of a student."""
        if kind != "chosen":
            return "every-other" if kind == "hybrid" else "all"
        matched = self.students / "all-0"
        if not (matched / EVALUATIONS / "match.json").is_file():
            raise SystemExit("the steps chosen-0 to chosen-2 need all-0, whose stage 1 tells which layers match best")
        errors = layer_errors(read_metrics(matched / STAGES / "match" / METRICS_FILE))
        best = sorted(errors, key=lambda layer: errors[layer])[: len(errors) // 2]
        return ",".join(map(str, sorted(best)))

    def _train_teacher(self) -> bool:
        """Trains a Llama from random parameters with the loop and the loss of stage 3."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from sympow.hf import to_fast_tokenizer

        if (self.teacher_folder / "config.json").is_file():
            return True
        scale, dataset = self.scale, open_dataset(self.data)
        config = ConvertConfig().changed(compile=self.compile, save_every=0, tensorboard=False, **scale.teacher)
        with ExitStack() as held:
            place = held.enter_context(process_group(self.device))
            claim = held.enter_context(claimed_folder(self.out / "teacher", resume=True, place=place))
            folder = claim.folder
            precision = "bf16" if place.device.type == "cuda" else "fp32"
            around = held.enter_context(surroundings(place, claim, precision))
            torch.manual_seed(0)
            shape = LlamaConfig(
                vocab_size=dataset.vocab_size,
                tie_word_embeddings=True,
                bos_token_id=dataset.boundary,
                eos_token_id=dataset.boundary,
                pad_token_id=dataset.boundary,
                **scale.shape,
            )
            model: Any = LlamaForCausalLM(shape)
            model.to(place.device)
            print(f"teacher: {sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)
            objective = NextToken(model, around.dtype)
            if self.compile:
                objective.compile()
            others = {"match_tokens": 0, "distill_tokens": 0, "extend_context": config.text.context}
            rate = {"extend_tokens": scale.teacher_tokens, "extend_rate": scale.teacher_rate}
            (stage,) = plan(config.changed(**others, **rate))
            stage = replace(stage, name=TEACHER, run=replace(stage.run, seed=0))
            trained = {"teacher_tokens": stage.seen, "teacher_rate": scale.teacher_rate}
            begun = folder / TRAINED_FILE
            if begun.is_file() and read_json(begun) != trained:
                raise SystemExit(f"{folder} holds a teacher that was begun with {read_json(begun)}; got {trained}")
            write_atomically(begun, (json.dumps(trained) + "\n").encode())
            if not train_stage(stage, config, objective, dataset, folder, around):
                return False
            unfinished = folder / "unfinished"
            model.save_pretrained(unfinished)
            write_atomically(unfinished / TRAINED_FILE, (json.dumps(trained) + "\n").encode())
            to_fast_tokenizer(dataset.load_tokenizer()).save_pretrained(unfinished)
            unfinished.rename(self.teacher_folder)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        return True


def write_results(out: Path, label: str, results: Path, facts: dict[str, Any]) -> None:
    """Writes a line per model, tables, curves and figures of all conversions that have been evaluated.

    Args:
        facts: to record; of the teacher, those that are stored beside it count.
    """
    students = out / label
    found = dict(_evaluations(students))
    teacher = next((one for (_, name), one in found.items() if name == TEACHER), None)
    if teacher is None:
        print("no results yet", file=sys.stderr)
        return
    trained = out / "teacher" / "model" / TRAINED_FILE
    if trained.is_file():
        facts = {**facts, **read_json(trained)}
    lines = [json.dumps({"facts": facts})]
    curves = []
    students_alone = [(key, one) for key, one in found.items() if one.name != TEACHER]
    for (step, name), one in [((TEACHER, TEACHER), teacher), *students_alone]:
        entry = {"step": step, "model": name, "tokens": one.tokens}
        of_contexts = {}
        for context, measured in one.by_context.items():
            of_teacher = teacher.by_context[context]
            mean, error = difference(measured, of_teacher)
            pairs = zip(measured.of_each, of_teacher.of_each, strict=True)
            of_contexts[context] = {
                "loss": round(measured.loss, 5),
                "late": round(measured.late, 5),
                "sequences": len(measured.of_each),
                "less_teacher": round(mean, 5),
                "error": round(error, 5),
                # Single sequences that the teacher predicts badly can differ by half a nat between seeds.
                "median": round(statistics.median(mine - its for mine, its in pairs), 5),
            }
        lines.append(json.dumps({**entry, "by_context": of_contexts}))
        longest = max(one.by_context)
        positions = {at: round(loss, 4) for at, loss in one.by_context[longest].by_position.items()}
        curves.append(json.dumps({**entry, "by_position": positions}))
    for metrics in [out / "teacher" / METRICS_FILE, *sorted(students.glob(f"*/{STAGES}/*/{METRICS_FILE}"))]:
        curve = {"training": metrics.parent.relative_to(out).as_posix(), "lines": condense(read_metrics(metrics), 100)}
        curves.append(json.dumps(curve))
    write_atomically(results / "conversion.jsonl", ("\n".join(lines) + "\n").encode())
    write_atomically(results / "conversion_curves.jsonl", ("\n".join(curves) + "\n").encode())
    write_atomically(results / "conversion.md", ("\n".join(_tables(found, teacher)) + "\n").encode())
    shown = {"teacher": teacher}
    for label, (step, name) in SHOWN.items():
        if (step, name) in found:
            shown[label] = found[step, name]
    draw_by_position(shown, results / "conversion_by_position.png")
    draw_by_context(shown, results / "conversion_by_context.png")
    for report in sorted(students.glob("all-0/report.html")):
        shutil.copy(report, results / "conversion_all-0.html")


# What the figures show, by label.
SHOWN = {
    "all layers, after matching": ("all-0", "match"),
    "all layers, after distillation": ("all-0", "distill"),
    "all layers, without stage 1": ("all-0", f"distill-{WITHOUT_MATCH}"),
    "every other layer": ("hybrid-0", "distill"),
    "half of the layers, chosen by stage 1": ("chosen-0", "distill"),
    "all layers, longer contexts": ("extended", "extend"),
}


def _evaluations(students: Path) -> Iterator[tuple[tuple[str, str], ModelLosses]]:
    """By step and model."""
    for step in STEPS:
        for path in sorted((students / step / EVALUATIONS).glob("*.json")):
            one = ModelLosses.read(path)
            yield (step, one.name), one


def _tables(found: dict[tuple[str, str], ModelLosses], teacher: ModelLosses) -> Iterator[str]:
    contexts = sorted(teacher.by_context)
    yield "Held-out loss in nats; mean over seeds, and in brackets what it has above the teacher (± over seeds).\n"
    yield f"| model | seeds | tokens | {' | '.join(f'{context:,}' for context in contexts)} |"
    yield "|---|---|---|" + "---|" * len(contexts)
    cells = " | ".join(f"{teacher.by_context[context].loss:.3f}" for context in contexts)
    yield f"| teacher | | | {cells} |"
    rows = {
        "all layers, untrained": ("all", START),
        "all layers, after stage 1": ("all", "match"),
        "all layers, after stage 2": ("all", "distill"),
        "all layers, stage 2 alone": ("all", f"distill-{WITHOUT_MATCH}"),
        "all layers, with stage 3": ("extended", "extend"),
        "every other layer, untrained": ("hybrid", START),
        "every other layer, after stage 1": ("hybrid", "match"),
        "every other layer, after stage 2": ("hybrid", "distill"),
        "half of the layers, chosen by stage 1, untrained": ("chosen", START),
        "half of the layers, chosen by stage 1, after stage 1": ("chosen", "match"),
        "half of the layers, chosen by stage 1, after stage 2": ("chosen", "distill"),
    }
    for label, (kind, name) in rows.items():
        seeds = [one for (step, model), one in found.items() if step.partition("-")[0] == kind and model == name]
        if seeds:
            cells = " | ".join(_cell(seeds, teacher, context) for context in contexts)
            yield f"| {label} | {len(seeds)} | {seeds[0].tokens:,} | {cells} |"


def _cell(seeds: Sequence[ModelLosses], teacher: ModelLosses, context: int) -> str:
    losses = [one.by_context[context].loss for one in seeds]
    above = [loss - teacher.by_context[context].loss for loss in losses]
    spread = f" ± {statistics.stdev(above):.3f}" if len(above) > 1 else ""
    return f"{statistics.fmean(losses):.3f} ({statistics.fmean(above):+.3f}{spread})"


def read_change(change: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE, if conversions have such a setting."""
    try:
        name, value = read_setting(change)
        ConvertConfig().changed(**{name: value})
    except (UserError, argparse.ArgumentTypeError) as error:
        raise SystemExit(f"--change takes settings as in distill_rate=6e-4; got {change!r} ({error})") from error
    return name, value


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=sorted(SCALES), default="small")
    parser.add_argument("--corpus", type=Path, required=True, help="archive of token shards, or their folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and evaluations")
    parser.add_argument("--results", type=Path, required=True, help="folder for tables and figures")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, separated by commas")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--teacher-tokens", type=int, help="instead of the scale's")
    parser.add_argument("--teacher-rate", type=float, help="instead of the scale's")
    parser.add_argument("--label", default="students", help="folder in --out for conversions, one for each --change")
    parser.add_argument(
        "--change", action="append", default=[], help="setting of all conversions, as distill_rate=6e-4"
    )
    arguments = parser.parse_args(words)
    steps = arguments.only.split(",")
    if unknown := [step for step in steps if step not in STEPS]:
        raise SystemExit(f"--only takes steps of {', '.join(STEPS)}; got {', '.join(unknown)}")
    scale = SCALES[arguments.scale]
    changed = {"teacher_tokens": arguments.teacher_tokens, "teacher_rate": arguments.teacher_rate}
    scale = replace(scale, **{name: value for name, value in changed.items() if value is not None})
    changes = dict(map(read_change, arguments.change))
    experiment = Conversions(
        scale, arguments.corpus, arguments.out, arguments.device, arguments.compile, arguments.label, changes
    )
    begin = time.monotonic()
    facts = {
        "scale": arguments.scale,
        "teacher_tokens": scale.teacher_tokens,
        "teacher_rate": scale.teacher_rate,
        "student": {**scale.student, **changes},
        "torch": torch.__version__,
        "device": "cpu" if choose_device(arguments.device) == "cpu" else torch.cuda.get_device_name(),
    }
    for step in steps:
        complete = step == "results" or experiment.run(step)
        state = "done" if complete else "interrupted"
        print(f"== {step}: {state} after {time.monotonic() - begin:.0f} s in all", file=sys.stderr, flush=True)
        if "results" in steps and step not in ("data", "teacher"):
            # After every step, so that a call that is killed leaves those before.
            write_results(arguments.out, arguments.label, arguments.results, facts)
        if not complete:
            break


if __name__ == "__main__":
    main()
