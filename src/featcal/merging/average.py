"""Simple averaging: θ = Σ w_i θ_i, w_i = 1/N (Wortsman et al.

2022, arXiv 2203.05482); mergekit's `linear`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from ..errors import InputError
from .base import Deltas, Merger, per_task, register


@register("average", linear={}, simple_average={})
class Average(Merger):
    """The mean of the experts; with `weights`, a weighted mean (normalised to sum 1)."""

    weights: tuple[float, ...] | None = Field(None, description="one weight per expert; equal when left out")

    def check(self, tasks: int) -> None:
        self._shares(tasks)

    def merge_delta(self, deltas: Deltas) -> Tensor:
        shares = self._shares(len(deltas.tau))
        return torch.tensordot(deltas.tau.new_tensor(shares), deltas.tau, dims=1)

    def _shares(self, tasks: int) -> list[float]:
        weights = per_task(1.0 if self.weights is None else self.weights, tasks, "average.weights")
        total = sum(weights)
        if total == 0:
            raise InputError("average.weights sum to zero; they are divided by their sum")
        return [weight / total for weight in weights]
