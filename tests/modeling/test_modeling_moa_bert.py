"""What holds for every gated BERT class, whatever its mechanism."""

import copy
import io

import pytest
import torch
from common import TINY, VARIANTS, batch, randomize, tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import hf_moa
from hf_moa import (
    MoaBertConfig,
    MoaBertForMaskedLM,
    MoaBertForMultipleChoice,
    MoaBertForQuestionAnswering,
    MoaBertForSequenceClassification,
    MoaBertForTokenClassification,
    MoaBertModel,
)
from hf_moa.modeling.outputs import GatingOutput

CLASSES = [
    (MoaBertModel, BertModel, AutoModel),
    (MoaBertForMaskedLM, BertForMaskedLM, AutoModelForMaskedLM),
    (
        MoaBertForSequenceClassification,
        BertForSequenceClassification,
        AutoModelForSequenceClassification,
    ),
    (MoaBertForTokenClassification, BertForTokenClassification, AutoModelForTokenClassification),
    (MoaBertForQuestionAnswering, BertForQuestionAnswering, AutoModelForQuestionAnswering),
    (MoaBertForMultipleChoice, BertForMultipleChoice, AutoModelForMultipleChoice),
]
each_class = pytest.mark.parametrize(
    ("gated", "plain", "auto"), CLASSES, ids=[gated.__name__ for gated, _, _ in CLASSES]
)
each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())


def build(cls=MoaBertForSequenceClassification, seed=0, **fields):
    torch.manual_seed(seed)
    return randomize(cls(tiny_config(**fields)), seed=seed).eval()


def inputs_for(cls):
    ids, mask = batch()
    if cls.__name__.endswith("MultipleChoice"):
        ids, mask = (x.unsqueeze(1).repeat(1, 2, 1) for x in (ids, mask))
        ids[:, 1] = ids[:, 1].flip(-1)
    return {"input_ids": ids, "attention_mask": mask}


def labels_for(cls):
    name = cls.__name__
    if name.endswith(("MaskedLM", "TokenClassification")):
        labels = batch(seed=5)[0] % 3
        labels[0, :4] = -100
        return {"labels": labels}
    if name.endswith("QuestionAnswering"):
        return {"start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([2, 4, 1])}
    if name.endswith("MultipleChoice"):
        return {"labels": torch.tensor([0, 1, 1])}
    return {"labels": torch.tensor([0, 1, 2])}


def main_output(output):
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in output:
            return output[name]
    raise AssertionError(f"no main output among {list(output)}")


# --- the plain path is transformers' BERT ---------------------------------------------------------


@each_class
def test_plain_path_is_bert(gated, plain, auto):
    fields = TINY if gated is MoaBertForQuestionAnswering else TINY | {"num_labels": 3}
    torch.manual_seed(0)
    reference = randomize(plain(BertConfig(**fields))).eval()
    model = gated(MoaBertConfig(**fields)).eval()
    assert set(model.state_dict()) == set(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    expected = reference(**inputs_for(gated))
    torch.testing.assert_close(
        main_output(model(**inputs_for(gated))), main_output(expected), atol=0, rtol=0
    )
    if gated is not MoaBertModel:
        labels = labels_for(gated)
        torch.testing.assert_close(
            model(**inputs_for(gated), **labels).loss, reference(**inputs_for(gated), **labels).loss
        )


@each_class
def test_bert_checkpoint_loads_into_mae_unchanged(gated, plain, auto, tmp_path):
    fields = TINY if gated is MoaBertForQuestionAnswering else TINY | {"num_labels": 3}
    torch.manual_seed(0)
    reference = randomize(plain(BertConfig(**fields))).eval()
    reference.save_pretrained(tmp_path)
    config = MoaBertConfig.from_pretrained(tmp_path, attention_type="mae")
    model, report = gated.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert report["missing_keys"]
    assert all(".mixture.gate." in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    torch.testing.assert_close(
        main_output(model(**inputs_for(gated))),
        main_output(reference(**inputs_for(gated))),
        atol=1e-6,
        rtol=0,
    )


def test_mae_adds_gate_keys_only():
    plain = set(MoaBertModel(tiny_config()).state_dict())
    mae = set(MoaBertModel(tiny_config(attention_type="mae")).state_dict())
    assert plain < mae
    assert all(".attention.self.mixture.gate." in name for name in mae - plain)


# --- saving, loading, initialising ----------------------------------------------------------------


@each_class
def test_auto_classes_know_every_head(gated, plain, auto):
    assert type(auto.from_config(tiny_config())) is gated


@each_variant
def test_saved_model_loads_bit_exactly(fields, tmp_path):
    model = build(**fields)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is MoaBertForSequenceClassification
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    inputs = inputs_for(type(model))
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@each_variant
def test_buffers_outside_the_checkpoint_are_restored(fields, tmp_path):
    model = build(**fields)
    model.save_pretrained(tmp_path)
    loaded = MoaBertForSequenceClassification.from_pretrained(tmp_path)
    for (name, buffer), (_, other) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_config_round_trip(tmp_path):
    config = tiny_config(attention_type="moa", cct_budgets=[1, 0.5], router_type="noisy_topk")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is MoaBertConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


@each_variant
@pytest.mark.parametrize("way", ["init", "from_config", "from_pretrained"])
def test_parameters_start_as_the_backbones_do(fields, way, tmp_path):
    """Normal(0, initializer_range) matrices, zero biases, unit norms; gates as documented."""
    config = tiny_config(hidden_size=64, initializer_range=0.05, **fields)
    torch.manual_seed(0)
    if way == "from_pretrained":  # an empty checkpoint: everything is missing and must be initialised
        source = BertModel(BertConfig(**TINY | {"hidden_size": 64}))
        head = {"pooler.dense.bias": source.pooler.dense.bias}
        model = MoaBertModel.from_pretrained(None, config=config, state_dict=head)
    else:
        model = {"init": MoaBertModel, "from_config": AutoModel.from_config}[way](config)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if "norm" in name.lower():
            assert torch.all(values == (0 if name.endswith("bias") else 1)), name
        elif ".gate.out." in name:
            assert torch.all(values == 0), name
        elif not config.cct_sublayer_norm and (".control.out." in name or "control_symbols" in name):
            assert torch.all(values == (4 if name.endswith("bias") else 0)), name
        elif values.ndim == 1 or name.endswith("bias"):
            assert torch.all(values == 0), name
        else:
            assert values.std().item() == pytest.approx(0.05, rel=0.25), name
            assert abs(values.mean().item()) < 0.02, name


# --- invariances ----------------------------------------------------------------------------------


@each_variant
def test_padding_changes_nothing(fields):
    model = build(MoaBertModel, **fields).double()
    ids, mask = batch()
    padded = model(ids, attention_mask=mask).last_hidden_state
    for b in range(len(ids)):
        n = int(mask[b].sum())
        alone = model(ids[b : b + 1, :n]).last_hidden_state
        torch.testing.assert_close(padded[b, :n], alone[0], atol=1e-11, rtol=0)
    other = torch.where(mask.bool(), ids, 7)
    changed = model(other, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(padded[mask.bool()], changed[mask.bool()], atol=1e-11, rtol=0)


@each_variant
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attention_implementations_agree(fields, implementation):
    model = build(MoaBertModel, attn_implementation="eager", **fields)
    ids, mask = batch(length=17)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        actual = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=3e-5, rtol=0)


@each_variant
def test_inputs_embeds_stand_for_input_ids(fields):
    model = build(MoaBertModel, **fields)
    ids, mask = batch()
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(
        model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state,
        model(ids, attention_mask=mask).last_hidden_state,
    )


@each_variant
def test_checkpointing_changes_no_gradient(fields):
    gradients = []
    for checkpointing in (False, True):
        model = build(MoaBertForMaskedLM, **fields).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(1)
        inputs = inputs_for(MoaBertForMaskedLM)
        model(**inputs, **labels_for(MoaBertForMaskedLM)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        assert (gradient is None) == (checkpointed[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@each_variant
def test_every_parameter_learns(fields):
    model = build(MoaBertForMaskedLM, **fields).train()
    inputs = inputs_for(MoaBertForMaskedLM)
    labels = inputs["input_ids"].clone()
    model(**inputs, labels=labels, budget=None).loss.backward()
    for name, parameter in model.named_parameters():
        unused = name.endswith("token_type_embeddings.weight")  # the batch has one type of two
        assert unused or parameter.grad.abs().max() > 0, name


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_and_runs(fields, dtype, tmp_path):
    model = build(**fields)
    model.save_pretrained(tmp_path)
    half = MoaBertForSequenceClassification.from_pretrained(tmp_path, dtype=dtype)
    assert half.dtype == dtype
    for name, tensor in half.state_dict().items():
        if "gate.norm" in name and tensor.is_floating_point():
            assert tensor.dtype == torch.float32, name
    logits = half(**inputs_for(type(half))).logits
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["mha", "mae-1", "moa", "cct-plain"])
def test_half_precision_computes_the_same_function(name):
    """Variants without decisions that rounding can turn; MoA keeps all its experts here."""
    fields = VARIANTS[name]
    if name == "moa":
        fields = fields | {"num_attention_experts": 4}
    torch.manual_seed(0)
    model = MoaBertModel(tiny_config(**fields)).eval()
    half = copy.deepcopy(model).to(torch.bfloat16)
    inputs = inputs_for(MoaBertModel)
    expected = model(**inputs).last_hidden_state
    error = (half(**inputs).last_hidden_state.float() - expected).abs().max()
    assert expected.abs().max() > 1
    assert error < 0.1


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(fields, dtype):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = MoaBertForSequenceClassification(tiny_config(**fields | no_dropout)).train()
    inputs = inputs_for(type(model)) | labels_for(type(model))
    torch.manual_seed(1)
    expected = model(**inputs).loss
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0.02)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@each_variant
def test_models_can_be_pickled_and_copied(fields):
    model = build(**fields)
    inputs = inputs_for(type(model))
    expected = model(**inputs).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(**inputs).logits, expected)
    model(**inputs, output_hidden_states=True)  # transformers installs its recording hooks
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, expected)


@each_variant
def test_is_captured_as_one_graph(fields):
    torch._dynamo.reset()
    model = build(**fields)
    inputs = inputs_for(type(model))
    budgets = [None, 0.5] if model.config.has_cct else [None]
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for budget in budgets:
            expected = model(**inputs, budget=budget).logits
            assert torch.equal(compiled(**inputs, budget=budget).logits, expected)


@pytest.mark.slow
@each_variant
def test_training_step_is_captured_as_one_graph(fields):
    torch._dynamo.reset()
    no_dropout = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "mae_gate_dropout": 0.0,
        "router_type": "topk",
        "router_load_loss_coef": 0.0,
    }
    if "cct_budgets" in fields:
        fields = fields | {"cct_budgets": [0.5]}
    model = build(**fields | no_dropout).train()
    model.set_experts_implementation("grouped_mm")
    inputs = inputs_for(type(model)) | labels_for(type(model))
    model(**inputs).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model = build(**fields | no_dropout).train()
    model.set_experts_implementation("grouped_mm")
    torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae-1", "moa", "moe", "mae-cct"])
def test_compiled_model_computes_the_same(name):
    torch._dynamo.reset()
    model = build(**VARIANTS[name])
    inputs = inputs_for(type(model))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)


# --- outputs --------------------------------------------------------------------------------------


def test_outputs_carry_gating_only_where_asked():
    model = build(attention_type="mae", cct_budgets=[1, 0.5])
    inputs = inputs_for(type(model))
    plain = model(**inputs)
    assert plain.expert_weights is None
    assert plain.cct_gates is None
    output = model(**inputs, output_expert_weights=True, output_cct_gates=True)
    assert [tuple(w.shape) for w in output.expert_weights] == [(3, 4)] * 2
    for gates in output.cct_gates:
        shapes = {name: tuple(gate.shape) for name, gate in gates.items()}
        assert shapes == {"kv": (3, 9), "query": (3, 9), "ffn": (3, 9, 4)}
    for weights in output.expert_weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_config_can_ask_for_gating_outputs():
    model = build(attention_type="moa", output_router_logits=True)
    inputs = inputs_for(type(model))
    assert len(model(**inputs).router_logits) == 2
    assert model(**inputs, output_router_logits=False).router_logits is None


@each_variant
def test_hidden_states_and_attentions(fields):
    model = build(attn_implementation="eager", **fields)
    output = model(**inputs_for(type(model)), output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in output.hidden_states] == [(3, 9, 32)] * 3
    assert [tuple(a.shape) for a in output.attentions] == [(3, 4, 9, 9)] * 2
    for attention in output.attentions:
        torch.testing.assert_close(attention.sum(-1), torch.ones(3, 4, 9))


@each_variant
def test_return_dict_false_gives_a_tuple(fields):
    model = build(**fields)
    inputs = inputs_for(type(model))
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], model(**inputs).logits)


def test_embeddings_resize_with_the_tied_head():
    model = build(MoaBertForMaskedLM, attention_type="mae")
    model.resize_token_embeddings(80)
    assert model.config.vocab_size == 80
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    logits = model(torch.tensor([[70, 79, 3]])).logits
    assert logits.shape == (1, 3, 80)


@pytest.mark.parametrize(
    ("num_labels", "problem", "labels"),
    [
        (1, "regression", torch.tensor([0.1, 0.5, 2.0])),
        (3, "single_label_classification", torch.tensor([0, 2, 1])),
        (3, "multi_label_classification", torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 1]])),
    ],
)
def test_problem_types_follow_bert(num_labels, problem, labels):
    torch.manual_seed(0)
    fields = TINY | {"num_labels": num_labels}
    reference = randomize(BertForSequenceClassification(BertConfig(**fields))).eval()
    model = MoaBertForSequenceClassification(MoaBertConfig(**fields)).eval()
    model.load_state_dict(reference.state_dict())
    inputs = inputs_for(type(model))
    torch.testing.assert_close(
        model(**inputs, labels=labels).loss, reference(**inputs, labels=labels).loss
    )
    assert model.config.problem_type == problem


@pytest.mark.parametrize("cls", [gated for gated, _, _ in CLASSES[1:]], ids=lambda cls: cls.__name__)
def test_every_head_adds_the_auxiliary_loss_in_training_alone(cls):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    fields = {} if cls is MoaBertForQuestionAnswering else {"num_labels": 3}
    config = tiny_config(attention_type="moa", **no_dropout | {"num_labels": 2} | fields)
    model = randomize(cls(config)).eval()
    inputs = inputs_for(cls) | labels_for(cls)
    task = model(**inputs).loss
    output = model.train()(**inputs)
    assert output.aux_loss > 0
    torch.testing.assert_close(output.loss, task + output.aux_loss)


@pytest.mark.parametrize("name", ["moa", "moa-noisy", "moe", "moe-noisy", "moa-moe-cct"])
def test_padding_counts_in_no_loss_of_a_model(name):
    model = build(MoaBertModel, **VARIANTS[name]).double()
    ids, mask = batch()
    losses = model(ids, attention_mask=mask).aux_losses
    other = model(torch.where(mask.bool(), ids, 7), attention_mask=mask).aux_losses
    wider = torch.nn.functional.pad(ids, (0, 5)), torch.nn.functional.pad(mask, (0, 5))
    padded = model(wider[0], attention_mask=wider[1]).aux_losses
    assert losses
    for term, loss in losses.items():
        torch.testing.assert_close(other[term], loss, atol=1e-11, rtol=0, msg=term)
        torch.testing.assert_close(padded[term], loss, atol=1e-11, rtol=0, msg=term)


def test_moe_losses_are_the_mean_over_cct_parts():
    model = build(MoaBertModel, ffn_type="moe", cct_budgets=[1], num_hidden_layers=1)
    seen = []
    for part in model.encoder.layer[0].feed_forward.parts:
        part.router.register_forward_hook(lambda m, a, routing: seen.append(routing.losses))
    ids, mask = batch()
    total = model(ids, attention_mask=mask).aux_losses["router_z_loss"]
    torch.testing.assert_close(total, torch.stack([losses["router_z_loss"] for losses in seen]).mean())


def test_pre_norm_normalises_the_input_of_each_sublayer():
    model = build(MoaBertModel, pre_norm=True).double()
    plain = build(MoaBertModel).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids, _ = batch()
    x = model.embeddings(ids)
    for layer, other in zip(model.encoder.layer, plain.encoder.layer, strict=True):
        attention, norm = other.attention, layer.attention.output.LayerNorm
        result = attention.self(norm(x))
        x = x + attention.self.mixture.output(attention.output.dense, result.context, result.mix)
        x = x + other.output.dense(other.intermediate(layer.output.LayerNorm(x)))
    expected = model.encoder.LayerNorm(x)
    torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("where", ["attention_probs_dropout_prob", "mae_gate_dropout"])
def test_dropout_works_in_training(where):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "mae_gate_dropout": 0.0}
    ids, _ = batch()
    for fields, differs in ((off, False), (off | {where: 0.5}, True)):
        model = build(MoaBertModel, attention_type="mae", **fields).train()
        first, second = (model(ids).last_hidden_state for _ in range(2))
        assert torch.equal(first, second) != differs


def test_reentrant_checkpointing_is_refused_where_it_would_drop_losses():
    reentrant = {"use_reentrant": True}
    build(attention_type="mae").activation_checkpointing_enable(reentrant)
    for fields in ({"attention_type": "moa"}, {"ffn_type": "moe"}, {"cct_budgets": [1]}):
        with pytest.raises(ValueError, match="reentrant"):
            build(**fields).activation_checkpointing_enable(reentrant)


def test_predictions_ignore_every_gating_output():
    fields = set(GatingOutput.__dataclass_fields__)
    assert fields <= set(tiny_config().keys_to_ignore_at_inference)


def test_tokenizer_of_a_gated_checkpoint_needs_its_vocabulary_alone(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhead\n")
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("head") == ["head"]


# --- losses under accumulation --------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls", [MoaBertForMaskedLM, MoaBertForTokenClassification], ids=lambda cls: cls.__name__
)
def test_parts_of_a_batch_sum_to_its_task_loss(cls):
    model = build(cls)
    inputs, labels = inputs_for(cls), labels_for(cls)["labels"]
    total = (labels != -100).sum()
    whole = model(**inputs, labels=labels).loss
    parts = [
        model(
            input_ids=inputs["input_ids"][b : b + 1],
            attention_mask=inputs["attention_mask"][b : b + 1],
            labels=labels[b : b + 1],
            num_items_in_batch=total,
        ).loss
        for b in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_auxiliary_loss_is_weighted_by_its_share_of_the_batch():
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build(MoaBertForMaskedLM, attention_type="moa", **no_dropout).train()
    inputs, labels = inputs_for(MoaBertForMaskedLM), labels_for(MoaBertForMaskedLM)["labels"]
    count = int((labels != -100).sum())
    output = model(**inputs, labels=labels)
    half = model(**inputs, labels=labels, num_items_in_batch=2 * count)
    torch.testing.assert_close(half.loss, output.loss / 2)
    torch.testing.assert_close(half.aux_loss, output.aux_loss)


# --- as a decoder ---------------------------------------------------------------------------------

DECODERS = {name: fields for name, fields in VARIANTS.items() if name != "mae-1"} | {
    "mae-1-window-3": {"attention_type": "mae", "mae_gate_window": 3},
    "mae-1-all": {"attention_type": "mae", "mae_gate_window": None},
}
each_decoder = pytest.mark.parametrize("fields", DECODERS.values(), ids=DECODERS.keys())


def decoder(**fields):
    return build(MoaBertModel, is_decoder=True, **fields).double()


@each_decoder
def test_no_gate_of_a_decoder_sees_the_future(fields):
    model = decoder(**fields)
    ids, _ = batch(length=12)
    before = model(ids, use_cache=False).last_hidden_state
    for t in (3, 8):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 11) % 60 + 5
        after = model(changed, use_cache=False).last_hidden_state
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert not torch.allclose(after[:, t:], before[:, t:])


@each_decoder
def test_cached_decoding_equals_the_full_forward(fields):
    model = decoder(**fields)
    ids, _ = batch(length=12)
    full = model(ids, use_cache=False).last_hidden_state
    cache, steps = None, []
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:9], ids[:, 9:12]):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, atol=1e-12, rtol=0)


@each_decoder
def test_left_padded_cached_decoding_equals_each_row_alone(fields):
    model = decoder(**fields)
    ids, _ = batch(batch_size=2, length=12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, steps = None, []
    for start, end in ((0, 7), (7, 8), (8, 12)):
        output = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        steps.append(output.last_hidden_state)
    alone = model(ids[1:, 4:], use_cache=False).last_hidden_state
    torch.testing.assert_close(torch.cat(steps, dim=1)[1, 4:], alone[0], atol=1e-11, rtol=0)


@each_decoder
def test_cross_attention_is_cached_and_counted(fields):
    model = decoder(add_cross_attention=True, **fields)
    ids, _ = batch(length=9)
    source = torch.randn(3, 6, 32, dtype=torch.float64)
    source_mask = torch.ones(3, 6, dtype=torch.long)
    source_mask[1, 4:] = 0
    encoder = {"encoder_hidden_states": source, "encoder_attention_mask": source_mask}
    full = model(ids, use_cache=False, output_cct_gates=True, **encoder)
    cache, steps = None, []
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:9]):
        output = model(part, past_key_values=cache, use_cache=True, **encoder)
        cache = output.past_key_values
        steps.append(output.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, dim=1), full.last_hidden_state, atol=1e-12, rtol=0)
    if model.config.has_cct:
        assert full.cct_gates[0]["cross_kv"].shape == (3, 6)
        assert full.cct_gates[0]["cross_query"].shape == (3, 9)
        assert torch.isfinite(output.compute_fraction).all()
    masked = source.clone()
    masked[1, 4:] = 9.0
    other = model(ids, use_cache=False, encoder_hidden_states=masked, encoder_attention_mask=source_mask)
    torch.testing.assert_close(other.last_hidden_state, full.last_hidden_state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["mae-2", "mae-cct", "cct"])
def test_cache_can_be_reordered_cropped_and_repeated(name):
    model = decoder(**VARIANTS[name])
    ids, _ = batch(length=12)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    cache.crop(-2)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    actual = model(ids[order, 7:12], past_key_values=cache, use_cache=True).last_hidden_state
    full = model(ids[order], use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, full[:, 7:12], atol=1e-12, rtol=0)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    twice = ids.repeat_interleave(2, dim=0)
    actual = model(twice[:, 9:], past_key_values=cache, use_cache=True).last_hidden_state
    full = model(twice, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, full[:, 9:], atol=1e-12, rtol=0)
    rows = torch.tensor([1, 4])
    cache = model(twice[:, :9], use_cache=True).past_key_values
    cache.batch_select_indices(rows)
    actual = model(twice[rows, 9:], past_key_values=cache, use_cache=True).last_hidden_state
    torch.testing.assert_close(actual, full[rows, 9:], atol=1e-12, rtol=0)
    cache.reset()
    actual = model(ids[:, :4], past_key_values=cache, use_cache=True).last_hidden_state
    full = model(ids[:, :4], use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, full, atol=1e-12, rtol=0)


@each_decoder
def test_given_cache_is_used_whatever_use_cache_says(fields):
    model = decoder(**fields)
    ids, _ = batch(length=12)
    cache = model(ids[:, :7], use_cache=True).past_key_values
    output = model(ids[:, 7:], past_key_values=cache, use_cache=False)
    full = model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, full[:, 7:], atol=1e-12, rtol=0)
    assert output.past_key_values is None


def test_public_names():
    assert set(hf_moa.__all__) >= {gated.__name__ for gated, _, _ in CLASSES} | {
        "MoaBertConfig",
        "upcycle",
    }
    for name in hf_moa.__all__:
        assert getattr(hf_moa, name) is not None
