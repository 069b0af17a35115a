"""The kernels of CCT's form for GPUs: translated by Triton's compiler, and run where there is a GPU."""

import pytest
import torch
from families import CASE
from test_open_tokens import WIDER
from triton_tools import bytes_spilled, translate

from hf_moa.modeling.cct import fast_control_gpu, open_tokens_gpu

JITFunction = pytest.importorskip("triton").JITFunction

PARTS = ["", "_1", "_2", "_3"]
NO_FOURTH = {"weight_3": None, "bias_3": None, "out_3": None, "size_3": 0, "stride_3": 0}
NO_MASK = {
    **dict.fromkeys(("mask", "visible")),
    **dict.fromkeys(("mask_batch", "mask_query", "mask_key", "visible_batch", "visible_query"), 0),
}
NO_BIAS = {"bias": None, **dict.fromkeys(("bias_batch", "bias_head", "bias_query", "bias_key"), 0)}
UP = {"PARTS": 4, "LISTS": 0x3210, "AT_TOKENS": True, "ACTIVATION": "gelu"}
KEYS = {"PARTS": 3, "LISTS": 0x110, "AT_TOKENS": False, "ACTIVATION": "", **NO_FOURTH}


ALL = vars(fast_control_gpu) | vars(open_tokens_gpu)


def control_networks():
    """Of BERT-base's and GPT-2's size, with the default width."""
    for number in (1, 4096):
        yield "_control", fast_control_gpu._control_tiles(number, 768, 128)


def products(number):
    """Of BERT-base's and GPT-2's matrices, whose strides differ."""
    tiles = open_tokens_gpu._tiles(number, 768, 768).constants()
    for stride in ("stride_in", "stride_out"):
        yield "_project", tiles | UP | {stride: 1}
        yield "_project", tiles | KEYS | {stride: 1}
        yield "_combine", tiles | {"PARTS": 4, stride: 1}
        yield "_combine", tiles | {"PARTS": 1, stride: 1}


def attention(head_dim):
    size = {"HEAD_DIM": head_dim, "QUERIES": open_tokens_gpu._QUERIES, "groups": 1}
    size |= open_tokens_gpu._attention_tiles(head_dim)
    yield "_attend", size | NO_MASK | NO_BIAS | {"CAUSAL": False}
    yield "_attend", size | NO_MASK | NO_BIAS | {"CAUSAL": True}
    yield "_attend", size | NO_BIAS | {"CAUSAL": False, "mask_key": 1}
    yield "_attend", size | {"CAUSAL": False, "mask_key": 1, "bias_key": 1}


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
def test_kernels_compile_for_gpus(generation, monkeypatch, tmp_path):
    """For the tensor cores, with loads ahead of the products, within registers, and within the shared
    memory that a GPU of any of the last generations has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    halves = [
        "x",
        "query",
        "key",
        "value",
        "gates",
        *("out_weight", "out_bias", "logits"),
        *(n + p for n in ("weight", "bias", "out") for p in PARTS),
    ]
    numbers = ["numbers", "patterns", "by_pattern", "visible"]
    numbers += [f"{of}{name}" for of in ("", "query_", "key_") for name in ("order", "rank")]
    pointers = dict.fromkeys(halves, "bf16") | dict.fromkeys(numbers, "i32") | {"mask": "u8"}
    undivided = ["num_rows", "num_gates", "num_tiles", "num_queries", "num_keys", "heads"]
    order = {"PARTS": 4, "BLOCK": open_tokens_gpu.BLOCK, "num_warps": 4}
    settings = [
        *control_networks(),
        ("_find_patterns", order),
        ("_put_in_order", order | {"CHUNK": open_tokens_gpu._CHUNK}),
        ("_put_in_order", order | {"CHUNK": open_tokens_gpu._CHUNK, "numbers": None, "num_tiles": 1}),
        *products(8),
        *products(64),
        *products(1024),
        *products(4096),
        *attention(64),
        *attention(128),
    ]
    kernels = {n: each for n, each in ALL.items() if isinstance(each, JITFunction)}
    assert set(kernels) == {"_place_of", "_bits_of", "_at_places", "_activated"} | {
        name for name, _ in settings
    }
    for name, constants in settings:
        compiled = translate(kernels[name], pointers, generation, undivided=undivided, **constants)
        about = name, constants
        if constants is not order and "CHUNK" not in constants:
            assert "mma" in compiled.asm["ptx"], about
            assert "cp.async" in compiled.asm["ptx"], about
        assert compiled.metadata.shared <= 99 * 1024, about
        assert bytes_spilled(compiled, tmp_path) == 0, about


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention_type", ["mha", "mae"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_on_a_gpu(name, norms, attention_type, compiled, dtype):
    """As close to float64 as the dense form, of the same gates."""
    case, inputs = CASE[name], {}
    for key, x in case.inputs().items():
        inputs[key] = x.cuda()
    if case.family.name != "bert":
        inputs["use_cache"] = False
    decided = {}

    def decide(network, x):
        """What is drawn once for each network."""
        if network.name not in decided:
            decided[network.name] = torch.rand(*x.shape[:-1], network.num_gates, device=x.device) < 0.5
        return decided[network.name].to(x.dtype)

    found = []
    for execution, precision in (("dense", torch.float64), ("dense", dtype), ("sparse", dtype)):
        fields = {"attention_type": attention_type, "cct_budgets": [1, 0.5], "cct_sublayer_norm": norms}
        model = case.build(**WIDER[case.family.name], **fields, cct_execution=execution)
        model = model.to("cuda", precision)
        for each, module in model.named_modules():
            if getattr(module, "gate_kind", None) == "cct":
                module.name, module.forced = each, decide
        torch.compiler.reset()
        output = (torch.compile(model, mode="reduce-overhead") if compiled else model)(**inputs)[0]
        found.append(output.double())
    exact, plain, fast = found
    error, limit = (fast - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * limit + 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_of_a_model_takes_other_gates():
    """Captured once, replayed with other inputs, bit for bit what is computed without a graph."""
    case = CASE["BertModel"]
    model = case.build(
        **WIDER["bert"], cct_budgets=[1, 0.5], cct_sublayer_norm=False, cct_execution="sparse"
    ).to("cuda", torch.bfloat16)
    ids = torch.randint(2, 60, (3, 16), device="cuda")
    mask = torch.ones(3, 16, dtype=torch.bool, device="cuda")
    model(ids, attention_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(ids, attention_mask=mask)[0]
    for _ in range(3):
        ids.random_(2, 60)
        graph.replay()
        assert torch.equal(output, model(ids, attention_mask=mask)[0])
