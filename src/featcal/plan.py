"""Everything about a job that can be known before a weight is read: what fits, what is calibrated, what it will cost.

`prepare` opens all models and data of a recipe and collects every problem; a calibration starts from the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from .adapters import open_model
from .blocks import find_blocks
from .data import Batches, ModelInput, Samples, check_vocab, find_processor, load_samples, make_batches
from .errors import InputError
from .merging import merger_from
from .names import KeyMap, model_class, skeleton, untie
from .network import compute_dtype, pick_device
from .reader import Checkpoint, open_checkpoint
from .recipe import MergeSpec, Recipe
from .skeleton import fill_with_stand_ins
from .stream import MODEL_ERRORS
from .targets import BlockInfo, Group, choose, probe, skippable_stem, unit_modules, with_readout

T = TypeVar("T")
HELD_OUT = 1 / 8
"""Held-out rows per calibration row: they measure the drift, and never enter a moment."""


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
class Cost:
    """Estimates for one process."""

    memory_bytes: int
    activation_bytes: int
    disk_bytes: int
    seconds: float


@dataclass
class Plan:
    """A job that is ready to run, unless `problems` says otherwise."""

    recipe: Recipe
    device: torch.device
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
    plan = Plan(recipe, pick_device(recipe.device))
    spec = recipe.merged
    if isinstance(spec, MergeSpec):
        plan.attempt(lambda: merger_from({"method": spec.method, **spec.parameters}).check(len(recipe.tasks)))
    refs = {
        "merged": recipe.base if isinstance(spec, MergeSpec) else spec,
        "base": recipe.base,
        **{f"expert '{t}'": s.expert for t, s in recipe.tasks.items()},
    }
    base = plan.attempt(lambda: open_checkpoint(recipe.base))

    def opened_model(label: str, ref: str) -> Checkpoint | None:
        if label == "base":
            return base
        return plan.attempt(lambda: open_model(ref, base=base, trust_remote_code=trust_remote_code))

    opened = {label: opened_model(label, ref) for label, ref in refs.items()}
    checkpoints = {label: checkpoint for label, checkpoint in opened.items() if checkpoint is not None}
    for checkpoint in checkpoints.values():
        plan.problems += checkpoint.check()
    if plan.problems:
        return plan
    _map_models(plan, checkpoints, trust_remote_code)
    if plan.problems or plan.merged is None or not read_data:
        return plan
    _load_data(plan, refs, tokenizer, trust_remote_code)
    if plan.tasks and not plan.problems:
        plan.attempt(lambda: _survey(plan))
    if plan.blocks:
        _compare(plan)
        plan.cost = estimate(plan)
    return plan


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
    plan.merged, plan.base = made["merged"], made["base"]
    for task in plan.recipe.tasks:
        model = made[f"expert '{task}'"]
        if model is not None:
            plan.experts[task] = model


def _common_class(checkpoints: dict[str, Checkpoint], trust: bool) -> type[PreTrainedModel]:
    """The merged model's class, or the experts' when they are a tower of it (vision towers of a whole CLIP)."""
    whole = model_class(checkpoints["merged"], trust_remote_code=trust)
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


def _load_data(plan: Plan, refs: dict[str, str], tokenizer: str | None, trust: bool) -> None:
    assert plan.merged is not None
    recipe, settings = plan.recipe, plan.recipe.calibration
    config = plan.merged.keymap.model.config
    reads = ModelInput.from_config(config)  # type: ignore[arg-type]
    held_out = max(int(settings.samples * HELD_OUT), 1)

    def load(task: str) -> Samples:
        spec = recipe.tasks[task].data
        return load_samples(spec, recipe.seed, settings.samples, task=task, held_out=held_out, kind=reads.kind)

    samples = {task: plan.attempt(lambda t=task: load(t)) for task in recipe.tasks}  # type: ignore[misc]
    parts = sorted({part for s in samples.values() if s is not None for part in s.columns})
    processor = plan.attempt(
        lambda: find_processor(
            reads,
            refs["merged"],
            refs["base"],
            {task: spec.expert for task, spec in recipe.tasks.items()},
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
        for model in (plan.merged, plan.experts[task]):
            embedding = model.keymap.model.get_input_embeddings() if reads.kind in ("text", "seq2seq") else None
            rows = getattr(embedding, "num_embeddings", None)
            if rows is not None:
                plan.attempt(lambda b=data.batches, r=rows, m=model: check_vocab(b, r, m.label))  # type: ignore[misc]


def _survey(plan: Plan) -> None:
    """Blocks, groups and kept modules, from one forward of a stand-in without memory on the first sample."""
    assert plan.merged is not None
    kind = type(plan.merged.keymap.model)
    model = skeleton(plan.merged.checkpoint, kind=kind)  # type: ignore[arg-type]
    fill_with_stand_ins(model)
    batch = next(iter(plan.tasks.values())).batches[0]
    model.config.use_cache = False
    settings = plan.recipe.calibration
    try:
        with torch.no_grad():
            infos = probe(model, find_blocks(model), batch)
            one = {key: value[:1] for key, value in batch.items()}
            plan.stem = skippable_stem(model, [info.name for info in infos], one, None)
    except MODEL_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{kind.__name__} refuses the first batch: {error}") from error
    plan.blocks = choose(with_readout(infos, model, settings.token_weights), model, settings)
    for info in plan.blocks:
        _keep_packed(info, plan.merged.keymap)


def _keep_packed(info: BlockInfo, keymap: KeyMap) -> None:
    """Modules that the file stores in another form than the model (fused from parts) cannot be written back."""
    for unit in list(info.units):
        packed = [m for m in unit_modules(unit) if keymap.key(f"{info.name}.{m}.weight") is None]
        if packed:
            info.units.remove(unit)
            info.kept |= dict.fromkeys(unit_modules(unit), "stored in another form on disk")


def _compare(plan: Plan) -> None:
    """Shapes inside the blocks must agree; an expert must differ from the base."""
    assert plan.merged is not None and plan.base is not None
    inside = tuple(f"{name}." for name in plan.order)
    wanted = {n: p.shape for n, p in plan.merged.keymap.parameters.items() if n.startswith(inside)}
    for model in (plan.merged, plan.base, *plan.experts.values()):
        keymap, label = model.keymap, model.label
        missing = [name for name in wanted if name not in keymap]
        if missing:
            plan.problems.append(
                f"{label} ('{model.checkpoint.name}') lacks {len(missing)} tensors of the merged model's blocks, "
                f"e.g. {missing[0]}; is it the same architecture with as many layers?"
            )
            continue
        other = keymap.parameters
        for name, shape in wanted.items():
            if name not in other or other[name].shape != shape or name in {m[0] for m in keymap.mismatched}:
                got = tuple(other[name].shape) if name in other else "none"
                plan.problems.append(f"{label}: {name} has shape {got}, the merged model {tuple(shape)}")
                break
        theirs = tuple(f"{block}." for block in find_blocks(keymap.model))
        if any(name.startswith(theirs) and name not in wanted for name in other):
            plan.problems.append(f"{label} has more blocks than the merged model; it is another model")
        outside = [m for m in keymap.mismatched if not m[0].startswith(inside)]
        plan.notes += [
            f"{label}: {name} is {shape} in the config and {got} in the file" for name, shape, got in outside
        ]
    for task, model in plan.experts.items():
        if _equal_in_blocks(plan, model, plan.base):
            plan.problems.append(
                f"expert '{task}' equals the base in every block; was it fine-tuned, or its adapter never applied?"
            )
    if not isinstance(plan.recipe.merged, MergeSpec):
        _note_unmerged(plan)


def _note_unmerged(plan: Plan) -> None:
    assert plan.merged is not None and plan.base is not None
    if _equal_in_blocks(plan, plan.merged, plan.base):
        plan.notes.append("the merged model equals the base in every block; was the merge applied?")


def _equal_in_blocks(plan: Plan, one: Model, other: Model) -> bool:
    """Compare a few rows of every target weight."""
    for info in plan.blocks:
        for unit in info.units:
            for module in unit_modules(unit):
                name = f"{info.name}.{module}.weight"
                count = one.keymap.parameters[name].shape[0]
                index = torch.arange(0, count, max(count // 4, 1))
                if not torch.equal(one.keymap.rows(name, index).float(), other.keymap.rows(name, index).float()):
                    return False
    return True


# ----------------------------------------------------------------------------------------------------- estimates

IMPORTS = 650 * 2**20
"""Resident memory of torch and transformers themselves."""


def estimate(plan: Plan) -> Cost:
    """Memory, disk and time of one process, from shapes, rows and a measured rate of matrix products."""
    assert plan.merged is not None
    keymap = plan.merged.keymap
    size = 4 if plan.device.type == "cpu" else 2
    rows = {task: sum(_rows(batch) for batch in data.batches) for task, data in plan.tasks.items()}
    samples = {task: sum(len(next(iter(b.values()))) for b in data.learn.batches) for task, data in plan.tasks.items()}
    width = max((u.width for i in plan.blocks for u in i.units if isinstance(u, Group)), default=0)
    hidden = min((u.width for i in plan.blocks for u in i.units if isinstance(u, Group)), default=0)
    peak, operations, read = 0, 0.0, 0
    for info in plan.blocks:
        names = [n for n in keymap.parameters if n.startswith(f"{info.name}.")]
        entries = sum(keymap.parameters[n].numel() for n in names)
        groups = [unit for unit in info.units if isinstance(unit, Group)]
        sums = sum(8 * (g.width**2 + sum(g.outputs) * g.width) for g in groups)
        scratch = sum(8 * (2 * g.width**2) for g in groups)
        anchors = sum(4 * sum(g.outputs) * g.width for g in groups)
        largest = max((8 * 4 * g.width**2 for g in groups), default=0)
        peak = max(peak, 2 * entries * size + anchors + sums + scratch + largest)
        read += entries * 2 * (len(plan.experts) + 2)
        for task, count in samples.items():
            operations += rows[task] * 2.0 * entries * (2.7 if groups else 2.0)
            operations += sum(_group_operations(g, int(count * g.rows_per_sample)) for g in groups)
        operations += sum(4 * (g.width**3 / 3 + sum(g.outputs) * g.width**2 * 2) for g in groups)
    stored = sum(rows.values()) * hidden * size * 2
    chunk = 4096 * (2 * width + hidden) * 4 * 2
    weights = sum(map(keymap.checkpoint.nbytes, keymap.checkpoint.keys()))
    rate = matmul_rate(plan.device)
    return Cost(
        memory_bytes=IMPORTS + peak + stored + chunk,
        activation_bytes=stored,
        disk_bytes=2 * weights,
        seconds=operations / (0.6 * rate) + read / 1e9,
    )


def _rows(batch: Any) -> int:
    """Tokens (or patches, unknown here: samples) of a batch, padding included."""
    for key in ("input_ids", "pixel_values"):
        if key in batch:
            shape = batch[key].shape
            return int(shape[0] * shape[1]) if key == "input_ids" else int(shape[0]) * 50
    return len(next(iter(batch.values())))


def _group_operations(group: Group, rows: int) -> float:
    """Multiply-adds times two of a group's moments over one task."""
    outputs, width = sum(group.outputs), group.width
    gram = 1.2 * rows * width**2
    inputs = 2 * rows * width**2 + 4 * outputs * width**2
    return gram + min(inputs, 4 * rows * outputs * width)


def matmul_rate(device: torch.device, size: int = 1024) -> float:
    """Measured float32 operations per second of a matrix product."""
    a = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def available_memory(device: torch.device) -> int:
    """Free bytes where the blocks live."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def dtype_of_blocks(plan: Plan) -> torch.dtype:
    """The compute dtype of the merged model's blocks."""
    assert plan.merged is not None
    name = next(n for n in plan.merged.keymap.parameters if n.startswith(plan.order[0]))
    return compute_dtype(plan.merged.keymap.dtype(name), plan.device)
