"""From a config to a trained model: `train(config, folder)`, and the command `sympow train`."""

from sympow.extras import require

require("numpy", "train")

from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig  # noqa: E402 - after the message
from sympow.train.trainer import train  # noqa: E402

__all__ = ["DataConfig", "OptimizerConfig", "RunConfig", "TrainConfig", "train"]
