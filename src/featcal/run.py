"""The whole job on checkpoints: plan, calibrate with one block resident, write a drop-in folder. Resumes by itself."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
from .journal import Journal, difference
from .log import progress_bar
from .plan import Model, Plan, prepare
from .recipe import Recipe, load_recipe, recipe_to_yaml
from .skeleton import DiskNetwork
from .student import Student
from .targets import BlockInfo
from .update import Record
from .version import __version__
from .writer import OutputFolder, assemble, atomic_write, disk_errors

logger = logging.getLogger("featcal")
RESOLVED = "featcal.yaml"
"""The resolved recipe in the output folder."""
REPORT = "report.json"


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
    with process_group() as comm, ExitStack() as stack:

        def ready_plan() -> Plan:
            chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
            plan = prepare(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            plan.check()
            return plan

        plan = comm.together(ready_plan)
        assert plan.cost is not None
        marks = fingerprint(plan)
        everyone = comm.gather_objects(marks)
        comm.together(lambda: _check_same(everyone))
        spills = _spills(plan, max_memory)
        need = plan.cost.disk_bytes + (plan.cost.activation_bytes if spills else 0)

        def desk_of_rank_0() -> _Desk | None:
            return None if comm.rank else _open_desk(plan, output, overwrite, fresh, need, marks, stack)

        desk = comm.together(desk_of_rank_0)
        if comm.share_object(desk is not None and desk.journal is None):
            return _finished(output) if desk else Outcome(Path(output), [])
        planned = time.perf_counter()
        with _scratch(output, spills, comm) as spill:
            run_job(build_job(plan, comm, stack, desk.journal if desk else None, spill, progress))
        peak = max(comm.gather_objects(peak_memory()))
        calibrated = time.perf_counter()
        if desk is None or desk.journal is None:
            return Outcome(Path(output), [])
        records = desk.journal.records() + kept_records(plan)
        seconds = {"plan": planned - clock, "calibrate": calibrated - planned}
        _write(plan, desk.place, desk.journal)
        seconds |= {"write": time.perf_counter() - calibrated, "total": time.perf_counter() - clock}
        outcome = Outcome(desk.place.final, records, seconds, peak)
        _write_report(plan, desk.place, outcome, marks)
        desk.place.publish()
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


def kept_records(plan: Plan) -> list[Record]:
    """A record for every module with parameters that is not a target, inside and outside the blocks."""
    assert plan.merged is not None
    records = [Record(i.name, m, "other", "kept", reason) for i in plan.blocks for m, reason in i.kept.items()]
    inside = (*plan.order, *(f"{name}." for name in plan.order))
    owners = {name.rpartition(".")[0]: None for name in plan.merged.keymap.parameters if not name.startswith(inside)}
    return records + [Record("", name, "other", "kept", "outside the blocks") for name in owners]


@dataclass
class _Desk:
    """Where rank 0 works: the output folder in the making and the journal; none when there is nothing left to do."""

    place: OutputFolder
    journal: Journal | None


def _check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    """All processes must see the same recipe, models and data; on several machines they need not."""
    for rank, theirs in enumerate(everyone):
        field = difference(everyone[0], theirs)
        if field:
            raise InputError(
                f"rank {rank} sees another {field} than rank 0; give all machines the same files, versions"
            )


def _open_desk(
    plan: Plan,
    output: str | Path,
    overwrite: bool,
    fresh: bool,
    need: int,
    marks: Mapping[str, Any],
    stack: ExitStack,
) -> _Desk:
    """The output folder in the making, held by this run alone until `stack` closes, and the journal in it."""
    assert plan.merged is not None and plan.base is not None
    models = [plan.merged, plan.base, *plan.experts.values()]
    sources = [Path(spec.data.source) for spec in plan.recipe.tasks.values()]
    inputs = [model.checkpoint.folder for model in models] + [path for path in sources if path.exists()]
    place = OutputFolder(output, inputs, overwrite=True)
    if not place.part.exists():
        OutputFolder(output, inputs, overwrite)  # refuses before anything is made
    stack.enter_context(_locked(place.part))
    if not fresh and _is_published(place, marks):
        shutil.rmtree(place.part)
        return _Desk(place, None)
    place = OutputFolder(output, inputs, overwrite)
    if fresh:
        shutil.rmtree(place.work, ignore_errors=True)
        shutil.rmtree(place.out, ignore_errors=True)
    place.prepare(max(need - _size(place.part), 0))
    return _Desk(place, Journal(place.work, marks))


def _is_published(place: OutputFolder, marks: Mapping[str, Any]) -> bool:
    """Whether this very run was stopped after OUT had appeared and before its hidden folder was gone."""
    if place.out.exists() or not (place.final / REPORT).exists():
        return False
    written = json.loads((place.final / REPORT).read_text()).get("fingerprint", {})
    return difference(written, json.loads(json.dumps(marks))) is None


def _finished(output: str | Path) -> Outcome:
    """The outcome of a run that had published its output."""
    report = json.loads((Path(output) / REPORT).read_text())
    records = [Record(**record) for record in report["modules"]]
    return Outcome(Path(output), records, report["seconds"], report["peak_memory_bytes"])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one run at a time works on an output; the lock goes with the process, however it ends."""
    path = folder / "lock"
    while True:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another run is working on {folder}; wait for it, or name another output") from None
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue  # the run that held it has just ended and taken its folder away
            yield
            return


def _spills(plan: Plan, max_memory: int | None) -> bool:
    """Whether activations outgrow the budget, so that they are kept on disk."""
    assert plan.cost is not None
    needed = plan.cost.activation_bytes
    if max_memory is None or needed <= max_memory:
        return False
    logger.info("activations need %.1f GB, more than --max-memory: they are kept beside the output", needed / 1e9)
    return True


@contextmanager
def _scratch(output: str | Path, wanted: bool, comm: Comm) -> Iterator[Path | None]:
    """A folder beside OUT for this process's activations, gone afterwards, like those that killed runs have left."""
    final = Path(output).expanduser().resolve()
    stem = f".{final.name}.featcal-activations-"
    folder = final.with_name(f"{stem}{comm.rank}")
    for old in [folder, *(final.parent.glob(f"{glob.escape(stem)}*") if comm.rank == 0 else ())]:
        shutil.rmtree(old, ignore_errors=True)
    comm.gather_objects(None)  # nobody writes before all have cleared
    try:
        yield folder if wanted else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write(plan: Plan, place: OutputFolder, journal: Journal) -> None:
    """The drop-in folder: merged shards with the new tensors, every other file as it was, the resolved recipe."""
    assert plan.merged is not None
    keymap = plan.merged.keymap
    changed: dict[str, tuple[Path, str]] = {}
    for info in plan.blocks:
        for name in journal.names(info.name):
            key = keymap.key(name)
            assert key is not None, f"{name} has no tensor of its own on disk"
            changed[key] = (journal.file(info.name), name)
    place.copy_side_files(plan.merged.checkpoint.folder)
    assemble(plan.merged.checkpoint, changed, place.out)
    with atomic_write(place.out / RESOLVED) as file:
        file.write(recipe_to_yaml(plan.recipe).encode())


def _write_report(plan: Plan, place: OutputFolder, outcome: Outcome, marks: Mapping[str, Any]) -> None:
    report = {
        "version": __version__,
        "recipe": plan.recipe.model_dump(mode="json", exclude_none=True),
        "environment": environment(plan.device),
        "fingerprint": marks,
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
    with atomic_write(place.out / REPORT) as file:
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
