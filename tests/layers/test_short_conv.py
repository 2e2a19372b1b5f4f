"""The short convolution: every path of a layer against an explicit sum over taps, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sympow.layers.mixers import ConformalAttention, Mixer, SoftmaxAttention
from sympow.layers.short_conv import ShortConvolution
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.short_convolution import short_convolution
from sympow.ops.state import State
from sympow.ops.window import Window

WIDTH, TAPS, LENGTH = 16, 4, 11


def explicit(x: Tensor, taps: Tensor, past: Tensor | None = None) -> Tensor:
    """One sequence (t, channels), token by token and tap by tap."""
    rows = [*([] if past is None else past.unbind(0)), *x.unbind(0)]
    before = len(rows) - len(x)
    nothing = torch.zeros_like(x[0])
    return torch.stack(
        [sum((taps[j] * rows[i - j] for j in range(len(taps)) if i >= j), nothing) for i in range(before, len(rows))]
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_layer(kind: type[Mixer] = ConformalAttention, **options: object) -> Mixer:
    torch.manual_seed(0)
    chosen = {"heads": 4, "key_value_heads": 2, "short_conv": TAPS, "rotary": "scale", **options}
    layer = kind(WIDTH, **chosen).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "short_conv" in name or "beta" in name:
                parameter.copy_(0.5 * randn(*parameter.shape, seed=1))
    return layer


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_convolution_and_gradients_are_those_of_the_explicit_sum():
    x, taps, past = (v.requires_grad_() for v in (randn(2, 7, 3), randn(TAPS, 3, seed=1), randn(2, 3, 3, seed=2)))
    y, after = short_convolution(x, taps, past)
    expected = torch.stack([explicit(x[i], taps, past[i]) for i in range(2)])
    same(y, expected)
    assert torch.equal(after, x[:, -3:])
    upstream = randn(*y.shape, seed=3)
    for found, wanted in zip(
        torch.autograd.grad((y * upstream).sum(), (x, taps, past)),
        torch.autograd.grad((expected * upstream).sum(), (x, taps, past)),
        strict=True,
    ):
        same(found, wanted)


def test_documents_are_convolved_each_on_its_own_with_their_own_past():
    sizes = [1, 5, 2, 3]
    offsets = torch.tensor([0, 1, 6, 8, 11], dtype=torch.int32)
    x, taps, past = (v.requires_grad_() for v in (randn(1, 11, 3), randn(TAPS, 3, seed=1), randn(4, 3, 3, seed=2)))
    y, after = short_convolution(x, taps, past, cu_seqlens=offsets)
    documents = x[0].split(sizes)
    expected = torch.cat([explicit(document, taps, past[i]) for i, document in enumerate(documents)])
    last = torch.stack([torch.cat([past[i], document])[-3:] for i, document in enumerate(documents)])
    same(y[0], expected)
    same(after, last)
    upstream, at_end = randn(11, 3, seed=3), randn(4, 3, 3, seed=4)
    for found, wanted in zip(
        torch.autograd.grad((y[0] * upstream).sum() + (after * at_end).sum(), (x, taps, past)),
        torch.autograd.grad((expected * upstream).sum() + (last * at_end).sum(), (x, taps, past)),
        strict=True,
    ):
        same(found, wanted)


def test_padding_anywhere_is_skipped():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [0] * 7]).bool()
    x, taps, past = randn(4, 7, 3), randn(TAPS, 3, seed=1), randn(4, 3, 3, seed=2)
    y, after = short_convolution(x, taps, past, mask=mask)
    assert bool(y.isfinite().all())
    for i in range(4):
        tokens = x[i][mask[i]]
        if len(tokens):
            same(y[i][mask[i]], explicit(tokens, taps, past[i]))
        same(after[i], torch.cat([past[i], tokens])[-3:])


def test_identity_at_first_so_that_the_layer_is_the_one_without():
    torch.manual_seed(0)
    with_conv = ConformalAttention(WIDTH, 4, rotary="scale", short_conv=TAPS)
    torch.manual_seed(0)
    without = ConformalAttention(WIDTH, 4, rotary="scale")
    x = torch.randn(1, LENGTH, WIDTH)
    assert torch.equal(with_conv(x)[0], without(x)[0])
    with_conv(x)[0].square().sum().backward()
    assert with_conv.short_conv is not None
    # All taps learn from the first step on.
    assert bool((with_conv.short_conv.weight.grad != 0).any(1).all())


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_layer_is_explicit_convolution_then_attention(kind):
    layer = make_layer(kind)
    x = randn(2, LENGTH, WIDTH, seed=5)
    y, _ = layer(x, return_state=False)
    plain = make_layer(kind, short_conv=0)
    plain.load_state_dict({name: v for name, v in layer.state_dict().items() if "short_conv" not in name})
    # The convolved projections as those of a layer without a convolution.
    assert layer.short_conv is not None
    joint = torch.stack([explicit(row, layer.short_conv.weight) for row in layer.qkv_proj(x)])
    plain.qkv_proj.register_forward_hook(lambda *_: joint)
    same(y, plain(x)[0])


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_segments_and_single_tokens_are_the_whole(kind):
    layer = make_layer(kind)
    x = randn(2, LENGTH, WIDTH, seed=5)
    whole, last = layer(x)
    for sizes in ([1] * LENGTH, [2, 1, 6, 2]):
        state, parts = None, []
        for part in x.split(sizes, dim=1):
            y, state = layer(part, state)
            parts.append(y)
        same(torch.cat(parts, 1), whole)
        for name, tensor in last._tensors().items():
            same(getattr(state, name), tensor)


def test_gradients_pass_through_the_state_between_segments():
    layer = make_layer()
    x = randn(1, LENGTH, WIDTH, seed=5)
    layer(x)[0].square().sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    first, state = layer(x[:, :6])
    second, _ = layer(x[:, 6:], state)
    (first.square().sum() + second.square().sum()).backward()
    for name, parameter in layer.named_parameters():
        same(parameter.grad, expected[name])


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
@torch.no_grad()
def test_decoding_steps_from_caches_are_the_whole(kind):
    layer = make_layer(kind)
    x = randn(2, LENGTH, WIDTH, seed=5)
    whole, last = layer(x)
    _, state = layer(x[:, :3])
    if kind is ConformalAttention:
        # A window that folds on the way.
        cache = Window.open(state, capacity=3, dtype=torch.float64)
    else:
        cache = KeyValueCache.open(state, capacity=LENGTH)
    held = cache.conv_state
    steps = [layer.step(x[:, i : i + 1], cache) for i in range(3, LENGTH)]
    same(torch.cat(steps, 1), whole[:, 3:])
    assert cache.conv_state is held  # a captured graph writes to fixed places
    closed = cache.close()
    for name, tensor in last._tensors().items():
        same(getattr(closed, name), tensor)


@torch.no_grad()
def test_windows_of_keys_without_a_state_are_the_whole():
    layer = make_layer()
    x = randn(2, LENGTH, WIDTH, seed=5)
    whole, last = layer(x)
    window = Window.empty(2, 2, 4, 4, 2, rotated=True, capacity=1, dtype=torch.float64)
    window.conv_state = layer.initial_conv_state(2, torch.float64, torch.device("cpu"))
    parts = []
    for part in x[:, :9].split([0, 4, 0, 5], dim=1):
        y, window = layer(part, window)
        parts.append(y)
    kept = window.conv_state.clone()
    longer = window.resized(LENGTH)
    parts += [layer.step(x[:, i : i + 1], longer) for i in (9, 10)]
    same(torch.cat(parts, 1), whole)
    # Neither the copy for decoding nor the folded state shares the window's last inputs.
    assert torch.equal(window.conv_state, kept)
    same(longer.folded().conv_state, last.conv_state)


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_packed_documents_are_documents_alone(kind):
    layer = make_layer(kind)
    x = randn(1, LENGTH, WIDTH, seed=5)
    offsets = torch.tensor([0, 2, 3, LENGTH], dtype=torch.int32)
    y, _ = layer(x, return_state=False, cu_seqlens=offsets)
    alone = [layer(x[:, start:stop])[0] for start, stop in ((0, 2), (2, 3), (3, LENGTH))]
    same(y, torch.cat(alone, 1))


def test_packed_documents_continue_their_states():
    layer = make_layer()
    x, later = randn(1, 8, WIDTH, seed=5), randn(1, 6, WIDTH, seed=6)
    _, states = layer(x, cu_seqlens=torch.tensor([0, 1, 8]))
    y, _ = layer(later, states, cu_seqlens=torch.tensor([0, 2, 6]))
    first = layer(torch.cat([x[:, :1], later[:, :2]], 1))[0][:, 1:]
    second = layer(torch.cat([x[:, 1:], later[:, 2:]], 1))[0][:, 7:]
    same(y, torch.cat([first, second], 1))


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_padded_rows_are_rows_alone(kind):
    layer = make_layer(kind)
    x, later = randn(2, 7, WIDTH, seed=5), randn(2, 3, WIDTH, seed=6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0]]).bool()
    y, state = layer(x, mask=mask)
    after, _ = layer(later, state)
    for i in range(2):
        tokens = x[i : i + 1, mask[i]]
        whole, _ = layer(torch.cat([tokens, later[i : i + 1]], 1))
        same(y[i][mask[i]], whole[0, : tokens.shape[1]])
        same(after[i], whole[0, tokens.shape[1] :])


def test_states_are_saved_joined_selected_and_moved_with_their_last_inputs(tmp_path):
    layer = make_layer()
    with torch.no_grad():
        states = [layer(randn(1, 5, WIDTH, seed=seed))[1] for seed in range(2)]
    assert isinstance(states[0], State)
    states[0].save(tmp_path / "state")
    loaded = State.load(tmp_path / "state")
    assert torch.equal(loaded.conv_state, states[0].conv_state)
    joined = State.cat(states)
    assert torch.equal(joined.select(slice(1, 2)).conv_state, states[1].conv_state)
    assert joined.to(dtype=torch.float32).conv_state.dtype == torch.float64
    with pytest.raises(ValueError, match="short_conv"):
        State.cat([states[0], replace(states[1], conv_state=None)])


def test_what_does_not_fit_is_refused_by_name():
    layer, plain = make_layer(), make_layer(short_conv=0)
    x = randn(1, 5, WIDTH)
    with torch.no_grad():
        _, state = layer(x)
        _, other = plain(x)
    for wrong, given in ((layer, other), (plain, state)):
        with pytest.raises(ValueError, match="short_conv"):
            wrong(x, given)
        with pytest.raises(ValueError, match="short_conv"), torch.no_grad():
            wrong.step(x[:, :1], Window.open(given, dtype=torch.float64))
    with pytest.raises(ValueError, match="short_conv"):
        make_layer(short_conv=3)(x, state)
    with pytest.raises(ValueError, match="short_conv"):
        layer(x, shards=object())
    for wrong_width in (1, -1, 65):
        with pytest.raises(ValueError, match="short_conv"):
            make_layer(short_conv=wrong_width)
    projections = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
    with pytest.raises(ValueError, match="short_conv"):
        ConformalAttention.from_projections(*projections, width=WIDTH, heads=4, short_conv=4)
    with pytest.raises(ValueError, match="short_conv"):
        ShortConvolution(6, 4)(randn(1, 2, 6), randn(1, 2, 6))
