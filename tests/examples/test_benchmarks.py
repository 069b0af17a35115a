"""The benchmark script runs, and writes what it says. (Its figures are for those who run it.)"""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from hf_moa import MoaBertConfig, timing
from hf_moa.modeling.bert.layers import MoaBertSelfAttention
from hf_moa.modeling.moa.projections import ExpertOutput

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def benchmarks(fresh_import):
    """Imports a file of the folder."""
    return fresh_import(FOLDER)


def test_compare_reports_ratios_to_the_first(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    calls = []

    def slow():
        calls.append("slow")
        for _ in range(2):  # two more seconds of the clock
            next(clock)

    first, second = timing.compare({"fast": lambda: None, "slow": slow}, turns=5)
    assert (first.name, first.ratio, first.value) == ("fast", 1.0, 1000.0)
    assert (second.name, second.ratio, second.value) == ("slow", 3.0, 3000.0)
    assert len(calls) == 3 + 5


def test_one_turn_is_refused(benchmarks, capsys):
    with pytest.raises(ValueError, match=r"turns must be at least 2 \(got 1\)"):
        timing.compare({"fast": lambda: None}, turns=1)
    with pytest.raises(SystemExit):
        benchmarks("run").main(["moa", "--turns", "1"])
    assert "--turns must be at least 2 (got 1)" in capsys.readouterr().err


def test_what_is_not_compiled_is_refused(benchmarks, capsys):
    with pytest.raises(SystemExit):
        benchmarks("run").main(["moa", "memory", "--compile"])
    assert (
        "--compile goes only with mae, moa, cct, cct_decoding, training (got memory)"
        in capsys.readouterr().err
    )


def test_models_are_compiled(benchmarks, tmp_path, monkeypatch):
    run, cct = benchmarks("run"), benchmarks("cct")
    monkeypatch.setattr(cct, "SIZES", {"cpu": ((32, 2),)})
    monkeypatch.setattr(cct, "BATCHES", {"cpu": (2,)})
    compiled = []
    # to compile takes half a minute
    monkeypatch.setattr(torch, "compile", lambda module, **_: compiled.append(module) or module)
    threads = torch.get_num_threads()
    try:
        run.main(["cct", "--turns", "2", "--compile", "--output_dir", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert [type(module).__name__ for module in compiled] == ["BertModel", "MoaBertModel"]
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["environment"]["mode"] == "torch.compile"
    assert [r["name"] for t in data["tables"] for r in t["results"]] == ["BertModel", "CCT, dense"]


def test_compiled_steps_behind_a_static_cache(benchmarks, monkeypatch):
    decoding = benchmarks("decoding")
    monkeypatch.setattr(decoding, "STATIC_SIZES", {"cpu": ((32, 2, 1),)})
    monkeypatch.setattr(decoding, "CCT_PAST", 20)
    calls = []

    def compiled(module, **_):
        return lambda *inputs, **options: calls.append(module) or module(*inputs, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    steps, memory = decoding.measure_cct(turns=2, dtype=torch.float32, compiled=True)
    assert [each.name for each in steps.results] == ["GPT-2", "CCT, dense"]
    assert {type(module).__name__ for module in calls} == {"GPT2LMHeadModel", "MoaGPT2LMHeadModel"}
    assert [each.name for each in memory.results] == ["GPT-2", "CCT, dense"]
    full = 2 * (20 + decoding.STEPS_IN_A_TURN) * 32 * 4 / 1e6
    assert [each.value for each in memory.results] == [full, full]
    assert "static cache of 24 tokens" in memory.title


def test_script_writes_tables_and_a_picture(benchmarks, tmp_path, monkeypatch, capsys):
    run, moa = benchmarks("run"), benchmarks("moa")
    monkeypatch.setattr(moa, "SIZES", {"cpu": moa.Size(hidden_size=128, batch=2, length=16)})
    threads = torch.get_num_threads()
    try:
        run.main(["moa", "--turns", "2", "--output_dir", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert "| MoA, N=16 |" in capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["environment"]["threads"].startswith("1 of")
    assert [t["results"][0]["ratio"] for t in data["tables"]] == [1.0] * 4
    assert (tmp_path / "results.md").read_text().startswith("processor")
    assert (tmp_path / "ratios.svg").is_file()


def test_a_run_stops_in_time_with_what_it_has(benchmarks, tmp_path, monkeypatch, capsys):
    run, moa = benchmarks("run"), benchmarks("moa")
    monkeypatch.setattr(moa, "SIZES", {"cpu": moa.Size(hidden_size=128, batch=2, length=16)})
    threads = torch.get_num_threads()
    done = subprocess.CompletedProcess([], 0, stdout="..s\n=== 2 passed, 1 skipped in 3.00s ===\n")
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: done)
    try:
        run.main(["moa", "--turns", "2", "--checks", "--seconds", "0", "--output_dir", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert "Stopped after 0 seconds, in moa." in capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["environment"]["checks"] == "2 passed, 1 skipped in 3.00s"
    assert len(data["tables"]) == 1


def test_experts_are_timed_in_both_forms(benchmarks, monkeypatch):
    experts = benchmarks("experts")
    monkeypatch.setattr(experts, "TOKENS", {"cpu": (16,)})
    monkeypatch.setattr(experts, "SIZES", {"cpu": ((32, 8, 2),)})
    seen = []
    monkeypatch.setattr(experts, "compare", lambda candidates, **_: seen.append(candidates) or [])
    tables = list(experts.measure(turns=2, dtype=torch.float32))
    assert [table.title[:38] for table in tables[::3]] == [
        "MoA's projections, inference, 2 of 4 e",
        "MoA's projections, training, 2 of 4 ex",
    ]
    for candidates in seen:
        for one, other in zip(*(run() for run in candidates.values()), strict=True):
            torch.testing.assert_close(one, other)


def test_whole_models_are_trained(benchmarks, monkeypatch):
    training = benchmarks("training")
    bert = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 48, "vocab_size": 90}
    gpt2 = {"n_layer": 1, "n_embd": 24, "vocab_size": 90, "bos_token_id": 0, "eos_token_id": 0}
    monkeypatch.setattr(training, "SIZES", {"cpu": {"BERT": (2, 8, bert), "GPT-2": (2, 8, gpt2)}})
    monkeypatch.setattr(training, "LARGE", {"cpu": 8})
    tables = list(training.measure(turns=2, dtype=torch.float32))
    assert [table.unit for table in tables] == ["ms", "tokens/s", "MB"] * 2
    times, rates, _ = tables[3:]
    assert times.title.startswith("training GPT-2, 2 x 8 tokens, a step (GPT2LMHeadModel ")
    assert [result.name for result in times.results] == ["GPT2LMHeadModel", *training.MECHANISMS]
    for time, rate in zip(times.results, rates.results, strict=True):
        assert rate.value == pytest.approx(16 / (1e-3 * time.value))
    assert all(result.value > 0 for table in tables for result in table.results)


def test_classifiers_are_timed_with_one_token_and_with_all(benchmarks, monkeypatch):
    classifiers = benchmarks("classifiers")
    monkeypatch.setattr(classifiers, "SIZES", {"cpu": ((32, 2),)})
    monkeypatch.setattr(classifiers, "BATCHES", {"cpu": (2,)})
    monkeypatch.setattr(classifiers, "LAYERS", (2, 1))
    seen = []
    monkeypatch.setattr(classifiers, "compare", lambda candidates, **_: seen.append(candidates) or [])
    titles = [table.title for table in classifiers.measure(turns=2, dtype=torch.float32)]
    assert titles[0] == "BERT's classifier, 2 layers, batch 2, d=32"
    assert [len(candidates) for candidates in seen] == [6, 3] * 2
    for candidates in seen:
        outputs = {name: run() for name, run in candidates.items()}
        assert outputs["plain, all tokens"].hidden_states[-1].shape[1] == classifiers.LENGTH
        assert outputs["plain, one token"].hidden_states is None
        torch.testing.assert_close(
            outputs["plain, one token"].logits, outputs["plain, all tokens"].logits
        )


def test_summary_has_a_row_for_each_table_of_the_same_candidates(benchmarks):
    module = benchmarks("tables")

    def table(title, *ratios, unit="ms", spread=1.0):
        names = ["plain", "gated"]
        results = [
            timing.Measurement(name=name, value=2 * ratio, ratio=ratio, spread=spread)
            for name, ratio in zip(names, ratios, strict=True)
        ]
        return module.Table(group="moa", title=title, results=results, unit=unit)

    tables = [table("a", 1, 1.5), table("size", 1, 3, unit="MB", spread=None), table("b", 1, 2)]
    assert module.summary(tables).splitlines() == [
        "|  | plain, ms | ± % | gated |",
        "|---|---|---|---|",
        "| a | 2.00 | 1.0 | 1.500 |",
        "| b | 2.00 | 1.0 | 2.000 |",
        "",
        "|  | plain, MB | gated |",
        "|---|---|---|",
        "| size | 2.00 | 3.000 |",
    ]


def test_unknown_benchmark_is_an_error(benchmarks, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmarks("run").main(["speed"])
    assert (
        "must be of mae, moa, experts, moe, cct, mae_decoding, cct_decoding, small_cct_decoding, memory"
        in capsys.readouterr().err
    )


def test_peak_memory_is_the_most_that_is_held_at_once(benchmarks):
    def step():
        for _ in range(3):
            x = torch.empty(1_000_000)
            x = torch.cat([x, x])  # 4 MB and 8 MB at once, then 4 MB less
            del x

    assert benchmarks("memory").peak_of(step) == pytest.approx(12e6, rel=0.01)


def test_the_published_codes_algorithm_is_moa(benchmarks):
    """What MoA is timed against computes the same function."""
    torch.manual_seed(0)
    peer_class = benchmarks("sorted_moa").SortedMoaAttention
    peer = peer_class(hidden_size=32, num_experts=6, num_selected=2, head_dim=8).double()
    config = MoaBertConfig(
        hidden_size=32, num_attention_heads=2, num_attention_experts=6, head_dim=8, attention_type="moa",
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ours = MoaBertSelfAttention(config, layer_idx=0, is_cross_attention=False).double().eval()
    output = ExpertOutput(num_experts=6, in_features=8, out_features=32, bias=False).double()
    with torch.no_grad():
        ours.mixture.router.gate.weight.copy_(peer.router.weight)
        ours.query.weight.copy_(peer.query.transpose(1, 2))
        ours.query.bias.zero_()
        output.weight.copy_(peer.output)
        for layer, weight, bias in zip(
            (ours.key, ours.value),
            peer.key_value.weight.chunk(2),
            peer.key_value.bias.chunk(2),
            strict=True,
        ):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        x = torch.randn(2, 7, 32, dtype=torch.float64)
        torch.testing.assert_close(ours.output(output, ours(x)), peer(x))


def test_mixtral_is_sparse_moe(benchmarks):
    """What sparse MoE is timed against computes the same function."""
    moe = benchmarks("moe")
    size = moe.Size(hidden_size=16, expert_size=24, batch=2, length=7)
    ours, peer = moe.own_layers(size, True)["MoE, N=8"], moe.mixtral_layers(size)["Mixtral, N=8"]
    with torch.no_grad():
        peer.gate.weight.copy_(ours.router.gate.weight)
        peer.experts.gate_up_proj.copy_(ours.experts.gate_up_proj)
        peer.experts.down_proj.copy_(ours.experts.down_proj)
        x = torch.randn(2, 7, 16)
        torch.testing.assert_close(ours(x)[0], peer(x))
