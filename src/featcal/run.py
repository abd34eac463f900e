"""The whole job on checkpoints: plan, calibrate with one block resident, write a drop-in folder. Resumes by itself."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .bench import Bench
from .calibrate import Job
from .calibrate import calibrate as run_job
from .card import write_card
from .dist import Comm, process_group
from .drift.results import TaskDrift, merge_parts
from .drift.watcher import Watcher
from .errors import InputError
from .journal import Journal, difference
from .log import progress_bar
from .merging.folder import merge_first
from .output import REPORT, Desk, environment, hold, merge_folder, open_desk, peak_memory, scratch, write_model
from .plan import Plan, adopt, prepare
from .recipe import MergeSpec, Recipe, load_recipe, recipe_to_yaml
from .report.build import make_report, write_report_json
from .report.page import write_report
from .settings import Calibration
from .student import Student
from .targets import BlockInfo, unit_modules
from .tune import Tuning, tune
from .update import Record
from .version import __version__

logger = logging.getLogger("featcal")


@dataclass
class Outcome:
    """What a run leaves behind."""

    output: Path
    records: list[Record]
    report: dict[str, Any] = field(default_factory=dict)
    """The contents of report.json; empty on other processes than the first."""
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0


def run(
    recipe: Recipe | str | Path | Callable[[], Recipe],
    output: str | Path,
    *,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    fresh: bool = False,
    max_memory: int | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Outcome:
    """Calibrate the merged checkpoint of a recipe into the folder `output`, as `featcal calibrate` does.

    Args:
        recipe: a `Recipe`, the path of a recipe file, or a function that makes a recipe.
        overrides: `dotted.key=value` each, for a recipe file.
        overwrite: replace a non-empty output.
        fresh: forget an interrupted run instead of going on with it.
        max_memory: bytes for activations; beyond it they are kept on disk.
        tokenizer: folder of the tokenizer or image processor, when no model brings one.
        trust_remote_code: allow modelling code that a checkpoint brings along.

    Raises:
        InputError: anything wrong with the recipe, the models, the data or the output; all problems at once.
        RunError: no space, or another process died. The same call goes on where it stopped.
    """
    clock = time.perf_counter()
    with process_group() as comm, ExitStack() as stack:

        def ready_plan() -> Plan:
            made = recipe() if callable(recipe) else recipe
            chosen = made if isinstance(made, Recipe) else load_recipe(made, overrides)
            plan = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            plan.check()
            return plan

        plan = comm.together(ready_plan)
        assert plan.cost is not None
        seconds: dict[str, float] = {}
        if isinstance(plan.recipe.merged, MergeSpec):
            started = time.perf_counter()

            def merge() -> None:
                options = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code, "progress": progress}
                with hold(plan, output, overwrite):
                    merge_first(plan.recipe, merge_folder(output), fresh=fresh, **options)  # type: ignore[arg-type]

            comm.together(lambda: None if comm.rank else merge())
            comm.together(lambda: adopt(plan, merge_folder(output)))
            seconds["merge"] = time.perf_counter() - started
        marks = fingerprint(plan)
        everyone = comm.gather_objects(marks)
        comm.together(lambda: _check_same(everyone))
        spills = _spills(plan, max_memory)
        need = plan.cost.disk_bytes + (plan.cost.activation_bytes if spills else 0)

        def desk_of_rank_0() -> Desk | None:
            return None if comm.rank else open_desk(plan, output, overwrite, fresh, need, marks, stack)

        desk = comm.together(desk_of_rank_0)
        if comm.share_object(desk is not None and desk.journal is None):
            return _finished(output) if desk else Outcome(Path(output), [])
        planned = time.perf_counter()
        with scratch(output, spills, comm) as spill:
            bench = open_bench(plan, comm, stack, spill)
            settings, tuning = _settings(plan, bench, desk, progress)
            tuned = time.perf_counter()
            job = build_job(bench, settings, desk.journal if desk else None, progress)
            job.watch = watcher = Watcher(job)
            run_job(job)
            drift = merge_parts(comm.gather_objects(watcher.finish()))
        peak = max(comm.gather_objects(peak_memory()))
        calibrated = time.perf_counter()
        if desk is None or desk.journal is None:
            return Outcome(Path(output), [])
        records = (desk.journal.records() if settings else uncalibrated(plan)) + kept_records(plan)
        seconds = {"plan": planned - clock - seconds.get("merge", 0.0), **seconds}
        seconds |= {"tune": tuned - planned, "calibrate": calibrated - tuned}
        write_model(plan, desk.place, desk.journal)
        seconds |= {"write": time.perf_counter() - calibrated, "measure": watcher.seconds}
        seconds["total"] = time.perf_counter() - clock
        outcome = Outcome(desk.place.final, records, {}, seconds, peak)
        outcome.report = report_of(plan, outcome, drift, tuning, fingerprint=marks)
        write_report_json(desk.place.out, outcome.report)
        write_report(desk.place.out)
        write_card(desk.place.out)
        desk.place.publish()
    return outcome


def open_bench(plan: Plan, comm: Comm, stack: ExitStack, spill: Path | None) -> Bench:
    """The plan's networks, open until `stack` closes, and its batches."""
    assert plan.merged is not None and plan.base is not None and plan.cost is not None

    return Bench(
        blocks=plan.blocks,
        merged=stack.enter_context(plan.network(plan.merged).open()),
        base=plan.network(plan.base),
        experts={task: stack.enter_context(plan.network(plan.experts[task]).open()) for task in plan.tasks},
        learn={task: data.learn.batches for task, data in plan.tasks.items()},
        held_out={task: data.held_out.batches for task, data in plan.tasks.items()},
        comm=comm,
        spill=spill,
        side_by_side=comm.share_object(plan.cost.side_by_side(plan.device)),
    )


def _settings(
    plan: Plan, bench: Bench, desk: Desk | None, progress: bool
) -> tuple[Calibration | None, dict[str, Any] | None]:
    """The settings to use (None: the merged model is best as it is) and how they were found, if need be earlier."""
    settings = plan.recipe.calibration
    if settings.tune != "auto":
        return settings, None
    journal = desk.journal if desk else None
    saved = bench.comm.share_object(journal.note("tuning") if journal else None)
    if saved is None:
        tuning = tune(bench, settings, progress=progress)
        chosen = None if tuning.chosen is None else tuning.chosen.model_dump(mode="json")
        saved = {"chosen": chosen, "table": tuning.as_dict()}
        if journal:
            journal.write_note("tuning", saved)
    chosen = saved["chosen"]
    return (None if chosen is None else Calibration(**chosen)), saved["table"]


def choose(
    recipe: Recipe, *, tokenizer: str | None = None, trust_remote_code: bool = False, progress: bool = True
) -> tuple[Tuning | None, str]:
    """Only the choice of settings, as `featcal tune` does: the search, and the recipe with the best as YAML.

    The search is None on other processes than the first.
    """
    searched = recipe.calibration.model_copy(update={"tune": "auto"})  # decides how many samples are held out
    wanted = recipe.model_copy(update={"calibration": searched})
    with process_group() as comm, ExitStack() as stack:

        def ready_plan() -> Plan:
            plan = prepare(wanted, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            plan.check()
            return plan

        plan = comm.together(ready_plan)
        tuning = tune(open_bench(plan, comm, stack, None), searched, progress=progress)
    if comm.rank:
        return None, ""
    settings = (tuning.chosen or recipe.calibration).model_copy(update={"tune": "off"})
    return tuning, recipe_to_yaml(recipe.model_copy(update={"calibration": settings, "preset": None}))


def build_job(bench: Bench, settings: Calibration | None, journal: Journal | None, progress: bool) -> Job:
    """The job of this process. Without settings every block keeps its merged weights."""
    comm = bench.comm
    started = [time.perf_counter()]

    def finish(info: BlockInfo, student: Student, records: Sequence[Record]) -> None:
        if journal is not None:
            new = {f"{info.name}.{name}": value for name, value in student.overrides.items()}
            journal.commit(info.name, new, list(records), time.perf_counter() - started[0])
        started[0] = time.perf_counter()

    def restore(info: BlockInfo) -> dict[str, Tensor] | None:
        if not comm.share_object(journal is not None and info.name in journal):
            return None
        saved = {} if journal is None else journal.tensors(info.name)
        shared = comm.share(saved, bench.merged.device)
        return {name.removeprefix(f"{info.name}."): value for name, value in shared.items()}

    job = bench.job([settings or Calibration()])
    job.restore, job.finish = (restore, finish) if settings else ((lambda info: {}), finish)
    job.progress = progress_bar("calibrating", enabled=progress and comm.rank == 0)
    return job


def report_of(
    plan: Plan, outcome: Outcome, drift: Sequence[TaskDrift], tuning: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """The contents of report.json."""
    tasks = [
        {"name": task, **data.samples.counts.as_dict(), "tokens": data.learn.tokens, "truncated": data.learn.truncated}
        for task, data in plan.tasks.items()
    ]
    return make_report(
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        tasks=tasks,
        drift=drift,
        records=outcome.records,
        seconds=outcome.seconds,
        environment=environment(plan.device),
        peak_memory_bytes=outcome.peak_memory_bytes,
        tuning=tuning,
        **more,
    )


def fingerprint(plan: Plan) -> dict[str, Any]:
    """All that decides the result, field by field, so that a resumed run can say what changed."""
    assert plan.merged is not None and plan.base is not None
    fields: dict[str, Any] = {"featcal": __version__, "torch": torch.__version__, "seed": plan.recipe.seed}
    fields |= {"transformers": transformers.__version__, "device": plan.device.type}
    fields |= {f"calibration.{k}": v for k, v in plan.recipe.calibration.model_dump(mode="json").items()}
    models = {"merged": plan.merged, "base": plan.base, **{f"expert '{t}'": m for t, m in plan.experts.items()}}
    fields |= {f"model {label}": model.checkpoint.fingerprint() for label, model in models.items()}
    fields |= {f"config of {label}": _digest(model.checkpoint.config) for label, model in models.items()}
    fields |= {f"data of '{task}'": data.samples.fingerprint for task, data in plan.tasks.items()}
    return fields | {f"batches of '{task}'": _digest(data.batches) for task, data in plan.tasks.items()}


def _digest(value: Any) -> str:
    """SHA-256 of nested values; of tensors, all bytes."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Mapping):
            add(sorted(part.items()))
        elif isinstance(part, (list, tuple)):
            digest.update(f"[{len(part)}".encode())
            for item in part:
                add(item)
        elif isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


def uncalibrated(plan: Plan) -> list[Record]:
    """Records of a run whose tuner found nothing better than the merged model."""
    reason = "no settings tried brought the model closer to its experts"
    targets = [(info.name, module) for info in plan.blocks for unit in info.units for module in unit_modules(unit)]
    return [Record(block, module, "target", "kept", reason) for block, module in targets]


def kept_records(plan: Plan) -> list[Record]:
    """A record for every module with parameters that is not a target, inside and outside the blocks."""
    assert plan.merged is not None
    records = [Record(i.name, m, "other", "kept", reason) for i in plan.blocks for m, reason in i.kept.items()]
    inside = (*plan.order, *(f"{name}." for name in plan.order))
    owners = {name.rpartition(".")[0]: None for name in plan.merged.keymap.parameters if not name.startswith(inside)}
    return records + [Record("", name, "other", "kept", "outside the blocks") for name in owners]


def _check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    """All processes must see the same recipe, models and data; on several machines they need not."""
    for rank, theirs in enumerate(everyone):
        field = difference(everyone[0], theirs)
        if field:
            raise InputError(
                f"rank {rank} sees another {field} than rank 0; give all machines the same files, versions"
            )


def _finished(output: str | Path) -> Outcome:
    """The outcome of a run that had published its output."""
    report = json.loads((Path(output) / REPORT).read_text())
    records = [Record(**record) for record in report["modules"]]
    return Outcome(Path(output), records, report, report["seconds"], report["peak_memory_bytes"])


def _spills(plan: Plan, max_memory: int | None) -> bool:
    """Whether activations outgrow the budget, so that they are kept on disk."""
    assert plan.cost is not None
    needed = plan.cost.activation_bytes
    if max_memory is None or needed <= max_memory:
        return False
    logger.info("activations need %.1f GB, more than --max-memory: they are kept beside the output", needed / 1e9)
    return True
