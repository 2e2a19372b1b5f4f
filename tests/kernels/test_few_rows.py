"""The small projections' kernel, in Triton's interpreter, against float64."""

import pytest
import torch

from support import assert_close, interpreted

pytest.importorskip("triton", reason="needs Triton")

pytestmark = interpreted


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 5, 1), (3, 300, 12), (2, 256, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_map(rows, inputs, outputs, bias):
    from sympow.kernels.few_rows import few_rows_linear

    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(*n, generator=generator) for n in ((rows, inputs), (outputs, inputs), (outputs,)))
    found = few_rows_linear(x, weight, offset if bias else None)
    expected = x.double() @ weight.double().mT + (offset.double() if bias else 0)
    assert found.dtype == torch.float32
    assert_close(found, expected, 1e-6, "y")
    torch.library.opcheck(few_rows_linear, (x, weight, offset if bias else None))
