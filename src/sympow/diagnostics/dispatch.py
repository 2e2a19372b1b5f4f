"""Which code serves which call of `sympow.attention` on a machine, and why the kernels do not serve the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sympow.ops.dispatch import Request, auto_uses_torch_reason


@dataclass(frozen=True)
class Route:
    """What serves a call.

    Attributes:
        call: the call, in words.
        served_by: "Hopper kernels", "Triton kernels" or "PyTorch".
        reason: why not by the kernels; None: they serve it.
    """

    call: str
    served_by: str
    reason: str | None


# What models are made of: the paper's heads, those of today's models, and what people ask about.
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
    "float32, p = 2, heads of 64": Request("", torch.float32, 2, 64, 64),
}


def routes(device: str) -> list[Route]:
    """What serves each of `CALLS` on a device with backend="auto"."""
    return [_route(call, replace(request, device=device)) for call, request in CALLS.items()]


def _route(call: str, request: Request) -> Route:
    reason = auto_uses_torch_reason(request)
    if reason is not None:
        return Route(call, "PyTorch", reason)
    return Route(call, "Hopper kernels" if _on_hopper(request) else "Triton kernels", None)


def _on_hopper(request: Request) -> bool:
    from sympow.kernels import hopper

    if request.form == "chunked" or request.step:
        return False
    q, v = (
        torch.empty(1, 1, 1, dim, dtype=request.dtype, device=request.device)
        for dim in (request.key_dim, request.value_dim)
    )
    return hopper.supports(q, q, v)
