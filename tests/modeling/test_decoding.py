"""Causal gates and their caches: nothing sees the future, and cached decoding is the full forward."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from common import VARIANTS, batch, randomize
from families import BERT, CASE, Case
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_moa import MoaBertModel
from hf_moa.modeling.cache import gate_states as gate_cache
from hf_moa.modeling.cache.gate_states import CROP_RESERVE, GatedDynamicLayer
from hf_moa.modeling.cache.naming import CACHE_NAME
from hf_moa.modeling.mae.norm import GateBatchNorm
from hf_moa.modeling.mae.switches import MAE_PHASES


@dataclass(frozen=True)
class Decoder:
    """A causal model of one family, called alike: tokens in, hidden states or logits out."""

    name: str

    @property
    def case(self) -> Case:
        return {"gpt2": CASE["GPT2LMHeadModel"], "t5": CASE["T5ForConditionalGeneration"]}[self.name]

    @property
    def variants(self):
        if self.name == "bert":  # biases of distances are an encoder's
            variants = {name: v for name, v in BERT.variants.items() if not name.endswith("relative")}
        else:
            variants = self.case.family.variants
        return variants | {
            "mae-window-3": {"attention_type": "mae", "mae_gate_window": 3},
            "mae-all": {"attention_type": "mae", "mae_gate_window": None},
        }

    def build(self, **fields):
        if self.name == "bert":
            torch.manual_seed(0)
            model = MoaBertModel(BERT.config(is_decoder=True, **fields))
            return randomize(model).eval().double()
        return self.case.build(**fields).double()

    def __call__(self, model, ids, *, mask=None, cache=None, use_cache=None, past=0, **kwargs):
        """`mask` `[B, past + T]`; the output's tensor `[B, T, ...]` and its cache."""
        if self.name == "t5":
            source, source_mask = batch(batch_size=4, length=7, seed=8)
            output = model(
                source[: len(ids)],
                attention_mask=source_mask[: len(ids)],
                decoder_input_ids=ids,
                decoder_attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None or bool(use_cache),
                **kwargs,
            )
            return output.logits, output.past_key_values
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            kwargs["position_ids"] = positions[:, past : past + ids.shape[1]]
        output = model(
            ids, attention_mask=mask, past_key_values=cache, use_cache=bool(use_cache), **kwargs
        )
        return output[0], output.past_key_values


DECODERS = [Decoder("bert"), Decoder("gpt2"), Decoder("t5")]
each_decoder = pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        pytest.param(decoder, fields, id=f"{decoder.name}-{name}")
        for decoder in DECODERS
        for name, fields in decoder.variants.items()
    ],
)
STATEFUL = ["mae-2", "mae-window-3", "mae-all", "mae-cct", "cct", "moa-moe-cct"]
each_stateful_decoder = pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        pytest.param(decoder, decoder.variants[name], id=f"{decoder.name}-{name}")
        for decoder in DECODERS
        for name in STATEFUL
    ],
)


# Gates and caches have ways of their own where no graph is made, as in `generate`.
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
each_decoder_and_mode = pytest.mark.parametrize(
    ("decoder", "fields", "mode"),
    [
        pytest.param(decoder, fields, mode, id=f"{decoder.name}-{name}-{mode_name}")
        for decoder in DECODERS
        for name, fields in decoder.variants.items()
        for mode_name, mode in MODES.items()
        if mode_name == "no_grad" or name in STATEFUL
    ],
)


def assert_equal(actual, expected):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, atol=1e-12 * scale, rtol=0)


# --- causality ------------------------------------------------------------------------------------


@pytest.mark.covering
@each_decoder
def test_no_gate_sees_the_future(decoder, fields):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    budgets = [1, 0.5] if "cct_budgets" in fields else [None]
    if fields.get("cct_budgets", [0])[0] == [1, 1]:
        budgets = [1, (1, 0.5)]
    for budget in budgets:
        _assert_causal(decoder, model, ids, budget=budget)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("decoder", "fields", "phase"),
    [
        pytest.param(decoder, fields, phase, id=f"{decoder.name}-{name}-{phase}")
        for decoder in DECODERS
        for name, fields in decoder.variants.items()
        for phase in MAE_PHASES
        if phase == "mixture"
        or (fields.get("attention_type") == "mae" and "mae_gate_type" not in fields)
    ],
)
def test_no_gate_sees_the_future_in_training(decoder, fields, phase):
    """With the gates' batch statistics, which run over all positions as in the paper, held still."""
    family = BERT if decoder.name == "bert" else decoder.case.family
    model = decoder.build(**fields | family.no_dropout).train()
    for module in model.modules():
        if isinstance(module, GateBatchNorm):
            module.weight.requires_grad_(False)
    if phase != "mixture":
        model.set_mae_phase(phase)
    ids, _ = batch(length=12)
    _assert_causal(decoder, model, ids)


def _assert_causal(decoder, model, ids, **kwargs):
    def run(ids):
        torch.manual_seed(3)
        return decoder(model, ids, **kwargs)[0]

    before = run(ids)
    for t in (3, 8):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 11) % 60 + 5
        after = run(changed)
        assert_equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:])


@pytest.mark.covering
@each_stateful_decoder
def test_no_gradient_comes_from_the_future(decoder, fields):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    if decoder.name == "t5":
        output = model(ids, decoder_inputs_embeds=embeds)[0]
    else:
        output = model(inputs_embeds=embeds, use_cache=False)[0]
    (gradient,) = torch.autograd.grad(output[:, :8].square().sum(), embeds)
    assert torch.all(gradient[:, 8:] == 0)
    assert gradient[:, :8].abs().max() > 0


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.covering
@each_decoder_and_mode
def test_cached_decoding_equals_the_full_forward(decoder, fields, mode):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    full, _ = decoder(model, ids)
    cache, steps = None, []
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:9], ids[:, 9:12]):
        with mode():
            output, cache = decoder(model, part, cache=cache, use_cache=True)
        steps.append(output)
    assert_equal(torch.cat(steps, dim=1), full)


@pytest.mark.covering
@each_decoder_and_mode
def test_left_padded_cached_decoding_equals_each_row_alone(decoder, fields, mode):
    model = decoder.build(**fields)
    ids, _ = batch(batch_size=2, length=12)
    ids = ids.flip(0)  # so that T5's source of the padded row is the first, as it is alone
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache, steps = None, []
    for start, end in ((0, 7), (7, 8), (8, 12)):
        with mode():
            output, cache = decoder(
                model, ids[:, start:end], mask=mask[:, :end], cache=cache, use_cache=True, past=start
            )
        steps.append(output)
    alone, _ = decoder(model, ids[:1, 4:])
    actual = torch.cat(steps, dim=1)[0, 4:]
    torch.testing.assert_close(actual, alone[0], atol=1e-10, rtol=0)


@pytest.mark.covering
@each_decoder_and_mode
def test_mask_of_all_slots_equals_that_of_the_tokens(decoder, fields, mode):
    model = decoder.build(**fields)
    ids, mask = batch(length=12)
    mask = mask.flip(1)
    slots = torch.cat([mask, torch.zeros(3, 3).long()], dim=1)
    caches = [StaticCache(config=model.config, max_cache_len=15) for _ in range(2)]
    if decoder.name == "t5":
        own = [StaticCache(config=model.config, max_cache_len=7) for _ in caches]
        caches = [EncoderDecoderCache(*pair) for pair in zip(caches, own, strict=True)]
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 12)):
        steps = []
        for cache, all_slots in zip(caches, (False, True), strict=True):
            with mode():
                output, _ = decoder(
                    model,
                    ids[:, start:end],
                    mask=slots if all_slots else mask[:, :end],
                    cache=cache,
                    use_cache=True,
                    past=start,
                )
            steps.append(output)
        # padding's own outputs mean nothing
        real = mask[:, start:end].bool()
        assert_equal(steps[1][real], steps[0][real])


@pytest.mark.covering
@each_decoder_and_mode
def test_static_cache_equals_the_full_forward(decoder, fields, mode):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    full, _ = decoder(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=15)
    if decoder.name == "t5":
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=7))
    for _ in range(2):  # and again after a reset
        steps = []
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:9], ids[:, 9:12]):
            with mode():
                output, _ = decoder(model, part, cache=cache, use_cache=True)
            steps.append(output)
        assert_equal(torch.cat(steps, dim=1), full)
        cache.reset()


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@each_stateful_decoder
def test_static_cache_whose_length_is_set_back_equals_the_full_forward(decoder, fields, mode):
    """As transformers' wrappers for ExecuTorch set it, without `reset`."""
    model = decoder.build(**fields)
    ids, others = (batch(length=12, seed=seed)[0] for seed in (0, 1))
    own = StaticCache(config=model.config, max_cache_len=15)
    cache = own
    if decoder.name == "t5":
        cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=7))
    with mode():
        full, _ = decoder(model, ids)
        decoder(model, others, cache=cache, use_cache=True)
        for start, end in ((0, 5), (5, 6), (6, 12), (3, 9), (9, 10), (1, 2), (2, 12), (0, 12)):
            for layer in own.layers:
                layer.cumulative_length.fill_(start)
            output, _ = decoder(model, ids[:, start:end], cache=cache, use_cache=True)
            assert_equal(output, full[:, start:end])


@pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        pytest.param(decoder, decoder.variants[name], id=f"{decoder.name}-{name}")
        for decoder in DECODERS
        for name in ("cct", "mae-cct", "moa-moe-cct")
    ],
)
def test_compute_fraction_counts_cached_keys(decoder, fields):
    """The costs of all steps add up to the cost of the full forward."""
    model = decoder.build(**fields)
    if decoder.name == "t5":
        model = model.decoder
    ids, _ = batch(length=12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    source = torch.randn(3, 7, 32, dtype=torch.float64) if decoder.name == "t5" else None
    extra = {} if source is None else {"encoder_hidden_states": source}
    full = model(ids, attention_mask=mask, use_cache=False, **extra).compute_cost
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=15)):
        if source is not None:
            cross = (
                copy.deepcopy(cache)
                if isinstance(cache, DynamicCache)
                else StaticCache(config=model.config, max_cache_len=7)
            )
            cache = EncoderDecoderCache(cache, cross)
        total = torch.zeros_like(full)
        for start, end in ((0, 5), (5, 6), (6, 12)):
            total += model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
                **extra,
            ).compute_cost
        torch.testing.assert_close(total, full)


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@each_stateful_decoder
def test_cache_can_be_reordered_cropped_and_repeated(decoder, fields, mode):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    if decoder.name == "t5":
        decoder = _SameSource(decoder.name)
    with mode():
        _move_caches(decoder, model, ids)


def _move_caches(decoder, model, ids):
    _, cache = decoder(model, ids[:, :9], use_cache=True)
    cache.crop(-2)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    actual, _ = decoder(model, ids[order, 7:12], cache=cache, use_cache=True)
    full, _ = decoder(model, ids[order])
    assert_equal(actual, full[:, 7:12])
    _, cache = decoder(model, ids[:, :9], use_cache=True)
    cache.batch_repeat_interleave(2)
    twice = ids.repeat_interleave(2, dim=0)
    actual, _ = decoder(model, twice[:, 9:], cache=cache, use_cache=True)
    full, _ = decoder(model, twice)
    assert_equal(actual, full[:, 9:])
    rows = torch.tensor([1, 4])
    _, cache = decoder(model, twice[:, :9], use_cache=True)
    cache.batch_select_indices(rows)
    actual, _ = decoder(model, twice[rows, 9:], cache=cache, use_cache=True)
    assert_equal(actual, full[rows, 9:])
    cache.reset()
    actual, _ = decoder(model, ids[:, :4], cache=cache, use_cache=True)
    full, _ = decoder(model, ids[:, :4])
    assert_equal(actual, full)


class _SameSource(Decoder):
    """T5 with one source for all rows, however many there are."""

    def __call__(self, model, ids, *, cache=None, use_cache=None, **kwargs):
        source = batch(batch_size=1, length=7, seed=8)[0].expand(len(ids), -1)
        output = model(
            source,
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=bool(use_cache),
        )
        return output.logits, output.past_key_values


def test_window_is_held_and_no_more():
    decoder = Decoder("gpt2")
    model = decoder.build(attention_type="mae", mae_gate_window=3, n_positions=400)
    model.requires_grad_(False)
    ids = torch.randint(5, 67, (1, 300))
    full, _ = decoder(model, ids)
    _, cache = decoder(model, ids[:, :280], use_cache=True)
    held = cache.layers[0].states["gate_features"]
    assert held.entries.shape == (1, 2 + CROP_RESERVE, model.config.mae_gate_hidden_size)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-CROP_RESERVE - 1)  # and leaves it as it was
    cache.crop(-CROP_RESERVE)
    length = 280 - CROP_RESERVE
    actual, _ = decoder(model, ids[:, length:], cache=cache, use_cache=True)
    assert_equal(actual, full[:, length:])
    cache = DynamicCache()
    _, cache = decoder(model, ids[:, :1], cache=cache, use_cache=True)
    cache.activate_past_recording()
    _, cache = decoder(model, ids[:, 1:280], cache=cache, use_cache=True)
    cache.crop(-270)
    actual, _ = decoder(model, ids[:, 10:], cache=cache, use_cache=True)
    assert_equal(actual, full[:, 10:])


def test_cache_of_another_model_is_refused():
    decoder = Decoder("gpt2")
    ids, _ = batch(length=6)
    _, cache = decoder(decoder.build(), ids, use_cache=True)
    gated = decoder.build(attention_type="mae")
    with pytest.raises(ValueError, match=CACHE_NAME):
        decoder(gated, ids[:, :1], cache=cache, use_cache=True)


def test_cache_of_another_mode_is_refused():
    decoder = Decoder("gpt2")
    model, ids = decoder.build(attention_type="mae"), batch(length=6)[0]
    for training in (False, True):
        _, cache = decoder(model.train(training), ids, use_cache=True)
        _, cache = decoder(model, ids[:, :1], cache=cache, use_cache=True)
        with pytest.raises(ValueError, match="filled in another mode"):
            decoder(model.train(not training), ids[:, :1], cache=cache, use_cache=True)


def test_what_a_generation_keeps_of_a_gate_is_of_that_gate_and_cache():
    decoder = Decoder("gpt2")
    model, ids = decoder.build(attention_type="mae"), batch(length=8)[0]
    gate = model.transformer.h[0].attn.mixture.gate
    with torch.no_grad():
        _, cache = decoder(model, ids[:, :6], cache=DynamicCache(), use_cache=True)
    layer = cache.layers[0]
    assert layer.kept
    twin = copy.deepcopy(cache)
    assert not twin.layers[0].kept
    gate.norm, gate.dense = copy.deepcopy(gate.norm), copy.deepcopy(gate.dense)  # as an adapter's
    torch.nn.init.normal_(gate.norm.weight)
    expected, _ = decoder(model, ids[:, 6:], cache=twin, use_cache=True)  # keeps nothing
    assert not twin.layers[0].kept
    with torch.no_grad():
        actual, _ = decoder(model, ids[:, 6:], cache=cache, use_cache=True)
    assert_equal(actual, expected)
    cache.reset()
    assert not layer.kept


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cache_that_was_reset_takes_any_mode(kind):
    decoder = Decoder("gpt2")
    model, ids = (
        decoder.build(attention_type="mae", **decoder.case.family.no_dropout),
        batch(length=6)[0],
    )
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=8)
    decoder(model.eval(), ids, cache=cache, use_cache=True)
    cache.reset()
    twin = copy.deepcopy(model.train())
    actual, _ = decoder(model, ids, cache=cache, use_cache=True)
    assert_equal(actual, decoder(twin, ids)[0])


class _OffloadedLayer(DynamicLayer):
    """Keys are out of reach between an update and the next prefetch, as those of offloaded caches."""

    def offload(self):
        self.away = self.keys, self.values
        self.keys, self.values = self.keys.to("meta"), self.values.to("meta")

    def prefetch(self):
        self.keys, self.values = self.away

    def update(self, *args, **kwargs):
        if self.is_initialized:
            self.prefetch()
        keys = super().update(*args, **kwargs)
        self.offload()
        return keys


@pytest.mark.parametrize("name", STATEFUL)
def test_gates_need_nothing_that_an_offloaded_cache_has_put_away(name, monkeypatch):
    decoder = Decoder("gpt2")
    model = decoder.build(**decoder.variants[name])
    ids, _ = batch(length=12)
    gated = type("GatedOffloadedLayer", (GatedDynamicLayer, _OffloadedLayer), {})
    monkeypatch.setitem(gate_cache._GATED, _OffloadedLayer, gated)
    cache = DynamicCache(config=model.config)
    cache.layers = [_OffloadedLayer() for _ in cache.layers]
    steps = [decoder(model, ids[:, t : t + 3], cache=cache, use_cache=True)[0] for t in range(0, 12, 3)]
    assert {layer.keys.device.type for layer in cache.layers} == {"meta"}
    assert_equal(torch.cat(steps, dim=1), decoder(model, ids)[0])


# T5 returns the cache that it was given, and always has cross-attention
each_decoder_alone = pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        pytest.param(decoder, fields, id=f"{decoder.name}-{name}")
        for decoder in DECODERS[:2]
        for name, fields in decoder.variants.items()
    ],
)


@pytest.mark.covering
@each_decoder_alone
def test_given_cache_is_used_whatever_use_cache_says(decoder, fields):
    model = decoder.build(**fields)
    ids, _ = batch(length=12)
    _, cache = decoder(model, ids[:, :7], use_cache=True)
    output, returned = decoder(model, ids[:, 7:], cache=cache, use_cache=False)
    full, _ = decoder(model, ids)
    assert_equal(output, full[:, 7:])
    assert returned is None


# --- cross-attention of BERT and GPT-2 ------------------------------------------------------------


@pytest.mark.covering
@each_decoder_alone
def test_cross_attention_is_cached_and_counted(decoder, fields):
    model = decoder.build(add_cross_attention=True, **fields)
    ids, _ = batch(length=9)
    source = torch.randn(3, 6, 32, dtype=torch.float64)
    source_mask = torch.ones(3, 6, dtype=torch.long)
    source_mask[1, 4:] = 0
    encoder = {"encoder_hidden_states": source, "encoder_attention_mask": source_mask}
    full = model(ids, use_cache=False, output_cct_gates=True, **encoder)
    cache, steps = None, []
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:9]):
        output = model(part, past_key_values=cache, use_cache=True, **encoder)
        cache = output.past_key_values
        steps.append(output[0])
    assert_equal(torch.cat(steps, dim=1), full[0])
    if model.config.has_cct:
        assert full.cct_gates[0]["cross_kv"].shape == (3, 6)
        assert full.cct_gates[0]["cross_query"].shape == (3, 9)
        assert torch.isfinite(output.compute_fraction).all()
    masked = source.clone()
    masked[1, 4:] = 9.0
    other = model(ids, use_cache=False, **encoder | {"encoder_hidden_states": masked})
    assert_equal(other[0], full[0])


@pytest.mark.parametrize("name", ["mae-1", "cct"])
def test_cache_of_inference_mode_is_of_use_outside_of_it(name):
    decoder = Decoder("gpt2")
    model = decoder.build(**VARIANTS[name])
    ids = torch.randint(5, 67, (2, 9))
    full, _ = decoder(model, ids)
    with torch.inference_mode():
        _, cache = decoder(model, ids[:, :6], cache=DynamicCache(), use_cache=True)
        decoder(model, ids[:, 6:7], cache=cache, use_cache=True)
    with torch.no_grad():
        actual, _ = decoder(model, ids[:, 7:], cache=cache, use_cache=True)
    assert_equal(actual, full[:, 7:])
