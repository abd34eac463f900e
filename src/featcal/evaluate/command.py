"""`featcal evaluate`: the command line of `evaluate_recipe`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import InputError, nearest
from ..recipe import load_recipe, resolve_source
from .harness import HarnessTask
from .heads import load_centroid_head
from .recipe import evaluate_recipe
from .table import score_table


def evaluate_command(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)", show_default=False)],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="[LABEL=]DIR", help="another checkpoint to score; may be repeated"),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="score --model alone, not the recipe's own models")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[TASK=]SOURCE", help="rows to score instead of the recipe's; {task} stands for its name"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="split to score [test, validation, …, or unused rows]", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="rows per task, a seeded choice [all]", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="rows per forward pass", min=1)] = 32,
    classes: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="class names of a CLIP task, one a line; templates hold a {}"),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option("--head", metavar="[TASK=]FILE", help="fixed head (safetensors: centroids, logit_scale); {task}"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="TASK=METRIC", help="exact_match [default] or spearman, for text-to-text"),
    ] = None,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option("--lm-eval", metavar="TASK[:METRIC]", help="a task of lm-eval to score on, too; may be repeated"),
    ] = None,
    shots: Annotated[int | None, typer.Option(help="examples in lm-eval prompts [the task's own]", min=0)] = None,
    include: Annotated[
        Path | None, typer.Option("--lm-eval-include", help="folder with lm-eval tasks of your own", show_default=False)
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="let lm-eval run programs that a model wrote (in a sandbox!)")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="folder for scores.json", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="processes that prepare batches", min=0)] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a recipe field")
    ] = None,
    quiet: Annotated[bool, typer.Option("--no-progress", help="no progress bars")] = False,
) -> None:
    """Score checkpoints on the tasks of a recipe, with 95 % intervals and agreement with the experts."""
    made = load_recipe(recipe, overrides or ())
    found = by_task("--head", heads or (), made.tasks)
    scores = evaluate_recipe(
        made,
        models or (),
        own=not only,
        split=split,
        limit=limit,
        batch_size=batch_size,
        classes=dict(read_classes(text) for text in classes or ()),
        metrics=dict(read_metric(text) for text in metrics or ()),
        heads={task: load_centroid_head(file) for task, file in found.items()},
        data={task: resolve_source(one) for task, one in by_task("--data", data or (), made.tasks).items()},
        benchmarks=dict(read_benchmark(text, shots) for text in benchmarks or ()),
        include_path=include,
        allow_code=allow_code,
        output=output,
        workers=workers,
        progress=not quiet,
    )
    Console().print(score_table(scores, str(recipe)))


def by_task(option: str, given: Sequence[str], tasks: Collection[str]) -> dict[str, str]:
    """`TASK=FILE`, or `FILE` with {task} for every task → task → file.

    Raises:
        InputError: neither, or a task twice.
    """
    made: dict[str, str] = {}
    for text in given:
        task, equals, file = text.partition("=")
        if "{task}" in text:
            named = {one: text.replace("{task}", one) for one in tasks}
        elif equals and task and file:
            named = {task: file}
        else:
            raise InputError(f"{option} {text}: expected TASK=FILE, or a FILE with {{task}} in its name")
        for one in named:
            if one in made:
                raise InputError(f"{option} {text}: task '{one}' has {made[one]} already")
        made |= named
    return made


def read_classes(text: str) -> tuple[str, tuple[list[str], list[str]]]:
    """The task, its class names (lines without {}) and its templates (lines with {}, or 'a photo of a {}.').

    Raises:
        InputError: not of this form, not text, a template with other braces, or no class name in the file.
    """
    task, equals, file = text.partition("=")
    if not equals or not Path(file).is_file():
        raise InputError(f"--classes {text}: expected TASK=FILE, a text file with one class name a line")
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"--classes {text}: {file} is not UTF-8 text") from error
    names = [line for line in lines if "{" not in line and "}" not in line]
    templates = [line for line in lines if line not in names]
    for template in templates:
        if not re.fullmatch(r"[^{}]*\{\}[^{}]*", template):
            raise InputError(f"--classes {text}: template '{template}' needs one {{}} and no other brace")
    if not names:
        raise InputError(f"--classes {text}: {file} holds no class name")
    return task, (names, templates or ["a photo of a {}."])


def read_metric(text: str) -> tuple[str, Any]:
    """The task and its metric.

    Raises:
        InputError: not of this form, or an unknown metric.
    """
    task, _, metric = text.partition("=")
    known = ("exact_match", "spearman")
    if metric not in known:
        raise InputError(
            f"--metric {text}: expected TASK=METRIC, a metric of {', '.join(known)}{nearest(metric, known)}"
        )
    return task, metric


def read_benchmark(text: str, shots: int | None) -> tuple[str, HarnessTask]:
    """lm-eval's task, and which of its numbers counts (`gsm8k:exact_match,strict-match`)."""
    task, _, metric = text.partition(":")
    return task, HarnessTask(task, metric or None, shots)
