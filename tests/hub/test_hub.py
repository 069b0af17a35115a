"""Pushed in one process and pulled in others, over HTTP: models, tokenizers, adapters."""

import json

import pytest
from hub_process import TOKEN, CallError
from safetensors.torch import load
from subjects import SUBJECTS

each_family = pytest.mark.parametrize("family", SUBJECTS)
TEXT = "a head may be heads"


def arguments(family):
    """Of a pull that runs the model."""
    subject = SUBJECTS[family]
    return {"auto": subject.case.auto_name, "inputs": subject.inputs()}


# --- models and tokenizers ------------------------------------------------------------------------


@each_family
def test_pulled_model_and_tokenizer_are_those_pushed(family, hub, owner, reader):
    repository = f"user/{family}"
    pushed = owner.call("push_model", family=family, repository=repository)
    card = hub.repositories[repository].files()["README.md"].content.decode()
    assert f'from_pretrained("{repository}")' in card
    assert "More Information Needed" not in card
    tokenizer = owner.call("push_tokenizer", family=family, repository=repository, text=TEXT)
    pulled = reader.call("pull_model", repository=repository, **arguments(family))
    assert pulled["logits"] == pushed["logits"]
    assert pulled["class"] == pushed["class"]
    assert pulled["class"].startswith("hf_moa.modeling.")
    assert len(tokenizer["ids"]) > 4
    assert reader.call("pull_tokenizer", repository=repository, text=TEXT) == tokenizer


@each_family
def test_pulled_model_runs_and_is_pushed_again_without_the_package(family, owner, stranger, reader):
    repository = f"user/{family}-elsewhere"
    pushed = owner.call("push_model", family=family, repository=repository)
    tokenizer = owner.call("push_tokenizer", family=family, repository=repository, text=TEXT)
    pulled = stranger.call(
        "pull_model", repository=repository, trust_remote_code=True, **arguments(family)
    )
    assert pulled["logits"] == pushed["logits"]
    assert pulled["class"].startswith("transformers_modules.user.")
    assert tokenizer == stranger.call(
        "pull_tokenizer", repository=repository, text=TEXT, trust_remote_code=True
    )
    again, auto_name = f"{repository}-again", SUBJECTS[family].case.auto_name
    stranger.call("push_again", auto=auto_name, repository=repository, again=again, token=TOKEN)
    pulled = reader.call("pull_model", repository=again, **arguments(family))
    assert pulled == {name: pushed[name] for name in ("class", "logits")}


def test_code_from_the_hub_is_not_run_untrusted(owner, stranger):
    owner.call("push_model", family="bert", repository="user/untrusted")
    with pytest.raises(CallError, match="trust_remote_code"):
        stranger.call(
            "pull_model", repository="user/untrusted", trust_remote_code=False, **arguments("bert")
        )


@each_family
def test_weights_are_safetensors_also_in_shards(family, hub, owner, reader):
    repository = f"user/{family}-shards"
    pushed = owner.call("push_model", family=family, repository=repository, max_shard_size="50KB")
    files = hub.repositories[repository].files()
    index = json.loads(files["model.safetensors.index.json"].content)
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert {path for path in files if path.endswith(".safetensors")} == shards
    assert {path.rsplit(".", 1)[1] for path in files} == {"json", "md", "py", "safetensors"}
    pulled = reader.call("pull_model", repository=repository, **arguments(family))
    assert pulled["logits"] == pushed["logits"]


# --- who may what ---------------------------------------------------------------------------------


def test_private_repository_needs_the_token(hub, owner, reader):
    repository = "user/private"
    pushed = owner.call("push_model", family="gpt2", repository=repository, private=True)
    assert hub.repositories[repository].private
    no_access = {None: "not a valid model identifier", "hf_of_another": "401 Unauthorized"}
    for token, message in no_access.items():
        with pytest.raises(CallError, match=message):
            reader.call("pull_model", repository=repository, token=token, **arguments("gpt2"))
    pulled = reader.call("pull_model", repository=repository, token=TOKEN, **arguments("gpt2"))
    assert pulled["logits"] == pushed["logits"]


def test_push_needs_the_token(hub, owner, reader):
    repository = "user/not-yours"
    owner.call("push_model", family="gpt2", repository=repository)
    before = hub.repositories[repository].history()
    for token in (None, "hf_of_another"):
        with pytest.raises(CallError, match="401"):
            reader.call("push_model", family="gpt2", repository=repository, seed=1, token=token)
    assert hub.repositories[repository].history() == before
    with pytest.raises(CallError, match="401"):
        reader.call("push_model", family="gpt2", repository="user/nobodys")
    assert "user/nobodys" not in hub.repositories


# --- revisions ------------------------------------------------------------------------------------


@each_family
def test_each_revision_has_its_own_weights(family, hub, owner, reader):
    repository = f"user/{family}-versions"

    def push(seed, **where):
        return owner.call("push_model", family=family, repository=repository, seed=seed, **where)

    def pull(revision):
        pulled = reader.call("pull_model", repository=repository, revision=revision, **arguments(family))
        return pulled["logits"]

    first = push(0)
    owner.call("create_tag", repository=repository, tag="v1")
    proposed = push(1, create_pr=True)
    branch = push(2, revision="next")
    assert pull("main") == first["logits"]  # neither has moved it
    last = push(3)
    expected = {
        "main": last,
        "v1": first,
        "next": branch,
        "refs/pr/1": proposed,
        first["commit"]: first,
        proposed["commit"]: proposed,
    }
    assert {revision: pull(revision) for revision in expected} == {
        revision: pushed["logits"] for revision, pushed in expected.items()
    }
    assert len({pushed["logits"] for pushed in expected.values()}) == 4
    assert set(hub.repositories[repository].refs) == {"main", "v1", "next", "refs/pr/1"}
    with pytest.raises(CallError, match="not a valid git identifier"):
        pull("v2")


# --- adapters -------------------------------------------------------------------------------------


@each_family
def test_adapter_is_pushed_alone_and_pulled_onto_its_base(family, hub, owner, reader, stranger):
    base, repository = f"user/{family}-base", f"user/{family}-ftg"
    plain = owner.call("push_model", family=family, repository=base)
    pushes = len(hub.asked("commit", base))
    pushed = owner.call("push_adapter", family=family, base=base, repository=repository)
    assert pushed["logits"] != plain["logits"]

    (commit,) = hub.asked("commit", repository)
    assert commit.files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    (upload,) = hub.asked("upload", repository)
    names = load(upload.body).keys()
    assert any(".ftg_modules." in name for name in names)
    assert {name for name in names if ".ftg_modules." not in name} == (
        {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
        if family == "bert"
        else set()
    )
    assert len(hub.asked("commit", base)) == pushes
    files = hub.repositories[repository].files()
    assert files["adapter_model.safetensors"].content == upload.body
    assert json.loads(files["adapter_config.json"].content)["base_model_name_or_path"] == base
    card = files["README.md"].content.decode()
    assert f"A PEFT adapter (FTG+) of `{base}`" in card
    subject = SUBJECTS[family]
    labels = ", num_labels=3" if family == "bert" else ""
    assert f'{subject.case.auto.__name__}.from_pretrained("{base}"{labels})' in card
    assert f'PeftModel.from_pretrained(base, "{repository}")' in card
    with_its_base = reader.call(
        "pull_adapter_with_its_base",
        auto=subject.peft_auto_name,
        repository=repository,
        inputs=subject.inputs(),
    )
    assert with_its_base == pushed
    onto = {"base": base, "repository": repository, **arguments(family)}
    assert reader.call("pull_adapter", **onto) == pushed
    assert "trust_remote_code" not in card  # the method is the package's


def test_a_card_that_somebody_wrote_stays(hub, owner, tmp_path):
    repository = "user/with-a-card"
    owner.call("push_model", family="gpt2", repository=repository)
    own = "---\nlicense: mit\n---\n# Mine\n\nIt decides.\n"
    (tmp_path / "README.md").write_text(own)
    owner.call("upload_folder", folder=str(tmp_path), repository=repository)
    owner.call("push_model", family="gpt2", repository=repository, seed=1)
    card = hub.repositories[repository].files()["README.md"].content.decode()
    assert card.endswith("# Mine\n\nIt decides.\n")


def test_pefts_own_push_uploads_an_adapter_and_its_card(hub, owner, reader):
    base, repository = "user/gpt2-base-of-peft", "user/gpt2-ftg-of-peft"
    owner.call("push_model", family="gpt2", repository=base)
    owner.call("push_adapter_as_peft_does", base=base, repository=repository)
    (commit,) = hub.asked("commit", repository)
    assert commit.files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    card = hub.repositories[repository].files()["README.md"].content.decode()
    assert f"A PEFT adapter (FTG) of `{base}`" in card
    assert f'PeftModel.from_pretrained(base, "{repository}")' in card
    reader.call("pull_adapter", base=base, repository=repository, **arguments("gpt2"))


# --- interrupted uploads --------------------------------------------------------------------------


def test_interrupted_push_leaves_the_previous_revision(hub, start, owner, reader):
    """Between shards, at the commit, and killed; then the next push goes through."""
    repository, killed = "user/interrupted", start("killed", token=TOKEN)
    push = {"family": "bert", "repository": repository, "max_shard_size": "50KB"}
    first = killed.call("push_model", **push)
    uploads = hub.asked("upload", repository)
    assert len(uploads) > 2

    def check_previous():
        assert hub.repositories[repository].refs == {"main": first["commit"]}
        pulled = reader.call("pull_model", repository=repository, **arguments("bert"))
        assert pulled["logits"] == first["logits"]

    for step, nth, message in (("upload", 2, "Error while uploading"), ("commit", 1, "Interrupted")):
        hub.interrupt(step, repository, nth=nth)
        with pytest.raises(CallError, match=message):
            killed.call("push_model", **push, seed=1)
        check_previous()
    assert [request.status for request in hub.asked("commit", repository)] == [200, 403]

    hub.interrupt("upload", repository, nth=2, status=None, action=killed.kill)
    with pytest.raises(CallError, match="Killed"):
        killed.call("push_model", **push, seed=2)
    check_previous()

    second = owner.call("push_model", **push, seed=2)
    pulled = reader.call("pull_model", repository=repository, **arguments("bert"))
    assert pulled["logits"] == second["logits"] != first["logits"]
    pulled = reader.call(
        "pull_model", repository=repository, revision=first["commit"], **arguments("bert")
    )
    assert pulled["logits"] == first["logits"]


def test_passing_fault_of_the_hub_is_retried(hub, owner, reader):
    repository = "user/retried"
    hub.interrupt("upload", repository, status=503)
    pushed = owner.call("push_model", family="gpt2", repository=repository)
    assert [request.status for request in hub.asked("upload", repository)] == [503, 200]
    pulled = reader.call("pull_model", repository=repository, **arguments("gpt2"))
    assert pulled["logits"] == pushed["logits"]
