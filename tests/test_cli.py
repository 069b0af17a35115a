import dataclasses
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from common import TINY
from families import CASE
from peft import get_peft_model
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification

import hf_moa
from hf_moa import MoaBertConfig, MoaBertForMultipleChoice
from hf_moa.cli import main
from hf_moa.cli.command import load_checkpoint
from hf_moa.cli.gating_fields import gating_fields
from hf_moa.cli.upcycle import UPCYCLED
from hf_moa.families import FAMILIES
from hf_moa.modeling.cct.upcycling import default_fields
from hf_moa.modeling.config.gating import GatingConfig
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


@pytest.fixture(scope="module")
def gated_dir(bert_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    hf_moa.upcycle(bert_dir, "mae", cct_budgets=[1, 0.5]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert_dir).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three labelled texts."""
    path = tmp_path_factory.mktemp("texts") / "dev.tsv"
    rows = ["sentence\tlabel", "Return the name\t0", "of the widget\t1", "the the\t2"]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def error_of(capsys, *argv):
    """The one line that a mistaken command leaves on standard error."""
    assert main([str(arg) for arg in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("command", ["quickstart", "upcycle", "analyze", "benchmark", "card", "env"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"example: hf-moa {command}" in capsys.readouterr().out


def test_help_of_upcycle_says_what_every_field_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # nothing is broken into lines
    with pytest.raises(SystemExit):
        main(["upcycle", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--mae-num-dropped-heads" in text
    assert "Heads that each MAE expert leaves out" in text
    assert "--cct-budgets BUDGET [BUDGET ...]" in text
    shown = [f for f in gating_fields() if f"--{f.name.replace('_', '-')}" in text]
    assert len(shown) > 20
    # `default_fields` has what upcycle sets itself
    said = [(f, f"{f.meaning} (default: {UPCYCLED.get(f.name, f.default)})") for f in shown]
    assert all((s.replace("None", "none") if "None" in f.kinds else s) in text for f, s in said)
    assert "for T5 also pairs" in text


def test_help_of_upcycle_names_every_task(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["upcycle", "--help"])
    named = re.search(r"head to load: (.+)", capsys.readouterr().out).group(1)
    known = {task for family in FAMILIES.values() for task in family.tasks}
    assert sorted(named.strip().split(", ")) == sorted(known)


def test_fields_of_the_command_line_are_those_of_the_configuration():
    hints = typing.get_type_hints(GatingConfig)
    for field, own in zip(gating_fields(), dataclasses.fields(GatingConfig), strict=True):
        kinds = typing.get_args(hints[own.name]) or (hints[own.name],)
        names = tuple("None" if kind is type(None) else kind.__name__ for kind in kinds)
        assert (field.name, field.kinds, field.default) == (own.name, names, own.default)
        assert field.meaning or own.name.startswith("output_"), own.name
        assert (field.choices is not None) == ("str" in names), own.name
        if field.choices is not None:
            with pytest.raises(ValueError, match=", ".join(map(repr, field.choices))):
                MoaBertConfig(**{own.name: "nonsense"})


def test_help_and_mistakes_do_not_wait_for_slow_imports():
    commands = "quickstart", "upcycle", "analyze", "benchmark", "card", "env"
    lines = [["--help"], [], *([command, "--help"] for command in commands)]
    lines += [["upcycle", "only-src"], ["analyze", "model", "--data", "x", "--limit", "0"]]
    lines += [["benchmark", "model", "--turns", "many"], ["card", "model", "--output", "."]]
    code = f"""
import contextlib, sys
from hf_moa_cli import main
for argv in {lines}:
    with contextlib.suppress(SystemExit):
        assert main(argv) == 2
    slow = {{"torch", "transformers", "peft", "datasets", "huggingface_hub"}} & set(sys.modules)
    assert not slow, (argv, slow)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert 'hf-moa = "hf_moa_cli:main"' in pyproject.read_text(encoding="utf-8")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"], ["upcycle", "only-src"]])
def test_unknown_usage_exits_with_2(argv):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"hf-moa {hf_moa.__version__}\n"


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


def test_upcycle_as_json(bert_dir, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["upcycle", str(bert_dir), out, "--attention-type", "mae", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "output_dir": out,
        "model": "MoaBertForSequenceClassification",
        "parameters": hf_moa.MoaBertForSequenceClassification.from_pretrained(out).num_parameters(),
        "tokenizer": True,
        "sentence_transformers": False,
    }


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


def test_upcycle_never_replaces_its_source(bert_dir, tmp_path, capsys):
    before = {entry.name: entry.read_bytes() for entry in Path(bert_dir).iterdir()}
    link = tmp_path / "link"
    link.symlink_to(bert_dir)
    for out in (bert_dir, link):
        message = error_of(capsys, "upcycle", bert_dir, out, "--overwrite")
        assert "another folder than the source" in message
    assert {entry.name: entry.read_bytes() for entry in Path(bert_dir).iterdir()} == before


def test_upcycle_refuses_a_full_folder_unless_told(bert_dir, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    (out / "checkpoint-2").mkdir()
    (out / "checkpoint-2" / "model.safetensors").write_text("mine, too")
    (out / "model-00001-of-00002.safetensors").write_text("old")
    message = error_of(capsys, "upcycle", bert_dir, out)
    assert "not empty" in message
    assert "--overwrite" in message
    assert (out / "model-00001-of-00002.safetensors").exists()
    assert main(["upcycle", str(bert_dir), str(out), "--overwrite"]) == 0
    assert not (out / "model-00001-of-00002.safetensors").exists()
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "checkpoint-2" / "model.safetensors").read_text() == "mine, too"
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


@pytest.mark.parametrize("command", ["upcycle", "benchmark", "analyze", "shrink"])
def test_a_path_that_is_not_there_is_no_name_on_the_hub(command, texts, tmp_path, capsys):
    rest = {
        "upcycle": [tmp_path / "out"],
        "analyze": ["--data", texts, "--output", tmp_path / "out.html"],
        "shrink": [tmp_path / "out", "--train-file", texts, "--text-column", "sentence"],
    }.get(command, [])
    for source in ("./nowhere", tmp_path / "no" / "where"):
        message = error_of(capsys, command, source, *rest)
        assert f"(got {str(source)!r}: there is no such folder)" in message
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))


def test_misspelt_options_are_told_the_ones_they_resemble(bert_dir, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["upcycle", str(bert_dir), str(tmp_path / "out"), "--atention_type", "mae"])
    message = "unrecognized arguments: --atention_type (did you mean --attention-type?) mae"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_analyze_refuses_an_output_that_it_could_not_write(gated_dir, texts, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file" / "gates.html", tmp_path / "deep" / "gates.html"):
        if output.parent.name == "deep":
            output.mkdir(parents=True)
        message = error_of(
            capsys, "analyze", "./nowhere", "--data", texts, "--output", output, "--overwrite"
        )
        assert "--output must be a file that can be written" in message


def test_quickstart_refuses_a_full_folder(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("mine")
    message = error_of(capsys, "quickstart", "--output-dir", tmp_path)
    assert "not empty" in message
    assert "--overwrite" in message


def test_analyze_writes_a_report_and_prints_its_tables(gated_dir, texts, tmp_path, capsys):
    report = tmp_path / "gates.html"
    command = ["analyze", gated_dir, "--data", texts, "--text-column", "sentence", "--output", report]
    command += ["--least-count", "1", "--draws", "2", "--budgets", "0.5", "--json"]
    assert main([str(word) for word in command]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["sequences"] == 3
    assert found["facts"]["model"] == "MoaBertForSequenceClassification"
    tables = found["tables"]
    assert [row["experts"] for row in tables["expert_selection"]] == ["mixture", "argmax", "random"]
    assert [row["budget"] for row in tables["budget_metrics"]] == [0.5]
    assert 0 <= tables["budget_metrics"][0]["accuracy"] <= 1
    assert {"mae_entropy", "mae_experts", "cct_activity", "cct_compute"} <= tables.keys()
    text = report.read_text(encoding="utf-8")
    assert all(f'id="{name}"' in text for name in tables)
    assert "dev.tsv" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--output", "report.pdf"], "must end in .html or .md (got report.pdf)"),
        (["--output", "there.html"], "there already; give another --output, or --overwrite"),
        (["--limit", "0"], "--limit must be at least 1 (got 0)"),
        (["--data", "missing.txt"], "no such file"),
        (["--budgets", "0.7"], "gated0, 1, 0.5 (got 0.7)"),
        (["--label-column", "stars"], "must have a column 'stars' (got sentence, label)"),
    ],
)
def test_analyze_with_a_bad_option(gated_dir, texts, tmp_path, capsys, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.html").write_text("mine")
    monkeypatch.setattr("tqdm.std.tqdm.display", lambda *args, **kwargs: None)
    columns = ["--text-column", "sentence"]
    message = error_of(capsys, "analyze", gated_dir, "--data", texts, *columns, *options)
    assert expected in message
    assert (tmp_path / "there.html").read_text() == "mine"
    assert not (tmp_path / "gates.html").exists()


def test_analyze_asks_for_matplotlib_before_it_measures(gated_dir, texts, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = error_of(capsys, "analyze", gated_dir, "--data", texts, "--text-column", "sentence")
    assert "needs the package matplotlib" in message
    assert 'pip install "hf-moa[analysis]"' in message


@pytest.mark.parametrize("command", ["analyze", "benchmark"])
def test_text_needs_a_tokenizer(command, gated_dir, texts, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(gated_dir / name)
    options = ["--data", texts, "--text-column", "sentence"]
    message = error_of(capsys, command, tmp_path, *options)
    assert f"{tmp_path} must have its tokenizer beside it to read text (got none)" in message


@pytest.mark.parametrize("command", [["analyze", "--data", "x.txt"], ["benchmark"]])
def test_plain_checkpoints_have_no_gates(bert_dir, capsys, command):
    message = error_of(capsys, command[0], bert_dir, *command[1:])
    assert (
        "must be a checkpoint of hf_moa (got model_type 'bert'); `hf-moa upcycle` makes one" in message
    )


@pytest.mark.parametrize("data", [True, False])
def test_benchmark_times_each_budget_beside_the_plain_model(gated_dir, texts, capsys, data):
    options = ["--turns", "2", "--length", "8", "--json"]
    options += ["--data", str(texts), "--text-column", "sentence"] if data else ["--batch-size", "2"]
    assert main(["benchmark", str(gated_dir), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert [(row["model"], row["budget"], row["execution"]) for row in rows] == [
        ("MoaBertForSequenceClassification without gates", None, None),
        ("MoaBertForSequenceClassification", 1, "dense"),
        ("MoaBertForSequenceClassification", 1, "auto"),
        ("MoaBertForSequenceClassification", 0.5, "auto"),
    ]
    assert rows[0]["ratio"] == 1
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(0 < row["compute_fraction"] <= 1 for row in rows[1:])
    assert found["environment"]["torch"] == torch.__version__


def test_benchmark_of_an_execution(gated_dir, capsys):
    options = ["--batch-size", "2", "--length", "4", "--turns", "2", "--execution", "sparse"]
    assert main(["benchmark", str(gated_dir), *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["execution"] for row in rows} == {None, "dense", "sparse"}


def test_benchmark_of_multiple_choice_has_choices(tmp_path, capsys):
    MoaBertForMultipleChoice(MoaBertConfig(**TINY, cct_budgets=[1, 0.5])).save_pretrained(tmp_path)
    options = ["--turns", "2", "--length", "8", "--batch-size", "2"]
    assert main(["benchmark", str(tmp_path), *options]) == 0
    assert "2x2x8 random tokens" in capsys.readouterr().out


def test_adapter_is_loaded_onto_the_class_of_its_task(gated_dir, tmp_path, capsys):
    """Not onto that of its base's checkpoint, and with as many labels as it has."""
    adapter = str(tmp_path / "adapter")
    hf_moa.MoaBertForMaskedLM.from_pretrained(gated_dir).save_pretrained(tmp_path)
    base = hf_moa.MoaBertForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    config = hf_moa.FTGConfig(task_type="TOKEN_CLS", modules_to_save=["control_symbols"])
    get_peft_model(base, config).save_pretrained(adapter)
    loaded = load_checkpoint(adapter).get_base_model()
    assert type(loaded) is hf_moa.MoaBertForTokenClassification
    assert loaded.config.num_labels == 5
    assert main(["benchmark", adapter, "--turns", "2", "--length", "8"]) == 0
    assert "| MoaBertForTokenClassification without gates |" in capsys.readouterr().out

    path = Path(adapter, "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    message = error_of(capsys, "benchmark", adapter)
    assert "must name its base model (got no base_model_name_or_path" in message


def test_benchmark_of_a_model_with_several_end_tokens(tmp_path, capsys):
    config = MoaBertConfig(**TINY, eos_token_id=[0, 2])
    hf_moa.MoaBertForMaskedLM(config).save_pretrained(tmp_path)
    assert main(["benchmark", str(tmp_path), "--turns", "2", "--length", "8"]) == 0
    assert "8x8 random tokens" in capsys.readouterr().out


def test_benchmark_prints_a_table(gated_dir, capsys):
    assert main(["benchmark", str(gated_dir), "--turns", "2", "--length", "8"]) == 0
    head, line, plain, *gated = capsys.readouterr().out.splitlines()[2:]
    assert head == "| model | budget | execution | compute fraction | ms | ± % | ratio |"
    assert line == "|---|---|---|---|---|---|---|"
    number = r"\d+\.\d"
    assert re.fullmatch(
        r"\| MoaBertForSequenceClassification without gates \|  \|  \|  "
        rf"\| {number}\d \| {number} \| 1\.000 \|",
        plain,
    )
    assert [row.split(" | ")[1:3] for row in gated] == [["1", "dense"], ["1", "auto"], ["0.5", "auto"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--turns", "1"], "turns must be at least 2 (got 1)"),
        (["--threads", "0"], "--threads must be at least 1 (got 0)"),
        (["--budgets", "0.3"], "--budgets must be of those of"),
    ],
)
def test_benchmark_with_a_bad_option(gated_dir, capsys, options, expected):
    assert expected in error_of(capsys, "benchmark", gated_dir, *options)


def test_module_is_the_same_command_and_its_reader_may_stop():
    command = f"{sys.executable} -m hf_moa env | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("python: ")
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["benchmark", "analyze"])
def test_budgets_are_refused_before_weights_are_loaded(command, tmp_path, bert_dir, capsys):
    """Of T5 any pair of numbers that it knows."""
    case = CASE["T5ForConditionalGeneration"]
    case.config(cct_budgets=[1, 0.5]).save_pretrained(tmp_path)  # and nothing else
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["MoaT5ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "dev.tsv").write_text("text\na head\n")
    data = ["--data", str(tmp_path / "dev.tsv")] if command == "analyze" else []
    for budget, said in {
        "0.7": "--budgets must be of those of",
        "1,0.7": "--budgets must be of those of",
        "1,0.5": "no file named model.safetensors",
        "0.5": "no file named model.safetensors",
    }.items():
        assert main([command, str(tmp_path), *data, "--budgets", budget]) == 2
        assert said in capsys.readouterr().err


def test_upcycle_sets_what_its_help_says():
    for name, value in default_fields({"cct_budgets": [1, 0.5]}, None).items():
        if name != "cct_sublayer_norm":  # which has no flag
            assert UPCYCLED[name].partition(" with CCT")[0] == str(value)
