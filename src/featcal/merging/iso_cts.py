"""Iso-CTS: isotropic merging in common and task-specific subspaces (Marczak et al.

2025, arXiv 2502.04959).
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from .base import Deltas, MatrixMerger, register
from .spectral import directions, joined, polar


@register("iso_cts")
class IsoCTS(MatrixMerger):
    """Matrices: the top directions of Σ τ_i, completed by each task's own top directions off their span.

    The joint left and right vectors are made orthonormal and all share the mean singular value. Others as in
    Iso-C.
    """

    scale: float = Field(1.0, description="s; 1.5 to 1.9 in published CLIP results")
    common_fraction: float = Field(0.8, ge=0, le=1, description="fraction of directions taken from Σ τ_i")

    def merge_matrix(self, deltas: Deltas) -> Tensor:
        tasks, rank = len(deltas.tau), min(deltas.tau.shape[1:])
        each = specific_directions(rank, tasks, self.common_fraction)
        common = directions(deltas.tau.sum(0)).top(rank - tasks * each)
        own = [directions(tau - common.u @ (common.u.T @ tau), tau.norm()).top(each) for tau in deltas.tau]
        u, s, v = joined([*own, common])
        return polar(u) @ polar(v) * (s.mean() if len(s) else 0.0)


def specific_directions(rank: int, tasks: int, common_fraction: float) -> int:
    """How many directions each task adds: equal shares of the rest of the rank, at most what exists."""
    return min(round((rank - int(rank * common_fraction)) / tasks), rank // tasks)
