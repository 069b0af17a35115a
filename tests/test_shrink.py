"""`hf-moa shrink`: from a finetuned checkpoint to one with several sizes."""

import json

import pytest
import torch
from datasets import Dataset
from few_words import WORDS, write_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_moa.benchmark import benchmark
from hf_moa.cli import main
from hf_moa.shrink import ShrinkSettings, shrink
from hf_moa.text_batches import TextBatches, read_text

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny checkpoint of each kind, with a tokenizer, and labelled texts: is there a "red" in it?"""
    folder = tmp_path_factory.mktemp("shrink")
    torch.manual_seed(0)
    for name in ("bert", "gpt2", "t5", "qa"):
        (folder / name).mkdir()
        size = write_tokenizer(folder / name)
        if name == "bert":
            model = BertForSequenceClassification(BertConfig(vocab_size=size, **BERT))
        elif name == "qa":
            model = BertForQuestionAnswering(BertConfig(vocab_size=size, **BERT))
        elif name == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(vocab_size=size, n_embd=16, n_layer=2, n_head=4, n_positions=32)
            )
        else:
            model = T5ForConditionalGeneration(
                T5Config(
                    vocab_size=size,
                    d_model=16,
                    d_kv=4,
                    d_ff=32,
                    num_layers=1,
                    num_heads=4,
                    decoder_start_token_id=0,
                )
            )
        model.save_pretrained(folder / name)
    rows = ["text\tlabel\ttarget"]
    for i in range(48):
        words = [WORDS[(i * 7 + j * (1 + i % 3)) % len(WORDS)] for j in range(3 + i % 5)]
        rows.append(f"{' '.join(words)}\t{int('red' in words)}\t{' '.join(reversed(words))}")
    (folder / "train.tsv").write_text("\n".join(rows))
    return folder


_slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["bert", pytest.param("gpt2", marks=_slow), pytest.param("t5", marks=_slow)]
)
def test_makes_one_checkpoint_with_several_sizes(name, files, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["shrink", files / name, out, "--train-file", files / "train.tsv", "--epochs", "1",
               "--budgets", "1", "0.5", "--batch-size", "8"]  # fmt: skip
    assert main([str(each) for each in command]) == 0
    printed = capsys.readouterr().out
    quality = "accuracy" if name == "bert" else "perplexity"
    assert f"| budget | {quality} | share of the matrices |" in printed
    results = json.loads((out / "results.json").read_text())
    assert [row["budget"] for row in results["rows"]] == [None, 1.0, 0.5]
    assert [row["compute_fraction"] for row in results["rows"]] == [None, 1.0, 0.5]
    assert all(row["milliseconds_batch_32"] > 0 for row in results["rows"])
    assert {"README.md", "config.json", "model.safetensors", "sizes.png", "tokenizer_config.json"} <= {
        path.name for path in out.iterdir()
    }
    assert not (out / "checkpoints").exists()
    card = (out / "README.md").read_text()
    assert "Nested budgets" in card
    assert quality in card or "loss" in card


@pytest.mark.parametrize("bf16", [False, True])
def test_every_budget_learns_from_the_source(bf16, files, tmp_path, monkeypatch):
    timed = set()

    def watched(model, batch):
        hook = model.classifier.register_forward_hook(lambda *args: timed.add(args[-1].dtype))
        times = benchmark(model, batch)
        hook.remove()
        return times

    monkeypatch.setattr("hf_moa.shrink.benchmark", watched)
    data = read_text(str(files / "train.tsv"))
    settings = ShrinkSettings(budgets=(1.0, 0.5), epochs=8, learning_rate=3e-3, batch_size=8, bf16=bf16)
    results = shrink(str(files / "bert"), tmp_path, train=data, validation=data, settings=settings)
    source, *budgets = results["rows"]
    assert all(row["eval_loss"] < source["eval_loss"] for row in budgets)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert model.config.nested_budgets == [1.0, 0.5]
    assert model.dtype == torch.float32
    assert timed == {torch.float32}  # not in autocast, as the source is timed


def test_batches_are_of_texts_of_about_the_same_length(files, tmp_path, monkeypatch):
    batches = []
    collate = TextBatches.collate

    def watched(self, examples):
        batches.append({len(each["text"]) for each in examples})
        return collate(self, examples)

    monkeypatch.setattr(TextBatches, "collate", watched)
    data = Dataset.from_list([{"text": "a red cat"[: 1 + 8 * (i % 2)], "label": 0} for i in range(96)])
    settings = ShrinkSettings(budgets=(1.0, 0.5), epochs=1, batch_size=4)
    shrink(str(files / "bert"), tmp_path, train=data, validation=data, settings=settings)
    mixed = sum(len(lengths) > 1 for lengths in batches)
    assert mixed < 0.3 * len(batches)  # of batches drawn at random 0.88


def test_goes_on_where_it_was_stopped(files, tmp_path):
    data = read_text(str(files / "train.tsv"))
    settings = ShrinkSettings(budgets=(1.0, 0.5), epochs=2, batch_size=8)

    def go(folder, say):
        shrink(str(files / "bert"), folder, train=data, validation=data, settings=settings, say=say)
        return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()

    class StoppedError(Exception):
        pass

    def stop(line):
        if line.startswith("Evaluation"):
            raise StoppedError

    with pytest.raises(StoppedError):
        go(tmp_path / "parts", stop)
    (last,) = (tmp_path / "parts" / "checkpoints").glob("checkpoint-*")
    assert last.name == "checkpoint-12"
    lines = []
    found, expected = go(tmp_path / "parts", lines.append), go(tmp_path / "whole", lines.append)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(ValueError, match="holds a result already"):
        go(tmp_path / "parts", lines.append)
    (tmp_path / "parts" / "results.json").unlink()
    with pytest.raises(ValueError, match=r"holds a run with other epochs \(got \[3\]\)"):
        shrink(str(files / "bert"), tmp_path / "parts", train=data, settings=ShrinkSettings(
            budgets=(1.0, 0.5), epochs=3, batch_size=8))  # fmt: skip


def test_touches_no_other_folder(files, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a run of shrink"):
        shrink(str(files / "bert"), tmp_path, train=None, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qa", [], "must be of a class with labels of its own to learn from"),
        ("bert", ["--budgets", "0.5"], "nested_budgets must be"),
        ("bert", ["--label-column", "other"], "must have a column 'other'"),
        ("bert", ["--batch-size", "0"], "--batch-size must be at least 1"),
        ("missing", [], "missing"),
    ],
)
def test_mistakes_are_one_line(name, options, message, files, tmp_path, capsys):
    argv = ["shrink", str(files / name), str(tmp_path / "out"), "--train-file", str(files / "train.tsv")]
    assert main([*argv, *options]) == 2
    assert message in capsys.readouterr().err
