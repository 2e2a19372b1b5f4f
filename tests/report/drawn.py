"""Checks of matplotlib figures: nothing is cut off, no text covers another, no two series look alike."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Pixels by which boxes can overlap: they include the empty border around letters.
SLACK = 1.5


def record_figures(monkeypatch):
    """A list that collects every figure that is saved from now on; no files are written, which would take too long."""
    saved = []

    def save(figure, *arguments, **options):
        if figure not in saved:
            saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return saved


def layout_problems(figure):
    """Descriptions of texts and legends that leave the figure, overlap, or cover a panel."""
    # A closed figure has no canvas any more.
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = []
    for axes in figure.axes:
        if axes.get_visible():
            boxes += [(describe(text), text.get_window_extent(renderer)) for text in texts_of(axes)]
    if figure.get_suptitle():
        boxes.append((figure.get_suptitle(), figure._suptitle.get_window_extent(renderer)))
    legends = [legend.get_window_extent(renderer) for legend in figure.legends]
    boxes += [("legend", box) for box in legends]
    inside = figure.bbox
    found = []
    for name, box in boxes:
        if min(box.x0 - inside.x0, box.y0 - inside.y0, inside.x1 - box.x1, inside.y1 - box.y1) < -SLACK:
            found.append(f"{name} leaves the figure")
    found += [f"{one} covers {other}" for (one, a), (other, b) in combinations(boxes, 2) if covers(a, b)]
    for axes in figure.axes:
        if axes.get_visible():
            assert axes.get_legend() is None, "the legend must be below the panels, where it hides no curve"
            found += ["legend covers a panel" for box in legends if covers(box, axes.get_window_extent(renderer))]
    return found


def texts_of(axes):
    """Title, axis labels and the tick labels within the axis' range, without empty ones."""
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        low, high = sorted(limits)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if low <= tick.get_loc() <= high:
                texts += [text for text in (tick.label1, tick.label2) if text.get_visible()]
    return [text for text in texts if isinstance(text, Text) and text.get_text().strip()]


def describe(text):
    return repr(text.get_text())


def covers(a, b):
    across = min(a.x1, b.x1) - max(a.x0, b.x0)
    up = min(a.y1, b.y1) - max(a.y0, b.y0)
    return across > SLACK and up > SLACK


def looks(figure):
    """By label: color, dashes and marker of every series that the legend names."""
    found = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle
            found[label] = (line.get_color(), str(line._unscaled_dash_pattern), line.get_marker())
    return found
