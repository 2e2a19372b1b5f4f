"""Text generation: whole characters, stop strings, prompts of different lengths, and the commands."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.cli.app import app
from sympow.data.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextDecoder, TextModel
from sympow.model.storage import save_model

TOKENIZER = ByteTokenizer()


def decode(text: bytes, stop=()):
    decoder = TextDecoder(TOKENIZER, stop)
    pieces = []
    for byte in text:
        pieces += decoder.take(byte)
        if decoder.stopped:
            return pieces
    return [*pieces, *decoder.finish()]


@pytest.mark.parametrize("text", ["plain", "naïve – 光", "👩‍🚀" * 30, "", "a" * 500 + "é"])
def test_characters_come_whole_and_in_order(text):
    pieces = decode(text.encode())
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.fixture(scope="module")
def json_tokenizers():
    """A byte-level BPE, whose tokens split characters, and one with byte fallback, as SentencePiece has."""
    tokenizers = pytest.importorskip("tokenizers")
    pairs = train_bpe(["naïve – 光 and the state 👩‍🚀 of keys", "日本語 テスト"] * 20, 320)
    words = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁the", -2.0), ("key", -3.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram([*words, ("</s>", 0.0)], 0, True))
    steps = tokenizers.decoders
    model.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return {"byte pairs": pairs, "byte fallback": JsonTokenizer(model, "file", "</s>"), "bytes": TOKENIZER}


def streamed(tokenizer, ids):
    decoder = TextDecoder(tokenizer)
    return "".join(text for token in ids for text in decoder.take(token)) + "".join(decoder.finish())


@pytest.mark.parametrize("kind", ["byte pairs", "byte fallback", "bytes"])
def test_streamed_text_is_that_of_all_tokens_at_once(json_tokenizers, kind):
    tokenizer = json_tokenizers[kind]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        # Characters of one to four bytes, which tokens split anywhere.
        points = torch.randint(32, 0x2FFFF, (30,), generator=generator).tolist()
        text = "".join(chr(p if i % 2 else 32 + p % 95) for i, p in enumerate(points) if not 0xD800 <= p < 0xE000)
        ids = tokenizer.encode(text).tolist()
        assert len(ids) > len(text)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["byte pairs", "byte fallback", "bytes"])
def test_random_tokens_are_streamed_as_they_are_decoded_at_once(json_tokenizers, kind):
    tokenizer = json_tokenizers[kind]
    generator = torch.Generator().manual_seed(0)
    for length in (40, 500) * 25:
        ids = torch.randint(tokenizer.vocab_size, (length,), generator=generator)
        ids = ids[ids != tokenizer.boundary].tolist()
        found = streamed(tokenizer, ids)
        # Byte fallback decodes a whole run of bytes to replacement characters if one is invalid; a stream cannot know
        # that in time.
        assert found if kind == "byte fallback" else found == tokenizer.decode(ids)


class Counted:
    """A tokenizer that counts the tokens it decodes, and those that its stream holds at each step."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name):
        found = getattr(self.tokenizer, name)
        if name in ("decode", "decode_continuation"):
            return lambda ids: self.count(len(ids), found(ids))
        return self.stream(found) if name == "decode_stream" else found

    def count(self, tokens, text):
        self.tokens += tokens
        return text

    def stream(self, open_stream):
        def opened(continues):
            advance, held = open_stream(continues), 0

            def step(token):
                nonlocal held
                held += 1
                self.tokens += held
                new = advance(token)
                held = held if new is None else 0
                return new

            return step

        return opened


@cache
def name_of_byte(byte):
    """The character that stands for a byte in the vocabulary of a byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in plain else 256 + [b for b in range(256) if b not in plain].index(byte))


TEXTS = {
    "invalid bytes": b"\xff" * 2_000,
    "continuation bytes": b"\x80" * 2_000,
    "first bytes": b"\xf0" * 2_000,
    "incomplete characters": b"\xe2\x82" * 1_000 + b"\xf0\x9f\x91" * 500,
    "replacement characters": ("\N{REPLACEMENT CHARACTER}" * 700).encode(),
    "among emoji": ("👩‍🚀\N{REPLACEMENT CHARACTER}" * 200 + "e\N{COMBINING ACUTE ACCENT}").encode() * 2,
    "combining characters": ("e" + "\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS}" * 1_000).encode(),
    "anything": bytes(torch.randint(256, (2_000,), generator=torch.Generator().manual_seed(0)).tolist()),
    "high bytes": bytes(torch.randint(128, 256, (2_000,), generator=torch.Generator().manual_seed(1)).tolist()),
}


@pytest.mark.parametrize("kind", ["byte pairs", "bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_runs_of_replacement_characters_are_decoded_in_linear_time(json_tokenizers, kind, text):
    tokenizer, content = Counted(json_tokenizers[kind]), TEXTS[text]
    if kind == "bytes":
        ids = list(content)
    else:
        # A token for each byte, and merged ones of the text that they are.
        ids = [tokenizer._model.token_to_id(name_of_byte(byte)) for byte in content]
        ids += tokenizer.encode(content.decode(errors="replace")).tolist()
    expected = tokenizer.decode(ids)
    tokenizer.tokens = 0
    assert streamed(tokenizer, ids) == expected
    assert tokenizer.tokens <= 30 * len(ids)


def test_bytes_that_are_no_character_are_shown_as_such_at_the_end():
    assert "".join(decode(b"ok\xff")) == "ok\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one. two", [". "], "one"),
        ("one. two", ["two", ". "], "one"),
        ("ababac", ["abac"], "ab"),
        ("one", ["e!"], "one"),
        ("né à la", ["à"], "né "),
        ("one. two", ". ", "one"),
        ("a\nb\n\nc", "\n\n", "a\nb"),
    ],
)
def test_stop_strings_end_the_text_and_are_no_part_of_it(text, stop, expected):
    assert "".join(decode(text.encode(), stop)) == expected


def test_what_may_become_a_stop_string_is_held_back():
    decoder = TextDecoder(TOKENIZER, ["STOP"])
    assert [list(decoder.take(byte)) for byte in b"aSTx"] == [["a"], [], [], ["STx"]]


def test_the_boundary_ends_a_text():
    decoder = TextDecoder(TOKENIZER)
    assert [*decoder.take(ord("a")), *decoder.take(TOKENIZER.boundary)] == ["a"]
    assert decoder.stopped
    assert list(decoder.take(ord("b"))) == []


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ([""], ValueError, "stop must not contain an empty string"),
        ("", ValueError, "stop must not contain an empty string"),
        ("\ud800", ValueError, "stop is not UTF-8 text: character 0"),
        (5, TypeError, "stop must be a string or strings, got int$"),
        (None, TypeError, "stop must be a string or strings, got NoneType$"),
        ([b"a"], TypeError, "stop must be a string or strings, got bytes among them"),
    ],
)
def test_stop_strings_that_end_no_text_are_refused(stop, error, message):
    with pytest.raises(error, match=message):
        TextDecoder(TOKENIZER, stop)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=257, layers=2, width=16, heads=2, rotary="scale")
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("model")
    save_model(path, config, model.state_dict())
    TOKENIZER.save(path)
    return path


GREEDY = Sampling(temperature=0)


def test_prompts_of_different_lengths_continue_together_as_alone(folder):
    text_model = TextModel.load(folder, dtype=torch.float64)
    prefixes = [text_model.prefill(text) for text in ("a", "a longer prompt", "")]
    alone = ["".join(text_model.stream(prefix, 30, GREEDY)) for prefix in prefixes]
    assert text_model.continue_all(prefixes, 30, GREEDY) == alone
    with pytest.raises(TypeError, match="prefixes must hold objects of class Prefix, got str"):
        text_model.continue_all(["a", "a longer prompt"], 30)
    for use in (text_model.prefill, lambda text: text_model.extend(prefixes[0], text)):
        with pytest.raises(TypeError, match="text must be a string, got bytes"):
            use(b"a")
    assert len(set(alone)) > 1


def test_a_stop_string_ends_texts_as_a_list_of_it_does(folder):
    text_model = TextModel.load(folder, dtype=torch.float64)
    prefixes = [text_model.prefill(text) for text in ("a", "a longer prompt")]
    whole = text_model.continue_all(prefixes, 60, seed=0)
    stop = whole[0][10:12]
    for given in (stop, [stop], iter([stop])):
        texts = text_model.continue_all(prefixes, 60, stop=given, seed=0)
        assert texts == [text.partition(stop)[0] for text in whole]
    assert len(texts[0]) == 10
    alone = "".join(text_model.stream(prefixes[0], 60, seed=0))
    stop = alone[10:12]
    assert "".join(text_model.stream(prefixes[0], 60, stop=stop, seed=0)) == alone.partition(stop)[0] == alone[:10]


def test_an_interrupted_batch_leaves_what_was_generated(folder):
    text_model = TextModel.load(folder, dtype=torch.float64)
    prefixes = [text_model.prefill(text) for text in ("a", "a longer prompt")]
    whole = text_model.continue_all(prefixes, 30, GREEDY)

    def interrupt(tokens):
        if tokens == 7:
            raise KeyboardInterrupt

    for text, expected in zip(text_model.continue_all(prefixes, 30, GREEDY, report=interrupt), whole, strict=True):
        assert text
        assert len(text) < len(expected)
        assert expected.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize("cache_policy", ["state", "keys"])
def test_what_is_kept_does_not_change_the_text(folder, cache_policy):
    options = ("--prompt", "def ", "--tokens", 40, "--temperature", 0)
    assert run("generate", folder, *options, "--cache", cache_policy).stdout == run("generate", folder, *options).stdout


def test_a_text_read_in_two_parts_is_one_text(folder):
    text_model = TextModel.load(folder, dtype=torch.float64)
    whole, first = text_model.prefill("two parts"), text_model.prefill("two ")
    second = text_model.extend(first, "parts", segment_size=2)
    torch.testing.assert_close(second.logits, whole.logits, rtol=1e-9, atol=1e-9)
    assert second.tokens == whole.tokens == 10
    assert text_model.extend(first, "") is first


def test_several_texts_are_not_streamed(folder):
    text_model = TextModel.load(folder)
    with pytest.raises(ValueError, match="prefix must be of one text, got 2"):
        list(text_model.stream(text_model.prefill("a").fork(2), 3))


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def message_of(result):
    """The error message of a command, on one line."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_the_command_continues_a_prompt(folder):
    first, again = (run("generate", folder, "--prompt", "def ", "--tokens", 20, "--seed", 1) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout
    # Speed and memory are shown only when they are asked for.
    assert first.stderr == ""
    described = run("generate", folder, "--prompt", "def ", "--tokens", 20, "--seed", 1, "--stats")
    assert described.stdout == first.stdout
    assert "20 tokens in" in described.stderr
    assert "tokens/s, after 5 tokens in keys and values of" in described.stderr
    assert "when they outgrow it, beyond 18 tokens" in described.stderr
    options = ("--prompt", "one", "--prompt", "another", "--tokens", 5, "--temperature", 0)
    several = run("generate", folder, *options)
    assert several.exit_code == 0, several.output
    assert several.stdout.startswith("one")
    assert "another" in several.stdout
    assert several.stderr == ""
    assert "10 tokens (5 of each of 2 texts) in" in run("generate", folder, *options, "--stats").stderr


def test_a_prompt_is_printed_before_what_follows_alone_as_among_others(folder):
    options = ("--tokens", 12, "--temperature", 0, "--device", "cpu")
    alone = run("generate", folder, "--prompt", "one", *options)
    several = run("generate", folder, "--prompt", "one", "--prompt", "another", *options)
    assert alone.exit_code == several.exit_code == 0, alone.output + several.output
    assert alone.stdout.startswith("one")
    assert len(alone.stdout) > len("one\n")
    assert several.stdout.startswith(alone.stdout)


def test_what_was_read_from_a_file_is_not_printed(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words, ")
    options = ("--tokens", 12, "--temperature", 0)
    whole = run("generate", folder, "--prompt", "some words, and", *options)
    parts = run("generate", folder, "--file", text, "--prompt", "and", *options)
    assert "some words, " + parts.stdout == whole.stdout
    rest = run("generate", folder, "--file", text, *options)
    assert not rest.stdout.startswith("some")


def test_stop_strings_are_unescaped(folder):
    options = ("--prompt", "def ", "--tokens", 60, "--temperature", 0)
    text = run("generate", folder, *options).stdout.removeprefix("def ").rstrip("\n")
    # A character from the middle of the text, written as an escape.
    wanted = next(character for character in text[5:] if ord(character) < 128)
    escaped = rf"\x{ord(wanted):02x}"
    stopped = run("generate", folder, *options, "--stop", escaped)
    assert stopped.exit_code == 0, stopped.output
    assert stopped.stdout.removeprefix("def ").rstrip("\n") == text[: text.index(wanted)].rstrip("\n")
    literal = run("generate", folder, *options, "--stop", rf"\{escaped}")
    assert literal.stdout.removeprefix("def ").rstrip("\n") == text, "an escaped backslash is a backslash"
    refused = message_of(run("generate", folder, *options, "--stop", r"\d"))
    assert "--stop must have no escapes but" in refused


def test_the_penalty_of_the_command_counts_the_prompt(folder, tmp_path):
    text_model = TextModel.load(folder)
    prompt = "".join(map(chr, range(32, 127)))  # many of the tokens that may follow
    sampling = Sampling(temperature=0, repetition_penalty=3.0)
    tokens = generate(text_model.model, 7, sampling, prompt=text_model.encode(prompt))
    expected = TOKENIZER.decode([int(token) for token in tokens])
    prefix = text_model.prefill(prompt)
    unread = replace(prefix, seen=torch.zeros_like(prefix.seen))
    assert "".join(text_model.stream(unread, 7, sampling)) != expected, "the prompt changes nothing: choose another"
    options = ("--tokens", 7, "--temperature", 0)
    found = run("generate", folder, "--prompt", prompt, *options, "--repetition-penalty", 3)
    assert found.stdout == f"{prompt}{expected}\n"
    text, state = tmp_path / "text.txt", tmp_path / "text.prefix"
    text.write_text(prompt)
    run("state", folder, text, "--out", state)
    resumed = run("generate", folder, "--state", state, *options, "--repetition-penalty", 3)
    assert resumed.stdout == f"{expected}\n"


def test_a_dash_is_standard_input(folder, tmp_path):
    pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")
    text, given = tmp_path / "text.txt", "größere Wörter, "
    text.write_text(given)
    options = ("--tokens", 15, "--temperature", 0)
    from_file = run("generate", folder, "--file", text, *options)
    assert from_file.exit_code == 0, from_file.output
    assert run("generate", folder, "--file", "-", *options, input=given).stdout == from_file.stdout
    shown = []
    for name, source in (("file", text), ("dash", "-")):
        made = run("state", folder, source, "--out", tmp_path / f"{name}.prefix", input=given)
        assert made.exit_code == 0, made.output
        resumed = run("generate", folder, "--state", tmp_path / f"{name}.prefix", *options)
        assert resumed.stdout == from_file.stdout
        page = tmp_path / f"{name}.html"
        result = run("inspect", folder, source, "-o", page, input=given)
        assert result.exit_code == 0, result.output
        content = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)[1])
        shown.append("".join(content["texts"][1:]))
    assert shown == [given, given]


COMMANDS = ("generate", "state", "inspect", "prepare")


# Only files are tokenized by `prepare`.
@pytest.mark.parametrize(
    ("command", "source"), [*((command, "file") for command in COMMANDS), *((name, "-") for name in COMMANDS[:3])]
)
def test_text_that_is_not_utf8_is_refused_alike_by_every_command(folder, tmp_path, command, source):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 3)
    given = path if source == "file" else "-"
    arguments = {
        "generate": ("generate", folder, "--file", given),
        "state": ("state", folder, given, "--out", tmp_path / "text.prefix"),
        "inspect": ("inspect", folder, given, "-o", tmp_path / "page.html"),
        "prepare": ("data", "prepare", given, "--out", tmp_path / "data", "--workers", 1),
    }[command]
    said = message_of(run(*arguments, input=path.read_bytes()))
    name = str(path) if source == "file" else "standard input"
    assert f"Error: {name} is not UTF-8 text: byte 0xe9 at offset 3; convert it first" in said


def test_a_prompt_that_is_not_utf8_is_refused(folder):
    said = message_of(run("generate", folder, "--prompt", b"caf\xe9".decode(errors="surrogateescape")))
    assert "--prompt is not UTF-8 text: character 3" in said


def test_a_state_file_stands_for_the_text(folder, tmp_path):
    text, state = tmp_path / "text.txt", tmp_path / "text.prefix"
    text.write_text("some words to read, ")
    made = run("state", folder, text, "--out", state)
    assert made.exit_code == 0, made.output
    assert "21 tokens in a state of" in made.stdout
    short = tmp_path / "short.txt"
    short.write_text("short")
    for cache_policy, said in (("auto", "keys and values of"), ("keys", "kept as they are"), ("state", "a state of")):
        made = run("state", folder, short, "--out", tmp_path / "short.prefix", "--cache", cache_policy)
        assert "6 tokens in " in made.stdout
        assert said in made.stdout
    options = ("--tokens", 15, "--temperature", 0)
    direct = run("generate", folder, "--file", text, "--prompt", "and more", *options)
    resumed = run("generate", folder, "--state", state, "--prompt", "and more", *options)
    assert resumed.exit_code == 0, resumed.output
    assert resumed.stdout == direct.stdout
    state.write_bytes(state.read_bytes()[:100])
    damaged = run("generate", folder, "--state", state)
    assert damaged.exit_code == 2
    assert "is not a prefix file, or is damaged" in " ".join(damaged.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a --prompt"),
        (("--prompt", "a", "--top-p", 2), "Error: --top-p must be above 0"),
        (("--file", "nowhere.txt"), "Error: nowhere.txt cannot be read: No such file or directory"),
        (("--prompt", "a", "--cache", "all"), "Error: --cache must be one of"),
        (("--prompt", "a", "--tokens", -3), "Error: --tokens must be at least 0, got -3"),
        (("--prompt", "a", "--segment-size", 0), "Error: --segment-size must be at least 1, got 0"),
        (("--prompt", "a", "--stop", ""), "Error: --stop must not contain an empty string"),
        (("--prompt", "a", "--stop", r"\ud800"), "Error: --stop is not UTF-8 text"),
        (("--prompt", "a", "--seed", 2**64), "Error: --seed must be at most 18,446,744,073,709,551,615"),
    ],
)
def test_the_command_names_mistakes_before_it_loads_a_model(arguments, message):
    result = run("generate", "no folder", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.output.replace("│", " ").split())
