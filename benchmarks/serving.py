"""Serving: throughput, time to the first token, and what a long context costs.

    python benchmarks/serving.py http --out build/serving_cpu.json
    python benchmarks/serving.py engine --out benchmarks/results/h200_serving.json

`http` asks a server, which it starts by itself (extra `serve`) unless --url names one:

concurrent   --requests at once, each with a prompt of --prompt and --tokens generated tokens
one by one   the same requests, each when the one before has ended
contexts     a short and a long text, uploaded once and asked --questions times each, in turn; the server's memory

`engine` needs no server and no tokenizer. It times `sympow.serving.Engine` with the paper's 124M model and random
weights beside `generate` of transformers with a GPT-2 of the same size, in batches of --batch:

requests     --requests of --prompt and --tokens tokens
shared       --sharing requests after one context of --context tokens, which is prefilled once; in transformers, its
             keys and values are computed once and copied for each batch

All decode greedily and ignore the end of a text, so that every request has the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from sympow import GPT, GPTConfig
from sympow.check.timing import environment, installed_version, save_results
from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.model.storage import save_model
from sympow.serving import Completion, Engine

GREEDY = Sampling(temperature=0)
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n"


@dataclass(frozen=True)
class Sample:
    """One answer: seconds to its first token and to its end, and its generated tokens."""

    first: float
    whole: float
    tokens: int


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    first = sorted(sample.first for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    return {
        "requests": len(samples),
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_median": statistics.median(first),
        "first_token_90th_percentile": first[int(0.9 * (len(first) - 1))],
        "first_token_slowest": first[-1],
    }


def tell(what: str, **numbers: float) -> None:
    """Says on stderr how far it is: a run takes minutes."""
    print(what, *(f"{name}={value:.6g}" for name, value in numbers.items()), file=sys.stderr, flush=True)


# Over HTTP ------------------------------------------------------------------------------------------------------------


@contextmanager
def a_server(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """The address of a server, and its process id if it was started here."""
    if options.url:
        yield options.url, None
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_model(Path(folder) / "random" / "model", options.preset)
        command = [sys.executable, "-m", "sympow", "serve", str(model), "--port", "0", "--slots", str(options.slots)]
        with subprocess.Popen(
            [*command, "--contexts", f"{folder}/contexts"], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start")
            try:
                yield found[0], server.pid
            finally:
                server.terminate()


def random_model(folder: Path, preset: str) -> Path:
    torch.manual_seed(0)
    config = GPTConfig.preset(preset, vocab_size=ByteTokenizer.vocab_size, rotary="scale")
    save_model(folder, config, GPT(config).state_dict())
    ByteTokenizer().save(folder)
    return folder


async def ask(url: str, body: dict[str, Any]) -> Sample:
    """Streams a completion over its own connection; a client library would take part of the CPU that is measured."""
    place = urlsplit(url)
    body = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **body}
    content = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**24)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()[-300:]}")
    first, tokens = 0.0, 0
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            if usage := json.loads(line[6:]).get("usage"):
                tokens = usage["completion_tokens"]
    writer.close()
    return Sample(first, time.perf_counter() - start, tokens)


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], together: bool) -> dict[str, float]:
    start = time.perf_counter()
    samples = (
        await asyncio.gather(*(ask(url, body) for body in bodies)) if together else [await ask(url, b) for b in bodies]
    )
    return summarize(samples, time.perf_counter() - start)


def text_of(length: int, seed: int) -> str:
    drawn = torch.randint(len(ALPHABET), (length,), generator=torch.Generator().manual_seed(seed))
    return "".join(ALPHABET[index] for index in drawn.tolist())


def upload(url: str, text: str) -> dict[str, Any]:
    """Uploads a context and waits until it is read."""
    start = time.perf_counter()
    request = Request(f"{url}/v1/contexts", json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})
    context = json.load(urlopen(request))
    while context["status"] == "reading":
        time.sleep(0.1)
        context = json.load(urlopen(f"{url}/v1/contexts/{context['id']}"))
    if context["status"] != "ready":
        raise RuntimeError(context["error"])
    return {**context, "seconds": time.perf_counter() - start}


def resident_bytes(process: int | None) -> int | None:
    """Memory of a process, on Linux."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text("utf-8").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure_contexts(url: str, process: int | None, options: argparse.Namespace) -> dict[str, Any]:
    contexts = [upload(url, text_of(length, seed=length)) for length in options.contexts]
    first: dict[int, list[float]] = {context["tokens"]: [] for context in contexts}
    memory = []
    for number in range(options.questions + 1):
        for context in contexts:
            body = {"context": context["id"], "prompt": text_of(32, seed=number), "max_tokens": 8}
            sample = asyncio.run(ask(url, body))
            # The first question warms up.
            if number:
                first[context["tokens"]].append(sample.first)
        memory.append(resident_bytes(process))
    rows = [
        {
            "tokens": context["tokens"],
            "state_bytes": context["nbytes"],
            "seconds_to_read": context["seconds"],
            "first_token_median": statistics.median(first[context["tokens"]]),
            "first_token_slowest": max(first[context["tokens"]]),
        }
        for context in contexts
    ]
    ratio = rows[-1]["first_token_median"] / rows[0]["first_token_median"]
    return {"rows": rows, "first token, longest over shortest": ratio, "server_bytes_after_each_round": memory}


def measure_http(options: argparse.Namespace) -> dict[str, Any]:
    with a_server(options) as (url, process):
        bodies = [
            {"prompt": text_of(options.prompt, seed), "max_tokens": options.tokens} for seed in range(options.requests)
        ]
        # Other prompts, so that the prefix cache does not know those that are timed.
        asyncio.run(
            ask_all(url, [{"prompt": text_of(options.prompt, -1 - n), "max_tokens": 4} for n in range(4)], True)
        )
        result: dict[str, Any] = {"concurrent": asyncio.run(ask_all(url, bodies, together=True))}
        # Likewise, the same prompts again would be found there.
        others = [body | {"prompt": text_of(options.prompt, 10_000 + n)} for n, body in enumerate(bodies)]
        result["one by one"] = asyncio.run(ask_all(url, others, together=False))
        speeds = [result[name]["tokens_per_second"] for name in ("concurrent", "one by one")]
        result["times as fast"] = speeds[0] / speeds[1]
        if options.contexts:
            result["contexts"] = measure_contexts(url, process, options)
    return result


# In this process ------------------------------------------------------------------------------------------------------


class IdTokenizer:
    """Texts are numbers: the benchmark runs where no vocabulary is installed."""

    kind = "file"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.boundary = vocab_size, vocab_size - 1

    def encode(self, text: str) -> Any:
        return torch.tensor([int(word) for word in text.split()]).numpy()

    def decode(self, ids: Any) -> str:
        return "".join(f"{index} " for index in ids)

    def decode_stream(self) -> Callable[[int], str]:
        """As those of the library tokenizers, which take no token twice."""
        return lambda token: f"{token} "

    def save(self, folder: Path | str) -> None:
        raise NotImplementedError


def prompts_of(options: argparse.Namespace, count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(options.vocabulary - 1, (count, length), generator=generator).tolist()


def an_engine(options: argparse.Namespace) -> Engine:
    torch.manual_seed(0)
    shape = {"vocab_size": options.vocabulary, "layers": options.layers, "width": options.width, "heads": options.heads}
    with torch.device(options.device):
        model = GPT(GPTConfig(**shape, rotary="scale")).to(getattr(torch, options.dtype)).eval()
    engine = Engine(TextModel(model, IdTokenizer(options.vocabulary)), options.slots, max_queue=2**16)
    engine.warm_up()
    return engine


def sample_of(completion: Completion) -> Sample:
    result = completion.result()
    assert result.time_to_first_token is not None
    return Sample(result.time_to_first_token, 0.0, len(result.tokens))


def time_engine(engine: Engine, prompts: Sequence[list[int]], tokens: int, **more: Any) -> dict[str, float]:
    start = time.perf_counter()
    completions = [engine.submit(p, GREEDY, max_tokens=tokens, ignore_boundary=True, **more) for p in prompts]
    samples = [sample_of(completion) for completion in completions]
    return summarize(samples, time.perf_counter() - start)


def measure_engine(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    start = time.perf_counter()
    with an_engine(options) as engine:
        found["slot_bytes"] = engine.stats().slot_nbytes
        found["seconds_to_start"] = time.perf_counter() - start
        tell("engine started", seconds=found["seconds_to_start"])
        if "requests" in options.parts:
            time_engine(engine, prompts_of(options, 4, options.prompt, 1), 4)
            prompts = prompts_of(options, options.requests, options.prompt, 2)
            found["requests"] = time_engine(engine, prompts, options.tokens)
            tell("engine, requests:", **found["requests"])
        if "shared" in options.parts:
            [context] = prompts_of(options, 1, options.context, 3)
            start = time.perf_counter()
            prefix = engine.prefill(context)
            seconds = time.perf_counter() - start
            time_engine(engine, prompts_of(options, 4, options.question, 4), 4, prefix=prefix)
            questions = prompts_of(options, options.sharing, options.question, 5)
            timed = time_engine(engine, questions, options.tokens, prefix=prefix)
            found["shared"] = {"seconds_to_read": seconds, "context_bytes": prefix.nbytes, **timed}
            tell("engine, shared:", **found["shared"])
        if options.device == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


class Clock:
    """A logits processor of transformers that notes when the first token is known."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            if scores.is_cuda:
                torch.cuda.synchronize()
            self.first = time.perf_counter()
        return scores


@torch.no_grad()
def measure_transformers(options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    def a_model(positions: int) -> Any:
        names: dict[str, Any] = {
            "vocab_size": options.vocabulary,
            "n_positions": positions,
            "n_embd": options.width,
            "n_layer": options.layers,
            "n_head": options.heads,
            "attn_implementation": "sdpa",
        }
        config = transformers.GPT2Config(**names, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        torch.manual_seed(0)
        with torch.device(options.device):
            return transformers.GPT2LMHeadModel(config).to(getattr(torch, options.dtype)).eval()

    def generate(model: Any, ids: torch.Tensor, start: float, **more: Any) -> list[Sample]:
        clock = Clock()
        settings = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
        processors = transformers.LogitsProcessorList([clock])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=processors, **settings, **more
        ).cpu()
        assert clock.first is not None
        seconds, tokens = time.perf_counter() - start, made.shape[1] - ids.shape[1]
        return [Sample(clock.first - start, seconds, tokens) for _ in range(len(ids))]

    def tensor(prompts: Any) -> torch.Tensor:
        return torch.tensor(prompts, device=options.device)

    found: dict[str, Any] = {"version": transformers.__version__, "batch": options.batch}
    if "requests" in options.parts:
        model = a_model(options.prompt + options.tokens)
        batches = tensor(prompts_of(options, options.requests, options.prompt, 2)).split(options.batch)
        model.generate(batches[0], attention_mask=torch.ones_like(batches[0]), max_new_tokens=4, do_sample=False)
        start = time.perf_counter()
        samples = [sample for batch in batches for sample in generate(model, batch, start)]
        found["requests"] = summarize(samples, time.perf_counter() - start)
        tell("transformers, requests:", **found["requests"])
    if "shared" in options.parts:
        model = a_model(options.context + options.question + options.tokens)
        context = tensor(prompts_of(options, 1, options.context, 3))
        start = time.perf_counter()
        cache = transformers.DynamicCache(config=model.config)
        for segment in context.split(2_048, dim=1):
            model(segment, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        batches = tensor(prompts_of(options, options.sharing, options.question, 5)).split(options.batch)
        samples = []
        start = time.perf_counter()
        for batch in batches:
            own = copy.deepcopy(cache)
            own.batch_repeat_interleave(len(batch))
            ids = torch.cat([context.expand(len(batch), -1), batch], dim=1)
            samples += generate(model, ids, start, past_key_values=own)
            del own
            tell("transformers, shared:", requests=len(samples), seconds=time.perf_counter() - start)
        found["shared"] = {"seconds_to_read": seconds, **summarize(samples, time.perf_counter() - start)}
    if options.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def measure_here(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"engine": measure_engine(options)}
    if options.transformers:
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found["transformers"] = measure_transformers(options)
        except Exception as error:  # noqa: BLE001 - a failure of another library must not lose our results
            found["transformers"] = {"error": f"{type(error).__name__}: {error}"[:500]}
        for part in options.parts:
            if part in found["transformers"]:
                speeds = [found[who][part]["tokens_per_second"] for who in ("engine", "transformers")]
                found[f"{part}: times as fast"] = speeds[0] / speeds[1]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    http, engine = kinds.add_parser("http"), kinds.add_parser("engine")
    for kind in (http, engine):
        kind.add_argument("--out", type=Path, help="JSON file to write")
    add = http.add_argument
    add("--url", help="of a server that runs, such as http://127.0.0.1:8000")
    add("--model", type=Path, help="folder to serve; by default random weights")
    add("--preset", default="byte-400k", help="of the random weights")
    add("--slots", type=int, default=64)
    add("--requests", type=int, default=64)
    add("--prompt", type=int, default=64, help="characters of a prompt")
    add("--tokens", type=int, default=64, help="tokens to generate")
    add("--contexts", type=int, nargs="*", default=[2_000, 200_000], help="characters of contexts, the shortest first")
    add("--questions", type=int, default=20, help="to each context")
    add = engine.add_argument
    add("--parts", nargs="+", default=["requests", "shared"], choices=["requests", "shared"])
    add("--requests", type=int, default=256)
    add("--prompt", type=int, default=512)
    add("--tokens", type=int, default=256)
    add("--sharing", type=int, default=64, help="requests that share a context")
    add("--context", type=int, default=65_536, help="its tokens")
    add("--question", type=int, default=32, help="tokens of a prompt after it")
    add("--slots", type=int, default=256)
    add("--batch", type=int, default=16, help="of transformers")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--vocabulary", type=int, default=50_257)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--dtype", help="by default bfloat16 on a GPU", choices=["bfloat16", "float32"])
    add("--no-transformers", dest="transformers", action="store_false", help="leave transformers' GPT-2 out")
    options = parser.parse_args()
    if options.kind == "engine":
        options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main() -> None:
    options = parse()
    result = measure_http(options) if options.kind == "http" else measure_here(options)
    print(json.dumps(result, indent=2), flush=True)
    if options.out:
        setting = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        versions = {name: installed_version(name) for name in ("transformers", "fastapi", "uvicorn")}
        device = "cpu" if options.kind == "http" else options.device
        save_results(options.out, {**environment(device), **versions}, setting=setting, **result)


if __name__ == "__main__":
    main()
