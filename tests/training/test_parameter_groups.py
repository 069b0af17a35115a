"""Parameter groups: each parameter in one, transformers' weight decay, rates of gates and budgets."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from training_runs import CLASSES, PLAIN_SGD, assert_same, build, plain_classifier, run, tensors, trainer
from transformers import Trainer, TrainingArguments

from hf_moa.training import parameter_groups
from hf_moa.training.parameter_groups import gate_kinds_of

FIELDS = {
    "mha": {},
    "mae": {"attention_type": "mae"},
    "moa-moe": {"attention_type": "moa", "router_type": "noisy_topk", "ffn_type": "moe"},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "cct-norms": {"cct_budgets": [1, 0.5], "cct_sublayer_norm": True},
}
KINDS = {
    "mha": set(),
    "mae": {"mae"},
    "moa-moe": {"router"},
    "mae-cct": {"mae", "cct"},
    "cct-norms": {"cct"},
}


def with_budget_bias(model):
    """A bias for each budget, as CCT's control networks may have it."""
    for module in model.modules():
        if getattr(module, "gate_kind", None) == "cct":
            module.budget_bias = torch.nn.Parameter(torch.zeros(2, module.num_gates))
    return model


def named(model, groups):
    """Of each parameter in the groups, by name: its rate (None for the optimiser's) and decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[p]: (group.get("lr"), group["weight_decay"]) for group in groups for p in group["params"]
    }


@pytest.mark.parametrize("variant", FIELDS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_that_learns_is_in_one_group(name, variant):
    model = with_budget_bias(build(name, **FIELDS[variant]))
    frozen = next(iter(model.parameters())).requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1, gate_learning_rate=1e-3)
    counts = Counter(p for group in groups for p in group["params"])
    assert set(counts) == set(model.parameters()) - {frozen}
    assert set(counts.values()) == {1}
    assert all(group["params"] for group in groups)


@pytest.mark.parametrize("variant", FIELDS)
@pytest.mark.parametrize("name", CLASSES)
def test_weights_decay_as_in_transformers(name, variant, tmp_path):
    """But for the norms of CCT's feed-forward parts, which transformers takes for weights."""
    model = with_budget_bias(build(name, **FIELDS[variant]))
    plain = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    expected = {n for n in plain.get_decay_parameter_names(model) if "_norms." not in n}
    found = named(model, parameter_groups(model, weight_decay=0.1, gate_learning_rate=1e-3))
    assert {n for n, (_, decay) in found.items() if decay == 0.1} == expected & set(found)
    assert {decay for _, decay in found.values()} == {0.1, 0.0}
    assert not any("norm" in n.lower() for n, (_, decay) in found.items() if decay)


@pytest.mark.parametrize("variant", FIELDS)
@pytest.mark.parametrize("name", CLASSES)
def test_gates_are_those_of_the_mechanisms(name, variant):
    model = with_budget_bias(build(name, **FIELDS[variant]))
    kinds = gate_kinds_of(model)
    assert set(kinds.values()) == KINDS[variant]
    words = {"mae": (".gate.",), "router": (".router.",), "cct": ("control.", "control_symbols.")}
    for n, parameter in model.named_parameters():
        is_gate = any(word in n for kind in KINDS[variant] for word in words[kind])
        assert (parameter in kinds) == is_gate, n


def test_rates_are_those_given():
    model = with_budget_bias(build("bert", **FIELDS["mae-cct"]))
    rates = {n: rate for n, (rate, _) in named(model, parameter_groups(model)).items()}
    assert {rates[n] for n in rates if n.endswith(".budget_bias")} == {0.05}
    assert {rates[n] for n in rates if not n.endswith(".budget_bias")} == {None}

    groups = parameter_groups(model, gate_learning_rate={"cct": 2e-3}, budget_bias_learning_rate=None)
    rates = {n: rate for n, (rate, _) in named(model, groups).items()}
    own = {n for n, rate in rates.items() if rate == 2e-3}
    assert own == {n for n in rates if "control." in n or "control_symbols" in n}
    assert {n: r for n, r in rates.items() if n not in own and r is not None} == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gate_learning_rate": 0}, r"gate_learning_rate must be a positive number \(got 0\)"),
        ({"gate_learning_rate": {"cct": True}}, "gate_learning_rate must be a positive number"),
        ({"gate_learning_rate": {"moa": 1e-3}}, r"of 'cct', 'mae', 'router' \(got 'moa'\)"),
        ({"budget_bias_learning_rate": -1}, "budget_bias_learning_rate must be a positive number"),
    ],
)
def test_bad_rates_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(build("bert"), **arguments)


@pytest.mark.parametrize("variant", FIELDS)
def test_the_trainers_optimiser_has_these_groups(variant, tmp_path):
    model = with_budget_bias(build("bert", **FIELDS[variant]))
    joint = {"mae_training": "joint"} if "mae" in variant else {}
    made = trainer("bert", model, tmp_path, learning_rate=1e-4, weight_decay=0.1,
                   gate_learning_rate=1e-3, budget_bias_learning_rate=0.1, **joint)  # fmt: skip
    expected = parameter_groups(
        model, weight_decay=0.1, gate_learning_rate=1e-3, budget_bias_learning_rate=0.1
    )
    expected = {
        name: (1e-4 if rate is None else rate, decay)
        for name, (rate, decay) in named(model, expected).items()
    }
    assert named(model, made.create_optimizer().param_groups) == expected


def test_without_rates_the_groups_are_transformers(tmp_path):
    """In the same order, in which an optimiser's state is saved."""
    model = build("bert", **FIELDS["moa-moe"])
    ours = trainer("bert", model, tmp_path, weight_decay=0.1).create_optimizer()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", weight_decay=0.1)
    theirs = Trainer(model, arguments).create_optimizer()
    assert len(ours.param_groups) == len(theirs.param_groups)
    for own, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert all(a is b for a, b in zip(own["params"], other["params"], strict=True))
        assert {k: v for k, v in own.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }


def test_block_coordinate_descent_keeps_the_rate_to_itself(tmp_path):
    """Its SGD takes it: other gates stay at `learning_rate`, and MAE's are in no group."""
    model = with_budget_bias(build("bert", **FIELDS["mae-cct"]))
    made = trainer("bert", model, tmp_path, learning_rate=1e-4, gate_learning_rate=0.3)
    found = named(model, made.create_optimizer().param_groups)
    assert not any(".mixture.gate." in name for name in found)
    assert {rate for name, (rate, _) in found.items() if "budget_bias" not in name} == {1e-4}
    assert {rate for name, (rate, _) in found.items() if "budget_bias" in name} == {0.05}


def test_an_optimiser_of_the_user_stays_as_it_is(tmp_path):
    model = build("bert", **FIELDS["moa-moe"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = trainer("bert", model, tmp_path, gate_learning_rate=1e-3)
    made.optimizer = optimizer
    assert made.create_optimizer() is optimizer
    assert len(optimizer.param_groups) == 1


def test_schedule_scales_each_rate(tmp_path):
    model = build("bert", **FIELDS["moa-moe"])
    made = run("bert", model, tmp_path, max_steps=4, learning_rate=1e-4, gate_learning_rate=1e-2,
               warmup_steps=8, lr_scheduler_type="constant_with_warmup")  # fmt: skip
    rates = {group["lr"] for group in made.optimizer.param_groups}
    assert rates == {0.5e-4, 0.5e-2}


@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_plain_trainer_takes_the_groups(way, tmp_path):
    """And updates as MoaTrainer does with the same rates."""
    rates = {"gate_learning_rate": 0.5}
    ours = build("bert", **FIELDS["moa-moe"])
    run("bert", ours, tmp_path, **PLAIN_SGD | rates)
    model = build("bert", **FIELDS["moa-moe"])
    groups = parameter_groups(model, **rates)
    if way == "optimizers":
        chosen = {"optimizers": (torch.optim.SGD(groups, lr=1.0), None)}
    else:
        chosen = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"params": groups, "lr": 1.0})}
    data = trainer("bert", build("bert"), tmp_path).train_dataset
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        save_strategy="no", **PLAIN_SGD,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, **chosen).train()
    assert_same(tensors(model), tensors(ours))


def test_models_of_transformers_have_two_groups():
    groups = parameter_groups(plain_classifier(), weight_decay=0.1, gate_learning_rate=1e-3)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("lr" not in group for group in groups)


def test_adapted_gates_are_gates():
    from peft import get_peft_model

    from hf_moa import FTGConfig

    model = with_budget_bias(build("bert", **FIELDS["mae-cct"]))
    adapted = get_peft_model(model, FTGConfig(modules_to_save=["control_symbols", "classifier"]))
    found = named(adapted, parameter_groups(adapted, gate_learning_rate=1e-3))
    assert set(found) == {n for n, p in adapted.named_parameters() if p.requires_grad}
    others = {name for name, (rate, _) in found.items() if rate is None}
    assert others == {name for name in found if "classifier" in name}
    assert {rate for name, (rate, _) in found.items() if name.endswith("budget_bias")} == {0.05}


def test_a_step_takes_what_is_spread_and_what_is_not(tmp_path):
    """As of a split model, whose gates every process has; in steps of all parameters at once."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build("bert", attention_type="mae")
        mesh = init_device_mesh("cpu", (1,))
        for name, parameter in list(model.named_parameters())[::2]:
            module, _, last = name.rpartition(".")
            own = nn.Parameter(distribute_tensor(parameter.data, mesh))
            setattr(model.get_submodule(module), last, own)
        groups = parameter_groups(model, weight_decay=0.1, gate_learning_rate=1e-2)
        optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))
    finally:
        dist.destroy_process_group()
