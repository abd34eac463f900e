"""The command line. Exit status: 0 done, 1 the job failed, 2 the user's input is wrong."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .dist import Elsewhere
from .errors import InputError, RunError
from .log import set_up_logging

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Calibrate a merged model toward its experts (FeatCal): closed form, no gradients, a drop-in result.",
)
out = Console()
logger = logging.getLogger("featcal")

RecipeArgument = Annotated[Path, typer.Argument(help="recipe file (YAML)", show_default=False)]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="folder to write", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a recipe field, e.g. calibration.alpha=0.2"),
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer-from", help="folder of the tokenizer or image processor to read data with")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="run modelling code that comes with a checkpoint")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace a non-empty output folder")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="start over instead of resuming")]


@app.callback()
def common(
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="say more")] = 0,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="only warnings and errors")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    set_up_logging(-1 if quiet else verbose)


def size(text: str) -> int:
    """Bytes from `500M`, `8GB`, `2GiB` or a plain number."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    stripped = text.strip().upper().removesuffix("B")
    number = stripped.rstrip("KMGTI")
    try:
        return int(float(number) * units[stripped[len(number) :]])
    except (ValueError, KeyError):
        raise InputError(f"'{text}' is not a size; write e.g. 500M, 8GB or 2GiB") from None


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Say what a calibration would do and cost, and everything that is wrong, without reading weights."""
    from .plan import prepare
    from .recipe import load_recipe
    from .show import show_plan

    made = prepare(load_recipe(recipe, overrides or ()), tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    made.check()
    show_plan(made, out)


@app.command()
def calibrate(
    recipe: RecipeArgument,
    output: OutputOption,
    overrides: SetOption = None,
    overwrite: OverwriteOption = False,
    fresh: FreshOption = False,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="memory for activations, e.g. 8GB; beyond it they go to disk")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 when a task got worse")] = False,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Calibrate a merged model. The same command again resumes an interrupted run."""
    from .report.schema import Report
    from .report.words import worse_tasks
    from .run import run
    from .show import show_outcome

    outcome = run(
        recipe,
        output,
        overrides=overrides or (),
        overwrite=overwrite,
        fresh=fresh,
        max_memory=None if max_memory is None else size(max_memory),
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        progress=logger.isEnabledFor(logging.INFO),
    )
    if outcome.records:
        show_outcome(outcome, out)
        worse = worse_tasks(Report.model_validate(outcome.report))
        if strict and worse:
            raise RunError(f"these tasks got worse on held-out samples: {', '.join(worse)} (--strict)")


@app.command()
def merge(
    recipe: RecipeArgument,
    output: OutputOption,
    overrides: SetOption = None,
    overwrite: OverwriteOption = False,
    fresh: FreshOption = False,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Carry out only the merge of a recipe (`merged: {method: …}`), into a folder that loads like the base."""
    from .merging.command import merge as run_merge

    made = run_merge(
        recipe,
        output,
        overrides=overrides or (),
        overwrite=overwrite,
        fresh=fresh,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        progress=logger.isEnabledFor(logging.INFO),
    )
    out.print(f"{made.output}  ({made.method}, {made.seconds:.0f} s, {len(made.notes)} notes)", markup=False)


def main() -> None:
    """Run the command line; user errors are a sentence or two, without a traceback unless --debug."""
    debug = "--debug" in sys.argv
    try:
        app()
    except (InputError, RunError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt) as error:
        if debug:
            raise
        status, text = explain(error)
        if text:
            print(text, file=sys.stderr)
        sys.exit(status)


def explain(error: BaseException) -> tuple[int, str]:
    """Exit status and wording of a failure."""
    if isinstance(error, InputError):
        return 2, "\n".join(f"error: {line}" for line in str(error).splitlines())
    if isinstance(error, Elsewhere):
        return 1, ""
    if isinstance(error, RunError):
        return 1, f"failed: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 1, "interrupted; the same command goes on from the last finished block"
    return 1, (
        "failed: out of memory; lower calibration.batch_size or calibration.max_length, or give --max-memory "
        "(`featcal plan` shows what a run needs)"
    )
