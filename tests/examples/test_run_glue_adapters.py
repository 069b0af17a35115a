"""`examples/run_glue.py` with adapters: FTG, FTG+, LoRA, only a head."""

from pathlib import Path

import pytest
import torch
from few_words import SENTENCE
from glue_runs import saved_model
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from script_runs import command_line, read_json
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

import hf_moa
from hf_moa.recipes.tokenizers import train_byte_level_bpe


@pytest.fixture
def arguments(glue_arguments):
    return glue_arguments


@pytest.mark.parametrize("adapter", ["ftg", "ftg+", "lora"])
def test_adapter_is_saved_beside_its_base_and_loads(run_glue, arguments, adapter, tmp_path, monkeypatch):
    arguments.update(
        attention_type="mae", adapter=adapter, modules_to_save=["pooler"], eval_strategy="epoch"
    )
    monkeypatch.chdir(tmp_path)
    run_glue.main(command_line(arguments | {"output_dir": "adapter"}))
    monkeypatch.chdir("/")  # it loads from anywhere
    arguments["output_dir"] = str(tmp_path / "adapter")
    saved = Path(arguments["output_dir"], "adapter_model.safetensors").resolve()
    assert saved.stat().st_size < 100_000
    assert not list(saved.parent.glob("model*.safetensors"))

    model = AutoPeftModelForSequenceClassification.from_pretrained(saved.parent, num_labels=2)
    assert isinstance(model.get_base_model(), hf_moa.MoaBertForSequenceClassification)
    base = model.peft_config["default"].base_model_name_or_path
    assert Path(base) == saved.parent / "base_model"
    trained = read_json(arguments, "train_results.json")["trainable_parameters"]
    stored = load_file(saved)
    buffers = [name for name in stored if "running_" in name or "num_batches" in name]
    assert trained == sum(t.numel() for name, t in stored.items() if name not in buffers)

    assert_answers_as_trained(run_glue, arguments, model)


def test_adapter_in_the_place_of_a_model_is_an_error(run_glue, arguments):
    """That says how to make a model of it."""
    run_glue.main(command_line(arguments | {"attention_type": "mae", "adapter": "ftg"}))
    adapter = arguments["output_dir"]
    again = arguments | {"do_train": False, "output_dir": adapter + "-again", "tokenizer_name": adapter}
    with pytest.raises(ValueError, match=r"must be a model .*an adapter.*merge_and_unload"):
        run_glue.main(command_line(again | {"model_name_or_path": adapter}))
    model = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=2)
    model.merge_and_unload().save_pretrained(adapter + "-merged")
    run_glue.main(command_line(again | {"model_name_or_path": adapter + "-merged"}))
    losses = (read_json(each, "eval_results.json")["eval_loss"] for each in (again, arguments))
    assert next(losses) == pytest.approx(next(losses), rel=1e-5)


@pytest.fixture
def without_padding(tmp_path):
    """A folder with a tokenizer without a token to pad with, as GPT-2's, and the sizes of a model."""
    folder, end = tmp_path / "gpt2", "<|endoftext|>"
    bpe = train_byte_level_bpe([SENTENCE], 300, [end], add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return folder, {**sizes, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize("adapter", ["none", "ftg", "lora"])
@pytest.mark.parametrize("pad_to_max_length", [True, False])
def test_tokenizer_without_padding(run_glue, arguments, without_padding, pad_to_max_length, adapter):
    """The end of text pads, and the classifier reads the last token before it; of an adapter, too, whose
    base was on disk without a token to pad with."""
    folder, fields = without_padding
    if adapter == "none":
        GPT2Model(GPT2Config(**fields)).save_pretrained(folder)
        arguments["attention_type"] = "mae"
    else:
        hf_moa.MoaGPT2Model(hf_moa.MoaGPT2Config(**fields, attention_type="mae")).save_pretrained(folder)
    arguments.update(
        model_name_or_path=str(folder),
        adapter=adapter,
        max_seq_length=64,
        pad_to_max_length=pad_to_max_length,
    )
    run_glue.main(command_line(arguments))
    if adapter == "none":
        model = saved_model(arguments).eval()
    else:
        output_dir = arguments["output_dir"]
        model = AutoPeftModelForSequenceClassification.from_pretrained(output_dir, num_labels=2).eval()
    assert model.config.pad_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(arguments["output_dir"])
    data_args = run_glue.DataTrainingArguments(task_name="mrpc", data_dir=arguments["data_dir"])
    losses = []
    for row in run_glue.load_raw_datasets(None, data_args)[0]["validation"]:  # alone, without padding
        inputs = tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt")
        with torch.no_grad():
            losses.append(model(**inputs, labels=torch.tensor([row["label"]])).loss)
    found = read_json(arguments, "eval_results.json")["eval_loss"]
    assert found == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def assert_answers_as_trained(run_glue, arguments, model):
    """That a loaded adapter has the loss of the one that was trained."""
    folder = Path(arguments["output_dir"])
    args = run_glue.MoaTrainingArguments(str(folder / "again"), use_cpu=True)
    data_args = run_glue.DataTrainingArguments(
        task_name="mrpc", data_dir=arguments["data_dir"], max_seq_length=24
    )
    splits, task = run_glue.load_raw_datasets(None, data_args)
    raw = splits["validation"]
    data = run_glue.tokenize(raw, BertTokenizer.from_pretrained(folder), data_args, task, [0, 1])
    loss = run_glue.MoaTrainer(model=model, args=args, eval_dataset=data).evaluate()["eval_loss"]
    assert loss == pytest.approx(read_json(arguments, "eval_results.json")["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("has_pooler", [False, True])
def test_adapter_of_a_gated_checkpoint(run_glue, arguments, has_pooler, tmp_path, monkeypatch):
    """What the checkpoint lacks beside the head, as a masked language model the pooler, is newly drawn:
    the adapter's base is then another model."""
    base = tmp_path / "gated"
    config = BertConfig.from_pretrained(arguments["model_name_or_path"])
    config = hf_moa.MoaBertConfig(**config.to_dict() | {"attention_type": "mae"})
    torch.manual_seed(0)
    gated = hf_moa.MoaBertModel(config) if has_pooler else hf_moa.MoaBertForMaskedLM(config)
    gated.save_pretrained(base)
    BertTokenizer.from_pretrained(arguments["model_name_or_path"]).save_pretrained(base)
    monkeypatch.chdir(tmp_path)  # the adapter names its base so that it is found from anywhere
    arguments.update(model_name_or_path="gated", adapter="ftg", eval_strategy="epoch")
    run_glue.main(command_line(arguments))
    model = AutoPeftModelForSequenceClassification.from_pretrained(arguments["output_dir"], num_labels=2)
    named = Path(model.peft_config["default"].base_model_name_or_path)
    expected = base if has_pooler else Path(arguments["output_dir"], "base_model")
    assert named == expected.resolve()
    assert_answers_as_trained(run_glue, arguments, model)


@pytest.mark.parametrize("match", ["ftg", "ftg+"])
def test_lora_has_as_many_parameters_as_the_gates(run_glue, arguments, match):
    counts = []
    for given in ({"adapter": match}, {"adapter": "lora", "lora_match": match}):
        output_dir = f"{arguments['output_dir']}-{given['adapter']}"
        given = {**arguments, **given, "attention_type": "mae", "output_dir": output_dir, "max_steps": 1}
        run_glue.main(command_line(given))
        counts.append(read_json(given, "train_results.json")["trainable_parameters"])
    one_rank = 2 * (4 * (32 + 32) + 2 * (32 + 64))  # layers, attention and feed-forward matrices
    assert abs(counts[0] - counts[1]) <= one_rank / 2


def test_head_alone_is_trained(run_glue, arguments):
    whole = {**arguments, "attention_type": "mae", "adapter": "head", "modules_to_save": ["pooler"]}
    run_glue.main(command_line(whole))
    trained = read_json(whole, "train_results.json")["trainable_parameters"]
    assert trained == 32 * 2 + 2 + 32 * 32 + 32
    run_glue.set_seed(3)
    model_args = run_glue.ModelArguments(arguments["model_name_or_path"])
    gating = run_glue.GatingArguments(attention_type="mae")
    before = run_glue.load_model(model_args, gating, run_glue.GLUE_TASKS["mrpc"]).state_dict()
    moved = {
        name.split(".")[0 if name.startswith("classifier") else 1]
        for name, tensor in saved_model(whole).state_dict().items()
        if not torch.equal(tensor, before[name]) and "running_" not in name and "num_b" not in name
    }
    assert moved == {"pooler", "classifier"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter": "ftg"}, "no gates"),
        ({"adapter": "lora"}, "give `lora_rank`"),
        ({"adapter": "lora", "lora_rank": 0}, "`lora_rank` must be 1 or more"),
        ({"adapter": "head", "modules_to_save": ["puller"]}, "'puller'"),
        ({"modules_to_save": ["pooler"]}, "`modules_to_save` needs an `adapter`"),
        ({"adapter": "lora", "adapter_gates": ["mae"]}, "`adapter_gates`"),
    ],
)
def test_impossible_adapters_are_errors(run_glue, arguments, given, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(command_line({**arguments, **given}))
