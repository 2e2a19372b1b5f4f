"""Opening pages in a browser, and checks of their layout."""

from contextlib import contextmanager

import matplotlib.image
import numpy as np

# Boxes that must not overlap, by what contains them.
SIBLINGS = (
    "main > section", "main > *", "section > *", ".panels > *", ".controls > *", ".bar > *", "nav > *",
    "header > *", ".overview > *", "figure > *",
)  # fmt: skip

FIND_OVERLAPS = """
(selectors) => {
  const found = [];
  const box = (element) => element.getBoundingClientRect();
  const cross = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const name = (element) => `${element.tagName}.${element.id || element.className.baseVal || element.className} `
    + element.textContent.trim().slice(0, 30);
  const compare = (elements) => {
    const shown = [...elements].filter((element) => box(element).width && box(element).height);
    shown.forEach((one, n) => shown.slice(n + 1).forEach((other) => {
      if (one.parentElement === other.parentElement && cross(box(one), box(other))) {
        found.push(`${name(one)} over ${name(other)}`);
      }
    }));
  };
  for (const selector of selectors) compare(document.querySelectorAll(selector));
  for (const plot of document.querySelectorAll(".plot")) {
    const texts = [...plot.querySelectorAll("text")].filter((text) => text.textContent.trim() && box(text).width);
    texts.forEach((one, n) => texts.slice(n + 1).forEach((other) => {
      if (cross(box(one), box(other))) found.push(`${name(one)} over ${name(other)}`);
    }));
    for (const text of texts) {
      const [inner, outer] = [box(text), box(plot)];
      if (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1) {
        found.push(`${name(text)} leaves its plot`);
      }
    }
  }
  for (const element of document.querySelectorAll("body *")) {
    // Elements that scroll can be wider.
    if (element.closest(".scroll, svg, #tooltip, select, script, style") || !box(element).width) continue;
    if (box(element).right > document.documentElement.clientWidth + 1) found.push(`${name(element)} leaves the page`);
  }
  return found;
}
"""


@contextmanager
def open_page(browser, path, width=1280, height=900, scheme="light"):
    """Opens a page from disk. Console messages, errors and requests for other files fail the test."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    context.close()
    assert complaints == []


def drawn(plot):
    """Scrolls to a plot and waits until it is drawn."""
    plot.scroll_into_view_if_needed()
    plot.page.wait_for_function("host => host.on && !host.stale", arg=plot.element_handle())
    return plot


def draw_all(page):
    for plot in page.locator(".plot").all():
        drawn(plot)
    page.evaluate("scrollTo(0, 0)")


def overlaps(page):
    """Descriptions of elements that overlap or leave the page."""
    return page.evaluate(FIND_OVERLAPS, list(SIBLINGS))


def picture_of(page, path):
    """A screenshot of the whole page: (height, width, 3) numbers between 0 and 1."""
    page.screenshot(path=path, full_page=True)
    return matplotlib.image.imread(path)[..., :3]


def share_of(picture, color):
    """Share of a picture's pixels that have about this color, "#rrggbb"."""
    wanted = np.array([int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return float((np.abs(picture - wanted).max(-1) < 0.06).mean())
