"""vLLM's and SGLang's backends for transformers' models, as far as their documents say what they ask of
one: a stand-in keeps the keys, and puts requests side by side."""

import json

import pytest
import torch
from families import CASE
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moa.modeling.attention.servers import SERVERS

SERVED = {
    "mha": {},
    "moa": {"attention_type": "moa"},
    "moa-groups": {"attention_type": "moa", "num_key_value_heads": 2},
    "moe": {"ffn_type": "moe"},
}
LENGTHS = (5, 3)


class Server:
    """Keys of some requests, by layer and request; what a call's tokens are of, `requests` says."""

    def __init__(self, num_kv_heads):
        self.num_kv_heads, self.keys, self.requests = num_kv_heads, {}, []

    def attend(self, layer, query, key, value):
        assert key.shape[1] == self.num_kv_heads
        outputs, groups = [], query.shape[1] // key.shape[1]
        for name, number in self.requests:
            q, k, v = (x[:, :, :number] for x in (query, key, value))
            query, key, value = (x[:, :, number:] for x in (query, key, value))
            held = self.keys.get((layer.layer_idx, name))
            if held is not None:
                k, v = (torch.cat(pair, dim=2) for pair in zip(held, (k, v), strict=True))
            self.keys[layer.layer_idx, name] = k, v
            mask = torch.ones(number, k.shape[2], dtype=torch.bool)
            mask = mask.tril(k.shape[2] - number) if layer.is_causal else mask
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            outputs.append(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        assert query.shape[2] == 0
        return torch.cat(outputs, dim=2)


@pytest.fixture(params=SERVERS)
def server_name(request, monkeypatch):
    """A server's name for the attention that it registers."""

    def forward(module, query, key, value, attention_mask, *, scaling, server, **kwargs):
        assert attention_mask is None
        assert scaling == module.head_dim**-0.5
        return server.attend(module, query, key, value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, request.param, forward)
    return request.param


def parts_of(length):
    """Tokens of a request that come together: the first ones, then one after the other."""
    return [(0, 2), *((i, i + 1) for i in range(2, length))]


@pytest.mark.parametrize("variant", SERVED)
def test_requests_side_by_side_and_step_by_step(variant, server_name):
    model = CASE["GPT2Model"].build(**SERVED[variant]).double()
    texts = [torch.randint(2, 60, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with torch.no_grad():
        expected = [model(text).last_hidden_state for text in texts]
        server = serve(model, server_name)
        found = [[] for _ in texts]
        steps = [parts_of(length) for length in LENGTHS]
        for step in range(max(map(len, steps))):
            going_on = [(i, *steps[i][step]) for i in range(len(texts)) if step < len(steps[i])]
            server.requests = [(i, end - start) for i, start, end in going_on]
            output = model(
                input_ids=torch.cat([texts[i][:, start:end] for i, start, end in going_on], dim=1),
                position_ids=torch.cat([torch.arange(s, e) for _, s, e in going_on])[None],
                use_cache=False,
                return_dict=False,
                server=server,
            )[0]
            for i, start, end in going_on:
                found[i].append(output[:, : end - start])
                output = output[:, end - start :]
    for i, parts in enumerate(found):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected[i], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", SERVED)
def test_texts_to_embed_side_by_side(variant, server_name):
    model = CASE["BertModel"].build(**SERVED[variant]).double()
    texts = [torch.randint(2, 60, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with torch.no_grad():
        expected = torch.cat([model(text).last_hidden_state for text in texts], dim=1)
        server = serve(model, server_name)
        server.requests = list(enumerate(LENGTHS))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        found = model(torch.cat(texts, dim=1), position_ids=positions, server=server, use_cache=False)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-9, atol=1e-9)


def serve(model, name):
    """Prepare a model as a server does, by what its configuration says."""
    model.config._attn_implementation = name
    kv_heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    return Server(kv_heads)


@pytest.mark.parametrize("name", ["GPT2Model", "BertModel"])
def test_gates_that_look_at_other_tokens_are_refused(name, server_name):
    model = CASE[name].build(attention_type="mae")
    server = serve(model, server_name)
    with pytest.raises(ValueError, match=rf"must not be '{server_name}' with learned MAE gates"):
        model(torch.tensor([[3, 4]]), server=server, use_cache=False)


@pytest.mark.parametrize("name", ["GPT2Model", "BertModel"])
@pytest.mark.parametrize("variant", SERVED)
def test_what_the_documents_list(name, variant, tmp_path):
    """Kwargs are shown above to reach the attention."""
    model = CASE[name].build(**SERVED[variant])
    model.save_pretrained(tmp_path)
    assert "AutoModel" in json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert type(model).is_backend_compatible()
    layers = [m for m in model.modules() if hasattr(m, "is_causal")]
    assert layers
    assert {m.is_causal for m in layers} == {name == "GPT2Model"}
    assert model.config.base_model_tp_plan
    # without a plan, as transformers' own, a server splits the one list of layers over its pipeline
    assert sum(isinstance(m, nn.ModuleList) for m in model.modules()) == 1
    assert model.supports_pp_plan == CASE[name].build_plain().supports_pp_plan
