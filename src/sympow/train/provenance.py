"""The data that a model was trained on, recorded in its folder: evaluation finds the held-out documents again by it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sympow.data.dataset import TokenDataset
from sympow.data.manifest import MANIFEST_FILE
from sympow.data.opening import STANDARD_LIBRARY, names_a_folder, open_dataset
from sympow.data.tokenizer import Tokenizer
from sympow.files import write_atomically
from sympow.parsing import read_json, read_yaml
from sympow.train.config import DataConfig
from sympow.train.run_folder import CONFIG_FILE, EXPORT

FILE = "training_data.json"


@dataclass(frozen=True)
class TrainedOn:
    """What a model was trained on, and how it read it.

    Attributes:
        data: as the user named it; None: the run was given a dataset of its own, which has no name to open it by.
        folder: its absolute path, if it is a folder of this machine; a run may be evaluated from elsewhere.
        context: tokens of a training sequence.
        short: what became of shorter documents.
        tokenizer: its kind, such as "bytes".
        fingerprint: of the training documents, to notice that the data was changed.
        name: what the dataset calls itself.
    """

    data: str | None
    folder: str | None
    context: int
    short: str
    tokenizer: str | None = None
    fingerprint: str | None = None
    name: str | None = None

    @classmethod
    def of_run(cls, config: DataConfig, dataset: TokenDataset, tokenizer: Tokenizer, *, named: bool) -> TrainedOn:
        """Of a run.

        Args:
            named: whether the dataset is the one that the config names.
        """
        folder = Path(config.data)
        return cls(
            config.data if named else None,
            str(folder.resolve()) if named and names_a_folder(config.data) else None,
            config.context,
            config.short,
            tokenizer.kind,
            dataset.fingerprint,
            dataset.name,
        )

    @classmethod
    def find(cls, model: Path | str) -> TrainedOn | None:
        """Of a model's folder: as recorded there, or by the config of the run that it lies in; None: nobody knows."""
        model = Path(model)
        if (model / FILE).is_file():
            return cls._read(model / FILE)
        config = model.resolve().parent / CONFIG_FILE
        if model.resolve().name != EXPORT or not config.is_file():
            return None
        content = read_yaml(config)
        section = content.get("data") if isinstance(content, dict) else None
        if not isinstance(section, dict | None):
            raise ValueError(f"{config}: data must map fields to values, got {type(section).__name__}")
        known = {field.name for field in fields(DataConfig)}
        try:
            data = DataConfig(**{name: value for name, value in (section or {}).items() if name in known})
        except TypeError as error:
            raise ValueError(f"{config}: {error}") from error
        # Where a relative path began was not recorded.
        return cls(data.data, None, data.context, data.short)

    def save(self, model: Path) -> None:
        write_atomically(model / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @property
    def source(self) -> str:
        """What to open: as the user named it, if that is the same folder from here, or else the folder itself.

        Where that is gone, what has its name from here: run and data may have moved together.

        Raises:
            ValueError: the data has no name, or its folder is not there any more.
        """
        if self.data is None:
            raise ValueError(
                f"the model was trained on {self.name}, a dataset that a program made and nothing can open"
            )
        if not names_a_folder(self.data):
            return self.data
        moved = self.folder is None or not Path(self.folder).exists()
        if Path(self.data).exists() and (moved or str(Path(self.data).resolve()) == self.folder):
            return self.data
        if self.folder is not None and not moved:
            return self.folder
        where = f"{self.folder} is not there any more" if self.folder else "there is no such folder here"
        raise ValueError(f"the model was trained on {self.data}, and {where}")

    def changed(self) -> bool:
        """Whether the data is not what the model was trained on: documents held out now may be among those it learned.

        Looked at only where it is quick to see: of the standard library and of prepared folders.
        """
        prepared = (Path(self.source) / MANIFEST_FILE).is_file()
        if self.fingerprint is None or not (prepared or self.source == STANDARD_LIBRARY):
            return False
        return open_dataset(self.source).fingerprint != self.fingerprint

    @classmethod
    def _read(cls, path: Path) -> TrainedOn:
        content: Any = read_json(path)
        try:
            return cls(**content)
        except TypeError as error:
            raise ValueError(f"{path} does not say what a model was trained on: {error}") from error
