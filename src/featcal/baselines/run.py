"""`featcal calibrate --method surgery`: adapters for a recipe's merged model, in a folder for `load_corrected`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dist import under_torchrun
from ..drift.outputs import Scores
from ..errors import InputError, nearest
from ..evaluate.heads import ZeroShotHead
from ..merging.folder import merge_first
from ..merging.loading import whole_model
from ..network import Network
from ..output import RESOLVED, hold, peak_memory
from ..plan import Model, Plan, adopt, prepare
from ..recipe import MergeSpec, Recipe, load_recipe, recipe_to_yaml
from ..writer import OutputFolder, atomic_write
from .corrected import Corrected
from .modules import METHODS
from .train import Trained, Training, train


@dataclass
class Outcome:
    """What training adapters leaves behind."""

    output: Path
    method: str
    before: dict[str, float] = field(default_factory=dict)
    """Mean |z − z^E| on the calibration samples by task, without the adapter …"""
    after: dict[str, float] = field(default_factory=dict)
    """… and with it."""
    parameters: int = 0
    """Extra parameters at inference."""
    seconds: float = 0.0
    peak_memory_bytes: int = 0

    def summary(self) -> str:
        """A few words for the terminal."""
        falls = [100 * (1 - self.after[task] / self.before[task]) for task in self.before if self.before[task]]
        mean = sum(falls) / len(falls) if falls else 0.0
        return (
            f"{self.method}: features moved {mean:.1f} % of the way to the experts' (L1, mean over tasks); "
            f"{self.parameters} extra parameters at inference\n{self.output}  "
            f"({self.seconds:.0f} s, peak {self.peak_memory_bytes / 1e9:.2f} GB)"
        )


def check_method(method: str) -> None:
    """Raises InputError unless `method` names adapters that can be trained."""
    if method not in METHODS:
        raise InputError(f"unknown method '{method}'{nearest(method, METHODS)}; known: featcal, {', '.join(METHODS)}")


def train_recipe(
    recipe: Recipe | str | Path,
    output: str | Path,
    method: str,
    *,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    fresh: bool = False,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    training: Training | None = None,
    progress: bool = True,
) -> Outcome:
    """Train the adapters of `method` on a recipe's calibration samples and write them into the folder `output`.

    A merge that the recipe asks for is made first and lies in `output/merged`. Training cannot be resumed (it takes
    minutes for `surgery` and `probsurgery`); a finished merge is taken as it is.

    Raises:
        InputError: anything wrong with the recipe, the models, the data, the method or the output.
    """
    check_method(method)
    if under_torchrun():
        raise InputError(f"{method} trains in one process; start it without torchrun")
    started = time.perf_counter()
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    plan = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    plan.check()
    OutputFolder(output, overwrite=overwrite)  # an interrupted run has no say in whether OUT may be replaced
    with hold(plan, output, overwrite) as place:
        if fresh:
            place.start_over()
        place.prepare()
        ref = str(chosen.merged)
        if isinstance(chosen.merged, MergeSpec):
            ref = "./merged"
            folder, options = place.out / "merged", {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
            merge_first(chosen, folder, progress=progress, **options)  # type: ignore[arg-type]
            adopt(plan, folder)
        rates = replace(training or Training(), seed=chosen.seed)
        trained = train_plan(plan, method, rates, progress=progress)
        outcome = _outcome(Path(output), method, trained, time.perf_counter() - started)
        _save(plan, place, trained, outcome, ref, rates)
        place.publish()
    return outcome


def train_plan(plan: Plan, method: str, training: Training, *, progress: bool = True) -> Trained:
    """Adapters for the models and samples of a plan, experts (and for final features the merged model) from disk."""
    assert plan.merged is not None and plan.base is not None
    data = {task: own.learn.batches for task, own in plan.tasks.items()}
    head = clip_projection(plan.base, plan.merged.keymap.model)
    scores: Mapping[str, Scores] = {} if head is None else dict.fromkeys(data, head)
    experts = {task: plan.network(model) for task, model in plan.experts.items()}
    merged: Network = plan.network(plan.merged)
    if method == "surgery_v2":
        merged = Network(plan.merged.label, whole_model(plan.merged), plan.order, plan.device, plan.stem, plan.dtype)
    return train(method, merged, experts, data, scores, training, progress=progress)


def clip_projection(base: Model, model: nn.Module) -> ZeroShotHead | None:
    """For CLIP the base's projection, whose output zero-shot heads read. Its one text is a dummy."""
    name = "visual_projection.weight"
    if not type(model).__name__.startswith("CLIP") or "For" in type(model).__name__ or name not in base.checkpoint:
        return None
    projection_PD = base.checkpoint.get(name).float()
    return ZeroShotHead(torch.ones(1, len(projection_PD)), projection_PD, 1.0)


def _outcome(output: Path, method: str, trained: Trained, seconds: float) -> Outcome:
    return Outcome(output, method, trained.before, trained.after, trained.parameters, seconds, peak_memory())


def _save(plan: Plan, place: OutputFolder, trained: Trained, outcome: Outcome, ref: str, training: Training) -> None:
    assert plan.merged is not None
    facts: dict[str, Any] = {
        "feature": trained.kind,
        "training": asdict(training),
        "samples": {task: data.samples.counts.samples for task, data in plan.tasks.items()},
        "l1_before": outcome.before,
        "l1_after": outcome.after,
        "seconds": outcome.seconds,
        "peak_memory_bytes": outcome.peak_memory_bytes,
    }
    corrected = Corrected(outcome.method, plan.merged.keymap.model, trained.adapters, facts)
    corrected.save(place.out, ref, plan.merged.checkpoint.fingerprint())
    with atomic_write(place.out / RESOLVED) as file:
        file.write(recipe_to_yaml(plan.recipe).encode())
