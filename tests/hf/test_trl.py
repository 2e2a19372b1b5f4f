"""trl's trainers, given a model's folder: supervised fine-tuning, DPO, and a reward model."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from sympow.data.tokenizer import ByteTokenizer
from sympow.hf import SympowConfig, SympowForCausalLM, SympowForSequenceClassification, to_fast_tokenizer

pytestmark = pytest.mark.slow
OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "dataloader_pin_memory": False,
    "max_length": 64,
}
TEXTS = ["def f(x):\n    return x + 1\n", "The quick brown fox jumps over the lazy dog. " * 2] * 4


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    tokenizer = to_fast_tokenizer(ByteTokenizer())
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    config = SympowConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **ids)
    SympowForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def train(trainer, kind):
    """Trains and returns the losses; checks that the model has the class that its folder names, and that it learns."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert type(model.get_base_model() if hasattr(model, "get_base_model") else model) is kind
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.train()
    changed = [name for name, p in model.named_parameters() if name in before and not torch.equal(before[name], p)]
    assert changed
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == OPTIONS["max_steps"]
    return losses


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "padding_free": True}, {"padding_free": True, "max_length": None}],
    ids=["padded", "packed", "padding-free"],
)
def test_supervised_fine_tuning(folder, tmp_path, options):
    data = Dataset.from_dict({"text": TEXTS})
    config = SFTConfig(str(tmp_path / "out"), **{**OPTIONS, **options})
    losses = train(SFTTrainer(folder, config, train_dataset=data), SympowForCausalLM)
    assert losses[-1] < losses[0]


def test_supervised_fine_tuning_of_adapters(folder, tmp_path):
    data = Dataset.from_dict({"text": TEXTS})
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    config = SFTConfig(str(tmp_path / "out"), **OPTIONS)
    losses = train(SFTTrainer(folder, config, train_dataset=data, peft_config=adapters), SympowForCausalLM)
    assert losses[-1] < losses[0]


PREFERENCES = {
    "prompt": ["Say something: ", "Say more: "] * 4,
    "chosen": ["aaaa", "aa"] * 4,
    "rejected": ["bbbb", "bb"] * 4,
}


def test_direct_preference_optimization(folder, tmp_path):
    config = DPOConfig(str(tmp_path / "out"), **OPTIONS)
    trainer = DPOTrainer(folder, args=config, train_dataset=Dataset.from_dict(PREFERENCES))
    losses = train(trainer, SympowForCausalLM)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is still the reference
    assert losses[-1] < losses[0]


def test_a_reward_model(folder, tmp_path):
    config = RewardConfig(str(tmp_path / "out"), **OPTIONS)
    trainer = RewardTrainer(folder, config, train_dataset=Dataset.from_dict(PREFERENCES))
    train(trainer, SympowForSequenceClassification)
