"""The cache goes by the names of all versions of transformers, alike."""

import inspect
import warnings

import pytest
import torch
from families import CASE
from transformers import DynamicCache, EncoderDecoderCache

from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.cache.naming import CACHE_NAME

BOTH_NAMES = ("past_key_values", "cache")
CASES = [
    CASE[name]
    for name in ("BertModel", "GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification",
                 "GPT2ForTokenClassification", "T5Model", "T5ForConditionalGeneration")
]  # fmt: skip
each_decoder = pytest.mark.parametrize("case", CASES, ids=lambda case: case.plain_name)


def build(case, **fields):
    """A model that decodes, what comes before the next tokens, and the name of their argument."""
    fields |= {"bert": {"is_decoder": True}, "gpt2": {"classifier_dropout": 0}}.get(case.family.name, {})
    model = case.build(**case.family.no_dropout, **fields)
    ids = torch.arange(5, 13).unsqueeze(0)
    if case.family.name == "t5":
        return model, {"input_ids": ids}, "decoder_input_ids"
    return model, {}, "input_ids"


def new_cache(case):
    return (
        EncoderDecoderCache(DynamicCache(), DynamicCache())
        if "T5" in case.plain_name
        else DynamicCache()
    )


@each_decoder
def test_signatures_are_those_of_transformers(case):
    found = list(inspect.signature(case.gated.forward).parameters)
    expected = list(inspect.signature(case.plain.forward).parameters)
    assert found.index(CACHE_NAME) == expected.index(CACHE_NAME)
    assert len({*BOTH_NAMES} & {*found}) == 1


@each_decoder
def test_either_name_gives_the_same(case):
    model, inputs, tokens = build(case)
    ids = torch.arange(5, 13).unsqueeze(0)
    outputs = []
    for name in BOTH_NAMES:
        cache = new_cache(case)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")  # none of a deprecated name
            model(**inputs, **{tokens: ids[:, :5], name: cache}, use_cache=True)
            outputs.append(model(**inputs, **{tokens: ids[:, 5:], name: cache}, use_cache=True)[0])
        assert cache.get_seq_length() == 8
    assert torch.equal(*outputs)


@each_decoder
def test_a_cache_by_both_names_is_refused(case):
    model, inputs, tokens = build(case)
    caches = {name: new_cache(case) for name in BOTH_NAMES}
    with pytest.raises(ValueError, match=r"Give one cache, as cache or as past_key_values \(got both\)"):
        model(**inputs, **{tokens: torch.tensor([[5, 6]])}, **caches)


@each_decoder
def test_an_output_gives_it_by_transformers_own_name(case):
    model, inputs, tokens = build(case)
    output = model(**inputs, **{tokens: torch.tensor([[5, 6]])}, use_cache=True)
    if "Token" in case.plain_name:
        return  # has none
    cache = output[CACHE_NAME]
    assert cache is output.past_key_values is getattr(output, CACHE_NAME)
    output.past_key_values = other = new_cache(case)
    assert other is output[CACHE_NAME] is output.past_key_values


@each_decoder
@pytest.mark.parametrize("name", BOTH_NAMES)
def test_checkpointed_layers_leave_it_alone(case, name):
    """Recomputed in backward, they would see their own keys twice."""
    model, inputs, tokens = build(case)
    inputs[tokens] = torch.arange(5, 13).unsqueeze(0)
    model.train()
    expected = model(**inputs)[0]
    model.gradient_checkpointing_enable()
    cache = new_cache(case)
    found = model(**inputs, **{name: cache})[0]
    found.sum().backward()
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", BOTH_NAMES)
def test_attention_takes_it_by_either_name(name):
    model, _, _ = build(CASE["GPT2Model"])
    attention = next(module for module in model.modules() if isinstance(module, AttentionFlow))
    cache = DynamicCache()
    attention(torch.randn(1, 3, 32), **{name: cache})
    assert cache.get_seq_length() == 3
