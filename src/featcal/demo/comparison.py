"""The comparison's rows, and the tables made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from .results import EXPERTS, MERGED, PRETRAINED
from .scoring import gain_interval

NAMES = {
    "average": "simple average",
    "task_arithmetic": MERGED,
    "ties": "TIES",
    "dare": "DARE",
    "dare_ties": "DARE + TIES",
    "wudi": "WUDI",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "tsv_m": "TSV-M",
    "regmean": "RegMean",
    "regmean_pp": "RegMean++",
    "lot": "LOT",
    "fisher": "Fisher",
    "task_wise_adamerging": "AdaMerging, per task",
    "adamerging": "AdaMerging, per tensor",
}
"""Merge methods that are compared, in the table's order, and their names in it."""


@dataclass
class Entry:
    """One row: an upstream, and what was put on top of it."""

    upstream: str = ""
    """A method of `NAMES`, or one of the two references."""
    step: str = ""
    """"" for the upstream alone, `FeatCal`, `Surgery`, `ProbSurgery`."""
    correct: dict[str, str] = field(default_factory=dict)
    """By task, one character per test text: 1 where it is right."""
    cpu_seconds: float = 0.0
    """Of all threads."""
    seconds: float = 0.0
    """By the clock."""
    memory_bytes: int = 0
    samples: int = 0
    """Per task."""
    parameters: int = 0
    """Extra ones at inference, of all tasks together."""
    notes: list[str] = field(default_factory=list)

    def accuracy(self, task: str) -> float:
        """Per cent."""
        return 100 * self.correct[task].count("1") / len(self.correct[task])

    @property
    def average(self) -> float:
        """Unweighted mean over the tasks, per cent."""
        return sum(map(self.accuracy, self.correct)) / len(self.correct)

    @property
    def label(self) -> str:
        name = NAMES.get(self.upstream, self.upstream)
        return f"{name} + {self.step}" if self.step else name


@dataclass
class Comparison:
    """All rows that are finished, and the options that they share."""

    facts: dict[str, Any]
    rows: list[Entry] = field(default_factory=list)

    def find(self, upstream: str, step: str = "") -> Entry | None:
        return next((row for row in self.rows if (row.upstream, row.step) == (upstream, step)), None)

    def gain(self, row: Entry, seed: int) -> tuple[float, float, float]:
        """Points over the upstream alone, and the ends of the 95 % interval (paired bootstrap over test texts)."""
        start = self.find(row.upstream)
        assert start is not None
        old, new = ([torch.tensor([c == "1" for c in r.correct[task]]) for task in row.correct] for r in (start, row))
        return row.average - start.average, *gain_interval(old, new, seed)

    def as_dict(self) -> dict[str, Any]:
        averages = {row.label: row.average for row in self.rows}
        return {"facts": self.facts, "averages": averages, "rows": [asdict(row) for row in self.rows]}

    def _upstreams(self) -> list[Entry]:
        return [row for row in self.rows if not row.step and row.upstream in NAMES]

    def table(self) -> Table:
        """For the terminal: one line per upstream."""
        table = Table(title="Average accuracy in %", title_justify="left")
        table.add_column("upstream")
        for name in ("alone", "+ FeatCal", "gain", "CPU s", "+ FeatCal", "MB", "+ FeatCal", "samples"):
            table.add_column(name, justify="right", min_width=5)
        for reference in (PRETRAINED, EXPERTS):
            row = self.find(reference)
            if row is not None:
                table.add_row(row.label, f"{row.average:.1f}")
        for row in self._upstreams():
            top = self.find(row.upstream, "FeatCal")
            if top is not None:
                cells = [f"{row.average:.1f}", f"{top.average:.1f}", f"{top.average - row.average:+.1f}"]
                cells += [*_seconds(row, top), _mb(row), _mb(top), str(row.samples)]
                table.add_row(row.label, *cells)
        return table

    def markdown(self, seed: int) -> str:
        """Three tables: upstreams with and without FeatCal, what follows Task Arithmetic, and all rows by task."""
        lines = _head("upstream", "alone", "+ FeatCal", GAIN, "CPU s", "+ FeatCal", "MB", "+ FeatCal", "samples")
        for row in self._upstreams():
            top = self.find(row.upstream, "FeatCal")
            if top is not None:
                cells = [row.label, f"{row.average:.1f}", f"{top.average:.1f}", self._gain(top, seed)]
                lines.append(_line(*cells, *_seconds(row, top), _mb(row), _mb(top), str(row.samples)))
        lines += ["", *_head(f"on {MERGED}", "average", GAIN, "CPU s", "MB", "samples", "extra parameters")]
        for row in self.rows:
            if row.step and NAMES.get(row.upstream) == MERGED:
                cells = [row.step, f"{row.average:.1f}", self._gain(row, seed), *_seconds(row)]
                lines.append(_line(*cells, _mb(row), str(row.samples), str(row.parameters)))
        tasks = list(self.rows[0].correct)
        lines += ["", *_head("model", *tasks, "average")]
        for row in self.rows:
            lines.append(_line(row.label, *(f"{row.accuracy(task):.1f}" for task in tasks), f"{row.average:.1f}"))
        return "\n".join(lines) + "\n"

    def _gain(self, row: Entry, seed: int) -> str:
        return "{:+.1f} ({:+.1f} to {:+.1f})".format(*self.gain(row, seed))


GAIN = "gain (95 % interval)"


def _head(*names: str) -> list[str]:
    return [_line(*names), "|---" * len(names) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _seconds(*rows: Entry) -> tuple[str, ...]:
    return tuple(f"{row.cpu_seconds:.1f}" for row in rows)


def _mb(row: Entry) -> str:
    return f"{row.memory_bytes / 1e6:.0f}"
