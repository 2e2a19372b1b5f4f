"""Data: documents in, token batches out.

`prepare` tokenizes text files into shards, `open_dataset` opens them (or the standard library, or LongCrawl64), and
`Loader` makes batches. NumPy and torch are enough for reading; the extra `data` brings zarr, fsspec, pyarrow and
tokenizers, each imported where it is used.
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
