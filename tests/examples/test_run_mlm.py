"""`examples/run_mlm.py` end to end: a tiny BERT on a few made-up lines, a few steps on the CPU."""

import json
import math

import pytest
import run_mlm
import torch
from launching import accelerate_launch, launch_ranks
from script_runs import ON_TRAINER, command_line, read_json
from test_run_clm import made_up_lines
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaConfig, RobertaForMaskedLM

from hf_moa.recipes import text_blocks
from hf_moa.recipes.masked_text import MaskedTextArguments, masked_collator, masked_sets
from hf_moa.recipes.text_blocks import load_lines

SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"


@pytest.fixture
def arguments(tmp_path):
    for name, count, offset in (("train", 90, 0), ("validation", 40, 90)):
        (tmp_path / f"{name}.txt").write_text("".join(made_up_lines(count, offset)), encoding="utf-8")
    return {
        "model_type": "moa_bert",
        "config_overrides": f"{SIZES},max_position_embeddings=16",
        "train_file": str(tmp_path / "train.txt"),
        "validation_file": str(tmp_path / "validation.txt"),
        "vocab_size": 200,
        "max_seq_length": 16,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "report_to": "none",
        "seed": 3,
    }


@pytest.mark.parametrize("line_by_line", [False, True])
def test_perplexity_and_accuracy_are_those_of_the_saved_model(arguments, line_by_line):
    arguments |= {"attention_type": "mae", "line_by_line": line_by_line}
    run_mlm.main(command_line(arguments))
    model = AutoModelForMaskedLM.from_pretrained(arguments["output_dir"]).eval()
    assert model.config.attention_type == "mae"
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    data = MaskedTextArguments(
        validation_file=arguments["validation_file"], max_seq_length=16, line_by_line=line_by_line
    )
    lines = {"validation": load_lines(None, data, "validation")}
    sequences = masked_sets(lines, tokenizer, data, seed=3)["validation"]
    batch = masked_collator(tokenizer, data)([sequences[i] for i in range(len(sequences))])
    with torch.no_grad():
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    labels = batch["labels"]
    loss = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100]).item()
    found = read_json(arguments, "eval_results.json")
    assert found["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["eval_tokens"] == (labels != -100).sum().item()
    hits = (logits.argmax(-1) == labels)[labels != -100].float().mean().item()
    assert found["eval_accuracy"] == pytest.approx(hits)
    assert found["eval_samples"] == len(sequences)


def test_budgets_learn_from_a_roberta(arguments, tmp_path):
    """A relative's checkpoint, distilled into nested budgets; arguments from a JSON file."""
    run_mlm.main(command_line(arguments | {"max_steps": 1}))
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    sizes = dict(pair.split("=") for pair in SIZES.split(","))
    config = RobertaConfig(
        **{name: int(size) for name, size in sizes.items()},
        vocab_size=len(tokenizer),
        max_position_embeddings=18,
        pad_token_id=tokenizer.pad_token_id,
    )
    source = tmp_path / "roberta"
    RobertaForMaskedLM(config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    for name in ("model_type", "config_overrides", "vocab_size"):
        del arguments[name]
    arguments |= {
        "model_name_or_path": str(source),
        "teacher": str(source),
        "attention_type": "mha",
        "nested_budgets": [1, 0.5],
        "budget_sampling": "all",
        "eval_budgets": True,
        "output_dir": str(tmp_path / "nested"),
        "max_seq_length": 16,
    }
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    run_mlm.main([str(tmp_path / "arguments.json")])
    rows = read_json(arguments, "budget_results_validation.json")
    assert [row["budget"] for row in rows] == [1, 0.5]
    assert all(row["eval_perplexity"] > 1 for row in rows)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "nested").config.positions_skip_padding


def test_resumed_run_equals_the_whole_one(arguments, tmp_path):
    arguments |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "max_train_samples": 20}
    run_mlm.main(command_line(arguments))
    part = {**arguments, "output_dir": str(tmp_path / "part")}
    whole = tmp_path / "out" / "checkpoint-3"
    run_mlm.main(command_line({**part, "resume_from_checkpoint": str(whole)}))
    models = [AutoModelForMaskedLM.from_pretrained(each["output_dir"]) for each in (arguments, part)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_masks_change_with_the_epoch(arguments, monkeypatch):
    seen = {}

    class Recorded(text_blocks.FirstSamples):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            seen.setdefault(index, []).append(row["labels"])
            return row

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    monkeypatch.setattr(text_blocks, "FirstSamples", Recorded)
    del arguments["max_steps"]
    run_mlm.main(command_line(arguments | {"num_train_epochs": 2, "max_train_samples": 8}))
    assert len(seen) == 8
    assert any(not torch.equal(first, second) for first, second in seen.values())


def test_evaluation_only_needs_no_training_text(arguments):
    run_mlm.main(command_line(arguments | {"do_eval": False}))
    folder = arguments["output_dir"]
    for name in ("model_type", "config_overrides", "vocab_size", "do_train", "train_file"):
        del arguments[name]
    run_mlm.main(command_line(arguments | {"model_name_or_path": folder}))
    assert read_json(arguments, "eval_results.json")["eval_perplexity"] > 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seq_length": 32}, "`max_seq_length` must be at most the 16 positions"),
        ({"validation_file": None, "validation_split_percentage": 0}, "`do_eval` needs a text"),
        ({"train_file": None}, "The train text is needed: give `train_file`"),
        ({"pad_to_max_length": True}, "`pad_to_max_length` needs `line_by_line`"),
    ],
)
def test_bad_arguments(arguments, changed, message):
    with pytest.raises(ValueError, match=message):
        run_mlm.main(command_line(arguments | changed))


def test_tokenizer_without_masks(arguments, tmp_path):
    run_mlm.main(command_line(arguments | {"do_eval": False}))
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="must have a mask_token, as BERT's"):
        masked_sets({"train": ["a cat"]}, tokenizer, MaskedTextArguments(), seed=0)


@pytest.mark.slow
def test_two_processes_shard_a_model(arguments):
    launch_ranks(2, run_mlm.__file__, *command_line(arguments | {"fsdp_size": 2, "do_eval": False}))
    assert read_json(arguments, "train_results.json")["train_loss"] > 0


@pytest.mark.slow
def test_two_processes_train_together_without_a_flag(arguments):
    """Of 8 sequences a step, 4 each."""
    del arguments["max_steps"], arguments["use_cpu"]
    arguments |= {"do_eval": False, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    accelerate_launch(run_mlm.__file__, *command_line(arguments))
    samples = read_json(arguments, "train_results.json")["train_samples"]
    assert read_json(arguments, "trainer_state.json")["max_steps"] == math.ceil(samples / 8)
