"""What it declares."""

from dataclasses import dataclass

from hf_moa.modeling.core.fields import check_number
from hf_moa.modeling.core.mechanism import Mechanism


@dataclass(kw_only=True)
class WeightedFields:
    """Configuration fields of weighted heads.

    Args:
        weighted_start (`float`, defaults to 1.0): the weight that every head starts with.
    """

    weighted_start: float = 1.0


WEIGHTED = Mechanism(
    name="weighted",
    fields=WeightedFields,
    prefixes=("weighted_",),
    attention_type="weighted",
    is_on=lambda config: config.attention_type == "weighted",
    check=lambda config: check_number(config, "weighted_start", minimum=0.0),
    gate_kind="weighted",
    gate_name="weights",
    package=__package__,
)
