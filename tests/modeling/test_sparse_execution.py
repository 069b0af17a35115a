"""CCT's sparse execution is the dense one, faster: the same function for every model and cache."""

import itertools

import pytest
import torch
from families import CASE, LANGUAGE_MODELS, each_gated_variant
from peft import LoraConfig, get_peft_model
from torch.func import functional_call, stack_module_state, vmap
from transformers.pytorch_utils import Conv1D

from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.cct.control import ControlNetwork
from hf_moa.modeling.cct.execution import Execution, GatedParts, choose_execution
from hf_moa.modeling.cct.feed_forward import FeedForwardGate
from hf_moa.modeling.cct.skipped_keys import visible_keys
from hf_moa.modeling.cct.token_subset import TokenSubset, in_steps
from hf_moa.modeling.core.linear_slices import input_slice, is_plain, linear_slice
from hf_moa.modeling.feed_forward.layers import gated_dense


def build(case, execution, **fields):
    return case.build(cct_execution=execution, **fields).double()


def budget_of(fields):
    """One at which gates decide."""
    return {"budget": 0.5} if fields.get("cct_full_budget_is_plain") else {}


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@each_gated_variant
def test_sparse_equals_dense(case, fields, padding, implementation):
    inputs = case.inputs_padded(padding)
    outputs, inputs = [], inputs | budget_of(fields)
    for execution in ("dense", "sparse"):
        model = build(case, execution, attn_implementation=implementation, **fields)
        outputs.append(model(**inputs, output_hidden_states=True, output_cct_gates=True))
    dense, sparse = outputs
    fraction = dense.compute_fraction
    assert (fraction < 0.95).any()  # else there is nothing to skip
    real = ... if case.family.name == "t5" or padding == "none" else inputs["attention_mask"].bool()
    torch.testing.assert_close(sparse.logits[real], dense.logits[real], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(sparse.compute_fraction, fraction)


@pytest.mark.covering
@each_gated_variant
def test_longer_padding_changes_nothing(case, fields, monkeypatch):
    """As on an accelerator."""
    if fields.get("cct_full_budget_is_plain"):
        pytest.skip("its gates are those of cct-biased")
    inputs = case.inputs()
    expected = build(case, "dense", **fields)(**inputs).logits
    sizes = []
    monkeypatch.setattr(
        "hf_moa.modeling.cct.token_subset.in_steps", lambda size, device: sizes.append(size) or size + 5
    )
    actual = build(case, "sparse", **fields)(**inputs).logits
    assert sizes
    real = ... if case.family.name == "t5" else inputs["attention_mask"].bool()
    torch.testing.assert_close(actual[real], expected[real], atol=1e-9, rtol=1e-9)


def test_sizes_on_an_accelerator_are_few():
    assert [in_steps(size, torch.device("cpu")) for size in (1, 65)] == [1, 65]
    assert [in_steps(size, torch.device("cuda")) for size in (1, 64, 65)] == [64, 64, 128]


@pytest.mark.parametrize("execution", ["auto", "sparse"])
def test_models_side_by_side_compute_what_each_does(execution, monkeypatch):
    """Under `vmap` no gate can be looked at, so that all is computed."""
    monkeypatch.setattr("hf_moa.modeling.cct.execution._TO_FIND", 0)
    case = CASE["BertModel"]
    models = [case.build(seed=seed, cct_budgets=[1, 0.5], cct_execution=execution) for seed in (0, 1)]
    ids = case.inputs()["input_ids"]
    parameters, buffers = stack_module_state(models)

    def call(parameters, buffers):
        return functional_call(models[0], (parameters, buffers), (ids,)).last_hidden_state

    found = vmap(call)(parameters, buffers)
    for one, model in zip(found, models, strict=True):
        torch.testing.assert_close(one, model(ids).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("more", [0, 5], ids=["", "longer-padding"])
@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "case", [c for c in LANGUAGE_MODELS if c.family.name != "bert"], ids=lambda c: c.family.name
)
def test_generation_is_the_same(case, cache, num_beams, more, monkeypatch):
    monkeypatch.setattr("hf_moa.modeling.cct.token_subset.in_steps", lambda size, device: size + more)
    inputs = case.inputs()
    inputs.pop("decoder_input_ids", None)
    if case.family.name == "gpt2":
        inputs = {k: v.flip(1) for k, v in inputs.items()}  # padding on the left
    results = []
    for execution in ("dense", "sparse"):
        model = build(case, execution, cct_budgets=[1, 0.5])
        results.append(
            model.generate(
                **inputs,
                max_new_tokens=6,
                do_sample=False,
                num_beams=num_beams,
                cache_implementation=cache,
                eos_token_id=None,
            )
        )
    assert torch.equal(*results)


@pytest.mark.covering
@each_gated_variant
def test_gradients_are_the_same(case, fields):
    inputs, gradients = case.inputs(), []
    for execution in ("dense", "sparse"):
        model = build(case, execution, **fields)
        model(**inputs).logits[
            inputs["attention_mask"].bool() if case.family.name != "t5" else ...
        ].sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    dense, sparse = gradients
    for name, gradient in sparse.items():
        torch.testing.assert_close(gradient, dense[name], atol=1e-8, rtol=1e-8, msg=name)
    for name in dense.keys() - sparse.keys():
        assert not dense[name].any(), name


class RandomGates:
    """The same hard gates in each run."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.seen = set()

    def __call__(self, network, x):
        shape = *x.shape[:-1], network.num_gates
        gates = torch.randint(0, 2, shape, generator=self.generator)
        if shape[-1] == 2:
            self.seen |= set(map(tuple, gates.flatten(0, -2).tolist()))
        return gates.to(x.dtype)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    "case", [c for c in LANGUAGE_MODELS if c.family.name != "bert"], ids=lambda c: c.family.name
)
@pytest.mark.parametrize("attention_type", ["mha", "mae", "moa"])
def test_token_by_token(case, attention_type, mode):
    """A step of one sequence has short ways of its own for whatever is open."""
    fields = {"cct_budgets": [1, 0.5], "attention_type": attention_type}
    ids = torch.randint(5, 67, (1, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for execution in ("dense", "sparse"):
        model = build(case, execution, **fields)
        gates = RandomGates()
        model.set_cct_gates(gates)
        found, inputs = {"past_key_values": None}, {}
        if case.family.name == "t5":
            inputs["encoder_outputs"] = model.get_encoder()(ids[:, :5])
        steps = []
        with mode():
            for token in ids.split(1, dim=1):
                name = "decoder_input_ids" if inputs else "input_ids"
                cache = found["past_key_values"]
                found = model(**inputs, **{name: token}, past_key_values=cache, use_cache=True)
                steps.append((found.logits, found.compute_cost))
        results.append([torch.cat(values) for values in zip(*steps, strict=True)])
        assert gates.seen == {(0, 0), (0, 1), (1, 0), (1, 1)}
    torch.testing.assert_close(results[1], results[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("open_parts", list(itertools.product([0.0, 1.0], repeat=4)), ids=str)
@pytest.mark.parametrize("kind", ["conv1d", "linear", "no bias", "gated"])
def test_one_token_takes_open_parts_side_by_side_at_once(open_parts, kind):
    def layer(size_in, size_out):
        if kind == "conv1d":
            return Conv1D(size_out, size_in).double()
        return torch.nn.Linear(size_in, size_out, bias=kind != "no bias").double()

    torch.manual_seed(0)
    gate = FeedForwardGate(
        hidden_size=6,
        gate_hidden_size=4,
        num_splits=4,
        part_cost=1,
        starts_open=True,
        execution="dense",
    ).double()
    up = [layer(6, 8) for _ in range(2 if kind == "gated" else 1)]
    down = layer(8, 6)
    x = torch.randn(1, 1, 6, dtype=torch.float64, requires_grad=True)
    gates = torch.tensor(open_parts, dtype=x.dtype).view(1, 1, 4)
    gate.control.forced = lambda *args: gates

    def activation(hidden, *others):
        calls.append(hidden.shape[-1] // 2)
        return torch.stack([hidden.tanh(), *others]).prod(dim=0)

    results = []
    for execution in ("dense", "sparse"):
        calls = []
        gate.eval().cct_execution = execution
        y, _ = gated_dense(x, None, up=up, activation=activation, down=down, gate=gate)
        weights = [*(m.weight for m in up), down.weight]
        gradients = torch.autograd.grad((x + y).sin().sum(), [x, *weights], materialize_grads=True)
        results.append([y, *gradients])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=1e-12)
    expected = [len(list(run)) for is_open, run in itertools.groupby(open_parts) if is_open]
    assert calls == expected


@pytest.mark.parametrize("open_gates", [0.0, 1.0])
@pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda c: c.family.name)
def test_all_closed_and_all_open(case, open_gates):
    inputs = case.inputs()
    logits = []
    for execution in ("dense", "sparse"):
        model = build(case, execution, cct_budgets=[1, 0.5], cct_sublayer_norm=False)
        model.set_cct_gates(open_gates)
        outputs = model(**inputs)
        assert torch.equal(
            outputs.compute_fraction, torch.full((3,), open_gates).to(outputs.compute_fraction)
        )
        logits.append(outputs.logits)
        assert logits[-1].isfinite().all()
    real = ... if case.family.name == "t5" else inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], atol=1e-9, rtol=1e-9)


@pytest.mark.covering
@each_gated_variant
def test_no_projection_is_asked_for_no_tokens(case, fields):
    """Quantised ones may fail of them."""
    model = build(case, "sparse", **fields)
    model.set_cct_gates(0.0)
    seen = []

    def look(module, args):
        seen.append(args[0].numel())

    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            module.register_forward_pre_hook(look)
    model(**case.inputs(), **budget_of(fields))
    assert seen
    assert all(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_skips_where_enough_is_closed(dtype):
    def choose(wanted, *gates, cost=1_000_000):
        return choose_execution(wanted, *(GatedParts(each, cost) for each in gates))

    closed, all_open = torch.zeros(2, 256, dtype=dtype), torch.ones(2, 256, dtype=dtype)
    almost = all_open.clone()
    almost[0, 0] = 0  # 511 of 512, which bfloat16 has not
    assert choose("auto", closed) is Execution.SUBSET
    assert choose("auto", closed, all_open) is Execution.SUBSET
    assert choose("auto", almost, all_open) is Execution.GATED
    assert choose("auto", all_open, all_open) is Execution.ALL_OPEN
    assert choose("auto", closed.to("meta")) is Execution.GATED
    assert choose("dense", closed) is Execution.GATED
    assert choose("sparse", all_open) is Execution.SUBSET
    # too small a layer
    assert choose("auto", closed, cost=1_000) is Execution.GATED
    assert choose("sparse", closed, cost=1_000) is Execution.SUBSET


@pytest.mark.parametrize("few", [0, 64])
def test_what_is_saved_by_skipping(few, monkeypatch):
    """A part without tokens saves the reading of its matrix, too; one with some, the closed ones."""
    monkeypatch.setattr("hf_moa.modeling.cct.execution._FEW_GATES", few)
    for name, cost in (("_TOKENS_TO_READ", 8), ("_TO_GATHER", 100)):
        monkeypatch.setattr(f"hf_moa.modeling.cct.execution.{name}", cost)
    gates = torch.tensor([[[0, 1, 0, 1], [0, 0, 1, 1]]])  # two tokens, four parts
    parts = GatedParts(gates, 10)
    assert parts.open_tokens() == [0, 1, 1, 2]
    assert parts.most_saved() == 10 * 4 * (8 + 2)
    assert parts.saved([0, 1, 1, 2]) == 10 * ((8 + 2) + 1 + 1 + 0) - 3 * 100
    one_kind = GatedParts(gates[..., 1], 10)
    assert one_kind.open_tokens() == [1]
    assert one_kind.saved([1]) == 10 - 100
    one_token = GatedParts(gates[:, :1], 10)
    assert one_token.saved([0, 1, 0, 1]) == 10 * 2 * (8 + 1)  # nothing to gather


def test_training_is_dense(monkeypatch):
    monkeypatch.setattr("hf_moa.modeling.cct.token_subset.TokenSubset.__init__", None)
    case = LANGUAGE_MODELS[0]
    build(case, "sparse", cct_budgets=[1, 0.5]).train()(**case.inputs())


def test_rows_are_put_back():
    chosen = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    rows = TokenSubset(chosen)
    x = torch.randn(3, 4, 5)
    taken = rows.gather(x)
    torch.testing.assert_close(rows.scatter(taken), x * chosen.unsqueeze(-1), atol=0, rtol=0)
    fill = torch.arange(5.0)
    expected = torch.where(chosen.unsqueeze(-1), x, fill)
    torch.testing.assert_close(rows.scatter(taken, fill), expected, atol=0, rtol=0)
    assert not rows.pad(taken, before=1)[:, 0].any()
    padded = rows.pad(taken)
    assert padded.shape == (3, 3, 5)
    assert not padded[1].any()
    torch.testing.assert_close(padded[2, 0], x[2, 1])
    torch.testing.assert_close(rows.unpad(padded), taken)
    assert len(rows) == 4


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_slices_add_up_to_the_layer(kind):
    module = torch.nn.Linear(6, 12) if kind == "linear" else Conv1D(12, 6)
    torch.nn.init.normal_(module.bias)
    x, y = torch.randn(2, 3, 6), None
    parts = [linear_slice(module, x, m, m + 1, of=4) for m in range(4)]
    torch.testing.assert_close(torch.cat(parts, dim=-1), module(x))
    wrapped = torch.nn.Sequential(module)  # as an adapter would
    assert is_plain(module)
    assert not is_plain(wrapped)
    y = linear_slice(wrapped, x, 1, 3, of=4)
    torch.testing.assert_close(y, torch.cat(parts[1:3], dim=-1))
    total = sum(input_slice(module, part, m, m + 1, of=3) for m, part in enumerate(x.chunk(3, dim=-1)))
    torch.testing.assert_close(total + module.bias, module(x))


def test_masks_that_are_not_simple_are_left_alone():
    def visible(mask, real=None, causal=False, queries=3):
        return visible_keys(mask, real, num_queries=queries, num_keys=3, causal=causal)

    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    assert visible(None) == (True, None)
    assert visible(mask)[1].tolist() == [[True] * 3] * 2
    mask[1, 0, 2, 1] = False  # one query sees less
    assert visible(mask) == (False, None)
    real = torch.ones(2, 3, dtype=torch.bool)
    causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    assert visible(causal, real, causal=True)[1] is real
    assert visible(causal, causal=True) == (True, None)
    assert visible(mask, real, causal=True) == (False, None)
    assert visible(causal[:, :, 1:], real, causal=True, queries=2) == (False, None)
    # a single query may see any keys
    assert visible(mask[:, :, 2:], causal=True, queries=1)[1].tolist() == [[1, 1, 1], [1, 0, 1]]


def test_nan_is_not_skipped():
    case = LANGUAGE_MODELS[0]
    model = build(case, "sparse", cct_budgets=[1, 0.5])
    inputs = case.inputs()
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    expected = model(inputs_embeds=embeds, **inputs).logits
    embeds[1, 2] = float("nan")
    actual = model(inputs_embeds=embeds, **inputs).logits
    assert actual[1, 2].isnan().all()
    real = inputs["attention_mask"].bool()
    real[1] = False
    torch.testing.assert_close(actual[real], expected[real], atol=1e-9, rtol=1e-9)


@pytest.mark.covering
@each_gated_variant
def test_autocast(case, fields):
    inputs = case.inputs()
    logits = []
    for execution in ("dense", "sparse"):
        model = case.build(cct_execution=execution, **fields)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs, output_cct_gates=True)
        logits.append(output.logits)
        assert output.logits.isfinite().all()
    assert logits[0].dtype == logits[1].dtype


def test_soft_gates_of_an_otherwise_frozen_model_are_not_skipped():
    case = LANGUAGE_MODELS[0]
    outputs = []
    for execution in ("dense", "sparse"):
        model = build(case, execution, cct_budgets=[1, 0.5])
        for module in model.modules():
            if isinstance(module, ControlNetwork):
                module.train()
        outputs.append(model(**case.inputs()).logits)
    torch.testing.assert_close(outputs[1], outputs[0], atol=0, rtol=0)


@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda c: c.family.name)
def test_adapters_on_projections(case, lora_bias):
    targets = {"bert": ["query", "output.dense"], "gpt2": ["c_attn", "c_proj"], "t5": ["q", "o"]}
    inputs, logits = case.inputs(), []
    for execution in ("dense", "sparse"):
        torch.manual_seed(0)
        config = LoraConfig(
            target_modules=targets[case.family.name],
            init_lora_weights=False,
            lora_bias=lora_bias and case.family.name != "t5",
        )
        model = get_peft_model(build(case, execution, cct_budgets=[1, 0.5]), config).double().eval()
        logits.append(model(**inputs).logits)
    real = ... if case.family.name == "t5" else inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_execution_is_chosen_at_run_time_in_every_stack(name):
    model = CASE[name].build(cct_budgets=[1, 0.5])
    for execution in ("sparse", "dense", "auto"):
        model.set_cct_execution(execution)
        layers = [m for m in model.modules() if isinstance(m, AttentionFlow)]
        gates = [m for m in model.modules() if isinstance(m, FeedForwardGate)]
        assert len(layers) >= len(gates) > 0
        assert {layer.config.cct_execution for layer in layers} == {execution}
        assert {gate.cct_execution for gate in gates} == {execution}
        assert model.config.cct_execution == execution


def test_execution_that_is_none_is_refused():
    model = CASE["BertForMaskedLM"].build(cct_budgets=[1, 0.5])
    with pytest.raises(ValueError, match=r"'auto', 'sparse', 'dense' \(got 'fast'\)"):
        model.set_cct_execution("fast")
    with pytest.raises(ValueError, match="set_cct_execution needs a model with CCT"):
        CASE["BertForMaskedLM"].build().set_cct_execution("dense")


@pytest.mark.parametrize("execution", ["sparse", "dense"])
def test_mask_of_pairs_must_not_hold_integers(execution):
    model = CASE["BertModel"].build(cct_budgets=[1, 0.5], cct_execution=execution)
    ids = CASE["BertModel"].inputs()["input_ids"]
    mask = torch.ones(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.long).tril()
    with pytest.raises((ValueError, RuntimeError), match=r"att(n|ention)_mask"):
        model(ids, attention_mask=mask)


def test_forced_gates_rule_eval_until_they_are_let_go():
    model = build(LANGUAGE_MODELS[0], "dense", cct_budgets=[1, 0.5])
    inputs = LANGUAGE_MODELS[0].inputs()
    own = model(**inputs).logits
    model.set_cct_gates(0.3)
    shares = [model(**inputs).compute_fraction.mean().item() for _ in range(20)]
    assert 0.1 < sum(shares) / 20 < 0.5
    assert len(set(shares)) > 10
    networks = [module for module in model.modules() if isinstance(module, ControlNetwork)]
    calls = []
    hooks = [each.dense.register_forward_hook(lambda *_: calls.append(1)) for each in networks]
    model(**inputs)
    assert len(calls) == len(networks) > 2  # they are computed all the same
    for hook in hooks:
        hook.remove()
    assert 0 < model.train()(**inputs, output_cct_gates=True).cct_gates[0]["query"].min() < 1
    model.eval().set_cct_gates(None)
    assert torch.equal(model(**inputs).logits, own)
    model.set_cct_gates(0.0)
    nan = torch.full((1, 2, networks[0].dense.in_features), float("nan"), dtype=torch.float64)
    assert networks[0](nan).all()  # the result says it, as without
    for bad in (1.5, "half"):
        with pytest.raises(ValueError, match=r"gates must be a share in \[0, 1\], a function or None"):
            model.set_cct_gates(bad)
    with pytest.raises(ValueError, match="set_cct_gates needs a model with CCT"):
        LANGUAGE_MODELS[0].build().set_cct_gates(0.5)
