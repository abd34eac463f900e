"""Drift of any number of models against each task's expert, measured block by block.

All models walk through the blocks in lock-step; one block of one model is resident at a time, so memory depends neither
on their depth nor on their number. Per batch, only the streams' states are kept, and the experts' previous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..blocks import State, find_blocks, stack_of
from ..errors import InputError, nearest
from ..log import progress_bar
from ..network import Network, common_dtype, pick_device
from ..proofs import prove
from ..stream import Stream
from ..targets import probe
from .operator import block_operator
from .outputs import Scores, TailReader, feature_drift, output_drift, passes, pick, pooled_feature
from .results import Tally, TaskDrift
from .rows import Readout, Rows, Sides, block_drift, floored, hidden, keep_mask, readouts
from .vectors import task_vector_cosines


@dataclass
class Ledger:
    """One task's measurements as they come in; shared by `walk` and the calibration's `Watcher`."""

    result: TaskDrift
    readouts: Mapping[str, Readout]
    device: torch.device
    bound: bool = False
    counted: bool = field(default=False, init=False)

    def start(self, block: str, batches: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Count samples and tokens, on the first block's outputs of the expert."""
        if self.counted:
            return
        self.counted = True
        readout = self.readouts[block]
        self.result.readout = readout.label
        for batch, output in zip(batches, outputs, strict=True):
            x = hidden(output)
            self.result.samples += len(x)
            self.result.tokens += int(Rows(x, keep_mask(x, batch, readout)).counts_B.sum())

    def block(
        self,
        label: str,
        block: str,
        batch: Any,
        expert: tuple[State, State],
        model: tuple[State, State],
        on_expert: Any,
    ) -> None:
        """One block on one batch. `expert` and `model`: the states before and after it; `on_expert`: f^M(h^E)."""
        stack = stack_of(block)
        after, own = hidden(expert[1][stack]), hidden(model[1][stack])
        before = [hidden(side[0][stack]) if stack in side[0] else None for side in (expert, model)]
        sides = Sides(after, own, None if on_expert is None else hidden(on_expert), before[0], before[1])
        rows = Rows(after, keep_mask(after, batch, self.readouts[block]))
        self.result.model(label).block(block).add(block_drift(sides, rows, self.device))

    def ends(
        self, batch: Any, expert: tuple[TailReader, State], models: Mapping[str, tuple[TailReader, State]]
    ) -> None:
        """Final features and scores of the expert and all models on one batch, with every block done."""
        readout = self.readouts[list(self.readouts)[-1]]
        size = len(hidden(list(expert[1].values())[-1]))
        for part in passes(expert[0].network, expert[1], size):
            own = pick(batch, part, size)
            taught = expert[0](own, pick(expert[1], part, size), readout)
            self.result.feature = taught.kind
            self.result.expert_features.append(pooled_feature(taught, own, readout))
            for label, (reader, state) in models.items():
                tail, found = reader(own, pick(state, part, size), readout), self.result.model(label)
                found.features.append(pooled_feature(tail, own, readout))
                found.extend(feature_drift(taught, tail, own, readout, self.device))
                found.extend(output_drift(taught, tail, own, readout, self.device, self.bound))


def measuring_device(device: torch.device) -> torch.device:
    """Where features are compared: on the GPU when the models run there."""
    return device if device.type == "cuda" else torch.device("cpu")


def walk(
    models: Mapping[str, Network],
    experts: Mapping[str, Network],
    data: Mapping[str, Sequence[Any]],
    blocks: Sequence[str],
    *,
    base: Network | None = None,
    scores: Mapping[str, Scores] | None = None,
    split: bool = True,
    check: int = 0,
    progress: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> list[TaskDrift]:
    """Measure drift of `models` (label → network) against the `experts` (task → network).

    Args:
        data: task → batches that no calibration has read.
        blocks: in order of execution.
        base: for the task-vector cosine; without it that is left out.
        scores: task → function (model, batch) → (rows, classes), for models whose scores live outside them.
        split: measure local mismatch and propagation too (one more forward of each model).
        check: batches per task on which A·e is compared to the propagation, by quadrature.

    A network may appear under several labels and tasks; every one is opened here.
    """
    with ExitStack() as stack:
        for network in {id(n): n for n in [*models.values(), *experts.values(), *([base] if base else [])]}.values():
            stack.enter_context(network.open())
        taught = {task: Stream(experts[task], data[task], task) for task in experts}
        walkers = {m: {task: Stream(network, data[task], task) for task in experts} for m, network in models.items()}
        ledgers = {
            task: Ledger(
                TaskDrift(task),
                readouts(network.model, blocks, data[task][0]),
                measuring_device(network.device),
                bound=True,
            )
            for task, network in experts.items()
        }
        for block in progress(list(blocks)):
            before = {task: list(stream.states) for task, stream in taught.items()}
            for task, stream in taught.items():
                with experts[task].block(block):
                    outputs = [stream.forward(block, index, keep=True) for index in range(len(data[task]))]
                ledgers[task].start(block, data[task], outputs)
            for label, network in models.items():
                with network.block(block):
                    for task in experts:
                        for index in range(len(data[task])):
                            own = walkers[label][task]
                            _step(ledgers[task], label, block, own, taught[task], before[task], index, split, check)
        for task in experts:
            _ends(ledgers[task], experts[task], taught[task], {m: walkers[m][task] for m in models}, scores)
        results = {task: ledger.result for task, ledger in ledgers.items()}
        if base is not None:
            for task, found in task_vector_cosines(base, experts, models, blocks).items():
                for label, value in found.items():
                    results[task].model(label).task_vector_cosine = value
    return list(results.values())


def _step(
    ledger: Ledger,
    label: str,
    block: str,
    own: Stream,
    taught: Stream,
    before: Sequence[State],
    index: int,
    split: bool,
    check: int,
) -> None:
    """One model's (resident) block on one batch: its own stream moves on, and the drift is noted."""
    batch, start, end = own.batches[index], before[index], own.states[index]
    output = own.forward(block, index, keep=True)
    on_expert = None
    if split:
        on_expert = own.network.forward(batch, block, start) if start else output
    states = (start, taught.states[index])
    ledger.block(label, block, batch, states, (end, own.states[index]), on_expert)
    if index < check and start and split:
        propagated = hidden(output) - hidden(on_expert)
        reached = block_operator(own.network, block, batch, start, end)
        error = (reached - propagated).double().norm() / floored(propagated.double().norm())
        ledger.result.model(label).checks.setdefault(block, Tally()).add({"error": error.reshape(1)})


def _ends(
    ledger: Ledger,
    expert: Network,
    taught: Stream,
    walkers: Mapping[str, Stream],
    scores: Mapping[str, Scores] | None,
) -> None:
    task = ledger.result.name
    function = (scores or {}).get(task)
    reader = TailReader(expert, function)
    readers = {label: TailReader(stream.network, function) for label, stream in walkers.items()}
    for index, batch in enumerate(taught.batches):
        states = {label: (readers[label], stream.states[index]) for label, stream in walkers.items()}
        ledger.ends(batch, (reader, taught.states[index]), states)


def measure(
    models: Mapping[str, nn.Module],
    *,
    experts: Mapping[str, nn.Module],
    data: Mapping[str, Iterable[Any]],
    base: nn.Module | None = None,
    scores: Mapping[str, Scores] | None = None,
    blocks: Sequence[str] | None = None,
    device: str | torch.device = "auto",
    split: bool = True,
    check: int = 0,
    progress: bool = False,
) -> list[TaskDrift]:
    """`walk` for models in memory: label → module, e.g. {"merged": merged, "calibrated": result.model}.

    Args:
        experts: task → module, of the models' class.
        data: task → batches that the calibration has not read, as in `featcal.calibrate`.
        blocks: globs of block names, for models that are not transformers'.

    Raises:
        InputError: no model, tasks that do not match, or a batch that a model refuses.
    """
    if not models or not experts:
        raise InputError("drift needs at least one model and one expert")
    for task in [*experts, *data]:
        if task not in experts or task not in data:
            missing, other = ("data", data) if task not in data else ("expert", experts)
            raise InputError(f"task '{task}' has no {missing}{nearest(task, other)}")
    batches = {task: list(data[task]) for task in experts}
    for task, own in batches.items():
        if not own:
            raise InputError(f"task '{task}': its data holds no sample")
    where, first = pick_device(device), next(iter(models.values()))
    sample = next(iter(batches.values()))[0]
    with Network("the model", first, [], where).open():
        order = [info.name for info in probe(first, find_blocks(first, blocks), sample, where)]
        stem = prove(first, order, sample, where)
    dtype = common_dtype([*models.values(), *experts.values(), *([] if base is None else [base])], where)
    networks: dict[int, Network] = {}

    def network(label: str, model: nn.Module) -> Network:
        return networks.setdefault(id(model), Network(label, model, order, where, stem, dtype))

    return walk(
        {label: network(f"model '{label}'", model) for label, model in models.items()},
        {task: network(f"expert '{task}'", model) for task, model in experts.items()},
        batches,
        order,
        base=None if base is None else network("the base", base),
        scores=scores,
        split=split,
        check=check,
        progress=progress_bar("measuring", enabled=progress),
    )
