"""What processes send each other when a model is split over them, and the share of time that it takes.

`forward` and `backward` count the numbers that a process gives to each kind of collective;
`tests/modeling/test_tensor_parallel.py` holds them to what is sent. The rest is arithmetic on rates
that are stated below, without latency and with nothing sent while something is computed: an estimate,
not a measurement.

    python examples/communication.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from hf_moa import MoaGPT2Config, MoaGPT2LMHeadModel

# An H100, of which a training step reaches a share; NVLink 4 in a node of 8, and InfiniBand of 400 Gb/s
# for each.
OPERATIONS = 0.4 * 989e12  # a second, in bfloat16
NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second, in one direction
BYTES = 2  # of a number
IN_NODE = 8
GPUS = (8, 64, 256, 1024)
SEQUENCES, LENGTH = 32, 512  # of a GPU in a step

GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
MODELS = {
    "MAE, GPT-2 medium": GPT2_MEDIUM | {"attention_type": "mae"},
    "MoA, 16 of 32 experts, GPT-2 medium": GPT2_MEDIUM
    | {"attention_type": "moa", "num_attention_experts": 32, "head_dim": 64},
    "MoA, 16 of 256": GPT2_MEDIUM
    | {"attention_type": "moa", "num_attention_experts": 256, "head_dim": 64},
    "MoE, 4 of 1,024 experts, d=512": {
        "n_embd": 512,
        "n_layer": 8,
        "n_head": 8,
        "n_inner": 1024,
        "ffn_type": "moe",
        "num_ffn_experts": 1024,
        "num_ffn_experts_per_token": 4,
    },
}


@dataclass(frozen=True)
class Call:
    """What a process computes.

    Args:
        batch: sequences.
        length: tokens of each; of a decoder's, in T5.
        source_length: tokens of an encoder's, in T5.
        tp_size, ep_size: processes that share heads and neurons, and feed-forward experts.
    """

    batch: int
    length: int
    source_length: int = 0
    tp_size: int = 1
    ep_size: int = 1


def forward(config: Any, call: Call) -> Counter:
    """The numbers that a process gives to each kind of collective, in a model with a language head."""
    sent: Counter = Counter()
    for layer in _layers(config, call):
        sent += layer.forward()
    if call.tp_size > 1:
        for _, length in _stacks(config, call):
            sent["all_reduce"] += call.batch * length * config.hidden_size  # embeddings
        logits = call.batch * call.length * ceil(config.vocab_size / call.tp_size)
        sent["all_gather"] += logits
    return sent


def backward(config: Any, call: Call) -> Counter:
    """The same in a backward."""
    sent: Counter = Counter()
    for layer in _layers(config, call):
        sent += layer.backward()
    if call.tp_size > 1:
        sent["all_reduce"] += call.batch * call.length * config.hidden_size  # of the head's input
    return sent


def sharded(parameters_of_layers: int, other_parameters: int, size: int) -> Counter:
    """The same in a training step under FSDP version 2 over `size` processes: a layer is gathered in
    forward and again in backward, what is in no layer once."""
    every = parameters_of_layers + other_parameters
    gathered = (2 * parameters_of_layers + other_parameters) / size
    return Counter(all_gather=gathered, reduce_scatter=every)


def _stacks(config: Any, call: Call) -> list[tuple[int, int]]:
    """Layers and tokens of a sequence, of each stack; a decoder is the last."""
    if config.model_type == "moa_t5":
        return [(config.num_layers, call.source_length), (config.num_decoder_layers, call.length)]
    return [(config.num_hidden_layers, call.length)]


def _layers(config: Any, call: Call) -> list[Any]:
    found: list[Any] = []
    for index, (number, length) in enumerate(_stacks(config, call)):
        is_causal = config.model_type == "moa_gpt2" or index == 1
        layer = [_Attention(config, call, length, length, is_causal), _FeedForward(config, call, length)]
        if index == 1:
            layer.append(_Attention(config, call, length, call.source_length, is_causal))
        found += layer * number
    return found


@dataclass(frozen=True)
class _Attention:
    config: Any
    call: Call
    queries: int  # of a sequence
    keys: int
    is_causal: bool

    @property
    def is_self(self) -> bool:
        return self.queries == self.keys

    def forward(self) -> Counter:
        c, n, queries = self.config, self.call.tp_size, self.call.batch * self.queries
        if n == 1:
            return Counter()
        sent = Counter(all_reduce=queries * c.hidden_size) + self._exchanged()
        if self._has_norms:
            keys = 2 * self.call.batch * self.keys if self._splits_keys else 0
            sent["all_gather"] += keys * self._key_width // n
            if c.attention_type != "moa":
                sent["all_gather"] += queries * _width(c) // n
        return sent

    def backward(self) -> Counter:
        c, n = self.config, self.call.tp_size
        if n == 1:
            return Counter()
        queries, keys = self.call.batch * self.queries, self.call.batch * self.keys
        is_moa, is_fused = c.attention_type == "moa", c.model_type == "moa_gpt2"
        sent = self._exchanged()
        each = queries  # gradients of d numbers, each matrix's of its own input
        if self._splits_keys:
            each = queries + (0 if is_fused and not is_moa else keys if is_fused else 2 * keys)
        else:
            sent["all_reduce"] += 2 * keys * c.head_dim
        sent["all_reduce"] += each * c.hidden_size
        if _shares_biases(c) and self._splits_keys:
            sent["all_reduce"] += 2 * self._key_width + (0 if is_moa else _width(c))
        if is_moa:
            sent["all_reduce"] += queries * c.num_attention_heads  # weights of experts
        if c.attention_type == "mae" and c.mae_gate_type == "learned":
            sent["all_reduce"] += (
                queries if self.is_causal else self.call.batch
            ) * c.num_attention_heads
        if c.model_type == "moa_t5" and self.is_self:
            biases = c.attention_experts if is_moa else c.num_attention_heads
            sent["all_reduce"] += biases * self.queries * self.keys
        if c.cct_budgets is not None:
            sent["all_reduce"] += queries + keys  # gates
        if self._has_norms and self._splits_keys:
            sent["all_reduce"] += 2 * keys * self._key_width
        if self._has_norms and is_moa:
            sent["all_reduce"] += (1 if c.model_type == "moa_t5" else 2) * c.head_dim
        elif self._has_norms:
            sent["all_reduce"] += queries * _width(c)
        return sent

    def _exchanged(self) -> Counter:
        """Queries and contexts of MoA's slots, which are not where their experts are."""
        if self.config.attention_type != "moa" or self._splits_keys:
            return Counter()
        slots = self.call.batch * self.queries * _width(self.config)
        return Counter(reduce_scatter=slots, all_gather=slots // self.call.tp_size)

    @property
    def _splits_keys(self) -> bool:
        return self.config.attention_type != "moa" or self.config.moa_key_value_heads > 1

    @property
    def _key_width(self) -> int:
        heads = self.config.num_attention_heads
        if self.config.attention_type == "moa":
            heads = self.config.moa_key_value_heads
        return heads * self.config.head_dim

    @property
    def _has_norms(self) -> bool:
        return self.config.cct_budgets is not None and self.config.cct_sublayer_norm


@dataclass(frozen=True)
class _FeedForward:
    config: Any
    call: Call
    tokens_of_sequence: int

    def forward(self) -> Counter:
        return self._sent(matrices=1)

    def backward(self) -> Counter:
        c, call = self.config, self.call
        is_gated = c.model_type == "moa_t5" and c.feed_forward_proj.startswith("gated-")
        sent = self._sent(matrices=1 + is_gated)
        tokens = call.batch * self.tokens_of_sequence
        if c.ffn_type == "moe":
            if call.ep_size > 1 and call.tp_size > 1:  # weights of experts
                rows = ceil(tokens / call.ep_size)
                sent["all_gather"] += self._parts * rows * c.num_ffn_experts_per_token
        elif call.tp_size > 1:
            if _shares_biases(c) and self._parts == 1:
                sent["all_reduce"] += c.ffn_size
            if c.cct_budgets is not None and self._parts == 1:
                sent["all_reduce"] += tokens * c.cct_num_ffn_splits  # gates
        return sent

    def _sent(self, matrices: int) -> Counter:
        c, call = self.config, self.call
        tokens = call.batch * self.tokens_of_sequence
        if c.ffn_type == "moe":
            if call.ep_size == 1:
                return Counter()
            # to the experts and back; where all processes have the same tokens, each sends some of them
            share = call.ep_size if call.tp_size > 1 else 1
            rows = 2 * tokens * c.num_ffn_experts_per_token / share
            sent = Counter(all_to_all=self._parts * rows * c.hidden_size)
            if share > 1:
                sent["all_gather"] += self._parts * ceil(tokens / share) * c.hidden_size
            return sent
        if call.tp_size == 1:
            return Counter()
        return Counter(all_reduce=matrices * self._parts * tokens * c.hidden_size)

    @property
    def _parts(self) -> int:
        """Networks side by side, of CCT."""
        c = self.config
        has_some = c.cct_budgets is not None and (c.cct_sublayer_norm or c.ffn_type == "moe")
        return c.cct_num_ffn_splits if has_some else 1


def _shares_biases(config: Any) -> bool:
    """Whether all processes have the biases of a split layer's outputs."""
    is_dealt = config.nested_budgets is not None and config.model_type == "moa_bert"
    return is_dealt or config.model_type == "moa_gpt2"


def _width(config: Any) -> int:
    return config.num_attention_heads * config.head_dim


@dataclass(frozen=True)
class _Model:
    """What a step on one GPU takes, of a model of `MODELS`."""

    config: Any
    operations: float  # of a token's forward
    in_layers: int  # parameters, without feed-forward experts
    others: int
    experts: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> _Model:
        config = MoaGPT2Config(**fields)
        with torch.device("meta"):
            model = MoaGPT2LMHeadModel(config)
        model.tie_weights()
        sizes: Counter = Counter()
        for name, parameter in model.named_parameters():
            place = "experts" if ".experts." in name else "layers" if ".h." in name else "others"
            sizes[place] += parameter.numel()
        operations = model.flops(LENGTH).active / LENGTH
        return cls(config, operations, sizes["layers"], sizes["others"], sizes["experts"])

    def step(self, **sizes: int) -> Counter:
        """What a forward and a backward send."""
        call = Call(SEQUENCES * sizes.get("tp_size", 1), LENGTH, **sizes)
        return forward(self.config, call) + backward(self.config, call)

    def share(self, seconds: float) -> float:
        """Of a step's time."""
        computing = 3 * self.operations * SEQUENCES * LENGTH / OPERATIONS
        return seconds / (seconds + computing)


def _seconds(sent: Counter, size: int, rate: float) -> float:
    """Of rings of `size` processes at a rate, and of all sending to all, most of them in other nodes."""
    rest = (size - 1) / size
    ring = (
        2 * sent["all_reduce"] * rest + sent["reduce_scatter"] * rest + sent["all_gather"] * (size - 1)
    )
    seconds = ring / rate
    near = min(size, IN_NODE)
    seconds += sent["all_to_all"] * (near - 1) / size / NVLINK
    if size > near:
        seconds += sent["all_to_all"] * (size - near) / size / INFINIBAND
    return BYTES * seconds


def _by_fsdp(model: _Model, gpus: int) -> float:
    """Each layer's parameters, experts included, over all GPUs."""
    sent = sharded(model.in_layers + model.experts, model.others, gpus)
    return _seconds(sent, gpus, _ring_rate(gpus))


def _by_hsdp(model: _Model, gpus: int) -> float:
    """A whole model in each node."""
    sent = sharded(model.in_layers + model.experts, model.others, IN_NODE)
    gradients = Counter(all_reduce=(model.in_layers + model.experts + model.others) / IN_NODE)
    seconds = _seconds(sent, IN_NODE, NVLINK)
    return seconds + _seconds(gradients, gpus // IN_NODE, INFINIBAND)


def _by_heads(model: _Model, gpus: int) -> float:
    """`tp_size` of a node's GPUs, which share a batch; FSDP over the nodes."""
    seconds = _seconds(model.step(tp_size=IN_NODE), IN_NODE, NVLINK)
    if gpus == IN_NODE:
        return seconds
    sent = sharded(model.in_layers // IN_NODE, model.others // IN_NODE, gpus // IN_NODE)
    return seconds + _seconds(sent, gpus // IN_NODE, INFINIBAND)


def _by_experts(model: _Model, gpus: int) -> float:
    """`ep_size` of all GPUs; FSDP of everything else over all of them."""
    seconds = _seconds(model.step(ep_size=gpus), gpus, NVLINK)
    sent = sharded(model.in_layers, model.others, gpus)
    return seconds + _seconds(sent, gpus, _ring_rate(gpus))


def _by_experts_of_node(model: _Model, gpus: int) -> float:
    """`ep_size` of a node's GPUs, and FSDP of a GPU's experts over the nodes."""
    seconds = _seconds(model.step(ep_size=IN_NODE), IN_NODE, NVLINK)
    seconds += _seconds(sharded(model.in_layers, model.others, gpus), gpus, _ring_rate(gpus))
    if gpus > IN_NODE:
        sent = sharded(model.experts // IN_NODE, 0, gpus // IN_NODE)
        seconds += _seconds(sent, gpus // IN_NODE, INFINIBAND)
    return seconds


def _ring_rate(gpus: int) -> float:
    """Of a ring through whole nodes, whose GPUs send by all their links at once."""
    return NVLINK if gpus == IN_NODE else min(NVLINK, IN_NODE * INFINIBAND)


FORMS: dict[str, Callable[[_Model, int], float]] = {
    "FSDP over all": _by_fsdp,
    "HSDP, sharded in a node": _by_hsdp,
    "tensor parallelism in a node, FSDP over nodes": _by_heads,
}
FORMS_OF_EXPERTS: dict[str, Callable[[_Model, int], float]] = {
    "FSDP over all": _by_fsdp,
    "experts over all": _by_experts,
    "experts over a node": _by_experts_of_node,
}


def table() -> str:
    """The share of a training step's time in which GPUs send, in percent, as Markdown."""
    lines = [
        f"| GPUs | | {' | '.join(map(str, GPUS))} |",
        f"|---|---|{'---|' * len(GPUS)}",
    ]
    for name, fields in MODELS.items():
        model = _Model.of(fields)
        for form, seconds in (FORMS_OF_EXPERTS if model.experts else FORMS).items():
            cells = [f"{100 * model.share(seconds(model, gpus)):.0f}" for gpus in GPUS]
            lines.append(f"| {name} | {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
