"""Mergers that regress on features: block by block, on the engine's networks and streams.

For the linear modules of an input group, with G_i the second moment of task i's inputs,
W = A + [Σ (W_i − A) G_i] (Σ G_i)^{-1} minimises Σ_i ‖W X_i − W_i X_i‖². The matrix A cancels wherever Σ G_i is regular;
inputs that never occur keep it. The methods differ in A, in what is done to G_i, and in whose inputs they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..calibrate import Task
from ..moments import NormMoments, Pool, add_gram, mirror
from ..network import Network
from ..student import Unit, work
from ..targets import BlockInfo, Capture, Group, Norm, as_matrix, keep_rows, normalise, select_rows
from .base import Merger


class FeatureMerger(Merger):
    """Parameters and switches of the regression mergers."""

    needs: ClassVar = "inputs"
    sequential: ClassVar[bool] = False
    """Features: of each expert on its own (False), or of its blocks on the merged model's activations (True)."""
    from_base: ClassVar[bool] = False
    """A: the base's weights (True) or the mean of the experts' (False)."""
    norms: ClassVar[bool] = False
    """Whether norm scales are regressed, too."""
    per_row: ClassVar[bool] = True
    """G_i is an average over rows (True) or a sum (False)."""

    samples: int = Field(256, ge=1, description="unlabelled samples per task")
    batch_size: int = Field(32, ge=1, description="samples per forward pass; does not change the result")

    def weigh(self, G_DD: Tensor) -> Tensor:
        """What enters the regression in place of a task's second moment."""
        return G_DD

    def invert(self, R_MD: Tensor, G_DD: Tensor) -> tuple[Tensor, bool]:
        """R G^{-1}, and whether G was regular."""
        return solve_regular(R_MD, G_DD)


def solve_regular(R_MD: Tensor, G_DD: Tensor) -> tuple[Tensor, bool]:
    """R G^{-1} by Cholesky; by the pseudo-inverse (and False) when G is singular to within float64."""
    lower, info = torch.linalg.cholesky_ex(G_DD)
    diagonal = lower.diagonal()
    if int(info) == 0 and float(diagonal.min() / diagonal.max()) ** 2 > 1e-12:
        return torch.cholesky_solve(R_MD.T, lower).T, True
    return solve_pseudo(R_MD, G_DD)


def solve_pseudo(R_MD: Tensor, G_DD: Tensor, rtol: float | None = None) -> tuple[Tensor, bool]:
    """R G⁺ with the Moore-Penrose inverse, and whether all eigenvalues counted.

    Eigenvalues up to `rtol` times the largest count as zero; left out, it is D · eps of float32, the precision in
    which the features were computed.
    """
    values, vectors = torch.linalg.eigh(G_DD)
    limit = float(values[-1]) * (len(G_DD) * torch.finfo(torch.float32).eps if rtol is None else rtol)
    counted = values > max(limit, 0.0)
    basis = vectors[:, counted]
    return (R_MD @ basis / values[counted]) @ basis.T, bool(counted.all())


def scale_off_diagonal(G_DD: Tensor, factor: float) -> Tensor:
    """G with its off-diagonal entries multiplied."""
    scaled = G_DD * factor
    scaled.diagonal().copy_(G_DD.diagonal())
    return scaled


@dataclass
class Gram:
    """Σ x xᵀ of the rows that an input group reads."""

    sum_DD: Tensor
    rows: int = 0

    def add(self, rows_RD: Tensor) -> None:
        add_gram(self.sum_DD, rows_RD)
        self.rows += len(rows_RD)

    def matrix(self, per_row: bool) -> Tensor:
        whole = mirror(self.sum_DD)
        return whole / max(self.rows, 1) if per_row else whole


@dataclass
class Regression:
    """Sums over tasks of one input group: Σ G_i and, per module, Σ (W_i − A) G_i; float64."""

    anchors: Mapping[str, Tensor]
    G_DD: Tensor
    R_MD: dict[str, Tensor] = field(default_factory=dict)

    def fold(self, G_DD: Tensor, experts: Mapping[str, Tensor]) -> None:
        """Add one task: its (weighed) second moment and its modules' weights."""
        self.G_DD += G_DD
        for name, anchor in self.anchors.items():
            part = (experts[name].double() - anchor) @ G_DD
            self.R_MD[name] = self.R_MD[name] + part if name in self.R_MD else part


@dataclass
class Affine:
    """Sums over tasks of one norm's scale: Σ s_i and Σ s_i (γ_i − γ_0), s_i = Σ z²; per channel, float64."""

    anchor_C: Tensor
    energy_C: Tensor
    pull_C: Tensor

    def fold(self, energy_C: Tensor, gamma_C: Tensor) -> None:
        self.energy_C += energy_C
        self.pull_C += energy_C * (gamma_C.double() - self.anchor_C)

    def solve(self) -> Tensor:
        """γ_0 + Σ s_i (γ_i − γ_0) / Σ s_i; γ_0 where no feature was ever non-zero."""
        return self.anchor_C + torch.where(self.energy_C > 0, self.pull_C / self.energy_C, 0.0)


def merge_blocks(
    method: FeatureMerger,
    blocks: Sequence[BlockInfo],
    tasks: Sequence[Task],
    merged: Network,
    base: Network,
    progress: Callable[[Sequence[BlockInfo]], Iterable[BlockInfo]] = iter,
    notes: list[str] | None = None,
) -> Iterator[tuple[BlockInfo, dict[str, Tensor]]]:
    """New parameters of each block in forward order, by their name in it, in the dtype in which they are saved.

    `merged` holds the mean of the experts, the value of everything that is not yielded here. The tasks' streams run on
    their experts, or on `merged` for a method that is `sequential`. All networks are open. Memory: one block of
    `merged`, of `base` and of one expert, one second moment per task at hand and one for all.
    """
    for info in progress(blocks):
        units = [unit for unit in info.units if isinstance(unit, Group) or method.norms]
        with merged.block(info.name) as block:
            start = dict(base.parameters(info.name) if method.from_base else merged.parameters(info.name))
            sums = {_key(unit): _empty(unit, start, block) for unit in units}
            for task in tasks:
                _fold_task(method, info.name, units, task, block, sums)
            new = _solve(method, info.name, block, sums, notes if notes is not None else [])
            new = {name: value.to(merged.stored_dtype(f"{info.name}.{name}")) for name, value in new.items()}
            if method.sequential:
                with swapped(block, new):
                    for task in tasks:
                        for index in range(len(task.stream.batches)):
                            task.stream.forward(info.name, index, keep=True)
        yield info, new


def _key(unit: Unit) -> str:
    return unit.modules[0] if isinstance(unit, Group) else unit.module


def _empty(unit: Unit, start: Mapping[str, Tensor], block: nn.Module) -> Regression | Affine:
    if isinstance(unit, Norm):
        scale = start[f"{unit.module}.weight"].double()
        return Affine(scale, torch.zeros_like(scale), torch.zeros_like(scale))
    anchors = {n: as_matrix(block.get_submodule(n), start[f"{n}.weight"]).double() for n in unit.modules}
    device = next(iter(anchors.values())).device
    return Regression(anchors, torch.zeros(unit.width, unit.width, dtype=torch.float64, device=device))


def _fold_task(
    method: FeatureMerger,
    name: str,
    units: Sequence[Unit],
    task: Task,
    block: nn.Module,
    sums: Mapping[str, Regression | Affine],
) -> None:
    """Run one task through the block and add its features and its expert's weights to the sums."""
    if method.sequential:
        weights = dict(task.expert.parameters(name))
        with swapped(block, weights):
            seen = _features(name, units, task, block, stop=True)
    else:
        with task.expert.block(name) as own:
            seen = _features(name, units, task, own, stop=False)
            weights = {n: p.data.clone() for n, p in own.named_parameters()}
    for unit in units:
        total, features = sums[_key(unit)], seen[_key(unit)]
        if isinstance(total, Regression):
            assert isinstance(features, Gram) and isinstance(unit, Group)
            experts = {n: as_matrix(block.get_submodule(n), weights[f"{n}.weight"]) for n in unit.modules}
            total.fold(method.weigh(features.matrix(method.per_row)), experts)
        else:
            assert isinstance(features, NormMoments) and isinstance(unit, Norm)
            total.fold(features.square_C, weights[f"{unit.module}.weight"])


def _features(
    name: str, units: Sequence[Unit], task: Task, block: nn.Module, *, stop: bool
) -> dict[str, Gram | NormMoments]:
    """Second moments of what the units read on the task's batches. Without `stop` the task's stream moves on."""
    sums: dict[str, Gram | NormMoments] = {}
    for index, batch in enumerate(task.stream.batches):
        with Capture(block, units, expert=False, stop=stop and bool(units)) as seen:
            task.stream.forward(name, index, keep=not stop)
        for unit in units:
            x = work(seen.inputs[_key(unit)])
            rows, _ = select_rows(x, keep_rows(batch, unit.mask), None)
            if isinstance(unit, Norm):
                moments = sums.setdefault(_key(unit), NormMoments(unit.channels, Pool(x.device)))
                assert isinstance(moments, NormMoments)
                moments.add(normalise(rows, unit), None)
                continue
            zeros = torch.zeros(unit.width, unit.width, dtype=torch.float64, device=x.device)
            gram = sums.setdefault(_key(unit), Gram(zeros))
            assert isinstance(gram, Gram)
            gram.add(rows)
    return sums


def _solve(
    method: FeatureMerger, name: str, block: nn.Module, sums: Mapping[str, Regression | Affine], notes: list[str]
) -> dict[str, Tensor]:
    new: dict[str, Tensor] = {}
    for key, total in sums.items():
        if isinstance(total, Affine):
            new[f"{key}.weight"] = total.solve()
            continue
        if not total.G_DD.isfinite().all():
            notes.append(f"{name}: {', '.join(total.anchors)} get the experts' mean, their features are not finite")
            continue
        stacked = torch.cat([total.R_MD[module] for module in total.anchors])
        change, regular = method.invert(stacked, total.G_DD)
        if not regular:
            notes.append(f"{name}: the features of {', '.join(total.anchors)} do not span all inputs (pseudo-inverse)")
        sizes = [len(anchor) for anchor in total.anchors.values()]
        for (module, anchor), part in zip(total.anchors.items(), change.split(sizes), strict=True):
            new[f"{module}.weight"] = as_matrix(block.get_submodule(module), anchor + part).contiguous()
    return new


@contextmanager
def swapped(block: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values for some of the block's parameters; its own are put back afterwards."""
    parameters: dict[str, Any] = dict(block.named_parameters())
    own = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.to(own[name])
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value
