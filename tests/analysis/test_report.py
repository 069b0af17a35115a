import base64
import re
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from families import CASE
from test_mae_measure import batches

from hf_moa.analysis import Analysis, analyze, write_report
from hf_moa.analysis.report import all_sections, markdown_table

VARIANTS = {
    "mae": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "moa": {"attention_type": "moa", "num_attention_experts": 6, "head_dim": 12, "ffn_type": "moe"},
}


def analysis_of(name, variant):
    case = CASE[name]
    return analyze(
        case.build(**VARIANTS[variant]), batches(case), least_count=1, top_tokens=3, progress=False
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_html_has_everything_in_it(tmp_path, variant):
    analysis = analysis_of("T5ForConditionalGeneration", variant)  # which has all parts
    path = tmp_path / "new" / "report.html"
    write_report(analysis, path)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    for table in analysis.tables:
        assert f'id="{table}"' in text
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    expected = sum(s.plot is not None for s in all_sections() if s.table in analysis.tables)
    assert len(pictures) == expected > 0
    for picture in pictures:
        svg = ElementTree.fromstring(base64.b64decode(picture))
        assert svg.tag.endswith("svg")
        assert len(list(svg.iter())) > 30


def test_metrics_stand_in_numbers_too(tmp_path):
    tables = {
        "budget_metrics": pd.DataFrame({"budget": [1.0, 0.5], "loss": [1.25, 1.5]}),
        "expert_selection": pd.DataFrame({"experts": ["mixture", "argmax"], "loss": [1.125, 1.75]}),
    }
    write_report(Analysis(tables, {"model": "m"}), tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert all(number in text for number in ("| 0.500 | 1.500 |", "| argmax | 1.750 |"))
    assert {path.stem for path in (tmp_path / "r_figures").iterdir()} == tables.keys()


def test_every_table_has_its_section():
    tables = set()
    for name in ("BertForMaskedLM", "T5ForConditionalGeneration"):
        for variant in VARIANTS:
            tables |= analysis_of(name, variant).tables.keys()
    sections = {section.table for section in all_sections()}
    assert tables | {"budget_metrics", "expert_selection"} == sections


def test_markdown_has_its_figures_beside(tmp_path):
    write_report(analysis_of("BertForMaskedLM", "mae"), tmp_path / "gates.md", title="My gates")
    text = (tmp_path / "gates.md").read_text(encoding="utf-8")
    assert text.startswith("# My gates\n")
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    assert all((tmp_path / picture).is_file() for picture in pictures)


def test_the_same_analysis_is_the_same_report(tmp_path):
    analysis = analysis_of("BertForMaskedLM", "moa")
    analysis.tables.pop("expert_token_preferences")  # which is long to draw
    for name in ("a.html", "b.html"):
        write_report(analysis, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_tokens_cannot_break_the_page(tmp_path):
    rows = [{"part": "encoder", "layer": 0, "expert": 0, "token": "<script>|", "pmi": 1.0, "count": 9}]
    analysis = Analysis({"mae_indicative_tokens": pd.DataFrame(rows)}, {"model": "<b>"})
    write_report(analysis, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "<code>&lt;script&gt;|</code> 1.00" in text
    assert "&lt;b&gt;" in text
    write_report(analysis, tmp_path / "r.md")
    assert r"`<script>\|` 1.00" in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_numbers_of_a_table():
    table = pd.DataFrame({"a": [1, 20000], "b": [0.12345, float("nan")], "c": ["x|y", None]})
    assert markdown_table(table).splitlines()[2:] == ["| 1 | 0.123 | x\\|y |", "| 20,000 |  |  |"]


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.html or \.md \(got 'a.pdf'\)"):
        write_report(Analysis({}, {"model": "m"}), tmp_path / "a.pdf")
