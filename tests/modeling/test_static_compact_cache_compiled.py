"""The kernels of CCT's static cache: translated by Triton's compiler, and run where there is a GPU."""

from functools import partial

import pytest
import torch
from families import CASE
from test_open_tokens import WIDER, without_kernels
from torch._subclasses import FakeTensorMode
from transformers import EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer
from triton_tools import bytes_spilled, translate

from hf_moa.modeling.cct import open_operators, paged_keys_gpu
from hf_moa.modeling.cct.static_compact_cache import (
    PAGE,
    CompactStaticCache,
    OpenPages,
    StaticCompactLayer,
)

JITFunction = pytest.importorskip("triton").JITFunction

NO_MASK = {"mask": None, "mask_batch": 0}
NO_BIAS = {"bias": None, "bias_batch": 0, "bias_head": 0}
NO_KEY = dict.fromkeys(("key", "value", "key_rank"))
IN_PARTS = dict.fromkeys(("largest_of", "total_of", "closed_of"))
CHANGED = ("keys", "values", "positions", "taken", "table", "rank")


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
def test_kernels_compile_for_gpus(generation, monkeypatch, tmp_path):
    """Within registers, and with loads of 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    halves = ["keys", "values", "key", "value", "query", "bias", "out"]
    numbers = ["positions", "taken", "table", "rank", "query_rank", "key_rank", "closed_of"]
    floats = ["largest_of", "total_of", "contexts"]
    pointers = dict.fromkeys(halves, "bf16") | dict.fromkeys(numbers, "i32")
    pointers |= dict.fromkeys(floats, "fp32") | {"length": "i64", "mask": "u8"}
    undivided = ["num_tokens", "max_length", "num_pages", "last_page", "heads", "groups", "scaling"]
    settings = [("_take_pages", {"PAGE": PAGE, "BLOCK": 128})]
    for head_dim in (64, 128):
        sizes = {"PAGE": PAGE, "HEAD_DIM": head_dim}
        step = sizes | {"KEYS": paged_keys_gpu._keys(head_dim), "PLACES": paged_keys_gpu._PLACES}
        step |= {"groups": 1}
        settings += [
            ("_put_keys", sizes | {"ROWS": paged_keys_gpu._ROWS}),
            ("_attend_step", step | NO_BIAS | IN_PARTS),
            ("_attend_step", step | NO_BIAS | IN_PARTS | {"heads": 1}),
            ("_attend_step", step | NO_BIAS),
            ("_attend_step", step),
            ("_attend_step", step | NO_BIAS | NO_MASK | NO_KEY | IN_PARTS),
            ("_join_parts", {"HEAD_DIM": head_dim, "PARTS": 8}),
        ]
    kernels = {name for name, each in vars(paged_keys_gpu).items() if isinstance(each, JITFunction)}
    assert kernels == {"_with_closed"} | {name for name, _ in settings}
    for name, constants in settings:
        kernel = vars(paged_keys_gpu)[name]
        own = pointers | (
            {"out": "fp32"} if name == "_attend_step" and "closed_of" not in constants else {}
        )
        compiled = translate(kernel, own, generation, undivided=undivided, num_warps=4, **constants)
        about = name, constants
        if "HEAD_DIM" in constants and name != "_join_parts":
            assert "ld.global.v4.b32" in compiled.asm["ptx"], about
        assert bytes_spilled(compiled, tmp_path) == 0, about


def test_operators_have_the_kernels_schemas():
    for name, function in paged_keys_gpu.PAGE_OPERATORS.items():
        changed = CHANGED
        schema = torch.library.infer_schema(function, mutates_args=changed)
        ours = open_operators._OPEN_SCHEMAS[name]
        arguments = [torch._C.parse_schema(f"f{each}").arguments for each in (schema, ours)]
        for said, made in zip(*arguments, strict=True):
            assert (said.name, str(said.type)) == (made.name, str(made.type))
            assert (made.alias_info is not None) is (said.name in changed)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [100, 8192])
def test_what_runs_around_the_kernels_waits_for_no_number(length, dtype, monkeypatch):
    """On fake tensors of a GPU, which raise where a number is asked for."""
    fakes = without_kernels(monkeypatch, paged_keys_gpu)
    layer = StaticCompactLayer.of(StaticLayer(length), OpenPages())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        states = torch.empty(3, 2, 0, 64, dtype=dtype)
        layer.lazy_initialization(states, states)
        rank, rows = torch.empty(4, dtype=torch.int32), torch.empty(3, 128, dtype=dtype)
        mask = torch.empty(3, 1, 1, length, dtype=torch.bool)
        bias = torch.empty(1, 2, 1, length, dtype=dtype)
        paged_keys_gpu.fill_pages(*layer._held, rows, rows, rank)
        for new in ((rows, rows, rank), (None, None, None)):
            for given in ((mask, None), (mask, bias), (None, None)):
                arguments = (*layer._held, rows, rank, *new, *given, 0.1)
                found = paged_keys_gpu.attend_pages(*arguments)
                said = fakes["attend_pages"](*arguments)
                assert (found.shape, found.dtype) == (said.shape, said.dtype) == ((3, 128), dtype)


@pytest.mark.parametrize(
    ("programs", "length", "expected"),
    [
        (12, 256, 1),
        (12, 511, 1),
        (12, 512, 2),
        (12, 8192, 16),
        (96, 8192, 2),
        (200, 8192, 1),
        (300, 99999, 1),
    ],
)
def test_parts(programs, length, expected):
    assert paged_keys_gpu._parts(programs, length, 264) == expected


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("open_keys", [None, 0.1])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention_type", ["mha", "mae"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_generation_on_a_gpu(name, attention_type, compiled, open_keys, dtype):
    """As close to float64 as the dense form, of the same tokens and gates."""
    case = CASE[name]
    inputs = {key: x.cuda() for key, x in case.inputs().items()}
    tokens = torch.randint(5, 60, (len(inputs["input_ids"]), 30), device="cuda")
    first = torch.zeros((), dtype=torch.long, device="cuda")  # position of a call's first token

    def decide(network, x):
        place = first + torch.arange(x.shape[1], device=x.device)
        is_open = ((place + torch.arange(len(x), device=x.device).unsqueeze(1)) % 3 > 0).unsqueeze(-1)
        return is_open.to(x.dtype).expand(-1, -1, network.num_gates)

    found = []
    for execution, precision in (("dense", torch.float64), ("dense", dtype), ("sparse", dtype)):
        fields = {"attention_type": attention_type, "cct_budgets": [1, 0.5], "cct_sublayer_norm": False}
        model = case.build(**WIDER[case.family.name], **fields, cct_execution=execution)
        model = model.to("cuda", precision)
        model.set_cct_gates(decide)
        first.zero_()
        make = StaticCache if open_keys is None else partial(CompactStaticCache, open_keys=open_keys)
        cache, key, given = make(model.config, 40), "input_ids", {}
        if case.family.name == "t5":
            own, key, given = cache, "decoder_input_ids", {"attention_mask": inputs["attention_mask"]}
            cache = EncoderDecoderCache(own, make(model.config, inputs["input_ids"].shape[1]))
            given["encoder_outputs"] = model.get_encoder()(inputs["input_ids"], inputs["attention_mask"])
        else:
            own = cache
        torch.compiler.reset()
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
        logits = [model(**{key: tokens[:, :8]}, **given, past_key_values=cache).logits.double()]
        for i in range(8, 30):
            first.fill_(i)
            if open_keys is not None:
                own.reserve()
            output = step(**{key: tokens[:, i : i + 1]}, **given, past_key_values=cache)
            logits.append(output.logits.double())
        kinds = {type(layer) for layer in own.layers}
        assert (kinds == {StaticCompactLayer}) is (execution == "sparse")
        found.append(torch.cat(logits, dim=1))
    exact, plain, fast = found
    error, limit = (fast - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * limit + 4 * torch.finfo(dtype).eps * exact.abs().max()
