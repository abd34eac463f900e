"""TIES: trim, elect a sign, merge what agrees (Yadav et al. 2023, arXiv 2306.01708).

The trim threshold of the published method is one number per expert over the entries of *all* its tensors, and
an entry whose trimmed task vectors cancel exactly takes the sign that the majority of all entries elected.
Both are found here by reading the tensors again, one at a time, instead of holding N flattened models: the
threshold by an exact radix selection on the bits of |τ| (16 bits a pass), the majority by one more pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Deltas, Merger, Ready, Stream, register

Aggregate = Literal["sum", "mean", "max"]


@register("ties")
class Ties(Merger):
    """θ = θ_0 + s · aggregate of the trimmed τ_i whose sign is the elected one."""

    scale: float = Field(0.3, description="s, applied to the merged task vector")
    density: float = Field(0.2, gt=0, le=1, description="K: the fraction of the largest entries that is kept")
    aggregate: Aggregate = Field("sum", description="sum, mean (over the agreeing experts) or max")
    per_tensor: bool = Field(False, description="trim each tensor by its own threshold, as mergekit does")

    def prepare(self, stream: Stream) -> Ready:
        if self.per_tensor:
            return self
        thresholds = global_thresholds(stream, self.density)
        return ReadyTies(self.scale, self.aggregate, thresholds, majority_sign(stream, thresholds))

    def merge_delta(self, deltas: Deltas) -> Tensor:
        thresholds = [kth_largest(tau, max(1, int(self.density * tau.numel()))) for tau in deltas.tau]
        return ReadyTies(self.scale, self.aggregate, thresholds, majority=1.0).merge_delta(deltas)


@dataclass(frozen=True)
class ReadyTies:
    """TIES with the trim threshold of each expert and the majority sign known."""

    scale: float
    aggregate: Aggregate
    thresholds: list[float]
    majority: float

    def merge_delta(self, deltas: Deltas) -> Tensor:
        kept = trim(deltas.tau, self.thresholds)
        elected = kept.sum(0).sign()
        elected[elected == 0] = 1.0 if self.majority > 0 else -1.0
        kept *= kept * elected > 0
        return _aggregate(kept, elected, self.aggregate).mul_(self.scale)


def trim(tau: Tensor, thresholds: list[float]) -> Tensor:
    """(N, *shape): entries below their expert's threshold set to zero. Entries equal to it stay."""
    limits = tau.new_tensor(thresholds).view(-1, *[1] * (tau.ndim - 1))
    return tau * (tau.abs() >= limits)


def _aggregate(agreeing: Tensor, elected: Tensor, how: Aggregate) -> Tensor:
    if how == "max":
        return agreeing.abs().amax(0) * elected
    total = agreeing.sum(0)
    return total / (agreeing != 0).sum(0).clamp_(min=1) if how == "mean" else total


def kth_largest(tau: Tensor, k: int) -> float:
    """The k-th largest magnitude (k from 1) of one tensor."""
    return float(tau.abs().flatten().kthvalue(tau.numel() - k + 1).values)


def majority_sign(stream: Stream, thresholds: list[float]) -> float:
    """The sign (−1, 0 or 1) of the sum of the elected signs of all entries."""
    votes = sum(int(trim(deltas.tau, thresholds).sum(0).sign().sum(dtype=torch.int64)) for deltas in stream)
    return float((votes > 0) - (votes < 0))


def global_thresholds(stream: Stream, density: float) -> list[float]:
    """Per expert the k-th smallest |τ| of all tensors' d entries, k = d − int(d · density). Exact.

    As in the reference implementation int(d · density) + 1 entries reach the threshold; with density 1 all
    do. The bits of a non-negative IEEE number order as the number does, so each pass fixes 16 more bits of
    the answer.
    """
    prefix = torch.zeros(stream.tasks, dtype=torch.int64)
    rank: Tensor | None = None
    top = 8 * stream.dtype.itemsize - 16
    for shift in range(top, -1, -16):
        counts = _digit_counts(stream, shift, None if shift == top else prefix.tolist())
        below = counts.cumsum(1)
        if rank is None:
            entries = int(below[0, -1])
            rank = torch.full_like(prefix, max(entries - int(entries * density), 1))
        digit = torch.searchsorted(below, rank[:, None])
        rank = rank - (below - counts).gather(1, digit)[:, 0]
        prefix = (prefix << 16) | digit[:, 0]
    return [float(value) for value in prefix.to(_INTEGER[stream.dtype]).view(stream.dtype)]


_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def _digit_counts(stream: Stream, shift: int, prefix: list[int] | None) -> Tensor:
    """(N, 65536): counts of the 16-bit digits at `shift` of each expert's |τ| that begin with its prefix."""
    counts = torch.zeros(stream.tasks, 1 << 16, dtype=torch.int64)
    for deltas in stream:
        patterns = deltas.tau.abs().reshape(stream.tasks, -1).view(_INTEGER[stream.dtype])
        for i, pattern in enumerate(patterns):
            if prefix is not None:
                pattern = pattern[(pattern >> (shift + 16)) == prefix[i]]
            counts[i] += torch.bincount((pattern >> shift) & 0xFFFF, minlength=1 << 16).cpu()
    return counts
