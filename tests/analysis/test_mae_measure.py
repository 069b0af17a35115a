"""MAE's measures against counts by hand."""

import math
from collections import Counter

import pandas as pd
import pytest
import torch
from families import CASE
from peft import LoraConfig, get_peft_model

from hf_moa.analysis import TokenExpertCounts, analyze
from hf_moa.analysis.observe import observe


def batches(case):
    """Two batches with padding; encoder-decoder models get the source as target."""
    for seed in (0, 1):
        batch = dict(case.inputs(seed=seed))
        if case.task == "ConditionalGeneration":
            del batch["decoder_input_ids"]
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        yield batch


def inputs_of(case, part):
    """By hand, from the model's own output: `(gate, token ids of the input)` by layer."""
    model, found = case.build(attention_type="mae", mae_num_dropped_heads=2).double(), []
    for batch in batches(case):
        output = model(**batch, output_expert_weights=True)
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        if part in ("decoder", "cross") and "labels" in batch:
            mask = batch["labels"] != -100
            ids = model._shift_right(batch["labels"])
        name = {"encoder": "encoder_expert_weights", "decoder": "decoder_expert_weights"}.get(
            part, "cross_expert_weights"
        )
        weights = output.expert_weights if not model.config.is_encoder_decoder else output[name]
        for layer, gates in enumerate(weights):
            for row in range(len(ids)):
                if gates.ndim == 2:
                    found.append((layer, gates[row], ids[row][mask[row]].tolist()))
                else:
                    positions = mask[row].nonzero().flatten().tolist()
                    found += [(layer, gates[row, t], [ids[row, t].item()]) for t in positions]
    return model, found


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("BertForMaskedLM", "encoder"),
        ("GPT2LMHeadModel", "decoder"),
        ("T5ForConditionalGeneration", "encoder"),
        ("T5ForConditionalGeneration", "decoder"),
        ("T5ForConditionalGeneration", "cross"),
    ],
)
def test_entropies_shares_and_tokens_are_those_counted_by_hand(name, part):
    case = CASE[name]
    model, expected = inputs_of(case, part)
    tables = analyze(model, batches(case), least_count=1, top_tokens=1000, progress=False).tables
    for layer in range(2):
        inputs = [(gate.double(), ids) for index, gate, ids in expected if index == layer]

        def rows(table, layer=layer):
            frame = tables[table]
            return frame[(frame["part"] == part) & (frame["layer"] == layer)]

        entropies = [-sum(g * math.log(g) for g in gate.tolist() if g > 0) for gate, _ in inputs]
        (row,) = rows("mae_entropy").to_dict(orient="records")
        assert row["inputs"] == len(inputs)
        assert row["entropy"] == pytest.approx(sum(entropies) / len(inputs), abs=1e-9)
        assert row["uniform"] == pytest.approx(math.log(6))

        chosen = Counter(int(gate.argmax()) for gate, _ in inputs)
        shares = rows("mae_experts").set_index("expert")["share"]
        for expert in range(6):
            assert shares[expert] == pytest.approx(chosen[expert] / len(inputs))
        heads = rows("mae_experts").set_index("expert")["drops heads"].tolist()
        assert heads == ["0,1", "0,2", "0,3", "1,2", "1,3", "2,3"]

        pairs = Counter((token, int(gate.argmax())) for gate, ids in inputs for token in ids)
        total = sum(pairs.values())
        tokens, experts = Counter(), Counter()
        for (token, expert), count in pairs.items():
            tokens[token] += count
            experts[expert] += count
        found = rows("mae_indicative_tokens")
        pmi = {
            (token, expert): math.log(count * total / (tokens[token] * experts[expert]))
            for (token, expert), count in pairs.items()
        }
        assert {(int(row.token), row.expert): row.pmi for row in found.itertuples()} == pytest.approx(
            {pair: value for pair, value in pmi.items() if value > 1e-12}
        )


def test_labels_left_out_within_a_target_are_tokens_of_it():
    case = CASE["T5ForConditionalGeneration"]
    model = case.build(attention_type="mae")
    batch = next(batches(case))
    batch["labels"][0, 1:3] = -100
    seen = observe(model, batch).expert_weights["decoder"]
    own = model(**batch, output_expert_weights=True).decoder_expert_weights
    for actual, expected in zip(seen, own, strict=True):
        torch.testing.assert_close(actual[0], expected[0])


def test_the_model_keeps_its_mode_and_its_gates_their_statistics():
    case = CASE["BertForMaskedLM"]
    model = case.build(attention_type="mae").train()
    model.bert.encoder.layer[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analyze(model, batches(case), progress=False)
    assert model.training
    assert not model.bert.encoder.layer[0].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_uniform_gates_have_the_entropy_of_uniform_choice():
    case = CASE["BertForMaskedLM"]
    model = case.build(attention_type="mae", mae_gate_type="uniform")
    table = analyze(model, batches(case), progress=False).tables["mae_entropy"]
    assert table["entropy"].tolist() == pytest.approx(table["uniform"].tolist())


def test_mutual_information_of_a_table_by_hand():
    counts = TokenExpertCounts(2)
    counts.add(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))
    counts.add(torch.tensor([3, 3]), torch.tensor([1, 1]))
    p = counts.pointwise_mutual_information()
    assert p[0, 0].item() == pytest.approx(math.log((2 / 6) / ((3 / 6) * (2 / 6))))
    assert p[0, 1].item() == pytest.approx(math.log((1 / 6) / ((3 / 6) * (4 / 6))))
    assert p[1, 0].item() == -math.inf
    assert math.isnan(p[2, 0].item())
    indicative = counts.indicative_tokens(least_count=2, most=5)
    assert [[token for token, _, _ in expert] for expert in indicative] == [[0], [3]]
    assert indicative[1][0][1:] == (pytest.approx(math.log(6 / 4)), 2)
    assert counts.indicative_tokens(least_count=2, most=5, without=[3]) == [indicative[0], []]


@pytest.mark.parametrize(
    ("fields", "batch", "kwargs", "message"),
    [
        ({}, {}, {}, "model must have gates"),
        ({"attention_type": "mae"}, {"attention_mask": torch.ones(1, 2)}, {}, "input_ids"),
        ({"attention_type": "mae"}, None, {"budgets": [0.5]}, "budgets need a model that has some"),
        ({"cct_budgets": [1, 0.5]}, None, {"budgets": []}, r"at least one of \[1, 0.5\]"),
        ({"cct_budgets": [1, 0.5]}, None, {"budgets": [0.7]}, r"\[1.0, 0.5\] \(got 0.7\)"),
        ({"attention_type": "moa"}, {"input_ids": torch.ones(1, 2).long(),
                                     "attention_mask": torch.zeros(1, 2)}, {}, "one real token"),
    ],
)  # fmt: skip
def test_what_cannot_be_analysed_is_refused(fields, batch, kwargs, message):
    case = CASE["BertForMaskedLM"]
    with pytest.raises(ValueError, match=message):
        analyze(
            case.build(**fields),
            batches(case) if batch is None else [batch],
            progress=False,
            **kwargs,
        )


def test_models_of_others_are_refused():
    plain = CASE["BertForMaskedLM"].build_plain()
    with pytest.raises(ValueError, match="must be one of hf_moa's"):
        analyze(plain, [], progress=False)


def test_sequences_to_sequences_need_a_target():
    case = CASE["T5ForConditionalGeneration"]
    model = case.build(attention_type="mae")
    batch = {name: value for name, value in case.inputs().items() if not name.startswith("decoder")}
    with pytest.raises(ValueError, match="labels or decoder_input_ids"):
        analyze(model, [batch], progress=False)


def test_tables_are_plain_data():
    case = CASE["BertForMaskedLM"]
    analysis = analyze(case.build(attention_type="mae"), batches(case), progress=False)
    assert all(isinstance(table, pd.DataFrame) for table in analysis.tables.values())
    plain = analysis.as_dict()
    assert plain["facts"]["sequences"] == 6
    assert plain["tables"]["mae_entropy"][0]["part"] == "encoder"


def test_ties_are_split_evenly():
    case = CASE["BertForMaskedLM"]
    model = case.build(attention_type="mae", mae_gate_type="uniform")
    shares = analyze(model, batches(case), progress=False).tables["mae_experts"]["share"]
    assert shares.tolist() == pytest.approx([0.25] * 8)


def test_mixtures_that_an_adapter_trains_are_measured():
    case = CASE["GPT2LMHeadModel"]
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["mixture"])
    model = get_peft_model(case.build(attention_type="mae"), config)
    expected = analyze(case.build(attention_type="mae"), batches(case), progress=False).tables
    tables = analyze(model, batches(case), progress=False).tables
    pd.testing.assert_frame_equal(tables["mae_entropy"], expected["mae_entropy"])


@pytest.mark.parametrize("name", ["T5ForQuestionAnswering", "T5ForSequenceClassification", "T5Model"])
def test_every_class_of_encoder_decoders_is_measured(name):
    case = CASE[name]
    table = analyze(case.build(attention_type="mae"), [case.inputs()], progress=False).tables
    assert set(table["mae_entropy"]["part"]) == {"encoder", "decoder", "cross"}


@pytest.mark.parametrize(
    "fields", [{"attention_type": "mae", "cct_budgets": [1, 0.5]}, {"ffn_type": "moe"}]
)
@pytest.mark.parametrize("given", ["labels", "ids", "ids and mask", "mask"])
def test_padding_of_the_target_changes_nothing(fields, given):
    """Whatever says where it ends: labels, beside the decoder's inputs too, or a mask."""
    case = CASE["T5ForConditionalGeneration"]
    model = case.build(**fields)
    batch = next(iter(batches(case)))
    wider = {**batch, "labels": torch.nn.functional.pad(batch["labels"], (0, 7), value=-100)}
    if "ids" in given:
        wider["decoder_input_ids"] = model._shift_right(wider["labels"])
    if "mask" in given:
        wider["decoder_attention_mask"] = (wider["labels"] != -100).long()
        wider["labels"] = wider["labels"].masked_fill(wider["labels"] == -100, 0)
    one, other = (analyze(model, [b], progress=False).tables for b in (batch, wider))
    for table in one:
        numbers = one[table].select_dtypes("number")
        columns = numbers.columns.difference(["loss", "perplexity", "accuracy"])
        numbers = numbers[columns]
        assert numbers.to_numpy() == pytest.approx(other[table][columns].to_numpy(), abs=1e-6)
