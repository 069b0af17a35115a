"""A trained model with gates, as the start of a further training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import claimed

# what CCT was when its experiments were run: the mean as budget loss, and in upcycled models the paper's
# gates, which `upcycle` makes only where it is asked to
MEAN_LOSS = {"cct_budget_loss": "mean"}
PAPERS_CCT = {
    **MEAN_LOSS,
    "cct_budget_bias": False,
    "cct_control_symbols": True,
    "cct_full_budget_is_plain": False,
    "cct_gate_training": "soft",
}


def write_upcycled(plain: str | Path, folder: Path, *, seed: int, **fields: Any) -> None:
    """Write the gated model of a plain checkpoint, and its tokenizer, to a folder that has none yet.

    Args:
        seed: of the gates' weights.
        fields: of `hf_moa.upcycle`.
    """
    import torch
    from transformers import AutoTokenizer

    from hf_moa import upcycle

    with claimed(folder):
        if not (folder / "tokenizer_config.json").is_file():
            torch.manual_seed(seed)
            upcycle(plain, **fields).save_pretrained(folder)
            AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
