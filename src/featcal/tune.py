"""Choose λ, ρ and α without labels: by how close the calibrated outputs come to the experts' on held-out samples.

Criterion: KL(expert ‖ candidate) of the task's scores, averaged over held-out rows, divided by that of the merged
model as it is, and averaged over tasks: 1 is the merged model, 0 the experts. Candidates walk through the blocks side
by side, on a part of the samples, so that the experts run once a round. Labels and test rows are never read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .bench import Bench
from .calibrate import Job, calibrate
from .drift.outputs import Scores, TailReader, output_drift, pooled_feature
from .drift.rows import readouts
from .errors import InputError
from .log import progress_bar
from .settings import Calibration

logger = logging.getLogger("featcal")

SHARE = 8
"""Candidates are tried on one in SHARE of the samples, but on no fewer than FEWEST per task."""
FEWEST = 16
CAP = 4.0
"""One task counts at most this many times worse than the merged model, so that no bad head decides alone."""
RHO = (1.0, 2.0, 7.0)
LESS = 0.2
"""Factor on λ, once and twice; its inverse when the search starts below LITTLE."""
LITTLE = 1e-3
VALLEY = 0.35
"""A weaker pull to the anchor goes with an anchor further out: the best ρ goes about like λ^-VALLEY."""
ALPHA = 0.6
ROUNDS = (len(RHO), 3, 1)
"""Candidates in each round of the search (one more in the first when the given ρ is not in RHO)."""
NEIGHBOURS = 4
"""Held-out samples that a neighbourhood needs at least."""
SMALLEST = 1e-5
"""λ from which the search starts when it is given as zero: steps are factors."""
TEMPERATURE = 0.1
"""Of the substitute criterion's similarities, for models without scores."""


@dataclass
class Candidate:
    """One choice of settings and how it did."""

    settings: Calibration
    kl: dict[str, float]
    """By task, mean KL(expert ‖ candidate) in nats over held-out rows."""
    criterion: float
    """Mean over tasks of kl / (kl of the merged model): below 1 is better than the merged model."""
    round: int

    def row(self) -> dict[str, Any]:
        s = self.settings
        return {"ridge": s.ridge, "rho": s.rho, "alpha": s.alpha, "criterion": self.criterion, "kl": self.kl,
                "round": self.round}  # fmt: skip


@dataclass
class Tuning:
    """The outcome of a search."""

    chosen: Calibration | None
    """The best settings; None when no candidate came closer to the experts than the merged model as it is."""
    candidates: list[Candidate]
    merged_kl: dict[str, float]
    kind: str
    """What the criterion compared."""
    seconds: float = 0.0
    samples: int = 0
    worse: list[str] = field(default_factory=list)
    """Tasks on which the chosen settings are no better than the merged model."""

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=lambda c: c.criterion)

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        rows = [{**c.row(), "chosen": c is best and self.chosen is not None} for c in self.candidates]
        return {
            "kind": self.kind,
            "samples": self.samples,
            "seconds": self.seconds,
            "merged_kl": self.merged_kl,
            "worse": self.worse,
            "candidates": rows,
        }


def tune(
    bench: Bench,
    settings: Calibration,
    scores: Mapping[str, Scores] | None = None,
    progress: bool = False,
) -> Tuning:
    """Search λ, ρ, α around `settings` in three rounds, deterministic, coarse to fine.

    λ moves along the valley: ρ goes with it as λ^-VALLEY.

    1. ρ over RHO, at the λ and α of `settings`.
    2. From the bottom of the parabola through these: λ one and two steps of a factor LESS, and one step with ALPHA.
    3. From the best so far: the bottoms of the parabolas in log λ and in log ρ (across the valley), both at once.

    Raises:
        InputError: no held-out sample.
    """
    start = time.perf_counter()
    if not any(bench.held_out.values()):
        raise InputError("tune: no held-out samples; give more data, or choose the settings with tune: off")
    total = settings.samples
    samples = min(total, max(total // SHARE, FEWEST))
    search = _Search(bench, scores or {}, samples, progress)
    start_at = settings.model_copy(update={"ridge": settings.ridge or SMALLEST})
    search.try_all([start_at.model_copy(update={"rho": rho}) for rho in sorted({*RHO, settings.rho}) if rho > 0])
    step = LESS if start_at.ridge > LITTLE else 1 / LESS
    first = search.bottom_across_valley()
    once, twice = (along_valley(first, first.ridge * factor) for factor in (step, step**2))
    search.try_all([once, twice, once.model_copy(update={"alpha": ALPHA})])
    search.try_all([along_valley(search.bottom_across_valley(), search.bottom(lambda s: s.ridge))])
    return search.result(time.perf_counter() - start)


def along_valley(settings: Calibration, ridge: float) -> Calibration:
    """Another λ, and the ρ that goes with it."""
    return settings.model_copy(update={"ridge": ridge, "rho": settings.rho * (settings.ridge / ridge) ** VALLEY})


def across_valley(settings: Calibration) -> float:
    """What `along_valley` does not change, up to rounding: ρ at λ = 1."""
    return round(settings.rho * settings.ridge**VALLEY, 12)


class _Search:
    def __init__(self, bench: Bench, scores: Mapping[str, Scores], samples: int, progress: bool):
        self.bench, self.scores, self.samples, self.progress = bench, scores, samples, progress
        self.candidates: list[Candidate] = []
        self.merged_kl: dict[str, float] = {}
        self.kind = ""
        self.rounds = 0

    def try_all(self, wanted: Sequence[Calibration]) -> None:
        """Run the settings that were not tried yet, side by side as far as memory goes."""
        tried = {_key(candidate.settings) for candidate in self.candidates}
        new = list({_key(s): s for s in wanted if _key(s) not in tried}.values())
        if not new:
            return
        self.rounds += 1
        most = self.bench.side_by_side
        for together in (new[start : start + most] for start in range(0, len(new), most)):
            first = not self.merged_kl
            job = self.bench.job(together, samples=self.samples, onlooker=first)
            label = f"choosing settings, round {self.rounds} of {len(ROUNDS)}"
            job.progress = progress_bar(label, enabled=self.progress and self.bench.comm.rank == 0)
            calibrate(job)
            table, self.kind = divergences(job, self.scores)
            if first:
                self.merged_kl = table.pop()
            for one, kl in zip(together, table, strict=True):
                self.candidates.append(Candidate(one, kl, criterion(kl, self.merged_kl), self.rounds))

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=lambda c: c.criterion)

    def bottom(self, place: Callable[[Calibration], float]) -> float:
        """Bottom of the parabola, in logs, through the best `place` and its neighbours, each with its best value."""
        points: dict[float, float] = {}
        for candidate in self.candidates:
            x = math.log(place(candidate.settings))
            points[x] = min(candidate.criterion, points.get(x, math.inf))
        return math.exp(parabola_bottom(points, math.log(place(self.best.settings))))

    def bottom_across_valley(self) -> Calibration:
        """The best settings, moved across the valley to its bottom."""
        best = self.best.settings
        return best.model_copy(update={"rho": best.rho * self.bottom(across_valley) / across_valley(best)})

    def result(self, seconds: float) -> Tuning:
        best = self.best
        better = best.criterion < 1.0
        worse = [task for task, kl in best.kl.items() if not kl < self.merged_kl[task]]
        return Tuning(
            best.settings if better else None,
            self.candidates,
            self.merged_kl,
            self.kind,
            seconds,
            self.samples,
            worse if better else list(self.merged_kl),
        )


def parabola_bottom(points: Mapping[float, float], best: float) -> float:
    """Abscissa of the minimum of the parabola through the best point and its two neighbours, kept between these.

    At the edge of what was tried: of the parabola through the last three, at most half a step beyond the best. The best
    itself when there are fewer than three points.
    """
    xs = sorted(points)
    if len(xs) < 3:
        return best
    (x0, y0), (x1, y1), (x2, y2) = ((x, points[x]) for x in xs[max(0, min(xs.index(best) - 1, len(xs) - 3)) :][:3])
    beyond = best + (best - x1) / 2  # the best itself, unless it lies at an edge
    low, high = (x0, x2) if best == x1 else sorted((x1, beyond))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (right - left) / (x2 - x0)
    if curvature <= 0:
        return beyond
    return min(max((x0 + x1) / 2 - left / (2 * curvature), low), high)


def _key(settings: Calibration) -> tuple[float, float, float]:
    return round(settings.ridge, 12), round(settings.rho, 9), round(settings.alpha, 9)


def criterion(kl: Mapping[str, float], merged: Mapping[str, float]) -> float:
    """Mean over tasks of the candidate's KL relative to the merged model's, each capped at CAP."""
    ratios = []
    for task, value in kl.items():
        if value - value != 0:  # not finite
            ratios.append(CAP)
        elif value == merged[task]:
            ratios.append(1.0)
        else:
            ratios.append(min(value / merged[task], CAP) if merged[task] > 0 else CAP)
    return sum(ratios) / len(ratios)


def divergences(job: Job, scores: Mapping[str, Scores]) -> tuple[list[dict[str, float]], str]:
    """Per student, by task: mean KL(expert ‖ student) over held-out samples, after the job has run; and of what."""
    blocks = [info.name for info in job.blocks]
    comm = job.students[0].comm
    sums: list[dict[str, tuple[float, int]]] = [{} for _ in job.students]
    unscored: dict[str, list[Tensor]] = {}
    for task in job.tasks:
        held = [i for i in range(len(task.stream.batches)) if i not in set(task.learn)]
        if not held:
            continue
        readout = list(readouts(job.merged.model, blocks, task.stream.batches[held[0]]).values())[-1]
        expert_reader = TailReader(task.expert, scores.get(task.name))
        reader = TailReader(job.merged, scores.get(task.name))
        experts: list[Tensor] = []
        features: list[list[Tensor]] = [[] for _ in job.students]
        totals = [0.0] * len(job.students)
        count = 0
        for index in held:
            batch = task.stream.batches[index]
            expert = expert_reader(batch, task.stream.states[index], readout)
            for place, student in enumerate(job.students):
                tail = reader(batch, student.streams[task.name].states[index], readout)
                drift = output_drift(expert, tail, batch, readout, torch.device("cpu"))
                if "kl" in drift:
                    totals[place] += float(drift["kl"].double().sum())
                else:
                    features[place].append(pooled_feature(tail, batch, readout))
            if features[0]:
                experts.append(pooled_feature(expert, batch, readout))
            count += len(pooled_feature(expert, batch, readout))
        if experts:
            unscored[task.name] = [torch.cat(own) for own in (experts, *features)]
            continue
        for place in range(len(job.students)):
            sums[place][task.name] = (totals[place], count)
    table = [_over_processes(comm.gather_objects(one)) for one in sums]
    neighbourhoods = _by_neighbourhoods(comm.gather_objects(unscored))
    for name, values in neighbourhoods.items():
        for one, value in zip(table, values, strict=True):
            one[name] = value
    return table, "feature neighbourhoods" if neighbourhoods else "scores"


def _by_neighbourhoods(parts: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, list[float]]:
    """By task, each student's mean `neighbourhood_kl` over the samples of all processes: each is one of the others'.

    `parts`: by process and task, (samples, D) features of the expert and of every student.
    """
    found: dict[str, list[float]] = {}
    for task in dict.fromkeys(task for part in parts for task in part):
        rows = zip(*(part[task] for part in parts if task in part), strict=True)
        expert, *students = (torch.cat(own) for own in rows)
        if len(expert) < NEIGHBOURS:
            raise InputError(
                f"tune: without scores, task '{task}' needs {NEIGHBOURS} held-out samples and has "
                f"{len(expert)}; give more samples, a scores function, or settings of your own"
            )
        found[task] = [float(neighbourhood_kl(expert, own).sum()) / len(expert) for own in students]
    return found


def neighbourhood_kl(expert_BD: Tensor, student_BD: Tensor) -> Tensor:
    """The substitute for models without scores: KL of whom each sample resembles.

    For every sample the softmax of its cosine similarities (centred on the expert's mean, over TEMPERATURE) to the
    expert's features of the other samples, for the expert's own feature and for the student's. Shape (B,).
    """
    centre = expert_BD.double().mean(0)
    anchors, own = normalize(expert_BD.double() - centre, dim=1), normalize(student_BD.double() - centre, dim=1)
    itself = torch.eye(len(anchors), dtype=torch.bool)
    log_p = (anchors @ anchors.T / TEMPERATURE).masked_fill(itself, -torch.inf).log_softmax(1)
    log_q = (own @ anchors.T / TEMPERATURE).masked_fill(itself, -torch.inf).log_softmax(1)
    return torch.where(itself, 0.0, log_p.exp() * (log_p - log_q)).sum(1)


def _over_processes(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for task, (total, count) in part.items():
            before = totals.get(task, (0.0, 0))
            totals[task] = (before[0] + total, before[1] + count)
    return {task: total / max(count, 1) for task, (total, count) in totals.items()}
