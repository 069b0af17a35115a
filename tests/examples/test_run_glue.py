"""`examples/run_glue.py` end to end: a tiny random BERT on a tiny MRPC, a few steps on the CPU."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from few_words import WORDS
from glue_runs import SCRIPT, saved_model
from launching import fresh_python
from script_runs import assert_measured_again, command_line, read_json
from transformers import (
    AutoModelForSequenceClassification,
)

import hf_moa
from hf_moa import cli


@pytest.fixture
def arguments(glue_arguments):
    return glue_arguments


def test_baseline_as_a_script_with_arguments_from_a_json_file(arguments, tmp_path):
    arguments.update(do_predict=True, pad_to_max_length=False, max_train_samples=20)
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    done = fresh_python(SCRIPT, tmp_path / "arguments.json")
    assert done.returncode == 0, done.stderr

    model = saved_model(arguments)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    assert read_json(arguments, "train_results.json")["train_samples"] == 20
    results = read_json(arguments, "eval_results.json")
    assert results["eval_samples"] == 7
    mean = (results["eval_accuracy"] + results["eval_f1"]) / 2
    assert results["eval_combined_score"] == pytest.approx(mean)
    predictions = Path(arguments["output_dir"], "predict_results_mrpc.txt").read_text().split("\n")
    assert predictions[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in predictions[1:-1]] == list("01234")
    assert {line.split("\t")[1] for line in predictions[1:-1]} <= {"equivalent", "not_equivalent"}


def test_mae_trains_and_saves_a_gated_model(run_glue, arguments):
    arguments.update(attention_type="mae", mae_num_dropped_heads=2)
    run_glue.main(command_line(arguments))
    model = saved_model(arguments)
    assert isinstance(model, hf_moa.MoaBertForSequenceClassification)
    assert model.config.attention_type == "mae"
    assert model.config.mae_num_dropped_heads == 2
    assert read_json(arguments, "eval_results.json")["eval_samples"] == 7


def test_moa_trains_and_saves_a_gated_model(run_glue, arguments):
    fields = {
        "attention_type": "moa",
        "num_attention_experts": 6,
        "num_attention_heads": 2,
        "head_dim": 8,
        "router_type": "noisy_topk",
        "ffn_type": "moe",
        "num_ffn_experts": 3,
        "num_ffn_experts_per_token": 1,
    }
    run_glue.main(command_line({**arguments, **fields}))
    config = saved_model(arguments).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_nested_budgets_are_distilled_and_evaluated(run_glue, arguments):
    arguments.update(
        attention_type="mha", nested_budgets=[1, 0.5], nested_layers=[2, 1], budget_sampling="all",
        teacher="self", eval_budgets=True,
    )  # fmt: skip
    run_glue.main(command_line(arguments))
    assert saved_model(arguments).config.nested_layers == [2, 1]
    rows = read_json(arguments, "budget_results_mrpc.json")
    assert [row["budget"] for row in rows] == [1, 0.5]
    assert rows[0]["compute_fraction"] == 1 > rows[1]["compute_fraction"]


def test_cct_anneals_its_noise_and_is_evaluated_at_each_budget(run_glue, arguments, capsys, monkeypatch):
    scales = []
    model_class = hf_moa.MoaBertForSequenceClassification
    monkeypatch.setattr(model_class, "set_cct_noise_scale", lambda self, scale: scales.append(scale))
    arguments.update(
        attention_type="mha", cct_budgets=[1, 0.5, 0.5, 0.25], cct_noise_steps=2, eval_budgets=True
    )
    run_glue.main(command_line(arguments))
    assert scales == [1.0, 0.5, 0.0]  # upcycled gates are hard
    rows = read_json(arguments, "budget_results_mrpc.json")
    assert [row["budget"] for row in rows] == [1.0, 0.5, 0.25]
    assert all(0 < row["compute_fraction"] <= 1 for row in rows)
    # The default budget is the largest.
    assert rows[0]["eval_f1"] == read_json(arguments, "eval_results.json")["eval_f1"]
    table = capsys.readouterr().out
    assert "mrpc, 7 examples" in table
    assert "| budget | compute_fraction | seconds | eval_loss | eval_accuracy |" in table


def test_command_keeps_what_the_card_of_a_run_knows(run_glue, arguments):
    """Names and sizes of the data, the machine: files beside the model do not tell."""
    arguments.update(attention_type="mae", cct_budgets=[1, 0.5], eval_budgets=True)
    run_glue.main(command_line(arguments))
    path = Path(arguments["output_dir"], "README.md")
    written = path.read_text(encoding="utf-8")
    assert "| evaluation | GLUE MRPC | nyu-mll/glue | mrpc | 7 |" in written
    assert ", 4 examples a batch." in written  # the machine of the budgets
    assert cli.main(["card", str(path.parent), "--overwrite"]) == 0
    assert path.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("attention_type", ["none", "mae"])
def test_accumulated_batches_have_the_loss_of_whole_ones(run_glue, arguments, attention_type):
    """Of transformers' own model too, whose heads take a mean whatever `Trainer` asks for."""
    arguments.update(attention_type=attention_type, learning_rate=0.0, max_steps=2)
    losses = []
    for size, accumulated in ((8, 1), (2, 4)):
        arguments.update(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            output_dir=f"{arguments['output_dir']}-{size}",
        )
        run_glue.main(command_line(arguments))
        losses.append(read_json(arguments, "train_results.json")["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.1)  # dropout draws differ


def test_variants_start_from_the_same_function(run_glue, arguments):
    """Before training, MAE and CCT predict what the baseline predicts, new classifier included."""
    model_args = run_glue.ModelArguments(arguments["model_name_or_path"])
    task = run_glue.GLUE_TASKS["mrpc"]
    inputs = {"input_ids": torch.tensor([[2, 5, 7, 9, 3, 6, 8, 3]])}
    logits = []
    for gating in (
        {"attention_type": "none"},
        {"attention_type": "mha"},
        {"attention_type": "mae"},
        {"attention_type": "mha", "cct_budgets": [1.0, 0.5]},
    ):
        run_glue.set_seed(3)
        model = run_glue.load_model(model_args, run_glue.GatingArguments(**gating), task).eval()
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_stopped_run_resumes_as_if_it_had_not_stopped(run_glue, arguments, tmp_path):
    arguments.update(
        attention_type="mha",
        cct_budgets=[1, 0.5],
        cct_noise_steps=4,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        do_eval=False,
    )
    whole = {**arguments, "max_steps": 4, "output_dir": str(tmp_path / "whole")}
    run_glue.main(command_line(whole))
    run_glue.main(command_line({**arguments, "max_steps": 2}))
    run_glue.main(command_line({**arguments, "max_steps": 4}))
    expected = saved_model(whole).state_dict()
    for name, value in saved_model(arguments).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    assert not torch.equal(
        AutoModelForSequenceClassification.from_pretrained(
            Path(arguments["output_dir"], "checkpoint-2")
        ).classifier.weight,
        expected["classifier.weight"],
    )


def test_converted_checkpoint_is_taken_as_it_is(run_glue, arguments, tmp_path):
    converted = {**arguments, "attention_type": "mae", "output_dir": str(tmp_path / "first")}
    run_glue.main(command_line(converted))
    arguments["model_name_or_path"] = converted["output_dir"]
    arguments.update(do_train=False)
    for attention_type in ("none", "mae"):
        run_glue.main(command_line({**arguments, "attention_type": attention_type}))
        results = read_json(arguments, "eval_results.json")
        assert results["eval_loss"] == read_json(converted, "eval_results.json")["eval_loss"]
    with pytest.raises(ValueError, match=r"converted checkpoint already.*`mae_num_dropped_heads`"):
        run_glue.main(command_line({**arguments, "attention_type": "mae", "mae_num_dropped_heads": 2}))


def test_checkpoint_that_numbers_the_classes_differently(run_glue, arguments, tmp_path):
    """A model with the classes swapped has the same metrics, F1 included, and the same answers."""
    run_glue.main(command_line(arguments))
    model = saved_model(arguments)
    with torch.no_grad():
        # A bias that splits the development set, so that F1 of either class is its own number.
        model.classifier.bias.copy_(torch.tensor([0.2, 0.0]))
        model.save_pretrained(tmp_path / "plain")
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter.flip(0))
    model.config.id2label = {0: "equivalent", 1: "not_equivalent"}
    model.config.label2id = {"equivalent": 0, "not_equivalent": 1}
    model.save_pretrained(tmp_path / "swapped")
    results = {}
    for name in ("plain", "swapped"):
        out = {
            **arguments,
            "model_name_or_path": str(tmp_path / name),
            "tokenizer_name": arguments["model_name_or_path"],
            "output_dir": str(tmp_path / f"out-{name}"),
            "do_train": False,
            "do_predict": True,
        }
        run_glue.main(command_line(out))
        results[name] = [
            {k: v for k, v in read_json(out, "eval_results.json").items() if "per_sec" not in k},
            Path(out["output_dir"], "predict_results_mrpc.txt").read_text(),
        ]
        for key in ("eval_runtime", "eval_model_preparation_time"):
            results[name][0].pop(key, None)
    assert results["plain"] == results["swapped"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_name": "squad"}, r"`task_name` must be one of cola.*\(got 'squad'\)"),
        ({"mae_num_dropped_heads": 2}, r"`mae_num_dropped_heads` .*need `attention_type`"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with budgets"),
        ({"max_eval_samples": -1}, r"`max_eval_samples` must be at least 1 \(got -1\)"),
        ({"cct_noise_steps": 5}, "cct_noise_steps needs a model with CCT"),
        ({"mae_training": "bcd"}, "mae_training='bcd' needs a model with MAE"),
        ({"task_name": "rte"}, "`data_dir` must hold the folder RTE"),
    ],
)
def test_arguments_that_cannot_work_are_errors(run_glue, arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(command_line({**arguments, **changes}))


def test_split_without_data_is_an_error(run_glue):
    with pytest.raises(ValueError, match=r"must have the split 'test' \(got train, validation\)"):
        run_glue.select_split({"train": [], "validation": []}, "test", None)


def test_regression_on_stsb(run_glue, arguments, tmp_path):
    (tmp_path / "STS-B").mkdir()
    columns = ["index", "genre", "filename", "year", "old_index", "source1", "source2"]
    columns += ["sentence1", "sentence2"]
    for name, num_rows in (("train", 8), ("dev", 5), ("test", 3)):
        labels = name != "test"
        lines = ["\t".join(columns + ["score"] * labels)]
        for i in range(num_rows):
            row = [str(i), "g", "f", "y", "o", "s", "s", f"the {WORDS[i]} .", f"a {WORDS[-i]} ."]
            lines.append("\t".join(row + [f"{i / 2:.3f}"] * labels))
        (tmp_path / "STS-B" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    arguments.update(task_name="stsb", data_dir=str(tmp_path), do_predict=True)
    run_glue.main(command_line(arguments))
    assert saved_model(arguments).config.num_labels == 1
    results = read_json(arguments, "eval_results.json")
    assert -1 <= results["eval_pearson"] <= 1
    assert -1 <= results["eval_spearmanr"] <= 1
    predictions = Path(arguments["output_dir"], "predict_results_stsb.txt").read_text()
    assert [float(line.split("\t")[1]) for line in predictions.splitlines()[1:]]


def test_predictions_are_those_of_their_rows(run_glue, arguments, tmp_path, monkeypatch):
    """Whatever rows were left out, and however training batches were drawn."""
    shutil.copytree(Path(arguments["data_dir"], "MRPC"), tmp_path / "MRPC")
    path = tmp_path / "MRPC" / "test.tsv"
    lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "broken\n", *lines[3:]]), encoding="utf-8-sig")
    arguments |= {"data_dir": str(tmp_path), "skip_malformed_rows": True, "do_predict": True}
    arguments |= {"train_sampling_strategy": "group_by_length", "max_steps": 1}
    samplers, predict = [], run_glue.predict

    def note_sampler(trainer, predict_sets, task):
        samplers.append(trainer._get_eval_sampler(predict_sets["mrpc"]))
        predict(trainer, predict_sets, task)

    monkeypatch.setattr(run_glue, "predict", note_sampler)
    run_glue.main(command_line(arguments))
    assert list(samplers[0]) == list(range(4))
    text = Path(arguments["output_dir"], "predict_results_mrpc.txt").read_text()
    assert [line.split("\t")[0] for line in text.splitlines()[1:]] == list("0234")


def test_both_sets_of_mnli_have_names_of_their_own(run_glue):
    class Evaluator:
        """Stands for a trainer: what it was asked, and what it saved."""

        def evaluate(self, dataset, metric_key_prefix):
            logged.append(f"{metric_key_prefix}_accuracy")
            return {f"{metric_key_prefix}_accuracy": len(dataset) / 10, "epoch": 1.0}

        def log_metrics(self, split, metrics):
            pass

        def save_metrics(self, split, metrics):
            saved.update(metrics)

    logged, saved = [], {}
    run_glue.evaluate(Evaluator(), {"mnli": range(3), "mnli-mm": range(5)})
    assert logged == ["eval_accuracy", "eval_mm_accuracy"]
    first = {"eval_accuracy": 0.3, "eval_samples": 3, "epoch": 1.0}
    assert saved == first | {"eval_accuracy_mm": 0.5, "eval_samples_mm": 5}


def test_mnli_is_evaluated_on_the_sets_that_are_there(run_glue, caplog):
    both = {"mnli": "validation_matched", "mnli-mm": "validation_mismatched"}
    assert run_glue.split_names("mnli", "validation", list(both.values())) == both
    assert run_glue.split_names("mnli", "train", ["train"]) == {"mnli": "train"}
    assert run_glue.split_names("sst2", "validation", []) == {"sst2": "validation"}
    assert not caplog.records
    with caplog.at_level("WARNING"):
        found = run_glue.split_names("mnli", "validation", ["train", "validation_matched"])
    assert found == {"mnli": "validation_matched"}
    assert "no validation_mismatched" in caplog.text
    # without any, the message of a missing split is about the first
    assert run_glue.split_names("mnli", "validation", ["train"]) == both


def test_finetuned_model_teaches_its_budgets(run_glue, arguments, tmp_path):
    """All in each step: the checkpoint's teacher is itself as it was, or its largest budget."""
    run_glue.main(command_line(arguments))
    finetuned, arguments["output_dir"] = arguments["output_dir"], str(tmp_path / "taught")
    arguments |= {
        "model_name_or_path": finetuned,
        "attention_type": "mha",
        "cct_budgets": [1, 0.5],
        "budget_sampling": "all",
        "gate_learning_rate": 0.01,
        "distillation_temperature": 3,
        "distillation_hidden_weight": 0.5,
        "logging_steps": 1,
        "do_eval": False,
    }
    for teacher in (finetuned, "self"):
        run_glue.main(command_line({**arguments, "teacher": teacher}))
        entry = read_json(arguments, "trainer_state.json")["log_history"][0]
        names = {"task_loss_1", "task_loss_0.5", "logits_loss_0.5", "hidden_loss_0.5"}
        assert names <= set(entry)
        assert ("logits_loss_1" in entry) == (teacher != "self")
        shutil.rmtree(arguments["output_dir"])


def test_a_teacher_must_be_finetuned(run_glue, arguments, checkpoint):
    arguments["teacher"] = checkpoint  # a bare encoder
    with pytest.raises(ValueError, match=r"must be finetuned.*no weights for classifier"):
        run_glue.main(command_line(arguments))


@pytest.mark.slow
def test_two_processes_shard_a_model(run_glue, arguments):
    """And evaluate it alike, and whole."""
    assert_measured_again(SCRIPT, run_glue, arguments, "eval_accuracy")
