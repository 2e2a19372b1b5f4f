"""Drift correction of reverse cumulative sums, against its plain PyTorch twin."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.running_sums import correct_drift

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def put_right(sums, anchors, spacing):
    """sums (t,) with anchors (n,), as lists: the error at the two anchors around a token, mixed by distance."""
    length = len(sums)
    known = [*range(0, length, spacing), length]
    missing = [anchor - (sums[at] if at < length else 0.0) for at, anchor in zip(known, anchors, strict=True)]
    out = []
    for position in range(length):
        before = position // spacing
        share = (position - known[before]) / (known[before + 1] - known[before])
        out.append(sums[position] + (1 - share) * missing[before] + share * missing[before + 1])
    return out


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("length", "spacing"), [(1, 1), (7, 7), (300, 300), (300, 64), (513, 256)])
def test_sums_are_moved_onto_their_anchors(length, spacing, known, documents):
    batch, heads, count = 2, 3, -(-length // spacing) + 1
    generator = torch.Generator().manual_seed(length)
    sums = torch.randn(batch, heads, length, dtype=torch.float64, generator=generator)
    anchors = torch.randn(batch, heads, count, dtype=torch.float64, generator=generator)
    # As in use: nothing lies beyond the last token.
    anchors[..., -1] = 0
    end = None
    if documents:
        cut = length // 3
        end = torch.tensor([cut] * cut + [length] * (length - cut), dtype=torch.int32)
    out = correct_drift(
        sums.to(DEVICE),
        anchors.to(DEVICE) if known else None,
        spacing,
        None if end is None else end.to(DEVICE),
        dtype=torch.float64,
    )
    assert out.shape == (batch, length, heads)
    for row in range(batch):
        for head in range(heads):
            at = anchors[row, head].tolist() if known else [0.0] * count
            expected = put_right(sums[row, head].tolist(), at, spacing)
            if end is not None:
                expected = [x - [*expected, 0.0][stop] for x, stop in zip(expected, end.tolist(), strict=True)]
            torch.testing.assert_close(
                out[row, :, head].cpu(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
            )
