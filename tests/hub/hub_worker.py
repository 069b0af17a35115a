"""A process that pushes and pulls: reads calls from stdin, a line of JSON each, and answers on stdout.

Its environment says which hub and token it uses, since huggingface_hub reads them when it is imported.
Started with the argument "without-the-package", it cannot import hf_moa.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "without-the-package" in sys.argv:
    sys.modules["hf_moa"] = None  # an import of it fails, as if it were not installed
else:
    import hf_moa.adapters

import peft
import torch
import transformers
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

CALLS = {}
UNPICKLED: list[str] = []  # every global that Python's unpickler looked up


def call(function):
    CALLS[function.__name__] = function
    return function


# --- pushing: with the package, which the subjects need ---------------------------------------------


@call
def push_model(family: str, repository: str, seed: int = 0, **push: Any) -> dict[str, Any]:
    from subjects import SUBJECTS

    model = SUBJECTS[family].build(seed)
    commit = model.push_to_hub(repository, **push)
    return describe(model, SUBJECTS[family].inputs()) | {"commit": commit.oid}


@call
def push_tokenizer(family: str, repository: str, text: str) -> dict[str, Any]:
    from subjects import SUBJECTS

    tokenizer = SUBJECTS[family].tokenizer()
    tokenizer.push_to_hub(repository)
    return describe_tokenizer(tokenizer, text)


@call
def push_adapter(family: str, base: str, repository: str) -> dict[str, Any]:
    """An FTG+ adapter, away from where it starts."""
    from subjects import SUBJECTS

    subject = SUBJECTS[family]
    config = hf_moa.FTGConfig(plus=True, task_type=subject.task_type, init_weights=False)
    model = peft.get_peft_model(subject.case.auto.from_pretrained(base), config)
    hf_moa.adapters.push_to_hub(model, repository)
    return describe(model, subject.inputs())


@call
def push_adapter_as_peft_does(base: str, repository: str) -> None:
    from subjects import SUBJECTS

    config = hf_moa.FTGConfig(task_type=SUBJECTS["gpt2"].task_type)
    model = peft.get_peft_model(SUBJECTS["gpt2"].case.auto.from_pretrained(base), config)
    model.push_to_hub(repository)


@call
def upload_folder(folder: str, repository: str) -> None:
    HfApi().create_repo(repository, exist_ok=True)
    HfApi().upload_folder(folder_path=folder, repo_id=repository)


@call
def create_tag(repository: str, tag: str) -> None:
    HfApi().create_tag(repository, tag=tag)


@call
def train(repository: str, folder: str, strategy: str, **arguments: Any) -> dict[str, Any]:
    """The first two of four steps, with a checkpoint each, stopped there as by a time limit; and the
    push at the end of a script."""
    from subjects import SUBJECTS

    subject = SUBJECTS["bert"]
    trainer = train_and_push(folder, repository, hub_strategy=strategy, **arguments)
    first = subject.case.gated.from_pretrained(Path(folder, "checkpoint-1"))
    return {
        "first": describe(first, subject.inputs()),
        "last": describe(trainer.model, subject.inputs()),
    }


@call
def train_adapter(base: str, repository: str, folder: str) -> dict[str, Any]:
    """As `train`; an FTG adapter, pushed at every save."""
    from subjects import SUBJECTS

    subject = SUBJECTS["bert"]
    config = hf_moa.FTGConfig(task_type=subject.task_type)
    model = peft.get_peft_model(subject.case.auto.from_pretrained(base), config)
    train_and_push(folder, repository, hub_strategy="every_save", model=model)
    return describe(model, subject.inputs())


@call
def train_adapter_beside_its_base(repository: str, folder: str) -> dict[str, Any]:
    """As an example script whose base is nowhere else; pushed once, at the end."""
    from subjects import SUBJECTS

    subject, base = SUBJECTS["bert"], Path(folder, "base_model")
    subject.build(0).save_pretrained(base)
    config = hf_moa.FTGConfig(task_type=subject.task_type, init_weights=False)
    model = peft.get_peft_model(subject.case.auto.from_pretrained(base), config)
    train_and_push(folder, repository, hub_strategy="end", model=model)
    return describe(model, subject.inputs())


def train_and_push(folder: str, repository: str, **arguments: Any) -> Any:
    from subjects import SUBJECTS, make_trainer

    hub = {"push_to_hub": True, "hub_model_id": repository, "hub_always_push": True}
    trainer = make_trainer(folder, **hub | arguments)
    trainer.processing_class = SUBJECTS["bert"].tokenizer()

    class StopWhenPushed(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if trainer.push_in_progress is not None:  # pushes run in the background
                for job in trainer.push_in_progress.jobs:
                    job.result()
            control.should_training_stop = state.global_step == 2

    trainer.add_callback(StopWhenPushed())
    trainer.train()
    trainer.push_to_hub()
    return trainer


@call
def run_accelerate_script(folder: str, **flags: Any) -> dict[str, Any]:
    """One update of a causal language model, with a checkpoint, by a script that pushes it."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests / "examples"), str(tests.parent / "examples")]
    from accelerate_runs import make_arguments, run

    settings = {"attention_type": "mae", "max_train_steps": 1, "checkpointing_steps": 1}
    values = make_arguments(Path(folder), "clm", **settings, push_to_hub=True, **flags)
    run("clm", values)
    model = transformers.AutoModelForCausalLM.from_pretrained(values["output_dir"])
    return describe(model, {"input_ids": [[1, 2, 3]]})


# --- pulling --------------------------------------------------------------------------------------


@call
def pull_model(auto: str, repository: str, inputs: dict[str, list], **pull: Any) -> dict[str, Any]:
    return describe(getattr(transformers, auto).from_pretrained(repository, **pull), inputs)


@call
def pull_tokenizer(repository: str, text: str, **pull: Any) -> dict[str, Any]:
    return describe_tokenizer(transformers.AutoTokenizer.from_pretrained(repository, **pull), text)


@call
def pull_adapter(
    auto: str, base: str, repository: str, inputs: dict[str, list], **pull: Any
) -> dict[str, Any]:
    model = getattr(transformers, auto).from_pretrained(base, **pull)
    return describe(peft.PeftModel.from_pretrained(model, repository), inputs)


@call
def pull_adapter_as_its_card_says(repository: str, inputs: dict[str, list]) -> dict[str, Any]:
    card = Path(hf_hub_download(repository, "README.md")).read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("inputs =")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return describe(names["model"], inputs)


@call
def pull_adapter_with_its_base(auto: str, repository: str, inputs: dict[str, list]) -> dict[str, Any]:
    return describe(getattr(peft, auto).from_pretrained(repository), inputs)


@call
def push_again(auto: str, repository: str, again: str, **push: Any) -> None:
    """What was pulled, as it was."""
    model = getattr(transformers, auto).from_pretrained(repository, trust_remote_code=True)
    model.push_to_hub(again, **push)


@call
def resume(repository: str, checkpoint: str, folder: str, revision: str | None = None) -> dict[str, str]:
    """A run from a checkpoint on the hub to its end."""
    from subjects import make_trainer

    snapshot = snapshot_download(repository, revision=revision)
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=str(Path(snapshot, checkpoint)))
    return fingerprint(trainer)


@call
def train_through(folder: str) -> dict[str, str]:
    """The same run, not interrupted."""
    from subjects import make_trainer

    trainer = make_trainer(folder)
    trainer.train()
    return fingerprint(trainer)


@call
def unpickled() -> list[str]:
    return UNPICKLED


@call
def unpickle(content: str) -> list[str]:
    """To show that it is noted: what this alone adds."""
    before = len(UNPICKLED)
    pickle.loads(bytes.fromhex(content))
    return UNPICKLED[before:]


# --- what came out --------------------------------------------------------------------------------


@torch.no_grad()
def describe(model: torch.nn.Module, inputs: dict[str, list]) -> dict[str, Any]:
    """The class of a model and its logits, bit by bit."""
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    logits = model.eval()(**tensors)["logits"]
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return {"class": f"{type(inner).__module__}.{type(inner).__name__}", "logits": digest(logits)}


def describe_tokenizer(tokenizer: Any, text: str) -> dict[str, Any]:
    return {"class": type(tokenizer).__name__, "ids": tokenizer(text)["input_ids"]}


def fingerprint(trainer: Any) -> dict[str, str]:
    """Of every parameter, buffer and state of the optimiser."""
    states = trainer.optimizer.state_dict()["state"].items()
    tensors = trainer.model.state_dict() | {
        f"optimizer.{i}.{name}": torch.as_tensor(value)
        for i, state in states
        for name, value in state.items()
    }
    return {name: digest(tensor) for name, tensor in tensors.items()} | {
        "steps": str(trainer.state.global_step)
    }


def digest(tensor: torch.Tensor) -> str:
    bits = tensor.detach().contiguous().numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(bits).hexdigest()}"


# --- the process ----------------------------------------------------------------------------------


def note_unpickling(event: str, arguments: tuple) -> None:
    if event == "pickle.find_class":
        UNPICKLED.append(".".join(map(str, arguments)))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.addaudithook(note_unpickling)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": CALLS[request["call"]](**request["arguments"])}
        except Exception as error:
            answer = {"errors": [type(e).__name__ for e in chain(error)], "message": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
