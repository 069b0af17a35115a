"""What is particular to gated BERT, and details that one backbone shows for all."""

import copy

import pytest
import torch
from common import VARIANTS, batch, randomize, tiny_config
from transformers import AutoTokenizer

from hf_moa import MoaBertForMaskedLM, MoaBertForSequenceClassification, MoaBertModel


def build(cls=MoaBertForSequenceClassification, seed=0, **fields):
    torch.manual_seed(seed)
    return randomize(cls(tiny_config(**fields)), seed=seed).eval()


def tokens():
    ids, mask = batch()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["mha", "mae-1", "moa", "cct-plain"])
def test_half_precision_computes_the_same_function(name):
    """Variants without decisions that rounding can turn; MoA keeps all its experts here."""
    fields = VARIANTS[name]
    if name == "moa":
        fields = fields | {"num_attention_experts": 4}
    torch.manual_seed(0)
    model = MoaBertModel(tiny_config(**fields)).eval()
    half = copy.deepcopy(model).to(torch.bfloat16)
    inputs = tokens()
    expected = model(**inputs).last_hidden_state
    error = (half(**inputs).last_hidden_state.float() - expected).abs().max()
    assert expected.abs().max() > 1
    assert error < 0.1


def test_outputs_carry_gating_only_where_asked():
    model = build(attention_type="mae", cct_budgets=[1, 0.5])
    inputs = tokens()
    plain = model(**inputs)
    assert plain.expert_weights is None
    assert plain.cct_gates is None
    output = model(**inputs, output_expert_weights=True, output_cct_gates=True)
    assert [tuple(w.shape) for w in output.expert_weights] == [(3, 4)] * 2
    for gates in output.cct_gates:
        shapes = {name: tuple(gate.shape) for name, gate in gates.items()}
        assert shapes == {"kv": (3, 9), "query": (3, 9), "ffn": (3, 9, 4)}
    for weights in output.expert_weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3))


@pytest.mark.parametrize("name", ["moa", "moa-noisy", "moe", "moe-noisy", "moa-moe-cct"])
def test_padding_counts_in_no_loss_of_a_model(name):
    model = build(MoaBertModel, **VARIANTS[name]).double()
    ids, mask = batch()
    losses = model(ids, attention_mask=mask).aux_losses
    other = model(torch.where(mask.bool(), ids, 7), attention_mask=mask).aux_losses
    wider = torch.nn.functional.pad(ids, (0, 5)), torch.nn.functional.pad(mask, (0, 5))
    padded = model(wider[0], attention_mask=wider[1]).aux_losses
    assert losses
    for term, loss in losses.items():
        torch.testing.assert_close(other[term], loss, atol=1e-11, rtol=0, msg=term)
        torch.testing.assert_close(padded[term], loss, atol=1e-11, rtol=0, msg=term)


def test_moe_losses_are_the_mean_over_cct_parts():
    model = build(MoaBertModel, ffn_type="moe", cct_budgets=[1], num_hidden_layers=1)
    seen = []
    for part in model.encoder.layer[0].feed_forward.parts:
        part.router.register_forward_hook(lambda m, a, routing: seen.append(routing.losses))
    ids, mask = batch()
    total = model(ids, attention_mask=mask).aux_losses["router_z_loss"]
    torch.testing.assert_close(total, torch.stack([losses["router_z_loss"] for losses in seen]).mean())


def test_pre_norm_normalises_the_input_of_each_sublayer():
    model = build(MoaBertModel, pre_norm=True).double()
    plain = build(MoaBertModel).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids, _ = batch()
    x = model.embeddings(ids)
    for layer, other in zip(model.encoder.layer, plain.encoder.layer, strict=True):
        attention, norm = other.attention, layer.attention.output.LayerNorm
        result = attention.self(norm(x))
        x = x + attention.self.mixture.output(attention.output.dense, result.context, result.mix)
        x = x + other.output.dense(other.intermediate(layer.output.LayerNorm(x)))
    expected = model.encoder.LayerNorm(x)
    torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_items", [None, 40])
@pytest.mark.parametrize("name", ["mha", "mae-1", "moa-moe-cct"])
def test_sparse_prediction_computes_the_same_loss_from_the_labelled_tokens(name, num_items):
    ids, mask = batch()
    labels = ids.masked_fill(torch.arange(ids.shape[1]) % 3 > 0, -100)
    labelled = labels != -100
    found = []
    for sparse in (False, True):
        model = build(MoaBertForMaskedLM, **VARIANTS[name], sparse_prediction=sparse).double().train()
        torch.manual_seed(1)
        outputs = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=num_items)
        outputs.loss.backward()
        logits = outputs.logits if sparse else outputs.logits[labelled]
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": outputs.loss, "logits": logits, **gradients})
    assert found[0]["logits"].shape == (int(labelled.sum()), model.config.vocab_size)
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-9)


def test_sparse_prediction_is_for_training_with_labels():
    model = build(MoaBertForMaskedLM, sparse_prediction=True)
    ids, _ = batch()
    every = (*ids.shape, model.config.vocab_size)
    assert model(ids, labels=ids.masked_fill(ids > 9, -100)).logits.shape == every
    assert model.train()(ids).logits.shape == every


@pytest.mark.parametrize("where", ["attention_probs_dropout_prob", "mae_gate_dropout"])
def test_dropout_works_in_training(where):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "mae_gate_dropout": 0.0}
    ids, _ = batch()
    for fields, differs in ((off, False), (off | {where: 0.5}, True)):
        model = build(MoaBertModel, attention_type="mae", **fields).train()
        first, second = (model(ids).last_hidden_state for _ in range(2))
        assert torch.equal(first, second) != differs


def test_tokenizer_of_a_gated_checkpoint_needs_its_vocabulary_alone(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhead\n")
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("head") == ["head"]
