"""Layout of every kind of figure, with one panel and with several, and distinct looks of its series."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import redraw
from benchmarks.redraw import load_rows
from examples import three_forms
from report.conftest import PASSKEY, RECALL
from report.drawn import layout_problems, looks, record_figures, texts_of
from report.made_up import grid, groups_of, write_run

from sympow.check.operator import Setting, methods
from sympow.check.timing import Timing, environment
from sympow.evaluate import PasskeyPoint, RecallPoint
from sympow.report.figure_files import (
    plot_bench_rows,
    plot_loss_by_context,
    plot_loss_by_position,
    plot_probes,
    plot_time_against_context,
)
from sympow.report.paper_figures import draw_figures
from sympow.report.plotting import OTHERS, add_legend, make_panels, method_styles
from sympow.report.plotting import VARIANTS as STYLED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ["softmax", "sympow", "sympow + gating", "conformal", "a run of mine with quite a long name", "another"]


@pytest.fixture
def saved(monkeypatch):
    return record_figures(monkeypatch)


def check(figures):
    assert figures
    for figure in figures:
        assert layout_problems(figure) == []
        seen = looks(figure)
        assert len(set(seen.values())) == len(seen), seen


def only_powers_of_two(axes):
    """Whether every label of the x axis is one, and there are several."""
    labels = [int(text.get_text().replace(",", "")) for text in axes.get_xticklabels() if text.get_text()]
    return len(labels) > 1 and all(label.bit_count() == 1 for label in labels)


def marked(axes):
    """The training context, as the vertical line has it."""
    (line,) = (line for line in axes.lines if line.get_label().startswith("trained at"))
    return line.get_xdata()[0]


def write_runs(folder, powers, contexts, rates, **changes):
    """Writes runs that differ in everything that figures distinguish, with the largest numbers that occur."""
    heads = {
        "half_life": [[700.0, 30.0], [None, 2.5]],
        "half_life_short": [[12_000.0] * 2] * 2,
        "beta_mean": [[1.0, 0.4], [1.6, 1.1]],
        "rate_change": [[1.0] * 32, [1.1] * 32],
    }
    for run, place, name, base, settings in grid(powers, contexts, rates):
        context = settings["context"]
        first = (context, settings["learning_rate"]) == (contexts[0], rates[0])
        write_run(
            folder / run,
            [base + 3 / step for step in range(1, 41)],
            lines={step: {"tokens_per_second": 1.2e6 * (place + 1)} for step in (20, 40)},
            evaluation=[base + 1 / (n + 1) for n in range(4 * context)],
            head_table=heads if name == "conformal" and first else None,
            batch_tokens=2 * context,
            **settings,
            **changes,
        )


@pytest.mark.parametrize(
    ("powers", "contexts", "rates"),
    [
        ((2,), (64,), (6e-4,)),
        pytest.param((2,), (64, 96), (6e-4, 1e-3, 3e-3), marks=pytest.mark.slow),
        pytest.param((2, 4), (256, 512, 4096), (6e-4,), marks=pytest.mark.slow),
    ],
    ids=["one panel", "long names", "several panels"],
)
def test_the_papers_figures(tmp_path, saved, powers, contexts, rates):
    write_runs(tmp_path / "runs", powers, contexts, rates)
    draw_figures(groups_of(tmp_path / "runs"), tmp_path / "figures")
    check(saved)


def test_all_models_share_one_panel_of_loss_by_evaluation_context(tmp_path, saved):
    """Those with a gate and those without one, so that they can be compared, from 1/16 of the training context on."""
    write_runs(tmp_path / "runs", (2,), (256,), (6e-4,))
    written = draw_figures(groups_of(tmp_path / "runs"), tmp_path / "figures")
    names = [path.stem for path in written if path.suffix == ".png"]
    (axes,) = saved[names.index("loss_by_evaluation_context_p2_trained_at_256")].axes
    curves = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) > 2}
    assert list(curves) == ["softmax", "sympow", "sympow + gating", "conformal"]
    assert all(list(line.get_xdata()) == [16, 32, 64, 128, 256, 512, 1024] for line in curves.values())
    assert only_powers_of_two(axes)
    assert marked(axes) == 256


def test_one_training_context_is_no_axis(tmp_path, saved):
    write_runs(tmp_path / "runs", (2,), (64,), (6e-4,))
    names = {path.stem for path in draw_figures(groups_of(tmp_path / "runs"), tmp_path / "figures")}
    assert not [name for name in names if name.endswith("by_training_context")]
    assert "training_curves_p2" in names


def test_maps_of_heads_have_their_values_and_a_scale_of_several_numbers(tmp_path, saved):
    close = {"half_life": [[300.0, 450.0, 270.0], [None, 333.0, 12_345.0]], "rate_change": [[1.0] * 32, [1.1] * 32]}
    write_run(tmp_path / "runs" / "one", [3.0, 2.5], head_table=close)
    written = draw_figures(groups_of(tmp_path / "runs"), tmp_path / "figures")
    check(saved)
    figure = saved[[path.parent.name for path in written if path.suffix == ".png"].index("heads")]
    few, many, *bars = figure.axes
    assert [text.get_text() for text in few.texts] == ["300", "450", "270", "333", "12,300"]
    assert not many.texts
    for bar in bars:
        low, high = bar.get_ylim()
        labels = {tick.get_text() for tick in bar.get_yticklabels() if low <= tick.get_position()[1] <= high}
        assert len(labels) > 2


def test_seeds_without_a_common_step_have_figures(tmp_path, saved):
    """The second has just begun, and logs more often than the first did."""
    first = write_run(tmp_path / "runs" / "seed0", [3.0] * 20, log_every=10)
    lines = (first / "metrics.jsonl").read_text().splitlines()
    (first / "metrics.jsonl").write_text(f"{lines[9]}\n{lines[19]}\n")
    write_run(tmp_path / "runs" / "seed1", [3.0] * 4, steps=20, log_every=1, seed=1)
    groups = groups_of(tmp_path / "runs")
    assert len(groups) == 1
    draw_figures(groups, tmp_path / "figures")
    check(saved)


def test_figures_of_byte_level_models_say_bytes(tmp_path, saved):
    write_runs(tmp_path / "runs", (2,), (64, 128), (6e-4,), vocab_size=257)
    draw_figures(groups_of(tmp_path / "runs"), tmp_path / "figures")
    said = {text.get_text() for figure in saved for axes in figure.axes for text in texts_of(axes)}
    assert not [text for text in said if "token" in text]
    assert {
        "training loss (nats per byte)",
        "training speed (bytes per second)",
        "training context (bytes)",
        "evaluation context (bytes)",
        "half-life of the state (bytes)",
    } <= said


@pytest.mark.parametrize("names", [NAMES[:2], NAMES], ids=["two models", "six models"])
def test_loss_by_position(tmp_path, saved, names):
    losses = {name: n + 3 + 1 / (torch.arange(40_000) + 1.0) for n, name in enumerate(names)}
    plot_loss_by_position(losses, 4_096, tmp_path / "figure.png")
    check(saved)
    (axes,) = saved[0].axes
    assert only_powers_of_two(axes)
    assert marked(axes) == 4_096


@pytest.mark.parametrize("length", [48, 262_144])
def test_loss_by_context(tmp_path, saved, length):
    curves = {name: {2**k: n + 3.0 for k in range(length.bit_length())} for n, name in enumerate(NAMES)}
    plot_loss_by_context(curves, length // 4, tmp_path / "figure.png")
    check(saved)
    assert only_powers_of_two(saved[0].axes[0])
    assert marked(saved[0].axes[0]) == length // 4


@pytest.mark.parametrize("kinds", ["recall", "passkey", "both"])
def test_probes(tmp_path, saved, kinds):
    recall = {name: [RecallPoint(**point, answers=8) for point in RECALL] for name in NAMES}
    passkey = {name: [PasskeyPoint(**point, keys=8) for point in PASSKEY] for name in NAMES}
    plot_probes(
        {} if kinds == "passkey" else recall, {} if kinds == "recall" else passkey, tmp_path / "figure.png", "byte"
    )
    check(saved)
    assert all(axes.get_xlabel() == "distance (bytes)" and only_powers_of_two(axes) for axes in saved[0].axes)


def everything_timed(device, monkeypatch):
    """Names of all methods of a device, as if all other packages were installed."""
    monkeypatch.setattr("sympow.check.operator._importable", lambda module: True)
    return list(methods(Setting(device=device), ("triton", "torch", "auto")))


@pytest.mark.parametrize("contexts", [(1024,), (4096, 8192, 16384, 65536), (1024, 1100, 1200, 1_048_576)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_time_against_context(tmp_path, saved, monkeypatch, device, contexts):
    names = everything_timed(device, monkeypatch)
    timings = {
        name: {c: Timing(c * 1e-6 * (n + 1), c * 0.9e-6 * (n + 1), c * 1.3e-6 * (n + 1), 5) for c in contexts}
        for n, name in enumerate(names)
    }
    title = "forward and backward, 1,048,576 tokens a call, 128 heads of 128, p = 4, bfloat16, and more words"
    plot_time_against_context(timings, title, tmp_path / "figure.png")
    check(saved)


def test_methods_differ_in_color_dashes_or_marker(monkeypatch):
    for device in ("cpu", "cuda"):
        styles = method_styles([*everything_timed(device, monkeypatch), "a method of tomorrow", "another"])
        assert len({(style.light, style.dash) for style in styles.values()}) == len(styles)
        # Colors that test_plotting.py found to differ for all kinds of color vision.
        assert {style.light for style in styles.values()} <= {style.light for style in [*STYLED.values(), *OTHERS]}
    assert styles["softmax, cuDNN"].light != styles["softmax, flash"].light
    assert styles["chunked form, torch"].light == styles["chunked form, triton"].light


@pytest.mark.slow
def test_the_three_forms_name_the_machine_that_timed_them(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["three_forms.py", "--tiny", "--out", str(tmp_path)])
    three_forms.main()
    check(saved)
    title = saved[0].axes[0].get_title().replace("\n", " ")
    assert environment()["device"] in title
    assert f"torch {torch.__version__}" in title


def test_saved_timings_are_drawn_again(saved, monkeypatch, capsys):
    results = BENCHMARKS / "results" / "h200_p2.json"
    monkeypatch.setattr(sys, "argv", ["redraw.py", str(results)])
    redraw.main()
    check(saved)
    assert "h200_p2.png" in capsys.readouterr().out
    (axes,) = saved[0].axes
    times = {c.get_label(): c[0].get_ydata().tolist() for c in axes.containers}
    content = json.loads(results.read_text())
    flash = [row["forward_and_backward"]["median"] for row in content["rows"] if row["method"] == "softmax, flash"]
    assert times["softmax, flash"] == pytest.approx([1e3 * x for x in flash])
    assert axes.get_title() == "forward and backward, 65,536 tokens a call, 12 heads of 64, p = 2, bfloat16"


def test_only_timings_of_this_command_are_drawn_again(tmp_path):
    with pytest.raises(ValueError, match=r"h200_training\.json was not written by sympow bench"):
        load_rows(BENCHMARKS / "results" / "h200_training.json")


def test_forward_alone_is_called_so(tmp_path, saved):
    rows, setting = load_rows(BENCHMARKS / "results" / "h200_p2.json")
    forward = [type(row)(row.method, row.context, row.forward, None, None, None) for row in rows]
    plot_bench_rows(forward, setting, tmp_path / "figure.png")
    assert saved[0].axes[0].get_title().startswith("forward, 65,536 tokens")


def test_the_check_itself_sees_what_is_cut_and_what_is_covered():
    figure, (axes,) = make_panels(1, width=2, height=2)
    axes.plot([0, 1], [0, 1], label="a label that is wider than this figure is")
    figure.legend(loc="lower center")
    axes.set_xticks([0.5, 0.52], ["here", "there"])
    found = layout_problems(figure)
    assert "legend leaves the figure" in found
    assert "'here' covers 'there'" in found
    figure.legends.clear()
    add_legend(figure, [axes])
    assert layout_problems(figure) == ["'here' covers 'there'"]
