"""Pretrains a masked language model with Accelerate, on one process or many: a gated BERT (MAE by block
coordinate descent, MoA, sparse experts, CCT) from scratch or from a checkpoint, or the plain one.

The flags are those of transformers' own `run_mlm_no_trainer.py`
(`hf_moa/recipes/accelerate/arguments.py` names the few that are left out), plus `GatingArguments` and
the gates' part of `MoaTrainingArguments`. From scratch on text files, with a WordPiece vocabulary
trained on the way:

    accelerate launch examples/run_mlm_no_trainer.py --model_type moa_bert --attention_type moa \
        --config_overrides \
        hidden_size=256,num_hidden_layers=4,intermediate_size=1024,initializer_range=0.06 \
        --num_attention_heads 8 --head_dim 32 --num_attention_experts 16 --max_seq_length 128 \
        --train_file train.txt.gz --validation_file valid.txt --num_train_epochs 10 \
        --learning_rate 5e-4 --num_warmup_steps 500 --checkpointing_steps 500 \
        --resume_from_checkpoint latest --output_dir out/mlm

`sparse_prediction=True` among the overrides computes only the logits of the masked tokens in training:
the same loss, sooner.

On several GPUs: `accelerate launch --config_file examples/accelerate/ddp.yaml` (or `fsdp2.yaml`, ...). A
run that was killed goes on from its last whole checkpoint, bit for bit, when it is started again.

Text is packed into sequences without padding, or each line is one (`--line_by_line`); which tokens are
masked follows from the seed, the epoch and the place of the sequence. Results: `all_results.json`
(perplexity of masked tokens; of a CCT model at each budget), `log.jsonl`, the model, its card
(README.md) and its tokenizer in `output_dir`.
"""

from __future__ import annotations

from transformers import AutoModelForMaskedLM

from hf_moa.quickstart.tokenizer import train_tokenizer
from hf_moa.recipes.accelerate import (
    About,
    AccelerateArguments,
    GatedTraining,
    checkpoint_to_resume,
    make_accelerator,
    perplexity_of,
)
from hf_moa.recipes.command_line import parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.masked_text import (
    MaskedTextArguments,
    check_sequence_length,
    masked_collator,
    masked_sets,
)
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.text_blocks import load_splits
from hf_moa.recipes.tokenizers import token_fields


def main(args: list[str] | None = None) -> dict[str, float]:
    model_args, data_args, gating_args, run_args = parse_arguments(
        args, ModelArguments, MaskedTextArguments, GatingArguments, AccelerateArguments
    )
    accelerator = make_accelerator(run_args)
    with accelerator.main_process_first():
        lines = load_splits(model_args, data_args)
    tokenizer = load_tokenizer(model_args, checkpoint_to_resume(run_args))
    if tokenizer is None:
        tokenizer = train_tokenizer(lines["train"], model_args.vocab_size, data_args.max_seq_length)
    fields = token_fields(tokenizer, "pad")
    model = load_model(AutoModelForMaskedLM, model_args, gating_args, tokenizer, fields)
    check_sequence_length(data_args, model)
    sets = masked_sets(lines, tokenizer, data_args, run_args.seed)
    collate = masked_collator(tokenizer, data_args)
    has_lengths = data_args.line_by_line and not data_args.pad_to_max_length
    evaluate = perplexity_of(
        accelerator,
        sets.get("validation"),
        run_args.per_device_eval_batch_size,
        shifts_labels=False,
        collate=collate,
    )
    training = GatedTraining(
        accelerator,
        run_args,
        model,
        tokenizer,
        sets["train"],
        collate,
        evaluate,
        lengths=sets["train"].lengths if has_lengths else None,
        about=About.of("fill-mask", model_args, data_args),
    )
    return training.train()


if __name__ == "__main__":
    main()
