"""Results beside the published numbers: on the terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ..evaluate.outcomes import is_percent
from .results import Row, write_text
from .schema import Suite


@dataclass(frozen=True)
class BenchResult:
    """A finished run. Percentages with one decimal; perplexities with two."""

    suite: Suite
    columns: tuple[str, ...]
    rows: list[Row]
    output: Path

    def row(self, name: str) -> Row:
        """A row by its name."""
        return next(row for row in self.rows if row.name == name)

    def lines(self) -> list[list[str]]:
        """Cells of the table: a line of ours, then, where there are published numbers, theirs and the difference."""
        lines = []
        for row in self.rows:
            mine = {column: row.value(column) for column in self.columns}
            mine["average"] = row.average(self.columns)
            digits = 1 if all(is_percent(next(iter(own))) for own in row.scores.values() if own) else 2
            lines.append([row.name, *(_number(value, digits) for value in mine.values())])
            published = self.suite.published_scores(row.name)
            if published:
                lines.append(["  published", *(_number(published.get(column)) for column in mine)])
                gaps = [_gap(value, published.get(column)) for column, value in mine.items()]
                lines.append(["  difference", *gaps])
        return lines

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return ["model", *self.columns, "average"]

    def table(self) -> Table:
        """For the terminal."""
        table = Table(title=escape(f"{self.suite.name}: {self.suite.title}"))
        for number, name in enumerate(self.header):
            table.add_column(escape(name), justify="right" if number else "left", no_wrap=number == 0)
        for cells in self.lines():
            table.add_row(*map(escape, cells), style="dim" if cells[0].startswith(" ") else None)
        return table

    def markdown(self) -> str:
        """The same table as Markdown, with the sources of the published numbers below."""
        sources = {one.source for row in self.rows if (one := self.suite.published_row(row.name)) is not None}
        notes = [f"Published, {name}: {self.suite.sources[name]}" for name in sorted(sources)]
        return markdown_table(self.header, self.lines()) + "".join(f"\n{note}" for note in [*notes, *self.notes]) + "\n"

    @property
    def notes(self) -> list[str]:
        """What went otherwise than asked, by row."""
        return [f"{row.name}: {note}" for row in self.rows for note in row.notes]

    def csv(self) -> str:
        """One line per row and score, with its interval."""
        lines: list[list[object]] = []
        for row in self.rows:
            published = self.suite.published_scores(row.name)
            for column, scores in row.scores.items():
                for metric, one in scores.items():
                    known = published.get(column, "") if metric == next(iter(scores)) else ""
                    lines.append([row.name, column, metric, one.value, one.low, one.high, one.n, known])
            mean = row.average(self.columns)
            if mean is not None:
                lines.append([row.name, "average", "", mean, "", "", "", published.get("average", "")])
        return csv_table(["model", "column", "metric", "value", "low", "high", "n", "published"], lines)

    def write(self) -> None:
        """`table.md` and `table.csv` in the output folder."""
        write_text(self.output / "table.md", self.markdown())
        write_text(self.output / "table.csv", self.csv())


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in (header, rule, *lines))


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("<", "&lt;")


def csv_table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _gap(value: float | None, published: float | None) -> str:
    return "–" if value is None or published is None else f"{value - published:+.1f}"
