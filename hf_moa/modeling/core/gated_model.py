"""`GatedModel`: what every gated `PreTrainedModel` has beside its backbone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save

from ..cct.budgets import Budget, BudgetControl
from ..cct.feed_forward import FeedForwardGate
from ..cct.gates import OPEN_GATE_LOGIT, ControlNetwork
from ..feed_forward.experts import FeedForwardExperts
from ..feed_forward.layers import DenseFeedForward
from ..mae.mixture import EXPERT_SELECTIONS, MAE_PHASES, MaeGate, MixtureOfHeads
from ..mae.norm import GateBatchNorm
from ..moa.projections import ExpertInput, ExpertOutput
from ..routing.routers import TopKRouter
from .configuration import CCT_EXECUTIONS, saving_model
from .flops import Flops, count_flops
from .sharding import FSDPModule
from .tracing import is_traced


class GatedModel:
    """Mixin for the `PreTrainedModel` subclasses of a gated backbone; put it first.

    It validates the configuration, initialises the gates, and holds the switches that rule them at
    run time. None of the switches is part of a checkpoint.
    """

    mae_phase = "mixture"
    _has_two_halves = False  # an encoder and a decoder
    # Statistics of a few vectors per batch: too coarse in half precision.
    _keep_in_fp32_modules_strict = ("mixture.gate.norm",)

    def __init__(self, config, *args, **kwargs):
        config.validate_gating()
        super().__init__(config, *args, **kwargs)

    def set_mae_phase(self, phase: str) -> None:
        """Choose what a training step of an MAE model does (Peng et al. 2020).

        Args:
            phase: `"mixture"` (all experts weighted by the gate; joint training), `"gate"` (the G
                step: the mixture, and only gates receive gradients) or `"expert"` (the F step: one
                expert drawn from the gate's distribution, and gates receive none). The gates'
                running statistics follow their inputs in every phase. Eval always computes the
                mixture. Under DDP, call the model inside the wrapper in the phase "gate", and average
                the gates' gradients (`hf_moa.training.BlockCoordinateDescent` does).

        Raises:
            ValueError: unknown phase; no MAE attention in the model; `"gate"` with uniform or frozen
            gates.
        """
        if phase not in MAE_PHASES:
            raise ValueError(f"phase must be one of {', '.join(map(repr, MAE_PHASES))} (got {phase!r}).")
        mixtures = self._mae_mixtures("set_mae_phase")
        gates = [mixture.gate for mixture in mixtures if mixture.gate is not None]
        if phase == "gate" and not gates:
            raise ValueError(
                "phase 'gate' needs learned gates, but mae_gate_type='uniform' has none to train."
            )
        if phase == "gate" and not any(p.requires_grad for gate in gates for p in gate.parameters()):
            raise ValueError(
                "phase 'gate' needs gates that can learn, but all are frozen (requires_grad=False). "
                'Under a PEFT adapter, keep them trainable with modules_to_save=["gate"].'
            )
        for mixture in mixtures:
            mixture.phase = phase
        for module in self.modules():
            if hasattr(type(module), "mae_phase"):
                module.mae_phase = phase

    def set_expert_selection(self, selection: str | None) -> None:
        """Evaluate an MAE model with one expert per layer (Peng et al. 2020, table 5).

        Args:
            selection: `"argmax"` (the expert with the largest gate), `"random"` (one drawn
                uniformly), each per sequence, or per position where causal; None for the mixture.

        Raises:
            ValueError: unknown selection; one is given, and there is no MAE attention in the model.
        """
        if selection not in EXPERT_SELECTIONS:
            raise ValueError(f"selection must be 'argmax', 'random' or None (got {selection!r}).")
        for mixture in self._mae_mixtures("set_expert_selection", needed=selection is not None):
            mixture.selection = selection

    def set_budget(self, budget: float | tuple[float, float] | None) -> None:
        """Use this compute budget wherever a call names none; None goes back to the default.

        Args:
            budget: one of `config.cct_budgets`; of an encoder-decoder model also a pair, the encoder's
                and the decoder's.

        Raises:
            ValueError: a budget is given, and the model has no CCT, or not this one in its list.
        """
        for control in self._budget_controls("set_budget", needed=budget is not None):
            control.choose(budget)

    def set_cct_execution(self, execution: str) -> None:
        """Choose how eval carries out CCT's gates from now on: `"sparse"` computes the tokens with open
        gates alone, `"dense"` computes all and masks, `"auto"` takes the faster one. They compute the
        same function. `config.cct_execution` follows.

        Raises:
            ValueError: the model has no CCT, or the execution is unknown.
        """
        if execution not in CCT_EXECUTIONS:
            known = ", ".join(map(repr, CCT_EXECUTIONS))
            raise ValueError(f"execution must be one of {known} (got {execution!r}).")
        self._budget_controls("set_cct_execution")
        for module in self.modules():
            if isinstance(module, GatedModel):
                module.config.cct_execution = execution
            elif isinstance(module, FeedForwardGate):
                module.execution = execution

    def set_cct_noise_scale(self, scale: float) -> None:
        """Set alpha, the scale of the noise on CCT's gates in training (Bapna et al. 2020).

        Raises:
            ValueError: the model has no CCT, or the scale is negative or not finite.
        """
        if not isinstance(scale, Real) or not 0 <= scale < float("inf"):
            raise ValueError(f"scale must be a finite number of at least 0 (got {scale!r}).")
        self._budget_controls("set_cct_noise_scale")
        for module in self.modules():
            if isinstance(module, ControlNetwork):
                module.noise_scale.fill_(scale)

    def flops(
        self, sequence_length: int, *, decoder_length: int | None = None, budget: Any = None
    ) -> Flops:
        """Count the floating-point operations of a forward on one sequence, without running it.

        What CCT skips differs from token to token: its layers count as what training holds them to,
        the budget's share of their skippable part. (A batch's own share is in the output's
        `compute_fraction`.)

        Args:
            sequence_length: in tokens; of the encoder in an encoder-decoder model.
            decoder_length: of the decoder, all at once as in training; None for `sequence_length`.
            budget: one of the model's, a pair for encoder-decoder models; None for the default.

        Returns:
            Operations by layer and part: total and active ones. `print` shows them per token.

        Raises:
            ValueError: a length that is none, `decoder_length` for a model without a decoder, or a
            budget that the model does not know.

        Example:
            >>> model.flops(128, budget=0.5).active
        """
        if not any(isinstance(module, BudgetControl) for module in self.modules()):
            self._refuse_budget(budget)
        lengths = {"sequence_length": sequence_length}
        if self._has_two_halves:
            lengths["decoder_length"] = sequence_length if decoder_length is None else decoder_length
        elif decoder_length is not None:
            raise ValueError(
                f"decoder_length needs an encoder-decoder model (got {decoder_length!r}); leave it out."
            )
        for name, length in lengths.items():
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise ValueError(f"{name} must be an integer of at least 1 (got {length!r}).")
        return count_flops(self, *lengths.values(), budget=budget)

    def _run_to_count(self, tokens: Tensor) -> None:
        """Run on `[1, T]` for `flops`; encoder-decoder models take `[1, S]` and `[1, T]`."""
        self(input_ids=tokens)

    def set_global_statistics(
        self, *, gate_norm: bool | None = None, router_balance: bool | None = None
    ) -> None:
        """Choose whether statistics of a training batch run over all processes of a data-parallel run
        (as with `nn.SyncBatchNorm`) or over each process's own part, the default.

        Args:
            gate_norm: batch normalisation of the MAE gates; None leaves it as it is.
            router_balance: the load in the routers' balance loss; None leaves it as it is.
        """
        for module in self.modules():
            if isinstance(module, GateBatchNorm) and gate_norm is not None:
                module.is_global = gate_norm
            elif isinstance(module, TopKRouter) and router_balance is not None:
                module.balances_globally = router_balance

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, also where FSDP version 2 shards the model: configuration and code are
        those of the model's own class."""
        with self._of_its_own_class(), saving_model():
            super().save_pretrained(save_directory, *args, **kwargs)

    def save_config(self, save_directory: str | os.PathLike) -> None:
        """Write what `save_pretrained` does without the weights: configuration and code. Sharded weights
        beside them need only be merged."""
        with self._of_its_own_class(), saving_model():
            self.config.architectures = [type(self).__name__]
            self.config.dtype = str(self.dtype).removeprefix("torch.")
            os.makedirs(save_directory, exist_ok=True)
            if self.is_remote_code():
                custom_object_save(self, save_directory, config=self.config)
            self.config.save_pretrained(save_directory)
            if self.can_generate():
                self.generation_config.save_pretrained(save_directory)

    @contextmanager
    def _of_its_own_class(self) -> Iterator[None]:
        """Without the class that FSDP version 2 has put before the model's, and whose module and name
        transformers would save."""
        sharded = type(self)
        self.__class__ = next(each for each in sharded.__mro__ if not issubclass(each, FSDPModule))
        try:
            yield
        finally:
            self.__class__ = sharded

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs
    ) -> None:
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", False)
        has_router = self.config.attention_type == "moa" or self.config.ffn_type == "moe"
        if enable and reentrant and (has_router or self.config.has_cct):
            raise ValueError(
                "gradient checkpointing must not be reentrant for models with routers or CCT: their "
                "auxiliary losses would lose their gradients (got use_reentrant=True)."
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    def _mae_mixtures(self, caller: str, *, needed: bool = True) -> list[MixtureOfHeads]:
        mixtures = [module for module in self.modules() if isinstance(module, MixtureOfHeads)]
        if needed and not mixtures:
            raise ValueError(
                f"{caller} needs attention_type='mae' (this model has "
                f"attention_type={self.config.attention_type!r})."
            )
        return mixtures

    def _budget_controls(self, caller: str, *, needed: bool = True) -> list[BudgetControl]:
        controls = [module for module in self.modules() if isinstance(module, BudgetControl)]
        if needed and not controls:
            raise ValueError(f"{caller} needs a model with CCT; set cct_budgets in its config.")
        return controls

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the backbone does; then what gates need otherwise.

        Only `transformers.initialization` functions are used: they leave loaded weights alone.
        """
        super()._init_weights(module)
        if isinstance(module, MaeGate):
            init.zeros_(module.out.weight)
            init.zeros_(module.out.bias)
        elif isinstance(module, MixtureOfHeads):
            module.reset_buffers()
        elif isinstance(module, (ExpertInput, ExpertOutput)):
            query_std, output_std = self._attention_init_std()
            # its weights sum to 1: where k heads add up, k experts are averaged
            output_std *= self.config.num_attention_heads
            init.normal_(module.weight, std=query_std if isinstance(module, ExpertInput) else output_std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, FeedForwardExperts):
            up_std, down_std = self._feed_forward_init_std()
            init.normal_(module.up_weight, std=up_std)
            init.normal_(module.down_proj, std=down_std)
            if module.bias:
                init.zeros_(module.up_proj_bias)
                init.zeros_(module.down_proj_bias)
        elif isinstance(module, DenseFeedForward):
            up_std, down_std = self._feed_forward_init_std()
            init.normal_(module.up.weight, std=up_std)
            init.normal_(module.down.weight, std=down_std)
            if module.linear is not None:
                init.normal_(module.linear.weight, std=up_std)
        elif isinstance(module, ControlNetwork):
            init.zeros_(module.noise_scale)
            if module.starts_open:
                init.zeros_(module.out.weight)
                init.constant_(module.out.bias, OPEN_GATE_LOGIT)
        elif isinstance(module, BudgetControl) and module.symbols_start_at_zero:
            init.zeros_(module.control_symbols.weight)

    def _attention_init_std(self) -> tuple[float, float]:
        """Standard deviations of an attention layer's query and output projections at the start."""
        return self.config.initializer_range, self.config.initializer_range

    def _feed_forward_init_std(self) -> tuple[float, float]:
        """Standard deviations of a feed-forward layer's two projections at the start."""
        return self.config.initializer_range, self.config.initializer_range

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers skips modules without direct parameters in classes from outside its tree,
        # and with them every container that `_init_weights` fills from above.
        super()._initialize_weights(module, False)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for its interface in the class's own source file; ours is in attention.py
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def set_experts_implementation(self, experts_implementation: str | dict) -> None:
        """As in transformers, for every stack: T5's have configurations of their own."""
        super().set_experts_implementation(experts_implementation)
        chosen = self.config._experts_implementation
        for module in self.modules():
            if isinstance(module, GatedModel):
                module.config._experts_implementation_internal = chosen

    def _budget_control(self) -> BudgetControl | None:
        """The control symbols of a stack of layers; None without CCT."""
        if not self.config.has_cct:
            return None
        return BudgetControl(
            self.config.stack_budgets,
            default=self.config.default_stack_budget,
            half=self.config.budget_half,
            hidden_size=self.config.hidden_size,
            symbols_start_at_zero=not self.config.cct_sublayer_norm,
        )

    def _resolve_budget(self, tokens: Tensor, budget: Any) -> Budget | None:
        """The budgets of a call on `tokens` `[B, ...]`, in a stack that has its control in `cct`."""
        if self.cct is not None:
            return self.cct(tokens.shape[0], tokens.device, budget)
        self._refuse_budget(budget)
        return None

    @staticmethod
    def _refuse_budget(budget: Any) -> None:
        if budget is not None:
            raise ValueError(
                f"budget needs a model with CCT; set cct_budgets in its config (got {budget!r})."
            )

    def _requested_gating(self, kwargs: dict[str, Any]) -> dict[str, bool]:
        """Which gating outputs to return: `output_<field>` of the call, else of the config."""
        requested = {}
        for name in ("router_logits", "expert_weights", "cct_gates"):
            asked = kwargs.pop(f"output_{name}", None)
            requested[name] = getattr(self.config, f"output_{name}") if asked is None else asked
        return requested

    def _with_aux_loss(self, loss: Tensor | None, outputs: Any, share: Any = 1.0) -> Tensor | None:
        """In training, a task's loss plus the auxiliary terms.

        Args:
            loss: the task's loss, or None without labels.
            outputs: of the base model, or fields of an output; gets the `task_loss`.
            share: what part of the accumulated batch this call is, where the task's loss is
                weighted so. By labels, which is all that `Trainer` tells: where rows have not as many
                labels as tokens, accumulation changes the terms' weights a little (not under
                `MoaTrainer`, which counts tokens).
        """
        # of an output not its entry, which it has only where it trains
        aux_loss = outputs.get("aux_loss") if type(outputs) is dict else outputs.aux_loss
        if loss is None or aux_loss is None or not self.training:
            return loss
        outputs["task_loss"] = loss
        return loss + aux_loss * share


def padding_mask_of(attention_mask: Tensor | None, length: int, past: int | Tensor = 0) -> Tensor | None:
    """The real ones of the `length` tokens behind `past` cached ones, `[B, length]` bool; None where
    the mask does not tell: there is none, or it is one of pairs, `[B, 1, T, S]`. None too where all are
    real, if that is known without waiting for an accelerator. The mask may go on behind them, as one
    for all slots of a static cache does."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    spare = max(attention_mask.shape[1] - length, 0)
    if isinstance(past, int):
        start = min(past, spare)
        mask = attention_mask[:, start : start + length].bool()
    else:  # of a static cache, to be read without waiting for it
        columns = past.clamp(max=spare) + torch.arange(length, device=past.device)
        mask = attention_mask[:, columns.to(attention_mask.device)].bool()
    if mask.device.type == "cpu" and not is_traced(mask) and mask.all():
        return None
    return mask
