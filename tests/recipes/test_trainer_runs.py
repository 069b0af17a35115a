"""What runs on `Trainer` tell the model card."""

from pathlib import Path

from hf_moa.recipes.trainer_runs import data_for_card


def test_card_names_no_data_but_those_of_the_hub():
    assert data_for_card(None) == {}
    assert data_for_card(str(Path(__file__).parent)) == {}  # a folder of files
    named = {"dataset": "rajpurkar/squad", "dataset_tags": "rajpurkar/squad", "dataset_args": None}
    assert data_for_card("rajpurkar/squad") == named
