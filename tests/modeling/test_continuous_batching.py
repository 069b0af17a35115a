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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_requests_give_what_each_gives_alone(name, implementation):
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
