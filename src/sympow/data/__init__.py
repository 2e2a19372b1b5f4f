"""Data: documents in, token batches out.

`prepare` tokenizes text into shards, `open_dataset` opens them (or the standard library, LongCrawl64, or token files of
datatrove, Megatron and nanoGPT), and `Loader` makes batches. NumPy and torch are enough for reading; the extra `data`
brings zarr, fsspec and tokenizers, and the extra `datasets` tables and datasets of a hub. Each is imported where it is
used.
"""

from sympow.extras import require

# First, so that without NumPy the error names the extra to install.
require("numpy", "data")

from sympow.data.dataset import TokenDataset  # noqa: E402
from sympow.data.loader import Batch, Loader  # noqa: E402
from sympow.data.open import open_dataset  # noqa: E402
from sympow.data.preparation import prepare  # noqa: E402
from sympow.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

__all__ = ["Batch", "Loader", "TokenDataset", "Tokenizer", "load_tokenizer", "open_dataset", "prepare"]
