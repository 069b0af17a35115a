"""What of an older card stays."""

import pytest
import yaml
from cards import EVERYTHING, MRPC, full_card, plain_classifier, sections
from huggingface_hub import ModelCard
from training_runs import trainer

from hf_moa import MoaBertConfig
from hf_moa.markdown import split_sections
from hf_moa.model_card import HEADINGS, eval_results, merged_card, model_card, read_card
from hf_moa.model_card.existing import card_of


def card(text, **metadata):
    return ModelCard(f"---\n{yaml.safe_dump(metadata)}---\n{text}")


def test_sections_of_ones_own_stay_where_they_were():
    text = full_card().text.replace("\n## Results\n", "\n## Limits\n\nFew.\n\n## Results\n")
    old = card_of(full_card().data, text + "\n## Thanks\n\n```text\n## no heading\n```\n")
    new = full_card(expert_load={"attention": [[0.5, 0.5]]})
    merged = merged_card(new, old, same_weights=False)
    own = ["Training results", "Limits", "Results"]
    names = list(sections(merged))
    assert names[4:7] == own
    assert names[-1] == "Thanks"
    assert [name for name in names if name in HEADINGS] == list(sections(new))
    assert sections(merged)["Thanks"].strip() == "```text\n## no heading\n```"
    assert "0.500 0.500" in sections(merged)["Expert load"]
    again = merged_card(new, merged, same_weights=False)
    assert str(again) == str(merged)


@pytest.mark.parametrize("same_weights", [True, False])
def test_measurements_of_other_weights_are_gone(same_weights):
    new = model_card(MoaBertConfig(**EVERYTHING), name="user/model")
    merged = merged_card(new, full_card(), same_weights=same_weights)
    measured = {"Results", "Compute budgets", "Expert load", "Training data"}
    assert measured.issubset(sections(merged)) is same_weights
    assert measured.isdisjoint(sections(merged)) is not same_weights
    assert ("model-index" in merged.data.to_dict()) is same_weights
    assert ("metrics" in merged.data.to_dict()) is same_weights
    for name in ("license", "base_model", "datasets", "language"):
        assert merged.data.get(name) == full_card().data.get(name)


def test_new_results_replace_those_of_the_same_metric():
    f1, bleu = eval_results(
        [("eval", "f1", 0.95), ("eval", "bleu", 1.0)], task="text-classification", data=MRPC
    )
    merged = merged_card(full_card(results=[f1, bleu]), full_card(), same_weights=True)
    values = {result.metric_type: result.metric_value for result in merged.data.eval_results}
    assert values == {"f1": 0.95, "bleu": 1.0, "accuracy": 0.875, "loss": 0.25}
    assert merged.data.metrics == ["f1", "bleu", "accuracy"]


def test_tags_of_other_mechanisms_are_gone():
    old = card("# Mine\n", tags=["mae", "ftg", "mine", "hf_moa"])
    assert merged_card(full_card(), old, same_weights=False).data.tags == [
        "hf_moa",
        "moa",
        "moe",
        "cct",
        "mine",
    ]


def test_introduction_of_ones_own_stays():
    mine = card("\n# My model\n\nIt counts heads.\n\n## Mechanism\n\nOld.\n", license="mit", widget=[1])
    merged = merged_card(full_card(license=None), mine, same_weights=False)
    introduction, _ = split_sections(merged.text)
    assert introduction.strip() == "# My model\n\nIt counts heads."
    assert "Old." not in merged.text
    assert list(sections(merged)) == list(sections(full_card()))
    assert (merged.data.license, merged.data.widget) == ("mit", [1])


def test_introduction_of_ours_is_written_anew():
    old = model_card(MoaBertConfig(attention_type="mae"), name="user/old")
    merged = merged_card(full_card(), old, same_weights=True)
    assert split_sections(merged.text)[0] == split_sections(full_card().text)[0]


def test_windows_line_ends_change_nothing(tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(b"---\r\nlicense: mit\r\n---\r\n# Mine\r\n\r\n## Limits\r\n\r\nFew.\r\n")
    merged = merged_card(full_card(license=None), read_card(path), same_weights=False)
    assert "\r" not in str(merged)
    assert sections(merged)["Limits"].strip() == "Few."
    assert merged.data.license == "mit"


@pytest.mark.parametrize("draft", ["", "\n# Model Card for Model ID\n\n## Uses\n\n[More]\n"])
def test_drafts_are_replaced(draft):
    merged = merged_card(full_card(), card(draft, license="mit"), same_weights=False)
    assert merged.text == full_card().text
    assert merged.data.license == "apache-2.0"


def test_draft_of_transformers_is_replaced(tmp_path):
    made = trainer("bert", plain_classifier(), tmp_path)
    made.create_model_card(license="mit")
    merged = merged_card(full_card(license=None), read_card(tmp_path / "README.md"), same_weights=False)
    assert merged.text == full_card().text
    assert merged.data.license == "mit"


@pytest.mark.parametrize("metadata", ["a: [", "- a list", "model-index:\n- name: x\n  results: [{}]"])
def test_unreadable_metadata_are_an_error(metadata, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    with pytest.raises(ValueError, match=r"metadata of .*README\.md cannot be read.*mend"):
        read_card(tmp_path / "README.md")
