"""The paper's three formulations, as written in the reference, agree with each other."""

import pytest
import torch

from support import random_inputs
from sympow.ops import reference


@pytest.mark.parametrize("power", [2, 4, 6])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
def test_attention_recurrent_and_conformal_formulations_agree(power, gate, rotation):
    dim = 2 if power == 6 else 4  # the explicit P̄ is a d^p × d^p matrix
    inputs = random_inputs(power, dim=dim, length=7, gate=gate, rotation=rotation)
    attention = reference.attention(**inputs.arguments(), power=power)
    recurrent, _ = reference.recurrent(**inputs.arguments(), power=power)
    conformal = reference.conformal(**inputs.arguments(), power=power)
    torch.testing.assert_close(recurrent, attention, rtol=0, atol=1e-10)
    torch.testing.assert_close(conformal, attention, rtol=0, atol=1e-10)


def test_equal_vector_gates_are_a_scalar_gate():
    inputs = random_inputs(5, gate="scalar")
    vector = inputs.log_gamma.unsqueeze(-1).expand(*inputs.log_gamma.shape, 2)
    scalar = reference.attention(**inputs.arguments(), power=4)
    same = reference.attention(**{**inputs.arguments(), "log_gamma": vector}, power=4)
    torch.testing.assert_close(same, scalar, rtol=0, atol=1e-12)


def test_the_symmetric_embedding_is_an_isometry_onto_symmetric_tensors():
    embedding = reference.symmetric_embedding(3, 4, torch.float64)
    torch.testing.assert_close(embedding.T @ embedding, torch.eye(15, dtype=torch.float64))
    x = torch.randn(3, dtype=torch.float64)
    tensor = torch.einsum("i,j,k,l->ijkl", x, x, x, x).flatten()
    torch.testing.assert_close(embedding @ reference.phi(x, 4), tensor)
