"""Captured gates and rotations against the same numbers computed layer by layer, without capture."""

import math
import os

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from support import assert_close
from sympow import GPT, GPTConfig
from sympow.data.loader import Loader
from sympow.data.open import open_dataset
from sympow.evaluate.head_statistics import (
    HeadTable,
    capture,
    half_life,
    held_out_rows,
    measure_heads,
    read_heads,
    write_heads,
)
from sympow.generation.prefix import Prefix
from sympow.model.storage import save_model
from sympow.train.monitoring import gate_and_rotation_metrics

TOKENS = 50


def lively_model(**changes):
    """A small model with data-dependent gates and rotations."""
    settings = {"vocab_size": 257, "layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "head_dim": 8}
    settings["rotary"] = "scale"
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma_proj.weight" in name or "beta_proj.weight" in name:
                parameter.normal_(std=1.0)
            if "gamma_proj.bias" in name:
                parameter.fill_(2.0)
            if name.endswith("theta"):
                parameter.mul_(1.5)
    return model.eval()


@torch.no_grad()
def layer_by_layer(model, tokens):
    """log γ and β of every layer, from its input and its parameters."""
    x = model.embedding_norm(model.embedding(tokens))
    found = []
    for block in model.blocks:
        inside = block.mixer_norm(x)
        gate, rotation = block.mixer.gate.gamma_proj, block.mixer.rotation.beta_proj
        found.append((logsigmoid(inside @ gate.weight.T + gate.bias)[0], 1 + torch.tanh(inside @ rotation.weight.T)[0]))
        x, _ = block(x, None, False, None)
    return found


@pytest.mark.parametrize("segment_size", [TOKENS, 16])
def test_a_capture_has_every_token_of_every_layer(segment_size):
    model = lively_model()
    tokens = torch.randint(257, (1, TOKENS))
    found = capture(model, lambda: Prefix.prefill(model, tokens, segment_size=segment_size))
    for layer, (log_gamma, beta) in zip(found, layer_by_layer(model, tokens), strict=True):
        assert layer.log_gamma.shape == layer.beta.shape == (TOKENS, 2)
        assert_close(layer.log_gamma, log_gamma, 1e-4, "log_gamma")
        assert_close(layer.beta, beta, 1e-4, "beta")
        assert layer.rate_change is None


def test_a_capture_leaves_the_model_as_it_was():
    model = lively_model()
    capture(model, lambda: model(torch.zeros(1, 3, dtype=torch.long)))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_capture_is_of_one_sequence():
    model = lively_model()
    with pytest.raises(ValueError, match="one sequence at a time, got a batch of 2"):
        capture(model, lambda: model(torch.zeros(2, 3, dtype=torch.long)))


def test_learned_rates_are_seen_relative_to_their_start():
    model = lively_model(gating="none", rotary="learned")
    (first, _) = capture(model, lambda: model(torch.zeros(1, 3, dtype=torch.long)))
    assert first.log_gamma is None
    assert first.beta is None
    torch.testing.assert_close(first.rate_change, torch.full((4,), 1.5))


def batches():
    loader = Loader(open_dataset("stdlib", "heldout"), 25, 1, short="join", shuffle=False, epochs=1, prefetch=0)
    return [batch for batch, _ in zip(loader, range(2), strict=False)]


def test_heads_are_summed_up_over_tokens():
    model = lively_model()
    read = batches()
    table = measure_heads(model, read, "stdlib")
    assert (table.tokens, table.data) == (TOKENS, "stdlib")
    parts = [layer_by_layer(model, batch.inputs) for batch in read]
    for layer in range(2):
        log_gamma = np.concatenate([part[layer][0].numpy() for part in parts]).astype(np.float64)
        beta = np.concatenate([part[layer][1].numpy() for part in parts]).astype(np.float64)
        close = {"rel": 1e-3}
        assert table.quantities["half_life"][layer] == pytest.approx(math.log(2) / -np.median(log_gamma, 0), **close)
        shortest = math.log(2) / -np.percentile(log_gamma, 10, axis=0)
        assert table.quantities["half_life_short"][layer] == pytest.approx(shortest, **close)
        assert table.quantities["beta_mean"][layer] == pytest.approx(beta.mean(0), **close)
        assert table.quantities["beta_deviation"][layer] == pytest.approx(beta.std(0), **close)
    assert "rate_change" not in table.quantities


def test_pairs_of_a_head_count_together():
    table = measure_heads(lively_model(gating="vector", rotary="pairs"), batches())
    assert [len(row) for row in table.quantities["half_life"]] == [2, 2]
    assert all(0 < x < 2 for row in table.quantities["beta_mean"] for x in row)


@pytest.mark.parametrize("rotary", ["signed", "grid"])
def test_angles_are_not_taken_for_scales(rotary):
    model = lively_model(rotary=rotary)
    assert set(measure_heads(model, batches()).quantities) == {"half_life", "half_life_short"}
    metrics = gate_and_rotation_metrics(model, lambda: model(batches()[0].inputs))
    assert set(metrics) == {"half_life/layer_0", "half_life/layer_1"}


def test_a_state_that_keeps_all_has_no_half_life():
    assert half_life(0.0) is None
    assert half_life(math.log(0.5)) == pytest.approx(1.0)
    assert half_life(-math.inf) == 0.0


def test_rows_are_those_of_the_run():
    settings = {"data": "stdlib", "context": 32, "short": "join"}
    rows = list(held_out_rows(settings, tokens=100))
    assert [tuple(batch.inputs.shape) for batch in rows] == [(1, 32)] * 3


def test_a_table_is_kept_until_the_model_is_newer(tmp_path):
    table = HeadTable({"half_life": [[1.0, None]]}, 100, "stdlib")
    write_heads(tmp_path, table)
    assert read_heads(tmp_path) == table
    model = lively_model()
    save_model(tmp_path / "model", model.config, model.state_dict())
    later = (tmp_path / "heads.json").stat().st_mtime + 10
    os.utime(tmp_path / "model" / "model.safetensors", (later, later))
    assert read_heads(tmp_path) is None
