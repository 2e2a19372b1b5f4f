"""The KL divergence in blocks, against the formula over all logits."""

import pytest
import torch

from sympow.convert.distillation import linear_kl_divergence


def inputs(rows=(3, 5), vocabulary=11, width=4, taught=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = ((*rows, width), (vocabulary, width), (*rows, taught), (vocabulary, taught))
    student, weight, teacher, teacher_weight = (torch.randn(s, dtype=torch.float64, generator=draw) for s in sizes)
    return student.requires_grad_(), weight.requires_grad_(), teacher, teacher_weight


def formula(student, weight, teacher, teacher_weight):
    p = (teacher @ teacher_weight.mT).softmax(-1)
    return (p * (p.log() - (student @ weight.mT).softmax(-1).log())).sum(-1).mean()


@pytest.mark.parametrize("tokens", [1, 4, 7, 100, None])
def test_blocks_give_the_formula_and_its_gradients(tokens):
    given = inputs()
    expected = formula(*given)
    expected.backward(torch.tensor(0.7, dtype=torch.float64))
    gradients = [given[0].grad, given[1].grad]
    fresh = inputs()
    found = linear_kl_divergence(*fresh, tokens=tokens)
    found.backward(torch.tensor(0.7, dtype=torch.float64))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for one, other in zip((fresh[0].grad, fresh[1].grad), gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_frozen_output_embedding_gets_no_gradient():
    """LoRA freezes it; the gradient of the features is the same."""
    given, frozen = inputs(), inputs()
    linear_kl_divergence(*given).backward()
    frozen[1].requires_grad_(False)
    linear_kl_divergence(*frozen).backward()
    assert frozen[1].grad is None
    assert torch.equal(frozen[0].grad, given[0].grad)


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_block_has_at_least_one_row(tokens):
    with pytest.raises(ValueError, match="tokens must be"):
        linear_kl_divergence(*inputs(), tokens=tokens)


def test_a_student_that_predicts_the_same_has_no_divergence_and_no_gradient():
    _, _, teacher, weight = inputs()
    student, mine = teacher.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_kl_divergence(student, mine, teacher, weight)
    loss.backward()
    assert loss == 0
    assert not student.grad.any()
    assert not mine.grad.any()


def test_tokens_that_the_teacher_excludes_count_nothing():
    student, weight, teacher, teacher_weight = inputs()
    # Its other logits are so large that this token's probability is exactly 0, whatever the sign of its features.
    teacher = torch.cat([teacher, torch.ones_like(teacher[..., :1])], -1)
    bias = torch.zeros(11, 1, dtype=torch.float64)
    bias[3] = -1e5
    loss = linear_kl_divergence(student, weight, teacher, torch.cat([teacher_weight, bias], -1))
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()
    assert loss > 0


def test_shapes_that_do_not_belong_together_are_refused():
    student, weight, teacher, teacher_weight = inputs()
    with pytest.raises(ValueError, match=r"same tokens and vocabulary as the teacher's; got \(3, 5, 4\)"):
        linear_kl_divergence(student, weight, teacher[:, :4], teacher_weight)
    with pytest.raises(ValueError, match=r"same tokens and vocabulary"):
        linear_kl_divergence(student, weight, teacher, teacher_weight[:10])
    with pytest.raises(ValueError, match="must not be empty"):
        linear_kl_divergence(student[:0], weight, teacher[:0], teacher_weight)
