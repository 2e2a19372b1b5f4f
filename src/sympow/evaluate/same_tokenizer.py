"""Whether data has the token ids of a model: a loss on ids of another tokenizer is a plausible number without meaning.

Tokenizers are compared by what they do, not by their files: transformers rewrites a tokenizer.json that it saves, and
the same tokenizer can be named or saved in several ways.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from sympow.data import open_dataset
from sympow.data.formats.shards import ShardDataset
from sympow.data.tokenizer import MODEL_FILE, SETTINGS_FILE, Tokenizer, beginning_of
from sympow.errors import ArgumentError

# Text to compare tokenizers on.
DOCUMENTS, TOKENS = 16, 1_024


def check_same_tokenizer(model: Path, tokenizer: Tokenizer, data: str) -> None:
    """Refuses data whose ids are not those of a model's tokenizer. Data without a tokenizer is not checked.

    Args:
        model: the model's folder, for messages.
        tokenizer: the model's tokenizer.
        data: the dataset, as `open_dataset` takes it.

    Raises:
        ValueError: the tokenizers encode the held-out documents differently, or put different tokens before them.
    """
    heldout = open_dataset(data, "heldout")
    if isinstance(heldout, ShardDataset) and not (heldout.folder / SETTINGS_FILE).is_file():
        return
    # A folder in Hugging Face format has only the file.
    file = model if (model / SETTINGS_FILE).is_file() else model / MODEL_FILE
    advice = f"Prepare it with the model's tokenizer: sympow data prepare … --tokenizer {file}"
    of_data = heldout.load_tokenizer()
    for document in range(min(DOCUMENTS, len(heldout.lengths))):
        text = of_data.decode(heldout.read(document, 0, min(TOKENS, int(heldout.lengths[document]))))
        found, expected = of_data.encode(text).tolist(), tokenizer.encode(text).tolist()
        if found != expected:
            either = zip_longest(found, expected)
            place = next(at for at, (one, other) in enumerate(either) if one != other)
            raise ArgumentError(
                "data",
                f"must be tokenized by the tokenizer of {model}, and {data} is not: the text of a document "
                f"becomes {found[place : place + 4]} from token {place:,} on, and with the model's tokenizer "
                f"{expected[place : place + 4]}. {advice}",
            )
    # Where a tokenizer puts no token before a text, the data of its model may have any.
    begins = beginning_of(tokenizer)
    if begins and heldout.boundary not in (tokenizer.boundary, *begins):
        raise ArgumentError(
            "data",
            f"must have the boundary token of {model} between documents, id {tokenizer.boundary:,}; {data} has id "
            f"{heldout.boundary:,}. {advice}",
        )
