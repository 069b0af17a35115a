"""What the experiments with one checkpoint of several speeds share: a plain model's students.

They start from its weights, and learn from it: itself, its cuts to fewer layers, one checkpoint with
nested budgets, one whose budgets only have fewer layers, and one with CCT.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts import budget_argument
from summaries import at_budget

PLAIN, ITSELF = "plain", "plain, distilled"
NESTED, LAYERS, CCT = "nested", "nested layers", "CCT"
Budgets = Mapping[str, Iterable[float]]  # of each model that has some


def write_student(
    teacher: Any,
    folder: str | Path,
    *,
    layers: int | None = None,
    batches: Callable[[], Iterable[dict]] | None = None,
    **fields: Any,
) -> None:
    """Write what a student starts from.

    Args:
        teacher: the plain model.
        folder: of the student.
        layers: that it is cut to, in each of its halves.
        batches: labelled ones, by which heads and neurons are sorted before they are given budgets.
        fields: of `hf_moa.upcycle`, for a student with budgets.
    """
    from hf_moa import importance, upcycle

    if layers is not None:
        student = cut(teacher, layers)
    elif fields:
        student = upcycle(teacher, "mha", importance=importance(teacher, batches()), **fields)
    else:
        student = teacher
    student.save_pretrained(folder)


def cut(model: Any, layers: int) -> Any:
    """The model with so many of its layers, evenly spaced from the first on, each as it is."""
    from hf_moa import upcycle

    gated = upcycle(model, "mha")
    config = gated.config
    nested = only_layers([config.num_hidden_layers, layers], config.num_attention_heads, config.ffn_size)
    return upcycle(gated, "mha", **nested).extract(nested["nested_budgets"][1])


def only_layers(layers: Sequence[int], heads: int, ffn_size: int) -> dict[str, list]:
    """Fields of nested budgets that have fewer layers, and of each all heads and neurons.

    Args:
        layers: of each budget, the first all of them.
        heads, ffn_size: of a layer.
    """
    return {
        "nested_budgets": [round(number / layers[0], 2) for number in layers],
        "nested_heads": [heads] * len(layers),
        "nested_ffn_sizes": [ffn_size] * len(layers),
        "nested_layers": [*layers],
    }


def candidates(
    models: Iterable[str],
    budgets: Budgets,
    trained: dict[str, Path],
    make_student: Callable[[str, str], None],
    auto_class: Any,
    run: Callable[[Any, dict], Any],
    *,
    device: str = "cpu",
) -> dict[str, Callable[[], Any]]:
    """What is timed: each model at each of its budgets, all of this package's classes.

    Args:
        models: their names. `ITSELF` is as fast as the plain one, and left out.
        trained: folders of those whose time depends on what they learned. The others are as fast before
            training as after it, and made by `make_student(name, folder)`.
        run: of a model, with what chooses the budget.
        device: of the models.
    """
    from hf_moa import upcycle

    found = {}
    for name in models:
        if name == ITSELF:
            continue
        with tempfile.TemporaryDirectory() as start:
            if name not in trained:
                make_student(name, start)
            model = auto_class.from_pretrained(trained.get(name, start))
        model = model if name in budgets else upcycle(model, "mha")
        model = model.to(device).eval()
        for column, budget in columns(name, budgets).items():
            found[column] = partial(run, model, budget_argument(budget))
    return found


def columns(model: str, budgets: Budgets) -> dict[str, float | None]:
    """What tables call a model at each of its budgets -> the budget."""
    return {at_budget(model, budget): budget for budget in budgets.get(model, (None,))}
