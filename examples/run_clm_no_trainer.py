"""Pretrains a causal language model with Accelerate, on one process or many: a gated GPT-2 (MAE by block
coordinate descent, MoA, sparse experts, CCT) from scratch or from a checkpoint, or the plain one.

The flags are those of transformers' own `run_clm_no_trainer.py`
(`hf_moa/recipes/accelerate/arguments.py` names the few that are left out), plus `GatingArguments` and
the gates' part of `MoaTrainingArguments`. From scratch on text files, with a tokenizer trained on the
way:

    accelerate launch examples/run_clm_no_trainer.py --model_type moa_gpt2 --attention_type mae \
        --config_overrides n_layer=4,n_embd=256,n_head=8,n_positions=256 \
        --train_file train.txt.gz --validation_file valid.txt --num_train_epochs 10 \
        --learning_rate 1e-3 --num_warmup_steps 100 --checkpointing_steps 500 \
        --resume_from_checkpoint latest --output_dir out/clm

On several GPUs: `accelerate launch --config_file examples/accelerate/ddp.yaml` (or `fsdp2.yaml`, ...). A
run that was killed goes on from its last whole checkpoint, bit for bit, when it is started again.

Text is packed into blocks without padding. Results: `all_results.json` (perplexity; of a CCT model at
each budget), `log.jsonl`, the model, its card (README.md) and its tokenizer in `output_dir`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, default_data_collator

from hf_moa.recipes.accelerate import (
    About,
    AccelerateArguments,
    GatedTraining,
    checkpoint_to_resume,
    make_accelerator,
    perplexity_of,
)
from hf_moa.recipes.command_line import optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.text_blocks import SplitTextArguments, TextBlocks, check_block_size, load_splits
from hf_moa.recipes.tokenizers import token_fields, train_text_tokenizer


@dataclass
class DataTrainingArguments(SplitTextArguments):
    """Which texts to train and evaluate on, and how they are cut up."""

    block_size: int | None = optional("Tokens per block. Default: what the model takes, at most 1024.")
    no_keep_linebreaks: bool = field(
        default=False, metadata={"help": "Leave out the ends of lines: texts follow each other at once."}
    )


def main(args: list[str] | None = None) -> dict[str, float]:
    model_args, data_args, gating_args, run_args = parse_arguments(
        args, ModelArguments, DataTrainingArguments, GatingArguments, AccelerateArguments
    )
    accelerator = make_accelerator(run_args)
    with accelerator.main_process_first():
        lines = load_splits(model_args, data_args)
    if data_args.no_keep_linebreaks:
        lines = {split: [line.rstrip("\r\n") for line in text] for split, text in lines.items()}
    tokenizer = load_tokenizer(model_args, checkpoint_to_resume(run_args))
    if tokenizer is None:
        tokenizer = train_text_tokenizer(lines["train"], model_args.vocab_size)
    fields = token_fields(tokenizer, "bos", "eos", "pad")
    model = load_model(AutoModelForCausalLM, model_args, gating_args, tokenizer, fields)
    block_size = check_block_size(data_args.block_size, model)
    blocks = {
        split: TextBlocks(text, tokenizer, block_size, data_args.preprocessing_num_workers)
        for split, text in lines.items()
    }

    evaluate = perplexity_of(
        accelerator,
        blocks.get("validation"),
        run_args.per_device_eval_batch_size,
        shifts_labels=True,
    )
    training = GatedTraining(
        accelerator,
        run_args,
        model,
        tokenizer,
        blocks["train"],
        default_data_collator,
        evaluate,
        about=About.of("text-generation", model_args, data_args),
    )
    return training.train()


if __name__ == "__main__":
    main()
