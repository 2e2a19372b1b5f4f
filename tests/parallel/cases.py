"""Functions that the ranks of a pool run: an operator on shards, compared with one call on the whole sequence."""

import random

import torch
import torch.distributed as dist
from parallel.counting import counted
from parallel.ring import ring_attention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sympow
import sympow.parallel.context_parallel as sharded
from support import Inputs, random_inputs
from sympow.evaluate import loss_by_position
from sympow.ops.torch.softmax import softmax_attention as whole_softmax_attention
from sympow.parallel import Shards, attention, softmax_attention
from sympow.parallel.fused_attention import fused_shard_attention


def random_lengths(choose, total, ranks):
    """Random lengths of shards, 0 included."""
    cuts = sorted(choose.choices(range(total + 1), k=ranks - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def compare(group, seed, *, power=2, lengths, offsets=None, closed=(), exchange="auto", initial=False, final=False,
            form="auto", kind=None):  # fmt: skip
    """Largest differences of outputs, states and gradients by name, relative to entries above 1.

    Args:
        initial: whether the sequence starts from a state.
        final: whether the state after it is asked for, and is part of the loss.
    """
    total = sum(lengths)
    inputs = random_inputs(seed, length=total, heads=4, key_heads=2, **(kind or {}))
    if inputs.log_gamma is not None:
        for token in closed:
            inputs.log_gamma[:, token] = -torch.inf
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    shards = Shards(group, lengths, cu_seqlens, exchange)
    state = None
    if initial:
        prefix = random_inputs(seed + 1, length=5, heads=4, key_heads=2, **(kind or {}))
        _, state = sympow.attention(**{**prefix.arguments(), "theta": inputs.theta}, power=power, return_state=True)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3], generator=generator, dtype=inputs.q.dtype)

    whole, whole_state = inputs.requires_grad(), _tracked(state)
    states = {"initial_state": whole_state, "return_state": final}
    expected = sympow.attention(**whole.arguments(), power=power, cu_seqlens=cu_seqlens, **states)
    expected, expected_state = expected if final else (expected, None)
    ((expected * weights).sum() + _weighed(expected_state, seed)).backward()

    own = inputs.time(shards.start, shards.start + shards.length).requires_grad()
    own_state = _tracked(state)
    states = {"initial_state": own_state, "return_state": final}
    y = attention(**own.arguments(), power=power, shards=shards, form=form, **states)
    y, after = y if final else (y, None)
    # Each rank has the state; of the sum of losses, it is to count once.
    ((y * shards.take(weights)).sum() + _weighed(after, seed) / group.size()).backward()

    differences = {"y": _difference(y, shards.take(expected))}
    if final:
        for name, mine in after._tensors().items():
            differences[f"final {name}"] = _difference(mine, getattr(expected_state, name))
    for name, mine, theirs in _pairs(own, whole):
        if name == "theta":
            differences[name] = _difference(_summed(mine, group), theirs.grad)
        else:
            differences[name] = _difference(mine.grad, shards.take(theirs.grad))
    if state is not None:
        for name in ("kv", "normalizer", "phase"):
            mine, theirs = getattr(own_state, name), getattr(whole_state, name)
            if mine is not None:
                differences[f"initial {name}"] = _difference(_summed(mine, group), theirs.grad)
    return differences


def gradient_of_the_initial_state(group, seed, *, lengths, final):
    """Differences as in `compare`, where nothing but the initial state requires a gradient, as in prefix tuning."""
    inputs = random_inputs(seed, length=sum(lengths), heads=4, key_heads=2)
    prefix = random_inputs(seed + 1, length=5, heads=4, key_heads=2)
    _, state = sympow.attention(**{**prefix.arguments(), "theta": inputs.theta}, return_state=True)
    whole, own, shards = _tracked(state), _tracked(state), Shards(group, lengths)
    expected = sympow.attention(**inputs.arguments(), initial_state=whole)
    expected.square().sum().backward()
    arguments = inputs.time(shards.start, shards.start + shards.length).arguments()
    y = attention(**arguments, shards=shards, initial_state=own, return_state=final)
    y = y[0] if final else y
    y.square().sum().backward()
    differences = {"y": _difference(y, shards.take(expected))}
    for name, theirs in whole._tensors().items():
        differences[name] = _difference(_summed(getattr(own, name), group), theirs.grad)
    return differences


def states_carry_on(group, seed, *, lengths, more):
    """Two sharded calls with the state passed on, compared with one call, gradients included."""
    first_length, second_length = sum(lengths), sum(more)
    inputs = random_inputs(seed, length=first_length + second_length, heads=2)
    whole = inputs.requires_grad()
    expected, expected_state = sympow.attention(**whole.arguments(), return_state=True)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=expected.dtype)
    ((expected * weights).sum() + expected_state.kv.sum()).backward()

    first, second = Shards(group, lengths), Shards(group, more)
    spans = (first.start, first.length), (first_length + second.start, second.length)
    parts = [inputs.time(start, start + length).requires_grad() for start, length in spans]
    y_first, state = attention(**parts[0].arguments(), shards=first, return_state=True)
    y_second, state = attention(**parts[1].arguments(), shards=second, initial_state=state, return_state=True)
    loss = sum(
        (y * weights[:, start : start + length]).sum()
        for y, (start, length) in zip((y_first, y_second), spans, strict=True)
    )
    # Each rank has the state; of the sum of losses, it is to count once.
    (loss + state.kv.sum() / first.size).backward()
    differences = {"kv": _difference(state.kv, expected_state.kv)}
    for part, (start, length) in zip(parts, spans, strict=True):
        for name, mine, theirs in _pairs(part, whole):
            if name != "theta":
                differences[f"{name} at {start}"] = _difference(mine.grad, theirs.grad[:, start : start + length])
    return differences


def _weighed(state, seed):
    """A loss that depends on every entry of a state."""
    if state is None:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    tensors = state._tensors().values()
    return sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in tensors)


def _pairs(own, whole):
    for name in Inputs.__dataclass_fields__:
        if getattr(own, name) is not None:
            yield name, getattr(own, name), getattr(whole, name)


def _summed(shared, group):
    """The gradient of a tensor that all ranks share: the sum of the ranks' gradients."""
    total = torch.zeros_like(shared) if shared.grad is None else shared.grad.clone()
    dist.all_reduce(total, group=group)
    return total


def _tracked(state):
    if state is None:
        return None
    return state._map(lambda x: x.detach().clone().requires_grad_())


def _difference(actual, expected):
    if actual is None or expected is None:  # an input that the outputs do not depend on has a gradient of zero
        return max((x.abs().max().item() for x in (actual, expected) if x is not None and x.numel()), default=0.0)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.numel():
        return 0.0
    assert actual.isfinite().all()
    return ((actual - expected).abs().max() / max(1.0, expected.abs().max().item())).item()


def random_cases(group, seeds, **options):
    return [random_case(group, seed, **options) for seed in seeds]


def random_case(group, seed, *, final=False):
    """A random case: lengths, empty shards, documents, gates closed at a boundary, power, form, exchange.

    Args:
        final: whether the state after the sequence is asked for; then there are no documents.
    """
    choose = random.Random(seed)
    total = choose.randint(1, 24)
    lengths = random_lengths(choose, total, group.size())
    offsets, initial = None, False
    if choose.random() < 0.5 and not final:
        offsets = sorted({0, total, *choose.choices(range(total + 1), k=choose.randint(0, 5))})
    else:
        initial = choose.random() < 0.4
    borders = [sum(lengths[:rank]) for rank in range(1, group.size())]
    closed = [token for token in borders if token < total and choose.random() < 0.3]
    kind = {
        "gate": choose.choice(["none", "scalar", "vector"]),
        "rotation": choose.choice(["none", "fixed", "scale", "pairs"]),
    }
    options = {
        "power": choose.choice([2, 4]),
        "form": choose.choice(["auto", "attention", "chunked", "recurrent"]),
        "exchange": choose.choice(["gather", "rounds"]),
    }
    case = {"lengths": lengths, "offsets": offsets, "closed": closed, "initial": initial, "final": final, **options}
    return compare(group, seed, kind=kind, **case), {**case, **kind}


def traffic(group, length, *, power=2, exchange="gather", kind=None, dtype=torch.float64):
    """Bytes sent forward and backward by sharded attention on a sequence of some length."""
    shards = Shards.even(length, group, exchange=exchange)
    inputs = random_inputs(0, length=length, heads=4, key_heads=2, dtype=dtype, **(kind or {}))
    own = inputs.time(shards.start, shards.start + shards.length).requires_grad()
    with counted() as forward:
        y = attention(**own.arguments(), power=power, shards=shards)
    with counted() as backward:
        y.sum().backward()
    return forward.sent, backward.sent


def softmax_traffic(group, length):
    """The same for softmax with an all-gather and with a ring, and the difference of their results."""
    shards = Shards.even(length, group)
    inputs = random_inputs(0, length=length, heads=2, value_dim=4, gate="none", rotation="none")
    own = inputs.time(shards.start, shards.start + shards.length).requires_grad()
    dy = torch.randn(own.v.shape, generator=torch.Generator().manual_seed(group.rank()), dtype=own.v.dtype)
    with counted() as forward:
        y = softmax_attention(own.q, own.k, own.v, shards=shards)
    with counted() as backward:
        y.backward(dy)
    with counted() as ring, torch.no_grad():
        around = ring_attention(own.q, own.k, own.v, dy, group)
    differences = [_difference(a, b) for a, b in zip(around, (y, own.q.grad, own.k.grad, own.v.grad), strict=True)]
    return (forward.sent, backward.sent), ring.sent, max(differences)


def softmax_compare(group, seed):
    """As `random_case`, for softmax attention, without states."""
    choose = random.Random(seed)
    total = choose.randint(1, 24)
    lengths = random_lengths(choose, total, group.size())
    offsets = sorted({0, total, *choose.choices(range(total + 1), k=choose.randint(0, 5))})
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32) if choose.random() < 0.5 else None
    kind = {
        "gate": choose.choice(["none", "scalar", "vector"]),
        "rotation": choose.choice(["none", "fixed", "scale", "pairs"]),
    }
    inputs = random_inputs(seed, length=total, heads=4, key_heads=2, value_dim=4, **kind)
    shards = Shards(group, lengths, cu_seqlens)
    weights = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(seed), dtype=inputs.q.dtype)
    whole = inputs.requires_grad()
    expected = whole_softmax_attention(**whole.arguments(), cu_seqlens=cu_seqlens)
    (expected * weights).sum().backward()
    own = inputs.time(shards.start, shards.start + shards.length).requires_grad()
    y = softmax_attention(**own.arguments(), shards=shards)
    (y * shards.take(weights)).sum().backward()
    differences = {"y": _difference(y, shards.take(expected))}
    for name, mine, theirs in _pairs(own, whole):
        got = _summed(mine, group) if name == "theta" else mine.grad
        differences[name] = _difference(got, theirs.grad if name == "theta" else shards.take(theirs.grad))
    return differences, {"lengths": lengths, "offsets": offsets, **kind}


def model_logits(group, mixer):
    """Compares a model on shards of packed documents with one process: logits and gradients of parameters."""
    torch.manual_seed(0)
    model = sympow.GPT(
        sympow.GPTConfig(vocab_size=13, layers=2, width=16, heads=2, mixer=mixer, rotary="scale")
    ).double()
    tokens = torch.randint(13, (1, 19), generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, 4, 15, 19])
    expected, _ = model(tokens, return_state=False, cu_seqlens=cu_seqlens)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    shards = Shards.even(19, group, cu_seqlens)
    logits, _ = model(shards.take(tokens), return_state=False, shards=shards)
    logits.square().sum().backward()
    differences = {"logits": _difference(logits, shards.take(expected))}
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        differences[name] = _difference(_summed(parameter, group), gradient)
    return differences


def evaluation(group, mixer, segment_size, length):
    """Compares losses by position of sharded documents with those of one process."""
    torch.manual_seed(0)
    model = sympow.GPT(
        sympow.GPTConfig(vocab_size=13, layers=2, width=16, heads=2, mixer=mixer, rotary="scale")
    ).double()
    generator = torch.Generator().manual_seed(1)
    documents = [tuple(torch.randint(13, (2, 1, length), generator=generator)) for _ in range(2)]
    together = loss_by_position(model, documents, segment_size=segment_size, group=group)
    alone = loss_by_position(model, documents)
    return {"mean": _difference(together.mean, alone.mean), "error": _difference(together.error, alone.error)}


def mistake(group, what):
    """The message of an error that all ranks make alike."""
    inputs = random_inputs(0, length=4)
    state = sympow.attention(**inputs.arguments(), return_state=True)[1]
    documents = torch.tensor([0, 3, 8])
    calls = {
        "lengths": lambda: Shards(group, [1, 2, 3]),
        "length": lambda: attention(**inputs.arguments(), shards=Shards(group, [3, 3])),
        "exchange": lambda: Shards(group, [4, 4], exchange="ring"),
        "group": lambda: Shards.even(8, "cp"),
        "documents": lambda: attention(
            **inputs.arguments(), shards=Shards(group, [4, 4], documents), initial_state=state
        ),
        "offsets": lambda: attention(**inputs.arguments(), shards=Shards(group, [4, 4], torch.tensor([0, 7]))),
        "softmax": lambda: softmax_attention(**inputs.arguments(), shards=Shards(group, [4, 4]), return_state=True),
        "take": lambda: Shards(group, [4, 4]).take(inputs.q),
        "evaluation": lambda: evaluation(group, "softmax", 4, 20),
    }
    try:
        calls[what]()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def shards_by_themselves(group):
    """Shards made from each rank's number of tokens, which the ranks exchange."""
    inputs = random_inputs(3, length=9)
    lengths = [2, 4, 3]
    start = sum(lengths[: group.rank()])
    own = inputs.time(start, start + lengths[group.rank()])
    expected = sympow.attention(**inputs.arguments())
    return {"y": _difference(attention(**own.arguments(), shards=group), expected[:, start : start + own.q.shape[1]])}


def of_a_mesh(group):
    """Shards of a mesh use the group of its dimension "cp"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inputs = random_inputs(mesh.get_local_rank("dp"), length=7)
    shards = Shards.even(7, mesh)
    own = inputs.time(shards.start, shards.start + shards.length)
    y = attention(**own.arguments(), shards=shards)
    assert shards.lengths == (4, 3)
    assert shards.rank == mesh.get_local_rank("cp")
    return {"y": _difference(y, shards.take(sympow.attention(**inputs.arguments())))}


def on_kernels(group, seed, lengths, kind=None, offsets=None, chunk_size=None, closed=(), exchange="auto"):
    """Whether this rank's shard went through the fused kernels, and its errors in float32 against float64."""
    torch.use_deterministic_algorithms(True)  # these fill new tensors with NaN
    try:
        return _on_kernels(group, seed, lengths, kind, offsets, chunk_size, closed, exchange)
    finally:
        torch.use_deterministic_algorithms(False)


def _on_kernels(group, seed, lengths, kind, offsets, chunk_size, closed, exchange):
    shape = {"heads": 2, "dim": 32, "value_dim": 32, **(kind or {})}
    inputs = random_inputs(seed, length=sum(lengths), dtype=torch.float32, **shape)
    for token in closed:
        inputs.log_gamma[:, token] = -torch.inf
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    shards = Shards(group, lengths, cu_seqlens, exchange)
    exact = inputs.map(Tensor.double).requires_grad()
    own = inputs.time(shards.start, shards.start + shards.length).requires_grad()
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3], generator=generator)
    used = []
    sharded.fused_shard_attention = lambda *args: used.append(args) or fused_shard_attention(*args)
    expected = sympow.attention(**exact.arguments(), power=2, cu_seqlens=cu_seqlens, backend="torch")
    (expected * weights.double()).sum().backward()
    y = attention(**own.arguments(), shards=shards, backend="triton", chunk_size=chunk_size)
    (y * shards.take(weights)).sum().backward()
    errors = {"y": _difference(y, shards.take(expected))}
    for name, mine, theirs in _pairs(own, exact):
        got = _summed(mine, group) if name == "theta" else mine.grad
        want = theirs.grad if name == "theta" else shards.take(theirs.grad)
        errors[name] = _difference(got, want)
    sharded.fused_shard_attention = fused_shard_attention
    return bool(used), errors
