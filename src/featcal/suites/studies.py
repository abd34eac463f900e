"""The paper's studies on any suite: sample efficiency, corrupted calibration data, ablation of λ, α, ρ, and cost.

Every point is a row of the same resumable store as the main table. Each study writes `NAME.md`, `NAME.csv` and
`NAME.png` into the output folder.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError, nearest
from ..network import pick_device
from . import figures
from .corrupt import CONDITIONS, parameters
from .meter import Meter
from .results import Row, write_text
from .runner import DEFAULT_METHODS, Made, Options, Session, open_session, quiet_libraries
from .schema import PublishedStudies, Suite
from .tables import csv_table, markdown_table

SAMPLES = (8, 16, 32, 64, 128, 256)
SEEDS = (42, 43, 44)
SEVERITY = 3
GRIDS: dict[str, tuple[float, ...]] = {
    "ridge": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1, 5e-1, 1, 5, 10, 100),
    "alpha": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    "rho": (0, 0.5, 1, 1.5, 2, 2.2, 2.5, 3, 4, 5),
}
"""Values of the ablation; each setting varies alone, around the suite's own."""
ABLATION_UPSTREAMS = ("task_arithmetic", "wudi")

STUDIES = ("samples", "corruption", "ablation", "cost")


@dataclass(frozen=True)
class StudyResult:
    """A finished study: its table, as cells, and where its files are."""

    name: str
    header: list[str]
    lines: list[list[str]]
    rows: list[Row]
    files: list[Path]

    def markdown(self) -> str:
        """The table as Markdown."""
        return markdown_table(self.header, self.lines)


def study(
    name: str,
    suite: str | Suite,
    output: str | Path,
    *,
    upstream: str = "task_arithmetic",
    methods: Sequence[str] = DEFAULT_METHODS,
    seeds: Sequence[int] = SEEDS,
    grids: Mapping[str, Sequence[float]] = GRIDS,
    counts: Sequence[int] = SAMPLES,
    variant: str | None = None,
    tasks: Sequence[str] | None = None,
    stand_in: bool = False,
    mirror: str | Path | None = None,
    benchmarks: Sequence[str] | None = None,
    options: Options | None = None,
) -> StudyResult:
    """Run one of `STUDIES`; the same call again goes on where it stopped.

    Args:
        upstream: the merger to start from.
        methods: post-merge methods to compare (the ablation is of `featcal` alone).
        seeds: of the sample choice, for the sample study.
        grids: values of ridge, alpha, rho for the ablation.
        counts: samples per task for the sample study; with one seed, fewer are the first of more.

    The other arguments are those of `bench`.

    Raises:
        InputError: an unknown study, or whatever `bench` refuses.
    """
    if name not in STUDIES:
        raise InputError(f"unknown study '{name}'{nearest(name, STUDIES)}; known: {', '.join(STUDIES)}")
    for what, numbers in {"counts": counts, "seeds": seeds}.items():
        if name == "samples" and (not numbers or len(set(numbers)) < len(numbers) or min(numbers) < (what == "counts")):
            raise InputError(f"--{what} {','.join(map(str, numbers))}: expected different whole numbers, counts from 1")
    with quiet_libraries(), open_session(
        suite, output, variant=variant, tasks=tasks, stand_in=stand_in, mirror=mirror,
        benchmarks=benchmarks, options=options or Options(), upstreams=[upstream], methods=methods,
    ) as session:  # fmt: skip
        work = _Study(session, upstream, Path(output))
        if name == "samples":
            return work.samples(methods, counts, seeds)
        if name == "corruption":
            return work.corruption(methods)
        if name == "cost":
            return work.cost(methods)
        return work.ablation(grids)


class _Study:
    """One study on an open session."""

    def __init__(self, session: Session, upstream: str, output: Path):
        self.session, self.upstream, self.output = session, upstream, output
        # The published studies start from Task Arithmetic.
        self.published = session.suite.studies if upstream == "task_arithmetic" else PublishedStudies()
        self._merged: dict[str, nn.Module] = {}

    def merged(self, upstream: str) -> nn.Module:
        """A merged model, made or loaded once."""
        if upstream not in self._merged:
            self._merged[upstream] = self.session.merged(upstream)[0]
        return self._merged[upstream]

    def point(self, name: str, method: str, upstream: str | None = None, **how: Any) -> Row:
        """One calibration and its score."""
        start = upstream or self.upstream
        self.session.fill({name: lambda: self.session.calibrated(self.merged(start), method, **how)})
        return self.session.rows[name]

    def start(self, upstream: str | None = None) -> Row:
        """The merged model's own row."""
        name = upstream or self.upstream
        self.session.fill({name: lambda: Made(_constant(self.merged(name)))})
        return self.session.rows[name]

    def mean(self, row: Row) -> float:
        """A row's average."""
        value = row.average(self.session.columns)
        assert value is not None
        return value

    def finish(
        self, name: str, header: list[str], lines: list[list[str]], rows: list[Row], draw: Callable[[Path], None]
    ) -> StudyResult:
        """Write the study's files."""
        files = [self.output / f"{name}.{kind}" for kind in ("md", "csv", "png")]
        write_text(files[0], markdown_table(header, lines))
        write_text(files[1], csv_table(header, [[cell.strip() for cell in line] for line in lines]))
        draw(files[2])
        return StudyResult(name, header, lines, rows, files)

    # ---------------------------------------------------------------------------------------------- studies

    def samples(self, methods: Sequence[str], counts: Sequence[int], seeds: Sequence[int]) -> StudyResult:
        """Average against calibration samples per task: mean and standard deviation over seeds."""
        for task in self.session.suite.tasks:
            size = len(self.session.materials.rows(task, test=False))
            if size < max(counts):
                raise InputError(f"--counts {max(counts)}: task '{task}' has only {size} training rows")
        base = self.mean(self.start())
        rows: list[Row] = []
        curves: dict[str, list[list[float]]] = {}
        for method in methods:
            curves[method] = []
            for count in counts:
                made = [
                    self.point(
                        f"samples {self.upstream} {method} n={count} seed={seed}", method, samples=count, seed=seed
                    )
                    for seed in seeds
                ]
                rows += made
                curves[method].append([self.mean(row) for row in made])
        known = self.published.samples
        published = {} if known is None else {m: dict(zip(known.n, getattr(known, m), strict=True)) for m in _CURVES}
        lines = []
        for method, points in curves.items():
            lines.append([method, *(_mean_sd(values) for values in points)])
            theirs = published.get(method)
            if theirs:
                lines.append(["  published", *(_one(theirs.get(count)) for count in counts)])
        lines.append([self.upstream, *[_one(base)] * len(counts)])
        return self.finish(
            "samples", ["average after", *(f"n = {count}" for count in counts)], lines, rows,
            lambda file: figures.samples(file, counts, curves, (self.upstream, base), published),
        )  # fmt: skip

    def corruption(self, methods: Sequence[str]) -> StudyResult:
        """Average when the calibration images are corrupted; test images stay clean."""
        if self.session.suite.family != "image":
            raise InputError(f"suite '{self.session.suite.name}' has no images to corrupt")
        base = self.mean(self.start())
        rows: list[Row] = []
        table: dict[str, dict[str, float]] = {}
        for method in methods:
            table[method] = {}
            for condition in CONDITIONS:
                row = self.point(f"corruption {self.upstream} {method} {condition}", method, condition=condition)
                rows.append(row)
                table[method][condition] = self.mean(row)
        published = self.published.corruption
        lines = [
            [method, *map(_one, values.values()), _one(statistics.fmean(values.values())), _one(published.get(method))]
            for method, values in table.items()
        ]
        lines.append([self.upstream, *[_one(base)] * (len(CONDITIONS) + 1), "–"])
        side = int(self.session.materials.image_processor.crop_size["height"])
        stated = [
            f"{condition} ({', '.join(f'{k} {v:g}' for k, v in parameters(condition, side, SEVERITY).items())})"
            if condition != "clean" else condition
            for condition in CONDITIONS
        ]  # fmt: skip
        return self.finish(
            "corruption", ["average after", *stated, "mean", "published mean"], lines, rows,
            lambda file: figures.bars(file, table, (self.upstream, base), "average score (%)"),
        )  # fmt: skip

    def ablation(self, grids: Mapping[str, Sequence[float]]) -> StudyResult:
        """Average against λ, α and ρ, each alone; ρ for two upstreams."""
        rows: list[Row] = []
        lines: list[list[str]] = []
        curves: dict[str, dict[str, dict[float, float]]] = {}
        others = [name for name in ABLATION_UPSTREAMS if name in self.session.suite.upstreams]
        for setting, values in grids.items():
            if setting not in GRIDS:
                raise InputError(f"unknown setting '{setting}'{nearest(setting, GRIDS)}; known: {', '.join(GRIDS)}")
            curves[setting] = {}
            upstreams = others if setting == "rho" else [self.upstream]
            for upstream in upstreams or [self.upstream]:
                points = {}
                for value in values:
                    name = f"ablation {upstream} {setting}={value:g}"
                    row = self.point(name, "featcal", upstream, settings={setting: value})
                    rows.append(row)
                    points[float(value)] = self.mean(row)
                    lines.append([f"{setting} ({upstream})", f"{value:g}", _one(points[float(value)])])
                curves[setting][upstream] = points
        starts = {name: self.mean(self.start(name)) for own in curves.values() for name in own}
        lines += [[f"{name} alone", "–", _one(value)] for name, value in starts.items()]
        return self.finish(
            "ablation", ["setting", "value", "average"], lines, rows,
            lambda file: figures.ablation(file, curves, starts),
        )  # fmt: skip

    def cost(self, methods: Sequence[str]) -> StudyResult:
        """Seconds by phase, energy, memory of the post-merge stage; models loaded, scoring left out."""
        session = self.session
        merged, materials = self.merged(self.upstream), session.materials
        _ = materials.base, materials.experts, materials.scores()
        device = pick_device(session.options.device)
        rows: list[Row] = []
        for method in methods:
            name = f"cost {self.upstream} {method}"
            found = session.store.get(name)
            if found is None:
                with Meter(device) as meter:
                    made = session.calibrated(merged, method)
                facts = {
                    **made.facts,
                    "seconds": meter.seconds,
                    "watt_hours": meter.watt_hours,
                    "peak_rss_bytes": meter.peak_rss_bytes,
                    "peak_device_bytes": meter.peak_device_bytes,
                    "device": str(device),
                }
                found = Row(name, {}, made.seconds, facts, made.notes)
                session.store.put(found)
            rows.append(found)
        published = self.published.cost
        lines = []
        for method, row in zip(methods, rows, strict=True):
            facts = row.facts
            lines.append(
                [
                    method,
                    f"{facts['seconds']:.1f}",
                    ", ".join(f"{phase} {value:.1f}" for phase, value in row.seconds.items()),
                    "–" if facts["watt_hours"] is None else f"{facts['watt_hours']:.2f}",
                    f"{facts['peak_rss_bytes'] / 2**30:.2f}",
                    str(facts["extra_parameters"]),
                ]
            )
            theirs = published.get(method)
            if theirs is not None:
                energy, memory = f"{theirs.watt_hours:.1f}", f"{theirs.rss_gib:.1f}"
                lines.append(["  published", f"{theirs.seconds:.0f}", "–", energy, memory, "–"])
        header = ["method", "seconds", "by phase", "Wh (GPU)", "peak RSS (GiB)", "extra parameters at inference"]
        phases = {method: row.seconds for method, row in zip(methods, rows, strict=True)}
        return self.finish("cost", header, lines, rows, lambda file: figures.phases(file, phases))


_CURVES = ("surgery", "probsurgery", "featcal")


def _constant(model: nn.Module) -> Callable[[str], nn.Module]:
    return lambda task: model


def _one(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _mean_sd(values: Sequence[float]) -> str:
    mean = _one(statistics.fmean(values))
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean
