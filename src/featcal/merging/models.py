"""Merge models in memory, by any method: `merge_modules`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..api import survey
from ..blocks import batch_size, call_model, cut, find_blocks
from ..calibrate import Task
from ..errors import InputError, nearest
from ..log import progress_bar
from ..network import Network, common_dtype, pick_device
from ..settings import make_settings
from ..stream import Stream
from .average import Average
from .base import Merger
from .drive import Experts, merge_state_dicts, module_kinds, named
from .features import FeatureMerger, merge_blocks
from .heads import Scores
from .whole import ModelMerger, WholeModels


def merge_modules(
    method: Merger,
    base: nn.Module,
    experts: Experts[nn.Module],
    *,
    data: Mapping[str, Iterable[Any]] | None = None,
    scores: Mapping[str, Scores] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str = "auto",
    notes: list[str] | None = None,
    progress: bool = False,
) -> nn.Module:
    """A copy of `base` with the merged weights. The inputs are left alone.

    Args:
        data: task name → iterable of unlabelled batches (as for `featcal.calibrate`), for methods that need inputs.
        scores: task name → function (model, batch) → (rows, classes), where the model's output holds no scores.
        blocks: globs of block names, for feature-based methods on models that are not transformers'.
        notes: what a user should know is appended here, e.g. tensors that keep the base's value.

    Raises:
        InputError: models that do not fit together, or a method that needs data and got none for a task.
    """
    tasks, remarks = named(experts), notes if notes is not None else []
    where = pick_device(device)
    if method.needs == "weights":
        return _copy_with(base, _weights(method, base, tasks, where, remarks))
    batches = _samples(method, tasks, data)
    if isinstance(method, FeatureMerger):
        return _by_features(method, base, tasks, batches, blocks, where, remarks, progress)
    assert isinstance(method, ModelMerger)
    return _by_predictions(method, base, tasks, batches, dict(scores or {}), where, remarks, progress)


def _weights(
    method: Merger, base: nn.Module, experts: Mapping[str, nn.Module], where: torch.device, notes: list[str]
) -> dict[str, Tensor]:
    states = {name: expert.state_dict() for name, expert in experts.items()}
    own = base.state_dict()
    for alias, first in tied_names(base).items():
        own.pop(alias, None)  # counted once, as on disk
        for name, state in states.items():
            if alias in state and first in state and not torch.equal(state[alias], state[first]):
                notes.append(f"{alias}: is {first} in the base; '{name}' has other values there, which are left out")
    return merge_state_dicts(method, own, states, kinds=module_kinds(base), device=where, notes=notes)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of shared parameters → the first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def _copy_with(base: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy with these tensors; those that are left out are other names of tied ones."""
    model = copy.deepcopy(base)
    model.load_state_dict(dict(state), strict=False)
    return model


def _samples(
    method: Merger, experts: Mapping[str, nn.Module], data: Mapping[str, Iterable[Any]] | None
) -> dict[str, list[Any]]:
    """The first `samples` samples of every task."""
    samples = getattr(method, "samples")  # noqa: B009
    for task in data or {}:
        if task not in experts:
            raise InputError(f"data: task '{task}' has no expert{nearest(task, experts)}")
    missing = [task for task in experts if task not in (data or {})]
    if data is None or missing:
        raise InputError(
            f"merge method '{method.method}' needs unlabelled samples of every task; "
            f"give data={{'{missing[0]}': batches}} or choose a data-free method such as task_arithmetic"
        )
    return {task: take(task, data[task], samples) for task in experts}


def take(task: str, source: Iterable[Any], samples: int) -> list[Any]:
    """The first `samples` samples of an iterable of batches (which may be endless), the last batch cut to fit."""
    batches: list[Any] = []
    for batch in source:
        rows = batch_size(batch)
        batches.append(batch if rows <= samples else cut(batch, samples))
        samples -= min(rows, samples)
        if not samples:
            break
    if not sum(map(batch_size, batches)):
        raise InputError(f"task '{task}': its data holds no sample")
    return batches


def _by_features(
    method: FeatureMerger,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    batches: Mapping[str, list[Any]],
    blocks: Sequence[str] | None,
    where: torch.device,
    notes: list[str],
    progress: bool,
) -> nn.Module:
    first = next(iter(batches.values()))[0]
    exclude = method.exclude
    if method.sequential:
        exclude = (*exclude, *after_the_stem(base, find_blocks(base, blocks), first, where))
    model = _copy_with(base, _weights(Average(exclude=exclude, weights=None), base, experts, where, notes))
    settings = make_settings(exclude=method.exclude, norm="on", token_weights="uniform", tune="off")
    infos, stem = survey(model, first, blocks, settings, where)
    order = [info.name for info in infos]
    dtype = common_dtype([base, *experts.values()], where)
    updates: dict[str, Tensor] = {}
    with ExitStack() as stack:
        merged = stack.enter_context(Network("the merged model", model, order, where, stem, dtype).open())
        opened: dict[int, Network] = {}
        tasks = []
        for name, expert in experts.items():
            if id(expert) not in opened:
                network = Network(f"expert '{name}'", expert, order, where, stem, dtype)
                opened[id(expert)] = stack.enter_context(network.open())
            own = opened[id(expert)]
            stream = Stream(merged if method.sequential else own, batches[name], name)
            tasks.append(Task(name, own, stream, range(len(batches[name])), sum(map(batch_size, batches[name]))))
        start = Network("the base", base, order, where, dtype=dtype)
        bar = progress_bar(method.method, enabled=progress)
        for info, new in merge_blocks(method, infos, tasks, merged, start, bar, notes):
            updates.update({f"{info.name}.{name}": value.cpu() for name, value in new.items()})
    _write(model, updates)
    return model


def _by_predictions(
    method: ModelMerger,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    batches: Mapping[str, list[Any]],
    scores: Mapping[str, Scores],
    where: torch.device,
    notes: list[str],
    progress: bool,
) -> nn.Module:
    rest = Average(exclude=method.exclude, weights=None)
    model = _copy_with(base, _weights(rest, base, experts, where, notes))
    names = common_parameters(method, base, experts)
    bar = progress_bar(method.method, enabled=progress)
    models = WholeModels(base, experts, batches, names, where, scores, notes, bar)
    _write(model, method.merge_models(models))
    return model


def _write(model: nn.Module, updates: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in updates.items():
            parameters[name].copy_(value)


def common_parameters(method: Merger, base: nn.Module, experts: Mapping[str, nn.Module]) -> list[str]:
    """Floating-point parameters that the method may change and that every expert has in the same shape."""
    others = [dict(expert.named_parameters()) for expert in experts.values()]
    return [
        name
        for name, p in base.named_parameters()
        if p.is_floating_point()
        and not method.excludes(name)
        and all(name in other and other[name].shape == p.shape for other in others)
    ]


def after_the_stem(model: nn.Module, blocks: Sequence[str], batch: Any, device: torch.device) -> list[str]:
    """Parameters outside the blocks that are not needed to reach them: all but embeddings and what runs before them.

    Found by one recorded forward: what has returned before the first block is entered is the stem.
    """
    inside = tuple(f"{name}." for name in blocks)
    outside = {n: m for n, m in model.named_modules() if not f"{n}.".startswith(inside)}
    stem: list[nn.Module] = [m for m in outside.values() if isinstance(m, nn.Embedding)]
    entered: list[str] = []

    def leave(module: nn.Module, *_: Any) -> None:
        if not entered:
            stem.append(module)

    handles = [module.register_forward_hook(leave) for module in outside.values()]
    for name in blocks:
        handles.append(model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: entered.append(name)))
    try:
        with Network("the base", model, [], device).open():
            call_model(model, batch, device)
    finally:
        for handle in handles:
            handle.remove()
    early = {id(p) for module in stem for p in module.parameters(recurse=False)}
    return [
        f"{name}.{leaf}" if name else leaf
        for name, module in outside.items()
        for leaf, p in module.named_parameters(recurse=False)
        if id(p) not in early
    ]
