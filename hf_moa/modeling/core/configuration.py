"""The configuration fields that every gated backbone has, and their rules.

`GatingConfig` is a dataclass mixin: `class MoaBertConfig(GatingConfig, BertConfig)`. It holds what
the mechanisms need (MAE, MoA, sparse MoE, CCT) and nothing of BERT, GPT-2 or T5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

ATTENTION_TYPES = ("mha", "mae", "moa")
MAE_GATE_TYPES = ("learned", "uniform")
ROUTER_TYPES = ("topk", "noisy_topk")
FFN_TYPES = ("dense", "moe")
CCT_EXECUTIONS = ("auto", "sparse", "dense")
MOST_MAE_EXPERTS = 65_536  # of a layer: each is a row of a table, and an output of the gate

_saves_model = ContextVar("saves_model", default=False)

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


@dataclass(kw_only=True, repr=False)  # it prints as its backbone's does
class GatingConfig:
    """Fields shared by `MoaBertConfig`, `MoaGPT2Config` and `MoaT5Config`.

    Args:
        attention_type (`str`, defaults to `"mha"`):
            `"mha"` (the plain backbone), `"mae"` (Peng et al. 2020, a mixture of subsets of heads) or
            `"moa"` (Zhang et al. 2022, k attention heads routed per token).
        mae_num_dropped_heads (`int`, defaults to 1):
            Heads that each MAE expert leaves out: t of Peng et al. 2020. For 8 heads, 1 is "MAE-7"
            with 8 experts and 2 is "MAE-6" with 28.
        mae_gate_type (`str`, defaults to `"learned"`):
            `"learned"`, or `"uniform"` for UNI-MAE, which has no gate parameters.
        mae_gate_hidden_size (`int`, defaults to 256): width of the gate's hidden layer.
        mae_gate_dropout (`float`, defaults to 0.1): dropout on the gate's hidden layer.
        mae_gate_window (`int` or `None`, defaults to 100):
            Causal layers: the gate at a position averages the inputs of this many positions up to it
            (`None`: all), padding left out: in the middle of a row, it leaves fewer to average.
        num_attention_experts (`int` or `None`, defaults to `None`):
            N of MoA, at least `num_attention_heads` (k); `None`: 2k.
        router_type (`str`, defaults to `"topk"`):
            Routers of MoA and of the MoE feed-forward layer: `"topk"`, or `"noisy_topk"`
            (Shazeer et al. 2017, eq. 3-5).
        router_balance_loss_coef (`float`, defaults to 0.01): weight of `N * sum_i f_i P_i`.
        router_z_loss_coef (`float`, defaults to 0.001): weight of `mean(logsumexp(logits)^2)`.
        router_importance_loss_coef (`float`, defaults to 0.0): weight of CV^2 of the summed gates.
        router_load_loss_coef (`float`, defaults to 0.0):
            Weight of CV^2 of the smooth expected load; needs `router_type="noisy_topk"`.
        ffn_type (`str`, defaults to `"dense"`): `"dense"` or `"moe"`.
        num_ffn_experts (`int`, defaults to 8): feed-forward experts of `ffn_type="moe"`.
        num_ffn_experts_per_token (`int`, defaults to 2): feed-forward experts active for a token.
        cct_budgets (`list[float]` or `None`, defaults to `None`):
            Compute budgets in (0, 1] that training samples from, repeats being sampling weights
            (Bapna et al. 2020 use `[1, 1, 1, .5, .33, .2]`). `None` switches CCT off.
        cct_num_ffn_splits (`int`, defaults to 4): parts of the feed-forward layer, each with a gate.
        cct_gate_hidden_size (`int`, defaults to 128): width of the control networks' hidden layer.
        cct_noise_max (`float`, defaults to 5.0):
            Final scale of the noise on the gates' logits. 5 is the paper's; gates of a pretrained model
            start open, and want about 1.
        cct_budget_loss_coef (`float`, defaults to 1.0): weight of the budget loss.
        cct_sublayer_norm (`bool`, defaults to `True`):
            The paper's extra LayerNorms inside the sub-layers. `False` leaves them out, so that a
            converted pretrained checkpoint starts as the same function.
        cct_execution (`str`, defaults to `"auto"`):
            How hard gates are executed in eval: `"dense"` computes all and multiplies by the gates,
            `"sparse"` computes the tokens with open gates alone, `"auto"` takes the faster one, as
            measured on a CPU (on an accelerator: dense). All compute the same function, but for the
            attention probabilities of skipped queries, which sparse execution does not compute. A cache
            holds the keys and values of open gates alone: with `"sparse"` always, with `"auto"` where
            that is faster: from a million numbers in a layer's keys on, for one sequence from about
            d=384 on.
        output_router_logits, output_expert_weights, output_cct_gates (`bool`, default to `False`):
            Return the routers' logits, the MAE gates and the CCT gates with every forward pass.

    Raises:
        ValueError: a field breaks its rule; the message names the field, the rule and the value.
    """

    attention_type: str = "mha"
    mae_num_dropped_heads: int = 1
    mae_gate_type: str = "learned"
    mae_gate_hidden_size: int = 256
    mae_gate_dropout: float = 0.1
    mae_gate_window: int | None = 100
    num_attention_experts: int | None = None
    router_type: str = "topk"
    router_balance_loss_coef: float = 0.01
    router_z_loss_coef: float = 0.001
    router_importance_loss_coef: float = 0.0
    router_load_loss_coef: float = 0.0
    ffn_type: str = "dense"
    num_ffn_experts: int = 8
    num_ffn_experts_per_token: int = 2
    cct_budgets: list | None = None
    cct_num_ffn_splits: int = 4
    cct_gate_hidden_size: int = 128
    cct_noise_max: float = 5.0
    cct_budget_loss_coef: float = 1.0
    cct_sublayer_norm: bool = True
    cct_execution: str = "auto"
    output_router_logits: bool = False
    output_expert_weights: bool = False
    output_cct_gates: bool = False

    # Writes the code that a checkpoint carries. The package sets it; in a checkpoint's own code it is
    # None, since transformers copies that.
    write_code: ClassVar[Callable[..., None] | None] = None

    # `AutoModel*` -> the family's class, by name; a subclass fills it in.
    auto_classes: ClassVar[dict[str, str]] = {}
    # fields of the backbone
    backbone_sizes: ClassVar[tuple[str, ...]] = ()
    backbone_dropouts: ClassVar[tuple[str, ...]] = ()
    backbone_scales: ClassVar[tuple[str, ...]] = ()  # numbers of at least 0

    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "cache",
        *GATING_OUTPUT_FIELDS,
    ]

    def __post_init__(self, **kwargs: Any):
        # Read from the directory of a plain backbone, a config must not keep that one's type.
        kwargs.pop("model_type", None)
        key_value_heads = kwargs.pop("num_key_value_heads", None)
        super().__post_init__(**kwargs)
        self.validate_gating()
        expected = 1 if self.attention_type == "moa" else self.num_attention_heads
        if key_value_heads not in (None, expected):
            raise ValueError(
                f"{type(self).__name__}.num_key_value_heads is {expected} with attention_type="
                f"{self.attention_type!r} and cannot be chosen (got {key_value_heads!r}); leave it out."
            )
        try:
            self.validate()  # the backbone's own rules
        except StrictDataclassError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from error

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; fields in `kwargs`, which it sets last, are checked with the others."""
        try:
            found = super().from_dict(config_dict, **kwargs)
        except TypeError as error:  # of transformers' log of the config, before any check
            raise ValueError(
                f"{cls.__name__}'s fields must hold what JSON can (got {kwargs}): {error}."
            ) from error
        (found[0] if isinstance(found, tuple) else found).validate_gating()
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
        _check_choice(self, "attention_type", ATTENTION_TYPES)
        _check_choice(self, "mae_gate_type", MAE_GATE_TYPES)
        _check_choice(self, "router_type", ROUTER_TYPES)
        _check_choice(self, "ffn_type", FFN_TYPES)
        _check_choice(self, "cct_execution", CCT_EXECUTIONS)
        for name in (
            "num_attention_heads",
            "mae_num_dropped_heads",
            "mae_gate_hidden_size",
            "num_ffn_experts",
            "num_ffn_experts_per_token",
            "cct_num_ffn_splits",
            "cct_gate_hidden_size",
        ):
            check_int(self, name, minimum=1)
        for name in ("mae_gate_window", "num_attention_experts"):
            if getattr(self, name) is not None:
                check_int(self, name, minimum=1)
        for name in (
            "router_balance_loss_coef",
            "router_z_loss_coef",
            "router_importance_loss_coef",
            "router_load_loss_coef",
            "cct_noise_max",
            "cct_budget_loss_coef",
        ):
            check_number(self, name, minimum=0.0)
        check_number(self, "mae_gate_dropout", minimum=0.0, below=1.0)
        for name in (
            "cct_sublayer_norm",
            "output_router_logits",
            "output_expert_weights",
            "output_cct_gates",
        ):
            check_bool(self, name)
        self._validate_heads()
        self._validate_routing()
        if self.cct_budgets is not None:
            self.validate_budgets()
            if self.ffn_size % self.cct_num_ffn_splits != 0:
                fail(self, "cct_num_ffn_splits", f"must divide the feed-forward size {self.ffn_size}")

    def validate_budgets(self) -> None:
        """Check `cct_budgets`: a non-empty list of numbers in (0, 1]. (T5 also takes pairs.)"""
        budgets = self.cct_budgets
        if not isinstance(budgets, (list, tuple)) or len(budgets) == 0:
            fail(self, "cct_budgets", "must be a non-empty list of numbers in (0, 1], or None")
        for budget in budgets:
            if not is_budget(budget):
                fail(self, "cct_budgets", f"must hold numbers in (0, 1], but holds {budget!r}")

    def validate_head_dim(self) -> None:
        """Check `head_dim` where it may be None: hidden_size / num_attention_heads, but free for MoA."""
        if self.head_dim is not None:
            check_int(self, "head_dim", minimum=1)
        heads, is_moa = self.num_attention_heads, self.attention_type == "moa"
        if self.hidden_size % heads != 0 and not (is_moa and self.head_dim is not None):
            fail(
                self,
                "num_attention_heads",
                f"must divide hidden_size={self.hidden_size}, or attention_type be 'moa' and head_dim "
                f"be given (attention_type={self.attention_type!r}, head_dim={self.head_dim!r})",
            )
        if not is_moa and self.head_dim not in (None, self.hidden_size // heads):
            fail(
                self,
                "head_dim",
                f"must be hidden_size / num_attention_heads = {self.hidden_size // heads} (or None) "
                f"for attention_type={self.attention_type!r}; it is free for 'moa'",
            )

    def _validate_heads(self) -> None:
        heads = self.num_attention_heads
        if self.attention_type == "moa":
            experts = self.num_attention_experts
            if experts is not None and experts < heads:
                fail(
                    self,
                    "num_attention_experts",
                    f"must be at least num_attention_heads={heads}, the heads active per token",
                )
        if self.attention_type == "mae":
            if self.mae_num_dropped_heads >= heads:
                fail(
                    self,
                    "mae_num_dropped_heads",
                    f"must be below num_attention_heads={heads}, so that an expert keeps a head",
                )
            experts = comb(heads, self.mae_num_dropped_heads)
            if experts > MOST_MAE_EXPERTS:
                fail(
                    self,
                    "mae_num_dropped_heads",
                    f"must give at most {MOST_MAE_EXPERTS:,} experts, one for each choice of so many of "
                    f"num_attention_heads={heads} heads: these are {experts:,}",
                )

    def _validate_routing(self) -> None:
        if self.router_load_loss_coef > 0 and self.router_type != "noisy_topk":
            fail(
                self,
                "router_load_loss_coef",
                "must be 0 unless router_type='noisy_topk': the load is smoothed by the noise",
            )
        if self.ffn_type == "moe" and self.num_ffn_experts_per_token > self.num_ffn_experts:
            fail(
                self,
                "num_ffn_experts_per_token",
                f"must be at most num_ffn_experts={self.num_ffn_experts}",
            )

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, whatever the backbone calls it."""
        raise NotImplementedError

    @property
    def attention_head_dim(self) -> int:
        """Size of one attention head, whatever the backbone calls it."""
        raise NotImplementedError

    @property
    def attention_experts(self) -> int:
        """N of MoA: `num_attention_experts`, or twice the active heads."""
        return self.num_attention_experts or 2 * self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values, for those who make caches. Of MoA alone, whose experts share one:
        where there is no such field, transformers takes as many as there are of queries."""
        if self.attention_type != "moa":
            raise AttributeError(f"{type(self).__name__} has no num_key_value_heads without MoA.")
        return 1

    @property
    def stack_budgets(self) -> list[float]:
        """The budgets of one stack of layers, repeats included."""
        return self.cct_budgets

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
        """`cct_budgets`, each once, largest first, pairs as tuples; none without CCT."""
        listed = [tuple(b) if isinstance(b, (list, tuple)) else b for b in self.cct_budgets or []]
        return sorted(
            set(listed), key=lambda b: (sum(b), b) if isinstance(b, tuple) else b, reverse=True
        )

    @property
    def has_cct(self) -> bool:
        return self.cct_budgets is not None


@contextmanager
def saving_model() -> Iterator[None]:
    """Within, a configuration is saved with the code of its models."""
    token = _saves_model.set(True)
    try:
        yield
    finally:
        _saves_model.reset(token)


def is_budget(value: Any) -> bool:
    """Whether `value` is a compute budget: a number in (0, 1]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < float(value) <= 1


def check_bool(config: Any, name: str) -> None:
    """Raise a ValueError unless the field is a bool."""
    if not isinstance(getattr(config, name), bool):
        fail(config, name, "must be True or False")


def fail(config: Any, name: str, rule: str) -> None:
    """Raise the ValueError of a field that breaks its rule. It names the field as its backbone does, and
    as the other backbones do."""
    other_names = getattr(config, "attribute_map", {})
    own = other_names.get(name, name)
    others = [other for other, mapped in other_names.items() if mapped == own]
    also = f"; {own} is {' and '.join(others)}, too" if others else ""
    raise ValueError(f"{type(config).__name__}.{own} {rule} (got {getattr(config, own)!r}){also}.")


def _check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(config, name) not in choices:
        fail(config, name, f"must be one of {', '.join(map(repr, choices))}")


def check_int(config: Any, name: str, *, minimum: int) -> None:
    """Raise a ValueError unless the field is an integer of at least `minimum`."""
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        fail(config, name, f"must be an integer of at least {minimum}")


def check_activation(config: Any, name: str) -> None:
    """Raise a ValueError unless the field names one of transformers' activation functions."""
    if getattr(config, name) not in ACT2FN:
        fail(config, name, f"must be one of {', '.join(sorted(ACT2FN))}")


def check_number(
    config: Any, name: str, *, minimum: float, maximum: float = float("inf"), below: float = float("inf")
) -> None:
    value = getattr(config, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum or not value < below:
        upper = "" if maximum == float("inf") else f" and at most {maximum}"
        upper += "" if below == float("inf") else f" and below {below}"
        fail(config, name, f"must be a finite number of at least {minimum}{upper}")
