import gzip
import json

import pytest
import torch
from families import CASE
from test_pipelines import tokenizer

from hf_moa.analysis import analyze, budget_metrics, evaluate
from hf_moa.text_batches import TextBatches, read_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, text):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return str(path)


def test_lines_without_the_blank_ones(tmp_path):
    for name in ("a.txt", "b.en", "c.de.gz"):
        data = read_text(write(tmp_path / name, 'one\n\n  \nNA\n"two\n'))
        assert data["text"] == ["one", "NA", '"two']


def test_columns_of_a_table_get_their_roles(tmp_path):
    path = write(tmp_path / "a.tsv", 'sentence\tother\tlabel\n"a\tb\t1\nnull\td\t0\n')
    data = read_text(path, columns={"text": "sentence", "pair": "other"})
    assert data[:] == {"text": ['"a', "null"], "pair": ["b", "d"], "label": [1, 0]}
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x", "label": "yes", "more": 1}))
    assert read_text(path)[:] == {"text": ["x"], "label": ["yes"]}


def test_target_beside_the_source(tmp_path):
    source, target = write(tmp_path / "a.en", "a\n\nb\n"), write(tmp_path / "a.de", "A\n\nB\n")
    assert read_text(source, target_file=target)[:] == {"text": ["a", "b"], "target": ["A", "B"]}
    assert read_text(source, target_file=target, limit=2)["text"] == ["a"]
    with pytest.raises(ValueError, match=r"as many lines as .*a.en \(got 1 and 3\)"):
        read_text(source, target_file=write(tmp_path / "b.de", "A\n"))


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("a\tb\n1\t2\n", {}, r"must have a column 'text' \(got a, b\)"),
        ("text\tb\n1\t2\n", {"label": "c"}, r"must have a column 'c' \(got text, b\)"),
        ("text\tb\n \t2\n", {}, "must hold text"),
    ],
)
def test_data_without_what_is_asked_for_is_refused(tmp_path, text, columns, message):
    with pytest.raises(ValueError, match=message):
        read_text(write(tmp_path / "a.tsv", text), columns=columns)


def test_a_file_that_is_not_there_is_no_dataset_of_the_hub(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_text(str(tmp_path / "missing.txt"))


def batches(name, rows, tmp_path, **kwargs):
    case = CASE[name]
    path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    return TextBatches(read_text(path), tokenizer(case), case.build(), **kwargs)


TEXTS = [{"text": "the attention of a head", "label": 1}, {"text": "a", "label": 0}, {"text": "of the"}]


def test_every_pass_gives_the_same_batches(tmp_path):
    found = batches("BertForMaskedLM", TEXTS, tmp_path, with_labels=True, batch_size=2)
    first, second = list(found), list(found)
    assert len(first) == len(found) == 2
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_masked_tokens_alone_are_labels(tmp_path):
    rows = [{"text": "the attention of a head " * 20}] * 4
    (batch,) = batches("BertForMaskedLM", rows, tmp_path, with_labels=True)
    (plain,) = batches("BertForMaskedLM", rows, tmp_path, with_labels=False)
    assert "labels" not in plain
    chosen = batch["labels"] != -100
    assert 0.05 < chosen.float().mean() < 0.3
    assert torch.equal(batch["labels"][chosen], plain["input_ids"][chosen])
    assert torch.equal(batch["input_ids"][~chosen], plain["input_ids"][~chosen])
    assert batch["input_ids"].shape[1] == 40  # cut at the model's positions


def test_padding_is_no_label_of_a_causal_model(tmp_path):
    (batch,) = batches("GPT2LMHeadModel", TEXTS, tmp_path, with_labels=True)
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    real = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][real], batch["input_ids"][real])


def test_classifiers_take_numbers_and_names(tmp_path):
    rows = [{"text": "a", "label": 2}, {"text": "the", "label": 0}]
    (batch,) = batches("BertForSequenceClassification", rows, tmp_path, with_labels=True)
    assert batch["labels"].tolist() == [2, 0]
    named = [{"text": "a", "label": "LABEL_2"}]
    (batch,) = batches("BertForSequenceClassification", named, tmp_path, with_labels=True)
    assert batch["labels"].tolist() == [2]
    unknown = batches(
        "BertForSequenceClassification", [{"text": "a", "label": "x"}], tmp_path, with_labels=True
    )
    with pytest.raises(ValueError, match=r"LABEL_0, LABEL_1, LABEL_2 \(got 'x'\)"):
        list(unknown)
    without = batches("BertForSequenceClassification", [{"text": "a"}], tmp_path, with_labels=True)
    assert not without.has_labels
    assert "labels" not in next(iter(without))


def test_sequences_to_sequences_need_a_target(tmp_path):
    with pytest.raises(ValueError, match="target column"):
        batches("T5ForConditionalGeneration", TEXTS, tmp_path, with_labels=False)
    rows = [{"text": "the head", "target": "a head of attention"}]
    (batch,) = batches("T5ForConditionalGeneration", rows, tmp_path, with_labels=False)
    assert batch["labels"].shape[1] > batch["input_ids"].shape[1]


def test_batches_of_another_size_measure_the_same(tmp_path):
    rows = [{"text": text} for text in ("the attention of a head", "a", "of the head", "the the of")]
    case = CASE["GPT2LMHeadModel"]
    model = case.build(attention_type="mae", cct_budgets=[1, 0.5])
    found = []
    for size in (1, 4):
        same = batches("GPT2LMHeadModel", rows, tmp_path, with_labels=True, batch_size=size)
        same.tokenizer.padding_side = "left"  # as generation wants it
        assert len(list(same)) == 4 // size
        tables = analyze(model, same, progress=False).tables
        tables["loss"] = budget_metrics([1, 0.5], lambda b, same=same: evaluate(model, same, budget=b))
        found.append(tables)
    for table in found[0]:
        one, other = (tables[table].select_dtypes("number").to_numpy() for tables in found)
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5), table


@pytest.mark.parametrize("label", [-1, None])
def test_hidden_labels_are_none(tmp_path, label):
    rows = [{"text": "a", "label": 1}, {"text": "the", "label": label}]
    found = batches("BertForSequenceClassification", rows, tmp_path, with_labels=True)
    assert not found.has_labels
    assert "labels" not in next(iter(found))


def test_labels_that_the_model_does_not_have_are_refused(tmp_path):
    rows = [{"text": "a", "label": 3}]
    with pytest.raises(ValueError, match=r"from 0 to 2 \(got 3\)"):
        list(batches("BertForSequenceClassification", rows, tmp_path, with_labels=True))


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", b""), ("b.txt", b"\xff\xfe\x00"), ("a.jsonl", b"{\n")]
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        read_text(str(path))


def test_numbers_are_text_too(tmp_path):
    (batch,) = batches("BertForMaskedLM", [{"text": 1}, {"text": 20}], tmp_path, with_labels=False)
    assert batch["input_ids"].shape[0] == 2


def test_numbers_are_targets_too(tmp_path):
    rows = [{"text": "a", "target": 0}, {"text": "the", "target": 20}]
    (batch,) = batches("T5ForConditionalGeneration", rows, tmp_path, with_labels=False)
    assert batch["labels"].shape[0] == 2


@pytest.mark.parametrize(
    ("name", "role"), [("T5ForConditionalGeneration", "target"), ("BertForMaskedLM", "pair")]
)
def test_every_text_has_what_others_have_beside_them(name, role, tmp_path):
    rows = [{"text": "a", role: "the"}, {"text": "of", role: None}]
    with pytest.raises(ValueError, match=rf"must have a {role} beside it \(got none beside 'of'\)"):
        list(batches(name, rows, tmp_path, with_labels=False))


def test_multiple_choice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="several texts an example"):
        batches("BertForMultipleChoice", TEXTS, tmp_path, with_labels=False)
