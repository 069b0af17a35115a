"""Text and pairs of the files that the scripts read."""

import csv
import gzip
import json

import pytest

from hf_moa.recipes.models import ModelArguments
from hf_moa.recipes.parallel_text import ParallelTextArguments, load_pairs
from hf_moa.recipes.text_blocks import (
    SplitTextArguments,
    TextFileArguments,
    load_lines,
    load_splits,
)

TEXTS = ["A gate, and\nanother.\n", 'It "opens".', "ä"]
LINES = ["A gate, and\nanother.\n", 'It "opens".\n', "ä\n"]


def write_rows(path, rows):
    """As CSV, as a JSON object a line, or as a JSON list, by the name."""
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in path.name:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        elif ".jsonl" in path.name:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            json.dump(rows, file, indent=1)
    return str(path)


@pytest.mark.parametrize("column", ["text", "content"])
@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.csv.gz", "a.jsonl.gz"])
def test_texts_of_a_table(name, column, tmp_path):
    """In the column `text` wherever it is, or else in the first one."""
    rows = [{column: text, "id": str(i)} for i, text in enumerate(TEXTS)]
    rows = [dict(reversed(row.items())) for row in rows] if column == "text" else rows
    path = write_rows(tmp_path / name, rows)
    assert load_lines(None, TextFileArguments(train_file=path), "train") == LINES


def test_carriage_returns_end_no_line_by_themselves(tmp_path):
    """Else parallel files would get out of step; behind a line they are a part of its end."""
    (tmp_path / "en").write_bytes(b"a gate\rand\r\ntwo gates\n")
    (tmp_path / "de").write_bytes(b"ein Tor\r\nzwei\rTore")
    files = {"train_source": str(tmp_path / "en"), "train_target": str(tmp_path / "de")}
    pairs = load_pairs(ParallelTextArguments(**files), "train")
    assert pairs == {"source": ["a gate\rand", "two gates"], "target": ["ein Tor", "zwei\rTore"]}
    lines = load_lines(None, TextFileArguments(train_file=str(tmp_path / "en")), "train")
    assert lines == ["a gate\rand\n", "two gates\n"]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl"])
def test_pairs_of_a_table_are_those_of_two_files(name, tmp_path):
    english, german = ["a gate", "two gates"], ["ein Tor", "zwei Tore"]
    rows = [{"de": de, "en": en} for en, de in zip(english, german, strict=True)]
    path = write_rows(
        tmp_path / name, rows if ".csv" in name else [{"translation": row} for row in rows]
    )
    for side, texts in (("en", english), ("de", german)):
        (tmp_path / side).write_text("\n".join(texts) + "\n")
    files = {"validation_source": str(tmp_path / "en"), "validation_target": str(tmp_path / "de")}
    expected = load_pairs(ParallelTextArguments(**files), "validation")
    table = ParallelTextArguments(validation_file=path, source_lang="en", target_lang="de")
    assert load_pairs(table, "validation") == expected == {"source": english, "target": german}
    assert table.has("validation")
    assert not table.has("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "`train_file` must hold a JSON object a line"),
        ("a.jsonl", '{"text": "a"}\nb\n', "`train_file` must hold a JSON object a line"),
        ("a.json", "[]", "`train_file` must hold rows of named columns"),
        ("a.json", '["a"]', "`train_file` must hold rows of named columns"),
        ("a.csv", "text\n", "`train_file` must hold rows of named columns"),
        ("a.jsonl", '{"text": "a"}\n{"text": 1}', r"`train_file` must have a text .*'text' \(row 1 is"),
        ("a.jsonl", "{}", r"`train_file` must have a text .*'text' \(row 0 is \{\}\)"),
    ],
)
def test_tables_without_texts_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_lines(None, TextFileArguments(train_file=str(tmp_path / name)), "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_file": "a.json"}, r"`train_file` needs `source_lang` and `target_lang` \(got None"),
        ({"train_file": "a.txt"}, r"`train_file` must be a .json, .jsonl or .csv file.*\(got a.txt\)"),
        (
            {"train_file": "a.json", "train_source": "b", "source_lang": "en", "target_lang": "de"},
            "either `train_file` or `train_source`, not both .got a.json and b.",
        ),
        ({"dataset_name": "d", "train_file": "a.json"}, "either `dataset_name` or files"),
    ],
)
def test_pairs_have_one_origin(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParallelTextArguments(**arguments)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"translation": {"en": "a"}},
            "`target_lang` must be a language of every pair .*'de'; there are en",
        ),
        (
            {"translation": "a"},
            "`source_lang` must be a language of every pair .*there are none in pair 0",
        ),
    ],
)
def test_pairs_need_both_languages(row, message, tmp_path):
    path = write_rows(tmp_path / "a.json", [row])
    arguments = ParallelTextArguments(train_file=path, source_lang="en", target_lang="de")
    with pytest.raises(ValueError, match=message):
        load_pairs(arguments, "train")


@pytest.mark.parametrize("origin", ["file", "dataset"])
def test_part_of_the_training_text_is_evaluated_on(origin, tmp_path):
    """Its beginning, where there is no validation text."""
    rows = [{"text": f"{i}\n"} for i in range(30)]
    data = tmp_path / "data"
    data.mkdir()
    path = write_rows(data / "train.jsonl", rows)
    where = {"train_file": path} if origin == "file" else {"dataset_name": str(data)}
    model_args = ModelArguments(model_type="gpt2", cache_dir=tmp_path / "cache")
    texts = [row["text"] for row in rows]
    splits = load_splits(model_args, SplitTextArguments(**where, validation_split_percentage=10))
    assert splits == {"train": texts[3:], "validation": texts[:3]}
    splits = load_splits(model_args, SplitTextArguments(**where))
    assert splits == {"train": texts[2:], "validation": texts[:2]}  # 5 % of 30
    splits = load_splits(model_args, SplitTextArguments(**where, validation_split_percentage=0))
    assert splits == {"train": texts}
    with pytest.raises(ValueError, match=r"must leave lines to train .* \(got 1 of 30 lines\)"):
        load_splits(model_args, SplitTextArguments(**where, validation_split_percentage=1))
    other = write_rows(data / "validation.jsonl", [{"text": "b"}])
    if origin == "file":
        where["validation_file"] = other
    splits = load_splits(model_args, SplitTextArguments(**where))
    assert splits == {"train": texts, "validation": ["b\n"]}


@pytest.mark.parametrize("value", [-1, 100])
def test_validation_split_is_a_percentage(value):
    with pytest.raises(ValueError, match=rf"must be at least 0 and less than 100 \(got {value}\)"):
        SplitTextArguments(train_file="a", validation_split_percentage=value)


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_byte_order_marks_and_long_cells(name, tmp_path):
    """What spreadsheets write, and articles."""
    path = tmp_path / name
    write_rows(path, [{"text": "word " * 40_000}, {"text": "b"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    lines = load_lines(None, TextFileArguments(train_file=str(path)), "train")
    assert [line.split()[0] for line in lines] == ["word", "b"]
    assert len(lines[0]) == 200_001
