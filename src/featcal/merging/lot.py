"""LOT: layer-wise optimal task vectors (arXiv 2505.23859). Formulas as in its Eq. 9 and 12."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from .base import register
from .features import FeatureMerger, solve_pseudo


@register("lot")
class Lot(FeatureMerger):
    """Linear modules: T = [Σ T_i X_i X_iᵀ] (Σ X_i X_iᵀ)⁺; norm scales: t = Σ s_i t_i / Σ s_i with s_i = Σ z²; on θ_0.

    X_i and z are what the modules of expert i read (columns are rows of features; z before the affine). Biases, and
    every tensor outside the blocks, are the experts' mean.
    """

    from_base: ClassVar[bool] = True
    norms: ClassVar[bool] = True
    per_row: ClassVar[bool] = False

    rtol: float | None = Field(
        None,
        ge=0,
        description="eigenvalues up to rtol times the largest count as zero; left out: D times float32's eps",
    )

    def invert(self, R_MD: Tensor, G_DD: Tensor) -> tuple[Tensor, bool]:
        return solve_pseudo(R_MD, G_DD, self.rtol)[0], True
