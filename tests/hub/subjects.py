"""What is pushed: of each family a gated model with its tokenizer and adapter, and a run that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from families import CASE, Case
from training_runs import build, trainer
from transformers import BertTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, T5Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Subject:
    """A class of a family, with mechanisms that have parameters and buffers of their own."""

    case: Case
    fields: dict[str, Any]
    task_type: str
    peft_auto_name: str
    tokenizer: Callable[[], PreTrainedTokenizerBase]

    def build(self, seed: int = 0):
        return self.case.build(seed, **self.fields)

    def inputs(self) -> dict[str, list]:
        """As JSON has them."""
        return {name: tensor.tolist() for name, tensor in self.case.inputs().items()}


def bert_tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "head", "##s", "may", "be", *LETTERS]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def gpt2_tokenizer() -> GPT2Tokenizer:
    pieces = ["<|endoftext|>", "Ġ", *LETTERS, "he", "ad", "head"]
    merges = [("h", "e"), ("a", "d"), ("he", "ad")]
    return GPT2Tokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["▁", "▁head", "▁may", *LETTERS]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=[*special, *((piece, -2.0) for piece in pieces)], extra_ids=0)


SUBJECTS = {
    "bert": Subject(
        CASE["BertForSequenceClassification"],
        {"attention_type": "mae", "ffn_type": "moe"},
        "SEQ_CLS",
        "AutoPeftModelForSequenceClassification",
        bert_tokenizer,
    ),
    "gpt2": Subject(
        CASE["GPT2LMHeadModel"],
        {"attention_type": "moa", "router_type": "noisy_topk"},
        "CAUSAL_LM",
        "AutoPeftModelForCausalLM",
        gpt2_tokenizer,
    ),
    "t5": Subject(
        CASE["T5ForConditionalGeneration"],
        {"attention_type": "mae", "cct_budgets": [[1, 1], [1, 0.5]]},
        "SEQ_2_SEQ_LM",
        "AutoPeftModelForSeq2SeqLM",
        t5_tokenizer,
    ),
}


def make_trainer(folder: str, model: Any = None, **arguments: Any):
    """A run of four steps; on a BERT with MAE and dropout, which is the same at each call."""
    model = build("bert", dropout=True, attention_type="mae") if model is None else model
    settings = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}
    return trainer("bert", model, folder, **settings | arguments)
