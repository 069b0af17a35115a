"""Cards of adapters."""

import pytest
import torch
from cards import LOGS, bib_keys, execute, python_of, refusals, sections
from families import CASE
from peft import LoraConfig, PeftModel, get_peft_model
from training_runs import build, run

from hf_moa import FTGConfig, MoaBertConfig
from hf_moa.model_card import model_card, read_card

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
    assert not any("local/base" in tag for tag in card.data.tags)
    assert refusals(str(card)) == []
    assert ("FTG+ adapter of" in card.text) == (method == "ftg")
    assert ("AutoPeftModel" in card.text) == (method == "ftg")
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


def test_ftg_adapter_of_plain_attention_cites_its_paper():
    config = MoaBertConfig(attention_type="moa")
    card = model_card(config, name="out", adapter="FTG", base_model="user/base")
    assert card.data.to_dict()["tags"] == ["hf_moa", "moa", "ftg"]
    assert bib_keys(card) == ["peng-etal-2020-mixture", "zhang-etal-2022-mixture"]
    assert 'base = AutoModel.from_pretrained("user/base", trust_remote_code=True)' in card.text
    assert 'PeftModel.from_pretrained(base, "out")' in card.text
