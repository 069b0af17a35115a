"""What the experiments in translation share: a small T5 from English to German."""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from corpora import multi30k, read_lines, tatoeba
from scripts import Flags, merged, run_script_once, starting_from

CORPORA = {"multi30k": multi30k, "tatoeba": tatoeba}
SIZE = {
    "d_model": 128,
    "d_kv": 16,
    "num_heads": 8,
    "d_ff": 512,
    "num_layers": 3,
    "dropout_rate": 0.1,
}
CHECKPOINT_EVERY = 100  # updates; the last 5 are averaged

FLAGS: Flags = {
    "model_type": "moa_t5",
    "vocab_size": 4096,
    "config_overrides": SIZE,
    "max_source_length": 64,
    "max_target_length": 64,
    "num_beams": 5,
    "optim": "adafactor",  # AdamW leaves the embeddings, of deviation 1, where they were
    "learning_rate": 3e-2,
    "num_warmup_steps": 200,
    "lr_scheduler_type": "cosine",
    "label_smoothing_factor": 0.1,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 100,
    "train_sampling_strategy": "group_by_length",
    "checkpointing_steps": CHECKPOINT_EVERY,
    "checkpoints_total_limit": 5,
    "average_checkpoints": 5,
    "resume_from_checkpoint": "latest",
}


def train_translation(
    corpus: str,
    flags: Flags,
    *,
    steps: int,
    seed: int,
    data_dir: str,
    work_dir: str | Path,
    folder: str | Path,
    start: str | Path | None = None,
    evaluate: bool = True,
    text: str = "test",
) -> dict[str, Any]:
    """One run of `examples/run_translation_no_trainer.py`.

    Args:
        corpus: one of `CORPORA`.
        flags: other than `FLAGS`.
        data_dir: of the corpora.
        work_dir: for corpora that have to be split.
        folder: for the model; a run that was cut off there goes on, one that ended is not made again.
        start: folder of a model to train on; default: a new one.
        evaluate: in the end.
        text: that it is evaluated on, "test" or "validation".

    Returns:
        What the script measured, and the `files`.
    """
    files = CORPORA[corpus](data_dir, work_dir)
    common = FLAGS if start is None else starting_from(start, FLAGS)
    flags = {
        **merged(common, flags),
        "train_source": files["train_source"],
        "train_target": files["train_target"],
        "max_train_steps": steps,
        "seed": seed,
    }
    if evaluate:
        flags |= {
            "validation_source": files[f"{text}_source"],
            "validation_target": files[f"{text}_target"],
            "eval_steps": steps + 1,  # only in the end
        }
    found = run_script_once("run_translation_no_trainer", flags, folder)
    for checkpoint in Path(folder).glob("step_*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # another process may be about it, too
    return {**found, "files": files}


class Translator:
    """Translations of a text, and their BLEU.

    Args:
        folder: of the tokenizer.
        source, target: text files, line by line.
        limit: lines to translate; default: all.
        batch_size: sentences that are translated together.
    """

    def __init__(
        self,
        folder: str | Path,
        source: str,
        target: str,
        *,
        limit: int | None = None,
        batch_size: int = 100,
    ) -> None:
        from transformers import AutoTokenizer

        self.batch_size = batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.sources, self.references = (
            [line.strip() for line in read_lines(path)][:limit] for path in (source, target)
        )

    def translate(self, model: Any, *, new_tokens: int | None = None, **kwargs: Any) -> list[str]:
        """Translations by a greedy search, or what the arguments of `model.generate` say.

        Args:
            new_tokens: exactly so many in each; default: until the end of the sentence.
        """
        import torch

        length = {"max_length": FLAGS["max_target_length"]}
        if new_tokens is not None:
            length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        found = []
        for i in range(0, len(self.sources), self.batch_size):
            batch = self.tokenizer(
                self.sources[i : i + self.batch_size],
                padding=True,
                truncation=True,
                max_length=FLAGS["max_source_length"],
                return_tensors="pt",
            ).to(model.device)
            with torch.no_grad():
                ids = model.generate(
                    batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    **length,
                    **kwargs,
                )
            found += self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in found]

    def bleu(self, model: Any, **kwargs: Any) -> float:
        from sacrebleu.metrics import BLEU

        return BLEU().corpus_score(self.translate(model, **kwargs), [self.references]).score


def held_out_text(
    options: argparse.Namespace, folder: str | Path, limit: int | None = None, batch_size: int = 100
) -> Translator:
    """Multi30k's test text, and the tokenizer of a folder."""
    files = multi30k(options.data_dir, options.models_dir)
    return Translator(
        folder, files["test_source"], files["test_target"], limit=limit, batch_size=batch_size
    )


def labelled(tokenizer: Any, sources: list[str], targets: list[str]) -> dict[str, Any]:
    """A model's arguments for sentences and their translations."""
    encode = partial(tokenizer, padding=True, return_tensors="pt")
    source, target = encode(sources), encode(text_target=targets)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    return {**source, "labels": labels}


def on_references(model, translator: Translator, **budget: float):
    """The model's outputs for the sources and their references."""
    import torch

    batch = labelled(translator.tokenizer, translator.sources, translator.references)
    with torch.no_grad():
        return model(**batch, **budget)
