"""Questions of SQuAD's form: files, windows, answers and their scores."""

import json

import numpy as np
import pytest
from datasets import Dataset
from few_words import squad, write_tokenizer
from transformers import AutoTokenizer

from hf_moa.recipes.question_answering import (
    AnswerMetric,
    Features,
    answer_place,
    normalised,
    num_answered,
    read_squad,
    squad_scores,
    token_f1,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_data_without_answers_have_none():
    rows = {"id": ["a"], "question": ["q"], "context": ["c"]}
    assert num_answered(Dataset.from_dict(rows)) == 0
    assert num_answered(Dataset.from_dict(rows | {"answers": [{"text": ["c"]}]})) == 1


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"data": []}',
        json.dumps({"data": [{"paragraphs": [{"qas": [{}]}]}]}),
        json.dumps(
            {"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "a", "question": None}]}]}]}
        ),
    ],
)
def test_other_files_are_errors(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="`train_file` must h"):
        read_squad(str(path), "train_file")


def test_unanswerable_questions_are_errors(tmp_path):
    content = squad(2)
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"got 2 questions .*, 1 without"):
        read_squad(str(path), "train_file")


def test_scores_by_hand():
    assert normalised("The  Quick, brown-fox!") == "quick brownfox"
    assert token_f1("the red dog", "a red cat") == pytest.approx(0.5)
    assert token_f1("", "red") == 0
    references = [{"text": ["red dog", "dog"]}, {"text": ["cat"]}]
    assert squad_scores(["The dog", "mat"], references) == {"exact_match": 50.0, "f1": 50.0}


def test_place_of_an_answer():
    outside = (-1, -1)
    offsets = np.array([outside, outside, (0, 3), (4, 7), (8, 12), outside])
    assert answer_place(offsets, {"text": ["ef "], "answer_start": [5]}) == (3, 3)
    assert answer_place(offsets, {"text": ["abc defg"], "answer_start": [4]}) == (3, 4)
    for start in (0, 11):  # the window begins, or ends, in the middle of it
        answers = {"text": ["xxxxx"], "answer_start": [start]}
        assert answer_place(np.delete(offsets, 2, axis=0), answers) == (0, 0)
    for start, length in ((3, 4), (4, 4)):  # the character before, or behind, has no token
        assert answer_place(offsets, {"text": ["x" * length], "answer_start": [start]}) == (3, 3)


def test_best_span_obeys_the_limits(tokenizer):
    """Against a search over all spans."""
    answers = {"text": ["cat"], "answer_start": [6]}
    questions = Dataset.from_list(
        [{"question": "the dog", "context": "the a cat dog sat ran on under", "answers": answers}]
    )
    features = Features(questions, tokenizer, max_length=32, stride=4, pad_to_max_length=False)
    [offsets] = features.offsets
    draws = np.random.default_rng(0)
    for most in (1, 2, 30):
        metric = AnswerMetric(features, n_best_size=20, max_answer_length=most)
        start, end = draws.normal(size=(2, 1, len(offsets)))
        spans = {
            (i, j): start[0, i] + end[0, j]
            for i in range(len(offsets))
            for j in range(i, min(i + most, len(offsets)))
            if offsets[i, 0] >= 0 and offsets[j, 0] >= 0
        }
        i, j = max(spans, key=spans.get)
        context = questions["context"][0]
        assert metric.answers(start, end) == [context[offsets[i, 0] : offsets[j, 1]]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "the dog " * 5}, "must leave room for the question .got one of 10 tokens"),
        ({"answers": {"text": [], "answer_start": []}}, "All questions must have an answer"),
    ],
)
def test_questions_that_do_not_fit_are_errors(tokenizer, row, message):
    answers = {"text": ["cat"], "answer_start": [6]}
    one = {"question": "the dog", "context": "the a cat dog sat", "answers": answers}
    questions = Dataset.from_list([one, {**one, **row}])
    with pytest.raises(ValueError, match=message):
        Features(questions, tokenizer, max_length=16, stride=4, pad_to_max_length=False)


def test_windows_of_many_questions_are_those_of_each(tokenizer):
    content = squad(1_003)["data"][0]["paragraphs"]
    rows = [{"context": p["context"], "question": p["qas"][0]["question"]} for p in content]
    for row, p in zip(rows, content, strict=True):
        [answer] = p["qas"][0]["answers"]
        row["answers"] = {name: [value] for name, value in answer.items()}
    options = {"max_length": 12, "stride": 3, "pad_to_max_length": False}
    features = Features(Dataset.from_list(rows), tokenizer, **options)
    assert len(features.dataset) == len(features.question) == len(features.offsets)
    for index in (0, 999, 1_000, 1_002):  # on both sides of a batch's end
        alone = Features(Dataset.from_list(rows[index : index + 1]), tokenizer, **options)
        windows = [i for i, question in enumerate(features.question) if question == index]
        assert [features.dataset[i] for i in windows] == list(alone.dataset)
        for i, offsets in zip(windows, alone.offsets, strict=True):
            assert np.array_equal(features.offsets[i], offsets)
    lean = Features(Dataset.from_list(rows[:3]), tokenizer, **options, keep_places=False)
    assert lean.offsets == []
