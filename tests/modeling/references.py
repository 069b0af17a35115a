"""Naive forms of every mechanism, straight from the papers' equations, for float64 comparisons.

They read a module's parameters and nothing else of it: no helper of the package computes here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch


@dataclass
class Weights:
    """An attention layer's parameters in the papers' terms, whatever its backbone calls them.

    Attributes:
        query, key, value: `[heads, dh, d]`, a head's (for MoA an expert's) projection each. MoA has
            one head of keys and values.
        query_bias, key_bias, value_bias: `[heads, dh]`.
        output: `[heads, dh, d]`; `output_bias` `[d]`.
        scaling: factor of the scores.
        position_table: `[buckets, heads]` of T5, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_bias: torch.Tensor
    key_bias: torch.Tensor
    value_bias: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor
    scaling: float
    position_table: torch.Tensor | None = None

    def position_bias(self, length, num_keys, config):
        """`[heads, T, S]`, T5's bias of every pair of positions."""
        if self.position_table is None:
            return torch.zeros(len(self.query), length, num_keys, dtype=torch.float64)
        bias = torch.stack(
            [
                torch.stack([self.position_table[_bucket(s - t, config)] for s in range(num_keys)])
                for t in range(length)
            ]
        )
        return bias.permute(2, 0, 1)


def _bucket(distance, config):
    """The bucket of key position minus query position (Raffel et al. 2020), in plain arithmetic."""
    buckets, furthest = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    offset = 0
    if config.is_decoder:
        distance = max(-distance, 0)
    else:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    logarithmic = exact + int(
        math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
    )
    return offset + min(logarithmic, buckets - 1)


def bert_weights(attention):
    """Of a `MoaBertAttention`."""
    core, dense = attention.self, attention.output.dense
    dh = core.head_dim

    def heads(x):
        return x if x.ndim == 3 else x.unflatten(0, (-1, dh))

    def bias_heads(x):
        return x if x.ndim == 2 else x.unflatten(0, (-1, dh))

    output = dense.weight if hasattr(core.mixture, "router") else dense.weight.T.unflatten(0, (-1, dh))
    return Weights(
        *(heads(getattr(core, name).weight) for name in ("query", "key", "value")),
        *(bias_heads(getattr(core, name).bias) for name in ("query", "key", "value")),
        output,
        dense.bias,
        dh**-0.5,
    )


def gpt2_weights(attention):
    """Of a `MoaGPT2Attention`: its projections are stored transposed, and some in one matrix."""
    dh, experts = attention.head_dim, hasattr(attention.mixture, "router")
    fused = not hasattr(attention, "q_attn")
    weights = list(attention.c_attn.weight.T.chunk(3 if fused else 2))
    biases = list(attention.c_attn.bias.chunk(3 if fused else 2))
    if not fused:
        query = attention.q_attn
        weights.insert(0, query.weight.flatten(0, 1) if experts else query.weight.T)
        biases.insert(0, query.bias.flatten())
    output = attention.c_proj.weight if experts else attention.c_proj.weight.unflatten(0, (-1, dh))
    return Weights(
        *(x.unflatten(0, (-1, dh)) for x in weights),
        *(x.unflatten(0, (-1, dh)) for x in biases),
        output,
        attention.c_proj.bias,
        attention.scaling,
    )


def t5_weights(attention):
    """Of a `MoaT5Attention`."""
    dh = attention.head_dim
    query, output = attention.q.weight, attention.o.weight
    if not hasattr(attention.mixture, "router"):
        query, output = query.unflatten(0, (-1, dh)), output.T.unflatten(0, (-1, dh))
    key, value = (x.weight.unflatten(0, (-1, dh)) for x in (attention.k, attention.v))
    zeros = [x.new_zeros(x.shape[:2]) for x in (query, key, value)]
    table = None
    if attention.has_relative_attention_bias:
        table = attention.relative_attention_bias.weight
    return Weights(query, key, value, *zeros, output, output.new_zeros(output.shape[-1]), 1.0, table)


def attend(query, key, value, mask, scale, bias, dead_keys=None):
    """Softmax attention of one head. `query` `[T, dh]`, `key`, `value` `[S, dh]`, `mask` `[T, S]`
    bool, `bias` `[T, S]`. Keys of `dead_keys` `[S]` (CCT's skipped ones) have score 0 beside their
    bias, and value 0."""
    logits = query @ key.T * scale
    if dead_keys is not None:
        logits = torch.where(dead_keys, torch.zeros_like(logits), logits)
        value = torch.where(dead_keys[:, None], torch.zeros_like(value), value)
    weights = torch.exp(logits + bias) * mask
    return (weights / weights.sum(dim=-1, keepdim=True)) @ value


def visibility(length, num_keys, key_mask, causal):
    mask = torch.ones(length, num_keys, dtype=torch.bool)
    if causal:
        mask = torch.tril(mask, diagonal=num_keys - length)
    return mask & key_mask[None, :]


def batch_norm(rows, norm, training):
    """Rows `[n, d]` -> normalised rows, with the batch's statistics where training (n > 1)."""
    if training and len(rows) > 1:
        mean = rows.sum(dim=0) / len(rows)
        var = ((rows - mean) ** 2).sum(dim=0) / len(rows)
    else:
        mean, var = norm.running_mean, norm.running_var
    return (rows - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def mae_gate_inputs(x, padding_mask, causal, window):
    """What the gate averages, per sequence `[B, d]` or per position (a dict of the real ones)."""
    pooled = {}
    for b in range(x.shape[0]):
        if not causal:
            pooled[b] = x[b][padding_mask[b]].mean(dim=0)
            continue
        for t in range(x.shape[1]):
            start = 0 if window is None else max(0, t + 1 - window)
            rows = x[b, start : t + 1][padding_mask[b, start : t + 1]]
            if padding_mask[b, t]:
                pooled[b, t] = rows.mean(dim=0)
    return pooled


def mae_gate(x, padding_mask, gate, causal, window):
    """g_S for every sequence (or real position), by Peng et al. 2020."""
    pooled = mae_gate_inputs(x, padding_mask, causal, window)
    rows = batch_norm(torch.stack(list(pooled.values())), gate.norm, gate.training)
    hidden = torch.tanh(rows @ gate.dense.weight.T + gate.dense.bias)
    logits = hidden @ gate.out.weight.T + gate.out.bias
    weights = torch.exp(logits) / torch.exp(logits).sum(dim=-1, keepdim=True)
    return dict(zip(pooled, weights, strict=True))


def mae_attention(core, weights, x, padding_mask, source=None, source_mask=None):
    """Z = sum_S g_S f_S(X), the sum over experts written out, of a `AttentionFlow`."""
    mixture, w = core.mixture, weights
    h, t = mixture.num_heads, mixture.num_dropped
    y = x if source is None else source
    key_mask = padding_mask if source is None else source_mask
    bias = w.position_bias(x.shape[1], y.shape[1], core.config)
    experts = list(itertools.combinations(range(h), t))
    gates = mae_gate(x, padding_mask, mixture.gate, mixture.is_causal, mixture.window)
    output = torch.zeros_like(x)
    for b in range(x.shape[0]):
        seen = visibility(len(x[b]), len(y[b]), key_mask[b], core.is_causal)
        heads = []
        for j in range(h):
            q = x[b] @ w.query[j].T + w.query_bias[j]
            k = y[b] @ w.key[j].T + w.key_bias[j]
            v = y[b] @ w.value[j].T + w.value_bias[j]
            heads.append(attend(q, k, v, seen, w.scaling, bias[j]) @ w.output[j])
        for position in range(x.shape[1]):
            g = gates.get((b, position)) if mixture.is_causal else gates[b]
            if g is None:  # padding: no gate is defined there
                continue
            total = torch.zeros_like(x[b, position])
            for s, dropped in enumerate(experts):
                kept = [heads[j][position] for j in range(h) if j not in dropped]
                total = total + g[s] * h / (h - t) * torch.stack(kept).sum(dim=0)
            output[b, position] = total + w.output_bias
    return output


def moa_attention(core, weights, x, padding_mask):
    """Zhang et al. 2022: a loop over tokens and experts, of a `AttentionFlow`; experts in as many groups
    as there are heads of keys and values."""
    router, w, groups = core.mixture.router, weights, len(weights.key)
    size = core.mixture.num_experts // groups
    bias = w.position_bias(x.shape[1], x.shape[1], core.config)
    rows = []
    for b in range(x.shape[0]):
        keys = [x[b] @ w.key[g].T + w.key_bias[g] for g in range(groups)]
        values = [x[b] @ w.value[g].T + w.value_bias[g] for g in range(groups)]
        seen = visibility(len(x[b]), len(x[b]), padding_mask[b], core.is_causal)
        for t in range(x.shape[1]):
            logits = router.gate.weight @ x[b, t]
            p = torch.exp(logits) / torch.exp(logits).sum()
            chosen = []
            for g in range(groups):
                best = sorted(range(g * size, (g + 1) * size), key=lambda i: -p[i].item())
                chosen += best[: router.num_selected // groups]
            normalizer = sum(p[i] for i in chosen).detach()
            y = w.output_bias
            for i in chosen:
                q = (w.query[i] @ x[b, t] + w.query_bias[i])[None]
                own = bias[i, t : t + 1]
                key, value = keys[i // size], values[i // size]
                context = attend(q, key, value, seen[t : t + 1], w.scaling, own)[0]
                y = y + p[i] / normalizer * (context @ w.output[i])
            rows.append(y)
    return torch.stack(rows).view(x.shape)


def layer_norm(x, norm):
    if isinstance(norm, torch.nn.Identity):
        return x
    if isinstance(norm, torch.nn.RMSNorm):
        return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + norm.eps) * norm.weight
    mean = x.mean(dim=-1, keepdim=True)
    var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def control(network, x):
    """G(x) and the gates: sigmoid in training (noise 0), hard in eval."""
    hidden = torch.clamp(x @ network.dense.weight.T + network.dense.bias, min=0)
    g = torch.sigmoid(hidden @ network.out.weight.T + network.out.bias)
    return g if network.training else (g >= 0.5).to(x.dtype)


def cct_attention(core, weights, x, padding_mask, source=None, source_mask=None):
    """Bapna et al. 2020, of a `AttentionFlow` with plain heads.

    In eval the keys that are gated off are left out of the scores altogether and their exp(0) terms
    (or exp(bias), with T5's position bias) are put into the denominator by hand."""
    cct, w = core.cct, weights
    y = x if source is None else source
    key_mask = padding_mask if source is None else source_mask
    bias = w.position_bias(x.shape[1], y.shape[1], core.config)
    output = []
    for b in range(x.shape[0]):
        gates = control(cct.control, x[b])
        if source is None:
            g_kv, g_q = gates[:, 0], gates[:, 1]
        else:
            g_kv, g_q = control(cct.source_control, y[b])[:, 0], gates[:, 0]
        q, k, v = (
            torch.einsum("td,hed->the", rows, matrix) + offset
            for rows, matrix, offset in (
                (x[b], w.query, w.query_bias),
                (y[b], w.key, w.key_bias),
                (y[b], w.value, w.value_bias),
            )
        )
        k = layer_norm(k.flatten(1), cct.key_norm).view(k.shape)
        v = layer_norm(v.flatten(1), cct.value_norm).view(v.shape)
        seen = visibility(len(x[b]), len(y[b]), key_mask[b], core.is_causal)
        dead = None
        if cct.training:
            k, v = g_kv[:, None, None] * k, g_kv[:, None, None] * v
        else:
            dead = g_kv == 0
        contexts = [
            attend(q[:, j], k[:, j], v[:, j], seen, w.scaling, bias[j], dead) for j in range(q.shape[1])
        ]
        context = layer_norm(torch.cat(contexts, dim=-1), cct.context_norm)
        output.append((g_q[:, None] * context) @ w.output.flatten(0, 1) + w.output_bias)
    return torch.stack(output)


def noisy_topk(x, router, noise):
    """Shazeer et al. 2017, eq. 3-5, with the drawn `noise` `[B, T, N]`: the gates `[B, T, N]`."""
    clean = x @ router.gate.weight.T
    scale = torch.log(1 + torch.exp(x @ router.noise.weight.T))
    h = clean + noise * scale
    gates = torch.zeros_like(h)
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        kept = sorted(range(h.shape[-1]), key=lambda i: -h[b, t, i].item())[: router.num_selected]
        total = sum(torch.exp(h[b, t, i]) for i in kept)
        for i in kept:
            gates[b, t, i] = torch.exp(h[b, t, i]) / total
    return clean, scale, h, gates


def smooth_load(clean, scale, h, k):
    """Shazeer et al. 2017, eq. 8-9."""
    load = torch.zeros_like(h)
    for index in itertools.product(*map(range, h.shape)):
        *row, i = index
        others = [h[(*row, j)] for j in range(h.shape[-1]) if j != i]
        threshold = sorted(others, key=lambda value: -value.item())[k - 1]
        z = (clean[index] - threshold) / scale[index]
        load[index] = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return load


def cv_squared(values):
    mean = values.sum() / len(values)
    return ((values - mean) ** 2).sum() / len(values) / mean**2


def balance_loss(logits, chosen, mask):
    """N sum_i f_i P_i over the real tokens; `chosen` `[B, T, k]`."""
    n = logits.shape[-1]
    tokens = [tuple(index) for index in mask.nonzero().tolist()]
    loss = 0.0
    for i in range(n):
        f = sum((chosen[token] == i).sum().double() for token in tokens) / (
            len(tokens) * chosen.shape[-1]
        )
        p = sum(torch.softmax(logits[token], dim=-1)[i] for token in tokens) / len(tokens)
        loss = loss + n * f * p
    return loss


def z_loss(logits, mask):
    rows = logits[mask]
    return (torch.log(torch.exp(rows).sum(dim=-1)) ** 2).mean()
