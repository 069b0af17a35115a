"""`examples/run_clm.py` end to end: a tiny GPT-2 on a few made-up lines, a few steps on the CPU."""

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest
import run_clm
import torch
from datasets import Dataset
from script_runs import ON_TRAINER, REPEATABLE, command_line, read_json, run_sharded
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hf_moa
from hf_moa.recipes.files import read_lines

SIZES = "n_layer=2,n_embd=32,n_head=4,n_positions=16"
SENTENCE = "the a cat dog sat ran on under mat tree red blue it she he was not very"
WORDS = SENTENCE.split()


def made_up_lines(num_lines, offset):
    """Sentences that a model can learn something about; every fifth line is empty."""
    for i in range(offset, offset + num_lines):
        words = [WORDS[(i * k + i // 3) % len(WORDS)] for k in (1, 2, 3, 5, 7)]
        yield "\n" if i % 5 == 0 else f"{' '.join(words[: 2 + i % 4])} .\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    with gzip.open(path / "train.txt.gz", "wt", encoding="utf-8") as file:
        file.writelines(made_up_lines(60, 0))
    for name, offset in (("validation", 60), ("test", 90)):
        (path / f"{name}.txt").write_text("".join(made_up_lines(25, offset)), encoding="utf-8")
    return path


@pytest.fixture
def arguments(files, tmp_path):
    return {
        "model_type": "moa_gpt2",
        "config_overrides": SIZES,
        "train_file": str(files / "train.txt.gz"),
        "validation_file": str(files / "validation.txt"),
        "test_file": str(files / "test.txt"),
        "vocab_size": 300,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "seed": 3,
    }


def saved_model(arguments):
    return AutoModelForCausalLM.from_pretrained(arguments["output_dir"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, files):
    """A plain GPT-2 with its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = run_clm.train_text_tokenizer(list(made_up_lines(60, 0)), 300)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=16,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


def test_arguments_from_a_json_file(arguments, tmp_path, capsys):
    arguments.update(do_predict=True, generate_samples=2, prompt_tokens=4, max_new_tokens=5)
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    run_clm.main([str(tmp_path / "arguments.json")])
    printed = capsys.readouterr().out
    assert type(saved_model(arguments)) is hf_moa.MoaGPT2LMHeadModel
    assert "predict_perplexity" in printed
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    samples = read_json(arguments, "samples.json")
    assert len(samples) == 2
    first_tokens = tokenizer("".join(made_up_lines(25, 90)))["input_ids"][:3]
    assert samples[0]["prompt"] == tokenizer.decode(first_tokens)
    for sample in samples:
        assert f"{sample['prompt']} >>>{sample['continuation']}" in printed


def test_perplexity_is_that_of_every_token_of_the_file(arguments):
    """By hand, from the saved model: the whole text, each token predicted once from its block."""
    arguments.update(attention_type="mae", do_predict=True)
    run_clm.main(command_line(arguments))
    model = saved_model(arguments).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    for prefix, name in (("eval", "validation"), ("predict", "test")):
        text = Path(arguments[f"{name}_file"]).read_text(encoding="utf-8")
        ids = [tokenizer.bos_token_id]
        for line in text.splitlines(keepends=True):
            ids += tokenizer(line)["input_ids"]
        assert tokenizer.decode(ids[1:]) == text
        total = 0.0
        with torch.no_grad():
            for first in range(0, len(ids) - 1, 15):
                start = max(0, min(first, len(ids) - 16))
                block = torch.tensor([ids[start : start + 16]])
                log_probs = model(block).logits.log_softmax(-1)
                for i in range(first + 1, start + block.shape[1]):
                    total -= log_probs[0, i - start - 1, ids[i]].item()
        results = read_json(arguments, f"{prefix}_results.json")
        assert results[f"{prefix}_tokens"] == len(ids) - 1
        assert results[f"{prefix}_perplexity"] == pytest.approx(math.exp(total / (len(ids) - 1)))
        assert results[f"{prefix}_words"] == len(text.split())
        assert results[f"{prefix}_lines"] == 25
        expected = math.exp(total / len(text.split()))
        assert results[f"{prefix}_word_perplexity"] == pytest.approx(expected)


def test_a_part_of_the_text_has_no_word_perplexity(arguments):
    run_clm.main(command_line({**arguments, "max_eval_samples": 2, "max_train_samples": 5}))
    results = read_json(arguments, "eval_results.json")
    assert results["eval_samples"] == 2
    assert results["eval_tokens"] == 30
    assert "eval_word_perplexity" not in results
    assert read_json(arguments, "train_results.json")["train_samples"] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_type": "mae", "mae_num_dropped_heads": 2, "mae_gate_window": 4},
        {
            "attention_type": "moa",
            "num_attention_experts": 6,
            "num_attention_heads": 2,
            "head_dim": 8,
            "ffn_type": "moe",
            "num_ffn_experts": 3,
        },
    ],
    ids=["mae", "moa"],
)
def test_gated_from_scratch(arguments, fields):
    if "num_attention_heads" in fields:
        arguments["config_overrides"] = SIZES.replace("n_head=4,", "")
    run_clm.main(command_line({**arguments, **fields}))
    config = saved_model(arguments).config
    assert {name: getattr(config, name) for name in fields} == fields
    assert (config.n_layer, config.n_embd, config.n_positions) == (2, 32, 16)


def test_cct_is_evaluated_at_each_budget(arguments, capsys):
    arguments.update(attention_type="mha", cct_budgets=[1, 0.5], cct_noise_steps=-1, eval_budgets=True)
    run_clm.main(command_line(arguments))
    rows = read_json(arguments, "budget_results_validation.json")
    assert [row["budget"] for row in rows] == [1.0, 0.5]
    # The default budget is the largest.
    expected = read_json(arguments, "eval_results.json")["eval_perplexity"]
    assert rows[0]["eval_perplexity"] == expected
    assert "eval_perplexity" in capsys.readouterr().out


def test_plain_model_type_is_the_baseline(arguments):
    """Under one seed, transformers' GPT-2 and the one without gates are the same run."""
    perplexities = []
    for model_type in ("gpt2", "moa_gpt2"):
        run_clm.main(command_line({**arguments, "model_type": model_type}))
        perplexities.append(read_json(arguments, "eval_results.json")["eval_perplexity"])
    assert type(saved_model(arguments)) is hf_moa.MoaGPT2LMHeadModel
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-4)


def test_checkpoint_is_converted_and_keeps_its_perplexity(arguments, checkpoint):
    arguments.update(
        model_type=None, config_overrides=None, do_train=False, model_name_or_path=checkpoint
    )
    perplexities = []
    for attention_type in ("none", "mae"):
        run_clm.main(command_line({**arguments, "attention_type": attention_type}))
        perplexities.append(read_json(arguments, "eval_results.json")["eval_perplexity"])
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-5)
    arguments.update(do_train=True, attention_type="mae", max_steps=1)
    run_clm.main(command_line(arguments))
    assert saved_model(arguments).config.attention_type == "mae"


def test_dataset_in_place_of_files(arguments, files, tmp_path):
    """Rows without ends of lines, as the Hub has them, are the text of the file."""
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        lines = read_lines(arguments[f"{split}_file"], "file")
        rows = Dataset.from_dict({"text": [line.rstrip("\n") for line in lines]})
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    run_clm.main(command_line(arguments))
    expected = read_json(arguments, "eval_results.json")["eval_word_perplexity"]
    arguments.update(train_file=None, validation_file=None, test_file=None)
    arguments.update(dataset_name=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"))
    run_clm.main(command_line(arguments))
    assert read_json(arguments, "eval_results.json")["eval_word_perplexity"] == expected
    with pytest.raises(ValueError, match=r"must have the split 'test' \(got train, validation\)"):
        run_clm.main(command_line({**arguments, "do_predict": True}))


def test_stopped_run_resumes_as_if_it_had_not_stopped(arguments, tmp_path):
    arguments.update(
        attention_type="mae",
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        do_eval=False,
    )
    whole = {**arguments, "max_steps": 4, "output_dir": str(tmp_path / "whole")}
    run_clm.main(command_line(whole))
    run_clm.main(command_line({**arguments, "max_steps": 2}))
    run_clm.main(command_line({**arguments, "max_steps": 4}))
    expected = saved_model(whole).state_dict()
    for name, value in saved_model(arguments).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def test_the_same_text_gives_the_same_tokenizer():
    lines = list(made_up_lines(60, 0))
    vocabularies = [run_clm.train_text_tokenizer(lines, 300).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
    assert len(vocabularies[0]) == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "Give either `model_name_or_path`.*or `model_type`"),
        (
            {"model_type": None, "model_name_or_path": "x"},
            "`config_overrides` .*needs `model_type`.*got 'n_layer=2",
        ),
        ({"config_overrides": "n_layer"}, r"`config_overrides` must be a list.*got 'n_layer'"),
        ({"config_overrides": "n_lyaer=2"}, "`n_lyaer` must be a field of MoaGPT2Config"),
        (
            {"model_type": "gpt2", "attention_type": "mae"},
            "`attention_type` must be a field of GPT2Config.*moa_ model",
        ),
        (
            {"attention_type": "moa", "num_attention_heads": 2},
            "`num_attention_heads` must have one value .got 4, and 2 from the gating flags",
        ),
        ({"mae_num_dropped_heads": 2}, "`mae_num_dropped_heads` .*need `attention_type`"),
        ({"vocab_size": 200}, r"`vocab_size` must be at least 258.*got 200"),
        ({"block_size": 17}, r"`block_size` must be between 2 and the 16 positions .*got 17"),
        ({"validation_file": None}, "validation text is needed: give `validation_file`"),
        ({"train_file": "nowhere.txt"}, r"`train_file` must be a text file.*nowhere.txt"),
        ({"dataset_name": "wikitext"}, "either `dataset_name` or files"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with budgets"),
        (
            {"generate_samples": 1, "do_eval": False},
            "`generate_samples` .*`do_predict` or `do_eval`",
        ),
    ],
)
def test_arguments_that_cannot_work_are_errors(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        run_clm.main(command_line({**arguments, **changes}))


@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_gates_are_trained_as_asked(arguments, training):
    arguments.update(attention_type="mae", mae_training=training, label_smoothing_factor=0.1)
    arguments.update(logging_steps=1, save_strategy="no")
    run_clm.main(command_line(arguments))
    log = read_json(arguments, "trainer_state.json")["log_history"]
    assert all(entry["gate_entropy"] > 0 for entry in log if "loss" in entry)


def test_finetuned_model_teaches_its_budgets(arguments, tmp_path):
    """All in each step: the checkpoint's teacher is itself as it was, or its largest budget."""
    arguments["model_type"] = "gpt2"
    run_clm.main(command_line(arguments))
    finetuned, arguments["output_dir"] = arguments["output_dir"], str(tmp_path / "taught")
    arguments |= {
        "model_name_or_path": finetuned,
        "model_type": None,
        "config_overrides": None,
        "attention_type": "mha",
        "cct_budgets": [1, 0.5],
        "budget_sampling": "all",
        "gate_learning_rate": 0.01,
        "distillation_temperature": 3,
        "logging_steps": 1,
        "do_eval": False,
    }
    for teacher in (finetuned, "self"):
        run_clm.main(command_line({**arguments, "teacher": teacher}))
        entry = read_json(arguments, "trainer_state.json")["log_history"][0]
        names = {"task_loss_1", "task_loss_0.5", "logits_loss_0.5", "hidden_loss_0.5"}
        assert names <= set(entry)
        assert ("logits_loss_1" in entry) == (teacher != "self")
        shutil.rmtree(arguments["output_dir"])


@pytest.mark.slow
def test_model_that_two_processes_shard_learns_what_one_does(arguments):
    """`--fsdp_size 2`, of as many sequences an update."""
    no_dropout = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    arguments |= REPEATABLE | {"config_overrides": f"{SIZES},{no_dropout}"}
    run_clm.main(command_line(arguments))
    halves = run_sharded(run_clm.__file__, arguments)
    one, two = saved_model(arguments), saved_model(halves)
    assert one.config.to_dict().keys() == two.config.to_dict().keys()
    for (name, expected), (_, found) in zip(
        one.state_dict().items(), two.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(
            found, expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
