"""`GatingConfig`: the configuration fields that every gated backbone has, of all mechanisms.

It is a dataclass mixin: `class MoaBertConfig(GatingConfig, BertConfig)`. What a field means and which
rules it has is in its mechanism's `mechanism.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging

from ..attention.multi_head import MultiHead
from ..cct.mechanism import CCT, CctFields
from ..core.fields import check_bool, check_choice, check_int, check_number, fail, is_budget
from ..core.mechanism import (
    MECHANISMS,
    attention_types,
    ffn_types,
    field_names,
    mechanisms_of,
    register,
)
from ..core.mixins import ConfigMixin
from ..mae.mechanism import MAE, MaeFields
from ..moa.mechanism import MOA, MoaFields
from ..moe.mechanism import MOE, MoeFields
from ..nested.mechanism import NESTED, NestedFields
from ..parallel.plans import ParallelNames, Plan, expert_plan, tensor_plan
from ..routing.mechanism import ROUTER, RouterFields
from .class_names import enter_class_names
from .plain_models import refuse_in_plain_models

logger = logging.get_logger(__name__)

register(MAE, MOA, MOE, ROUTER, CCT, NESTED)  # in the order in which everything names them

_saves_model = ContextVar("saves_model", default=False)
_loads = ContextVar("loads", default=False)

# The fields of `outputs.GatingOutput` and `GatingSeq2SeqOutput`; `Trainer` must not collect them
# into predictions.
GATING_OUTPUT_FIELDS = (
    "aux_loss",
    "aux_losses",
    "task_loss",
    "expert_load",
    "budget",
    "compute_fraction",
    "compute_cost",
    "router_logits",
    "expert_weights",
    "cct_gates",
    "cross_router_logits",
    "ffn_router_logits",
    "encoder_ffn_router_logits",
    "decoder_ffn_router_logits",
    "cross_expert_weights",
    "encoder_aux_loss",
    "decoder_aux_loss",
    "encoder_compute_fraction",
    "decoder_compute_fraction",
    "encoder_router_logits",
    "decoder_router_logits",
    "encoder_expert_weights",
    "decoder_expert_weights",
    "encoder_cct_gates",
    "decoder_cct_gates",
)


@dataclass(kw_only=True, repr=False)
class KindFields:
    """The fields that choose between mechanisms, and what all have in common.

    Args:
        attention_type (`str`, defaults to `"mha"`):
            `"mha"` (the plain backbone), `"mae"` (Peng et al. 2020, a mixture of subsets of heads) or
            `"moa"` (Zhang et al. 2022, k attention heads routed per token).
        ffn_type (`str`, defaults to `"dense"`): `"dense"` or `"moe"` (Shazeer et al. 2017).
        carry_aux_loss (`bool`, defaults to `False`):
            A loss that is computed outside the model, of its hidden states or logits, trains routers and
            budgets by the auxiliary losses, too, as `model.carry_aux_loss()` has it. Checkpoints for
            sentence-transformers have `True`.
    """

    attention_type: str = "mha"
    ffn_type: str = "dense"
    carry_aux_loss: bool = False


# the last one's fields come first
@dataclass(kw_only=True, repr=False)  # it prints as its backbone's does
class GatingConfig(
    NestedFields, CctFields, MoeFields, RouterFields, MoaFields, MaeFields, KindFields, ConfigMixin
):
    """Fields shared by `MoaBertConfig`, `MoaGPT2Config` and `MoaT5Config`: those of `KindFields`,
    `MaeFields`, `MoaFields`, `RouterFields`, `MoeFields`, `CctFields` and `NestedFields`.

    Raises:
        ValueError: a field breaks its rule; the message names the field, the rule and the value. Or a
            field is unknown whose name begins as a gating field's, or looks like one.
    """

    # Writes the code that a checkpoint carries. The package sets it; in a checkpoint's own code it is
    # None, since transformers copies that.
    write_code: ClassVar[Callable[..., None] | None] = None

    # `AutoModel*` -> the family's class, by name; a subclass fills it in. Model cards name the first of
    # several that have one class.
    auto_classes: ClassVar[dict[str, str]] = {}
    # fields of the backbone
    backbone_sizes: ClassVar[tuple[str, ...]] = ()
    backbone_dropouts: ClassVar[tuple[str, ...]] = ()
    backbone_scales: ClassVar[tuple[str, ...]] = ()  # numbers of at least 0

    # fields of the backbone's relatives, as RoBERTa is of BERT; at their defaults they are not saved
    fields_of_relatives: ClassVar[tuple[str, ...]] = ()

    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "cache",
        *GATING_OUTPUT_FIELDS,
    ]

    def __init_subclass__(cls, *args: Any, **kwargs: Any):
        super().__init_subclass__(*args, **kwargs)
        if "auto_classes" in vars(cls):
            enter_class_names(cls)
            refuse_in_plain_models(cls)

    def __post_init__(self, **kwargs: Any):
        # Read from the directory of a plain backbone, a config must not keep that one's type.
        kwargs.pop("model_type", None)
        key_value_heads = kwargs.pop("num_key_value_heads", None)
        if key_value_heads is not None and self.attention_type == "moa":
            self.moa_key_value_heads = key_value_heads
        for mechanism in MECHANISMS.values():
            for name, default in mechanism.defaults.items():
                if not hasattr(type(self), name):  # of a mechanism that came later
                    setattr(self, name, kwargs.pop(name, default))
        refuse_misspelled(type(self).__name__, kwargs)
        super().__post_init__(**kwargs)
        self.validate_gating()
        if self.attention_type != "moa" and key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"{type(self).__name__}.num_key_value_heads is num_attention_heads="
                f"{self.num_attention_heads} without MoA (got {key_value_heads!r}); leave it out."
            )
        try:
            self.validate()  # the backbone's own rules
        except StrictDataclassError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from error
        if not _loads.get():
            self._warn_of_unused_fields()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; fields in `kwargs`, which it sets last, are checked with the others. A
        field that is missing means what the model did before there was such a field."""
        refuse_misspelled(cls.__name__, kwargs)
        held = SimpleNamespace(**{name: config_dict.get(name) for name in field_names()})
        for mechanism in mechanisms_of(held):
            config_dict = mechanism.of_old | config_dict
        token = _loads.set(True)
        try:
            found = super().from_dict(config_dict, **kwargs)
        except TypeError as error:  # of transformers' log of the config, before any check
            raise ValueError(
                f"{cls.__name__}'s fields must hold what JSON can (got {kwargs}): {error}."
            ) from error
        finally:
            _loads.reset(token)
        config = found[0] if isinstance(found, tuple) else found
        config.validate_gating()
        config._warn_of_unused_fields(kwargs)
        return found

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As in transformers, with the code beside it: where this package is not installed, the config
        loads with `trust_remote_code=True`. Beside a model's, it names every class of the family, and
        the checkpoint loads as any of them."""
        folder = Path(save_directory)
        if self.write_code is not None and not folder.is_file():  # which transformers refuses
            folder.mkdir(parents=True, exist_ok=True)
            self.write_code(folder, with_model=_saves_model.get())
        self.auto_map = {"AutoConfig": f"configuration_{self.model_type}.{type(self).__name__}"}
        if _saves_model.get() or Path(folder, f"modeling_{self.model_type}.py").exists():
            for auto_class, name in self.auto_classes.items():
                self.auto_map[auto_class] = f"modeling_{self.model_type}.{name}"
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved."""
        left_out = set(self.fields_of_relatives) - set(self._used_fields_of_relatives())
        return {name: value for name, value in super().to_diff_dict().items() if name not in left_out}

    def _used_fields_of_relatives(self) -> list[str]:
        return [n for n in self.fields_of_relatives if getattr(self, n) != getattr(type(self), n)]

    def __setattr__(self, name: str, value: Any) -> None:
        # `@strict` parents raise an error that is not a ValueError; ours always is one.
        try:
            super().__setattr__(name, value)
        except StrictDataclassError as error:
            raise ValueError(f"{type(self).__name__}.{name}: {error}") from error

    def validate_gating(self) -> None:
        """Check every gating field, and the backbone's sizes, dropouts and scales. Called at
        construction, after loading, and when a model is built."""
        for name in self.backbone_sizes:
            check_int(self, name, minimum=1)
        for name in self.backbone_dropouts:
            check_number(self, name, minimum=0.0, maximum=1.0)
        for name in self.backbone_scales:
            check_number(self, name, minimum=0.0)
        check_int(self, "chunk_size_feed_forward", minimum=0)
        check_int(self, "num_attention_heads", minimum=1)
        check_choice(self, "attention_type", attention_types())
        check_choice(self, "ffn_type", ffn_types())
        check_bool(self, "carry_aux_loss")
        for mechanism in MECHANISMS.values():
            for name in mechanism.defaults:
                if name.startswith("output_"):
                    check_bool(self, name)
            mechanism.check(self)

    def _warn_of_unused_fields(self, names: Any = None) -> None:
        """Say once which fields do nothing: of `names`, or of those that are not at their defaults."""
        for mechanism in MECHANISMS.values():
            is_on = mechanism.is_on(self)
            unused = mechanism.unused(self) if is_on else mechanism.defaults
            for name, default in mechanism.defaults.items():
                is_set = getattr(self, name) != default and (names is None or name in names)
                if is_set and name in unused and not name.startswith("output_"):
                    reason = unused[name] if is_on else f"{mechanism.name} is off"
                    logger.warning_once(
                        f"{type(self).__name__}.{name}={getattr(self, name)!r} does nothing: {reason}."
                    )

    def validate_budgets(self) -> None:
        """Check `cct_budgets`: a non-empty list of numbers in (0, 1]. (T5 also takes pairs.)"""
        budgets = self.cct_budgets
        if not isinstance(budgets, (list, tuple)) or len(budgets) == 0:
            fail(self, "cct_budgets", "must be a non-empty list of numbers in (0, 1], or None")
        for budget in budgets:
            if not is_budget(budget):
                fail(self, "cct_budgets", f"must hold numbers in (0, 1], but holds {budget!r}")

    def validate_head_dim(self) -> None:
        """Check `head_dim` where it may be None, for hidden_size / num_attention_heads."""
        check_int(self, "head_dim", minimum=1, optional=True)
        if self.hidden_size % self.num_attention_heads != 0 and self.head_dim is None:
            fail(
                self,
                "num_attention_heads",
                f"must divide hidden_size={self.hidden_size}, or head_dim be given",
            )

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, whatever the backbone calls it."""
        raise NotImplementedError

    @property
    def parallel_names(self) -> ParallelNames | None:
        """Which modules of the base model are split or sharded over processes; None where none are."""
        return None

    @property
    def base_model_tp_plan(self) -> Plan | None:  # type: ignore[override]  # a constant of other models
        """How tensor parallelism splits the base model, as transformers' engine asks for it: heads,
        attention experts, neurons and the vocabulary over processes. It may name modules that this
        model lacks."""
        names = self.parallel_names
        return None if names is None else tensor_plan(self, names, MultiHead)

    @property
    def base_model_ep_plan(self) -> Plan | None:  # type: ignore[override]  # the same
        """How expert parallelism splits it: feed-forward experts over processes."""
        names = self.parallel_names
        return None if names is None else expert_plan(self, names)

    @property
    def base_model_fsdp_plan(self) -> Plan:  # type: ignore[override]  # the same
        """How FSDP version 2 shards it: layer by layer. Embeddings, which heads share, stay with the
        model as a whole."""
        names = self.parallel_names
        return {} if names is None else {names.layers: "free_full_weight"}

    @property
    def embedding_width(self) -> int:
        """Size of the tokens' embeddings, to which control symbols are added."""
        return self.hidden_size

    @property
    def has_plain_backbone(self) -> bool:
        """Whether transformers' own class computes what this one does without gates."""
        return not self._used_fields_of_relatives()

    @property
    def max_tokens(self) -> int | None:
        """Length of the longest sequence; None for any length."""
        return getattr(self, "max_position_embeddings", None)

    @property
    def attention_experts(self) -> int:
        """N of MoA: `num_attention_experts`, or twice the active heads."""
        return self.num_attention_experts or 2 * self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """`moa_key_value_heads`, for those who make caches. Only of MoA, whose experts share them: where
        there is no such field, transformers takes as many as there are of queries."""
        if self.attention_type != "moa":
            raise AttributeError(f"{type(self).__name__} has no num_key_value_heads without MoA.")
        return self.moa_key_value_heads

    @num_key_value_heads.setter
    def num_key_value_heads(self, value: int) -> None:
        self.moa_key_value_heads = value

    def __getattr__(self, name: str) -> Any:
        """What is not there. Of `num_experts` and `num_experts_per_tok` others compute Mixtral's loss of
        the router logits, as TRL does with `router_aux_loss_coef` or `output_router_logits`."""
        if name not in ("num_experts", "num_experts_per_tok"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{type(self).__name__} has no num_experts and num_experts_per_tok, of which others compute "
            "Mixtral's loss of the router logits: the losses of these routers are `outputs.aux_loss`, "
            "weighted by router_balance_loss_coef and its like. Where the loss is computed outside the "
            "model, as TRL does, call `model.carry_aux_loss()` and leave router_aux_loss_coef and "
            "output_router_logits out."
        )

    @property
    def stack_budgets(self) -> list[float]:
        """The budgets of one stack of layers, repeats included."""
        return self.cct_budgets  # type: ignore[return-value]  # asked only with CCT

    @property
    def default_stack_budget(self) -> float:
        """The budget of a stack in eval, where none is chosen."""
        return max(self.stack_budgets)

    @property
    def budget_half(self) -> int | None:
        """Which number of a pair of budgets is the stack's: None where there are no pairs."""
        return None

    @property
    def listed_budgets(self) -> list[Any]:
        """`nested_budgets` or `cct_budgets`, each once, largest first, pairs as tuples; none without."""
        budgets = self.nested_budgets or self.cct_budgets or []
        listed = [tuple(b) if isinstance(b, (list, tuple)) else b for b in budgets]
        return sorted(
            set(listed), key=lambda b: (sum(b), b) if isinstance(b, tuple) else b, reverse=True
        )

    @property
    def has_cct(self) -> bool:
        return self.cct_budgets is not None

    @property
    def drawn_budgets(self) -> list[Any]:
        """The budgets that training draws from, repeats included."""
        return self.cct_budgets or self.listed_budgets

    @property
    def budget_shares(self) -> dict[Any, float]:
        """The budgets that training draws, largest first, each with its share of the draws."""
        drawn = self.drawn_budgets
        sizes = {b: (sum(b), b) if isinstance(b, tuple) else (b, ()) for b in drawn}
        distinct = sorted(sizes, key=lambda budget: sizes[budget], reverse=True)
        return {budget: drawn.count(budget) / len(drawn) for budget in distinct}


def refuse_misspelled(config_name: str, unknown: Any) -> None:
    """Refuse unknown fields that must be meant for gating fields: transformers would keep them and the
    model be a plain one.

    Args:
        config_name: of the class, for the message.
        unknown: names of fields, known ones among them or not.

    Raises:
        ValueError: one begins as a mechanism's fields do, or is close to the name of a gating field.
    """
    known = field_names()
    prefixes = tuple(prefix for m in MECHANISMS.values() for prefix in m.prefixes)
    for name in unknown:
        if name in known or name in _NOT_OURS:
            continue
        close = get_close_matches(name, known, n=1, cutoff=0.85)
        if close or name.startswith(prefixes):
            alike = [each for each in known if each.split("_")[0] == name.split("_")[0]]
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(alike or known)}."
            raise ValueError(f"{config_name} has no field {name} (got {unknown[name]!r}): {hint}")


# Names that other libraries give to fields of their own, which look like ours.
_NOT_OURS = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")


@contextmanager
def saving_model() -> Iterator[None]:
    """Within, a configuration is saved with the code of its models."""
    token = _saves_model.set(True)
    try:
        yield
    finally:
        _saves_model.reset(token)
