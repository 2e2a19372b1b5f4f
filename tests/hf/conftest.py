import pytest
import torch

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
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
