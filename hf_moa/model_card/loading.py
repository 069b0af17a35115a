"""How to load a model: Python that runs as it stands."""

from __future__ import annotations

from typing import Any

from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.upcycling.families import family_of

_GENERATIVE = ("text-generation", "text2text-generation")


def class_of(config: GatingConfig, model_class: type | str | None = None) -> str:
    """The name of the family's class that a model is: of a class derived from it, its parent.

    Args:
        model_class: default: the class that the config names in `architectures`; without one, the base
            model.
    """
    known = list(config.auto_classes.values())
    if isinstance(model_class, type):
        names = [parent.__name__ for parent in model_class.__mro__]
    else:
        names = [model_class] if model_class else list(config.architectures or [])
    return next((name for name in names if name in known), known[0])


def task_of(config: GatingConfig, model_class: str) -> str:
    """The Hub's name of what the class does: `MoaBertForMaskedLM` -> "fill-mask"."""
    tasks = {f"Moa{name}": task for task, name in family_of(config).tasks.items()}
    task = tasks.get(model_class, "feature-extraction")
    return "feature-extraction" if task == "text-encoding" else task


def loading_in_words(
    config: GatingConfig,
    *,
    name: str,
    model_class: str,
    has_tokenizer: bool,
    carries_code: bool,
    base: str | None,
    base_folder: str | None = None,
) -> str:
    """Snippets with this package and without it.

    Args:
        name: what `from_pretrained` is given: an id on the Hub, or a folder.
        has_tokenizer: whether a tokenizer is saved beside the model.
        carries_code: whether the checkpoint loads with `trust_remote_code=True`.
        base: for an adapter, the model that it adapts.
        base_folder: for an adapter, the folder beside it that the base is in, in the place of `base`.
    """
    auto = {known: auto for auto, known in config.auto_classes.items()}[model_class]
    source = name if base_folder else base or name
    loader, packages = auto, ["import hf_moa  # makes transformers know this model"]
    if base_folder:  # the auto classes load the base that the adapter beside it names
        loader, packages = model_class, [f"from hf_moa import {model_class}"]
    tokenizers = ["AutoTokenizer"] if has_tokenizer else []
    imports = [*([] if base_folder else [auto]), *tokenizers]
    peft = ["from peft import PeftModel"] if base else []
    is_classifier = auto.endswith(("SequenceClassification", "TokenClassification"))
    # the base need not have the head that is saved with an adapter
    options = f', subfolder="{base_folder}"' if base_folder else ""
    options += f", num_labels={config.num_labels}" if base and is_classifier else ""
    use = _use(config, model_class, name=name, has_tokenizer=has_tokenizer)
    torch = ["import torch"] if any("torch." in line for line in use) else []
    with_package = [
        *packages,
        *torch,
        *peft,
        *([f"from transformers import {', '.join(imports)}"] if imports else []),
        "",
        *_load(loader, source, adapter=name if base else None, options=options),
        *use,
    ]
    text = f"With this model's package, hf_moa:\n\n{_python(with_package)}"
    if not carries_code:
        return text
    alone = [
        *peft,
        f"from transformers import {', '.join([auto, *tokenizers])}",
        "",
        *_load(
            auto, source, adapter=name if base else None, options=f"{options}, trust_remote_code=True"
        ),
        *([_tokenizer(name, ", trust_remote_code=True")] if has_tokenizer else []),
    ]
    return (
        f"{text}\n\nWithout it, {'the base model' if base else 'the checkpoint'} brings its own code, "
        f"which runs on your machine:\n\n{_python(alone)}"
    )


def _load(auto: str, source: str, *, adapter: str | None, options: str = "") -> list[str]:
    if adapter is None:
        return [f'model = {auto}.from_pretrained("{source}"{options})']
    return [
        f'base = {auto}.from_pretrained("{source}"{options})',
        f'model = PeftModel.from_pretrained(base, "{adapter}").eval()',
    ]


def _use(config: GatingConfig, model_class: str, *, name: str, has_tokenizer: bool) -> list[str]:
    task = task_of(config, model_class)
    lines = _inputs(config, task, name) if has_tokenizer else _ids(config, task)
    call = "model(**inputs"
    if task in _GENERATIVE:
        call = "model.generate(**inputs, max_new_tokens=20"
    elif model_class == "MoaT5Model":
        call = 'model(**inputs, decoder_input_ids=inputs["input_ids"]'
    lines.append(f"outputs = {call})")
    if task in _GENERATIVE and has_tokenizer:
        lines.append("print(tokenizer.batch_decode(outputs, skip_special_tokens=True))")
    if config.has_cct:
        budgets = budgets_of(config, model_class)
        listed = ", ".join(map(str, budgets))
        lines.append(f"# of the budgets {listed}; without one, the largest:")
        lines.append(f"outputs = {call}, budget={budgets[-1]})")
    return lines


def budgets_of(config: GatingConfig, model_class: str) -> list[Any]:
    """The budgets that a call may name, largest first: pairs where each half has its own."""
    is_pair = isinstance(config.cct_budgets[0], (list, tuple))
    is_encoder = model_class in ("MoaT5EncoderModel", "MoaT5ForTokenClassification")
    if not is_pair:
        return sorted(set(config.cct_budgets), reverse=True)
    if is_encoder:
        return sorted({encoder for encoder, _ in config.cct_budgets}, reverse=True)
    return sorted(map(tuple, config.budget_pairs), key=lambda pair: (sum(pair), pair), reverse=True)


def _inputs(config: GatingConfig, task: str, name: str) -> list[str]:
    lines = [_tokenizer(name)]
    if task == "multiple-choice":
        return [
            *lines,
            'choices = tokenizer(["A question"] * 2, ["One answer", "Another"], padding=True)',
            "inputs = {name: torch.tensor([rows]) for name, rows in choices.items()}  # [1, choices, T]",
        ]
    texts = {
        "fill-mask": 'f"A {tokenizer.mask_token} to fill in"',
        "question-answering": '"Who gates the heads?", "A layer gates its heads"',
    }
    return [*lines, f'inputs = tokenizer({texts.get(task, _text(task))}, return_tensors="pt")']


def _tokenizer(name: str, options: str = "") -> str:
    return f'tokenizer = AutoTokenizer.from_pretrained("{name}"{options})'


def _text(task: str) -> str:
    return '"Once upon a time"' if task in _GENERATIVE else '"Which heads does this need?"'


def _ids(config: GatingConfig, task: str) -> list[str]:
    end = config.eos_token_id if isinstance(config.eos_token_id, int) else 4
    ids = f"[2, 3, {end}]"
    ids = f"[[{ids}, {ids}]]" if task == "multiple-choice" else f"[{ids}]"
    return [f'inputs = {{"input_ids": torch.tensor({ids})}}  # no tokenizer is saved here: your own ids']


def _python(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"
