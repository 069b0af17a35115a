"""PEFT's prompt and prefix tuning: virtual tokens before the input, embedded or as keys and values."""

import pytest
import torch
from adapted import needs_peft_of_transformers
from common import VARIANTS
from families import CASE
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

CASES = {
    "CAUSAL_LM": CASE["GPT2LMHeadModel"],
    "SEQ_2_SEQ_LM": CASE["T5ForConditionalGeneration"],
}
each_task = pytest.mark.parametrize("task_type", CASES)
# of MoA, whose experts share one head of keys
SHARED_HEAD = {"num_attention_heads": 1, "token_dim": VARIANTS["moa"]["head_dim"]}


def check_trains_and_generates(task_type, variant, config):
    case = CASES[task_type]
    torch.manual_seed(0)
    model = get_peft_model(case.build(**VARIANTS[variant]).train(), config)
    inputs = case.inputs()
    model(**inputs, **case.labels()).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all("prompt_encoder" in name for name in trained)

    model.eval()
    ids = inputs["input_ids"]
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # `generate` wants no padding
    with torch.no_grad():
        generated = model.generate(**tokens, max_new_tokens=1, do_sample=False)
        if task_type == "SEQ_2_SEQ_LM":
            tokens["decoder_input_ids"] = generated[:, :1]
        before = model(**tokens).logits
        torch.testing.assert_close(generated[:, -1], before[:, -1].argmax(dim=-1))
        for parameter in model.prompt_encoder.parameters():
            parameter += 1
        assert not torch.allclose(model(**tokens).logits, before)


@each_task
@pytest.mark.parametrize("variant", ["mae-1", "moa", "cct"])
def test_prompt_tuning(task_type, variant):
    config = PromptTuningConfig(task_type=task_type, num_virtual_tokens=3)
    check_trains_and_generates(task_type, variant, config)


@needs_peft_of_transformers
@each_task
@pytest.mark.parametrize(("variant", "sizes"), [("mha", {}), ("moa", SHARED_HEAD)])
def test_prefix_tuning(task_type, variant, sizes):
    config = PrefixTuningConfig(task_type=task_type, num_virtual_tokens=3, **sizes)
    check_trains_and_generates(task_type, variant, config)


@each_task
@pytest.mark.parametrize(
    ("variant", "message"),
    [("moa", "num_attention_heads=1, token_dim=12"), ("mae-1", "gates find their past")],
)
def test_a_prefix_that_does_not_fit_is_refused(task_type, variant, message):
    config = PrefixTuningConfig(task_type=task_type, num_virtual_tokens=3)
    case = CASES[task_type]
    model = get_peft_model(case.build(**VARIANTS[variant]), config)
    with pytest.raises(ValueError, match=message):
        model(**case.inputs())
