"""Sums over processes. Collectives come in the order of the plan, never of the data. One process: all is local.

Ranks own whole tasks first; if ranks outnumber tasks, those of a task share its batches. Every tensor is
made contiguous before a collective: gloo delivers a transposed view wrongly, in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from .errors import RunError
from .moments import GroupSums, NormMoments, TaskMoments
from .update import NormPart

TIMEOUT = timedelta(minutes=30)


class Comm:
    """A job of one process. `Ranks` (many processes) overrides each step."""

    rank = 0
    world = 1

    def assign(self, samples: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Task name → indices of the batches that this process runs; `samples`: samples per batch of each task."""
        return {task: list(range(len(sizes))) for task, sizes in samples.items()}

    def leads(self, task: str) -> bool:
        """Whether this process folds the task's moments (one of those that share its batches does)."""
        return True

    def merge_task(self, task: str, moments: TaskMoments | NormMoments) -> None:
        """Sum a task's moments over the processes that share its batches."""

    def owner(self, index: int) -> int:
        """The process that solves the unit at this place of its block."""
        return 0

    def reduce(self, sums: GroupSums, owner: int) -> None:
        """Sum over all processes, onto the owner."""

    def gather_parts(self, parts: Mapping[str, NormPart]) -> list[NormPart]:
        """Every task's share in a norm, in the order of the tasks, on every process."""
        return list(parts.values())

    def share(self, tensors: dict[str, Tensor], device: torch.device, owner: int = 0) -> dict[str, Tensor]:
        """The owner's tensors on every process."""
        return tensors

    def share_object(self, value: Any, owner: int = 0) -> Any:
        """The owner's small picklable value on every process."""
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Every process's small picklable value, in the order of ranks."""
        return [value]


class Ranks(Comm):
    """A job of several processes under torchrun (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self) -> None:
        self.rank, self.world = torch_dist.get_rank(), torch_dist.get_world_size()
        self._tasks: list[str] = []
        self._ranks: dict[str, list[int]] = {}
        self._groups: dict[str, Any] = {}

    def assign(self, samples: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        self._tasks, self._ranks = list(samples), shares({t: sum(s) for t, s in samples.items()}, self.world)
        mine: dict[str, list[int]] = {}
        for task, ranks in self._ranks.items():
            self._groups[task] = torch_dist.new_group(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine[task] = list(range(len(samples[task])))[ranks.index(self.rank) :: len(ranks)]
        return mine

    def leads(self, task: str) -> bool:
        return self._ranks[task][0] == self.rank

    def merge_task(self, task: str, moments: TaskMoments | NormMoments) -> None:
        if len(self._ranks[task]) == 1:
            return
        for tensor in moments.tensors():
            torch_dist.all_reduce(tensor, group=self._groups[task])
        count = torch.tensor([moments.rows], device=moments.weight.device)
        torch_dist.all_reduce(count, group=self._groups[task])
        moments.rows = int(count)

    def owner(self, index: int) -> int:
        return index % self.world

    def reduce(self, sums: GroupSums, owner: int) -> None:
        for tensor in sums.tensors():
            torch_dist.reduce(tensor, owner)
        broken = [float(task in sums.broken) for task in self._tasks]
        scalars = [sums.omega, float(sums.rows), *sums.floor.values(), *broken]
        total = torch.tensor(scalars, dtype=torch.float64, device=sums.G_DD.device)
        torch_dist.all_reduce(total)
        sums.omega, sums.rows = float(total[0]), int(total[1])
        names = list(sums.floor)
        sums.floor = {name: float(total[2 + i]) for i, name in enumerate(names)}
        sums.broken = [t for i, t in enumerate(self._tasks) if total[2 + len(names) + i] > 0]

    def gather_parts(self, parts: Mapping[str, NormPart]) -> list[NormPart]:
        device = next((p.mean_C.device for p in parts.values()), None)
        merged: dict[str, NormPart] = {}
        for theirs in self.gather_objects({task: _moved(part, "cpu") for task, part in parts.items()}):
            merged |= theirs
        return [_moved(merged[task], device or "cpu") for task in self._tasks if task in merged]

    def share(self, tensors: dict[str, Tensor], device: torch.device, owner: int = 0) -> dict[str, Tensor]:
        shapes = self.share_object({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, owner)
        shared: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            mine = owner == self.rank
            tensor = tensors[name].to(device).contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            torch_dist.broadcast(tensor, owner)
            shared[name] = tensor
        return shared

    def share_object(self, value: Any, owner: int = 0) -> Any:
        box = [value]
        torch_dist.broadcast_object_list(box, owner)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.world
        torch_dist.all_gather_object(box, value)
        return box


def shares(cost: Mapping[str, float], world: int) -> dict[str, list[int]]:
    """Ranks of each task. Tasks go whole to the least loaded rank, costliest first; spare ranks double up on tasks."""
    tasks = list(cost)
    if world >= len(tasks):
        return {task: list(range(i, world, len(tasks))) for i, task in enumerate(tasks)}
    load = [0.0] * world
    ranks: dict[str, list[int]] = {}
    for task in sorted(tasks, key=lambda t: (-cost[t], tasks.index(t))):
        rank = load.index(min(load))
        load[rank] += cost[task]
        ranks[task] = [rank]
    return {task: ranks[task] for task in tasks}


def _moved(part: NormPart, device: Any) -> NormPart:
    beta = None if part.beta_C is None else part.beta_C.to(device)
    return replace(
        part,
        mean_C=part.mean_C.to(device),
        energy_C=part.energy_C.to(device),
        gamma_C=part.gamma_C.to(device),
        beta_C=beta,
    )


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def process_group(device: torch.device) -> Iterator[Comm]:
    """The comm of this job: `Ranks` under torchrun, else one process. Each rank's GPU is that of its LOCAL_RANK."""
    if not under_torchrun():
        yield Comm()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch_dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks()
    except torch_dist.DistBackendError as error:
        raise RunError(f"rank {torch_dist.get_rank()} lost the other processes: {error}") from error
    finally:
        torch_dist.destroy_process_group()
