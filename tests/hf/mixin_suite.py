"""transformers' common model tests (`ModelTesterMixin`) for our models. `test_mixin.py` runs this file.

The tests are part of transformers' source package. Two mixins that they import, for generation and export, are only in
its repository; `test_generation.py` and the tests of compilation and export check the same for our models.
"""

import sys
import types
import unittest

from sympow.hf import SympowConfig, SympowForCausalLM, SympowForSequenceClassification, SympowModel

for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
    absent = types.ModuleType(f"tests.{name}")
    setattr(absent, mixin, type(mixin, (), {}))
    sys.modules[absent.__name__] = absent

from transformers.models.auto import modeling_auto  # noqa: E402

# The mixin looks up the task of a class in these lists, which name transformers' own models only.
modeling_auto.MODEL_MAPPING_NAMES["sympow"] = "SympowModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["sympow"] = "SympowForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["sympow"] = "SympowForSequenceClassification"

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
        return SympowConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            rotary="scale",
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        inputs = {"input_ids": ids_tensor(shape, VOCABULARY), "attention_mask": random_attention_mask(shape)}
        return self.get_config(), inputs


class TestSympow(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (SympowModel, SympowForCausalLM, SympowForSequenceClassification)
    has_attentions = False  # attention weights are never materialized
    # Skipped for models older than 2023, by the year in a licence header, which our files do not have.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = SympowTester()
