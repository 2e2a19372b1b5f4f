"""Generation throughput and memory by the number of tokens before: conformal, p = 2, beside softmax, on one GPU.

    python benchmarks/generation_throughput.py --out benchmarks/results/h200_generation.json

The paper's 124M model with random weights in bfloat16, batch 16, decodes greedily with
`sympow.generation.sampling.generate`. The time is what a user gets: the model in CUDA graphs, sampling, and the copy of
every token to the host.

conformal     random tokens prefilled in segments; states with windows of 64 tokens
softmax       the same model with fixed RoPE and no gates, and a static cache of random keys and values
transformers  GPT-2 with a static cache of random keys and values, captured as a CUDA graph, or compiled with --compile;
              a failure is reported and does not end the benchmark

All are prepared first; then their samples are interleaved, so that the GPU's clock affects all alike. A sample is 64
tokens, so that each includes one fold of the windows; softmax has no folds, and shorter samples. Peak memory is
measured beyond the model and the prompt: of prefilling a prompt in segments of --piece tokens and generating, and of
generating alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sympow import GPT, GPTConfig
from sympow.check.timing import environment, save_results
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.model.config import VARIANTS
from sympow.ops.torch.softmax import KeyValueState
from sympow.ops.window_batch import CAPACITY

GREEDY = Sampling(temperature=0)
TIMED = ("conformal", "softmax")
# Tokens before the first sample. The second fold of a window is captured, and all later ones are replayed.
WARM_UP = {"conformal": 3 * CAPACITY, "softmax": 8, "transformers": 4}
# Tokens of a sample: as many as a window holds, so that each sample has one fold.
SAMPLE = {"conformal": CAPACITY, "softmax": 16, "transformers": 8}


def make_model(options: argparse.Namespace, variant: str) -> GPT:
    shape = {"vocab_size": options.vocabulary, "layers": options.layers, "width": options.width, "heads": options.heads}
    torch.manual_seed(0)
    with torch.device(options.device):
        model = GPT(GPTConfig(**{**shape, **VARIANTS[variant]}))
    return model.to(getattr(torch, options.dtype)).eval()


def random_tokens(options: argparse.Namespace, length: int) -> Tensor:
    return torch.randint(options.vocabulary, (options.batch, length), device=options.device)


@torch.no_grad()
def random_cache(model: GPT, options: argparse.Namespace, length: int) -> Prefix:
    """A prefix of a softmax model with random keys and values; their content does not affect the timing."""
    shape = model.config.head_shape
    size = (options.batch, length, shape.key_value_heads, shape.head_dim)
    dtype = model.embedding.weight.dtype
    layers = []
    for _ in range(options.layers):
        k, v = (torch.randn(size, device=options.device, dtype=dtype) for _ in range(2))
        phase = torch.zeros(*size[::2], shape.head_dim // 2, dtype=torch.float64, device=options.device)
        layers.append(KeyValueState(k, v, None, phase))
    logits = torch.randn(options.batch, options.vocabulary, device=options.device)
    return Prefix(logits, tuple(layers), length, torch.zeros_like(logits, dtype=torch.bool))


@dataclass
class Generation:
    """A generation in progress.

    Attributes:
        row: the entries of its row that are known before timing.
        tokens: yields one token per sequence at a time.
        sample: number of tokens of a sample.
        kept: objects that a captured graph reads and writes, which must live as long as the graph.
    """

    row: dict[str, Any]
    tokens: Iterator[Any]
    sample: int
    kept: tuple[Any, ...] = ()
    speeds: list[float] = field(default_factory=list)

    def time_sample(self, batch: int) -> None:
        start = time.perf_counter()
        for _ in range(self.sample):
            next(self.tokens)
        self.speeds.append(batch * self.sample / (time.perf_counter() - start))

    def as_row(self, batch: int) -> dict[str, Any]:
        median = statistics.median(self.speeds)
        return {
            **self.row,
            "tokens_per_second": median,
            "milliseconds_per_step": 1e3 * batch / median,
            "spread": (max(self.speeds) - min(self.speeds)) / median,
            "samples": len(self.speeds),
            "tokens_per_sample": self.sample,
        }


def start_generation(options: argparse.Namespace, variant: str, context: int) -> Generation:
    model = make_model(options, variant)
    start = time.perf_counter()
    if variant == "softmax":
        prefix = random_cache(model, options, context)
    else:
        text = random_tokens(options, context)
        prefix = Prefix.prefill(model, text, segment_size=options.read_piece, cache_policy="state")
    synchronize(options.device)
    seconds_to_read = time.perf_counter() - start
    warm_up, sample = WARM_UP[variant], SAMPLE[variant]
    total = warm_up + sample * options.runs
    cache_policy = "state" if variant == "conformal" else "auto"
    tokens = generate(model, total, GREEDY, prefix=prefix, cache_policy=cache_policy)  # type: ignore[arg-type]
    bytes_held = prefix.nbytes
    next(tokens)  # the decoder has its own copy now
    del prefix
    for _ in range(warm_up - 1):
        next(tokens)
    row = {"what": variant, "context": context, "bytes_held": bytes_held, "seconds_to_read": seconds_to_read}
    return Generation(row, tokens, sample)


def start_transformers(options: argparse.Namespace, context: int) -> Generation:
    """GPT-2 of the same size in transformers."""
    import transformers

    total = WARM_UP["transformers"] + SAMPLE["transformers"] * options.runs + 8
    names: dict[str, Any] = {
        "vocab_size": options.vocabulary,
        "n_positions": context + total,
        "n_embd": options.width,
        "n_layer": options.layers,
        "n_head": options.heads,
        "attn_implementation": "sdpa",
    }
    config = transformers.GPT2Config(**names, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.GPT2LMHeadModel(config).to(getattr(torch, options.dtype)).eval()
    cache: Any = transformers.StaticCache(config=config, max_cache_len=context + total)
    token = torch.zeros(options.batch, 1, dtype=torch.int64, device=options.device)
    position = torch.full((1, 1), context, dtype=torch.int64, device=options.device)
    forward: Callable[..., Any] = model
    if options.compile:
        forward = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def step() -> None:
        logits = forward(
            input_ids=token, past_key_values=cache, position_ids=position, use_cache=True, logits_to_keep=1
        ).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    with torch.no_grad():  # the first call allocates the keys and values
        model(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        if isinstance(layer.cumulative_length, Tensor):
            layer.cumulative_length.fill_(context)
        else:
            layer.cumulative_length = context
    run: Callable[[], Any] = step
    step()
    if options.device == "cuda" and not options.compile:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay

    def tokens() -> Iterator[Any]:
        while True:
            run()
            yield token.cpu()

    made = tokens()
    for _ in range(WARM_UP["transformers"]):
        next(made)
    how = "compiled" if options.compile else "captured as a CUDA graph" if options.device == "cuda" else "plain"
    row = {"what": "transformers", "context": context, "version": transformers.__version__, "how": how}
    return Generation(row, made, SAMPLE["transformers"], kept=(model, cache, position))


def peak_memory(options: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """Peak bytes beyond the model and the prompt; CUDA only."""
    model, tokens = make_model(options, "conformal"), random_tokens(options, prompt)
    clean_up()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = generate(model, 2 * CAPACITY, GREEDY, prompt=tokens, segment_size=options.piece, cache_policy="state")
    next(made)
    prefill_and_first = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    count = 1 + sum(1 for _ in made)
    generating = torch.cuda.max_memory_allocated() - before
    assert count == 2 * CAPACITY
    return {"prompt": prompt, "peak_bytes": max(prefill_and_first, generating), "peak_bytes_generating": generating}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    started, rows = [], []
    for variant in (*TIMED, *(["transformers"] if options.transformers else [])):
        for context in options.contexts:
            clean_up()
            if variant == "transformers":
                try:
                    started.append(start_transformers(options, context))
                except Exception as error:  # noqa: BLE001 - a failure of another library must not lose our results
                    said = f"{type(error).__name__}: {error}"[:500]
                    rows.append({"what": variant, "context": context, "error": said})
            else:
                started.append(start_generation(options, variant, context))
            print(f"{variant} at {context:,}", flush=True)
    for _ in range(options.runs):
        for generation in started:
            generation.time_sample(options.batch)
    rows = [*(generation.as_row(options.batch) for generation in started), *rows]
    for row in rows:
        print(json.dumps(row), flush=True)
    del started
    memory = []
    if options.device == "cuda":
        for prompt in options.prompts:
            clean_up()
            memory.append(peak_memory(options, prompt))
            print(json.dumps(memory[-1]), flush=True)
    return {"rows": rows, "memory": memory, "summary": summarize(rows, memory, options.contexts)}


def summarize(rows: list[dict[str, Any]], memory: list[dict[str, Any]], contexts: list[int]) -> dict[str, float]:
    """Ratios of the longest context or prompt to the shortest, and of conformal to softmax."""
    speed = {(row["what"], row["context"]): row["tokens_per_second"] for row in rows if "error" not in row}
    first, last = contexts[0], contexts[-1]
    baselines = [speed[key] for key in speed if key[1] == last and key[0] != "conformal"]
    summary = {
        "speed at the longest context over that at the shortest": speed["conformal", last] / speed["conformal", first],
        "times as fast as the faster softmax at the longest context": speed["conformal", last] / max(baselines),
    }
    for name in ("peak_bytes", "peak_bytes_generating"):
        if memory:
            summary[f"{name} after the longest prompt over the shortest"] = memory[-1][name] / memory[0][name]
    return summary


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file to write")
    add("--contexts", type=int, nargs="+", default=[1_024, 65_536], help="tokens before those that are timed")
    add(
        "--prompts",
        type=int,
        nargs="+",
        default=[1_000, 100_000],
        help="prompt lengths to measure peak memory with, on a GPU",
    )
    add("--piece", type=int, default=500, help="tokens per prefill segment of those prompts")
    add("--read-piece", type=int, default=4_096, help="tokens per prefill segment of a context")
    add("--batch", type=int, default=16)
    add("--layers", type=int, default=12)
    add("--width", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--vocabulary", type=int, default=50_257)
    add("--runs", type=int, default=7, help="samples")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--dtype", help="by default bfloat16 on a GPU", choices=["bfloat16", "float32"])
    add("--compile", action="store_true", help="compile transformers' model instead of capturing it")
    add("--no-transformers", dest="transformers", action="store_false", help="leave transformers' GPT-2 out")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main() -> None:
    options = parse()
    result = measure_all(options)
    print(json.dumps(result["summary"], indent=2), flush=True)
    if options.out:
        names = ("batch", "layers", "width", "heads", "vocabulary", "dtype", "piece", "read_piece")
        setting = {name: getattr(options, name) for name in names}
        save_results(options.out, environment(options.device), setting=setting, **result)


if __name__ == "__main__":
    main()
