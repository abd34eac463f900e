"""Sums over processes. Collectives come in the order of the plan, never of the data. One process: all is local.

Ranks own whole tasks first; if ranks outnumber tasks, those of a task share its batches. Every tensor is
made contiguous before a collective: gloo delivers a transposed view wrongly, in silence.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from .errors import InputError, RunError
from .moments import GroupSums, NormMoments, TaskMoments
from .update import NormPart

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT = timedelta(hours=3)
"""The longest that one process may wait for another within a block. A process that dies is noticed at once."""
GRACE = 5.0
"""Seconds that the processes without a message stay, because torchrun ends all when the first one ends."""


class Elsewhere(RunError):
    """Another process of the job says what is wrong; this one ends without a word."""


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

    def gather_parts(self, parts: Mapping[str, NormPart], device: torch.device) -> list[NormPart]:
        """Every task's share in a norm, in the order of the tasks, on every process's own `device`."""
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

    def together(self, step: Callable[[], T]) -> T:
        """Run a step that every process takes (without collectives in it); when it fails on one, all fail.

        Raises:
            InputError, RunError: as the step did, on the first process where it did.
            Elsewhere: on the others.
        """
        return step()


def _guarded(method: F) -> F:
    """Say what it means when a collective breaks: gloo raises a bare RuntimeError, NCCL a kind of it."""

    @functools.wraps(method)
    def call(self: Ranks, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RunError(
                f"rank {self.rank} lost another process of the job, which has ended or cannot be reached "
                f"({str(error).splitlines()[0][:120]}); the same command goes on from the last finished block"
            ) from error

    return call  # type: ignore[return-value]


class Ranks(Comm):
    """A job of several processes under torchrun (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self) -> None:
        self.rank, self.world = torch_dist.get_rank(), torch_dist.get_world_size()
        self._tasks: list[str] = []
        self._ranks: dict[str, list[int]] = {}
        self._groups: dict[str, Any] = {}

    @_guarded
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

    @_guarded
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

    @_guarded
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

    def gather_parts(self, parts: Mapping[str, NormPart], device: torch.device) -> list[NormPart]:
        merged: dict[str, NormPart] = {}
        for theirs in self.gather_objects({task: _moved(part, "cpu") for task, part in parts.items()}):
            merged |= theirs
        return [_moved(merged[task], device) for task in self._tasks if task in merged]

    @_guarded
    def share(self, tensors: dict[str, Tensor], device: torch.device, owner: int = 0) -> dict[str, Tensor]:
        shapes = self.share_object({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, owner)
        shared: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            mine = owner == self.rank
            tensor = tensors[name].to(device).contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            torch_dist.broadcast(tensor, owner)
            shared[name] = tensor
        return shared

    @_guarded
    def share_object(self, value: Any, owner: int = 0) -> Any:
        box = [value]
        torch_dist.broadcast_object_list(box, owner)
        return box[0]

    @_guarded
    def gather_objects(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.world
        torch_dist.all_gather_object(box, value)
        return box

    def together(self, step: Callable[[], T]) -> T:
        problem: InputError | RunError | None = None
        made: list[T] = []
        try:
            made.append(step())
        except (InputError, RunError) as error:
            problem = error
        problems = self.gather_objects(None if problem is None else (type(problem), str(problem), socket.gethostname()))
        failed = [rank for rank, theirs in enumerate(problems) if theirs]
        if not failed:
            return made[0]
        if failed[0] != self.rank:
            time.sleep(GRACE)
            raise Elsewhere(f"rank {failed[0]} reports: {problems[failed[0]][1]}")
        assert problem is not None
        if self.rank == 0:
            raise problem
        kind, text, host = problems[self.rank]
        raise kind("\n".join(f"rank {self.rank} on {host}: {line}" for line in text.splitlines())) from problem


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
def process_group() -> Iterator[Comm]:
    """The comm of this job: `Ranks` under torchrun, else one process. Each rank's GPU is that of its LOCAL_RANK."""
    if not under_torchrun():
        yield Comm()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch_dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks()
    finally:
        torch_dist.destroy_process_group()
