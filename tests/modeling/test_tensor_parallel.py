"""Models that transformers' engine splits over processes compute and learn what whole ones do: by tensor
and expert parallelism, FSDP version 2, and combinations of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import BERT, CASE, GPT2, LANGUAGE_MODELS, T5, each_variant
from launching import launch_ranks
from transformers.distributed.parallel_utils import _get_parameter_plan, replace_layer_number_by_wildcard

from hf_moa.modeling.parallel.ranks import DealtRanks, TensorRanks

FAMILIES = {family.name: family for family in (BERT, GPT2, T5)}
TP_2 = {"tp_size": 2}
TP_4 = {"tp_size": 4}
TP_2_EP_2 = {"tp_size": 2, "ep_size": 2}
FSDP_2 = {"fsdp_size": 2}
FSDP_2_EP_2 = {"fsdp_size": 2, "ep_size": 2}
HSDP = {"dp_replicate_size": 2, "fsdp_size": 2}
TP_2_FSDP_2 = {"tp_size": 2, "fsdp_size": 2}
TP_2_FSDP_2_EP_4 = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
MORE_FIELDS = {
    "bert-mae-1+cross": {"is_decoder": True, "add_cross_attention": True},
    "gpt2-moa-moe-cct+cross": {"add_cross_attention": True},
    "gpt2-mae-1+cross": {"add_cross_attention": True},
    "gpt2-moa": {"num_attention_experts": 8},
    "gpt2-moa+sparse": {"num_attention_experts": 8, "moa_execution": "sparse"},
    "t5-moa": {"num_attention_experts": 8, "vocab_size": 68, "moa_execution": "sparse"},
    "t5-moa+groups": {"num_key_value_heads": 2},
    # 4 heads, and 3
    "t5-mae-nested+uneven": {"nested_budgets": [1, 0.75]},
    "gpt2-mae-nested+uneven": {"nested_budgets": [1, 0.75]},
    "bert-mae-nested+four": {"nested_heads": [4, 4], "nested_ffn_sizes": [48, 24]},
    "bert-moa-moe-cct+groups": {"num_key_value_heads": 2},
    # parts of one size, where weights are tied
    "gpt2-cct-plain": {"vocab_size": 68},
    "bert-moe": {"vocab_size": 68},
    # files of parts can be written
    "bert-mae-2": {"tie_word_embeddings": False},
    "bert-cct-plain": {"tie_word_embeddings": False},
    "gpt2-moe": {"tie_word_embeddings": False},
}

# each mechanism, on two processes
FEW = {
    "bert-mae-2": TP_2,
    "gpt2-moe": TP_2_EP_2,
    "bert-mae-nested": TP_2,
    "t5-moa-moe-cct": TP_2,
}
ON_2 = {
    "bert-mae-cct-relative": TP_2,
    "bert-mae-1+cross": TP_2,
    "gpt2-moa-moe-cct+cross": TP_2,
    "bert-moa-moe-cct": FSDP_2,
    "bert-moa-moe-cct+groups": TP_2,
    "bert-moe": FSDP_2_EP_2,
    "gpt2-mae-1": FSDP_2,
    "gpt2-mae-cct": TP_2,
    "t5-mae-nested+uneven": TP_2,
}
ON_4 = {
    "bert-mae-2": TP_4,
    "bert-moe": TP_2_FSDP_2_EP_4,
    "gpt2-moa+sparse": TP_4,
    "bert-mae-nested+four": TP_4,
    "gpt2-moe": FSDP_2_EP_2 | {"dp_replicate_size": 2},
    "t5-moa": TP_2_FSDP_2,
}
# of the night
MORE_ON_2 = {
    "t5-mha": FSDP_2,
    "gpt2-mae-1+cross": TP_2,
    "bert-cct-plain": TP_2,
    "gpt2-mae-nested": FSDP_2,
    "t5-moa-moe-cct": TP_2_EP_2,
    "t5-moe-gated-gelu": FSDP_2_EP_2,
    "t5-mae-gated-gelu": TP_2,
    "t5-moa+groups": TP_2,
    "gpt2-mae-nested+uneven": TP_2,
}
MORE_ON_4 = {
    "gpt2-moa": TP_4,
    "gpt2-moe+whole-experts": {"tp_size": 4, "ep_size": 4},
    "t5-moa-moe-cct+sharded": {"fsdp_size": 4, "ep_size": 4},
    "gpt2-cct-plain": TP_2_FSDP_2,
    "t5-cct": TP_4,
    "t5-mae-1": HSDP,
}
ALL_ON_2 = {
    f"{case.family.name}-{name}": TP_2 for case in LANGUAGE_MODELS for name in case.family.variants
}
# processes, what they run in one launch, and when
LAUNCHES = {
    "few": (2, FEW, []),
    "two": (2, ON_2, pytest.mark.slow),
    "four": (4, ON_4, pytest.mark.slow),
    "more-two": (2, MORE_ON_2, pytest.mark.nightly),
    "more-four": (4, MORE_ON_4, pytest.mark.nightly),
    "all": (2, ALL_ON_2, pytest.mark.nightly),
}


def run(scenarios, number, folder):
    """What failed, by scenario and property; the same on every process."""
    rows = {}
    for scenario, parallel in scenarios.items():
        family, _, variant = scenario.partition("+")[0].partition("-")
        fields = FAMILIES[family].variants[variant]
        rows[scenario] = (fields | MORE_FIELDS.get(scenario, {}), parallel)
    (folder / "scenarios.json").write_text(json.dumps(rows))
    launch_ranks(number, Path(__file__).with_name("tensor_parallel_worker.py"), folder, timeout=900)
    failed = [json.loads((folder / f"failed-{rank}.json").read_text()) for rank in range(number)]
    return {name: [each[name] for each in failed if each[name]] for name in scenarios}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a set of scenarios, which one launch runs."""
    found = {}

    def of(name, scenarios, number):
        if name not in found:
            found[name] = run(scenarios, number, tmp_path_factory.mktemp(name))
        return found[name]

    return of


@pytest.mark.parametrize(
    ("name", "number", "scenario"),
    [
        pytest.param(name, number, scenario, id=f"{name}-{scenario}", marks=marks)
        for name, (number, scenarios, marks) in LAUNCHES.items()
        for scenario in scenarios
    ],
)
def test_split_model_is_the_whole_one(name, number, scenario, results):
    assert results(name, LAUNCHES[name][1], number)[scenario] == []


# matrices of a layer that every process has whole: what decides, and norms
WHOLE = ("gate.", "router.", "control.", "norm", "Norm", "ln_", "relative_attention_bias")


@each_variant
def test_every_matrix_of_a_layer_has_a_place(case, fields):
    """In the plan of tensor parallelism, or of expert parallelism; and no name that the model lacks."""
    with torch.device("meta"):
        model = case.gated(case.config(**fields))
    # MoA's keys and values are shared by all experts
    shared = ("self.key", "self.value", "c_attn", ".k.", ".v.") if "moa" in fields.values() else ()
    plan = model.tp_plan | model.ep_plan
    for name, parameter in model.named_parameters():
        is_of_layer = any(part.isdigit() for part in name.split("."))
        if is_of_layer and parameter.ndim > 1 and not any(word in name for word in (*WHOLE, *shared)):
            assert _get_parameter_plan(name, plan) is not None, name
    model._validate_parallel_plan(plan, set(plan.values()), "tp_plan", names=_names(model))
    assert set(plan) <= _names(model)
    assert set(model.fsdp_plan) <= _names(model)


def _names(model):
    found = (*model.named_modules(), *model.named_parameters())
    return {replace_layer_number_by_wildcard(name) for name, _ in found}


class Mesh:
    """The first of some ranks."""

    def __init__(self, number):
        self.number = number

    def size(self):
        return self.number

    def get_local_rank(self):
        return 0


@pytest.mark.parametrize(
    ("fields", "number", "message"),
    [
        ({}, 3, r"num_attention_heads must be a multiple of tp_size=3 \(got 4\)"),
        (
            {"attention_type": "moa", "num_attention_experts": 6},
            4,
            r"num_attention_experts must be a multiple of tp_size=4 \(got 6\)",
        ),
        (
            {"attention_type": "moa", "num_attention_experts": 8, "num_key_value_heads": 2},
            4,
            r"num_key_value_heads must be a multiple of tp_size=4 \(got 2\)",
        ),
        (
            {"nested_budgets": [1, 0.5]},
            4,
            r"at most the heads of the smallest of nested_budgets, 2 \(got 4\): extract",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(fields, number, message):
    layer = CASE["BertModel"].build(**fields).encoder.layer[0].attention.self
    with pytest.raises(ValueError, match=message):
        layer.spread_over(TensorRanks(Mesh(number)))


def test_tied_weights_of_uneven_parts_are_refused():
    model, sizes = CASE["GPT2LMHeadModel"].build(), {"dp_size": 2, "fsdp_size": 2, "tp_size": 2}
    with pytest.raises(ValueError, match=r"vocab_size must be a multiple .* = 4 .*\(got 67\)"):
        type(model).maybe_distribute_model(model, SimpleNamespace(**sizes), Mesh(2))


def test_dealt_heads_are_not_sharded_too():
    model, sizes = CASE["BertModel"].build(nested_budgets=[1, 0.5]), {"fsdp_size": 2, "tp_size": 2}
    with pytest.raises(ValueError, match=r"must be 1 with nested_budgets, .*\(got 2 and 2\): extract"):
        type(model).maybe_distribute_model(model, SimpleNamespace(**sizes), Mesh(2))


def test_parts_that_are_dealt_in_turn():
    ranks = DealtRanks(Mesh(2))  # the first
    assert [ranks.count(number) for number in range(4)] == [0, 1, 1, 2]
    assert ranks.part(torch.arange(5), 0).tolist() == [0, 2, 4]


def test_finer_slices_where_there_are_more_ranks_than_gates():
    gates = torch.tensor([[0.25, 0.5]])
    assert TensorRanks(Mesh(4)).slices(gates).tolist() == [[0.25]]
    assert TensorRanks(Mesh(2)).slices(gates).tolist() == [[0.25]]
    assert TensorRanks(Mesh(3)).slices(gates).tolist() == [[0.25, 0.25]]


def test_experts_of_other_ranks_have_one_number():
    assert TensorRanks(Mesh(2)).own_experts(torch.tensor([[0, 5, 3, 2]]), 3).tolist() == [[0, 3, 3, 2]]
