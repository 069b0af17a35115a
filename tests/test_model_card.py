"""Model cards: from plain data, from a trainer, from a checkpoint; and what of an older card stays."""

import argparse
import json
import math
import pickle
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from families import CASE, CASES
from huggingface_hub import EvalResult, ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from test_pipelines import tokenizer
from training_runs import build, rows, run, trainer
from transformers import BertConfig, BertForSequenceClassification

import hf_moa
from hf_moa import FTGConfig, MoaBertConfig, MoaGPT2Config, MoaT5Config, upcycle
from hf_moa.cli import card as command
from hf_moa.model_card import (
    HEADINGS,
    DataUsed,
    MeanExpertLoad,
    TrainingFacts,
    checkpoint_card,
    eval_results,
    merged_card,
    model_card,
    read_card,
    trainer_card,
    write_card,
)
from hf_moa.model_card.card import card_of
from hf_moa.model_card.existing import split_sections
from hf_moa.model_card.facts import named_metrics
from hf_moa.model_card.mechanisms import fields_in_use
from hf_moa.model_card.tables import budget_table, table
from hf_moa.model_card.trainer import final_metrics, history_of
from hf_moa.training import evaluate_budgets

MRPC = DataUsed(use="evaluation", name="MRPC", dataset="nyu-mll/glue", config="mrpc", split="validation")
RESULTS = eval_results(
    [("eval", "accuracy", 0.875), ("eval", "f1", 0.9), ("eval", "loss", 0.25)],
    task="text-classification",
    data=MRPC,
)
BUDGET_ROWS = [
    {"budget": 0.5, "compute_fraction": 0.48, "seconds": 1.0, "eval_accuracy": 0.8},
    {"budget": 1, "compute_fraction": 1.0, "seconds": 1.5, "eval_accuracy": 0.9},
]
EVERYTHING = {
    "attention_type": "moa",
    "ffn_type": "moe",
    "cct_budgets": [1, 0.5],
}


def full_card(**changes):
    facts = {
        "name": "user/model",
        "model_class": "MoaBertForSequenceClassification",
        "license": "apache-2.0",
        "base_model": "google-bert/bert-base-uncased",
        "datasets": ["nyu-mll/glue"],
        "language": "en",
        "results": RESULTS,
        "training": TrainingFacts(
            data=(MRPC,),
            hyperparameters={"learning_rate": 2e-5, "optimizer": "a | b"},
            versions={"hf_moa": "0.1.0"},
            history=({"step": 5, "epoch": 1.0, "eval accuracy": 0.8},),
        ),
        "budget_rows": BUDGET_ROWS,
        "measured_on": "a machine",
        "expert_load": {"attention": [[0.25, 0.75]]},
    }
    return model_card(MoaBertConfig(**EVERYTHING), **facts | changes)


def sections(card):
    return dict(split_sections(card.text)[1])


def python_of(card):
    return re.findall(r"```python\n(.*?)```", sections(card)["How to load"], flags=re.DOTALL)


def bib_keys(card):
    return re.findall(r"^@\w+{(.+?),$", sections(card).get("Citation", ""), flags=re.MULTILINE)


# --- metadata -------------------------------------------------------------------------------------


def test_metadata_say_what_is_known():
    metadata = full_card().data.to_dict()
    metrics = [
        {"type": "accuracy", "value": 0.875, "name": "Accuracy"},
        {"type": "f1", "value": 0.9, "name": "F1"},
        {"type": "loss", "value": 0.25, "name": "Loss"},
    ]
    data = {"name": "MRPC", "type": "nyu-mll/glue", "config": "mrpc", "split": "validation"}
    result = {"task": {"type": "text-classification"}, "dataset": data, "metrics": metrics}
    assert metadata == {
        "base_model": "google-bert/bert-base-uncased",
        "datasets": ["nyu-mll/glue"],
        "language": "en",
        "library_name": "transformers",
        "license": "apache-2.0",
        "metrics": ["accuracy", "f1"],
        "pipeline_tag": "text-classification",
        "tags": ["hf_moa", "moa", "moe", "cct"],
        "model-index": [{"name": "model", "results": [result]}],
    }


def test_nothing_is_invented():
    card = model_card(MoaBertConfig(attention_type="mae"), name="out", model_class="MoaBertModel")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["hf_moa", "mae"],
    }
    assert list(sections(card)) == ["How to load", "Mechanism", "Citation"]


def test_card_reads_back_as_it_was_written(tmp_path):
    card = full_card()
    write_card(card, tmp_path / "README.md")
    again = read_card(tmp_path / "README.md")
    assert str(again) == str(card)
    assert again.data.to_dict() == card.data.to_dict()
    assert again.data.eval_results == RESULTS
    assert again.data.model_name == "model"
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "incomplete",
    [
        eval_results([("eval", "f1", math.nan)], task="fill-mask", data=MRPC),
        eval_results([("eval", "f1", math.inf)], task="fill-mask", data=MRPC),
        eval_results([("eval", "f1", 0.5)], task="fill-mask", data=DataUsed(use="evaluation")),
        eval_results([("eval", "f1", 0.5)], task="fill-mask", data=None),
    ],
    ids=["nan", "inf", "no data set", "no data"],
)
def test_results_that_the_hub_refuses_stand_in_the_table_alone(incomplete):
    card = full_card(results=incomplete)
    assert "model-index" not in card.data.to_dict()
    assert card.data.metrics == ["f1"]
    assert "| F1 |" in sections(card)["Results"]


def test_names_that_are_no_ids_stay_out_of_the_datasets():
    card = full_card(datasets=["GLUE MRPC", "/home/someone/data", "nyu-mll/glue"])
    assert card.data.datasets == ["nyu-mll/glue"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"license": "Apache 2.0"}, r"license must be .*apache-2\.0.* \(got 'Apache 2\.0'\)"),
        ({"base_model": "/home/someone/bert"}, r"base_model must be .*\(got '/home/someone/bert'\)"),
        ({"budget_rows": [{"seconds": 1.0}]}, "`budget`, a number or a pair"),
        ({"expert_load": {"attention": [[]]}}, r"expert_load\['attention'\]\[0\]"),
        ({"expert_load": {"attention": [[1.5, -0.5]]}}, r"\[0, 1\]"),
    ],
)
def test_bad_facts_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        full_card(**changes)


def test_card_of_a_plain_model_is_an_error():
    with pytest.raises(ValueError, match=r"got BertConfig.*upcycle"):
        model_card(BertConfig(), name="out")


# --- what the Hub checks ----------------------------------------------------------------------------


def refusals(content):
    """What is wrong with a card's metadata, by the Hub's documented rules."""
    metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)[1])
    name = r"[\w.-]+(/[\w.-]+)?"
    found = []
    if not re.fullmatch(r"[a-z0-9.+-]+", metadata.get("license", "mit")):
        found.append("license")
    for key in ("base_model", "datasets"):
        ids = metadata.get(key, [])
        ids = [ids] if isinstance(ids, str) else ids
        if not all(isinstance(each, str) and re.fullmatch(name, each) for each in ids):
            found.append(key)
    for key in ("tags", "metrics"):
        if not all(isinstance(each, str) for each in metadata.get(key, [])):
            found.append(key)
    for model in metadata.get("model-index", []):
        if not model.get("name"):
            found.append("model-index.name")
        for result in model["results"]:
            needed = [result.get("task", {}).get("type")]
            needed += [result.get("dataset", {}).get(key) for key in ("type", "name")]
            for metric in result.get("metrics", []):
                needed += [metric.get("type"), isinstance(metric.get("value"), (int, float, str))]
                value = metric.get("value")
                needed.append(not isinstance(value, float) or math.isfinite(value))
            if not all(needed) or not result.get("metrics"):
                found.append("model-index.results")
    return found


@pytest.fixture
def endpoint(monkeypatch):
    """A server in the place of the Hub's validation."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body["repoType"], body["content"]))
            wrong = refusals(body["content"])
            self.send_response(400 if wrong else 200)
            self.end_headers()
            self.wfile.write(", ".join(wrong).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield requests
    server.shutdown()
    server.server_close()


def test_cards_pass_validation(endpoint):
    cards = [
        full_card(),
        full_card(results=eval_results([("eval", "f1", math.nan)], task="fill-mask", data=MRPC)),
        full_card(datasets=["GLUE MRPC"], tags=["1"], base_model=None, license=None),
        model_card(MoaT5Config(), name="out"),
    ]
    for card in cards:
        card.validate()
    assert endpoint == [("/api/validate-yaml", "model", str(card)) for card in cards]


def test_the_validation_of_these_tests_refuses(endpoint):
    card = full_card()
    card.data.license = "Apache 2.0"
    card.data.base_model = "/home/someone/bert"
    card.data.eval_results[0].metric_value = math.nan
    with pytest.raises(ValueError, match=r"license, base_model, model-index\.results"):
        card.validate()


# --- mechanisms -------------------------------------------------------------------------------------

VARIANTS = {
    "mha": ({}, [], []),
    "mae": ({"attention_type": "mae"}, ["mae"], ["peng-etal-2020-mixture"]),
    "moa": ({"attention_type": "moa"}, ["moa"], ["zhang-etal-2022-mixture"]),
    "moa-noisy": (
        {"attention_type": "moa", "router_type": "noisy_topk"},
        ["moa"],
        ["zhang-etal-2022-mixture", "shazeer-etal-2017-outrageously"],
    ),
    "moe": ({"ffn_type": "moe"}, ["moe"], ["shazeer-etal-2017-outrageously"]),
    "cct": ({"cct_budgets": [1, 0.5]}, ["cct"], ["bapna-etal-2020-controlling"]),
    "mae-cct": (
        {"attention_type": "mae", "cct_budgets": [1, 0.5]},
        ["mae", "cct"],
        ["peng-etal-2020-mixture", "bapna-etal-2020-controlling"],
    ),
}


@pytest.mark.parametrize("config_class", [MoaBertConfig, MoaGPT2Config, MoaT5Config])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tags_and_citations_are_those_of_the_mechanisms_in_use(variant, config_class):
    fields, tags, keys = VARIANTS[variant]
    card = model_card(config_class(**fields), name="out")
    assert card.data.tags == ["hf_moa", *tags]
    assert bib_keys(card) == keys


@pytest.mark.parametrize("config_class", [MoaBertConfig, MoaGPT2Config, MoaT5Config])
def test_every_field_that_applies_stands_with_value_and_meaning(config_class):
    config = config_class(
        attention_type="moa", ffn_type="moe", router_type="noisy_topk", cct_budgets=[1, 0.5],
        router_importance_loss_coef=0.5, router_load_loss_coef=0.5, num_attention_experts=20,
    )  # fmt: skip
    text = sections(model_card(config, name="out"))["Mechanism"]
    lines = re.findall(r"^\| `(\w+)` \| `(.*)` \| (.*) \|$", text, flags=re.MULTILINE)
    values = {name: value for name, value, _ in lines}
    assert values == {name: str(getattr(config, name)) for name in fields_in_use(config)}
    assert values["num_attention_experts"] == "20"
    assert all(len(meaning) > 5 for *_, meaning in lines)


def test_fields_of_other_mechanisms_do_not_stand():
    mae = ["attention_type", "mae_num_dropped_heads", "mae_gate_type"]
    gate = ["mae_gate_hidden_size", "mae_gate_dropout"]
    assert fields_in_use(MoaBertConfig()) == ["attention_type"]
    assert fields_in_use(MoaBertConfig(attention_type="mae")) == [*mae, *gate]
    assert fields_in_use(MoaGPT2Config(attention_type="mae")) == [*mae, *gate, "mae_gate_window"]
    assert fields_in_use(MoaBertConfig(attention_type="mae", mae_gate_type="uniform")) == mae
    assert fields_in_use(MoaBertConfig(attention_type="moa")) == [
        "attention_type",
        "num_attention_experts",
        "router_type",
        "router_balance_loss_coef",
        "router_z_loss_coef",
    ]


def test_words_have_the_models_numbers():
    config = MoaBertConfig(attention_type="mae", mae_num_dropped_heads=2, num_attention_heads=8)
    assert "layer of 8 heads is a mixture of 28 experts" in model_card(config, name="out").text
    config = MoaBertConfig(attention_type="moa", num_attention_heads=8, head_dim=128)
    text = model_card(config, name="out").text
    assert "16 heads of size 128" in text
    assert "each token to 8 of them" in text
    config = MoaT5Config(ffn_type="moe", cct_budgets=[[1, 1], [1, 0.5], [1, 1]])
    text = model_card(config, name="out").text
    assert "2 of the 8 feed-forward experts" in text
    assert "trained for (1, 1), (1, 0.5)." in text


# --- how to load ------------------------------------------------------------------------------------


def saved(case, folder, *, with_tokenizer=True, **fields):
    model = case.build(**fields)
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer(case).save_pretrained(folder)
    return model


def execute(code):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("with_tokenizer", [True, False], ids=["tokenizer", "ids"])
@pytest.mark.parametrize("case", CASES, ids=CASE)
def test_snippets_run(case, with_tokenizer, tmp_path, monkeypatch, capsys):
    model = saved(case, tmp_path / "out", with_tokenizer=with_tokenizer, cct_budgets=[1, 0.5, 1])
    with_package, alone = python_of(checkpoint_card(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    names = execute(with_package)
    assert type(names["model"]) is case.gated
    assert "budget=0.5)  # of 1, 0.5; without: the largest" in with_package
    assert ("tokenizer" in names) == with_tokenizer
    loaded = execute(alone)["model"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("name", "budget"),
    [("T5ForConditionalGeneration", "(0.5, 0.5)"), ("T5EncoderModel", "0.5")],
)
def test_snippets_run_with_pairs_of_budgets(name, budget, tmp_path, monkeypatch):
    saved(CASE[name], tmp_path / "out", cct_budgets=[[1, 1], [1, 0.5], [0.5, 0.5]])
    code = python_of(checkpoint_card(tmp_path / "out"))[0]
    assert f"budget={budget})" in code
    monkeypatch.chdir(tmp_path)
    execute(code)


ALONE = """
import re, sys
sys.modules["hf_moa"] = None  # as where it is not installed
for name in sys.argv[1:]:
    card = open(f"{name}/README.md", encoding="utf-8").read()
    names = {}
    exec(re.findall(r"```python\\n(.*?)```", card, flags=re.DOTALL)[1], names)
    assert type(names["model"]).__module__.startswith("transformers_modules"), type(names["model"])
    print(type(names["model"]).__name__)
"""


def test_snippets_run_without_the_package(tmp_path):
    classes = ["BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
    for name in classes:
        saved(CASE[name], tmp_path / name, attention_type="mae")
        write_card(checkpoint_card(tmp_path / name), tmp_path / name / "README.md")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *classes], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"Moa{name}" for name in classes]


def test_checkpoint_without_code_does_not_promise_it(tmp_path):
    saved(CASE["BertModel"], tmp_path)
    (tmp_path / "modeling_moa_bert.py").unlink()
    assert len(python_of(checkpoint_card(tmp_path))) == 1
    assert "trust_remote_code" not in checkpoint_card(tmp_path).text


def test_snippets_load_the_name_on_the_hub(tmp_path):
    saved(CASE["BertModel"], tmp_path)
    card = checkpoint_card(tmp_path, name="user/model")
    assert card.text.count('from_pretrained("user/model"') == 3
    assert "# model\n" in card.text


# --- tables -----------------------------------------------------------------------------------------


def test_speed_up_is_over_the_largest_budget():
    assert budget_table(BUDGET_ROWS).splitlines() == [
        "| budget | compute fraction | accuracy | seconds | speed-up |",
        "|---|---|---|---|---|",
        "| 0.5 | 0.48 | 0.8 | 1 | 1.50x |",
        "| 1 | 1 | 0.9 | 1.5 | 1.00x |",
    ]


def test_budget_table_of_pairs_as_json_has_them():
    pairs = [
        {"budget": [1.0, 1.0], "seconds": 3.0, "eval_loss": 2.0},
        {"budget": [1.0, 0.5], "seconds": 2.0},
    ]
    assert budget_table(pairs).splitlines()[2:] == [
        "| 1, 1 |  | 2 | 3 | 1.00x |",
        "| 1, 0.5 |  |  | 2 | 1.50x |",
    ]


def test_expert_load_tells_least_most_entropy_and_shares():
    load = {"attention": [[0.25, 0.75], [0.5, 0.5]], "feed_forward": [[0.0, 1.0]]}
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    lines = sections(full_card(expert_load=load))["Expert load"].strip().splitlines()[-5:]
    assert lines == [
        "| part | layer | least | most | entropy | shares |",
        "|---|---|---|---|---|---|",
        f"| attention | 0 | 0.250 | 0.750 | {entropy:.3f} | 0.250 0.750 |",
        "| attention | 1 | 0.500 | 0.500 | 1.000 | 0.500 0.500 |",
        "| feed forward | 0 | 0.000 | 1.000 | 0.000 | 0.000 1.000 |",
    ]


@pytest.mark.parametrize(("experts", "shown"), [(16, True), (17, False)])
def test_shares_of_many_experts_are_left_out(experts, shown):
    text = sections(full_card(expert_load={"attention": [[1 / experts] * experts]}))["Expert load"]
    assert ("| shares |" in text) is shown
    assert f"| {1 / experts:.3f} | {1 / experts:.3f} | 1.000 |" in text


def test_mean_expert_load_leaves_out_layers_that_routed_nothing():
    mean = MeanExpertLoad()
    mean.add({"attention": torch.tensor([[0.5, 0.5], [1.0, 0.0]])})
    mean.add({"attention": torch.tensor([[0.0, 1.0], [0.0, 0.0]])})
    mean.add(None)
    assert mean.drain(lambda x: 3 * x) == {"attention": [[0.25, 0.75], [1.0, 0.0]]}
    assert mean.drain(lambda x: x) == {}


def test_mean_weights_of_gates_are_a_load():
    mean = MeanExpertLoad()
    encoder = (torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    cross = (torch.tensor([[[0.25, 0.75], [0.75, 0.25]], [[1.0, 0.0], [1.0, 0.0]]]),)
    mean.add_outputs({"encoder_expert_weights": encoder, "cross_expert_weights": cross})
    assert mean.drain(lambda x: x) == {
        "encoder_MAE_gate": [[0.75, 0.25], [0.0, 1.0]],
        "cross_MAE_gate": [[0.75, 0.25]],
    }


def test_values_do_not_break_a_table():
    assert table(["a"], [["x | y\nz"], [1 / 3], [None]]).splitlines() == [
        "| a |",
        "|---|",
        "| x \\| y z |",
        "| 0.3333 |",
        "|  |",
    ]
    assert "| `optimizer` | a \\| b |" in sections(full_card())["Training hyperparameters"]


# --- logs -------------------------------------------------------------------------------------------


def test_metrics_of_an_entry():
    entry = {
        "eval_accuracy": 0.5,
        "eval_runtime": 3.0,
        "eval_samples": 8,
        "eval_samples_per_second": 2.0,
        "eval_mm_f1": torch.tensor(0.25),
        "eval_mm_runtime": 1.0,
        "predict_bleu": 30,
        "perplexity": 12.5,
        "epoch": 1.0,
        "train_loss": 2.0,
        "train_runtime": 2.0,
        "total_flos": 7,
        "eval_matrix": torch.zeros(2),
        "eval_name": "x",
    }
    assert named_metrics(entry) == [
        ("eval", "accuracy", 0.5),
        ("eval_mm", "f1", 0.25),
        ("predict", "bleu", 30),
        ("", "perplexity", 12.5),
    ]
    results = eval_results(named_metrics(entry), task="translation", data=None)
    assert [result.metric_name for result in results] == [
        "Accuracy",
        "F1 (mm)",
        "Bleu (predict)",
        "Perplexity",
    ]


def evaluation(step, accuracy, **others):
    return {"eval_accuracy": accuracy, "eval_runtime": 1.0, "step": step, "epoch": step / 4, **others}


LOG = [
    {"loss": 2.0, "step": 2},
    evaluation(2, 0.25),
    {"loss": 1.0, "step": 4},
    evaluation(4, 0.5),
    {"train_runtime": 9.0, "train_loss": 1.5, "step": 4},
]


def test_final_metrics_are_those_of_the_final_weights():
    assert final_metrics(LOG, step=4) == [("eval", "accuracy", 0.5)]
    assert final_metrics(LOG, step=4, loaded_step=2) == [("eval", "accuracy", 0.25)]
    assert final_metrics([*LOG, evaluation(4, 0.75)], step=4, loaded_step=2) == [
        ("eval", "accuracy", 0.75)
    ]
    assert final_metrics(LOG[:3], step=4) == []  # measured on earlier weights
    assert final_metrics([evaluation(0, 0.125)], step=0) == [("eval", "accuracy", 0.125)]
    assert final_metrics([], step=0) == []


def test_history_is_that_of_the_training():
    assert history_of([*LOG, evaluation(4, 0.75)]) == (
        {"step": 2, "epoch": 0.5, "training loss": 2.0, "eval accuracy": 0.25},
        {"step": 4, "epoch": 1.0, "training loss": 1.0, "eval accuracy": 0.5},
    )


# --- what of an older card stays --------------------------------------------------------------------


def card(text, **metadata):
    return ModelCard(f"---\n{yaml.safe_dump(metadata)}---\n{text}")


def test_sections_of_ones_own_stay_where_they_were():
    text = full_card().text.replace("\n## Results\n", "\n## Limits\n\nFew.\n\n## Results\n")
    old = card_of(full_card().data, text + "\n## Thanks\n\n```text\n## no heading\n```\n")
    new = full_card(expert_load={"attention": [[0.5, 0.5]]})
    merged = merged_card(new, old, same_weights=False)
    own = ["Training results", "Limits", "Results"]
    names = list(sections(merged))
    assert names[4:7] == own
    assert names[-1] == "Thanks"
    assert [name for name in names if name in HEADINGS] == list(sections(new))
    assert sections(merged)["Thanks"].strip() == "```text\n## no heading\n```"
    assert "0.500 0.500" in sections(merged)["Expert load"]
    again = merged_card(new, merged, same_weights=False)
    assert str(again) == str(merged)


@pytest.mark.parametrize("same_weights", [True, False])
def test_measurements_of_other_weights_are_gone(same_weights):
    new = model_card(MoaBertConfig(**EVERYTHING), name="user/model")
    merged = merged_card(new, full_card(), same_weights=same_weights)
    measured = {"Results", "Compute budgets", "Expert load", "Training data"}
    assert measured.issubset(sections(merged)) is same_weights
    assert measured.isdisjoint(sections(merged)) is not same_weights
    assert ("model-index" in merged.data.to_dict()) is same_weights
    assert ("metrics" in merged.data.to_dict()) is same_weights
    for name in ("license", "base_model", "datasets", "language"):
        assert merged.data.get(name) == full_card().data.get(name)


def test_new_results_replace_those_of_the_same_metric():
    f1, bleu = eval_results(
        [("eval", "f1", 0.95), ("eval", "bleu", 1.0)], task="text-classification", data=MRPC
    )
    merged = merged_card(full_card(results=[f1, bleu]), full_card(), same_weights=True)
    values = {result.metric_type: result.metric_value for result in merged.data.eval_results}
    assert values == {"f1": 0.95, "bleu": 1.0, "accuracy": 0.875, "loss": 0.25}
    assert merged.data.metrics == ["f1", "bleu", "accuracy"]


def test_tags_of_other_mechanisms_are_gone():
    old = card("# Mine\n", tags=["mae", "ftg", "mine", "hf_moa"])
    assert merged_card(full_card(), old, same_weights=False).data.tags == [
        "hf_moa",
        "moa",
        "moe",
        "cct",
        "mine",
    ]


def test_introduction_of_ones_own_stays():
    mine = card("\n# My model\n\nIt counts heads.\n\n## Mechanism\n\nOld.\n", license="mit", widget=[1])
    merged = merged_card(full_card(license=None), mine, same_weights=False)
    introduction, _ = split_sections(merged.text)
    assert introduction.strip() == "# My model\n\nIt counts heads."
    assert "Old." not in merged.text
    assert list(sections(merged)) == list(sections(full_card()))
    assert (merged.data.license, merged.data.widget) == ("mit", [1])


def test_introduction_of_ours_is_written_anew():
    old = model_card(MoaBertConfig(attention_type="mae"), name="user/old")
    merged = merged_card(full_card(), old, same_weights=True)
    assert split_sections(merged.text)[0] == split_sections(full_card().text)[0]


def test_windows_line_ends_change_nothing(tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(b"---\r\nlicense: mit\r\n---\r\n# Mine\r\n\r\n## Limits\r\n\r\nFew.\r\n")
    merged = merged_card(full_card(license=None), read_card(path), same_weights=False)
    assert "\r" not in str(merged)
    assert sections(merged)["Limits"].strip() == "Few."
    assert merged.data.license == "mit"


@pytest.mark.parametrize("draft", ["", "\n# Model Card for Model ID\n\n## Uses\n\n[More]\n"])
def test_drafts_are_replaced(draft):
    merged = merged_card(full_card(), card(draft, license="mit"), same_weights=False)
    assert merged.text == full_card().text
    assert merged.data.license == "apache-2.0"


def test_draft_of_transformers_is_replaced(tmp_path):
    made = trainer("bert", plain_classifier(), tmp_path)
    made.create_model_card(license="mit")
    merged = merged_card(full_card(license=None), read_card(tmp_path / "README.md"), same_weights=False)
    assert merged.text == full_card().text
    assert merged.data.license == "mit"


@pytest.mark.parametrize("metadata", ["a: [", "- a list", "model-index:\n- name: x\n  results: [{}]"])
def test_unreadable_metadata_are_an_error(metadata, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    with pytest.raises(ValueError, match=r"metadata of .*README\.md cannot be read.*mend"):
        read_card(tmp_path / "README.md")


# --- from a trainer ---------------------------------------------------------------------------------

FIELDS = {"attention_type": "moa", "cct_budgets": [1, 0.5], "num_attention_experts": 6}
LOGS = {"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def plain_classifier():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=3
        )
    )


@pytest.fixture
def offline(monkeypatch):
    """Any use of the network fails."""

    def refuse(*args):
        pytest.fail(f"reached for the network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_saving_writes_the_card(tmp_path, offline):
    made = run("bert", build("bert", **FIELDS), tmp_path / "run", max_steps=2, **LOGS)
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
    assert re.search(r"rows a batch\. Compute", text["Compute budgets"])
    hyperparameters = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", text["Training hyperparameters"], flags=re.MULTILINE)
    )
    assert hyperparameters["cct_noise_steps"] == "-1"
    assert hyperparameters["steps_done"] == "2"
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


class _Api:
    """Stands in for the Hub's client: keeps the card of each upload."""

    def __init__(self):
        self.cards = []

    def create_repo(self, name, **kwargs):
        return argparse.Namespace(repo_id=f"user/{name}")

    def upload_folder(self, *, folder_path, **kwargs):
        self.cards.append(Path(folder_path, "README.md").read_text())


def test_push_uploads_the_card(tmp_path, monkeypatch, offline):
    api = _Api()
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


# --- adapters ---------------------------------------------------------------------------------------

ADAPTERS = {
    "ftg": FTGConfig(task_type="SEQ_CLS", plus=True),
    "lora": LoraConfig(task_type="SEQ_CLS", target_modules=["query"]),
}


@pytest.mark.parametrize("method", ADAPTERS)
def test_card_of_an_adapter(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("bert", attention_type="mae").save_pretrained("local/base")
    base = CASE["BertForSequenceClassification"].gated.from_pretrained("local/base")
    model = get_peft_model(base, ADAPTERS[method])
    made = run("bert", model, tmp_path / "adapter", learning_rate=1e-2, **LOGS)
    made.save_model()
    card = read_card(tmp_path / "adapter" / "README.md")
    assert card.data.library_name == "peft"
    assert {"hf_moa", "mae", method, "transformers", "generated_from_trainer"} <= set(card.data.tags)
    assert "base_model" not in card.data.to_dict()
    assert not any("local/base" in tag for tag in card.data.tags)
    assert refusals(str(card)) == []
    assert ("FTG+ adapter of" in card.text) == (method == "ftg")
    assert ("AutoPeftModel" in card.text) == (method == "ftg")
    assert "[More Information Needed]" not in card.text
    assert "- PEFT " in sections(card)["Training hyperparameters"]
    assert "peng-etal-2020-mixture" in bib_keys(card)
    made.save_model()
    assert str(read_card(tmp_path / "adapter" / "README.md")) == str(card)

    code = python_of(card)[0].replace("path/or/name/of/the/base/model", "local/base")
    loaded = execute(code.split("inputs =")[0])["model"]
    assert isinstance(loaded, PeftModel)
    inputs = CASE["BertForSequenceClassification"].inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model.eval()(**inputs).logits)


def test_ftg_adapter_of_plain_attention_cites_its_paper():
    config = MoaBertConfig(attention_type="moa")
    card = model_card(config, name="out", adapter="FTG", base_model="user/base")
    assert card.data.to_dict()["tags"] == ["hf_moa", "moa", "ftg"]
    assert bib_keys(card) == ["peng-etal-2020-mixture", "zhang-etal-2022-mixture"]
    assert 'base = AutoModel.from_pretrained("user/base", trust_remote_code=True)' in card.text
    assert 'PeftModel.from_pretrained(base, "out")' in card.text


# --- from a checkpoint ------------------------------------------------------------------------------


def card_command(*argv):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["card", *map(str, argv)])
    return args.run(args)


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
    assert card_command(checkpoint, *options) == 0
    card = read_card(checkpoint / "README.md")
    assert capsys.readouterr().out == f"{checkpoint / 'README.md'}: tags hf_moa, mae, cct\n"
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "user/base")
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
    assert "--license, --base-model, --dataset\n" in capsys.readouterr().out
    assert not (checkpoint / "README.md").exists()
    card = read_card(output)
    assert card.data.metrics == ["accuracy", "f1"]
    assert "| evaluation data | F1 | 0.25 |" in sections(card)["Results"]
    assert "1.50x" in sections(card)["Compute budgets"]


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
    with pytest.raises(ValueError, match=r"folder with config\.json \(got .*nowhere, which has none\)"):
        checkpoint_card(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter's"):
        checkpoint_card(tmp_path)
    plain_classifier().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"moa_t5 \(got 'bert' in .*upcycle"):
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
    assert "example: hf-moa card ./mae-bert --license apache-2.0" in text
