"""`load_glue_tsv` on small files in each published form."""

import gzip
import re

import pytest

from hf_moa.training import GLUE_TASKS, load_glue_tsv


def write(path, *rows, bom=False, end="\n"):
    """Writes rows of fields to a TSV file, gzipped if the path says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join("\t".join(row) + end for row in rows)
    data = data.encode("utf-8-sig" if bom else "utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_sst2_reads_train_gzipped_and_dev_plain(tmp_path):
    write(tmp_path / "SST-2/train.tsv.gz", ["sentence", "label"], ["dull ", "0"], ["fine ", "1"])
    write(tmp_path / "SST-2/dev.tsv", ["sentence", "label"], ["so so", "1"])
    write(tmp_path / "SST-2/test.tsv", ["index", "sentence"], ["0", "who knows"])
    data = load_glue_tsv(tmp_path, "sst2")
    assert list(data) == ["train", "validation", "test"]
    assert data["train"].to_dict() == {
        "sentence": ["dull ", "fine "],
        "label": [0, 1],
        "idx": [0, 1],
    }
    assert data["validation"]["label"] == [1]
    assert data["test"].to_dict() == {"sentence": ["who knows"], "label": [-1], "idx": [0]}
    assert data["train"].features["label"].names == ["negative", "positive"]


def test_plain_file_is_read_where_both_exist(tmp_path):
    write(tmp_path / "SST-2/dev.tsv", ["sentence", "label"], ["plain", "1"])
    write(tmp_path / "SST-2/dev.tsv.gz", ["sentence", "label"], ["gzipped", "1"])
    assert load_glue_tsv(tmp_path, "sst2")["validation"]["sentence"] == ["plain"]


def test_cola_has_no_header_but_in_test(tmp_path):
    write(tmp_path / "CoLA/train.tsv", ["gj04", "1", "", "A."], ["gj04", "0", "*", "B me."])
    write(tmp_path / "CoLA/test.tsv", ["index", "sentence"], ["0", "C."])
    data = load_glue_tsv(tmp_path, "cola")
    assert data["train"].to_dict() == {"sentence": ["A.", "B me."], "label": [1, 0], "idx": [0, 1]}
    assert data["test"]["sentence"] == ["C."]


def test_mrpc_has_a_byte_order_mark_and_lone_quotes(tmp_path):
    header = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    first = ["1", "11", "12", 'He said , " no .', '" No , " he said .']
    second = ["0", "21", "22", "It rose 4 % .", "It fell ."]
    write(tmp_path / "MRPC/train.tsv", header, first, second, bom=True, end="\r\n")
    data = load_glue_tsv(tmp_path, "mrpc")["train"]
    assert data["sentence1"] == ['He said , " no .', "It rose 4 % ."]
    assert data["sentence2"] == ['" No , " he said .', "It fell ."]
    assert data["label"] == [1, 0]


def test_stsb_is_regression(tmp_path):
    header = ["index", "genre", "filename", "year", "old_index", "source1", "source2"]
    header += ["sentence1", "sentence2"]
    row = ["0", "news", "MSR", "2012", "1", "none", "none", "A.", "B."]
    write(tmp_path / "STS-B/dev.tsv", [*header, "score"], [*row, "3.750"])
    write(tmp_path / "STS-B/test.tsv", header, row)
    data = load_glue_tsv(tmp_path, "stsb")
    assert data["validation"].to_dict() == {
        "sentence1": ["A."],
        "sentence2": ["B."],
        "label": [3.75],
        "idx": [0],
    }
    assert data["test"]["label"] == [-1.0]


@pytest.mark.parametrize(
    ("task", "texts", "labels"),
    [
        ("qnli", ["question", "sentence"], ["entailment", "not_entailment"]),
        ("rte", ["sentence1", "sentence2"], ["entailment", "not_entailment"]),
        ("wnli", ["sentence1", "sentence2"], ["0", "1"]),
    ],
)
def test_inference_pairs(tmp_path, task, texts, labels):
    folder = tmp_path / GLUE_TASKS[task].folder
    rows = [[str(i), f"premise {i}", "conclusion", label] for i, label in enumerate(labels)]
    write(folder / "dev.tsv", ["index", *texts, "label"], *rows)
    data = load_glue_tsv(tmp_path, task)["validation"]
    assert data[texts[0]] == ["premise 0", "premise 1"]
    assert data["label"] == [0, 1]


def test_qqp_takes_its_own_column_names(tmp_path):
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    write(tmp_path / "QQP/dev.tsv", header, ["7", "1", "2", "Why?", "How?", "0"])
    data = load_glue_tsv(tmp_path, "qqp")["validation"]
    assert data[0] == {"question1": "Why?", "question2": "How?", "label": 0, "idx": 0}


def test_mnli_has_two_development_sets_and_takes_the_gold_label(tmp_path):
    header = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse"]
    header += ["sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
    header += ["sentence1", "sentence2", "label1", "gold_label"]
    row = ["0", "1", "1c", "fiction", "( A )", "( B )", "(R A)", "(R B)", "A", "B"]
    write(tmp_path / "MNLI/train.tsv", header, [*row, "entailment", "contradiction"])
    write(tmp_path / "MNLI/dev_matched.tsv", header, [*row, "neutral", "neutral"])
    write(tmp_path / "MNLI/dev_mismatched.tsv", header, [*row, "neutral", "entailment"])
    write(tmp_path / "MNLI/test_matched.tsv", header[:-2], row)
    data = load_glue_tsv(tmp_path, "mnli")
    assert {split: data[split]["label"][0] for split in data} == {
        "train": 2,
        "validation_matched": 1,
        "validation_mismatched": 0,
        "test_matched": -1,
    }
    assert data["train"][0] == {"premise": "A", "hypothesis": "B", "label": 2, "idx": 0}


def test_only_line_feeds_end_a_line(tmp_path):
    text = "a\u2028b\x85c\x0cd\re"
    write(tmp_path / "SST-2/dev.tsv", ["sentence", "label"], [text, "1"], [""], ["next", "0"])
    data = load_glue_tsv(tmp_path, "sst2")["validation"]
    assert data["sentence"] == [text, "next"]
    assert data["idx"] == [0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["too", "many", "1"], "expected 2 columns ['sentence', 'label'], got 3"),
        (["too few"], "expected 2 columns ['sentence', 'label'], got 1"),
        (["text", "2"], "the column 'label' must be one of '0', '1', got '2'"),
        (["text", ""], "the column 'label' must be one of '0', '1', got ''"),
    ],
)
def test_malformed_rows_are_named(tmp_path, caplog, row, message):
    path = tmp_path / "SST-2/train.tsv.gz"
    write(path, ["sentence", "label"], ["good", "1"], [], row, ["fine", "0"])
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 4: {message}")):
        load_glue_tsv(tmp_path, "sst2")

    data = load_glue_tsv(tmp_path, "sst2", skip_malformed=True)["train"]
    assert data.to_dict() == {"sentence": ["good", "fine"], "label": [1, 0], "idx": [0, 2]}
    assert "1 malformed rows left out of 3" in caplog.text


@pytest.mark.parametrize("score", ["five", "5.5", "-1", "nan"])
def test_scores_are_from_0_to_5(tmp_path, score):
    path = tmp_path / "STS-B/dev.tsv"
    write(path, ["sentence1", "sentence2", "score"], ["A", "B", score])
    expected = f"line 2: the column 'score' must be a number from 0 to 5, got '{score}'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_glue_tsv(tmp_path, "stsb")


def test_missing_columns_are_named(tmp_path):
    write(tmp_path / "RTE/train.tsv", ["index", "sentence1", "sentence2"], ["0", "A", "B"])
    with pytest.raises(ValueError, match=r"train\.tsv, line 1: .* without 'label'\)"):
        load_glue_tsv(tmp_path, "rte")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder STS-B .*train\.tsv, train\.tsv\.gz, dev\.tsv"):
        load_glue_tsv(tmp_path, "stsb")


def test_unknown_task_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"`task_name` must be one of cola, .* \(got 'ax'\)"):
        load_glue_tsv(tmp_path, "ax")


@pytest.mark.parametrize("content", [b"", b"sentence\tlabel\n"])
def test_empty_files_are_errors(tmp_path, content):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/dev.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=r"dev\.tsv"):
        load_glue_tsv(tmp_path, "sst2")


def test_other_encodings_are_errors(tmp_path):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/dev.tsv").write_bytes("sentence\tlabel\ncaf\xe9\t1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"dev\.tsv must be UTF-8 text"):
        load_glue_tsv(tmp_path, "sst2")
