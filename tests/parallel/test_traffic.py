"""Communication volume: counted, independent of the context for a state, and as the formulas of docs/scaling.md say."""

import pytest
import torch
from benchmarks.traffic import LayerShape, gathered_key_value_bytes, ring_attention_bytes, state_bytes
from parallel import cases

# The shape of the inputs of the counted calls.
KINDS = {"scalar": 1, "vector": 2, "none": 0}


@pytest.mark.parametrize("exchange", ["gather", "rounds"])
@pytest.mark.parametrize(("gate", "rotation"), [("scalar", "scale"), ("vector", "pairs"), ("none", "fixed")])
def test_what_a_rank_sends_does_not_depend_on_the_context(pool, exchange, gate, rotation):
    kind = {"gate": gate, "rotation": rotation}
    shape = LayerShape(heads=2, key_dim=4, value_dim=3, power=2, pairs=KINDS[gate], rotated=rotation != "fixed")
    for ranks in (2, 3, 4):
        short = pool.run(cases.traffic, ranks, length=8, exchange=exchange, kind=kind)
        long = pool.run(cases.traffic, ranks, length=800, exchange=exchange, kind=kind)
        assert short == long
        for rank, (forward, backward) in enumerate(short):
            sent = {"exchange": exchange, "itemsize": 8}
            assert forward == state_bytes(shape, ranks, rank=rank, **sent)
            assert backward == state_bytes(shape, ranks, rank=ranks - 1 - rank, **sent)


def test_states_travel_in_their_own_dtype(pool):
    (forward, _), *_ = pool.run(cases.traffic, 2, length=8, power=4, dtype=torch.float32)
    shape = LayerShape(heads=2, key_dim=4, value_dim=3, power=4)
    assert forward == state_bytes(shape, 2, rank=0, exchange="gather", itemsize=4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [8, 40])
def test_keys_and_values_are_sent_as_the_formulas_say(pool, ranks, length):
    shape = LayerShape(heads=2, key_dim=4, value_dim=4)
    for gathered, ring, difference in pool.run(cases.softmax_traffic, ranks, length=length):
        assert difference < 1e-12
        assert gathered == gathered_key_value_bytes(shape, length, ranks, itemsize=8)
        assert ring == sum(ring_attention_bytes(shape, length, ranks, itemsize=8, gradient_itemsize=8))
