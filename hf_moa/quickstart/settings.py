"""Every number a quickstart depends on, with its default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QuickstartSettings:
    """Sizes and schedules, chosen for a few minutes on two CPU cores.

    Args:
        seed: of the splits, of the weights and of the order of training.
        num_labels: classes of the classification task.
        vocab_size: WordPiece entries.
        hidden_size, num_layers, num_heads, ffn_size: of the model.
        mae_gate_hidden_size, cct_gate_hidden_size: of its gates.
        budgets: compute budgets it learns, repeats being sampling weights.
        cct_noise_max, cct_budget_loss_coef: of CCT. The paper's noise of 5, and a weight of 1 over the
            number of budgets, are for runs a thousand times as long: here they would drown the task.
        cct_sublayer_norm: of CCT. Without the extra LayerNorms all gates start open, and so small a
            model learns its task sooner.
        block_length: tokens of a pretraining sequence; also the most positions of the model.
        mlm_probability: share of tokens hidden in pretraining. At a few passes over little text a
            higher share than BERT's 0.15 teaches more per step.
        pretrain_epochs, pretrain_batch_size, pretrain_learning_rate: of pretraining.
        finetune_epochs, finetune_batch_size, finetune_learning_rate: of finetuning.
        finetune_dropout: dropout of finetuning. Pretraining has none: it sees each text a few times.
        max_steps: most optimiser steps of either training, -1 for no limit. A handful is enough to
            try every stage; the accuracy is then that of an untrained model.

    Raises:
        ValueError: a field breaks its rule.
    """

    seed: int = 0
    num_labels: int = 10
    vocab_size: int = 4096
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 8
    ffn_size: int = 512
    mae_gate_hidden_size: int = 64
    cct_gate_hidden_size: int = 32
    budgets: tuple[float, ...] = (1.0, 1.0, 0.5, 0.33)
    cct_noise_max: float = 1.0
    cct_budget_loss_coef: float = 0.1
    cct_sublayer_norm: bool = False
    block_length: int = 64
    mlm_probability: float = 0.25
    pretrain_epochs: float = 2.0
    pretrain_batch_size: int = 16
    pretrain_learning_rate: float = 1e-3
    finetune_epochs: float = 10.0
    finetune_batch_size: int = 16
    finetune_learning_rate: float = 1e-3
    finetune_dropout: float = 0.1
    max_steps: int = -1

    def __post_init__(self) -> None:
        for name in ("pretrain_epochs", "finetune_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 (got {getattr(self, name)})")
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, or -1 for no limit (got {self.max_steps})")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more (got {self.seed})")
