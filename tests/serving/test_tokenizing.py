"""Long prompts in the server: they delay no short ones, are tokenized piece by piece, and can be given up meanwhile.

The application is called without a network, so that a client can go away at any point.
"""

import asyncio
import json
import threading

import pytest
from serving.in_process import serving
from serving.small_model import small_model

from sympow.data import pieces
from sympow.data.tokenizer import ByteTokenizer, train_bpe
from sympow.generation.chat import ChatTemplate
from sympow.generation.text import TextModel
from sympow.serving.engine.engine import Engine
from sympow.serving.web.errors import ApiError

LONG = "words " * 200_000
PATIENCE = 60


class Watched(ByteTokenizer):
    """Notes what it encodes, and holds long texts back until `go_on`."""

    def __init__(self):
        self.lengths, self.go_on = [], threading.Event()

    def encode(self, text):
        if len(text) > 1_000:
            self.lengths.append(len(text))
            assert self.go_on.wait(PATIENCE)
        return super().encode(text)


@pytest.fixture
def text_model():
    tokenizer = Watched()
    yield TextModel(small_model(layers=1), tokenizer)
    tokenizer.go_on.set()


async def post(app, path, body, gone=None, *, kind="application/json", whole=True):
    """The status and the body of an answer.

    Args:
        gone: set when the client goes away; it does not by itself.
        whole: whether all of the body arrives.
    """
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    left, sent, gone = [{"type": "http.request", "body": body, "more_body": not whole}], [], gone or asyncio.Event()

    async def receive():
        if left:
            return left.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", kind.encode()), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), PATIENCE)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def until(done):
    async with asyncio.timeout(PATIENCE):
        while not done():
            await asyncio.sleep(0.01)


def test_short_prompts_do_not_wait_for_long_ones(text_model, tmp_path):
    tokenizer = text_model.tokenizer

    async def run():
        async with serving(text_model, tmp_path) as service:
            gone = asyncio.Event()
            waiting = [
                asyncio.create_task(post(service.app, "/v1/completions", {"prompt": LONG}, gone)) for _ in range(4)
            ]
            await until(lambda: tokenizer.lengths)
            status, _ = await post(service.app, "/v1/completions", {"prompt": "short", "max_tokens": 1})
            assert status == 200
            gone.set()
            assert [status for status, _ in await asyncio.gather(*waiting)] == [499] * 4

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_whose_client_has_gone_is_tokenized_no_further(text_model, tmp_path, stream):
    tokenizer = text_model.tokenizer

    async def run():
        async with serving(text_model, tmp_path) as service:
            gone = asyncio.Event()
            asking = asyncio.create_task(post(service.app, "/v1/completions", {"prompt": LONG, "stream": stream}, gone))
            await until(lambda: tokenizer.lengths)
            gone.set()
            assert (await asking)[0] == 499
            tokenizer.go_on.set()
            # The thread of long prompts is free again.
            await asyncio.get_running_loop().run_in_executor(service.tokenizing_long, lambda: None)
            assert sum(tokenizer.lengths) < len(LONG) / 10
            assert service.engine.stats().submitted == 0
            assert service.counts.disconnected == 1

    asyncio.run(run())


def test_a_text_that_cannot_fit_is_not_tokenized_to_its_end(text_model):
    text_model.tokenizer.go_on.set()
    with Engine(text_model, 1, max_context=50_000) as engine:
        with pytest.raises(ValueError, match=r"prompt is too long: 0 tokens of the prefix and .* or more of its own"):
            engine.request(LONG, max_tokens=1)
        assert sum(text_model.tokenizer.lengths) <= 50_000
        # Ids of which only the first are looked at.
        with pytest.raises(ValueError, match="prompt is too long"):
            engine.request(iter(lambda: 7, 8), max_tokens=1)
        assert len(engine.request("x" * 40_000, max_tokens=1).tokens) == 40_001


def test_a_context_that_is_deleted_is_tokenized_no_further(text_model, tmp_path):
    tokenizer = text_model.tokenizer

    async def run():
        async with serving(text_model, tmp_path) as service:
            making = asyncio.create_task(service.contexts.create(LONG, "book"))
            await until(lambda: tokenizer.lengths)
            [context] = service.contexts.list()
            await service.contexts.delete(context.id)
            tokenizer.go_on.set()
            with pytest.raises(ApiError, match="there is no context"):
                await making
            assert sum(tokenizer.lengths) < len(LONG) / 10

    asyncio.run(run())


def test_a_chat_has_the_tokens_of_its_whole_text():
    pytest.importorskip("transformers")
    from sympow.hf import to_fast_tokenizer

    fast = to_fast_tokenizer(train_bpe(["some words, and others"], 300))
    fast.chat_template = "{% for m in messages %}{{ m.content }}<|endoftext|> {% endfor %}"
    template = ChatTemplate(fast)
    text = template.write([{"role": "user", "content": f"some words {number}, " * 3_000} for number in range(3)])
    expected = fast(str(text), add_special_tokens=False, split_special_tokens=False)["input_ids"]
    assert expected.count(fast.eos_token_id) == 3
    asked = []
    tokens = template.tokens(text)
    asked += [next(tokens) for _ in range(10)]
    assert [*asked, *tokens] == expected
    assert len(text) > 5 * pieces.PIECE


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", "application/json"),
        ("/v1/contexts", "multipart/form-data; boundary=x"),
        ("/v1/contexts", "application/json"),
    ],
)
def test_a_client_that_goes_away_while_it_sends(text_model, tmp_path, path, kind):
    async def run():
        async with serving(text_model, tmp_path) as service:
            gone = asyncio.Event()
            gone.set()
            body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nwords'
            status, _ = await post(service.app, path, body, gone, kind=kind, whole=False)
            assert status == 499
            assert service.counts.responses == {(path, 499): 1}

    asyncio.run(run())
