"""`featcal drift`: measure base, merged and other models of a recipe on its held-out samples, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ..adapters import open_model
from ..errors import InputError
from ..log import progress_bar
from ..plan import Model, Plan, map_model, prepare
from ..recipe import MergeSpec, Recipe, labelled, load_recipe
from ..writer import atomic_write
from .outputs import Scores
from .results import TaskDrift, to_csv, to_json
from .walk import walk


def drift(
    recipe: Recipe | str | Path,
    *,
    models: Sequence[str] = (),
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    split: bool = True,
    check: int = 0,
    scores: Mapping[str, Scores] | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> list[TaskDrift]:
    """Drift of the recipe's base and merged model, and of other models, from each task's expert.

    The samples are the recipe's held-out ones, so that what a calibration reports is measured again, number by number.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        models: more models, as `DIR` or `LABEL=DIR`: a calibrated folder, another merge, an expert.
        output: folder for `drift.json` and `drift.csv`; it is made if need be.
        overrides: `dotted.key=value` each, for a recipe file.
        split: local mismatch and propagation too (one more forward of each model).
        check: batches per task on which the path-averaged operator is checked by quadrature.
        scores: task → function (model, batch) → (rows, classes), for models whose scores live outside them.

    Raises:
        InputError: anything wrong with the recipe, the models or the data; all problems at once.
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    folder = Path(".") if isinstance(recipe, Recipe) else Path(recipe).parent
    performed = isinstance(chosen.merged, MergeSpec)
    if performed and not models:
        raise InputError("the recipe performs its merge: run `featcal merge` first, then give the folder with --model")
    plan = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    assert plan.base is not None or plan.problems
    more = labelled(models, folder, taken=("base",) if performed else ("base", "merged"))
    plan.check()
    opened = _opened(plan, more, trust_remote_code)
    for task, data in plan.tasks.items():
        if not data.held_out.batches:
            plan.problems.append(f"task '{task}': no held-out samples to measure on; give its source more rows")
    plan.check()
    networks = {label: plan.network(model) for label, model in opened.items()}
    found = walk(
        networks,
        {task: plan.network(plan.experts[task]) for task in plan.tasks},
        {task: data.held_out.batches for task, data in plan.tasks.items()},
        plan.order,
        base=networks["base"],
        scores=scores,
        split=split,
        check=check,
        progress=progress_bar("measuring", enabled=progress),
    )
    if output is not None:
        write(found, output)
    return found


def _opened(plan: Plan, more: Mapping[str, str], trust: bool) -> dict[str, Model]:
    """The models to measure, mapped to the plan's class."""
    assert plan.base is not None and plan.merged is not None
    found = {"base": plan.base, "merged": plan.merged}
    if isinstance(plan.recipe.merged, MergeSpec):
        del found["merged"]
    kind = type(plan.base.keymap.model)
    assert issubclass(kind, PreTrainedModel)
    base = plan.base.checkpoint

    def opened(label: str, reference: str) -> Model:
        checkpoint = open_model(reference, base=base, trust_remote_code=trust)
        problems = checkpoint.check()
        if problems:
            raise InputError("\n".join(problems))
        return map_model(label, checkpoint, kind, trust)

    for label, reference in more.items():
        model = plan.attempt(lambda a=label, r=reference: opened(a, r))  # type: ignore[misc]
        if model is not None:
            found[label] = model
    return found


def write(found: Sequence[TaskDrift], folder: str | Path) -> None:
    """`drift.json` and `drift.csv` in a folder, each complete or not at all."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    for name, text in (("drift.json", to_json(found)), ("drift.csv", to_csv(found))):
        with atomic_write(where / name) as file:
            file.write(text.encode())
