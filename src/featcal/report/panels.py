"""The report's figures. Each is a list of panels; a page shows them one by one, a PNG side by side.

In every panel the merged model as given is orange, dashed and hollow; the calibrated one blue, solid and filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .schema import Report, Task
from .svg import Palette, shown

PANELS, FEWEST, MARKS = 12, 4, 600
"""Panels of a figure with one panel per task, at most; of very deep models fewer (MARKS over the depth), but FEWEST."""
Axes = Any
Draw = Callable[[Axes, Palette], None]


@dataclass(frozen=True)
class Panel:
    """One drawing, and what a screen reader says of it."""

    label: str
    draw: Draw
    width: float = 3.4
    height: float = 2.6
    """Inches."""
    margins: tuple[float, float, float, float] = (0.62, 0.46, 0.1, 0.28)
    """Left, bottom, right, top, inches: fixed, because fitting them costs as much as drawing."""


@dataclass(frozen=True)
class Chart:
    """A figure of the report. `name` is its file name."""

    name: str
    title: str
    caption: str
    panels: list[Panel]


def charts(report: Report) -> list[Chart]:
    """All figures that the report's data allow, in reading order."""
    tasks, note = shown_tasks(report)
    viewed = [task for task in tasks if task.view]
    split = [task for task in tasks if _has_split(task)]
    drifting = [task for task in tasks if any(b.before is not None for b in task.drift)]
    paired = [task for task in tasks if _pairs(task)]
    made = [
        _per_task("drift", "Drift, block by block", DRIFT + note, drifting, draw_drift, **ROOMY),
        _cosine_chart(report),
        _per_task("split", "Where the drift comes from", SPLIT + note, split, draw_split, **ROOMIER),
        _per_task("samples", "Every held-out sample", SAMPLES + note, paired, draw_samples),
        _per_task("view", "The features in two dimensions", VIEW + note, viewed, draw_view, **ROOMY),
        _neighbours_chart(viewed, note),
        _gain_chart(report),
        _tuning_chart(report),
        _time_chart(report),
    ]
    return [chart for chart in made if chart is not None and chart.panels]


DRIFT = (
    "Mean L2 distance between the model's and the expert's features after each block, on held-out samples. Lower is "
    "closer to the expert."
)
SPLIT = (
    "The same drift, split exactly: what the block itself adds on the expert's input (local, solid) and what it makes "
    "of the drift that reaches it (propagated, hatched). Parts below zero act against the drift."
)
SAMPLES = (
    "Cosine of the final feature to the expert's, one point per held-out sample. Above the line: calibration helped."
)
VIEW = (
    "Final features of the same samples in the three models, in their two leading principal components. The calibrated "
    "points should lie nearer to the expert's than the merged ones do."
)
NEIGHBOURS = "The same features by t-SNE: neighbours stay neighbours, distances between groups mean little."


ROOMY: dict[str, Any] = {"height": 2.8, "margins": (0.62, 0.66, 0.1, 0.28)}
"""Room for a legend of one row under the axis; ROOMIER for two."""
ROOMIER: dict[str, Any] = {"height": 2.95, "margins": (0.62, 0.82, 0.1, 0.28)}
NAMED = (1.55, 0.46, 0.25, 0.3)
"""Margins for task names on the left."""


def _per_task(
    name: str, title: str, caption: str, tasks: Sequence[Task], draw: Callable[..., None], **shape: Any
) -> Chart:
    def panel(task: Task) -> Panel:
        return Panel(f"{title}: {task.name}", lambda ax, p: draw(ax, p, task), **shape)

    return Chart(name, title, caption, [panel(task) for task in tasks])


def shown_tasks(report: Report) -> tuple[list[Task], str]:
    """The tasks that get a panel: all, or those that gained least when there are too many."""
    depth = max([len(task.drift) for task in report.tasks] + [1])
    most = min(PANELS, max(FEWEST, MARKS // depth))
    if len(report.tasks) <= most:
        return report.tasks, ""

    def gained(task: Task) -> float:
        return -math.inf if task.verdict == "worse" else task.gain.mean if task.gain else math.inf

    worst = {id(task) for task in sorted(report.tasks, key=gained)[:most]}
    note = f" {most} of {len(report.tasks)} tasks are drawn, those that gained least."
    return [task for task in report.tasks if id(task) in worst], note


# ------------------------------------------------------------------------------------------------------- panels


def draw_drift(ax: Axes, p: Palette, task: Task) -> None:
    blocks = task.drift
    x = np.arange(1, len(blocks) + 1)
    ax.plot(x, [_nan(b.before) for b in blocks], color=p.before, ls="--", marker="o", mfc="none", ms=4, label="merged")
    ax.plot(x, [_nan(b.after) for b in blocks], color=p.after, marker="s", ms=4, label="calibrated")
    _block_axis(ax, p, task)
    ax.set(title=shown(task.name), ylabel="drift ‖e‖₂ (feature units)", ylim=(0, None))
    _legend_below(ax, 2)


def draw_split(ax: Axes, p: Palette, task: Task) -> None:
    x = np.arange(1, len(task.drift) + 1)
    for side, colour, shift in (("before", p.before, -0.2), ("after", p.after, 0.2)):
        local = np.array([_nan(getattr(b.local_part, side)) for b in task.drift])
        other = np.array([_nan(getattr(b.propagated_part, side)) for b in task.drift])
        # Parts of opposite sign start both from zero, else the bar would hide the smaller one.
        bottom = np.where(local * other < 0, 0.0, local)
        word = "merged" if side == "before" else "calibrated"
        ax.bar(x + shift, local, 0.36, color=colour, edgecolor=colour, lw=0.6, label=f"{word}: local")
        hatched = {"color": "none", "edgecolor": colour, "hatch": "/////", "lw": 0.6}
        ax.bar(x + shift, other, 0.36, bottom=bottom, label=f"{word}: propagated", **hatched)
    ax.axhline(0, color=p.ink, lw=0.6)
    _block_axis(ax, p, task)
    ax.set(title=shown(task.name), ylabel="part of the drift (feature units)")
    _legend_below(ax, 2)


def draw_samples(ax: Axes, p: Palette, task: Task) -> None:
    before, after = np.array(_pairs(task)).T
    low = float(min(before.min(), after.min()))
    low = low - 0.05 * (1 - low) - 1e-3
    ax.plot([low, 1], [low, 1], color=p.ink, lw=0.8, ls=":")
    ax.plot(before, after, color=p.after, marker="s", ms=3, ls="none", alpha=0.7)
    share = float((after > before).mean())
    ax.text(0.03, 0.97, f"{share:.0%} of {len(before)} closer", transform=ax.transAxes, va="top")
    ax.set(title=shown(task.name), xlabel="cosine, merged", ylabel="cosine, calibrated", xlim=(low, 1), ylim=(low, 1))
    ax.set_aspect("equal")
    _few_ticks(ax)


def draw_view(ax: Axes, p: Palette, task: Task) -> None:
    assert task.view is not None
    columns = min(2, len(task.view.explained))
    sides = [np.array(side)[:, :columns] for side in (task.view.expert, task.view.merged, task.view.calibrated)]
    if columns == 1:
        sides = [np.column_stack([side, np.zeros(len(side))]) for side in sides]
    names = [f"component {i + 1} ({share:.0%} of variance)" for i, share in enumerate(task.view.explained[:2])]
    _cloud(ax, p, sides, task)
    ax.set(xlabel=names[0], ylabel=names[1] if columns > 1 else "")


def _cloud(ax: Axes, p: Palette, sides: Sequence[Any], task: Task) -> None:
    marks: list[dict[str, Any]] = [
        {"color": p.expert, "marker": "o", "ms": 3.5, "label": "expert"},
        {"color": p.before, "marker": "^", "ms": 4.5, "mfc": "none", "label": "merged"},
        {"color": p.after, "marker": "x", "ms": 4.5, "label": "calibrated"},
    ]
    for side, mark in zip(sides, marks, strict=True):
        ax.plot(side[:, 0], side[:, 1], ls="none", mew=0.9, **mark)
    ax.set_title(shown(task.name))
    _legend_below(ax, 3)
    _few_ticks(ax)


def _cosine_chart(report: Report) -> Chart | None:
    tasks = [t for t in report.tasks if t.cosine.before is not None and t.cosine.after is not None]
    if not tasks:
        return None

    def draw(ax: Axes, p: Palette) -> None:
        for y, task in enumerate(reversed(tasks)):
            before, after = _nan(task.cosine.before), _nan(task.cosine.after)
            ax.annotate("", (after, y), (before, y), arrowprops={"arrowstyle": "->", "color": p.ink, "lw": 0.8})
            ax.plot(
                before, y, color=p.before, marker="o", mfc=p.paper, ms=6, ls="none", label="merged" if not y else None
            )
            ax.plot(after, y, color=p.after, marker="s", ms=5.5, ls="none", label="calibrated" if not y else None)
        ax.set_yticks(range(len(tasks)), [shown(task.name) for task in reversed(tasks)])
        ax.set(xlabel="mean cosine of the final feature to the expert's", ylim=(-0.6, len(tasks) - 0.4))
        ax.margins(x=0.08)
        ax.grid(axis="x", lw=0.5)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)

    caption = "From the merged model (hollow) to the calibrated one (filled). 1 is the expert itself."
    panel = Panel("Cosine of the final feature per task", draw, 6.4, 0.9 + 0.28 * len(tasks), NAMED)
    return Chart("cosine", "Final features", caption, [panel])


def _neighbours_chart(tasks: Sequence[Task], note: str) -> Chart | None:
    """t-SNE of the kept components, where scikit-learn is installed."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None

    def panel(task: Task) -> Panel:
        assert task.view is not None
        sides = [np.array(side) for side in (task.view.expert, task.view.merged, task.view.calibrated)]
        points = np.concatenate(sides)
        perplexity = min(30.0, (len(points) - 1) / 3)
        found = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
        parts = np.split(found, 3)

        def draw(ax: Axes, p: Palette) -> None:
            _cloud(ax, p, parts, task)
            ax.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")

        return Panel(f"t-SNE of the features: {task.name}", draw, **ROOMY)

    wide = [t for t in tasks if t.view and len(t.view.explained) >= 2 and len(t.view.expert) >= 4]
    return Chart("tsne", "The features by t-SNE", NEIGHBOURS + note, [panel(task) for task in wide])


def gains(report: Report) -> tuple[str, list[tuple[str, float, float]]]:
    """What is gained besides cosine, in words, and (task, Δcosine, Δ in points) for the tasks that have both."""
    merged, calibrated = report.scores.get("merged", {}), report.scores.get("calibrated", {})
    found = []
    for task in report.tasks:
        old, new = merged.get(task.name), calibrated.get(task.name)
        cosine = _difference(task.cosine.before, task.cosine.after)
        if old and new and old.metric == new.metric != "perplexity" and cosine is not None:
            found.append((task.name, cosine, new.value - old.value))
    if found:
        return "score (points)", found
    for task in report.tasks:
        cosine, agreed = (_difference(pair.before, pair.after) for pair in (task.cosine, task.agreement))
        if cosine is not None and agreed is not None:
            found.append((task.name, cosine, 100 * agreed))
    return "agreement with the expert (points)", found


def _gain_chart(report: Report) -> Chart | None:
    what, found = gains(report)
    if not found:
        return None

    def draw(ax: Axes, p: Palette) -> None:
        ax.axhline(0, color=p.ink, lw=0.6)
        ax.axvline(0, color=p.ink, lw=0.6)
        places = np.linspace(0, 1, len(found) + 2)[1:-1]
        for place, (name, x, y) in zip(places, sorted(found, key=lambda point: (point[2], -point[1])), strict=True):
            ax.plot(x, y, color=p.after, marker="s", ms=5, ls="none")
            ax.annotate(
                shown(name, 18), (x, y), (1.03, place), textcoords="axes fraction", fontsize=8, va="center",
                arrowprops={"arrowstyle": "-", "color": p.ink, "lw": 0.4, "relpos": (0, 0.5), "shrinkA": 2},
                annotation_clip=False,
            )  # fmt: skip
        ax.set(xlabel="gain in cosine to the expert", ylabel=f"gain in {what}")
        ax.margins(0.1)

    caption = "One point per task. Upper right: features and outputs both improved. The two need not go together."
    height = max(3.2, 0.8 + 0.2 * len(found))
    panel = Panel(f"Gain in cosine against gain in {what}", draw, 6.4, height, (0.62, 0.46, 1.5, 0.2))
    return Chart("gain", "Features against outcomes", caption, [panel])


def _tuning_chart(report: Report) -> Chart | None:
    tried = [c for c in report.tuning.candidates if c.criterion is not None] if report.tuning else []
    if not tried:
        return None

    def panel(name: str, symbol: str) -> Panel:
        def draw(ax: Axes, p: Palette) -> None:
            ax.axhline(1, color=p.before, ls="--", lw=1, label="merged model")
            for c in tried:
                value = getattr(c, name)
                mark = {"marker": "*", "ms": 11} if c.chosen else {"marker": "o", "ms": 4.5, "mfc": "none"}
                ax.plot(value, c.criterion, color=p.after, ls="none", **mark)
            ax.plot([], [], color=p.after, marker="o", mfc="none", ms=4.5, ls="none", label="tried")
            if any(c.chosen for c in tried):
                ax.plot([], [], color=p.after, marker="*", ms=9, ls="none", label="chosen")
            values = [getattr(c, name) for c in tried]
            if name == "ridge" and min(values) > 0 and max(values) > 5 * min(values):
                ax.set_xscale("log")
                ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                ax.xaxis.set_minor_formatter(lambda value, _: "")
            ax.set(xlabel=f"{symbol} ({name})", ylabel="criterion (lower is better)")
            ax.legend(loc="best")

        return Panel(f"Criterion against {name}", draw)

    caption = (
        "Every candidate of the label-free search, against each of its three settings. The criterion is the distance "
        "of the outputs from the experts' on held-out samples; the merged model as given scores 1."
    )
    panels = [panel("ridge", "λ"), panel("rho", "ρ"), panel("alpha", "α")]
    return Chart("tuning", "How the settings were chosen", caption, panels)


def phases(report: Report) -> list[tuple[str, float]]:
    """Seconds by phase that add up to the total: measuring is taken out of the calibration that it runs in."""
    seconds = dict(report.seconds)
    total = seconds.pop("total", None)
    if "measure" in seconds and "calibrate" in seconds:
        seconds["calibrate"] = max(seconds["calibrate"] - seconds["measure"], 0.0)
    if total is not None and total - sum(seconds.values()) > 0.01 * total:
        seconds["other"] = total - sum(seconds.values())
    return list(seconds.items())


def _time_chart(report: Report) -> Chart | None:
    found = phases(report)
    if not found:
        return None

    def draw(ax: Axes, p: Palette) -> None:
        for y, (_, value) in enumerate(reversed(found)):
            ax.barh(y, value, 0.6, color=p.after)
            ax.annotate(f"{value:.3g} s", (value, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_yticks(range(len(found)), [shown(name) for name, _ in reversed(found)])
        ax.set_xlabel("seconds")
        ax.margins(x=0.15)

    panel = Panel("Seconds by phase", draw, 6.4, 0.8 + 0.28 * len(found), NAMED)
    return Chart("time", "Where the time went", "Wall-clock seconds of this run, by phase.", [panel])


# ------------------------------------------------------------------------------------------------------ helpers


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _has_split(task: Task) -> bool:
    return any(b.local_part.before is not None or b.local_part.after is not None for b in task.drift)


def _pairs(task: Task) -> list[tuple[float, float]]:
    sides = (task.sample_cosines.get("before", []), task.sample_cosines.get("after", []))
    return [(b, a) for b, a in zip(*sides, strict=False) if b is not None and a is not None]


def _block_axis(ax: Axes, p: Palette, task: Task) -> None:
    """Blocks numbered from 1 in forward order; a line where another stack (a decoder) begins."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("block, in forward order")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.set_xlim(0.4, len(task.drift) + 0.6)
    stacks = [b.block.rpartition(".")[0] for b in task.drift]
    for place in range(1, len(stacks)):
        if stacks[place] != stacks[place - 1]:
            ax.axvline(place + 0.5, color=p.ink, lw=0.6, ls=":")
            ax.annotate(
                shown(stacks[place].partition(".")[0], 14), (place + 0.5, 1), (2, -1), fontsize=7, va="top",
                xycoords=("data", "axes fraction"), textcoords="offset points",
            )  # fmt: skip


def _legend_below(ax: Axes, columns: int) -> None:
    """Out of the data's way, under the axis label."""
    spacing = {"handletextpad": 0.3, "handlelength": 1.5, "columnspacing": 0.9}
    ax.legend(loc="upper center", bbox_to_anchor=(0.43, -0.2), ncols=columns, **spacing)


def _few_ticks(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
