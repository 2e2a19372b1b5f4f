"""A small teacher, settings of a small conversion, and what comes out of one."""

import json

import torch

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    # Large enough that attention is not nearly uniform, and predictions not nearly so either.
    "initializer_range": 0.2,
}
TINY = {
    "context": 16,
    "batch_tokens": 128,
    "micro_batch_tokens": 64,
    "match_tokens": 8 * 128,
    "distill_tokens": 8 * 128,
    "match_rate": 1e-2,
    "distill_rate": 1e-2,
    "extend_rate": 1e-2,
    "evaluate_tokens": 256,
    "log_every": 1,
    "tensorboard": False,
}


def make_llama(seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def make_gpt2():
    """Attention with one map of queries, keys and values, learned positions, and no rotation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
    config = GPT2Config(**shape, bos_token_id=256, eos_token_id=256, initializer_range=SHAPE["initializer_range"])
    return GPT2LMHeadModel(config).eval()


def losses_of(folder, stage):
    """The loss of every step of a stage."""
    lines = (folder / "stages" / stage / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def learns(folder, *stages):
    """Whether each stage reduces its loss."""
    ends = [(losses[:2], losses[-2:]) for losses in (losses_of(folder, stage) for stage in stages)]
    return all(sum(last) < 0.9 * sum(first) for first, last in ends)


def same_weights(one, other):
    """Whether two saved models have the same weights, bit for bit, by their folders."""
    one, other = weights_of(one), weights_of(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
