"""Generation from a sharded model (FSDP2) in mixed precision."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sympow.hf import SympowCache


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one process: casting does not depend on the number of processes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
@torch.no_grad()
def test_states_keep_their_precision_between_calls(make, tokens, mesh, mixer):
    """FSDP2, as accelerate configures it, casts the tensors among a module's inputs and outputs."""
    model, ids = make(mixer=mixer).float(), tokens()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    for module in (*model.model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    cache = model(ids[:, :6], past_key_values=SympowCache("state" if mixer == "sympow" else "auto")).past_key_values
    for layer in cache.state:
        assert layer.phase.dtype == torch.float64
        if mixer == "sympow":
            assert layer.kv.dtype == layer.normalizer.dtype == torch.float32
            # The values were not rounded either.
            assert not torch.equal(layer.kv, layer.kv.bfloat16().float())
    generated = model.generate(ids[:, :6], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 10)
    logits = model(generated, use_cache=False).logits
    stepwise = model(generated[:, 6:], past_key_values=cache).logits
    assert (stepwise - logits[:, 6:]).abs().max() < 0.02 * logits.abs().max()
