"""What CCT declares: its configuration fields and their rules (Bapna et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.fields import check_bool, check_choice, check_int, check_number, fail
from ..core.mechanism import Mechanism

CCT_EXECUTIONS = ("auto", "sparse", "dense")
CCT_GATE_TRAININGS = ("soft", "hard")
CCT_BUDGET_LOSSES = ("sum", "mean")


@dataclass(kw_only=True, repr=False)
class CctFields:
    """Configuration fields of CCT.

    Args:
        cct_budgets (`list[float]` or `None`, defaults to `None`):
            Compute budgets in (0, 1] that training samples from, repeats being sampling weights
            (Bapna et al. 2020 use `[1, 1, 1, .5, .33, .2]`). `None` switches CCT off.
        cct_num_ffn_splits (`int`, defaults to 4): parts of the feed-forward layer, each with a gate.
        cct_gate_hidden_size (`int`, defaults to 128): width of the control networks' hidden layer.
        cct_noise_max (`float`, defaults to 5.0):
            Largest scale of the noise on the gates' logits, to which that of soft gates grows, and from
            which that of hard ones falls to 0. 5 is the paper's; gates of a pretrained model start open,
            and want about 1.
        cct_gate_training (`str`, defaults to `"soft"`):
            Gates in training: `"soft"` are the paper's noisy sigmoids, `"hard"` decide as in eval and
            have the sigmoids' gradients (straight-through).
        cct_budget_bias (`bool`, defaults to `False`):
            A bias of each budget on each gate's logit, so that budgets reach gates directly. (Not the
            paper's; `upcycle` switches it on.)
        cct_control_symbols (`bool`, defaults to `True`):
            The paper's control symbols: an embedding of the budget, added to those of all tokens.
            (`upcycle` leaves them out where gates have a bias.)
        cct_full_budget_is_plain (`bool`, defaults to `False`):
            At a budget of 1 all gates are open, and in eval not computed: the model is a plain one, like
            that it was converted from, and as fast. (`upcycle` switches it on.)
        cct_budget_loss (`str`, defaults to `"sum"`):
            The budget loss is the paper's `"sum"` over budgets, whatever their sampling weights, or
            the `"mean"` of them as sampled, as in checkpoints of version 0.2.
        cct_budget_loss_coef (`float` or `None`, defaults to `None`):
            Weight of the budget loss. `None` is 1 / (number of budgets) for the sum, 1 for the mean.
        cct_sublayer_norm (`bool`, defaults to `True`):
            The paper's extra LayerNorms inside the sub-layers. `False` leaves them out, so that a
            converted pretrained checkpoint starts as the same function.
        cct_execution (`str`, defaults to `"auto"`):
            How hard gates are executed in eval: `"dense"` computes all and multiplies by the gates,
            `"sparse"` computes only the tokens with open gates, `"auto"` takes the faster one, as
            measured on a CPU (on an accelerator: dense). On a GPU in half precision, without gradients,
            `"sparse"` has kernels that never wait for the host. All compute the same function, except
            for the attention probabilities of skipped queries, which sparse execution does not compute.
            A cache holds only the keys and values of open gates: with `"sparse"` always, but with those
            kernels, which keep all, never; with `"auto"` where that is faster: from a million numbers
            in a layer's keys on, for one sequence from about d=384 on.
        output_cct_gates (`bool`, defaults to `False`): Return the gates with every forward pass.
    """

    cct_budgets: list | None = None
    cct_num_ffn_splits: int = 4
    cct_gate_hidden_size: int = 128
    cct_noise_max: float = 5.0
    cct_gate_training: str = "soft"
    cct_budget_bias: bool = False
    cct_control_symbols: bool = True
    cct_full_budget_is_plain: bool = False
    cct_budget_loss: str = "sum"
    cct_budget_loss_coef: float | None = None
    cct_sublayer_norm: bool = True
    cct_execution: str = "auto"
    output_cct_gates: bool = False


def has_full_budget(budgets: Any) -> bool:
    """Whether a budget is 1, or one of a pair, and another is not."""
    if not isinstance(budgets, (list, tuple)):
        return False
    numbers = [n for b in budgets for n in (b if isinstance(b, (list, tuple)) else [b])]
    return 1 in numbers and any(n != 1 for n in numbers)


_SWITCHES = (
    "cct_sublayer_norm",
    "cct_budget_bias",
    "cct_control_symbols",
    "cct_full_budget_is_plain",
)


def _check_budget_inputs(config: Any) -> None:
    """How budgets reach gates."""
    if len(config.listed_budgets) > 1 and not (config.cct_budget_bias or config.cct_control_symbols):
        fail(
            config,
            "cct_control_symbols",
            "must be True where cct_budget_bias is False: no gate could tell one budget from another",
        )
    if not config.cct_full_budget_is_plain:
        return
    if config.cct_sublayer_norm:
        rule = "needs cct_sublayer_norm=False: with the extra norms no budget is the plain model's"
        fail(config, "cct_full_budget_is_plain", rule)
    if not has_full_budget(config.cct_budgets):
        fail(
            config,
            "cct_full_budget_is_plain",
            f"needs a budget of 1 and a smaller one in cct_budgets={config.cct_budgets!r}",
        )


def _unused(config: Any) -> dict[str, str]:
    if config.cct_budget_loss_coef == 0:
        return {"cct_budget_loss": "cct_budget_loss_coef is 0"}
    return {}


def _check_cct(config: Any) -> None:
    check_choice(config, "cct_execution", CCT_EXECUTIONS)
    check_int(config, "cct_num_ffn_splits", minimum=1)
    check_int(config, "cct_gate_hidden_size", minimum=1)
    check_number(config, "cct_noise_max", minimum=0.0)
    check_choice(config, "cct_gate_training", CCT_GATE_TRAININGS)
    check_choice(config, "cct_budget_loss", CCT_BUDGET_LOSSES)
    check_number(config, "cct_budget_loss_coef", minimum=0.0, optional=True)
    for name in _SWITCHES:
        check_bool(config, name)
    if CCT.is_on(config):
        config.validate_budgets()
        _check_budget_inputs(config)
        if config.ffn_size % config.cct_num_ffn_splits != 0:
            fail(config, "cct_num_ffn_splits", f"must divide the feed-forward size {config.ffn_size}")


def _check_loaded(asked: Any, of_checkpoint: dict[str, Any]) -> None:
    """Refuse other budgets, as many: what one has learned would stand for another. (Another number of
    them does not fit the weights.)"""
    given, saved = asked.cct_budgets, of_checkpoint.get("cct_budgets")
    for own, known in zip(_of_each_half(given), _of_each_half(saved), strict=False):
        if len(own) == len(known) and own != known:
            raise ValueError(
                f"cct_budgets must be those that the checkpoint was trained for, {saved} (got {given}). "
                "Leave them out; for others, upcycle the source again and train."
            )


def _of_each_half(budgets: Any) -> list[set[float]]:
    """The distinct budgets, of an encoder and of a decoder."""
    if not isinstance(budgets, (list, tuple)):
        return []
    pairs = (b if isinstance(b, (list, tuple)) else (b, b) for b in budgets)
    return [set(half) for half in zip(*pairs, strict=False)]


CCT = Mechanism(
    name="cct",
    fields=CctFields,
    prefixes=("cct_",),
    is_on=lambda config: config.cct_budgets is not None,
    check=_check_cct,
    check_loaded=_check_loaded,
    unused=_unused,
    of_old={"cct_budget_loss": "mean"},
    shape_fields=("cct_num_ffn_splits", "cct_gate_hidden_size", "cct_budget_bias"),
    gate_kind="cct",
    gate_name="control",
    gate_words="CCT control networks",
    gate_modules=("control_symbols",),
    has_auxiliary_losses=True,
    counts_what_it_computes=True,
    code=("cct/gating.py", "cct/costs.py"),
    package=__package__,
)
