"""Losses of the stages against formulas over whole models, in float64, with gradients."""

import copy

import pytest
import torch
from convert.tiny import make_gpt2, make_llama

from sympow.convert.models import features
from sympow.convert.objectives import Distillation, Matching, NextToken
from sympow.data import Loader, open_dataset


@pytest.fixture
def batch(texts):
    return next(iter(Loader(open_dataset(texts), 12, 4, short="join", prefetch=0)))


@pytest.fixture
def pair():
    """A teacher and a student with layers swapped and gates that depend on their inputs, in float64."""
    from sympow.hf import swap_attention

    def make(layers="all", make_teacher=make_llama):
        teacher = make_teacher().double().requires_grad_(False)
        student = swap_attention(copy.deepcopy(teacher).requires_grad_(True), layers=layers)
        new = {name for name, _ in student.named_parameters()} - {name for name, _ in teacher.named_parameters()}
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name in new:
                    parameter.add_(torch.randn_like(parameter))
        return teacher, student.double()

    return make


def assert_same_gradients(one, other):
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=0, atol=1e-10), name


@pytest.mark.parametrize(("layers", "make_teacher"), [("all", make_llama), ([1], make_llama), ("all", make_gpt2)])
def test_matching_is_the_mean_relative_error_given_the_teachers_inputs(pair, batch, layers, make_teacher):
    from sympow.hf import attention_modules, swapped_layers

    teacher, student = pair(layers, make_teacher)
    expected = copy.deepcopy(student)
    taken = {}
    for number, module in attention_modules(teacher).items():
        keep = lambda _, args, kwargs, output, number=number: taken.update({number: (args, kwargs, output[0])})  # noqa: E731
        module.register_forward_hook(keep, with_kwargs=True)
    features(teacher, batch.inputs)
    errors = []
    for number in swapped_layers(expected):
        args, kwargs, output = taken[number]
        found = attention_modules(expected)[number](*args, **kwargs)[0]
        errors += [
            (ours - theirs).square().sum() / theirs.square().sum() for ours, theirs in zip(found, output, strict=True)
        ]
    loss = sum(errors) / len(errors)
    (0.3 * loss).backward()

    objective = Matching(teacher, student, None)
    returned = objective.backward(batch, 0.3)
    assert torch.allclose(returned, 0.3 * loss, rtol=0, atol=1e-12)
    trained = {id(parameter) for parameter in objective.trained}
    assert_same_gradients(student, expected)
    for name, parameter in student.named_parameters():
        assert (parameter.grad is None) == (id(parameter) not in trained), name
    assert {f"match_loss/layer_{n}" for n in swapped_layers(student)} == set(objective.details(batch))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    # Hooks are removed: a plain forward pass of the teacher does not touch the student.
    before = [parameter.grad.clone() for parameter in objective.trained]
    features(teacher, batch.inputs)
    assert all(torch.equal(one, other.grad) for one, other in zip(before, objective.trained, strict=True))


@pytest.mark.parametrize("kind", [Matching, Distillation])
def test_micro_batches_add_up_to_the_batch(pair, batch, kind):
    teacher, student = pair()
    other = copy.deepcopy(student)
    whole = kind(teacher, student, None).backward(batch, 1.0)
    accumulated, pieces = kind(teacher, other, None), batch.split(3)
    assert [piece.rows for piece in pieces] == [3, 1]
    total = sum(accumulated.backward(piece, piece.rows / batch.rows) for piece in pieces)
    assert torch.allclose(total, whole, rtol=0, atol=1e-12)
    assert_same_gradients(student, other)


def test_matching_of_an_unchanged_layer_is_zero(batch):
    """A student whose attention is the teacher's own reproduces everything."""
    teacher = make_llama().double().requires_grad_(False)
    student = copy.deepcopy(teacher).requires_grad_(True)
    objective = Matching.__new__(Matching)
    objective.teacher, objective.dtype = teacher, None
    objective.pairs = {
        number: (one.self_attn, other.self_attn)
        for number, (one, other) in enumerate(zip(teacher.model.layers, student.model.layers, strict=True))
    }
    assert objective.backward(batch, 1.0) == 0


def test_distillation_is_the_divergence_of_whole_predictions(pair, batch):
    teacher, student = pair()
    expected = copy.deepcopy(student)
    p = teacher(batch.inputs).logits.log_softmax(-1)
    loss = (p.exp() * (p - expected(batch.inputs).logits.log_softmax(-1))).sum(-1).mean()
    (0.3 * loss).backward()
    returned = Distillation(teacher, student, None).backward(batch, 0.3)
    assert torch.allclose(returned, 0.3 * loss, rtol=0, atol=1e-12)
    assert_same_gradients(student, expected)


def test_the_plain_loss_is_cross_entropy(pair, batch):
    _, student = pair()
    expected = copy.deepcopy(student)
    loss = torch.nn.functional.cross_entropy(expected(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
    (0.3 * loss).backward()
    returned = NextToken(student, None).backward(batch, 0.3)
    assert torch.allclose(returned, 0.3 * loss, rtol=0, atol=1e-12)
    assert_same_gradients(student, expected)
