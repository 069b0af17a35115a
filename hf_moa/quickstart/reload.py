"""Checks that a saved classifier computes in a new process, bit for bit, what it did before.

Run as a program it is that process: it reads a JSON list of texts from standard input and prints
their logits as a JSON list.

    echo '["Return the name."]' | python -m hf_moa.quickstart.reload ./hf-moa-quickstart/classifier
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_moa


class ReloadError(RuntimeError):
    """The checkpoint that was written does not give back the model that was trained."""


@torch.inference_mode()
def classify(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> torch.Tensor:
    """Logits `[len(texts), labels]`, float32, of all texts as one padded batch."""
    batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    return model(**batch).logits.float()


def check_reload(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: str | Path,
    texts: list[str],
) -> None:
    """Compares `model` in memory with `checkpoint` loaded by the Auto classes in a new process.

    Args:
        model: the trained model, in eval mode, on the CPU.
        tokenizer: its tokenizer.
        checkpoint: folder that both were saved to.
        texts: what to compare the logits of.

    Raises:
        ReloadError: the process failed, or any logit differs by a bit.
    """
    expected = classify(model, tokenizer, texts)
    # The checkout comes first on the path, as it may have done here.
    package_root = str(Path(hf_moa.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = package_root if not inherited else os.pathsep.join([package_root, inherited])
    # Sums over other numbers of threads round differently.
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hf_moa.quickstart.reload", str(checkpoint), "--threads", threads],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise ReloadError(f"loading {checkpoint} in a new process failed:\n{done.stderr}")
    # JSON numbers carry float32 exactly: they are written with as many digits as float64 needs.
    logits = torch.tensor(json.loads(done.stdout), dtype=torch.float32)
    if logits.shape != expected.shape or not torch.equal(logits, expected):
        raise ReloadError(
            f"the model reloaded from {checkpoint} must give the very logits of the trained one "
            f"(got {_difference(logits, expected)})"
        )


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> str:
    if logits.shape != expected.shape:
        return f"shape {tuple(logits.shape)} for {tuple(expected.shape)}"
    return f"a largest difference of {(logits - expected).abs().max().item():.3g}"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder of a saved classifier and its tokenizer")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForSequenceClassification.from_pretrained(args.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    print(json.dumps(classify(model, tokenizer, json.load(sys.stdin)).tolist()))


if __name__ == "__main__":
    _main()
