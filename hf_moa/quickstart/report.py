"""The results of a quickstart, as JSON, as Markdown and as a few lines on the screen."""

import json
from pathlib import Path
from typing import Any

from hf_moa.training import format_budget_table

_COLUMNS = {
    "budget": "budget",
    "compute_fraction": "compute fraction",
    "eval_accuracy": "accuracy",
    "eval_loss": "loss",
    "seconds": "seconds",
}


def write_report(folder: Path, results: dict[str, Any]) -> None:
    """Writes `results.json` and `results.md` into `folder`. See `run_quickstart` for `results`."""
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(_markdown(results), encoding="utf-8")


def summary(results: dict[str, Any]) -> str:
    """What was learned, in a dozen lines."""
    seconds = results["seconds"]
    stages = ", ".join(f"{stage} {value:.0f}" for stage, value in seconds.items())
    return "\n".join(
        [
            _pretraining_line(results),
            "",
            _table(results),
            f"Always answering with the most frequent class: {results['majority_rate']:.4f}",
            "",
            f"{sum(seconds.values()):.0f} s in all: {stages}",
        ]
    )


def _table(results: dict[str, Any]) -> str:
    rows = results["classification"]
    return format_budget_table([{title: row[name] for name, title in _COLUMNS.items()} for row in rows])


def _pretraining_line(results: dict[str, Any]) -> str:
    loss = results["masked_language"]
    return (
        f"Masked-language loss on held-out text: {loss['loss_before']:.2f} before pretraining, "
        f"{loss['loss_after']:.2f} after {loss['steps']} steps (from token frequencies only: "
        f"{loss['unigram']:.2f})"
    )


def _markdown(results: dict[str, Any]) -> str:
    corpus, environment = results["corpus"], results["environment"]
    picture = "![gates](gates.png)\n" if results["picture"] else ""
    return f"""# hf-moa quickstart

A BERT with mixture-of-heads attention (MAE) and compute budgets (CCT), {results["parameters"]:,}
parameters, pretrained from random weights on the text of Python's own documentation and finetuned
to name the top-level package that a docstring was written for.

{_pretraining_line(results)}.

{_table(results)}

Always answering with the most frequent class: {results["majority_rate"]:.4f}, on the same
{corpus["evaluation"]:,} docstrings. Training saw {corpus["train"]:,} others of the
{len(results["labels"])} classes: {", ".join(results["labels"])}.

What the figures mean:

- Every word that contains the name of one of the classes is masked, in every docstring. The
  evaluation docstrings stand in neither the pretraining nor the training text, and no text stands
  on both sides; docstrings that differ by a word ("Return the width", "Return the height") do.
- Compute fraction: multiply-accumulates carried out of those the gates can skip.
- Seconds: the whole evaluation loop, in which so small a model is not the only cost.
- One run with one seed, on {corpus["evaluation"]:,} texts: differences of a few percent are chance.

{picture}
The classifier was saved, loaded with `AutoModelForSequenceClassification` in a new process, and gave
the same logits bit for bit on {results["reload_texts"]} docstrings.

## Settings

{_two_columns(results["settings"])}

## Text

{_two_columns(corpus)}

## Seconds

{_two_columns({stage: f"{value:.1f}" for stage, value in results["seconds"].items()})}

## Environment

{_two_columns(environment)}
"""


def _two_columns(values: dict[str, Any]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
