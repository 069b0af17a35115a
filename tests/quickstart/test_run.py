import json
import math

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import hf_moa
from hf_moa.cli import main
from hf_moa.quickstart import run
from hf_moa.quickstart.corpus import Docstring, Example, build_corpus
from hf_moa.quickstart.gates import choose_example, expert_weights_by_class, token_compute
from hf_moa.quickstart.plots import draw_gates
from hf_moa.quickstart.reload import ReloadError, check_reload
from hf_moa.quickstart.run import run_quickstart
from hf_moa.quickstart.settings import QuickstartSettings
from hf_moa.quickstart.tokenizer import train_tokenizer
from hf_moa.quickstart.train import _unigram_loss

LABELS = ["asyncio", "email"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Return the name of the widget."], vocab_size=60, max_length=16)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = hf_moa.MoaBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=len(LABELS),
        attention_type="mae",
        cct_budgets=[0.5, 1.0],
    )
    model = hf_moa.MoaBertForSequenceClassification(config).eval()
    for name, parameter in model.named_parameters():
        if ".gate." in name:  # away from uniform weights
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def examples():
    texts = ["Return the name.", "The widget.", "Return a name of a name.", "Widget"]
    return [Example(text, i % 2) for i, text in enumerate(texts)]


def test_token_frequencies_leave_out_what_is_never_masked(tokenizer):
    """Were [CLS] and [SEP] counted, half of the tokens below would be of them."""
    ids = tokenizer("the name")["input_ids"]
    the, name = ids[1:3]
    heldout = [{"labels": torch.tensor([[-100, the, name, -100], [-100, the, -100, -100]])}]
    found = _unigram_loss([{"input_ids": ids}] * 3, heldout, tokenizer)
    kinds = len(tokenizer) - len(tokenizer.all_special_ids)
    assert found == pytest.approx(-math.log((3 + 1) / (6 + kinds)))


def test_expert_weights_are_the_mean_over_the_texts_of_a_class(model, tokenizer, examples):
    weights = expert_weights_by_class(model, tokenizer, examples, len(LABELS), batch_size=3)
    assert weights.shape == (2, 2, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
    alone = []
    for example in examples:
        batch = tokenizer(example.text, return_tensors="pt")
        with torch.no_grad():
            alone.append(torch.cat(model(**batch, output_expert_weights=True).expert_weights))
    torch.testing.assert_close(weights[:, 1], (alone[1] + alone[3]) / 2)
    assert weights.std() > 0.01


def test_token_compute_agrees_with_the_models_own_count(model, tokenizer):
    compute = token_compute(model, tokenizer, "Return the name of the widget.")
    assert compute.tokens[0] == "[CLS]"
    assert list(compute.open_gates) == [1.0, 0.5]
    inputs = tokenizer("Return the name of the widget.", return_tensors="pt")
    for budget, shares in compute.open_gates.items():
        assert shares.shape == (2, len(compute.tokens))
        with torch.no_grad():
            output = model(**inputs, budget=budget, output_cct_gates=True)
        assert compute.compute_fraction[budget] == output.compute_fraction.item()
        for share, gates in zip(shares, output.cct_gates, strict=True):
            six = torch.stack([gates["kv"][0], gates["query"][0], *gates["ffn"][0].unbind(-1)])
            torch.testing.assert_close(share, six.mean(dim=0))


def test_example_of_the_picture_fits_it(tokenizer):
    texts = ["Name", "Return\nthe name of widget.", "[MASK] the name of widget.", "Return the name."]
    examples = [Example(text, 0) for text in texts]
    assert choose_example(examples, tokenizer, 5, 12) is examples[3]
    assert choose_example(examples, tokenizer, 100, 200) is examples[0]


def test_picture_is_written(model, tokenizer, examples, tmp_path):
    pytest.importorskip("matplotlib")
    weights = expert_weights_by_class(model, tokenizer, examples, len(LABELS))
    text = "Return the name."
    draw_gates(tmp_path / "g.png", weights, LABELS, token_compute(model, tokenizer, text), text)
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "g.png").stat().st_size > 20_000


@pytest.mark.slow
def test_reload_check_passes_for_what_was_saved_and_fails_for_a_changed_weight(
    model, tokenizer, examples, tmp_path
):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [example.text for example in examples]
    check_reload(model, tokenizer, tmp_path, texts)
    bias = model.classifier.bias.data
    before = bias.clone()
    try:
        bias[0] += 1e-6
        with pytest.raises(ReloadError, match="largest difference"):
            check_reload(model, tokenizer, tmp_path, texts)
    finally:
        bias.copy_(before)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ReloadError, match="failed"):
        check_reload(model, tokenizer, tmp_path, texts)


@pytest.fixture
def little_text(monkeypatch):
    """A corpus that is soon read, and soon trained and evaluated on."""
    texts = [f"Return the {word} of item {i}." for i in range(60) for word in ("name", "size", "age")]
    docstrings = [Docstring(("asyncio", "email")[i % 2], text) for i, text in enumerate(texts)]
    corpus = build_corpus(docstrings=docstrings, topics=["A topic about gates."] * 9)
    monkeypatch.setattr(run, "build_corpus", lambda **settings: corpus)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A whole run with three steps in either training."""
    folder = tmp_path_factory.mktemp("run") / "out"
    lines = []
    settings = QuickstartSettings(max_steps=3, num_layers=2)
    results = run_quickstart(folder, settings, threads=1, say=lines.append)
    return folder, results, "\n".join(lines)


@pytest.mark.slow
def test_run_writes_checkpoints_results_and_picture(quickstart):
    folder, results, _ = quickstart
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"classifier", "gates.png", "pretrained", "results.json", "results.md"}
    assert [entry.name for entry in folder.parent.iterdir()] == ["out"]
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier").eval()
    assert model.config.id2label == dict(enumerate(results["labels"]))
    assert model(**tokenizer("Return the loop.", return_tensors="pt")).logits.shape == (1, 10)
    assert type(AutoModelForMaskedLM.from_pretrained(folder / "pretrained")).__name__ == (
        "MoaBertForMaskedLM"
    )


@pytest.mark.slow
def test_run_reports_each_budget_beside_the_majority_class(quickstart):
    folder, results, shown = quickstart
    assert [row["budget"] for row in results["classification"]] == [1.0, 0.5, 0.33]
    for row in results["classification"]:
        assert 0 <= row["eval_accuracy"] <= 1
        assert 0 <= row["compute_fraction"] <= 1
    assert results["masked_language"]["steps"] == 3
    assert results["masked_language"]["loss_after"] < results["masked_language"]["loss_before"]
    assert set(results["seconds"]) == {
        "text",
        "pretraining",
        "finetuning",
        "reload check",
        "picture",
    }
    for text in (shown, (folder / "results.md").read_text()):
        assert f"{results['majority_rate']:.4f}" in text
        assert "| budget | compute fraction | accuracy |" in text


@pytest.mark.slow
def test_run_does_not_overwrite_unless_told(quickstart, capsys):
    folder, results, _ = quickstart
    assert main(["quickstart", "--output-dir", str(folder)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert json.loads((folder / "results.json").read_text())["seconds"] == results["seconds"]


@pytest.mark.slow
def test_failed_reload_is_an_error_and_writes_nothing(little_text, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise ReloadError("not the same logits")

    monkeypatch.setattr(run, "check_reload", fail)
    argv = ["quickstart", "--output-dir", str(tmp_path / "out"), "--max-steps", "1"]
    assert main([*argv, "--threads", "1"]) == 1
    assert "not the same logits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_run_without_matplotlib_says_how_to_get_it(little_text, tmp_path, monkeypatch):
    def missing(*args):
        raise ImportError("matplotlib")

    monkeypatch.setattr(run, "draw_gates", missing)
    lines = []
    settings = QuickstartSettings(max_steps=1, num_layers=1)
    results = run_quickstart(tmp_path / "out", settings, threads=1, say=lines.append)
    assert results["picture"] is False
    assert any("hf-moa[plots]" in line for line in lines)
    assert "gates.png" not in (tmp_path / "out" / "results.md").read_text()
    assert not (tmp_path / "out" / "gates.png").exists()
