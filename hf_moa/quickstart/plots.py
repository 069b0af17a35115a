"""The picture of the gates. Needs matplotlib, the extra `plots`."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .gates import TokenCompute

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Even in lightness from dark to bright: readable in grey and to the colour-blind.
_COLOURS = "cividis"


def draw_gates(
    path: str | Path,
    expert_weights: torch.Tensor,
    labels: list[str],
    compute: TokenCompute,
    text: str,
) -> None:
    """Writes a picture: above, the experts' weights by class; below, the open gates by token.

    Args:
        path: file to write, its format taken from the suffix.
        expert_weights: `[layers, classes, experts]`.
        labels: names of the classes.
        compute: the gates of one text.
        text: that text, for the title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot: no window system is asked for, and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_layers, _, num_experts = expert_weights.shape
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[1, 1]).flatten()
    _draw_experts(upper, expert_weights, labels, num_layers, num_experts)
    _draw_tokens(lower, compute, text)
    figure.savefig(path, dpi=150)


def _draw_experts(
    figure: "SubFigure",
    weights: torch.Tensor,
    labels: list[str],
    num_layers: int,
    num_experts: int,
) -> None:
    axes = figure.subplots(1, num_layers, sharey=True, squeeze=False)[0]
    known = weights[~weights.isnan()]
    low, high = known.min().item(), known.max().item()
    for layer, axis in enumerate(axes):
        image = axis.imshow(
            weights[layer].numpy(),
            cmap=_COLOURS,
            vmin=low,
            vmax=high,
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_title(f"layer {layer}", fontsize=10)
        axis.set_xticks(range(num_experts), [str(expert) for expert in range(num_experts)])
        axis.set_xlabel("expert")
        axis.set_yticks(range(len(labels)), labels)
    figure.colorbar(image, ax=list(axes), label="mean weight", pad=0.01)
    figure.suptitle(
        f"MAE: mean weight of each expert by class (uniform: {1 / num_experts:.3f})", fontsize=12
    )


def _draw_tokens(figure: "SubFigure", compute: TokenCompute, text: str) -> None:
    axes = figure.subplots(len(compute.open_gates), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (budget, shares) in zip(axes, compute.open_gates.items(), strict=True):
        image = axis.imshow(
            shares.numpy(), cmap=_COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axis.set_yticks(range(shares.shape[0]))
        axis.set_ylabel("layer")
        axis.set_title(
            f"budget {budget:g}: {compute.compute_fraction[budget]:.0%} of the full computation",
            fontsize=10,
        )
        _write_numbers(axis, shares)
    axes[-1].set_xticks(range(len(compute.tokens)), compute.tokens, rotation=45, ha="right")
    figure.colorbar(image, ax=list(axes), label="share of gates open", pad=0.01)
    figure.suptitle(f"CCT: compute by token of “{text}”", fontsize=12)


def _write_numbers(axis: "Axes", shares: torch.Tensor) -> None:
    # Percentages, so that the picture can be read without its colours.
    for layer, of_layer in enumerate(shares.tolist()):
        for position, share in enumerate(of_layer):
            axis.text(
                position,
                layer,
                f"{100 * share:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="black" if share > 0.5 else "white",
            )
