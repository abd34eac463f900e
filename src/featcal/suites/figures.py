"""Figures of the studies. Readable without colour: every curve has its own marker and line, every bar its hatching."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..writer import atomic_write

_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"))
_HATCHES = ("", "//", "xx", "..", "\\\\")
_LABELS = {"ridge": "ridge λ", "alpha": "target interpolation α", "rho": "anchor blend ρ"}


def samples(
    file: Path,
    counts: Sequence[int],
    curves: Mapping[str, Sequence[Sequence[float]]],
    start: tuple[str, float],
    published: Mapping[str, Mapping[int, float]],
) -> None:
    """Average against samples per task, mean ± standard deviation over seeds; published curves in grey."""
    figure, axes = _new()
    for (method, points), (marker, line) in zip(curves.items(), _STYLES, strict=False):
        means = [statistics.fmean(values) for values in points]
        spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in points]
        axes.errorbar(counts, means, spreads, marker=marker, linestyle=line, capsize=3, label=method)
        theirs = published.get(method)
        if theirs:
            axes.plot(
                list(theirs), list(theirs.values()), marker, color="grey", mfc="none", label=f"{method}, published"
            )
    axes.axhline(start[1], color="black", linewidth=0.8, linestyle=":", label=start[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(count) for count in counts])
    axes.set(xlabel="calibration samples per task", ylabel="average score (%)")
    _finish(figure, axes, file)


def bars(file: Path, table: Mapping[str, Mapping[str, float]], start: tuple[str, float], label: str) -> None:
    """Groups of bars: one group per condition, one bar per method; the upstream as a line."""
    figure, axes = _new()
    conditions = list(next(iter(table.values())))
    width = 0.8 / len(table)
    for number, (method, values) in enumerate(table.items()):
        places = [index + (number - (len(table) - 1) / 2) * width for index in range(len(conditions))]
        hatch = _HATCHES[number % len(_HATCHES)]
        axes.bar(places, [values[c] for c in conditions], width, hatch=hatch, edgecolor="black", label=method)
    axes.axhline(start[1], color="black", linewidth=0.8, linestyle=":", label=start[0])
    axes.set_xticks(range(len(conditions)), [condition.replace("_", " ") for condition in conditions])
    lowest = min(start[1], *(value for values in table.values() for value in values.values()))
    axes.set_ylim(bottom=max(0.0, lowest - 5))
    axes.set(ylabel=label)
    _finish(figure, axes, file)


def ablation(
    file: Path, curves: Mapping[str, Mapping[str, Mapping[float, float]]], starts: Mapping[str, float]
) -> None:
    """One panel per setting, one curve per upstream; each upstream's own score as a line."""
    figure, panels = _new(len(curves))
    for axes, (setting, own) in zip(panels if len(curves) > 1 else [panels], curves.items(), strict=True):
        for number, (upstream, points) in enumerate(own.items()):
            marker, line = _STYLES[number % len(_STYLES)]
            axes.plot(list(points), list(points.values()), marker=marker, linestyle=line, label=f"{upstream} + featcal")
            axes.axhline(starts[upstream], color=f"C{number}", linewidth=0.8, linestyle=":", label=upstream)
        if setting == "ridge":
            axes.set_xscale("log")
        axes.set(xlabel=_LABELS[setting], ylabel="average score (%)")
        axes.legend(frameon=False, fontsize=8)
    _save(figure, file)


def phases(file: Path, seconds: Mapping[str, Mapping[str, float]]) -> None:
    """Where the time went: one stacked bar per method."""
    figure, axes = _new()
    names = list(dict.fromkeys(phase for own in seconds.values() for phase in own))
    for method, own in seconds.items():
        left = 0.0
        for place, phase in enumerate(names):
            value = own.get(phase, 0.0)
            hatch = _HATCHES[place % len(_HATCHES)]
            axes.barh(method, value, left=left, color=f"C{place}", hatch=hatch, edgecolor="black")
            left += value
    for place, phase in enumerate(names):
        axes.barh(0, 0, color=f"C{place}", hatch=_HATCHES[place % len(_HATCHES)], edgecolor="black", label=phase)
    axes.set(xlabel="seconds")
    _finish(figure, axes, file)


def _new(panels: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 if panels == 1 else 4.5 * panels, 4), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=True)


def _finish(figure: Any, axes: Any, file: Path) -> None:
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    with atomic_write(file) as stream:
        figure.savefig(stream, format="png", dpi=150)
