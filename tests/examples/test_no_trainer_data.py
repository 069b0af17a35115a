"""What the Accelerate scripts make of texts, pairs and data sets."""

from pathlib import Path

import pytest
import run_clm_no_trainer
import run_mlm_no_trainer
import torch
from accelerate_runs import made_up_lines, run, weights
from datasets import Dataset
from text_blocks import TextBlocks
from transformers import AutoTokenizer


def test_line_ends_can_be_left_out(arguments, monkeypatch):
    """Evaluated on is the beginning of the training text."""
    texts = {}

    def recorded(lines, tokenizer, block_size):
        texts[len(lines)] = lines
        return TextBlocks(lines, tokenizer, block_size)

    monkeypatch.setattr(run_clm_no_trainer, "TextBlocks", recorded)
    values = arguments("clm", max_train_steps=1, validation_file=None, no_keep_linebreaks=True)
    assert "perplexity" in run("clm", values)
    lines = Path(values["train_file"]).read_text().splitlines()
    assert texts == {38: lines[2:], 2: lines[:2]}


def test_masks_follow_from_seed_epoch_and_place(arguments):
    values = arguments("mlm")
    run("mlm", values)
    tokenizer = AutoTokenizer.from_pretrained(values["output_dir"])
    lines = list(made_up_lines(400, 0))
    settings = {"length": 16, "probability": 0.3, "seed": 1}
    one = run_mlm_no_trainer.RemaskedSequences(lines, tokenizer, **settings)
    other = run_mlm_no_trainer.RemaskedSequences(lines, tokenizer, **settings)
    rows = [one[i] for i in range(len(one))]
    for i in reversed(range(len(one))):
        assert torch.equal(rows[i]["input_ids"], other[i]["input_ids"])
    one.set_epoch(1)
    assert any(not torch.equal(one[i]["input_ids"], rows[i]["input_ids"]) for i in range(len(one)))
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    predicted = labels != -100
    assert not predicted[:, 0].any()  # [CLS]
    assert 0.2 < predicted.float().mean() < 0.33
    masked = (ids == tokenizer.mask_token_id)[predicted].float().mean()
    assert 0.75 < masked < 0.85
    assert 0.07 < (ids == labels)[predicted].float().mean() < 0.14
    assert torch.equal(torch.where(predicted, labels, ids), one.ids)


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
