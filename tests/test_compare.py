"""`featcal demo --compare` on a pico encoder: rows, what they cost, tables, going on after an interruption."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import featcal.demo.compare
from featcal.baselines import Training as AdapterTraining
from featcal.demo import Options, main, suite
from featcal.demo.compare import Budget, compare, measured
from featcal.demo.comparison import NAMES, Comparison, Entry
from featcal.demo.experts import Training
from featcal.demo.results import EXPERTS, MERGED, PRETRAINED
from featcal.errors import InputError
from featcal.merging import ALIASES, REGISTRY
from test_demo import pico_wheels

OPTIONS = Options(samples=8, test=20, batch_size=4, training=Training(steps=60, learning_rate=5e-3))
BUDGET = Budget(adamerging_steps=2, training=AdapterTraining(steps=20))


@pytest.fixture
def pico_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scratch").mkdir()
    model, texts = pico_wheels(tmp_path / "cache", tmp_path / "scratch")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(suite, "MINILM", model)
    monkeypatch.setattr(suite, "TEXTS", texts)
    return tmp_path / "out"


@pytest.mark.slow
def test_every_merger_alone_and_with_featcal(pico_demo: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    found = compare(pico_demo, OPTIONS, BUDGET, console=console)
    labels = [row.label for row in found.rows]
    assert labels[:2] == [PRETRAINED, EXPERTS]
    expected = [label for name in NAMES.values() for label in (name, f"{name} + FeatCal")]
    assert [label for label in labels[2:] if "Surgery" not in label] == expected
    assert {*NAMES} >= {*REGISTRY} and {*NAMES} <= {*REGISTRY, *ALIASES}
    assert [label for label in labels if "Surgery" in label] == [f"{MERGED} + Surgery", f"{MERGED} + ProbSurgery"]
    for row in found.rows:
        assert list(row.correct) == ["comp", "rec", "sci", "rest", "reuters"]
        assert all(len(right) == 20 for right in row.correct.values())
    for row in found.rows[2:]:
        assert (
            row.seconds > 0
            and row.cpu_seconds > 0
            and row.parameters == (0 if "Surgery" not in row.step else row.parameters)
        )
        free = row.step == "" and REGISTRY[ALIASES.get(row.upstream, (row.upstream, {}))[0]].needs == "weights"
        assert row.samples == (0 if free else 8)
    surgery, prob = found.find("task_arithmetic", "Surgery"), found.find("task_arithmetic", "ProbSurgery")
    assert surgery is not None and surgery.parameters == 5 * 2 * 16 * 16
    assert prob is not None and prob.parameters == 5 * 2 * 128 * 16
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f" {name} " in printed for name in NAMES.values())
    text = (pico_demo / "comparison.md").read_text()
    assert text == found.markdown(42) and f"| {MERGED} + FeatCal | " in text and "| ProbSurgery | " in text

    # The same numbers as the demo itself, whose folder may be the same.
    result = main(pico_demo, OPTIONS, console=Console(file=io.StringIO()))
    for label in (PRETRAINED, EXPERTS, MERGED, f"{MERGED} + FeatCal"):
        row = next(row for row in found.rows if row.label == label)
        assert {task: row.accuracy(task) for task in row.correct} == pytest.approx(result.rows[label].accuracies)


def test_finished_rows_are_kept_and_other_options_refused(pico_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(mergers=("average", "ties"))
    merged: list[str] = []
    real = featcal.demo.compare.merge_modules

    def stop_at_ties(method: Any, *args: Any, **options: Any) -> Any:
        merged.append(method.method)
        if method.method == "ties" and len(merged) < 3:
            raise KeyboardInterrupt
        return real(method, *args, **options)

    monkeypatch.setattr("featcal.demo.compare.merge_modules", stop_at_ties)
    quiet = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        compare(pico_demo, OPTIONS, budget, console=quiet)
    kept = json.loads((pico_demo / "comparison.json").read_text())
    assert [row["upstream"] for row in kept["rows"]] == [PRETRAINED, EXPERTS, "average", "average"]
    whole = compare(pico_demo, OPTIONS, budget, console=quiet)
    assert merged == ["average", "ties", "ties"] and len(whole.rows) == 6
    assert compare(pico_demo, OPTIONS, budget, console=quiet) == whole and len(merged) == 3
    with pytest.raises(InputError, match=r"comparison.json is of other options .*give another folder"):
        compare(pico_demo, Options(**{**vars(OPTIONS), "samples": 7}), budget, console=quiet)
    assert json.loads((pico_demo / "comparison.json").read_text()) == json.loads(json.dumps(whole.as_dict()))


def test_gains_are_of_the_same_upstream() -> None:
    rows = [
        Entry("ties", "", {"a": "0011", "b": "1111"}),
        Entry("ties", "FeatCal", {"a": "0111", "b": "1110"}),
        Entry("average", "", {"a": "0000", "b": "0000"}),
    ]
    found = Comparison({}, rows)
    assert (rows[0].average, rows[1].average, rows[1].label) == (75.0, 75.0, "TIES + FeatCal")
    gain, low, high = found.gain(rows[1], 0)
    assert gain == 0.0 and -37.5 <= low < 0 < high <= 37.5
    assert Comparison(**{k: v for k, v in found.as_dict().items() if k == "facts"}).rows == []
    assert [Entry(**row) for row in found.as_dict()["rows"]] == rows


def test_memory_is_what_the_step_adds() -> None:
    entry = Entry()
    with measured(entry):
        torch.ones(64, 2**20).sum()  # 268 MB for as long as it is summed
        held = torch.ones(32, 2**20)
        for _ in range(20):
            held.add_(1.0)
    assert 100e6 < entry.memory_bytes < 600e6 and entry.seconds > 0


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="was not made by the demo"):
        compare(tmp_path)
