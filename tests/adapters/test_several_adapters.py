"""Several FTG adapters on one model: switched, disabled, deleted and merged."""

import warnings

import pytest
import torch
from adapted import VARIANTS, adapted, each_backbone, each_method, each_variant, predict, tensors
from peft import get_peft_model
from training_runs import CLASSES, assert_same, build, run

from hf_moa import FTGConfig
from hf_moa.adapters import FTGLayer


@each_variant
@each_method
def test_adapters_are_switched_disabled_and_deleted(variant, plus, tmp_path):
    base = build("bert", dropout=True, **VARIANTS[variant]).eval()
    plain = predict("bert", base)
    model = get_peft_model(base, FTGConfig(plus=plus, init_weights=False), adapter_name="one").eval()
    one = predict("bert", model)
    model.add_adapter("two", FTGConfig(plus=plus, init_weights=False))
    assert torch.equal(predict("bert", model), one)
    model.set_adapter("two")
    two = predict("bert", model)
    assert not torch.equal(two, one)
    assert not torch.equal(one, plain)
    with model.disable_adapter():
        assert torch.equal(predict("bert", model), plain)
    run("bert", model, tmp_path, max_steps=2, learning_rate=0.1)  # of the active one
    model.eval()
    assert not torch.equal(predict("bert", model), two)
    model.set_adapter("one")
    assert torch.equal(predict("bert", model), one)
    with model.disable_adapter():
        assert torch.equal(predict("bert", model), plain)
    model.delete_adapter("two")
    assert torch.equal(predict("bert", model), one)
    assert not any("two" in name for name, _ in model.named_modules())


@each_variant
def test_base_never_moves_in_training_mode(variant):
    model = adapted("bert-lm", variant).train()
    base = {k: v.clone() for k, v in tensors(model).items() if "base_layer" in k}
    copies = {k: v.clone() for k, v in tensors(model).items() if "ftg_modules" in k}
    with model.disable_adapter():
        model(**CLASSES["bert-lm"].inputs())
    assert_same({k: v for k, v in tensors(model).items() if "base_layer" in k}, base)
    assert_same({k: v for k, v in tensors(model).items() if "ftg_modules" in k}, copies)
    model(**CLASSES["bert-lm"].inputs())
    assert_same({k: v for k, v in tensors(model).items() if "base_layer" in k}, base)
    if variant.startswith("mae"):
        moved = [k for k in copies if not torch.equal(tensors(model)[k], copies[k])]
        assert any("running_mean" in key for key in moved)


def test_two_active_adapters_are_an_error():
    model = adapted("bert-lm", "mae", adapter_name="one")
    model.add_adapter("two", FTGConfig())
    model.base_model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match=r"one adapter at a time .*one, two"):
        predict("bert-lm", model)


def test_a_batch_has_one_adapter():
    model = adapted("bert-lm", "mae", adapter_name="one").eval()
    model.add_adapter("two", FTGConfig())
    with pytest.raises(ValueError, match=r"one adapter \(got adapter_names=\['one', 'two'\]\)"):
        model(**CLASSES["bert-lm"].inputs(), adapter_names=["one", "two"])


def test_budgets_of_a_converted_model_need_its_symbols(tmp_path):
    def with_zero_symbols():
        model = build("bert", cct_budgets=[1, 0.5])
        torch.nn.init.zeros_(model.bert.cct.control_symbols.weight)
        return model

    with pytest.warns(UserWarning, match="cannot tell budgets apart"):
        get_peft_model(with_zero_symbols(), FTGConfig())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cannot tell budgets apart")
        get_peft_model(build("bert", cct_budgets=[1, 0.5]), FTGConfig())
        config = FTGConfig(modules_to_save=["control_symbols"])
        model = get_peft_model(with_zero_symbols(), config)
    run("bert", model, tmp_path, max_steps=3, learning_rate=0.1)
    model.eval()
    inputs = CLASSES["bert"].inputs()
    with torch.no_grad():
        assert not torch.equal(model(**inputs, budget=1).logits, model(**inputs, budget=0.5).logits)


@pytest.mark.covering(pairs=True)
@each_backbone
@each_variant
@each_method
def test_merged_model_is_a_plain_one(name, variant, plus, tmp_path):
    model = adapted(name, variant, plus=plus, perturbed=True).eval()
    expected = predict(name, model)
    model.merge_adapter()
    assert torch.equal(predict(name, model), expected)
    model.unmerge_adapter()
    with model.disable_adapter():
        base = build(name, dropout=True, **VARIANTS[variant]).eval()
        assert torch.equal(predict(name, model), predict(name, base))
    assert torch.equal(predict(name, model), expected)
    merged = model.merge_and_unload()
    assert torch.equal(predict(name, merged), expected)
    merged.save_pretrained(tmp_path)
    loaded, report = CLASSES[name].gated.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(predict(name, loaded.eval()), expected)


def test_base_that_a_merged_adapter_stands_for_is_cast_too():
    model = adapted("gpt2", "mae", perturbed=True).eval()
    model.merge_adapter()
    model.double()
    model.unmerge_adapter()
    with model.disable_adapter():
        base = build("gpt2", dropout=True, **VARIANTS["mae"]).eval().double()
        assert torch.equal(predict("gpt2", model), predict("gpt2", base))


def test_unmerged_adapter_goes_on_in_the_mode_of_its_model():
    model = adapted("gpt2", "mae").eval()
    copies = [m.ftg_modules["default"] for m in model.modules() if isinstance(m, FTGLayer)]
    model.merge_adapter()
    model.train()
    assert not any(copy.training for copy in copies)
    model.unmerge_adapter()
    assert all(copy.training for copy in copies)
