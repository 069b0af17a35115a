"""What model cards say of routers, beside what they do for MoA and sparse MoE."""

from __future__ import annotations

from typing import Any

SHAZEER = """@inproceedings{shazeer-etal-2017-outrageously,
  title = {Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer},
  author = {Shazeer, Noam and Mirhoseini, Azalia and Maziarz, Krzysztof and Davis, Andy and Le, Quoc and
            Hinton, Geoffrey and Dean, Jeff},
  booktitle = {International Conference on Learning Representations},
  year = {2017},
  eprint = {1701.06538},
  archivePrefix = {arXiv}
}"""


def shown_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Without the losses that weigh nothing."""
    return {name: value for name, value in fields.items() if value}


def citations(config: Any) -> list[str]:
    return [SHAZEER] if config.router_type == "noisy_topk" else []
