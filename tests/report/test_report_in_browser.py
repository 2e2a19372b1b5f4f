"""The report's page in a headless Chromium, from disk."""

import math
from itertools import product

import pytest
from report.made_up import VARIANTS as VARIANT_SETTINGS
from report.made_up import groups_of, write_run
from report.pages import draw_all, drawn, open_page, overlaps, picture_of, share_of

from sympow.report.plotting import DARK_PAPER, LIGHT_PAPER, VARIANTS
from sympow.report.run_report import build_report_page

pytestmark = pytest.mark.slow  # a browser, and runs to report on

pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")


@pytest.fixture(scope="module")
def path(experiment, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(build_report_page("Made-up runs", groups_of(experiment), ["One thing to know."]), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, path):
    with open_page(browser, path) as page:
        yield page


def plot(page, section, n=0):
    return drawn(page.locator(f"#{section} .plot").nth(n))


def traces(page, section, kind):
    """Plotly's traces of one kind that are shown in a section, panel by panel: "mean", "range" or "seed"."""
    return page.evaluate(
        """([section, kind]) => [...document.querySelectorAll(`#${section} .plot`)].flatMap((host) => host.plot.traces)
             .filter((trace) => trace.kind === kind && trace.visible === true)""",
        [section, kind],
    )


def lines(page, section, series=None):
    """The curves in a section: means over seeds."""
    return [trace for trace in traces(page, section, "mean") if series in (None, trace["name"])]


def axis_range(page, section, axis, n=0):
    """Ends of an axis of one plot; on a logarithmic one, their logarithms."""
    return plot(page, section, n).evaluate(f"host => host._fullLayout.{axis}axis.range")


def titles(page, section):
    return page.locator(f"#{section} figcaption").all_text_contents()


def ticks(page, section, n=0):
    found = plot(page, section, n).locator(".xtick text, .ytick text")
    return [text for text in found.all_text_contents() if text]


def axis_labels(page, section):
    return [plot(page, section).locator(f".{axis}title").text_content() for axis in "xy"]


def legend_entry(page, section, series):
    entries = plot(page, section).locator(".legend .traces")
    return entries.filter(has=page.locator(f'text[data-unformatted="{series}"]')).locator(".legendtoggle")


def hover_label(page, section):
    """Lines of text in the hover label, once there is one."""
    texts = page.locator(f"#{section} .hoverlayer text")
    texts.first.wait_for()
    return texts.all_text_contents()


def wait_for_runs(page, text):
    """Waits until the page is redrawn after a click on a legend or a change of the filter."""
    page.wait_for_function("text => document.getElementById('shown').textContent === text", arg=text)


def roughness(line):
    ys = line["y"]
    return sum(abs(a - 2 * b + c) for a, b, c in zip(ys, ys[1:], ys[2:], strict=False))


def test_it_shows_every_section(page):
    assert page.title() == page.locator("h1").text_content() == "Made-up runs"
    assert page.locator("#summary").text_content() == "28 runs of 14 configs with 2 seeds"
    assert "One thing to know." in page.locator("#notes").text_content()
    assert titles(page, "final") == titles(page, "speed") == ["p = 4", "p = 2"]
    contexts = [f"p = {power}, training context {context}" for power in (4, 2) for context in (64, 256)]
    assert titles(page, "curves") == contexts
    assert titles(page, "beyond") == [title.replace("training context", "trained at") for title in contexts]
    assert titles(page, "heads") == ["By layer and head", "By layer over training"]
    assert page.locator("#run-table tbody tr").count() == 28
    # Four variants in each panel.
    for section, panels in (("final", 2), ("beyond", 4), ("curves", 4), ("speed", 2), ("probes", 4)):
        assert len(lines(page, section)) == 4 * panels
        assert all(len(line["y"]) > 1 for line in lines(page, section))


@pytest.mark.slow
def test_a_series_can_be_hidden_everywhere_and_shown_again(page):
    legend_entry(page, "final", "sympow").click()
    wait_for_runs(page, "20 of 28 runs")
    for section in ("final", "beyond", "curves", "speed"):
        assert lines(page, section, "sympow") == []
        assert lines(page, section, "conformal") != []
    assert page.locator("#run-table tbody tr").count() == 20
    legend_entry(page, "curves", "sympow").click()
    wait_for_runs(page, "28 runs")
    assert len(lines(page, "curves", "sympow")) == 4


@pytest.mark.slow
def test_a_double_click_shows_one_series_alone(page):
    legend_entry(page, "curves", "conformal").dblclick()
    wait_for_runs(page, "8 of 28 runs")
    assert len(lines(page, "curves")) == len(lines(page, "curves", "conformal")) == 4
    legend_entry(page, "curves", "conformal").dblclick()
    wait_for_runs(page, "28 runs")


@pytest.mark.slow
def test_smoothing_smooths(page):
    def set_smoothing(value):
        page.locator("#smoothing").fill(str(value))
        return lines(page, "curves", "conformal")[0]

    rough, smooth = set_smoothing(0), set_smoothing(20)
    assert page.locator("#smoothing-value").text_content() == "over 8 steps"
    assert roughness(smooth) < roughness(rough) / 3
    set_smoothing(0)
    assert page.locator("#smoothing-value").text_content() == "none"


@pytest.mark.slow
def test_curves_against_tokens_and_time_and_on_logarithmic_axes(page):
    assert axis_labels(page, "curves") == ["step", "training loss (nats per token)"]
    assert "40" in ticks(page, "curves")
    page.locator("#curve-x").select_option("tokens")
    assert axis_labels(page, "curves")[0] == "tokens"
    # 40 steps of 1,024 tokens.
    assert "40,000" in ticks(page, "curves")
    page.locator("#curve-x").select_option("time")
    assert axis_labels(page, "curves")[0] == "time on steps"
    assert any(tick.endswith(" s") for tick in ticks(page, "curves"))
    page.locator("#curve-x").select_option("steps")
    page.locator("#curve-log-x").check()
    assert {"1", "10"} <= set(ticks(page, "curves"))
    # From 1 to 40 steps.
    assert axis_range(page, "curves", "x") == pytest.approx([0, math.log10(40)])
    linear = axis_range(page, "curves", "y")
    page.locator("#curve-log-y").check()
    assert axis_range(page, "curves", "y") == pytest.approx([math.log10(y) for y in linear], abs=0.01)


@pytest.mark.slow
def test_the_beginning_can_have_its_room(page):
    highest = max(lines(page, "curves")[0]["y"])
    assert axis_range(page, "curves", "y")[1] < highest
    page.locator("#late").uncheck()
    assert axis_range(page, "curves", "y")[1] > highest


@pytest.mark.slow
def test_another_metric_and_each_seed(page):
    page.locator("#metric").select_option(label="held-out loss (nats per token)")
    assert axis_labels(page, "curves")[1] == "held-out loss (nats per token)"
    page.locator("#metric").select_option("loss")
    assert traces(page, "curves", "seed") == []
    assert len(traces(page, "curves", "range")) == 4 * 4
    page.locator("#each-seed").check()
    assert len(traces(page, "curves", "seed")) == 4 * 4 * 2
    assert traces(page, "curves", "range") == []


def test_pointing_reads_numbers(page):
    box = plot(page, "final").locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 60)
    text = hover_label(page, "final")
    # p = 4 at 256: mean of two seeds, 0.02 apart, of the last four of forty losses.
    base = 3 - 0.3 - 0.2
    tail = sum(3 / step for step in range(37, 41)) / 4
    assert text[0] == "training context (tokens): 256"
    # The highest loss first, as in the plot.
    assert [line.partition(" :")[0] for line in text[1:]] == ["softmax", "sympow", "sympow + gating", "conformal"]
    assert text[4] == f"conformal : {base + 0.01 + tail:.3f}  ({base + tail:.3f} to {base + 0.02 + tail:.3f}, 2 seeds)"
    page.mouse.move(5, 5)
    page.locator("#final .hoverlayer text").first.wait_for(state="detached")


@pytest.mark.slow
def test_arrow_keys_read_numbers_too(page):
    plot(page, "final").focus()
    page.keyboard.press("ArrowRight")
    assert hover_label(page, "final")[0] == "training context (tokens): 64"
    page.keyboard.press("ArrowRight")
    page.locator("#final .hoverlayer text").filter(has_text="256").first.wait_for()
    page.locator("#filter").focus()
    page.locator("#final .hoverlayer text").first.wait_for(state="detached")


@pytest.mark.slow
def test_dragging_looks_closer_and_a_double_click_goes_back(page):
    area = plot(page, "curves").locator(".nsewdrag")
    box = area.bounding_box()

    def ranges():
        return [axis_range(page, "curves", axis) for axis in "xy"]

    whole = ranges()
    page.mouse.move(box["x"] + 100, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 160, steps=4)
    page.mouse.up()
    page.wait_for_function("document.querySelector('#curves .plot')._fullLayout.xaxis.range[0] > 1")
    closer = ranges()
    assert all(low > least and high < most for (low, high), (least, most) in zip(closer, whole, strict=True))
    # Toggling a series elsewhere keeps the zoom.
    legend_entry(page, "final", "softmax").click()
    wait_for_runs(page, "24 of 28 runs")
    assert ranges() == closer
    legend_entry(page, "final", "softmax").click()
    wait_for_runs(page, "28 runs")
    assert ranges() == closer
    plot(page, "curves")
    area.dblclick(position={"x": 150, "y": 100})
    page.wait_for_function("document.querySelector('#curves .plot')._fullLayout.xaxis.range[0] === 1")
    assert ranges() == whole


@pytest.mark.slow
def test_a_filter_is_for_the_whole_page(page):
    page.locator("#filter").fill("conformal context=64 p=2")
    wait_for_runs(page, "2 of 28 runs")
    assert titles(page, "curves") == ["p = 2, training context 64"]
    names = page.locator("#run-table tbody tr").evaluate_all("rows => rows.map((row) => row.dataset.run)")
    assert names == ["conformal-p2-64/seed0", "conformal-p2-64/seed1"]
    assert page.locator("#head-run option").all_text_contents() == [
        "conformal, p = 2, context 64, seed 0",
        "conformal, p = 2, context 64, seed 1",
    ]
    page.locator("#filter").fill("nothing-like-this")
    wait_for_runs(page, "0 of 28 runs")
    assert page.locator("#final .empty").is_visible()
    assert page.locator("#heads .empty").is_visible()
    page.locator("#filter").fill("")
    wait_for_runs(page, "28 runs")
    assert len(lines(page, "curves")) == 16


@pytest.mark.slow
def test_loss_beyond_the_training_context(page):
    marks = page.locator("#beyond .plot").evaluate_all("hosts => hosts.map((host) => host.plot.layout.shapes[0].x0)")
    assert marks == [64, 256, 64, 256]
    # From 1/16 of the training context, 64, to what was evaluated.
    assert lines(page, "beyond", "conformal")[0]["x"] == [2**n for n in range(2, 10)]
    page.locator("#beyond-kind").select_option("by_position")
    assert axis_labels(page, "beyond")[0] == "position (tokens)"
    assert len(lines(page, "beyond", "conformal")[0]["x"]) > 10


@pytest.mark.parametrize("width", [1440, 390])
def test_axes_of_contexts_have_powers_of_two(browser, path, width):
    with open_page(browser, path, width=width) as page:
        page.locator("#probe").select_option("passkey")
        for section, choices in (
            ("final", []),
            ("beyond", ["by_context", "by_position"]),
            ("probes", []),
            ("speed", []),
        ):
            for choice in choices or [None]:
                if choice:
                    page.locator("#beyond-kind").select_option(choice)
                labels = [text for text in plot(page, section).locator(".xtick text").all_text_contents() if text]
                numbers = [int(label.replace(",", "")) for label in labels]
                assert len(numbers) > 1
                assert all(number.bit_count() == 1 for number in numbers), (section, choice, labels)


def test_one_training_context_is_a_table_and_no_axis(page):
    assert page.locator("#final .panels table").count() == 0
    page.locator("#filter").fill("context=64")
    wait_for_runs(page, "14 of 28 runs")
    # The mean of two seeds, 0.02 apart, of the last four of forty losses.
    low = 3 - 0.3 - 0.1 + sum(3 / step for step in range(37, 41)) / 4
    final = f"{low + 0.01:.3f}  ({low:.3f} to {low + 0.02:.3f}, 2 seeds)"
    for section, number in (("final", final), ("speed", "4,000  (4,000 to 4,000, 2 seeds)")):
        assert page.locator(f"#{section} .plot").count() == 0
        rows = page.locator(f"#{section} .panels tbody tr")
        assert rows.count() == 8
        found = {tuple(row.locator("td").all_text_contents()[:2]): row.locator("td").last for row in rows.all()}
        assert found["p = 2", "conformal"].text_content() == number
    assert page.locator("#final details").is_hidden()
    page.locator("#filter").fill("")
    wait_for_runs(page, "28 runs")
    assert titles(page, "final") == titles(page, "speed") == ["p = 4", "p = 2"]
    assert len(lines(page, "final")) == 8
    assert page.locator("#final details").is_visible()


def test_it_does_not_call_a_users_runs_the_papers_figures(page):
    assert "Fig." not in page.locator("main").inner_text()


UNDRAWN = "[...document.querySelectorAll('.plot')].filter((host) => !host.querySelector('.main-svg')).length"


@pytest.mark.slow
def test_plots_that_nobody_scrolled_to_are_in_a_picture_of_the_page(browser, path, tmp_path):
    with open_page(browser, path) as page:
        page.wait_for_function(f"() => {UNDRAWN} === 0")
        assert page.locator(".plot").count() > 10
        whole = picture_of(page, tmp_path / "page.png")
        # The lower half, of training curves and heat maps.
        assert share_of(whole[len(whole) // 2 :], VARIANTS["conformal"].light) > 1e-4
        # What is redrawn out of view follows too.
        page.locator("#theme").select_option("dark")
        page.wait_for_function("() => [...document.querySelectorAll('.plot')].every((host) => !host.stale)")


def test_all_plots_are_drawn_before_printing(browser, path):
    with open_page(browser, path) as page:
        # A browser prints what this event leaves behind.
        assert page.evaluate(f"() => {{ dispatchEvent(new Event('beforeprint')); return {UNDRAWN}; }}") == 0


@pytest.mark.slow
def test_probes_of_the_state(page):
    assert titles(page, "probes") == titles(page, "beyond")
    choices = page.locator("#probe option").all_text_contents()
    assert choices == ["associative recall of 2 pairs", "associative recall of 4 pairs", "passkey"]
    for probe, shown in (("2", "0.25"), ("4", "0.5"), ("passkey", "2")):
        page.locator("#probe").select_option(probe)
        (line, *_) = lines(page, "probes", "conformal")
        assert [text.partition("  ")[0] for text in line["customdata"]] == [shown] * 2
    assert axis_labels(page, "probes")[1] == "loss reduction (nats per key)"


def test_numbers_that_are_missing_are_left_out(browser, tmp_path):
    points = [{"distance": n, "accuracy": 0.0, "loss": 3.0, "control": None if n == 64 else 5.0} for n in (16, 64, 256)]
    mean = [2.0] * 20 + [None] * 20
    write_run(tmp_path / "runs" / "one", [3.0, 2.5], evaluation=mean, probes={"passkey": points}, vocab_size=257)
    page = build_report_page("Missing", groups_of(tmp_path / "runs"), [])
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    with open_page(browser, tmp_path / "index.html") as page:
        (line,) = plot(page, "probes").evaluate("host => host.data.map(({ x, y }) => ({ x, y }))")
        assert line == {"x": [16, 256], "y": [2, 2]}
        (line,) = plot(page, "beyond").evaluate("host => host.data.map(({ x, customdata }) => ({ x, customdata }))")
        assert line["x"] == [4, 8, 16, 32, 40]
        assert line["customdata"] == ["2"] * 3 + ["–"] * 2


@pytest.mark.slow
def test_heat_maps_of_heads(page):
    def cells(n=0):
        return plot(page, "heads", n).evaluate("host => host.data[0].text.flat()")

    assert cells() == ["700", "30", "–", "2.5"]
    assert cells(1) == ["500"] * 4 + ["20"] * 4
    # Colored by logarithms.
    colors = plot(page, "heads").evaluate("host => host.data[0].z.flat()")
    assert colors == [
        pytest.approx(math.log10(700)),
        pytest.approx(math.log10(30)),
        None,
        pytest.approx(math.log10(2.5)),
    ]
    box = plot(page, "heads").locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 3 * box["height"] / 4)
    assert hover_label(page, "heads") == ["layer 1, head 0: never forgets (4,096 held-out tokens)"]
    page.locator("#head-quantity").select_option("beta_mean")
    assert cells() == ["1", "0.4", "1.6", "1.1"]
    chosen = page.locator("#head-run").input_value()
    page.locator("#head-run").select_option(label="conformal, p = 4, context 256, seed 1")
    assert page.locator("#head-run").input_value() != chosen
    assert cells() == ["1", "0.4", "1.6", "1.1"]


@pytest.mark.slow
def test_the_final_loss_can_be_the_held_out_one(page):
    page.locator("#final-kind").select_option("final_heldout_loss")
    assert axis_labels(page, "final")[1] == "held-out loss (nats per token)"
    page.locator("#final details summary").click()
    row = page.locator("#final .numbers tbody tr").filter(has_text="conformal").first
    assert row.locator("td").all_text_contents() == ["p = 4", "conformal", "3.01", "3.01"]


@pytest.mark.slow
def test_the_table_sorts_marks_and_opens(page):
    head = page.locator("#run-table thead")
    assert "learning rate" not in head.inner_text()
    assert "learning rate" in page.locator("#same").text_content()
    head.get_by_role("button", name="final loss").click()
    values = [float(x) for x in page.locator("#run-table tbody td:nth-child(4)").all_text_contents()]
    assert values == sorted(values)
    assert len(set(values)) > 5
    head.get_by_role("button", name="final loss").click()
    values = [float(x) for x in page.locator("#run-table tbody td:nth-child(4)").all_text_contents()]
    assert values == sorted(values, reverse=True)
    # Softmax is not the most common mixer.
    marked = page.locator("#run-table td.different").all_text_contents()
    assert marked.count("softmax") == 4
    assert "sympow" not in marked
    page.locator("#run-table summary").filter(has_text="softmax-p2-64/seed1").click()
    command = page.locator("#run-table .command:visible").text_content()
    assert command.startswith("sympow train --config ")
    assert "softmax-p2-64/seed1/config.yaml" in command
    page.locator("#all-settings").check()
    assert "learning rate" in head.inner_text()


@pytest.mark.slow
def test_light_and_dark_can_be_chosen(page):
    def colors():
        drawn_line = "host.data.findLast((trace) => trace.name === 'conformal').line.color"
        ink, line = plot(page, "curves").evaluate(f"host => [host._fullLayout.font.color, {drawn_line}]")
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), ink, line

    light = colors()
    page.locator("#theme").select_option("dark")
    dark = colors()
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(20, 23, 28)"
    assert light[1] != dark[1]
    assert light[2] != dark[2]
    page.locator("#theme").select_option("auto")
    assert colors() == light


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1440, "light"), (390, "dark")],
)
def test_it_looks_right(browser, path, tmp_path, width, scheme):
    with open_page(browser, path, width=width, scheme=scheme) as page:
        draw_all(page)
        assert overlaps(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        picture = picture_of(page, tmp_path / "page.png")
    assert picture.shape[1] == width
    paper = LIGHT_PAPER if scheme == "light" else DARK_PAPER
    assert 0.2 < share_of(picture, paper) < 0.98
    for name in ("sympow", "sympow + gating", "conformal"):
        assert share_of(picture, getattr(VARIANTS[name], scheme)) > 1e-4, name


@pytest.fixture(scope="module")
def fast_bytes(tmp_path_factory):
    """The page of byte-level runs at hundreds of thousands of bytes per second: long tick labels."""
    folder = tmp_path_factory.mktemp("fast")
    # At two contexts: at one, speeds are a table.
    for place, ((name, variant), context) in enumerate(product(VARIANT_SETTINGS.items(), (64, 128))):
        settings = {**variant, "context": context, "vocab_size": 257}
        lines = {2: {"tokens_per_second": 61_728.0 * (place + 1)}}
        write_run(folder / "runs" / f"{name}-{context}", [3.0, 2.5], lines=lines, evaluation=[2.0] * 128, **settings)
    page = build_report_page("Fast", groups_of(folder / "runs"), [])
    (folder / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
def test_axis_labels_stand_beside_long_numbers(browser, fast_bytes, width):
    with open_page(browser, fast_bytes, width=width) as page:
        assert "400,000" in ticks(page, "speed")
        draw_all(page)
        assert overlaps(page) == []


@pytest.mark.slow
def test_byte_level_runs_are_counted_in_bytes(browser, fast_bytes):
    with open_page(browser, fast_bytes) as page:
        assert axis_labels(page, "speed") == ["training context (bytes)", "bytes per second"]
        assert axis_labels(page, "final")[1] == "training loss (nats per byte)"
        assert axis_labels(page, "beyond") == ["evaluation context (bytes)", "average loss (nats per byte)"]
        assert "number of bytes in which half of the state" in page.locator("#heads p").first.inner_text()
        # The table keeps the names and help texts of settings.
        page.locator("#runs").evaluate("element => element.remove()")
        assert "token" not in page.locator("main").inner_text()


@pytest.mark.slow
def test_it_prints_light_and_without_controls(browser, path, tmp_path):
    with open_page(browser, path, scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.locator("#filter").is_hidden()
        assert page.locator("#smoothing").is_hidden()
        # All of them, and not only those near the window.
        page.wait_for_function("[...document.querySelectorAll('.plot')].every((host) => !host.stale)")
        assert page.locator("#curves .main-svg").first.is_visible()
        picture = picture_of(page, tmp_path / "print.png")
        assert share_of(picture, LIGHT_PAPER) > 0.5
        pdf = page.pdf()
    assert pdf.startswith(b"%PDF")


def test_names_of_runs_are_text(browser, tmp_path):
    """HTML, Plotly's tags and its templates in names are shown literally, and scripts do not run."""
    name = "<img src=x onerror=fail()><b>bold</b>%{x}<script>fail()</script>"
    small = {"width": 64, "heads": 2, "layers": 2, "mlp_ratio": 4}
    large = {"width": 128, "heads": 4, "layers": 3, "mlp_ratio": 2}
    # With more differences than a name lists, series are named after folders.
    for folder, changes in ((name.replace("/", "∕"), small), ("plain", large)):
        write_run(tmp_path / "runs" / folder, [3.0, 2.5], **changes)
    groups = groups_of(tmp_path / "runs")
    named = next(group.series for group in groups if "bold" in group.series)
    path = tmp_path / "index.html"
    path.write_text(build_report_page(name, groups, [name]), encoding="utf-8")
    with open_page(browser, path) as page:
        assert page.locator("h1").text_content() == name
        assert page.locator("main img, main script").count() == 0
        plot(page, "curves").focus()
        assert named in page.locator("#curves .legend text").all_text_contents()
        page.keyboard.press("ArrowRight")
        assert any(line.startswith(f"{named} : 3") for line in hover_label(page, "curves"))
