"""`hf-moa benchmark`: how fast a checkpoint is at each budget, beside the plain model of its size."""

import argparse
import json
from typing import Any

from .command import add_command, budget, load_checkpoint, move, without_bars
from .data import add_data_arguments, check_at_least_1, read_data, tokenizer_for


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "benchmark",
        run,
        "time a checkpoint at each of its budgets, in turns with transformers' model of the same size",
        "hf-moa benchmark ./bert-cct --data dev.tsv --text-column sentence --batch-size 8",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or Hub id")
    add_data_arguments(parser, use="CCT's compute depends on it (default: random tokens)")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--length",
        type=int,
        default=128,
        help="tokens of a sequence, cut off beyond (default: %(default)s)",
    )
    parser.add_argument(
        "--budgets", nargs="+", type=budget, metavar="BUDGET", help="of the model (default: all)"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=11,
        help="measurements of each model and budget, taken in turns (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s"
    )
    parser.add_argument("--device", help="such as cuda (default: cpu)")
    parser.add_argument(
        "--execution",
        choices=["auto", "sparse", "dense"],
        help="of CCT's gates (default: the checkpoint's cct_execution)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="by torch.compile, on a GPU in CUDA graphs"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    check_at_least_1(args, "batch_size", "length", "threads")
    import torch

    from hf_moa.benchmark import benchmark
    from hf_moa.environment import device_name, environment
    from hf_moa.gated_models import gated_model_of

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with without_bars():
        model = load_checkpoint(args.checkpoint, budgets=args.budgets)
    move(model, args.device, dtype=getattr(torch, args.dtype))
    model = gated_model_of(model)
    if args.execution is not None:
        model.set_cct_execution(args.execution)
    batch = {name: x.to(model.device) for name, x in _batch(args, model).items()}
    rows = benchmark(model, batch, budgets=args.budgets, turns=args.turns, compiled=args.compile)
    if args.json:
        print(json.dumps({"environment": environment(), "rows": rows}, indent=1))
        return 0
    shape = "x".join(map(str, batch["input_ids"].shape))
    print(
        f"{device_name(model.device)}, {args.dtype}, {'compiled, ' if args.compile else ''}{shape} "
        f"{'random tokens' if args.data is None else 'tokens of ' + args.data}\n"
    )
    print(_table(rows))
    return 0


def _batch(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    import torch

    if args.data is None:
        torch.manual_seed(0)
        positions = model.config.max_tokens or args.length
        choices = [2] if type(model).__name__.endswith("ForMultipleChoice") else []
        shape = [args.batch_size, *choices, min(args.length, positions)]
        ids = torch.randint(model.config.vocab_size, shape)
        ends = model.config.eos_token_id
        if ends is not None:  # some classifiers read its place, and want one
            ends = ends if isinstance(ends, list) else [ends]
            others = [i for i in range(len(ends) + 1) if i not in ends]
            ids[torch.isin(ids, torch.tensor(ends))] = others[0]
            ids[..., -1] = ends[0]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        from hf_moa.text_batches import TextBatches

        tokenizer = tokenizer_for(model, args.checkpoint)
        data = read_data(args, limit=args.batch_size)
        sizes = {"batch_size": args.batch_size, "max_length": args.length}
        (batch,) = TextBatches(data, tokenizer, model, with_labels=False, **sizes)
    reads_two_sides = model.can_generate() or type(model).__name__.endswith("Model")
    if model.config.is_encoder_decoder and reads_two_sides:
        labels = batch.pop("labels", None)
        batch["decoder_input_ids"] = batch["input_ids"] if labels is None else model._shift_right(labels)
    return batch


def _table(rows: list[dict[str, Any]]) -> str:
    from hf_moa.markdown import table

    lines = []
    for row in rows:
        fraction = row["compute_fraction"]
        lines.append(
            [
                *("" if value is None else str(value) for value in list(row.values())[:3]),
                "" if fraction is None else f"{fraction:.3f}",
                f"{row['milliseconds']:.2f}",
                f"{row['spread']:.1f}",
                f"{row['ratio']:.3f}",
            ]
        )
    return table(["model", "budget", "execution", "compute fraction", "ms", "± %", "ratio"], lines)
