"""DARE: drop entries of each τ_i at random, rescale the rest, then merge (Yu et al.

2024, arXiv 2311.03099).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Deltas, Merger, Ready, Stream, register
from .ties import Aggregate, Ties

SCALES = {"linear": 0.3, "ties": 0.5}


@register("dare", dare_linear={"combine": "linear"}, dare_ties={"combine": "ties"})
class Dare(Merger):
    """Each entry of τ_i is dropped with probability p; the others are divided by 1 − p.

    The survivors are combined by Task Arithmetic (`linear`, s 0.3), TIES (`ties`, s 0.5) or a mean
    (`average`). The masks come from the seed, the expert's position and the tensor's name: the same on every
    device, in any order.
    """

    combine: Literal["linear", "ties", "average"] = Field("linear", description="how the survivors are merged")
    drop_rate: float = Field(0.5, ge=0, lt=1, description="p: the probability that an entry is dropped")
    scale: float | None = Field(None, description="s; left out: 0.3 for linear, 0.5 for ties; average has none")
    rescale: bool = Field(True, description="divide the survivors by 1 − p")
    linear_only: bool = Field(False, description="drop only in the weights of linear modules")
    seed: int = Field(42, description="seed of the masks")
    density: float = Field(0.2, gt=0, le=1, description="ties: the fraction of the largest entries that is kept")
    aggregate: Aggregate = Field("sum", description="ties: sum, mean or max of the entries that agree")
    per_tensor: bool = Field(False, description="ties: trim each tensor by its own threshold")

    @property
    def wants_kinds(self) -> bool:
        return self.linear_only

    def prepare(self, stream: Stream) -> Ready:
        if self.combine != "ties":
            return self
        return _DropThen(self, self._ties().prepare(_Dropped(self, stream)))

    def merge_delta(self, deltas: Deltas) -> Tensor:
        tau = self.drop(deltas).tau
        return tau.mean(0) if self.combine == "average" else tau.sum(0) * self._scale()

    def drop(self, deltas: Deltas) -> Deltas:
        """The task vectors with entries dropped at random and the others rescaled."""
        if self.drop_rate == 0 or (self.linear_only and deltas.kind not in ("linear", "conv1d")):
            return deltas
        tau = torch.empty_like(deltas.tau)
        for i, vector in enumerate(deltas.tau):
            torch.mul(vector, self.mask(deltas.name, i, vector.shape).to(vector.device), out=tau[i])
        return replace(deltas, tau=tau / (1 - self.drop_rate) if self.rescale else tau)

    def mask(self, name: str, expert: int, shape: torch.Size) -> Tensor:
        """Bool, on the CPU: which entries of expert number `expert`'s tensor survive."""
        digest = hashlib.blake2b(f"{self.seed}/{expert}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.rand(shape, generator=generator) >= self.drop_rate

    def _scale(self) -> float:
        return SCALES[self.combine] if self.scale is None else self.scale

    def _ties(self) -> Ties:
        return Ties(
            scale=self._scale(),
            density=self.density,
            aggregate=self.aggregate,
            per_tensor=self.per_tensor,
            exclude=(),
        )


@dataclass(frozen=True)
class _Dropped:
    """A stream whose task vectors went through `Dare.drop`."""

    dare: Dare
    stream: Stream

    @property
    def tasks(self) -> int:
        return self.stream.tasks

    @property
    def dtype(self) -> torch.dtype:
        return self.stream.dtype

    def __iter__(self) -> Iterator[Deltas]:
        return map(self.dare.drop, self.stream)


@dataclass(frozen=True)
class _DropThen:
    dare: Dare
    ready: Ready

    def merge_delta(self, deltas: Deltas) -> Tensor:
        return self.ready.merge_delta(self.dare.drop(deltas))
