"""The page of `sympow inspect` in a headless Chromium, from disk."""

import math

import pytest
import torch
from report.pages import draw_all, drawn, open_page, overlaps, picture_of
from report.test_heads import layer_by_layer, lively_model

from sympow.data.tokenizer import ByteTokenizer, train_bpe
from sympow.generation.text import TextModel
from sympow.report.inspection import build_inspection_page, inspect_text

pytestmark = pytest.mark.slow  # a browser, and runs to report on

LINE = "A state <b>that</b> forgets, naïvely;\n\tand turns.\n"
TEXT = LINE * 120

pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")


@pytest.fixture(scope="module")
def text_model():
    return TextModel(lively_model(), ByteTokenizer())


@pytest.fixture(scope="module")
def path(text_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(build_inspection_page(inspect_text(text_model, TEXT, tokens=5000), "Made up"), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, path):
    with open_page(browser, path) as page:
        yield page


def colors(page, count=40):
    """Background colors of the first tokens."""
    return page.locator(".token").evaluate_all(
        f"tokens => tokens.slice(0, {count}).map((token) => getComputedStyle(token).backgroundColor)"
    )


def lost(gamma):
    """1 − γ, as it is written: near 1 as "1 − 5e-4"."""
    return float(gamma.removeprefix("1 − ")) if gamma.startswith("1 − ") else 1 - float(gamma)


def test_it_shows_the_text_and_says_what_is_left_out(page):
    assert page.locator("h1").text_content() == "Made up"
    shown = page.locator("#text").text_content().replace("⏎", "").removeprefix("start of document")
    assert TEXT.startswith(shown)
    assert len(shown.encode()) == 5000
    left_out = len(TEXT.encode()) - 5000
    assert f"continues for {left_out:,} bytes that are not shown" in page.locator("#notes").text_content()


# Adjacent tokens of one word that are on different lines.
FIND_BROKEN_WORDS = """
() => {
  const tokens = [...document.querySelectorAll(".token")];
  const middle = (token) => { const box = token.getBoundingClientRect(); return (box.top + box.bottom) / 2; };
  return tokens.slice(1).flatMap((token, n) => {
    const [before, here] = [tokens[n].textContent, token.textContent];
    // Lines may break beside what is neither a letter nor a digit.
    const inside = /[\\p{L}\\d]$/u.test(before) && (here === "" || /^[\\p{L}\\d]/u.test(here));
    return inside && Math.abs(middle(token) - middle(tokens[n])) > 5 ? [`${before}|${here} at token ${n + 1}`] : [];
  });
}
"""


@pytest.mark.slow
def test_no_line_breaks_inside_a_word(browser, text_model, tmp_path):
    # With letters of two bytes.
    text = "Naïve café owners repeated señor Müller's incomprehensible circumlocutions about coöperation. " * 40
    path = tmp_path / "page.html"
    path.write_text(build_inspection_page(inspect_text(text_model, text), "Prose"), encoding="utf-8")
    with open_page(browser, path) as page:
        for width in (1280, 700, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(FIND_BROKEN_WORDS) == []


@pytest.mark.slow
def test_what_is_not_read_as_bytes_is_counted_in_tokens(browser, tmp_path):
    tokenizer = train_bpe([TEXT], 257 + 20)
    model = TextModel(lively_model(vocab_size=tokenizer.vocab_size), tokenizer)
    path = tmp_path / "page.html"
    path.write_text(build_inspection_page(inspect_text(model, LINE), "Tokens"), encoding="utf-8")
    with open_page(browser, path) as page:
        assert "Point at a token for its numbers" in page.locator("#summary").text_content()
        assert "median half-life (tokens)" in page.locator("#map-title").text_content()
        assert "bytes" not in page.locator("body").inner_text()


def test_pointing_at_a_token_reads_its_numbers(page, text_model):
    for layer, head, token in ((0, 0, 5), (1, 1, 30)):
        page.locator("#layer").select_option(str(layer))
        page.locator("#head").select_option(str(head))
        page.locator(f'[data-token="{token}"]').hover()
        cells = page.locator("#tooltip td").all_text_contents()
        found = dict(zip(cells[::2], cells[1::2], strict=True))
        # Computed without the page, from the same tokens.
        log_gamma, beta = layer_by_layer(text_model.model, text_model.encode(TEXT)[:, :100])[layer]
        rate = -log_gamma[token, head].item()
        half_life = float(found["half-life"].removesuffix(" bytes").replace(",", ""))
        assert lost(found["γ"]) == pytest.approx(-math.expm1(-rate), rel=5e-3)
        assert half_life == pytest.approx(math.log(2) / rate, rel=2e-3)
        assert float(found["β"]) == pytest.approx(beta[token, head].item(), abs=2e-3)
        assert page.locator("#tooltip strong").text_content() == f'"{TEXT[token - 1]}"'


@pytest.mark.slow
def test_layer_head_and_quantity_change_the_colors(page):
    seen = [colors(page)]
    page.locator("#head").select_option("1")
    seen.append(colors(page))
    page.locator("#layer").select_option("1")
    seen.append(colors(page))
    page.locator("#quantity").select_option("rotation")
    seen.append(colors(page))
    assert all(a != b for n, a in enumerate(seen) for b in seen[n + 1 :])
    page.locator("#quantity").select_option("forgetting")
    page.locator("#same-scale").check()
    assert colors(page) not in seen


@pytest.mark.slow
def test_the_most_forgetful_token_is_the_strongest(page, text_model):
    page.locator("#quantity").select_option("forgetting")
    strengths = page.locator(".token").evaluate_all(
        "tokens => tokens.slice(0, 100).map((token) => Number(token.style.getPropertyValue('--forgot')))"
    )
    log_gamma, _ = layer_by_layer(text_model.model, text_model.encode(TEXT)[:, :100])[0]
    by_forgetting = torch.argsort(log_gamma[:, 0]).tolist()
    assert strengths[by_forgetting[0]] == 1
    assert strengths[by_forgetting[-1]] == 0
    assert strengths[by_forgetting[0]] >= strengths[by_forgetting[50]] >= strengths[by_forgetting[-1]]


@pytest.mark.slow
def test_the_map_has_every_heads_median(page, text_model):
    def cells():
        """Half-lives are colored by their logarithms."""
        colors = drawn(page.locator("#map")).evaluate("host => host.data[0].z.flat()")
        return colors if page.locator("#quantity").input_value() == "rotation" else [10**x for x in colors]

    read = layer_by_layer(text_model.model, text_model.encode(TEXT)[:, :5001])
    # The boundary before the text does not count.
    half_lives = [math.log(2) / -log_gamma[1:].median(0).values for log_gamma, _ in read]
    assert cells() == pytest.approx(torch.cat(half_lives).tolist(), rel=5e-3)
    page.locator("#quantity").select_option("rotation")
    assert cells() == pytest.approx(torch.cat([beta[1:].mean(0) for _, beta in read]).tolist(), abs=1e-3)


@pytest.mark.slow
def test_the_curve_says_that_it_is_of_mean_decays(page, text_model):
    assert "half-life of the mean decay of every 32 bytes" in page.locator("#profile-title").text_content()
    assert "below the head's median half-life" in page.locator("#profile-note").inner_text()
    (first, *_) = drawn(page.locator("#profile")).evaluate("host => host.data[0].y")
    log_gamma, _ = layer_by_layer(text_model.model, text_model.encode(TEXT)[:, :5001])[0]
    assert first == pytest.approx(math.log(2) / -log_gamma[1:33, 0].mean().item(), rel=5e-3)
    page.locator("#quantity").select_option("rotation")
    assert "mean β of every 32 bytes" in page.locator("#profile-title").text_content()
    assert page.locator("#profile-note").is_hidden()


@pytest.mark.slow
def test_a_head_can_be_chosen_on_the_map(page):
    box = drawn(page.locator("#map")).locator(".nsewdrag").bounding_box()
    page.mouse.click(box["x"] + 3 * box["width"] / 4, box["y"] + 3 * box["height"] / 4)
    page.wait_for_function("document.getElementById('head').value === '1'")
    assert page.locator("#layer").input_value() == "1"
    assert page.locator("#head").input_value() == "1"
    assert "Layer 1, head 1" in page.locator("#profile-title").text_content()


@pytest.mark.slow
def test_a_click_on_the_curve_leads_to_that_place(page):
    profile = drawn(page.locator("#profile")).locator(".nsewdrag")
    box = profile.bounding_box()
    profile.click(position={"x": box["width"] - 2, "y": 40})
    page.locator(".token.here").wait_for()
    assert int(page.locator(".token.here").get_attribute("data-token")) > 4900
    page.wait_for_function(
        """() => {
             const box = document.querySelector(".here").getBoundingClientRect();
             return box.top > 0 && box.bottom < innerHeight;
           }"""
    )


@pytest.mark.slow
def test_a_model_that_only_forgets_offers_no_turning(browser, tmp_path):
    model = TextModel(lively_model(rotary="fixed"), ByteTokenizer())
    path = tmp_path / "page.html"
    path.write_text(build_inspection_page(inspect_text(model, LINE), "Gated"), encoding="utf-8")
    with open_page(browser, path) as page:
        assert page.locator("#quantity").input_value() == "forgetting"
        assert page.locator("#quantity option").count() == 1
        page.locator('[data-token="3"]').hover()
        assert "β" not in page.locator("#tooltip").text_content()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1280, "dark"), (390, "light")],
)
def test_it_looks_right(browser, path, tmp_path, width, scheme):
    with open_page(browser, path, width=width, scheme=scheme) as page:
        page.locator(".token").first.wait_for()
        draw_all(page)
        assert overlaps(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        picture = picture_of(page, tmp_path / "page.png")[:900]
    assert len({tuple(pixel) for pixel in (picture[::4, ::4].reshape(-1, 3) * 15).round().tolist()}) > 20
