"""Training on Accelerate, on one process or many: the loop of the `run_*_no_trainer.py` scripts."""

from .arguments import AccelerateArguments, make_accelerator
from .checkpoints import checkpoint_to_resume
from .evaluation import mean_over_labels, perplexity_of
from .results import About
from .training import GatedTraining

__all__ = [
    "About",
    "AccelerateArguments",
    "GatedTraining",
    "checkpoint_to_resume",
    "make_accelerator",
    "mean_over_labels",
    "perplexity_of",
]
