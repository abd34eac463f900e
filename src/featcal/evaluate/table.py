"""Scores on disk and on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..writer import atomic_write
from .outcomes import Score, average, is_percent

Scores = Mapping[str, Mapping[str, Score]]
"""{task: {metric: score}}; the first metric of a task is its main one."""


def main_scores(scores: Scores) -> dict[str, Score]:
    """Each task's main score. Tasks with none (no labels, no reference) are left out."""
    return {task: next(iter(own.values())) for task, own in scores.items() if own}


def scores_to_dict(scores: Scores) -> dict[str, Any]:
    """Plain data: {task: {metric, value, n, low, high}} and `average`; further metrics under `also`."""
    plain: dict[str, Any] = {}
    for task, own in scores.items():
        if own:
            main, *others = [one.as_dict() for one in own.values()]
            plain[task] = main | ({"also": others} if others else {})
    return {**plain, "average": average(main_scores(scores))}


def write_scores(scores: Scores, path: str | os.PathLike[str], models: Mapping[str, Scores] | None = None) -> Path:
    """Write `scores.json`, as a whole: one model's scores and, under `models`, those of all in the comparison."""
    file = Path(path)
    plain = scores_to_dict(scores)
    if models:
        plain["models"] = {name: scores_to_dict(own) for name, own in models.items()}
    with atomic_write(file) as stream:
        stream.write((json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return file


def show(one: Score | None) -> str:
    """`85.5 ± 0.4`, or `12.30 [11.80, 12.95]` where the interval is lopsided (perplexities)."""
    if one is None:
        return "–"
    if is_percent(one.metric):
        return f"{one.value:.1f} ± {(one.high - one.low) / 2:.1f}"
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


def score_table(models: Mapping[str, Scores], title: str = "") -> Table:
    """One column per model; one row per task and metric, then the average. Intervals are 95 % (half-width for %)."""
    rows: dict[tuple[str, str], None] = {}
    for scores in models.values():
        rows |= {(task, metric): None for task, own in scores.items() for metric in own}
    table = Table(title=escape(title) or None, box=box.SIMPLE_HEAD)
    table.add_column("task")
    for name in models:
        table.add_column(escape(name), justify="right")
    for task, metric in sorted(rows, key=lambda row: [own for own, _ in rows].index(row[0])):
        cells = [show(scores.get(task, {}).get(metric)) for scores in models.values()]
        table.add_row(escape(f"{task} {metric}{' %' if is_percent(metric) else ''}"), *cells)
    means = [average(main_scores(scores)) for scores in models.values()]
    table.add_row("average", *("–" if mean is None else f"{mean:.1f}" for mean in means), style="bold")
    return table
