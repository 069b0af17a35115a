"""Trains a causal language model on text files with `MoaTrainer`, and measures perplexity: a gated
GPT-2 (MAE, MoA, sparse experts, CCT) from scratch or from a GPT-2 checkpoint, or the plain one.

The flags are those of transformers' own `run_clm.py` where it has them, plus `GatingArguments` and
`TeacherArguments`. From scratch on WikiText-2, with a byte-level BPE tokenizer trained on the way; the
same without gates is `--attention_type mha`:

    python examples/run_clm.py --model_type moa_gpt2 \
        --config_overrides n_layer=4,n_embd=256,n_head=8,n_positions=256 --attention_type mae \
        --train_file train.txt.gz --validation_file valid.txt --test_file test.txt \
        --do_train --do_eval --do_predict --generate_samples 2 --num_train_epochs 1 \
        --learning_rate 1e-3 --per_device_train_batch_size 16 --output_dir out/clm-mae

From a checkpoint, converted to MAE, on a data set of the Hub:

    python examples/run_clm.py --model_name_or_path openai-community/gpt2 --attention_type mae \
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1 --block_size 512 \
        --do_train --do_eval --output_dir out/gpt2-mae

The results are in `eval_results.json` (validation) and `predict_results.json` (test):

- `perplexity`: exp of the mean loss per token, over `tokens` tokens. It depends on the tokenizer.
- `word_perplexity`: the same total loss divided by the number of whitespace-separated `words`. It
  compares across tokenizers. Ends of lines are no words here, but their loss counts; where a paper
  counts each as a word, `words` is larger by `lines`.

The arguments can stand in one JSON file instead: `python examples/run_clm.py arguments.json`.
"""

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_moa.modeling.core.task_losses import IGNORE_INDEX
from hf_moa.recipes.command_line import optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.splitting import SplitArguments, split_model
from hf_moa.recipes.teachers import TeacherArguments
from hf_moa.recipes.text_blocks import (
    TextBlocks,
    TextFileArguments,
    check_block_size,
    first_samples,
    load_lines,
)
from hf_moa.recipes.tokenizers import token_fields, train_text_tokenizer
from hf_moa.recipes.trainer_runs import (
    data_for_card,
    evaluate_at_budgets,
    find_checkpoint,
    finish,
    set_up_logging,
    train,
    write_metrics,
)
from hf_moa.training import MoaTrainer, MoaTrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments(TextFileArguments):
    """Which texts to train and evaluate on, and how they are cut up."""

    test_file: str | None = optional("Text for --do_predict.")
    block_size: int | None = optional("Tokens per block. Default: what the model takes, at most 1024.")
    max_train_samples: int | None = optional("Train on the first so many blocks only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many blocks only.")
    max_predict_samples: int | None = optional("Test on the first so many blocks only.")
    generate_samples: int = field(
        default=0,
        metadata={
            "help": "Continue so many places of the test text (or else the validation text), print "
            "and write them to samples.json."
        },
    )
    prompt_tokens: int = field(default=32, metadata={"help": "Tokens that a sample starts from."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens to add to them."})


def token_losses(logits, labels: Tensor) -> Tensor:
    """`[B, T - 1]`: the loss of each token. `Trainer` keeps these instead of the logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits, targets = logits[:, :-1].float(), labels[:, 1:]
    losses = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.view(targets.shape)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    tokens = int((prediction.label_ids[:, 1:] != IGNORE_INDEX).sum())
    # `Trainer`'s own loss is a mean over batches, whose numbers of tokens differ.
    token_loss = float(prediction.predictions.sum(dtype=np.float64)) / tokens
    return {"token_loss": token_loss, "perplexity": math.exp(token_loss), "tokens": tokens}


def check_arguments(data_args: DataTrainingArguments, training_args: MoaTrainingArguments) -> None:
    if data_args.generate_samples and not (training_args.do_eval or training_args.do_predict):
        raise ValueError(
            "`generate_samples` continues a text that is evaluated on: give `do_predict` or "
            f"`do_eval` (got {data_args.generate_samples} samples and neither)."
        )


def evaluate(trainer: Trainer, blocks: TextBlocks, max_samples: int | None, prefix: str) -> None:
    dataset = first_samples(blocks, max_samples)
    metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
    metrics[f"{prefix}_samples"] = len(dataset)
    if len(dataset) == len(blocks):  # of a part, the words are not known
        total_loss = metrics[f"{prefix}_token_loss"] * metrics[f"{prefix}_tokens"]
        metrics[f"{prefix}_words"] = blocks.num_words
        metrics[f"{prefix}_lines"] = blocks.num_lines
        metrics[f"{prefix}_word_perplexity"] = math.exp(total_loss / blocks.num_words)
    write_metrics(trainer, prefix, metrics)


def write_samples(trainer: Trainer, blocks: TextBlocks, data_args: DataTrainingArguments) -> None:
    """Continues places that lie evenly spread over a text."""
    tokenizer, model = trainer.processing_class, trainer.model
    places = np.linspace(0, len(blocks), data_args.generate_samples, endpoint=False, dtype=int)
    num_prompt = min(data_args.prompt_tokens, blocks.block_size // 2)
    prompts = torch.stack([blocks[i]["input_ids"][:num_prompt] for i in places.tolist()])
    set_seed(trainer.args.seed)
    model.eval()
    continued = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        do_sample=True,
        top_p=0.9,
        max_new_tokens=min(data_args.max_new_tokens, blocks.block_size - num_prompt),
        pad_token_id=tokenizer.eos_token_id,
    )
    samples = []
    for ids in continued.tolist():
        parts = (ids[:num_prompt], ids[num_prompt:])
        prompt, continuation = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        samples.append({"prompt": prompt, "continuation": continuation})
    path = Path(trainer.args.output_dir, "samples.json")
    path.write_text(json.dumps(samples, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for sample in samples:
        print(f"\n{sample['prompt']} >>>{sample['continuation']}\n")


def main(args: list[str] | None = None) -> None:
    model_args, data_args, gating_args, teacher_args, split_args, training_args = parse_arguments(
        args,
        ModelArguments,
        DataTrainingArguments,
        GatingArguments,
        TeacherArguments,
        SplitArguments,
        MoaTrainingArguments,
    )
    set_up_logging(training_args, logger)
    check_arguments(data_args, training_args)
    checkpoint = find_checkpoint(training_args)

    splits = {
        "train": training_args.do_train,
        "validation": training_args.do_eval or gating_args.eval_budgets,
        "test": training_args.do_predict,
    }
    tokenizer = load_tokenizer(model_args, checkpoint)
    splits["train"] |= tokenizer is None
    with training_args.main_process_first(desc="reading the text"):
        lines = {
            split: load_lines(model_args, data_args, split) for split, used in splits.items() if used
        }
    if tokenizer is None:
        tokenizer = train_text_tokenizer(lines["train"], model_args.vocab_size)

    # The model comes right after the seed, so that variants draw what they share alike.
    set_seed(training_args.seed)
    fields = token_fields(tokenizer, "bos", "eos", "pad")
    model = load_model(AutoModelForCausalLM, model_args, gating_args, tokenizer, fields)
    model = split_model(model, split_args)
    teacher = teacher_args.load(model, model_args)
    block_size = check_block_size(data_args.block_size, model)
    blocks = {split: TextBlocks(text, tokenizer, block_size) for split, text in lines.items()}
    for split, each in blocks.items():
        logger.info(f"{split}: {len(each.ids):,} tokens in {len(each):,} blocks of {block_size}.")

    trainer = MoaTrainer(
        model=model,
        args=training_args,
        teacher=teacher,
        train_dataset=first_samples(blocks["train"], data_args.max_train_samples)
        if training_args.do_train
        else None,
        eval_dataset=first_samples(blocks["validation"], data_args.max_eval_samples)
        if splits["validation"]
        else None,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_losses,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        train(trainer, checkpoint)
    if training_args.do_eval:
        evaluate(trainer, blocks["validation"], data_args.max_eval_samples, "eval")
    if gating_args.eval_budgets:
        evaluate_at_budgets(trainer, {"validation": trainer.eval_dataset})
    if training_args.do_predict:
        evaluate(trainer, blocks["test"], data_args.max_predict_samples, "predict")
    if data_args.generate_samples and trainer.is_world_process_zero():
        write_samples(trainer, blocks.get("test", blocks.get("validation")), data_args)
    finish(
        trainer,
        finetuned_from=model_args.model_name_or_path,
        tasks="text-generation",
        **data_for_card(data_args.dataset_name, data_args.dataset_config_name),
    )


if __name__ == "__main__":
    main()
