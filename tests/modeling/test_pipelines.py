"""transformers' text pipelines, with gated checkpoints on disk as a user has them."""

import logging

import pytest
import torch
import transformers
from families import CASE
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline

SENTENCE = "a head may be dropped or kept where the gate says so and no other computes it"
WORDS = SENTENCE.split()
MECHANISMS = {
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa"},
    "cct": {"cct_budgets": [1, 0.5]},
}
each_mechanism = pytest.mark.parametrize("fields", MECHANISMS.values(), ids=MECHANISMS)


def tokenizer(case):
    """A word each; special tokens where the tiny configurations expect them."""
    special = ["<pad>", "</s>", "<unk>", "<mask>", "<cls>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if case.family.name == "t5":
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<cls>",
        sep_token="</s>",
        padding_side="left" if case.task == "LMHead" else "right",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture
def load(tmp_path, caplog):
    """A pipeline on a saved checkpoint; transformers must find nothing to complain of."""

    def make(task, name, **fields):
        case = CASE[name]
        model = case.build(**fields)
        model.save_pretrained(tmp_path)
        tokenizer(case).save_pretrained(tmp_path)
        with caplog.at_level(logging.ERROR):
            result = pipeline(task, model=str(tmp_path), device="cpu")
        assert "not supported" not in caplog.text
        assert type(result.model) is case.gated
        return result

    return make


@each_mechanism
def test_fill_mask(load, fields):
    answers = load("fill-mask", "BertForMaskedLM", **fields)("a head <mask> be dropped", top_k=3)
    assert len(answers) == 3
    assert answers[0]["score"] >= answers[1]["score"] > 0


@each_mechanism
@pytest.mark.parametrize("family", ["Bert", "GPT2", "T5"])
def test_text_classification_of_a_padded_batch(load, fields, family):
    classify = load("text-classification", f"{family}ForSequenceClassification", **fields)
    texts = ["a head may be dropped", "the gate says so and no other computes it"]
    together = classify(texts, batch_size=2)
    for text, answer in zip(texts, together, strict=True):
        alone = classify(text)[0]
        assert alone["label"] == answer["label"]
        assert alone["score"] == pytest.approx(answer["score"], abs=1e-5)


@each_mechanism
@pytest.mark.parametrize("family", ["Bert", "GPT2", "T5"])
def test_token_classification(load, fields, family):
    entities = load("token-classification", f"{family}ForTokenClassification", **fields)("a head kept")
    assert [entity["word"] for entity in entities][:3] == ["a", "head", "kept"]


@each_mechanism
@pytest.mark.parametrize("family", ["Bert", "GPT2"])
def test_feature_extraction(load, fields, family):
    features = load("feature-extraction", f"{family}Model", **fields)("a head kept", return_tensors=True)
    assert features.shape == (1, 3, 32)
    assert torch.isfinite(features).all()


def test_feature_extraction_of_the_encoder_of_t5(tmp_path):
    case = CASE["T5EncoderModel"]
    model = case.build(attention_type="mae")
    extract = pipeline("feature-extraction", model=model, tokenizer=tokenizer(case), device="cpu")
    assert extract("a head kept", return_tensors=True).shape == (1, 4, 32)


@each_mechanism
def test_text_generation(load, fields):
    generate = load("text-generation", "GPT2LMHeadModel", **fields)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    texts = ["a head may be", "the gate says so and no other"]
    together = generate(texts, batch_size=2, **options)
    for text, answers in zip(texts, together, strict=True):
        assert answers[0]["generated_text"].startswith(text)
        assert generate(text, **options) == answers


def test_text_generation_at_a_budget(load):
    generate = load("text-generation", "GPT2LMHeadModel", **MECHANISMS["cct"])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 1}
    texts = [generate("a head may", budget=budget, **options) for budget in (1, 0.5)]
    assert texts[0] != texts[1]


CALLS = {
    "fill-mask": ("BertForMaskedLM", ("a head <mask> be dropped",), {}),
    "text-classification": ("GPT2ForSequenceClassification", ("a head may be dropped",), {"top_k": 3}),
    "token-classification": ("T5ForTokenClassification", ("a head kept",), {}),
    "feature-extraction": ("BertModel", ("a head kept",), {}),
    "zero-shot-classification": (
        "BertForSequenceClassification",
        ("a head may be dropped", ["gate", "head"]),
        {"hypothesis_template": "the {} says so", "multi_label": True},
    ),
}


@pytest.mark.parametrize("task", CALLS)
def test_each_call_has_its_budget(load, task):
    name, inputs, options = CALLS[task]
    compute = load(task, name, **MECHANISMS["cct"])
    found = [compute(*inputs, budget=budget, **options) for budget in (1, 0.5)]
    assert found[0] != found[1]
    for budget, answer in zip((1, 0.5), found, strict=True):
        compute.model.set_budget(budget)
        assert compute(*inputs, **options) == answer
    compute.model.set_budget(None)
    assert compute(*inputs, **options) == found[0]
    assert (
        pipeline(task, model=compute.model, tokenizer=compute.tokenizer, device="cpu", budget=0.5)(
            *inputs, **options
        )
        == found[1]
    )
    with pytest.raises(ValueError, match=r"budget must be one of .*0\.7"):
        compute(*inputs, budget=0.7, **options)
    assert isinstance(compute, getattr(transformers, type(compute).__name__))


@pytest.mark.parametrize("task", CALLS)
def test_budgets_of_models_without_any_are_refused(load, task):
    name, inputs, options = CALLS[task]
    with pytest.raises(ValueError, match="budget"):
        load(task, name)(*inputs, budget=0.5, **options)


def test_batches_in_a_pipeline_have_one_budget(load):
    classify = load("text-classification", "BertForSequenceClassification", nested_budgets=[1, 0.5])
    texts = ["a head may be dropped", "the gate says so and no other computes it"]
    together = classify(texts, batch_size=2, budget=0.5)
    for text, answer in zip(texts, together, strict=True):
        assert classify(text, budget=0.5)[0]["score"] == pytest.approx(answer["score"], abs=1e-5)


def test_pipelines_of_plain_models_are_as_before():
    case = CASE["BertForSequenceClassification"]
    plain = pipeline("text-classification", model=case.build_plain(), tokenizer=tokenizer(case))
    own = transformers.TextClassificationPipeline(model=plain.model, tokenizer=plain.tokenizer)
    assert plain("a head kept", top_k=3) == own("a head kept", top_k=3)


@each_mechanism
def test_zero_shot_classification(load, fields):
    answer = load("zero-shot-classification", "BertForSequenceClassification", **fields)(
        "a head may be dropped", candidate_labels=["gate", "head"], hypothesis_template="the {} says so"
    )
    assert sum(answer["scores"]) == pytest.approx(1)
