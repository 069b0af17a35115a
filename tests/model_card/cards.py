"""Cards, checkpoints and logs for the tests of model cards, and what these read in cards."""

import argparse
import math
import re
from pathlib import Path

import yaml
from test_pipelines import tokenizer
from transformers import BertConfig, BertForSequenceClassification

from hf_moa import MoaBertConfig
from hf_moa.cli import card as command
from hf_moa.markdown import split_sections
from hf_moa.model_card import DataUsed, TrainingFacts, eval_results, model_card

FIELDS = {"attention_type": "moa", "cct_budgets": [1, 0.5], "num_attention_experts": 6}
LOGS = {"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
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
    """A card with every section."""
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
    """Heading -> text."""
    return dict(split_sections(card.text)[1])


def python_of(card):
    """The snippets: with the package, and without it where the card has one."""
    return re.findall(r"```python\n(.*?)```", sections(card)["How to load"], flags=re.DOTALL)


def bib_keys(card):
    return re.findall(r"^@\w+{(.+?),$", sections(card).get("Citation", ""), flags=re.MULTILINE)


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


def saved(case, folder, *, with_tokenizer=True, **fields):
    """A model that was saved to a folder."""
    model = case.build(**fields)
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer(case).save_pretrained(folder)
    return model


def execute(code):
    """Run a snippet; the names that it leaves."""
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def card_command(*argv):
    """`hf-moa card`, whose errors come through."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["card", *map(str, argv)])
    return args.run(args)


class Uploads:
    """Stands in for the Hub's client: keeps the card of each upload."""

    def __init__(self):
        self.cards = []

    def create_repo(self, name, **kwargs):
        return argparse.Namespace(repo_id=f"user/{name}")

    def upload_folder(self, *, folder_path, **kwargs):
        self.cards.append(Path(folder_path, "README.md").read_text())


def plain_classifier():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=3
        )
    )


def evaluation(step, accuracy, **others):
    """An entry of a trainer's log, which takes four steps an epoch."""
    return {"eval_accuracy": accuracy, "eval_runtime": 1.0, "step": step, "epoch": step / 4, **others}


LOG = [
    {"loss": 2.0, "step": 2},
    evaluation(2, 0.25),
    {"loss": 1.0, "step": 4},
    evaluation(4, 0.5),
    {"train_runtime": 9.0, "train_loss": 1.5, "step": 4},
]
