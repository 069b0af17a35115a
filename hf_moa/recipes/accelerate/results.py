"""What a run of the loop leaves behind: log, results and model card; the push."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedConfig, SchedulerType

from hf_moa.environment import package_versions
from hf_moa.hub_names import hub_name
from hf_moa.model_card import DataUsed, TrainingFacts, checkpoint_card, read_card, write_card
from hf_moa.model_card.existing import base_model_of
from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.run_results import at_budget, in_words, named_metrics

from ..models import ModelArguments
from .arguments import AccelerateArguments
from .checkpoints import Progress

logger = logging.getLogger(__name__)

_OF_BUDGETS = ("budget", "compute_fraction")


@dataclass(frozen=True, kw_only=True)
class About:
    """What a script knows of its model, for the card.

    Attributes:
        task: in the Hub's words.
        start: the checkpoint that the model was made of: a path, or its name on the Hub.
        dataset, dataset_config: on the Hub.
    """

    task: str
    start: str | None = None
    dataset: str | None = None
    dataset_config: str | None = None

    @classmethod
    def of(cls, task: str, model_args: ModelArguments, data_args: Any) -> About:
        """What the flags say of it."""
        return cls(
            task=task,
            start=model_args.model_name_or_path,
            dataset=data_args.dataset_name,
            dataset_config=data_args.dataset_config_name,
        )


class TrainingLog:
    """`log.jsonl`: a line for each log and for each evaluation on the way, with its `step`."""

    def __init__(self, folder: Path):
        self.path = folder / "log.jsonl"

    def append(self, step: int, values: Mapping[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def cut(self, step: int, *, evaluates_again: bool) -> None:
        """Drop what comes after a step, and will come again.

        Args:
            evaluates_again: whether the evaluation at that step will, too.
        """
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            at = _step_of(line)
            if at < step or (at == step and not (evaluates_again and "loss" not in json.loads(line))):
                kept.append(f"{line}\n")
        self.path.write_text("".join(kept))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def history(self, budget: Any = None) -> tuple[dict[str, Any], ...]:
        """A table row for each evaluation on the way, with the training loss of the last log; of a model
        with budgets at one of them."""
        if not self.path.is_file():
            return ()
        end = "" if budget is None else at_budget("", budget)
        rows, loss = [], None
        for entry in map(json.loads, self.path.read_text().splitlines()):
            loss = entry.get("loss", loss)
            if "loss" not in entry:
                metrics = {k.removesuffix(end): v for k, v in entry.items() if k.endswith(end)}
                row = {"step": entry["step"], "epoch": entry["epoch"], "training loss": loss}
                rows.append(row | in_words(named_metrics(metrics)))
        return tuple(rows)


@dataclass(kw_only=True)
class RunResults:
    """A run at its end, its model saved.

    Attributes:
        args: the flags; results are written to their `output_dir`.
        config: of the model.
        num_sequences: that it was trained on.
        metrics: of the model; with budgets, at each.
        budget_rows: metrics and `compute_fraction` by `budget`, the largest first.
        mixed_precision: Accelerate's.
        mae_training, noise_steps: how gates were trained.
    """

    args: AccelerateArguments
    about: About
    config: PreTrainedConfig
    progress: Progress
    num_sequences: int
    metrics: Mapping[str, float]
    budget_rows: Sequence[Mapping[str, Any]]
    mixed_precision: str
    mae_training: str | None
    noise_steps: float | None

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir)

    def write(self) -> None:
        """Write `all_results.json`, `budget_results_validation.json` of a model with budgets, and the
        card of a gated one."""
        results = {**self.metrics, **asdict(self.progress)}
        _write_json(self.folder / "all_results.json", results)
        path = self.folder / "budget_results_validation.json"
        if self.budget_rows:
            _write_json(path, self.budget_rows)
        else:
            path.unlink(missing_ok=True)
        self._write_card(self.args.hub_model_id)

    def push(self) -> None:
        """Upload what lies in the folder, in one commit; but for checkpoints and trackers' files, which
        are in folders of their own."""
        api = HfApi(token=self.args.hub_token)
        name = self.args.hub_model_id or self.folder.absolute().name
        name = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
        self._write_card(name)  # the Hub may have put its owner before it
        api.upload_folder(
            repo_id=name,
            folder_path=self.folder,
            ignore_patterns=["*/*"],
            commit_message="End of training",
        )

    def _write_card(self, name: str | None) -> None:
        """Write README.md; what somebody wrote of their own there stays. A card that cannot be read
        stays as it is."""
        if not isinstance(self.config, GatingConfig):
            return
        path = self.folder / "README.md"
        try:
            old = read_card(path)
        except ValueError as error:
            logger.warning(f"No model card was written. {error}")
            return
        about, metrics, budget = self.about, self.metrics, None
        if self.budget_rows:
            budget = self.budget_rows[0]["budget"]
            metrics = {k: v for k, v in self.budget_rows[0].items() if k not in _OF_BUDGETS}
        dataset = hub_name(about.dataset)
        used = DataUsed(
            use="training",
            dataset=dataset,
            config=about.dataset_config,
            examples=self.num_sequences,
        )
        card = checkpoint_card(
            self.folder,
            name=name,
            base_model=base_model_of(about.start),
            datasets=[dataset] if dataset else [],
            task=about.task,
            metrics=metrics or None,
            budgets=self.budget_rows,
            training=TrainingFacts(
                data=(used,),
                hyperparameters=self._hyperparameters(),
                versions=package_versions(),
                history=TrainingLog(self.folder).history(budget),
            ),
            old=old,
        )
        write_card(card, path)

    def _hyperparameters(self) -> dict[str, Any]:
        """Those that a card shows, under the names of `Trainer`'s cards."""
        args, progress = self.args, self.progress
        batch, accumulated, processes = progress.rows_per_update
        betas = f", betas (0.9, {args.adam_beta2:g})" if args.optim == "adamw" else ""
        found = {
            "learning_rate": args.learning_rate,
            "train_batch_size": batch,
            "eval_batch_size": args.per_device_eval_batch_size,
            "seed": args.seed,
            "num_devices": processes * args.tp_size,
            "gradient_accumulation_steps": accumulated,
            "total_train_batch_size": math.prod(progress.rows_per_update),
            "optimizer": args.optim + betas,
            "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
            "lr_scheduler_warmup_steps": args.num_warmup_steps,
            "label_smoothing_factor": args.label_smoothing_factor,
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.max_grad_norm,
            "mixed_precision_training": self.mixed_precision,
            "mae_training": self.mae_training,
            "gate_learning_rate": args.gate_learning_rate,
            "cct_noise_steps": self.noise_steps,
            "average_checkpoints": args.average_checkpoints,
            "steps_done": progress.step,
            "tokens_seen": progress.tokens,
        }
        if self.mae_training == "bcd":
            names = ("gate_every_n_epochs", "gate_epoch_steps")
            found |= {name: getattr(args, name) for name in names}
            found["gate_learning_rate"] = args.descent_learning_rate
        return {name: value for name, value in found.items() if value is not None}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _step_of(line: str) -> float:
    """The update that a line of the log is about; of one that a kill cut short, none that was."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf
