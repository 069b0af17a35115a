"""Cards of saved checkpoints: `hf-moa card`."""

import json
import pickle

import pytest
import torch
from cards import (
    BUDGET_ROWS,
    LOG,
    RESULTS,
    card_command,
    full_card,
    plain_classifier,
    refusals,
    saved,
    sections,
)
from families import CASE
from huggingface_hub import EvalResult
from peft import get_peft_model
from test_pipelines import tokenizer

from hf_moa import FTGConfig
from hf_moa.markdown import read_table
from hf_moa.model_card import DataUsed, TrainingFacts, checkpoint_card, read_card, write_card
from hf_moa.run_results import budget_table


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    saved(CASE["BertForSequenceClassification"], folder, attention_type="mae", cct_budgets=[1, 0.5])
    return folder


def test_command_writes_what_lies_beside_the_checkpoint(checkpoint, capsys, offline):
    results = {"eval_accuracy": 0.75, "eval_runtime": 1.0, "train_loss": 1.0, "epoch": 2.0}
    (checkpoint / "all_results.json").write_text(json.dumps(results))
    (checkpoint / "budget_results_mrpc.json").write_text(json.dumps(BUDGET_ROWS))
    state = {"log_history": LOG, "global_step": 4, "max_steps": 4, "num_train_epochs": 1, "epoch": 1.0}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    options = ["--license", "apache-2.0", "--base-model", "user/base", "--dataset", "nyu-mll/glue"]
    assert card_command(checkpoint, *options, "--language", "en", "de") == 0
    card = read_card(checkpoint / "README.md")
    assert capsys.readouterr().out == f"{checkpoint / 'README.md'}: tags hf_moa, mae, cct\n"
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "user/base")
    assert card.data.language == ["en", "de"]
    (result,) = card.data.eval_results
    assert result == EvalResult(
        task_type="text-classification",
        dataset_type="nyu-mll/glue",
        dataset_name="nyu-mll/glue",
        metric_type="accuracy",
        metric_name="Accuracy",
        metric_value=0.75,
    )
    text = sections(card)
    assert text["Compute budgets"].strip().endswith(budget_table(BUDGET_ROWS))
    assert "| `steps_done` | 4 |" in text["Training hyperparameters"]
    assert "| 2 | 0.5 | 2 | 0.25 |" in text["Training results"]
    assert refusals(str(card)) == []


def test_command_takes_files_and_says_what_is_missing(checkpoint, tmp_path, capsys):
    (tmp_path / "metrics.json").write_text('{"accuracy": 0.5, "eval_f1": 0.25}')
    (tmp_path / "budgets.json").write_text(json.dumps(BUDGET_ROWS))
    output = tmp_path / "cards" / "card.md"
    argv = ["--metrics", tmp_path / "metrics.json", "--budgets", tmp_path / "budgets.json"]
    assert card_command(checkpoint, *argv, "--output", output, "--name", "user/model") == 0
    assert "--license, --base-model, --dataset, --language\n" in capsys.readouterr().out
    assert not (checkpoint / "README.md").exists()
    card = read_card(output)
    assert card.data.metrics == ["accuracy", "f1"]
    assert "| evaluation data | F1 | 0.25 |" in sections(card)["Results"]
    assert "1.50x" in sections(card)["Compute budgets"]


@pytest.mark.parametrize("is_adapter", [False, True])
def test_expert_load_is_measured_on_text(is_adapter, checkpoint, tmp_path, capsys):
    text = tmp_path / "dev.tsv"
    text.write_text("sentence\tlabel\nthe head of a head\t1\nattention\t0\nheads\t0\n")
    folder = tmp_path / "adapter" if is_adapter else checkpoint
    model = CASE["BertForSequenceClassification"].gated.from_pretrained(checkpoint)
    if is_adapter:
        get_peft_model(model, FTGConfig(task_type="SEQ_CLS")).save_pretrained(folder)
    options = ["--data", text, "--text-column", "sentence", "--limit", "2"]
    assert card_command(folder, *options) == 0
    load = sections(read_card(folder / "README.md"))["Expert load"]
    assert "the mean over 2 texts of dev.tsv." in load
    rows = [line.split(" | ") for line in load.strip().splitlines() if line.startswith("| MAE gate |")]
    assert [row[1] for row in rows] == ["0", "1"]
    encoded = [tokenizer(CASE["BertModel"])(text) for text in ("the head of a head", "attention")]
    weights = [
        model(torch.tensor([each["input_ids"]]), output_expert_weights=True).expert_weights
        for each in encoded
    ]
    for row, first, second in zip(rows, *weights, strict=True):
        shares = [float(share) for share in row[-1].rstrip(" |").split()]
        torch.testing.assert_close(torch.tensor([shares]), (first + second) / 2, atol=6e-4, rtol=0)
    assert card_command(folder, "--overwrite") == 0  # without data, it stays
    assert sections(read_card(folder / "README.md"))["Expert load"].strip() == load.strip()


def test_text_for_a_model_without_experts_is_an_error(tmp_path):
    saved(CASE["BertModel"], tmp_path / "model", cct_budgets=[1, 0.5])
    (tmp_path / "dev.txt").write_text("the head\n")
    with pytest.raises(ValueError, match=r"the model must have some \(got attention_type 'mha' and"):
        card_command(tmp_path / "model", "--data", tmp_path / "dev.txt")
    with pytest.raises(ValueError, match=r"--limit must be at least 1 \(got 0\)"):
        card_command(tmp_path / "model", "--data", tmp_path / "dev.txt", "--limit", "0")
    assert not (tmp_path / "model" / "README.md").exists()


def test_card_as_json(checkpoint, capsys):
    old = "---\nreleased: 2020-02-02\n---\n# Mine\n"
    (checkpoint / "README.md").write_text(old)
    assert card_command(checkpoint, "--license", "mit", "--overwrite", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["card"] == str(checkpoint / "README.md")
    assert found["metadata"] == {
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-classification",
        "released": "2020-02-02",
        "tags": ["hf_moa", "mae", "cct"],
    }
    assert found["unsaid"] == ["--base-model", "--dataset", "--language", "--metrics"]


def test_command_keeps_a_card_unless_told(checkpoint):
    write_card(full_card(), checkpoint / "README.md")
    before = (checkpoint / "README.md").read_bytes()
    with pytest.raises(ValueError, match=r"README\.md is there already; give --overwrite"):
        card_command(checkpoint)
    assert (checkpoint / "README.md").read_bytes() == before


def test_overwriting_keeps_what_the_new_card_does_not_know(checkpoint):
    write_card(full_card(), checkpoint / "README.md")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 4, "max_steps": 4}')
    assert card_command(checkpoint, "--license", "mit", "--overwrite") == 0
    card = read_card(checkpoint / "README.md")
    assert card.data.license == "mit"
    assert card.data.base_model == "google-bert/bert-base-uncased"
    assert card.data.datasets == ["nyu-mll/glue"]
    assert card.data.eval_results == RESULTS
    assert set(sections(full_card())) == set(sections(card))
    assert "2e-05" in sections(card)["Training hyperparameters"]
    assert "mae_gate_type" in sections(card)["Mechanism"]


def test_overwriting_measures_on_the_data_that_the_card_names(checkpoint):
    write_card(full_card(), checkpoint / "README.md")
    (checkpoint / "all_results.json").write_text('{"eval_accuracy": 0.5}')
    card = checkpoint_card(checkpoint)
    (results,) = card.data.to_dict()["model-index"][0]["results"]
    assert results["dataset"]["config"] == "mrpc"
    values = {metric["type"]: metric["value"] for metric in results["metrics"]}
    assert values == {"accuracy": 0.5, "f1": 0.9, "loss": 0.25}


def test_data_that_are_named_later_keep_their_sizes(checkpoint):
    sizes = (DataUsed(use="training", examples=40), DataUsed(use="evaluation", name="dev", examples=7))
    write_card(full_card(training=TrainingFacts(data=sizes), datasets=()), checkpoint / "README.md")
    assert card_command(checkpoint, "--overwrite", "--license", "mit") == 0
    table = sections(read_card(checkpoint / "README.md"))["Training data"]
    assert table.strip().splitlines()[2:] == [
        "| training | not recorded | 40 |",
        "| evaluation | dev | 7 |",
    ]
    assert card_command(checkpoint, "--overwrite", "--dataset", "nyu-mll/glue") == 0
    assert sections(read_card(checkpoint / "README.md"))["Training data"].strip().splitlines()[2:] == [
        "| training | nyu-mll/glue | nyu-mll/glue | 40 |",
        "| evaluation | dev |  | 7 |",
    ]
    assert card_command(checkpoint, "--overwrite", "--dataset", "nyu-mll/glue", "user/more") == 0
    assert sections(read_card(checkpoint / "README.md"))["Training data"].strip().splitlines()[2:] == [
        "| training | nyu-mll/glue | nyu-mll/glue | 40 |",
        "| training | user/more | user/more |  |",
        "| evaluation | dev |  | 7 |",
    ]


def test_unnamed_data_stay_beside_several_names(checkpoint):
    sizes = (DataUsed(use="training", examples=40),)
    write_card(full_card(training=TrainingFacts(data=sizes), datasets=()), checkpoint / "README.md")
    assert card_command(checkpoint, "--overwrite", "--dataset", "user/one", "user/two") == 0
    rows = sections(read_card(checkpoint / "README.md"))["Training data"].strip().splitlines()[2:]
    assert rows == [
        "| training | not recorded |  | 40 |",
        "| training | user/one | user/one |  |",
        "| training | user/two | user/two |  |",
    ]


def test_wrong_data_are_corrected(checkpoint):
    assert card_command(checkpoint, "--dataset", "wrong/one") == 0
    assert card_command(checkpoint, "--overwrite", "--dataset", "right/one") == 0
    card = read_card(checkpoint / "README.md")
    assert card.data.datasets == ["right/one"]
    assert "wrong/one" not in str(card)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (
            {"eval_accuracy": 0.9, "predict_accuracy": 0.8},
            {"eval_accuracy": 0.8},
            {"Accuracy": "0.8"},
        ),
        (
            {"eval_accuracy": 0.84, "eval_accuracy_mm": 0.85},
            {"eval_accuracy": 0.85, "eval_accuracy_mm": 0.84},
            {"Accuracy": "0.85", "Accuracy mm": "0.84"},
        ),
        (
            {"eval_accuracy": 0.75, "eval_f1": 0.5},
            {"eval_matthews_correlation": 0.5},
            {"Matthews correlation": "0.5"},
        ),
    ],
)
def test_new_results_replace_those_of_the_card(before, after, shown, checkpoint):
    (checkpoint / "all_results.json").write_text(json.dumps(before))
    assert card_command(checkpoint) == 0
    (checkpoint / "all_results.json").write_text(json.dumps(after))
    assert card_command(checkpoint, "--overwrite") == 0
    rows = read_table(sections(read_card(checkpoint / "README.md"))["Results"])
    assert {row["metric"]: row["value"] for row in rows} == shown


def test_results_that_differ_in_later_digits_replace_those_of_the_metadata(checkpoint):
    path = checkpoint / "all_results.json"
    path.write_text('{"eval_accuracy": 0.912345}')
    assert card_command(checkpoint, "--dataset", "nyu-mll/glue") == 0
    path.write_text('{"eval_accuracy": 0.912309}')
    assert card_command(checkpoint, "--overwrite") == 0
    (result,) = read_card(checkpoint / "README.md").data.eval_results
    assert result.metric_value == 0.912309


def test_metrics_at_a_rank_are_none_at_a_budget(checkpoint):
    path = checkpoint / "all_results.json"
    path.write_text('{"eval_precision_at_1": 0.25, "eval_precision_at_5": 0.5}')
    text = sections(checkpoint_card(checkpoint))["Results"]
    assert "| Precision at 1 | 0.25 |" in text
    assert "| Precision at 5 | 0.5 |" in text
    path.write_text(
        '{"bleu_at_1": 20.0, "bleu_at_0.5": 10.0, "compute_fraction_at_1": 1.0, '
        '"compute_fraction_at_0.5": 0.5}'
    )
    rows = read_table(sections(checkpoint_card(checkpoint))["Results"])
    assert [(row["metric"], row["value"]) for row in rows] == [("BLEU", "20")]


def test_new_measurements_replace_those_of_the_card(checkpoint):
    """The machine with them, which may be another."""
    write_card(full_card(), checkpoint / "README.md")
    path = checkpoint / "budget_results_mrpc.json"
    path.write_text(json.dumps(BUDGET_ROWS))
    assert card_command(checkpoint, "--overwrite") == 0
    assert " on a machine" in sections(read_card(checkpoint / "README.md"))["Compute budgets"]
    rows = [row | {"seconds": 9.0} for row in BUDGET_ROWS]
    path.write_text(json.dumps(rows))
    assert card_command(checkpoint, "--overwrite") == 0
    text = sections(read_card(checkpoint / "README.md"))["Compute budgets"]
    assert budget_table(rows) in text
    assert " on a machine" not in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("--metrics", "{", r"m\.json must hold JSON"),
        ("--metrics", "[1]", r"m\.json must hold a JSON object \(got a list\)"),
        ("--metrics", "{}", r"metrics by name, each a number.*\(got none\)"),
        ("--metrics", '{"accuracy": "good"}', r"no number for accuracy"),
        ("--metrics", None, r"no file .*m\.json"),
        ("--budgets", '{"budget": 1}', r"list of the rows that `evaluate_budgets` returned"),
        ("--budgets", "[]", r"list of the rows"),
        ("--budgets", '[{"budget": "x"}]', r"`budget`, a number or a pair"),
    ],
)
def test_bad_files_are_errors_that_leave_all_as_it_was(file, content, message, checkpoint, tmp_path):
    write_card(full_card(), checkpoint / "README.md")
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir() if p.is_file()}
    if content is not None:
        (tmp_path / "m.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        card_command(checkpoint, file, tmp_path / "m.json", "--overwrite")
    assert {p.name: p.read_bytes() for p in checkpoint.iterdir() if p.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--license", "The MIT"], "license must be"),
        (["--base-model", "a/b/c"], "base_model must be"),
        (["--output", "."], "--output must be a file"),
    ],
)
def test_bad_options_are_errors(options, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        card_command(checkpoint, *options)
    assert not (checkpoint / "README.md").exists()


def test_folders_without_a_gated_model_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json or .* \(got .*nowhere, which has neither\)"):
        checkpoint_card(tmp_path / "nowhere")
    plain_classifier().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"moa_bert \(got 'bert' in .*upcycle"):
        checkpoint_card(tmp_path)
    (tmp_path / "config.json").write_text("not JSON")
    with pytest.raises(ValueError, match=r"config\.json must hold JSON"):
        checkpoint_card(tmp_path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def test_pickles_are_not_read(checkpoint, tmp_path):
    (checkpoint / "training_args.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "marker")))
    checkpoint_card(checkpoint)
    assert not (tmp_path / "marker").exists()


def test_metrics_of_a_best_model_that_may_not_be_there_are_left_out(checkpoint):
    state = {"log_history": LOG, "global_step": 4, "best_global_step": 2}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert "Results" not in sections(checkpoint_card(checkpoint))
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"best_global_step": 4}))
    assert "| Accuracy | 0.5 |" in sections(checkpoint_card(checkpoint))["Results"]


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        card_command("--help")
    text = capsys.readouterr().out
    assert "example: hf-moa card ./bert-mae --license apache-2.0" in text
