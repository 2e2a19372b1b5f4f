"""`sympow data info`: counts, lengths and first tokens of a dataset."""

from __future__ import annotations

from typing import Any

import numpy as np

from sympow.checks import check_at_least
from sympow.data.dataset import TokenDataset
from sympow.data.formats.shards import ShardDataset
from sympow.data.formats.token_files import TokenFiles
from sympow.data.open import open_dataset, splits_of
from sympow.errors import UserError
from sympow.extras import require

SHOWN_DOCUMENTS = 3


def describe(source: str, *, shown_tokens: int = 32, verify: bool = False) -> dict[str, Any]:
    """All that the command prints, as values ready for JSON.

    Args:
        source: as for `open_dataset`.
        shown_tokens: of each of the first documents.
        verify: read all shards of prepared data and compare their hashes.
    """
    check_at_least("tokens", shown_tokens, 0)
    datasets = {split: open_dataset(source, split) for split in splits_of(source)}
    any_split = next(iter(datasets.values()))
    described: dict[str, Any] = {
        "source": source,
        "vocab_size": any_split.vocab_size,
        "boundary": any_split.boundary,
        "tokenizer": any_split.load_tokenizer().kind,
        "splits": {split: _describe_split(dataset, shown_tokens) for split, dataset in datasets.items()},
    }
    if isinstance(any_split, ShardDataset):
        manifest = any_split.manifest
        described |= {"dtype": manifest.dtype, "counts": manifest.counts, "request": manifest.request}
    if isinstance(any_split, TokenFiles):
        described["format"] = ", ".join(any_split.formats)
    if verify:
        for dataset in datasets.values():
            if not isinstance(dataset, ShardDataset):
                raise UserError(f"verify compares hashes of prepared shards; {source} has none")
            dataset.verify()
    return described


def _describe_split(dataset: TokenDataset, shown_tokens: int) -> dict[str, Any]:
    lengths, tokenizer = dataset.lengths, dataset.load_tokenizer()
    beginnings = []
    for document in range(min(SHOWN_DOCUMENTS, len(lengths))):
        tokens = dataset.read(document, 0, min(shown_tokens, int(lengths[document])))
        beginnings.append(
            {
                "document": dataset.document_name(document),
                "tokens": tokens.tolist(),
                "text": tokenizer.decode(tokens),
            }
        )
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "blocks": len(dataset.blocks) - 1,
        "fingerprint": dataset.fingerprint,
        "beginnings": beginnings,
    }


def print_description(described: dict[str, Any]) -> None:
    """Prints the description as tables on the terminal."""
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table

    facts = table(title=described["source"], show_header=False, title_justify="left")
    if "format" in described:
        facts.add_row("format", described["format"])
    facts.add_row("tokenizer", described["tokenizer"])
    facts.add_row("vocabulary", f"{described['vocab_size']:,} tokens")
    facts.add_row("boundary token", f"{described['boundary']:,}, the id between documents")
    for name, value in described.get("counts", {}).items():
        facts.add_row(name.replace("_", " "), f"{len(value) if isinstance(value, list) else value:,}")
    console.print(facts)

    splits = table(title="Splits", title_justify="left")
    splits.add_column("")
    for split in described["splits"]:
        splits.add_column(split, justify="right")
    for name in ("documents", "tokens", "shortest", "median", "longest", "blocks"):
        splits.add_row(name, *(f"{content[name]:,.0f}" for content in described["splits"].values()))
    splits.add_row("fingerprint", *(content["fingerprint"] for content in described["splits"].values()))
    console.print(splits)

    for split, content in described["splits"].items():
        for beginning in content["beginnings"]:
            # Documents may contain anything, including rich's markup.
            console.print(f"{split}: {beginning['document']}", style="bold", markup=False, highlight=False)
            console.print(str(beginning["tokens"]), markup=False, highlight=False)
            console.print(beginning["text"], markup=False, highlight=False)
