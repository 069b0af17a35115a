"""What the experiments on WikiText share: a small BERT, and one run of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corpora import wikitext
from scripts import Flags, run_script_once, starting_from

LENGTH = 32  # tokens of a block: BERT learns to look at neighbours twice as soon as in 128
SMALL_BERT: Flags = {
    "model_type": "moa_bert",
    "vocab_size": 4096,
    "config_overrides": {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "max_position_embeddings": LENGTH,
        "pre_norm": True,
        "initializer_range": 0.08,  # 0.02 is for d=768; here it leaves attention uniform for long
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
    },
    "max_seq_length": LENGTH,
    "mlm_probability": 0.3,
    "num_warmup_steps": 150,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 64,
    "mixed_precision": "bf16",
}


def train_on_wikitext(
    script: str,
    corpus: str,
    flags: Flags,
    *,
    steps: int,
    seed: int,
    data_dir: str | None,
    work_dir: str | Path,
    folder: str | Path,
    start: str | Path | None = None,
    text: str = "test",
) -> dict[str, Any]:
    """Run `run_clm_no_trainer` or `run_mlm_no_trainer`, evaluated in the end.

    Args:
        script: which one.
        corpus: "wikitext-2" or "wikitext-103".
        flags: of the model and its training.
        data_dir, work_dir: of `wikitext`.
        folder: for the model; a run that ended there is not made again.
        start: folder of a model to train on; default: a new one.
        text: that it is evaluated on, "test" or "validation".

    Returns:
        What the script measured, and the `files`.
    """
    files = wikitext(corpus, data_dir, work_dir)
    flags = {
        **(flags if start is None else starting_from(start, flags)),
        "train_file": files["train"],
        "validation_file": files[text],
        "max_train_steps": steps,
        "eval_steps": steps + 1,  # only in the end
        "seed": seed,
    }
    return {**run_script_once(script, flags, folder), "files": files}
