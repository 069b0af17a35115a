"""FTG beside transformers' own adapter interface, LoRA, other precisions and the compiler."""

import json
from pathlib import Path

import pytest
import torch
from adapted import VARIANTS, adapted, each_backbone, each_variant, needs_peft_of_transformers, predict
from families import CASE
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from training_runs import CLASSES, build, run

from hf_moa import FTGConfig
from hf_moa.adapters import FTGModel


@needs_peft_of_transformers
@each_backbone
def test_transformers_own_adapter_interface(name, tmp_path):
    base = build(name, dropout=True, **VARIANTS["mae-cct"]).eval()
    plain = predict(name, base)
    base.add_adapter(FTGConfig(init_weights=False), adapter_name="tuned")
    expected = predict(name, base.eval())
    assert not torch.equal(expected, plain)
    base.disable_adapters()
    assert torch.equal(predict(name, base), plain)
    base.enable_adapters()
    assert torch.equal(predict(name, base.eval()), expected)
    base.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    other = build(name, dropout=True, **VARIANTS["mae-cct"])
    other.load_adapter(tmp_path)
    assert torch.equal(predict(name, other.eval()), expected)
    as_peft = PeftModel.from_pretrained(build(name, dropout=True, **VARIANTS["mae-cct"]), tmp_path)
    assert torch.equal(predict(name, as_peft.eval()), expected)


@needs_peft_of_transformers
def test_two_methods_on_one_model():
    """LoRA on queries and FTG on gates, through transformers' interface."""
    model = build("bert-lm", **VARIANTS["mae"])
    model.add_adapter(LoraConfig(target_modules=["query"], init_lora_weights=False), "lora")
    lora = predict("bert-lm", model.eval())
    model.add_adapter(FTGConfig(init_weights=False), "ftg")
    model.set_adapter("ftg")
    ftg = predict("bert-lm", model.eval())
    model.set_adapter(["lora", "ftg"])
    both = predict("bert-lm", model.eval())
    model.set_adapter("lora")
    assert torch.equal(predict("bert-lm", model.eval()), lora)
    assert not torch.equal(ftg, lora)
    assert not torch.equal(both, lora)
    assert not torch.equal(both, ftg)


@pytest.mark.covering
@each_backbone
@each_variant
def test_half_precision_base_with_full_precision_gates(name, variant, tmp_path):
    fields = VARIANTS[variant]
    if variant == "moa":  # all experts, weighted: a choice that rounding turns is another function
        fields = fields | {"num_attention_experts": 4, "num_ffn_experts_per_token": 8}
    build(name, **fields).save_pretrained(tmp_path)
    base = CLASSES[name].gated.from_pretrained(tmp_path, dtype=torch.bfloat16)
    reference = predict(name, base.eval())
    model = get_peft_model(base, FTGConfig(plus=True))
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    statistics = {key: buffer.clone() for key, buffer in model.named_buffers()}
    run(name, model, tmp_path / "run", max_steps=1, learning_rate=0.0)
    for key, buffer in model.named_buffers():  # gates' statistics move whatever the rate
        buffer.copy_(statistics[key])
    actual = predict(name, model.eval())
    assert actual.dtype == torch.bfloat16
    assert actual.isfinite().all()
    if "cct" not in variant:  # whose hard gates fall either way
        assert (actual - reference).abs().float().mean() < 0.1 * reference.abs().float().mean()


@pytest.mark.covering
@each_backbone
@each_variant
@pytest.mark.parametrize("low_memory", [False, True])
def test_full_precision_loads_beside_a_half_precision_base(name, variant, low_memory, tmp_path):
    build(name, **VARIANTS[variant]).save_pretrained(tmp_path / "base")

    def load():
        return CLASSES[name].gated.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)

    model = get_peft_model(load(), FTGConfig(plus=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # to what bfloat16 cannot hold
                parameter.add_(0.1 * torch.randn_like(parameter))
    trained = get_peft_model_state_dict(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load(), tmp_path / "adapter", low_cpu_mem_usage=low_memory)
    for key, tensor in get_peft_model_state_dict(loaded).items():
        assert tensor.dtype == trained[key].dtype
        assert torch.equal(tensor, trained[key]), key
    assert torch.equal(predict(name, loaded.eval()), predict(name, model.eval()))


@pytest.mark.covering
@needs_peft_of_transformers
@each_backbone
@each_variant
def test_half_precision_gates(name, variant, tmp_path):
    """Copies that nothing casts have float32 norms beside bfloat16 weights, as the base's gates."""
    build(name, **VARIANTS[variant]).save_pretrained(tmp_path / "base")

    def load():
        return CLASSES[name].gated.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).eval()

    reference = predict(name, load())
    model = get_peft_model(load(), FTGConfig(plus=True), autocast_adapter_dtype=False)
    assert torch.equal(predict(name, model), reference)
    model.save_pretrained(tmp_path / "adapter")
    loaded, added = load(), load()
    loaded.load_adapter(tmp_path / "adapter")
    added.add_adapter(FTGConfig(plus=True))
    for model in (loaded, added):
        assert torch.equal(predict(name, model.eval()), reference)


@pytest.mark.slow
@each_variant
def test_compiled_adapter_is_the_same(variant):
    torch._dynamo.reset()
    model = adapted("bert", variant, plus=True, perturbed=True).eval()
    expected = predict("bert", model)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(predict("bert", compiled), expected)


def test_modules_to_save_and_head(tmp_path):
    model = adapted("bert", "mae")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("classifier.modules_to_save" in name for name in names)
    base = build("bert-lm", **VARIANTS["mae"])
    model = get_peft_model(base, FTGConfig(modules_to_save=["cls"]))
    assert any("cls.modules_to_save" in n for n, p in model.named_parameters() if p.requires_grad)


def test_shared_module_is_refused():
    base = build("bert-lm", **VARIANTS["mae"])
    layers = base.bert.encoder.layer
    layers[1].attention.self.mixture.gate = layers[0].attention.self.mixture.gate
    with pytest.raises(ValueError, match="shared"):
        get_peft_model(base, FTGConfig())


def test_config_round_trip(tmp_path):
    config = FTGConfig(plus=True, gates=("mae", "cct"), layers_to_transform=[0])
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert type(loaded) is FTGConfig
    assert loaded.to_dict() == config.to_dict()
    assert json.loads(Path(tmp_path, "adapter_config.json").read_text())["peft_type"] == "FTG"
    assert FTGModel.prefix == "ftg_"
    assert CASE["BertModel"].gated is not None
