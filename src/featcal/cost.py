"""What a calibration will take, from shapes and rows: memory, disk, and time at a measured rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .blocks import batch_size
from .moments import CHUNK, cheaper_form
from .names import KeyMap
from .skeleton import BIG
from .survey import Batches, Survey
from .targets import BlockInfo, Group, unit_modules

GPU_CONTEXT = 600 * 2**20
"""Bytes that a CUDA context takes before anything is in it."""
BANDWIDTH, READING = 5e9, 1e9
"""Bytes per second: sums in memory; weights from files, converted on the way."""
CALL = 4e-3
"""Seconds of a model's forward besides its arithmetic."""


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


@dataclass
class _Group:
    """One input group of a block, with its rows per task."""

    group: Group
    rows: Mapping[str, int]
    """Real rows that enter the moments."""
    total: int
    """Rows of all tasks with padding and held-out ones."""

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

    def operations(self) -> float:
        """Of moments and solve, counted as float32 operations (float64 ones twice)."""
        width, outputs, done = self.width, self.outputs, 0.0
        pieces = -(-width // max(256, -(-width // 8)))
        for task, rows in self.rows.items():
            done += 2 * rows * width**2 * (pieces + 1) / (2 * pieces)
            if self.forms[task] == "inputs":
                done += 2 * rows * width**2 + 4 * outputs * width**2
            else:
                done += 4 * rows * outputs * width
        return done + 2 * (width**3 / 3 + 2 * outputs * width**2) + 4 * outputs * width**2

    def traffic(self) -> float:
        """Bytes that move while float64 sums are added to, cleared, folded and solved."""
        own = self.moments
        flushes = sum(-(-rows // self.chunk) for rows in self.rows.values())
        return 2.5 * own * flushes + (own + 3 * self.sums) * len(self.rows) + 6 * self.sums


def estimate(
    keymap: KeyMap,
    experts: int,
    seen: Survey,
    learn: Batches,
    held_out: Batches,
    device: torch.device,
    schedule: str,
    *,
    side_files: int = 0,
) -> Cost:
    """The cost of calibrating the merged model behind `keymap`.

    Args:
        seen: the survey of that model.
        learn, held_out: batches by task.
        schedule: `block` or `group`.
        side_files: bytes of the files that are copied along.
    """
    size = 4 if device.type == "cpu" else 2
    every = {task: [*learn[task], *held_out[task]] for task in learn}
    state = sum(seen.state_bytes(batch, size) for own in every.values() for batch in own)
    apart = sum(seen.state_bytes(batch, size) for own in held_out.values() for batch in own)
    stored = 2 * state
    peak, candidate, seconds = 0, 0, 0.0
    rate = matmul_rate(device)
    for info in seen.blocks:
        entries = _entries(keymap, info)
        groups = [_Group(u, *_rows(u, learn, every)) for u in info.units if isinstance(u, Group)]
        anchors = 4 * sum(g.outputs * g.width for g in groups)
        held = groups if schedule == "block" else groups[:1]
        block = size * entries
        sums = sum(g.sums + g.moments for g in held)
        largest = max((g.adding + g.pending * (len(held) > 1) for g in groups), default=0)
        waiting = max(sum(g.pending for g in held), largest) + largest
        learning = block + max(waiting, max((g.folding for g in groups), default=0))
        solving = max((g.solving for g in groups), default=0)
        candidate = max(candidate, anchors + sum(g.sums + g.moments + g.pending for g in held))
        peak = max(peak, block + anchors + sums + max(learning, solving))
        seconds += _seconds(info, entries, groups, learn, every, schedule, rate)
    read = sum(keymap.checkpoint.nbytes(key) for name in _inside(keymap, seen.blocks) for key in keymap.keys(name))
    weights = sum(map(keymap.checkpoint.nbytes, keymap.checkpoint.keys()))
    new = sum(_target_bytes(keymap, info) for info in seen.blocks)
    seconds += read * (experts + 2) / READING + 2 * weights / READING
    base = psutil.Process().memory_info().rss if device.type == "cpu" else GPU_CONTEXT
    on_cpu = stored + 3 * apart if device.type == "cpu" else 0
    return Cost(
        memory_bytes=base + _outside(keymap, seen.blocks, size) * (1 + experts) + peak + on_cpu,
        activation_bytes=stored,
        disk_bytes=weights + new + side_files,
        seconds=seconds,
        candidate_bytes=candidate + state,
    )


def _entries(keymap: KeyMap, info: BlockInfo) -> int:
    return sum(p.numel() for name, p in keymap.parameters.items() if name.startswith(f"{info.name}."))


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


def _rows(group: Group, learn: Batches, every: Batches) -> tuple[dict[str, int], int]:
    """Real rows of the group per task, and the rows of all batches with padding."""

    def real(batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
        if group.mask and all(group.mask in batch for batch in batches):
            return sum(int((batch[group.mask] != 0).sum()) for batch in batches)
        return int(group.rows_per_sample * sum(map(batch_size, batches)))

    def padded(batch: Mapping[str, torch.Tensor]) -> int:
        if group.mask and group.mask in batch:
            return batch[group.mask].numel()
        return int(group.rows_per_sample * batch_size(batch))

    total = sum(padded(batch) for own in every.values() for batch in own)
    return {task: max(real(own), 1) for task, own in learn.items()}, total


def _seconds(
    info: BlockInfo,
    entries: int,
    groups: Sequence[_Group],
    learn: Batches,
    every: Batches,
    schedule: str,
    rate: float,
) -> float:
    """Of one block: forwards of experts and merged model, moments, solves."""
    passes = max(len(info.units), 1) if schedule == "group" else 1
    calls, rows = {True: 0, False: 0}, 0
    for task in learn:
        calls[True] += len(learn[task])
        calls[False] += len(every[task])
    share = calls[True] / max(calls[False], 1)
    linear = sum(g.total * g.outputs * g.width for g in groups)
    known = sum(g.outputs * g.width for g in groups)
    rows = max((g.total for g in groups), default=0)
    forward = 2.0 * (linear + max(entries - known, 0) * rows)
    # All rows once through the expert and once through the calibrated block; learnt rows once more for the sums. Passes
    # of single units stop halfway on average.
    times = 2 + share * (1 if passes == 1 else passes / 2 + (passes - 1) / 2)
    overhead = CALL * (2 * calls[False] + calls[True] * (1 if passes == 1 else 2 * passes))
    work = forward * times + sum(g.operations() for g in groups)
    return work / rate + sum(g.traffic() for g in groups) / BANDWIDTH + overhead


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
