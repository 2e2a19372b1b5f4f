"""Training: `train(config, folder)`, and the command `sympow train`.

Names are imported lazily: the trainer imports torch.distributed, which other commands should not wait for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sympow.extras import require

if TYPE_CHECKING:
    from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
    from sympow.train.trainer import train

__all__ = ["DataConfig", "OptimizerConfig", "RunConfig", "TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("numpy", "train")
    return getattr(import_module(f"{__name__}.{'trainer' if name == 'train' else 'config'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
