"""FTG and FTG+: what is trained, saved and loaded, on every backbone and kind of gate."""

import json

import pytest
import torch
from adapted import TASKS, VARIANTS, adapted, each_backbone, each_method, each_variant, predict, tensors
from launching import fresh_python
from peft import (
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from training_runs import CLASSES, assert_same, build, rows, run, trainer
from transformers import Trainer, TrainingArguments

from hf_moa import FTGConfig
from hf_moa.adapters import FTGLayer

# --- what is trained ------------------------------------------------------------------------------


@each_backbone
@each_variant
@each_method
def test_trains_its_gates_alone(name, variant, plus, tmp_path):
    model = adapted(name, variant, plus=plus)
    assert torch.equal(
        predict(name, model.eval()), predict(name, build(name, dropout=True, **VARIANTS[variant]).eval())
    )
    before = {key: tensor.clone() for key, tensor in tensors(model).items()}
    run(name, model, tmp_path, max_steps=2, learning_rate=1e-2)
    moved = {key for key, tensor in tensors(model).items() if not torch.equal(tensor, before[key])}
    moved -= {key for key in moved if "noise_scale" in key}
    assert moved
    kinds = ("mixture.gate", "router", "control")
    for key in moved:
        is_head = "modules_to_save" in key
        is_projection = plus and any(
            part in key for part in (".output.dense.", ".c_proj.", ".o.", "attention")
        )
        assert is_head or (".ftg_modules.default." in key), key
        assert is_head or is_projection or any(kind in key for kind in kinds), key


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, {"gate", "control"}),
        ({"gates": ("mae",)}, {"gate"}),
        ({"gates": "cct"}, {"control"}),
        ({"gates": (), "plus": True}, {"dense"}),
        ({"gates": ["mae"], "plus": True}, {"gate", "dense"}),
    ],
)
def test_choice_of_gates(config, kinds):
    base = build("bert-lm", **VARIANTS["mae-cct"])
    model = get_peft_model(base, FTGConfig(**config))
    names = [name for name, module in model.named_modules() if isinstance(module, FTGLayer)]
    assert {name.rsplit(".", 1)[1] for name in names} == kinds
    if "dense" in kinds:
        assert sum(name.endswith("attention.output.dense") for name in names) == 2


@pytest.mark.parametrize("layers", [0, [1]])
@each_backbone
def test_choice_of_layers(name, layers):
    model = adapted(name, "mae", plus=True, layers_to_transform=layers)
    names = [n for n, module in model.named_modules() if isinstance(module, FTGLayer)]
    chosen = layers if isinstance(layers, int) else layers[0]
    assert names
    for path in names:
        assert any(f".{part}.{chosen}." in path for part in ("layer", "h", "block")), path


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [0, 1], "exclude_modules": [r"h.0.attn.mixture.gate"]},
        {"layers_to_transform": [0, 1], "exclude_modules": r".*h\.0\..*"},
        {"layers_to_transform": 1, "target_modules": ["gate"]},
        {"layers_to_transform": [1], "target_modules": r".*\.gate"},
        {
            "layers_to_transform": [1],
            "target_modules": ["h.0.attn.mixture.gate", "h.1.attn.mixture.gate"],
        },
        {"target_modules": ["h.1.attn.mixture.gate"]},
    ],
)
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_layers_modules_and_exclusions_go_together(prefix, config):
    base = build("gpt2", **VARIANTS["mae"])
    model = get_peft_model(base if prefix else base.transformer, FTGConfig(**config))
    names = [n for n, module in model.named_modules() if isinstance(module, FTGLayer)]
    assert names == [f"base_model.model.{prefix}h.1.attn.mixture.gate"]


@pytest.mark.parametrize(
    ("variant", "config", "message"),
    [
        (
            "mae",
            {"gates": ("router",)},
            r"nothing .*'router'.*gates of mae in the layers \[0, 1\]",
        ),
        ("mae", {"layers_to_transform": [7]}, r"layers_to_transform=\[7\].*layers \[0, 1\]"),
        (None, {}, "it has no gates .*hf_moa.upcycle"),
    ],
)
def test_selecting_nothing_is_an_error(variant, config, message):
    base = build("bert", **VARIANTS.get(variant, {}))
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, FTGConfig(**config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gates": ("mae", "moe")}, r"FTGConfig.gates must hold some of .*'moe'"),
        ({"gates": ()}, "FTGConfig.gates"),
        ({"gates": None, "plus": True}, r"FTGConfig.gates must hold .*\(got None\)"),
        ({"plus": "yes"}, "FTGConfig.plus must be True or False"),
        ({"init_weights": "false"}, r"FTGConfig.init_weights must be True or False \(got 'false'\)"),
        ({"layers_to_transform": "a"}, r"FTGConfig.layers_to_transform must be .*\(got 'a'\)"),
        ({"layers_to_transform": [0, 1.5]}, r"FTGConfig.layers_to_transform must be .*\[0, 1.5\]"),
        ({"modules_to_save": 5}, r"FTGConfig.modules_to_save must be a name.*\(got 5\)"),
        ({"exclude_modules": [None]}, r"FTGConfig.exclude_modules must be a name.*\[None\]"),
    ],
)
def test_bad_configurations_are_errors(config, message):
    with pytest.raises(ValueError, match=message):
        FTGConfig(**config)


# --- training -------------------------------------------------------------------------------------


def test_papers_sgd(tmp_path):
    """A step of plain SGD on the gates, by hand."""
    base = build("gpt2", **VARIANTS["mae"])  # without dropout
    model = get_peft_model(base, FTGConfig()).train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    made = trainer("gpt2", model, tmp_path, optim="sgd", learning_rate=1.0, max_grad_norm=0,
                   lr_scheduler_type="constant", train_sampling_strategy="sequential",
                   per_device_train_batch_size=8)  # fmt: skip
    model(**made.data_collator(list(rows("gpt2")))).loss.backward()
    expected = {n: model.get_parameter(n).detach() - model.get_parameter(n).grad for n in names}
    model.zero_grad()
    for module in model.modules():  # statistics of the forward above
        if hasattr(module, "running_mean"):
            module.reset_running_stats()
    made.train()
    for n in names:
        torch.testing.assert_close(model.get_parameter(n).detach(), expected[n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_block_coordinate_descent_of_an_adapter(training, tmp_path):
    """With a head to train in the F steps."""
    model = adapted("bert", "mae")
    made = run("bert", model, tmp_path, max_steps=2, mae_training=training)
    assert made.mae_training == training
    assert model.get_base_model().mae_phase == "mixture"


@pytest.mark.parametrize("plus", [False, True])
def test_gates_of_an_adapter_do_not_stand_still_without_a_word(plus, tmp_path):
    """Though a classifier, or FTG+'s projections, would learn."""
    with pytest.raises(ValueError, match="mae_training='expert' trains no gate"):
        trainer("bert", adapted("bert", "mae", plus=plus), tmp_path, mae_training="expert")


@pytest.mark.parametrize("moa_trainer", [True, False])
@each_variant
def test_resumption_is_bit_exact(variant, moa_trainer, tmp_path):
    settings = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    if moa_trainer:
        make = trainer
    else:

        def make(name, model, folder, **arguments):
            arguments = TrainingArguments(
                str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **arguments
            )
            return Trainer(model, arguments, train_dataset=list(rows(name)))

    whole = make("bert", adapted("bert", variant), tmp_path, **settings)
    whole.train()
    resumed = make("bert", adapted("bert", variant), tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(tensors(resumed.model), tensors(whole.model))


def test_best_adapter_is_loaded(tmp_path):
    model = adapted("bert", "mae")
    made = trainer("bert", model, tmp_path, max_steps=3, learning_rate=0.1, save_strategy="steps",
                   save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                   metric_for_best_model="loss", greater_is_better=True)  # fmt: skip
    made.train()
    losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert made.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-5)


@each_variant
def test_gradient_checkpointing_changes_nothing(variant, tmp_path):
    states = []
    for checkpointing in (False, True):
        model = adapted("bert", variant)
        run("bert", model, tmp_path, max_steps=2, activation_checkpointing=checkpointing,
            optim="sgd", learning_rate=0.1)  # fmt: skip
        states.append(get_peft_model_state_dict(model))
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, atol=1e-6, rtol=1e-5, msg=key)


# --- saving and loading ---------------------------------------------------------------------------


@pytest.mark.covering(pairs=True)
@each_backbone
@each_variant
@each_method
@pytest.mark.parametrize("low_memory", [False, True])
def test_adapter_loads_bit_exactly(name, variant, plus, low_memory, tmp_path):
    model = adapted(name, variant, plus=plus, adapter_name="tuned")
    run(name, model, tmp_path / "run", max_steps=1, learning_rate=0.1)
    expected = predict(name, model.eval())
    model.save_pretrained(tmp_path)
    folder = tmp_path / "tuned"
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    saved = load_file(folder / "adapter_model.safetensors")
    assert not any("base_layer" in key or "tuned" in key for key in saved)
    base = build(name, dropout=True, **VARIANTS[variant])
    base.config.use_cache = model.config.use_cache  # a run switches it off, which can change roundings
    loaded = PeftModel.from_pretrained(
        base, folder, adapter_name="other", low_cpu_mem_usage=low_memory
    ).eval()
    assert torch.equal(predict(name, loaded), expected)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_auto_classes_load_base_and_adapter(tmp_path):
    for name, auto in (
        ("bert", AutoPeftModelForSequenceClassification),
        ("gpt2", AutoPeftModelForCausalLM),
    ):
        base = build(name, dropout=True, **VARIANTS["mae-cct"])
        base.save_pretrained(tmp_path / name / "base")
        base = CLASSES[name].gated.from_pretrained(tmp_path / name / "base")
        model = get_peft_model(base, FTGConfig(task_type=TASKS[name], init_weights=False)).eval()
        expected = predict(name, model)
        model.save_pretrained(tmp_path / name / "adapter")
        fields = {"num_labels": 3} if name == "bert" else {}
        loaded = auto.from_pretrained(tmp_path / name / "adapter", **fields).eval()
        assert torch.equal(predict(name, loaded), expected)


@each_backbone
def test_adapter_of_version_0_1_finds_its_base(name, tmp_path):
    """Its file names the base's module as it was then."""
    build(name, dropout=True, **VARIANTS["mae"]).save_pretrained(tmp_path / "base")
    base = CLASSES[name].gated.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, FTGConfig(init_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(file.read_text())
    module = f"hf_moa.modeling.modeling_moa_{name}"
    saved["auto_mapping"]["parent_library"] = module
    file.write_text(json.dumps(saved))
    fields = {"num_labels": 3} if name == "bert" else {}
    loaded = AutoPeftModel.from_pretrained(tmp_path / "adapter", import_allowlist=[module], **fields)
    assert torch.equal(predict(name, loaded.eval()), predict(name, model))


def test_card_says_what_it_is_and_how_to_load_it(tmp_path):
    base = build("gpt2", **VARIANTS["mae"])
    base.save_pretrained(tmp_path / "base")
    base = CLASSES["gpt2"].gated.from_pretrained(tmp_path / "base")
    get_peft_model(base, FTGConfig(plus=True)).save_pretrained(tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    for part in ("base_model:", "library_name: peft", "FTG+ adapter", "MAE gates", "import hf_moa"):
        assert part in card, part
    assert str(tmp_path / "base") in card


def test_text_that_others_wrote_stays_in_the_card(tmp_path):
    card, model = tmp_path / "README.md", adapted("gpt2", "mae")
    model.save_pretrained(tmp_path)
    first = card.read_text()
    card.write_text(first + "\n## Limits\n\nMine.\n")
    model.save_pretrained(tmp_path)
    assert card.read_text().count("## Limits\n\nMine.") == 1
    assert card.read_text().count("# FTG adapter of") == 1
    head = first[: first.index("# FTG adapter of")]
    card.write_text(f"{head}# My adapter\n\nFor my cats.\n")
    model.save_pretrained(tmp_path)
    assert "# My adapter\n\nFor my cats." in card.read_text()
    assert "# FTG adapter of" not in card.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mae_num_dropped_heads": 2}, "mae_num_dropped_heads=1, not 2"),
        ({"attention_type": "moa"}, "attention_type='mae', not 'moa'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2, not 3"),
        ({"cct_budgets": [1, 0.5]}, "cct=False, not True"),
    ],
)
def test_adapter_of_another_model_is_refused(changes, message, tmp_path):
    adapted("bert", "mae").save_pretrained(tmp_path)
    other = build("bert", **VARIANTS["mae"] | changes)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(other, tmp_path)


def test_adapter_of_other_budgets_is_refused(tmp_path):
    fields = {"cct_budgets": [[1, 1], [1, 0.5]]}
    get_peft_model(build("t5", **fields), FTGConfig()).save_pretrained(tmp_path)
    PeftModel.from_pretrained(build("t5", cct_budgets=[(1, 1), (1, 1), (1, 0.5)]), tmp_path)
    other = build("t5", cct_budgets=[[1, 1], [0.5, 1]])
    with pytest.raises(ValueError, match=r"cct_budgets=\[\[1, 1\], \[1, 0.5\]\], not .*\[0.5, 1\]"):
        PeftModel.from_pretrained(other, tmp_path)


def test_adapter_of_another_backbone_is_refused(tmp_path):
    adapted("gpt2", "mae").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='moa_gpt2', not 'moa_bert'"):
        PeftModel.from_pretrained(build("bert-lm", **VARIANTS["mae"]), tmp_path)


REMOTE = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base", trust_remote_code=True)
assert type(base).__module__.startswith("transformers_modules."), type(base)
import hf_moa  # which brings the method
model = PeftModel.from_pretrained(base, sys.argv[1] + "/adapter").eval()
with torch.no_grad():
    torch.save(model(torch.arange(5, 12)[None]).logits, sys.argv[1] + "/logits.pt")
"""


def test_adapter_loads_on_a_base_of_a_checkpoints_own_code(tmp_path):
    base = build("gpt2", **VARIANTS["mae-cct"])
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, FTGConfig(init_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(torch.arange(5, 12)[None]).logits
    done = fresh_python(REMOTE, tmp_path, folder=tmp_path, modules_cache=tmp_path / "code")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
