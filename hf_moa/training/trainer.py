"""`MoaTrainer`: transformers' `Trainer`, and what gates need of it.

trainer = MoaTrainer(model=model, args=MoaTrainingArguments("out"), train_dataset=dataset)
trainer.train()
trainer.train(resume_from_checkpoint=True)  # bit-exact, after however it ended
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Seq2SeqTrainer, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import HPSearchBackend, has_length
from transformers.utils import logging

from hf_moa.expert_load import MeanExpertLoad
from hf_moa.modeling.core.precision import on_device
from hf_moa.modeling.core.sharding import FSDPModule
from hf_moa.modeling.core.task_losses import next_token_labels, token_share

from .adafactor import adafactor_arguments
from .arguments import (
    GateTrainingArguments,
    MoaSeq2SeqTrainingArguments,
    MoaTrainingArguments,
)
from .auxiliary_losses import (
    auxiliary_part,
    count_tokens,
    has_auxiliary_losses,
    name_task_loss,
    weigh_auxiliary_loss,
    weighted_auxiliary_loss,
)
from .budgets import warn_of_excess
from .cards import WritesModelCards
from .checkpoints import discard_unfinished
from .distilling import Distils
from .divergence import StopsDivergedRuns, TrainingDivergedError
from .gate_choices import (
    check_mae_training,
    check_noise_steps,
    choose_mae_training,
    choose_noise_steps,
)
from .gate_descent import (
    BlockCoordinateDescent,
    NonFiniteGradientError,
    keep_gates_out,
    prepare_gates,
)
from .label_smoothing import smoothed_loss
from .parameter_groups import decay_parameter_names, give_own_rates
from .random_states import kept_random_states
from .schedules import CCTNoiseCallback, noise_in, noise_steps, set_cct_noise
from .step_statistics import StepStatistics, distinct_budgets
from .trackers import report_histograms, with_one_file
from .whole_checkpoints import SavesWholeCheckpoints

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from .trainer_base import RunArguments

logger = logging.get_logger(__name__)


class _GatedTraining(WritesModelCards, SavesWholeCheckpoints, StopsDivergedRuns, Distils):
    """Mixin for `Trainer` and `Seq2SeqTrainer`."""

    arguments_class: type

    def __init__(
        self, model: Any = None, args: GateTrainingArguments | None = None, *rest: Any, **kwargs: Any
    ):
        args = self.arguments_class("tmp_trainer") if args is None else args
        # a class of the user's own may have the fields of both, too
        if not all(isinstance(args, base) for base in self.arguments_class.__bases__):
            raise ValueError(
                f"args must be {self.arguments_class.__name__} (got {type(args).__name__})."
            )
        self._has_begun = False
        self._unwrapped: tuple[Any, Any] = (None, None)  # the model, and what its wrappers hold
        self._descent: BlockCoordinateDescent | None = None
        self._statistics = StepStatistics()
        self._expert_load = MeanExpertLoad()
        self.expert_load: dict[str, list[list[float]]] = {}  # of the last log, for the card
        self.budget_rows: list[dict] = []  # of the last `evaluate_budgets`, for the card
        self._epoch = 0
        self._next_batches: tuple[list, Any] | None = None
        self._update: tuple[list, Any] = ([], None)  # its micro-batches, and how many labels they have
        self._tokens: Tensor | None = None  # of the accumulated batch, for the auxiliary losses
        self._token_share: Tensor | None = None  # of the micro-batch
        self._loss_is_finite: Tensor | bool = True
        arguments = cast("RunArguments", args)
        super().__init__(model, arguments, *rest, **kwargs)
        self.callback_handler.callbacks = with_one_file(self.callback_handler.callbacks)
        # Both are for `compute_loss` here: `Trainer` would leave the auxiliary losses out.
        self._smoothing = arguments.label_smoothing_factor if self.label_smoother is not None else 0.0
        self.label_smoother = None
        if self.compute_loss_func is not None:
            self.compute_loss_func = self._with_auxiliary_loss(self.compute_loss_func)
        if self.model_init is None:
            self._check_training()

    # --- what is trained how ----------------------------------------------------------------------

    @property
    def mae_training(self) -> str | None:
        """How this run trains: "bcd", "expert" or "joint"; None for a model without MAE attention."""
        return choose_mae_training(
            self._gated_model(), self.args.mae_training, adapted=self._is_adapted()
        )

    def _is_adapted(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _gated_model(self) -> nn.Module:
        """The model itself, without wrappers or adapters."""
        if self._unwrapped[0] is not self.model:  # once, not in each step: it looks at every module
            inner = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            self._unwrapped = (self.model, inner)
        model = self._unwrapped[1]
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _check_training(self) -> None:
        """Raise a ValueError where the arguments and the model do not go together."""
        args, model = self.args, self._gated_model()
        args.check_gate_training()
        self._check_teacher()
        self._check_budget_sampling()
        engine = "DeepSpeed" if self.is_deepspeed_enabled else None
        engine = "FSDP version 1" if self._is_fsdp1() else engine
        check_mae_training(
            model,
            args.mae_training,
            chosen=self.mae_training,
            adapted=self._is_adapted(),
            engine=engine,
        )
        if self.mae_training == "bcd" and args.max_steps <= 0 and args.num_train_epochs <= 0:
            raise ValueError(
                "mae_training='bcd' has its first G step in epoch 0: num_train_epochs must be above 0 "
                f"(got {args.num_train_epochs})."
            )
        check_noise_steps(model, args.cct_noise_steps, by_callback=self._has_noise_callback())

    @property
    def cct_noise_steps(self) -> float | None:
        """The steps over which this run's CCT noise grows (see `MoaTrainingArguments`); None for a model
        without CCT, or where a `CCTNoiseCallback` sets the noise."""
        model, asked = self._gated_model(), self.args.cct_noise_steps
        return choose_noise_steps(model, asked, by_callback=self._has_noise_callback())

    def _has_noise_callback(self) -> bool:
        callbacks = self.callback_handler.callbacks
        return any(isinstance(callback, CCTNoiseCallback) for callback in callbacks)

    def _is_fsdp1(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return self.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1

    # --- the run ----------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. However it ends, the model is left in the phase "mixture". A trial of an
        Optuna search that diverges is pruned, and the search goes on.

        Raises:
            ValueError: the arguments do not go with the model.
            TrainingDivergedError: the loss or its gradients were not finite.
        """
        self._has_begun, self._descent, self._statistics = False, None, StepStatistics()
        self._expert_load, self.expert_load, self.budget_rows = MeanExpertLoad(), {}, []
        if self.args.should_save:  # a checkpoint that a killed run was about to replace comes back
            discard_unfinished(self.args.output_dir)
        self.accelerator.wait_for_everyone()
        try:
            result = super().train(*args, **kwargs)
            self._warn_of_excess()
            return result
        except TrainingDivergedError as error:
            if self.hp_search_backend != HPSearchBackend.OPTUNA or self._trial is None:
                raise
            return self._prune_trial(error)
        finally:
            self._tokens, self._update = None, ([], None)
            if self._descent is not None:
                self._descent.finish()

    def _warn_of_excess(self) -> None:
        """Warn where gates computed more than their budgets when last they were logged."""
        computed = {}
        for budget in distinct_budgets(config := getattr(self._gated_model(), "config", None)) or []:
            name = "" if isinstance(budget, tuple) else f"compute_fraction_{budget:g}"
            logged = [entry[name] for entry in self.state.log_history if name in entry]
            if logged:
                computed[budget] = logged[-1]
        if self.is_world_process_zero():
            warn_of_excess(computed, config)

    def _prune_trial(self, error: TrainingDivergedError) -> None:
        if self.args.process_index == 0:
            import optuna

            raise optuna.TrialPruned(str(error)) from error
        # the other processes follow the first one to the next trial, without an evaluation
        self.objective = float("nan") if self.objective is None else self.objective

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`; without the gates, where their training is another."""
        self._check_training()  # here, a `model_init` has run
        is_own = self.optimizer is not None  # the user's, in groups of the user's
        optimizer = super().create_optimizer(model)
        whole = self.model if model is None else model
        if whole is None:
            return optimizer
        descends = self.mae_training in ("bcd", "expert")
        if not is_own:
            give_own_rates(optimizer, whole, self.args, with_gates=not descends)
        if descends:
            keep_gates_out(optimizer, whole)
        return optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[Any, Any]:
        """As in `Trainer`; Adafactor also with steps relative to the size of the weights."""
        made, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return made, kwargs | adafactor_arguments(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As in `Trainer`; without the norms of CCT's feed-forward parts, which it does not know."""
        return decay_parameter_names(model)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._epoch = kwargs["epoch"]
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The micro-batches of the next update, which a G step sees first."""
        self._next_batches = super().get_batch_samples(*args, **kwargs)
        self._tokens = self._count_tokens(self._next_batches[0])
        return self._next_batches

    def _count_tokens(self, batches: list[dict]) -> Tensor | None:
        """The tokens of an accumulated batch, over all processes; None where nothing is weighted by
        them."""
        config = getattr(self._gated_model(), "config", None)
        is_whole = len(batches) == 1 and self.accelerator.num_processes == 1
        # devices that share a batch each count their own part of it, or the same
        shares = self.args.n_gpu * self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1
        if not batches or is_whole or shares or not has_auxiliary_losses(config):
            return None
        counts = [self._tokens_of(batch) for batch in batches]
        known = [count.to(self.args.device) for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        total = torch.stack(known).sum(dim=0)
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, reduction="sum")
        return total

    def _tokens_of(self, batch: dict[str, Any]) -> Tensor | None:
        if self.compute_loss_func is not None:  # which has the labels, and the model has not
            batch = {name: value for name, value in batch.items() if name != "labels"}
        config = self._gated_model().config
        return count_tokens(batch, is_encoder_decoder=getattr(config, "is_encoder_decoder", False))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward on one micro-batch; before the first of an update, its G step."""
        if self._next_batches is not None:
            batches, num_items = self._next_batches
            self._next_batches = None
            self._begin_update(model, batches, num_items)
        return self._checked(super().training_step(model, inputs, num_items_in_batch))

    def _checked(self, loss: Tensor) -> Tensor:
        self._loss_is_finite = loss.isfinite() & self._loss_is_finite  # asked once an update
        return loss

    def _begin_update(self, model: nn.Module, batches: list, num_items: Any) -> None:
        gated = self._gated_model()
        self._loss_is_finite, self._update = True, (batches, num_items)
        if not self._has_begun:
            self._has_begun = True
            self._begin_run(gated)
        steps = self.cct_noise_steps
        if steps is not None:
            set_cct_noise(gated, self.state.global_step, noise_steps(steps, self.state.max_steps))
        epoch = self.args.gate_epoch(self._epoch, self.state.global_step)
        # `Trainer` leaves the last batches of a stream, if too few, to the next epoch's first update
        is_whole = len(batches) == self.args.gradient_accumulation_steps
        is_update = is_whole or has_length(self.train_dataset)
        if self._descent is not None and self._descent.has_gate_steps(epoch) and is_update:
            self._gate_step(self._descent, model, batches, num_items)
        elif self._descent is not None:
            self._descent.forget_gate_step()

    def _begin_run(self, gated: nn.Module) -> None:
        self._descent = prepare_gates(gated, self.args, self.mae_training)
        self._begin_distillation()
        has_epochs = has_length(self.train_dataset) or self.args.gate_epoch_steps is not None
        if self.mae_training == "bcd" and not has_epochs:
            logger.warning(
                "The training data has no length. Should it have no end either, every update is of "
                "epoch 0 and takes a G step: give gate_epoch_steps, the updates of an epoch."
            )

    def _gate_step(
        self, descent: BlockCoordinateDescent, model: nn.Module, batches: list, num_items: Any
    ) -> None:
        # inside DDP's wrapper, which would wait for gradients of all parameters
        if self._is_ddp(model):
            model = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        step = super().training_step
        scaler = getattr(self.accelerator, "scaler", None)
        if isinstance(model, FSDPModule):  # the first micro-batch of several does not reduce
            model.set_requires_gradient_sync(True)
        try:
            descent.gate_step(
                lambda batch: self._checked(step(model, dict(batch), num_items)),
                batches,
                scaler=scaler,
            )
        except NonFiniteGradientError as error:
            self._stop_diverged("a G step", error)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(len(batches) == 1)

    @staticmethod
    def _is_ddp(model: nn.Module) -> bool:
        model = getattr(model, "_orig_mod", model)
        return isinstance(model, DistributedDataParallel)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in `Trainer`; but in the middle of training it uses up none of training's random numbers,
        so that a run resumed after it draws the same."""
        with kept_random_states() if self.is_in_train else nullcontext():
            return super().evaluate(*args, **kwargs)

    # --- the loss ---------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As in `Trainer`; but labels are smoothed only in training, shifted where the model shifts
        them, and the auxiliary losses stay in.

        Raises:
            ValueError: labels to smooth that are none, or no classes.
        """
        in_gate_step = self._descent is not None and self._descent.model.mae_phase == "gate"
        records = model.training and not in_gate_step
        config = getattr(self._gated_model(), "config", None)
        if records and getattr(config, "attention_type", None) == "mae":
            inputs = {**inputs, "output_expert_weights": True}
        epsilon = self._smoothing if model.training and self.compute_loss_func is None else 0.0

        def forward(**inputs: Any) -> Any:
            lesson = self._begin_lesson(inputs) if model.training else None
            outputs = model(**inputs)
            self._token_share = None
            if model.training and self._tokens is not None and isinstance(outputs, dict):
                self._token_share = self._share_of(inputs, self._tokens, num_items_in_batch)
                weigh_auxiliary_loss(outputs, self._token_share)
            if lesson is not None or self._pass is not None:
                name_task_loss(outputs)
            auxiliary = auxiliary_part(outputs) if lesson is not None else 0.0
            if epsilon:
                if not isinstance(outputs, dict) or inputs.get("labels") is None:
                    raise ValueError(
                        "label_smoothing_factor needs `labels`, and outputs by name (got "
                        f"{', '.join(inputs)}, and a {type(outputs).__name__}); set it to 0."
                    )
                outputs["loss"] = smoothed_loss(
                    outputs,
                    inputs["labels"],
                    epsilon=epsilon,
                    shifts_labels=self._shifts_labels(),
                    num_items_in_batch=inputs.get("num_items_in_batch"),
                )
            terms = {}
            if lesson is not None:
                terms = lesson.finish(outputs, outputs["loss"].mean() - auxiliary)
            if records and isinstance(outputs, dict):
                self._record(outputs, terms, num_items_in_batch)
            elif in_gate_step and isinstance(outputs, dict):
                self._statistics.note_losses(outputs)
            return outputs

        # which only calls it
        return super().compute_loss(
            forward,
            inputs,
            return_outputs,
            num_items_in_batch,
        )

    def _shifts_labels(self) -> bool:
        """Whether the logits of a position are for the next one's label: also GPT-2's, whose loss does
        not say so."""
        name = type(self._gated_model()).__name__
        return self._loss_shifts_labels or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _share_of(self, inputs: dict[str, Any], tokens: Tensor, num_items_in_batch: Any) -> Tensor:
        """A micro-batch's share of the accumulated batch's tokens, times what its loss will be divided
        by."""
        own = cast(Tensor, self._tokens_of(inputs))  # or the batch's would not have been counted
        share = own.to(tokens.device) / tokens.clamp(min=1)
        if not self._losses_add_up(num_items_in_batch):
            share = share * self.current_gradient_accumulation_steps
        takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        takes_items = takes_items and num_items_in_batch is not None
        is_scaled = takes_items and self.args.average_tokens_across_devices
        return share if is_scaled else share * self.accelerator.num_processes

    def _losses_add_up(self, num_items_in_batch: Any) -> bool:
        """Whether `Trainer` takes the sum of the micro-batches' losses, not their mean."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        takes_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return takes_items or self.compute_loss_func is not None

    def _with_auxiliary_loss(self, loss_function: Callable) -> Callable:
        """A `compute_loss_func` of the user, and the auxiliary losses beside it."""

        def compute(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = loss_function(outputs, labels, num_items_in_batch=num_items_in_batch)
            aux_loss = outputs.get("aux_loss") if isinstance(outputs, dict) else None
            if aux_loss is None or not aux_loss.requires_grad:
                return loss
            if self._token_share is not None:
                return loss + weighted_auxiliary_loss(outputs, self._token_share)
            if not self._losses_add_up(num_items_in_batch):
                return loss + aux_loss.mean()
            if labels is not None and self._loss_shifts_labels:
                labels = next_token_labels(labels)
            return loss + aux_loss.mean() * token_share(labels, num_items_in_batch)

        return compute

    # --- logs -------------------------------------------------------------------------------------

    def _record(self, outputs: Any, terms: dict[str, Tensor], num_items_in_batch: Any) -> None:
        part = None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            part = 1 / self.current_gradient_accumulation_steps
            if self.args.average_tokens_across_devices:
                part /= self.accelerator.num_processes
        gated = self._gated_model()
        budgets = distinct_budgets(getattr(gated, "config", None))
        self._statistics.add_outputs(outputs, part_of_mean=part, budgets=budgets)
        for name, value in self._at_budget(terms, outputs.get("task_loss")).items():
            self._statistics.add(name, value.mean(), part or 1.0)
        self._expert_load.add_outputs(outputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `Trainer`; training logs also carry what `StepStatistics` gathered, and the scale of
        CCT's noise. Trackers that have histograms get those of `_histograms`."""
        of_training = "loss" in logs
        histograms = {}
        if of_training:
            logs |= self._statistics.drain(self._sum_over_processes) | noise_in(self._gated_model())
            self.expert_load = self._expert_load.drain(self._sum_over_processes)
            histograms = self._histograms()
        super().log(logs, start_time)
        if of_training and self.is_world_process_zero():
            report_histograms(self.callback_handler.callbacks, histograms, self.state.global_step)

    def _histograms(self) -> dict[str, list[float]]:
        """Since the last log: the mean entropy of each layer's gates, and for each layer the shares of
        its experts, relative to an even one."""
        found = self._statistics.drain_layers(self._sum_over_processes)
        for part, layers in self.expert_load.items():
            for i, shares in enumerate(layers):
                found[f"{part}_load/layer_{i}"] = [share * len(shares) for share in shares]
        return found

    def _sum_over_processes(self, x: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return x
        return self.accelerator.reduce(on_device(x, self.args.device), reduction="sum").cpu()


class MoaTrainer(_GatedTraining, Trainer):
    """`Trainer` for gated models (and any other).

    It adds: block coordinate descent for MAE; the schedule of CCT's noise; logs of loss parts, compute,
    gate entropy and expert load, to whatever `report_to` names (`StepStatistics`); label smoothing that
    keeps the auxiliary losses; distillation, and all budgets in each step; checkpoints that are whole or
    not there; an end to a run that diverges; and the card of a gated model, where `save_model` is called
    and on every push.

    Args:
        model, and all others: as in `Trainer`.
        args (`MoaTrainingArguments`): the training arguments.
        teacher (`PreTrainedModel`, `str`, *optional*): a finetuned model to learn from beside the
            labels, or its path; or "self": in each step the model's largest budget teaches the others.
            `MoaTrainingArguments` says how.

    Raises:
        ValueError: the arguments are of another class, or do not go with the model or the teacher.
    """

    arguments_class = MoaTrainingArguments


class MoaSeq2SeqTrainer(_GatedTraining, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with what `MoaTrainer` adds; its `args` are `MoaSeq2SeqTrainingArguments`."""

    arguments_class = MoaSeq2SeqTrainingArguments
