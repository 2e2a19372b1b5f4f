"""Many clients at once, some of which go away: every answer is its own, and nothing is left behind."""

import asyncio
import random
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from server_process import ServerProcess, metrics, save_tiny_model, until

from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    save_tiny_model(folder)
    options = ("--model-name", "tiny", "--slots", 16, "--max-queue", 64, "--prefix-cache-bytes", 2**20)
    with ServerProcess(folder, *options) as process:
        yield process, TextModel.load(folder)


def settings_of(number):
    draw = random.Random(number)
    text = "".join(draw.choices("abcdefghij klmnop", k=draw.randrange(1, 120)))
    sampling = {"temperature": draw.choice([0, 0.7, 1.5]), "top_p": draw.choice([1, 0.8])}
    return {"prompt": text, "max_tokens": draw.randrange(1, 40), "seed": number, **sampling}


def run_all(process, work):
    """Runs a coroutine for each client library call at once."""

    async def run():
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(limits=limits, timeout=600)
        async with openai.AsyncOpenAI(
            base_url=f"{process.url}/v1", api_key="-", max_retries=0, http_client=http
        ) as client:
            return await work(client)

    return asyncio.run(run())


async def text_of(client, stream, **settings):
    if not stream:
        return (await client.completions.create(model="tiny", **settings)).choices[0].text
    chunks = await client.completions.create(model="tiny", stream=True, **settings)
    return "".join([chunk.choices[0].text async for chunk in chunks])


def numbers(process):
    with httpx.Client(base_url=process.url) as client:
        return metrics(client)


def resident_bytes(process):
    return int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]) * 4096


def test_nothing_is_left_of_1000_requests_a_third_of_which_are_cut_off(served):
    process, text_model = served
    endless = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}}
    texts = {}

    def alone(prompt, max_tokens, seed, **sampling):
        return "".join(text_model.stream(text_model.prefill(prompt), max_tokens, Sampling(**sampling), seed=seed))

    async def one(client, number, turn):
        settings = settings_of(number)
        async with turn:
            if number % 3:
                texts[number] = await text_of(client, number % 2, **settings)
                return None
            cut = settings | endless
            if number % 2:
                stream = await client.completions.create(model="tiny", stream=True, **cut)
                async for _ in stream:
                    break
                return await stream.close()
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).completions.create(model="tiny", **cut)
            return None

    def round_of(first, last):
        async def work(client):
            turn = asyncio.Semaphore(32)
            await asyncio.gather(*(one(client, number, turn) for number in range(first, last)))

        run_all(process, work)
        until(lambda: numbers(process)["sympow_http_requests_open"] == 1)
        until(lambda: numbers(process)["sympow_slots_running"] == 0)
        return numbers(process), resident_bytes(process)

    _, before = round_of(0, 400)
    idle, after = round_of(400, 1_000)
    assert idle["sympow_queue_length"] == 0
    # The server's own, and those of the request for these numbers.
    assert idle["sympow_tasks"] <= 6
    # The first round filled the prefix cache and the allocator's pools.
    assert after < 1.1 * before
    assert idle["sympow_client_disconnects_total"] > 200
    some = [number for number in texts if number < 96]
    assert [texts[number] for number in some] == [alone(**settings_of(number)) for number in some]
