"""RegMean: regression mean of linear layers on the experts' own features (Jin et al. 2023, arXiv 2212.09849)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from .base import register
from .features import FeatureMerger, scale_off_diagonal


@register("regmean")
class RegMean(FeatureMerger):
    """W = Σ W_i G̃_i (Σ G̃_i)^{-1} for the linear modules of all blocks; every other tensor is the experts' mean.

    G_i is the average of x xᵀ over the rows that the module of expert i reads; G̃_i has its off-diagonal entries
    multiplied by γ. Published: γ = 0.95 for CLIP, 0.6 for GPT-2, 0.5 for Llama (MergeBench), 0.1 otherwise.
    """

    off_diagonal: float = Field(0.95, ge=0, le=1, description="γ, the factor of off-diagonal entries")

    def weigh(self, G_DD: Tensor) -> Tensor:
        return scale_off_diagonal(G_DD, self.off_diagonal)
