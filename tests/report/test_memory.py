"""The table of states against keys and values, and its page."""

from pathlib import Path

import pytest
import torch
from convert.tiny import make_llama

from sympow import State
from sympow.report.memory import KNOWN_SHAPES, break_even, bytes_of_cache, bytes_of_states, memory_table, shape

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"


def test_the_page_has_the_table_of_the_function():
    _, _, after = PAGE.read_text("utf-8").partition("<!-- memory_table: begin -->")
    assert after.partition("<!-- memory_table: end -->")[0].strip() == memory_table()


@pytest.mark.parametrize("power", [2, 4])
def test_bytes_are_those_of_states_and_caches(power):
    pytest.importorskip("transformers", reason="needs transformers")
    from sympow.hf import swap_attention

    config = shape(layers=3, key_value_heads=2, head_dim=8, power=power)
    state = State.zeros(1, 2, 8, 8, power, rotated=False)
    assert bytes_of_states(config) == 3 * state.nbytes
    ids, model = torch.arange(12).unsqueeze(0), make_llama(num_hidden_layers=3)
    with torch.no_grad():
        kept = model(ids, use_cache=True).past_key_values
        cache = swap_attention(model, power=power, cache_policy="state")(ids, use_cache=True).past_key_values
    assert bytes_of_cache(config, 12, itemsize=4) == sum(
        x.nbytes for layer in kept.layers for x in (layer.keys, layer.values)
    )
    phases = 3 * 2 * 4 * 8
    assert bytes_of_states(config) == sum(layer.nbytes for layer in cache.layers) - phases


def test_states_are_smaller_from_the_break_even_on():
    for config in KNOWN_SHAPES.values():
        for copied in (False, True):
            tokens, size = break_even(config, copied=copied), bytes_of_states(config, copied=copied)
            assert bytes_of_cache(config, tokens - 1) < size <= bytes_of_cache(config, tokens)
    largest = KNOWN_SHAPES["Qwen3 14B"]
    assert bytes_of_states(largest, copied=True) > bytes_of_states(largest)
