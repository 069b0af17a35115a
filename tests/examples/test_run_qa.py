"""`examples/run_qa.py` end to end: a tiny BERT on a few made-up questions; and what it scores with."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import run_qa
import torch
from datasets import Dataset
from question_answering import (
    AnswerMetric,
    Features,
    answer_place,
    normalised,
    num_answered,
    read_squad,
    squad_scores,
    token_f1,
)
from script_runs import command_line, read_json
from test_run_glue import WORDS, checkpoint  # noqa: F401 - fixture
from text_training import data_for_card
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

import hf_moa  # noqa: F401 - registers the gated models


def squad(num_questions):
    paragraphs = []
    for i in range(num_questions):
        words = [WORDS[(i + j) % len(WORDS)] for j in range(9)]
        context, answer = " ".join(words), words[5]
        answers = [{"text": answer, "answer_start": len(" ".join(words[:5])) + 1}]
        question = {"id": str(i), "question": f"the {words[4]}", "answers": answers}
        paragraphs.append({"context": context, "qas": [question]})
    return {"data": [{"paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    with gzip.open(folder / "train.json.gz", "wt", encoding="utf-8") as file:
        json.dump(squad(12), file)
    (folder / "dev.json").write_text(json.dumps(squad(5)), encoding="utf-8")
    return folder


@pytest.fixture
def arguments(files, checkpoint, tmp_path):  # noqa: F811
    return {
        "model_name_or_path": checkpoint,
        "train_file": str(files / "train.json.gz"),
        "validation_file": str(files / "dev.json"),
        "max_seq_length": 12,
        "doc_stride": 3,
        "output_dir": str(tmp_path / "out"),
        "do_train": True,
        "do_eval": True,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }


def test_gated_model_at_budgets_and_its_checkpoint(arguments):
    given = {
        **arguments,
        "attention_type": "mae",
        "mae_training": "joint",
        "cct_budgets": [1, 0.5],
        "cct_noise_steps": -1,
        "eval_budgets": True,
        "pad_to_max_length": False,
        "train_sampling_strategy": "group_by_length",
    }
    run_qa.main(command_line(given))
    results = read_json(arguments, "eval_results.json")
    assert results["eval_samples"] == 5
    rows = read_json(arguments, "budget_results_squad.json")
    assert [row["budget"] for row in rows] == [1, 0.5]
    assert rows[0]["eval_f1"] == results["eval_f1"]
    assert rows[0]["eval_exact_match"] == results["eval_exact_match"]

    # The same figures from the saved checkpoint, without a trainer.
    model = AutoModelForQuestionAnswering.from_pretrained(arguments["output_dir"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    questions = read_squad(arguments["validation_file"], "validation_file")
    features = Features(questions, tokenizer, max_length=12, stride=3, pad_to_max_length=True)
    assert len(features.question) > len(questions)  # contexts of several windows
    columns = ("input_ids", "token_type_ids", "attention_mask")
    batch = {name: torch.tensor(features.dataset[name]) for name in columns}
    with torch.no_grad():
        outputs = model(**batch)
    metric = AnswerMetric(features, n_best_size=20, max_answer_length=30)
    answers = metric.answers(outputs.start_logits.numpy(), outputs.end_logits.numpy())
    scores = squad_scores(answers, questions["answers"])
    assert scores["f1"] == pytest.approx(results["eval_f1"])


def test_a_model_learns_to_answer(arguments):
    run_qa.main(
        command_line({**arguments, "max_steps": 150, "learning_rate": 3e-3, "max_eval_samples": 4})
    )
    results = read_json(arguments, "eval_results.json")
    assert results["eval_samples"] == 4
    assert results["eval_exact_match"] >= 75


@pytest.mark.parametrize("unanswered", [0, 1, 5])
def test_test_questions_are_answered(arguments, files, unanswered, tmp_path, caplog):
    """With scores, in the card too, where all their answers are known."""
    content, answered = squad(5), unanswered == 0
    for paragraph in content["data"][0]["paragraphs"][:unanswered]:
        del paragraph["qas"][0]["answers"]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    given = arguments | {"attention_type": "mae", "do_predict": True, "test_file": str(path)}
    run_qa.main(command_line(given))
    results, evaluated = (read_json(arguments, f"{name}_results.json") for name in ("predict", "eval"))
    answers = read_json(arguments, "predict_predictions.json")
    assert list(answers) == [str(i) for i in range(5)]
    assert results["predict_samples"] == 5
    card = Path(arguments["output_dir"], "README.md").read_text(encoding="utf-8")
    assert ("F1 (predict)" in card) == ("predict_f1" in results) == answered
    assert answered == (f"{unanswered} of 5 test questions come without answers" not in caplog.text)
    if answered:  # the very questions of the validation file
        for name in ("f1", "exact_match", "loss"):
            assert results[f"predict_{name}"] == evaluated[f"eval_{name}"]
        references = read_squad(str(path), "test_file")["answers"]
        assert squad_scores(answers.values(), references)["f1"] == pytest.approx(results["predict_f1"])
    given = arguments | {"do_train": False, "do_eval": False, "do_predict": True, "train_file": None}
    run_qa.main(command_line({**given, "test_file": str(path), "max_predict_samples": 2}))
    assert len(read_json(arguments, "predict_predictions.json")) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_predict": True}, "give `test_file`"),
        ({"dataset_name": "squad"}, "Give either `dataset_name`, or `train_file`"),
        ({"doc_stride": 12}, "`doc_stride` must be less than `max_seq_length`"),
        ({"n_best_size": 0}, "`n_best_size` must be at least 1"),
        ({"validation_file": None}, "give `validation_file`"),
        ({"validation_file": "nowhere.json"}, "`validation_file` must be a file of questions"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with CCT gates"),
        (
            {"eval_strategy": "epoch", "train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy` group_by_length would change the order",
        ),
    ],
)
def test_mistakes_are_errors(arguments, given, message):
    with pytest.raises(ValueError, match=message):
        run_qa.main(command_line({**arguments, **given}))


def test_test_questions_of_one_id_are_errors(arguments, tmp_path):
    content = squad(2)
    content["data"][0]["paragraphs"][1]["qas"][0]["id"] = "0"
    path = tmp_path / "test.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    given = arguments | {"do_predict": True, "test_file": str(path)}
    with pytest.raises(
        ValueError, match=r"of `test_file` must have an `id` of its own \(got '0' 2 times"
    ):
        run_qa.main(command_line(given))


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


def test_card_names_no_data_but_those_of_the_hub():
    assert data_for_card(None) == {}
    assert data_for_card(str(Path(__file__).parent)) == {}  # a folder of files
    named = {"dataset": "rajpurkar/squad", "dataset_tags": "rajpurkar/squad", "dataset_args": None}
    assert data_for_card("rajpurkar/squad") == named


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


def test_best_span_obeys_the_limits(checkpoint):  # noqa: F811
    """Against a search over all spans."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
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
def test_questions_that_do_not_fit_are_errors(checkpoint, row, message):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = {"text": ["cat"], "answer_start": [6]}
    one = {"question": "the dog", "context": "the a cat dog sat", "answers": answers}
    questions = Dataset.from_list([one, {**one, **row}])
    with pytest.raises(ValueError, match=message):
        Features(questions, tokenizer, max_length=16, stride=4, pad_to_max_length=False)


def test_windows_of_many_questions_are_those_of_each(checkpoint):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
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
