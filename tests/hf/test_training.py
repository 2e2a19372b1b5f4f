"""Losses, gradient checkpointing, and transformers' Trainer."""

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from support import assert_close, assert_same_model
from sympow.data.tokenizer import ByteTokenizer
from sympow.hf import SympowConfig, SympowForCausalLM, to_fast_tokenizer
from sympow.hf.model import modeling


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_loss_is_of_the_next_token_where_labels_count(make, tokens):
    model, ids = make().train(), tokens()
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(ids).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
    assert_close(model(ids, labels=labels).loss, expected, 2e-6, "loss")
    several = model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    assert_close(several, expected * (labels[:, 1:] != -100).sum() / 100, 2e-6, "loss")


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
def test_padding_learns_nothing(make, tokens, pad_left, mixer):
    model = make(mixer=mixer).train()
    text, short = tokens(2, 8)
    ids, mask = pad_left([text, short[:5]], token=49)
    labels = ids.masked_fill(mask == 0, -100)
    padded = gradients(model, input_ids=ids, attention_mask=mask, labels=labels)
    alone = gradients(model, input_ids=text[None], labels=text[None])
    other = gradients(model, input_ids=short[None, :5], labels=short[None, :5])
    for name, gradient in padded.items():
        assert_close(gradient, (7 * alone[name] + 4 * other[name]) / 11, 1e-6, "gradient")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(make, tokens, reentrant):
    model, ids = make().train(), tokens()
    expected = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.blocks[0].mixer.register_forward_hook(lambda *_: calls.append(1))
    for name, gradient in gradients(model, input_ids=ids, labels=ids).items():
        assert torch.equal(gradient, expected[name]), name
    assert len(calls) == 2, "nothing was recomputed"
    assert model(ids, use_cache=True).past_key_values is None
    model.gradient_checkpointing_disable()
    assert model(ids, use_cache=True).past_key_values is not None


def test_a_cache_asked_for_with_checkpointing_is_said_not_to_be_made(make, tokens, caplog):
    model, ids = make().train(), tokens()
    model.gradient_checkpointing_enable()
    # Other tests may have caused the message, which is logged once.
    modeling.logger.warning_once.cache_clear()
    assert model(ids).past_key_values is None
    assert not caplog.records
    for _ in range(2):
        assert model(ids, use_cache=True).past_key_values is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "`use_cache=True` is incompatible with gradient checkpointing" in caplog.text


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_fine_tunes(tmp_path, checkpointing):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(0)
    tokenizer = to_fast_tokenizer(ByteTokenizer())
    config = SympowConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        rotary="scale",
        pad_token_id=256,
        eos_token_id=256,
    )
    texts = ["ab" * 12, "abab" * 3, "ba" * 9, "ab" * 5] * 4
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=SympowForCausalLM(config),
        args=arguments,
        train_dataset=[tokenizer(text) for text in texts],
        eval_dataset=[tokenizer(text) for text in texts[:4]],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    (evaluated,) = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated < losses[0]
    trainer.save_model(tmp_path / "model")
    loaded = SympowForCausalLM.from_pretrained(tmp_path / "model")
    assert_same_model(loaded, trainer.model.eval(), tokenizer("abab", return_tensors="pt").input_ids)
