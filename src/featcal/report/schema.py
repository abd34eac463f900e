"""`report.json`: what a run did and what it changed, measured on held-out samples. Read back strictly before use.

Units: drifts are L2 norms in feature units; KL in nats; agreement and cosine are shares of one (not per cent); seconds;
bytes. `before` is the merged model as given, `after` the calibrated one; null means not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InputError

NAME = "report.json"
Verdict = Literal["better", "no clear change", "worse", "not measured"]


class _Open(BaseModel):
    """Fields that a newer version adds are kept."""

    model_config = ConfigDict(extra="allow")


class Pair(_Open):
    before: float | None = None
    after: float | None = None


class BlockDrift(Pair):
    """`before` and `after`: mean L2 drift of the block's output from the expert's."""

    block: str
    relative: Pair = Pair()
    """Drift over the norm of the expert's feature."""
    cosine: Pair = Pair()
    local: Pair = Pair()
    """‖m‖: the block's own mismatch, on the expert's input."""
    propagated: Pair = Pair()
    """‖p‖: what the drift of its input becomes."""
    local_part: Pair = Pair()
    """Share of m along the drift; with `propagated_part` it sums to the drift."""
    propagated_part: Pair = Pair()
    skip_share: Pair = Pair()
    """Share of the drift that the skip path carries over unchanged."""
    not_finite: int = 0


class Gain(_Open):
    """Paired differences over held-out samples; positive is better."""

    measure: Literal["kl", "cosine"]
    mean: float
    error: float | None
    """Standard error of the mean; null for a single sample."""
    samples: int
    broken: int = 0
    """Samples that became not finite."""


class Held(_Open):
    samples: int
    tokens: int
    readout: str
    feature: str


class View(_Open):
    """Final features in their leading principal components, one row per sample."""

    explained: list[float]
    """Share of the variance, by component."""
    expert: list[list[float]]
    merged: list[list[float]]
    calibrated: list[list[float]]


class Task(_Open):
    name: str
    samples: int = 0
    tokens: int = 0
    held_out: Held | None = None
    drift: list[BlockDrift] = []
    cosine: Pair = Pair()
    agreement: Pair = Pair()
    kl: Pair = Pair()
    l2: Pair = Pair()
    linf: Pair = Pair()
    gain: Gain | None = None
    verdict: Verdict = "not measured"
    sample_cosines: dict[Literal["before", "after"], list[float | None]] = {}
    view: View | None = None


class Module(_Open):
    """One record of `featcal.update.Record`."""

    block: str
    module: str
    kind: str
    status: Literal["calibrated", "kept"]
    reason: str = ""
    rows: int = 0
    before: float | None = None
    after: float | None = None
    ridge: float | None = None
    seconds: float = 0.0


class Kept(_Open):
    module: str
    reason: str


class Candidate(_Open):
    ridge: float
    rho: float
    alpha: float
    criterion: float | None
    chosen: bool = False


class Tuning(_Open):
    candidates: list[Candidate]
    kind: str = ""
    samples: int = 0
    seconds: float = 0.0


class Score(_Open):
    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None


class Report(_Open):
    version: str
    recipe: dict[str, Any]
    environment: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    peak_memory_bytes: int = 0
    tasks: list[Task] = Field(min_length=1)
    modules: list[Module] = []
    kept: list[Kept] = []
    tuning: Tuning | None = None
    scores: dict[str, dict[str, Score]] = {}
    """Label (`merged`, `calibrated`, `experts`) → task → score."""


def read_report(folder: str | Path) -> Report:
    """The report of an output folder, its scores completed from `scores.json` when that is there.

    Raises:
        InputError: there is no report, or it is not one.
    """
    path = Path(folder) / NAME
    raw = _read_json(path, f"{folder} has no {NAME}; give the output folder of a calibration")
    report = _checked(Report, raw, path)
    scores = Path(folder) / "scores.json"
    if scores.is_file():
        found = _read_json(scores, "")
        report.scores |= parse_scores(found, scores)
    return report


def parse_scores(raw: Any, where: Path | str = "scores") -> dict[str, dict[str, Score]]:
    """Scores by label and task.

    From `{task: score, "average": …}`, the calibrated model's, which may hold those it is compared with under
    `models`, as `featcal evaluate` writes them; or from `{label: {task: score, …}}`.

    Raises:
        InputError: neither of the two.
    """
    if not isinstance(raw, Mapping):
        raise InputError(f"{where}: expected {{task: {{metric, value, n}}}}")
    own = {task: entry for task, entry in raw.items() if isinstance(entry, Mapping) and task != "models"}
    flat = all("value" in entry for entry in own.values())
    compared = raw.get("models", {}) if flat else {}
    labelled = {**compared, "calibrated": own} if flat else raw
    made: dict[str, dict[str, Score]] = {}
    for label, tasks in labelled.items():
        if isinstance(tasks, Mapping):
            entries = {task: entry for task, entry in tasks.items() if isinstance(entry, Mapping)}
            made[label] = {task: _checked(Score, entry, where) for task, entry in entries.items()}
    return made


def _read_json(path: Path, missing: str) -> Any:
    if not path.is_file():
        raise InputError(missing)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); run the command that wrote it again") from error


def _checked(kind: type[Any], raw: Any, where: Path | str) -> Any:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top level"
        raise InputError(f"{where}: {place}: {first['msg'].lower()}") from error
