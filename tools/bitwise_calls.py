"""Compares two versions of the operator bit by bit, call by call, on the device that is there.

    python tools/bitwise_calls.py store before.json --source OLD/src --device cuda
    python tools/bitwise_calls.py store after.json --source NEW/src --device cuda
    python tools/bitwise_calls.py compare before.json after.json

A call is one of `sympow.attention`, its gradients included, of a `Window`, of a layer or of a shard of a sequence, with
fixed random inputs. Each of its results is stored as a hash, and which kernels ran by name, so that the comparison also
shows whether a call took another way.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bitwise

Results = dict[str, Any]
GATES = {"none": None, "weak": 6.0, "strong": 0.0, "closed": 3.0}


def main() -> None:
    parser, store = bitwise.parsers(__doc__, "calls")
    store.add_argument("--only", default="", help="a part of the names of the calls to run")
    store.add_argument("--processes", type=int, default=1, help="that share the calls, since compiling takes longest")
    store.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        before, after = (json.loads(file.read_text("utf-8")) for file in arguments.files)
        sys.exit(differences(before, after))
    others = [] if arguments.share else range(1, arguments.processes)
    # A later --share counts.
    started = [subprocess.Popen([sys.executable, *sys.argv, "--share", str(other)]) for other in others]
    sys.path.insert(0, str(arguments.source.resolve()))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stored = {}
    for number, (name, call) in enumerate(calls(arguments.device)):
        if arguments.only in name and number % arguments.processes == arguments.share:
            stored[name] = run(call, arguments.device)
            print(name, *(digest[:8] for digest in stored[name]["results"].values()), flush=True)
    for other, process in zip(others, started, strict=True):
        if process.wait():
            sys.exit(f"process {other} ended with {process.returncode}")
        stored |= json.loads(share_of(arguments.file, other).read_text("utf-8"))
        share_of(arguments.file, other).unlink()
    share_of(arguments.file, arguments.share).write_text(json.dumps(stored, indent=1), "utf-8")


def share_of(file: Path, share: int) -> Path:
    """Where a process leaves its share of the results; the first one writes the file itself."""
    return file.with_name(f"{file.name}.{share}") if share else file


def differences(before: Results, after: Results) -> int:
    """Prints what differs and returns how many calls do."""
    differing = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = (stored.get(name, {"results": {}, "kernels": []}) for stored in (before, after))
        named = sorted(old["results"].keys() | new["results"].keys())
        changed = [key for key in named if old["results"].get(key) != new["results"].get(key)]
        if changed:
            print(f"{name}: DIFFERENT {', '.join(changed)}")
        if old["kernels"] != new["kernels"]:
            print(f"{name}: kernels {len(old['kernels'])} -> {len(new['kernels'])}: {new['kernels']}")
        differing += bool(changed)
    print(f"{len(before)} and {len(after)} calls, {differing} differ")
    return differing


def run(call: Callable[[], Results], device: str) -> Results:
    """Hashes of what a call returns, and the names of the package's kernels that it launched, in order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Some of torch's own operators add in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device != "cuda":
        return {"results": hashes(call()), "kernels": []}
    found = hashes(call())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = sorted((event for event in profiler.events() if event.device_type.name == "CUDA"),
                    key=lambda event: event.time_range.start)  # fmt: skip
    # Names of torch's kernels have brackets.
    return {"results": found, "kernels": [event.name for event in events if event.name.isidentifier()]}


def hashes(results: Results) -> dict[str, str]:
    import torch

    def digest(x: Any) -> str:
        x = x.detach().contiguous().cpu()
        shape = f"{x.dtype} {tuple(x.shape)}".encode()
        return hashlib.sha256(shape + x.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()

    return {name: digest(x) for name, x in results.items() if x is not None}


def calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    yield from attention_calls(device)
    yield from window_calls(device)
    yield from layer_calls(device)
    yield from shard_calls(device)


# sympow.attention ---------------------------------------------------------------------------------------------------


def attention_calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    for options in attention_options(device):
        name = " ".join(f"{key}={value}" for key, value in options.items())
        yield f"attention {name}", partial(call_attention, name, device, **options)


def attention_options(device: str) -> Iterator[dict[str, Any]]:
    """Engines, dtypes, forms, gates, documents and states; on a CPU fewer, and short ones."""
    if device != "cuda":
        for power, form, gates in itertools.product((2, 4), ("attention", "chunked", "recurrent", "auto"), GATES):
            yield {"power": power, "form": form, "gates": gates, "length": 70, "dim": 16, "states": True}
        for dtype in ("float64", "float32", "bfloat16", "float16"):
            yield {"dtype": dtype, "length": 90, "dim": 16, "rotation": "scaled", "documents": True}
        yield {"form": "auto", "gates": "pairs", "rotation": "scaled", "length": 90, "dim": 16, "states": True}
        return
    for dtype, dim, gates in itertools.product(("bfloat16", "float16", "float32"), (32, 64, 128), ("none", "weak")):
        yield {"dtype": dtype, "dim": dim, "gates": gates}
        yield {"dtype": dtype, "dim": dim, "gates": gates, "form": "chunked", "length": 2500, "rotation": "scaled"}
    for dtype, power in itertools.product(("bfloat16", "float16", "float32"), (4, 8)):
        yield {"dtype": dtype, "power": power, "backend": "triton"}
    for dtype, gates in itertools.product(("bfloat16", "float16", "float32"), ("strong", "closed")):
        yield {"dtype": dtype, "gates": gates, "rotation": "fixed"}
        yield {"dtype": dtype, "gates": gates, "form": "chunked", "length": 1700, "states": True}
    for dtype, dim in itertools.product(("bfloat16", "float16", "float32"), (64, 128)):
        yield {"dtype": dtype, "dim": dim, "documents": True, "rotation": "scaled"}
        yield {"dtype": dtype, "dim": dim, "documents": True, "form": "chunked", "length": 2500}
        yield {"dtype": dtype, "dim": dim, "states": True, "rotation": "scaled", "length": 2500}
        yield {"dtype": dtype, "dim": dim, "states": True, "form": "attention"}
        yield {"dtype": dtype, "dim": dim, "length": 700, "form": "chunked"}
    for dim, value_dim in ((48, 48), (64, 32), (80, 80), (96, 128), (16, 16)):
        yield {"dim": dim, "value_dim": value_dim, "rotation": "fixed"}
        yield {"dim": dim, "value_dim": value_dim, "form": "chunked", "length": 2500}
    for length in (9000, 17_000):
        yield {"length": length, "heads": 2, "kv_heads": 1, "form": "attention", "rotation": "fixed"}
        yield {"length": length, "heads": 2, "kv_heads": 1, "form": "attention", "dim": 128}
    for dtype, form in itertools.product(("bfloat16", "float32"), ("attention", "chunked")):
        yield {"dtype": dtype, "power": 4, "dim": 16, "form": form, "length": 9000, "heads": 2, "kv_heads": 1}
        yield {"dtype": dtype, "power": 4, "dim": 32, "form": form, "length": 6000, "states": True}
    for form in ("attention", "chunked"):
        yield {"gates": "pairs", "form": form, "length": 1500, "rotation": "scaled"}
        yield {"gates": "pairs", "form": form, "length": 2500, "states": True}
    for dtype in ("bfloat16", "float32"):
        yield {"dtype": dtype, "states": True, "length": 1}
        yield {"dtype": dtype, "backend": "torch", "length": 300, "states": True, "rotation": "scaled"}
    yield {"heads": 12, "kv_heads": 12, "batch": 8, "length": 1024, "rotation": "scaled"}


def call_attention(
    name: str,
    device: str,
    *,
    dtype: str = "bfloat16",
    power: int = 2,
    form: str = "auto",
    backend: str = "auto",
    gates: str = "weak",
    rotation: str = "none",
    length: int = 1500,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    documents: bool = False,
    states: bool = False,
) -> Results:
    """Output, last state and every gradient; and the output without gradients, which may take another way."""
    import torch

    import sympow

    value_dim = value_dim or dim
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    def on_device(x: Any, dtype: Any = None) -> Any:
        return x.to(device, dtype).requires_grad_()

    # Of length about 1, so that float16 holds every score.
    kind = getattr(torch, dtype)
    inputs = {
        "q": on_device(normal(batch, length, heads, dim) / dim**0.5, kind),
        "k": on_device(normal(batch, length, kv_heads, dim), kind),
        "v": on_device(normal(batch, length, kv_heads, value_dim), kind),
    }
    shift = GATES.get(gates, 6.0)
    if shift is not None:
        per_pair = (dim // 2,) if gates == "pairs" else ()
        log_gamma = torch.nn.functional.logsigmoid(normal(batch, length, kv_heads, *per_pair) + shift)
        if gates == "closed":
            log_gamma[normal(batch, length, kv_heads) > 2] = -torch.inf
        inputs["log_gamma"] = on_device(log_gamma)
    if rotation != "none":
        inputs["theta"] = on_device(sympow.rotary_rates(dim, 65_536))
    if rotation == "scaled":
        inputs["beta"] = on_device(2 * torch.rand(batch, length, kv_heads, generator=generator))
    options: dict[str, Any] = {"power": power, "form": form, "backend": backend}
    if documents:
        cuts = [0, length // 7, length // 3, length // 3 + 1, length]
        options["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32, device=device)
    if states:
        rotated = rotation != "none"
        before = sympow.State.zeros(batch, kv_heads, dim, value_dim, power, rotated=rotated, device=device)
        # The state of a few tokens: a state of random entries is none of any keys.
        keys, values = (normal(batch, 50, kv_heads, n).to(device) for n in (dim, value_dim))
        theta = inputs["theta"].detach() if rotated else None
        _, before = sympow.attention(keys, keys, values, power, theta=theta, return_state=True, backend="torch",
                                     initial_state=before)  # fmt: skip
        inputs["kv"], inputs["normalizer"] = (x.detach().requires_grad_() for x in (before.kv, before.normalizer))
        options["return_state"] = True

    def attend(tensors: dict[str, Any]) -> Results:
        tensors = dict(tensors)
        if states:
            kv, normalizer = tensors.pop("kv"), tensors.pop("normalizer")
            tensors["initial_state"] = sympow.State(kv, normalizer, before.phase, power=power, key_dim=dim)
        found = sympow.attention(**tensors, **options)
        if not states:
            return {"y": found}
        y, after = found
        return {"y": y, "after_kv": after.kv, "after_normalizer": after.normalizer, "after_phase": after.phase}

    with torch.no_grad():
        alone = attend(inputs)
    found = attend(inputs)
    loss = sum((x.float() * normal(*x.shape).to(device)).sum() for name, x in found.items()
               if x is not None and name != "after_phase")  # fmt: skip
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {
        **found,
        **{f"{name} without gradients": x for name, x in alone.items()},
        **{f"d {name}": x for name, x in zip(inputs, gradients, strict=True)},
    }


# What is built on it ------------------------------------------------------------------------------------------------


def window_calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    import torch

    from sympow import Window

    def steps(dtype: Any, dim: int, power: int) -> Results:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).to(device, dtype)

        window = Window.empty(2, 2, dim, dim, power, capacity=8, rotated=False, dtype=dtype, device=device)
        outputs = []
        for _ in range(20):
            gate = torch.nn.functional.logsigmoid(normal(2, 1, 2).float() + 4)
            outputs.append(window.step(normal(2, 1, 4, dim), normal(2, 1, 2, dim), normal(2, 1, 2, dim), gate))
            window.fold(only_full=True)
        state = window.close()
        return {"y": torch.cat(outputs, 1), "kv": state.kv, "normalizer": state.normalizer}

    kinds = ("bfloat16", "float16", "float32") if device == "cuda" else ("float32",)
    for dtype, (dim, power) in itertools.product(kinds, ((64, 2), (16, 4))):
        yield f"window {dtype} dim={dim} power={power}", partial(steps, getattr(torch, dtype), dim, power)


def layer_calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    import torch

    from sympow.layers import ConformalAttention, SoftmaxAttention

    def train(layer_type: Any, dtype: Any) -> Results:
        torch.manual_seed(3)
        layer = layer_type(128, 4).to(device)
        x = torch.randn(2, 300, 128, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            y, _ = layer(x)
        y.float().square().sum().backward()
        return {"y": y, "dx": x.grad, **{f"d {name}": p.grad for name, p in layer.named_parameters()}}

    for layer_type, dtype in itertools.product((ConformalAttention, SoftmaxAttention), (torch.float32, torch.bfloat16)):
        yield f"layer {layer_type.__name__} {dtype}", partial(train, layer_type, dtype)


def shard_calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Context parallelism with a group of one rank, whose kernels are those of shards."""
    import torch
    import torch.distributed as dist

    import sympow
    from sympow.parallel import Shards
    from sympow.parallel import attention as sharded_attention

    def attend(dim: int) -> Results:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Any:
            return torch.randn(1, 2500, *shape, generator=generator).to(device)

        kind = torch.bfloat16 if device == "cuda" else torch.float32
        inputs = {
            "q": normal(4, dim).to(kind),
            "k": normal(2, dim).to(kind),
            "v": normal(2, dim).to(kind),
            "log_gamma": torch.nn.functional.logsigmoid(normal(2) + 6),
        }
        for x in inputs.values():
            x.requires_grad_()
        theta = sympow.rotary_rates(dim, 65_536, device=device)
        assert dist.group.WORLD is not None
        y = sharded_attention(**inputs, theta=theta, shards=Shards(dist.group.WORLD, (2500,)))
        gradients = torch.autograd.grad(y.float().square().sum(), list(inputs.values()))
        return {"y": y, **{f"d {name}": x for name, x in zip(inputs, gradients, strict=True)}}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    for dim in (32, 64, 128) if device == "cuda" else (32,):
        yield f"shard dim={dim}", partial(attend, dim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
