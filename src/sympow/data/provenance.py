"""`training_data.json` of a model: which data it was trained on, so that evaluation finds the held-out documents."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sympow.data.dataset import TokenDataset
from sympow.data.manifest import MANIFEST_FILE
from sympow.data.open import names_a_folder, open_dataset
from sympow.data.standard_library import STANDARD_LIBRARY
from sympow.data.tokenizer import Tokenizer
from sympow.errors import UserError
from sympow.files import write_atomically
from sympow.parsing import read_json

FILE = "training_data.json"


@dataclass(frozen=True)
class TrainedOn:
    """The data that a model was trained on.

    Attributes:
        data: as the user named it; None: a dataset object was passed to `train`, which has no name to open it by.
        folder: its absolute path, if it is a local folder; a run may be evaluated from another working directory.
        context: tokens of a training sequence.
        short: how shorter documents were treated.
        tokenizer: its kind, such as "bytes".
        fingerprint: of the training documents, to detect changed data.
        name: what the dataset calls itself.
    """

    data: str | None
    folder: str | None
    context: int
    short: str
    tokenizer: str
    fingerprint: str
    name: str

    @classmethod
    def of_run(
        cls, data: str | None, dataset: TokenDataset, tokenizer: Tokenizer, *, context: int, short: str
    ) -> TrainedOn:
        """Of a run; the arguments are the attributes of these names, or have them."""
        return cls(
            data,
            str(Path(data).resolve()) if data is not None and names_a_folder(data) else None,
            context,
            short,
            tokenizer.kind,
            dataset.fingerprint,
            dataset.name,
        )

    @classmethod
    def find(cls, model: Path | str) -> TrainedOn | None:
        """Of a model folder; None: it does not say, as after a conversion of formats."""
        path = Path(model) / FILE
        if not path.is_file():
            return None
        content: Any = read_json(path)
        names = [field.name for field in fields(cls)]
        if not isinstance(content, dict) or content.keys() - set(names):
            raise UserError(f"{path} must say what a model was trained on, by {', '.join(names)}")
        if missing := [name for name in names if name not in content]:
            raise UserError(f"{path} lacks {', '.join(missing)}")
        return cls(**content)

    def save(self, model: Path) -> None:
        write_atomically(model / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @property
    def source(self) -> str:
        """What to open: the user's name, if it is the same folder from here, or else the absolute path.

        If that does not exist, the user's name again: run and data may have been moved together.

        Raises:
            ValueError: the data has no name, or its folder does not exist any more.
        """
        if self.data is None:
            raise UserError(f"the model was trained on {self.name}, a dataset object that cannot be opened by name")
        if not names_a_folder(self.data):
            return self.data
        moved = self.folder is None or not Path(self.folder).exists()
        if Path(self.data).exists() and (moved or str(Path(self.data).resolve()) == self.folder):
            return self.data
        if self.folder is not None and not moved:
            return self.folder
        where = f"{self.folder} is not there any more" if self.folder else "there is no such folder here"
        raise UserError(f"the model was trained on {self.data}, and {where}")

    def changed(self) -> bool:
        """Whether the data has changed since training: documents held out now may have been trained on.

        Checked only where that is quick, for the standard library and prepared folders.
        """
        prepared = (Path(self.source) / MANIFEST_FILE).is_file()
        if not (prepared or self.source == STANDARD_LIBRARY):
            return False
        return open_dataset(self.source).fingerprint != self.fingerprint
