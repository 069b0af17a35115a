"""CCT's measures against the model's own costs, and counts by hand."""

import pytest
import torch
from families import CASE
from test_mae_measure import batches

from hf_moa.analysis import CctMeasure, Vocabulary, analyze, observe
from hf_moa.modeling.cct.analysis import token_costs

NAMES = ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "T5EncoderModel"]


def build(name, **fields):
    torch.manual_seed(0)
    return CASE[name].build(cct_budgets=[1, 0.5], **fields)


@pytest.mark.parametrize("attention", ["mha", "moa"])
@pytest.mark.parametrize("name", NAMES)
def test_costs_of_the_tokens_add_up_to_the_models(name, attention):
    model = build(name, attention_type=attention, cct_sublayer_norm=False)
    measure = CctMeasure(model, Vocabulary())
    for batch in batches(CASE[name]):
        seen = observe(model, batch, budget=0.5)
        costs = token_costs(measure.costs, seen)
        if "decoder" in seen.tokens and "encoder" in seen.tokens:
            # the model counts every position of the decoder: here only those that predict
            batch |= {"decoder_attention_mask": seen.tokens["decoder"].mask.long()}
        expected = model(**batch, budget=0.5).compute_cost
        total = sum(cost.sum(dim=1) for cost in costs.values())
        assert 0 < total[:, 0].sum() < total[:, 1].sum()
        torch.testing.assert_close(total, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES[:3])
def test_activity_is_the_share_of_open_gates(name):
    model, case = build(name), CASE[name]
    table = analyze(model, batches(case), progress=False).tables["cct_activity"]
    stack = "decoder" if name.startswith("GPT2") else "encoder"
    found = set()
    for budget in (1.0, 0.5):
        opened, chances = {}, 0
        for batch in batches(case):
            output = model(**batch, budget=budget, output_cct_gates=True)
            mask = batch["attention_mask"]
            chances += mask.sum().item()
            gates = output.cct_gates if "T5" not in name else output.encoder_cct_gates
            for layer, gate in enumerate(gates):
                parts = {"keys, values": gate["kv"], "query, output": gate["query"]}
                parts |= {f"ffn {part}": gate["ffn"][..., part] for part in range(4)}
                for part, tensor in parts.items():
                    key = (layer, part)
                    opened[key] = opened.get(key, 0.0) + (tensor * mask).sum().item()
        for (layer, part), count in opened.items():
            row = table[
                (table["budget"] == budget)
                & (table["stack"] == stack)
                & (table["layer"] == layer)
                & (table["sub-network"] == part)
            ]
            assert row["open"].item() == pytest.approx(count / chances)
            found.add(row["open"].item())
    assert len(found) > 5  # not all open, not all closed


def test_tables_of_tokens_agree_with_one_another():
    case = CASE["GPT2LMHeadModel"]
    model = build("GPT2LMHeadModel")
    measure = CctMeasure(model, Vocabulary(), least_count=1, top_tokens=1000)
    shares, ids = [], []
    for batch in batches(case):
        seen = observe(model, batch, budget=0.5)
        measure.update(seen)
        mask = seen.tokens["decoder"].mask
        used, full = token_costs(measure.costs, seen)["decoder"][mask].unbind(dim=-1)
        shares += (used / full).tolist()
        ids += seen.tokens["decoder"].ids[mask].tolist()
    tables = measure.tables()
    distribution = tables["cct_distribution"]
    for row in distribution.to_dict(orient="records"):
        last = row["to"] == 1
        inside = [row["from"] <= s < row["to"] or (last and s >= row["from"]) for s in shares]
        assert row["share of tokens"] == pytest.approx(sum(inside) / len(shares))
    for row in tables["cct_frequency"].to_dict(orient="records"):
        chosen = [
            share
            for share, token in zip(shares, ids, strict=True)
            if row["occurrences from"] <= ids.count(token) <= row["to"]
        ]
        assert row["compute"] == pytest.approx(sum(chosen) / len(chosen))
    by_token = tables["cct_token_compute"]
    assert by_token[by_token["which"] == "most"]["compute"].is_monotonic_decreasing
    for row in by_token.to_dict(orient="records"):
        chosen = [s for s, token in zip(shares, ids, strict=True) if str(token) == row["token"]]
        assert (row["count"], row["compute"]) == (len(chosen), pytest.approx(sum(chosen) / len(chosen)))


def test_steps_of_the_decoder_by_hand():
    case = CASE["T5ForConditionalGeneration"]
    model = build("T5ForConditionalGeneration")
    table = analyze(model, batches(case), budgets=[(1, 0.5)], progress=False).tables["cct_steps"]
    assert table["budget"].unique().tolist() == ["1, 0.5"]
    assert set(table["sub-network"]) == {
        "keys, values",
        "query, output",
        "cross query, output",
        "feed-forward",
    }
    opened, chances = 0.0, 0
    for batch in batches(case):
        output = model(**batch, budget=(1, 0.5), output_cct_gates=True)
        real = batch["labels"][:, 3] != -100
        for gates in output.decoder_cct_gates:
            opened += gates["cross_query"][real, 3].sum().item()
            chances += int(real.sum())
    row = table[(table["step"] == 3) & (table["sub-network"] == "cross query, output")]
    assert row["open"].item() == pytest.approx(opened / chances)


def test_targets_of_special_tokens_alone_have_no_table_by_frequency():
    class Tokenizer:
        all_special_ids, all_special_tokens = (0, 1), ("w0", "w1")

        def get_vocab(self):
            return {f"w{index}": index for index in range(67)}

        def convert_ids_to_tokens(self, index):
            return f"w{index}"

    case = CASE["T5ForConditionalGeneration"]
    batch = dict(next(iter(batches(case))))
    batch["labels"] = torch.ones_like(batch["labels"][:, :1])
    model = build("T5ForConditionalGeneration")
    tables = analyze(model, [batch], tokenizer=Tokenizer(), progress=False).tables
    assert set(tables["cct_distribution"]["stack"]) == {"encoder", "decoder"}
    assert set(tables["cct_frequency"]["stack"]) == {"encoder"}
