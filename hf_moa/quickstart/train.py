"""The two trainings of a quickstart: masked language modelling, then classification."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

from hf_moa import MoaBertConfig, MoaBertForMaskedLM, MoaBertForSequenceClassification
from hf_moa.eval_mode import in_eval_mode
from hf_moa.training import CCTNoiseCallback, evaluate_budgets

from .corpus import Corpus, Example
from .settings import QuickstartSettings
from .tokenizer import pack

_EVAL_BATCH_SIZE = 64


@dataclass(frozen=True)
class MaskedLanguageResult:
    """Mean cross-entropy in nats per hidden token of the held-out text.

    `unigram` is that of answering every position with the tokens' frequencies in the training text:
    below it, the model uses the context.
    """

    loss_before: float
    loss_after: float
    unigram: float
    steps: int


def pretrain(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    settings: QuickstartSettings,
    work_dir: str | Path,
) -> tuple[MoaBertForMaskedLM, MaskedLanguageResult]:
    """Trains a BERT with MAE attention and CCT on `corpus.pretraining` from random weights.

    Args:
        work_dir: a scratch folder for the trainer.
    """
    torch.manual_seed(settings.seed)
    model = MoaBertForMaskedLM(_model_config(tokenizer, settings))
    blocks = pack(tokenizer, corpus.pretraining, settings.block_length)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=settings.mlm_probability)
    heldout = _mask_once(tokenizer, pack(tokenizer, corpus.heldout, settings.block_length), settings)
    loss_before = masked_loss(model, heldout)
    trainer = Trainer(
        model,
        _training_arguments(
            settings,
            work_dir,
            num_train_epochs=settings.pretrain_epochs,
            per_device_train_batch_size=settings.pretrain_batch_size,
            learning_rate=settings.pretrain_learning_rate,
        ),
        train_dataset=blocks,
        data_collator=collator,
        callbacks=[CCTNoiseCallback()],
    )
    _train(trainer, "pretraining")
    return model, MaskedLanguageResult(
        loss_before=loss_before,
        loss_after=masked_loss(model, heldout),
        unigram=_unigram_loss(blocks, heldout, tokenizer),
        steps=trainer.state.global_step,
    )


def finetune(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    pretrained_dir: str | Path,
    settings: QuickstartSettings,
    work_dir: str | Path,
) -> tuple[Trainer, list[dict]]:
    """Finetunes the checkpoint in `pretrained_dir` on `corpus.train`.

    Returns:
        The trainer, its model in eval mode, and the rows of `evaluate_budgets` on
        `corpus.evaluation`, which took no part in training or in choosing anything.
    """
    torch.manual_seed(settings.seed)
    model = MoaBertForSequenceClassification.from_pretrained(
        pretrained_dir,
        id2label=dict(enumerate(corpus.labels)),
        label2id={label: i for i, label in enumerate(corpus.labels)},
        hidden_dropout_prob=settings.finetune_dropout,
        attention_probs_dropout_prob=settings.finetune_dropout,
    )
    trainer = Trainer(
        model,
        _training_arguments(
            settings,
            work_dir,
            num_train_epochs=settings.finetune_epochs,
            per_device_train_batch_size=settings.finetune_batch_size,
            learning_rate=settings.finetune_learning_rate,
            # Docstrings are of very different lengths: batches of like length pad little.
            train_sampling_strategy="group_by_length",
        ),
        train_dataset=_encode(tokenizer, corpus.train),
        eval_dataset=_encode(tokenizer, corpus.evaluation),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_accuracy,
        callbacks=[CCTNoiseCallback()],
    )
    _train(trainer, "finetuning")
    rows = evaluate_budgets(trainer)
    model.eval()
    return trainer, rows


@torch.no_grad()
def masked_loss(model: MoaBertForMaskedLM, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """Mean cross-entropy in nats over all hidden tokens of `batches`, at the largest budget."""
    total, count = 0.0, 0
    with in_eval_mode(model):
        for batch in batches:
            hidden = int((batch["labels"] != -100).sum())
            total += model(**batch).loss.item() * hidden
            count += hidden
    return total / count


class _StageProgress(ProgressCallback):
    """One named bar per training with the current loss in it, instead of printed dictionaries."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")

    def on_prediction_step(self, *args, **kwargs):
        """Evaluations take a second each and show no bar."""


def _train(trainer: Trainer, name: str) -> None:
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_StageProgress(name))
    trainer.train()


def _model_config(tokenizer: PreTrainedTokenizerBase, settings: QuickstartSettings) -> MoaBertConfig:
    return MoaBertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=settings.ffn_size,
        max_position_embeddings=settings.block_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        sparse_prediction=True,  # most of so small a model's time would go into logits
        attention_type="mae",
        mae_gate_hidden_size=settings.mae_gate_hidden_size,
        cct_budgets=list(settings.budgets),
        cct_gate_hidden_size=settings.cct_gate_hidden_size,
        cct_noise_max=settings.cct_noise_max,
        cct_budget_loss_coef=settings.cct_budget_loss_coef,
        cct_sublayer_norm=settings.cct_sublayer_norm,
    )


def _training_arguments(
    settings: QuickstartSettings, work_dir: str | Path, **arguments
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work_dir),
        seed=settings.seed,
        max_steps=settings.max_steps,
        per_device_eval_batch_size=_EVAL_BATCH_SIZE,
        lr_scheduler_type="linear",
        warmup_steps=0.1,  # below 1: a share of all steps
        weight_decay=0.01,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=False,  # else the verbosity of transformers decides
        # The same arithmetic everywhere, and no gain from an accelerator at this size.
        use_cpu=True,
        dataloader_pin_memory=False,
        **arguments,
    )


def _mask_once(
    tokenizer: PreTrainedTokenizerBase, blocks: list[dict], settings: QuickstartSettings
) -> list[dict[str, torch.Tensor]]:
    """Batches with the same tokens hidden whenever they are used, so that losses compare."""
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=settings.mlm_probability, seed=settings.seed
    )
    return [
        dict(collator(blocks[start : start + _EVAL_BATCH_SIZE]))
        for start in range(0, len(blocks), _EVAL_BATCH_SIZE)
    ]


def _unigram_loss(
    blocks: list[dict], heldout: list[dict[str, torch.Tensor]], tokenizer: PreTrainedTokenizerBase
) -> float:
    special = set(tokenizer.all_special_ids)  # which are never masked
    tokens = (token for block in blocks for token in block["input_ids"])
    counts = Counter(token for token in tokens if token not in special)
    total = sum(counts.values()) + len(tokenizer) - len(special)  # once more than each was seen
    labels = torch.cat([batch["labels"].flatten() for batch in heldout])
    hidden = labels[labels != -100].tolist()
    return -sum(math.log((counts[token] + 1) / total) for token in hidden) / len(hidden)


def _encode(tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> list[dict]:
    encoded = tokenizer([example.text for example in examples], truncation=True)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": example.label}
        for ids, mask, example in zip(
            encoded["input_ids"], encoded["attention_mask"], examples, strict=True
        )
    ]


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    predicted = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean())}
