"""How every class of every family loads a checkpoint, and how it starts without one."""

import copy
import io
import math

import pytest
import torch
from families import (
    each_class,
    each_class_and_mechanism,
    each_family,
    each_variant,
    main_output,
)
from transformers import AutoConfig

from hf_moa.modeling.cct.control import ControlNetwork
from hf_moa.modeling.mae.mixture import MaeGate
from hf_moa.modeling.routing.routers import TopKRouter


@each_class
def test_checkpoint_of_the_backbone_loads_into_mae_unchanged(case, tmp_path):
    reference = case.build_plain()
    reference.save_pretrained(tmp_path)
    config = case.family.config_class.from_pretrained(tmp_path, attention_type="mae")
    model, report = case.gated.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert report["missing_keys"]
    assert all(".mixture.gate." in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    inputs = case.inputs()
    expected = main_output(reference(**inputs))
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-5, rtol=1e-5)


@each_class
def test_mae_adds_gate_keys_only(case):
    plain = set(case.gated(case.config()).state_dict())
    mae = set(case.gated(case.config(attention_type="mae")).state_dict())
    assert plain < mae
    assert all(".mixture.gate." in name for name in mae - plain)


@each_class_and_mechanism
def test_every_class_loads_bit_exactly(case, fields, tmp_path):
    _assert_loads_bit_exactly(case, fields, tmp_path)


@each_variant
def test_every_variant_loads_bit_exactly(case, fields, tmp_path):
    _assert_loads_bit_exactly(case, fields, tmp_path)


def _assert_loads_bit_exactly(case, fields, path):
    model = case.build(**fields)
    model.save_pretrained(path)
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = case.auto.from_pretrained(path)
    assert type(loaded) is case.gated
    for (name, one), (other_name, other) in zip(
        _tensors(model), _tensors(loaded), strict=True
    ):  # buffers that the checkpoint does not carry included
        assert name == other_name
        assert torch.equal(one, other), name
    inputs = case.inputs()
    assert torch.equal(main_output(loaded(**inputs)), main_output(model(**inputs)))


def _tensors(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


@each_family
def test_config_round_trip(case, tmp_path):
    config = case.config(attention_type="moa", cct_budgets=[1, 0.5], router_type="noisy_topk")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is case.family.config_class
    ignored = {"_name_or_path": "", "auto_map": None}
    assert loaded.to_dict() | ignored == config.to_dict() | ignored


@each_class
def test_mismatched_head_can_be_replaced(case, tmp_path):
    if case.task not in ("SequenceClassification", "TokenClassification"):
        pytest.skip("no head that depends on the number of labels")
    model = case.build(attention_type="mae")
    model.save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError), match="ignore_mismatched_sizes"):
        case.gated.from_pretrained(tmp_path, num_labels=5)
    other = case.gated.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert other(**case.inputs()).logits.shape[-1] == 5


@each_variant
def test_models_can_be_pickled_and_copied(case, fields):
    model = case.build(**fields)
    inputs = case.inputs()
    expected = model(**inputs).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(**inputs).logits, expected)
    model(**inputs, output_hidden_states=True)  # transformers installs its recording hooks
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, expected)


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_and_runs(case, fields, dtype, tmp_path):
    torch.manual_seed(0)
    case.gated(case.config(**fields)).save_pretrained(tmp_path)
    half = case.gated.from_pretrained(tmp_path, dtype=dtype)
    assert half.dtype == dtype
    for name, tensor in half.state_dict().items():
        if "gate.norm" in name and tensor.is_floating_point():
            assert tensor.dtype == torch.float32, name
    assert torch.isfinite(half(**case.inputs()).logits).all()


@each_variant
def test_loaded_and_built_models_start_alike(case, fields):
    """`from_pretrained` of an empty checkpoint initialises as the constructor does, except MAE's gates,
    which start uniform beside the weights of a model without them."""
    config = case.config(**fields, **_WIDE[case.family.name])
    torch.manual_seed(0)
    built = case.gated(copy.deepcopy(config))
    name, tensor = next(iter(built.state_dict().items()))
    torch.manual_seed(1)
    loaded = case.gated.from_pretrained(None, config=config, state_dict={name: tensor})
    for (name, one), (_, other) in zip(_tensors(built), _tensors(loaded), strict=True):
        if name.endswith("mixture.gate.out.weight"):
            assert other.count_nonzero() == 0
            assert one.std().item() == pytest.approx(0.02, rel=0.15)
        elif one.is_floating_point():
            _assert_same_distribution(other, one, name)


def _assert_same_distribution(actual, expected, name):
    """Means and standard deviations within six standard errors (none where they are constant)."""
    mean, std = (statistic(actual.detach().double()) for statistic in (torch.mean, _deviation))
    other_mean, other_std = (f(expected.detach().double()) for f in (torch.mean, _deviation))
    error = 6 * other_std / actual.numel() ** 0.5
    assert abs(mean - other_mean) <= 1.5 * error + 1e-12, name
    assert abs(std - other_std) <= error + 1e-12, name


def _deviation(x):
    return x.std(correction=0)


_WIDE = {
    "bert": {"hidden_size": 64},
    "gpt2": {"n_embd": 64},
    "t5": {"d_model": 64},
}


@each_variant
def test_gates_start_undecided(case, fields):
    """Small weights, so that no gate starts saturated and all choose evenly, but none is a constant."""
    torch.manual_seed(0)
    model = case.gated(case.config(**fields, **_WIDE[case.family.name]))
    for name, module in model.named_modules():
        if isinstance(module, (MaeGate, TopKRouter, ControlNetwork)):
            for part, linear in module.named_children():
                if isinstance(linear, torch.nn.Linear):
                    assert linear.weight.std() < 0.03, f"{name}.{part}"
        if isinstance(module, (MaeGate, TopKRouter)):
            x = torch.randn(500, 64)
            is_mae = isinstance(module, MaeGate)
            p = module(x, None, dtype=x.dtype) if is_mae else module.gate(x).softmax(-1)
            entropy = -(p * p.log()).sum(-1).mean()
            assert entropy > 0.95 * math.log(p.shape[-1]), name


@each_class_and_mechanism
def test_plain_parameters_start_as_the_backbones_do(case, fields):
    """Every parameter that the backbone has too has its mean and standard deviation."""
    wide = _WIDE[case.family.name]
    torch.manual_seed(0)
    plain_config = case.family.plain_config_class(**case.family.tiny | case.fields | wide)
    plain = dict(case.plain(plain_config).named_parameters())
    gated = dict(case.gated(case.config(**fields, **wide)).named_parameters())
    shared = [name for name in plain.keys() & gated.keys() if plain[name].shape == gated[name].shape]
    assert len(shared) >= 5
    for name in shared:
        _assert_same_distribution(gated[name], plain[name], name)


@each_class
def test_plain_model_starts_with_the_backbones_numbers(case):
    torch.manual_seed(0)
    plain = case.plain(case.family.plain_config_class(**case.family.tiny | case.fields)).state_dict()
    torch.manual_seed(0)
    gated = case.gated(case.config()).state_dict()
    for name, tensor in plain.items():
        assert torch.equal(gated[name], tensor), name
