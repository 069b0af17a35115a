"""Relatives of the families, such as RoBERTa, compute upcycled what transformers' own class does."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from common import TINY, randomize
from published_configurations import PUBLISHED, SIZES

import hf_moa
from hf_moa import upcycle
from hf_moa.cli import main
from hf_moa.relatives import RELATIVES
from hf_moa.relatives.relative import Relative

NO_DROPOUT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "qa_dropout",
    "seq_classif_dropout",
    "summary_last_dropout",
    "dropout_rate",
)


@dataclass(frozen=True)
class Case:
    """One class of a relative."""

    relative: Relative
    task: str
    sizes: dict[str, Any] = field(hash=False)

    @property
    def name(self):
        return self.relative.tasks[self.task]

    def build(self, **fields):
        config_class = transformers.CONFIG_MAPPING[self.relative.model_type]
        num_labels = 2 if self.task == "question-answering" else 3
        torch.manual_seed(0)
        config = config_class(**self.sizes | {"num_labels": num_labels} | fields)
        return randomize(getattr(transformers, self.name)(config)).eval()

    def without_dropout(self):
        known = [name for name in NO_DROPOUT if hasattr(self.build().config, name)]
        return self.build(**dict.fromkeys(known, 0.0))

    def inputs(self, padding_id):
        """A sequence without padding, one with padding on the left, and one with it on the right."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 67, (3, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, :4], mask[2, 6:] = 0, 0
        if self.name.endswith("T5ForSequenceClassification"):  # which reads the end token, once
            ids[torch.arange(3), [8, 8, 5]] = 1
        ids[mask == 0] = padding_id
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.task == "multiple-choice":
            return {name: torch.stack([x, x.flip(0)], dim=1) for name, x in inputs.items()}
        if self.name.endswith(("T5Model", "ForConditionalGeneration")):
            inputs["decoder_input_ids"] = torch.randint(5, 67, (3, 7), generator=generator)
        return inputs

    def labels(self):
        of_sequences, of_tokens = torch.tensor([0, 1, 1]), torch.arange(27).view(3, 9) % 3
        return {
            "feature-extraction": {},
            "text-encoding": {},
            "fill-mask": {"labels": of_tokens},
            "text2text-generation": {"labels": of_tokens + 5},
            "token-classification": {"labels": of_tokens},
            "replaced-token-detection": {"labels": of_tokens % 2},
            "question-answering": {"start_positions": of_sequences, "end_positions": of_sequences + 2},
        }.get(self.task, {"labels": of_sequences})


CASES = {
    case.name: case
    for relative in RELATIVES
    for case in (Case(relative, task, SIZES[relative.model_type]) for task in relative.tasks)
}
# XLM-RoBERTa and CamemBERT are RoBERTa by other names.
_LIKE_ROBERTA = ("xlm-roberta", "camembert")
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.slow]
            if case.relative.model_type in _LIKE_ROBERTA and case.task != "fill-mask"
            else [],
        )
        for name, case in CASES.items()
    ],
)
each_relative = pytest.mark.parametrize("relative", RELATIVES, ids=[r.model_type for r in RELATIVES])
FIRST = {relative.model_type: next(iter(relative.tasks)) for relative in RELATIVES}


def case_of(relative, task=None):
    return CASES[relative.tasks[task or FIRST[relative.model_type]]]


def outputs_of(model, inputs, **kwargs):
    """Its tensors by name, and those of its tuples."""
    found = {}
    for name, value in model(**inputs, **kwargs).items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif name in ("hidden_states", "attentions", "encoder_hidden_states", "decoder_hidden_states"):
            found |= {f"{name}.{i}": x for i, x in enumerate(value)}
    return found


def assert_same(actual, expected, mask=None):
    """Where both have an output, at the tokens that are no padding."""
    assert set(expected) <= set(actual)
    for name, x in expected.items():
        y = actual[name]
        if mask is not None and x.shape[:2] == mask.shape:
            x, y = x[mask.bool()], y[mask.bool()]
        torch.testing.assert_close(y, x, atol=1e-10, rtol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


PRESERVING = {
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "moa-moe": {"attention_type": "moa", "ffn_type": "moe", "num_ffn_experts": 2},
    "nested": {"nested_budgets": [1, 0.5]},
}


@each_case
def test_function_is_preserved(case):
    assert_preserved(case, {})


@pytest.mark.parametrize("fields", PRESERVING.values(), ids=PRESERVING)
@each_relative
def test_function_is_preserved_by_mechanisms(relative, fields):
    assert_preserved(case_of(relative, "text-classification"), fields)


def assert_preserved(case, fields):
    source = case.build().double()
    model = upcycle(source, **fields)
    assert type(model).__name__.startswith(f"Moa{case.relative.family.prefix}")
    inputs = case.inputs(source.config.pad_token_id)
    asked = {"output_hidden_states": True}
    mask = None if case.task == "multiple-choice" else inputs["attention_mask"]
    assert_same(outputs_of(model, inputs, **asked), outputs_of(source, inputs, **asked), mask)


@each_case
def test_loss_and_gradients_are_the_sources(case):
    source = case.without_dropout().double().train()
    model = upcycle(source).train()
    inputs = case.inputs(source.config.pad_token_id) | case.labels()
    if case.task == "text2text-generation":
        del inputs["decoder_input_ids"]
    losses = []
    for each in (source, model):
        output = each(**inputs)
        if not case.labels():
            is_counted = inputs.get("decoder_input_ids", inputs["attention_mask"]) > 0
            output.loss = output[0][is_counted].square().mean()
        elif each is source and case.task == "replaced-token-detection":  # ELECTRA's own is float32
            is_real = inputs["attention_mask"].bool()
            output.loss = torch.nn.functional.binary_cross_entropy_with_logits(
                output.logits[is_real], inputs["labels"][is_real].double()
            )
        loss = output.loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, atol=1e-11, rtol=1e-11)
    compared = set()  # by identity: tied ones have a name each
    for name, parameter in source.named_parameters():
        own = model.get_parameter(case.relative._renamed(name))
        compared.add(id(own))
        assert (parameter.grad is None) == (own.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                own.grad, parameter.grad, atol=1e-10, rtol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert compared == set(map(id, model.parameters()))


@each_relative
def test_embeddings_instead_of_tokens(relative):
    """RoBERTa and MPNet count them all, since nobody knows which are padding."""
    case = case_of(relative)
    source = case.build().double()
    model = upcycle(source, "mae")
    inputs = case.inputs(source.config.pad_token_id)
    del inputs["attention_mask"]
    inputs["inputs_embeds"] = source.get_input_embeddings()(inputs.pop("input_ids"))
    assert_same(outputs_of(model, inputs), outputs_of(source, inputs))


@each_relative
def test_classifier_of_one_token_computes_its_last_layer_only(relative):
    if relative.family.model_type != "bert":
        pytest.skip("T5's classifiers read the decoder")
    case = case_of(relative, "text-classification")
    source = case.build().double()
    inputs = case.inputs(source.config.pad_token_id)
    for fields in ({}, {"nested_budgets": [1, 0.5]}, {"cct_budgets": [1, 0.5]}):
        model = upcycle(source, **fields)
        budgets = model.config.listed_budgets or [None]
        for budget in budgets:
            whole = model(**inputs, budget=budget, output_hidden_states=True).logits
            torch.testing.assert_close(model(**inputs, budget=budget).logits, whole, atol=1e-12, rtol=0)


@each_relative
def test_importance_sorts_and_extracts(relative):
    case = case_of(relative, "text-classification")
    source = case.build().double()
    inputs = case.inputs(source.config.pad_token_id) | case.labels()
    scores = hf_moa.importance(source, [inputs])
    model = upcycle(source, importance=scores, nested_budgets=[1, 0.5])
    expected = source(**inputs).logits
    torch.testing.assert_close(model(**inputs, budget=1).logits, expected, atol=1e-10, rtol=1e-10)
    for budget in (1, 0.5):
        small = model.extract(budget)
        logits = model(**inputs, budget=budget).logits
        torch.testing.assert_close(small(**inputs).logits, logits, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_is_taken_from_a_folder(name, tmp_path):
    published = PUBLISHED[name]
    plain = getattr(transformers, published["architectures"][0])
    source = randomize(plain(plain.config_class(**published))).eval()
    if not published.get("tie_word_embeddings", True):  # a head of its own, as the file has it
        source.lm_head.weight = torch.nn.Parameter(torch.randn_like(source.lm_head.weight))
    source.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(json.dumps(published))
    source = plain.from_pretrained(tmp_path / "source")
    model = upcycle(tmp_path / "source", "mae", nested_budgets=[1, 0.5])
    model.save_pretrained(tmp_path / "gated")
    loaded = type(model).from_pretrained(tmp_path / "gated")
    ids = torch.arange(5, 17).view(2, 6)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if "d_model" in published else {})
    expected = source(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.config.id2label == source.config.id2label


@pytest.mark.parametrize("name", ["MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_generation_is_the_sources(name):
    # with more layers in the decoder transformers' UMT5 makes a cache that is too short
    source = CASES[name].build(num_decoder_layers=2).double()
    inputs = CASES[name].inputs(0)
    del inputs["decoder_input_ids"]
    for kwargs in ({}, {"num_beams": 3}, {"use_cache": False}):
        expected = source.generate(**inputs, max_new_tokens=8, **kwargs)
        for fields in ({"attention_type": "mae"}, {"cct_budgets": [1, 0.5]}):
            model = upcycle(source, **fields)
            assert torch.equal(model.generate(**inputs, max_new_tokens=8, **kwargs), expected)


def test_cached_positions_of_a_decoder_are_robertas():
    config = transformers.RobertaConfig(**SIZES["roberta"], is_decoder=True)
    source = randomize(transformers.RobertaModel(config)).double().eval()
    model = upcycle(source, "mae", mae_gate_window=1)
    ids = torch.randint(5, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    caches = [None, None]
    for part in ids.split([4, 3, 1, 1], dim=1):
        outputs = []
        for i, each in enumerate((source, model)):
            output = each(part, past_key_values=caches[i], use_cache=True)
            caches[i] = output.past_key_values
            outputs.append(output.last_hidden_state)
        torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("RobertaForMaskedLM", {"hidden_act": "relu"}, "RobertaConfig.hidden_act must be 'gelu'"),
        ("MPNetModel", {"pad_token_id": 0}, "MPNetConfig.pad_token_id must be 1"),
        (
            "MPNetModel",
            {"relative_attention_num_buckets": 64},
            "MPNetConfig.relative_attention_num_buckets must be 32",
        ),
        ("ElectraForMultipleChoice", {"summary_type": "last"}, "summary_type must be 'first'"),
        (
            "ElectraForMultipleChoice",
            {"summary_activation": "relu"},
            "summary_activation must be 'gelu'",
        ),
    ],
)
def test_what_a_family_cannot_express_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        upcycle(CASES[name].build(**fields), "mae")


def test_other_models_are_refused_with_what_is_taken(tmp_path):
    config = transformers.RobertaConfig(**SIZES["roberta"], is_decoder=True)
    decoder = transformers.RobertaForCausalLM(config)
    with pytest.raises(ValueError, match=r"'RobertaForCausalLM'; .* RobertaForMaskedLM.*`base_model`"):
        upcycle(decoder, "mae")
    albert = transformers.AlbertModel(transformers.AlbertConfig(**TINY, embedding_size=16))
    with pytest.raises(ValueError, match=r"'bert'.*'electra'.*'umt5' \(got 'albert'\).*docs/upcycle.md"):
        upcycle(albert, "mae")
    CASES["RobertaForMaskedLM"].build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"task must be one of .* \(got 'replaced-token-detection'\)"):
        upcycle(tmp_path, task="replaced-token-detection")


def test_labels_of_a_path(tmp_path):
    CASES["RobertaForSequenceClassification"].build().save_pretrained(tmp_path)
    load: dict[str, Any] = {"num_labels": 5}
    with pytest.raises(ValueError, match=r"num_labels must be the checkpoint's, .* \(got .*5"):
        upcycle(tmp_path, "mae", load_kwargs=load)
    model = upcycle(tmp_path, "mae", load_kwargs=load | {"ignore_mismatched_sizes": True})
    assert model.classifier.out_features == model.config.num_labels == 5
    with pytest.raises(ValueError, match=r"num_labels must be left out for RobertaForMaskedLM"):
        upcycle(tmp_path, "mae", task="fill-mask", load_kwargs=load)
    with pytest.raises(ValueError, match=r"num_labels must be an integer of at least 1 \(got 0\)"):
        upcycle(tmp_path, "mae", load_kwargs={"num_labels": 0})
    with pytest.raises(ValueError, match=r"id2label must hold each name once \(got \['a', 'a'\]\)"):
        upcycle(tmp_path, "mae", load_kwargs={"id2label": {0: "a", 1: "a"}})


def test_configuration_holds_the_familys_fields_only():
    source = CASES["DistilBertForSequenceClassification"].build(id2label={0: "a", 1: "b", 2: "c"})
    config = upcycle(source, "mae").config
    assert not {"dim", "n_heads", "seq_classif_dropout", "activation"} & set(config.to_dict())
    assert config.id2label == {0: "a", 1: "b", 2: "c"}
    assert (config.classifier_dropout, config.hidden_dropout_prob) == (0.2, 0.1)
    plain = hf_moa.MoaBertConfig().to_diff_dict()
    own = ("embedding_size", "positions_skip_padding", "relative_attention_num_buckets", "pooler_act")
    assert not set(own) & set(plain), "of a BERT's checkpoint nothing changes"


def test_attention_is_not_left_at_what_a_source_cannot_choose():
    source = CASES["MPNetModel"].build()
    assert source.config._attn_implementation == "eager"
    assert upcycle(source, "mae").config._attn_implementation == "sdpa"


def test_sequences_of_all_positions_are_taken_and_longer_ones_refused():
    source = CASES["RobertaModel"].build()
    model = upcycle(source, "mae")
    ids = torch.full((1, 38), 7)
    torch.testing.assert_close(model(ids)[0], source(ids)[0], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"at most 38 tokens .*max_position_embeddings=40 .*got 39"):
        model(torch.full((1, 39), 7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions_skip_padding": 1}, "positions_skip_padding must be True or False"),
        ({"positions_skip_padding": True, "pad_token_id": None}, "pad_token_id must be an integer"),
        (
            {"positions_skip_padding": True, "pad_token_id": 39},
            "max_position_embeddings must be at least pad_token_id",
        ),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be an integer"),
        (
            {"relative_attention_num_buckets": 8, "is_decoder": True},
            "relative_attention_num_buckets must be None with is_decoder=True",
        ),
        ({"embedding_size": 0}, "embedding_size must be an integer of at least 1"),
        ({"type_vocab_size": -1}, "type_vocab_size must be an integer of at least 0"),
        ({"pooler_act": "step"}, "pooler_act must be one of"),
    ],
    ids=str,
)
def test_rules_of_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        hf_moa.MoaBertConfig(**TINY | fields)


def tokenizers():
    """A tokenizer of each kind, whose vocabulary is made of characters."""
    characters = [chr(code) for code in range(33, 127)]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = {piece: i for i, piece in enumerate([*special, "Ġ", *characters])}
    scores = [(name, 0.0) for name in special[:4]] + [(c, -2.0) for c in ["▁", *characters]]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    of_words = {word: i for i, word in enumerate(words)}
    return {
        "RobertaForMaskedLM": transformers.RobertaTokenizer(vocab=pieces, merges=[]),
        "XLMRobertaForMaskedLM": transformers.XLMRobertaTokenizer(vocab=scores),
        "DistilBertForMaskedLM": transformers.DistilBertTokenizer(vocab=of_words),
        "ElectraForPreTraining": transformers.BertTokenizer(vocab=of_words),
        "MT5ForConditionalGeneration": transformers.ByT5Tokenizer(),
    }


@pytest.mark.parametrize("name", tokenizers())
def test_command_leaves_the_tokenizer_as_it_is(name, tmp_path):
    CASES[name].build(vocab_size=400).save_pretrained(tmp_path / "source")
    tokenizers()[name].save_pretrained(tmp_path / "source")
    folder = str(tmp_path / "gated")
    assert main(["upcycle", str(tmp_path / "source"), folder, "--attention-type", "mae"]) == 0
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "source")
    after = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a head may be dropped.", "Which?"]
    assert type(after) is type(before)
    assert dict(after(texts, texts, padding=True)) == dict(before(texts, texts, padding=True))
    assert after.pad_token_id == before.pad_token_id


def test_command_takes_labels(tmp_path):
    CASES["ElectraForPreTraining"].build().save_pretrained(tmp_path / "source")
    common = ["upcycle", str(tmp_path / "source")]
    task = ["--task", "text-classification"]
    names = ["--id2label", "negative", "neutral", "positive"]
    assert main([*common, str(tmp_path / "named"), *task, *names]) == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "named")
    assert config.id2label == {0: "negative", 1: "neutral", 2: "positive"}
    assert config.label2id == {"negative": 0, "neutral": 1, "positive": 2}
    assert main([*common, str(tmp_path / "counted"), *task, "--num-labels", "5"]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "counted").num_labels == 5
    assert main([*common, str(tmp_path / "none"), "--num-labels", "5"]) == 2
