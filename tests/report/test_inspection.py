"""`sympow inspect`: numbers of every token in the page's data, and the command."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from report.test_heads import layer_by_layer, lively_model
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.data.tokenizer import ByteTokenizer, train_bpe
from sympow.generation.text import TextModel
from sympow.model.storage import save_model
from sympow.report.inspection import (
    FASTEST,
    SLOWEST,
    beta_codes,
    forgetting_codes,
    inspect_text,
    inspection_data,
    token_texts,
)

TEXT = "naïve – 'γ' <script>\n\tturns"


def decoded_forgetting(codes):
    """−log γ, decoded as in the page."""
    low, high = np.log(SLOWEST), np.log(FASTEST)
    return np.where(codes == 0, 0, np.exp(low + (codes.astype(float) - 1) / 65534 * (high - low)))


def unpacked(text, heads):
    return np.frombuffer(base64.b64decode(text), "<u2").reshape(heads, -1)


@pytest.fixture
def text_model():
    return TextModel(lively_model(), ByteTokenizer())


def test_the_page_has_the_numbers_of_every_token(text_model):
    found = inspection_data(inspect_text(text_model, TEXT, segment_size=7))
    ids = [256, *TEXT.encode()]
    assert found["ids"] == ids
    for layer, (log_gamma, beta) in zip(
        found["layers"], layer_by_layer(text_model.model, torch.tensor([ids])), strict=True
    ):
        assert layer["heads"] == 2
        decays = decoded_forgetting(unpacked(layer["forgetting"], 2))
        np.testing.assert_allclose(decays, -log_gamma.numpy().T, rtol=2e-3)
        np.testing.assert_allclose(unpacked(layer["beta"], 2) / 65535 * 2, beta.numpy().T, atol=1e-3)


def test_codes_lose_less_than_a_thousandth_over_the_whole_range():
    rates = torch.logspace(-9.9, 1.9, 1000, dtype=torch.float64)
    np.testing.assert_allclose(decoded_forgetting(forgetting_codes(-rates)), rates.numpy(), rtol=5e-4)
    assert forgetting_codes(torch.tensor([0.0, -torch.inf])).tolist() == [0, 65535]
    assert beta_codes(torch.tensor([0.0, 1.0, 2.0])).tolist() == [0, 32768, 65535]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokens_say_what_they_add(kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else train_bpe([TEXT * 3], 270)
    texts = token_texts(tokenizer, [tokenizer.boundary, *tokenizer.encode(TEXT).tolist()])
    assert texts[0] == "start of document"
    assert "".join(texts[1:]) == TEXT
    if kind == "bytes":
        # The last byte of a character has its text.
        at = 1 + len(b"na")
        assert texts[at : at + 2] == ["", "ï"]


def test_a_long_text_is_cut_and_says_so(text_model):
    found = inspect_text(text_model, "abcdef", tokens=4)
    assert found.texts == ["start of document", "a", "b", "c", "d"]
    assert found.left_out == 2
    assert found.layers[0].log_gamma.shape == (5, 2)


def test_pairs_are_averaged():
    model = TextModel(lively_model(gating="vector", rotary="pairs"), ByteTokenizer())
    inspection = inspect_text(model, "abc")
    (first, _) = inspection_data(inspection)["layers"]
    expected = inspection.layers[0].beta.mean(-1).T
    np.testing.assert_allclose(unpacked(first["beta"], 2) / 65535 * 2, expected, atol=1e-4)


@pytest.mark.parametrize("rotary", ["signed", "grid"])
def test_angles_are_not_shown_as_scales_and_the_page_says_so(rotary):
    inspection = inspect_text(TextModel(lively_model(rotary=rotary), ByteTokenizer()), "abc")
    assert inspection.hidden_rotation == rotary
    data = inspection_data(inspection)
    assert data["overview"].keys() == {"forgetting"}
    for layer in data["layers"]:
        assert layer["beta"] is None
        assert layer["forgetting"] is not None


def test_what_cannot_be_shown_is_refused(text_model):
    with pytest.raises(ValueError, match="must not be empty"):
        inspect_text(text_model, "")
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        inspect_text(text_model, "a", tokens=0)
    for rotary in ("fixed", "grid"):
        plain = TextModel(lively_model(gating="none", rotary=rotary), ByteTokenizer())
        with pytest.raises(ValueError, match=f"nothing to show: neither its decay nor a scale .*rotary='{rotary}'"):
            inspect_text(plain, "a")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    model = lively_model()
    save_model(folder, model.config, model.state_dict())
    ByteTokenizer().save(folder)
    return folder


def inspect(*arguments, stdin=None):
    pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")
    return CliRunner().invoke(app, ["inspect", *map(str, arguments), "--device", "cpu"], input=stdin)


def embedded(page):
    """The data of a page, as its script reads it."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)[1])


def test_the_command_writes_a_page_from_a_file_a_pipe_or_words(checkpoint, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    out = tmp_path / "new" / "page.html"
    for arguments, stdin in (((file,), None), (("-",), TEXT), (("--text", TEXT), None)):
        out.unlink(missing_ok=True)
        result = inspect(checkpoint, *arguments, "-o", out, stdin=stdin)
        assert result.exit_code == 0, result.output
        assert "".join(embedded(out)["texts"][1:]) == TEXT


def test_the_command_says_how_much_it_left_out(checkpoint, tmp_path):
    result = inspect(checkpoint, "--text", "a" * 100, "--tokens", 30, "-o", tmp_path / "page.html")
    assert "the text has 100 tokens; the first 30 are shown" in result.stderr
    assert "continues for 70 bytes that are not shown" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either a file"),
        (("file.txt", "--text", "a"), "give either a file"),
        (("nowhere.txt",), "nowhere.txt cannot be read: No such file or directory"),
        (("--text", "a", "--tokens", 0), "tokens must be at least 1"),
    ],
)
def test_mistakes_are_explained(checkpoint, arguments, message):
    result = inspect(checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.output
