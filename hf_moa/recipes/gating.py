"""How a script gates its model: the flags, and the conversion of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

import hf_moa
from hf_moa.modeling.core.mechanism import attention_types

from .command_line import optional


def _configured(help_text: str) -> Any:
    """A flag for a field that a configuration has a value for."""
    return optional(f"{help_text} None: as the configuration has it.")


@dataclass
class GatingArguments:
    """How to gate the model. What is not given keeps the model config's default."""

    attention_type: str = field(
        default="none",
        metadata={
            "help": "none: take a checkpoint as it is (an ungated baseline, or a model that was "
            "converted before); from scratch, the same as mha. Otherwise gate a new model, or convert "
            "a checkpoint with hf_moa.upcycle; mha adds no gates to the attention, for CCT or a "
            "mixture of feed-forward experts only.",
            "choices": ["none", *attention_types()],
        },
    )
    mae_num_dropped_heads: int | None = _configured("MAE: heads that each expert leaves out.")
    mae_gate_type: str | None = _configured("MAE: the gate; uniform is UNI-MAE.")
    mae_gate_dropout: float | None = _configured("MAE: dropout inside the gate.")
    mae_gate_window: int | None = _configured("MAE: tokens that a gate of a causal layer averages.")
    num_attention_experts: int | None = _configured("MoA: attention experts per layer.")
    num_attention_heads: int | None = _configured("MoA: heads active for a token.")
    moa_key_value_heads: int | None = _configured("MoA: heads of keys and values.")
    head_dim: int | None = _configured("MoA: size of a head.")
    router_type: str | None = _configured("The router: topk or noisy_topk.")
    ffn_type: str | None = _configured("moe: a mixture of feed-forward experts.")
    num_ffn_experts: int | None = _configured("Feed-forward experts per layer.")
    num_ffn_experts_per_token: int | None = _configured("Feed-forward experts active for a token.")
    nested_budgets: list[float] | None = field(
        default=None,
        metadata={
            "help": "Nested budgets, such as 1 0.5 0.33: at each one the model is a smaller one, the "
            "first heads and feed-forward neurons of every layer. (hf_moa.upcycle(..., importance=...) "
            "sorts them first.)"
        },
    )
    nested_heads: list[int] | None = field(
        default=None, metadata={"help": "Heads at each nested budget. None: the budget's share."}
    )
    nested_ffn_sizes: list[int] | None = field(
        default=None, metadata={"help": "Feed-forward neurons at each. None: the budget's share."}
    )
    nested_layers: list[int] | None = field(
        default=None, metadata={"help": "Layers at each. None: all of them."}
    )
    cct_budgets: list[str] | None = field(
        default=None,
        metadata={
            "help": "CCT: the budgets to train for, such as 1 0.5 0.33; of T5 also pairs for encoder "
            "and decoder, such as 1,1 1,0.5. Switches CCT on."
        },
    )
    cct_budget_loss_coef: float | None = _configured("CCT: weight of the budget loss.")
    cct_noise_max: float | None = _configured("CCT: largest scale of the gates' noise.")
    eval_budgets: bool = field(
        default=False,
        metadata={
            "help": "At the end, evaluate at each budget; print the table and write it to "
            "budget_results_<name>.json."
        },
    )

    def __post_init__(self):
        if self.cct_budgets is not None:
            budgets: Any = [_budget(each) for each in self.cct_budgets]  # no longer text
            self.cct_budgets = budgets
        if self.attention_type == "none" and self.config_fields():
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in self.config_fields())} gate a model "
                f"and need `attention_type` to be of {', '.join(attention_types())} (got 'none')."
            )

    def config_fields(self) -> dict:
        """The given fields of the model config, `attention_type` aside."""
        not_in_config = ("attention_type", "eval_budgets")
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in not_in_config}
        return {name: value for name, value in fields.items() if value is not None}

    def all_config_fields(self) -> dict:
        """The same with `attention_type`; nothing if that is none."""
        if self.attention_type == "none":
            return {}
        return {"attention_type": self.attention_type, **self.config_fields()}


def _budget(given: str | float | list) -> float | list[float]:
    """A number, or a pair of numbers; from the command line, or as a JSON file has it."""
    parts = given.split(",") if isinstance(given, str) else given
    try:
        numbers = [float(part) for part in (parts if isinstance(parts, (list, tuple)) else [parts])]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`cct_budgets` must hold numbers such as 0.5, or pairs such as 1,0.5 (got {given!r})."
        ) from error
    return numbers if len(numbers) > 1 else numbers[0]


def convert(model: PreTrainedModel, gating_args: GatingArguments) -> PreTrainedModel:
    """The checkpoint as the flags want it: itself, or converted.

    Raises:
        ValueError: it was converted before, with other values; budgets are asked of a model without.
    """
    fields = gating_args.all_config_fields()
    if fields and not model.config.model_type.startswith("moa_"):
        model = hf_moa.upcycle(model, **fields)
    else:
        _check_fields(model, fields)
    check_budgets(model, gating_args)
    return model


def _check_fields(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    known = json.loads(json.dumps({name: getattr(model.config, name, None) for name in fields}))
    differing = [name for name, value in fields.items() if known[name] != value]
    if differing:
        raise ValueError(
            f"{model.config.name_or_path} is a converted checkpoint already, with other values "
            f"of {', '.join(f'`{name}`' for name in differing)}. Leave out the flags that convert, "
            "or start from the checkpoint it was converted from."
        )


def check_budgets(model: PreTrainedModel, gating_args: GatingArguments) -> None:
    """Raise a ValueError where budgets are asked of a model that has none."""
    if gating_args.eval_budgets and not getattr(model.config, "listed_budgets", None):
        raise ValueError(
            "`eval_budgets` needs a model with budgets: give `nested_budgets` or `cct_budgets`, or "
            "start from a checkpoint that has them (got "
            f"{model.config.name_or_path or 'a new model'} without)."
        )
