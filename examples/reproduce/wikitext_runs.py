"""One run of a language model on WikiText, for the experiments that share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corpora import wikitext
from scripts import Flags, run_script_once


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
    text: str = "test",
) -> dict[str, Any]:
    """Run `run_clm_no_trainer` or `run_mlm_no_trainer`, evaluated in the end.

    Args:
        script: which one.
        corpus: "wikitext-2" or "wikitext-103".
        flags: of the model and its training.
        data_dir, work_dir: of `wikitext`.
        folder: for the model; a run that ended there is not made again.
        text: that it is evaluated on, "test" or "validation".

    Returns:
        What the script measured, and the `files`.
    """
    files = wikitext(corpus, data_dir, work_dir)
    flags = {
        **flags,
        "train_file": files["train"],
        "validation_file": files[text],
        "max_train_steps": steps,
        "eval_steps": steps + 1,  # in the end alone
        "seed": seed,
    }
    return {**run_script_once(script, flags, folder), "files": files}
