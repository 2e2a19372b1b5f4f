"""The report of a conversion: report.md, report.html and figures, from its evaluations and metrics."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sympow.convert.evaluation import ModelLosses, difference
from sympow.convert.objectives import LAYER_ERROR
from sympow.convert.stages import LOSSES, STAGES, START, TEACHER, WITHOUT_MATCH, Stage
from sympow.files import write_atomically
from sympow.report.plotting import (
    VARIANTS,
    Style,
    assign_styles,
    finish,
    make_panels,
    mark_training_context,
    set_context_ticks,
    set_powers_of_two,
    set_title,
)
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import METRICS_FILE

FIGURES = "figures"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: white; }
"""
Table = list[list[str]]


def write_conversion_report(
    out: Path, stages: Sequence[Stage], evaluations: Mapping[str, ModelLosses], facts: Mapping[str, Any]
) -> None:
    """Writes report.md, report.html and figures/ into the folder of a conversion.

    Args:
        out: the folder of the conversion.
        stages: the stages in order.
        evaluations: evaluations by name: of the teacher, of the untrained student, and after every stage.
        facts: settings to list.
    """
    named = {label_of(name): evaluation for name, evaluation in evaluations.items()}
    figures = {
        "Held-out loss by position": out / FIGURES / "loss_by_position.png",
        "Held-out loss by context": out / FIGURES / "loss_by_context.png",
    }
    draw_by_position(named, figures["Held-out loss by position"])
    draw_by_context(named, figures["Held-out loss by context"])
    curves = {
        stage.name: (stage, read_metrics(out / STAGES / stage.name / METRICS_FILE))
        for stage in stages
        if (out / STAGES / stage.name / METRICS_FILE).is_file()
    }
    if curves:
        figures["Training"] = out / FIGURES / "training.png"
        draw_training(curves, figures["Training"])
    title = f"Conversion of {facts['teacher']}"
    tables = {
        **_loss_tables(named),
        **_layer_tables(curves),
        "Settings": [["setting", "value"], *([name, str(value)] for name, value in facts.items())],
    }
    write_atomically(out / "report.md", "\n".join(_markdown(title, tables, figures, out)).encode())
    write_atomically(out / "report.html", "\n".join(_html(title, tables, figures)).encode())


def label_of(name: str) -> str:
    """The label of a model in tables and figures."""
    if name == TEACHER:
        return "teacher"
    if name == START:
        return "student, untrained"
    kind, _, rest = name.partition("-")
    after = {"match": "matching", "distill": "distillation", "extend": "longer contexts"}[kind]
    return f"student after {after}" + (", without stage 1" if rest == WITHOUT_MATCH else "")


def _loss_tables(evaluations: Mapping[str, ModelLosses]) -> dict[str, Table]:
    """Tables with a row per model and a column per context; differences have their standard error over sequences."""
    contexts = _contexts(evaluations)
    (teacher,) = (one.by_context for one in evaluations.values() if one.name == TEACHER)
    losses, differences, late = [["model", "tokens"]], [["model"]], [["model"]]
    for table in (losses, differences, late):
        table[0] += [f"context {context:,}" for context in contexts]
    for name, one in evaluations.items():
        of = one.by_context
        losses.append([name, f"{one.tokens:,}", *(f"{of[context].loss:.4f}" for context in contexts)])
        if one.name != TEACHER:
            found = [difference(of[context], teacher[context]) for context in contexts]
            differences.append([name, *(_with_error(mean, error) for mean, error in found)])
        late.append([name, *(f"{of[context].late:.4f}" for context in contexts)])
    return {
        "Held-out loss (nats per token)": losses,
        "Loss minus the teacher's, on the same sequences": differences,
        "Loss over the last quarter of each context": late,
    }


def layer_errors(lines: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """The relative squared error of each layer's attention output at the end of stage 1, by the layer's index.

    Args:
        lines: metrics of stage 1; the last tenth of those with errors of layers is averaged.
    """
    measured = [
        {int(name.removeprefix(LAYER_ERROR)): error for name, error in line.items() if name.startswith(LAYER_ERROR)}
        for line in lines
    ]
    measured = [errors for errors in measured if errors]
    last = measured[-max(1, len(measured) // 10) :]
    return {layer: sum(errors[layer] for errors in last) / len(last) for layer in sorted(last[-1])} if last else {}


def _layer_tables(curves: Mapping[str, tuple[Stage, list[dict[str, float]]]]) -> dict[str, Table]:
    """The errors of layers, if stage 1 has run."""
    errors = next((layer_errors(lines) for stage, lines in curves.values() if stage.kind == "match"), {})
    if not errors:
        return {}
    rows = [[str(layer), f"{error:.4f}"] for layer, error in errors.items()]
    return {"Attention outputs at the end of stage 1": [["layer", "relative squared error"], *rows]}


def draw_by_position(evaluations: Mapping[str, ModelLosses], path: Path) -> None:
    """Loss against position, on the longest sequences."""
    evaluations = _drawn(evaluations)
    longest, shortest = max(_contexts(evaluations)), min(_contexts(evaluations))
    figure, (axes,) = make_panels(1, width=7, height=4.2)
    styles = _styles(evaluations)
    for name, one in evaluations.items():
        points = one.by_context[longest].by_position
        axes.plot([float(at) for at in points], list(points.values()), label=name, **styles[name].for_matplotlib)
    mark_training_context(axes, shortest)
    set_powers_of_two(axes)
    axes.set(xlabel="position (tokens)", ylabel="loss (nats per token)")
    set_title(axes, "Held-out loss by position")
    finish(figure, [axes], path)


def draw_by_context(evaluations: Mapping[str, ModelLosses], path: Path) -> None:
    """Mean loss against the length of sequences."""
    evaluations = _drawn(evaluations)
    contexts = _contexts(evaluations)
    figure, (axes,) = make_panels(1, width=7, height=4.2)
    styles = _styles(evaluations)
    for name, one in evaluations.items():
        axes.plot(contexts, [one.by_context[c].loss for c in contexts], label=name, **styles[name].with_marker)
    mark_training_context(axes, contexts[0])
    axes.set(xlabel="context (tokens)", ylabel="loss (nats per token)")
    set_context_ticks(axes, contexts)
    set_title(axes, "Mean held-out loss by context")
    finish(figure, [axes], path)


def draw_training(curves: Mapping[str, tuple[Stage, list[dict[str, float]]]], path: Path) -> None:
    """What each stage minimizes, against steps; a panel for each kind of stage."""
    kinds = list(dict.fromkeys(stage.kind for stage, _ in curves.values()))
    figure, panels = make_panels(len(kinds))
    styles = assign_styles((label_of(name), label_of(name)) for name in curves)
    for axes, kind in zip(panels, kinds, strict=True):
        for name, (stage, lines) in curves.items():
            if stage.kind == kind:
                points = [(line["step"], line["loss"]) for line in lines if "loss" in line]
                axes.plot(*zip(*points, strict=True), label=label_of(name), **styles[label_of(name)].for_matplotlib)
        axes.set(xlabel="step", yscale="log" if kind != "extend" else "linear")
        set_title(axes, LOSSES[kind])
    finish(figure, panels, path)


def _styles(evaluations: Mapping[str, ModelLosses]) -> dict[str, Style]:
    """Line styles by model; the teacher has the style of softmax."""
    names = ((name, "softmax" if one.name == TEACHER else name) for name, one in evaluations.items())
    styles = assign_styles(names)
    assert all(styles[name] == VARIANTS["softmax"] for name, one in evaluations.items() if one.name == TEACHER)
    return styles


def _drawn(evaluations: Mapping[str, ModelLosses]) -> Mapping[str, ModelLosses]:
    """Without the untrained student if there is another: on its scale the others could not be told apart."""
    trained = {name: one for name, one in evaluations.items() if one.name != START}
    return trained if any(one.name != TEACHER for one in trained.values()) else evaluations


def _contexts(evaluations: Mapping[str, ModelLosses]) -> list[int]:
    """The contexts that all models were evaluated at."""
    return sorted(set.intersection(*(set(one.by_context) for one in evaluations.values())))


def _with_error(mean: float, error: float) -> str:
    return f"{mean:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _markdown(title: str, tables: Mapping[str, Table], figures: Mapping[str, Path], out: Path) -> Iterator[str]:
    yield f"# {title}\n"
    for heading, rows in tables.items():
        yield f"## {heading}\n"
        for number, row in enumerate(rows):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
            if number == 0:
                yield f"|{'---|' * len(row)}"
        yield ""
    for heading, path in figures.items():
        yield f"![{heading}]({path.relative_to(out).as_posix()})\n"


def _html(title: str, tables: Mapping[str, Table], figures: Mapping[str, Path]) -> Iterator[str]:
    """The report as one file with inlined figures."""
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
    *measured, settings = tables
    for heading in measured:
        yield from _html_table(heading, tables[heading])
    for heading, path in figures.items():
        picture = base64.b64encode(path.read_bytes()).decode()
        yield f'<h2>{escape(heading)}</h2><img alt="{escape(heading)}" src="data:image/png;base64,{picture}">'
    yield from _html_table(settings, tables[settings])
    yield "</body></html>"


def _html_table(heading: str, rows: Table) -> Iterator[str]:
    yield f"<h2>{escape(heading)}</h2><table>"
    for number, row in enumerate(rows):
        kind = "th" if number == 0 else "td"
        yield f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in row)}</tr>"
    yield "</table>"
