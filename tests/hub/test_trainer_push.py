"""`MoaTrainer` and the Accelerate scripts with `push_to_hub`: what they leave on the hub."""

import json

import pytest
from hub_process import TOKEN
from subjects import SUBJECTS

# What `Trainer` writes with `torch.save`, the first into every folder: not weights, and loaded, if at
# all, with `weights_only`.
ARGUMENTS = "training_args.bin"
STATES = {ARGUMENTS, "optimizer.pt", "scheduler.pt", "rng_state.pth"}
SAVES = ["Training in progress, step 1", "Training in progress, step 2"]
STRATEGIES = {  # the messages of the commits, and the folders of checkpoints
    "end": (["End of training"], set()),
    "every_save": ([*SAVES, "End of training"], set()),
    "checkpoint": (
        [message + end for message in SAVES for end in ("", ", checkpoint")] + ["End of training"],
        {"last-checkpoint"},
    ),
    "all_checkpoints": (
        [message + end for message in SAVES for end in ("", ", checkpoint")] + ["End of training"],
        {"checkpoint-1", "checkpoint-2"},
    ),
}
# "checkpoint" pushes all that these do, but for the names of its folders.
_SLOW = {"every_save", "all_checkpoints"}
of_each_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in STRATEGIES],
)
BERT = SUBJECTS["bert"]
PULL = {"auto": BERT.case.auto_name, "inputs": BERT.inputs()}


@of_each_strategy
def test_strategy_pushes_its_revisions(strategy, trained, hub, reader):
    repository, run = trained(strategy)
    messages, folders = STRATEGIES[strategy]
    commits = hub.repositories[repository].history()[1:]
    assert [commit.message for commit in commits] == messages
    last = commits[-1].files
    assert {path.rsplit("/", 1)[0] for path in last if "/" in path} == folders
    assert not any("_unfinished" in path for commit in commits for path in commit.files)

    pulled = reader.call("pull_model", repository=repository, **PULL)
    assert pulled["logits"] == run["last"]["logits"]
    assert (
        reader.call("pull_tokenizer", repository=repository, text="a head")["class"] == "BertTokenizer"
    )
    if strategy != "end":
        first = reader.call("pull_model", repository=repository, revision=commits[0].oid, **PULL)
        assert first["logits"] == run["first"]["logits"] != run["last"]["logits"]


@of_each_strategy
def test_weights_are_safetensors_and_pickles_are_the_trainers_own(strategy, trained, hub):
    repository, _ = trained(strategy)
    folders = STRATEGIES[strategy][1]
    for commit in hub.repositories[repository].history()[1:]:
        weights = {path for path in commit.files if "model" in path.rsplit("/", 1)[-1]}
        assert {path for path in weights if not path.endswith((".py", ".json"))} == {
            path for path in commit.files if path.endswith(".safetensors")
        }
        assert "model.safetensors" in commit.files
        pickles = {path for path, blob in commit.files.items() if is_pickle(blob.content)}
        there = {path.split("/")[0] for path in commit.files if "/" in path}
        assert there <= folders
        assert pickles == {ARGUMENTS} | {f"{folder}/{name}" for folder in there for name in STATES}


def is_pickle(content):
    """As `torch.save` and `pickle.dump` write it."""
    return content.startswith((b"PK\x03\x04", b"\x80"))


@of_each_strategy
def test_every_revision_has_the_code_it_names(strategy, trained, hub, stranger):
    """So that it loads where the package is not installed, also while the training goes on."""
    repository, run = trained(strategy)
    commits = hub.repositories[repository].history()[1:]
    last = commits[-1].files
    auto_map = json.loads(last["config.json"].content)["auto_map"]
    assert {f"{target.split('.')[0]}.py" for target in auto_map.values()} <= last.keys()
    for commit in commits:
        assert code_of(commit) == code_of(commits[-1])
    pulled = stranger.call(
        "pull_model", repository=repository, revision=commits[0].oid, trust_remote_code=True, **PULL
    )
    expected = run["last"] if strategy == "end" else run["first"]
    assert pulled["logits"] == expected["logits"]


def code_of(commit):
    return {
        path: blob for path, blob in commit.files.items() if path.endswith(".py") and "/" not in path
    }


@pytest.mark.parametrize(
    ("strategy", "checkpoint"),
    [
        ("checkpoint", "last-checkpoint"),
        pytest.param("all_checkpoints", "checkpoint-1", marks=pytest.mark.slow),
    ],
)
def test_run_goes_on_elsewhere_bit_for_bit(strategy, checkpoint, trained, reader, tmp_path):
    """From the hub's checkpoint, in a process that has nothing else of the run."""
    repository, _ = trained(strategy)
    unpickled = reader.call("unpickled")
    resumed = reader.call(
        "resume", repository=repository, checkpoint=checkpoint, folder=str(tmp_path / "resumed")
    )
    assert reader.call("unpickled") == unpickled  # the states are loaded with `weights_only`
    assert resumed["steps"] == "4"
    assert resumed == reader.call("train_through", folder=str(tmp_path / "whole"))


def test_private_run_is_private(hub, owner, tmp_path):
    arguments = {"strategy": "end", "hub_private_repo": True}
    owner.call("train", repository="user/run-private", folder=str(tmp_path), **arguments)
    assert hub.repositories["user/run-private"].private


def test_run_of_an_adapter_pushes_the_adapter(hub, owner, reader, tmp_path):
    base, repository = "user/run-base", "user/run-adapter"
    plain = owner.call("push_model", family="bert", repository=base)
    arguments = {"base": base, "repository": repository, "folder": str(tmp_path)}
    adapted = owner.call("train_adapter", **arguments)
    commits = hub.repositories[repository].history()[1:]
    assert [commit.message for commit in commits] == STRATEGIES["every_save"][0]
    for commit in commits:
        weights = {path for path in commit.files if path.endswith(".safetensors")}
        assert weights == {"adapter_model.safetensors"}
    arguments = {"auto": BERT.peft_auto_name, "inputs": BERT.inputs()}
    pulled = reader.call("pull_adapter_with_its_base", repository=repository, **arguments)
    assert pulled["logits"] == adapted["logits"] != plain["logits"]


def test_adapter_beside_its_base_loads_as_its_card_says(hub, owner, reader, tmp_path):
    repository = "user/run-adapter-and-base"
    trained = owner.call("train_adapter_beside_its_base", repository=repository, folder=str(tmp_path))
    (tmp_path / "base_model").rename(tmp_path / "gone")
    arguments = {"repository": repository, "inputs": BERT.inputs()}
    pulled = reader.call("pull_adapter_as_its_card_says", **arguments)
    assert pulled["logits"] == trained["logits"]


def test_accelerate_script_pushes_model_tokenizer_and_card_at_once(hub, owner, reader, tmp_path):
    """By the folder's name alone, to which the hub adds the owner."""
    flags = {"output_dir": str(tmp_path / "accelerated"), "hub_private_repo": False}
    trained = owner.call("run_accelerate_script", folder=str(tmp_path), **flags)
    (repository,) = (name for name in hub.repositories if name.endswith("/accelerated"))
    assert not hub.repositories[repository].private
    (commit,) = hub.repositories[repository].history()[1:]
    expected = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "all_results.json"}
    assert expected | {"modeling_moa_gpt2.py"} <= commit.files.keys()
    assert not any("/" in path for path in commit.files)  # the checkpoint stays
    assert not any(is_pickle(blob.content) for blob in commit.files.values())
    card = commit.files["README.md"].content.decode()
    assert f'AutoModelForCausalLM.from_pretrained("{repository}")' in card
    arguments = {"auto": "AutoModelForCausalLM", "inputs": {"input_ids": [[1, 2, 3]]}}
    pulled = reader.call("pull_model", repository=repository, **arguments)
    assert pulled["logits"] == trained["logits"]


def test_accelerate_script_pushes_where_and_as_whom_it_is_told(hub, reader, tmp_path):
    flags = {"hub_model_id": "user/told", "hub_private_repo": True, "hub_token": TOKEN}
    reader.call("run_accelerate_script", folder=str(tmp_path), **flags)
    assert hub.repositories["user/told"].private
    assert '"user/told"' in hub.repositories["user/told"].files()["README.md"].content.decode()
