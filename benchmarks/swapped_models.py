"""Speed and memory of pretrained models' shapes with swapped attention, beside the softmax original, on one GPU.

    python benchmarks/swapped_models.py --out benchmarks/results/h200_swapped_models.json

Qwen3-0.6B and Llama-3.2-1B as transformers builds them from configs, with random weights in bfloat16: as they are,
with `scaled_dot_product_attention`, and with all attention swapped for symmetric power attention (`swap_attention`,
p = 2, scalar gates); with --hybrid also with every other layer swapped.

forward   features of --tokens tokens in sequences of the context's length, and the logits of each last one
train     a step on as many tokens: gradient checkpointing, loss over parts of the logits, AdamW
generate  --batch prompts of the context's length are read by one call, then `generate` decodes --new tokens; swapped
          models also decode with `sympow.hf.SwappedGPT`, whose steps are CUDA graphs, after the same prompts

Models are used one after another, since they share the GPU's memory; every time is the median of --runs after one call
that compiles. Peak memory includes the model. What does not fit is reported as such. With --part, --model and --context
a run takes part of the time; rows of earlier runs in --out are kept unless they are measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from sympow.check.operator import progress_bar
from sympow.check.timing import environment, save_results
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.hf import StateLayer, SwappedGPT, swap_attention, swapped_layers
from sympow.model.losses import linear_cross_entropy
from sympow.ops.window_batch import CAPACITY

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
# Model types and configs, as published with the models but for max_position_embeddings, which is 40,960 and 131,072
# there: room for the longest context measured and for tokens after it. It changes neither weights nor rotation rates.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 1_024,
            "intermediate_size": 3_072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2_048,
            "intermediate_size": 8_192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 262_144,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    # For a try on a CPU.
    "tiny": (
        "qwen3",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
}
SWAPPED = {"swapped": "all", "hybrid": "every-other"}
PARTS = ("forward", "train", "generate")


def make_model(options: argparse.Namespace, name: str, variant: str) -> Any:
    model_type, sizes = MODELS[name]
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, **sizes, **no_tokens)
    config.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation="sdpa")
    if variant in SWAPPED:
        swap_attention(model, power=options.power, layers=SWAPPED[variant])  # type: ignore[arg-type]
    return model.eval()


def random_tokens(options: argparse.Namespace, model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device=options.device)


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def time_calls(options: argparse.Namespace, call: Callable[[], Any], runs: int) -> list[float]:
    """Seconds of each of `runs` calls, after one that is not counted."""
    seconds = []
    for number in range(runs + 1):
        synchronize(options)
        start = time.perf_counter()
        call()
        synchronize(options)
        if number:
            seconds.append(time.perf_counter() - start)
    return seconds


def time_forward(options: argparse.Namespace, model: Any, context: int) -> dict[str, Any]:
    batch = max(1, options.tokens // context)
    ids = random_tokens(options, model, batch, context)

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    return speed(batch * context, time_calls(options, forward, options.runs), batch)


def time_training(options: argparse.Namespace, model: Any, context: int) -> dict[str, Any]:
    batch = max(1, options.tokens // context)
    ids = random_tokens(options, model, batch, context + 1)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    weight: nn.Parameter = model.get_output_embeddings().weight

    def step() -> None:
        features = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        # Not the model's own loss, whose logits of all tokens would take more memory than all else.
        linear_cross_entropy(features, weight, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return speed(batch * context, time_calls(options, step, options.runs), batch)


@torch.no_grad()
def time_generation(options: argparse.Namespace, model: Any, context: int) -> dict[str, Any]:
    ids = random_tokens(options, model, options.batch, context)
    reading, decoding, held = [], [], 0
    for number in range(options.runs + 1):
        cache = None
        synchronize(options)
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        synchronize(options)
        read = time.perf_counter()
        cache = out.past_key_values
        del out
        # A try first, which compiles kernels for one token.
        text = torch.cat([ids, token], dim=1)
        for new in (4, options.new):
            synchronize(options)
            begun = time.perf_counter()
            text = model.generate(
                text,
                attention_mask=torch.ones_like(text),
                past_key_values=cache,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
            )
            synchronize(options)
        if number:
            reading.append(read - start)
            decoding.append(time.perf_counter() - begun)
        held = cache_bytes(cache)
    per_token = statistics.median(decoding) / options.new
    del cache
    captured = time_captured_steps(options, model, ids) if all_swapped(model) else {}
    return {
        "batch": options.batch,
        "seconds_to_read": statistics.median(reading),
        "tokens_per_second_reading": options.batch * context / statistics.median(reading),
        "tokens_per_second": options.batch / per_token,
        "milliseconds_per_step": 1e3 * per_token,
        "cache_bytes": held,
        "runs": len(reading),
        **captured,
    }


def all_swapped(model: Any) -> bool:
    """Whether all layers were swapped."""
    return len(swapped_layers(model)) == model.config.num_hidden_layers


def time_captured_steps(options: argparse.Namespace, model: Any, ids: Tensor) -> dict[str, Any]:
    """Decoding by sympow's own decoder."""
    gpt = SwappedGPT(model)
    prefix = Prefix.prefill(gpt, ids, cache_policy="state")
    seconds = []
    for _ in range(options.runs):
        decoder = Decoder(gpt, prefix, cache_policy="state")
        token = prefix.logits.argmax(-1)
        # A try first, in which steps and a fold are captured.
        for new in (CAPACITY + 4, options.new):
            synchronize(options)
            start = time.perf_counter()
            for _ in range(new):
                token = decoder.step(token).argmax(-1)
            synchronize(options)
        seconds.append(time.perf_counter() - start)
        # Before the next one is made, whose states would need as much memory again.
        del decoder
    per_token = statistics.median(seconds) / options.new
    return {"captured_tokens_per_second": options.batch / per_token, "captured_milliseconds_per_step": 1e3 * per_token}


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            total += layer.nbytes
        else:
            total += sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
    return total


def speed(tokens: int, seconds: list[float], batch: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "batch": batch,
        "tokens_per_second": tokens / median,
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "runs": len(seconds),
    }


TIMERS = {"forward": time_forward, "train": time_training, "generate": time_generation}


def clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(options: argparse.Namespace, part: str, name: str, variant: str, context: int) -> dict[str, Any]:
    """One row. A model is made anew for each, so that a failure leaves nothing behind."""
    row: dict[str, Any] = {"part": part, "model": name, "variant": variant, "context": context}
    clean_up()
    try:
        row |= TIMERS[part](options, make_model(options, name, variant), context)
    except torch.OutOfMemoryError as error:
        row["error"] = f"out of memory: {error}"[:200]
    if options.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def measure_all(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    variants = ("softmax", "swapped", *(["hybrid"] if options.hybrid else []))
    calls = [
        (part, name, variant, context)
        for part in options.part
        for name in options.model
        for context in options.context
        for variant in variants
    ]
    with progress_bar() as show:
        for call in calls:
            show(" ".join(map(str, call)), len(calls))
            row = measure(options, *call)
            print(json.dumps(row), flush=True)
            keep(row)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file to write, after every row")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS))
    add("--model", nargs="+", choices=list(MODELS), default=["qwen3-0.6b", "llama-3.2-1b"])
    add("--context", type=int, nargs="+", default=[4_096, 32_768, 131_072], help="tokens of a sequence")
    add("--tokens", type=int, default=131_072, help="tokens of a call of forward and train")
    add("--batch", type=int, default=4, help="sequences of generate")
    add("--new", type=int, default=64, help="tokens that generate decodes")
    add("--power", type=int, default=2)
    add("--runs", type=int, default=3)
    add("--hybrid", action="store_true", help="also swap only every other layer")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--dtype", help="by default bfloat16 on a GPU", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main() -> None:
    options = parse()
    setting = {name: getattr(options, name) for name in ("tokens", "batch", "new", "power", "dtype")}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("part", "model", "variant", "context"))

    if options.out and options.out.is_file():
        before = json.loads(options.out.read_text())
        if before["setting"] != setting:
            raise SystemExit(f"{options.out} has rows of another setting, {before['setting']}: choose another --out")
        rows = {key(row): row for row in before["rows"]}

    def keep(row: dict[str, Any]) -> None:
        rows[key(row)] = row
        if options.out:
            found = {**environment(options.device), "transformers": transformers.__version__}
            save_results(options.out, found, setting=setting, rows=list(rows.values()))

    measure_all(options, keep)


if __name__ == "__main__":
    main()
