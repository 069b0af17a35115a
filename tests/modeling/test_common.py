"""What holds for every class of every family, whatever its mechanism."""

import inspect
from typing import Unpack, get_type_hints

import pytest
import torch
from common import VARIANTS
from families import (
    CASE,
    CASES,
    LANGUAGE_MODELS,
    each_class,
    each_class_and_mechanism,
    each_family,
    each_head,
    each_variant,
    main_output,
)
from transformers import AutoModel, Cache, Trainer, TrainingArguments
from transformers.utils import find_labels
from transformers.utils.generic import TransformersKwargs

import hf_moa
from hf_moa.modeling.core.outputs import GatingOutput, GatingSeq2SeqOutput

# --- the plain path is transformers' own ----------------------------------------------------------


@each_class
def test_plain_path_is_the_backbone(case):
    reference = case.build_plain()
    model = case.gated(case.config()).eval()
    assert set(model.state_dict()) == set(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    inputs, labels = case.inputs(), case.labels()
    expected = main_output(reference(**inputs))
    # with hidden states of all tokens, which a classifier leaves out otherwise
    whole = main_output(model(**inputs, output_hidden_states=True))
    torch.testing.assert_close(whole, expected, atol=0, rtol=0)
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-6, rtol=1e-6)
    if labels:
        actual, expected = model(**inputs, **labels).loss, reference(**inputs, **labels).loss
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@each_class
def test_other_arguments_are_typed_as_transformers_types_them(case):
    """Its tests and tools ask for it."""
    forward = case.gated.forward
    shown = inspect.signature(forward).parameters["kwargs"].annotation
    hints = get_type_hints(inspect.unwrap(forward))
    assert hints.get("kwargs", shown) == Unpack[TransformersKwargs]


@each_class
def test_modules_of_the_backbone_are_at_work(case):
    """Who hooks or replaces one, say a dropout, finds it called."""
    inputs = case.inputs() | case.labels()
    plain, gated = (_called(model, inputs) for model in (case.build_plain(), case.gated(case.config())))
    assert any("dropout" in name for name in plain)
    assert plain <= gated


def _called(model, inputs):
    names = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *args, name=name: names.add(name))
    model.train()(**inputs)
    return names


@each_class
def test_auto_classes_know_every_class(case):
    assert type(case.auto.from_config(case.config())) is case.gated


# --- invariances ----------------------------------------------------------------------------------


@each_class_and_mechanism
def test_padding_and_batch_change_nothing(case, fields):
    _assert_padding_and_batch_change_nothing(case, fields)


@each_variant
def test_padding_and_batch_change_nothing_in_any_variant(case, fields):
    _assert_padding_and_batch_change_nothing(case, fields)


def _assert_padding_and_batch_change_nothing(case, fields):
    model = case.build(**fields).double()
    inputs = case.inputs()
    mask = inputs["attention_mask"]
    together = main_output(model(**inputs))
    longest = mask.shape[-1]
    for b in range(len(mask)):
        n = int(mask[b].flatten(0, -2).sum(-1).max() if mask.ndim == 3 else mask[b].sum())
        row = {
            name: x[b : b + 1] if name.startswith("decoder") else x[b : b + 1, ..., :n]
            for name, x in inputs.items()
        }
        alone = main_output(model(**row))
        per_token = together.ndim > 1 and together.shape[1] == longest
        expected = together[b, :n] if per_token else together[b]
        torch.testing.assert_close(alone[0], expected, atol=1e-10, rtol=0)


@each_variant
@pytest.mark.parametrize(
    "implementation", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.nightly)]
)
def test_attention_implementations_agree(case, fields, implementation):
    # T5's scores are not scaled: small weights keep float32 rounding small
    model = case.build(attn_implementation="eager", noise=0.05, **fields)
    inputs = case.inputs(length=17)
    with torch.no_grad():
        expected = model(**inputs)
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        actual = model(**inputs)
    real = inputs["attention_mask"].bool()
    if case.family.name == "t5":
        real = torch.ones_like(inputs["decoder_input_ids"], dtype=torch.bool)
    scale = expected.logits[real].abs().max().item()
    torch.testing.assert_close(actual.logits[real], expected.logits[real], atol=1e-5 * scale, rtol=0)


@each_class_and_mechanism
def test_inputs_embeds_stand_for_input_ids(case, fields):
    if case.task == "MultipleChoice" or case.plain_name in (
        "GPT2ForSequenceClassification",  # finds the last token by its id
        "T5ForSequenceClassification",
        "T5ForQuestionAnswering",  # the decoder reads the ids
    ):
        pytest.skip("needs input_ids")
    model = case.build(**fields)
    inputs = case.inputs()
    expected = main_output(model(**inputs))
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    torch.testing.assert_close(main_output(model(**inputs)), expected)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(**case.inputs() | inputs)


# --- training -------------------------------------------------------------------------------------


@each_variant
def test_checkpointing_changes_no_gradient(case, fields):
    gradients = []
    for checkpointing in (False, True):
        model = case.build(**fields).double().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(1)
        model(**case.inputs(), **case.labels()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        assert (gradient is None) == (checkpointed[name] is None), name
        if gradient is not None:
            limit = 1e-11 * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(checkpointed[name], gradient, atol=limit, rtol=1e-9, msg=name)


@each_variant
def test_every_parameter_learns(case, fields):
    model = case.build(**fields).train()
    model(**case.inputs(), **case.labels()).loss.backward()
    # one batch has one token type of two, and may not draw every pair of budgets
    unused = ("token_type_embeddings.weight",)
    for name, parameter in model.named_parameters():
        assert name.endswith(unused) or parameter.grad.abs().max() > 0, name


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(case, fields, dtype):
    torch.manual_seed(0)
    model = case.gated(case.config(**fields | case.family.no_dropout)).train()
    inputs = case.inputs() | case.labels()
    torch.manual_seed(1)
    expected = model(**inputs).loss
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0.02)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@each_head
def test_every_head_adds_the_auxiliary_loss_in_training_alone(case):
    model = case.build(attention_type="moa", **case.family.no_dropout)
    inputs = case.inputs() | case.labels()
    task = model(**inputs).loss
    if case.plain_name == "GPT2ForTokenClassification":
        model.dropout.p = 0.0  # GPT-2's configuration has no field for it
    output = model.train()(**inputs)
    assert output.aux_loss > 0
    torch.testing.assert_close(output.loss, task + output.aux_loss)


@each_head
def test_auxiliary_loss_is_part_of_the_loss_without_its_gradient_too(case):
    model = case.build(attention_type="moa", **case.family.no_dropout).train()
    if case.plain_name == "GPT2ForTokenClassification":
        model.dropout.p = 0.0
    inputs = case.inputs() | case.labels()
    expected = model(**inputs)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    for output in (model(**inputs), torch.no_grad()(model)(**inputs)):
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(output.task_loss, expected.task_loss)


@each_family
def test_auxiliary_loss_of_no_weight_is_zero(case):
    fields = {"attention_type": "moa", "router_balance_loss_coef": 0.0, "router_z_loss_coef": 0.0}
    output = case.build(**fields).train()(**case.inputs(), **case.labels())
    assert output.aux_loss == 0
    assert min(output.aux_losses.values()) > 0
    torch.testing.assert_close(output.loss, output.task_loss)


@each_family
@pytest.mark.parametrize("fields", [{}, {"cct_budgets": [1, 0.5]}], ids=["mha", "cct"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_linear_layers_can_be_quantized(case, fields):
    model = case.build(**fields)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert any(type(part).__module__.startswith("torch.ao.nn.quantized") for part in quantized.modules())
    actual, expected = quantized(**case.inputs())[0], model(**case.inputs())[0]
    assert torch.isfinite(actual).all()
    if not fields:  # a gate's decision may change
        assert (actual - expected).abs().max() < 0.2 * expected.abs().max()


@each_head
def test_parts_of_a_batch_sum_to_its_task_loss(case):
    if not getattr(case.gated, "accepts_loss_kwargs", True):
        pytest.skip("the loss is a mean over sequences")
    model = case.build()
    inputs, labels = case.inputs(), case.labels()["labels"]
    shifted = labels[:, 1:] if case.task == "LMHead" else labels
    total = (shifted != -100).sum()
    parts = [
        model(
            **{name: x[b : b + 1] for name, x in inputs.items()},
            labels=labels[b : b + 1],
            num_items_in_batch=total,
        ).loss
        for b in range(3)
    ]
    torch.testing.assert_close(sum(parts), model(**inputs, labels=labels).loss)


@each_family
def test_auxiliary_loss_is_weighted_by_its_share_of_the_batch(case):
    model = case.build(attention_type="moa", **case.family.no_dropout).train()
    inputs, labels = case.inputs(), case.labels()["labels"]
    shifted = labels[:, 1:] if case.task == "LMHead" else labels
    count = int((shifted != -100).sum())
    output = model(**inputs, labels=labels)
    half = model(**inputs, labels=labels, num_items_in_batch=2 * count)
    torch.testing.assert_close(half.loss, output.loss / 2)
    torch.testing.assert_close(half.aux_loss, output.aux_loss)


@pytest.mark.parametrize(
    ("num_labels", "problem", "labels"),
    [
        (1, "regression", torch.tensor([0.1, 0.5, 2.0])),
        (3, "single_label_classification", torch.tensor([0, 2, 1])),
        (3, "multi_label_classification", torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 1]])),
    ],
    ids=("regression", "single-label", "multi-label"),
)
@pytest.mark.parametrize("name", ["Bert", "GPT2", "T5"])
def test_problem_types_follow_the_backbone(name, num_labels, problem, labels):
    case = CASE[f"{name}ForSequenceClassification"]
    reference = case.build_plain(num_labels=num_labels)
    model = case.gated(case.config(num_labels=num_labels)).eval()
    model.load_state_dict(reference.state_dict())
    inputs = case.inputs()
    torch.testing.assert_close(
        model(**inputs, labels=labels).loss, reference(**inputs, labels=labels).loss
    )
    assert model.config.problem_type == problem


@each_class
def test_trainer_finds_the_labels_of_the_backbone(case):
    """`Trainer` takes every parameter of `forward` with "label" in its name for one it needs."""
    assert find_labels(case.gated) == find_labels(case.plain)


# --- outputs --------------------------------------------------------------------------------------


@each_variant
def test_hidden_states_and_attentions(case, fields):
    model = case.build(attn_implementation="eager", **fields)
    output = model(**case.inputs(), output_hidden_states=True, output_attentions=True)
    lengths = {"": (9, 9)}
    if case.family.name == "t5":
        lengths = {"encoder_": (9, 9), "decoder_": (6, 6), "cross_": (6, 9)}
    for prefix, (length, keys) in lengths.items():
        if prefix != "cross_":
            states = output[f"{prefix}hidden_states"]
            assert [tuple(state.shape) for state in states] == [(3, length, 32)] * 3
        attentions = output[f"{prefix}attentions"]
        assert [tuple(a.shape) for a in attentions] == [(3, 4, length, keys)] * 2
        for attention in attentions:
            torch.testing.assert_close(attention.sum(-1), torch.ones(3, 4, length))


@each_class_and_mechanism
def test_return_dict_false_gives_a_tuple(case, fields):
    model = case.build(**fields)
    inputs = case.inputs()
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], main_output(model(**inputs)))


@each_family
def test_embeddings_resize_with_the_tied_head(case):
    model = case.build(attention_type="mae")
    model.resize_token_embeddings(80)
    assert model.config.vocab_size == 80
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    inputs = case.inputs()
    inputs["input_ids"][0, :2] = torch.tensor([70, 79])
    assert model(**inputs).logits.shape[-1] == 80


@each_family
def test_config_can_ask_for_gating_outputs(case):
    model = case.build(attention_type="moa", output_router_logits=True)
    name = "decoder_router_logits" if case.family.name == "t5" else "router_logits"
    assert len(model(**case.inputs())[name]) == 2
    assert model(**case.inputs(), output_router_logits=False).get(name) is None


def test_predictions_ignore_every_gating_output():
    for case in CASES:
        ignored = set(case.config().keys_to_ignore_at_inference)
        assert ignored >= set(GatingOutput.__dataclass_fields__) - {"loss"}
        assert ignored >= set(GatingSeq2SeqOutput.__dataclass_fields__)


@each_family
def test_reentrant_checkpointing_is_refused_where_it_would_drop_losses(case):
    reentrant = {"use_reentrant": True}
    case.build(attention_type="mae").activation_checkpointing_enable(reentrant)
    for fields in ({"attention_type": "moa"}, {"ffn_type": "moe"}, {"cct_budgets": [1]}):
        with pytest.raises(ValueError, match="reentrant"):
            case.build(**fields).activation_checkpointing_enable(reentrant)


def test_public_names():
    names = {case.gated.__name__ for case in CASES}
    configs = {case.family.config_class.__name__ for case in CASES}
    assert set(hf_moa.__all__) >= names | configs | {"upcycle"}
    for name in hf_moa.__all__:
        assert getattr(hf_moa, name) is not None


def test_base_models_are_what_automodel_gives():
    for case in LANGUAGE_MODELS:
        assert type(AutoModel.from_config(case.config())).__name__.endswith("Model")


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@each_head
def test_auxiliary_loss_is_an_entry_wherever_it_is_an_attribute(case, training, with_grad, with_labels):
    model = case.build(attention_type="moa").train(training)
    inputs = case.inputs() | (case.labels() if with_labels else {})
    with torch.set_grad_enabled(with_grad):
        output = model(**inputs)
    assert ("aux_loss" in output) == (output.aux_loss is not None) == (with_grad or with_labels)
    assert ("expert_load" in output) == (output.expert_load is not None)
    found = {**output, **output.batch_terms}  # in inference they are beside the entries
    assert found["aux_loss"] > 0
    assert found["expert_load"]


@pytest.mark.covering
@each_class
@pytest.mark.parametrize("name", ["mha", "moa", "mae-cct", "moa-moe-cct", "mae-nested"])
def test_tuples_have_as_many_entries_as_the_backbones(case, name):
    """And behind them what is asked of the gates."""
    inputs = case.inputs() | case.labels()
    plain = case.build_plain()(**inputs, return_dict=False)
    model = case.build(**VARIANTS[name])
    given = model(**inputs, return_dict=False)
    assert len(given) == len(plain)
    for one, other in zip(given, plain, strict=True):
        assert type(one) is type(other) or isinstance(other, Cache)
        assert getattr(one, "shape", None) == getattr(other, "shape", None)
    asked = model(**inputs, return_dict=False, output_expert_weights=True)
    assert (len(asked) > len(plain)) == ("mae" in name)


@each_head
def test_predictions_of_a_trainer_are_as_the_backbones(case, tmp_path):
    """Of T5 a tuple, with the encoder's states."""
    inputs = case.inputs() | case.labels()
    inputs.pop("decoder_input_ids", None)
    data = [{name: value[i] for name, value in inputs.items()} for i in range(3)]
    args = TrainingArguments(tmp_path, report_to="none", use_cpu=True, disable_tqdm=True)
    shapes = []
    for model in (case.build_plain(), case.build(**VARIANTS["mae-cct"])):
        found = Trainer(model, args).predict(data).predictions
        shapes.append([x.shape for x in found] if isinstance(found, tuple) else found.shape)
    assert shapes[0] == shapes[1]


@each_family
@pytest.mark.parametrize("name", ["moe", "moa-moe-cct"])
def test_router_logits_of_feed_forward_experts(case, name):
    model = case.build(**VARIANTS[name])
    inputs = case.inputs()
    output = model(**inputs, output_router_logits=True)
    side = "decoder_" if case.family.name == "t5" else ""
    found = output[f"{side}ffn_router_logits"]
    config = model.config
    shape = (3, 6 if side else 9, config.num_ffn_experts)
    parts = (config.cct_num_ffn_splits,) if config.has_cct else ()
    assert [tuple(x.shape) for x in found] == [(*shape[:2], *parts, shape[2])] * 2
    assert model(**inputs).get(f"{side}ffn_router_logits") is None
    if name == "moe" and not side:
        real = inputs["attention_mask"].bool()
        for logits, load in zip(found, output.expert_load["feed_forward"], strict=True):
            chosen = logits[real].topk(config.num_ffn_experts_per_token).indices
            counts = chosen.flatten().bincount(minlength=config.num_ffn_experts)
            torch.testing.assert_close(load, (counts / counts.sum()).to(load))
