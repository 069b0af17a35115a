"""The cards of `model_cards` say what the results of `examples/reproduce` say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "reproduce"
EXPERIMENTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "EXPERIMENT = Experiment(" in path.read_text()
)
# whose report has further tables, which the card has not
PART_IS_SHOWN = {"specialisation"}
MEASURED = re.compile(r"^\|.*|^.*\d+ runs, .* hours.*", re.MULTILINE)


def measured(text):
    """The lines of tables, and those that say how long runs took."""
    return set(MEASURED.findall(text))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_card_and_report_agree(fresh_import, tmp_path, capsys, name):
    card = ROOT / "model_cards" / f"{name}.md"
    fresh_import(FOLDER)(name).EXPERIMENT.main(["--report", str(tmp_path)])
    text = card.read_text(encoding="utf-8")
    report, shown = measured(capsys.readouterr().out), measured(text)
    assert len(shown) > 3
    assert shown - report == set(), "in the card, but not in the report"
    if name not in PART_IS_SHOWN:
        assert report - shown == set(), "in the report, but not in the card"
    for figure in tmp_path.glob("*.svg"):
        assert f"]({name}/{figure.name})" in text
        assert (card.with_suffix("") / figure.name).is_file()


def test_every_experiment_is_in_the_table():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)\.py` \|", table, re.MULTILINE)) == EXPERIMENTS
