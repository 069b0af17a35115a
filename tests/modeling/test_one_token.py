"""A classifier's last layer computes the one token that the head reads: the same logits, less work."""

import pytest
import torch
from common import VARIANTS
from families import CASE, CASES
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

READERS = [
    CASE[name]
    for name in (
        "BertForSequenceClassification",
        "BertForMultipleChoice",
        "GPT2ForSequenceClassification",
    )
]
READER = {case.family.name: case for case in reversed(READERS)}
each_reader = pytest.mark.parametrize("case", READERS, ids=lambda case: case.plain_name)


def last_layer(model):
    stack = model.bert.encoder.layer if model.config.model_type == "moa_bert" else model.transformer.h
    return stack[-1]


def tokens_computed(model, **inputs):
    """How many tokens of each sequence leave the last layer, and the model's output."""
    seen = []
    hook = last_layer(model).register_forward_hook(lambda module, args, y: seen.append(y[0].shape[1]))
    with torch.no_grad():
        output = model(**inputs)
    hook.remove()
    assert len(seen) == 1
    return seen[0], output


def of_all_tokens(model, **inputs):
    """The model's output with the last layer of all tokens."""
    number, output = tokens_computed(model, **inputs, output_hidden_states=True)
    assert number == inputs["input_ids"].shape[-1]
    return output


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(of_one, of_all):
    """Parameters that the one token does not reach may have no gradient instead of zeros."""
    for name, expected in of_all.items():
        actual = of_one.get(name, torch.zeros_like(expected))
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=0, msg=name)


each_variant_of_readers = pytest.mark.parametrize(
    ("reader", "fields"),
    [
        pytest.param(reader, fields, id=f"{family}-{name}")
        for family, reader in READER.items()
        for name, fields in reader.family.variants.items()
        if not name.endswith("noisy")  # without noise, the other
    ],
)


@pytest.mark.covering
@each_variant_of_readers
def test_logits_are_those_of_all_tokens(reader, fields):
    model, inputs = reader.build(**fields).double(), reader.inputs()
    for budget in model.config.listed_budgets or [None]:
        number, output = tokens_computed(model, **inputs, budget=budget)
        assert number == 1
        expected = of_all_tokens(model, **inputs, budget=budget)
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-12, rtol=0)


@pytest.mark.covering
@each_variant_of_readers
def test_gradients_are_those_of_all_tokens(reader, fields):
    model, inputs = reader.build(**fields).double(), reader.inputs()
    gradients = []
    for output_hidden_states in (False, True):
        model.zero_grad()
        model(**inputs, output_hidden_states=output_hidden_states).logits.square().sum().backward()
        gradients.append(gradients_of(model))
    assert_alike(*gradients)


@pytest.mark.parametrize("execution", ["sparse", "dense"])
@pytest.mark.parametrize("name", ["cct", "mae-cct", "moa-moe-cct"])
@each_reader
def test_executions_agree(case, name, execution):
    model, inputs = case.build(**VARIANTS[name], cct_execution=execution).double(), case.inputs()
    number, output = tokens_computed(model, **inputs)
    assert number == 1
    expected = of_all_tokens(model, **inputs)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-12, rtol=0)


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("name", ["mha", "mae-1", "moa", "mae-cct"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["right", "left", "none", "without a mask"])
@each_reader
def test_padding(case, name, attention, padding):
    model = case.build(**VARIANTS[name], attn_implementation=attention).double()
    inputs = case.inputs()
    if padding == "left":
        inputs = {key: x.flip(-1) for key, x in inputs.items()}
    elif padding == "none":
        inputs = {"input_ids": inputs["input_ids"].clamp(min=5)}
    elif padding == "without a mask":
        del inputs["attention_mask"]
    number, output = tokens_computed(model, **inputs)
    assert number == 1
    torch.testing.assert_close(output.logits, of_all_tokens(model, **inputs).logits, atol=1e-12, rtol=0)


@each_reader
def test_masks_of_pairs(case):
    model, inputs = case.build().double(), case.inputs()
    length = inputs["input_ids"].shape[-1]
    batch = inputs["input_ids"].numel() // length
    mask = (torch.rand(batch, 1, length, length) < 0.6) | torch.eye(length, dtype=torch.bool)
    if case.task == "MultipleChoice":
        mask = mask.unflatten(0, (-1, 2))
    inputs["attention_mask"] = mask
    number, output = tokens_computed(model, **inputs)
    assert number == 1
    torch.testing.assert_close(output.logits, of_all_tokens(model, **inputs).logits, atol=1e-12, rtol=0)


def test_a_classifier_that_is_a_decoder():
    case = READER["bert"]
    model, inputs = case.build(attention_type="mae", is_decoder=True).double(), case.inputs()
    number, output = tokens_computed(model, **inputs)
    assert number == 1
    torch.testing.assert_close(output.logits, of_all_tokens(model, **inputs).logits, atol=1e-12, rtol=0)


@each_reader
def test_chunks_of_the_feed_forward_layer(case):
    model, inputs = case.build(chunk_size_feed_forward=3).double(), case.inputs()
    number, output = tokens_computed(model, **inputs)
    assert number == 1
    torch.testing.assert_close(output.logits, of_all_tokens(model, **inputs).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions", "output_expert_weights"])
@each_reader
def test_all_tokens_where_they_are_asked_for(case, asked):
    model, inputs = case.build(attention_type="mae", attn_implementation="eager"), case.inputs()
    length = inputs["input_ids"].shape[-1]
    assert tokens_computed(model, **inputs)[0] == 1
    number, output = tokens_computed(model, **inputs, **{asked: True})
    assert number == length
    if asked == "output_hidden_states":
        assert output.hidden_states[-1].shape[1] == length
    if asked == "output_attentions":
        assert output.attentions[-1].shape[-2] == length
    setattr(model.config, asked, True)
    assert tokens_computed(model, **inputs)[0] == length


@each_reader
def test_all_tokens_in_training(case):
    model, inputs = case.build().train(), case.inputs()
    assert tokens_computed(model, **inputs)[0] == inputs["input_ids"].shape[-1]


@pytest.mark.parametrize("name", ["cct", "mae-cct", "moa-moe-cct"])
@each_reader
def test_one_token_in_training_where_computing_is_counted(case, name):
    """With CCT; gradients too are those of all tokens."""
    fields = VARIANTS[name] | case.family.no_dropout
    model, inputs = case.build(**fields).double().train(), case.inputs()
    seen, gradients = [], []
    last_layer(model).register_forward_hook(lambda module, args, y: seen.append(y[0].shape[1]))
    for asked in (False, True):
        model.zero_grad()
        output = model(**inputs, **case.labels(), budget=0.5, output_hidden_states=asked)
        output.task_loss.backward()
        gradients.append(gradients_of(model))
    assert seen == [1, inputs["input_ids"].shape[-1]]
    assert_alike(*gradients)


@each_reader
def test_training_holds_budgets_to_what_eval_computes(case):
    """Gates that are open do not depend on the mode: the same compute is counted."""
    model = case.build(**VARIANTS["cct"]).double()
    model.set_cct_gates(1.0)
    expected = tokens_computed(model, **case.inputs())[1].compute_cost
    for network in model.modules():
        if getattr(network, "gate_kind", None) == "cct":
            torch.nn.init.zeros_(network.out.weight)
            torch.nn.init.constant_(network.out.bias, 100.0)
    model.set_cct_gates(None)
    number, output = tokens_computed(model.train(), **case.inputs())
    assert number == 1
    torch.testing.assert_close(output.compute_cost, expected)


@pytest.mark.parametrize("name", ["moa", "moe", "cct"])
@each_reader
def test_labels_change_nothing(case, name):
    model, inputs = case.build(**VARIANTS[name]).double(), case.inputs()
    number, output = tokens_computed(model, **inputs, **case.labels())
    assert number == 1
    expected = of_all_tokens(model, **inputs, **case.labels())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-12, rtol=0)
    _, without = tokens_computed(model, **inputs)
    assert torch.equal(output.logits, without.logits)
    if name == "cct":
        assert torch.equal(output.compute_fraction, without.compute_fraction)


@each_reader
def test_attention_experts_are_counted_for_all_tokens(case):
    """Routers of attention see all tokens, as before."""
    model, inputs = case.build(attention_type="moa", num_attention_experts=6, head_dim=12), case.inputs()
    actual = tokens_computed(model, **inputs)[1].batch_terms
    expected = of_all_tokens(model, **inputs).batch_terms
    assert torch.equal(actual["expert_load"]["attention"], expected["expert_load"]["attention"])
    torch.testing.assert_close(actual["aux_loss"], expected["aux_loss"])


def test_compute_counts_the_token_that_is_computed():
    """All gates open: a share of 1, of less."""
    model = READER["gpt2"].build(**VARIANTS["cct-full-plain"])
    inputs = READER["gpt2"].inputs()
    _, output = tokens_computed(model, **inputs)
    expected = of_all_tokens(model, **inputs)
    assert output.compute_fraction.eq(1).all()
    assert expected.compute_fraction.eq(1).all()
    assert (output.compute_cost < expected.compute_cost).all()


@pytest.mark.parametrize("name", ["mae-1", "mae-cct", "mae-nested"])
def test_the_cache_holds_all_tokens(name):
    case = READER["gpt2"]
    model, inputs = case.build(**VARIANTS[name]).double(), case.inputs()
    number, output = tokens_computed(model, **inputs, use_cache=True)
    assert number == 1
    caches = [output.past_key_values, of_all_tokens(model, **inputs, use_cache=True).past_key_values]
    for cache in caches:
        assert cache.get_seq_length(1) == inputs["input_ids"].shape[-1]
    following = inputs["input_ids"][:, :2]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(following)], dim=1)
    with torch.no_grad():
        outputs = [
            model(following, attention_mask=mask, past_key_values=cache).logits for cache in caches
        ]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("position", [2, -1, torch.tensor([0, 3, 5])])
@pytest.mark.parametrize("name", ["mha", "mae-1", "moa", "mae-cct", "moa-moe-cct"])
@pytest.mark.parametrize("model_class", ["BertModel", "GPT2Model"])
def test_base_models_take_any_token(model_class, name, position):
    case = CASE[model_class]
    model, inputs = case.build(**VARIANTS[name]).double(), case.inputs()
    with torch.no_grad():
        output = model(**inputs, last_layer_token=position).last_hidden_state
        all_tokens = model(**inputs).last_hidden_state
    if isinstance(position, int):
        position = torch.full((len(output),), position % all_tokens.shape[1])
    expected = all_tokens[torch.arange(len(output)), position].unsqueeze(1)
    # a padding token's output means nothing
    real = inputs["attention_mask"].gather(1, position[:, None]).bool().squeeze(1)
    torch.testing.assert_close(output[real], expected[real], atol=1e-12, rtol=0)


@pytest.mark.parametrize("model_class", ["BertModel", "GPT2Model"])
def test_refuses_what_is_no_token(model_class):
    case = CASE[model_class]
    model, inputs = case.build(), case.inputs()
    length = inputs["input_ids"].shape[1]
    with pytest.raises(ValueError, match=rf"position among {length} tokens \(got {length}\)"):
        model(**inputs, last_layer_token=length)
    with pytest.raises(ValueError, match=r"a position for each sequence \(got a tensor \[1\]\)"):
        model(**inputs, last_layer_token=torch.tensor([0]))

    with pytest.raises(ValueError, match=r"positions among 9 tokens \(got \[0, 9, 0\]\)"):
        model(**inputs, last_layer_token=torch.tensor([0, 9, 0]))


@pytest.fixture
def other_implementation(monkeypatch):
    """The name of an attention function whose masks need not be tensors."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "other", sdpa_attention_forward)
    return "other"


def test_other_implementations_are_refused_one_token(other_implementation):
    case = CASE["BertModel"]
    model, inputs = case.build(attn_implementation=other_implementation), case.inputs()
    message = r"must be of sdpa, eager .* \(got 'other'\)"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(**inputs, last_layer_token=0)


def test_other_implementations_compute_all_tokens(other_implementation):
    case = READER["bert"]
    model, inputs = case.build(attn_implementation=other_implementation), case.inputs()
    assert tokens_computed(model, **inputs)[0] == inputs["input_ids"].shape[1]


def test_refuses_a_token_behind_a_cache():
    case = CASE["GPT2Model"]
    model, inputs = case.build(), case.inputs()
    cache = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be None with past_key_values"):
        model(inputs["input_ids"][:, :1], past_key_values=cache, last_layer_token=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae-1", "mae-cct"])
@each_reader
def test_compiles_whole(case, name):
    torch.compiler.reset()
    model, inputs = case.build(**VARIANTS[name]).double(), case.inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("case", [c for c in CASES if c not in READERS], ids=lambda c: c.plain_name)
def test_no_other_class_leaves_tokens_out(case):
    model = case.build()
    assert not getattr(model, "only_token_read", lambda inputs: {})(case.inputs())
