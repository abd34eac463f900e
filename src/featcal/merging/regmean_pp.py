"""RegMean++: RegMean on features that follow the merged model's prefix (Nguyen et al. 2025, arXiv 2508.03121)."""

from __future__ import annotations

from typing import ClassVar

from .base import register
from .regmean import RegMean


@register("regmean_pp", regmean_plusplus={})
class RegMeanPP(RegMean):
    """RegMean block by block: G_i comes from expert i's block run on the activations of the blocks merged so far.

    In the blocks the other tensors are the experts' mean, as is what runs before the first block (embeddings and
    their norm). What runs after the blocks keeps the base's value. Published: γ = 0.95 for CLIP, 0.1 for Llama.
    """

    sequential: ClassVar[bool] = True
