"""Drift correction of reverse cumulative sums, against its plain PyTorch reference."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.reference import correct_drift_reference
from sympow.kernels.running_sums import correct_drift

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("length", "spacing"), [(1, 1), (7, 7), (300, 300), (300, 64), (513, 256)])
def test_the_drift_between_exact_sums_is_interpolated(length, spacing, known, documents):
    batch, heads, count = 2, 3, -(-length // spacing) + 1
    generator = torch.Generator().manual_seed(length)
    sums = torch.randn(batch, heads, length, dtype=torch.float64, generator=generator)
    exact = torch.randn(batch, heads, count, dtype=torch.float64, generator=generator)
    # After the last token the sum is 0.
    exact[..., -1] = 0
    end = None
    if documents:
        cut = length // 3
        end = torch.tensor([cut] * cut + [length] * (length - cut), dtype=torch.int32)
    out = correct_drift(
        sums.to(DEVICE),
        exact.to(DEVICE) if known else None,
        spacing,
        None if end is None else end.to(DEVICE),
        dtype=torch.float64,
    )
    assert out.shape == (batch, length, heads)
    expected = correct_drift_reference(sums, exact if known else None, spacing, end)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-12)
