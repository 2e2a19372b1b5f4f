"""`sympow serve` with a key, small limits and a model of Hugging Face format: what it refuses, and how it stops."""

import asyncio
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
from server_process import ServerProcess, metrics, save_tiny_model, until
from serving.in_process import serving
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.generation.prefix import fingerprint_of
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.serving.engine.engine import Engine
from sympow.serving.web.context_folder import ContextFolder
from sympow.serving.web.gatekeeping import ServerOptions, allowed_hosts

GREEDY = Sampling(temperature=0)
BAD_HOSTS = ("models.example:443", "https://models.example", "models.example/v1", "*.example", "[::1]:80", "")
MORE = "such as models.example, or an address, without scheme, port and path"
MAX_BODY = 20_000
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
# More than can be generated within a test.
ENDLESS = {"prompt": "endless", "max_tokens": 60_000, "extra_body": {"ignore_eos": True}}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny model in both formats, the second with a chat template."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from sympow.hf import convert_to_transformers

    root = tmp_path_factory.mktemp("models")
    save_tiny_model(root / "native")
    convert_to_transformers(root / "native", root / "chat")
    tokenizer = AutoTokenizer.from_pretrained(root / "chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "chat")
    return SimpleNamespace(native=root / "native", chat=root / "chat")


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# of the tests\nfirst-key\n\nsecond-key\n")
    options = ("--slots", 1, "--max-queue", 1, "--api-key-file", keys, "--max-body", MAX_BODY)
    with ServerProcess(folders.chat, *options) as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="second-key", max_retries=0)
        raw = httpx.Client(base_url=process.url, timeout=60)
        with client, raw:
            yield SimpleNamespace(
                url=process.url, client=client, raw=raw, text_model=TextModel.load(folders.native), process=process
            )


HEADERS = {"authorization": "Bearer first-key", "content-type": "application/json"}


def running(served):
    values = metrics(served.raw, headers=HEADERS)
    return values["sympow_slots_running"], values["sympow_queue_length"]


@pytest.mark.slow
def test_a_model_of_hugging_face_format_answers_as_the_native_one(served):
    answer = served.client.completions.create(model="chat", prompt="Same", max_tokens=20, temperature=0)
    prefix = served.text_model.prefill("Same")
    assert answer.choices[0].text == "".join(served.text_model.stream(prefix, 20, GREEDY))


def test_chats_are_written_by_the_template(served):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    boundary = served.text_model.tokenizer.boundary
    parts = [
        served.text_model.tokenizer.encode(text).tolist() for text in ("system: be brief", "user: hi", "assistant: ")
    ]
    ids = [*parts[0], boundary, *parts[1], boundary, *parts[2]]
    expected = served.client.completions.create(model="chat", prompt=ids, max_tokens=12, temperature=0)
    options = {"model": "chat", "messages": messages, "temperature": 0}
    answer = served.client.chat.completions.create(**options, max_tokens=12, logprobs=True, top_logprobs=2)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.choices[0].text)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), expected.usage.completion_tokens)
    assert choice.finish_reason == expected.choices[0].finish_reason
    told = choice.logprobs.content
    assert "".join(one.token for one in told).removesuffix("<|endoftext|>") == choice.message.content
    assert all(one.bytes == list(one.token.encode()) and len(one.top_logprobs) == 2 for one in told)
    assert all(one.top_logprobs[0].token == one.token for one in told)
    chunks = list(served.client.chat.completions.create(**options, max_completion_tokens=12, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_an_answer_can_be_sent_back_as_it_came(served):
    options = {"model": "chat", "max_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": "hi"}]
    message = served.client.chat.completions.create(**options, messages=messages).choices[0].message
    again = {"role": "user", "content": "and?"}
    plain = [*messages, {"role": "assistant", "content": message.content}, again]
    expected = served.client.chat.completions.create(**options, messages=plain)
    for sent in (message, message.model_dump(), {**message.model_dump(), "tool_calls": [], "annotations": []}):
        answer = served.client.chat.completions.create(**options, messages=[*messages, sent, again])
        assert answer.choices[0].message == expected.choices[0].message
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    # An empty one may also be null.
    empty = [[*messages, {"role": "assistant", "content": content}, again] for content in ("", None)]
    answers = [served.client.chat.completions.create(**options, messages=sent) for sent in empty]
    assert answers[0].choices[0].message == answers[1].choices[0].message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages",
            "messages.0.tool_calls: must be [] or null: this server does not call tools",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "Mood": "good"}]},
            "messages",
            "Unrecognized request argument supplied: messages.0.Mood",
        ),
        ({"messages": []}, "messages", "at least 1 item"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages",
            "do not fit this model's chat template: no tools",
        ),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required"),
        ({"tools": [{"type": "function"}]}, "tools", "tools: must be [] or null: this server does not call tools"),
        ({"tool_choice": "required"}, "tool_choice", 'tool_choice: must be "none" or "auto" or null: this server does'),
        ({"modalities": ["text", "audio"]}, "modalities", 'must be ["text"] or null: the model writes text alone'),
        ({"service_tier": "priority"}, "service_tier", 'must be "auto" or "default" or null: this server has one tier'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false or null: this server does not call"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "must be null: this server does not have it"),
        ({"extra_body": {"top_k": -2}}, "top_k", "top_k must be at least 0, got -2"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "only that of an assistant may be null"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
        ({"top_logprobs": 2}, "top_logprobs", "only be given with logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "must not both be given"),
        (
            {"max_tokens": None, "max_completion_tokens": 10**9},
            "max_completion_tokens",
            "max_completion_tokens must be at most 65,536, got 1,000,000,000",
        ),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens: Input should be greater"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages",
            "messages.0.content: must be a text, or a list of text parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages",
            "messages.0.content.0.text: Input should be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages",
            "messages.0.content.0.type: must be 'text', since this server takes only text; got 'image_url'",
        ),
    ],
)
def test_mistakes_in_chats_are_explained(served, fields, param, message):
    options = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**options)
    assert caught.value.param == param
    assert message in caught.value.body["message"]


NEUTRAL = [
    {"service_tier": "auto"},
    {"service_tier": "default", "modalities": ["text"], "store": False},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"functions": [], "function_call": "none"},
    {"extra_body": {"top_k": -1, "audio": None, "prediction": None, "reasoning_effort": None, "verbosity": None}},
]


@pytest.mark.parametrize("fields", NEUTRAL)
def test_values_that_change_nothing_are_accepted(served, fields):
    options = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0}
    expected = served.client.chat.completions.create(**options).choices[0].message
    assert served.client.chat.completions.create(**options, **fields).choices[0].message == expected


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 10**4_000}, {"top_k": -(10**4_000)}, {"prompt": [10**4_000]}, {"temperature": 10**4_000}],
    ids=["max_tokens", "top_k", "prompt", "temperature"],
)
def test_long_numbers_are_not_sent_back(served, fields):
    answer = served.raw.post("/v1/completions", json={"prompt": "x", **fields}, headers=HEADERS)
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]
    assert len(answer.content) < 500


@pytest.mark.parametrize("key", ["wrong", "first-ke", "first-key2", "-", "# of the tests"])
def test_a_key_must_be_right(served, key):
    headers = {"authorization": f"Bearer {key}"}
    for path in ("/v1/models", "/metrics", "/v1/contexts", "/openapi.json", "/nothing"):
        answer = served.raw.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
    with client, pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        client.completions.create(model="chat", prompt="x")


def test_keys_are_needed_for_everything_but_health_and_the_page(served):
    assert served.raw.get("/v1/models").status_code == 401
    assert served.raw.get("/v1/models", headers={"authorization": "Basic first-key"}).status_code == 401
    assert served.raw.get("/v1/models", headers=HEADERS).status_code == 200
    assert served.raw.get("/health").status_code == served.raw.get("/").status_code == 200
    for path in ("/health", "/", "/page.css"):
        head = served.raw.head(path)
        assert (head.status_code, head.content) == (200, b"")


def test_large_bodies_are_refused_with_and_without_their_length(served):
    body = b'{"prompt": "%s"}' % (b"x" * 2 * MAX_BODY)

    def unannounced():
        for start in range(0, len(body), 1_000):
            yield body[start : start + 1_000]

    for content in (body, unannounced()):
        answer = served.raw.post("/v1/completions", content=content, headers=HEADERS)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    form = {"file": ("book.txt", b"x" * 2 * MAX_BODY)}
    answer = served.raw.post("/v1/contexts", files=form, headers={"authorization": HEADERS["authorization"]})
    assert answer.status_code == 413
    # As many bytes as are allowed.
    fits = b'{"prompt": "x", "max_tokens": 1}'.ljust(MAX_BODY)
    assert served.raw.post("/v1/completions", content=fits, headers=HEADERS).status_code == 200


def test_a_full_queue_refuses_and_recovers(served):
    until(lambda: running(served) == (0, 0))
    with served.client.completions.create(model="chat", stream=True, **ENDLESS) as first:
        assert next(iter(first)).choices
        with served.client.completions.create(model="chat", stream=True, **ENDLESS):
            until(lambda: running(served) == (1, 1))
            with pytest.raises(openai.RateLimitError, match="the server is busy") as caught:
                served.client.completions.create(model="chat", prompt="x", max_tokens=1)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            # All of a request's choices or none.
            with pytest.raises(openai.RateLimitError):
                served.client.completions.create(model="chat", prompt=["x", "y"], max_tokens=1)
    until(lambda: running(served) == (0, 0))
    assert served.client.completions.create(model="chat", prompt="x", max_tokens=1).choices


def ask_in_this_process(folder, text_model, ask, options=None):
    """Calls a coroutine with a server in this process and a client of it."""

    async def run():
        async with serving(text_model, folder, options, slots=1) as service:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(service.app))
            async with openai.AsyncOpenAI(
                base_url="http://here/v1", api_key="-", max_retries=0, http_client=http
            ) as client:
                await ask(client, service)

    asyncio.run(run())


def test_a_prompt_is_tokenized_once_for_all_its_choices(folders, tmp_path, monkeypatch):
    text_model = TextModel.load(folders.native)
    encoded = []
    encode = text_model.tokenizer.encode

    def counted(text):
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(text_model.tokenizer, "encode", counted)

    async def ask(client, _):
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=1, echo=True)
        assert [choice.text[0] for choice in answer.choices] == [*"aaabbb"]

    ask_in_this_process(tmp_path, text_model, ask)
    assert encoded == ["a", "b"]


def test_a_request_is_submitted_once_and_as_it_is(folders):
    text_model = TextModel.load(folders.native)
    with Engine(text_model, 1) as engine:
        request = engine.request("a", GREEDY, max_tokens=3)
        text = engine.submit(request).result(60).text
        assert text == engine.submit(replace(request, seed=1)).result(60).text
        with pytest.raises(ValueError, match="prompt is a Request that was submitted already"):
            engine.submit(request)
        with pytest.raises(TypeError, match="a Request must be submitted without further arguments"):
            engine.submit(replace(request), max_tokens=1)


def test_texts_that_take_long_to_tokenize_are_given_up(folders, tmp_path, monkeypatch):
    """The client hears of it in time, and what it asked for is not submitted after all."""
    text_model = TextModel.load(folders.native)
    encoded = []
    go_on = threading.Event()
    encode = text_model.tokenizer.encode

    def slow(text):
        encoded.append(text)
        assert go_on.wait(60)
        return encode(text)

    monkeypatch.setattr(text_model.tokenizer, "encode", slow)

    async def ask(client, service):
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.5 seconds"):
            await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=1, stream=True)
        assert encoded == ["a"]
        go_on.set()
        service.tokenizing.shutdown()
        assert encoded == ["a"]
        assert service.engine.stats().submitted == 0

    ask_in_this_process(tmp_path, text_model, ask, ServerOptions(timeout=0.5))


def test_requests_have_a_time_limit(folders, tmp_path):
    """In this process, where the limit can be shorter than a busy machine takes for the other tests."""
    text_model = TextModel.load(folders.native)

    async def ask(client, service):
        options = {"model": "tiny", **ENDLESS}
        with pytest.raises(openai.InternalServerError, match=r"longer than 0\.5 seconds") as caught:
            await client.completions.create(**options)
        assert caught.value.status_code == 504
        assert caught.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match=r"longer than 0\.5 seconds"):
            [chunk async for chunk in await client.completions.create(**options, stream=True)]
        until(lambda: service.engine.stats().finished.get("cancelled") == 2)

    ask_in_this_process(tmp_path, text_model, ask, ServerOptions(timeout=0.5))


@pytest.mark.slow
def test_a_stop_lets_requests_end_and_keeps_contexts(folders, tmp_path):
    options = ("--contexts", tmp_path, "--slots", 2, "--grace", 600)
    with ServerProcess(folders.native, *options) as process:
        raw = httpx.Client(base_url=process.url, timeout=60)
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
        with raw, client:
            made = raw.post("/v1/contexts", json={"text": "kept over a restart"}).json()
            until(lambda: raw.get(f"/v1/contexts/{made['id']}").json()["status"] == "ready")
            question = {"model": "native", "prompt": "?", "max_tokens": 20, "temperature": 0}
            question["extra_body"] = {"context": made["id"]}
            before = client.completions.create(**question).choices[0].text
            ended = []

            def short():
                ended.append(client.completions.create(model="native", prompt="short", max_tokens=100, temperature=0))

            thread = threading.Thread(target=short)
            endless = client.completions.create(model="native", stream=True, **ENDLESS)
            events = iter(endless)
            next(events)
            thread.start()
            until(lambda: "sympow_slots_running 2" in raw.get("/metrics").text)
            process.process.send_signal(signal.SIGINT)
            # Requests that run may end, until a second signal, which tells the others.
            thread.join()
            assert ended[0].choices[0].finish_reason in ("length", "stop")
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(events)
            with pytest.raises(openai.APIConnectionError):
                client.completions.create(model="native", prompt="too late")
        assert process.wait() == 0
        assert process.messages[-1] == "stopped\n"
    # The next server finds the context.
    model = TextModel.load(folders.native)
    folder = ContextFolder(tmp_path, model.model, fingerprint_of(model.model))
    assert list(folder.records()) == [made["id"]]
    prefix = model.extend(folder.load(made["id"]), "?")
    assert "".join(model.stream(prefix, 20, GREEDY)) == before
    folder.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "--port must be between 0 and 65535, got 70000"),
        (("--host", "203.0.113.1"), "cannot be used: 203.0.113.1"),
        (("--timeout", "nan"), "--timeout must be finite"),
        (("--timeout", "0"), "--timeout must be above 0"),
        (("--max-body", "0"), "--max-body must be at least 1"),
        (("--slots", "0"), "--slots must be at least 1"),
        (("--model-name", "m\udcff"), "--model-name is not UTF-8 text: character 1"),
        (("--api-key-file", "empty.txt"), "--api-key-file must have at least one key"),
        (("--api-key-file", "missing.txt"), "missing.txt cannot be read"),
        (("--contexts", "empty.txt"), "--contexts must name a folder"),
        *((("--allow-host", name), f"--allow-host must be a name {MORE}; got {name!r}") for name in BAD_HOSTS),
    ],
)
def test_mistakes_on_the_command_line_are_explained(folders, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty.txt").write_text("# no key\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", str(folders.native), "--port", "0", *arguments], terminal_width=200)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_hosts_are_compared_as_clients_send_them():
    hosts = allowed_hosts("127.0.0.1", ["Models.Example", "::2", "[FE80::0:1]", "10.0.0.7"])
    assert hosts == {"localhost", "127.0.0.1", "[::1]", "models.example", "[::2]", "[fe80::1]", "10.0.0.7"}
    assert allowed_hosts("::1", []) == {"localhost", "127.0.0.1", "[::1]"}
    assert allowed_hosts("0.0.0.0", []) is None


def test_a_folder_without_a_model_is_explained(tmp_path):
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0"], terminal_width=200)
    assert result.exit_code == 2
    assert "holds no model" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--allow-host", "models.example"), True),
        (("--host", "0.0.0.0", "--api-key-file", "keys.txt"), False),
        (("--allow-host", "models.example"), False),
    ],
)
def test_a_server_that_others_can_reach_without_a_key_warns(tmp_path, monkeypatch, arguments, warned):
    (tmp_path / "keys.txt").write_text("a-key\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", *arguments], terminal_width=200)
    assert ("anyone who can reach 0.0.0.0 can use this server" in result.output) == warned
    assert "holds no model" in " ".join(result.output.split())


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "python_multipart", "prometheus_client"])
def test_the_extra_is_named_if_it_is_missing(folders, monkeypatch, missing):
    import sys

    monkeypatch.setitem(sys.modules, missing, None)
    result = CliRunner().invoke(app, ["serve", str(folders.native)])
    assert result.exit_code == 1
    assert "pip install 'conformal-sympow[serve]'" in result.output
    assert "Traceback" not in result.output
