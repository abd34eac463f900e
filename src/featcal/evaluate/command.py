"""`featcal evaluate`: the command line of `evaluate_recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InputError
from ..recipe import load_recipe
from .recipe import evaluate_recipe
from .table import score_table


def evaluate_command(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)", show_default=False)],
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="DIR", help="another checkpoint to score; may be repeated")
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="score --model alone, not the recipe's own models")] = False,
    split: Annotated[str | None, typer.Option(help="split to score [test, validation, …, or unused rows]")] = None,
    limit: Annotated[int | None, typer.Option(help="rows per task, a seeded choice [all]", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="rows per forward pass", min=1)] = 32,
    classes: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="class names of a CLIP task, one a line; templates hold a {}"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="folder for MODEL.scores.json [beside nothing: printed only]")
    ] = None,
    workers: Annotated[int, typer.Option(help="processes that prepare batches", min=0)] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a recipe field")
    ] = None,
    quiet: Annotated[bool, typer.Option("--no-progress", help="no progress bars")] = False,
) -> None:
    """Score checkpoints on the tasks of a recipe, with 95 % intervals and agreement with the experts."""
    scores = evaluate_recipe(
        load_recipe(recipe, overrides or ()),
        models or (),
        own=not only,
        split=split,
        limit=limit,
        batch_size=batch_size,
        classes=dict(read_classes(text) for text in classes or ()),
        output=output,
        workers=workers,
        progress=not quiet,
    )
    Console().print(score_table(scores, str(recipe)))


def read_classes(text: str) -> tuple[str, tuple[list[str], list[str]]]:
    """The task, its class names (lines without {}) and its templates (lines with {}, or 'a photo of a {}.').

    Raises:
        InputError: not of this form, or no class name in the file.
    """
    task, equals, file = text.partition("=")
    if not equals or not Path(file).is_file():
        raise InputError(f"--classes {text}: expected TASK=FILE, a text file with one class name a line")
    lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    names = [line for line in lines if "{}" not in line]
    if not names:
        raise InputError(f"--classes {text}: {file} holds no class name")
    return task, (names, [line for line in lines if "{}" in line] or ["a photo of a {}."])
