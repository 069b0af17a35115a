"""On a GPU every model computes what it computes on a CPU, and waits for no number on the way."""

import pytest
import torch
from common import alternating_device_map
from families import each_class, each_family, each_mechanism, each_variant, main_output
from test_no_waiting import WIDTH, masks_made_without_looking  # noqa: F401
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_moa.training.step_statistics import StepStatistics, distinct_budgets

pytestmark = pytest.mark.gpu

# noise and load losses draw or need what was drawn; dropout draws
FIXED = {"router_type": "topk", "router_load_loss_coef": 0.0}
HALF = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}


@pytest.fixture(autouse=True)
def float64_stays_float64(request, monkeypatch):
    """T5 norms in float32, whatever it computes in: in float64 little else would be compared."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    parameters = getattr(request.node, "callspec", None)
    if parameters is not None and parameters.params.get("dtype") == torch.float64:
        monkeypatch.setattr(T5LayerNorm, "forward", norm)


def on_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def assert_close(actual, expected, dtype, about=""):
    limit = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual.detach().cpu().double(),
        expected.double(),
        atol=limit,
        rtol=0,
        msg=lambda m: f"{about}: {m}",
    )


def pair(case, dtype, **fields):
    """The same model in float64 on the CPU, and in `dtype` on the GPU."""
    return case.build(noise=0.1, **fields).double(), case.build(noise=0.1, **fields).to("cuda", dtype)


@each_class
@each_mechanism
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_class_computes_the_same(case, fields, dtype):
    reference, model = pair(case, dtype, **fields)
    inputs = case.inputs() | case.labels()
    expected, actual = reference(**inputs), model(**on_gpu(inputs))
    assert_close(main_output(actual), main_output(expected), dtype)
    if case.labels():
        assert_close(actual.loss, expected.loss, dtype)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("by_expert", [False, True], ids=["", "by-expert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_variant
def test_every_variant_has_the_same_gradients(case, fields, dtype, by_expert, training):
    if by_expert:
        if fields.get("attention_type") != "moa" or dtype == torch.float64:
            pytest.skip("no kernel is at work")
        fields = fields | {"moa_execution": "sparse"}
    fields = fields | FIXED | case.family.no_dropout
    if training and "cct_budgets" in fields:
        fields = fields | {"cct_budgets": [0.5]}
    inputs = case.inputs() | case.labels()
    found = []
    for model in pair(case, dtype, **fields):
        model.train(training).set_experts_implementation(
            "grouped_mm" if dtype != torch.float64 else "eager"
        )
        loss = model(**{name: x.to(model.device) for name, x in inputs.items()}).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (expected_loss, expected), (actual_loss, actual) = found
    assert_close(actual_loss, expected_loss, dtype)
    for name, gradient in expected.items():
        assert (gradient is None) == (actual[name] is None), name
        if gradient is not None:
            assert_close(actual[name], gradient, dtype, name)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_variant
def test_half_precision_is_near(case, fields, dtype):
    """Weights in half precision, and autocast; routers and gates may choose others for a few tokens."""
    fields = fields | FIXED
    reference, model = pair(case, dtype, **fields)
    inputs = case.inputs() | case.labels()
    expected = reference(**inputs)
    loss = model(**on_gpu(inputs)).loss
    assert abs(loss.item() - expected.loss.item()) < 0.3 * max(1.0, expected.loss.item())
    trained = case.build(noise=0.1, **fields | case.family.no_dropout).cuda().train()
    with torch.autocast("cuda", dtype):
        output = trained(**on_gpu(inputs))
    output.loss.backward()
    for name, parameter in trained.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def in_half_precision(case, fields):
    """A model whose experts grouped products take, and a batch."""
    model = case.build(**WIDTH[case.family.name], **fields).to("cuda", torch.bfloat16)
    return model, on_gpu(case.inputs())


@pytest.mark.usefixtures("masks_made_without_looking")
@each_variant
def test_waits_for_no_number(case, fields):
    model, inputs = in_half_precision(case, fields)
    labels = on_gpu(case.labels())

    def step():
        with torch.no_grad():
            model.eval()(**inputs)
        outputs = model.train()(**inputs, **labels)
        outputs.loss.backward()
        budgets = distinct_budgets(model.config)
        StepStatistics().add_outputs(outputs, part_of_mean=None, budgets=budgets)

    step()  # what is built once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("masks_made_without_looking")
@each_variant
def test_is_captured_as_a_cuda_graph(case, fields):
    model, inputs = in_half_precision(case, fields)
    if case.family.name != "bert":
        inputs["use_cache"] = False
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                expected = model(**inputs).logits
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(**inputs).logits
        captured.zero_()
        graph.replay()
    torch.testing.assert_close(captured, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_variant
def test_sparse_execution_is_the_dense_one(case, fields, dtype, implementation):
    if "cct_budgets" not in fields:
        pytest.skip("nothing is skipped")
    inputs = on_gpu(case.inputs())
    real = ... if case.family.name == "t5" else inputs["attention_mask"].bool()
    dense, sparse = (
        case.build(cct_execution=execution, attn_implementation=implementation, **fields)
        .to("cuda", dtype)(**inputs)
        .logits[real]
        for execution in ("dense", "sparse")
    )
    assert_close(sparse, dense.detach().cpu(), dtype)


@each_variant
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generates_the_same_tokens(case, fields, cache):
    if case.family.name == "bert":
        pytest.skip("it writes no text")
    inputs = case.inputs()
    inputs.pop("decoder_input_ids", None)
    if case.family.name == "gpt2":
        inputs = {name: x.flip(1) for name, x in inputs.items()}  # padding on the left
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    options |= {"cache_implementation": cache, "disable_compile": True}
    reference, model = pair(case, torch.float64, **fields)
    expected = reference.generate(**inputs, **options)
    assert torch.equal(model.generate(**on_gpu(inputs), **options).cpu(), expected)


@each_family
@pytest.mark.parametrize("name", ["mha", "mae-1", "moa", "moe", "cct", "moa-moe-cct"])
def test_compiled_training_step_has_the_same_gradients(case, name):
    """By Inductor, in one graph."""
    torch._dynamo.reset()
    fields = case.family.variants[name] | FIXED | case.family.no_dropout
    if "cct_budgets" in fields:
        fields = fields | {"cct_budgets": [0.5]}
    inputs = on_gpu(case.inputs() | case.labels())
    gradients = []
    for compiled in (False, True):
        model = case.build(noise=0.1, **case.family.one_layer | fields).cuda().train()
        model.set_experts_implementation("grouped_mm")
        step = torch.compile(model, fullgraph=True) if compiled else model
        step(**inputs).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for key, expected in gradients[0].items():
        assert_close(gradients[1][key], expected.cpu(), torch.float32, key)


@each_family
@pytest.mark.parametrize("name", ["mae-1", "moa", "moe", "cct"])
def test_checkpointed_gradients_are_the_same(case, name):
    """With dropout and noise, which have to be drawn again alike."""
    inputs = on_gpu(case.inputs() | case.labels())
    found = []
    for checkpoints in (False, True):
        model = case.build(**case.family.variants[name]).cuda().train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for key, expected in found[0].items():
        assert_close(found[1][key], expected.cpu(), torch.float32, key)


@each_family
@pytest.mark.parametrize("name", ["mae-1", "moa", "moe", "cct", "moa-moe-cct"])
def test_layers_split_between_devices_compute_the_same(case, name, tmp_path):
    """The first block on the GPU, the second on the CPU."""
    model = case.build(**case.family.variants[name])
    expected = model(**case.inputs()).logits
    model.save_pretrained(tmp_path)
    device_map = alternating_device_map(model, 0, "cpu")
    loaded = case.gated.from_pretrained(tmp_path, device_map=device_map)
    assert {p.device.type for p in loaded.parameters()} >= {"cuda"}
    assert_close(loaded(**on_gpu(case.inputs())).logits, expected, torch.float32)
