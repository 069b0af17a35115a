"""`generate` in every mode that transformers offers these backbones: the cache changes no token."""

import numpy as np
import pytest
import torch
from families import CASE, T5
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from hf_moa.modeling.cache.gate_states import CROP_RESERVE

GENERATORS = {"gpt2": CASE["GPT2LMHeadModel"], "t5": CASE["T5ForConditionalGeneration"]}
NAMES = ["mha", "mae-1", "mae-window-3", "moa", "moe", "cct", "mae-cct", "moa-moe-cct"]
each_generator = pytest.mark.parametrize(
    ("case", "fields"),
    [
        pytest.param(case, case.family.variants[name], id=f"{family}-{name}")
        for family, case in GENERATORS.items()
        for name in NAMES
    ],
)
each_family = pytest.mark.parametrize("case", GENERATORS.values(), ids=GENERATORS)
# Nine tokens, each new: the choice then depends on the order of many logits.
LENGTH = {
    "max_new_tokens": 9,
    "min_new_tokens": 9,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [0],  # padding, which is a repetition only where there is some
}


def build(case, **fields):
    """A model with a head of its own: a tied one, untrained, repeats its input."""
    model = case.build(seed=1, **fields).double()
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(67, 32, generator=generator, dtype=torch.float64)
    model.lm_head.weight = torch.nn.Parameter(head)
    return model


def prompt(case, batch_size=3, length=7):
    """Padded on the left for GPT-2, on the right for T5's encoder."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 67, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(1, batch_size):
        padding = slice(None, 2 * b) if case.family.name == "gpt2" else slice(length - 2 * b, None)
        mask[b, padding] = 0
        ids[b, padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_cache_changes_nothing(model, inputs, **kwargs):
    def run(**more):
        torch.manual_seed(0)
        return model.generate(**inputs, **LENGTH, **kwargs | more)

    expected = run(use_cache=False)
    assert len(expected[:, -9:].unique()) >= 9
    assert torch.equal(run(), expected)
    return expected


@pytest.mark.covering
@each_generator
@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    ],
    ids=["greedy", "sampling", "beams", "beam-sampling"],
)
def test_cache_changes_no_token(case, fields, mode):
    assert_cache_changes_nothing(build(case, **fields), prompt(case), **mode)


@each_generator
@pytest.mark.parametrize(
    "implementation",
    [
        "static",
        pytest.param("offloaded", marks=pytest.mark.gpu),
        pytest.param("offloaded_static", marks=pytest.mark.gpu),
    ],
)
def test_kind_of_cache_changes_no_token(case, fields, implementation):
    device = "cuda" if implementation.startswith("offloaded") else "cpu"
    model = build(case, **fields).to(device)
    inputs = {name: x.to(device) for name, x in prompt(case).items()}
    options = {"do_sample": False, "disable_compile": True}
    expected = model.generate(**inputs, **LENGTH, **options)
    actual = model.generate(**inputs, **LENGTH, **options, cache_implementation=implementation)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_static_cache_takes_a_prompt_in_chunks(name):
    case = GENERATORS["gpt2"]
    model = build(case, **case.family.variants[name])
    inputs = {"input_ids": prompt(case)["input_ids"][:1]}
    chunks = {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": 3}
    found = model.generate(**inputs, **LENGTH, **chunks)
    assert torch.equal(found, model.generate(**inputs, **LENGTH))


@pytest.mark.covering
@each_generator
@pytest.mark.parametrize("helper", ["assistant", "prompt-lookup"])
def test_assisted_generation_is_greedy_generation(case, fields, helper):
    model = build(case, **fields)
    inputs = {name: x[:1] for name, x in prompt(case).items()}
    inputs["input_ids"][0, -3:] = inputs["input_ids"][0, :3]  # something to look up
    options = {"prompt_lookup_num_tokens": 3}
    if helper == "assistant":
        options = {"assistant_model": case.build(seed=1, **case.family.one_layer).double()}
    expected = model.generate(**inputs, **LENGTH, do_sample=False, use_cache=False)
    actual = model.generate(**inputs, **LENGTH, do_sample=False, **options)
    assert torch.equal(actual, expected)


@each_generator
def test_model_assists_itself(case, fields):
    """Every candidate but those that rounding turns is accepted, so that the cache is cropped."""
    model = build(case, **fields)
    inputs = {name: x[:1] for name, x in prompt(case).items()}
    expected = model.generate(**inputs, **LENGTH, do_sample=False, use_cache=False)
    actual = model.generate(**inputs, **LENGTH, do_sample=False, assistant_model=model)
    assert torch.equal(actual, expected)


@each_family
def test_lookup_may_reach_further_than_the_gates_hold(case):
    """Its refused candidates are cropped from the cache at once."""
    sizes = {"gpt2": {"n_positions": 1200}, "t5": {}}[case.family.name]
    model = build(case, attention_type="mae", mae_gate_window=3, **sizes)
    ids = torch.randint(5, 67, (1, 200), generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if case.family.name == "t5":
        inputs["decoder_input_ids"] = ids
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=False)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(
            kwargs["decoder_input_ids" if case.family.name == "t5" else "input_ids"].shape[1]
        ),
        with_kwargs=True,
    )
    options = {"max_new_tokens": 300, "prompt_lookup_num_tokens": CROP_RESERVE + 50}
    actual = model.generate(**inputs, do_sample=False, **options)
    assert max(lengths[1:]) > CROP_RESERVE
    assert torch.equal(actual[:, : expected.shape[1]], expected)


@each_family
def test_cache_that_cannot_hold_gates_is_refused_before_the_first_step(case):
    class OtherLayer(DynamicLayer):
        pass

    model, inputs = build(case, attention_type="mae"), prompt(case)
    cache = DynamicCache(config=model.config)
    cache.layers = [OtherLayer() for _ in cache.layers]
    if case.family.name == "t5":
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    with pytest.raises(ValueError, match="OtherLayer"):
        model.generate(**inputs, **LENGTH, past_key_values=cache)


@each_generator
def test_padded_rows_generate_what_they_do_alone(case, fields):
    model, inputs = build(case, **fields), prompt(case)
    together = model.generate(**inputs, **LENGTH, do_sample=False)
    for b, real in enumerate(inputs["attention_mask"].bool()):
        ids = inputs["input_ids"][b : b + 1, real]
        alone = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **LENGTH, do_sample=False
        )
        assert torch.equal(alone[0, -9:], together[b, -9:])


@pytest.mark.parametrize("implementation", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_the_prompt_generate_what_its_tokens_do(name, implementation):
    case = GENERATORS["gpt2"]
    model, inputs = build(case, **case.family.variants[name]), prompt(case)
    options = {"do_sample": False, "disable_compile": True}
    expected = model.generate(**inputs, **LENGTH | {"no_repeat_ngram_size": 0}, **options)
    actual = model.generate(
        inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]),
        attention_mask=inputs["attention_mask"],
        **LENGTH | {"no_repeat_ngram_size": 0},
        **options,
        cache_implementation=implementation,
    )
    assert torch.equal(actual, expected[:, 7:])


@each_family
def test_left_padding_reaches_the_gates_with_a_static_cache(case):
    """The mask of pairs that static caches need does not tell the gates what is padding."""
    model = build(case, attention_type="mae", mae_gate_window=3, ffn_type="moe")
    inputs = prompt(case)
    if case.family.name == "t5":
        start = torch.tensor([[0, 0, 0, 0, 9], [0, 0, 0, 7, 9], [0, 8, 6, 7, 9]])
        inputs["decoder_input_ids"] = start
        inputs["decoder_attention_mask"] = torch.tensor(
            [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
        )
    expected = model.generate(**inputs, **LENGTH, do_sample=False, use_cache=False)
    actual = model.generate(
        **inputs, **LENGTH, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(actual, expected)


@pytest.mark.slow
@each_family
@pytest.mark.parametrize(
    "name", ["mae-window-3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mha", "cct"))]
)
def test_compiled_static_decoding_changes_no_token(case, name):
    torch._dynamo.reset()
    model, inputs = build(case, **case.family.variants[name]), prompt(case)
    expected = model.generate(**inputs, **LENGTH, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    actual = model.generate(**inputs, **LENGTH, do_sample=False, cache_implementation="static")
    assert torch.equal(actual, expected)


# --- budgets --------------------------------------------------------------------------------------


def test_budget_of_generation():
    case = GENERATORS["gpt2"]
    model, inputs = build(case, cct_budgets=[1, 0.5]), prompt(case)
    tokens = {
        budget: assert_cache_changes_nothing(model, inputs, budget=budget, do_sample=False)
        for budget in (1, 0.5)
    }
    assert not torch.equal(tokens[1], tokens[0.5])
    model.set_budget(0.5)
    assert torch.equal(model.generate(**inputs, **LENGTH, do_sample=False), tokens[0.5])
    model.set_budget(None)
    assert torch.equal(model.generate(**inputs, **LENGTH, do_sample=False), tokens[1])
    mixed = torch.tensor([0.5, 1.0, 0.5])
    actual = model.generate(**inputs, **LENGTH, do_sample=False, budget=mixed)
    assert torch.equal(actual[::2], tokens[0.5][::2])
    assert torch.equal(actual[1], tokens[1][1])
    beams = model.generate(**inputs, **LENGTH, do_sample=False, num_beams=2, budget=mixed)
    for budget, rows in ((0.5, slice(0, None, 2)), (1, slice(1, 2))):
        same = model.generate(**inputs, **LENGTH, do_sample=False, num_beams=2, budget=budget)
        assert torch.equal(beams[rows], same[rows])
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
        model.generate(**inputs, **LENGTH, budget=0.7)


def test_guidance_has_the_budget_of_generation():
    case = GENERATORS["gpt2"]
    model, inputs = build(case, cct_budgets=[1, 0.5]), prompt(case)
    guided = {**inputs, **LENGTH, "do_sample": False, "guidance_scale": 3.0}
    actual = model.generate(**guided, budget=0.5)
    mixed = model.generate(**guided, budget=torch.tensor([0.5, 1.0, 0.5]))
    default = model.generate(**guided)
    model.set_budget(0.5)
    assert torch.equal(actual, model.generate(**guided))
    assert torch.equal(mixed[::2], actual[::2])
    assert torch.equal(mixed[1], default[1])


def test_budget_of_generation_is_a_pair_for_t5():
    case = GENERATORS["t5"]
    model, inputs = build(case, cct_budgets=[1, 0.5]), prompt(case)
    pairs = [(1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5)]
    tokens = {
        pair: assert_cache_changes_nothing(model, inputs, budget=pair, do_sample=False) for pair in pairs
    }
    distinct = {tuple(x.flatten().tolist()) for x in tokens.values()}
    assert len(distinct) >= 3
    assert torch.equal(model.generate(**inputs, **LENGTH, do_sample=False), tokens[1, 1])
    one = model.generate(**inputs, **LENGTH, do_sample=False, budget=0.5)
    assert torch.equal(one, tokens[0.5, 0.5])
    for pair in pairs:
        model.set_budget(pair)
        assert torch.equal(model.generate(**inputs, **LENGTH, do_sample=False), tokens[pair])
    model.set_budget(None)
    mixed = torch.tensor([[1, 0.5], [0.5, 1], [0.5, 0.5]])
    actual = model.generate(**inputs, **LENGTH, do_sample=False, budget=mixed)
    for b, pair in enumerate(mixed.tolist()):
        assert torch.equal(actual[b], tokens[tuple(pair)][b])
    beams = model.generate(**inputs, **LENGTH, do_sample=False, num_beams=2, budget=mixed)
    same = model.generate(**inputs, **LENGTH, do_sample=False, num_beams=2, budget=(1, 0.5))
    assert torch.equal(beams[0], same[0])


@pytest.mark.parametrize("budget", [0.5, 0.25, (1, 0.25), torch.tensor([1, 1, 0.5])], ids=str)
def test_generation_of_t5_refuses_by_its_list_of_pairs(budget):
    """Also what the encoder, which runs first, would take."""
    case = GENERATORS["t5"]
    model = build(case, cct_budgets=[[1, 1], [1, 0.5], [0.5, 0.25]])
    with pytest.raises(ValueError, match=r"\[\(1.0, 1.0\), \(1.0, 0.5\), \(0.5, 0.25\)\]"):
        model.generate(**prompt(case), **LENGTH, budget=budget)


@each_family
@pytest.mark.parametrize("kind", [torch.tensor, np.float32], ids=["tensor", "numpy"])
def test_budget_may_be_a_scalar_of_another_library(case, kind):
    model, inputs = build(case, cct_budgets=[1, 0.33]), prompt(case)
    options = {"do_sample": False, "num_beams": 2}
    expected = model.generate(**inputs, **LENGTH, **options, budget=0.33)
    assert torch.equal(model.generate(**inputs, **LENGTH, **options, budget=kind(0.33)), expected)


@each_family
@pytest.mark.parametrize("fields", [{}, {"cct_budgets": [1, 0.25]}], ids=["plain", "other-budgets"])
def test_assistant_keeps_to_its_own_budget(case, fields):
    model = build(case, cct_budgets=[1, 0.5])
    inputs = {name: x[:1] for name, x in prompt(case).items()}
    assistant = case.build(seed=1, **fields).double()
    expected = model.generate(**inputs, **LENGTH, do_sample=False, budget=0.5)
    actual = model.generate(**inputs, **LENGTH, do_sample=False, budget=0.5, assistant_model=assistant)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, model.generate(**inputs, **LENGTH, do_sample=False))


def test_selected_experts_rule_generation():
    case = GENERATORS["gpt2"]
    model, inputs = build(case, attention_type="mae"), prompt(case)
    mixture = model.generate(**inputs, **LENGTH, do_sample=False)
    model.set_expert_selection("argmax")
    assert not torch.equal(assert_cache_changes_nothing(model, inputs, do_sample=False), mixture)


@each_family
def test_generation_carries_no_gating_outputs(case):
    model = build(case, attention_type="moa", cct_budgets=[1, 0.5])
    output = model.generate(
        **prompt(case), **LENGTH, return_dict_in_generate=True, output_hidden_states=True
    )
    assert not any("router" in name or "cct" in name for name in output)


def test_a_cache_goes_on_where_it_ended():
    case = GENERATORS["gpt2"]
    model = build(case, attention_type="mae", mae_gate_window=3, cct_budgets=[1, 0.5])
    inputs = {name: x[:1] for name, x in prompt(case).items()}
    expected = model.generate(
        **inputs, **LENGTH | {"max_new_tokens": 12, "min_new_tokens": 12}, do_sample=False
    )
    cache = DynamicCache(config=model.config)
    first = model.generate(**inputs, **LENGTH, do_sample=False, past_key_values=cache)
    second = model.generate(
        first,
        **LENGTH | {"max_new_tokens": 3, "min_new_tokens": 3},
        do_sample=False,
        past_key_values=cache,
    )
    assert torch.equal(second, expected)


@pytest.mark.parametrize("name", ["mae-1", "moa", "cct"])
def test_encoder_outputs_may_be_given(name):
    case = CASE["T5ForConditionalGeneration"]
    model, ids = case.build(**case.family.variants[name]), case.inputs()["input_ids"]
    kwargs = {"num_beams": 2, "max_new_tokens": 4, "eos_token_id": None}
    expected = model.generate(ids, **kwargs)
    encoded = model.get_encoder()(ids, return_dict=True)
    assert torch.equal(model.generate(encoder_outputs=encoded, **kwargs), expected)


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("name", ["mha", "mae-1", "cct"])
def test_decoder_may_have_more_layers_than_the_encoder(name, implementation):
    case = CASE["T5ForConditionalGeneration"]
    fields = T5.variants[name] | {"num_layers": 1, "num_decoder_layers": 3}
    model, inputs = case.build(**fields), case.inputs()
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    expected = model.generate(**inputs, **options, use_cache=False)
    kind = {} if implementation is None else {"cache_implementation": implementation}
    actual = model.generate(**inputs, **options, **kind, disable_compile=True)
    assert torch.equal(actual, expected)
