"""The quickstart from text to checked checkpoint.

hf-moa quickstart --output-dir ./hf-moa-quickstart
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
from transformers.utils import logging as transformers_logging

from hf_moa.environment import environment, idle_cpus
from hf_moa.output_folder import output_folder

from .corpus import build_corpus
from .gates import choose_example, expert_weights_by_class, token_compute
from .plots import draw_gates
from .reload import check_reload
from .report import summary, write_report
from .settings import QuickstartSettings
from .tokenizer import train_tokenizer
from .train import finetune, pretrain

# More threads than this slow so small a model down.
_MOST_THREADS = 4
_RELOAD_TEXTS = 32
_MARKER = "results.json"


def run_quickstart(
    output_dir: str | Path = "hf-moa-quickstart",
    settings: QuickstartSettings | None = None,
    *,
    overwrite: bool = False,
    threads: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Pretrains, finetunes, evaluates, saves and checks a small gated BERT, on the CPU, offline.

    Written to `output_dir`, which appears only when everything is done:

    - `pretrained/`: the masked language model and its tokenizer;
    - `classifier/`: the classifier and its tokenizer;
    - `results.md`, `results.json`: figures, settings, versions and seconds of each stage;
    - `gates.png`: what the gates do, where matplotlib is installed.

    Args:
        output_dir: folder to write.
        settings: default: `QuickstartSettings()`.
        overwrite: replace an earlier quickstart in `output_dir`.
        threads: of torch; default: the idle CPUs, at most 4.
        say: takes each line of progress.

    Returns:
        What `results.json` holds: `labels`, `parameters`, `majority_rate`, `masked_language`
        (`loss_before`, `loss_after`, `unigram`, `steps`), `classification` (a row per budget:
        `budget`, `compute_fraction`, `seconds`, `eval_loss`, `eval_accuracy`), `reload_texts`,
        `picture`, `corpus`, `settings`, `seconds`, `environment`.

    Raises:
        ValueError: `output_dir` is not empty; `threads` is not positive; the standard library's
            text is missing.
        ReloadError: the saved classifier does not compute what the trained one did.
    """
    settings = QuickstartSettings() if settings is None else settings
    threads = min(idle_cpus(), _MOST_THREADS) if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1 (got {threads})")
    with output_folder(output_dir, overwrite=overwrite, marker=_MARKER) as folder, _quiet(threads):
        results = _run(folder, settings, say)
    say("")
    say(summary(results))
    say(f"\nWritten to {output_dir}: " + _contents(Path(output_dir)))
    return results


def _run(folder: Path, settings: QuickstartSettings, say: Callable[[str], None]) -> dict[str, Any]:
    seconds: dict[str, float] = {}

    with _timed(seconds, "text"):
        corpus = build_corpus(num_labels=settings.num_labels, seed=settings.seed)
        tokenizer = train_tokenizer(corpus.pretraining, settings.vocab_size, settings.block_length)
    characters = sum(map(len, corpus.pretraining))
    say(f"Text: {characters / 1e6:.1f} MB of the standard library's documentation")
    say(
        f"Classes: {', '.join(corpus.labels)} ({len(corpus.train)} docstrings to train on, "
        f"{len(corpus.evaluation)} to evaluate)"
    )

    with TemporaryDirectory() as work_dir:
        with _timed(seconds, "pretraining"):
            pretrained, masked_language = pretrain(corpus, tokenizer, settings, work_dir)
            pretrained.save_pretrained(folder / "pretrained")
            tokenizer.save_pretrained(folder / "pretrained")
        with _timed(seconds, "finetuning"):
            trainer, rows = finetune(corpus, tokenizer, folder / "pretrained", settings, work_dir)
    model = cast(transformers.PreTrainedModel, trainer.model)

    with _timed(seconds, "reload check"):
        model.save_pretrained(folder / "classifier")
        tokenizer.save_pretrained(folder / "classifier")
        texts = [example.text for example in corpus.evaluation[:_RELOAD_TEXTS]]
        check_reload(model, tokenizer, folder / "classifier", texts)
    say(f"Reloaded in a new process: the same logits, bit for bit, on {len(texts)} docstrings")

    with _timed(seconds, "picture"):
        picture = _picture(folder / "gates.png", model, tokenizer, corpus, say)

    results = {
        "labels": corpus.labels,
        "parameters": model.num_parameters(),
        "majority_rate": corpus.majority_rate,
        "masked_language": asdict(masked_language),
        "classification": rows,
        "reload_texts": len(texts),
        "picture": picture,
        "corpus": {
            "pretraining_characters": characters,
            "train": len(corpus.train),
            "evaluation": len(corpus.evaluation),
        },
        "settings": asdict(settings),
        "seconds": seconds,
        "environment": environment(),
    }
    write_report(folder, results)
    return results


def _picture(path: Path, model, tokenizer, corpus, say: Callable[[str], None]) -> bool:
    example = choose_example(corpus.evaluation, tokenizer)
    weights = expert_weights_by_class(model, tokenizer, corpus.evaluation, len(corpus.labels))
    compute = token_compute(model, tokenizer, example.text)
    try:
        draw_gates(path, weights, corpus.labels, compute, example.text)
    except ImportError:
        say('No picture of the gates without matplotlib: pip install "hf-moa[plots]"')
        return False
    return True


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """Sets the threads, and hushes what is expected here: new heads, bars of the saved files."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    threads_before = torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.set_num_threads(threads_before)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _contents(folder: Path) -> str:
    return ", ".join(sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir()))
