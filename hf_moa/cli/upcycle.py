"""`hf-moa upcycle`: a pretrained checkpoint becomes a gated one."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .command import add_command, budget, given, tokenizer_of, without_bars
from .gating_fields import GatingField, gating_fields

_MARKER = "config.json"
# what an earlier checkpoint may have more of: a leftover could be loaded beside the new one
_WEIGHTS_AND_CODE = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "modeling_*.py",
    "configuration_*.py",
)
# those of `hf_moa.families.FAMILIES`, which would import torch.
_TASKS = (
    "feature-extraction",
    "fill-mask",
    "multiple-choice",
    "replaced-token-detection",
    "text-generation",
    "text2text-generation",
    "text-encoding",
    "text-classification",
    "token-classification",
    "question-answering",
)
# What upcycle sets instead of the configuration's defaults; see the mechanisms' `upcycling.py`, which
# would import torch.
UPCYCLED = {
    "cct_budget_bias": "True with CCT",
    "cct_control_symbols": "False with CCT",
    "cct_gate_training": "hard with CCT",
    "cct_full_budget_is_plain": "True with CCT, if 1 is one of its budgets",
    "cct_noise_max": "1.0 with CCT",
    "moa_key_value_heads": "the source's heads, or as many as fit",
}
# What upcycle takes besides the gating fields.
_HEAD_FIELDS = {
    "num_attention_heads": "heads active per token (default: the source's)",
    "head_dim": "size of one head (default: hidden_size / num_attention_heads)",
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "upcycle",
        run,
        "turn a pretrained BERT, GPT-2 or T5 into a gated one that starts from its weights",
        "hf-moa upcycle google-bert/bert-base-uncased ./bert-mae "
        "--attention-type mae --cct-budgets 1.0 0.5",
    )
    parser.add_argument("source", metavar="SRC", help="folder or Hub id of a checkpoint")
    parser.add_argument("output_dir", metavar="OUT", help="folder for the gated checkpoint")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier checkpoint in OUT; all else there stays",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--task", help=f"head to load: {', '.join(_TASKS)}")
    head.add_argument("--model-class", help="the same as a class, such as MoaBertForMaskedLM")
    labels = parser.add_mutually_exclusive_group()
    labels.add_argument("--num-labels", type=int, help="of a classifier (default: the checkpoint's)")
    labels.add_argument(
        "--id2label",
        nargs="+",
        metavar="NAME",
        help="the same by the names of the labels, in their order",
    )
    parser.add_argument(
        "--ignore-mismatched-sizes",
        action="store_true",
        help="where the checkpoint has a classifier of other labels, start a random one",
    )
    fields = parser.add_argument_group(
        "gating", "Fields of the configuration; those not given keep their defaults."
    )
    for name, meaning in _HEAD_FIELDS.items():
        fields.add_argument(
            "--" + name.replace("_", "-"), type=int, default=argparse.SUPPRESS, help=meaning
        )
    for field in gating_fields():
        # upcycle admits one value of cct_sublayer_norm; the last are wishes for outputs.
        if field.name == "cct_sublayer_norm" or field.name.startswith("output_"):
            continue
        fields.add_argument("--" + field.name.replace("_", "-"), **_options(field))


def _options(field: GatingField) -> dict[str, Any]:
    """Options of `add_argument` for one field of `GatingConfig`."""
    default = UPCYCLED.get(field.name, str(field.default))
    meaning = f"{field.meaning} (default: {default})".replace("%", "%%")
    if field.kinds[0] == "list":
        meaning += "; for T5 also pairs of the encoder's and the decoder's, such as 1,1 1,0.5"
    if "None" in field.kinds:
        meaning = meaning.replace("None", "none")  # as the command line takes it
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": meaning, "choices": field.choices}
    first = field.kinds[0]
    if first == "bool":
        del options["choices"]  # the action takes none
        return options | {"action": argparse.BooleanOptionalAction}
    if first == "list":
        return options | {"type": budget, "nargs": "+", "metavar": "BUDGET"}
    kind = {"int": int, "float": float, "str": str}[first]
    if "None" in field.kinds:
        return options | {"type": _or_none(kind), "metavar": f"{first.upper()}|none"}
    return options | {"type": kind}


def _or_none(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = f"{kind.__name__} or none"  # what argparse calls it in an error
    return parse


def _load_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if args.num_labels is not None:
        kwargs["num_labels"] = args.num_labels
    if args.id2label is not None:
        names = dict(enumerate(args.id2label))
        kwargs |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    if args.ignore_mismatched_sizes:
        kwargs["ignore_mismatched_sizes"] = True
    return kwargs


def _has_head(args: argparse.Namespace, encoder: str) -> bool:
    """Whether a task other than the encoder's is asked for, or a class with a head."""
    name = args.model_class or ""
    return args.task not in (None, encoder) or "For" in name or "Head" in name


def run(args: argparse.Namespace) -> int:
    from hf_moa import upcycle
    from hf_moa.hub_names import check_source
    from hf_moa.modeling.config.gating import GatingConfig
    from hf_moa.output_folder import output_folder
    from hf_moa.sentence_folders import encoder_task, sentence_modules, write_modules

    if Path(args.output_dir).resolve() == Path(args.source).resolve():
        raise ValueError(
            f"OUT must be another folder than the source, which stays (got {args.output_dir} for both)"
        )
    fields = given(args, GatingConfig)
    fields |= {name: value for name, value in vars(args).items() if name in _HEAD_FIELDS}
    with (
        without_bars(),
        output_folder(
            args.output_dir, overwrite=args.overwrite, marker=_MARKER, parts=_WEIGHTS_AND_CODE
        ) as folder,
    ):
        check_source(args.source)
        modules = sentence_modules(args.source)
        load_kwargs, task = _load_kwargs(args), args.task
        path = place = "" if modules is None else modules[0]["path"]  # of the source, and of its copy
        if path:
            load_kwargs["subfolder"] = path
        if modules is not None:
            encoder = encoder_task(args.source, subfolder=path)
            if _has_head(args, encoder):  # what comes out is no sentence-transformers model
                modules, place = None, ""
            else:
                task = encoder if args.model_class is None else None
                fields = {"carry_aux_loss": True} | fields
        model = upcycle(
            args.source, task=task, model_class=args.model_class, load_kwargs=load_kwargs, **fields
        )
        if modules is not None:
            write_modules(args.source, modules, folder)
        model.save_pretrained(Path(folder, place))
        tokenizer = tokenizer_of(args.source, path)
        if tokenizer is not None:
            tokenizer.save_pretrained(Path(folder, place))
    if args.json:
        facts = {
            "output_dir": args.output_dir,
            "model": type(model).__name__,
            "parameters": model.num_parameters(),
            "tokenizer": tokenizer is not None,
            "sentence_transformers": modules is not None,
        }
        print(json.dumps(facts, indent=1))
        return 0
    if modules is not None:
        print(f"A sentence-transformers model: {len(modules) - 1} modules behind the transformer stay.")
    print(
        f"{args.output_dir}: {type(model).__name__}, {model.num_parameters():,} parameters, "
        f"{'with' if tokenizer is not None else 'without'} a tokenizer"
    )
    return 0
