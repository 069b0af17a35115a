"""`generate_batch`: requests that stand side by side in one row give what each gives alone."""

import pytest
import torch
from families import CASE
from test_generation import build
from transformers import ContinuousBatchingConfig, GenerationConfig

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [16]]
CASES = {
    "mha": {},
    "mae-uniform": {"attention_type": "mae", "mae_gate_type": "uniform"},
    "moa": {"attention_type": "moa", "num_attention_experts": 6, "head_dim": 12},
    "moe": {"ffn_type": "moe"},
    "cct": {"cct_budgets": [1, 0.5]},
    "cct-sparse": {"cct_budgets": [1, 0.5], "cct_execution": "sparse"},
    "moa-cct": {"attention_type": "moa", "cct_budgets": [1, 0.5], "cct_sublayer_norm": False},
}


def generate_together(model):
    """The new tokens of each prompt, or why it has none."""
    settings = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=66, pad_token_id=0)
    memory = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)  # not all that there is
    found = model.generate_batch(
        inputs=PROMPTS, generation_config=settings, continuous_batching_config=memory
    )
    return [request.error or request.generated_tokens for request in found.values()]


@pytest.mark.covering
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_requests_give_what_each_gives_by_itself(name, implementation):
    model = build(CASE["GPT2LMHeadModel"], **CASES[name]).eval()
    model.set_attn_implementation(implementation)
    expected = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=66, pad_token_id=0
        )
        expected.append(ids[0, len(prompt) :].tolist())
    assert generate_together(model) == expected


def test_learned_gates_refuse():
    """They would average the tokens of all requests."""
    model = build(CASE["GPT2LMHeadModel"], attention_type="mae").eval()
    with pytest.raises(ValueError, match="cannot tell apart the requests"):
        generate_together(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")


def together(model, budget=None, **settings):
    config = GenerationConfig(max_new_tokens=9, eos_token_id=66, pad_token_id=0, **settings)
    memory = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    return model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=memory, budget=budget
    )


@pytest.mark.parametrize("name", ["cct", "nested"])
def test_budgets_of_requests(name):
    fields = {"nested_budgets": [1, 0.5]} if name == "nested" else CASES["cct"]
    model = build(CASE["GPT2LMHeadModel"], **fields).eval()
    model.set_budget(0.5)

    def by_itself(prompt, budget):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=66, pad_token_id=0,
            budget=budget,
        )  # fmt: skip
        return ids[0, len(prompt) :].tolist()

    for budget in (1, [1, 0.5, 1], [0.5, 1, 1]):
        found = together(model, budget, do_sample=False)
        assert list(found) == ["req_0", "req_1", "req_2"]
        budgets = budget if isinstance(budget, list) else [budget] * 3
        expected = [by_itself(*each) for each in zip(PROMPTS, budgets, strict=True)]
        assert [each.generated_tokens for each in found.values()] == expected
        assert [each.request_id for each in found.values()] == list(found)
    assert [by_itself(prompt, None) for prompt in PROMPTS] == [
        by_itself(prompt, 0.5) for prompt in PROMPTS
    ]
    assert [each.generated_tokens for each in together(model, do_sample=False).values()] == [
        by_itself(prompt, 0.5) for prompt in PROMPTS
    ]


def test_several_sequences_of_requests_keep_their_names():
    model = build(CASE["GPT2LMHeadModel"], **CASES["cct"]).eval()
    found = together(model, [1, 0.5, 1], do_sample=True, num_return_sequences=2)
    assert [name.split("__")[0] for name in found] == [f"req_{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert len(set(found)) == 6


def test_budgets_that_do_not_fit():
    settings = GenerationConfig(max_new_tokens=2, budget=0.5)
    with pytest.raises(ValueError, match=r"must have no budget in continuous batching.*\(got 0\.5\)"):
        build(CASE["GPT2LMHeadModel"], **CASES["cct"]).generate_batch(PROMPTS, settings)
    model = build(CASE["GPT2LMHeadModel"], **CASES["cct"]).eval()
    with pytest.raises(ValueError, match=r"budget must be one of .* \(got 0\.3\)"):
        together(model, 0.3)
    with pytest.raises(ValueError, match=r"one for each of the 3 requests \(got 2\)"):
        together(model, [1, 0.5])
    with pytest.raises(ValueError, match=r"model's budgets \[\] \(got 1\)"):
        together(build(CASE["GPT2LMHeadModel"]).eval(), 1)
