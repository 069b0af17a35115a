"""A card's metadata, and what the Hub checks of them."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from cards import MRPC, RESULTS, full_card, refusals, sections
from transformers import BertConfig

from hf_moa import MoaBertConfig, MoaT5Config
from hf_moa.model_card import DataUsed, eval_results, model_card, read_card, write_card


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
    (tmp_path / "other").touch()
    assert (tmp_path / "README.md").stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "README.md").chmod(0o600)
    write_card(card, tmp_path / "README.md")
    assert (tmp_path / "README.md").stat().st_mode & 0o777 == 0o600


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


@pytest.fixture
def endpoint(monkeypatch):
    """A server instead of the Hub's validation."""
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
