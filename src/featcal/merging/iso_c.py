"""Iso-C: isotropic merging in the common subspace (Marczak et al. 2025, arXiv 2502.04959)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from .base import Deltas, MatrixMerger, register
from .spectral import directions


@register("iso_c")
class IsoC(MatrixMerger):
    """Matrices: s Σ τ_i, all its singular values replaced by their mean. Other tensors: s times the mean."""

    scale: float = Field(1.0, description="s; 1.3 to 1.5 in published CLIP results")

    def merge_matrix(self, deltas: Deltas) -> Tensor:
        u, s, v = directions(deltas.tau.sum(0))
        return (u @ v) * (s.mean() if len(s) else 0.0)
