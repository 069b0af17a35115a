"""Cards of adapters: of trainers, of `hf-moa card` and of `push_to_hub`."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cards import (
    LOGS,
    Uploads,
    bib_keys,
    card_command,
    execute,
    plain_classifier,
    python_of,
    refusals,
    sections,
)
from families import CASE
from peft import LoraConfig, PeftModel, get_peft_model
from training_runs import build, run

from hf_moa import FTGConfig, MoaBertConfig
from hf_moa.adapter_files import base_beside
from hf_moa.adapters import push_to_hub
from hf_moa.cli.command import load_checkpoint
from hf_moa.model_card import Adapter, model_card, read_card, trainer_card
from hf_moa.modeling.ftg.config import ADAPTER_PLACE

ADAPTERS = {
    "ftg": FTGConfig(task_type="SEQ_CLS", plus=True),
    "lora": LoraConfig(task_type="SEQ_CLS", target_modules=["query"]),
}


@pytest.mark.parametrize("method", ADAPTERS)
def test_card_of_an_adapter(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("bert", attention_type="mae").save_pretrained("local/base")
    base = CASE["BertForSequenceClassification"].gated.from_pretrained("local/base")
    model = get_peft_model(base, ADAPTERS[method])
    made = run("bert", model, tmp_path / "adapter", learning_rate=1e-2, **LOGS)
    made.save_model()
    card = read_card(tmp_path / "adapter" / "README.md")
    assert card.data.library_name == "peft"
    assert {"hf_moa", "mae", method, "transformers", "generated_from_trainer"} <= set(card.data.tags)
    assert "base_model" not in card.data.to_dict()
    assert "local/base" not in str(card)
    assert ADAPTER_PLACE not in card.text
    assert refusals(str(card)) == []
    assert ("MAE gates and attention output projections" in card.text) == (method == "ftg")
    assert "AutoPeftModel" not in card.text  # one way to load it
    assert "[More Information Needed]" not in card.text
    assert "- PEFT " in sections(card)["Training hyperparameters"]
    assert "peng-etal-2020-mixture" in bib_keys(card)
    made.save_model()
    assert str(read_card(tmp_path / "adapter" / "README.md")) == str(card)

    code = python_of(card)[0].replace("path/or/name/of/the/base/model", "local/base")
    loaded = execute(code.split("inputs =")[0])["model"]
    assert isinstance(loaded, PeftModel)
    inputs = CASE["BertForSequenceClassification"].inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model.eval()(**inputs).logits)


def test_base_of_an_adapter_is_the_one_that_it_names(tmp_path):
    """Not the checkpoint that a script was started from, which it may have converted."""
    model = get_peft_model(build("bert", attention_type="mae"), FTGConfig(task_type="SEQ_CLS"))
    made = run("bert", model, tmp_path)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base_model")
    card = trainer_card(made, finetuned_from="google-bert/bert-base-uncased")
    assert "bert-base-uncased" not in str(card)
    model.peft_config["default"].base_model_name_or_path = "user/bert-mae"
    assert trainer_card(made, finetuned_from="user/bert").data.base_model == "user/bert-mae"


def test_ftg_adapter_of_plain_attention_cites_its_paper():
    config = MoaBertConfig(attention_type="moa")
    card = model_card(config, name="out", adapter="FTG", base_model="user/base")
    assert card.data.to_dict()["tags"] == ["hf_moa", "moa", "ftg"]
    assert bib_keys(card) == ["peng-etal-2020-mixture", "zhang-etal-2022-mixture"]
    assert 'base = AutoModel.from_pretrained("user/base", trust_remote_code=True)' in card.text
    assert 'PeftModel.from_pretrained(base, "out")' in card.text


@pytest.fixture
def saved_adapter(tmp_path, monkeypatch):
    """Saves an adapter of a method, onto a base in `local/base`, and returns the adapted model."""
    monkeypatch.chdir(tmp_path)
    build("bert", attention_type="mae").save_pretrained("local/base")

    def save(method):
        base = CASE["BertForSequenceClassification"].gated.from_pretrained("local/base")
        model = get_peft_model(base, ADAPTERS[method])
        model.save_pretrained("adapter")
        return model.eval()

    return save


@pytest.mark.parametrize("method", ADAPTERS)
def test_command_writes_the_card_that_is_pushed(method, saved_adapter, monkeypatch, capsys):
    model = saved_adapter(method)
    api = Uploads()
    monkeypatch.setattr("hf_moa.adapters.hub.HfApi", lambda token: api)
    push_to_hub(model, "adapter")
    assert card_command("adapter", "--name", "user/adapter") == 0  # PEFT's is unfinished
    assert api.cards == [Path("adapter/README.md").read_text()]
    assert f"tags hf_moa, mae, {method}, transformers\n" in capsys.readouterr().out

    card = read_card("adapter/README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert refusals(str(card)) == []
    assert "local/base" not in str(card)
    assert ("adapter (FTG+) of a BERT" in card.text) == (method == "ftg")
    assert "AutoPeftModel" not in card.text  # one way to load it
    code = python_of(card)[0].replace("path/or/name/of/the/base/model", "local/base")
    loaded = execute(code.replace("user/adapter", "adapter"))["model"]
    inputs = CASE["BertForSequenceClassification"].inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("method", ["ftg", "lora"])
@pytest.mark.parametrize(
    ("task", "name", "labels"),
    [
        ("SEQ_CLS", "BertForSequenceClassification", 3),
        ("SEQ_CLS", "GPT2ForSequenceClassification", 3),
        ("TOKEN_CLS", "T5ForTokenClassification", 4),
        ("QUESTION_ANS", "BertForQuestionAnswering", None),
        ("FEATURE_EXTRACTION", "BertModel", None),
        (None, "BertForMaskedLM", None),
    ],
)
def test_every_snippet_runs_whatever_head_the_base_has(
    task, name, labels, method, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    case = CASE[name]
    backbone, query = {
        "bert": ("BertModel", "query"),
        "gpt2": ("GPT2Model", "c_attn"),
        "t5": ("T5Model", "q"),
    }[case.family.name]
    CASE[backbone].build(attention_type="mae").save_pretrained("base")
    options = {} if labels is None else {"num_labels": labels}
    base = case.gated.from_pretrained("base", **options)
    config = {"ftg": FTGConfig(), "lora": LoraConfig(target_modules=[query])}[method]
    config.task_type = task
    get_peft_model(base, config).save_pretrained("adapter")
    snippets = snippets_of("adapter") if method == "ftg" else []  # FTG's card as it is saved
    assert len(snippets) == (method == "ftg")
    assert card_command("adapter") == 0
    snippets += snippets_of("adapter")
    assert len(snippets) == 2
    for code in snippets:
        for place, name_here in (("the/base/model", "base"), ("this/adapter", "adapter")):
            code = code.replace(f"path/or/name/of/{place}", name_here)
        model = execute(code.split("inputs =")[0])["model"]
        assert isinstance(model, PeftModel)
        assert type(model.get_base_model()).__name__ == f"Moa{name}"
        assert labels in (None, model.config.num_labels)


def snippets_of(folder):
    return re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), flags=re.DOTALL)


def test_command_takes_facts_of_an_adapter_and_keeps_what_others_wrote(saved_adapter):
    saved_adapter("ftg")
    Path("adapter/all_results.json").write_text('{"eval_accuracy": 0.75}')
    options = ["--base-model", "user/base", "--dataset", "nyu-mll/glue", "--license", "mit"]
    assert card_command("adapter", *options, "--language", "en") == 0
    path = Path("adapter/README.md")
    path.write_text(path.read_text() + "\n## Limits\n\nFew.\n")
    with pytest.raises(ValueError, match="there already; give --overwrite"):
        card_command("adapter")
    assert card_command("adapter", "--name", "user/other", "--overwrite") == 0
    card = read_card(path)
    assert (card.data.license, card.data.base_model) == ("mit", "user/base")
    assert card.data.language == ["en"]
    assert card.data.eval_results[0].metric_value == 0.75
    assert sections(card)["Limits"].strip() == "Few."
    assert card.text.count("A PEFT adapter (FTG+) of `user/base`, ") == 1
    assert card.text.count('from_pretrained("user/base"') == 1
    assert card.text.count('"user/other"') == 1


def test_draft_that_somebody_filled_in_stays_unless_told(saved_adapter):
    saved_adapter("lora")
    card = Path("adapter/README.md")
    text, place = card.read_text(), "**Developed by:** [More Information Needed]"
    assert place in text
    card.write_text(text.replace(place, "**Developed by:** me"))
    with pytest.raises(ValueError, match="there already; give --overwrite"):
        card_command("adapter")
    assert "**Developed by:** me" in card.read_text()


def test_base_that_moved_is_found_by_its_name(saved_adapter):
    saved_adapter("lora")
    Path("local/base").rename("elsewhere")
    with pytest.raises(ValueError, match=r"configuration can be read \(got local/base: "):
        card_command("adapter")
    assert card_command("adapter", "--base-model", "elsewhere") == 0


def test_task_of_an_adapter_says_the_class_of_its_base(saved_adapter):
    saved_adapter("lora")
    facts = json.loads(Path("adapter/adapter_config.json").read_text())
    for task, named, found in (
        ("TOKEN_CLS", None, "MoaBertForTokenClassification"),
        (None, "MoaBertForMaskedLM", "MoaBertForMaskedLM"),
        (None, None, None),
    ):
        mapping = None if named is None else {"base_model_class": named}
        text = json.dumps(facts | {"task_type": task, "auto_mapping": mapping})
        Path("adapter/adapter_config.json").write_text(text)
        assert Adapter.in_folder(Path("adapter")).model_class == found


def test_adapters_of_plain_models_are_errors(saved_adapter):
    saved_adapter("lora")
    plain_classifier().save_pretrained("local/base")
    with pytest.raises(ValueError, match=r"must be a gated model \(got local/base, .* 'bert'\)"):
        card_command("adapter")
    plain = get_peft_model(plain_classifier(), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="must be a gated model"):
        Adapter.of(plain)
    Path("adapter/adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="must name its base model"):
        card_command("adapter")
    Path("adapter/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"must name the adapter's method, peft_type \(got None\)"):
        card_command("adapter")


def test_card_of_an_adapter_of_a_plain_model_is_pushed_with_its_name(monkeypatch):
    api = Uploads()
    monkeypatch.setattr("hf_moa.adapters.hub.HfApi", lambda token: api)
    push_to_hub(get_peft_model(plain_classifier(), FTGConfig(target_modules=["query"])), "adapter")
    assert 'PeftModel.from_pretrained(base, "user/adapter")' in api.cards[0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (FTGConfig(), "MAE gates and CCT control networks, and leaves all else as it is ("),
        (FTGConfig(gates=["cct"]), "CCT control networks, and"),
        (FTGConfig(gates=[], plus=True), "attention output projections, and"),
        (FTGConfig(plus=True), "MAE gates, CCT control networks and attention output projections, and"),
        (FTGConfig(layers_to_transform=1), "MAE gates and CCT control networks in layer 1, and"),
        (
            FTGConfig(layers_to_transform=[0]),
            "MAE gates and CCT control networks in the layers [0], and",
        ),
        (FTGConfig(target_modules=["value", "key"]), "modules named `key`, `value`, and"),
        (FTGConfig(target_modules=r".*\.query"), r"modules of names like `.*\.query`, and"),
        (FTGConfig(gates=["mae"], task_type="SEQ_CLS"), "but for modules named `classifier`, `score` ("),
    ],
)
def test_card_says_what_the_adapter_trains(config, text, tmp_path):
    build("bert", attention_type="mae", cct_budgets=[1, 0.5]).save_pretrained(tmp_path / "base")
    base = CASE["BertForSequenceClassification"].gated.from_pretrained(tmp_path / "base")
    get_peft_model(base, copy.deepcopy(config)).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "README.md"
    assert text in " ".join(path.read_text().split())
    assert card_command(tmp_path / "adapter") == 0
    assert text in path.read_text()


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("writer", ["trainer", "command"])
def test_base_beside_its_adapter_moves_with_it(writer, is_relative, tmp_path, monkeypatch):
    """The adapter's files name where the base was; card and commands find it where it is."""
    monkeypatch.chdir(tmp_path)
    folder = (tmp_path / "adapter").resolve()
    build("bert", attention_type="mae").save_pretrained(folder / "base_model")
    name = "adapter/base_model" if is_relative else folder / "base_model"
    base = CASE["BertForSequenceClassification"].gated.from_pretrained(name)
    model = get_peft_model(base, FTGConfig(task_type="SEQ_CLS"))
    if writer == "trainer":
        run("bert", model, folder, learning_rate=1e-2, **LOGS).save_model()
    else:
        model.save_pretrained(folder)
    (tmp_path / "elsewhere").mkdir()
    folder.rename("elsewhere/moved")
    monkeypatch.chdir("elsewhere")
    if writer == "command":
        assert card_command("moved") == 0
    assert "adapter/base_model" not in Path("moved/README.md").read_text()
    (snippet,) = python_of(read_card("moved/README.md"))  # no code is found beside an adapter
    assert 'subfolder="base_model"' in snippet
    snippet = snippet.replace('"adapter"', '"moved"').split("inputs =")[0]
    inputs = CASE["BertForSequenceClassification"].inputs()
    for loaded in (execute(snippet)["model"], load_checkpoint("moved")):
        with torch.no_grad():
            expected = model.eval()(**inputs).logits
            torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=0)


def test_copied_adapter_has_the_base_beside_it(tmp_path, monkeypatch):
    """Though the one that its files name is still there."""
    monkeypatch.chdir(tmp_path)
    build("bert", attention_type="mae").save_pretrained("first/base_model")
    base = CASE["BertForSequenceClassification"].gated.from_pretrained(tmp_path / "first/base_model")
    get_peft_model(base, FTGConfig(task_type="SEQ_CLS")).save_pretrained("first")
    shutil.copytree("first", "second")
    assert card_command("second") == 0
    (snippet,) = python_of(read_card("second/README.md"))
    assert 'from_pretrained("second", subfolder="base_model"' in snippet
    assert load_checkpoint("second").get_base_model().name_or_path == "second"
    shutil.rmtree("first")
    assert load_checkpoint("second").get_base_model().name_or_path == "second"
    path = Path("second/adapter_config.json")  # as it is written on Windows
    config = json.loads(path.read_text()) | {"base_model_name_or_path": r"C:\runs\first\base_model"}
    path.write_text(json.dumps(config))
    assert base_beside("second", config["base_model_name_or_path"]) == "base_model"
    assert load_checkpoint("second").get_base_model().name_or_path == "second"


def test_what_others_add_to_the_card_that_an_adapter_is_saved_with_stays(saved_adapter):
    model = saved_adapter("ftg")
    path = Path("adapter/README.md")
    first = path.read_text()
    path.write_text(first + "\nTrained at night.\n\n## Limits\n\nFew.\n")
    model.save_pretrained("adapter")
    model.save_pretrained("adapter")
    text = path.read_text()
    for own in ("Trained at night.", "## Limits\n\nFew.", "# FTG+ adapter of local/base"):
        assert text.count(own) == 1
    assert card_command("adapter") == 0
    card = read_card(path)
    assert card.text.count("Trained at night.") == 1
    assert "FTG+ adapter of" not in card.text
    assert "A PEFT adapter (FTG+) of a BERT" in card.text
    assert sections(card)["Limits"].strip().startswith("Few.\n")  # PEFT adds its version at the end
    assert card_command("adapter", "--overwrite") == 0
    assert str(read_card(path)) == str(card)


def test_adapter_that_names_no_base_warns_and_says_so(tmp_path, caplog):
    model = get_peft_model(build("bert", attention_type="mae"), FTGConfig(task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    assert "names no base model" in caplog.text
    assert f'PeftModel.from_pretrained(base, "{ADAPTER_PLACE}")' in (tmp_path / "README.md").read_text()
    assert "AutoPeftModel" not in (tmp_path / "README.md").read_text()
