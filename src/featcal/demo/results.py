"""The demo's findings: the table, the share of the gap recovered, the drift per block."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from ..settings import Calibration
from .scoring import Outcome, drift, gain_interval, gap_recovered

MERGED = "Task Arithmetic"
"""The row that is calibrated, and from which the gap to the experts counts."""

PRETRAINED = "pre-trained"
EXPERTS = "experts"


@dataclass
class Row:
    """One row of the table."""

    label: str
    outcomes: dict[str, Outcome]
    """By task, on its test texts."""

    @property
    def accuracies(self) -> dict[str, float]:
        """Per cent by task."""
        return {task: outcome.accuracy for task, outcome in self.outcomes.items()}

    @property
    def average(self) -> float:
        """Unweighted mean over the tasks, per cent."""
        return sum(self.accuracies.values()) / len(self.outcomes)


@dataclass
class Calibrated:
    """A row that featcal made: where it is saved, the settings used, seconds by phase."""

    label: str
    folder: str
    settings: Calibration
    seconds: dict[str, float]


@dataclass
class DemoResult:
    """What the demo found."""

    rows: dict[str, Row]
    """By label, in the table's order."""
    calibrated: list[Calibrated]
    seconds: dict[str, float]
    """By phase."""

    def gap(self, label: str) -> float | None:
        """The share of the gap between the merged model and the experts that the row `label` recovers."""
        return gap_recovered(self.rows[MERGED].average, self.rows[label].average, self.rows[EXPERTS].average)

    def gain(self, label: str, seed: int) -> tuple[float, float, float]:
        """The row's gain over the merged model in points, and the ends of its 95 % interval."""
        old, new = ([o.correct_R for o in self.rows[name].outcomes.values()] for name in (MERGED, label))
        return self.rows[label].average - self.rows[MERGED].average, *gain_interval(old, new, seed)

    def drifts(self, label: str) -> dict[str, dict[str, list[float]]]:
        """Task → `merged` and `calibrated` → drift from the expert per block, on the test texts."""
        sides = {"merged": self.rows[MERGED].outcomes, "calibrated": self.rows[label].outcomes}
        experts = self.rows[EXPERTS].outcomes
        return {
            task: {side: drift(outcomes[task], expert) for side, outcomes in sides.items()}
            for task, expert in experts.items()
        }


def make_table(result: DemoResult) -> Table:
    """Rows: models; columns: tasks and their average."""
    outcomes = result.rows[MERGED].outcomes
    sizes = sorted({len(outcome.correct_R) for outcome in outcomes.values()})
    texts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    table = Table(title=f"Accuracy in % on {texts} test texts per task", title_justify="left")
    table.add_column("model")
    for name in (*outcomes, "average"):
        # On a narrow terminal the models' names wrap; a cut number would be wrong.
        width = max(len(name), len("100.0"))
        table.add_column(name, justify="right", min_width=width, style="bold" if name == "average" else None)
    for label, row in result.rows.items():
        table.add_row(label, *(f"{row.accuracies[task]:.1f}" for task in outcomes), f"{row.average:.1f}")
    return table


def gap_sentence(result: DemoResult, label: str, seed: int) -> str:
    """The share of the gap that a row recovers, and its gain with the interval, for people."""
    gain, low, high = result.gain(label, seed)
    gap = result.gap(label)
    points = f"{gain:+.1f} points over {MERGED}, 95 % interval {low:+.1f} to {high:+.1f}"
    if gap is None:
        return f"{label}: {points}; the experts are not better than {MERGED}, so there is no gap to recover"
    return f"{label}: {100 * gap:.0f} % of the gap to the experts recovered ({points})"
