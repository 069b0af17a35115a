"""What the gates of a trained classifier do, measured on evaluation text."""

from dataclasses import dataclass
from typing import cast

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from .corpus import MASK_TOKEN, Example


@dataclass(frozen=True)
class TokenCompute:
    """Gates of one text at each budget.

    Attributes:
        tokens: the T tokens, `[CLS]` and `[SEP]` included.
        open_gates: budget -> `[layers, T]`, share of the token's gates in the layer that are open
            (one for keys and values, one for queries, one for each part of the feed-forward layer).
        compute_fraction: budget -> share of the text's computation that was carried out.
    """

    tokens: list[str]
    open_gates: dict[float, torch.Tensor]
    compute_fraction: dict[float, float]


@torch.inference_mode()
def expert_weights_by_class(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    num_labels: int,
    batch_size: int = 64,
) -> torch.Tensor:
    """Mean weight of each MAE expert over the examples of each class, at the largest budget.

    Returns:
        `[layers, num_labels, experts]`; sums to 1 over the experts, NaN for a class without examples.
    """
    collator = DataCollatorWithPadding(tokenizer)
    encoded = tokenizer([example.text for example in examples], truncation=True)
    weights = []
    for start in range(0, len(examples), batch_size):
        part = {key: value[start : start + batch_size] for key, value in encoded.items()}
        padded = collator(part)  # type: ignore[arg-type]  # a dict of lists does, too
        output = model(**padded, output_expert_weights=True)
        weights.append(torch.stack(output.expert_weights))  # [layers, B, E]
    per_text = torch.cat(weights, dim=1)
    labels = torch.tensor([example.label for example in examples])
    means = [per_text[:, labels == label].mean(dim=1) for label in range(num_labels)]
    return torch.stack(means, dim=1)


@torch.inference_mode()
def token_compute(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> TokenCompute:
    """The gates of every token of `text`, at each of the model's budgets."""
    batch = tokenizer(text, truncation=True, return_tensors="pt")
    open_gates, compute_fraction = {}, {}
    for budget in model.config.listed_budgets:
        output = model(**batch, budget=budget, output_cct_gates=True)
        open_gates[budget] = torch.stack(
            [
                torch.cat([gates["kv"].T, gates["query"].T, gates["ffn"][0]], dim=-1).mean(dim=-1)
                for gates in output.cct_gates
            ]
        )
        compute_fraction[budget] = output.compute_fraction.item()
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    return TokenCompute(cast(list[str], tokens), open_gates, compute_fraction)


def choose_example(
    examples: list[Example],
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int = 14,
    max_tokens: int = 20,
) -> Example:
    """The first example that fits a picture: of `min_tokens` to `max_tokens` tokens, one line, no
    masked word. Where there is none, the first of the shortest."""
    lengths = [len(ids) for ids in tokenizer([e.text for e in examples])["input_ids"]]
    for example, length in zip(examples, lengths, strict=True):
        one_line = "\n" not in example.text and MASK_TOKEN not in example.text
        if one_line and min_tokens <= length <= max_tokens:
            return example
    return examples[lengths.index(min(lengths))]
