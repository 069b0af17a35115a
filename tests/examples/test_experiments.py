"""The experiments of `examples/reproduce` end to end: tiny models, made-up texts, a few updates."""

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import datasets
import pandas as pd
import pytest
from accelerate_runs import forget_accelerator
from test_run_qa import squad as squad_file

FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"
WORDS = ["the", "small", "red", "dog", "cat", "sees", "runs", "jumps", "over", "a", "house", "now"]
TRY_TO_LOCK = """
import sys
from filelock import FileLock, Timeout
try:
    FileLock(sys.argv[1]).acquire(timeout=0)
except Timeout:
    sys.exit(0)
sys.exit("nobody holds the lock")
"""
TINY_T5 = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 1}


@pytest.fixture
def reproduce(fresh_import):
    """Imports a script of the folder."""
    forget_accelerator()
    return fresh_import(FOLDER)


def sentences(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("multi30k", "tatoeba-en-de", "wikitext-2", "wikitext-103"):
        (folder / name).mkdir()
    for seed, (stem, count) in enumerate({"train": 40, "val": 6, "test_2016_flickr": 6}.items()):
        for language in ("en", "de"):
            text = "\n".join(sentences(count, f"{seed}{language}")) + "\n"
            (folder / "multi30k" / f"{stem}.{language}").write_text(text, encoding="utf-8")
    pairs = [f"{i} {one}\t{i} {other}\tCC-BY" for i, (one, other) in enumerate(tatoeba_pairs())]
    (folder / "tatoeba-en-de" / "deu.txt").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    for seed, stem in enumerate(("train", "valid", "test")):
        text = "".join(f"{line}\n" for line in sentences(60, seed))
        for name in ("wikitext-2", "wikitext-103"):
            (folder / name / f"{stem}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def tatoeba_pairs():
    return zip(sentences(60, "en"), sentences(60, "de"), strict=True)


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def report_of(module, results, folder, capsys):
    capsys.readouterr()
    module.EXPERIMENT.main(["--report", str(folder), "--results", str(results)])
    return capsys.readouterr().out


def make_tiny(translation_runs):
    translation_runs.FLAGS |= {
        "vocab_size": 300,
        "config_overrides": TINY_T5,
        "checkpointing_steps": 1,
        "checkpoints_total_limit": 2,
        "average_checkpoints": 2,
        "num_beams": 2,
        "max_target_length": 12,
        "per_device_train_batch_size": 8,
    }


@pytest.mark.nightly
def test_translation_specialisation_and_transfer(reproduce, data_dir, tmp_path, capsys):
    """The three that build on each other's models."""
    make_tiny(reproduce("translation_runs"))
    training = reproduce("mae_translation")
    for name in set(training.VARIANTS) - {"BASE", "MAE-7"}:
        del training.VARIANTS[name]
    training.SEEDS, training.STEPS = (1,), {"multi30k": 3, "tatoeba": 3}
    training.SMALL |= {"pairs": 20, "steps": 3}
    training.FASTER |= {"steps": 3}
    training.VARIANTS_OF_SMALL = training.VARIANTS_OF_FASTER = ("MAE-7",)
    folders = ["--data_dir", data_dir, "--models_dir", str(tmp_path / "models")]
    results = tmp_path / "training.jsonl"
    training.EXPERIMENT.main([*folders, "--results", str(results)])
    rows = rows_of(results)
    assert len(rows) == 4 + 1 + 1
    losses = [row["measured"]["loss"] for row in rows]
    assert all(loss > 0 for loss in losses)
    assert len(set(losses)) == len(losses)  # the settings reach the training
    assert report_of(training, results, tmp_path, capsys).count("| MAE-7 | 1 |") == 2 * 2 + 1 + 1
    left = {path.name for path in (tmp_path / "models" / "tatoeba" / "MAE-7-1").iterdir()}
    assert "model.safetensors" in left
    assert not any(name.startswith("step_") for name in left)

    specialisation = reproduce("specialisation")
    results = tmp_path / "specialisation.jsonl"
    specialisation.EXPERIMENT.main([*folders, "--results", str(results)])
    rows = rows_of(results)
    assert [row["settings"]["variant"] for row in rows] == ["MAE-7", "MAE-7"]
    for row in rows:
        assert 0 < row["measured"]["entropy"] <= 1.3863  # log 4
        assert {"encoder entropy", "cross largest_share", "bleu argmax"} <= row["measured"].keys()
        for layer in row["measured"]["layers"]:
            assert sum(layer["shares"]) == pytest.approx(1)
            assert len(layer["shares"]) == len(layer["tokens"]) == 4
    assert "| cross | 1 |" in report_of(specialisation, results, tmp_path, capsys)

    transfer = reproduce("transfer")
    transfer.SEEDS, transfer.FRACTIONS, transfer.PAIRS = (1,), (0.5,), 40
    transfer.STEPS = transfer.STEPS_FROM_SCRATCH = 2
    transfer.METHODS |= {name: rates[:1] for name, rates in transfer.METHODS.items()}
    transfer.OTHER_BASES = ("MAE-7",)  # no further one is trained here
    folders[-1] = str(tmp_path / "pretrained")
    results = tmp_path / "transfer.jsonl"
    transfer.EXPERIMENT.main([*folders, "--results", str(results)])
    pretraining = tmp_path / "pretrained" / "tatoeba" / "MAE-7-1" / "all_results.json"
    assert json.loads(pretraining.read_text())["step"] == 4 * training.STEPS["tatoeba"]
    rows = rows_of(results)
    assert len(rows) == 5 + 6 + 3  # learning rates; methods; those on another base
    sizes = {row["settings"]["method"]: row["measured"]["trainable_parameters"] for row in rows}
    assert sizes["NOFT"] == 0 < sizes["FTG"] < sizes["FTG+"] < sizes["FTALL"] == sizes["SCRATCH"]
    shown = report_of(transfer, results, tmp_path, capsys)
    assert "| LoRA |" in shown
    of_bases = shown[shown.index("| base, seed 1 |") :]
    assert of_bases.count("| MAE-7 |") == 2
    assert "| - |" not in of_bases
    assert (tmp_path / "bleu.svg").is_file()


@pytest.mark.nightly
def test_cct_translation(reproduce, data_dir, tmp_path, capsys):
    make_tiny(reproduce("translation_runs"))
    module = reproduce("cct_translation")
    module.SEEDS, module.LATENCY_SENTENCES = (1,), 4
    module.PLAIN_STEPS, module.FURTHER_STEPS = 3, 3
    for name in ("plain, 0.5 of the size", "plain, 0.33 of the size"):
        del module.PLAIN[name]
    for name in ("CCT, constant noise", "CCT, 2 parts"):
        del module.GATED[name]
    module.WITH_BUDGETS = (*module.GATED, module.FROM_SCRATCH)
    module.VARIANTS = (*module.PLAIN, *module.WITH_BUDGETS)
    for flags in module.PLAIN.values():
        flags["config_overrides"] |= {"num_heads": 2, "d_ff": 32}
    folders = ["--data_dir", data_dir, "--models_dir", str(tmp_path / "models")]
    results = tmp_path / "results.jsonl"
    module.EXPERIMENT.main([*folders, "--results", str(results)])
    rows = rows_of(results)
    assert len(rows) == 6 + 1
    gated = next(row["measured"] for row in rows if row["settings"].get("variant") == "CCT")
    assert {f"bleu at {b}" for b in ("1", "0.5", "0.33", "0.2")} < gated.keys()
    assert 0 <= gated["compute at 0.2"] <= 1
    assert "| CCT, 1 part at 0.2 |" in report_of(module, results, tmp_path, capsys)
    assert set(rows[-1]["measured"]) == {*module.PLAIN, *(f"CCT at {b:g}" for b in module.BUDGETS)}


@pytest.mark.nightly
def test_moa_scaling(reproduce, data_dir, tmp_path, capsys):
    make_tiny(reproduce("translation_runs"))
    module = reproduce("moa_scaling")
    module.SEEDS, module.STEPS = (1,), dict.fromkeys(module.STEPS, 3)
    module.LONG_STEPS, module.LONGER = 4, ("MoA 8 of 8",)
    module.LARGE_STEPS, module.LARGER, module.LARGE_BATCH = 3, ("MoA 8 of 8",), 8
    module.MASKED |= {"vocab_size": 300, "max_seq_length": 16, "per_device_train_batch_size": 4}
    module.MASKED["config_overrides"] |= {"num_hidden_layers": 1}
    moa = {**module.moa(16, d_kv=4), "num_attention_heads": 4}
    translation = {"MHA": module.MHA, "MoA 8K16E": moa}
    left_out = ("MoA 8 of 16", "MoA 8 of 64", "MoA 8 of 32, no z loss", "MoA 32 of 32")
    masked = {k: v for k, v in module.VARIANTS["wikitext-2"].items() if k not in left_out}
    other = {"MoA 8 of 8": masked["MoA 8 of 8"]}
    module.VARIANTS |= {"wikitext-2": masked, "wikitext-103": other, "multi30k": translation}
    module.EXPERTS = (8, 32)
    for corpus, (rates, variants) in module.RATES.items():
        kept = [variant for variant in variants if variant in module.VARIANTS[corpus]]
        module.RATES[corpus] = rates[:2], kept
    module.CHECKED = {"wikitext-2": ("MoA 8 of 8",)}
    results = tmp_path / "results.jsonl"
    module.EXPERIMENT.main(["--data_dir", data_dir, "--results", str(results)])
    rows = rows_of(results)
    assert [row["settings"].get("text") for row in rows] == ["validation"] * 10 + [None] * 11
    found = [row for row in rows[10:-2] if row["settings"]["corpus"] == "wikitext-2"]
    measured = {row["settings"]["variant"]: row["measured"] for row in found}
    assert "load_cv" not in measured["MHA"]
    rates = {row["settings"]["learning_rate"]: row["measured"]["loss"] for row in rows[:2]}
    chosen = {row["settings"]["variant"]: row["settings"]["learning_rate"] for row in found}
    assert chosen["MHA"] == min(rates, key=rates.get)
    assert chosen["MoA 8 of 8"] == chosen["MoA 8 of 32"]
    assert measured["MoA 8 of 8"]["load_max"] == pytest.approx(1)
    assert measured["MoA 8 of 32"]["load_max"] > 1
    uniform = measured[module.MULTI_QUERY]["router_entropy"]
    assert measured["MoA 8 of 8"]["router_entropy"] < uniform == pytest.approx(math.log(8))
    sizes = [measured[name]["attention_flops"] for name in ("MHA", "MoA 8 of 8", "MoA 8 of 32")]
    assert max(sizes) < 1.1 * min(sizes)
    assert rows[-1]["settings"]["batch"] == 8
    assert rows[-1]["measured"]["loss"] != measured["MoA 8 of 8"]["loss"]
    assert "| MoA 8 of 32, neither |" in report_of(module, results, tmp_path, capsys)


@pytest.mark.slow
def test_moa_start(reproduce, data_dir, tmp_path, capsys):
    module = reproduce("moa_start")
    module.SEEDS, module.STEPS = (1,), 2
    module.MASKED |= {"vocab_size": 300, "max_seq_length": 16, "per_device_train_batch_size": 4}
    results = tmp_path / "results.jsonl"
    module.EXPERIMENT.main(["--data_dir", data_dir, "--results", str(results)])
    losses = {row["settings"]["variant"]: row["measured"]["loss"] for row in rows_of(results)}
    assert losses["MoA 8 of 32"] != losses["MoA 8 of 32, Wo as in MHA"]
    assert len(set(losses.values())) == len(losses) == len(module.VARIANTS)
    assert report_of(module, results, tmp_path, capsys).count("| 1 |") == len(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy_top_k", "mae_language_modelling"])
def test_language_models(reproduce, data_dir, tmp_path, capsys, name):
    module = reproduce(name)
    module.SEEDS = (1,)
    module.FLAGS |= {"vocab_size": 300, "per_device_train_batch_size": 4}
    module.FLAGS["config_overrides"] |= {"n_layer": 1, "n_positions": 16, "n_embd": 32}
    if name == "noisy_top_k":
        module.STEPS, module.LONG_STEPS = 2, 3
        module.LOOKED_AT = (("noise alone", 2), ("importance loss alone", 2))
        variants = [*module.VARIANTS, *module.LONGER]
    else:
        module.FLAGS |= {"max_train_samples": 8, "num_train_epochs": 2}
        variants = list(module.VARIANTS)
    results = tmp_path / "results.jsonl"
    module.EXPERIMENT.main(["--data_dir", data_dir, "--results", str(results)])
    rows = rows_of(results)
    if name == "noisy_top_k":
        noisy, plain = (row["measured"] for row in rows[-2:])
        assert set(noisy) == {"spread 1", "gap 1", "noise 1"} == {*plain, "noise 1"}
        assert noisy["gap 1"] > 0
        assert noisy["noise 1"] == pytest.approx(math.log(2), abs=0.1)  # where it starts
        rows = rows[:-2]
    assert [row["settings"]["variant"] for row in rows] == variants
    assert all(row["measured"]["perplexity"] > 1 for row in rows)
    gated = "load_cv" if name == "noisy_top_k" else "entropy"
    without = [row["settings"]["variant"] for row in rows if gated not in row["measured"]]
    assert without == ["no experts" if name == "noisy_top_k" else "BASE"]
    assert report_of(module, results, tmp_path, capsys).count("| 1 |") == len(rows)


@pytest.mark.slow
def test_budgets_of_one_checkpoint_against_cut_models(
    reproduce,
    checkpoint,
    glue_dir,
    tmp_path,
    capsys,
):
    module = reproduce("minilm_budgets")
    module.SEEDS, module.IMPORTANCE_EXAMPLES = (1, 2), 8
    for task in set(module.TASKS) - {"mrpc"}:
        del module.TASKS[task]
    module.TASKS["mrpc"] = {"max_train_samples": 16, "num_train_epochs": 1}
    module.CUT.clear()
    module.CUT["2 layers"] = (0,)
    module.MODELS = tuple(name for name in module.MODELS if name != "3 layers")
    module.BUDGETS, module.NESTED_LAYERS = (1.0, 0.5, 0.25), (2, 2, 1)
    module.OF_MODELS = dict.fromkeys(module.OF_MODELS, module.BUDGETS)
    results = tmp_path / "results.jsonl"
    argv = ["--model_name_or_path", checkpoint, "--data_dir", glue_dir, "--results", str(results)]
    module.EXPERIMENT.main([*argv, "--models_dir", str(tmp_path / "models")])
    rows = rows_of(results)
    assert len(rows) == 2 * 5 + 2  # models of two seeds; latencies
    kept = {path.name for path in (tmp_path / "models" / "mrpc").iterdir() if path.is_dir()}
    assert kept == {"plain-1", "plain-2", "CCT-1"}
    nested = next(row["measured"] for row in rows if row["settings"].get("model") == "nested")
    assert nested["compute at 1"] == 1
    assert nested["compute at 0.25"] < nested["compute at 0.5"] < 0.6
    assert set(rows[-1]["measured"]) == {
        "plain",
        "2 layers",
        *(f"{model} at {budget:g}" for model in module.OF_MODELS for budget in module.BUDGETS),
    }
    shown = report_of(module, results, tmp_path, capsys)
    assert "| nested at 0.25 | 2 |" in shown
    assert (tmp_path / "accuracy_batch_32.svg").is_file()


@pytest.mark.slow
def test_budgets_of_one_translation_model_against_cut_ones(reproduce, data_dir, tmp_path, capsys):
    module = reproduce("translation_budgets")
    module.IMPORTANCE_PAIRS = 8
    sizes = {**TINY_T5, "d_model": 16, "num_layers": 2, "dropout_rate": 0}
    short = {"max_steps": 2}
    module.FIRST |= {"vocab_size": 300, "config_overrides": sizes, **short}
    module.FURTHER |= short
    module.CUT.clear()
    module.CUT["1 + 1 layers"] = 1
    module.MODELS = tuple(name for name in module.MODELS if name != "2 + 2 layers")
    module.BUDGETS, module.NESTED_LAYERS = (1.0, 0.5, 0.25), (2, 2, 1)
    module.LATENCY_SENTENCES, module.LATENCY_TOKENS = 4, 3
    results = tmp_path / "results.jsonl"
    models = tmp_path / "models"
    argv = ["--data_dir", data_dir, "--results", str(results), "--models_dir", str(models)]
    module.EXPERIMENT.main([*argv, "--precision", "float32"])
    rows = rows_of(results)
    assert [row["settings"].get("model") for row in rows] == [*module.MODELS, None, None]
    assert {path.name for path in models.iterdir() if path.is_dir()} == {"plain-1"}
    nested = next(row["measured"] for row in rows if row["settings"].get("model") == "nested")
    assert nested["compute at 1"] == 1
    assert nested["compute at 0.25"] < nested["compute at 0.5"] < 0.6
    budgets = {f"nested at {budget:g}" for budget in module.BUDGETS}
    budgets |= {"nested layers at 1", "nested layers at 0.5"}
    assert set(rows[-1]["measured"]) == {"plain", "1 + 1 layers", *budgets}
    shown = report_of(module, results, tmp_path, capsys)
    assert "| nested at 0.25 | 1 |" in shown
    assert (tmp_path / "bleu.svg").is_file()


@pytest.mark.slow
def test_budgets_of_one_language_model_against_cut_ones(reproduce, data_dir, tmp_path, capsys):
    module = reproduce("language_model_budgets")
    module.BLOCK, module.IMPORTANCE_BLOCKS = 16, 4
    module.BUDGETS, module.NESTED_LAYERS = (1.0, 0.5), (2, 2)
    module.TRAINING |= {"block_size": 16, "max_eval_samples": 4}
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16}
    module.FIRST |= {"vocab_size": 300, "config_overrides": sizes, "max_steps": 2}
    module.FURTHER |= {"max_steps": 2}
    module.CUT.clear()
    module.CUT["1 layer"] = 1
    module.MODELS = (module.PLAIN, module.ITSELF, "1 layer", module.NESTED, module.LAYERS)
    module.LATENCY_PROMPTS, module.LATENCY_TOKENS = {1: 1, 32: 3}, 4
    results, models = tmp_path / "results.jsonl", tmp_path / "models"
    argv = ["--data_dir", data_dir, "--results", str(results), "--models_dir", str(models)]
    module.EXPERIMENT.main([*argv, "--precision", "float32"])
    rows = rows_of(results)
    assert [row["settings"].get("model") for row in rows] == [*module.MODELS, None, None]
    assert {path.name for path in models.iterdir() if path.is_dir()} == {"plain-1"}
    found = {row["settings"].get("model"): row["measured"] for row in rows}
    for name in ("nested", "nested layers"):
        assert (found[name]["compute at 1"], found[name]["compute at 0.5"]) == (1, 0.5)
        assert found[name]["perplexity at 1"] == found[name]["perplexity"]
    cut = ("1 layer", "nested at 1", "nested at 0.5", "nested layers at 1", "nested layers at 0.5")
    assert set(rows[-1]["measured"]) == {"plain", *cut}
    assert "| nested layers at 0.5 | 1 |" in report_of(module, results, tmp_path, capsys)
    assert (tmp_path / "perplexity.svg").is_file()


@pytest.mark.slow
def test_cct_bert(reproduce, data_dir, glue_dir, tmp_path, capsys):
    module = reproduce("cct_bert")
    module.SEEDS, module.LENGTH, module.LATENCY_BATCH = (1,), 32, 2
    module.PLAIN_STEPS, module.GATED_STEPS = 2, 1
    for name in ("plain, 3 layers", "plain, 2 layers"):
        del module.PLAIN[name]
    module.FINETUNED = (*module.PLAIN, module.CCT)
    module.VARIANTS = (*module.FINETUNED, module.FROM_SCRATCH)
    module.PRETRAINING |= {"vocab_size": 300, "max_seq_length": 16, "per_device_train_batch_size": 4}
    module.PLAIN[module.LARGEST] = {"config_overrides": {"num_hidden_layers": 2}}
    module.FINETUNING |= {"max_seq_length": 16}
    task = {"max_train_samples": 8, "num_train_epochs": 1}
    squad = {**module.TASKS["squad"][1], **task, "doc_stride": 2}
    module.TASKS = {"mrpc": ("accuracy", task), "squad": ("f1", squad)}
    module.PARTS = (None, *module.TASKS)
    data = tmp_path / "data"
    data.mkdir()
    (data / "wikitext-2").symlink_to(Path(data_dir, "wikitext-2"))
    (data / "glue").symlink_to(glue_dir)
    (data / "squad").mkdir()
    for split in ("train", "dev"):
        (data / "squad" / f"{split}-v1.1.json").write_text(json.dumps(squad_file(8)), encoding="utf-8")
    results = tmp_path / "results.jsonl"
    folders = ["--data_dir", str(data), "--models_dir", str(tmp_path / "models")]
    module.EXPERIMENT.main([*folders, "--results", str(results)])
    rows = rows_of(results)
    assert len(rows) == 4 + 3 * 2 + 1
    gated = [row for row in rows if row["settings"].get("variant") == "CCT"]
    names = ("perplexity", "compute", "flops")
    assert gated[0]["measured"].keys() == {f"{n} at {b:g}" for n in names for b in module.BUDGETS}
    for row in gated[1:]:
        assert {"score at 1", "compute at 0.2", "flops at 0.5"} < row["measured"].keys()
    assert set(rows[-1]["measured"]) == {
        "plain, 6 layers",
        "plain, 1 layer",
        *(f"CCT at {b:g}" for b in module.BUDGETS),
    }
    found = report_of(module, results, tmp_path, capsys)
    assert found.count("| CCT at 0.33 |") == 3  # in pretraining, and in two tasks
    assert found.count("| CCT from scratch at 0.33 |") == 1
    assert (tmp_path / "quality.svg").is_file()


@pytest.mark.slow
def test_a_training_that_ended_is_not_made_again(reproduce, data_dir, tmp_path, monkeypatch):
    module = reproduce("translation_runs")
    make_tiny(module)
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    run = {"steps": 2, "seed": 1, "data_dir": data_dir, "work_dir": tmp_path, "folder": tmp_path / "run"}
    first = module.train_translation("multi30k", {"attention_type": "mha"}, **run)
    monkeypatch.setattr(sys.modules["scripts"], "run_script", None)
    assert module.train_translation("multi30k", {"attention_type": "mha"}, **run) == first
    with pytest.raises(ValueError, match="holds a run of other flags"):
        module.train_translation("multi30k", {"attention_type": "mha"}, **{**run, "seed": 2})


# --- what they share ------------------------------------------------------------------------------


def test_a_run_keeps_others_out_of_its_folder(reproduce, tmp_path, monkeypatch):
    scripts = reproduce("scripts")
    folder = tmp_path / "models" / "run-1"
    waiting = []

    def run_script(name, flags, folder):
        other = subprocess.run([sys.executable, "-c", TRY_TO_LOCK, f"{folder}.lock"], check=True)
        waiting.append(other.returncode)
        return {"name": name}

    monkeypatch.setattr(scripts, "run_script", run_script)
    assert scripts.run_script_once("run_clm", {"seed": 1}, folder) == {"name": "run_clm"}
    assert waiting == [0]
    with scripts.claimed(folder):  # it is free again
        pass


def test_no_source_is_in_two_splits(reproduce):
    corpora = reproduce("corpora")
    pairs = [(f"sentence {i // 3}", f"Satz {i}") for i in range(9_000)]
    pairs += [(f"other {i}", f"Satz {i}") for i in range(9_000)]
    splits = corpora.split_by_source(pairs)
    sources = {split: {source for source, _ in found} for split, found in splits.items()}
    assert sum(map(len, sources.values())) == len(set.union(*sources.values()))
    assert all(500 < len(splits[split]) < 1_500 for split in ("validation", "test"))
    assert len(splits["test"]) == len(sources["test"])  # the first translation of each
    targets = {split: {target for _, target in found} for split, found in splits.items()}
    assert not targets["train"] & (targets["validation"] | targets["test"])
    assert corpora.split_by_source(pairs) == splits


def test_the_beginning_of_wikitext_103_from_the_hub(reproduce, tmp_path, monkeypatch):
    corpora = reproduce("corpora")
    texts = {"train": 9_800, "validation": 3, "test": 4}
    splits = {
        split: datasets.Dataset.from_dict({"text": [f"{split} {i}\n" for i in range(count)]})
        for split, count in texts.items()
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration: splits)
    for name, kept in (("wikitext-2", 9_800), ("wikitext-103", 9_742)):
        files = corpora.wikitext(name, None, tmp_path)
        counts = {split: len(corpora.read_lines(path)) for split, path in files.items()}
        assert counts == texts | {"train": kept}
    assert corpora.read_lines(files["train"])[-1] == "train 9741"


def test_missing_files_are_named(reproduce, tmp_path):
    with pytest.raises(ValueError, match=r"`data_dir` must hold multi30k/train.en or its .gz"):
        reproduce("corpora").multi30k(str(tmp_path), tmp_path)


def test_balance_by_hand(reproduce):
    loads = {("encoder", 0): [0.5, 0.5, 0.0, 0.0], ("encoder", 1): [0.25, 0.25, 0.25, 0.25]}
    rows = [
        {"part": part, "layer": layer, "expert": expert, "load": load}
        for (part, layer), values in loads.items()
        for expert, load in enumerate(values)
    ]
    found = reproduce("gate_measures").balance({"expert_load": pd.DataFrame(rows)})
    assert found == {"load_cv": 0.5, "load_max": 1.5, "unused": 0.25}


def test_table_pairs_the_seeds(reproduce, tmp_path):
    results = reproduce("runs").Results(tmp_path / "results.jsonl")
    for variant, values in {"a": {1: 1.0, 2: 3.0}, "b": {2: 4.0, 1: 3.0, 3: 9.0}}.items():
        for seed, value in values.items():
            results.add({"variant": variant, "seed": seed}, {"score": value}, seconds=1)
    summaries = reproduce("summaries")
    table = summaries.variant_table(
        results, ["a", "b", "c"], [summaries.Column("score", "score", paired=True)]
    )
    lines = table.splitlines()
    assert lines[2] == "| a | 2 | 2.0 ± 1.4 | - |"
    assert lines[3] == "| b | 3 | 5.3 ± 3.2 | +1.5 ± 0.7 |"  # 3 - 1 and 4 - 3
    assert lines[4] == "| c | 0 | - | - |"


def test_above_the_line_of_others(reproduce):
    above_line = reproduce("summaries").above_line
    line = [({1: 1.0, 2: 1.0}, {1: 10.0, 2: 0.0}), ({1: 3.0, 2: 2.0}, {1: 20.0, 2: 1.0})]
    line.insert(0, ({1: 7.0}, {1: 24.0}))  # the order is that of x; seed 2 has no such
    for x, expected in ((1.0, 10.0), (2.0, 15.0), (3.0, 20.0), (5.0, 22.0), (0.0, 5.0), (8.0, 25.0)):
        assert above_line(({1: x, 3: x}, {1: 30.0, 3: 1.0}), line) == [30 - expected]
    assert above_line(({1: 2.0, 2: 3.0}, {2: 2.5, 1: 15.0}), line) == [0, 0.5]
    for short in (line[:1], [line[0], line[0]]):  # of one cost there is no line
        assert above_line(({1: 2.0}, {1: 15.0}), short) == []


def test_shards_make_all_runs_once(reproduce, tmp_path, capsys):
    experiment = reproduce("experiment")
    made = []

    def measure(settings, options):
        made.append(settings["seed"])
        return {"score": settings["seed"]}

    phases = (
        experiment.Phase("first", lambda results: [{"seed": i} for i in range(5)], measure),
        experiment.Phase("second", lambda results: [{"seed": len(results.rows)}], measure),
        experiment.Phase("third", lambda results: [{"seed": 9}], measure, independent=True),
    )
    tested = experiment.Experiment(
        name="tested", description="", phases=phases, report=lambda *_: "", needed={}
    )
    argv = ["--results", str(tmp_path / "results.jsonl"), "--shard"]
    tested.main([*argv, "0/2"])
    assert made == [0, 2, 4, 9]
    assert "2 runs of the phase 'first' are missing" in capsys.readouterr().out
    tested.main(["--results", str(tmp_path / "results.jsonl"), "--phases", "second"])
    assert made == [0, 2, 4, 9]
    assert "on which second may depend" in capsys.readouterr().out
    tested.main([*argv, "1/2"])
    assert made == [0, 2, 4, 9, 1, 3]
    tested.main([*argv, "0/2"])
    assert made == [0, 2, 4, 9, 1, 3, 6]
    with pytest.raises(ValueError, match="holds 7 runs of other sizes or flags"):
        dataclasses.replace(tested, plan=lambda: {"steps": 2}).main([*argv, "0/2"])
    with pytest.raises(SystemExit):
        tested.main([*argv, "2/2"])
    assert "must be I/N with I < N" in capsys.readouterr().err
