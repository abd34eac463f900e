"""The demo's picture: drift per block, merged against calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..writer import atomic_write

_STYLE = {
    "merged": {"color": "0.45", "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    "calibrated": {"color": "black", "linestyle": "-", "marker": "o", "markerfacecolor": "black"},
}


def plot_drift(drifts: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    """Saves one panel per task; readable in black and white.

    Args:
        drifts: task → `merged` and `calibrated` → mean drift per block, first block first.
        file: a PNG file.
    """
    from matplotlib.figure import Figure  # a second to import, and every command imports this module

    figure = Figure(figsize=(2.1 * len(drifts) + 0.4, 2.6), layout="constrained")
    axes = figure.subplots(1, len(drifts), sharey=True, squeeze=False)[0]
    for axis, (task, curves) in zip(axes, drifts.items(), strict=True):
        for name, values in curves.items():
            blocks = range(1, len(values) + 1)
            axis.plot(blocks, values, label=name, linewidth=1.3, markersize=4, **_STYLE[name])
        axis.set_title(task, fontsize=10)
        axis.set_xticks(range(1, len(next(iter(curves.values()))) + 1))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.9", linewidth=0.6)
    # The axes share their limits, which must wait until every curve is drawn.
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("drift: mean ‖h − h expert‖₂", fontsize=9)
    figure.supxlabel("block", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    with atomic_write(file) as stream:
        figure.savefig(stream, format="png", dpi=150)
