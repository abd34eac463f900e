"""Score several models on a task in one pass over its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from ..data import check_vocab
from ..errors import InputError
from ..log import progress_bar
from ..network import Network, pick_device
from ..stream import MODEL_ERRORS
from .outcomes import Score, agreement, score
from .readers import Rows
from .scorers import Adapter, Batch, Predictions, Scorer


@dataclass(frozen=True)
class Adapted:
    """A merged model with one learnt correction of features per task (Surgery and its kin)."""

    model: nn.Module
    adapters: Mapping[str, Adapter]


Candidate = nn.Module | Adapted


@dataclass(frozen=True)
class EvalTask:
    """A named task: how to score it, and its labelled (or unlabelled) rows."""

    name: str
    scorer: Scorer
    rows: Any
    """A sequence of rows: `datasets.Dataset`, or a list of dicts."""


def choose_rows(rows: Any, limit: int | None, seed: int = 42) -> Any:
    """All rows, or `limit` of them: a seeded random choice (many test sets are sorted by class), in order.

    Raises:
        InputError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    if limit is None or limit >= len(rows):
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return Subset(rows, sorted(order[:limit].tolist()))


def predict(
    models: Mapping[str, Candidate],
    task: EvalTask,
    *,
    batch_size: int = 32,
    limit: int | None = None,
    device: str | torch.device = "auto",
    workers: int = 0,
    progress: bool = True,
    seed: int = 42,
) -> dict[str, Predictions]:
    """What every model decides on the task's rows; each batch is read once and given to all models.

    Args:
        models: by name; all are resident on the device during the pass.
        batch_size: rows per forward pass.
        limit: a seeded random choice of that many rows instead of all.
        workers: processes that prepare batches.

    Raises:
        InputError: no rows, or rows without the columns that the task needs.
    """
    rows: Rows = choose_rows(task.rows, limit, seed)
    if not len(rows):
        raise InputError(f"task '{task.name}': no row to evaluate")
    loader: Any = DataLoader(rows, batch_size, collate_fn=task.scorer.collate, num_workers=workers)  # type: ignore[arg-type]
    results = {name: Predictions() for name in models}
    bar: Callable[[Any], Any] = progress_bar(f"evaluating {task.name}", enabled=progress)
    with ExitStack() as stack:
        seen: dict[int, nn.Module] = {}
        for candidate in models.values():
            model = _module(candidate)
            if id(model) not in seen:
                seen[id(model)] = model
                stack.enter_context(Network(task.name, model, [], pick_device(device)).open())
        with _place(f"task '{task.name}'"):
            for batch in bar(loader):
                for name, candidate in models.items():
                    adapter = candidate.adapters.get(task.name) if isinstance(candidate, Adapted) else None
                    with _place(name, MODEL_ERRORS):
                        check_tokens(batch, _module(candidate), name)
                        results[name].extend(task.scorer.predict(_module(candidate), batch, adapter))
    return results


@contextmanager
def _place(name: str, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Says where in the work an error came up; `refusals` are a model's own."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except refusals as error:
        raise InputError(f"{name}: the model cannot be scored on these rows: {error}") from error


def check_tokens(batch: Batch, model: nn.Module, name: str) -> None:
    """Refuse token ids that the model's embedding table does not hold.

    Raises:
        InputError: with the largest id and the size of the table.
    """
    find: Any = getattr(model, "get_input_embeddings", None)
    table = find() if find is not None and "input_ids" in batch.inputs else None
    if isinstance(table, nn.Embedding):
        check_vocab([batch.inputs], table.num_embeddings, name)


def evaluate(
    models: Mapping[str, Candidate],
    task: EvalTask,
    *,
    expert: str | None = None,
    resamples: int = 1000,
    **options: Any,
) -> dict[str, dict[str, Score]]:
    """Scores of several models on one task: {model: {metric: score}}.

    With `expert` (a name in `models`) every other model's agreement with it is added, which needs no labels.
    `options` are `predict`'s.
    """
    predictions = predict(models, task, **options)
    reference = predictions[expert] if expert is not None else None
    return {
        name: score_predictions(task.scorer.metric, found, None if name == expert else reference, resamples)
        for name, found in predictions.items()
    }


def score_predictions(
    metric: str, found: Predictions, reference: Predictions | None = None, resamples: int = 1000
) -> dict[str, Score]:
    """The metric (when there are labels) and the agreement (when there is a reference) of one model."""
    scores: dict[str, Score] = {}
    if found.outcomes is not None:
        scores[metric] = score(metric, found.outcomes, resamples=resamples)
    if reference is not None:
        scores["agreement"] = score("agreement", agreement(found.choices, reference.choices), resamples=resamples)
    return scores


def _module(candidate: Candidate) -> nn.Module:
    return candidate.model if isinstance(candidate, Adapted) else candidate
