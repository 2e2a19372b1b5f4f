"""`quiet`: loading and saving with transformers without its progress bars and notices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sympow.extras import require


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off the progress bars and notices of transformers while the block runs.

    sympow itself says what it loads and writes, and refuses models that lack tensors. Downloads, which take long, keep
    their progress bars on a terminal.
    """
    logging, hub = require("transformers.utils.logging", "hf"), require("huggingface_hub.utils", "hf")
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
