"""transformers' own model tests on the gated classes: `python tests/upstream/run.py SOURCE` runs them.

One test class for each suite and variant: `ModelTesterMixin` and `ConfigTester` for all,
`TrainingTesterMixin` for GPT-2, and `GenerationTesterMixin` where the source tree has it. Left out are
the pipeline tests, which download models, and those of tensor parallelism and FSDP, for which neither
BERT, GPT-2 nor T5 has a plan. What remains may need an accelerator, flash attention or DeepSpeed, and
then skips itself, as it does for transformers' own classes.
"""

from __future__ import annotations

import fnmatch
import unittest
from dataclasses import dataclass

from testers import SUITES, VARIANTS, Suite, Tester
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_training_mixin import TrainingTesterMixin
from transformers.models.auto import modeling_auto

import hf_moa
from tests import test_modeling_common as upstream


@dataclass(frozen=True)
class Inapplicable:
    """Tests that say nothing of our classes, or that transformers' own classes fail too, and why."""

    pattern: str
    reason: str
    suites: tuple[str, ...] = tuple(suite.name for suite in SUITES)
    variants: tuple[str, ...] = tuple(VARIANTS)


INAPPLICABLE = (
    Inapplicable(
        "test_eager_matches_batched_and_grouped_inference_*",
        "compares implementations of feed-forward experts, which only ffn_type='moe' has; "
        "transformers asks the class, not the configuration, whether there are any",
        variants=("mha", "mae", "moa", "cct"),
    ),
    Inapplicable(
        "test_keep_in_fp32_modules_exist",
        "looks for typing errors in lists of module names, which are one for all configurations: "
        "without MAE there is no mixture.gate.norm, with experts or CCT no wo, without CCT no down",
    ),
    Inapplicable(
        "test_keep_in_fp32_modules",
        "gates stand in that list because quantisers leave out what is on it; loaded in float16 they "
        "are in float16, as transformers' own routers",
        variants=("mae", "moa", "cct", "moe"),
    ),
    Inapplicable(
        "test_training_gradient_checkpointing_use_reentrant_true",
        "refused with a ValueError: the auxiliary losses would lose their gradients",
        variants=("moa", "cct", "moe"),
    ),
    Inapplicable(
        "test_attention_outputs",
        "counts an encoder-decoder's outputs; CCT's costs are among them",
        suites=("T5", "T5Heads"),
        variants=("cct",),
    ),
    Inapplicable(
        "test_eager_matches_sdpa_inference_*_bf16_*",
        "compares outputs to rounding; a hard gate whose logit is near zero, as those of a model that "
        "was not trained are, falls either way in bfloat16",
        variants=("cct",),
    ),
    Inapplicable(
        "test_eager_matches_sdpa_inference_*_bf16_*",
        "compares outputs to rounding, which in bfloat16 changes a token's choice of experts where two "
        "are nearly alike; outputs agree for the sequences whose choices do",
        suites=("T5", "T5Heads"),
        variants=("moa",),
    ),
    Inapplicable(
        "test_model_base_model_prefix",
        "asks for a base model inside the language model; T5's holds its two stacks itself, "
        "transformers' too",
        suites=("T5",),
    ),
    Inapplicable(
        "test_inputs_embeds",
        "T5's classifier finds the end token in input_ids, transformers' too",
        suites=("T5Heads",),
    ),
)


def _name_classes() -> None:
    """Let the mixins, which go by class names, know what task each of our classes is for."""
    for name, mapping in vars(modeling_auto).items():
        if not name.endswith("_MAPPING_NAMES"):
            continue
        for family in {suite.family.name: suite.family for suite in SUITES}.values():
            plain = mapping.get(family.plain_config_class.model_type)
            if isinstance(plain, str) and hasattr(hf_moa, f"Moa{plain}"):
                mapping[family.config_class.model_type] = f"Moa{plain}"


class _Common:
    """What every suite has beside the mixins."""

    suite: Suite
    variant: str
    test_resize_position_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        upstream.global_rng.seed(0)
        self.model_tester = Tester(self.suite, self.variant)
        self.config_tester = ConfigTester(
            self,
            config_class=self.model_tester.config_class,
            common_properties=["hidden_size", "num_attention_heads", "num_hidden_layers"],
            **self.model_tester.fields,
        )

    def test_config(self):
        self.config_tester.run_common_tests()


def _test_class(suite: Suite, variant: str) -> type:
    mixins = [_Common, upstream.ModelTesterMixin]
    classes = suite.classes(variant)
    if any(model_class.can_generate() for model_class in classes):
        mixins.append(GenerationTesterMixin)
    if suite.language_model:
        mixins.append(TrainingTesterMixin)
    contents = {
        "suite": suite,
        "variant": variant,
        "all_model_classes": classes,
        "is_encoder_decoder": suite.is_encoder_decoder,
        "model_tester": None,
        "__module__": __name__,
    }
    test_class = type(suite.title(variant), (*mixins, unittest.TestCase), contents)
    for row in INAPPLICABLE:
        if suite.name not in row.suites or variant not in row.variants:
            continue
        for name in fnmatch.filter(dir(test_class), row.pattern):
            setattr(test_class, name, unittest.skip(row.reason)(getattr(test_class, name)))
    return test_class


_name_classes()
for _suite in SUITES:
    for _variant in VARIANTS:
        _made = _test_class(_suite, _variant)
        globals()[_made.__name__] = _made
del _made
