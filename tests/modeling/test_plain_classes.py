"""transformers' own classes, given a gated configuration or checkpoint."""

import pytest
import torch
import transformers
from families import CASE, LANGUAGE_MODELS, each_class, main_output
from transformers import AutoConfig, AutoModel, PreTrainedModel

import hf_moa

_FIELDS = {
    "mae": {"attention_type": "mae"},
    "moe": {"ffn_type": "moe"},
    "cct": {"cct_budgets": [1, 0.5]},
}
each_kind = pytest.mark.parametrize("kind", _FIELDS)
each_loaded = pytest.mark.parametrize(
    "case", [*LANGUAGE_MODELS, CASE["T5EncoderModel"]], ids=lambda case: case.plain_name
)


@each_class
@each_kind
def test_plain_class_refuses_a_gated_configuration(case, kind):
    with pytest.raises(ValueError, match=rf"{case.plain.__name__} must have .* without gates.*{kind}"):
        case.plain(case.config(**_FIELDS[kind]))
    with pytest.raises(ValueError, match="without gates"):
        case.plain._from_config(case.config(**_FIELDS[kind]))


@each_loaded
@pytest.mark.parametrize("gives_config", [False, True], ids=["path", "config"])
def test_plain_class_loads_a_gated_checkpoint_as_what_it_is(case, gives_config, tmp_path):
    """As sentence-transformers does with `T5EncoderModel`, with the configuration that it has read, and
    scripts with the class that they name."""
    model = case.build(attention_type="mae", cct_budgets=[1, 0.5])
    model.save_pretrained(tmp_path)
    given = {"config": AutoConfig.from_pretrained(tmp_path)} if gives_config else {}
    loaded = case.plain.from_pretrained(tmp_path, **given)
    assert type(loaded) is case.gated
    inputs = case.inputs()
    assert torch.equal(main_output(loaded(**inputs)), main_output(model(**inputs)))


@each_loaded
def test_plain_configuration_of_a_gated_directory_is_refused(case, tmp_path):
    case.config(attention_type="mae").save_pretrained(tmp_path)
    config = case.family.plain_config_class.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without gates"):
        case.plain(config)


@each_loaded
def test_plain_checkpoints_load_as_before(case, tmp_path):
    """Also a gated family's without any mechanism, which is the plain model."""
    plain = case.build_plain()
    plain.save_pretrained(tmp_path / "plain")
    assert type(case.plain.from_pretrained(tmp_path / "plain")) is case.plain
    gated = case.gated(case.config())
    gated.save_pretrained(tmp_path / "gated")
    assert type(case.plain.from_pretrained(tmp_path / "gated")) is case.plain


def test_class_without_a_gated_one_refuses_a_gated_checkpoint(tmp_path):
    case = CASE["BertModel"]
    case.build(attention_type="mae").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertLMHeadModel must have .* without gates"):
        transformers.BertLMHeadModel.from_pretrained(tmp_path)


def test_class_of_a_user_may_hold_a_gated_model():
    class Tagger(PreTrainedModel):
        config_class = hf_moa.MoaBertConfig

        def __init__(self, config):
            super().__init__(config)
            self.bert = AutoModel.from_config(config)
            self.post_init()

    config = CASE["BertModel"].config(attention_type="mae")
    assert type(Tagger(config).bert) is hf_moa.MoaBertModel
