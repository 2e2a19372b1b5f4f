"""Numbers of a run: a JSONL file always, TensorBoard events and Weights & Biases if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from sympow.extras import require


class Writer(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line per step, flushed, so that a killed run has all of them; a resumed one goes on after its checkpoint."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        # Steps after the checkpoint will be made again.
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_at] if path.exists() else []
        self._file = path.open("w")
        self._file.writelines(json.dumps(line) + "\n" for line in kept)
        self._file.flush()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path, resumed_at: int) -> None:
        module = require("torch.utils.tensorboard", "train")
        # What a killed run wrote after its checkpoint is hidden.
        self._writer = module.SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        self._run = wandb.init(project=project, dir=str(folder), name=folder.name, config=config, resume="allow")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; without the last one, if it was cut off."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.endswith("}")]
