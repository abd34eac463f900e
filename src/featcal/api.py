"""`featcal.calibrate`: models in memory in, a calibrated model out."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .bench import Bench, first_samples, samples_after
from .blocks import batch_size, cut, find_blocks
from .calibrate import calibrate as run_job
from .errors import InputError, nearest
from .log import progress_bar
from .network import Network, common_dtype, pick_device
from .proofs import prove
from .settings import Calibration, make_settings
from .states import Config, ModelOrState, as_models
from .stream import MODEL_ERRORS
from .student import Student
from .targets import BlockInfo, Group, choose, probe, with_readout
from .tune import Tuning, tune
from .update import Record

logger = logging.getLogger("featcal")
Scores = Callable[[nn.Module, Any], Tensor]


@dataclass
class Result:
    """What `featcal.calibrate` returns."""

    model: nn.Module
    records: list[Record]
    """One per module of the blocks: calibrated or kept, with the objective before and after."""
    settings: Calibration
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    tuning: Tuning | None = None
    """How the settings were chosen, when they were."""


def calibrate(
    merged: ModelOrState,
    *,
    base: ModelOrState,
    experts: Mapping[str, ModelOrState],
    data: Mapping[str, Iterable[Any]],
    config: Config | None = None,
    scores: Mapping[str, Scores] | None = None,
    preset: str | None = None,
    blocks: Sequence[str] | None = None,
    device: str | torch.device = "auto",
    seed: int = 42,
    inplace: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Calibrate a merged model toward its experts (FeatCal), block by block, in closed form.

    Args:
        merged: the merged model; base, merged and experts are of one class. All may be state dicts.
        base: the common base, for the anchor W^base + ρ (W^M − W^base).
        experts: task name → expert.
        data: task name → iterable of batches: a dict of tensors, a tensor, or a tuple led by either. Padding is taken
            from the batch's `attention_mask` (`decoder_attention_mask`). At most `samples` samples per task are read;
            no label is.
        config: for state dicts: a transformers config, its folder, or a function that makes the model (`states`).
        scores: task name → function (model, batch) → (rows, classes), for models whose scores live outside them.
        preset: `clip`, `flan-t5`, `llama`, …: the published settings.
        blocks: globs of block names, for models that are not transformers'.
        device: `auto`, `cpu`, `cuda`, …
        seed: for models that draw random numbers in their forward, or data that draw on being read; the caller's own
            random state is put back.
        inplace: change `merged` itself instead of a copy.
        settings: any field of `Calibration`, e.g. alpha=0.3, rho=2.0, ridge=0.05.

    Raises:
        InputError: models that do not fit together, a task without data, a batch that the model refuses.
    """
    clock = time.perf_counter()
    chosen = make_settings(preset, **settings)
    merged, base, experts = as_models(merged, base, experts, config)
    check_models(merged, base, experts, data)
    model, where = merged if inplace else copy.deepcopy(merged), pick_device(device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([where] if where.type == "cuda" else []))
        torch.manual_seed(seed)
        bench = open_bench(stack, model, base, experts, data, chosen, blocks, where)
        seconds = {"prepare": time.perf_counter() - clock}
        tuning = None
        if chosen.tune == "auto":
            tuning = tune(bench, chosen, scores, progress)
            seconds["tune"] = tuning.seconds
        records, updates = _calibrate(bench, chosen if tuning is None else tuning.chosen, progress)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in updates.items():
            parameters[name].copy_(value)
    records += kept_records(model, bench.blocks)
    warn_about(records, bench.blocks, bench.learn)
    seconds["total"] = time.perf_counter() - clock
    seconds["calibrate"] = seconds["total"] - sum(seconds[name] for name in seconds if name != "total")
    final = chosen if tuning is None or tuning.chosen is None else tuning.chosen
    return Result(model, records, final, seconds, tuning)


def _calibrate(bench: Bench, settings: Calibration | None, progress: bool) -> tuple[list[Record], dict[str, Tensor]]:
    """Run the job; the records and the new parameters by full name. No settings: the merged model is the best."""
    records: list[Record] = []
    updates: dict[str, Tensor] = {}
    if settings is None:
        logger.warning("no settings bring the merged model closer to its experts: it is returned as it is")
        return records, updates
    job = replace(bench, held_out={}).job([settings])

    def finish(info: BlockInfo, student: Student, made: Sequence[Record]) -> None:
        updates.update({f"{info.name}.{name}": value.cpu() for name, value in student.overrides.items()})
        records.extend(made)

    job.finish = finish
    job.progress = progress_bar("calibrating", enabled=progress)
    run_job(job)
    return records, updates


def open_bench(
    stack: ExitStack,
    merged: nn.Module,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    data: Mapping[str, Iterable[Any]],
    settings: Calibration,
    blocks: Sequence[str] | None,
    device: torch.device,
) -> Bench:
    """Read the samples, survey the model, open a network for each model until `stack` closes."""
    learn, held_out = {}, {}
    for task in experts:
        learn[task], held_out[task] = take_samples(task, data[task], settings)
    infos, stem = survey(merged, next(iter(learn.values()))[0], blocks, settings, device)
    order = [info.name for info in infos]
    check_experts(base, experts, order)
    dtype = common_dtype([merged, base, *experts.values()], device)
    opened: dict[int, Network] = {}
    networks = {}
    for task, expert in experts.items():
        if id(expert) not in opened:
            own = Network(f"expert '{task}'", expert, order, device, stem, dtype)
            opened[id(expert)] = stack.enter_context(own.open())
        networks[task] = opened[id(expert)]
    network = stack.enter_context(Network("the merged model", merged, order, device, stem, dtype).open())
    start = Network("the base", base, order, device, dtype=dtype)
    return Bench(infos, network, start, networks, learn, held_out)


def survey(
    model: nn.Module, batch: Any, blocks: Sequence[str] | None, settings: Calibration, device: torch.device
) -> tuple[list[BlockInfo], tuple[str, ...]]:
    """The blocks in order of execution with what is calibrated in each, and the stem to skip; from the first batch."""
    names = find_blocks(model, blocks)
    network = Network("the merged model", model, [], device)
    with network.open():
        try:
            infos = probe(model, names, batch, device)
            stem = prove(model, [info.name for info in infos], batch, device)
        except MODEL_ERRORS as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the merged model's forward refuses the first batch: {error}") from error
    return choose(with_readout(infos, model, settings.token_weights), model, settings), stem


def check_models(merged: nn.Module, base: nn.Module, experts: Mapping[str, nn.Module], data: Mapping[str, Any]) -> None:
    """One class, the same task names on both sides, nobody listed twice under two roles."""
    if not experts:
        raise InputError("experts: give at least one expert, e.g. experts={'cars': model}")
    for task in data:
        if task not in experts:
            raise InputError(f"data: task '{task}' has no expert{nearest(task, experts)}")
    for task in experts:
        if task not in data:
            raise InputError(f"data: task '{task}' has an expert but no data; give data={{'{task}': batches}}")
    for label, model in {"base": base, **{f"expert '{t}'": m for t, m in experts.items()}}.items():
        if type(model) is not type(merged):
            raise InputError(
                f"{label} is a {type(model).__name__}, the merged model a {type(merged).__name__}; load all alike"
            )
        if model is merged:
            raise InputError(f"{label} is the merged model itself; give separate objects")


def check_experts(base: nn.Module, experts: Mapping[str, nn.Module], blocks: Sequence[str]) -> None:
    """Same shapes inside the blocks; an expert that equals the base there was never fine-tuned (or loaded wrongly)."""
    reference = {f"{b}.{n}": p for b in blocks for n, p in base.get_submodule(b).named_parameters()}
    for task, expert in experts.items():
        parameters = dict(expert.named_parameters())
        same = True
        for name, p in reference.items():
            other = parameters.get(name)
            if other is None or other.shape != p.shape:
                got = "no such parameter" if other is None else f"shape {tuple(other.shape)}"
                raise InputError(f"expert '{task}': {name} has {got}, the base has {tuple(p.shape)}")
            same = same and torch.equal(other.to(p), p)
        if same:
            raise InputError(
                f"expert '{task}' equals the base in every block; was it fine-tuned, or its adapter never applied?"
            )


def take_samples(task: str, source: Iterable[Any], settings: Calibration) -> tuple[list[Any], list[Any]]:
    """Batches to learn from, and held-out ones when the settings are tuned.

    The first `samples` samples of an iterable of batches, and `settings.held_out` after them; when the source has no
    more, the last fifth of what there is, at most, is held out instead.
    """
    held_out = settings.held_out if settings.tune == "auto" else 0
    batches: list[Any] = []
    missing = settings.samples + held_out
    for batch in source:
        rows = batch_size(batch)
        if rows:
            batches.append(batch if rows <= missing else cut(batch, missing))
            missing -= min(rows, missing)
        if not missing:
            break
    if not batches:
        raise InputError(f"task '{task}': its data holds no sample")
    total = sum(map(batch_size, batches))
    learn = min(settings.samples, total - min(held_out, total // 5))
    return first_samples(batches, learn), samples_after(batches, learn)


def kept_records(model: nn.Module, infos: Sequence[BlockInfo]) -> list[Record]:
    """A record for every module that holds parameters and was not a target, inside and outside the blocks."""
    records = [Record(i.name, module, "other", "kept", reason) for i in infos for module, reason in i.kept.items()]
    inside = tuple(f"{info.name}." for info in infos)
    for name, module in model.named_modules():
        outside = name not in {i.name for i in infos} and not name.startswith(inside)
        if outside and next(module.parameters(recurse=False), None) is not None:
            records.append(Record("", name, "other", "kept", "outside the blocks"))
    return records


def warn_about(records: Sequence[Record], infos: Sequence[BlockInfo], batches: Mapping[str, Sequence[Any]]) -> None:
    """Say aloud what a user should know: kept targets, and tasks with fewer tokens than a module has inputs."""
    for record in records:
        if record.kind != "other" and record.status == "kept":
            logger.warning("%s.%s keeps the merged weight: %s", record.block, record.module, record.reason)
    groups = [unit for info in infos for unit in info.units if isinstance(unit, Group)]
    if not groups:
        return
    narrow = min(groups, key=lambda group: group.width)
    for task, own in batches.items():
        rows = int(narrow.rows_per_sample * sum(batch_size(batch) for batch in own))
        if rows < narrow.width:
            logger.warning(
                "task '%s': about %d tokens for modules with %d inputs; more samples would calibrate better",
                task, rows, narrow.width,
            )  # fmt: skip
