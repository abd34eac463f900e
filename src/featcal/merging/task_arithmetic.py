"""Task Arithmetic: θ = θ_0 + s Σ τ_i (Ilharco et al. 2023, arXiv 2212.04089)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from .base import Deltas, Merger, per_task, register


@register("task_arithmetic")
class TaskArithmetic(Merger):
    """The scaled sum of the task vectors, on every floating-point tensor."""

    scale: float | tuple[float, ...] = Field(0.3, description="s: one number for all experts, or one for each")

    def check(self, tasks: int) -> None:
        per_task(self.scale, tasks, "task_arithmetic.scale")

    def merge_delta(self, deltas: Deltas) -> Tensor:
        scales = per_task(self.scale, len(deltas.tau), "task_arithmetic.scale")
        return torch.tensordot(deltas.tau.new_tensor(scales), deltas.tau, dims=1)
