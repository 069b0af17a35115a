"""`examples/run_qa.py` end to end: a tiny BERT on a few made-up questions."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import run_qa
import torch
from few_words import squad
from script_runs import ON_TRAINER, assert_measured_again, command_line, read_json
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from hf_moa.recipes.question_answering import AnswerMetric, Features, read_squad, squad_scores


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    with gzip.open(folder / "train.json.gz", "wt", encoding="utf-8") as file:
        json.dump(squad(12), file)
    (folder / "dev.json").write_text(json.dumps(squad(5)), encoding="utf-8")
    return folder


@pytest.fixture
def arguments(files, checkpoint, tmp_path):
    return {
        "model_name_or_path": checkpoint,
        "train_file": str(files / "train.json.gz"),
        "validation_file": str(files / "dev.json"),
        "max_seq_length": 12,
        "doc_stride": 3,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
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
        ({"eval_budgets": True}, "`eval_budgets` needs a model with budgets"),
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


def test_finetuned_model_teaches_its_budgets(arguments, tmp_path):
    """All in each step: the checkpoint's teacher is itself as it was, or its largest budget."""
    run_qa.main(command_line(arguments))
    finetuned, arguments["output_dir"] = arguments["output_dir"], str(tmp_path / "taught")
    arguments |= {
        "model_name_or_path": finetuned,
        "attention_type": "mha",
        "cct_budgets": [1, 0.5],
        "budget_sampling": "all",
        "gate_learning_rate": 0.01,
        "distillation_temperature": 3,
        "logging_steps": 1,
        "do_eval": False,
    }
    for teacher in (finetuned, "self"):
        run_qa.main(command_line({**arguments, "teacher": teacher}))
        entry = read_json(arguments, "trainer_state.json")["log_history"][0]
        names = {"task_loss_1", "task_loss_0.5", "logits_loss_0.5", "hidden_loss_0.5"}
        assert names <= set(entry)
        assert ("logits_loss_1" in entry) == (teacher != "self")
        shutil.rmtree(arguments["output_dir"])


@pytest.mark.slow
def test_two_processes_shard_a_model(arguments):
    """And evaluate it alike, and whole."""
    assert_measured_again(run_qa.__file__, run_qa, arguments, "eval_f1")
