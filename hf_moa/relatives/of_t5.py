"""The encoder-decoder models that a gated T5 expresses. Their weights have T5's names."""

from __future__ import annotations

from typing import Any

from hf_moa.modeling.t5.family import T5

from .relative import Relative


def _mt5(config: Any, class_name: str) -> dict[str, Any]:
    # which T5's configuration does not declare
    return {"decoder_start_token_id": config.decoder_start_token_id, "scale_decoder_outputs": False}


def _umt5(config: Any, class_name: str) -> dict[str, Any]:
    return _mt5(config, class_name) | {
        "scale_decoder_outputs": True,  # as transformers' class does
        "relative_bias_in_every_layer": True,
    }


MT5 = Relative(model_type="mt5", prefix="MT5", family=T5, fields=_mt5)
UMT5 = Relative(model_type="umt5", prefix="UMT5", family=T5, fields=_umt5)
RELATIVES = (MT5, UMT5)
