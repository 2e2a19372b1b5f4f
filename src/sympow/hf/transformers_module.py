"""Where this package meets transformers: its version, classes found by name, loading without code or progress bars."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sympow.errors import UserError
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


def load_without_code(kind: Any, source: Path | str, **options: Any) -> Any:
    """`kind.from_pretrained(source, **options)`, without running code that comes with the source, or asking whether to.

    This package loads folders and repositories of transformers in no other way.

    Args:
        kind: an Auto class or a model class.

    Raises:
        ValueError: the source cannot be loaded without its own code.
    """
    try:
        return kind.from_pretrained(str(source), trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(f"{source} has code of its own (auto_map), which sympow never runs") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off the progress bars and notices of transformers while the block runs.

    sympow itself says what it loads and writes, and refuses models that lack tensors. Downloads, which take long, keep
    their progress bars on a terminal.
    """
    logging, hub = transformers.utils.logging, require("huggingface_hub.utils", "hf")
    bars, downloads = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    # This turns off those of downloads too.
    logging.disable_progress_bar()
    if downloads and sys.stderr.isatty():
        hub.enable_progress_bars()
    # Unless the user has asked for notices.
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if downloads:
            hub.enable_progress_bars()
        else:
            hub.disable_progress_bars()
