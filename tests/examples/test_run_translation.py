"""`examples/run_translation.py` end to end: a tiny T5 on a few made-up pairs, a few steps on the CPU."""

import copy
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import run_translation
import sacrebleu
import torch
from peft import PeftModel
from script_runs import ON_TRAINER, REPEATABLE, command_line, read_json, run_sharded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_moa

SIZES = "d_model=32,d_kv=8,num_heads=4,d_ff=64,num_layers=2"
PAIRS = [("the", "die"), ("dog", "Dögge"), ("cat", "Katze"), ("red", "rote"), ("small", "kleine")]
PAIRS += [("sees", "sieht"), ("runs", "läuft"), ("jumps", "springt")]


def made_up_pairs(num_pairs, offset):
    for i in range(offset, offset + num_pairs):
        words = [0, 3 + i % 2, 1 + i // 2 % 2, 5 + i % 3]
        yield tuple(" ".join(PAIRS[w][side] for w in words) + "." for side in (0, 1))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    for split, number, offset in (("train", 48, 0), ("validation", 7, 48), ("test", 5, 60)):
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in made_up_pairs(number, offset))
            if split == "train":
                with gzip.open(path / f"{split}.{language}.gz", "wt", encoding="utf-8") as file:
                    file.write(text)
            else:
                (path / f"{split}.{language}").write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def arguments(files, tmp_path):
    return {
        "model_type": "moa_t5",
        "config_overrides": SIZES,
        "train_source": str(files / "train.en.gz"),
        "train_target": str(files / "train.de.gz"),
        "validation_source": str(files / "validation.en"),
        "validation_target": str(files / "validation.de"),
        "test_source": str(files / "test.en"),
        "test_target": str(files / "test.de"),
        "vocab_size": 300,
        "max_target_length": 12,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "predict_with_generate": True,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "seed": 3,
    }


def saved_model(arguments):
    return AutoModelForSeq2SeqLM.from_pretrained(arguments["output_dir"])


def translate(arguments, texts, **generate):
    """By hand, from the saved model and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    generated = saved_model(arguments).generate(**inputs, max_length=12, **generate)
    return [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]


def test_arguments_from_a_json_file(arguments, tmp_path):
    (tmp_path / "arguments.json").write_text(json.dumps({**arguments, "do_predict": True}))
    run_translation.main([str(tmp_path / "arguments.json")])
    assert type(saved_model(arguments)) is hf_moa.MoaT5ForConditionalGeneration
    assert read_json(arguments, "predict_results.json")["predict_samples"] == 5


def test_it_learns_to_translate_and_bleu_is_that_of_the_files(arguments):
    arguments.update(
        attention_type="mae",
        do_predict=True,
        num_beams=2,
        max_steps=60,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
    )
    run_translation.main(command_line(arguments))
    sources, references = zip(*made_up_pairs(5, 60), strict=True)
    predictions = Path(arguments["output_dir"], "generated_predictions.txt").read_text(encoding="utf-8")
    predictions = predictions.splitlines()
    assert predictions == translate(arguments, list(sources), num_beams=2)
    results = read_json(arguments, "predict_results.json")
    expected = sacrebleu.corpus_bleu(predictions, [references])
    assert results["predict_bleu"] == pytest.approx(expected.score)
    assert results["predict_bleu"] > 50
    assert results["predict_bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    assert "eval_bleu_signature" in read_json(arguments, "eval_results.json")


def test_tokenizer_has_the_ids_of_t5_and_loses_nothing(arguments):
    run_translation.main(command_line({**arguments, "max_steps": 1, "do_eval": False}))
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    config = saved_model(arguments).config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)
    text = "die Dögge, (sieht) 日本 “rote”."
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_references_are_found_in_any_order_and_are_not_cut_off(arguments):
    pairs = run_translation.load_pairs(
        run_translation.DataTrainingArguments(**only_data(arguments)), "test"
    )
    tokenizer = run_translation.train_translation_tokenizer(pairs, 300)
    data_args = run_translation.DataTrainingArguments(max_target_length=6)
    dataset = run_translation.tokenize(pairs, tokenizer, data_args, None)
    metric = run_translation.BleuMetric(tokenizer, dataset)
    order = (3, 0, 4, 1, 2)
    labels = np.full((5, 9), -100)
    for row, i in zip(labels, order, strict=True):
        row[:6] = dataset["labels"][i]
    labels[labels[:, 6:].sum() :, 7] = tokenizer.pad_token_id
    inputs = padded_rows([dataset["input_ids"][i] for i in order])
    whole = tokenizer([pairs["target"][i] for i in order], padding=True, return_tensors="np")
    predictions = np.pad(whole["input_ids"], ((0, 0), (0, 2)), constant_values=-100)
    assert metric(EvalPrediction(predictions, labels, inputs))["bleu"] == pytest.approx(100)


def padded_rows(rows):
    return np.array([[*row, *[-100] * (max(map(len, rows)) - len(row))] for row in rows])


def test_targets_of_the_same_ids_are_told_apart():
    """As of characters that the tokenizer does not know."""
    targets = [f"one one one one {last}" for last in ("snowman", "comet", "umbrella")]
    pairs = {"source": ["eins", "zwei", "eins"], "target": targets}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"?": 0, "</s>": 1, "eins": 2, "zwei": 3, "one": 4}, "?")),
        unk_token="?",
        pad_token="</s>",
        eos_token="</s>",
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    data_args = run_translation.DataTrainingArguments()
    dataset = run_translation.tokenize(pairs, tokenizer, data_args, None)
    assert dataset["labels"][0] == dataset["labels"][1]
    metric = run_translation.BleuMetric(tokenizer, dataset)
    metric.decode = list
    for rows in ([0, 1, 2], [1, 0, 2]):
        inputs, labels = (
            padded_rows([dataset[name][i] for i in rows]) for name in ("input_ids", "labels")
        )
        translations = [targets[i] for i in rows]
        assert metric(EvalPrediction(translations, labels, inputs))["bleu"] == pytest.approx(100)
        wrong = [translations[i] for i in (1, 0, 2)]
        assert metric(EvalPrediction(wrong, labels, inputs))["bleu"] < 99


def only_data(arguments):
    names = run_translation.DataTrainingArguments.__dataclass_fields__
    return {name: value for name, value in arguments.items() if name in names}


def test_predicts_without_text_for_validation(arguments):
    """That both texts are told apart, and neither needs the other."""
    given = {k: v for k, v in arguments.items() if not k.startswith("validation_")}
    run_translation.main(command_line(given | {"do_eval": False, "do_predict": True, "max_steps": 2}))
    bleu = read_json(given, "predict_results.json")["predict_bleu"]
    assert 0 <= bleu <= 100
    card = Path(given["output_dir"], "README.md").read_text(encoding="utf-8")
    assert f"| evaluation data | BLEU (predict) | {bleu:.4g} |" in card


def test_pairs_of_budgets(arguments):
    """From the command line; the checkpoint that has them takes the same flags again."""
    flags = ["--cct_budgets", "1,1", "1,0.5", "--eval_budgets"]
    given = {**arguments, "attention_type": "mha", "max_steps": 2, "cct_noise_steps": -1}
    run_translation.main([*command_line(given), *flags])
    assert saved_model(given).config.listed_budgets == [(1.0, 1.0), (1.0, 0.5)]
    rows = read_json(given, "budget_results_validation.json")
    assert [row["budget"] for row in rows] == [[1.0, 1.0], [1.0, 0.5]]

    names = ("model_type", "config_overrides", "vocab_size")
    again = {name: value for name, value in given.items() if name not in names}
    again |= {"model_name_or_path": given["output_dir"], "output_dir": given["output_dir"] + "-again"}
    run_translation.main([*command_line(again | {"do_train": False}), *flags])
    others = ["--cct_budgets", "1,1", "0.5,0.5"]
    with pytest.raises(ValueError, match="with other values of `cct_budgets`"):
        run_translation.main([*command_line(again | {"do_train": False}), *others])
    with pytest.raises(ValueError, match=r"such as 0.5, or pairs such as 1,0.5 \(got '1,half'\)"):
        run_translation.main([*command_line(given), "--cct_budgets", "1,half"])


def test_predictions_are_in_the_order_of_the_file(arguments):
    """Grouping by length, for less padding in training, must not reorder them."""
    arguments.update(do_predict=True, max_steps=2)
    arguments.update(train_sampling_strategy="group_by_length", eval_strategy="steps", eval_steps=1)
    run_translation.main(command_line(arguments))
    predictions = Path(arguments["output_dir"], "generated_predictions.txt").read_text(encoding="utf-8")
    sources = [source for source, _ in made_up_pairs(5, 60)]
    assert predictions.splitlines() == translate(arguments, sources)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_type": "mae", "mae_num_dropped_heads": 2},
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
        arguments["config_overrides"] = SIZES.replace("num_heads=4,", "")
    run_translation.main(command_line({**arguments, **fields}))
    config = saved_model(arguments).config
    assert {name: getattr(config, name) for name in fields} == fields
    assert (config.d_model, config.num_layers, config.num_decoder_layers) == (32, 2, 2)


def test_cct_is_evaluated_at_each_budget(arguments):
    arguments.update(attention_type="mha", cct_budgets=[1, 0.5], cct_noise_steps=-1, eval_budgets=True)
    run_translation.main(command_line(arguments))
    rows = read_json(arguments, "budget_results_validation.json")
    assert [row["budget"] for row in rows] == [1.0, 0.5]
    # The default budget is the largest.
    assert rows[0]["eval_bleu"] == read_json(arguments, "eval_results.json")["eval_bleu"]


@pytest.mark.parametrize("attention_type", ["mae", "moa"])
def test_label_smoothing(arguments, attention_type):
    arguments.update(attention_type=attention_type, label_smoothing_factor=0.1, max_steps=1)
    run_translation.main(command_line(arguments))
    assert read_json(arguments, "eval_results.json")["eval_loss"] > 0


def test_plain_model_type(arguments):
    run_translation.main(command_line({**arguments, "model_type": "t5"}))
    assert type(saved_model(arguments)) is T5ForConditionalGeneration
    assert read_json(arguments, "eval_results.json")["eval_bleu"] >= 0


def test_checkpoint_is_converted_and_translates_as_before(arguments, tmp_path):
    pairs = run_translation.load_pairs(
        run_translation.DataTrainingArguments(**only_data(arguments)), "train"
    )
    tokenizer = run_translation.train_translation_tokenizer(pairs, 300)
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        d_ff=64,
        num_layers=2,
        vocab_size=len(tokenizer),
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "checkpoint")
    arguments.update(
        model_type=None,
        config_overrides=None,
        model_name_or_path=str(tmp_path / "checkpoint"),
        source_prefix="translate English to German: ",
        do_train=False,
        do_predict=True,
    )
    results = []
    for attention_type in ("none", "mae"):
        run_translation.main(command_line({**arguments, "attention_type": attention_type}))
        translations = Path(arguments["output_dir"], "generated_predictions.txt").read_text("utf-8")
        results.append((translations, read_json(arguments, "predict_results.json")["predict_loss"]))
    assert results[1][0] == results[0][0]
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    arguments.update(do_train=True, attention_type="mae", max_steps=1)
    run_translation.main(command_line(arguments))
    assert saved_model(arguments).config.attention_type == "mae"


def test_stopped_run_resumes_as_if_it_had_not_stopped(arguments, tmp_path):
    arguments.update(
        attention_type="mae",
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        do_eval=False,
    )
    whole = {**arguments, "max_steps": 4, "output_dir": str(tmp_path / "whole")}
    run_translation.main(command_line(whole))
    run_translation.main(command_line({**arguments, "max_steps": 2}))
    run_translation.main(command_line({**arguments, "max_steps": 4}))
    expected = saved_model(whole).state_dict()
    for name, value in saved_model(arguments).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_target": None}, "`validation_target` is needed"),
        ({"train_source": "nowhere.en"}, r"`train_source` must be a text file.*nowhere.en"),
        ({"do_predict": True, "predict_with_generate": False}, "needs `predict_with_generate`"),
        ({"config_overrides": "n_layer=2"}, "`n_layer` must be a field of MoaT5Config"),
        ({"mae_num_dropped_heads": 2}, "`mae_num_dropped_heads` .*need `attention_type`"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with budgets"),
    ],
)
def test_arguments_that_cannot_work_are_errors(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        run_translation.main(command_line({**arguments, **changes}))


def test_files_of_other_lengths_are_an_error(arguments, files):
    arguments["test_target"] = str(files / "validation.de")
    with pytest.raises(ValueError, match=r"equally many lines .got .*5.*7"):
        run_translation.main(command_line({**arguments, "do_predict": True}))


@pytest.mark.parametrize("adapter", ["ftg", "ftg+", "lora"])
def test_adapter_of_a_gated_checkpoint(arguments, adapter, tmp_path):
    """What is not in the adapter stays, and the adapter that is loaded translates as the trained one."""
    run_translation.main(command_line({**arguments, "attention_type": "mae", "do_eval": False}))
    base = arguments["output_dir"]
    given = {**arguments, "model_name_or_path": base, "adapter": adapter, "learning_rate": 1e-2}
    given = {k: v for k, v in given.items() if k not in ("model_type", "config_overrides", "vocab_size")}
    given |= {"mae_training": "joint", "do_predict": True, "output_dir": str(tmp_path / "adapter")}
    run_translation.main(command_line(given))
    folder = Path(given["output_dir"])
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == base

    untrained = AutoModelForSeq2SeqLM.from_pretrained(base).state_dict()
    model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(base), folder).eval()
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    changed = {name for name, value in merged.items() if not torch.equal(value, untrained[name])}
    assert changed
    if adapter != "lora":
        kinds = (".gate.", ".o.") if adapter == "ftg+" else (".gate.",)
        assert all(any(kind in name for kind in kinds) for name in changed), changed

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = Path(arguments["test_source"]).read_text(encoding="utf-8").splitlines()
    batch = tokenizer(sources, padding=True, return_tensors="pt")
    ids = model.generate(**batch, max_length=12)
    found = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    written = (folder / "generated_predictions.txt").read_text(encoding="utf-8").splitlines()
    assert found == written


def test_a_model_that_is_all_backbone_has_no_head_to_train(arguments):
    given = {**arguments, "attention_type": "mae", "adapter": "head", "do_eval": False}
    with pytest.raises(ValueError, match="`adapter` head needs a model with a head of its own"):
        run_translation.main(command_line(given))


def test_finetuned_model_teaches_its_budgets(arguments, tmp_path):
    """All in each step: the checkpoint's teacher is itself as it was, or its largest budget."""
    arguments["model_type"] = "t5"
    run_translation.main(command_line(arguments))
    finetuned, arguments["output_dir"] = arguments["output_dir"], str(tmp_path / "taught")
    arguments |= {
        "model_name_or_path": finetuned,
        "model_type": None,
        "config_overrides": None,
        "attention_type": "mha",
        "cct_budgets": ["1,1", "0.5,0.5"],
        "budget_sampling": "all",
        "gate_learning_rate": 0.01,
        "distillation_temperature": 3,
        "logging_steps": 1,
        "do_eval": False,
        "predict_with_generate": None,
    }
    for teacher in (finetuned, "self"):
        run_translation.main(command_line({**arguments, "teacher": teacher}))
        entry = read_json(arguments, "trainer_state.json")["log_history"][0]
        names = {"task_loss_1_1", "task_loss_0.5_0.5", "logits_loss_0.5_0.5", "hidden_loss_0.5_0.5"}
        assert names <= set(entry)
        assert ("logits_loss_1_1" in entry) == (teacher != "self")
        shutil.rmtree(arguments["output_dir"])


@pytest.mark.slow
def test_model_that_two_processes_shard_learns_what_one_does(arguments):
    """`--fsdp_size 2`, of as many pairs an update."""
    arguments |= REPEATABLE | {"config_overrides": f"{SIZES},dropout_rate=0", "do_predict": False}
    run_translation.main(command_line(arguments))
    halves = run_sharded(run_translation.__file__, arguments)
    one, two = (
        AutoModelForSeq2SeqLM.from_pretrained(each["output_dir"]).state_dict()
        for each in (arguments, halves)
    )
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)


def test_split_models_take_no_adapter(arguments):
    with pytest.raises(ValueError, match=r"`adapter` must be none .*\(got ftg\)"):
        run_translation.main(command_line(arguments | {"fsdp_size": 2, "adapter": "ftg"}))
