"""Model cards: what a gated model is, how to load it, how it was trained and what it was measured at.

from hf_moa.model_card import checkpoint_card, model_card, trainer_card
print(checkpoint_card("./my-checkpoint", license="apache-2.0"))  # a huggingface_hub.ModelCard

`MoaTrainer` writes one when it saves or pushes, `push_to_hub` of a model or an adapter when it pushes,
`hf-moa card` for a checkpoint or an adapter. The text is in card.md.jinja. Nothing here touches the
network, except for the configuration of an adapter's base that is not on this machine.
"""

from hf_moa.adapter_files import Adapter
from hf_moa.expert_load import MeanExpertLoad
from hf_moa.run_facts import DataUsed, TrainingFacts

from .card import HEADINGS, model_card
from .checkpoint import checkpoint_card
from .data_and_results import eval_results
from .existing import is_unfinished, merged_card, read_card, write_card
from .trainer import trainer_card, write_trainer_card

__all__ = [
    "HEADINGS",
    "Adapter",
    "DataUsed",
    "MeanExpertLoad",
    "TrainingFacts",
    "checkpoint_card",
    "eval_results",
    "is_unfinished",
    "merged_card",
    "model_card",
    "read_card",
    "trainer_card",
    "write_card",
    "write_trainer_card",
]
