"""Causal LMs on public benchmarks, through EleutherAI's lm-eval (an optional extra) with a model that is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError
from .outcomes import Score


@dataclass(frozen=True)
class HarnessTask:
    """One task of lm-eval and which of its numbers counts."""

    task: str
    metric: str | None = None
    """As lm-eval calls it, with its filter: `exact_match,strict-match`, `acc_norm,none`, `pass@1,create_test`.
    None: the first that the task reports."""
    shots: int | None = None
    """None: the task's own number."""
    chat: bool = False
    """Apply the tokenizer's chat template."""
    runs_code: bool = False
    """The task executes what the model wrote."""


def is_installed() -> bool:
    """Whether lm-eval can be imported."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        return False
    return True


def run_harness(
    model: nn.Module,
    tokenizer: Any,
    tasks: dict[str, HarnessTask],
    *,
    batch_size: int = 8,
    limit: int | None = None,
    include_path: str | Path | None = None,
    allow_code: bool = False,
    seed: int = 42,
) -> dict[str, dict[str, Score]]:
    """Scores (percent) of a model on lm-eval tasks, {name: {metric: score}}; intervals are ±1.96 standard errors.

    Args:
        model, tokenizer: ready to use; the model stays where it is.
        limit: only the first so many documents of each task.
        include_path: a folder with task files of your own.
        allow_code: run generated programs on this machine (code benchmarks need it; use a sandbox).

    Raises:
        InputError: lm-eval is not installed, a task is unknown, or a code benchmark without `allow_code`.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("benchmarks of language models need lm-eval: pip install 'featcal[eval]'") from error
    dangerous = [name for name, task in tasks.items() if task.runs_code]
    if dangerous and not allow_code:
        raise InputError(
            f"{', '.join(dangerous)}: runs programs that the model wrote; allow it (allow_code=True) inside a sandbox"
        )
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [task.task for task in tasks.values() if task.task not in manager.all_tasks]
    if unknown:
        raise InputError(f"lm-eval has no task '{unknown[0]}'; see `lm-eval --tasks list`")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    scores: dict[str, dict[str, Score]] = {}
    for name, task in tasks.items():
        results = simple_evaluate(
            model=lm,
            tasks=[task.task],
            num_fewshot=task.shots,
            limit=limit,
            apply_chat_template=task.chat,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            bootstrap_iters=1000,
            log_samples=False,
            confirm_run_unsafe_code=allow_code,
        )
        found = _score(task, results)
        scores[name] = {found.metric: found}
    return scores


def _score(task: HarnessTask, results: Any) -> Score:
    found = results["results"][task.task]
    known = [key for key in found if "," in key and "_stderr" not in key]
    metric = task.metric or next(iter(known), "")
    if metric not in known:
        wanted = (
            f"no metric '{metric}'; it has: {', '.join(known)}" if metric else "no score of its own; name a sub-task"
        )
        raise InputError(f"lm-eval task '{task.task}' has {wanted}")
    value = 100.0 * float(found[metric])
    base, _, filtered = metric.partition(",")
    error = found.get(f"{base}_stderr,{filtered}", "N/A")
    spread = 0.0 if isinstance(error, str) else 196.0 * float(error)
    n = int(results["n-samples"][task.task]["effective"])
    return Score(metric, value, n, max(0.0, value - spread), min(100.0, value + spread))
