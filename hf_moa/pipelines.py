"""transformers' text pipelines with a budget in the call, as models take it.

    classify = pipeline("text-classification", model="./bert-cct")
    classify("a sentence", budget=0.5)

`import hf_moa` registers these instead of transformers' own, of which they are subclasses. For a model
that is not gated they change nothing. (`text-generation` hands `budget` to `generate` by itself.)
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from .gated_models import is_instance_by_name
from .modeling.config.gating import GatingConfig

TASKS = {
    "text-classification": "TextClassificationPipeline",
    "token-classification": "TokenClassificationPipeline",
    "feature-extraction": "FeatureExtractionPipeline",
    "fill-mask": "FillMaskPipeline",
    "zero-shot-classification": "ZeroShotClassificationPipeline",
}


class _AtBudget:
    """A model that is called with a budget: all that a pipeline does with a model."""

    def __init__(self, model: Any, budget: Any):
        self._model = model
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs, budget=self._budget)


class BudgetPipeline:
    """Mixin for a pipeline of transformers; put it first.

    Args:
        budget: of the call, or of the pipeline, for calls without one: as the model's `forward` takes
            it. Default: what `set_budget` chose, else the largest.

    Raises:
        ValueError: a budget that the model does not know, or of a gated model without budgets.

    Example:
        >>> classify = pipeline("text-classification", model="./bert-cct", budget=0.5)
        >>> classify("a sentence", budget=1)
    """

    model: Any

    def _sanitize_parameters(self, *args: Any, **kwargs: Any) -> tuple[dict, dict, dict]:
        budget = None
        if is_instance_by_name(self.model.config, GatingConfig):
            budget = kwargs.pop("budget", None)
        parent: Any = super()
        before, forward, after = parent._sanitize_parameters(*args, **kwargs)
        return before, forward if budget is None else {**forward, "budget": budget}, after

    def _forward(self, model_inputs: Any, budget: Any = None, **kwargs: Any) -> Any:
        parent: Any = super()
        if budget is None:
            return parent._forward(model_inputs, **kwargs)
        # not `set_budget`: another thread may be computing at another one
        at_budget: Any = copy.copy(self)
        at_budget.model = _AtBudget(self.model, budget)
        return at_budget._forward(model_inputs, **kwargs)


def register_pipelines() -> None:
    """Let `transformers.pipeline` make them; not where somebody has put a pipeline of their own."""
    for task, name in TASKS.items():
        registered = PIPELINE_REGISTRY.supported_tasks[task]
        if str(registered["impl"]).startswith("transformers."):
            registered["impl"] = f"{__name__}.{name}"


def __getattr__(name: str) -> Any:
    """A pipeline of `TASKS`, made when it is asked for: its parent is slow to import."""
    if name not in TASKS.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    parent = getattr(transformers, name)
    made = type(name, (BudgetPipeline, parent), {"__module__": __name__, "__doc__": parent.__doc__})
    globals()[name] = made
    return made
