import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification

import hf_moa
from hf_moa.cli import main
from hf_moa.cli.upcycle import _meaning
from hf_moa.modeling.configuration_gating import GatingConfig
from hf_moa.quickstart.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def bert_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_tokenizer(["Return the name of the widget."], vocab_size=60)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def error_of(capsys, *argv):
    """The one line that a mistaken command leaves on standard error."""
    assert main([str(arg) for arg in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("command", ["quickstart", "upcycle", "env"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"example: hf-moa {command}" in capsys.readouterr().out


def test_help_of_upcycle_says_what_every_field_is(capsys):
    with pytest.raises(SystemExit):
        main(["upcycle", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--mae-num-dropped-heads" in text
    assert "Heads that each MAE expert leaves out" in text
    assert "--cct-budgets BUDGET [BUDGET ...]" in text
    for field in dataclasses.fields(GatingConfig):
        assert _meaning(GatingConfig, field.name) or field.name.startswith("output_"), field.name


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"], ["upcycle", "only-src"]])
def test_unknown_usage_exits_with_2(argv):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2


def test_env_as_json(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert facts["hf_moa"] == hf_moa.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpus"] >= 1
    assert {"python", "transformers", "peft", "accelerate"} <= facts.keys()
    assert isinstance(facts["cuda"], list)


def test_env_as_text(capsys):
    assert main(["env"]) == 0
    assert f"torch: {torch.__version__}" in capsys.readouterr().out.splitlines()


def test_module_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "hf_moa", "env", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["torch"] == torch.__version__


def test_upcycle_writes_a_gated_checkpoint_that_computes_the_same(bert_dir, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["upcycle", str(bert_dir), str(out), "--attention-type", "mae"]
    assert main([*argv, "--mae-num-dropped-heads", "2", "--cct-budgets", "1.0", "0.5"]) == 0
    assert "MoaBertForSequenceClassification" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]

    model = hf_moa.MoaBertForSequenceClassification.from_pretrained(out).eval()
    assert model.config.attention_type == "mae"
    assert model.config.mae_num_dropped_heads == 2
    assert model.config.cct_budgets == [1.0, 0.5]
    source = BertForSequenceClassification.from_pretrained(bert_dir).eval()
    batch = AutoTokenizer.from_pretrained(out)(["Return the widget."], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, source(**batch).logits)


def test_upcycle_takes_fields_of_every_kind(bert_dir, tmp_path):
    out = tmp_path / "out"
    argv = ["upcycle", bert_dir, out, "--attention-type", "moa", "--num-attention-experts", "6"]
    argv += ["--router-z-loss-coef", "0.5", "--mae-gate-window", "none", "--ffn-type", "moe"]
    argv += ["--num-attention-heads", "2", "--head-dim", "4", "--task", "feature-extraction"]
    assert main([str(arg) for arg in argv]) == 0
    config = AutoModel.from_pretrained(out).config
    assert (config.attention_type, config.num_attention_experts, config.head_dim) == ("moa", 6, 4)
    assert (config.num_attention_heads, config.ffn_type) == (2, "moe")
    assert config.router_z_loss_coef == 0.5
    assert config.mae_gate_window is None
    assert config.architectures == ["MoaBertModel"]


def test_upcycle_without_a_tokenizer_writes_none(bert_dir, tmp_path, capsys):
    source = tmp_path / "source"
    BertForSequenceClassification.from_pretrained(bert_dir).save_pretrained(source)
    assert main(["upcycle", str(source), str(tmp_path / "out")]) == 0
    assert "without a tokenizer" in capsys.readouterr().out
    names = {entry.name for entry in (tmp_path / "out").iterdir() if entry.suffix != ".py"}
    assert names == {"config.json", "model.safetensors"}


def test_upcycle_refuses_a_full_folder_unless_told(bert_dir, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "stale.bin").write_text("old")
    message = error_of(capsys, "upcycle", bert_dir, out)
    assert "not empty" in message
    assert "--overwrite" in message
    assert (out / "stale.bin").exists()
    assert main(["upcycle", str(bert_dir), str(out), "--overwrite"]) == 0
    assert not (out / "stale.bin").exists()
    assert AutoModel.from_pretrained(out).config.model_type == "moa_bert"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--attention-type", "mae", "--mae-num-dropped-heads", "4"], "mae_num_dropped_heads"),
        (["--cct-budgets", "1.5"], "cct_budgets"),
        (["--task", "nonsense"], "task must be one of"),
        (["--attention-type", "moa", "--num-attention-experts", "2"], "num_attention_experts"),
    ],
)
def test_upcycle_with_a_bad_field_leaves_nothing(bert_dir, tmp_path, capsys, options, expected):
    message = error_of(capsys, "upcycle", bert_dir, tmp_path / "out", *options)
    assert message.startswith("hf-moa upcycle: error: ")
    assert expected in message
    assert list(tmp_path.iterdir()) == []


def test_upcycle_of_a_missing_source_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error_of(capsys, "upcycle", tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_unexpected_errors_keep_their_traceback(bert_dir, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(hf_moa, "upcycle", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["upcycle", str(bert_dir), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_interruption_ends_with_130_and_leaves_nothing(bert_dir, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_moa, "upcycle", interrupted)
    assert main(["upcycle", str(bert_dir), str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--max-steps", "0"], "max_steps"),
        (["--threads", "0"], "threads"),
        (["--seed", "-1"], "seed"),
        (["--pretrain-epochs", "0"], "pretrain_epochs"),
    ],
)
def test_quickstart_with_a_bad_option(tmp_path, capsys, options, expected):
    assert expected in error_of(capsys, "quickstart", "--output-dir", tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_quickstart_refuses_a_full_folder(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("mine")
    message = error_of(capsys, "quickstart", "--output-dir", tmp_path)
    assert "not empty" in message
    assert "--overwrite" in message
