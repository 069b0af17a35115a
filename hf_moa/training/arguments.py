"""`MoaTrainingArguments`: transformers' training arguments, and those of the gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from .cpu_processes import train_together_on_cpu, warn_of_single_process
from .distillation_arguments import DistillationArguments
from .gate_descent import GATE_LEARNING_RATE, MAE_TRAININGS, check_gate_every_n_epochs
from .parameter_groups import BUDGET_BIAS_LEARNING_RATE, check_learning_rate


@dataclass
class GateTrainingArguments:
    """How the gates are trained; see `MoaTrainingArguments`."""

    mae_training: str | None = field(
        default=None,
        metadata={
            "help": "MAE: bcd (block coordinate descent: experts are trained one per sequence, gates by "
            "SGD in every n-th epoch), joint (gates and experts together, on the mixture) or expert "
            "(only experts). Default: bcd for gates that can learn, expert for uniform ones, joint for "
            "frozen ones and under a PEFT adapter.",
            "choices": MAE_TRAININGS,
        },
    )
    gate_every_n_epochs: int = field(
        default=5, metadata={"help": "BCD: gates learn in the epochs 0, n, 2n, ..."}
    )
    gate_epoch_steps: int | None = field(
        default=None,
        metadata={
            "help": "BCD: updates that count as an epoch, for data that has no end. Default: epochs."
        },
    )
    gate_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the gates (MAE's, routers, CCT's control networks and symbols), "
            "which the schedule scales as it does learning_rate. Default: learning_rate. With BCD: "
            "constant, of the SGD of only MAE's gates, 1 by default."
        },
    )
    budget_bias_learning_rate: float = field(
        default=BUDGET_BIAS_LEARNING_RATE,
        metadata={"help": "Learning rate of gates' biases for each budget (`budget_bias`)."},
    )
    sync_gate_norm: bool = field(
        default=True,
        metadata={
            "help": "Several processes: normalise the MAE gates' inputs over the batches of all, as "
            "nn.SyncBatchNorm does. Otherwise each process normalises over its own."
        },
    )
    router_global_balance: bool = field(
        default=False,
        metadata={
            "help": "Several processes: the routers' balance loss takes the load over the batches of "
            "all. Otherwise each process balances its own."
        },
    )
    cct_noise_steps: float | None = field(
        default=None,
        metadata={
            "help": "CCT: optimiser steps over which the noise of soft gates grows to the config's "
            "cct_noise_max, and that of hard ones falls from there to 0; below 1, that part of the run; "
            "-1: all of it. Default with CCT: all of it, for hard gates 0.9."
        },
    )

    def __post_init__(self):
        warn_of_single_process()
        if train_together_on_cpu():
            self.use_cpu = True
        super().__post_init__()  # type: ignore[misc]  # of the training arguments, behind this class
        self.check_gate_training()

    def gate_epoch(self, epoch: int, step: int) -> int:
        """The epoch of BCD that an update belongs to, of the data's epoch and the updates before it."""
        return epoch if self.gate_epoch_steps is None else step // self.gate_epoch_steps

    @property
    def descent_learning_rate(self) -> float:
        """Of the SGD of MAE's gates in BCD."""
        return GATE_LEARNING_RATE if self.gate_learning_rate is None else self.gate_learning_rate

    def check_gate_training(self) -> None:
        """Raise a ValueError for a value that breaks its rule (as one set later may)."""
        if self.mae_training not in (None, *MAE_TRAININGS):
            choices = ", ".join(map(repr, MAE_TRAININGS))
            raise ValueError(f"mae_training must be {choices} or None (got {self.mae_training!r}).")
        check_gate_every_n_epochs(self.gate_every_n_epochs)
        if self.gate_learning_rate is not None:
            check_learning_rate("gate_learning_rate", self.gate_learning_rate)
        check_learning_rate("budget_bias_learning_rate", self.budget_bias_learning_rate)
        steps = self.gate_epoch_steps
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(
                f"gate_epoch_steps must be an integer of at least 1, or None for epochs (got {steps!r})."
            )
        for name in ("sync_gate_norm", "router_global_balance"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False (got {getattr(self, name)!r}).")
        check_noise_steps(self.cct_noise_steps)


@dataclass
class MoaTrainingArguments(GateTrainingArguments, DistillationArguments, TrainingArguments):
    """`TrainingArguments`, and:

    Args:
        mae_training (`str`, *optional*): how an MAE model is trained.

            - `"bcd"`: block coordinate descent (Peng et al. 2020, section 3.2). Every update is an F
              step (one expert per sequence, drawn from its gates); in the epochs 0, n, 2n, ... a G
              step (only the gates, by plain SGD) precedes it on the same accumulated batch.
            - `"joint"`: gates and experts together, on the mixture (the paper's NOBCD).
            - `"expert"`: only F steps, which is how uniform gates (UNI-MAE) are trained.

            Default: `"bcd"` where gates can learn, `"expert"` where they are uniform; `"joint"` for a
            model with a PEFT adapter, or with frozen gates.
        gate_every_n_epochs (`int`, defaults to 5): n of BCD.
        gate_epoch_steps (`int`, *optional*): updates that count as an epoch of BCD, instead of the
            data's own epochs: for streams without an end, where every update would be of epoch 0.
        gate_learning_rate (`float`, *optional*): of the gates: MAE's, routers, CCT's control networks
            and symbols. They are in parameter groups of their own, and the schedule scales it as it does
            `learning_rate`, the default. With BCD it is only of MAE's gates and their SGD: constant,
            without momentum, weight decay or clipping, 1.0 by default.
        budget_bias_learning_rate (`float`, defaults to 0.05): of the parameters `budget_bias`, which
            move a layer's gates at one budget.
        sync_gate_norm (`bool`, defaults to `True`): with several processes, the gates' batch
            normalisation takes the batches of all.
        router_global_balance (`bool`, defaults to `False`): with several processes, the routers'
            balance loss takes the load over the batches of all.
        cct_noise_steps (`float`, *optional*): optimiser steps over which CCT's noise grows linearly to
            `config.cct_noise_max` (Bapna et al. 2020), or with `cct_gate_training="hard"` falls from
            there to 0; below 1, that part of the run; -1, all of it. Default with CCT: -1, for hard
            gates 0.9.
        budget_sampling (`str`, *optional*): how a model with budgets is trained.

            - `"draw"`: a step draws budgets from the configuration's list, where repeats are weights.
            - `"all"`: every budget in every step, one after the other. The gradient is the mean over
              budgets, weighted by their share of the list (Yu & Huang 2019).

            Default: `"draw"`; `"all"` with `teacher="self"`.
        distillation_weight (`float`, defaults to 0.5): with a teacher, w of (1 - w) * loss of the labels
            + w * loss of the logits. Label smoothing is of the labels' loss only.
        distillation_temperature (`float`, defaults to 2.0): what the logits of both are divided by.
        distillation_hidden_weight (`float`, *optional*): of the hidden states' relative squared error,
            the mean over layers and, in encoder-decoder models, over both halves. Default: 1; 0 for
            BERT's and GPT-2's sequence classifiers with CCT, whose gates should be free to leave out
            what their head does not read.
        distillation_hidden_states (`list[int]` or `list[str]`, *optional*): which hidden states: 0 for
            the embeddings, -1, the default, for the last layer's; `"1:2"` compares the student's first
            layer with the teacher's second.
        distillation_cache (`bool`, defaults to `False`): the teacher's logits for the training data are
            computed once, and kept: 4 bytes * examples * classes on the training device. For
            classification and regression with `distillation_hidden_weight=0`, on data that a collator
            does not change.

    Raises:
        ValueError: a value breaks its rule; the message names the field, the rule and the value.
    """


@dataclass
class MoaSeq2SeqTrainingArguments(
    GateTrainingArguments, DistillationArguments, Seq2SeqTrainingArguments
):
    """`Seq2SeqTrainingArguments` with the fields of `MoaTrainingArguments`."""


def check_noise_steps(value: float | None) -> None:
    """Raise a ValueError unless it is None, -1, a number in (0, 1), or a whole number from 1 on."""
    if value is None or value == -1:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not (0 < value < 1 or (value >= 1 and value == int(value))):
        raise ValueError(
            "cct_noise_steps must be a whole number of steps, a part of the run below 1, or -1 for all "
            f"of it (got {value!r})."
        )
