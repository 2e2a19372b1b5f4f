"""`sympow serve` as its users meet it: a process, and the client library of OpenAI."""

import asyncio
import json
import math
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
from server_process import ServerProcess, metrics, save_tiny_model, until

from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.serving.engine.completion import Event, Result, TokenLogprob, Usage
from sympow.serving.web.answers import Answer, TokenNames

GREEDY = Sampling(temperature=0)
# More than can be generated within a test.
ENDLESS = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}}
# Bytes of a context of the tiny model are some ten thousand: of several, not all stay in memory.
CONTEXT_BYTES = 150_000


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "model")
    options = ("--model-name", "tiny", "--slots", 4, "--max-queue", 40, "--contexts", folder / "contexts")
    with ServerProcess(folder / "model", *options, "--context-bytes", CONTEXT_BYTES) as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
        raw = httpx.Client(base_url=process.url, timeout=60)
        with client, raw:
            yield SimpleNamespace(
                url=process.url,
                client=client,
                raw=raw,
                text_model=TextModel.load(folder / "model"),
                contexts=folder / "contexts",
            )


def alone(text_model, prompt, tokens, sampling=GREEDY, **options):
    """What the library generates without a server."""
    return "".join(text_model.stream(text_model.prefill(prompt), tokens, sampling, **options))


def complete(served, prompt, max_tokens=20, **options):
    options = {"temperature": 0, **options}
    return served.client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, **options)


def is_idle(served):
    """Whether every request has ended and left its slot."""
    now = metrics(served.raw)
    ended = sum(value for name, value in now.items() if name.startswith("sympow_requests_finished_total"))
    return now["sympow_requests_submitted_total"] == ended and now["sympow_slots_running"] == 0


def test_the_model_is_listed(served):
    (described,) = served.client.models.list()
    assert described.id == "tiny"
    # 2 layers, 2 heads of 16: keys' features × (values and the normalizer) in float32. A slot has a window, too.
    assert described.state_bytes == 2 * 2 * 136 * 17 * 4 < described.slot_bytes
    assert served.client.models.retrieve("tiny").owned_by == "sympow"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        served.client.models.retrieve("other")


def test_a_completion_is_what_the_library_generates(served):
    answer = complete(served, "Once upon", 30)
    [choice] = answer.choices
    assert choice.text == alone(served.text_model, "Once upon", 30)
    assert choice.finish_reason == "length"
    assert (answer.model, answer.object) == ("tiny", "text_completion")
    # The boundary token before the text is one of the prompt's.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 30, 40)


def test_token_ids_are_taken_as_they_are(served):
    ids = served.text_model.encode("Once upon")[0].tolist()
    assert complete(served, ids).choices[0].text == complete(served, "Once upon").choices[0].text
    both = complete(served, [ids, ids[:4]]).choices
    assert [choice.index for choice in both] == [0, 1]
    assert [choice.text for choice in both] == [complete(served, one).choices[0].text for one in (ids, ids[:4])]


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_the_same_text_in_pieces(served, include_usage):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(complete(served, "stream ", 25, stream=True, **options))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.text for piece in pieces) == alone(served.text_model, "stream ", 25)
    assert len(pieces) > 10
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks]
    assert [usage is not None for usage in usages] == [False] * (len(usages) - 1) + [include_usage]
    if include_usage:
        assert (usages[-1].prompt_tokens, usages[-1].completion_tokens) == (8, 25)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_each_what_they_are_alone(served, stream):
    prompts, options = ["one", "another, longer"], {"temperature": 1.3, "top_p": 0.9, "extra_body": {"top_k": 30}}
    if stream:
        options["stream_options"] = {"include_usage": True}
    answer = complete(served, prompts, 15, n=2, seed=5, stream=stream, **options)
    texts = dict.fromkeys(range(4), "")
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    sampling = Sampling(1.3, top_p=0.9, top_k=30)
    expected = [alone(served.text_model, prompt, 15, sampling, seed=seed) for prompt in prompts for seed in (5, 6)]
    assert list(texts.values()) == expected
    assert len(set(expected)) == 4
    # Each prompt counts once, with its boundary token.
    usage = (chunk if stream else answer).usage
    assert usage.prompt_tokens == sum(len(prompt) + 1 for prompt in prompts)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 2 * 15


@pytest.mark.parametrize(("seed", "second"), [(-1, 0), (2**63 - 1, 0), (-(2**63), 1 - 2**63)])
def test_seeds_of_choices_are_counted_from_the_one_that_was_given(served, seed, second):
    choices = complete(served, "seed", 10, temperature=1, n=2, seed=seed).choices
    expected = [alone(served.text_model, "seed", 10, Sampling(1.0), seed=one) for one in (seed, second)]
    assert [choice.text for choice in choices] == expected


def test_log_probabilities_belong_to_tokens(served):
    answer = complete(served, "log", 6, logprobs=3, echo=True).choices[0]
    found = answer.logprobs
    assert answer.text == "log" + alone(served.text_model, "log", 6)
    assert found.tokens == ["<|endoftext|>", *answer.text]
    assert found.text_offset == [0, *range(len(answer.text))]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(len(top) == 3 for top in found.top_logprobs[1:])
    # Greedy decoding chooses the most likely token.
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[4:]:
        assert max(top, key=top.get) == token
        assert top[token] == logprob < 0
    scored = complete(served, "log", 0, logprobs=0, echo=True).choices[0]
    assert (scored.text, scored.finish_reason) == ("log", "length")
    assert scored.logprobs.token_logprobs == found.token_logprobs[:4]
    chunks = list(complete(served, "log", 6, logprobs=3, echo=True, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [offset for part in streamed for offset in part.text_offset] == found.text_offset
    assert [logprob for part in streamed for logprob in part.token_logprobs] == found.token_logprobs


def test_log_probabilities_of_many_tokens_can_be_asked_for(served):
    """As many as a response may have, of a text that ends soon."""
    text = complete(served, "log", 10).choices[0].text
    [choice] = complete(served, "log", 49_932, logprobs=20, stop=text[5]).choices
    assert choice.text == text[: text.index(text[5])]
    assert all(len(top) == 20 for top in choice.logprobs.top_logprobs)


def test_log_probabilities_that_are_nan_are_null(served):
    entries = [TokenLogprob(1, None), TokenLogprob(2, math.nan, ((3, math.nan), (4, -math.inf), (5, -1.0)))]
    usage = Usage(2, 0, 0)
    result = Result("", (), None, tuple(entries), "length", usage, None)
    for form in ("completion", "chat"):
        answer = Answer(form, "tiny", TokenNames(served.text_model.tokenizer), None, tops=True, choices=1)
        streamed = answer.chunk(0, Event("", (1, 2), tuple(entries), echo=True))
        for content in (answer.whole([result]), streamed):
            [choice] = json.loads(json.dumps(content, allow_nan=False))["choices"]
            if form == "completion":
                assert choice["logprobs"]["token_logprobs"] == [None, None]
                assert list(choice["logprobs"]["top_logprobs"][1].values()) == [None, -9999.0, -1.0]
            else:
                assert [one["logprob"] for one in choice["logprobs"]["content"]] == [None, None]


def test_many_clients_at_once_each_get_their_own_text(served):
    settings = [
        {
            "prompt": "x" * (1 + 7 * number),
            "max_tokens": 3 + 5 * (number % 5),
            "seed": number,
            "temperature": number % 3,
        }
        for number in range(16)
    ]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(number, setting):
                if number % 2:
                    return (await client.completions.create(model="tiny", **setting)).choices[0].text
                stream = await client.completions.create(model="tiny", stream=True, **setting)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(*pair) for pair in enumerate(settings)))

    expected = [
        alone(served.text_model, s["prompt"], s["max_tokens"], Sampling(s["temperature"]), seed=s["seed"])
        for s in settings
    ]
    assert asyncio.run(ask_all()) == expected


@pytest.mark.parametrize("how", ["stream", "whole", "before the first token"])
def test_a_client_that_goes_away_frees_its_slots(served, how):
    until(lambda: is_idle(served))
    before = metrics(served.raw)
    if how == "stream":
        with complete(served, ["a", "b"], stream=True, **ENDLESS) as stream:
            assert next(iter(stream)).choices
            until(lambda: metrics(served.raw)["sympow_slots_running"] == 2)
    else:
        prompt = "whole" if how == "whole" else "long " * 10_000
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.5).completions.create(model="tiny", prompt=prompt, **ENDLESS)
    gone = "sympow_client_disconnects_total"
    until(lambda: metrics(served.raw)[gone] == before[gone] + 1)
    until(lambda: is_idle(served))
    after = metrics(served.raw)
    cancelled = "sympow_requests_finished_total:cancelled"
    assert after[cancelled] - before.get(cancelled, 0) == (2 if how == "stream" else 1)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature must be at least 0, got -1"),
        ({"temperature": "hot"}, "temperature", "temperature: Input should be a valid number"),
        ({"top_p": 0}, "top_p", "top_p must be above 0"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 10**9}, "max_tokens", "max_tokens must be at most 65,536, got 1,000,000,000"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 100}, "prompt", "at most 44 choices, got 100"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "stop: must be at most 16 strings, got 17"),
        (
            {"prompt": "x" * 60_000, "logprobs": 20, "echo": True},
            "logprobs",
            "logprobs must be at most 1,048,576 numbers in all choices, (tokens of echoed prompts + max_tokens) × "
            "(logprobs + 1); got (60,001 + 16) × 21 = 1,260,357",
        ),
        ({"logprobs": 20, "max_tokens": 50_000}, "logprobs", "got (0 + 50,000) × 21 = 1,050,000"),
        ({"logprobs": 0, "max_tokens": 60_000, "n": 20}, "logprobs", "got (0 + 1,200,000) × 1 = 1,200,000"),
        (
            {"prompt": ["x" * 9_999] * 5, "logprobs": 20, "max_tokens": 10, "echo": True, "stream": True},
            "logprobs",
            "got (50,000 + 50) × 21 = 1,051,050",
        ),
        ({"prompt": []}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [["a"]]}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [10**6]}, "prompt", "prompt must hold ids from 0 to"),
        ({"prompt": [-1]}, "prompt", "prompt must hold ids from 0 to"),
        ({"prompt": [10**30]}, "prompt", "prompt"),
        ({"best_of": 3}, "best_of", "best_of must be n"),
        ({"suffix": "end"}, "suffix", "suffix must be empty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "this server has repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias must be empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only be given with stream"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "repetition_penalty must be above 0"),
        ({"extra_body": {"temprature": 1}}, "temprature", "Unrecognized request argument supplied: temprature"),
        ({"extra_body": {"Temperature": 1}}, "Temperature", "Unrecognized request argument supplied: Temperature"),
        ({"extra_body": {"x" * 200: 1}}, "x" * 100, "Unrecognized request argument supplied: " + "x" * 100),
    ],
)  # fmt: skip
def test_mistakes_are_explained_in_the_form_of_openai(served, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model="tiny", **{"prompt": "x", **fields})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert message in caught.value.body["message"]


def test_values_that_change_nothing_are_accepted(served):
    same = {"best_of": 2, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": "", "user": "me"}
    plain = complete(served, "same", n=2)
    assert [c.text for c in complete(served, "same", n=2, **same).choices] == [c.text for c in plain.choices]


def test_another_model_is_not_found(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "temperature: Input should be a finite number"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: Input should be a finite number"),
        (b'{"prompt": "\\ud800"}', "prompt is not UTF-8 text"),
        (b'{"prompt": "\xff"}', "the body is not JSON"),
        (b'{"prompt": "x"', "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"", "the body is not JSON: it is empty"),
        (b"[]", "should be an object"),
        (b'{"max_tokens": ' + b"9" * 5_000 + b"}", "the body is not JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_malformed_bodies_are_refused_and_the_server_goes_on(served, body, message):
    answer = served.raw.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert message in answer.json()["error"]["message"]
    assert complete(served, "still", 5).choices[0].text == alone(served.text_model, "still", 5)


def test_unknown_paths_methods_and_types_are_errors_of_the_same_form(served):
    for method, path, status in (("GET", "/v1/files", 404), ("PUT", "/v1/completions", 405), ("GET", "/etc", 404)):
        answer = served.raw.request(method, path)
        assert answer.status_code == status
        assert "unknown request" in answer.json()["error"]["message"]
    answer = served.raw.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_chats_need_a_template(served):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])


def test_pages_of_other_sites_are_refused(served):
    assert served.raw.get("/v1/models", headers={"host": "example.org"}).status_code == 403
    own = served.url.removeprefix("http://")
    for headers, status in (
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": f"http://{own}"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, 200),
        # As browsers send it on plain HTTP to other machines.
        ({"origin": "http://example.org"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": f"http://{own}"}, 200),
        ({}, 200),
    ):
        answer = served.raw.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert answer.status_code == status, headers


def test_probes_reach_the_health_by_any_name(served):
    assert served.raw.get("/health", headers={"host": "10.1.2.3:8000"}).json() == {"status": "ok"}


def test_the_page_may_load_nothing_from_elsewhere(served):
    for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
        answer = served.raw.get(path)
        assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert served.raw.get("/index.html").status_code == served.raw.get("/__init__.py").status_code == 404


def test_metrics_are_those_of_prometheus(served):
    before = metrics(served.raw)
    complete(served, "count me", 7)
    after = metrics(served.raw)
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert changes["sympow_generated_tokens_total"] == 7
    assert changes["sympow_requests_submitted_total"] == 1
    assert changes["sympow_requests_finished_total:length"] == 1
    assert changes["sympow_time_to_first_token_seconds_count"] == 1
    assert changes["sympow_time_to_first_token_seconds_bucket:+Inf"] == 1
    assert changes["sympow_http_responses_total:/v1/completions:200"] == 1
    assert after["sympow_slots"] == 4
    assert after["sympow_slot_bytes"] > 0


def upload(served, text, **more):
    answer = served.raw.post("/v1/contexts", json={"text": text, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ready(served, id_):
    """A context, once it is read."""

    def finished():
        context = served.raw.get(f"/v1/contexts/{id_}").json()
        assert context["status"] in ("reading", "ready"), context
        return context if context["status"] == "ready" else None

    return until(finished)


def ask(served, context, prompt, **options):
    return complete(served, prompt, extra_body={"context": context}, **options)


def test_a_context_is_read_once_and_asked_many_times(served):
    text = "The state has a fixed size. " * 20
    made = upload(served, text, name="a fact")
    assert (made["object"], made["name"], made["tokens"]) == ("context", "a fact", len(text) + 1)
    context = ready(served, made["id"])
    assert context["tokens"] == context["tokens_read"] == len(text) + 1
    assert context["nbytes"] > 0
    prefix = served.text_model.prefill(text)
    for prompt in ("Why?", "How?", ""):
        answer = ask(served, made["id"], prompt)
        expected = "".join(served.text_model.stream(served.text_model.extend(prefix, prompt), 20, GREEDY))
        assert answer.choices[0].text == expected
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.model_extra["context_tokens"] == len(text) + 1
    assert made["id"] in [one["id"] for one in served.raw.get("/v1/contexts").json()["data"]]


def test_a_fork_continues_a_context_and_leaves_it_alone(served):
    first = ready(served, upload(served, "Once upon a time ")["id"])
    before = ask(served, first["id"], "x").choices[0].text
    made = served.raw.post(f"/v1/contexts/{first['id']}/fork", json={"text": "in a wood", "name": "wood"}).json()
    fork = ready(served, made["id"])
    assert (fork["parent"], fork["tokens"]) == (first["id"], len("Once upon a time in a wood") + 1)
    both = served.text_model.extend(served.text_model.prefill("Once upon a time "), "in a wood, x")
    assert ask(served, fork["id"], ", x").choices[0].text == "".join(served.text_model.stream(both, 20, GREEDY))
    copy = ready(served, served.raw.post(f"/v1/contexts/{first['id']}/fork", json={}).json()["id"])
    assert copy["tokens"] == first["tokens"]
    assert ask(served, copy["id"], "x").choices[0].text == ask(served, first["id"], "x").choices[0].text == before


def test_a_file_is_uploaded_as_a_form(served):
    content = "Caf\u00e9 \u5149.\n".encode()
    made = served.raw.post("/v1/contexts", files={"file": ("notes/menu.txt", content)}).json()
    assert made["name"] == "menu.txt"
    assert ready(served, made["id"])["tokens"] == len(content.decode()) + 1
    named = served.raw.post("/v1/contexts", files={"file": ("menu.txt", content)}, data={"name": "food"}).json()
    assert named["name"] == "food"
    for files, data, message in (
        ({"file": ("a.bin", b"\xff\xfe\x00")}, {}, "file is not UTF-8 text: byte 0xff at offset 0"),
        ({"file": ("empty.txt", b"")}, {}, "text must not be empty"),
        ({"other": ("a.txt", b"a")}, {}, "Unrecognized request argument supplied: other"),
        ({"file": ("a.txt", b"a")}, {"name": "x" * 201}, "name must have at most 200 characters"),
    ):
        answer = served.raw.post("/v1/contexts", files=files, data=data)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("charset", ["unicode_escape", "utf-7", "undefined", "hex"])
def test_forms_are_utf8_so_that_names_are_text(served, charset):
    """Python decodes the first two to lone surrogates, which no response can hold."""
    parts = (
        b'--xx\r\nContent-Disposition: form-data; name="name"\r\n\r\n%s\r\n'
        b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\ntext\r\n--xx--\r\n'
    )
    name = b"a+2AA-b" if charset == "utf-7" else rb"a\ud800b"
    kind = f"multipart/form-data; boundary=xx; charset={charset}"
    answer = served.raw.post("/v1/contexts", content=parts % name, headers={"content-type": kind})
    assert answer.status_code == 400
    assert f"or as UTF-8; got charset='{charset}'" in answer.json()["error"]["message"]
    assert served.raw.get("/v1/contexts").status_code == 200
    kind = "multipart/form-data; boundary=xx; charset=UTF-8"
    made = served.raw.post("/v1/contexts", content=parts % "café".encode(), headers={"content-type": kind}).json()
    assert made["name"] == "café"


def test_a_context_on_its_way_shows_how_far_it_is_and_can_be_deleted(served):
    made = upload(served, "A long book. " * 20_000)
    assert (made["status"], made["tokens"]) == ("reading", 13 * 20_000 + 1)
    path = f"/v1/contexts/{made['id']}"
    partly = until(lambda: (now := served.raw.get(path).json())["tokens_read"] > 0 and now)
    assert partly["status"] == "reading"
    assert partly["tokens_read"] < partly["tokens"]
    with pytest.raises(openai.ConflictError, match="still being read"):
        ask(served, made["id"], "x")
    # Others are answered meanwhile.
    assert complete(served, "meanwhile", 5).choices[0].text == alone(served.text_model, "meanwhile", 5)
    assert served.raw.delete(path).json()["deleted"] is True
    assert served.raw.get(path).status_code == 404
    until(lambda: is_idle(served))


def test_deleted_and_unknown_contexts_are_not_found(served):
    made = ready(served, upload(served, "soon gone")["id"])
    path = f"/v1/contexts/{made['id']}"
    assert (served.contexts / made["id"]).is_dir()
    assert served.raw.delete(path).status_code == 200
    assert not (served.contexts / made["id"]).exists()
    assert served.raw.delete(path).status_code == served.raw.get(path).status_code == 404
    with pytest.raises(openai.NotFoundError, match="there is no context ctx_"):
        ask(served, made["id"], "x")


@pytest.mark.parametrize(
    "id_", ["..", "../contexts", "ctx_../../../etc/passwd", "/etc", ".lock", "ctx_" + "0" * 24 + "/..", "ctx_\n", ""]
)
def test_ids_cannot_leave_the_folder(served, id_):
    (served.contexts / ".lock").touch()
    with pytest.raises(openai.NotFoundError, match="there is no context"):
        ask(served, id_, "x")
    quoted = id_.replace("/", "%2f").replace(".", "%2e").replace("\n", "%0a") or "%20"
    for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
        answer = served.raw.request(method, f"/v1/contexts/{quoted}{tail}", json={})
        assert answer.status_code in (404, 405)
    assert (served.contexts / ".lock").exists()


def test_contexts_beyond_the_budget_are_dropped_from_memory_and_not_from_disk(served):
    made = [ready(served, upload(served, f"number {n} " * 200)["id"]) for n in range(4)]
    listed = {one["id"]: one for one in served.raw.get("/v1/contexts").json()["data"]}
    assert [listed[one["id"]]["in_memory"] for one in made][0::3] == [False, True]
    assert metrics(served.raw)["sympow_contexts_memory_bytes"] <= CONTEXT_BYTES
    before = metrics(served.raw)["sympow_context_loads_total"]
    expected = served.text_model.extend(served.text_model.prefill("number 0 " * 200), "x")
    for _ in range(2):
        text = "".join(served.text_model.stream(expected, 20, GREEDY))
        assert ask(served, made[0]["id"], "x").choices[0].text == text
    assert metrics(served.raw)["sympow_context_loads_total"] == before + 1


def test_a_damaged_context_is_an_error_and_nothing_else(served):
    made = ready(served, upload(served, "to be damaged " * 50)["id"])
    for n in range(4):
        ready(served, upload(served, f"pushes it out {n} " * 50)["id"])
    file = served.contexts / made["id"] / "state.prefix"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(openai.InternalServerError, match="damaged") as caught:
        ask(served, made["id"], "x")
    assert caught.value.body["code"] == "context_damaged"
    assert "/" not in caught.value.body["message"]
    assert complete(served, "still", 5).choices[0].text == alone(served.text_model, "still", 5)


def test_a_context_that_cannot_be_opened_now_is_not_called_damaged(served):
    """Whoever is told that it is damaged deletes it."""
    made = ready(served, upload(served, "to be opened later " * 50)["id"])
    for n in range(4):
        ready(served, upload(served, f"pushes it out {n} " * 50)["id"])
    file = served.contexts / made["id"] / "state.prefix"
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(served, made["id"], "x")
    message = f"context {made['id']} cannot be read from the server's disk: Too many levels of symbolic links"
    assert caught.value.body["message"] == message
    file.with_suffix(".kept").replace(file)
    assert ask(served, made["id"], "x").choices


def test_the_openapi_description_names_the_parameters(served):
    described = json.loads(served.raw.get("/openapi.json").text)
    schema = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/CompletionBody"}
    fields = described["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "max_tokens", "context", "repetition_penalty"} <= fields.keys()
    forms = described["paths"]["/v1/contexts"]["post"]["requestBody"]["content"]
    assert forms["application/json"]["schema"]["properties"].keys() == {"text", "name"}
    assert forms["multipart/form-data"]["schema"]["properties"].keys() == {"file", "name"}


def test_states_in_memory_and_on_disk_are_those_of_the_model(served):
    """What the server keeps can be used by the library."""
    from sympow.generation.prefix import Prefix

    made = ready(served, upload(served, "shared with the library")["id"])
    prefix = Prefix.load(served.contexts / made["id"] / "state.prefix", served.text_model.model)
    assert prefix.tokens == made["tokens"]
    text = "".join(served.text_model.stream(prefix, 20, GREEDY))
    assert ask(served, made["id"], "").choices[0].text == text


@pytest.mark.slow
def test_the_page_works_before_the_real_server(served, browser, tmp_path):
    """Its own tests have a stand-in; here every request goes to the server, under its Content-Security-Policy."""
    from playwright.sync_api import expect

    text = "The page uploads this. " * 10
    (tmp_path / "book.txt").write_text(text)
    context = browser.new_context()
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(served.url)
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("20")
    answer = page.locator("#answers article").first.locator(".text")

    def ask_page(prompt, expected):
        page.get_by_label("The model continues").fill(prompt)
        page.get_by_role("button", name="Generate").click()
        expect(answer).to_have_text(prompt + expected, use_inner_text=True, timeout=60_000)
        expect(page.get_by_role("button", name="Generate")).to_be_enabled()

    ask_page("Once upon", alone(served.text_model, "Once upon", 20))
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload a text file").click()
    chooser.value.set_files(tmp_path / "book.txt")
    row = page.locator("#document-list li").filter(has_text="book.txt")
    expect(row.get_by_role("radio")).to_be_checked(timeout=60_000)
    prefix = served.text_model.extend(served.text_model.prefill(text), "Who?")
    ask_page("Who?", "".join(served.text_model.stream(prefix, 20, GREEDY)))
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Delete book.txt").click()
    expect(row).to_have_count(0)
    context.close()
    assert complaints == []
