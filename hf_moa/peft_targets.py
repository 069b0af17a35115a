"""PEFT's default target modules: a gated model has those of its backbone."""

from __future__ import annotations

from peft.utils import constants


def register_target_modules(model_type: str, backbone: str) -> None:
    """Let PEFT's methods (LoRA, IA3, ...) do without `target_modules` on a gated model.

    What PEFT itself may know of the model stays. (MoA's experts are no linear layers, which a table may
    name: `LoraConfig.target_parameters` takes them. The feed-forward layers of sparse MoE, and of CCT
    with its norms, have modules of other names than a table's.)

    Args:
        model_type: the gated model's, such as "moa_bert".
        backbone: that of transformers' own model, such as "bert".
    """
    for name, table in vars(constants).items():
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict) and backbone in table:
            table.setdefault(model_type, table[backbone])
