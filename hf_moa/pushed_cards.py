"""The card of a plain `push_to_hub`, of a model or of PEFT's adapter.

transformers puts a card into the folder that it uploads: the one that the repository has, or a draft,
which says "More Information Needed" all over. A whole card replaces the draft; others stay.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .gated_models import is_instance_by_name
from .modeling.config.gating import GatingConfig
from .modeling.core.gated_model import GatedModel

logger = logging.get_logger(__name__)


def write_pushed_card(model: Any, folder: str | os.PathLike, name: str) -> None:
    """Write the card of a model, or of a `PeftModel` on a gated one, over a draft.

    Args:
        model: what the folder holds.
        folder: that is about to be uploaded.
        name: of the repository, "user/name".
    """
    from .model_card import Adapter, checkpoint_card, is_unfinished, read_card, write_card

    folder = Path(folder)
    path = folder / "README.md"
    try:
        card = read_card(path)
        if card is None or is_unfinished(card):
            adapter = None if isinstance(model, GatedModel) else Adapter.of(model)
            write_card(checkpoint_card(folder, name=name, adapter=adapter), path)
    except ValueError as error:  # which shall not keep weights from being pushed
        logger.warning(f"No card of hf_moa was written for {name}: {error}")


def write_cards_of_pushes() -> None:
    """Have gated models write theirs. A checkpoint's own code does not have this."""
    GatedModel.write_card = staticmethod(write_pushed_card)


def write_cards_of_adapters() -> None:
    """Have PEFT's adapters of gated models write theirs."""
    from peft import PeftModel

    upload = PeftModel._upload_modified_files

    def upload_with_card(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        if is_instance_by_name(getattr(self.get_base_model(), "config", None), GatingConfig):
            write_pushed_card(self, working_dir, repo_id)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    PeftModel._upload_modified_files = upload_with_card  # type: ignore[method-assign]
