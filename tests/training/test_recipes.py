"""The papers' optimiser settings are arguments of the trainers."""

import pytest

from hf_moa.training import (
    MoaSeq2SeqTrainingArguments,
    causal_language_model_recipe,
    masked_language_model_recipe,
    translation_recipe,
)


@pytest.mark.parametrize(
    "recipe",
    [translation_recipe(), masked_language_model_recipe(), causal_language_model_recipe()],
)
def test_recipes_are_training_arguments(recipe, tmp_path):
    arguments = MoaSeq2SeqTrainingArguments(str(tmp_path), use_cpu=True, **recipe)
    for name, value in recipe.items():
        assert getattr(arguments, name) == value


def test_rate_of_the_base_transformer():
    assert translation_recipe()["learning_rate"] == pytest.approx(7e-4, rel=0.01)
    assert translation_recipe(1024, 16_000)["learning_rate"] == pytest.approx(2.47e-4, rel=0.01)
