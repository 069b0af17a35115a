"""Trains a translation model on parallel text files with `MoaSeq2SeqTrainer`, and measures
sacreBLEU: a gated T5 (MAE, MoA, sparse experts, CCT) from scratch or from a T5 checkpoint, or the plain
one.

The flags are those of transformers' own `run_translation.py` where it has them, plus `GatingArguments`,
`AdapterArguments` and `TeacherArguments`. From scratch on Multi30k, with a tokenizer trained on both
languages on the way; the same without gates is `--attention_type mha`. Needs
`pip install "hf-moa[translation]"`:

    python examples/run_translation.py --model_type moa_t5 \
        --config_overrides d_model=256,d_kv=32,num_heads=8,d_ff=1024,num_layers=3 \
        --attention_type mae --train_source train.en.gz --train_target train.de.gz \
        --validation_source val.en.gz --validation_target val.de.gz \
        --test_source test.en.gz --test_target test.de.gz \
        --do_train --do_eval --do_predict --predict_with_generate --num_beams 5 \
        --num_train_epochs 20 --optim adafactor --optim_args scale_parameter=True \
        --learning_rate 3e-2 --warmup_steps 0.1 --label_smoothing_factor 0.1 \
        --per_device_train_batch_size 64 --output_dir out/translation-mae

From a checkpoint, converted to MAE:

    python examples/run_translation.py --model_name_or_path google-t5/t5-small --attention_type mae \
        --source_prefix "translate English to German: " --train_source train.en ...

Of a gated checkpoint, only the gates (FTG), with the attention's output projections (FTG+), or LoRA of
the same size as the gates; the output is an adapter for PEFT:

    python examples/run_translation.py --model_name_or_path out/translation-mae --adapter ftg ...

The results are in `eval_results.json` (validation) and `predict_results.json` (test), with sacreBLEU's
signature; the translations of the test file in `generated_predictions.txt`. BLEU is that of the
detokenised translations against the lines of the target file as they stand there.

The arguments can stand in one JSON file instead: `python examples/run_translation.py arguments.json`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peft import TaskType
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    set_seed,
)

from hf_moa.recipes.adapters import AdapterArguments, adapt
from hf_moa.recipes.command_line import optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.parallel_text import BleuMetric, ParallelTextArguments, load_pairs, tokenize
from hf_moa.recipes.splitting import SplitArguments, split_model
from hf_moa.recipes.teachers import TeacherArguments
from hf_moa.recipes.tokenizers import train_translation_tokenizer, translation_token_fields
from hf_moa.recipes.trainer_runs import (
    data_for_card,
    evaluate_at_budgets,
    find_checkpoint,
    finish,
    set_up_logging,
    train,
    write_metrics,
)
from hf_moa.training import MoaSeq2SeqTrainer, MoaSeq2SeqTrainingArguments

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments(ParallelTextArguments):
    """Which pairs of texts to train and evaluate on, and how they are prepared."""

    test_file: str | None = optional("Pairs for --do_predict in one file.")
    test_source: str | None = optional("Text for --do_predict.")
    test_target: str | None = optional("Its translation.")
    max_train_samples: int | None = optional("Train on the first so many pairs only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many pairs only.")
    max_predict_samples: int | None = optional("Translate the first so many test sentences only.")
    num_beams: int | None = optional("Beams of the search, in evaluation and prediction.")


def write_results(trainer: MoaSeq2SeqTrainer, metrics: dict, prefix: str, bleu: BleuMetric) -> None:
    if f"{prefix}_bleu" in metrics:
        metrics[f"{prefix}_bleu_signature"] = bleu.signature
    write_metrics(trainer, prefix, metrics)


def predict(trainer: MoaSeq2SeqTrainer, dataset: Dataset) -> None:
    trainer.compute_metrics = bleu = BleuMetric(trainer.processing_class, dataset)
    prediction = trainer.predict(dataset, metric_key_prefix="predict")
    trainer.log(prediction.metrics)  # from where the model's card takes them
    metrics = {**prediction.metrics, "predict_samples": len(dataset)}
    write_results(trainer, metrics, "predict", bleu)
    if trainer.is_world_process_zero():
        translations = bleu.decode(prediction.predictions)
        path = Path(trainer.args.output_dir, "generated_predictions.txt")
        path.write_text("\n".join(translations) + "\n", encoding="utf-8")
        for source, translation in list(zip(dataset["source"], translations, strict=True))[:3]:
            print(f"\n{source}\n-> {translation}")


def check_arguments(training_args: MoaSeq2SeqTrainingArguments) -> None:
    if training_args.do_predict and not training_args.predict_with_generate:
        raise ValueError(
            "`do_predict` translates, and needs `predict_with_generate` (got False). Add "
            "--predict_with_generate."
        )


def main(args: list[str] | None = None) -> None:
    *arguments, adapter_args, teacher_args, split_args, training_args = parse_arguments(
        args,
        ModelArguments,
        DataTrainingArguments,
        GatingArguments,
        AdapterArguments,
        TeacherArguments,
        SplitArguments,
        MoaSeq2SeqTrainingArguments,
    )
    model_args, data_args, gating_args = arguments
    split_args.check(adapter_args.adapter)
    set_up_logging(training_args, logger)
    check_arguments(training_args)
    checkpoint = find_checkpoint(training_args)

    tokenizer = load_tokenizer(model_args, checkpoint)
    max_samples = {}
    if training_args.do_train or tokenizer is None:
        max_samples["train"] = data_args.max_train_samples
    if training_args.do_eval or gating_args.eval_budgets:
        max_samples["validation"] = data_args.max_eval_samples
    if training_args.do_predict:
        max_samples["test"] = data_args.max_predict_samples
    pairs = {split: load_pairs(data_args, split, model_args) for split in max_samples}
    if tokenizer is None:
        tokenizer = train_translation_tokenizer(pairs["train"], model_args.vocab_size)
    fields = translation_token_fields(tokenizer)

    # The model comes right after the seed, so that variants draw what they share alike.
    set_seed(training_args.seed)
    model = load_model(AutoModelForSeq2SeqLM, model_args, gating_args, tokenizer, fields)
    teacher = teacher_args.load(model, model_args)
    model = split_model(model, split_args)
    model = adapt(model, adapter_args, TaskType.SEQ_2_SEQ_LM, training_args.output_dir)
    with training_args.main_process_first(desc="tokenizing"):
        sets = {
            split: tokenize(pairs[split], tokenizer, data_args, most, split)
            for split, most in max_samples.items()
        }

    if data_args.num_beams is not None:
        training_args.generation_num_beams = data_args.num_beams
    if training_args.generation_max_length is None:
        training_args.generation_max_length = data_args.target_length("validation")
    bleu = None
    if training_args.predict_with_generate:
        training_args.include_for_metrics = [*training_args.include_for_metrics, "inputs"]
        if "validation" in sets:
            bleu = BleuMetric(tokenizer, sets["validation"])
    on_tensor_cores = (training_args.fp16 or training_args.bf16) and not training_args.use_cpu
    trainer = MoaSeq2SeqTrainer(
        model=model,
        args=training_args,
        teacher=teacher,
        train_dataset=sets["train"] if training_args.do_train else None,
        eval_dataset=sets.get("validation"),
        compute_metrics=bleu,
        processing_class=tokenizer,
        # Tensor cores want lengths that are multiples of 8.
        data_collator=DataCollatorForSeq2Seq(
            tokenizer,
            model=model,
            label_pad_token_id=data_args.label_pad_token_id(tokenizer),
            pad_to_multiple_of=8 if on_tensor_cores else None,
        ),
    )
    if training_args.do_train:
        train(trainer, checkpoint)
    # With group_by_length the evaluation, too, would leave the order of the file.
    trainer.args.train_sampling_strategy = "random"
    if training_args.do_eval:
        metrics = {**trainer.evaluate(), "eval_samples": len(sets["validation"])}
        write_results(trainer, metrics, "eval", bleu)
    if gating_args.eval_budgets:
        evaluate_at_budgets(trainer, {"validation": sets["validation"]})
    if training_args.do_predict:
        predict(trainer, sets["test"])
    finish(
        trainer,
        finetuned_from=model_args.model_name_or_path,
        tasks="translation",
        **data_for_card(data_args.dataset_name, data_args.dataset_config_name),
    )


if __name__ == "__main__":
    main()
