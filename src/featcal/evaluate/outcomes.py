"""From what was observed per row to a score with its confidence interval.

An *outcome* is a row of one or two numbers (right or wrong; a prediction and its reference; a sum and its count). Every
metric is a function of all outcomes, so that one bootstrap serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Outcomes = NDArray[np.float64]
"""(rows, k), k as the metric needs."""


def mean_percent(outcomes: Outcomes) -> float:
    """100 × the mean of 0/1 outcomes (rows, 1): top-1 accuracy, exact match."""
    return 100.0 * float(outcomes[:, 0].mean())


def ratio_percent(outcomes: Outcomes) -> float:
    """100 × Σ hits / Σ positions of outcomes (rows, 2)."""
    return 100.0 * float(outcomes[:, 0].sum() / outcomes[:, 1].sum())


def perplexity(outcomes: Outcomes) -> float:
    """exp(Σ negative log-likelihoods / Σ tokens) of outcomes (rows, 2), in nats per token; at most exp(700) ~ 1e304."""
    return math.exp(min(float(outcomes[:, 0].sum() / outcomes[:, 1].sum()), 700.0))


def spearman(outcomes: Outcomes) -> float:
    """100 × Spearman's ρ of outcomes (rows, 2); ties get their mean rank.

    A constant column has no rank correlation; it counts as 0.
    """
    first, second = _ranks(outcomes[:, 0]), _ranks(outcomes[:, 1])
    first, second = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return 100.0 * float(first @ second) / scale if scale else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


@dataclass(frozen=True)
class Metric:
    """How outcomes become one number. Percentages are averaged over tasks; other units are not."""

    name: str
    reduce: Callable[[Outcomes], float]
    unit: str
    higher_is_better: bool = True
    ratio: bool = False
    """A sum over a sum: rows that add nothing to the lower one say nothing."""


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", mean_percent, "%"),
        Metric("exact_match", mean_percent, "%"),
        Metric("spearman", spearman, "%"),
        Metric("agreement", ratio_percent, "%", ratio=True),
        Metric("perplexity", perplexity, "nats", higher_is_better=False, ratio=True),
    )
}


def is_percent(metric: str) -> bool:
    """Whether a metric is a percentage; those of lm-eval, which are not in `METRICS`, are."""
    return metric not in METRICS or METRICS[metric].unit == "%"


@dataclass(frozen=True)
class Score:
    """A metric's value on `n` rows with its 95 % interval (`low` … `high`); percent where the metric's unit is %."""

    metric: str
    value: float
    n: int
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `scores.json`."""
        return asdict(self)


def score(metric: str, outcomes: Outcomes, *, resamples: int = 1000, seed: int = 0) -> Score:
    """The metric of some outcomes (rows, k) with a percentile-bootstrap interval over rows.

    Args:
        metric: a key of `METRICS`.
        resamples: bootstrap samples; with 0 the interval is the value itself.
        seed: of the resampling.

    Raises:
        InputError: no outcome, or none that counts.
    """
    reduce, ratio = METRICS[metric].reduce, METRICS[metric].ratio
    counted = outcomes[outcomes[:, 1] > 0] if ratio and len(outcomes) else outcomes
    if not len(counted):
        raise InputError(f"{metric}: nothing to count in any of {len(outcomes)} rows (texts of one token, or none)")
    value = reduce(counted)
    if not resamples:
        return Score(metric, value, len(counted), value, value)
    if reduce is mean_percent and value in (0.0, 100.0):
        return Score(metric, value, len(counted), *_unanimous(value, len(counted)))
    generator = np.random.default_rng(seed)
    draws = (generator.integers(len(counted), size=len(counted)) for _ in range(resamples))
    low, high = np.quantile([reduce(counted[draw]) for draw in draws], [0.025, 0.975])
    return Score(metric, value, len(counted), float(low), float(high))


def _unanimous(value: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval when all rows are right or all are wrong, where a bootstrap knows no doubt."""
    doubt = 100.0 * 1.96**2 / (n + 1.96**2)
    return (0.0, doubt) if value == 0.0 else (100.0 - doubt, 100.0)


def average(scores: Mapping[str, Score]) -> float | None:
    """The unweighted mean over tasks: arithmetic for percentages, geometric for perplexities.

    None for a mixture of units, and of agreement (with the expert) and correctness.
    """
    values = [one.value for one in scores.values()]
    kinds = {one.metric if one.metric == "agreement" else is_percent(one.metric) for one in scores.values()}
    if len(kinds) != 1:
        return None
    return float(np.exp(np.mean(np.log(values)))) if kinds == {False} else float(np.mean(values))


def agreement(choices: Sequence[Any], reference: Sequence[Any]) -> Outcomes:
    """Per row, on how many of how many positions two models decide alike; outcomes (rows, 2) of `agreement`.

    A choice is a class, a generated text (one position each), or an array of predicted tokens (one position a token).
    """
    assert len(choices) == len(reference)
    rows = []
    for mine, other in zip(choices, reference, strict=True):
        if isinstance(mine, np.ndarray):
            rows.append((float((mine == other).sum()), float(mine.size)))
        else:
            rows.append((float(mine == other), 1.0))
    return np.array(rows)
