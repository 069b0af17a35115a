"""Teachers: models whose logits and hidden states others learn from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_moa.hub_names import check_source

SELF = "self"  # a model's largest budget teaches the others
_AUTO_CLASSES = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
)


class Teacher:
    """A model that answers in eval mode and without gradients.

    Args:
        model: the model; it is put into eval mode.

    Example:
        >>> Teacher(finetuned)(batch, output_hidden_states=True)["hidden_states"][-1]
    """

    def __init__(self, model: nn.Module):
        self.model: Any = model.eval()
        inner: Any = self.model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        self._names = set(inspect.signature(inner.forward).parameters)

    def to(self, device: torch.device) -> None:
        """Move the model, unless several devices share it."""
        if getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Any], *, output_hidden_states: bool = False) -> Any:
        """The outputs for a batch of the student's.

        Args:
            batch: what the student is called with. The teacher gets those that its forward names, and no
                labels: an encoder-decoder model the decoder's inputs that follow from them.
            output_hidden_states: whether they are among the outputs.
        """
        inputs = {n: x for n, x in batch.items() if n in self._names and n not in ("labels", "budget")}
        for name in ("start_positions", "end_positions", "num_items_in_batch"):
            inputs.pop(name, None)
        labels = batch.get("labels")
        has_decoder = getattr(self.model.config, "is_encoder_decoder", False)
        given = [inputs.get(f"decoder_{name}") for name in ("input_ids", "inputs_embeds")]
        if has_decoder and given == [None, None] and labels is not None and labels.ndim == 2:
            shifted = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
            inputs["decoder_input_ids"] = shifted
        return self.model(**inputs, output_hidden_states=output_hidden_states, return_dict=True)


def load_teacher(path: str | os.PathLike, student: nn.Module, **kwargs: Any) -> PreTrainedModel:
    """The model of a path or of the Hub, with a head as the student's.

    Args:
        path: of the teacher.
        student: without wrappers or adapters.
        kwargs: of `from_pretrained`.

    Raises:
        ValueError: there is no auto class for the student's; the checkpoint lacks some of the weights.
    """
    config: Any = getattr(student, "config", None)
    name = type(student).__name__
    by_name = {model: auto for auto, model in getattr(config, "auto_classes", {}).items()}
    for auto_name in _AUTO_CLASSES:
        auto: Any = getattr(transformers, auto_name)
        found = auto._model_mapping.get(type(config), None)
        if by_name.get(name) == auto_name or getattr(found, "__name__", None) == name:
            check_source(path, "teacher")
            teacher, report = auto.from_pretrained(path, output_loading_info=True, **kwargs)
            if report["missing_keys"]:
                raise ValueError(
                    f"teacher={str(path)!r} must be finetuned for the model's task, but has no weights "
                    f"for {', '.join(sorted(report['missing_keys']))} of {type(teacher).__name__}."
                )
            return teacher
    raise ValueError(
        f"teacher={path!r}: there is no auto class to load a model with whose head is that of "
        f"{name}. Load it yourself, and give the model."
    )


def check_teacher(teacher: nn.Module, student: nn.Module, *, compares_hidden: bool) -> None:
    """Raise a ValueError where a model cannot learn from another.

    Args:
        teacher: the other.
        student: the model, without wrappers or adapters.
        compares_hidden: whether hidden states are compared.
    """
    own = {p.data_ptr() for p in student.parameters() if p.numel() and not p.is_meta}
    if teacher is student or any(p.data_ptr() in own for p in teacher.parameters()):
        raise ValueError(
            "teacher shares parameters with the model, and would change with it: give a copy "
            "(copy.deepcopy), or teacher='self' to distil the largest budget into the others."
        )
    ours: Any = getattr(student, "config", None)
    theirs: Any = getattr(teacher, "config", None)
    if theirs is None or ours is None:
        return
    for name in ("is_encoder_decoder", "decoder_start_token_id"):
        values = [getattr(config, name, None) for config in (ours, theirs)]
        if values[0] != values[1]:
            raise ValueError(f"teacher must have the model's {name}, {values[0]!r} (got {values[1]!r}).")
    sizes = [_num_embeddings(model) for model in (student, teacher)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            "teacher must have the model's tokenizer: it embeds another number of tokens, "
            f"{sizes[1]}, not {sizes[0]}. Take a teacher of the same vocabulary; where only the sizes "
            "of the matrices differ, resize one (resize_token_embeddings)."
        )
    _check_label_names(ours, theirs)
    widths = [getattr(config, "hidden_size", None) for config in (ours, theirs)]
    if compares_hidden and None not in widths and widths[0] != widths[1]:
        raise ValueError(
            f"teacher's hidden states have {widths[1]} numbers, the model's {widths[0]}, and cannot be "
            "compared. Set distillation_hidden_weight to 0, for only the logits, or take a teacher of "
            "the same width."
        )


def _num_embeddings(model: nn.Module) -> int | None:
    try:
        return model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _check_label_names(ours: Any, theirs: Any) -> None:
    numbered = [
        {str(name).lower(): i for name, i in (getattr(config, "label2id", None) or {}).items()}
        for config in (ours, theirs)
    ]
    if numbered[0] != numbered[1] and set(numbered[0]) == set(numbered[1]):
        raise ValueError(
            f"teacher numbers the classes otherwise: {theirs.label2id}, where the model has "
            f"{ours.label2id}. Give both the same `label2id`, with the classifier's rows in its order."
        )
