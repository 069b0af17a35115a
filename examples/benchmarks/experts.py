"""The projections of MoA's experts: all of them, of which the chosen are kept, against expert by expert.
Where they cross is what `computes_by_expert` in `hf_moa/modeling/moa/projections.py` reckons with."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from tables import Table

from hf_moa.modeling.moa.projections import ExpertInput, ExpertOutput
from hf_moa.timing import compare

# tokens; d, dh, k
TOKENS = {"cpu": (256, 2_048), "cuda": (4_096, 16_384, 65_536)}
SIZES = {"cpu": ((512, 64, 8),), "cuda": ((512, 64, 8), (1024, 64, 16), (1024, 128, 8))}
TIMES_AS_MANY = (2, 4, 8)  # experts as are chosen


def measure(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """Into the heads and out of them, k of N experts."""
    device = torch.get_default_device().type
    for training in (False, True):
        for hidden_size, head_dim, selected in SIZES[device]:
            for tokens in TOKENS[device]:
                for times in TIMES_AS_MANY:
                    experts = times * selected
                    run = projections(tokens, hidden_size, head_dim, selected, experts, dtype, training)
                    candidates = {
                        name: run(execution)
                        for name, execution in {"all experts": "dense", "by expert": "sparse"}.items()
                    }
                    what = "training" if training else "inference"
                    yield Table(
                        group="experts",
                        title=f"MoA's projections, {what}, {selected} of {experts} experts, {tokens:,} "
                        f"tokens, d={hidden_size}, dh={head_dim}",
                        results=compare(candidates, turns=turns, title=f"experts {experts}"),
                    )


def projections(
    tokens: int,
    hidden_size: int,
    head_dim: int,
    selected: int,
    experts: int,
    dtype: torch.dtype,
    training: bool,
) -> Callable[[str], Callable[[], object]]:
    """Of an execution: both maps, and in training their gradients."""
    into = ExpertInput(num_experts=experts, in_features=hidden_size, out_features=head_dim).to(dtype)
    out_of = ExpertOutput(num_experts=experts, in_features=head_dim, out_features=hidden_size).to(dtype)
    index = torch.rand(1, tokens, experts).topk(selected).indices
    weight = torch.rand(1, tokens, selected, dtype=dtype)
    x = torch.randn(1, tokens, hidden_size, dtype=dtype, requires_grad=training)
    context = torch.randn(1, tokens, selected, head_dim, dtype=dtype, requires_grad=training)
    learning = [x, context, *into.parameters(), *out_of.parameters()]
    gradients = [torch.randn_like(context), torch.randn_like(x)]

    def compute(execution: str) -> object:
        into.moa_execution = out_of.moa_execution = execution
        with torch.set_grad_enabled(training):
            outputs = [into(x, index), out_of(context, index, weight)]
        return torch.autograd.grad(outputs, learning, gradients) if training else outputs

    return lambda execution: partial(compute, execution)
