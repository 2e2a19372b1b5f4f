"""The page of `sympow serve` in a headless Chromium, before a stand-in for the server that a script moves along."""

import re
from contextlib import contextmanager

import pytest
from report.pages import overlaps, picture_of
from serving.stand_in import BREAK_OFF, WAIT, StandIn

pytestmark = pytest.mark.slow  # a browser
HTML = "<img src=x onerror=fail()><b>bold</b><script>fail()</script>"
LONG_NAME = "a_name_without_any_place_to_break_it_" * 4 + ".txt"
# Seconds to wait for what the page should do, on a busy machine.
PATIENCE = 30
PAPER = {"light": "#ffffff", "dark": "#1a1e24"}


@pytest.fixture
def server():
    server = StandIn()
    yield server
    server.close()


@contextmanager
def open_page(browser, server, width=1280, height=900, scheme="light", phone=False):
    """Opens the page. What it writes to the console fails the test, but for refused requests, which browsers report."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=phone, is_mobile=phone
    )
    page = context.new_page()
    page.set_default_timeout(1_000 * PATIENCE)
    complaints = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    yield page
    context.close()
    assert [line for line in complaints if not line.startswith("error: Failed to load resource:")] == []


@pytest.fixture
def page(browser, server):
    with open_page(browser, server) as page:
        expect(page.locator("#model")).to_have_text("tiny")
        yield page


def expect(locator):
    from playwright.sync_api import expect

    expect.set_options(timeout=1_000 * PATIENCE)
    return expect(locator, None)


def ask(page, prompt):
    page.get_by_label("The model continues").fill(prompt)
    page.get_by_role("button", name="Generate").click()


def until(page, holds):
    """Waits until something holds of the server."""
    for _ in range(50 * PATIENCE):
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{PATIENCE} seconds have passed")


def newest(page):
    """The newest generated text, as the page shows it: with the prompt."""
    return page.locator("#answers article").first.locator(".text")


def facts(page):
    return page.locator("#answers article").first.locator(".facts")


def problem(page):
    return page.locator("#answers article").first.get_by_role("alert")


def document(page, name):
    return page.locator("#document-list li").filter(has_text=name)


def test_a_prompt_is_continued_as_tokens_come(page, server):
    server.tokens = ["Once", " upon", WAIT, " a", " time\n<end>"]
    for label, value in {"Temperature": "0.5", "Top-p": "0.9", "Max tokens": "32", "Seed": "7"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Stop strings").fill("\\n\\n\nThe \\\\n")
    ask(page, "Tell: ")
    expect(newest(page)).to_have_text("Tell: Once upon")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    server.go_on.set()
    expect(newest(page)).to_have_text("Tell: Once upon a time\n<end>", use_inner_text=True)
    expect(facts(page)).to_have_text(
        re.compile(r"first token after .*s · .*tokens/s · 4 tokens · prompt 3 tokens · ended")
    )
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    assert server.bodies("/v1/completions") == [
        {
            "model": "tiny",
            "prompt": "Tell: ",
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 32,
            "seed": 7,
            "stop": ["\n\n", "The \\n"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_what_is_left_empty_is_not_sent_and_the_newest_text_comes_first(page, server):
    page.get_by_label("The model continues").fill("one")
    page.keyboard.press("Control+Enter")
    expect(newest(page)).to_have_text("oneOnce upon a time")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    server.finish = "length"
    ask(page, "")
    expect(newest(page)).to_have_text("Once upon a time")
    expect(facts(page)).to_contain_text("cut at max tokens")
    expect(page.locator("#answers article")).to_have_count(2)
    first, second = server.bodies("/v1/completions")
    assert (first["prompt"], second["prompt"]) == ("one", "")
    assert not {"seed", "stop", "context"} & first.keys()


def test_stop_cuts_the_connection_and_keeps_the_text(page, server):
    server.tokens = ["Once", " upon", WAIT, " a"]
    for key in ("Enter", "Escape"):
        ask(page, "")
        expect(newest(page)).to_have_text("Once upon")
        # Whoever started it with the keyboard stops it with the same key.
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press(key)
        expect(facts(page)).to_contain_text("stopped")
        assert server.cut_off.wait(10)
        server.cut_off.clear()
        expect(newest(page)).to_have_text("Once upon")
        expect(problem(page)).to_have_count(0)
        expect(page.get_by_role("button", name="Stop")).to_have_count(0)
        expect(page.get_by_role("button", name="Generate")).to_be_focused()
    server.tokens = ["again"]
    ask(page, "")
    expect(newest(page)).to_have_text("again")


def test_settings_that_cannot_be_are_not_sent(page, server):
    page.get_by_label("Top-p").fill("1.5")
    page.locator("#settings summary").click()
    ask(page, "")
    expect(page.get_by_label("Top-p")).to_be_focused()
    assert server.bodies("/v1/completions") == []


def test_a_document_is_uploaded_read_asked_twice_and_deleted(page, server, tmp_path):
    (tmp_path / "book.txt").write_text("Call me Ishmael.\n")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload a text file").click()
    chooser.value.set_files(tmp_path / "book.txt")
    row = document(page, "book.txt")
    expect(row).to_contain_text("0 of 4,000 tokens")
    expect(row.get_by_role("radio")).to_be_disabled()
    context = server.contexts["ctx-1"]
    context["tokens_read"] = 1000
    expect(row).to_contain_text("1,000 of 4,000 tokens")
    expect(row).to_contain_text("state 1.23 MB, and stays so")
    assert row.get_by_role("progressbar").evaluate("bar => bar.value / bar.max") == 0.25
    context.update(tokens_read=4000, status="ready", nbytes=1_200_000)
    # It is chosen as soon as it can be asked.
    expect(row.get_by_role("radio")).to_be_checked()
    expect(row).to_contain_text("4,000 tokens · state 1.2 MB")
    expect(row.get_by_role("progressbar")).to_be_hidden()
    assert server.texts == {"ctx-1": "Call me Ishmael.\n"}

    for question in ("Who?", "Where?"):
        ask(page, question)
        expect(newest(page)).to_have_text(f"{question}Once upon a time")
        expect(page.locator("article h3").first).to_contain_text("After 4,000 tokens of book.txt")
        expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    page.get_by_label("No document").check()
    ask(page, "Alone?")
    expect(newest(page)).to_have_text("Alone?Once upon a time")
    asked = server.bodies("/v1/completions")
    assert [(body["prompt"], body.get("context")) for body in asked] == [
        ("Who?", "ctx-1"),
        ("Where?", "ctx-1"),
        ("Alone?", None),
    ]

    row.get_by_role("radio").check()
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Delete book.txt").click()
    assert "ctx-1" in server.contexts
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Delete book.txt").click()
    expect(row).to_have_count(0)
    expect(page.get_by_label("No document")).to_be_checked()
    until(page, lambda: server.contexts == {})


def test_a_choice_made_while_a_document_is_read_stays(page, server):
    server.add("other.txt")
    page.reload()
    with page.expect_response(lambda response: response.request.method == "POST"):
        page.locator("#file").set_input_files({"name": "new.txt", "mimeType": "text/plain", "buffer": b"text"})
    document(page, "other.txt").get_by_role("radio").check()
    server.contexts["ctx-2"].update(tokens_read=4000, status="ready")
    expect(document(page, "new.txt").get_by_role("radio")).to_be_enabled()
    expect(document(page, "other.txt").get_by_role("radio")).to_be_checked()


def test_a_list_made_before_an_upload_does_not_take_the_document_away(page, server):
    server.send_lists.clear()
    with page.expect_request("**/v1/contexts"):
        page.reload()
    page.locator("#file").set_input_files({"name": "new.txt", "mimeType": "text/plain", "buffer": b"text"})
    expect(document(page, "new.txt")).to_contain_text("0 of 4,000 tokens")
    with page.expect_response("**/v1/contexts"):
        server.send_lists.set()
    server.contexts["ctx-1"].update(tokens_read=4000, status="ready")
    expect(document(page, "new.txt").get_by_role("radio")).to_be_checked()


DROP = """
(texts) => {
  const dataTransfer = new DataTransfer();
  for (const [name, text] of Object.entries(texts)) dataTransfer.items.add(new File([text], name));
  const options = { dataTransfer, bubbles: true, cancelable: true };
  for (const type of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(type, options));
}
"""


def test_documents_can_be_dropped_and_pasted(page, server):
    page.evaluate(DROP, {"one.txt": "Eins", "two.txt": "Zwei"})
    expect(document(page, "one.txt")).to_be_visible()
    expect(document(page, "two.txt")).to_be_visible()
    # The page shows a document while it is still being sent.
    until(page, lambda: server.texts == {"ctx-1": "Eins", "ctx-2": "Zwei"})
    page.locator("summary", has_text="Paste").click()
    page.get_by_label("Name").fill("three")
    page.get_by_label("Text", exact=True).fill("Drei")
    page.get_by_role("button", name="Read it").click()
    expect(document(page, "three")).to_be_visible()
    until(page, lambda: server.texts == {"ctx-1": "Eins", "ctx-2": "Zwei", "ctx-3": "Drei"})
    # The newest first, below "No document".
    expect(page.locator("#document-list .name")).to_have_text(["No document", "three", "two.txt", "one.txt"])


def test_a_model_whose_state_grows_is_not_said_to_have_one_of_fixed_size(page, server):
    expect(page.locator("#about-documents")).to_contain_text("a state whose size does not depend on")
    server.state_bytes = None
    server.add("book.txt", status="reading", tokens_read=100, nbytes=None)
    page.reload()
    expect(document(page, "book.txt")).to_contain_text("100 of 1,000 tokens")
    expect(page.locator("#documents")).not_to_contain_text("state")


def test_documents_of_the_server_are_listed_with_what_went_wrong(page, server):
    server.add("read.txt")
    server.add("bad.txt", status="failed", error="byte 17 is not UTF-8")
    server.add("half.txt", status="reading", tokens_read=100)
    page.reload()
    expect(document(page, "read.txt").get_by_role("radio")).to_be_enabled()
    expect(document(page, "bad.txt")).to_contain_text("byte 17 is not UTF-8")
    expect(document(page, "bad.txt").get_by_role("radio")).to_be_disabled()
    # One that is deleted elsewhere disappears.
    expect(document(page, "half.txt")).to_contain_text("100 of 1,000 tokens")
    del server.contexts["ctx-3"]
    expect(document(page, "half.txt")).to_have_count(0)


def test_an_api_key_is_asked_for_and_sent_from_then_on(browser, server):
    server.key = "right"
    with open_page(browser, server) as page:
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("does not accept this key")).to_be_visible()
        key.fill("right")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(key).to_be_hidden()
        ask(page, "a")
        expect(newest(page)).to_have_text("aOnce upon a time")
        # The key is kept for a reload, but neither for other tabs nor for later.
        page.reload()
        expect(page.locator("#model")).to_have_text("tiny")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

        # The server gets another key: the request that was refused is sent again.
        server.key = "newer"
        ask(page, "b")
        key.fill("newer")
        page.keyboard.press("Enter")
        expect(newest(page)).to_have_text("bOnce upon a time")
        sent = [
            headers.get("Authorization") for _, path, headers, body in server.requests if body and body["prompt"] == "b"
        ]
        assert sent == ["Bearer right", "Bearer newer"]
        page.get_by_role("button", name="Forget the API key").click()
        expect(key).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


REFUSALS = (
    (429, [("Retry-After", "7")], "no room", "The server is busy. Try again in 7 seconds.\nno room"),
    (429, [("Retry-After", "1")], "no room", "The server is busy. Try again in 1 second.\nno room"),
    (429, [], "no room", "The server is busy. Try again later.\nno room"),
    (400, [], "top_p must be above 0, not 0", "top_p must be above 0, not 0"),
    (500, [], HTML, f"The server answered with 500 Internal Server Error.\n{HTML}"),
)


def test_refusals_are_explained(page, server):
    for status, headers, said, shown in REFUSALS:
        server.refusals.append(("/v1/completions", status, headers, said))
        ask(page, "a")
        expect(problem(page)).to_have_text(shown, use_inner_text=True)
        expect(facts(page)).to_have_text("failed")
    # The prompt is still there to be sent again.
    page.get_by_role("button", name="Generate").click()
    expect(newest(page)).to_have_text("aOnce upon a time")


def test_a_stream_that_breaks_says_so_and_keeps_its_text(page, server):
    server.tokens = ["Once", BREAK_OFF]
    ask(page, "")
    expect(problem(page)).to_have_text("The connection ended before the text did.")
    expect(newest(page)).to_have_text("Once")
    server.tokens = ["Once", {"error": {"message": "out of memory"}}]
    ask(page, "")
    expect(problem(page)).to_have_text("out of memory")
    expect(newest(page)).to_have_text("Once")


def test_a_document_that_is_too_large_is_refused_by_name(page, server):
    server.refusals.append(("/v1/contexts", 413, [], "the limit is 1 MB"))
    page.locator("#file").set_input_files({"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 1000})
    expect(page.locator("#document-error")).to_have_text(
        "large.txt: This is more than the server accepts.\nthe limit is 1 MB", use_inner_text=True
    )
    expect(document(page, "large.txt")).to_have_count(0)


def test_a_document_that_is_gone_is_taken_off_the_list(page, server):
    server.add("gone.txt")
    page.reload()
    document(page, "gone.txt").get_by_role("radio").check()
    server.contexts.clear()
    ask(page, "a")
    expect(problem(page)).to_have_text("there is nothing at /v1/completions")
    expect(document(page, "gone.txt")).to_have_count(0)
    expect(page.get_by_label("No document")).to_be_checked()


def test_a_server_that_is_gone_is_told_from_one_that_refuses(browser):
    server = StandIn()
    with open_page(browser, server) as page:
        expect(page.locator("#model")).to_have_text("tiny")
        server.close()
        ask(page, "a")
        expect(problem(page)).to_contain_text("The server cannot be reached.")
        page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"})
        expect(page.locator("#document-error")).to_contain_text("a.txt: The upload was cut off")


def test_names_texts_and_messages_are_shown_literally(page, server):
    server.tokens = [HTML, "&lt;"]
    server.add(HTML, status="failed", error=HTML)
    page.reload()
    expect(document(page, HTML).locator(".error")).to_have_text(HTML)
    page.locator("#file").set_input_files(
        {"name": f"{HTML}.txt".replace("/", "∕"), "mimeType": "", "buffer": HTML.encode()}
    )
    expect(page.locator("#document-list .name").nth(1)).to_contain_text("<img src=x onerror=fail()>")
    # The page shows the name before the server has the file.
    until(page, lambda: "ctx-2" in server.contexts)
    server.contexts["ctx-2"].update(name=HTML, status="ready")
    expect(document(page, HTML).first.get_by_role("radio")).to_be_checked()
    ask(page, HTML)
    expect(newest(page)).to_have_text(f"{HTML}{HTML}&lt;")
    expect(page.locator("article h3")).to_contain_text(HTML)
    assert page.locator("img, main script, article b:not(h3 > b)").count() == 0


def fill(page, server):
    """Everything that the page can show, with words that are too long for a line."""
    server.add(LONG_NAME, tokens=200_000, nbytes=39_321_600)
    server.add("broken.bin", status="failed", error="not a text: byte 17 is not UTF-8")
    server.add(
        "Moby Dick; or, The Whale.txt", tokens=1_234_567, tokens_read=345_678, status="reading", nbytes=39_321_600
    )
    page.reload()
    expect(document(page, "Moby").get_by_role("progressbar")).to_be_visible()
    server.refusals.append(("/v1/completions", 429, [("Retry-After", "30")], "64 requests run and 256 wait"))
    ask(page, "A prompt that meets a full queue")
    expect(problem(page)).to_be_visible()
    document(page, LONG_NAME).get_by_role("radio").check()
    server.tokens = [" The state", " has a fixed size,\n\n", "w" * 200, " whatever it has read." * 12]
    ask(page, "Why does memory stay flat?")
    expect(facts(page)).to_contain_text("ended by itself")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (800, "light"), (1280, "dark")])
def test_it_fits_every_width(browser, server, tmp_path, width, scheme):
    with open_page(browser, server, width=width, scheme=scheme, phone=width < 500) as page:
        fill(page, server)
        page.locator("#settings").evaluate("details => { details.open = true; }")
        page.locator("#paste").evaluate("details => { details.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert overlaps(page) == []
        picture = picture_of(page, tmp_path / "page.png")
    card = [int(PAPER[scheme][n : n + 2], 16) / 255 for n in (1, 3, 5)]
    assert (abs(picture - card).max(-1) < 0.02).mean() > 0.4


def test_long_names_leave_the_prompt_on_a_phones_screen(browser, server):
    for number in range(6):
        server.add(f"{number} {LONG_NAME}")
    with open_page(browser, server, width=390, height=844, phone=True) as page:
        radio = page.locator("#document-list .document").nth(1).get_by_role("radio")
        expect(radio).to_be_visible()
        assert page.locator("#prompt").bounding_box()["y"] + 50 < 844
        radio.check()
        expect(page.locator("#prompt-label")).to_contain_text(LONG_NAME)
        assert page.locator("#prompt").bounding_box()["y"] + 50 < 844
        assert page.locator(".document .name").nth(1).get_attribute("title") == f"5 {LONG_NAME}"


UNNAMED = """
() => [...document.querySelectorAll("input, textarea, button, progress")].filter((element) => {
  const labels = [...(element.labels ?? [])].map((label) => label.textContent.trim()).join("");
  return !(labels || element.ariaLabel || element.textContent.trim() || element.type === "file");
}).map((element) => element.outerHTML)
"""


def test_every_control_has_a_name_and_a_place_in_the_order_of_tabs(page, server):
    fill(page, server)
    assert page.evaluate(UNNAMED) == []
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value || ''"))
    for control in ("ctx-1", "upload", "prompt", "temperature", "top-p", "max-tokens", "seed", "stop", "generate"):
        assert control in reached


def test_nothing_moves_for_those_who_asked_for_that(page, server):
    page.emulate_media(reduced_motion="reduce")
    server.tokens = ["Once", WAIT]
    ask(page, "")
    expect(newest(page)).to_have_text("Once")
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("document.getAnimations().length") == 1
