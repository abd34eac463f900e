"""Where a run's result is made: the hidden folder that one run holds, the drop-in folder, its report."""

from __future__ import annotations

import glob
import json
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from .adapters import AdaptedCheckpoint
from .data.images import images_of
from .dist import Comm
from .journal import Journal, difference
from .plan import Plan
from .recipe import recipe_to_yaml
from .writer import OutputFolder, assemble, atomic_write, locked

RESOLVED = "featcal.yaml"
"""The resolved recipe in the output folder."""
REPORT = "report.json"


@dataclass
class Desk:
    """Where rank 0 works: the output folder in the making and the journal; none when there is nothing left to do."""

    place: OutputFolder
    journal: Journal | None


def open_desk(
    plan: Plan,
    output: str | Path,
    overwrite: bool,
    fresh: bool,
    need: int,
    marks: Mapping[str, Any],
    stack: ExitStack,
) -> Desk:
    """The output folder in the making, held by this run alone until `stack` closes, and the journal in it."""
    place = stack.enter_context(hold(plan, output, overwrite))
    if not fresh and _is_published(place, marks):
        place.discard()
        return Desk(place, None)
    place = OutputFolder(output, inputs_of(plan), overwrite)
    if fresh:
        place.start_over()
    place.prepare(max(need - _size(place.work) - _size(place.out), 0))
    return Desk(place, Journal(place.work, marks))


def _is_published(place: OutputFolder, marks: Mapping[str, Any]) -> bool:
    """Whether this very run was stopped after OUT had appeared and before its hidden folder was gone."""
    if place.out.exists():
        return False
    try:
        written = json.loads((place.final / REPORT).read_text()).get("fingerprint", {})
    except (OSError, ValueError, AttributeError):  # none, or none of ours
        return False
    return isinstance(written, dict) and difference(written, json.loads(json.dumps(marks))) is None


@contextmanager
def hold(plan: Plan, output: str | Path, overwrite: bool) -> Iterator[OutputFolder]:
    """The hidden folder beside OUT, for this run alone."""
    place = OutputFolder(output, inputs_of(plan), overwrite=True)
    if not place.part.exists():
        OutputFolder(output, inputs_of(plan), overwrite)  # refuses before anything is made
    with locked(place.part):
        yield place


def inputs_of(plan: Plan) -> list[Path]:
    """Every folder and file that is read and must stay intact.

    Not the copy of the recipe that featcal leaves in its outputs: from there a run may be made again in place.
    """
    models = [model for model in (plan.merged, plan.base, *plan.experts.values()) if model is not None]
    sources = [Path(spec.data.source) for spec in plan.recipe.tasks.values()]
    checkpoints = [model.checkpoint for model in models]
    adapters = [c.adapter.folder for c in checkpoints if isinstance(c, AdaptedCheckpoint)]
    recipe = plan.recipe.file
    named = [] if recipe is None or recipe.name == RESOLVED else [recipe]
    named += [] if plan.tokenizer is None else [Path(plan.tokenizer)]
    named += images_of(row for data in plan.tasks.values() for row in (*data.samples.rows, *data.samples.held_out))
    return [c.folder for c in checkpoints] + adapters + [path for path in [*sources, *named] if path.exists()]


def merge_folder(output: str | Path) -> Path:
    """Where the merge that a recipe asks for is made: in the hidden folder, with which it goes in the end."""
    return OutputFolder(output, overwrite=True).part / "merged"


@contextmanager
def scratch(output: str | Path, wanted: bool, comm: Comm) -> Iterator[Path | None]:
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


def write_model(plan: Plan, place: OutputFolder, journal: Journal) -> None:
    """The drop-in folder: merged shards with the new tensors, every other file as it was, the resolved recipe."""
    assert plan.merged is not None
    keymap = plan.merged.keymap
    changed: dict[str, tuple[Path, str]] = {}
    for info in plan.blocks:
        for name in journal.names(info.name) if info.name in journal else ():
            key = keymap.key(name)
            assert key is not None, f"{name} has no tensor of its own on disk"
            changed[key] = (journal.file(info.name), name)
    place.copy_side_files(plan.merged.checkpoint.folder)
    assemble(plan.merged.checkpoint, changed, place.out)
    with atomic_write(place.out / RESOLVED) as file:
        file.write(recipe_to_yaml(plan.recipe).encode())


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
    status = Path("/proc/self/status")
    if status.exists():  # Linux: a child's `ru_maxrss` starts at what its parent had when it was started
        words = next(line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(words[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
