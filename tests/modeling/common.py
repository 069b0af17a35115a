"""Small models and comparisons that the modeling tests share."""

from __future__ import annotations

import torch

from hf_moa import MoaBertConfig

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}

# One row per mechanism and combination that every general property is shown for.
VARIANTS = {
    "mha": {},
    "mae-1": {"attention_type": "mae"},
    "mae-2": {"attention_type": "mae", "mae_num_dropped_heads": 2},
    "uni-mae": {"attention_type": "mae", "mae_gate_type": "uniform"},
    "moa": {"attention_type": "moa", "num_attention_experts": 6, "head_dim": 12},
    "moa-noisy": {"attention_type": "moa", "router_type": "noisy_topk", "router_load_loss_coef": 0.1},
    "moe": {"ffn_type": "moe", "num_ffn_experts": 4},
    "moe-noisy": {"ffn_type": "moe", "num_ffn_experts": 4, "router_type": "noisy_topk"},
    "cct": {"cct_budgets": [1, 0.5]},
    "cct-plain": {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False},
    "cct-biased": {
        "cct_budgets": [1, 0.5],
        "cct_sublayer_norm": False,
        "cct_budget_bias": True,
        "cct_control_symbols": False,
        "cct_gate_training": "hard",
    },
    "cct-full-plain": {
        "cct_budgets": [1, 0.5],
        "cct_sublayer_norm": False,
        "cct_budget_bias": True,
        "cct_full_budget_is_plain": True,
    },
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "mae-nested": {"attention_type": "mae", "nested_budgets": [1, 0.5]},
    "moa-moe-cct": {
        "attention_type": "moa",
        "moa_key_value_heads": 2,
        "ffn_type": "moe",
        "cct_budgets": [1, 1, 0.5],
    },
    "mae-pre-norm": {"attention_type": "mae", "pre_norm": True},
}


def tiny_config(**fields) -> MoaBertConfig:
    return MoaBertConfig(**TINY | {"num_labels": 3} | fields)


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """Move every parameter and statistic away from its initial value, so that nothing is trivial."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor):
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.2 * noise(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + noise(buffer).abs())
    return model


def batch(batch_size: int = 3, length: int = 9, seed: int = 0):
    """Token ids `[B, T]` and a mask whose rows have different lengths, the first one full."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, TINY["vocab_size"], (batch_size, length), generator=generator)
    mask = torch.ones(batch_size, length, dtype=torch.long)
    for b in range(1, batch_size):
        mask[b, length - 2 * b :] = 0
    return ids, mask


def hidden(batch_size: int = 3, length: int = 7, size: int = 32, seed: int = 0):
    """Float64 hidden states `[B, T, d]` that require gradients, and a padding mask `[B, T]`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, length, size, generator=generator, dtype=torch.float64)
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    for b in range(1, batch_size):
        mask[b, length - b :] = False
    return x.requires_grad_(), mask


def alternating_device_map(model, first, second) -> dict:
    """A device map with every second block on another device; no block is split."""
    blocks = set(model._no_split_modules)
    names = [name for name, module in model.named_modules() if type(module).__name__ in blocks]
    device_map = {name: second if i % 2 else first for i, name in enumerate(names)}
    inside = tuple(name + "." for name in names)
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if not name.startswith(inside):
            device_map[name] = first
    return device_map


def assert_same_with_gradients(actual, expected, inputs, *, atol=1e-10):
    """Equal values, and equal gradients of a fixed random projection, in float64."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(actual.shape, generator=generator, dtype=actual.dtype)
    got = torch.autograd.grad((actual * weight).sum(), inputs, retain_graph=True, allow_unused=True)
    want = torch.autograd.grad((expected * weight).sum(), inputs, retain_graph=True, allow_unused=True)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in want)
    for one, other in zip(got, want, strict=True):
        one = torch.zeros(()) if one is None else one
        other = torch.zeros(()) if other is None else other
        torch.testing.assert_close(
            one.double().expand_as(other) if one.ndim == 0 else one.double(),
            other.double().expand_as(one) if other.ndim == 0 else other.double(),
            atol=atol,
            rtol=1e-9,
        )
