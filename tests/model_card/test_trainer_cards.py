"""Cards of trainers, on save and push."""

import re
from pathlib import Path

import datasets
import pytest
import torch
from cards import FIELDS, LOGS, Uploads, full_card, plain_classifier, refusals, sections
from huggingface_hub import ModelCard
from training_runs import build, rows, run, trainer

import hf_moa
from hf_moa import upcycle
from hf_moa.model_card import HEADINGS, read_card, trainer_card, write_card
from hf_moa.run_results import budget_table
from hf_moa.training import evaluate_budgets


def test_saving_writes_the_card(tmp_path, offline):
    made = run("bert", build("bert", **FIELDS), tmp_path / "run", max_steps=2, warmup_steps=0.5, **LOGS)
    assert not (tmp_path / "run" / "README.md").exists()
    rows = evaluate_budgets(made)
    made.save_model()
    card = read_card(tmp_path / "run" / "README.md")
    text = sections(card)
    assert list(text) == list(HEADINGS)
    assert card.data.tags == ["hf_moa", "moa", "cct", "generated_from_trainer"]
    assert card.data.license is None
    assert text["Compute budgets"].strip().endswith(budget_table(rows))
    assert made.budget_rows == rows
    assert re.search(r"examples a batch\. Compute", text["Compute budgets"])
    hyperparameters = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", text["Training hyperparameters"], flags=re.MULTILINE)
    )
    assert hyperparameters["cct_noise_steps"] == "-1"
    assert hyperparameters["steps_done"] == "2"
    assert hyperparameters["lr_scheduler_warmup_steps"] == "1"  # the half of them
    assert hyperparameters["train_batch_size"] == "4"
    assert f"- hf_moa {hf_moa.__version__}" in text["Training hyperparameters"]
    assert text["Training data"].strip().splitlines()[2:] == [
        "| training | not recorded | 8 |",
        "| evaluation | not recorded | 8 |",
    ]
    last = [entry for entry in made.state.log_history if "eval_loss" in entry][-1]
    assert f"| Loss | {last['eval_loss']:.4g} |" in text["Results"]
    assert len(text["Training results"].strip().splitlines()) == 4
    assert "model-index" not in card.data.to_dict()  # which data it was, nobody said


def test_expert_load_is_that_of_the_last_log(tmp_path):
    loads = []

    def record(module, args, output):
        if module.training:
            loads.append(output.expert_load)

    model = build("bert", attention_type="moa", ffn_type="moe")
    model.register_forward_hook(record)
    made = run(
        "bert", model, tmp_path, max_steps=2, gradient_accumulation_steps=2,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    assert len(loads) == 4
    assert set(made.expert_load) == {"attention", "feed_forward"}
    for part, layers in made.expert_load.items():
        mean = (loads[2][part].double() + loads[3][part].double()) / 2
        torch.testing.assert_close(torch.tensor(layers, dtype=torch.float64), mean)
        assert not torch.equal(loads[1][part], loads[2][part])
    card = trainer_card(made)
    shares = " ".join(f"{share:.3f}" for share in made.expert_load["attention"][1])
    assert f"| {shares} |" in sections(card)["Expert load"]


def test_mae_training_stands_among_the_hyperparameters(tmp_path):
    made = run("bert", build("bert", attention_type="mae"), tmp_path, gate_learning_rate=0.5)
    text = sections(trainer_card(made))["Training hyperparameters"]
    assert "| `mae_training` | bcd |" in text
    assert "| `gate_learning_rate` | 0.5 |" in text
    assert "| `gate_every_n_epochs` | 5 |" in text
    assert "| `optimizer` | adamw_torch_fused, betas (0.9, 0.999), epsilon 1e-08 |" in text
    assert "cct_noise_steps" not in text


def test_checkpoints_and_models_without_gates_have_no_card(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    run("bert", build("bert", attention_type="mae"), tmp_path / "gated", **settings)
    assert list((tmp_path / "gated").rglob("README.md")) == []
    made = run("bert", plain_classifier(), tmp_path / "plain", **settings)
    made.save_model()
    assert list((tmp_path / "plain").rglob("README.md")) == []
    made.create_model_card()
    assert "Training procedure" in (tmp_path / "plain" / "README.md").read_text()


def test_arguments_of_create_model_card(tmp_path, offline):
    made = run("bert", build("bert", attention_type="mae"), tmp_path, **LOGS)
    tags = ["mine"]
    made.create_model_card(
        language="en", license="mit", tags=tags, model_name="named", finetuned_from="user/base",
        tasks="text-classification", dataset_tags="nyu-mll/glue", dataset="GLUE MRPC",
        dataset_args="mrpc",
    )  # fmt: skip
    card = read_card(tmp_path / "README.md")
    assert tags == ["mine"]
    assert card.data.tags == ["hf_moa", "mae", "mine", "generated_from_trainer"]
    (result,) = card.data.eval_results
    data = ("nyu-mll/glue", "GLUE MRPC", "mrpc")
    assert (result.dataset_type, result.dataset_name, result.dataset_config) == data
    assert (card.data.model_name, card.data.datasets) == ("named", ["nyu-mll/glue"])
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", "en", "user/base")
    assert "| evaluation | GLUE MRPC | nyu-mll/glue | mrpc | 8 |" in card.text
    assert 'from_pretrained("named")' in card.text
    made.save_model()  # which says none of this
    again = read_card(tmp_path / "README.md")
    assert (again.data.license, again.data.base_model) == ("mit", "user/base")
    assert "mine" in again.data.tags


def test_data_from_the_hub_are_named(tmp_path):
    info = datasets.DatasetInfo(
        config_name="mrpc",
        download_checksums={"hf://datasets/nyu-mll/glue@abc123/mrpc/train-0.parquet": {}},
    )
    columns = {name: [row[name].tolist() for row in rows("bert")] for name in next(rows("bert"))}
    data = datasets.Dataset.from_dict(columns, info=info, split="validation")
    made = run("bert", build("bert", attention_type="mae"), tmp_path, data=data, **LOGS)
    card = trainer_card(made)
    assert card.data.datasets == ["nyu-mll/glue"]
    (result,) = card.data.eval_results
    assert result.dataset_type == "nyu-mll/glue"
    assert (result.dataset_config, result.dataset_split) == ("mrpc", "validation")
    assert result.dataset_revision == "abc123"
    assert "| evaluation | nyu-mll/glue | nyu-mll/glue | mrpc | validation | 8 |" in card.text


@pytest.mark.parametrize("finetuned_from", [None, "given"])
def test_path_of_the_base_stays_out_of_the_card(finetuned_from, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path("base/model")  # looks like an id on the Hub
    plain_classifier().save_pretrained(source)
    model = upcycle(str(source), "mae")
    model.config._name_or_path = str(source)
    made = trainer("bert", model, tmp_path / "out")
    facts = {"finetuned_from": str(source)} if finetuned_from else {}
    card = trainer_card(made, **facts)
    assert card.data.base_model is None
    assert str(source) not in str(card)
    write_card(full_card(), source / "README.md")  # which knows what it came from
    assert trainer_card(made, **facts).data.base_model == "google-bert/bert-base-uncased"


def test_base_that_was_loaded_from_the_hub_is_named(tmp_path):
    model = build("bert", attention_type="mae")
    model.config._name_or_path = "google-bert/bert-base-uncased"
    card = trainer_card(trainer("bert", model, tmp_path))
    assert card.data.base_model == "google-bert/bert-base-uncased"
    assert "It started from `google-bert/bert-base-uncased`." in card.text
    for name in ("/no/longer/there", "None", ""):
        model.config._name_or_path = name
        assert trainer_card(trainer("bert", model, tmp_path)).data.base_model is None


def test_model_is_not_its_own_base(tmp_path):
    model = build("bert", attention_type="mae")
    model.config._name_or_path = "user/model"
    made = trainer("bert", model, tmp_path, hub_model_id="user/model")
    assert trainer_card(made).data.base_model is None
    assert trainer_card(made, finetuned_from="user/other").data.base_model == "user/other"


def test_evaluation_that_was_given_its_data_is_of_the_data_named(tmp_path):
    made = trainer("bert", build("bert", attention_type="mae"), tmp_path)
    data, made.eval_dataset = made.eval_dataset, None
    made.evaluate(data)
    card = trainer_card(made, dataset_tags="nyu-mll/glue")
    assert [result.dataset_type for result in card.data.eval_results] == ["nyu-mll/glue"]


def test_trainer_that_did_not_train_claims_no_training(tmp_path):
    made = trainer("bert", build("bert", cct_budgets=[1, 0.5]), tmp_path)
    write_card(full_card(), tmp_path / "README.md")
    made.evaluate()
    made.create_model_card()
    card = read_card(tmp_path / "README.md")
    assert "learning_rate` | 2e-05" in card.text  # of the training before
    assert {"accuracy", "f1"} <= set(card.data.metrics)
    run_later = run("bert", build("bert", cct_budgets=[1, 0.5]), tmp_path)
    run_later.save_model()
    card = read_card(tmp_path / "README.md")
    assert "2e-05" not in card.text
    assert "model-index" not in card.data.to_dict()
    assert "Compute budgets" not in sections(card)


def test_training_again_forgets_what_was_measured_before(tmp_path):
    made = run("bert", build("bert", **FIELDS), tmp_path, logging_strategy="steps", logging_steps=1)
    evaluate_budgets(made)
    assert made.budget_rows
    assert made.expert_load
    made.args.logging_strategy = "no"
    made.train()
    assert made.budget_rows == []


def test_best_model_has_the_metrics_of_its_step(tmp_path):
    made = run(
        "bert", build("bert", attention_type="mae"), tmp_path, max_steps=3, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        learning_rate=1e-2, **LOGS,
    )  # fmt: skip
    losses = {e["step"]: e["eval_loss"] for e in made.state.log_history if "eval_loss" in e}
    best = max(losses, key=losses.get)
    assert best != 3
    assert f"| Loss | {losses[best]:.4g} |" in sections(trainer_card(made))["Results"]


def test_unreadable_card_stays_and_the_model_is_saved(tmp_path, caplog):
    made = trainer("bert", build("bert", attention_type="mae"), tmp_path)
    (tmp_path / "README.md").write_text("---\na: [\n---\nMine")
    made.save_model()
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "README.md").read_text() == "---\na: [\n---\nMine"


def test_card_of_another_folder_has_its_name(tmp_path):
    made = trainer("bert", build("bert", attention_type="mae"), tmp_path / "out")
    made.save_model(str(tmp_path / "elsewhere"))
    assert 'from_pretrained("elsewhere")' in (tmp_path / "elsewhere" / "README.md").read_text()
    assert not (tmp_path / "out" / "README.md").exists()


def test_push_uploads_the_card(tmp_path, monkeypatch, offline):
    api = Uploads()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: api)
    made = run("bert", build("bert", attention_type="mae"), tmp_path / "pushed", **LOGS)
    made.push_to_hub(license="mit", dataset_tags="nyu-mll/glue")
    (pushed,) = api.cards
    assert pushed == (tmp_path / "pushed" / "README.md").read_text()
    card = ModelCard(pushed)
    assert card.data.license == "mit"
    assert card.data.eval_results[0].dataset_type == "nyu-mll/glue"
    assert 'from_pretrained("user/pushed", trust_remote_code=True)' in pushed
    assert refusals(pushed) == []
    made.args.push_to_hub = True
    made.save_model()
    assert len(api.cards) == 2
    assert ModelCard(api.cards[1]).data.license == "mit"
    assert api.cards[1] == (tmp_path / "pushed" / "README.md").read_text()
