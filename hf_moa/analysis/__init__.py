"""What the gates learned: measures over a stream of data, their plots and a report.

analysis = analyze(model, batches, tokenizer=tokenizer)
analysis.tables["mae_entropy"]  # DataFrames
write_report(analysis, "report.html")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_moa.extras import from_extra

with from_extra("analysis"):
    from .analyze import Analysis, analyze
    from .measure import Measure
    from .metrics import budget_metrics, evaluate, expert_selection
    from .observe import Observation, observe
    from .report import write_report
    from .token_counts import TokenExpertCounts
    from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from hf_moa.modeling.cct.analysis import CctMeasure
    from hf_moa.modeling.mae.analysis import MaeMeasure
    from hf_moa.modeling.routing.analysis import MoaMeasure

__all__ = [
    "Analysis",
    "CctMeasure",
    "MaeMeasure",
    "Measure",
    "MoaMeasure",
    "Observation",
    "TokenExpertCounts",
    "Vocabulary",
    "analyze",
    "budget_metrics",
    "evaluate",
    "expert_selection",
    "observe",
    "write_report",
]

# Measures of mechanisms, which need this package first.
_MEASURES = {"MaeMeasure": "mae", "MoaMeasure": "routing", "CctMeasure": "cct"}


def __getattr__(name: str) -> Any:
    if name not in _MEASURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_moa.modeling.{_MEASURES[name]}.analysis"), name)
