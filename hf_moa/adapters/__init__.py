"""FTG and FTG+: finetuning of only the gates, as PEFT adapters (Peng et al. 2020, section 5.2).

    model = get_peft_model(model, FTGConfig(task_type="SEQ_CLS"))

The code is in `hf_moa/modeling/ftg/`.
"""

from hf_moa.modeling.core.mechanism import gate_kinds
from hf_moa.modeling.ftg.config import FTGConfig
from hf_moa.modeling.ftg.layer import FTGLayer
from hf_moa.modeling.ftg.model import FTGModel

from .hub import push_to_hub

GATE_KINDS = gate_kinds()  # of the package

__all__ = ["GATE_KINDS", "FTGConfig", "FTGLayer", "FTGModel", "push_to_hub"]
