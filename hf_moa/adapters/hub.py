"""Pushing an adapter together with its card."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, HfApi
from peft import PeftModel

from hf_moa.gated_models import is_instance_by_name
from hf_moa.model_card import Adapter, checkpoint_card, read_card, write_card
from hf_moa.model_card.existing import base_on_hub
from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.modeling.ftg.config import ADAPTER_PLACE

# How the card begins that `FTGConfig` writes; a base follows, which may be a path on this machine.
_FTG_TITLE = re.compile(r"^(# FTG\+? adapter of ).*$", flags=re.MULTILINE)


def push_to_hub(
    model: PeftModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload adapter",
) -> CommitInfo:
    """Upload an adapter's weights, configuration and card in one commit.

    `PeftModel.push_to_hub` does the same on a gated base, where the repository has no card that somebody
    wrote. This one also writes it for FTG on any other model, and replaces the one that is there.

    Args:
        model: with adapters, of any method.
        repo_id: "user/name".
        private: whether a new repository is; default: what the organization has as its default.
        token: default: the one of `hf auth login`.
        revision: branch to push to; default: main.
        create_pr: open a pull request instead.
        commit_message: of the commit.

    Raises:
        ValueError: `model` has no adapters.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; the repository is as it was.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"model must be a PeftModel (got {type(model).__name__}); a model without adapters has "
            "push_to_hub of its own."
        )
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _write_card(model, Path(folder), name=repo_id)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )


def _write_card(model: PeftModel, folder: Path, *, name: str) -> None:
    """Write a card over the one that `save_pretrained` wrote."""
    path = folder / "README.md"
    if is_instance_by_name(getattr(model.get_base_model(), "config", None), GatingConfig):
        write_card(checkpoint_card(folder, name=name, adapter=Adapter.of(model)), path)
        return
    card = read_card(path)  # FTG takes any modules by their names
    if card is not None:
        base = base_on_hub(card) or "the base model"
        card.text = _FTG_TITLE.sub(lambda title: title[1] + base, card.text.replace(ADAPTER_PLACE, name))
        write_card(card, path)
