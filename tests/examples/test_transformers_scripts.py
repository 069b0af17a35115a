"""transformers' own example scripts, unmodified, on gated checkpoints.

They are in no package: give a checkout of transformers' repository that fits the installed version.

    TRANSFORMERS_CHECKOUT=path/to/transformers pytest -m slow tests/examples/test_transformers_scripts.py

`run_summarization.py` also needs nltk with its "punkt" data.
"""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from families import CASE
from script_runs import command_line
from test_pipelines import WORDS, tokenizer

FIELDS = {
    "mae+cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "moa+moe": {"attention_type": "moa", "num_attention_experts": 8, "ffn_type": "moe"},
    "nested": {"nested_budgets": [1, 0.5]},
}
# Metrics are on the Hub. `evaluate` takes a script of the working directory first.
METRICS = {
    "accuracy": ("datasets.Value('int32')", "datasets.Value('int32')", ["accuracy"]),
    "sacrebleu": ("datasets.Value('string')", "[datasets.Value('string')]", ["score"]),
    "rouge": ("datasets.Value('string')", "datasets.Value('string')", ["rouge1"]),
    "squad": (
        "{'id': datasets.Value('string'), 'prediction_text': datasets.Value('string')}",
        "{'id': datasets.Value('string'), 'answers': datasets.Sequence("
        "{'text': datasets.Value('string'), 'answer_start': datasets.Value('int32')})}",
        ["exact_match", "f1"],
    ),
    "seqeval": (
        "[datasets.Value('string')]",
        "[datasets.Value('string')]",
        [f"overall_{name}" for name in ("precision", "recall", "f1", "accuracy")],
    ),
}
_METRIC = """
import datasets, evaluate

class Counted(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": {0}, "references": {1}}})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, **options):
        assert len(predictions) == len(references) > 0
        return dict.fromkeys({2}, 0.5)
"""


def text(length, start=0):
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(length))


def classified(i):
    return {"sentence": text(5, i), "label": ("no", "yes")[i % 2]}


def answered(i):
    context = text(8, i)
    answer = context.split()[2]
    answers = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"id": str(i), "title": "", "context": context, "question": text(3, i), "answers": answers}


def tagged(i):
    return {"tokens": text(4, i).split(), "ner_tags": ["O", "B-A", "I-A", "O"]}


def chosen(i):
    endings = {f"ending{j}": text(2, i + j) for j in range(4)}
    return {"sent1": text(4, i), "sent2": text(2, i), **endings, "label": i % 4}


def translated(i):
    return {"translation": {"en": text(4, i), "fr": text(4, i + 1)}}


def summarised(i):
    return {"text": text(8, i), "summary": text(3, i)}


def line(i):
    return text(30, i)


@dataclass(frozen=True)
class Script:
    """A script, the class it trains, an example by its number, the files' ending and further flags."""

    path: str
    model: str
    example: object
    ending: str
    flags: dict = field(default_factory=dict)
    needs: str | None = None


_STEPS = {"max_steps": 2, "per_device_train_batch_size": 2, "do_train": "", "do_eval": ""}
_TRAINER = {**_STEPS, "report_to": "none", "use_cpu": "True", "save_strategy": "no"}
_NO_TRAINER = {"max_train_steps": 2, "per_device_train_batch_size": 2}
_BLOCKS = {"block_size": 8}
_GENERATES = {**_TRAINER, "predict_with_generate": "", "max_target_length": 8}
SCRIPTS = (
    Script(
        "text-classification/run_glue.py", "BertForSequenceClassification", classified, "csv", _TRAINER
    ),
    Script("language-modeling/run_clm.py", "GPT2LMHeadModel", line, "txt", _TRAINER | _BLOCKS),
    Script(
        "language-modeling/run_clm_no_trainer.py", "GPT2LMHeadModel", line, "txt", _NO_TRAINER | _BLOCKS
    ),
    Script(
        "language-modeling/run_mlm.py", "BertForMaskedLM", line, "txt", _TRAINER | {"max_seq_length": 8}
    ),
    Script(
        "language-modeling/run_mlm_no_trainer.py",
        "BertForMaskedLM",
        line,
        "txt",
        _NO_TRAINER | {"max_seq_length": 8},
    ),
    Script("question-answering/run_qa.py", "BertForQuestionAnswering", answered, "json", _TRAINER),
    Script("token-classification/run_ner.py", "BertForTokenClassification", tagged, "json", _TRAINER),
    Script("multiple-choice/run_swag.py", "BertForMultipleChoice", chosen, "csv", _TRAINER),
    Script(
        "translation/run_translation.py",
        "T5ForConditionalGeneration",
        translated,
        "json",
        _GENERATES | {"source_lang": "en", "target_lang": "fr", "source_prefix": "no: "},
    ),
    Script(
        "summarization/run_summarization.py",
        "T5ForConditionalGeneration",
        summarised,
        "csv",
        _GENERATES | {"source_prefix": "no: "},
        needs="nltk",
    ),
)


def write(path, script):
    examples = [script.example(i) for i in range(16)]
    if script.ending == "txt":
        path.write_text("\n".join(examples))
    elif script.ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(examples[0]))
            writer.writeheader()
            writer.writerows(examples)
    elif script.example is answered:  # run_qa.py reads the field "data"
        path.write_text(json.dumps({"data": examples}))
    else:
        path.write_text("\n".join(map(json.dumps, examples)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", FIELDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: Path(script.path).stem)
def test_it_trains_a_gated_checkpoint(script, variant, tmp_path):
    if "TRANSFORMERS_CHECKOUT" not in os.environ:
        pytest.skip("TRANSFORMERS_CHECKOUT names no checkout of transformers' repository")
    if script.needs and importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"needs {script.needs}")
    source = Path(os.environ["TRANSFORMERS_CHECKOUT"], "examples/pytorch", script.path)

    case = CASE[script.model]
    case.build(**FIELDS[variant]).save_pretrained(tmp_path / "model")
    tokenizer(case).save_pretrained(tmp_path / "model")
    for name, (predictions, references, keys) in METRICS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(_METRIC.format(predictions, references, keys))
    files = {name: tmp_path / f"{name}.{script.ending}" for name in ("train", "validation")}
    for path in files.values():
        write(path, script)

    flags = {"model_name_or_path": "model", "output_dir": "out", **script.flags}
    flags |= {f"{name}_file": path.name for name, path in files.items()}
    words = [word for word in command_line(flags) if word]
    done = subprocess.run(
        [sys.executable, str(source), *words, "--trust_remote_code"],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"].startswith("moa_")
    assert config.items() >= FIELDS[variant].items()
    assert (tmp_path / "out/model.safetensors").is_file()
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert any(name.startswith(("eval_", "perplexity")) for name in results)
