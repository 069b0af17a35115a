"""A pickle runs what its author wrote: none is loaded, from whatever file of a repository."""

import base64
import contextlib
import pickle

import pytest
import torch
from hub_process import CallError
from subjects import SUBJECTS

BERT = SUBJECTS["bert"]
PULL = {"auto": BERT.case.auto_name, "inputs": BERT.inputs()}


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def write_archive(path, marker):
    torch.save({"weight": torch.zeros(2), "extra": Malicious(marker)}, path)


def write_legacy(path, marker):
    content = {"weight": torch.zeros(2), "extra": Malicious(marker)}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def write_plain(path, marker):
    path.write_bytes(pickle.dumps({"extra": Malicious(marker)}))


each_format = pytest.mark.parametrize(
    "write", [write_archive, write_legacy, write_plain], ids=["archive", "legacy", "plain"]
)


@pytest.fixture
def marker(tmp_path):
    """The file that a pickle of the test would create; it must not be there in the end."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def check_it_would_run(path, marker):
    with contextlib.suppress(RuntimeError):  # a plain pickle is none of torch's, but by then it has run
        torch.load(path, weights_only=False)
    assert marker.exists()
    marker.unlink()


@pytest.mark.covering
@each_format
@pytest.mark.parametrize("settings", [{}, {"trust_remote_code": True}], ids=["plain", "trusted"])
def test_malicious_weights_are_refused(write, settings, hub, owner, reader, marker, tmp_path):
    repository = f"user/{write.__name__}-{len(settings)}".replace("_", "-")
    BERT.build().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / "pytorch_model.bin"
    write(weights, marker)
    check_it_would_run(weights, marker)
    owner.call("upload_folder", folder=str(tmp_path / "model"), repository=repository)
    with pytest.raises(CallError) as error:
        reader.call("pull_model", repository=repository, **settings, **PULL)
    assert "UnpicklingError" in error.value.errors
    assert served(hub, repository, "pytorch_model.bin")


@each_format
def test_malicious_adapter_is_refused(write, hub, owner, reader, marker, tmp_path):
    repository = f"user/adapter-{write.__name__}".replace("_", "-")
    owner.call("push_model", family="bert", repository=f"{repository}-base")
    arguments = {"base": f"{repository}-base", "repository": repository}
    owner.call("push_adapter", family="bert", **arguments)
    weights = tmp_path / "adapter_model.bin"
    write(weights, marker)
    check_it_would_run(weights, marker)
    put(hub, repository, weights, in_place_of="adapter_model.safetensors")
    with pytest.raises(CallError) as error:
        reader.call("pull_adapter", **arguments, **PULL)
    assert "UnpicklingError" in error.value.errors
    assert served(hub, repository, "adapter_model.bin")


def test_safetensors_are_preferred_to_a_pickle_beside_them(hub, owner, reader, marker, tmp_path):
    repository = "user/both"
    pushed = owner.call("push_model", family="bert", repository=repository)
    write_archive(tmp_path / "pytorch_model.bin", marker)
    put(hub, repository, tmp_path / "pytorch_model.bin")
    pulled = reader.call("pull_model", repository=repository, **PULL)
    assert pulled["logits"] == pushed["logits"]
    assert not served(hub, repository, "pytorch_model.bin")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_malicious_state_of_a_run_is_refused(name, trained, hub, reader, marker, tmp_path):
    repository, _ = trained("checkpoint")
    write_archive(tmp_path / name, marker)
    check_it_would_run(tmp_path / name, marker)
    put(hub, repository, tmp_path / name, folder="last-checkpoint/", branch=name)
    with pytest.raises(CallError) as error:
        resume(reader, repository, name, tmp_path)
    assert "UnpicklingError" in error.value.errors


def test_arguments_of_a_run_are_never_loaded(trained, hub, reader, marker, tmp_path):
    repository, _ = trained("checkpoint")
    name = "training_args.bin"
    write_archive(tmp_path / name, marker)
    put(hub, repository, tmp_path / name, folder="last-checkpoint/", branch=name)
    assert resume(reader, repository, name, tmp_path)["steps"] == "4"
    assert served(hub, repository, f"last-checkpoint/{name}")


def test_nothing_is_unpickled_by_pulls(owner, reader):
    """Of models, adapters and tokenizers. (The audit hook that sees this sees pickles indeed.)"""
    for family, subject in SUBJECTS.items():
        pull = {"auto": subject.case.auto_name, "inputs": subject.inputs()}
        base, adapter = f"user/{family}-no-pickle", f"user/{family}-no-pickle-ftg"
        owner.call("push_model", family=family, repository=base)
        owner.call("push_tokenizer", family=family, repository=base, text="a")
        owner.call("push_adapter", family=family, base=base, repository=adapter)
        before = reader.call("unpickled")
        reader.call("pull_model", repository=base, **pull)
        reader.call("pull_tokenizer", repository=base, text="a")
        reader.call("pull_adapter", base=base, repository=adapter, **pull)
        assert reader.call("unpickled") == before
    assert reader.call("unpickle", content=pickle.dumps(pickle.Pickler).hex()) == ["_pickle.Pickler"]


def resume(reader, repository, branch, tmp_path):
    return reader.call(
        "resume",
        repository=repository,
        revision=branch,
        checkpoint="last-checkpoint",
        folder=str(tmp_path / "resumed"),
    )


def put(hub, repository, file, *, folder="", in_place_of=None, branch="main"):
    """An attacker's commit; on a new branch, unless it is "main"."""
    repository = hub.repositories[repository]
    if branch != "main":
        repository.point(branch, "main")
    content = base64.b64encode(file.read_bytes()).decode()
    operations = [{"key": "file", "value": {"path": folder + file.name, "content": content}}]
    if in_place_of is not None:
        operations.append({"key": "deletedFile", "value": {"path": in_place_of}})
    repository.commit(branch, operations)


def served(hub, repository, path):
    """Whether the content of a file went out."""
    return any(
        (request.method, request.arguments["path"], request.status) == ("GET", path, 200)
        for request in hub.asked("resolve", repository)
    )
