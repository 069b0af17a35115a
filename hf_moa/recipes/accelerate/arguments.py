"""The flags of the scripts on Accelerate (`run_*_no_trainer.py`), and the processes that they start.

Names and meanings are those of transformers' scripts of the same names. Of their flags, these are left
out:

| flag | why |
|---|---|
| `use_slow_tokenizer` | transformers 5 has one tokenizer for a model and ignores the choice |
| `low_cpu_mem_usage` | transformers 5 always loads a checkpoint so and ignores the choice |
| `overwrite_cache` | nothing is kept to overwrite: every start reads and tokenises its text |
| `max_length` | there `run_translation_no_trainer.py` takes it and does nothing with it |

Other defaults than there: `output_dir` is needed and `seed` is 42, for a run to go on from a checkpoint;
`max_seq_length` and `max_source_length` are 128 and `num_beams` is 5. `source_lang` and `target_lang`
are as in the data.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, set_seed
from transformers import SchedulerType

from hf_moa.training.arguments import GateTrainingArguments
from hf_moa.training.checkpoints import discard_unfinished

from ..command_line import check_counts, optional
from ..splitting import SplitArguments

logger = logging.getLogger(__name__)

CHOICES = {
    "train_sampling_strategy": ("random", "group_by_length"),
    "optim": ("adamw", "adafactor"),
}
ADAM_BETA2 = 0.999
SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)  # Accelerate's own


@dataclass
class _RunArguments:
    output_dir: str = field(metadata={"help": "Folder for checkpoints, results and the final model."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Sequences per process in a forward pass of training."}
    )
    per_device_eval_batch_size: int = field(
        default=8, metadata={"help": "Sequences per process in a forward pass of evaluation."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forward passes per update."})
    num_train_epochs: int = field(default=3, metadata={"help": "Epochs."})
    max_train_steps: int | None = optional("Updates in all, instead of num_train_epochs.")
    learning_rate: float = field(default=5e-5, metadata={"help": "Largest learning rate."})
    optim: str = field(
        default="adamw",
        metadata={
            "help": "adamw, or adafactor (torch's), whose learning_rate is relative to the size of each "
            "weight: for a T5 from random weights, whose embeddings are far larger than its others. "
            "(Not for a checkpoint converted to CCT: its gates and control symbols start at zero, and "
            "would hardly move.)"
        },
    )
    weight_decay: float = field(
        default=0.0, metadata={"help": "Of the optimiser, but for biases and norms."}
    )
    adam_beta2: float = field(default=ADAM_BETA2, metadata={"help": "AdamW's."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip gradients; 0 does not."})
    lr_scheduler_type: SchedulerType = field(
        default=SchedulerType.LINEAR, metadata={"help": "Schedule of the learning rate."}
    )
    num_warmup_steps: int = field(default=0, metadata={"help": "Updates of its warm-up."})
    label_smoothing_factor: float = field(default=0.0, metadata={"help": "Share of the uniform labels."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute activations again instead of keeping them."}
    )
    seed: int = field(default=42, metadata={"help": "Of everything that is drawn."})
    train_sampling_strategy: str = field(
        default="random",
        metadata={
            "help": "Order of the sequences: random, or group_by_length, which puts those of similar "
            "length into a batch, for less padding of pairs and of single lines."
        },
    )
    logging_steps: int = field(default=50, metadata={"help": "Updates between two logs."})
    eval_steps: int | None = optional("Updates between two evaluations. Default: an epoch.")
    checkpointing_steps: str | None = optional("Updates between two checkpoints, or 'epoch'.")
    checkpoints_total_limit: int | None = optional("Keep so many checkpoints, the latest.")
    resume_from_checkpoint: str | None = optional(
        "Folder of a checkpoint, or 'latest' for the last one in output_dir (none: start from scratch)."
    )
    average_checkpoints: int = field(
        default=0, metadata={"help": "In the end, average the weights of so many last checkpoints."}
    )
    mixed_precision: str | None = field(
        default=None,
        metadata={"help": "Default: what Accelerate is set to.", "choices": ["no", "fp16", "bf16"]},
    )
    use_cpu: bool = field(default=False, metadata={"help": "Do not use an accelerator."})
    with_tracking: bool = field(default=False, metadata={"help": "Log to experiment trackers."})
    report_to: str = field(default="all", metadata={"help": "The tracker, or all that are installed."})
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the final model."})
    hub_model_id: str | None = optional("Its name on the Hub. Default: that of output_dir.")
    hub_private_repo: bool | None = optional(
        "Whether a new repository there is private. Default: what the account's are."
    )
    hub_token: str | None = optional("Access token for it.")

    def __post_init__(self):
        steps = self.checkpointing_steps
        if steps is not None and steps != "epoch" and not (steps.isdigit() and int(steps) > 0):
            raise ValueError(
                f"`checkpointing_steps` must be a number of updates or 'epoch' (got {steps!r})."
            )
        if self.average_checkpoints and steps is None:
            raise ValueError(
                "`average_checkpoints` needs `checkpointing_steps` (got "
                f"{self.average_checkpoints} and None)."
            )
        for name in ("average_checkpoints", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must be at least 0, which turns it off (got {getattr(self, name)})."
                )
        check_counts(
            self,
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_train_steps",
            "logging_steps",
            "eval_steps",
            "checkpoints_total_limit",
        )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{name}` must be {' or '.join(choices)} (got {getattr(self, name)!r})."
                )
        if self.optim != "adamw" and self.adam_beta2 != ADAM_BETA2:
            raise ValueError(
                f"`adam_beta2` is AdamW's (got {self.adam_beta2} and optim={self.optim}). Leave one out."
            )


@dataclass
class AccelerateArguments(GateTrainingArguments, SplitArguments, _RunArguments):
    """How to train, with the flags of transformers' `run_*_no_trainer.py`; how to train gates; and over
    how many processes to split the model."""

    def what_shards(self, distributed_type: DistributedType) -> str | None:
        """What spreads a model's weights over processes, so that none has them all; None: nothing."""
        if self.is_split:
            return ", ".join(self.given)
        return distributed_type.value if distributed_type in SHARDING else None


def make_accelerator(args: AccelerateArguments) -> Accelerator:
    """The processes of this run, seeded, with logs only from the first one; and `output_dir` without
    what a killed run left unfinished there."""
    if args.is_split:
        from .split_models import SplitAccelerator  # torch can be built without what it needs

        make = partial(SplitAccelerator, args)
    else:
        make = Accelerator
    accelerator = make(
        cpu=args.use_cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.report_to if args.with_tracking else None,
        project_dir=args.output_dir,
        # the order of an epoch follows from its number and the seed
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        level=logging.INFO if accelerator.is_main_process else logging.ERROR,
    )
    logger.info(accelerator.state)
    set_seed(args.seed)
    if accelerator.is_main_process:  # a checkpoint that a killed run was about to replace comes back
        discard_unfinished(args.output_dir)
    accelerator.wait_for_everyone()
    return accelerator
