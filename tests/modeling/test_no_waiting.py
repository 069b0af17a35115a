"""On an accelerator, a forward must not wait for a number: it would hold up all that comes behind it.

Tensors on the meta device have shapes and no numbers. They take the paths of an accelerator, and raise
where a number is asked for. transformers itself asks once in a call, when it makes the mask.
"""

import pytest
import torch
from families import LANGUAGE_MODELS

CASES = [(case, variant) for case in LANGUAGE_MODELS for variant in case.family.variants]


# Grouped products take widths of 16 bytes: eight numbers, in each of four parts.
WIDTH = {"bert": {"intermediate_size": 64}, "gpt2": {"n_inner": 64}, "t5": {"d_ff": 64}}


def on_meta(case, fields, **kwargs):
    model = case.gated(case.config(**WIDTH[case.family.name], **fields)).to("meta", torch.bfloat16)
    batch = {**case.inputs(), **kwargs}
    return model, {name: value.to("meta") for name, value in batch.items()}


@pytest.fixture
def masks_made_without_looking(monkeypatch):
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        monkeypatch.setattr(f"transformers.masking_utils.{name}", lambda *args, **kwargs: False)


@pytest.mark.covering
@pytest.mark.usefixtures("masks_made_without_looking")
@pytest.mark.parametrize(
    ("case", "variant"), CASES, ids=[f"{case.family.name}-{variant}" for case, variant in CASES]
)
def test_forward_and_backward_ask_for_no_number(case, variant):
    model, batch = on_meta(case, case.family.variants[variant], **case.labels())
    model.eval()(**batch)
    model.train()(**batch).loss.backward()
    assert all(p.grad is None or p.grad.device.type == "meta" for p in model.parameters())


def test_a_number_would_be_noticed():
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(2, device="meta").any().item()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.zeros(2, device="meta").nonzero()
