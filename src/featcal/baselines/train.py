"""Training of the adapters on the calibration samples: never on test data, and no step is chosen by a score.

Published training reads the test inputs; a fair comparison gives every post-merge method the same n samples per task.
The number of steps is then fixed beforehand: 1000 batches of 16, as FusionBench trains Surgery, cycling over the n
samples in a new seeded order each time around. The same number is used for all three.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import batch_size, cut, find_blocks
from ..drift.outputs import Scores, TailReader
from ..drift.rows import Readout, hidden, readouts
from ..errors import InputError, RunError, nearest
from ..evaluate.heads import Head, OwnHead
from ..log import progress_bar
from ..network import Network, common_dtype, pick_device, to_device
from ..proofs import prove
from ..targets import probe
from .features import Features, Pairs, final_rows, pair, select, token_mean
from .modules import METHODS, Correction, DeepSurgery

ROUND = 100
"""Steps between two signs of progress."""


@dataclass(frozen=True)
class Training:
    """How an adapter is trained. Published: Adam, learning rate 1e-3, β 0.9 and 0.999, no weight decay, batch 16."""

    steps: int = 1000
    batch_size: int = 16
    lr: float = 1e-3
    rank: int | None = None
    """Hidden width; left out: 16 for Surgery and SurgeryV2, 128 for ProbSurgery."""
    seed: int = 42


@dataclass
class Trained:
    """Adapters by task, and what is known of their training."""

    adapters: dict[str, Correction]
    before: dict[str, float]
    """Mean |z − z^E| of the merged model's features over the calibration samples, by task."""
    after: dict[str, float]
    """The same with the adapter, as at inference."""
    kind: str
    """What the feature is, in words."""
    seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """Extra parameters at inference, of all tasks together."""
        return sum(adapter.used for adapter in self.adapters.values())


def train_surgery(
    kind: str,
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    data: Mapping[str, Iterable[Any]],
    *,
    heads: Mapping[str, Head] | None = None,
    blocks: Sequence[str] | None = None,
    training: Training | None = None,
    device: str | torch.device = "auto",
    seed: int = 42,
    progress: bool = True,
) -> dict[str, Correction]:
    """Train one adapter per task on models in memory.

    Args:
        kind: `surgery`, `probsurgery` or `surgery_v2`.
        experts: task → expert, of the merged model's class.
        data: task → batches of calibration samples, without labels; all of them are used.
        heads: task → head outside the model, whose features are corrected (CLIP's projected embedding, a pooled
            encoder). Without one it is what the model's own output layer reads.
        blocks: globs of block names, for models that are not transformers'.
        training: sizes and rates; its seed is replaced by `seed`.

    Raises:
        InputError: an unknown kind, a task without data, models that do not fit together, features that are not finite.
    """
    options = replace(training or Training(), seed=seed)
    return train_in_memory(
        kind, merged, experts, data, heads=heads, blocks=blocks, training=options, device=device, progress=progress
    ).adapters


def train_in_memory(
    kind: str,
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    data: Mapping[str, Iterable[Any]],
    *,
    heads: Mapping[str, Head] | None = None,
    blocks: Sequence[str] | None = None,
    training: Training | None = None,
    device: str | torch.device = "auto",
    progress: bool = True,
) -> Trained:
    """`train_surgery`, with what is known of the training."""
    for task in [*experts, *data]:
        if task not in experts or task not in data:
            missing, other = ("data", data) if task not in data else ("expert", experts)
            raise InputError(f"task '{task}' has no {missing}{nearest(task, other)}")
    batches = {task: list(data[task]) for task in experts}
    empty = [task for task, own in batches.items() if not own]
    if empty or not experts:
        raise InputError(f"task '{empty[0]}': its data holds no sample" if empty else "experts: give at least one")
    where, sample = pick_device(device), next(iter(batches.values()))[0]
    with Network("the merged model", merged, [], where).open():
        order = [info.name for info in probe(merged, find_blocks(merged, blocks), sample, where)]
        stem = prove(merged, order, sample, where)
    scores = {task: head for task, head in (heads or {}).items() if not isinstance(head, OwnHead)}
    dtype = common_dtype([merged, *experts.values()], where)
    network = Network("the merged model", merged, order, where, stem, dtype)
    taught = {task: Network(f"expert '{task}'", expert, order, where, stem, dtype) for task, expert in experts.items()}
    return train(kind, network, taught, batches, scores, training or Training(), progress=progress)


def train(
    kind: str,
    merged: Network,
    experts: Mapping[str, Network],
    data: Mapping[str, Sequence[Any]],
    scores: Mapping[str, Scores],
    training: Training,
    *,
    progress: bool = True,
) -> Trained:
    """One adapter per task, from closed networks in memory or on disk (for `surgery_v2` the merged one in memory).

    Raises:
        InputError: an unknown kind.
    """
    if kind not in METHODS:
        raise InputError(f"unknown method '{kind}'{nearest(kind, METHODS)}; known: {', '.join(METHODS)}")
    started = time.perf_counter()
    fit = fit_deep if kind == "surgery_v2" else fit_shallow
    trained = fit(kind, merged, experts, data, scores, training, progress)
    trained.seconds = time.perf_counter() - started
    return trained


def fit_shallow(
    kind: str,
    merged: Network,
    experts: Mapping[str, Network],
    data: Mapping[str, Sequence[Any]],
    scores: Mapping[str, Scores],
    training: Training,
    progress: bool,
) -> Trained:
    """Adapters on final features, which are collected once."""
    with merged.open():
        own = final_rows(merged, data, scores)
    trained = Trained({}, {}, {}, next(iter(own.values())).kind)
    for task, expert in experts.items():
        with expert.open():
            pairs = pair(task, own.pop(task), final_rows(expert, {task: data[task]}, scores)[task])
        adapter = METHODS[kind](pairs.width, training.rank, _seed(training.seed, task))
        trained.adapters[task] = adapter
        trained.before[task] = float((pairs.merged_RD - pairs.expert_RD).abs().mean())
        _fit(adapter, pairs, task, training, merged.device, progress)
        with torch.no_grad():
            trained.after[task] = float((adapter(pairs.merged_RD) - pairs.expert_RD).abs().mean())
    return trained


def _fit(
    adapter: Correction, pairs: Pairs, task: str, training: Training, device: torch.device, progress: bool
) -> None:
    optimizer = _adam(adapter.to(device), training)
    noise = torch.Generator().manual_seed(_seed(training.seed, f"{task}/noise"))
    order = in_turn(pairs.samples, training.batch_size, _seed(training.seed, f"{task}/order"))
    with torch.enable_grad():
        for _ in _steps(f"{adapter.method} {task}", training.steps, progress):
            z_RD, expert_RD = pairs.rows(next(order), device)
            _step(adapter.loss(z_RD, expert_RD, noise), optimizer, task)
    adapter.cpu().requires_grad_(False)


def fit_deep(
    kind: str,
    merged: Network,
    experts: Mapping[str, Network],
    data: Mapping[str, Sequence[Any]],
    scores: Mapping[str, Scores],
    training: Training,
    progress: bool,
) -> Trained:
    """Adapters after every block: each step runs the whole merged model forward and backward.

    Samples are taken in the batches in which they come, cut to the training's batch size, in shuffled order.
    """
    trained = Trained({}, {}, {}, "")
    whole = Network(merged.label, merged.model, [], merged.device, dtype=merged.dtype)
    for task, expert in experts.items():
        batches = [piece for batch in data[task] for piece in pieces(batch, training.batch_size)]
        with expert.open():
            target = final_rows(expert, {task: batches}, scores, pooled=True)[task]
        with merged.open():
            start = final_rows(merged, {task: batches}, scores)[task]
        blocks = reached(whole, merged.order, batches[0], scores.get(task))
        widths = [target.pooled[name][0].shape[1] for name in blocks]
        width = target.parts[0].shape[1]
        deep = DeepSurgery(blocks, widths, width, training.rank, _seed(training.seed, task))
        lesson = _DeepLesson(deep, whole, batches, pair(task, start, target), target, scores.get(task))
        trained.kind, trained.adapters[task] = target.kind, deep
        trained.before[task] = float((lesson.pairs.merged_RD - lesson.pairs.expert_RD).abs().mean())
        order = in_turn(len(batches), 1, _seed(training.seed, f"{task}/order"))
        with whole.open(), frozen(whole.model), torch.enable_grad():
            optimizer = _adam(deep.to(whole.device), training)
            for _ in _steps(f"{kind} {task}", training.steps, progress):
                _step(lesson.loss(next(order)[0]), optimizer, task)
            trained.after[task] = lesson.distance()
        deep.cpu().requires_grad_(False)
    return trained


@dataclass
class _DeepLesson:
    """One task of SurgeryV2: the corrected model on the batches, against the expert's block outputs and features."""

    deep: DeepSurgery
    whole: Network
    batches: Sequence[Any]
    pairs: Pairs
    target: Features
    score: Scores | None

    def __post_init__(self) -> None:
        self._readouts = readouts(self.whole.model, self.deep.order, self.batches[0])
        self._last: Readout = self._readouts[self.deep.order[-1]]
        sizes = [batch_size(batch) for batch in self.batches]
        self._samples = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]

    def features(self, index: int, seen: dict[str, Tensor]) -> Tensor:
        """Corrected final features (R, D) of a batch; the blocks' corrected outputs go to `seen`."""
        batch = self.batches[index]
        with self.deep.inserted(self.whole.model, seen):
            raw = feature_of(self.whole, batch, self.score, self._last)
        return self.deep.final(select(raw, batch, self._last)[0].float())

    def loss(self, index: int) -> Tensor:
        """Σ over blocks of mean |token mean − the expert's| + mean |ẑ − z^E|, unweighted."""
        seen: dict[str, Tensor] = {}
        device = self.whole.device
        total = (self.features(index, seen) - self.pairs.rows(self._samples[index], device)[1]).abs().mean()
        for name in self.deep.order:
            mean = token_mean(hidden(seen[name]), self.batches[index], self._readouts[name])
            total = total + (mean.float() - self.target.pooled[name][index].to(device)).abs().mean()
        return total

    @torch.no_grad()
    def distance(self) -> float:
        """Mean |ẑ − z^E| over all samples."""
        total = 0.0
        for index in range(len(self.batches)):
            ours = self.features(index, {})
            total += float((ours - self.pairs.rows(self._samples[index], ours.device)[1]).abs().double().sum())
        return total / self.pairs.expert_RD.numel()


def feature_of(whole: Network, batch: Any, score: Scores | None, readout: Readout) -> Tensor:
    """The final feature by one forward of a whole (open, ungated) network, with gradients where they are enabled."""
    from_head = getattr(score, "features", None)
    if from_head is None:
        return TailReader(whole)(batch, {}, readout).feature
    found: Tensor = from_head(whole.model, to_device(batch, whole.device))
    return found


def reached(whole: Network, blocks: Sequence[str], batch: Any, score: Scores | None) -> list[str]:
    """The blocks that the final feature depends on: not those of CLIP's text tower, for one."""
    run: list[str] = []
    model = whole.model
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: run.append(name)) for name in blocks
    ]
    try:
        with whole.open():
            feature_of(whole, batch, score, readouts(model, blocks, batch)[blocks[-1]])
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in blocks if name in run]


# ------------------------------------------------------------------------------------------------------- chores


def in_turn(samples: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices without end: all samples in a seeded order, then all again in another (last one shorter)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator).tolist()
        yield from (order[start : start + size] for start in range(0, samples, size))


def pieces(batch: Any, size: int) -> list[Any]:
    """A batch cut into batches of at most `size` samples."""
    rows = batch_size(batch)
    return [cut(batch, min(start + size, rows), start) for start in range(0, rows, size)]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Meanwhile no parameter of the model collects gradients."""
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in wanted:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, wants in wanted:
            p.requires_grad_(wants)


def _adam(adapter: Correction, training: Training) -> torch.optim.Adam:
    return torch.optim.Adam(adapter.parameters(), lr=training.lr, betas=(0.9, 0.999), weight_decay=0)


def _step(loss: Tensor, optimizer: torch.optim.Adam, task: str) -> None:
    if not loss.isfinite():
        raise RunError(f"task '{task}': the adapter's loss is not finite any more; try a smaller learning rate")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _steps(label: str, steps: int, progress: bool) -> Iterator[int]:
    rounds = [range(start, min(start + ROUND, steps)) for start in range(0, steps, ROUND)]
    for part in progress_bar(label, enabled=progress)(rounds):
        yield from part


def _seed(seed: int, name: str) -> int:
    """A seed of its own for everything random: the same on every device and in any order of tasks."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
