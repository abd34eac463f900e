"""TSV-M: merging by task singular vectors (Gargiulo et al. 2025, arXiv 2412.00081)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from .base import Deltas, MatrixMerger, register
from .spectral import directions, joined, polar, weighted


@register("tsv_m")
class TSVM(MatrixMerger):
    """Matrices: each task's top r/N singular triplets side by side, left and right vectors made orthonormal.

    Other tensors, and matrices with fewer directions than tasks, get the mean of τ_i.
    """

    scale: float = Field(1.0, description="factor of the merged task vector (the paper's α)")

    def merge_matrix(self, deltas: Deltas) -> Tensor:
        rank = min(deltas.tau.shape[1:])
        share = rank // len(deltas.tau)
        if share == 0:
            deltas.note(f"mean of the task vectors, since its rank {rank} is smaller than the number of tasks")
            return deltas.tau.mean(0)
        u, s, v = joined([directions(tau).top(share) for tau in deltas.tau])
        return weighted(polar(u), s, polar(v))
