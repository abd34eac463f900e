"""`featcal bench`: the command line of suites and studies."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import InputError, nearest
from .load import downloads, load_suite, suite_names
from .materials import pick_tasks
from .runner import DEFAULT_METHODS, METHODS, Options, bench
from .studies import SAMPLES, SEEDS, STUDIES, study


def bench_command(
    suite: Annotated[
        str | None,
        typer.Argument(help="suite or suite file (.yaml); none: list them", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="folder of results, which a rerun completes [bench/SUITE]"),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the suite, e.g. demo")] = None,
    tasks: Annotated[str | None, typer.Option(help="only these tasks, separated by commas")] = None,
    upstreams: Annotated[str | None, typer.Option(help="mergers to start from, by commas [all of the suite]")] = None,
    methods: Annotated[
        str, typer.Option(help=f"post-merge methods by commas, of {', '.join(METHODS)}; none: upstreams only")
    ] = ",".join(DEFAULT_METHODS),
    limit: Annotated[int | None, typer.Option(help="test rows per task, a seeded choice [all]", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="calibration samples per task [the suite's]", min=1)] = None,
    which: Annotated[str | None, typer.Option("--study", help=f"one of {', '.join(STUDIES)}")] = None,
    seeds: Annotated[str, typer.Option(help="seeds of the samples study, by commas")] = ",".join(map(str, SEEDS)),
    counts: Annotated[str, typer.Option(help="samples per task of the samples study, by commas")] = ",".join(
        map(str, SAMPLES)
    ),
    references: Annotated[bool, typer.Option("--references", help="also score jointly trained checkpoints")] = False,
    benchmarks: Annotated[
        str | None, typer.Option(help="lm-eval tasks of the suite, by commas; none: leave them out [all]")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="let code benchmarks run the model's programs (use a sandbox)")
    ] = False,
    stand_in: Annotated[
        bool,
        typer.Option("--stand-in", help="small local stand-ins instead of the Hub; scores mean nothing"),
    ] = False,
    mirror: Annotated[
        Path | None, typer.Option(help="folder with models/ORG/NAME and datasets/ORG/NAME to read instead of the Hub")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="only say what would be downloaded")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="calibration setting, e.g. alpha=0.2")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, …")] = "auto",
    workers: Annotated[int, typer.Option(help="processes that prepare test batches", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="seed of the calibration samples", min=0)] = 42,
    quiet: Annotated[bool, typer.Option("--no-progress", help="no progress bars")] = False,
) -> None:
    """Run a published benchmark suite end to end, beside the published numbers; or one of the paper's studies."""
    out = Console()
    if suite is None:
        out.print(suite_table())
        return
    if plan:
        show_downloads(suite, variant, out, _listed(tasks))
        return
    folder = output or Path("bench") / Path(suite).stem
    options = Options(
        limit=limit, samples=samples, seed=seed, device=device, workers=workers, allow_code=allow_code,
        progress=not quiet, settings=parse_settings(settings or []),
    )  # fmt: skip
    chosen = _listed(methods) or ()
    lm_tasks = None if benchmarks is None else [] if benchmarks == "none" else _listed(benchmarks)
    if which is not None:
        starts = ["task_arithmetic"] if upstreams is None else _listed(upstreams) or []
        if len(starts) != 1:
            raise InputError(f"--upstreams {upstreams}: a study starts from one merger")
        upstream = starts[0]
        made = study(
            which, suite, folder, upstream=upstream, methods=chosen, seeds=_numbers(seeds, "--seeds"),
            counts=_numbers(counts, "--counts"), variant=variant, tasks=_listed(tasks), stand_in=stand_in,
            mirror=mirror, benchmarks=lm_tasks, options=options,
        )  # fmt: skip
        table = Table(title=escape(f"{suite}: {which}"))
        for number, name in enumerate(made.header):
            table.add_column(escape(name), justify="right" if number else "left")
        for line in made.lines:
            table.add_row(*map(escape, line))
        out.print(table)
        out.print(f"Written: {', '.join(str(file) for file in made.files)}", soft_wrap=True, highlight=False)
        return
    result = bench(
        suite, folder, variant=variant, tasks=_listed(tasks), upstreams=_listed(upstreams), methods=chosen,
        references=references, stand_in=stand_in, mirror=mirror, benchmarks=lm_tasks, options=options,
    )  # fmt: skip
    out.print(result.table())
    for note in result.notes:
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    out.print(f"Written: {folder / 'table.md'}, {folder / 'table.csv'}", soft_wrap=True, highlight=False)


def suite_table() -> Table:
    """All suites in a few words."""
    table = Table(title="suites")
    for name in ("suite", "tasks", "base", "settings", "runs on"):
        table.add_column(name)
    for name in suite_names():
        suite = load_suite(name)
        table.add_row(
            name, str(len(suite.tasks)), suite.base, suite.preset or "–", "this machine" if suite.build else "Hub"
        )
    return table


def parse_settings(texts: list[str]) -> dict[str, object]:
    """`alpha=0.2` → {"alpha": 0.2}; values are Python literals, anything else is text.

    Raises:
        InputError: no `=`, or an unknown setting.
    """
    from ..settings import Calibration

    settings: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("calibration.")
        if not equals:
            raise InputError(f"--set {text}: expected KEY=VALUE, e.g. alpha=0.2")
        if key not in Calibration.model_fields:
            raise InputError(f"--set {text}: unknown setting '{key}'{nearest(key, Calibration.model_fields)}")
        try:
            settings[key] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[key] = value.strip()
    return settings


def _listed(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [] if text == "none" else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: expected whole numbers separated by commas") from None


def show_downloads(suite: str, variant: str | None, out: Console, tasks: list[str] | None = None) -> None:
    """Print what a suite would fetch, a line each: a model or a data set, and its id."""
    for kind, name in downloads(pick_tasks(load_suite(suite, variant), tasks)):
        out.print(f"{kind:8}  {name}", highlight=False, markup=False)
