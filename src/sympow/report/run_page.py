"""The page of `sympow report`: its HTML, and the curves of all runs, which `assets/report.js` joins and draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from html import escape
from typing import Any

from sympow.evaluate.head_statistics import quantity_labels
from sympow.model.accounting import count_parameters
from sympow.model.config import GPTConfig
from sympow.report.curves import by_layer, curve, median_speed, metric_names, seconds_at
from sympow.report.grouping import Group, by_power, differing, plain_words, shown, styles_of, unit_of
from sympow.report.html_page import build_page, format_number, heat_map, notes_html, options, plain, six_digits
from sympow.report.plotting import MARKERS, Style, drawn_contexts
from sympow.report.run_collection import Run, settings_help
from sympow.train.run_folder import CONFIG_FILE

# Labels of metrics.
METRICS = {
    "loss": "training loss (nats per {unit})",
    "heldout_loss": "held-out loss (nats per {unit})",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "speed ({unit}s per second)",
    "utilisation": "MFU",
    "memory_gib": "memory (GiB)",
}
# Units of time, and their seconds.
CLOCKS = (("h", 3600), ("min", 60), ("s", 1))
# About so many ticks at powers of two.
OCTAVES = 5

# What the script draws of a choice: axes, panels, and how their lines look.
View = dict[str, Any]
# A run's curve: y by x.
Points = Mapping[int, float] | Mapping[float, float]


def build_report_page(title: str, groups: Sequence[Group], notes: Sequence[str]) -> str:
    """The report as HTML.

    Args:
        notes: sentences for the reader, on missing data for example.
    """
    data = report_data(groups)
    runs = [run for group in groups for run in group.runs]
    seeds = len({run.settings["seed"] for run in runs})
    probes = data["views"]["probes"]
    different = set(differing(runs))
    same = [name for name in runs[0].settings if name not in different]
    return build_page(
        "report",
        title,
        data,
        series_css(styles_of(groups)),
        summary=f"{len(runs)} runs of {len(groups)} configs with {seeds} {'seed' if seeds == 1 else 'seeds'}",
        notes=notes_html(notes),
        unit=unit_of(groups),
        metrics=options((name, view["y"]["title"]["text"]) for name, view in data["views"]["curves"].items()),
        probes=options((name, view["label"]) for name, view in probes.items()),
        table=_table(groups, different),
        same=escape(" · ".join(f"{plain_words(name)}: {shown(runs[0].settings[name])}" for name in same)),
        without_heldout="" if data["views"]["final"]["final_heldout_loss"]["panels"] else " disabled",
        without_probes="" if probes else " hidden",
        without_final="" if any(run.finished for run in runs) else "No run has these numbers yet.",
        without_speed="" if data["views"]["speed"][""]["panels"] else "No run has these numbers yet.",
        without_heads="" if data["heads"] else "No run has gates or learned rotations.",
        without_beyond=""
        if any(run.evaluation for run in runs)
        else "No evaluation was found. Make one with: sympow evaluate RUN/model --out RUN",
    )


def series_css(styles: Mapping[str, Style]) -> str:
    """CSS with a custom property for the color of each series in the light and the dark theme."""
    colors = "".join(
        f"--series-{place}: light-dark({style.light}, {style.dark}); " for place, style in enumerate(styles.values())
    )
    return f"\n:root {{ {colors}}}\n"


def report_data(groups: Sequence[Group]) -> dict[str, Any]:
    """What the page's script reads, with numbers rounded to six digits.

    `series`, `runs` and `grids` (lists of steps, contexts or seconds) are named by their places in the lists. `views`
    has, by section and choice, panels of lines: the curves of the seeds of each config, which the script joins.
    """
    styles = styles_of(groups)
    panels = _Panels(groups, styles)
    return {
        "series": [_look(place, label, style) for place, (label, style) in enumerate(styles.items())],
        "runs": [
            {
                "name": run.name,
                "series": panels.places[group.series],
                "steps": run.steps,
                "planned": run.settings["steps"],
                "batchTokens": run.settings["batch_tokens"],
                "words": _words(group, run),
            }
            for group in groups
            for run in group.runs
        ],
        "views": panels.views(),
        "grids": [list(grid) for grid in panels.grids],
        "layout": {"hovermode": "x unified", "hoversort": "value descending", "showlegend": True},
        "heads": _heads(groups),
    }


def _look(place: int, label: str, style: Style) -> dict[str, Any]:
    """Traces of a series, without points: the mean over seeds, their range, and a seed."""
    color = f"var(--series-{place})"
    line = {"color": color, "width": 2, "dash": ",".join(f"{length}px" for length in style.dash) or "solid"}
    trace = {"type": "scatter", "name": plain(label), "legendgroup": str(place)}
    silent = {**trace, "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    marker = {"color": color, "size": 8, "symbol": MARKERS[style.marker][1]}
    return {
        "label": label,
        "mean": {**trace, "kind": "mean", "line": line, "marker": marker, "hovertemplate": "%{customdata}"},
        "range": {
            **silent,
            "kind": "range",
            "line": {"width": 0},
            "fill": "toself",
            "fillcolor": color,
            "opacity": 0.18,
        },
        "seed": {**silent, "kind": "seed", "line": {**line, "width": 1}, "opacity": 0.55},
    }


def _words(group: Group, run: Run) -> str:
    """What the filter searches: the name, the series, and name=value of every setting."""
    power = [] if group.power is None else [f"p={group.power}"]
    settings = [f"{name}={shown(value)}" for name, value in run.settings.items()]
    return " ".join([run.name, group.series, *power, *settings]).lower()


class _Panels:
    """Panels of lines, by section and choice."""

    def __init__(self, groups: Sequence[Group], styles: Mapping[str, Style]) -> None:
        self._groups = groups
        self._runs = [run for group in groups for run in group.runs]
        self._numbers = {run.folder: number for number, run in enumerate(self._runs)}
        self._unit = unit_of(groups)
        self.places = {label: place for place, label in enumerate(styles)}
        # Most curves share their steps with others.
        self.grids: dict[tuple[float, ...], int] = {}

    def views(self) -> dict[str, dict[str, Any]]:
        labels = {name: label.format(unit=self._unit) for name, label in METRICS.items()}
        names = dict.fromkeys(name for run in self._runs for name in metric_names(run))
        evaluations = [run.evaluation for run in self._runs if run.evaluation]
        probes = {
            # Pairs are close together, far within any context.
            str(n): self._probe(
                f"associative recall of {n} {'pair' if n == 1 else 'pairs'}",
                "share recalled",
                partial(_recalled, pairs=n),
                mark=False,
            )
            for n in sorted({point["pairs"] for evaluation in evaluations for point in evaluation.recall})
        }
        if any(evaluation.passkey for evaluation in evaluations):
            probes["passkey"] = self._probe("passkey", "loss reduction (nats per key)", _retrieved, mark=True)
        return {
            "final": {
                "final_loss": self._against_context(
                    labels["loss"], lambda run: run.final_loss if run.finished else None
                ),
                "final_heldout_loss": self._against_context(
                    labels["heldout_loss"], lambda run: run.final_heldout_loss if run.finished else None
                ),
            },
            "beyond": {
                "by_context": self._beyond(
                    f"evaluation context ({self._unit}s)", "average loss", _by_context, markers=True
                ),
                "by_position": self._beyond(f"position ({self._unit}s)", "loss", _by_position),
            },
            "probes": probes,
            "curves": {
                name: self._metric(name, labels.get(name, plain_words(name)))
                for name in (*labels, *names)
                if name in names
            },
            "speed": {"": self._against_context(f"{self._unit}s per second", median_speed, fromZero=True)},
        }

    def _against_context(self, label: str, number: Callable[[Run], float | None], **more: Any) -> View:
        def curve_of(run: Run) -> Points:
            found = number(run)
            return {} if found is None else {run.settings["context"]: found}

        contexts = sorted({group.context for group in self._groups})
        ticks = {"tickvals": contexts, "ticktext": [f"{context:,}" for context in contexts]}
        return {
            "x": _x_axis(f"training context ({self._unit}s)", type="log", **ticks),
            "y": _titled(label),
            "panels": self._panels(lambda run: self._curve(run, curve_of(run))),
            "look": {"markers": True, "whiskers": True},
            "across": "training context",
            "contexts": True,
            "range": "shared",
            **more,
        }

    def _beyond(self, across: str, loss: str, curve_of: Callable[[Run], Points], **look: bool) -> View:
        panels = self._panels(lambda run: self._curve(run, curve_of(run)), "trained at", mark=True)
        return {
            "x": self._powers_of_two(across, panels),
            "y": _titled(f"{loss} (nats per {self._unit})"),
            "panels": panels,
            "look": look,
            "across": across,
        }

    def _probe(self, label: str, y: str, curve_of: Callable[[Run], Points], *, mark: bool) -> View:
        panels = self._panels(lambda run: self._curve(run, curve_of(run)), "trained at", mark=mark)
        return {
            "label": label,
            "x": self._powers_of_two(f"{self._unit}s ago", panels),
            "y": _titled(y) | {"rangemode": "tozero"},
            "panels": panels,
            "look": {"markers": True},
        }

    def _metric(self, name: str, label: str) -> View:
        clock, size = self._clock

        def curve_of(run: Run) -> dict[str, Any] | None:
            found = curve(run, name)
            seconds = seconds_at(run, found.steps)
            more = {
                "counts": None if set(found.counts) == {1} else found.counts,
                "time": None if seconds is None else self._grid(x / size for x in seconds),
            }
            points = self._curve(run, dict(zip(found.steps, found.values, strict=True)))
            return points and points | more

        x = {"steps": _x_axis("step"), "tokens": _x_axis(f"{self._unit}s")}
        x["time"] = _x_axis("time on steps", ticksuffix=f" {clock}")
        panels = self._panels(curve_of, "training context")
        return {"x": x, "y": _titled(label), "panels": panels, "look": {}, "range": "panel"}

    @cached_property
    def _clock(self) -> tuple[str, int]:
        """The unit of time on steps, and its seconds."""
        times = [seconds_at(run, [run.steps]) for run in self._runs]
        longest = max((found[0] for found in times if found), default=0)
        return next(((name, size) for name, size in CLOCKS if longest >= 1.5 * size), CLOCKS[-1])

    def _panels(
        self, curve_of: Callable[[Run], dict[str, Any] | None], at_context: str = "", *, mark: bool = False
    ) -> list[dict[str, Any]]:
        """A panel for each power, with a line for each series; or one for each power and training context.

        Args:
            curve_of: the curve of a run; None: it has none.
            at_context: what the titles say before a training context; empty: contexts share a panel.
            mark: whether to mark the training context.
        """
        found = []
        for power, members in by_power(self._groups).items():
            contexts: Iterable[int | None] = sorted({group.context for group in members}) if at_context else [None]
            for context in contexts:
                # Several configs with the same name, context and power are lines of their own.
                lines: dict[object, dict[str, Any]] = {}
                for group in sorted(members, key=lambda group: group.context):
                    if context not in (None, group.context):
                        continue
                    if seeds := [one for run in group.runs if (one := curve_of(run))]:
                        key = group.series if context is None else group.runs[0].folder
                        line = lines.setdefault(key, {"series": self.places[group.series], "configs": []})
                        line["configs"].append(seeds)
                if lines:
                    title = (
                        power if context is None else ", ".join([*filter(None, [power]), f"{at_context} {context:,}"])
                    )
                    ordered = sorted(lines.values(), key=lambda line: line["series"])
                    shapes = [_training_context(context)] if context is not None and mark else []
                    found.append({"title": title, "lines": ordered, "shapes": shapes})
        return found

    def _curve(self, run: Run, points: Points) -> dict[str, Any] | None:
        if not points:
            return None
        return {"run": self._numbers[run.folder], "grid": self._grid(points), "y": [*map(six_digits, points.values())]}

    def _grid(self, xs: Iterable[float]) -> int:
        found = tuple(x if isinstance(x, int) else float(f"{x:.6g}") for x in xs)
        return self.grids.setdefault(found, len(self.grids))

    def _powers_of_two(self, title: str, panels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A logarithmic axis for contexts or positions, with ticks at powers of two."""
        grids = list(self.grids)
        used = {
            seed["grid"] for panel in panels for line in panel["lines"] for seeds in line["configs"] for seed in seeds
        }
        xs = [x for grid in used for x in grids[grid]] or [1]
        stride = max(1, math.ceil(math.log2(max(xs) / min(xs)) / OCTAVES))
        return _x_axis(title, type="log", tick0=0, dtick=stride * math.log10(2), tickformat=",.0f")


def _x_axis(title: str, **more: Any) -> dict[str, Any]:
    return {**_titled(title), "hoverformat": ",.7~r", "unifiedhovertitle": {"text": f"{title}: %{{x}}"}, **more}


def _titled(title: str) -> dict[str, Any]:
    return {"title": {"text": plain(title)}}


def _training_context(x: int) -> dict[str, Any]:
    color = "var(--mark)"
    place = {"textangle": 0, "textposition": "end", "xanchor": "right", "yanchor": "top"}
    label = {"text": "training context", "font": {"color": color, "size": 11}, **place}
    line = {"color": color, "width": 1, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "label": label}


def _by_context(run: Run) -> Points:
    return drawn_contexts(run.evaluation.by_context, run.settings["context"]) if run.evaluation else {}


def _by_position(run: Run) -> Points:
    return run.evaluation.by_position if run.evaluation else {}


def _recalled(run: Run, pairs: int) -> Points:
    points = run.evaluation.recall if run.evaluation else []
    return {
        math.sqrt(max(1, point["nearest"]) * max(1, point["farthest"])): point["accuracy"]
        for point in points
        if point["pairs"] == pairs
    }


def _retrieved(run: Run) -> Points:
    """How much lower the loss of a passkey is than that of one that was not stated, by distance."""
    points = run.evaluation.passkey if run.evaluation else []
    # A single key has no control, and a model that diverged no loss.
    known = [point for point in points if point["control"] is not None and point["loss"] is not None]
    return {point["distance"]: point["control"] - point["loss"] for point in known}


# --- gates and rotations ----------------------------------------------------------------------------------------------


def _heads(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Runs with gates or rotations, those with the most quantities first: labels, and heat maps by quantity."""
    labels = quantity_labels(unit_of(groups))
    runs = [(group, run) for group in groups for run in group.runs]
    found = [
        {"run": place, "label": _described(group, run), "maps": _maps(run, labels)}
        for place, (group, run) in enumerate(runs)
    ]
    return sorted((one for one in found if one["maps"]), key=lambda one: -len(one["maps"]))


def _described(group: Group, run: Run) -> str:
    power = [] if group.power is None else [f"p = {group.power}"]
    return ", ".join([group.series, *power, f"context {group.context:,}", f"seed {run.settings['seed']}"])


def _maps(run: Run, labels: Mapping[str, str]) -> dict[str, Any]:
    quantities = run.heads.quantities if run.heads else {}
    over_training = by_layer(run)
    found = {}
    for name in dict.fromkeys([*quantities, *over_training]):
        label = plain(labels.get(name, plain_words(name)))
        half_life = name.startswith("half_life")
        look: dict[str, Any] = {
            "log": half_life,
            "around_one": name in ("beta_mean", "rate_change"),
            "domain": (0, 2) if name == "beta_mean" else None,
            "missing": "never forgets" if half_life else "no number",
        }
        panels: list[dict[str, Any]] = []
        if run.heads and (table := quantities.get(name)):
            columns = [str(n) for n in range(max(map(len, table)))]
            column_title = "rotated pair" if name == "rate_change" else "head"
            note = f" ({run.heads.tokens:,} held-out {run.unit}s)"
            title = f"By layer and {column_title}"
            panels.append(
                {"title": title, "plot": heat_map(f"{label}: {title}", table, columns, column_title, note=note, **look)}
            )
        if name in over_training:
            steps, values = over_training[name]
            title = "By layer over training"
            panels.append(
                {
                    "title": title,
                    "plot": heat_map(f"{label}: {title}", values, [f"{n:,}" for n in steps], "step", **look),
                }
            )
        found[name] = {"label": labels.get(name, plain_words(name)), "panels": panels}
    return found


# --- the table of runs -----------------------------------------------------------------------------------------------


def _table(groups: Sequence[Group], different: set[str]) -> str:
    """HTML of the table: results, the settings that differ, and, hidden at first, the others."""
    runs = [(group, run) for group in groups for run in group.runs]
    unit = unit_of(groups)
    columns: list[tuple[str, Callable[[Run], float | None]]] = [
        ("final loss", lambda run: run.final_loss),
        ("held-out loss", lambda run: run.final_heldout_loss),
        (f"{unit}s/s", median_speed),
        ("memory, GiB", _memory),
        ("parameters", _parameters),
    ]
    columns = [column for column in columns if any(column[1](run) is not None for _, run in runs)]
    devices = any(run.result.get("device") for _, run in runs)
    settings = list(dict.fromkeys(name for _, run in runs for name in run.settings))
    helps = settings_help()
    commonest = {name: Counter(_setting(run, name) for _, run in runs).most_common(1)[0][0] for name in different}
    head = [_cell("th", "run"), _cell("th", "series"), _cell("th", "steps made", "number")]
    head += [_cell("th", "device")] if devices else []
    head += [_cell("th", name, "number") for name, _ in columns]
    head += [
        _cell("th", plain_words(name), "" if name in different else "same", helps.get(name, "")) for name in settings
    ]
    rows = []
    for place, (group, run) in enumerate(runs):
        cells = [
            f'<td data-value="{escape(run.name)}"><details><summary>{escape(run.name)}</summary>'
            f'Command: <code class="command">{escape(_command(run))}</code></details></td>',
            _cell("td", group.series),
            f'<td class="number" data-value="{run.steps}">{run.steps:,}{"" if run.finished else ", unfinished"}</td>',
            *([_cell("td", str(run.result.get("device") or ""))] if devices else []),
        ]
        for _, number in columns:
            found = six_digits(number(run))
            value = "" if found is None else found
            cells.append(f'<td class="number" data-value="{value}">{format_number(found)}</td>')
        for name in settings:
            value = _setting(run, name)
            mark = "same" if name not in different else "" if value == commonest[name] else "different"
            cells.append(_cell("td", value, mark))
        rows.append(f'<tr data-place="{place}" data-run="{escape(run.name)}">{"".join(cells)}</tr>')
    head_row, body = f"<thead><tr>{''.join(head)}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="data" id="run-table">{head_row}{body}</table>'


def _cell(tag: str, text: str, kind: str = "", title: str = "") -> str:
    content = f'<button type="button">{escape(text)}</button>' if tag == "th" else escape(text)
    attributes = "".join(f' {name}="{escape(x)}"' for name, x in (("class", kind), ("title", title)) if x)
    return f"<{tag}{attributes}>{content}</{tag}>"


def _setting(run: Run, name: str) -> str:
    return shown(run.settings[name]) if name in run.settings else ""


def _command(run: Run) -> str:
    """The command that reproduces a run."""
    return run.result.get("command") or f"sympow train --config {run.folder / CONFIG_FILE} --out runs/again"


def _memory(run: Run) -> float | None:
    return max((line["memory_gib"] for line in run.metrics if "memory_gib" in line), default=None)


def _parameters(run: Run) -> int | None:
    """Parameters of the run's model; None if this version does not support such a model."""
    known = {name: run.settings[name] for name in GPTConfig.__dataclass_fields__}
    try:
        return count_parameters(GPTConfig(**known)).total
    except (ValueError, TypeError):
        return None
