"""Naive forms of every mechanism, straight from the papers' equations, for float64 comparisons.

They read a module's parameters and nothing else of it: no helper of the package computes here.
"""

from __future__ import annotations

import itertools
import math

import torch


def attend(query, key, value, mask, scale, dead_keys=None):
    """Softmax attention of one head. `query` `[T, dh]`, `key`, `value` `[S, dh]`, `mask` `[T, S]`
    bool. Keys of `dead_keys` `[S]` (CCT's skipped ones) have logit 0 and value 0."""
    logits = query @ key.T * scale
    if dead_keys is not None:
        logits = torch.where(dead_keys, torch.zeros_like(logits), logits)
        value = torch.where(dead_keys[:, None], torch.zeros_like(value), value)
    weights = torch.exp(logits) * mask
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


def mae_attention(attention, x, padding_mask, source=None, source_mask=None):
    """Z = sum_S g_S f_S(X), the sum over experts written out, of a `MoaBertAttention` before its
    residual."""
    self_, mixture = attention.self, attention.self.mixture
    h, dh, t = mixture.num_heads, mixture.head_dim, mixture.num_dropped
    y = x if source is None else source
    key_mask = padding_mask if source is None else source_mask
    experts = list(itertools.combinations(range(h), t))
    gates = mae_gate(x, padding_mask, mixture.gate, mixture.is_causal, mixture.window)
    output = torch.zeros_like(x)
    for b in range(x.shape[0]):
        q = x[b] @ self_.query.weight.T + self_.query.bias
        k = y[b] @ self_.key.weight.T + self_.key.bias
        v = y[b] @ self_.value.weight.T + self_.value.bias
        seen = visibility(len(x[b]), len(y[b]), key_mask[b], self_.is_causal)
        heads = []
        for j in range(h):
            part = slice(j * dh, (j + 1) * dh)
            context = attend(q[:, part], k[:, part], v[:, part], seen, dh**-0.5)
            heads.append(context @ attention.output.dense.weight[:, part].T)
        for position in range(x.shape[1]):
            g = gates.get((b, position)) if mixture.is_causal else gates[b]
            if g is None:  # padding: no gate is defined there
                continue
            total = torch.zeros_like(x[b, position])
            for s, dropped in enumerate(experts):
                kept = [heads[j][position] for j in range(h) if j not in dropped]
                total = total + g[s] * h / (h - t) * torch.stack(kept).sum(dim=0)
            output[b, position] = total + attention.output.dense.bias
    return output


def moa_attention(attention, x, padding_mask):
    """Zhang et al. 2022: a loop over tokens and experts, of a `MoaBertAttention`."""
    self_, router = attention.self, attention.self.mixture.router
    k_active, dh = router.num_selected, self_.head_dim
    rows = []
    for b in range(x.shape[0]):
        key = x[b] @ self_.key.weight.T + self_.key.bias
        value = x[b] @ self_.value.weight.T + self_.value.bias
        seen = visibility(len(x[b]), len(x[b]), padding_mask[b], self_.is_causal)
        for t in range(x.shape[1]):
            logits = router.gate.weight @ x[b, t]
            p = torch.exp(logits) / torch.exp(logits).sum()
            chosen = sorted(range(len(p)), key=lambda i: -p[i].item())[:k_active]
            normalizer = sum(p[i] for i in chosen).detach()
            y = attention.output.dense.bias
            for i in chosen:
                q = self_.query.weight[i] @ x[b, t] + self_.query.bias[i]
                context = attend(q[None], key, value, seen[t : t + 1], dh**-0.5)[0]
                y = y + p[i] / normalizer * (context @ attention.output.dense.weight[i])
            rows.append(y)
    return torch.stack(rows).view(x.shape)


def layer_norm(x, norm):
    if isinstance(norm, torch.nn.Identity):
        return x
    mean = x.mean(dim=-1, keepdim=True)
    var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def control(network, x):
    """G(x) and the gates: sigmoid in training (noise 0), hard in eval."""
    hidden = torch.clamp(x @ network.dense.weight.T + network.dense.bias, min=0)
    g = torch.sigmoid(hidden @ network.out.weight.T + network.out.bias)
    return g if network.training else (g >= 0.5).to(x.dtype)


def cct_attention(attention, x, padding_mask, source=None, source_mask=None):
    """Bapna et al. 2020, of a `MoaBertAttention` with plain heads, before its residual.

    In eval the keys that are gated off are left out of the scores altogether and their exp(0) terms
    are put into the denominator by hand."""
    self_, cct = attention.self, attention.self.cct
    h, dh = self_.mixture.num_heads, self_.head_dim
    y = x if source is None else source
    key_mask = padding_mask if source is None else source_mask
    output = []
    for b in range(x.shape[0]):
        gates = control(cct.control, x[b])
        if source is None:
            g_kv, g_q = gates[:, 0], gates[:, 1]
        else:
            g_kv, g_q = control(cct.source_control, y[b])[:, 0], gates[:, 0]
        q = x[b] @ self_.query.weight.T + self_.query.bias
        k = layer_norm(y[b] @ self_.key.weight.T + self_.key.bias, cct.key_norm)
        v = layer_norm(y[b] @ self_.value.weight.T + self_.value.bias, cct.value_norm)
        seen = visibility(len(x[b]), len(y[b]), key_mask[b], self_.is_causal)
        dead = None
        if cct.training:
            k, v = g_kv[:, None] * k, g_kv[:, None] * v
        else:
            dead = g_kv == 0
        contexts = []
        for j in range(h):
            part = slice(j * dh, (j + 1) * dh)
            contexts.append(attend(q[:, part], k[:, part], v[:, part], seen, dh**-0.5, dead))
        context = layer_norm(torch.cat(contexts, dim=-1), cct.context_norm)
        dense = attention.output.dense
        output.append((g_q[:, None] * context) @ dense.weight.T + dense.bias)
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
