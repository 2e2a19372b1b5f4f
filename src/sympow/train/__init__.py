"""From a config to a trained model: `train(config, folder)`, and the command `sympow train`."""

from typing import TYPE_CHECKING, Any

from sympow.extras import require

require("numpy", "train")

from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig  # noqa: E402 - after the message

if TYPE_CHECKING:
    from sympow.train.trainer import train

__all__ = ["DataConfig", "OptimizerConfig", "RunConfig", "TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    # Late: the trainer brings torch's distributed packages, which no other command should wait for.
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sympow.train.trainer import train

    return train
