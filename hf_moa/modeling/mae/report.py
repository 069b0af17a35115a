"""What a report says and shows of MAE's gates."""

from __future__ import annotations

from functools import partial

from hf_moa.analysis.plots import plot_entropies, plot_shares
from hf_moa.analysis.sections import Section, joined, with_mean

SECTIONS = (
    Section(
        "mae_entropy",
        "MAE: entropy of the gates",
        "Mean over inputs of the entropy of the gate's distribution over experts. At the uniform value "
        "the gate has learned nothing; near zero it uses one expert.",
        plot_entropies,
        with_mean,
    ),
    Section(
        "mae_experts",
        "MAE: inputs attributed to each expert",
        "Share of the inputs whose largest gate is each expert's (table 8), experts named by the heads "
        "that they drop. An input of a bidirectional layer is a sequence; of a causal one a position "
        "with what precedes it.",
        partial(plot_shares, column="share", experts="drops heads"),
    ),
    Section(
        "mae_indicative_tokens",
        "MAE: tokens telling of an expert",
        "Tokens with the highest pointwise mutual information with each expert, in nats (table 6): how "
        "much more often than by chance their inputs go to it.",
        shorten=partial(joined, by=["part", "layer", "expert"], value="pmi"),
    ),
)
