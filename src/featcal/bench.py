"""The models and data of a calibration, opened once, from which jobs over all or some of the samples are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .blocks import batch_size, cut
from .calibrate import Job, Task
from .dist import Comm
from .moments import Pool
from .network import Network
from .recipe import slug
from .settings import Calibration
from .stream import Stream
from .student import Onlooker, Student
from .targets import BlockInfo


@dataclass
class Bench:
    """Open networks and batches. `learn` and `held_out` are by task, over all processes."""

    blocks: Sequence[BlockInfo]
    merged: Network
    base: Network
    experts: Mapping[str, Network]
    learn: Mapping[str, Sequence[Any]]
    held_out: Mapping[str, Sequence[Any]]
    comm: Comm = field(default_factory=Comm)
    spill: Path | None = None
    """Folder for activations that shall not stay in memory."""
    side_by_side: int = 8
    """Candidates whose sums fit into memory at once while settings are tuned."""

    def job(self, settings: Sequence[Calibration], *, samples: int | None = None, onlooker: bool = False) -> Job:
        """A job with one student per settings, on the first `samples` samples of each task and all held-out ones.

        With `onlooker` a last student walks the held-out samples with the merged weights as they are.
        """
        learn = {task: first_samples(batches, samples) for task, batches in self.learn.items()}
        batches = {task: [*learn[task], *self.held_out.get(task, ())] for task in self.experts}
        mine = self.comm.assign({task: [batch_size(b) for b in all_] for task, all_ in batches.items()})
        tasks, own, held = [], {}, {}
        for task, indices in mine.items():
            own[task] = [batches[task][i] for i in indices]
            places = [place for place, i in enumerate(indices) if i < len(learn[task])]
            held[task] = [place for place, i in enumerate(indices) if i >= len(learn[task])]
            expert = self.experts[task]
            stream = Stream(expert, own[task], task, self._folder("expert", task))
            tasks.append(Task(task, expert, stream, places, sum(map(batch_size, learn[task]))))

        def streams(label: str) -> dict[str, Stream]:
            return {task: Stream(self.merged, own[task], task, self._folder(label, task)) for task in own}

        everything = {task: range(len(own[task])) for task in own}
        pool = Pool(self.merged.device)
        students = [
            Student(one, self.merged, streams(f"student{i}"), everything, held, self.comm, pool)
            for i, one in enumerate(settings)
        ]
        if onlooker:
            students.append(Onlooker(settings[0], self.merged, streams("onlooker"), held, held, self.comm))
        return Job(self.blocks, tasks, self.merged, self.base, students, settings[0].schedule)

    def _folder(self, side: str, task: str) -> Path | None:
        return None if self.spill is None else self.spill / f"rank{self.comm.rank}" / side / slug(task)


def first_samples(batches: Sequence[Any], samples: int | None) -> list[Any]:
    """The first samples of a list of batches, the last batch cut to fit; all of them for None."""
    if samples is None:
        return list(batches)
    taken: list[Any] = []
    missing = samples
    for batch in batches:
        if missing <= 0:
            break
        rows = batch_size(batch)
        taken.append(batch if rows <= missing else cut(batch, missing))
        missing -= min(rows, missing)
    return taken


def samples_after(batches: Sequence[Any], samples: int) -> list[Any]:
    """What `first_samples` leaves."""
    left: list[Any] = []
    for batch in batches:
        rows = batch_size(batch)
        if samples < rows:
            left.append(cut(batch, rows, start=samples) if samples else batch)
        samples = max(samples - rows, 0)
    return left
