"""Drift before and after, measured while a calibration runs: a `Job.watch` for a few forwards of held-out rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..blocks import State, batch_size, stack_of
from ..calibrate import Job, Task
from ..stream import Stream
from ..targets import BlockInfo
from .outputs import Scores, TailReader
from .results import TaskDrift
from .rows import hidden, readouts
from .walk import Ledger, measuring_device

BEFORE, AFTER = "merged", "calibrated"


@dataclass
class _Watched:
    """One task with held-out batches."""

    task: Task
    indices: Sequence[int]
    before: Stream
    """The uncalibrated merged model on the held-out batches."""
    ledger: Ledger
    expert: list[State]
    """The expert's states before the current block."""


@dataclass
class _Pending:
    """A block whose calibrated output is known only when the student has moved on."""

    block: str
    watched: _Watched
    place: int
    expert: tuple[State, State]
    model: State
    on_expert: Any


class Watcher:
    """Measures `merged` and `calibrated` against each expert on the held-out batches of a job.

    Assign it to `job.watch` before the job runs; call `finish` after it, while the networks are still open. Costs one
    block forward of the held-out rows, three with `split`, and three passes of a model's end.

    Args:
        job: its tasks' batches that are not in `learn` are measured; tasks without any are left out.
        scores: task → function (model, batch) → (rows, classes), for models whose scores live outside them.
        samples: held-out samples per task, at most (whole batches); None: all.
        split: measure local mismatch and propagation too.
    """

    def __init__(
        self, job: Job, *, scores: Mapping[str, Scores] | None = None, samples: int | None = None, split: bool = True
    ):
        self.seconds = 0.0
        """Time spent measuring."""
        self._job, self._scores, self._split = job, scores or {}, split
        self._pending: list[_Pending] = []
        names = [info.name for info in job.blocks]
        self._watched = []
        for task in job.tasks:
            indices = held_out(task, samples)
            if not indices:
                continue
            batches = [task.stream.batches[i] for i in indices]
            ledger = Ledger(
                TaskDrift(task.name),
                readouts(job.merged.model, names, batches[0]),
                measuring_device(job.merged.device),
            )
            before = Stream(job.merged, batches, task.name)
            self._watched.append(_Watched(task, indices, before, ledger, [{} for _ in indices]))

    def __call__(self, info: BlockInfo, block: nn.Module) -> None:
        """`block` is resident with its merged weights; experts are past it, students have its new weights at hand."""
        clock = time.perf_counter()
        self._settle()
        for watched in self._watched:
            self._before(info.name, watched)
        with self._job.students[0].installed(block):
            for watched in self._watched:
                self._after(info.name, watched)
        for watched in self._watched:
            watched.expert = [watched.task.stream.states[i] for i in watched.indices]
        self.seconds += time.perf_counter() - clock

    def finish(self) -> list[TaskDrift]:
        """The results, with final features and scores; the networks must be open."""
        clock = time.perf_counter()
        self._settle()
        student = self._job.students[0]
        for watched in self._watched:
            task = watched.task
            function = self._scores.get(task.name)
            expert, merged = TailReader(task.expert, function), TailReader(self._job.merged, function)
            for place, index in enumerate(watched.indices):
                models = {
                    BEFORE: (merged, watched.before.states[place]),
                    AFTER: (merged, student.streams[task.name].states[index]),
                }
                watched.ledger.ends(task.stream.batches[index], (expert, task.stream.states[index]), models)
        self.seconds += time.perf_counter() - clock
        return [watched.ledger.result for watched in self._watched]

    def _before(self, block: str, watched: _Watched) -> None:
        states = [watched.task.stream.states[i] for i in watched.indices]
        stack = stack_of(block)
        watched.ledger.start(block, watched.before.batches, [state[stack] for state in states])
        for place, (start, end) in enumerate(zip(watched.expert, states, strict=True)):
            own, batch = watched.before.states[place], watched.before.batches[place]
            output = watched.before.forward(block, place, keep=True)
            on_expert = None
            if self._split:
                on_expert = self._job.merged.forward(batch, block, start) if start else output
            states_after = watched.before.states[place]
            watched.ledger.block(BEFORE, block, batch, (start, end), (own, states_after), on_expert)

    def _after(self, block: str, watched: _Watched) -> None:
        student = self._job.students[0]
        stream = student.streams[watched.task.name]
        for place, index in enumerate(watched.indices):
            start, end = watched.expert[place], watched.task.stream.states[index]
            batch = watched.before.batches[place]
            on_expert = student.network.forward(batch, block, start) if self._split and start else None
            self._pending.append(_Pending(block, watched, place, (start, end), stream.states[index], on_expert))

    def _settle(self) -> None:
        """Note the calibrated side of the block before, which the student has left behind by now."""
        student = self._job.students[0]
        for one in self._pending:
            watched, index = one.watched, one.watched.indices[one.place]
            state = student.streams[watched.task.name].states[index]
            output = one.on_expert
            if self._split and not one.expert[0]:
                output = hidden(state[stack_of(one.block)])
            batch = watched.before.batches[one.place]
            watched.ledger.block(AFTER, one.block, batch, one.expert, (one.model, state), output)
        self._pending = []


def held_out(task: Task, samples: int | None) -> list[int]:
    """Indices of batches that the task does not learn from, until they hold `samples` samples."""
    learn, chosen, count = set(task.learn), [], 0
    for index, batch in enumerate(task.stream.batches):
        if index not in learn and (samples is None or count < samples):
            chosen.append(index)
            count += batch_size(batch)
    return chosen
