"""`featcal evaluate`: task scores of a recipe's checkpoints, and of any others, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..cost import available_memory
from ..data import ModelInput, find_processor
from ..errors import InputError, nearest
from ..network import Network, pick_device
from ..recipe import Recipe, labelled, load_recipe
from .checkpoints import checkpoint_bytes, load_model, named_class
from .harness import HarnessTask, is_installed, run_harness
from .heads import Head
from .outcomes import Score
from .run import predict, score_predictions
from .scorers import Predictions
from .table import write_scores
from .tasks import CAUSAL, Classes, RecipeTasks, TextMetric

EXPERTS = "experts"
"""The row of the experts, each on its own task."""

SHARE = 0.6
"""Of the free memory, for models that are scored side by side."""


def evaluate_recipe(
    recipe: Recipe | str | Path,
    models: Mapping[str, str] | Sequence[str] = (),
    *,
    own: bool = True,
    split: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    classes: Classes | None = None,
    metrics: Mapping[str, TextMetric] | None = None,
    heads: Mapping[str, Head] | None = None,
    data: Mapping[str, str] | None = None,
    benchmarks: Mapping[str, HarnessTask] | None = None,
    include_path: str | Path | None = None,
    allow_code: bool = False,
    output: str | Path | None = None,
    workers: int = 0,
    progress: bool = True,
) -> dict[str, dict[str, dict[str, Score]]]:
    """Scores of checkpoints on a recipe's tasks, {model: {task: {metric: Score}}}.

    Models that fit in memory together are scored in one pass over the data. Each model's agreement with the task's
    expert is added, which needs no labels. Without labels it is all there is.

    Args:
        models: further checkpoints to score, `DIR` or `LABEL=DIR` each (folders, Hub ids), or a mapping.
        own: score the recipe's own base, merged model (when it is a checkpoint) and experts, too.
        split: the split to score on; by default the first of `SPLITS` that has labels, else rows of the recipe's own
            split that calibration does not read.
        limit: a seeded choice of that many rows per task.
        classes: class names and templates for CLIP, by task; the published tasks' are known.
        metrics: `exact_match` (default) or `spearman`, by task, for text-to-text models.
        heads: fixed heads, by task, of encoders whose classifier lies outside the model.
        data: other sources of the rows to score, by task; in the columns of the recipe's.
        benchmarks: tasks of lm-eval that causal language models (not the experts) are also scored on.
        include_path: a folder with lm-eval task files of your own.
        allow_code: let benchmarks run programs that a model wrote.
        output: a folder for `scores.json`: the scores of the last of `models`, else of the recipe's merged model,
            and under `models` all of them.

    Raises:
        InputError: a broken recipe, a checkpoint that cannot be had, data or a class that no score is known for.
    """
    made = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    _check_names(made, classes or {}, metrics or {}, heads or {}, data or {}, benchmarks or {})
    named = _named(made, models, Path(".") if isinstance(recipe, Recipe) else Path(recipe).parent, own)
    for ref in named.values():
        _check_class(ref, named_class(ref, base=made.base), benchmarks or {})
    folder = None if output is None else _folder(output)
    tasks = RecipeTasks(made, split, limit, classes or {}, metrics or {}, heads or {}, data or {})
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "device": made.device,
        "workers": workers,
        "progress": progress,
    }
    scores, taught = _experts(made, tasks, options)
    if not own:
        scores = {}
    for group in _groups(made, named):
        loaded = {name: load_model(named[name], base=made.base) for name in group}
        scores |= {name: {} for name in group}
        for task in made.tasks:
            job = tasks.task(task, next(iter(loaded.values())))
            for name, found in predict(loaded, job, **options).items():
                scores[name][task] = score_predictions(job.scorer.metric, found, taught[task])
        for name, model in loaded.items():
            scores[name] |= _benchmarks(
                model, named[name], made.base, benchmarks or {}, made.device,
                batch_size=batch_size, limit=limit, include_path=include_path, allow_code=allow_code, seed=made.seed,
            )  # fmt: skip
        if folder is not None:
            write_scores(scores.get(list(named)[-1], {}), folder / "scores.json", scores)
    return scores


def _experts(
    recipe: Recipe, tasks: RecipeTasks, options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, dict[str, Score]]], dict[str, Predictions]]:
    """The experts' scores, and what each of them decides on its task."""
    taught: dict[str, Predictions] = {}
    scores: dict[str, dict[str, Score]] = {}
    for task, spec in recipe.tasks.items():
        expert = load_model(spec.expert, base=recipe.base)
        job = tasks.task(task, expert)
        taught[task] = predict({f"expert '{task}'": expert}, job, **options)[f"expert '{task}'"]
        scores[task] = score_predictions(job.scorer.metric, taught[task])
    return {EXPERTS: scores}, taught


def _benchmarks(
    model: nn.Module, ref: str, base: str, tasks: Mapping[str, HarnessTask], device: str, **options: Any
) -> dict[str, dict[str, Score]]:
    """Scores of lm-eval tasks, with the tokenizer of the model, else of the base."""
    if not tasks:
        return {}
    reads = ModelInput.from_config(model.config)  # type: ignore[arg-type]
    tokenizer = find_processor(reads, ref, base, {}, parts=("text",)).tokenizer
    with Network(ref, model, [], pick_device(device)).open():
        return run_harness(model, tokenizer, dict(tasks), **options)


def _check_class(ref: str, kind: type, benchmarks: Mapping[str, HarnessTask]) -> None:
    """Refuse benchmarks that cannot be run before anything is scored."""
    if not benchmarks:
        return
    if not kind.__name__.endswith(CAUSAL):
        raise InputError(f"lm-eval scores causal language models; {ref} is a {kind.__name__}")
    if not is_installed():
        raise InputError("--lm-eval needs lm-eval: pip install 'featcal[eval]'")


def _named(recipe: Recipe, models: Mapping[str, str] | Sequence[str], folder: Path, own: bool) -> dict[str, str]:
    """The models to score by name, in the order of the table."""
    mine = {"base": recipe.base} | ({"merged": recipe.merged} if isinstance(recipe.merged, str) else {}) if own else {}
    taken = (EXPERTS, *mine)
    if isinstance(models, Mapping):
        for name in models:
            if name in taken:
                raise InputError(f"models: '{name}' is a name of the recipe's own; take another")
        more = dict(models)
    else:
        more = labelled(models, folder, taken)
    if not mine and not more:
        raise InputError("no model to evaluate: name one")
    return {**mine, **more}


def _check_names(recipe: Recipe, *by_task: Mapping[str, Any]) -> None:
    """Refuse names that `scores.json` needs itself, options for no task, and benchmarks called like tasks."""
    *options, benchmarks = by_task
    for name in (*recipe.tasks, *benchmarks):
        if name in ("average", "models"):
            raise InputError(f"a task called '{name}' cannot be scored: scores.json has a field of that name")
    for name in (name for option in options for name in option):
        if name not in recipe.tasks:
            known = ", ".join(recipe.tasks)
            raise InputError(f"the recipe has no task '{name}'{nearest(name, recipe.tasks)}; it has: {known}")
    for name in benchmarks:
        if name in recipe.tasks:
            raise InputError(f"'{name}' is a task of the recipe and a benchmark; rename the task")


def _folder(output: str | Path) -> Path:
    """The output folder, made before anything is scored."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder}: no folder can be made there ({error.strerror})") from error
    return folder


def _groups(recipe: Recipe, named: Mapping[str, str]) -> Iterator[list[str]]:
    """Names of models that are scored side by side: as many as fit into a share of the free memory, in order."""
    device = pick_device(recipe.device)
    room = SHARE * min(available_memory(device), available_memory(torch.device("cpu")))
    group: list[str] = []
    size = 0
    for name, ref in named.items():
        own = checkpoint_bytes(ref, base=recipe.base, device=device)
        if group and size + own > room:
            yield group
            group, size = [], 0
        group.append(name)
        size += own
    yield group
