"""When a trainer writes a model card: where the user saves or pushes a gated model."""

from __future__ import annotations

from typing import Any

from hf_moa.gated_models import is_instance_by_name
from hf_moa.model_card import write_trainer_card
from hf_moa.modeling.config.gating import GatingConfig

from .trainer_base import TrainerBase


class WritesModelCards(TrainerBase):
    """Mixin for `Trainer`; its `_gated_model()` is the bare model."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; and the user's call writes a gated model's card beside the model.
        (Checkpoints have none.)"""
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self._has_card():
            write_trainer_card(self, self.args.output_dir if output_dir is None else output_dir)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the card of a gated model, or of an adapter of one, to `args.output_dir`: see
        `hf_moa.model_card.trainer_card`. Any other model has that of `Trainer`.

        Raises:
            ValueError: `license` is none of the Hub's identifiers.
        """
        facts: dict[str, Any] = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "finetuned_from": finetuned_from,
            "tasks": tasks,
            "dataset_tags": dataset_tags,
            "dataset": dataset,
            "dataset_args": dataset_args,
        }
        if not is_instance_by_name(getattr(self._gated_model(), "config", None), GatingConfig):
            super().create_model_card(**facts)
        elif self._has_card():
            write_trainer_card(self, self.args.output_dir, **facts)

    def _has_card(self) -> bool:
        config = getattr(self._gated_model(), "config", None)
        return self.is_world_process_zero() and is_instance_by_name(config, GatingConfig)
