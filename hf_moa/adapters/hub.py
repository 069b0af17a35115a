"""Pushing an adapter together with its card."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, HfApi
from peft import PeftModel

from hf_moa.modeling.ftg_config import ADAPTER_PLACE


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

    `PeftModel.push_to_hub` does the same, but puts an empty card of transformers in the place of the one
    that `save_pretrained` writes, which says what the adapter's base is and how to load it.

    Args:
        model: with adapters.
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
        card = Path(folder, "README.md")
        text = card.read_text(encoding="utf-8").replace(ADAPTER_PLACE, repo_id)
        card.write_text(text, encoding="utf-8")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
