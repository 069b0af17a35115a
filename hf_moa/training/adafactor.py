"""Adafactor whose steps are relative to the size of the weights (Shazeer & Stern 2018, section 8)."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

# A step is relative to a weight's root mean square, or to this where that is smaller: gates start at or
# near zero, and with the usual 0.001 would stay there
SMALLEST_SIZE = 0.02


def adafactor_arguments(args: TrainingArguments) -> dict[str, Any]:
    """What `optim_args` adds to the Adafactor of `Trainer`, which does not read them and whose rate is
    absolute: with "scale_parameter=True" a step is `learning_rate` times the weight's root mean square.

    Returns:
        Arguments of `transformers.Adafactor`; none for other optimisers.

    Raises:
        ValueError: Adafactor is given something else.

    Example:
        >>> MoaTrainingArguments("out", optim="adafactor", optim_args="scale_parameter=True",
        ...                      learning_rate=3e-2)
    """
    if args.optim != "adafactor":
        return {}
    forms: dict[str, dict[str, Any]] = {
        "": {},
        "scale_parameter=False": {},
        "scale_parameter=True": {"scale_parameter": True, "eps": (1e-30, SMALLEST_SIZE)},
    }
    given = (args.optim_args or "").replace(" ", "")
    if given not in forms:
        raise ValueError(
            "optim_args of adafactor must be scale_parameter=True, for steps relative to the size of "
            f"the weights, or scale_parameter=False (got {args.optim_args!r})."
        )
    return forms[given]
