"""What `run_translation_no_trainer.py` makes of pairs and data sets."""

import pytest
import torch
from accelerate_runs import run, weights
from datasets import Dataset


def evaluated(training):
    with torch.no_grad():
        return training.evaluate(training.model.eval())


def test_targets_to_evaluate_on_have_a_length_of_their_own(arguments, caught, monkeypatch):
    run("translation", arguments("translation", max_target_length=6, val_max_target_length=9))
    (training,) = caught
    assert max(len(labels) for labels in training.train_dataset["labels"]) == 6
    generate, asked = training.model.generate, []

    def recorded(*args, **kwargs):
        asked.append((kwargs["num_beams"], kwargs["max_length"]))
        return generate(*args, **kwargs)

    monkeypatch.setattr(training.model, "generate", recorded)
    assert evaluated(training)["eval_tokens"] == 9 * 9
    assert set(asked) == {(2, 9)}


def test_evaluation_without_translations(arguments, caught):
    run("translation", arguments("translation", predict_with_generate=False))
    assert set(evaluated(caught[0])) == {"eval_loss", "eval_tokens"}


@pytest.mark.parametrize("ignored", [True, False])
def test_pairs_are_padded_to_one_length(ignored, arguments, caught):
    """Which changes no loss, unless padding is to be predicted."""
    changes = {"max_source_length": 60, "max_target_length": 50, "predict_with_generate": False}
    changes["ignore_pad_token_for_loss"] = ignored
    for padded in (False, True):
        run("translation", arguments("translation", **changes, pad_to_max_length=padded))
    batches = [batch for training in caught for batch in training.loader]
    assert {batch["input_ids"].shape[1] for batch in batches[-10:]} == {60}
    assert {batch["labels"].shape[1] for batch in batches[-10:]} == {50}
    has_ignored = [bool((batch["labels"] == -100).any()) for batch in batches]
    assert has_ignored[-10:] == [ignored] * 10
    assert any(has_ignored[:-10]) == ignored
    one, other = (evaluated(training) for training in caught)
    assert (other["eval_tokens"] == 9 * 50) == (not ignored)
    assert (other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)) == ignored


@pytest.mark.parametrize("name", ["val_max_target_length", "max_source_length", "num_beams"])
def test_counts_are_positive(name, arguments):
    with pytest.raises(ValueError, match=rf"`{name}` must be at least 1 \(got 0\)"):
        run("translation", arguments("translation", **{name: 0}))


def test_pairs_of_one_length_are_not_grouped_by_it(arguments):
    changes = {"pad_to_max_length": True, "train_sampling_strategy": "group_by_length"}
    with pytest.raises(ValueError, match="group_by_length needs sequences of several lengths"):
        run("translation", arguments("translation", **changes))


@pytest.fixture
def translation_dataset(arguments, tmp_path):
    """Arguments of a run on files, and of the same pairs as a data set of the Hub has them."""
    values = arguments("translation")
    (tmp_path / "data").mkdir()
    files = {"train": "train", "validation": "valid"}
    for split, name in files.items():
        sides = [(tmp_path / f"{name}.{side}").read_text().splitlines() for side in ("en", "de")]
        rows = [{"en": en, "de": de} for en, de in zip(*sides, strict=True)]
        Dataset.from_dict({"translation": rows}).to_parquet(tmp_path / "data" / f"{split}.parquet")
    changes = {f"{split}_{side}": None for split in files for side in ("source", "target")}
    changes |= {"dataset_name": tmp_path / "data", "cache_dir": tmp_path / "cache"}
    return values, changes | {"source_lang": "en", "target_lang": "de"}


def test_translation_of_a_data_set_is_that_of_its_files(translation_dataset, tmp_path):
    values, changes = translation_dataset
    run("translation", values)
    expected = weights(values)
    values |= changes | {"output_dir": tmp_path / "again"}
    run("translation", values)
    assert all(torch.equal(weights(values)[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_lang": None}, r"needs `source_lang` and `target_lang` \(got None and 'de'\)"),
        ({"target_lang": "fr"}, r"`target_lang` must be a language .*'fr'; there are (en, de|de, en)"),
        ({"train_source": "train.en"}, "either `dataset_name` or files"),
    ],
)
def test_data_sets_that_cannot_be_translated_are_refused(translation_dataset, change, message):
    values, changes = translation_dataset
    with pytest.raises(ValueError, match=message):
        run("translation", values | changes | change)
