"""Model cards: what a gated model is, how to load it, how it was trained and what it was measured at.

from hf_moa.model_card import checkpoint_card, model_card, trainer_card
print(checkpoint_card("./my-checkpoint", license="apache-2.0"))  # a huggingface_hub.ModelCard

`MoaTrainer` writes one when it saves or pushes, `hf-moa card` for a checkpoint. Nothing here touches the
network.
"""

from .card import HEADINGS, model_card
from .checkpoint import checkpoint_card
from .existing import merged_card, read_card, write_card
from .expert_load import MeanExpertLoad
from .facts import DataUsed, TrainingFacts, eval_results
from .trainer import trainer_card, write_trainer_card

__all__ = [
    "HEADINGS",
    "DataUsed",
    "MeanExpertLoad",
    "TrainingFacts",
    "checkpoint_card",
    "eval_results",
    "merged_card",
    "model_card",
    "read_card",
    "trainer_card",
    "write_card",
    "write_trainer_card",
]
