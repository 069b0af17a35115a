"""Nested budgets: each one is the model whose other heads, neurons and layers are not there.

The plain form is a model of all heads and neurons whose output projections have zeros for those that a
budget leaves out, and which lacks the layers.
"""

import re

import pytest
import torch
from common import batch, randomize, tiny_config
from families import CASE, CASES
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, StaticCache

import hf_moa
from hf_moa import MoaBertConfig, MoaBertModel, MoaGPT2Config
from hf_moa.modeling.core.budgets import BudgetHolder
from hf_moa.modeling.nested.shapes import shapes_of

BUDGETS = [1, 0.5, 0.25]
FORMS = {
    "mha": {"nested_budgets": BUDGETS},
    "mae": {"attention_type": "mae", "nested_budgets": BUDGETS},
    "mae-2": {"attention_type": "mae", "mae_num_dropped_heads": 2, "nested_budgets": BUDGETS},
    "depth": {"nested_budgets": BUDGETS, "nested_layers": [2, 2, 1]},
}
each_form = pytest.mark.parametrize("form", FORMS)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.plain_name)
# one class of each backbone for all forms; the others differ in their heads only
BASES = [CASE[name] for name in ("BertModel", "GPT2Model", "T5Model")]
each_base = pytest.mark.parametrize("case", BASES, ids=lambda case: case.plain_name)
WRITERS = [CASE["GPT2LMHeadModel"], CASE["T5ForConditionalGeneration"]]
each_writer = pytest.mark.parametrize("case", WRITERS, ids=lambda case: case.plain_name)

# matrices whose inputs are heads, and whose inputs are neurons, with their input's axis
_OF_HEADS = re.compile(r".*(attention\.output\.dense|attn\.c_proj|Attention\.o)\.weight")
_OF_NEURONS = re.compile(r".*(\d\.output\.dense|mlp\.c_proj|DenseReluDense\.wo)\.weight")
_LAYER = re.compile(r"\.(\d+)\.")


def reference(case, model, budget, **fields):
    """The same model without nested budgets, what the budget leaves out removed."""
    config = model.config
    shape = shapes_of(config)[BUDGETS.index(budget)]
    plain = case.build(**fields | case.family.no_dropout).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            axis = 0 if "c_proj" in name else 1
            if _OF_HEADS.fullmatch(name):
                parameter.movedim(axis, 0)[shape.heads * config.head_dim :] = 0
            elif _OF_NEURONS.fullmatch(name):
                parameter.movedim(axis, 0)[shape.neurons :] = 0
    for module in plain.modules():
        for name in ("layer", "h", "block"):
            layers = getattr(module, name, None)
            if isinstance(layers, torch.nn.ModuleList) and hasattr(layers[0], "mae_phase"):
                setattr(module, name, torch.nn.ModuleList(layers[i] for i in shape.layers))
    return plain.train(model.training)


def numbered(name, layers):
    """The name of a parameter of the reference, whose layers are numbered without gaps."""
    found = _LAYER.search(name)
    if found is None or int(found[1]) not in layers:
        return name
    start, end = found.span(1)
    return f"{name[:start]}{layers.index(int(found[1]))}{name[end:]}"


# --- the equation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS[1:])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@each_form
@each_base
def test_equals_the_model_without_the_other_heads_neurons_and_layers(case, form, training, budget):
    fields = FORMS[form]
    model = case.build(**fields | case.family.no_dropout).double().train(training)
    without = {k: v for k, v in fields.items() if not k.startswith("nested")}
    plain = reference(case, model, budget, **without)
    inputs = case.inputs()
    actual, expected = model(**inputs, budget=budget)[0], plain(**inputs)[0]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual)
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    shape = shapes_of(model.config)[BUDGETS.index(budget)]
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if layer and int(layer[1]) not in shape.layers:
            assert not got.any(), name
            continue
        want = wanted[numbered(name, shape.layers)].grad
        want = torch.zeros_like(parameter) if want is None else want.clone()
        axis = 0 if "c_proj" in name else 1  # the removed inputs have no gradient
        if _OF_HEADS.fullmatch(name):
            want.movedim(axis, 0)[shape.heads * model.config.head_dim :] = 0
        elif _OF_NEURONS.fullmatch(name):
            want.movedim(axis, 0)[shape.neurons :] = 0
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@each_case
def test_the_full_budget_is_transformers_own_model_to_the_bit(case, implementation):
    plain = case.build_plain(attn_implementation=implementation)
    model = hf_moa.upcycle(plain, nested_budgets=BUDGETS)
    model.set_attn_implementation(implementation)
    inputs = case.inputs()
    with torch.no_grad():
        for kwargs in ({}, {"budget": 1}, {"budget": torch.ones(3)}):
            kwargs["output_hidden_states"] = True  # of all tokens, in the last layer of a classifier
            assert torch.equal(model(**inputs, **kwargs)[0], plain(**inputs)[0])


@pytest.mark.parametrize("form", ["mha", "mae"])
@each_base
def test_sequences_have_budgets_of_their_own(case, form):
    model = case.build(**FORMS[form]).double()
    inputs = case.inputs()
    budgets = torch.tensor([0.25, 1, 0.5])
    together = model(**inputs, budget=budgets)
    torch.testing.assert_close(together.budget.reshape(3, -1)[:, 0].double(), budgets.double())
    for budget in BUDGETS:
        same = model(**inputs, budget=budget)
        chosen = budgets == budget
        for name in ("compute_fraction", "compute_cost"):
            torch.testing.assert_close(together[name][chosen], same[name][chosen])
        torch.testing.assert_close(together[0][chosen], same[0][chosen], atol=1e-10, rtol=0)


GROUPED = ["BertModel", "BertForSequenceClassification", "GPT2Model", "T5EncoderModel"]


@pytest.mark.parametrize("form", ["mae", "depth"])
@pytest.mark.parametrize("name", GROUPED)
def test_sequences_of_one_budget_are_computed_together(name, form):
    """Each at its own size, and with its own layers."""
    case = CASE[name]
    model, inputs = case.build(**FORMS[form]).double(), case.inputs()
    inputs |= {"use_cache": False} if name.startswith("GPT2") else {}
    budgets = torch.tensor([0.25, 1, 0.25])
    down = next(m for n, m in model.named_modules() if _OF_NEURONS.fullmatch(f"{n}.weight"))
    sizes = []
    down.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[-1]))
    together = model(**inputs, budget=budgets)
    assert sizes == [48, 48]  # a hooked layer is called whole, once for each group
    if name.endswith("Classification"):  # one token
        assert together.logits.shape == (3, 3)
    for budget in (0.25, 1):
        chosen = budgets == budget
        same = model(**inputs, budget=budget)
        assert together.keys() == same.keys()
        for key in same:
            torch.testing.assert_close(together[key][chosen], same[key][chosen], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_budgets_have_gradients_and_hidden_states(name):
    case = CASE[name]
    model, inputs = case.build(**FORMS["mae"]).double(), case.inputs()
    inputs |= {"use_cache": False} if name.startswith("GPT2") else {}
    budgets, found = torch.tensor([0.5, 1, 0.25]), []
    for split in (True, False):
        model.zero_grad()
        if split:
            output = model(**inputs, budget=budgets, output_hidden_states=True)
            outputs = [output]
        else:
            outputs = [
                model(**{k: v[i : i + 1] if torch.is_tensor(v) else v for k, v in inputs.items()},
                      budget=budget, output_hidden_states=True)
                for i, budget in enumerate(budgets.tolist())
            ]  # fmt: skip
        sum(output[0].square().sum() for output in outputs).backward()
        states = [torch.cat(layer) for layer in zip(*(o.hidden_states for o in outputs), strict=True)]
        found.append([*states, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_sequences_that_stay_together_have_the_same_layers():
    model, inputs = CASE["BertModel"].build(**FORMS["depth"]), CASE["BertModel"].inputs()
    with pytest.raises(ValueError, match=r"different layers \(got \[1.0, 0.25\]\): call once"):
        model(**inputs, budget=torch.tensor([1, 0.25, 1]), output_hidden_states=True)
    model.train()
    model(**inputs, budget=torch.tensor([1, 0.5, 1]))  # both with two layers
    with pytest.raises(ValueError, match=r"different layers \(got \[1.0, 0.25\]\)"):
        model(**inputs, budget=torch.tensor([1, 0.25, 1]))


def test_a_cache_holds_sequences_of_several_budgets_together():
    case = CASE["GPT2LMHeadModel"]
    model, inputs = case.build(**FORMS["mha"]).double(), case.inputs()
    budgets = torch.tensor([0.25, 1, 0.25])
    cached = model(**inputs, budget=budgets, use_cache=True)
    assert cached.past_key_values.get_seq_length() == inputs["input_ids"].shape[1]
    apart = model(**inputs, budget=budgets, use_cache=False)
    assert apart.get("past_key_values") is None
    torch.testing.assert_close(cached.logits, apart.logits, atol=1e-10, rtol=0)


def test_halves_of_an_encoder_decoder_model_have_pairs_of_their_own():
    case = CASE["T5ForConditionalGeneration"]
    model, inputs = case.build(**FORMS["mae"]).double(), case.inputs()
    pairs = torch.tensor([[0.25, 1], [1, 0.5], [0.25, 0.25]])
    together = model(**inputs, budget=pairs)
    for i, pair in enumerate(pairs.tolist()):
        alone = model(**inputs, budget=tuple(pair))
        torch.testing.assert_close(together.logits[i], alone.logits[i], atol=1e-10, rtol=0)


# --- shapes and their rules -------------------------------------------------------------------------


def test_shapes_are_the_budgets_share():
    config = MoaBertConfig(
        hidden_size=384, num_attention_heads=12, intermediate_size=1536, num_hidden_layers=6,
        nested_budgets=[1, 0.5, 0.33],
    )  # fmt: skip
    assert shapes_of(config) == [
        (12, 1536, (0, 1, 2, 3, 4, 5)),
        (6, 768, (0, 1, 2, 3, 4, 5)),
        (4, 512, (0, 1, 2, 3, 4, 5)),
    ]
    config.nested_layers = [6, 3, 2]
    assert shapes_of(config)[1:] == [(12, 1536, (0, 2, 4)), (12, 1536, (0, 3))]
    config.nested_layers, config.nested_heads = [6, 4, 3], [12, 8, 3]
    config.nested_ffn_sizes = [1536, 1000, 1]
    assert shapes_of(config)[1:] == [(8, 1000, (0, 1, 3, 4)), (3, 1, (0, 2, 4))]


def test_a_gpt2_of_default_width_has_shares_of_that():
    config = MoaGPT2Config(n_embd=64, n_head=4, n_layer=2, nested_budgets=[1, 0.5])
    assert config.n_inner is None
    assert shapes_of(config)[1] == (2, 128, (0, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"nested_budgets": [0.5, 0.25]},
            r"nested_budgets must be .* the first 1 \(got \[0.5, 0.25\]\)",
        ),
        ({"nested_budgets": [1, 0.25, 0.5]}, "nested_budgets must be a list of decreasing"),
        ({"nested_budgets": [1, 1, 0.5]}, "nested_budgets must be a list of decreasing"),
        ({"nested_budgets": []}, "nested_budgets must be a list"),
        ({"nested_budgets": 0.5}, "nested_budgets must be a list"),
        ({"nested_budgets": [1, True]}, "nested_budgets must be a list"),
        ({"nested_budgets": [1, 0.99]}, "nested_budgets must differ in heads, neurons or layers"),
        ({"nested_budgets": [1, 0.5], "nested_heads": [4]}, r"nested_heads must be None or 2 integers"),
        ({"nested_budgets": [1, 0.5], "nested_heads": [3, 2]}, "nested_heads must .* the first 4"),
        ({"nested_budgets": [1, 0.5], "nested_ffn_sizes": [48, 0]}, "nested_ffn_sizes must"),
        ({"nested_budgets": [1, 0.5], "nested_layers": [2, 3]}, "nested_layers must"),
        ({"nested_budgets": [1, 0.5], "attention_type": "moa"}, "nested_budgets must be None with MoA"),
        ({"nested_budgets": [1, 0.5], "ffn_type": "moe"}, "here ffn_type is 'moe'"),
        ({"nested_budgets": [1, 0.5], "cct_budgets": [1, 0.5]}, r"here cct_budgets is \[1, 0.5\]"),
        ({"nested_bugdets": [1, 0.5]}, "did you mean nested_budgets"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_fields_without_nested_budgets_do_nothing_and_say_so(caplog):
    tiny_config(nested_heads=[4, 2])
    assert "nested_heads=[4, 2] does nothing: nested is off" in caplog.text


# --- choosing a budget ------------------------------------------------------------------------------


@each_base
def test_a_chosen_budget_holds_for_calls_that_name_none(case):
    model, inputs = case.build(**FORMS["mha"]), case.inputs()
    half = model(**inputs, budget=0.5)[0]
    model.set_budget(0.5)
    assert torch.equal(model(**inputs)[0], half)
    assert not torch.equal(model(**inputs, budget=1)[0], half)
    model.set_budget(None)
    assert torch.equal(model(**inputs)[0], model(**inputs, budget=1)[0])
    for budget in (0.7, torch.tensor([1, 0.5, 0.7])):
        with pytest.raises(ValueError, match=r"budgets.*set by `nested_budgets`"):
            model(**inputs, budget=budget)
    with pytest.raises(ValueError, match="set_cct_execution needs a model with CCT"):
        model.set_cct_execution("dense")


@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_training_draws_one_budget_for_each_call(name):
    model, inputs = CASE[name].build(**FORMS["mha"]).train(), CASE[name].inputs()
    torch.manual_seed(0)
    drawn = [model(**inputs).budget for _ in range(30)]
    assert all((each == each.flatten()[0]).all() for each in drawn)
    assert {each.flatten()[0].item() for each in drawn} == set(BUDGETS)


def test_the_halves_of_t5_take_a_pair():
    case = CASE["T5ForConditionalGeneration"]
    model, inputs = case.build(**FORMS["mae"]).double(), case.inputs()
    pair = model(**inputs, budget=(1, 0.5))
    assert pair.budget.tolist() == [[1, 0.5]] * 3
    encoded = model.encoder(inputs["input_ids"], inputs["attention_mask"], budget=1)
    again = model(**inputs, encoder_outputs=encoded, budget=0.5)
    torch.testing.assert_close(again.logits, pair.logits)
    assert pair.compute_fraction.max() < 1
    assert pair.encoder_compute_fraction.tolist() == [1, 1, 1]
    assert pair.decoder_compute_fraction.tolist() == [0.5, 0.5, 0.5]


# --- generation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("budget", BUDGETS[1:])
@pytest.mark.parametrize("form", ["mha", "mae", "depth"])
@each_writer
def test_generation_with_a_cache_equals_that_without(case, form, budget, cache):
    if cache == "static" and form.startswith("mae"):
        pytest.skip("shown for every mixture in test_gate_cache.py")
    model = case.build(noise=0.1, **FORMS[form]).double()
    inputs = {k: v for k, v in case.inputs().items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "budget": budget, "output_logits": True,
               "return_dict_in_generate": True, "num_beams": 1, "do_sample": False}  # fmt: skip
    implementation = {"cache_implementation": "static"} if cache == "static" else {}
    with_cache = model.generate(**inputs, **options, **implementation)
    without = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(
        torch.stack(with_cache.logits), torch.stack(without.logits), atol=1e-9, rtol=0
    )


@each_writer
def test_beams_and_budgets_of_each_sequence_in_generation(case):
    model = case.build(noise=0.1, **FORMS["mae"]).double()
    inputs = {k: v for k, v in case.inputs().items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 3, "do_sample": False}
    budgets = torch.tensor([0.5, 1, 0.25])
    together = model.generate(**inputs, **options, budget=budgets)
    for i, budget in enumerate(budgets.tolist()):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        alike = model.generate(**one, **options, budget=budget)
        assert torch.equal(together[i, -5:], alike[0, -5:])


def test_a_cache_holds_the_heads_of_its_budget_and_is_used_at_no_other():
    model = CASE["GPT2LMHeadModel"].build(**FORMS["depth"])
    ids, _ = batch()
    cache = model(ids, use_cache=True, budget=0.5).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 2]
    with pytest.raises(ValueError, match=r"heads, 4 .*\(got 2.*[Aa] cache is of one budget"):
        model(ids[:, :1], past_key_values=cache, budget=1)
    fields = {"nested_budgets": [1, 0.5], "nested_layers": [2, 1]}
    model = CASE["GPT2LMHeadModel"].build(**fields)
    cache = model(ids, use_cache=True, budget=0.5).past_key_values
    with pytest.raises(ValueError, match="budget must have no layers that the cache was filled without"):
        model(ids[:, :1], past_key_values=cache, budget=1)


def test_a_static_cache_is_of_one_budget():
    model = CASE["GPT2LMHeadModel"].build(**FORMS["mha"])
    ids, _ = batch()
    cache = StaticCache(model.config, max_cache_len=20)
    model(ids, past_key_values=cache, budget=0.5)
    with pytest.raises(ValueError, match="cache is of one budget"):
        model(ids[:, :1], past_key_values=cache, budget=1)


# --- a model of its own -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mha", "depth"])
@each_case
def test_extracts_a_model_of_its_own(case, form, tmp_path):
    model, inputs = case.build(**FORMS[form]).double(), case.inputs()
    for budget in BUDGETS:
        small = model.extract(budget)
        torch.testing.assert_close(small(**inputs)[0], model(**inputs, budget=budget)[0])
        heads_fit = shapes_of(model.config)[BUDGETS.index(budget)].heads == 4
        is_plain = case.family.name == "t5" or heads_fit
        assert type(small) is (case.plain if is_plain else case.gated)
        assert not getattr(small.config, "nested_budgets", None)
        assert not small.training
        count = sum(p.numel() for p in small.parameters())
        assert (count == sum(p.numel() for p in model.parameters())) == (budget == 1)
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again(**inputs)[0], small(**inputs)[0])


def test_extraction_shares_no_memory_and_keeps_what_else_there_is():
    case = CASE["T5ForConditionalGeneration"]
    model, inputs = case.build(**FORMS["mha"]), case.inputs()
    model.generation_config.max_new_tokens = 7
    small = model.extract(0.5)
    expected = small(**inputs)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(small(**inputs)[0], expected)
    assert small.generation_config.max_new_tokens == 7
    assert small.lm_head.weight is small.shared.weight or not small.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "budget", "message"),
    [
        ({}, 1, "extract needs a model with nested_budgets"),
        (FORMS["mae"], 0.5, "extract needs attention_type='mha'"),
        (FORMS["mha"], 0.7, r"budget must be one of the model's budgets \[1, 0.5, 0.25\] \(got 0.7\)"),
    ],
)
def test_refuses_what_it_cannot_extract(fields, budget, message):
    with pytest.raises(ValueError, match=message):
        CASE["BertModel"].build(**fields).extract(budget)


# --- what else uses linear layers -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel", "T5Model"])
def test_adapters_of_sliced_layers(name):
    """An adapter's layer is computed in full and sliced behind: it counts, and it learns."""
    targets = {
        "BertForSequenceClassification": ["query", "value", "output.dense"],
        "GPT2LMHeadModel": ["c_attn", "c_proj"],
        "T5Model": ["q", "v", "o", "wi", "wo"],
    }
    case = CASE[name]
    model = get_peft_model(
        case.build(**FORMS["mae"] | case.family.no_dropout),
        LoraConfig(r=2, target_modules=targets[name], fan_in_fan_out=name.startswith("GPT2")),
    ).double()
    randomize(model, scale=0.1)
    inputs = case.inputs()
    outputs = model(**inputs, budget=0.5)[0]
    outputs.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**inputs, budget=0.5)[0], outputs, atol=1e-9, rtol=0)


def test_flops_are_those_of_the_extracted_model():
    for name in ("BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"):
        for form in ("mha", "depth"):
            model = CASE[name].build(**FORMS[form])
            for budget in BUDGETS:
                small = hf_moa.upcycle(model.extract(budget))
                counted = model.flops(9, budget=budget)
                assert counted.active == small.flops(9).active
                assert counted.total == model.flops(9).total
                model.set_budget(budget)
                assert model.flops(9) == counted
                model.set_budget(None)


def test_compute_fraction_is_the_share_of_the_matrices():
    model = CASE["BertModel"].build(**FORMS["depth"])
    inputs = CASE["BertModel"].inputs()
    for budget in BUDGETS:
        small = model.extract(budget)
        layers = [sum(p.numel() for n, p in m.encoder.named_parameters() if n.endswith("weight")
                      and "LayerNorm" not in n) for m in (small, model)]  # fmt: skip
        found = model(**inputs, budget=budget)
        torch.testing.assert_close(found.compute_fraction, torch.full((3,), layers[0] / layers[1]))
        tokens = inputs["attention_mask"].sum(dim=1).float()
        torch.testing.assert_close(found.compute_cost[:, 0], tokens * layers[0])


def test_saved_and_loaded_with_its_budgets(tmp_path):
    model, inputs = CASE["BertModel"].build(**FORMS["depth"]), CASE["BertModel"].inputs()
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs, budget=0.25)[0], model(**inputs, budget=0.25)[0])
    plain_keys = set(MoaBertModel(tiny_config()).state_dict())
    assert set(model.state_dict()) == plain_keys


def test_budgets_hold_nothing_to_learn():
    model = CASE["T5Model"].build(**FORMS["mha"])
    holders = [module for module in model.modules() if isinstance(module, BudgetHolder)]
    assert len(holders) == 2
    assert not any(holder.state_dict() for holder in holders)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "budget"),
    [
        ("BertModel", "mae", torch.tensor([0.5, 1, 0.5])),  # one graph has one number of layers
        ("GPT2LMHeadModel", "depth", 0.25),
        ("T5ForConditionalGeneration", "depth", 0.25),
    ],
)
def test_compiles_whole(name, form, budget):
    model, inputs = CASE[name].build(**FORMS["mae"] | FORMS[form]), CASE[name].inputs()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(**inputs, budget=budget)[0]
        torch.testing.assert_close(compiled(**inputs, budget=budget)[0], expected)


@pytest.mark.slow
def test_exports_at_the_chosen_budget():
    case = CASE["BertForSequenceClassification"]
    model, inputs = case.build(**FORMS["depth"]), case.inputs()
    model.set_budget(0.25)
    program = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(program(**inputs)["logits"], model(**inputs).logits)
