import pytest
import torch

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
    "rotary": "scale",
}


@pytest.fixture
def make():
    """Makes a model in float64 whose gates and rotations depend on the data."""
    from sympow.hf import SympowConfig, SympowForCausalLM

    def make_model(seed=0, noise=0.1, **changes):
        torch.manual_seed(seed)
        model = SympowForCausalLM(SympowConfig(**{**SMALL, **changes})).double().eval()
        with torch.no_grad():
            for parameter in model.model.blocks.parameters():
                parameter += noise * torch.randn_like(parameter)
            for block in model.model.blocks:
                # Queries and keys share a direction: without it, a state computes tiny scores as differences of large
                # numbers.
                bias = block.mixer.qkv_proj.bias
                heads = bias.unflatten(0, (-1, model.config.hidden_size // model.config.num_attention_heads))
                heads[: -(model.config.num_key_value_heads or model.config.num_attention_heads), :2] += 1
            # A tied embedding alone would predict the last input token.
            model.model.final_norm.weight.copy_(torch.randn_like(model.model.final_norm.weight))
        return model

    return make_model


@pytest.fixture
def tokens():
    def make_tokens(batch=2, length=12, vocabulary=50, seed=2):
        return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make_tokens


@pytest.fixture
def pad_left():
    """Pads texts of different lengths on the left to one batch; returns it with its attention mask."""

    def pad(texts, token=0):
        longest = max(map(len, texts))
        ids = torch.stack([torch.nn.functional.pad(text, (longest - len(text), 0), value=token) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        return ids, (torch.arange(longest) >= (longest - lengths).unsqueeze(1)).long()

    return pad


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_SIZES = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
# Softmax models that `pretrained` makes, as model type and changes of its config.
PRETRAINED = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt2": ("gpt2", {"attn_pdrop": 0.0}),
}


@pytest.fixture
def pretrained():
    """Makes a softmax model of transformers with weights large enough for its attention not to be uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make_model(kind="llama", seed=0, dtype=torch.float64, **changes):
        model_type, others = PRETRAINED[kind]
        sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **others, **changes}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += (0.3 if parameter.ndim == 1 or "norm" in name else 0.15) * torch.randn_like(parameter)
        return model.to(dtype).eval()

    return make_model


@pytest.fixture
def swapped(pretrained):
    """Makes a model with swapped attention whose gates, and scales of rotations, depend on the data."""
    from sympow.hf import attention_modules, swap_attention

    def make_model(kind="llama", seed=0, model=None, **options):
        model = swap_attention(pretrained(kind, seed) if model is None else model, **options)
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for module in attention_modules(model).values():
                for part in (getattr(module, "gate", None), getattr(module, "rotation", None)):
                    for parameter in [] if part is None else part.parameters():
                        parameter += 0.3 * torch.randn_like(parameter)
        return model

    return make_model
