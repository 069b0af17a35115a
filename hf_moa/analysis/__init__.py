"""What the gates learned: measures over a stream of data, their plots and a report.

analysis = analyze(model, batches, tokenizer=tokenizer)
analysis.tables["mae_entropy"]  # DataFrames
write_report(analysis, "report.html")
"""

from hf_moa.extras import from_extra

with from_extra("analysis"):
    from .analyze import Analysis, analyze
    from .cct import CctMeasure
    from .mae import MaeMeasure
    from .metrics import budget_metrics, evaluate, expert_selection
    from .moa import MoaMeasure
    from .observe import Observation, observe
    from .report import write_report
    from .token_counts import TokenExpertCounts
    from .vocabulary import Vocabulary

__all__ = [
    "Analysis",
    "CctMeasure",
    "MaeMeasure",
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
