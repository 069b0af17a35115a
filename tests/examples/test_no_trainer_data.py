"""What the Accelerate scripts make of texts."""

from pathlib import Path

import pytest
import run_clm_no_trainer
import torch
from accelerate_runs import SCRIPTS, cut_unevenly, made_up_lines, run
from datasets import Dataset
from transformers import AutoTokenizer

from hf_moa.quickstart.tokenizer import pack, train_tokenizer
from hf_moa.recipes import masked_text
from hf_moa.recipes.text_blocks import TextBlocks


def test_line_ends_can_be_left_out(arguments, monkeypatch):
    """Evaluated on is the beginning of the training text."""
    texts = {}

    def recorded(lines, *args):
        texts[len(lines)] = lines
        return TextBlocks(lines, *args)

    monkeypatch.setattr(run_clm_no_trainer, "TextBlocks", recorded)
    values = arguments("clm", max_train_steps=1, validation_file=None, no_keep_linebreaks=True)
    assert "perplexity" in run("clm", values)
    lines = Path(values["train_file"]).read_text().splitlines()
    assert texts == {38: lines[2:], 2: lines[:2]}


def test_masks_follow_from_seed_epoch_and_place(arguments):
    values = arguments("mlm")
    run("mlm", values)
    tokenizer = AutoTokenizer.from_pretrained(values["output_dir"])
    data_args = masked_text.MaskedTextArguments(train_file="a", max_seq_length=16)
    sequences = masked_text.pack(list(made_up_lines(400, 0)), tokenizer, data_args)
    one, other = (
        masked_text.RemaskedSequences(*sequences, tokenizer, probability=0.3, seed=1) for _ in range(2)
    )
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
    assert torch.equal(torch.where(predicted, labels, ids), one.ids.view_as(ids))


def test_sequences_are_packed_as_the_quickstarts():
    lines = [*made_up_lines(30, 0), "\x01\n"]  # the last one has no tokens
    tokenizer = train_tokenizer(lines, 60)
    data_args = masked_text.MaskedTextArguments(train_file="a", max_seq_length=16)
    ids, lengths = masked_text.pack(lines, tokenizer, data_args)
    expected = pack(tokenizer, lines, 16)
    assert ids.reshape(-1, 16).tolist() == [row["input_ids"] for row in expected]
    assert lengths.tolist() == [16] * len(expected)


def test_lines_are_sequences(arguments, tmp_path, caught):
    values = arguments("mlm", line_by_line=True, max_seq_length=14)
    lines = ["a gate\n", "\n", f"{'a gate ' * 20}\n", "  \n", "heads and heads\n"]
    Path(values["train_file"]).write_text("".join(lines * 3))
    run("mlm", values)
    (training,) = caught
    tokenizer, data = training.tokenizer, training.train_dataset
    texts = [line.strip() for line in lines * 3 if line.strip()]
    expected = tokenizer(texts, truncation=True, max_length=14)["input_ids"]
    assert max(map(len, expected)) == 14 > min(map(len, expected))
    for row, ids in zip(data, expected, strict=True):
        predicted = row["labels"] != -100
        assert predicted.any()
        assert torch.where(predicted, row["labels"], row["input_ids"]).tolist() == ids
    for batch in training.loader:
        rows = [
            row[mask.bool()]
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert max(map(len, rows)) == batch["input_ids"].shape[1]
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_lines_are_padded_to_one_length(arguments, caught):
    run("mlm", arguments("mlm", line_by_line=True, pad_to_max_length=True, max_seq_length=40))
    assert {batch["input_ids"].shape[1] for batch in caught[0].loader} == {40}
    assert {batch["labels"].shape[1] for batch in caught[0].loader} == {40}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"line_by_line": None}, "`pad_to_max_length` needs `line_by_line`"),
        ({"max_seq_length": 2}, r"`max_seq_length` must be at least 3, .* \(got 2\)"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "group_by_length needs sequences of several lengths",
        ),
    ],
)
def test_padding_that_cannot_work_is_an_error(changes, message, arguments):
    values = arguments("mlm", line_by_line=True, pad_to_max_length=True)
    with pytest.raises(ValueError, match=message):
        run("mlm", values | changes)


def test_lines_of_similar_length_come_together(arguments, caught):
    for strategy in ("random", "group_by_length"):
        values = arguments("mlm", line_by_line=True, train_sampling_strategy=strategy)
        cut_unevenly(values["train_file"])
        run("mlm", values)
    padding = [sum((batch["attention_mask"] == 0).sum() for batch in each.loader) for each in caught]
    assert padding[1] < padding[0]


@pytest.mark.parametrize("task", SCRIPTS)
def test_scripts_tokenise_in_as_many_processes_as_asked(task, arguments, caught, monkeypatch):
    map_rows, asked = Dataset.map, []

    def recorded(self, *args, num_proc, **kwargs):
        asked.append(num_proc)
        return map_rows(self, *args, **kwargs)

    monkeypatch.setattr(Dataset, "map", recorded)
    run(task, arguments(task, preprocessing_num_workers=3))
    assert asked == [3, 3]
    with pytest.raises(ValueError, match=r"`preprocessing_num_workers` must be at least 1 \(got 0\)"):
        run(task, arguments(task, preprocessing_num_workers=0))
