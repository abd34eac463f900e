"""THE algorithm: blocks in forward order, one closed-form ridge solve per module.

    for each block:
        for each pass over it (one for all units; in the `group` schedule one per unit):
            for each task: run the expert's and the merged block on the same samples, sum up what their modules read
            solve each module (Eq. 17)
        run the calibrated block: its outputs are what the next block reads

A *unit* is a group of linear modules that read the same tensor, or a norm. A *student* is a merged model being
calibrated: one, or one per candidate while settings are tuned. Residency, resume and processes do not show here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .network import Network
from .stream import Stream
from .student import Lesson, Student
from .targets import BlockInfo, Capture, Unit
from .update import Record


@dataclass
class Task:
    """One task: its expert and that expert's activations on the task's batches."""

    name: str
    expert: Network
    stream: Stream
    learn: Sequence[int]
    """Indices of the batches whose rows enter the moments; the others are held out and only walk along."""
    samples: int
    """Samples in `learn`, over all processes."""


@dataclass
class Job:
    """All that a calibration needs, whether models live in memory or on disk."""

    blocks: Sequence[BlockInfo]
    tasks: Sequence[Task]
    merged: Network
    base: Network
    students: Sequence[Student]
    schedule: str = "block"
    """`block`: all units of a block from one snapshot, as published. `group`: each sees the earlier ones calibrated."""
    restore: Callable[[BlockInfo], dict[str, Tensor] | None] = lambda info: None
    """New parameters of a block that an earlier, interrupted run has finished."""
    finish: Callable[[BlockInfo, Student, Sequence[Record]], None] = lambda info, student, records: None
    """Takes the first student's finished block: keeps it, saves it."""
    watch: Callable[[BlockInfo, nn.Module], None] = lambda info, block: None
    """Sees every block with its merged weights, before the students move on."""
    progress: Callable[[Sequence[BlockInfo]], Iterable[BlockInfo]] = iter


def calibrate(job: Job) -> None:
    """Calibrate every student of the job, block by block."""
    for info in job.progress(job.blocks):
        with job.merged.block(info.name) as block:
            for student in job.students:
                student.overrides = {}
            restored = job.restore(info)
            if restored is None:
                job.finish(info, job.students[0], fit(job, info, block))
            else:
                job.students[0].overrides = restored
                skip(job, info)
            job.watch(info, block)
            for student in job.students:
                student.advance(info.name, block, last=info is job.blocks[-1])


def fit(job: Job, info: BlockInfo, block: nn.Module) -> list[Record]:
    """New parameters of one block, into each student's `overrides`; the experts' streams move past the block."""
    records: list[Record] = []
    base = job.base.parameters(info.name)
    passes = [[unit] for unit in info.units] if job.schedule == "group" and info.units else [list(info.units)]
    for units in passes:
        for student in job.students:
            student.begin(info.name, units, block, base)
        for task in job.tasks:
            learn_task(job, info, task, units, last=units is passes[-1])
        made = [student.solve() for student in job.students]
        records += made[0]
    return records


def learn_task(job: Job, info: BlockInfo, task: Task, units: Sequence[Unit], *, last: bool) -> None:
    """Sum one task's rows for the given units; on the last pass the expert's stream moves past the block."""
    learn = set(task.learn)
    with task.expert.block(info.name) as expert:
        for student in job.students:
            student.open_task(task.name, expert, task.samples)
        for index in range(len(task.stream.batches)):
            if index not in learn:
                if last:
                    task.stream.forward(info.name, index, keep=True)
                continue
            with Capture(expert, units, expert=True, stop=not last) as seen:
                if last or seen.wanted:
                    task.stream.forward(info.name, index, keep=last)
            for student in job.students:
                student.observe(task.name, index, Lesson(seen.inputs, seen.outputs))
        for student in job.students:
            student.close_task(task.name, expert)


def skip(job: Job, info: BlockInfo) -> None:
    """Move the experts' streams past a block that needs no fitting."""
    for task in job.tasks:
        with task.expert.block(info.name):
            for index in range(len(task.stream.batches)):
                task.stream.forward(info.name, index, keep=True)
