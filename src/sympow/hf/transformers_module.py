"""Where this package meets transformers: its version, the type of swapped models, and classes found by name."""

from __future__ import annotations

import re

from sympow.extras import require

transformers = require("transformers", "hf")
logger = transformers.utils.logging.get_logger(__name__)

# The model type in configs of pretrained models with swapped attention; that of our own is in `SympowConfig`.
SWAPPED_TYPE = "sympow_swapped"


def check_version(version: str) -> None:
    """Refuses transformers before 5, and logs a warning about releases of 5 that the extra `hf` excludes.

    Those are not refused: they load models and generate, but without an assistant model in some of them.
    """
    # A release candidate has a suffix, as in 5.17rc1.
    release = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if release < [5]:
        raise ImportError(f"sympow.hf needs transformers 5 or newer, found {version}", name="transformers")
    if release < [5, 17]:
        logger.warning(
            "sympow.hf needs transformers 5.17 or newer for assisted generation and for removing tokens from a cache, "
            f"found {version}"
        )


def publish(*classes: type) -> None:
    """Makes classes attributes of transformers, where trl and `transformers serve` look up a checkpoint's class.

    They become attributes of the module's type: transformers executes its own `__init__` again when its processors are
    imported, which makes a second module of this type, and a program may hold either.
    """
    for published in classes:
        setattr(type(transformers), published.__name__, published)
