"""Gates and rotation scales of one token, in Triton's interpreter, against float64."""

import pytest
import torch

from support import assert_close, interpreted, within

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.decode.gate_projection import step_gates
from sympow.kernels.decode.reference import step_gates_reference

pytestmark = interpreted


@pytest.mark.parametrize(("rows", "inputs"), [(1, 5), (3, 300), (2, 256)])
@pytest.mark.parametrize(("gates", "rotations"), [(12, 12), (40, 1), (1, 0), (0, 17)])
def test_they_are_those_of_the_formulas(rows, inputs, gates, rotations):
    generator = torch.Generator().manual_seed(rows + gates)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, gate_weight, rotation_weight = normal(rows, inputs), normal(gates, inputs), normal(rotations, inputs)
    # Gates near 1, and some near 0.
    gate_bias = 7 + 10 * normal(gates)
    arguments = (
        x,
        gate_weight if gates else None,
        gate_bias if gates else None,
        rotation_weight if rotations else None,
    )
    log_gamma, beta = step_gates(*arguments)
    assert log_gamma.dtype == beta.dtype == torch.float32
    assert log_gamma.shape == (rows, gates)
    assert beta.shape == (rows, rotations)
    expected, expected_beta = step_gates_reference(*(None if t is None else t.double() for t in arguments))
    # Both are sums with a term per input feature, and the smallest are differences in an exponent.
    size = x.abs().sum(-1, keepdim=True).double()
    if gates:
        error = (log_gamma - expected).abs() / (size * expected.abs().clamp(max=1))
        within(error.max(), 2e-6, "log_gamma")
    if rotations:
        assert_close(beta, expected_beta, 1e-5, "beta")
    torch.library.opcheck(step_gates.op, arguments)
