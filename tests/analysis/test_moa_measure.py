"""The routers' measures against counts by hand."""

import itertools
import math
from collections import Counter

import pytest
import torch
from families import CASE
from peft import get_peft_model
from test_mae_measure import batches

import hf_moa
from hf_moa.analysis import MoaMeasure, Vocabulary, analyze

FIELDS = {
    "attention_type": "moa",
    "num_attention_experts": 6,
    "head_dim": 12,
    "router_type": "noisy_topk",
}


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_load_entropy_company_and_preferences_are_those_counted_by_hand(name):
    case = CASE[name]
    model = case.build(**FIELDS)
    part = "encoder" if name.startswith("Bert") else "decoder"
    tables = analyze(model, batches(case), least_count=1, top_tokens=99, progress=False).tables
    for layer in range(2):
        chosen, entropies = [], []
        for batch in batches(case):
            logits = model(**batch, output_router_logits=True).router_logits[layer]
            for row, t in batch["attention_mask"].nonzero().tolist():
                p = logits[row, t].double().softmax(dim=-1)
                entropies.append(-(p * p.log()).sum().item())
                best = p.topk(4).indices.tolist()
                chosen.append((batch["input_ids"][row, t].item(), frozenset(best)))

        def rows(table, layer=layer):
            frame = tables[table]
            return frame[(frame["part"] == part) & (frame["layer"] == layer)]

        count, each = len(chosen), Counter(e for _, experts in chosen for e in experts)
        assert rows("expert_load").set_index("expert")["load"].to_dict() == pytest.approx(
            {expert: each[expert] / (4 * count) for expert in range(6)}
        )
        (row,) = rows("router_entropy").to_dict(orient="records")
        assert row["tokens"] == count
        assert row["entropy"] == pytest.approx(sum(entropies) / count, abs=1e-6)
        assert row["uniform"] == pytest.approx(math.log(6))
        for pair in rows("experts_together").to_dict(orient="records"):
            together = sum({pair["expert"], pair["other"]} <= experts for _, experts in chosen)
            assert pair["share"] == pytest.approx(together / count)
            # of 6 experts, 4 are drawn without putting one back
            by_chance = each[pair["expert"]] * each[pair["other"]] / count**2 * (6 * 3) / (4 * 5)
            assert pair["tokens"] == together
            assert pair["lift"] == pytest.approx(together / count / by_chance)
        assert len(rows("experts_together")) == len(list(itertools.combinations(range(6), 2)))
        frame = rows("expert_token_preferences")
        for token, shares in frame.groupby("token"):
            of_token = [experts for other, experts in chosen if str(other) == token]
            for row in shares.itertuples():
                expected = sum(row.expert in experts for experts in of_token) / (4 * len(of_token))
                assert row.share == pytest.approx(expected)
                assert row.count == len(of_token)
        (kind,) = rows("expert_kind_preferences")["kind"].unique()  # ids stand for tokens
        assert kind == "number"


def test_load_of_feed_forward_experts_weighs_calls_by_their_tokens():
    case = CASE["BertForMaskedLM"]
    model = case.build(ffn_type="moe", num_ffn_experts=4)
    table = analyze(model, batches(case), progress=False).tables["expert_load"]
    loads, weights = [], []
    for batch in batches(case):
        loads.append(model(**batch).expert_load["feed_forward"].double())
        weights.append(batch["attention_mask"].sum())
    expected = sum(w * load for w, load in zip(weights, loads, strict=True)) / sum(weights)
    assert table["part"].unique().tolist() == ["encoder feed_forward"]
    assert table["load"].tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-6)


def test_both_halves_and_cross_attention_are_told_apart():
    case = CASE["T5ForConditionalGeneration"]
    model = case.build(**FIELDS, ffn_type="moe", num_ffn_experts=4)
    table = analyze(model, batches(case), progress=False).tables["expert_load"]
    expected = {"encoder": 6, "decoder": 6, "cross": 6}
    expected |= {"encoder feed_forward": 4, "decoder feed_forward": 4}
    for part, experts in expected.items():
        rows = table[table["part"] == part]
        assert len(rows) == 2 * experts
        assert rows.groupby("layer")["load"].sum().tolist() == pytest.approx([1, 1], abs=1e-6)


def test_lift_of_choices_by_chance_is_one():
    torch.manual_seed(0)
    case = CASE["BertForMaskedLM"]
    measure = MoaMeasure(case.build(**FIELDS), Vocabulary())
    layer = measure.layers["encoder"][0]
    layer.add(torch.zeros(100_000, dtype=torch.long), torch.randn(100_000, 6))
    lifts = measure.tables()["experts_together"]["lift"]
    assert lifts.tolist() == pytest.approx([1.0] * 15, abs=0.02)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_an_adapters_routers_are_measured(name, plus):
    case = CASE[name]
    fields = {**FIELDS, "cct_budgets": [1, 0.5]}
    plain = analyze(case.build(**fields), batches(case), progress=False)
    adapter = get_peft_model(case.build(**fields), hf_moa.FTGConfig(plus=plus))
    adapted = analyze(adapter, batches(case), progress=False)
    assert adapted.tables.keys() == plain.tables.keys()
    for table in plain.tables:
        assert adapted.tables[table].equals(plain.tables[table]), table


@pytest.mark.parametrize("sublayer_norm", [True, False])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_experts_in_the_parts_of_cct_are_measured(name, sublayer_norm):
    case = CASE[name]
    model = case.build(
        ffn_type="moe",
        num_ffn_experts=4,
        cct_budgets=[1, 0.5],
        cct_sublayer_norm=sublayer_norm,
        cct_execution="dense",
    )
    table = analyze(model, batches(case), progress=False).tables["expert_load"]
    for _, rows in table.groupby(["part", "layer"]):
        assert len(rows) == (16 if sublayer_norm else 4 * model.config.cct_num_ffn_splits)
        assert rows["load"].sum() == pytest.approx(1, abs=1e-6)


class WordPieces:
    all_special_ids, all_special_tokens = (0,), ("[CLS]",)
    tokens = ("[CLS]", "the", "##ing", "1990", ".", "##,")

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, index):
        return self.tokens[index]


class ByteLevel(WordPieces):
    tokens = ("[CLS]", "Ġthe", "ing", "Ġ1990", "Ġ.", "!")


@pytest.mark.parametrize("tokenizer", [WordPieces(), ByteLevel()])
def test_kinds_of_tokens(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    kinds = [vocabulary.kind(index) for index in range(6)]
    assert kinds == ["special", "word", "word piece", "number", "punctuation", "punctuation"]
    assert Vocabulary(tokenizer, kind_of=len).kind(1) == len(tokenizer.tokens[1])


def test_counts_are_exact_under_autocast():
    """More tokens than half precision can count."""
    measure = MoaMeasure(CASE["BertForMaskedLM"].build(**FIELDS), Vocabulary())
    layer = measure.layers["encoder"][0]
    ids, logits = torch.arange(3001) % 67, torch.randn(3001, 6)
    with torch.autocast("cpu", torch.bfloat16):
        layer.add(ids, logits)
    expected = logits.topk(4).indices.flatten().bincount(minlength=6)
    assert layer.chosen_together.diagonal().tolist() == expected.tolist()
