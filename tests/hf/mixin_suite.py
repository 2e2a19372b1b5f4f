"""transformers' common model tests (`ModelTesterMixin`) for our models and swapped Llamas, which `test_mixin.py` runs.

The tests are part of transformers' source package. Two mixins that they import, for generation and export, are only in
its repository; the tests of generation, compilation and export check the same for these models.
"""

import sys
import types
import unittest

from sympow.hf import SympowConfig, SympowForCausalLM, SympowForSequenceClassification, SympowModel
from sympow.hf.swap.classes import (
    SympowLlamaConfig,
    SympowLlamaForCausalLM,
    SympowLlamaForSequenceClassification,
    SympowLlamaForTokenClassification,
    SympowLlamaModel,
)

for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
    absent = types.ModuleType(f"tests.{name}")
    setattr(absent, mixin, type(mixin, (), {}))
    sys.modules[absent.__name__] = absent

from transformers.models.auto import modeling_auto  # noqa: E402

# The mixin looks up the task of a class in these lists, which name transformers' own models only.
for task, ours, swapped in (
    ("", SympowModel, SympowLlamaModel),
    ("FOR_CAUSAL_LM_", SympowForCausalLM, SympowLlamaForCausalLM),
    ("FOR_SEQUENCE_CLASSIFICATION_", SympowForSequenceClassification, SympowLlamaForSequenceClassification),
    ("FOR_TOKEN_CLASSIFICATION_", None, SympowLlamaForTokenClassification),
):
    names = getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")
    names["sympow_swapped"] = swapped.__name__
    if ours is not None:
        names["sympow"] = ours.__name__

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask  # noqa: E402

VOCABULARY = 99


class SympowTester:
    """Provides the mixin with a config and inputs."""

    base_model_class, causal_lm_class = SympowModel, SympowForCausalLM
    batch_size, seq_length = 3, 7
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    is_training = True

    def get_config(self):
        return self.config_of(SympowConfig, rotary="scale")

    def config_of(self, kind, **others):
        return kind(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **others,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        inputs = {"input_ids": ids_tensor(shape, VOCABULARY), "attention_mask": random_attention_mask(shape)}
        return self.get_config(), inputs


class SwappedTester(SympowTester):
    """The same for Llamas, some of whose layers are swapped."""

    base_model_class, causal_lm_class = SympowLlamaModel, SympowLlamaForCausalLM

    def __init__(self, layers):
        self.layers = layers

    def get_config(self):
        config = self.config_of(SympowLlamaConfig, intermediate_size=37)
        config.sympow_attention = {
            "base_model_type": "llama",
            "layers": self.layers,
            "power": 2,
            "gating": "scalar",
            "rotary": "fixed",
            "initial_gate": 0.999,
            "form": "auto",
            "backend": "auto",
            "chunk_size": None,
            "cache_policy": "auto",
        }
        return config


class Case(ModelTesterMixin, GenerationTesterMixin):
    has_attentions = False  # attention weights are never materialized
    # Skipped for models older than 2023, by the year in a licence header, which our files do not have.
    test_can_init_all_missing_weights_before_2023 = True


class TestSympow(Case, unittest.TestCase):
    all_model_classes = (SympowModel, SympowForCausalLM, SympowForSequenceClassification)

    def setUp(self):
        self.model_tester = SympowTester()


class SwappedCase(Case):
    all_model_classes = (
        SympowLlamaModel,
        SympowLlamaForCausalLM,
        SympowLlamaForSequenceClassification,
        SympowLlamaForTokenClassification,
    )

    @unittest.skip("rotation rates that depend on the length of a text are refused: a state holds rotated keys")
    def test_model_rope_scaling_from_config_1_dynamic(self):
        """Of the mixin."""


class TestWhole(SwappedCase, unittest.TestCase):
    def setUp(self):
        self.model_tester = SwappedTester([0, 1])

    @unittest.skip("it asks for attentions, and a model without softmax layers does not support output_attentions")
    def test_capture_outputs_decorator(self):
        """Of the mixin."""


class TestHybrid(SwappedCase, unittest.TestCase):
    def setUp(self):
        self.model_tester = SwappedTester([0])
