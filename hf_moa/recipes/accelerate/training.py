"""The training loop of the scripts on Accelerate (`run_*_no_trainer.py`), with how gates are trained.

A script brings a model, a data set and a function that evaluates; the loop brings the optimiser, block
coordinate descent, CCT's noise, logs, checkpoints and their exact resumption, on any number of
processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from hf_moa.modeling.core.gated_model import GatedModel
from hf_moa.modeling.core.precision import on_device
from hf_moa.modeling.core.task_losses import IGNORE_INDEX
from hf_moa.run_results import at_budget
from hf_moa.training import (
    NonFiniteGradientError,
    TrainingDivergedError,
    smoothed_loss,
    written_whole,
)
from hf_moa.training.auxiliary_losses import (
    count_tokens,
    has_auxiliary_losses,
    weigh_auxiliary_loss,
)
from hf_moa.training.divergence import (
    NO_LABELS,
    lacks_labels,
    named_losses,
    what_is_not_finite,
)
from hf_moa.training.gate_choices import (
    check_mae_training,
    check_noise_steps,
    choose_mae_training,
    choose_noise_steps,
)
from hf_moa.training.gate_descent import prepare_gates
from hf_moa.training.random_states import kept_random_states
from hf_moa.training.schedules import noise_in, noise_steps, set_cct_noise
from hf_moa.training.step_statistics import StepStatistics, distinct_budgets
from hf_moa.training.trackers import report_histograms, store_configuration

from ..splitting import split_model
from .arguments import AccelerateArguments
from .checkpoints import (
    Progress,
    average_checkpoints,
    check_averaging,
    checkpoint_to_resume,
    find_checkpoints,
    progress_of,
)
from .optimizers import SchedulePlace, make_optimizer
from .results import About, RunResults, TrainingLog
from .sampling import EpochsGroupedByLength

logger = logging.getLogger(__name__)


class GatedTraining:
    """One run.

    Args:
        accelerator: of `make_accelerator`.
        args: the flags.
        model: the model, in training or not.
        train_dataset: sequences of a causal or masked language model, or pairs. One with a `set_epoch`
            is told the epoch, so that what it draws depends only on that.
        collate: makes a batch of sequences, with `labels`.
        evaluate: model -> metrics, with its process's part of the work; called on all together.
        lengths: tokens of each sequence, where they have several lengths and are padded.
        about: the model, for its card.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: AccelerateArguments,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset,
        collate: Callable[[list], dict],
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        lengths: list[int] | None = None,
        *,
        about: About,
    ):
        self.accelerator, self.args, self.tokenizer = accelerator, args, tokenizer
        model = split_model(model, args)
        self.train_dataset, self.evaluate = train_dataset, evaluate
        self.num_sequences = len(cast(Sized, train_dataset))
        self.about, self.output_dir = about, Path(args.output_dir)
        self.training_log = TrainingLog(self.output_dir)
        self.budget_rows: list[dict[str, Any]] = []
        self.mae_training = _mae_training(args, model, accelerator)
        check_noise_steps(model, args.cct_noise_steps)
        self.noise_steps = choose_noise_steps(model, args.cct_noise_steps)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.progress = Progress(
            rows_per_update=(
                args.per_device_train_batch_size,
                args.gradient_accumulation_steps,
                accelerator.num_processes,
            ),
            seed=args.seed,
            train_sampling_strategy=args.train_sampling_strategy,
        )
        sampler = self._sampler(lengths)
        loader = DataLoader(
            train_dataset,
            batch_size=args.per_device_train_batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(args.seed),  # does not touch the model's draws
        )
        optimizer = make_optimizer(
            args, model, accelerator, gates=self.mae_training not in ("bcd", "expert")
        )
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.gated = accelerator.unwrap_model(self.model, keep_torch_compile=False)
        updates_per_epoch = math.ceil(len(self.loader) / args.gradient_accumulation_steps)
        self.max_steps = args.max_train_steps or args.num_train_epochs * updates_per_epoch
        self.num_epochs = math.ceil(self.max_steps / updates_per_epoch)
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=args.num_warmup_steps,
            num_training_steps=self.max_steps,
        )
        accelerator.register_for_checkpointing(
            SchedulePlace(self.scheduler) if args.is_split else self.scheduler
        )
        self.descent = prepare_gates(self.gated, args, self.mae_training)
        check_averaging(
            args,
            updates=self.max_steps,
            updates_per_epoch=updates_per_epoch,
            distributed_type=accelerator.distributed_type,
        )
        self.statistics = StepStatistics()
        # transformers' own GPT-2 does not say so
        self.shifts_labels = about.task == "text-generation"
        if args.with_tracking:
            config = {k: v for k, v in asdict(args).items() if not k.endswith("token")}
            accelerator.init_trackers("hf_moa")
            for tracker in accelerator.trackers:
                store_configuration(tracker, _plain(config))

    def _sampler(self, lengths: list[int] | None) -> EpochsGroupedByLength | None:
        """The order of the sequences; None: Accelerate's random one."""
        if self.args.train_sampling_strategy == "random":
            return None
        if lengths is None:
            raise ValueError(
                f"`train_sampling_strategy` {self.args.train_sampling_strategy} needs sequences "
                "of several lengths (got one length, packed or padded). Leave it at 'random'."
            )
        per_update = math.prod(self.progress.rows_per_update)
        return EpochsGroupedByLength(lengths, per_update, self.args.seed)

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Train to the end; save the final model and its metrics, and return these."""
        self._resume()
        args, progress = self.args, self.progress
        logger.info(
            f"{self.num_sequences:,} sequences, {self.num_epochs} epochs, {self.max_steps:,} "
            f"updates of {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} x "
            f"{self.accelerator.num_processes} sequences."
        )
        bar = tqdm(
            total=self.max_steps,
            initial=progress.step,
            disable=not self.accelerator.is_local_main_process,
        )
        self.loss = torch.zeros((), device=self.accelerator.device)
        self.tokens = torch.zeros((), dtype=torch.long, device=self.accelerator.device)
        self.updates_since_log = 0
        self.started, self.tokens_before = time.perf_counter(), progress.tokens
        self.seconds_elsewhere = 0.0  # in evaluations and checkpoints
        try:
            while progress.step < self.max_steps:
                for batches in self._updates():
                    self._update(batches)
                    progress.step += 1
                    progress.batches_in_epoch += len(batches)
                    bar.update()
                    self._log(bar)
                    if args.eval_steps is not None and progress.step % args.eval_steps == 0:
                        self._evaluate_on_the_way()
                    if self._is_checkpoint(progress.step):
                        self._save(f"step_{progress.step}")
                    if progress.step >= self.max_steps:
                        break
                if progress.batches_in_epoch < len(self.loader):
                    break  # in the middle of the epoch
                progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0
                if args.checkpointing_steps == "epoch":
                    self._save(f"epoch_{progress.epoch}")
                if args.eval_steps is None and progress.step < self.max_steps:
                    self._evaluate_on_the_way()
        finally:
            bar.close()
            if self.descent is not None:
                self.descent.finish()
        self._write_model(self.output_dir)  # before anything else can go wrong
        if args.average_checkpoints:
            last = find_checkpoints(self.output_dir)[-args.average_checkpoints :]
            average_checkpoints(self.gated, last)
            self._write_model(self.output_dir)
        metrics = self._evaluate()
        self._write_results(metrics)
        self.model = None  # DDP ends before the process group does
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return metrics

    def _is_checkpoint(self, step: int) -> bool:
        every = self.args.checkpointing_steps
        return every is not None and every.isdigit() and step % int(every) == 0

    def _updates(self) -> Iterator[list[dict]]:
        """The rest of the epoch, in the micro-batches of one update."""
        if hasattr(self.train_dataset, "set_epoch"):
            self.train_dataset.set_epoch(self.progress.epoch)
        self.loader.set_epoch(self.progress.epoch)
        loader = self.loader
        if self.progress.batches_in_epoch:
            loader = self.accelerator.skip_first_batches(loader, self.progress.batches_in_epoch)
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == self.args.gradient_accumulation_steps:
                yield batches
                batches = []
        if batches:
            yield batches

    def _update(self, batches: list[dict]) -> None:
        accelerator, args = self.accelerator, self.args
        if self.noise_steps is not None:
            steps = noise_steps(self.noise_steps, self.max_steps)
            set_cct_noise(self.gated, self.progress.step, steps)
        labels = [batch["labels"][:, 1:] if self.shifts_labels else batch["labels"] for batch in batches]
        count = sum((each != IGNORE_INDEX).sum() for each in labels)
        count = accelerator.gather(count.to(accelerator.device).view(1)).sum()
        self.gated_tokens = self._tokens_of_update(batches)
        self.count, self.is_finite = count, torch.ones((), dtype=torch.bool, device=accelerator.device)
        self.model.train()
        epoch = args.gate_epoch(self.progress.epoch, self.progress.step)
        if self.descent is not None and self.descent.has_gate_steps(epoch):
            is_ddp = accelerator.distributed_type.value.startswith("MULTI_")
            inner = self.gated if is_ddp else self.model
            scaler = getattr(accelerator, "scaler", None)
            try:
                self.descent.gate_step(
                    lambda batch: self._backward(inner, batch, count), batches, scaler=scaler
                )
            except NonFiniteGradientError as error:
                self._stop_diverged(str(error))
        elif self.descent is not None:
            self.descent.forget_gate_step()
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            is_whole = is_last or accelerator.distributed_type == DistributedType.DEEPSPEED
            with contextlib.nullcontext() if is_whole else accelerator.no_sync(self.model):
                outputs, loss = self._backward(self.model, batch, count)
            self.loss += loss
            self._record(outputs, len(batches))
            self.tokens += _num_tokens(batch)
        self.updates_since_log += 1
        norm = accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm or float("inf"))
        found = what_is_not_finite(
            norm,
            self.is_finite & self.loss.isfinite(),
            sum_over_processes=self._sum,
            scales=getattr(accelerator, "scaler", None) is not None,
        )
        if found is not None:
            self._stop_diverged(found)
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.gated.zero_grad()  # gates that no optimiser has

    def _backward(self, model: nn.Module, batch: dict, count: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Loss and gradients of one micro-batch, as a part of the update's mean over `count` labels."""
        accelerator = self.accelerator
        extra: dict[str, Any] = {"num_items_in_batch": count}
        if self.mae_training is not None:
            extra["output_expert_weights"] = True
        outputs = model(**batch, **extra)
        if self.gated_tokens is not None:
            share = self._tokens_of(batch).to(self.gated_tokens.device) / self.gated_tokens
            weigh_auxiliary_loss(outputs, share)
        loss = outputs.loss
        # a loss of transformers' own BERT or T5 is the mean over a micro-batch, whatever `count` is
        if self.args.label_smoothing_factor or not isinstance(self.gated, GatedModel):
            loss = smoothed_loss(
                outputs,
                batch["labels"],
                epsilon=self.args.label_smoothing_factor,
                shifts_labels=self.shifts_labels,
                num_items_in_batch=count,
            )
        outputs["loss"] = loss.detach()
        self.is_finite = self.is_finite & loss.detach().isfinite()
        self.statistics.note_losses(outputs)
        # data parallelism takes the mean over the processes, whose losses add up
        loss = loss * accelerator.num_processes
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            accelerator.backward(loss, scale_wrt_gas=False)
        else:  # which divides by them
            accelerator.backward(loss * accelerator.gradient_accumulation_steps)
        return outputs, loss.detach()

    def _tokens_of_update(self, batches: list[dict]) -> torch.Tensor | None:
        """Of the update, over all processes: what the auxiliary losses are weighted by."""
        if not has_auxiliary_losses(self.gated.config):
            return None
        counts = torch.stack([self._tokens_of(batch) for batch in batches]).sum(dim=0)
        return self.accelerator.reduce(counts.to(self.accelerator.device), reduction="sum").clamp(min=1)

    def _tokens_of(self, batch: dict) -> torch.Tensor:
        count = count_tokens(batch, is_encoder_decoder=self.gated.config.is_encoder_decoder)
        return cast(torch.Tensor, count)  # every batch has its ids

    # --- logs and evaluation ----------------------------------------------------------------------

    def _record(self, outputs: Any, num_micro_batches: int) -> None:
        self.statistics.add_outputs(
            outputs,
            part_of_mean=1 / (num_micro_batches * self.accelerator.num_processes),
            budgets=distinct_budgets(self.gated.config),
        )

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return x
        return self.accelerator.reduce(on_device(x, self.accelerator.device), reduction="sum").cpu()

    def _log(self, bar: tqdm) -> None:
        step = self.progress.step
        if step % self.args.logging_steps and step != self.max_steps:
            return
        self._count_tokens()
        loss = float(self._sum(self.loss.cpu().double()))
        seconds = time.perf_counter() - self.started - self.seconds_elsewhere
        logs = {
            "loss": loss / self.accelerator.num_processes / self.updates_since_log,
            "learning_rate": self.scheduler.get_last_lr()[0],
            "epoch": self.progress.epoch,
            "tokens_per_second": (self.progress.tokens - self.tokens_before) / seconds,
            **self.statistics.drain(self._sum),
            **noise_in(self.gated),
        }
        histograms = self.statistics.drain_layers(self._sum)
        self.loss, self.updates_since_log = torch.zeros_like(self.loss), 0
        bar.set_postfix(loss=f"{logs['loss']:.3f}", tokens_per_s=f"{logs['tokens_per_second']:,.0f}")
        self.accelerator.log(logs, step=step)
        if self.accelerator.is_main_process:
            report_histograms(getattr(self.accelerator, "trackers", []), histograms, step)
            self.training_log.append(step, logs)

    def _count_tokens(self) -> None:
        self.progress.tokens += int(self._sum(self.tokens.cpu()))
        self.tokens = torch.zeros_like(self.tokens)

    def _evaluate_on_the_way(self) -> None:
        metrics = self._evaluate()
        if metrics and self.accelerator.is_main_process:
            self.training_log.append(self.progress.step, {"epoch": self.progress.epoch, **metrics})

    def _evaluate(self) -> dict[str, float]:
        """Metrics; of a CCT model, at each of the budgets that it was given."""
        if self.evaluate is None:
            return {}
        began = time.perf_counter()
        self.model.eval()
        with kept_random_states():  # a run resumed after this draws the same as this one
            metrics = self._metrics_at_budgets(self.evaluate)
        self.seconds_elsewhere += time.perf_counter() - began
        logger.info(f"step {self.progress.step}: {metrics}")
        self.accelerator.log(metrics, step=self.progress.step)
        return metrics

    def _metrics_at_budgets(self, evaluate: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
        budgets = getattr(self.gated.config, "listed_budgets", [])  # a plain model has none
        if not budgets:
            return evaluate(self.model)
        metrics: dict[str, float] = {}
        self.budget_rows = []
        for budget in budgets:
            self.gated.set_budget(budget)
            found = evaluate(self.model)
            self.budget_rows.append({"budget": budget, **found})
            metrics |= {at_budget(name, budget): value for name, value in found.items()}
        self.gated.set_budget(None)
        return metrics

    def _stop_diverged(self, found: str) -> None:
        folder = self.output_dir / f"diverged-{self.progress.step}"
        if self.descent is not None:
            self.descent.take_gate_step_back()
        self._write_model(folder)
        where = f"at step {self.progress.step} (epoch {self.progress.epoch})"
        saved = f"The model with the parameters that it had before this update is in {folder}."
        if lacks_labels([], self.count):
            raise TrainingDivergedError(f"Training stopped {where}. {NO_LABELS} {saved}")
        raise TrainingDivergedError(
            f"Training diverged {where}. {found} Last losses: {named_losses(self.statistics.latest)}. "
            f"{saved} Try a lower learning_rate or gate_learning_rate, or more num_warmup_steps."
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def _save(self, name: str) -> None:
        began = time.perf_counter()
        self._count_tokens()
        with written_whole(self.output_dir / name, self.accelerator) as folder:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                (folder / "progress.json").write_text(json.dumps(asdict(self.progress)))
                self.tokenizer.save_pretrained(folder)
                what_shards = self.args.what_shards(self.accelerator.distributed_type)
                if what_shards and isinstance(self.gated, GatedModel):
                    self.gated.save_config(folder)  # shards come without
        limit = self.args.checkpoints_total_limit
        if limit is not None and self.accelerator.is_main_process:
            keep = max(limit, self.args.average_checkpoints)
            for old in find_checkpoints(self.output_dir)[:-keep]:
                shutil.rmtree(old)
        self.seconds_elsewhere += time.perf_counter() - began

    def _resume(self) -> None:
        folder = checkpoint_to_resume(self.args)
        if folder is None:
            if self.accelerator.is_main_process:
                self.training_log.remove()
            return
        found = progress_of(folder, self.progress, is_split=self.args.is_split)
        self.accelerator.load_state(str(folder))
        self.progress = found
        if self.accelerator.is_main_process:
            at_end_of_epoch = found.batches_in_epoch == len(self.loader)
            self.training_log.cut(
                found.step, evaluates_again=at_end_of_epoch and self.args.eval_steps is None
            )
        logger.info(f"Resuming from {folder}.")

    def _write_model(self, folder: Path) -> None:
        is_main = self.accelerator.is_main_process
        if self.args.is_split:  # all processes give their parts
            self.gated.save_pretrained(folder, is_main_process=is_main)
        else:
            state = self.accelerator.get_state_dict(self.model)
            if is_main:
                self.gated.save_pretrained(folder, state_dict=state, save_function=self.accelerator.save)
        if is_main:
            self.tokenizer.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    def _write_results(self, metrics: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            results = RunResults(
                args=self.args,
                about=self.about,
                config=self.gated.config,
                progress=self.progress,
                num_sequences=self.num_sequences,
                metrics=metrics,
                budget_rows=self.budget_rows,
                mixed_precision=self.accelerator.mixed_precision,
                mae_training=self.mae_training,
                noise_steps=self.noise_steps,
            )
            results.write()
            if self.args.push_to_hub:
                results.push()
        self.accelerator.wait_for_everyone()


def _mae_training(args: AccelerateArguments, model: nn.Module, accelerator: Accelerator) -> str | None:
    """How gates are trained; a ValueError where that does not go with the model."""
    chosen = choose_mae_training(model, args.mae_training)
    in_turns = accelerator.distributed_type != DistributedType.DEEPSPEED
    check_mae_training(model, args.mae_training, chosen=chosen, engine=None if in_turns else "DeepSpeed")
    return chosen


def _num_tokens(batch: dict) -> torch.Tensor | int:
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Values that trackers take."""
    return {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in config.items()}
