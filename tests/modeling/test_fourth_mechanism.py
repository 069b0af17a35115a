"""A mechanism from outside the package is one like the others: a folder, and one line for it."""

import json

import pytest
import torch
import weighted_heads.mixture
from common import TINY, assert_same_with_gradients, hidden, randomize
from families import BERT, CASE, GPT2, T5, each_class, main_output
from layers import attention_layer, each_backbone
from peft import PeftModel, get_peft_model
from references import attend, visibility
from transformers import AutoConfig, BertConfig, BertForSequenceClassification
from weighted_heads.mechanism import WEIGHTED

from hf_moa import FTGConfig, MoaBertConfig, upcycle
from hf_moa.analysis import analyze
from hf_moa.model_card import checkpoint_card
from hf_moa.modeling.core.mechanism import MECHANISMS, register
from hf_moa.modeling.core.slots import MIXTURES

FIELDS = {"attention_type": "weighted", "weighted_start": 0.5}


@pytest.fixture(autouse=True)
def _registered():
    """The one line."""
    register(WEIGHTED)


@each_backbone
def test_equals_its_equation(backbone):
    layer = attention_layer(backbone, **FIELDS)
    assert type(layer.core.mixture) is MIXTURES["weighted"] is weighted_heads.mixture.WeightedHeads
    (x, mask), w, output = hidden(), layer.weights, []
    bias = w.position_bias(7, 7, layer.core.config)
    for b in range(len(x)):
        seen, y = visibility(7, 7, mask[b], layer.core.is_causal), w.output_bias
        for j, weight in enumerate(layer.core.mixture.weights.weight):
            q, k, v = (
                x[b] @ matrix[j].T + offset[j]
                for matrix, offset in (
                    (w.query, w.query_bias),
                    (w.key, w.key_bias),
                    (w.value, w.value_bias),
                )
            )
            y = y + weight * (attend(q, k, v, seen, w.scaling, bias[j]) @ w.output[j])
        output.append(y)
    actual, _ = layer(x, mask)
    assert_same_with_gradients(actual[mask], torch.stack(output)[mask], [x, *layer.parameters()])


@each_class
def test_every_class_saves_loads_and_trains(case, tmp_path):
    model = case.build(**FIELDS)
    inputs = case.inputs()
    expected = main_output(model(**inputs))
    assert not torch.equal(expected, main_output(case.build(attention_type="mha")(**inputs)))
    model.save_pretrained(tmp_path)
    loaded, info = case.gated.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(main_output(loaded(**inputs)), expected)
    main_output(model.train()(**inputs)).sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if ".weights.weight" in name]
    assert gradients
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("fields", [FIELDS, FIELDS | {"ffn_type": "moe", "cct_budgets": [1, 0.5]}])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_it_combines_and_generates_with_a_cache(name, fields):
    model = CASE[name].build(**fields).double()
    inputs = {k: v for k, v in CASE[name].inputs().items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))


@pytest.mark.parametrize("family", [BERT, GPT2, T5], ids=lambda family: family.name)
def test_configuration_has_its_fields(family, tmp_path):
    config = family.config(**FIELDS)
    assert (config.attention_type, config.weighted_start) == ("weighted", 0.5)
    assert family.config().weighted_start == 1.0
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["weighted_start"] == 0.5
    assert AutoConfig.from_pretrained(tmp_path).weighted_start == 0.5
    with pytest.raises(ValueError, match=r"weighted_start must be a finite number .* \(got -1\)"):
        family.config(attention_type="weighted", weighted_start=-1)
    with pytest.raises(ValueError, match=r"no field weighted_stop .* there are weighted_start"):
        family.config(attention_type="weighted", weighted_stop=1)


def test_new_models_start_as_it_says_and_converted_ones_as_their_source():
    model = CASE["BertModel"].gated(CASE["BertModel"].config(**FIELDS))
    weights = [p for name, p in model.named_parameters() if name.endswith("weights.weight")]
    assert all(torch.equal(weight, torch.full_like(weight, 0.5)) for weight in weights)
    torch.manual_seed(0)
    source = randomize(BertForSequenceClassification(BertConfig(**TINY))).eval()
    ids = torch.randint(5, 60, (2, 7))
    expected = source(ids).logits
    torch.testing.assert_close(upcycle(source, "weighted")(ids).logits, expected)
    halved = upcycle(source, "weighted", weighted_start=0.5)(ids).logits
    assert not torch.allclose(halved, expected)


def test_operations_are_counted():
    case = CASE["BertModel"]
    plain, weighted = (case.gated(case.config(**f)).flops(9) for f in ({}, FIELDS))
    assert weighted.total == plain.total  # elementwise operations are not


def test_it_is_unknown_where_it_is_not_registered():
    MECHANISMS.pop("weighted")
    with pytest.raises(ValueError, match="attention_type must be one of 'mha', 'mae', 'moa'"):
        MoaBertConfig(attention_type="weighted")


def test_cards_and_analysis_know_it(tmp_path):
    model = CASE["BertForSequenceClassification"].build(**FIELDS)
    model.save_pretrained(tmp_path)
    card = checkpoint_card(tmp_path, name="user/weighted")
    assert "weighted" in card.data.tags
    for part in (
        "whose heads have one weight each (WEIGHTED)",
        "**WEIGHTED**. Each of 4 heads has a learned weight.",
        "| `weighted_start` | `0.5` | The weight that every head starts with |",
        "@misc{nobody",
    ):
        assert part in card.text, part
    found = analyze(model, [CASE["BertForSequenceClassification"].inputs()], progress=False)
    assert list(found.tables) == ["head_weights"]
    assert len(found.tables["head_weights"]) == 2
    assert found.facts["batches of weights"] == 1


def test_ftg_trains_its_gates(tmp_path):
    model = CASE["GPT2LMHeadModel"].build(**FIELDS)
    ids = torch.arange(5, 12)[None]
    adapted = get_peft_model(model, FTGConfig(gates=["weighted"], init_weights=False)).eval()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2
    assert all(".mixture.weights.ftg_modules." in name for name in trained)
    expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path)
    base = CASE["GPT2LMHeadModel"].build(**FIELDS)
    assert not torch.allclose(base(ids).logits, expected)
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits, expected)
