"""Sums over processes. Collectives come in the order of the plan, never of the data. One process: all is local."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .moments import GroupSums, NormMoments, TaskMoments
from .update import NormPart


class Comm:
    """A job of one process. `Ranks` (many processes) overrides each step."""

    rank = 0
    world = 1

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

    def share(self, tensors: dict[str, Tensor], like: dict[str, Tensor], owner: int) -> dict[str, Tensor]:
        """The owner's tensors (a subset of `like`, whose shapes and dtypes all processes know) on every process."""
        return tensors

    def share_object(self, value: object, owner: int) -> object:
        """The owner's small picklable value on every process."""
        return value
