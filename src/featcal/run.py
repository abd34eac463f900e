"""The whole job on checkpoints: plan, calibrate with one block resident, write a drop-in folder. Resumes by itself."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor

from .bench import Bench
from .calibrate import Job
from .calibrate import calibrate as run_job
from .dist import Comm, process_group
from .errors import InputError
from .journal import Journal
from .log import progress_bar
from .plan import Model, Plan, prepare
from .recipe import Recipe, load_recipe, recipe_to_yaml
from .skeleton import DiskNetwork
from .student import Student
from .targets import BlockInfo
from .update import Record
from .version import __version__
from .writer import OutputFolder, assemble, atomic_write

logger = logging.getLogger("featcal")


@dataclass
class Outcome:
    """What a run leaves behind."""

    output: Path
    records: list[Record]
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0


def run(
    recipe: Recipe | str | Path,
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
        recipe: a `Recipe`, or the path of a recipe file.
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
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    plan = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    plan.check()
    with process_group(plan.device) as comm, ExitStack() as stack:
        place = _open_output(plan, output, overwrite, fresh, comm, stack)
        planned = time.perf_counter()
        journal = Journal(place.work, fingerprint(plan)) if place else None
        job = build_job(plan, comm, stack, journal, _spill(plan, place, max_memory), progress)
        run_job(job)
        calibrated = time.perf_counter()
        if place is None or journal is None:
            return Outcome(Path(output), [])
        records = journal.records() + kept_records(plan)
        seconds = {"plan": planned - clock, "calibrate": calibrated - planned}
        _write(plan, place, journal)
        seconds |= {"write": time.perf_counter() - calibrated, "total": time.perf_counter() - clock}
        outcome = Outcome(place.final, records, seconds, peak_memory())
        _write_report(plan, place, outcome)
        place.publish()
    return outcome


def build_job(
    plan: Plan, comm: Comm, stack: ExitStack, journal: Journal | None, spill: Path | None, progress: bool
) -> Job:
    """Networks, streams and the job of this process; networks stay open until `stack` closes."""
    assert plan.merged is not None and plan.base is not None

    def network(model: Model) -> DiskNetwork:
        opened = DiskNetwork(model.label, model.keymap, plan.order, plan.device, plan.stem)
        stack.enter_context(opened.open())
        return opened

    bench = Bench(
        blocks=plan.blocks,
        merged=network(plan.merged),
        base=DiskNetwork(plan.base.label, plan.base.keymap, plan.order, plan.device),
        experts={task: network(plan.experts[task]) for task in plan.tasks},
        learn={task: data.learn.batches for task, data in plan.tasks.items()},
        held_out={task: data.held_out.batches for task, data in plan.tasks.items()},
        comm=comm,
        spill=spill,
    )
    settings = plan.recipe.calibration
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
        shared = comm.share(saved, plan.device)
        return {name.removeprefix(f"{info.name}."): value for name, value in shared.items()}

    job = bench.job([settings])
    job.restore, job.finish = restore, finish
    job.progress = progress_bar("calibrating", enabled=progress and comm.rank == 0)
    return job


def fingerprint(plan: Plan) -> dict[str, Any]:
    """All that decides the result, field by field, so that a resumed run can say what changed."""
    assert plan.merged is not None and plan.base is not None
    fields: dict[str, Any] = {"featcal": __version__, "torch": torch.__version__, "seed": plan.recipe.seed}
    fields |= {"transformers": transformers.__version__, "device": plan.device.type}
    fields |= {f"calibration.{k}": v for k, v in plan.recipe.calibration.model_dump(mode="json").items()}
    models = {"merged": plan.merged, "base": plan.base, **{f"expert '{t}'": m for t, m in plan.experts.items()}}
    fields |= {f"model {label}": model.checkpoint.fingerprint() for label, model in models.items()}
    return fields | {f"data of '{task}'": data.samples.fingerprint for task, data in plan.tasks.items()}


def kept_records(plan: Plan) -> list[Record]:
    """A record for every module with parameters that is not a target, inside and outside the blocks."""
    assert plan.merged is not None
    records = [Record(i.name, m, "other", "kept", reason) for i in plan.blocks for m, reason in i.kept.items()]
    inside = (*plan.order, *(f"{name}." for name in plan.order))
    owners = {name.rpartition(".")[0]: None for name in plan.merged.keymap.parameters if not name.startswith(inside)}
    return records + [Record("", name, "other", "kept", "outside the blocks") for name in owners]


def _open_output(
    plan: Plan, output: str | Path, overwrite: bool, fresh: bool, comm: Comm, stack: ExitStack
) -> OutputFolder | None:
    """The output folder in the making, on rank 0; a refusal there is raised on every rank."""
    assert plan.merged is not None and plan.base is not None and plan.cost is not None
    models = [plan.merged, plan.base, *plan.experts.values()]
    place, problem = None, None
    if comm.rank == 0:
        try:
            sources = [Path(spec.data.source) for spec in plan.recipe.tasks.values()]
            inputs = [model.checkpoint.folder for model in models] + [path for path in sources if path.exists()]
            place = OutputFolder(output, inputs, overwrite)
            if fresh:
                place.start_over()
            place.prepare(plan.cost.disk_bytes)
            stack.enter_context(_locked(place.part / "lock"))
        except InputError as error:
            problem = str(error)
    problem = comm.share_object(problem)
    if problem:
        raise InputError(problem)
    return place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one run at a time works on an output; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run is working on {path.parent}; wait for it, or name another output") from None
        yield


def _spill(plan: Plan, place: OutputFolder | None, max_memory: int | None) -> Path | None:
    """Where activations go when they outgrow the budget; None: they stay in memory."""
    assert plan.cost is not None
    if max_memory is None or plan.cost.activation_bytes <= max_memory:
        return None
    folder = place.work / "activations" if place else Path(os.environ.get("TMPDIR", "/tmp")) / f"featcal-{os.getpid()}"
    logger.info(
        "activations need %.1f GB, more than --max-memory: they are kept in %s",
        plan.cost.activation_bytes / 1e9,
        folder,
    )
    return folder


def _write(plan: Plan, place: OutputFolder, journal: Journal) -> None:
    """The drop-in folder: merged shards with the new tensors, every other file as it was, the resolved recipe."""
    assert plan.merged is not None
    keymap = plan.merged.keymap
    changed: dict[str, Any] = {}
    for info in plan.blocks:
        for name, tensor in journal.tensors(info.name).items():
            key = keymap.key(name)
            assert key is not None, f"{name} has no tensor of its own on disk"
            changed[key] = tensor if plan.merged.checkpoint.shape(key) != tuple(tensor.shape) else (
                journal.file(info.name), name
            )  # fmt: skip
    place.copy_side_files(plan.merged.checkpoint.folder)
    assemble(plan.merged.checkpoint, changed, place.out)
    with atomic_write(place.out / "featcal.yaml") as file:
        file.write(recipe_to_yaml(plan.recipe).encode())


def _write_report(plan: Plan, place: OutputFolder, outcome: Outcome) -> None:
    report = {
        "version": __version__,
        "recipe": plan.recipe.model_dump(mode="json", exclude_none=True),
        "environment": environment(plan.device),
        "seconds": outcome.seconds,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "tasks": [
            {
                "name": task,
                **asdict(data.samples.counts),
                "tokens": data.learn.tokens,
                "truncated": data.learn.truncated,
            }
            for task, data in plan.tasks.items()
        ],
        "modules": [asdict(record) for record in outcome.records if record.kind != "other"],
        "kept": [
            {"module": f"{r.block}.{r.module}".strip("."), "reason": r.reason}
            for r in outcome.records
            if r.status == "kept"
        ],
    }
    with atomic_write(place.out / "report.json") as file:
        file.write(json.dumps(report, indent=1).encode())


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, for the report."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
    }


def peak_memory() -> int:
    """Peak resident memory of this process, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
