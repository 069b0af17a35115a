"""A backbone from outside the package is one like the others: a folder, and one line for it."""

import pytest
import torch
from common import batch, randomize
from launching import fresh_python
from peft import get_peft_model
from rotary_decoder.family import LLAMA
from rotary_decoder.model import MoaLlamaConfig, MoaLlamaForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from hf_moa import FTGConfig, importance, upcycle
from hf_moa.families import FAMILIES
from hf_moa.model_card import checkpoint_card
from hf_moa.registration import register_family

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "num_labels": 3,
    "pad_token_id": 0,
}
VARIANTS = {
    "mae": {"attention_type": "mae"},
    "cct": {"cct_budgets": [1, 0.5]},
    "mae-moe-cct": {"attention_type": "mae", "ffn_type": "moe", "cct_budgets": [1, 0.5]},
    "moa": {"attention_type": "moa", "num_attention_experts": 8},
    "moa-cct": {"attention_type": "moa", "num_attention_experts": 8, "cct_budgets": [1, 0.5]},
}
each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture(autouse=True)
def _registered():
    """The one line."""
    register_family(LLAMA)
    yield
    del FAMILIES["llama"]


def build(model_class=MoaLlamaForCausalLM, **fields):
    torch.manual_seed(0)
    return randomize(model_class(MoaLlamaConfig(**TINY | fields))).double().eval()


def build_plain(model_class=LlamaForCausalLM):
    torch.manual_seed(0)
    return randomize(model_class(LlamaConfig(**TINY))).double().eval()


def tokens():
    ids, mask = batch()
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def test_plain_path_is_the_backbones_to_the_bit():
    model, plain = build(), build_plain()
    model.load_state_dict(plain.state_dict())
    labels = {"labels": tokens()["input_ids"]}
    found, expected = model(**tokens(), **labels), plain(**tokens(), **labels)
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.loss.float(), expected.loss)  # which is computed in float32


@each_variant
def test_no_token_sees_a_later_one_and_caches_change_none(fields):
    model, ids = build(**fields), tokens()["input_ids"][:1]
    expected = model(ids).logits
    torch.testing.assert_close(model(ids[:, :6]).logits, expected[:, :6], atol=1e-10, rtol=1e-10)
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(ids, **options, **cache)
        assert torch.equal(found, model.generate(ids, **options, use_cache=False))


@each_variant
def test_every_parameter_learns(fields):
    model = build(**fields).train()
    model(**tokens(), labels=tokens()["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@each_variant
def test_checkpoint_loads_by_auto_classes(fields, tmp_path):
    model = build(**fields)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is MoaLlamaForCausalLM
    assert torch.equal(loaded(**tokens()).logits, model(**tokens()).logits)


def test_checkpoint_loads_where_only_the_package_is(tmp_path):
    model = build(**VARIANTS["mae-moe-cct"])
    model.save_pretrained(tmp_path / "gated")
    torch.save((tokens(), model(**tokens()).logits), tmp_path / "expected.pt")
    program = """
import torch
from transformers import AutoModelForCausalLM

loading = {"dtype": torch.float64, "trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained("gated", **loading)
assert type(model).__module__.startswith("transformers_modules."), type(model)
inputs, expected = torch.load("expected.pt")
assert torch.equal(model(**inputs).logits, expected)
"""
    done = fresh_python(program, folder=tmp_path, modules_cache=tmp_path / "code")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fields", [VARIANTS[name] for name in ("mae", "cct", "mae-moe-cct")])
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_upcycled_model_computes_what_its_source_does(model_class, fields):
    source = build_plain(model_class)
    model = upcycle(source, **{"attention_type": "mha"} | fields)
    assert type(model) is LLAMA.gated_class(model_class.__name__)
    expected = source(**tokens()).logits
    torch.testing.assert_close(model(**tokens()).logits, expected, atol=1e-11, rtol=1e-11)


def test_moa_starts_from_the_heads():
    """Each group of experts has the keys of a head, and as many experts as heads are chosen: all."""
    source = build_plain()
    model = upcycle(source, "moa", num_attention_experts=4)
    torch.testing.assert_close(
        model(**tokens()).logits, source(**tokens()).logits, atol=1e-10, rtol=1e-10
    )


def test_sorted_model_computes_what_its_source_does():
    source = build_plain()
    labels = tokens()["input_ids"]
    scores = importance(source, [{**tokens(), "labels": labels}])
    model = upcycle(source, "mha", cct_budgets=[1, 0.5], importance=scores)
    expected = source(**tokens()).logits
    torch.testing.assert_close(model(**tokens()).logits, expected, atol=1e-11, rtol=1e-11)
    found = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(found, source.model.layers[0].mlp.up_proj.weight)


def test_nested_budgets_take_no_heads_that_share_keys():
    message = r"nested_budgets must be None where queries share keys: .* \(got 4 .* and 2 of keys\)"
    with pytest.raises(ValueError, match=message):
        build(nested_budgets=[1, 0.5])
    model = build(nested_budgets=[1, 0.5], num_key_value_heads=4)
    ids = tokens()["input_ids"][:1]
    options = {"max_new_tokens": 6, "do_sample": False, "budget": 0.5}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_budgets_skip_operations():
    model = build(cct_budgets=[1, 0.5])
    half, whole = (model.flops(9, budget=budget) for budget in (0.5, 1))
    assert half.active < whole.active == whole.total


def test_card_says_how_it_loads(tmp_path):
    AutoModelForSequenceClassification.from_config(
        MoaLlamaConfig(**TINY, attention_type="mae")
    ).save_pretrained(tmp_path)
    card = checkpoint_card(tmp_path, name="user/gated-llama").text
    assert "Llama" in card
    assert 'AutoModelForSequenceClassification.from_pretrained("user/gated-llama"' in card


def test_ftg_trains_its_gates():
    adapted = get_peft_model(build(attention_type="mae"), FTGConfig())
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all(".mixture.gate." in name for name in trained)
