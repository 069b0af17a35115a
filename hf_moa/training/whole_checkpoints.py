"""How a trainer saves its checkpoints: whole, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import HubStrategy, rotate_checkpoints

from hf_moa.gated_models import is_instance_by_name
from hf_moa.modeling.core.gated_model import GatedModel

from .checkpoints import check_same_model, written_whole
from .trainer_base import TrainerBase


class SavesWholeCheckpoints(TrainerBase):
    """Mixin for `Trainer`; its `_gated_model()` is the bare model."""

    _staged: Path | None = None  # where the checkpoint is being written, before it has its name
    _pushes_later = False  # when it has it

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`, which takes the weights that fit and leaves the others as they are.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        check_same_model(resume_from_checkpoint, getattr(self._gated_model(), "config", None))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staged is None else str(self._staged)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in `Trainer`; but a checkpoint has its name only when it is whole."""
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        best_checkpoint = self.state.best_model_checkpoint
        if self.state.best_global_step == self.state.global_step:
            best_checkpoint = str(folder)
        with written_whole(folder, self.accelerator, writes=self.args.should_save) as staged:
            self._staged = staged.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staged = None
            self.state.best_model_checkpoint = best_checkpoint  # not the one of another name
            gated = self._gated_model()
            if self.args.should_save and self.is_fsdp_enabled and is_instance_by_name(gated, GatedModel):
                gated.save_config(staged)  # shards come without
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))
        if self._pushes_later:
            self._pushes_later = False
            self._push_whole_checkpoint(folder)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # uploads go on in the background, under the name that the folder will have
        self._pushes_later = True

    def _push_whole_checkpoint(self, folder: Path) -> None:
        # `Trainer` pushes a checkpoint's weights and configuration, but not the code that this names
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            for code in folder.glob("*.py"):
                shutil.copy(code, self.args.output_dir)
        super()._push_from_checkpoint(str(folder))
