"""`GatedModel`: what every gated `PreTrainedModel` has beside its backbone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

from ..cct.switches import CctSwitches
from ..config.gating import saving_model
from ..mae.switches import MaeSwitches
from ..moa.switches import MoaSwitches
from .budget_switches import BudgetSwitches
from .carried_loss import carried
from .initialization import InitScales, beside_weights
from .mechanism import field_names, mechanisms_of
from .outputs import batch_term
from .sharding import FSDPModule
from .slots import GATINGS, require_code

logger = logging.get_logger(__name__)

# where a checkpoint is found
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


class GatedModel(MaeSwitches, MoaSwitches, CctSwitches, BudgetSwitches):
    """Mixin for the `PreTrainedModel` subclasses of a gated backbone; put it first.

    It validates the configuration, initialises the gates, and holds the switches that rule them at
    run time. None of the switches is part of a checkpoint.
    """

    # Writes the card of a push, of model, folder and name of the repository. The package sets it.
    write_card: ClassVar[Callable[..., None] | None] = None

    _has_two_halves = False  # an encoder and a decoder
    _carried_weight: float | None = None  # of the auxiliary losses' gradient
    # Statistics of a few vectors per batch: too coarse in half precision.
    _keep_in_fp32_modules_strict = ("mixture.gate.norm",)  # type: ignore[assignment]  # made a set

    def __init__(self, config, *args, **kwargs):
        config.validate_gating()
        require_code(config)
        super().__init__(config, *args, **kwargs)
        if config.carry_aux_loss:
            self._carried_weight = 1.0
        # Quantisers leave out what stands here. Gates decide, and have too few outputs for some.
        self._gates = [f".+{each.gate_name}" for each in mechanisms_of(config) if each.gate_name]
        kept = type(self)._keep_in_fp32_modules or ()
        self._keep_in_fp32_modules = {*kept, *self._gates}

    def init_parallel_plans(self) -> None:
        """As transformers', of the names that this model has: a configuration's plan is of the whole
        family."""
        # an older transformers has neither this nor plans
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

        super().init_parallel_plans()
        found = chain(self.named_modules(), self.named_parameters())
        names = {replace_layer_number_by_wildcard(name) for name, _ in found}
        self._tp_plan, self._ep_plan, self._fsdp_plan = (
            {name: style for name, style in (plan or {}).items() if name in names}
            for plan in (self._tp_plan, self._ep_plan, self._fsdp_plan)
        )

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """As transformers', with weights tied before FSDP shards them: tied later, one of them would
        keep what it was loaded with, where processes have parts of different sizes.

        Raises:
            ValueError: under tensor parallelism, too, where it would; and with what FSDP cannot shard
                there.
        """
        gating = GATINGS.of(model.config)
        if mesh_manager is not None and gating is not None and gating.split_but_not_sharded:
            sizes = distributed_config.tp_size, distributed_config.fsdp_size
            if min(sizes) > 1:
                raise ValueError(
                    f"tp_size or fsdp_size must be 1 with {gating.split_but_not_sharded} (got "
                    f"{sizes[0]} and {sizes[1]}): extract(budget) gives a plain model, which takes both."
                )
        if mesh_manager is not None and distributed_config.dp_size > 1 and model.all_tied_weights_keys:
            number = distributed_config.tp_size * distributed_config.fsdp_size
            if distributed_config.tp_size == 1:
                model.tie_weights()
            elif model.config.vocab_size % number:
                raise ValueError(
                    f"{type(model.config).__name__}.vocab_size must be a multiple of tp_size * "
                    f"fsdp_size = {number} with tied embeddings (got {model.config.vocab_size}): call "
                    f"resize_token_embeddings(..., pad_to_multiple_of={number}) and save the model."
                )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def gather_sharded_state_dict_for_save(self, model_to_save: Any, *args: Any, **kwargs: Any) -> dict:
        """As transformers', with each tied weight once, as in the files of a model that is not split:
        gathered, they are tensors of their own."""
        gathered = super().gather_sharded_state_dict_for_save(model_to_save, *args, **kwargs)
        if model_to_save.is_distributed_loading_by_transformers:
            for name in model_to_save.all_tied_weights_keys:
                gathered.pop(name, None)
        return gathered

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and a warning where quantisation leaves experts as they are.

        Raises:
            ValueError: as transformers', and for `cct_budgets` that the checkpoint was not trained for.
        """
        config = kwargs.get("config")
        asked = SimpleNamespace(**{n: kwargs.get(n, getattr(config, n, None)) for n in field_names()})
        checks = [m.check_loaded for m in mechanisms_of(asked) if m.check_loaded is not None]
        if checks and pretrained_model_name_or_path is not None:
            hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
            config_class: Any = cls.config_class
            with suppress(OSError):  # weights without a configuration beside them
                saved, _ = config_class.get_config_dict(pretrained_model_name_or_path, **hub)
                for check in checks:
                    check(asked, saved)
        with beside_weights():
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "is_quantized", False):
            # quantisers convert linear layers; the matrices of experts are one tensor
            names = [name for name, p in model.named_parameters() if p.ndim == 3]
            if names:
                logger.warning_once(
                    f"Quantisation leaves the experts of {cls.__name__} as they are: {', '.join(names)}."
                )
        return loaded

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """As transformers', in which gates loaded in half precision are in half precision."""
        plan = super()._get_dtype_plan(dtype)
        return {name: kept for name, kept in plan.items() if name not in self._gates}

    def flops(
        self, sequence_length: int, *, decoder_length: int | None = None, budget: Any = None
    ) -> Any:
        """Count the floating-point operations of a forward on one sequence, without running it.

        What CCT skips differs from token to token: its layers count as what training holds them to,
        the budget's share of their skippable part. (A batch's own share is in the output's
        `compute_fraction`.) A sequence classifier's last layer counts the token that it computes.

        Args:
            sequence_length: in tokens; of the encoder in an encoder-decoder model.
            decoder_length: of the decoder, all at once as in training; None for `sequence_length`.
            budget: one of the model's, a pair for encoder-decoder models; None for the default.

        Returns:
            The `hf_moa.flops.Flops`: operations by layer and part, total and active ones. `print` shows
            them per token.

        Raises:
            ValueError: a length that is none, `decoder_length` for a model without a decoder, or a
            budget that the model does not know.
            ImportError: where the package is not installed, which has the counter.

        Example:
            >>> model.flops(128, budget=0.5).active
        """
        try:
            from hf_moa.flops import count_flops
        except ImportError as error:
            raise ImportError("flops() is a part of the package hf_moa: install it.") from error
        if not self._budget_controls("flops", needed=False):
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

    def extract(self, budget: float) -> Any:
        """The smaller model that a nested budget is, by itself: with its own matrices, and no budgets.

        It is of transformers' own class where that can have its heads: always in T5, in BERT and GPT-2
        where number and size of the heads give `hidden_size`. Elsewhere, and where the backbone is a
        relative's, such as RoBERTa's, it is of the gated class with `attention_type="mha"` and
        `head_dim`. It compiles, exports and quantises as any such model.

        Args:
            budget: one of `config.nested_budgets`.

        Returns:
            A model in eval mode, on this one's device, in its dtype. It shares no memory with it.

        Raises:
            ValueError: the model has no nested budgets, or not this one, or MAE's gates.
            ImportError: where the package is not installed.

        Example:
            >>> model.extract(0.5).save_pretrained("half")
        """
        try:
            from hf_moa.extraction import extract
        except ImportError as error:
            raise ImportError("extract() is a part of the package hf_moa: install it.") from error
        return extract(self, budget)

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
        module: Any
        for module in self.modules():
            if gate_norm is not None and "is_global" in vars(module):
                module.is_global = gate_norm
            elif router_balance is not None and "balances_globally" in vars(module):
                module.balances_globally = router_balance

    def carry_aux_loss(self, weight: float | None = 1.0) -> None:
        """Train routers and budgets also by a loss that is computed outside the model, of its logits or
        hidden states: TRL's, sentence-transformers', that of an `EncoderDecoderModel`.

        In training, the backward pass through the hidden states then adds the gradient of the auxiliary
        losses (`aux_loss` of the output) times `weight`, whatever the loss weighs itself. The loss's
        value is without them. A loss that has `aux_loss`, as that of a call with labels, keeps to that:
        it counts once.

        Args:
            weight: 1 / steps where gradients of so many steps are accumulated into a mean; that times
                the loss scale where a scaler multiplies losses (float16). None goes back to adding
                nothing.

        Raises:
            ValueError: a weight that is no finite number above 0.

        Example:
            >>> model.carry_aux_loss()
            >>> SFTTrainer(model, ...).train()
        """
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if weight is not None and not (is_number and 0 < weight < float("inf")):
            raise ValueError(f"weight must be a finite number above 0, or None (got {weight!r}).")
        for module in self.modules():
            if isinstance(module, GatedModel):
                module._carried_weight = weight

    def _carried(self, hidden_states: Tensor, totals: dict[str, Any]) -> Tensor:
        """A stack's hidden states `[B, T, d]`; see `carry_aux_loss`."""
        if not self.training:
            return hidden_states
        return carried(hidden_states, totals.get("aux_loss"), self._carried_weight)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, also where FSDP version 2 shards the model: configuration and code are
        those of the model's own class."""
        with self._of_its_own_class(), saving_model():
            super().save_pretrained(save_directory, *args, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers', with a card of its own instead of transformers' draft."""
        if self.write_card is not None:
            self.write_card(self, working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def save_config(self, save_directory: str | os.PathLike) -> None:
        """Write what `save_pretrained` does without the weights: configuration and code. Sharded weights
        beside them need only be merged."""
        with self._of_its_own_class(), saving_model():
            self.config.architectures = [type(self).__name__]
            self.config.dtype = str(self.dtype).removeprefix("torch.")
            os.makedirs(save_directory, exist_ok=True)
            if self.is_remote_code():
                config: Any = self.config  # as transformers does, whose annotation has a dictionary
                custom_object_save(self, save_directory, config=config)
            self.config.save_pretrained(save_directory)
            if self.can_generate():
                self.generation_config.save_pretrained(save_directory)

    @contextmanager
    def _of_its_own_class(self) -> Iterator[None]:
        """Without the class that FSDP version 2 has put before the model's, and whose module and name
        transformers would save."""
        sharded = type(self)
        own: Any = next(each for each in sharded.__mro__ if not issubclass(each, FSDPModule))
        self.__class__ = own
        try:
            yield
        finally:
            self.__class__ = sharded

    def _set_gradient_checkpointing(  # type: ignore[override]  # what may follow goes by name
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable = checkpoint,
        **kwargs: Any,
    ) -> None:
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", False)
        has_losses = any(m.has_auxiliary_losses for m in mechanisms_of(self.config))
        if enable and reentrant and has_losses:
            raise ValueError(
                "gradient checkpointing must not be reentrant for models with routers or CCT: their "
                "auxiliary losses would lose their gradients (got use_reentrant=True)."
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the backbone does; then what gates and experts need otherwise.

        Only `transformers.initialization` functions are used: they do not change loaded weights.
        """
        super()._init_weights(module)
        initialize = getattr(module, "initialize", None)
        if initialize is not None:
            initialize(self._init_scales())

    def _init_scales(self) -> InitScales:
        """Standard deviations of a layer's projections at the start."""
        std = self.config.initializer_range
        return InitScales(std, std, std, std, self.config.num_attention_heads)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers skips modules without direct parameters in classes from outside its tree,
        # and with them every container that `_init_weights` fills from above.
        super()._initialize_weights(module, False)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for its interface in the class's own source file; ours is in attention/
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

    def _requested_gating(self, kwargs: Any) -> dict[str, bool]:
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
            outputs: of the base model; gets the `task_loss`.
            share: what part of the accumulated batch this call is, where the task's loss is
                weighted so. By labels, which is all that `Trainer` tells: where sequences have not as
                many labels as tokens, accumulation changes the terms' weights a little (not under
                `MoaTrainer`, which counts tokens).
        """
        aux_loss = batch_term(outputs, "aux_loss")
        if loss is None or aux_loss is None or not self.training:
            return loss
        outputs["task_loss"] = loss
        return loss + aux_loss * share
