"""The small table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
