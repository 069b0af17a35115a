"""`FTGConfig`: which gates an FTG adapter trains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import logging

from ..core.fields import check_bool, fail
from ..core.mechanism import Mechanism, gate_kinds, gated_mechanisms

# In a `try`, so that a checkpoint's code loads where PEFT is not installed.
try:
    from peft import PeftConfig
except ImportError:
    raise

logger = logging.get_logger(__name__)

# The text of an adapter's card, from its title to its last sentence, and what PEFT adds to it later.
_CARD = re.compile(
    r"^# FTG\+? adapter of .*?"
    r"^(The package hf_moa brings the method\.|`PeftModel\.from_pretrained\(base, \.\.\.\)`\.)$"
    r"(\s*^### Framework versions\s+^- PEFT \S+$(?!\n- ))?",
    re.DOTALL | re.MULTILINE,
)
# What an adapter's card calls the adapter, before it has a name.
ADAPTER_PLACE = "path/or/name/of/this/adapter"
# PEFT's names of tasks -> what its classes that load adapters for them are called behind "AutoPeftModel"
LOADERS = {
    "SEQ_CLS": "ForSequenceClassification",
    "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
    "CAUSAL_LM": "ForCausalLM",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "ForFeatureExtraction",
}
_PROJECTIONS = "attention output projections"
_HEAD = re.compile(r"\.(classifier|score|classification_head\.out_proj)\.weight$")


class FTGPeftType(str, Enum):  # noqa: UP042 - as PEFT's own
    """PEFT's name of the method. (Its own enumeration is closed.)"""

    FTG = "FTG"


@dataclass
class FTGConfig(PeftConfig):
    """Adapter that trains the gates of a gated model (FTG), with `plus` also the output projections of
    its attention (FTG+; Peng et al. 2020, section 5.2).

    The adapter holds copies of the modules that it trains; the base model stays as it was.

    Args:
        plus (`bool`, defaults to `False`): FTG+: also train the output projection of every attention.
        gates (`list[str]`, defaults to `("mae", "router", "cct")`):
            Which gating modules to train, of those that the model has: the gates of MAE, the routers of
            MoA and of sparse feed-forward layers, the control networks of CCT.
        modules_to_save (`list[str]`, *optional*): further modules to train and save, such as a
            classifier. With `task_type` "SEQ_CLS" or "TOKEN_CLS", PEFT adds heads named `classifier` or
            `score` by itself (T5's, "classification_head", belongs here). A CCT model that was just
            converted with `cct_budget_bias=False` needs "control_symbols" here, or no gate can tell one
            budget from another.
        layers_to_transform (`int` or `list[int]`, *optional*): the layers to train; default: all. T5's
            encoder and decoder each count from 0.
        target_modules (`str` or `list[str]`, *optional*): names of the modules to train, instead of
            `gates` and `plus`. An adapter that was made knows those it found.
        exclude_modules (`str` or `list[str]`, *optional*): names of modules to leave out.
        init_weights (`bool`, defaults to `True`): start from the base's weights, so that the adapted
            model computes what the base does; `False` perturbs them, for tests.
        made_for (`dict`, *optional*): what the adapter was made for; written by it, checked on loading.

    Raises:
        ValueError: an unknown kind of gate; when the model is adapted: nothing in it is selected, or it
            is not what the adapter was made for.
    """

    plus: bool = field(
        default=False, metadata={"help": "Also train the attention's output projections (FTG+)."}
    )
    gates: list[str] | tuple[str, ...] | str = field(
        default_factory=gate_kinds, metadata={"help": "Which gates to train; all by default."}
    )
    modules_to_save: list[str] | str | None = field(
        default=None, metadata={"help": "Further modules to train and save, such as a classifier."}
    )
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "The layers to train; all by default."}
    )
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names of the modules to train, instead of gates and plus."}
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names of modules to leave out."}
    )
    init_weights: bool = field(
        default=True, metadata={"help": "Start from the base's weights; False perturbs them."}
    )
    made_for: dict[str, Any] | None = field(
        default=None, metadata={"help": "The model that the adapter was made for."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = FTGPeftType.FTG
        gates = [self.gates] if isinstance(self.gates, str) else self.gates
        known = isinstance(gates, (list, tuple, set)) and all(kind in gate_kinds() for kind in gates)
        if known:
            self.gates = list(gates)
        if not known or not (self.gates or self.plus or self.target_modules):
            raise ValueError(
                f"FTGConfig.gates must hold some of {', '.join(map(repr, gate_kinds()))}, or plus be "
                f"True (got {self.gates!r})."
            )
        check_bool(self, "plus")
        check_bool(self, "init_weights")
        self._check_list_of(int, "layers_to_transform", "the number of a layer, or a list of such")
        for name in ("modules_to_save", "target_modules", "exclude_modules"):
            self._check_list_of(str, name, "a name, or a list of names")
        if isinstance(self.target_modules, (list, tuple)):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]  # as LoRA does
        if isinstance(self.exclude_modules, (list, tuple)):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]  # the same

    def _check_list_of(self, kind: type, name: str, rule: str) -> None:
        """Check that a field is None, one of `kind` or several."""
        value = getattr(self, name)
        several = value if isinstance(value, (list, tuple, set)) else [value]
        if value is not None and any(not isinstance(v, kind) or isinstance(v, bool) for v in several):
            fail(self, name, f"must be {rule}")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """As in PEFT; and the adapter's card says what it is and how to load it.

        An adapter that names no base is saved with a warning.
        """
        super().save_pretrained(save_directory, **kwargs)
        if not self.base_model_name_or_path:
            logger.warning(
                f"The adapter in {save_directory} names no base model, since the model that it was made "
                "on was only in memory: save that model, load it from there and adapt it, or keep it "
                "for `PeftModel.from_pretrained(base, ...)`."
            )
        card = Path(save_directory, "README.md")
        if not card.is_file():
            return
        text = card.read_text(encoding="utf-8")
        start = text.find("\n---", 3) + len("\n---")  # behind the metadata
        if not text.startswith("---") or start == len("\n---") - 1:
            return
        body = text[start:].strip()
        if _CARD.match(body):
            kept = without_ftg_card(body)  # what others have added
            kept = f"\n{kept}" if kept else ""
        elif body.startswith("# Model Card for"):  # PEFT's draft
            kept = ""
        else:  # somebody's own text
            return
        labels = saved_num_labels(save_directory)
        card.write_text(f"{text[:start]}\n\n{self._card(labels)}{kept}", encoding="utf-8")

    def in_words(self) -> str:
        """What the adapter trains, in a sentence for its card."""
        names, layers = self.target_modules, self.layers_to_transform
        if isinstance(names, str):
            trained = [f"modules of names like `{names}`"]
        elif names is None:
            words = {mechanism.gate_kind: _gates_in_words(mechanism) for mechanism in gated_mechanisms()}
            trained = [words[kind] for kind in self.gates]
            trained += [_PROJECTIONS] if self.plus else []
        else:  # an adapter that was made knows what it found
            ends = {name.rsplit(".", 1)[-1] for name in names}
            trained = [_gates_in_words(m) for m in gated_mechanisms() if m.gate_name in ends]
            others = sorted(ends - {m.gate_name for m in gated_mechanisms()})
            if others:
                trained.append(_PROJECTIONS if self.plus else f"modules named {_listed(others)}")
        text = "It trains copies of the base model's " + " and ".join(
            [", ".join(trained[:-1]), trained[-1]] if len(trained) > 1 else trained
        )
        if layers is not None:
            text += f" in layer {layers}" if isinstance(layers, int) else f" in the layers {layers}"
        text += ", and leaves all else as it is"
        if self.modules_to_save:
            text += f" but for modules named {_listed(self.modules_to_save)}"
        return f"{text} (Peng et al. 2020, section 5.2)."

    def _card(self, num_labels: int | None) -> str:
        base = self.base_model_name_or_path or "the base model"
        first = "import hf_moa  # makes PEFT and transformers know the adapter and the base"
        task = getattr(self.task_type, "value", self.task_type)
        loader = f"AutoPeftModel{'' if task is None else LOADERS.get(task, '')}"
        options = "" if num_labels is None else f", num_labels={num_labels}"
        if task is None:  # PEFT imports the base's own class
            options += ', import_allowlist=["hf_moa"]'
        load = f'{loader}.from_pretrained("{ADAPTER_PLACE}"{options})'
        if not self.base_model_name_or_path:
            loader = "PeftModel"
            load = f'{loader}.from_pretrained(base, "{ADAPTER_PLACE}")  # the model that it was made on'
        return f"""# {"FTG+" if self.plus else "FTG"} adapter of {base}

A PEFT adapter for a gated Transformer. {self.in_words()}

```python
{first}
from peft import {loader}

model = {load}
```

The package hf_moa brings the method.
"""


def _gates_in_words(mechanism: Mechanism) -> str:
    return mechanism.gate_words or f"{mechanism.gate_kind} gates"


def _listed(names: str | Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in ([names] if isinstance(names, str) else names))


def without_ftg_card(text: str) -> str:
    """The text of a card without what `FTGConfig` wrote into it."""
    return _CARD.sub("", text, count=1).strip()


def saved_num_labels(folder: str | Path) -> int | None:
    """How many labels the classifier has that is saved with an adapter; None where none is."""
    weights = Path(folder, "adapter_model.safetensors")
    if not weights.is_file():
        return None
    with safe_open(weights, "pt") as file:
        heads = [name for name in file.keys() if _HEAD.search(name)]  # noqa: SIM118 - no mapping
        return file.get_slice(heads[0]).get_shape()[0] if heads else None
