"""Everything about a job that can be known before a weight is read: what fits, what is calibrated, what it will cost.

`prepare` opens all models and data of a recipe and collects every problem; a calibration starts from the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .adapters import open_model
from .blocks import find_blocks
from .cost import Cost, available_memory, estimate, folder_bytes
from .data import Batches, ModelInput, Samples, check_vocab, find_processor, load_samples, make_batches
from .errors import InputError
from .merging import merger_from
from .names import KeyMap, model_class, skeleton, untie
from .network import compute_dtype, pick_device
from .reader import Checkpoint, open_checkpoint
from .recipe import MergeSpec, Recipe
from .skeleton import DiskNetwork
from .survey import Survey, survey
from .targets import BlockInfo, unit_modules
from .writer import side_files

T = TypeVar("T")


@dataclass
class TaskData:
    """One task's samples as model-ready batches; the held-out ones come last."""

    samples: Samples
    learn: Batches
    held_out: Batches

    @property
    def batches(self) -> list[Any]:
        return [*self.learn.batches, *self.held_out.batches]


@dataclass
class Model:
    """One checkpoint with the names of its tensors in the model."""

    label: str
    checkpoint: Checkpoint
    keymap: KeyMap


@dataclass
class Plan:
    """A job that is ready to run, unless `problems` says otherwise."""

    recipe: Recipe
    device: torch.device
    tokenizer: str | None = None
    """Folder of the tokenizer or image processor, when it was named."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    merged: Model | None = None
    base: Model | None = None
    experts: dict[str, Model] = field(default_factory=dict)
    tasks: dict[str, TaskData] = field(default_factory=dict)
    blocks: list[BlockInfo] = field(default_factory=list)
    stem: tuple[str, ...] = ()
    cost: Cost | None = None

    def attempt(self, job: Callable[[], T]) -> T | None:
        """Run one step; what it finds wrong joins the problems, and the plan goes on."""
        try:
            return job()
        except InputError as error:
            self.problems += str(error).splitlines()
            return None

    def check(self) -> None:
        """Raises InputError with every problem, one a line."""
        if self.problems:
            raise InputError("\n".join(dict.fromkeys(self.problems)))

    @property
    def order(self) -> list[str]:
        return [info.name for info in self.blocks]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all models of the job compute in."""
        maps = [model.keymap for model in (self.merged, self.base, *self.experts.values()) if model is not None]
        return compute_dtype([m.dtype(name) for m in maps for name in m.parameters if name in m], self.device)

    def network(self, model: Model) -> DiskNetwork:
        """One of the models (or another of their kind) as a network of this job, its weights on disk."""
        return DiskNetwork(model.label, model.keymap, self.order, self.device, self.stem, self.dtype)


def prepare(
    recipe: Recipe, *, trust_remote_code: bool = False, tokenizer: str | None = None, read_data: bool = True
) -> Plan:
    """The plan of a recipe: headers, configs and the chosen rows are read; weights are not.

    The parameters of a merge to perform are checked, and the base stands for its result until `adopt`: their names,
    shapes and files are the same.

    Args:
        trust_remote_code: allow custom modelling code that a checkpoint brings along.
        tokenizer: folder of the tokenizer / image processor, when no model brings one.
        read_data: whether the samples are needed, and with them the blocks; a data-free merge does without.
    """
    plan = Plan(recipe, torch.device("cpu"), tokenizer)
    plan.device = plan.attempt(lambda: _device(recipe.device)) or plan.device
    checkpoints = _open_models(plan, trust_remote_code)
    if not checkpoints:
        return plan
    _map_models(plan, checkpoints, trust_remote_code)
    some = plan.merged or plan.base or next(iter(plan.experts.values()), None)
    if some is None or not read_data:
        return plan
    _load_data(plan, some, checkpoints, tokenizer, trust_remote_code)
    seen = None
    if plan.tasks:
        seen = plan.attempt(lambda: _survey(plan, some, trust_remote_code))
    if seen is not None and plan.merged is not None:
        _compare(plan, seen)
    if seen is not None and not plan.problems:
        plan.cost = _cost(plan, seen)
    return plan


def _device(wanted: str) -> torch.device:
    """The device of a recipe, if this machine has it; `cuda` is the local rank's GPU."""
    kind, _, index = wanted.partition(":")
    count = {"cuda": torch.cuda.device_count, "xpu": torch.xpu.device_count}.get(kind, lambda: 1)()
    if int(index or 0) >= count:
        raise InputError(f"device: this machine has no {wanted}; write auto, or cpu")
    return pick_device("auto" if wanted == "cuda" else wanted)


def _open_models(plan: Plan, trust: bool) -> dict[str, Checkpoint]:
    """The checkpoints that are sound, by label; the base stands for a merge that is still to be performed."""
    recipe, spec = plan.recipe, plan.recipe.merged
    if isinstance(spec, MergeSpec):
        plan.attempt(lambda: merger_from({"method": spec.method, **spec.parameters}).check(len(recipe.tasks)))
    base = plan.attempt(lambda: open_checkpoint(recipe.base))
    opened: dict[str, Checkpoint | None] = {"merged": base, "base": base}
    if not isinstance(spec, MergeSpec):
        opened["merged"] = plan.attempt(lambda: open_model(spec, base=base, trust_remote_code=trust))
    for task, entry in recipe.tasks.items():
        ref = entry.expert
        opened[f"expert '{task}'"] = plan.attempt(lambda r=ref: open_model(r, base=base, trust_remote_code=trust))  # type: ignore[misc]
    sound: dict[str, Checkpoint] = {}
    for label, checkpoint in opened.items():
        problems = checkpoint.check() if checkpoint is not None else []
        plan.problems += problems
        if checkpoint is not None and not problems:
            sound[label] = checkpoint
    return sound


def adopt(plan: Plan, folder: Path) -> None:
    """The merge that the recipe asks for lies in `folder` and takes the place that the base has held for it."""
    assert plan.merged is not None
    plan.merged = map_model("merged", open_checkpoint(folder), type(plan.merged.keymap.model))  # type: ignore[arg-type]
    _note_unmerged(plan)


def _map_models(plan: Plan, checkpoints: dict[str, Checkpoint], trust: bool) -> None:
    """Skeleton and key map of every checkpoint, all in one class."""
    kind = plan.attempt(lambda: _common_class(checkpoints, trust))
    if kind is None:
        return
    made = {
        label: plan.attempt(lambda a=label, c=checkpoint: map_model(a, c, kind, trust))  # type: ignore[misc]
        for label, checkpoint in checkpoints.items()
    }
    plan.merged, plan.base = made.get("merged"), made.get("base")
    for task in plan.recipe.tasks:
        model = made.get(f"expert '{task}'")
        if model is not None:
            plan.experts[task] = model


def _common_class(checkpoints: dict[str, Checkpoint], trust: bool) -> type[PreTrainedModel]:
    """The merged model's class, or the experts' when they are a tower of it (vision towers of a whole CLIP)."""
    first = next(label for label in ("merged", "base", *checkpoints) if label in checkpoints)
    whole = model_class(checkpoints[first], trust_remote_code=trust)
    kinds = {model_class(c, trust_remote_code=trust) for label, c in checkpoints.items() if label.startswith("expert")}
    towers = getattr(whole.config_class, "sub_configs", {}).values()
    tower = kinds.pop() if len(kinds) == 1 else whole
    return tower if tower.config_class in towers else whole


def map_model(label: str, checkpoint: Checkpoint, kind: type[PreTrainedModel], trust: bool = False) -> Model:
    """The checkpoint in terms of a class: its skeleton, untied where the file's values differ, and its key map."""
    model: PreTrainedModel = skeleton(checkpoint, kind=kind, trust_remote_code=trust)
    keymap = KeyMap(model, checkpoint)
    untie(model, keymap.untied)
    return Model(label, checkpoint, keymap)


def _load_data(
    plan: Plan, some: Model, checkpoints: Mapping[str, Checkpoint], tokenizer: str | None, trust: bool
) -> None:
    """Samples and batches of every task, for the kind of input that `some` model reads."""
    recipe, settings = plan.recipe, plan.recipe.calibration
    reads = ModelInput.from_config(some.keymap.model.config)  # type: ignore[arg-type]

    def load(task: str) -> Samples:
        spec = recipe.tasks[task].data
        return load_samples(spec, recipe.seed, settings.samples, task=task, held_out=settings.held_out, kind=reads.kind)

    samples = {task: plan.attempt(lambda t=task: load(t)) for task in recipe.tasks}  # type: ignore[misc]
    parts = sorted({part for s in samples.values() if s is not None for part in s.columns})
    processor = plan.attempt(
        lambda: find_processor(
            reads,
            recipe.merged if isinstance(recipe.merged, str) and "merged" in checkpoints else None,
            recipe.base if "base" in checkpoints else None,
            {task: spec.expert for task, spec in recipe.tasks.items() if f"expert '{task}'" in checkpoints},
            override=tokenizer,
            parts=parts,
            trust_remote_code=trust,
        )
    )
    if processor is None:
        return

    def batches(rows: Sequence[Any]) -> Batches:
        return make_batches(rows, processor, reads, batch_size=settings.batch_size, max_length=settings.max_length)

    def build(task: str, chosen: Samples) -> TaskData:
        try:
            data = TaskData(chosen, batches(chosen.rows), batches(chosen.held_out))
        except InputError as error:
            raise InputError(f"task '{task}': {error}") from error
        data.learn.warn_if_few(task, reads.width)
        return data

    for task, chosen in samples.items():
        if chosen is not None:
            made = plan.attempt(lambda t=task, c=chosen: build(t, c))  # type: ignore[misc]
            if made is not None:
                plan.tasks[task] = made
    for task, data in plan.tasks.items():
        for model in (plan.merged, plan.experts.get(task)):
            rows = None if model is None or reads.kind == "image" else _vocabulary(model)
            if model is not None and rows:
                plan.attempt(lambda b=data.batches, r=rows, m=model: check_vocab(b, r, m.label))  # type: ignore[misc]
    if plan.tasks and settings.tune == "auto" and not any(data.held_out.batches for data in plan.tasks.values()):
        plan.problems.append("tune: no held-out samples; give more data, or choose the settings with tune: off")


def _vocabulary(model: Model) -> int:
    """Rows of the input embedding in the file; 0 when it cannot be told."""
    root = model.keymap.model
    reader = getattr(root, "text_model", root)  # of a model that reads text and images
    if not isinstance(reader, PreTrainedModel):
        return 0
    weight = reader.get_input_embeddings().weight
    names = [name for name, parameter in model.keymap.parameters.items() if parameter is weight]
    keys = model.keymap.keys(names[0]) if names else ()
    return model.checkpoint.shape(keys[0])[0] if len(keys) == 1 else 0


def _survey(plan: Plan, some: Model, trust: bool) -> Survey:
    """Blocks, groups and kept modules, from one forward of a stand-in without memory on two short samples."""
    batches = {task: data.batches for task, data in plan.tasks.items()}
    kind: type[PreTrainedModel] = type(some.keymap.model)  # type: ignore[assignment]
    seen = survey(some.checkpoint, kind, batches, plan.recipe.calibration, trust=trust)
    plan.blocks, plan.stem = seen.blocks, seen.stem
    for info in plan.blocks:
        _keep_packed(info, some.keymap)
    return seen


def _keep_packed(info: BlockInfo, keymap: KeyMap) -> None:
    """Modules that the file stores in another form than the model (fused from parts) cannot be written back."""
    for unit in list(info.units):
        packed = [m for m in unit_modules(unit) if keymap.key(f"{info.name}.{m}.weight") is None]
        if packed:
            info.units.remove(unit)
            info.kept |= dict.fromkeys(unit_modules(unit), "stored in another form on disk")


def _compare(plan: Plan, seen: Survey) -> None:
    """What the blocks and their inputs need must be there, in one shape; an expert must differ from the base."""
    for model in (plan.merged, plan.base, *plan.experts.values()):
        if model is not None:
            plan.attempt(lambda m=model: _compare_blocks(plan, m))  # type: ignore[misc]
            if model is not plan.base:
                _compare_outside(plan, model, seen)
    for task, model in plan.experts.items():
        if not plan.problems and plan.base is not None and _equal_in_blocks(plan, model, plan.base):
            plan.problems.append(
                f"expert '{task}' equals the base in every block; was it fine-tuned, or its adapter never applied?"
            )
    if not isinstance(plan.recipe.merged, MergeSpec) and not plan.problems:
        _note_unmerged(plan)


def _compare_blocks(plan: Plan, model: Model) -> None:
    """The same blocks with the same shapes as in the merged model."""
    assert plan.merged is not None
    inside = tuple(f"{name}." for name in plan.order)
    wanted = {n: tuple(p.shape) for n, p in plan.merged.keymap.parameters.items() if n.startswith(inside)}
    keymap, label = model.keymap, model.label
    missing = [name for name in wanted if name not in keymap]
    if missing:
        raise InputError(
            f"{label} ('{model.checkpoint.name}') lacks {len(missing)} tensors of the merged model's blocks, "
            f"e.g. {missing[0]}; is it the same architecture with as many layers?"
        )
    in_files = {name: got for name, _, got in keymap.mismatched}
    for name, shape in wanted.items():
        got = in_files.get(name, tuple(keymap.parameters[name].shape))
        if got != shape:
            raise InputError(f"{label}: {name} has shape {got}, the merged model {shape}; it is another model")
    theirs = tuple(f"{block}." for block in find_blocks(keymap.model))
    if any(name.startswith(theirs) and name not in wanted for name in keymap.parameters):
        raise InputError(f"{label} has more blocks than the merged model; it is another model")


def _compare_outside(plan: Plan, model: Model, seen: Survey) -> None:
    """Embeddings and the like: needed for the blocks' inputs, and in a size of their own only where that works."""
    keymap, label = model.keymap, model.label
    inside = tuple(f"{name}." for name in plan.order)
    for name in keymap.missing:
        if name.startswith(inside):
            continue
        if name.rpartition(".")[0] in seen.needed:
            plan.problems.append(f"{label} ('{model.checkpoint.name}') lacks {name}, which its blocks' inputs need")
        else:
            plan.notes.append(f"{label} has no {name}; it is not needed")
    for name, shape, got in keymap.mismatched:
        owner = name.rpartition(".")[0]
        if name.startswith(inside):
            continue
        text = f"{label}: {name} is {shape} by the config and {got} in the file"
        if owner in seen.needed and not isinstance(keymap.model.get_submodule(owner), nn.Embedding):
            plan.problems.append(f"{text}; correct its config.json")
        else:
            plan.notes.append(text)
    if keymap.unused:
        more = f" and {len(keymap.unused) - 1} more" if len(keymap.unused) > 1 else ""
        plan.notes.append(f"{label}: {keymap.unused[0]}{more} are not part of a {type(keymap.model).__name__}")


def _cost(plan: Plan, seen: Survey) -> Cost:
    """Estimates; a note when the memory is not there."""
    assert plan.merged is not None
    folder = plan.merged.checkpoint.folder
    cost = estimate(
        plan.merged.keymap,
        len(plan.experts),
        seen,
        {task: data.learn.batches for task, data in plan.tasks.items()},
        {task: data.held_out.batches for task, data in plan.tasks.items()},
        plan.device,
        plan.dtype,
        plan.recipe.calibration,
        side_files=folder_bytes(folder, side_files(folder).copied),
    )
    if cost.memory_bytes > available_memory(plan.device):
        plan.notes.append("the memory that is free may not do; --max-memory keeps activations on disk")
    return cost


def _note_unmerged(plan: Plan) -> None:
    assert plan.merged is not None and plan.base is not None
    if _equal_in_blocks(plan, plan.merged, plan.base):
        plan.notes.append("the merged model equals the base in every block; was the merge applied?")


def _equal_in_blocks(plan: Plan, one: Model, other: Model) -> bool:
    """Whether all parameters of the blocks agree. Nearly always a few rows of the first weight tell them apart."""
    inside = tuple(f"{name}." for name in plan.order)
    names = [name for name in one.keymap.parameters if name.startswith(inside)]

    def differs_in_some_rows(name: str) -> bool:
        count = one.keymap.parameters[name].shape[0]
        index = torch.arange(0, count, max(count // 4, 1))
        return not torch.equal(one.keymap.rows(name, index).float(), other.keymap.rows(name, index).float())

    targets = [f"{info.name}.{m}.weight" for info in plan.blocks for unit in info.units for m in unit_modules(unit)]
    if any(map(differs_in_some_rows, targets)):
        return False
    return not any(
        name in one.keymap and not torch.equal(one.keymap.tensor(name).double(), other.keymap.tensor(name).double())
        for name in names
    )
