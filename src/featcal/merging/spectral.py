"""Singular value decompositions that leave out directions which are not there.

The singular vectors that LAPACK returns for a singular value of zero are arbitrary: they differ between
machines. An expert that did not touch a matrix, or that changed it by a low-rank adapter, has many. Nothing
here uses them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Directions(NamedTuple):
    """U (m, k), σ (k,) descending and V (k, d) with U diag(σ) V the matrix; k is its numerical rank."""

    u: Tensor
    s: Tensor
    v: Tensor

    def top(self, count: int) -> Directions:
        """The `count` largest, or all when there are fewer."""
        return Directions(self.u[:, :count], self.s[:count], self.v[:count])


def directions(matrix: Tensor, size: Tensor | None = None) -> Directions:
    """The singular triplets of `matrix` (m, d) above max(m, d) · eps · size, the usual bound for its rank.

    `size` is σ_1 unless given: the norm of what a difference was computed from, whose rounding errors the limit is for.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    limit = (s[:1] if size is None else size) * max(matrix.shape) * torch.finfo(s.dtype).eps
    return Directions(u, s, v).top(int((s > limit).sum()))


def joined(parts: list[Directions]) -> Directions:
    """The triplets of all parts, side by side.

    U's columns and V's rows are in general no longer orthogonal.
    """
    return Directions(
        torch.cat([p.u for p in parts], 1), torch.cat([p.s for p in parts]), torch.cat([p.v for p in parts])
    )


def polar(matrix: Tensor) -> Tensor:
    """The nearest (partial) isometry to `matrix`: U V of its singular value decomposition."""
    u, _, v = directions(matrix)
    return u @ v


def weighted(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """U diag(σ) V."""
    return (u * s) @ v
