"""What a drift measurement found: sums that add up over batches and processes, and their JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MEASURES = ("drift", "relative", "cosine", "local", "propagated", "local_part", "propagated_part", "skip_part")
"""Per block; see `rows.block_drift`."""
OUTPUTS = ("l2", "linf", "kl", "agreement", "bound", "bound_ratio")
"""Per task; see `outputs.output_drift`."""


class Tally:
    """Sums of per-sample values by name. Values that are not finite are counted apart."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.not_finite = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value_B in values.items():
            good = value_B[value_B.isfinite()]
            self.sums[name] = self.sums.get(name, 0.0) + float(good.sum())
            self.counts[name] = self.counts.get(name, 0) + len(good)
        self.not_finite += max((int((~v.isfinite()).sum()) for v in values.values()), default=0)

    def merge(self, other: Tally) -> None:
        for name, total in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        self.not_finite += other.not_finite

    def mean(self, name: str) -> float | None:
        """Mean over samples; None when nothing was measured."""
        count = self.counts.get(name, 0)
        return self.sums[name] / count if count else None


@dataclass
class ModelDrift:
    """One model against one task's expert."""

    blocks: dict[str, Tally] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Per-sample values at the model's end: `cosine` and `drift` of the final feature, and those of OUTPUTS."""
    features: list[Tensor] = field(default_factory=list)
    """Final features (samples, D), one tensor per batch, for the 2-D view."""
    checks: dict[str, Tally] = field(default_factory=dict)
    """Per block, `error`: ‖A e − p‖ / ‖p‖ of the path-averaged operator by quadrature."""
    task_vector_cosine: float | None = None

    def block(self, name: str) -> Tally:
        return self.blocks.setdefault(name, Tally())

    def extend(self, values: Mapping[str, Tensor]) -> None:
        for name, value_B in values.items():
            self.samples.setdefault(name, []).extend(value_B.tolist())

    def mean(self, name: str) -> float | None:
        """Mean over samples of a value at the model's end."""
        return mean_of(self.samples.get(name, ()))

    def merge(self, other: ModelDrift) -> None:
        for name, tally in other.blocks.items():
            self.block(name).merge(tally)
        for name, tally in other.checks.items():
            self.checks.setdefault(name, Tally()).merge(tally)
        for name, values in other.samples.items():
            self.samples.setdefault(name, []).extend(values)
        self.features += other.features

    def to_dict(self) -> dict[str, Any]:
        return {
            "blocks": [_block_dict(name, tally, self.checks.get(name)) for name, tally in self.blocks.items()],
            "final": {name: self.mean(name) for name in ("cosine", "drift", *OUTPUTS)},
            "sample_cosines": [finite(v) for v in self.samples.get("cosine", ())],
            "task_vector_cosine": finite(self.task_vector_cosine),
        }


def _block_dict(name: str, tally: Tally, check: Tally | None) -> dict[str, Any]:
    made: dict[str, Any] = {"block": name, **{measure: tally.mean(measure) for measure in MEASURES}}
    drift, skip = made["drift"], made["skip_part"]
    made["not_finite"] = tally.not_finite
    made["skip_share"] = skip / drift if skip is not None and drift else None
    if check is not None:
        made["operator_error"] = check.mean("error")
    return made


@dataclass
class TaskDrift:
    """All models against one task's expert, on rows that no calibration has read."""

    name: str
    samples: int = 0
    tokens: int = 0
    """Rows that count in the first block: real tokens, or one per sample where the class token is read."""
    readout: str = ""
    feature: str = ""
    """What the final feature is."""
    models: dict[str, ModelDrift] = field(default_factory=dict)
    expert_features: list[Tensor] = field(default_factory=list)

    def model(self, label: str) -> ModelDrift:
        return self.models.setdefault(label, ModelDrift())

    def merge(self, other: TaskDrift) -> None:
        """Add another process's share of the same task."""
        assert other.name == self.name
        self.samples += other.samples
        self.tokens += other.tokens
        self.readout, self.feature = self.readout or other.readout, self.feature or other.feature
        self.expert_features += other.expert_features
        for label, drift in other.models.items():
            self.model(label).merge(drift)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "samples": self.samples,
            "tokens": self.tokens,
            "readout": self.readout,
            "feature": self.feature,
            "models": {label: drift.to_dict() for label, drift in self.models.items()},
        }


def merge_parts(parts: Iterable[Sequence[TaskDrift]]) -> list[TaskDrift]:
    """One list from the lists of several processes; shares of one task are added up, in order of first appearance."""
    merged: dict[str, TaskDrift] = {}
    for part in parts:
        for task in part:
            if task.name in merged:
                merged[task.name].merge(task)
            else:
                merged[task.name] = task
    return list(merged.values())


def to_dict(tasks: Sequence[TaskDrift]) -> dict[str, Any]:
    """The whole measurement as plain data, with macro means (unweighted over tasks) per model."""
    labels = list(dict.fromkeys(label for task in tasks for label in task.models))
    names = ("cosine", "drift", *OUTPUTS)
    macro: dict[str, dict[str, float | None]] = {}
    for label in labels:
        own = [task.models[label] for task in tasks if label in task.models]
        macro[label] = {name: mean_of(drift.mean(name) for drift in own) for name in names}
    return {"models": labels, "macro": macro, "tasks": [task.to_dict() for task in tasks]}


def to_json(tasks: Sequence[TaskDrift]) -> str:
    """`to_dict` as strict JSON (no NaN)."""
    return json.dumps(to_dict(tasks), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(tasks: Sequence[TaskDrift]) -> str:
    """Long form: task, model, block (empty: the model's end), measure, value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["task", "model", "block", "measure", "value"])
    for task in to_dict(tasks)["tasks"]:
        for label, drift in task["models"].items():
            for block in drift["blocks"]:
                cells = [(name, value) for name, value in block.items() if name != "block"]
                writer.writerows([task["name"], label, block["block"], n, v] for n, v in cells if v is not None)
            ends = {**drift["final"], "task_vector_cosine": drift["task_vector_cosine"]}
            writer.writerows([task["name"], label, "", n, v] for n, v in ends.items() if v is not None)
    return text.getvalue()


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the finite values; None when there is none."""
    good = [value for value in values if value is not None and math.isfinite(value)]
    return sum(good) / len(good) if good else None


def finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not finite becomes null."""
    return value if value is not None and math.isfinite(value) else None


def stacked(features: Sequence[Tensor]) -> Tensor:
    """Per-batch features as one (samples, D)."""
    return torch.cat(list(features)) if features else torch.empty(0, 0)
