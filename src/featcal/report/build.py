"""From what a run measured to the contents of `report.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..drift.results import ModelDrift, TaskDrift, finite, stacked
from ..drift.watcher import AFTER, BEFORE
from ..update import Record
from ..version import __version__
from ..writer import atomic_write
from .schema import NAME, Report

COMPONENTS = 10
"""Principal components of the final features that are kept for the 2-D view."""
POINTS = 64
"""Samples per task in the 2-D view, at most."""
CLEAR = 2.0
"""A change counts as clear from this many standard errors on."""
PAIRED = ("relative", "cosine", "local", "propagated", "local_part", "propagated_part", "skip_share")


def make_report(
    *,
    recipe: Mapping[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    drift: Sequence[TaskDrift],
    records: Sequence[Record],
    seconds: Mapping[str, float],
    environment: Mapping[str, Any],
    peak_memory_bytes: int = 0,
    tuning: Mapping[str, Any] | None = None,
    scores: Mapping[str, Mapping[str, Any]] | None = None,
    version: str = __version__,
    **more: Any,
) -> dict[str, Any]:
    """The contents of `report.json`, checked against its schema.

    Args:
        recipe: the resolved recipe, or at least {"calibration": settings}.
        tasks: per task at least {"name", "samples", "tokens"} of the calibration; more keys are kept.
        drift: a watcher's results (models `merged` and `calibrated`); a task without held-out samples may be absent.
        records: one per module, as `featcal.calibrate` returns.
        seconds: by phase; `total`, if given, is the whole. `measure` is the time of the watcher, inside `calibrate`.
        scores: label (`merged`, `calibrated`, `experts`) → task → {metric, value, n, …}.
        more: further top-level entries.
    """
    found = {result.name: result for result in drift}
    report = {
        "version": version,
        "recipe": dict(recipe),
        "environment": dict(environment),
        "seconds": dict(seconds),
        "peak_memory_bytes": peak_memory_bytes,
        "tasks": [{**task, **task_entry(found.get(task["name"]))} for task in tasks],
        "modules": [_plain(asdict(record)) for record in records if record.kind != "other"],
        "kept": [
            {"module": f"{r.block}.{r.module}".strip("."), "reason": r.reason} for r in records if r.status == "kept"
        ],
        **({"tuning": _plain(tuning)} if tuning is not None else {}),
        **({"scores": _plain(scores)} if scores else {}),
        **_plain(more),
    }
    checked: dict[str, Any] = Report.model_validate(report).model_dump(mode="json", exclude_unset=True)
    return checked


def write_report_json(folder: str | Path, report: Mapping[str, Any]) -> Path:
    """Write `report.json` into an existing folder, complete or not at all; strict JSON (no NaN)."""
    path = Path(folder) / NAME
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as file:
        file.write(f"{text}\n".encode())
    return path


def task_entry(result: TaskDrift | None) -> dict[str, Any]:
    """A task's measured fields."""
    if result is None:
        return {"verdict": "not measured"}
    before, after = result.model(BEFORE), result.model(AFTER)
    gain = paired_gain(before, after)
    return {
        "held_out": {
            "samples": result.samples,
            "tokens": result.tokens,
            "readout": result.readout,
            "feature": result.feature,
        },
        "drift": _blocks(before, after),
        **{
            name: {"before": before.mean(name), "after": after.mean(name)}
            for name in ("cosine", "agreement", "kl", "l2", "linf")
        },
        **({} if gain is None else {"gain": gain}),
        "verdict": verdict(gain),
        "sample_cosines": {
            "before": [_short(v) for v in before.samples.get("cosine", ())],
            "after": [_short(v) for v in after.samples.get("cosine", ())],
        },
        **_view(result),
    }


def _blocks(before: ModelDrift, after: ModelDrift) -> list[dict[str, Any]]:
    old, new = before.to_dict()["blocks"], after.to_dict()["blocks"]
    return [
        {
            "block": b["block"],
            "before": b["drift"],
            "after": a["drift"],
            **{name: {"before": b[name], "after": a[name]} for name in PAIRED},
            "not_finite": max(b["not_finite"], a["not_finite"]),
        }
        for b, a in zip(old, new, strict=True)
    ]


def paired_gain(before: ModelDrift, after: ModelDrift) -> dict[str, Any] | None:
    """Mean and standard error of the per-sample gain: KL to the expert saved, or without scores cosine won."""
    for measure, sign in (("kl", -1.0), ("cosine", 1.0)):
        pairs = list(zip(before.samples.get(measure, ()), after.samples.get(measure, ()), strict=True))
        gains = [sign * (a - b) for b, a in pairs if math.isfinite(a) and math.isfinite(b)]
        broken = sum(math.isfinite(b) and not math.isfinite(a) for b, a in pairs)
        if gains or broken:
            n = len(gains)
            mean = sum(gains) / max(n, 1)
            spread = sum((g - mean) ** 2 for g in gains)
            error = math.sqrt(spread / (n - 1) / n) if n > 1 else None
            return {"measure": measure, "mean": mean, "error": error, "samples": n, "broken": broken}
    return None


def verdict(gain: Mapping[str, Any] | None) -> str:
    """`better` or `worse` when the mean gain is at least CLEAR standard errors away from zero.

    Also `worse`: the calibrated model gives something that is not finite where the merged one did not.
    """
    if gain is None:
        return "not measured"
    if gain["broken"]:
        return "worse"
    mean, error = gain["mean"], gain["error"]
    if error is None or mean == 0 or abs(mean) < CLEAR * error:
        return "no clear change"
    return "better" if mean > 0 else "worse"


def _view(result: TaskDrift) -> dict[str, Any]:
    """Leading principal components of the final features of expert, merged and calibrated model together."""
    sides = [stacked(result.expert_features), *(stacked(result.model(label).features) for label in (BEFORE, AFTER))]
    if len({side.shape for side in sides}) != 1 or not sides[0].numel() or len(sides[0]) < 2:
        return {}
    x = torch.cat([side[:POINTS] for side in sides]).double()
    if not bool(x.isfinite().all()):
        return {}
    x = x - x.mean(0)
    left, values, _ = torch.linalg.svd(x, full_matrices=False)
    size = min(COMPONENTS, len(values))
    energy = values.square()
    if not float(energy.sum()):
        return {}
    points = (left[:, :size] * values[:size]).tolist()
    rows = [[float(f"{v:.4g}") for v in row] for row in points]
    n = len(rows) // 3
    return {
        "view": {
            "explained": [float(f"{v:.4g}") for v in (energy / energy.sum())[:size].tolist()],
            "expert": rows[:n],
            "merged": rows[n : 2 * n],
            "calibrated": rows[2 * n :],
        }
    }


def _short(value: float) -> float | None:
    good = finite(value)
    return None if good is None else float(f"{good:.6g}")


def _plain(value: Any) -> Any:
    """Data that strict JSON can hold: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value
