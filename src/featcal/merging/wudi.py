"""WUDI-Merging: least interference with every task's own row space (Cheng et al. 2025, arXiv 2503.08099).

For each matrix, minimise over τ the loss Σ_i ‖(τ − τ_i) τ_iᵀ‖² / ‖τ_i‖², from Σ τ_i, by a fixed number of
Adam steps. Its gradient is 2 (τ H − K) with H = Σ τ_iᵀτ_i / ‖τ_i‖² and K = Σ τ_i τ_iᵀτ_i / ‖τ_i‖²: one
product a step, whatever the number of tasks, where automatic differentiation needs 4 N.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from .base import Deltas, MatrixMerger, register


@register("wudi")
class Wudi(MatrixMerger):
    """Matrices: the minimiser as above; other tensors: the mean of τ_i.

    A task that left a matrix alone adds no term.
    """

    iterations: int = Field(400, ge=0, description="Adam steps per matrix")
    lr: float = Field(1e-5, gt=0, description="Adam's learning rate")
    scale: float = Field(1.0, description="factor of the merged task vector; published: 1")

    def merge_matrix(self, deltas: Deltas) -> Tensor:
        h, k = interference(deltas.tau)
        merged = deltas.tau.sum(0)
        optimizer = torch.optim.Adam([merged], lr=self.lr, weight_decay=0)
        for _ in range(self.iterations):
            merged.grad = torch.addmm(k, merged, h, beta=-2, alpha=2)
            optimizer.step()
        return merged


def interference(tau: Tensor) -> tuple[Tensor, Tensor]:
    """H (d, d) and K (m, d) of the loss for task vectors (N, m, d).

    Zero task vectors are left out: 0/0 otherwise.
    """
    h = tau.new_zeros(tau.shape[2], tau.shape[2])
    k = torch.zeros_like(tau[0])
    for vector in tau:
        norm = vector.square().sum()
        if norm > 0:
            unit = vector / norm.sqrt()
            gram = unit.T @ unit
            h += gram
            k.addmm_(vector, gram)
    return h, k
