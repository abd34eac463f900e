"""What a calibration will take, from shapes and rows: memory, disk, and time at a measured rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from .blocks import batch_size
from .drift.outputs import LOGITS
from .drift.rows import CHUNK as COMPARED
from .moments import CHUNK, cheaper_form
from .names import KeyMap
from .settings import Calibration
from .skeleton import BIG
from .survey import Batches, Survey
from .targets import BlockInfo, Group, unit_modules
from .tune import FEWEST, ROUNDS, SHARE

GPU_CONTEXT = 600 * 2**20
"""Bytes that a CUDA context takes before anything is in it."""
BANDWIDTH, READING = 5e9, 1e9
"""Bytes per second: sums in memory; weights from files, converted on the way."""
CALL = 4e-3
"""Seconds of a model's forward besides its arithmetic."""
OVERHEAD = 1.25
"""Measured over counted seconds, in the middle of several sizes: page faults, copies and hooks are not counted."""
LATER = 30 * 2**20
"""Bytes of what is imported and made after the plan."""


@dataclass
class Cost:
    """Estimates for one process that does all the work."""

    memory_bytes: int
    """Peak of the memory that holds blocks and sums (on a CPU: activations and the program itself too)."""
    activation_bytes: int
    """Of that, or on disk with --max-memory: what is kept of every batch between blocks."""
    disk_bytes: int
    """The output and finished blocks, while it is made."""
    seconds: float
    candidate_bytes: int = 0
    """Memory of one more candidate that walks along while settings are tuned."""

    def side_by_side(self, device: torch.device) -> int:
        """How many candidates fit into the memory that is free now; at least one."""
        taken = psutil.Process().memory_info().rss if device.type == "cpu" else 0
        room = 0.8 * available_memory(device) - (self.memory_bytes - taken)
        return 1 + max(int(room // max(self.candidate_bytes, 1)), 0)


@dataclass
class _Group:
    """One input group of a block, with its rows."""

    group: Group
    rows: Mapping[str, int]
    """Per task, real rows that enter the moments."""
    learnt: int
    """The same over all tasks, with padding."""
    apart: int
    """Held-out rows of all tasks, with padding."""

    def __post_init__(self) -> None:
        self.width, self.outputs = self.group.width, sum(self.group.outputs)
        outputs = list(self.group.outputs)
        self.forms = {task: cheaper_form(self.width, outputs, rows) for task, rows in self.rows.items()}
        self.chunk = max(CHUNK // self.width, 1)

    @property
    def sums(self) -> int:
        """Bytes of the sums over tasks: G and R."""
        return 8 * (self.width**2 + self.outputs * self.width)

    @property
    def moments(self) -> int:
        """Bytes of one task's sums: G with C, R or (over tasks that differ) both."""
        cross = {"inputs": self.width**2, "residuals": self.outputs * self.width}
        return 8 * (self.width**2 + sum(cross[form] for form in set(self.forms.values())))

    @property
    def pending(self) -> int:
        """Bytes of the rows that wait to be summed up."""
        return 4 * min(max(self.rows.values()), self.chunk) * (2 * self.width + self.outputs)

    @property
    def adding(self) -> int:
        """Passing bytes while waiting rows are summed up."""
        largest = max(self.group.outputs) * self.width
        return self.pending + (8 * largest if "residuals" in self.forms.values() else 4 * self.width**2)

    @property
    def folding(self) -> int:
        """Passing bytes while a task joins the others."""
        largest = max(self.group.outputs) * self.width
        return 8 * self.width**2 + 40 * largest if "inputs" in self.forms.values() else 0

    @property
    def solving(self) -> int:
        """Passing bytes of the solve: the system and its factor, and the weights in question."""
        return 28 * self.width**2 + 48 * max(self.group.outputs) * self.width

    def operations(self, share: float) -> float:
        """Of moments of a share of the rows, and solve, counted as float32 operations (float64 ones twice)."""
        width, outputs, done = self.width, self.outputs, 0.0
        pieces = -(-width // max(256, -(-width // 8)))
        for task, rows in self.rows.items():
            done += 2 * share * rows * width**2 * (pieces + 1) / (2 * pieces)
            if self.forms[task] == "inputs":
                done += 2 * share * rows * width**2 + 4 * outputs * width**2
            else:
                done += 4 * share * rows * outputs * width
        return done + 2 * (width**3 / 3 + 2 * outputs * width**2) + 4 * outputs * width**2

    def traffic(self, share: float) -> float:
        """Bytes that move while float64 sums are added to, cleared, folded and solved."""
        own = self.moments
        flushes = sum(-(-int(share * rows) // self.chunk) for rows in self.rows.values())
        return 2.5 * own * flushes + (own + 3 * self.sums) * len(self.rows) + 6 * self.sums


@dataclass
class _Block:
    """One block with its groups."""

    entries: int
    units: int
    groups: list[_Group]
    learnt: int
    """Batches that are learnt from."""
    apart: int
    """Held-out batches."""

    def forward(self, share: float, apart: float) -> float:
        """Operations of the block on a share of the rows that are learnt from and a multiple of the held-out ones."""
        known = sum(g.outputs * g.width for g in self.groups)
        rows = [share * g.learnt + apart * g.apart for g in self.groups]
        linear = sum(r * g.outputs * g.width for r, g in zip(rows, self.groups, strict=True))
        return 2.0 * (linear + max(self.entries - known, 0) * max(rows, default=0.0))

    def seconds(self, rate: float, share: float, students: int, watching: float, passes: int) -> float:
        """A walk past the block: the experts once, each student's sums, solve and outputs.

        Args:
            share: of the rows that are learnt from.
            watching: passes of the held-out rows besides.
            passes: over the block for the sums; of several, each stops halfway on average.
        """
        looks = 1.0 if passes == 1 else passes / 2
        work = self.forward(share, 1) + self.forward(share * (looks - 1) if passes > 1 else 0, 0)
        work += students * (self.forward(share * looks, 0) + self.forward(share, 1)) + self.forward(0, watching)
        work += students * sum(g.operations(share) for g in self.groups)
        calls = share * self.learnt * passes * (1 + students) + (students + 1) * self.apart
        calls += students * share * self.learnt + watching * self.apart
        traffic = students * sum(g.traffic(share) for g in self.groups)
        return work / rate + traffic / BANDWIDTH + CALL * calls


@dataclass
class _Head:
    """The output layer, which measuring and tuning run on held-out rows; zeros without one."""

    classes: int
    width: int
    rows: int
    """Held-out rows, with padding."""
    largest: int
    """Of one batch."""

    @property
    def passing(self) -> int:
        """Bytes while the scores of a few samples are compared."""
        scores = min(self.largest * self.classes, LOGITS)
        return 4 * (4 * scores + 10 * min(scores, COMPARED))

    def seconds(self, rate: float, models: float) -> float:
        scores = self.rows * self.classes * models
        parts = max(self.rows * self.classes / LOGITS, 1.0)
        return (
            2 * scores * self.width / rate + 80 * scores / BANDWIDTH + 2 * parts * self.classes * self.width / READING
        )


def estimate(
    keymap: KeyMap,
    experts: int,
    seen: Survey,
    learn: Batches,
    held_out: Batches,
    device: torch.device,
    dtype: torch.dtype,
    settings: Calibration,
    *,
    side_files: int = 0,
) -> Cost:
    """The cost of calibrating the merged model behind `keymap`.

    Args:
        seen: the survey of that model.
        learn, held_out: batches by task.
        dtype: what all models compute in.
        side_files: bytes of the files that are copied along.
    """
    size = dtype.itemsize
    state, apart = (
        sum(seen.state_bytes(batch, size) for own in part.values() for batch in own) for part in (learn, held_out)
    )
    rate = matmul_rate(device)
    head = _head(keymap, held_out)
    blocks = [_block(keymap, info, learn, held_out) for info in seen.blocks]
    passes = [max(block.units, 1) if settings.schedule == "group" else 1 for block in blocks]
    seconds = sum(b.seconds(rate, 1.0, 1, 3.0, n) for b, n in zip(blocks, passes, strict=True)) + head.seconds(rate, 5)
    peak, candidate = _peak(blocks, settings.schedule, size, head)
    candidate += state + apart
    read = sum(keymap.checkpoint.nbytes(key) for name in _inside(keymap, seen.blocks) for key in keymap.keys(name))
    walks = 1
    if settings.tune == "auto":
        rounds = (ROUNDS[0] + 1, *ROUNDS[1:])  # the merged model walks along in the first
        share = min(1.0, max(1 / SHARE, FEWEST / settings.samples))
        walks += len(rounds)
        for students in rounds:
            seconds += sum(b.seconds(rate, share, students, 1.0, n) for b, n in zip(blocks, passes, strict=True))
            seconds += head.seconds(rate, students + 2)
    weights = sum(map(keymap.checkpoint.nbytes, keymap.checkpoint.keys()))
    new = sum(_target_bytes(keymap, info) for info in seen.blocks)
    seconds += (walks * read * (experts + 2) + 2 * weights) / READING
    base = psutil.Process().memory_info().rss + LATER if device.type == "cpu" else GPU_CONTEXT
    kept = 2 * state + 5 * apart if device.type == "cpu" else 0
    return Cost(
        memory_bytes=base + _outside(keymap, seen.blocks, size) * (1 + experts) + peak + kept,
        activation_bytes=2 * (state + apart),
        disk_bytes=weights + new + side_files,
        seconds=OVERHEAD * seconds,
        candidate_bytes=candidate,
    )


def _peak(blocks: Sequence[_Block], schedule: str, size: int, head: _Head) -> tuple[int, int]:
    """Bytes that come and go with the blocks, at most; and of those, what one student takes."""
    peak, candidate, pool = 0, 0, 0
    for one in blocks:
        groups = one.groups
        held = groups if schedule == "block" else groups[:1]
        weights = size * one.entries
        anchors = 4 * sum(g.outputs * g.width for g in held)
        sums = sum(g.sums + g.moments for g in held)
        waiting = sum(g.pending for g in held) + max((g.adding for g in groups), default=0)
        learning = weights + max([waiting, *(g.folding for g in groups)])
        solving = max((g.solving for g in groups), default=0)
        pool = max(pool, sums)
        candidate = max(candidate, anchors + sums + waiting)
        peak = max(peak, weights + anchors + sums + max(learning, solving))
    return max(peak, pool + head.passing), candidate


def _block(keymap: KeyMap, info: BlockInfo, learn: Batches, held_out: Batches) -> _Block:
    entries = sum(p.numel() for name, p in keymap.parameters.items() if name.startswith(f"{info.name}."))
    groups = [_group(unit, learn, held_out) for unit in info.units if isinstance(unit, Group)]
    return _Block(entries, len(info.units), groups, sum(map(len, learn.values())), sum(map(len, held_out.values())))


def _head(keymap: KeyMap, held_out: Batches) -> _Head:
    model = keymap.model
    weight = getattr(model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return _Head(0, 0, 0, 0)
    keys = ("decoder_input_ids", "input_ids")
    rows = [next((b[k].numel() for k in keys if k in b), 0) for own in held_out.values() for b in own]
    return _Head(weight.shape[0], weight.shape[1], sum(rows), max(rows, default=0))


def _inside(keymap: KeyMap, blocks: Sequence[BlockInfo]) -> list[str]:
    prefixes = tuple(f"{info.name}." for info in blocks)
    return [name for name in keymap.parameters if name.startswith(prefixes)]


def _outside(keymap: KeyMap, blocks: Sequence[BlockInfo], size: int) -> int:
    """Bytes of a network's resident tensors outside the blocks; big tables stay in their file."""
    inside = set(_inside(keymap, blocks))
    names = {keymap.keys(name): p for name, p in keymap.parameters.items() if name not in inside}
    return sum(size * p.numel() for p in names.values() if p.dim() != 2 or p.numel() < BIG)


def _target_bytes(keymap: KeyMap, info: BlockInfo) -> int:
    modules = [module for unit in info.units for module in unit_modules(unit)]
    names = [f"{info.name}.{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
    return sum(keymap.checkpoint.nbytes(key) for name in names for key in keymap.keys(name))


def _group(group: Group, learn: Batches, held_out: Batches) -> _Group:
    def real(batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
        if group.mask and all(group.mask in batch for batch in batches):
            return sum(int((batch[group.mask] != 0).sum()) for batch in batches)
        return int(group.rows_per_sample * sum(map(batch_size, batches)))

    def padded(part: Batches) -> int:
        batches = [batch for own in part.values() for batch in own]
        if group.mask and all(group.mask in batch for batch in batches):
            return sum(batch[group.mask].numel() for batch in batches)
        return int(group.rows_per_sample * sum(map(batch_size, batches)))

    rows = {task: max(real(own), 1) for task, own in learn.items()}
    return _Group(group, rows, padded(learn), padded(held_out))


def matmul_rate(device: torch.device, size: int = 1024, seconds: float = 0.3) -> float:
    """Measured float32 operations per second of matrix products, over a third of a second."""
    a = torch.randn(size, size, device=device)
    float((a @ a)[0, 0])
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        float((a @ a)[0, 0])
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start)


def available_memory(device: torch.device) -> int:
    """Free bytes where the blocks live."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def folder_bytes(folder: Path, names: Sequence[str]) -> int:
    """Bytes of some files of a folder."""
    return sum((folder / name).stat().st_size for name in names)
