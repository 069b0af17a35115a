"""`examples/run_glue.py` with one's own texts and labels instead of a GLUE task."""

import csv
import gzip
import json

import pytest
import run_glue
import torch
from few_words import write_tokenizer
from script_runs import ON_TRAINER, command_line, read_json
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from hf_moa.recipes.labelled_texts import load_labelled_files

TEXTS = ["the cat sat .", "a red dog ran .", "it was not very red .", "the mat was blue ."] * 3
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_json(path, rows):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def rows_of(labels, **others):
    return [
        {"id": i, "text": t, "label": labels[i % len(labels)], **others} for i, t in enumerate(TEXTS)
    ]


@pytest.fixture
def arguments(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    vocab_size = write_tokenizer(checkpoint)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=vocab_size, **SIZES)).save_pretrained(checkpoint)
    return {
        "model_name_or_path": str(checkpoint),
        "attention_type": "mae",
        "max_seq_length": 16,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "report_to": "none",
    }


def test_names_of_classes(arguments, tmp_path):
    """CSV to train and evaluate on, compressed JSON lines without labels to predict."""
    arguments |= {
        "train_file": write_csv(tmp_path / "train.csv", rows_of(["Good", "bad", "so so"])),
        "validation_file": write_csv(tmp_path / "dev.csv", rows_of(["bad", "so so"])),
        "test_file": write_json(tmp_path / "test.json.gz", [{"text": t} for t in TEXTS]),
        "do_predict": True,
    }
    run_glue.main(command_line(arguments))
    model = AutoModelForSequenceClassification.from_pretrained(arguments["output_dir"])
    assert model.config.id2label == {0: "Good", 1: "bad", 2: "so so"}
    assert 0 <= read_json(arguments, "eval_results.json")["eval_accuracy"] <= 1
    predicted = (tmp_path / "out" / "predict_results_texts.txt").read_text().splitlines()
    assert len(predicted) == 1 + len(TEXTS)
    assert {line.split("\t")[1] for line in predicted[1:]} <= {"Good", "bad", "so so"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "GLUE" not in card
    assert "nyu-mll" not in card


def test_accuracy_is_that_of_the_saved_model(arguments, tmp_path):
    path = write_csv(tmp_path / "data.csv", rows_of([0, 1]))
    run_glue.main(command_line(arguments | {"train_file": path, "validation_file": path}))
    model = AutoModelForSequenceClassification.from_pretrained(arguments["output_dir"]).eval()
    tokenizer = run_glue.load_tokenizer(run_glue.ModelArguments(arguments["output_dir"]))
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(-1)
    expected = (predicted == torch.arange(len(TEXTS)) % 2).float().mean().item()
    assert read_json(arguments, "eval_results.json")["eval_accuracy"] == pytest.approx(expected)


def test_decimals_are_a_regression(arguments, tmp_path):
    path = write_csv(tmp_path / "data.csv", rows_of(["1", "2.5", "0"]))
    run_glue.main(command_line(arguments | {"train_file": path, "validation_file": path}))
    found = read_json(arguments, "eval_results.json")
    assert {"eval_pearson", "eval_spearmanr"} <= set(found)
    model = AutoModelForSequenceClassification.from_pretrained(arguments["output_dir"])
    assert model.config.num_labels == 1


def classifier(*names):
    labels = dict(enumerate(names))
    return BertConfig(
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
        architectures=["BertForSequenceClassification"],
    )


@pytest.mark.parametrize(
    ("names", "labels", "classes", "ids"),
    [
        # a checkpoint that knows the classes keeps its own, in its order
        (("neg", "neu", "pos"), ["pos", "neg"], ("neg", "neu", "pos"), [2, 0]),
        (("neg", "neu", "pos"), ["2", "0"], ("neg", "neu", "pos"), [2, 0]),
        (("neg", "pos"), ["good", "bad"], ("bad", "good"), [1, 0]),
        (("neg", "pos"), [1, 2, 3], ("1", "2", "3"), [0, 1, 2]),
        # numbers in their order, written as they may be
        ((), ["10", "9"], ("9", "10"), [1, 0]),
        ((), [1.0, 0], ("0", "1"), [1, 0]),
        ((), [True, False], ("False", "True"), [1, 0]),
    ],
)
def test_classes(names, labels, classes, ids, tmp_path):
    path = write_json(tmp_path / "train.jsonl.gz", rows_of(labels))
    config = classifier(*names) if names else BertConfig()
    splits, task = load_labelled_files({"train": path}, config)
    assert task.label_names == classes
    assert splits["train"]["label"][: len(ids)] == ids
    assert splits["train"]["text"] == TEXTS
    assert splits["train"].column_names == ["text", "label", "idx"]


def test_pairs_of_texts(tmp_path):
    rows = [{"sentence2": "b", "note": "x", "sentence1": "a", "label": i % 2} for i in range(4)]
    path = write_csv(tmp_path / "train.csv", rows)
    _, task = load_labelled_files({"train": path}, BertConfig())
    assert list(task.text_columns) == ["sentence1", "sentence2"]
    rows = [{"id": str(i), "question": "a", "answer": "b", "label": i % 2} for i in range(4)]
    path = write_csv(tmp_path / "train.csv", rows)
    _, task = load_labelled_files({"train": path}, BertConfig())
    assert list(task.text_columns) == ["question", "answer"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of([0, 1], a="x y", b="z"), r"one or two columns of text .*got text, a, b among id"),
        ([{"n": 1, "label": 0}, {"n": 2, "label": 1}], "got none among n, label"),
        (rows_of([0, None]), r"a name or a number in the column `label` \(row 1 has None\)"),
        (rows_of([[0], [1]]), r"row 0 has \[0\]"),
        (rows_of(["a"]), r"labels of two classes at least \(got a\)"),
        ([*rows_of([0, 1]), {"text": None, "label": 0}], "must have a text in the column 'text'"),
    ],
)
def test_bad_rows(rows, message, tmp_path):
    path = write_json(tmp_path / "train.json.gz", rows)
    with pytest.raises(ValueError, match=message):
        load_labelled_files({"train": path}, BertConfig())


def test_labels_that_training_has_not(tmp_path):
    files = {
        "train": write_csv(tmp_path / "train.csv", rows_of(["a", "b"])),
        "validation": write_csv(tmp_path / "dev.csv", rows_of(["a", "c"])),
    }
    with pytest.raises(ValueError, match=r"dev.csv .* known, a, b \(row 1 has 'c'\)"):
        load_labelled_files(files, BertConfig())
    files["train"] = write_csv(tmp_path / "train.csv", rows_of(["0.5", "1"]))
    with pytest.raises(ValueError, match=r"numbers as labels \(row 0 has 'a'\)"):
        load_labelled_files(files, BertConfig())


def test_flags_that_do_not_go_together(arguments, tmp_path):
    for changed, message in (
        ({}, "Give either `task_name`"),
        ({"task_name": "sst2", "train_file": "a.csv"}, "Give either `task_name`"),
        ({"train_file": "a.csv", "data_dir": "b"}, "`data_dir` needs `task_name`"),
        ({"train_file": "a.csv"}, r"`train_file` must be a .* \(got a.csv: no such file\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run_glue.main(command_line(arguments | changed))
    path = write_csv(tmp_path / "train.csv", rows_of([0, 1]))
    with pytest.raises(ValueError, match=r"must have the split 'validation' \(got train\)"):
        run_glue.main(command_line(arguments | {"train_file": path}))


def test_finetuned_classifier_goes_on(arguments, tmp_path):
    """Its classes stay its own, though the file has only some of them."""
    torch.manual_seed(0)
    folder = arguments["model_name_or_path"]
    vocab_size = BertConfig.from_pretrained(folder).vocab_size
    config = classifier("neg", "neu", "pos").to_dict() | SIZES | {"vocab_size": vocab_size}
    BertForSequenceClassification(BertConfig(**config)).save_pretrained(folder)
    path = write_csv(tmp_path / "data.csv", rows_of(["pos", "neg"]))
    run_glue.main(command_line(arguments | {"train_file": path, "validation_file": path}))
    model = AutoModelForSequenceClassification.from_pretrained(arguments["output_dir"])
    assert model.config.id2label == {0: "neg", 1: "neu", 2: "pos"}
