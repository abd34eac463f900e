"""Small tables for the terminal: at the end of a run, and of `featcal drift`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..drift.results import TaskDrift, to_dict
from .schema import Report
from .words import headline, last_block, number, percent, share, short

STYLES = {"better": "green", "worse": "bold red", "no clear change": "yellow", "not measured": "dim"}


def summary_table(report: Report) -> Table:
    """One row per task: verdict, drift after the last block, cosine, and agreement where there are outputs."""
    outputs = any(task.agreement.before is not None for task in report.tasks)
    table = Table(title="held-out samples: merged → calibrated", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("verdict")
    for name in ("drift, last block", "cosine", *(("agreement", "KL, nats") if outputs else ())):
        table.add_column(name, justify="right")
    for task in report.tasks:
        drift = last_block(task)
        cells = [
            f"{number(drift.before)} → {number(drift.after)} ({percent(drift.before, drift.after)})",
            f"{number(task.cosine.before)} → {number(task.cosine.after)}",
        ]
        if outputs:
            cells.append(f"{share(task.agreement.before)} → {share(task.agreement.after)}")
            cells.append(f"{number(task.kl.before)} → {number(task.kl.after)}")
        table.add_row(Text(short(task.name)), Text(task.verdict, STYLES[task.verdict]), *cells)
    return table


def print_summary(report: Report, console: Console) -> None:
    """The table, and the answer in one line."""
    console.print(summary_table(report))
    mark, text = headline(report)
    console.print(Text(text, {"good": "green", "note": "yellow", "bad": "bold red"}[mark]))


def drift_table(found: Sequence[TaskDrift]) -> Table:
    """For the terminal: one row per task and model."""
    outputs = any("kl" in model.samples for task in found for model in task.models.values())
    table = Table(title="drift from the experts, on held-out samples", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("model", overflow="fold")
    heads = ["drift, last block", "local", "propagated", "skip share", "cosine", "task-vector cosine"]
    for head in heads + (["same top choice", "KL, nats", "δ / bound"] if outputs else []):
        table.add_column(head, justify="right")
    for task in to_dict(found)["tasks"]:
        for label, model in task["models"].items():
            last, final = model["blocks"][-1], model["final"]
            cells = [number(last[n]) for n in ("drift", "local", "propagated")] + [share(last["skip_share"])]
            cells += [number(final["cosine"]), number(model["task_vector_cosine"])]
            if outputs:
                cells += [share(final["agreement"]), number(final["kl"]), number(final["bound_ratio"])]
            table.add_row(Text(short(task["name"])), Text(short(label)), *cells)
    return table
