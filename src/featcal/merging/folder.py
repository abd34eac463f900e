"""A merge from checkpoints to a folder: the base's files, names and shards with merged tensors.

Data-free methods hold one tensor of each model, regression methods one block of each side; fisher and adamerging hold
whole models. `merge_first` is what a recipe with `merged: {method: …}` starts with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..blocks import batch_size
from ..calibrate import Task
from ..errors import InputError, RunError
from ..journal import difference
from ..log import progress_bar
from ..names import skeleton
from ..plan import Model, Plan, map_model, prepare
from ..reader import Checkpoint, open_checkpoint
from ..recipe import MergeSpec, Recipe
from ..settings import make_settings
from ..skeleton import fill_with_stand_ins
from ..stream import Stream
from ..version import __version__
from ..writer import Change, OutputFolder, assemble, atomic_write, write_safetensors
from .average import Average
from .base import MatrixMerger, Merger, merger_from
from .drive import merge_checkpoints
from .features import FeatureMerger, merge_blocks
from .loading import head_scores, whole_model
from .models import after_the_stem, common_parameters
from .tensors import MergedTensors, Names, Renamed, excluded_parameters, finished_tensors, in_rounds
from .whole import ModelMerger, WholeModels

logger = logging.getLogger("featcal")

MADE = "merge.json"
"""In the merged folder: the method with all its parameters, what it was made of, and notes."""


def method_of(recipe: Recipe) -> Merger:
    """The merge that a recipe asks for.

    Raises:
        InputError: it names a merged checkpoint instead, or a method or parameter that does not exist.
    """
    if not isinstance(recipe.merged, MergeSpec):
        raise InputError(
            f"merged: '{recipe.merged}' names a model; to make one, write e.g. merged: {{method: task_arithmetic}}"
        )
    return merger_from({"method": recipe.merged.method, **recipe.merged.parameters})


def prepare_merge(recipe: Recipe, *, tokenizer: str | None = None, trust_remote_code: bool = False) -> Plan:
    """The plan of the merge alone: no data where the method needs none, else the method's own number of samples.

    Samples are the first ones in the order in which calibration takes them.

    Raises:
        InputError: with every problem, one a line.
    """
    method = method_of(recipe)
    plan = prepare(recipe, trust_remote_code=trust_remote_code, read_data=False)
    plan.check()
    assert plan.base is not None
    if method.needs != "weights":
        settings = make_settings(
            samples=getattr(method, "samples"),  # noqa: B009
            batch_size=getattr(method, "batch_size"),  # noqa: B009
            max_length=recipe.calibration.max_length,
            exclude=excluded_parameters(method, plan.base),
            norm="on",
            token_weights="uniform",
            tune="off",
        )
        recipe = recipe.model_copy(update={"calibration": settings})
        plan = prepare(recipe, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
        plan.check()
    return plan


def merge_first(
    recipe: Recipe,
    folder: Path,
    *,
    fresh: bool = False,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> None:
    """Make the merge of a recipe in `folder`, unless a finished one of the same method and inputs lies there."""
    plan = prepare_merge(recipe, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    marks = fingerprint(plan)
    place = OutputFolder(folder, overwrite=True)
    if fresh:
        place.start_over()
    elif difference(read_made(folder).get("fingerprint", {}), marks) is None:
        logger.info("%s: the merge that an earlier run has finished is taken", method_of(recipe).method)
        return
    make_merge(plan, place, marks, progress=progress)
    place.publish()


def read_made(folder: Path) -> dict[str, Any]:
    """What `merge.json` says; nothing where there is none."""
    path = folder / MADE
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def fingerprint(plan: Plan) -> dict[str, Any]:
    """All that decides a merge, field by field."""
    assert plan.base is not None
    method = method_of(plan.recipe)
    fields: dict[str, Any] = {"featcal": __version__, "torch": torch.__version__, "device": plan.device.type}
    fields |= {"method": method.method, **{f"merged.{k}": v for k, v in method.model_dump(mode="json").items()}}
    models = {"base": plan.base, **{f"expert '{task}'": model for task, model in plan.experts.items()}}
    fields |= {f"model {label}": model.checkpoint.fingerprint() for label, model in models.items()}
    for task, data in plan.tasks.items():
        digest = hashlib.sha256()
        for batch in data.learn.batches:
            digest.update(safetensors.torch.save({key: value.contiguous() for key, value in batch.items()}))
        fields[f"data of '{task}'"] = digest.hexdigest()
    return dict(json.loads(json.dumps(fields)))


def make_merge(plan: Plan, place: OutputFolder, marks: Mapping[str, Any], *, progress: bool = True) -> dict[str, Any]:
    """Merge into `place.out`, which the caller publishes; returns what `merge.json` says.

    Matrices of the methods that take long (`wudi`, `iso_*`, `tsv_m`) are kept as they are finished: the next run of
    the same merge goes on after the last one.
    """
    assert plan.base is not None
    started = time.perf_counter()
    checkpoint, method = plan.base.checkpoint, method_of(plan.recipe)
    _go_on(place, marks, 2 * sum(map(checkpoint.nbytes, checkpoint.keys())))
    job = _Merge(plan, plan.base, place, [], progress)
    template, changed = job.run(method)
    place.copy_side_files(checkpoint.folder)
    assemble(template, changed, place.out)
    for note in job.notes:
        logger.info("%s: %s", method.method, note)
    made = {
        "version": __version__,
        "merged": {"method": method.method, **method.model_dump(mode="json", exclude_none=True)},
        "base": plan.recipe.base,
        "experts": {task: spec.expert for task, spec in plan.recipe.tasks.items()},
        "samples": {task: data.samples.counts.samples for task, data in plan.tasks.items()},
        "notes": job.notes,
        "seconds": time.perf_counter() - started,
        "fingerprint": dict(marks),
    }
    with atomic_write(place.out / MADE) as file:
        file.write((json.dumps(made, indent=1) + "\n").encode())
    return made


def _go_on(place: OutputFolder, marks: Mapping[str, Any], need: int) -> None:
    """Make the hidden folder ready. What is finished in it stays if it is of the same merge."""
    known = place.work / "fingerprint.json"
    if known.is_file() and difference(json.loads(known.read_text()), marks) is not None:
        place.start_over()
    place.prepare(need)
    with atomic_write(known) as file:
        file.write(json.dumps(dict(marks)).encode())


@dataclass
class _Merge:
    """One merge on its way into `place`."""

    plan: Plan
    base: Model
    place: OutputFolder
    notes: list[str]
    progress: bool

    def run(self, method: Merger) -> tuple[Checkpoint, Mapping[str, Change]]:
        """A checkpoint, and the tensors of it that the merge changes."""
        if isinstance(method, FeatureMerger):
            return self._by_features(method)
        if isinstance(method, ModelMerger):
            return self.base.checkpoint, self._by_predictions(method)
        return self.base.checkpoint, self._by_tensors(method)

    def _by_tensors(self, method: Merger, ready: Mapping[str, Change] | None = None) -> MergedTensors:
        """One tensor of each model at a time; those in `ready` (by key) are there already."""
        names = Names(self.base)
        kept = self.place.work / "tensors" if isinstance(method, MatrixMerger) else None
        done = {} if kept is None else finished_tensors(kept)
        done |= {names.first(key): value for key, value in (ready or {}).items()}
        stream = merge_checkpoints(
            names.spelt_out(method),
            Renamed(self.base.checkpoint, {key: key for key in names.own}),
            {task: names.in_file(task, model, self.notes) for task, model in self.plan.experts.items()},
            kinds=names.kinds(),
            device=self.plan.device,
            notes=self.notes,
            skip=done,
        )
        bar = progress_bar(method.method, enabled=self.progress)
        return MergedTensors(in_rounds(stream, len(names.own) - len(done), bar), names, done, kept)

    def _by_features(self, method: FeatureMerger) -> tuple[Checkpoint, Mapping[str, Change]]:
        """The mean of the experts as a checkpoint of its own, then one block after the other regressed on it."""
        average = self._average(method)
        changed: dict[str, Change] = {}
        with ExitStack() as stack:
            merged = stack.enter_context(self.plan.network(average).open())
            tasks = []
            for task, expert in self.plan.experts.items():
                own = stack.enter_context(self.plan.network(expert).open())
                batches = self.plan.tasks[task].learn.batches
                stream = Stream(merged if method.sequential else own, batches, task)
                tasks.append(Task(task, own, stream, range(len(batches)), sum(map(batch_size, batches))))
            bar = progress_bar(method.method, enabled=self.progress)
            base = self.plan.network(self.base)
            for info, new in merge_blocks(method, self.plan.blocks, tasks, merged, base, bar, self.notes):
                tensors = {}
                for name, value in new.items():
                    key = average.keymap.key(f"{info.name}.{name}")
                    assert key is not None, f"{info.name}.{name} has no tensor of its own on disk"
                    tensors[key] = _finite(key, value.cpu().contiguous())
                path = self.place.work / f"{info.name}.safetensors"
                write_safetensors(path, tensors)
                changed |= {key: (path, key) for key in tensors}
        return average.checkpoint, changed

    def _average(self, method: FeatureMerger) -> Model:
        """What holds wherever the regression says nothing."""
        kind: Any = type(self.base.keymap.model)
        exclude = method.exclude
        if method.sequential:
            model = skeleton(self.base.checkpoint, kind=kind)
            fill_with_stand_ins(model)
            batch = next(iter(self.plan.tasks.values())).batches[0]
            after = after_the_stem(model, self.plan.order, batch, torch.device("cpu"))
            exclude = (*exclude, *map(escape, after))
        place = OutputFolder(self.place.work / "average", overwrite=True)
        place.start_over()
        place.prepare()
        place.copy_side_files(self.base.checkpoint.folder)
        inner = _Merge(self.plan, self.base, place, self.notes, progress=False)
        assemble(self.base.checkpoint, inner._by_tensors(Average(exclude=exclude, weights=None)), place.out)
        return map_model("the merged model", open_checkpoint(place.publish()), kind)

    def _by_predictions(self, method: ModelMerger) -> MergedTensors:
        """Whole models in memory; what the method does not change is the mean of the experts."""
        base = whole_model(self.base)
        experts = {task: whole_model(model) for task, model in self.plan.experts.items()}
        data = {task: own.learn.batches for task, own in self.plan.tasks.items()}
        named = method.model_copy(update={"exclude": excluded_parameters(method, self.base)})
        names = common_parameters(named, base, experts)
        scores = head_scores(self.base, data)
        bar = progress_bar(method.method, enabled=self.progress)
        models = WholeModels(base, experts, data, names, self.plan.device, scores, self.notes, bar)
        new: dict[str, Change] = {}
        for name, value in method.merge_models(models).items():
            key = self.base.keymap.key(name)
            if key is None:
                self.notes.append(f"{name}: gets the mean of the experts, the file stores it in another form")
            else:
                new[key] = _finite(key, value.to("cpu", self.base.checkpoint.dtype(key)).contiguous())
        self.progress = False  # the rest is quick
        return self._by_tensors(Average(exclude=method.exclude, weights=None), new)


def _finite(key: str, value: torch.Tensor) -> torch.Tensor:
    if not value.isfinite().all():
        raise RunError(f"the merged tensor '{key}' overflows {value.dtype}; use a base in a wider dtype")
    return value
