"""What the adapters learn from: final features of the merged model and of each expert on the same samples.

Collected on the engine's networks and streams, one block resident at a time, and read off the model's end by
`drift.outputs.TailReader`: CLIP's projected image embedding, what a classifier's or a language model's head reads, the
last hidden state of an encoder. Padding is left out. Shape suffixes: B samples, R rows (samples, or their real tokens),
D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import State, batch_size
from ..drift.outputs import Scores, TailReader, passes, pick
from ..drift.rows import Readout, hidden, keep_mask, readouts
from ..errors import InputError
from ..evaluate.scorers import output_layer
from ..network import Network
from ..stream import Stream
from ..targets import keep_rows

OWN_HEAD = "input of the head"
"""How `TailReader` calls what the model's own head reads."""


@dataclass
class Features:
    """Final features of one model on one task's samples, (R, D) float32 on the CPU, sample after sample."""

    parts: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Rows of each sample."""
    kind: str = ""
    """What the feature is, in words."""
    pooled: dict[str, list[Tensor]] = field(default_factory=dict)
    """By block, if asked for: per batch, each sample's mean over its real tokens, (B, D)."""

    @property
    def values_RD(self) -> Tensor:
        return torch.cat(self.parts)


def final_rows(
    network: Network,
    data: Mapping[str, Sequence[Any]],
    scores: Mapping[str, Scores],
    *,
    pooled: bool = False,
) -> dict[str, Features]:
    """Features of an open network by task; `pooled`: of every block's output, too."""
    streams = {task: Stream(network, batches, task) for task, batches in data.items()}
    found = {task: Features() for task in data}
    marks = {task: readouts(network.model, network.order, batches[0]) for task, batches in data.items()}
    for block in network.order:
        with network.block(block):
            for task, stream in streams.items():
                for index, batch in enumerate(stream.batches):
                    output = stream.forward(block, index, keep=True)
                    if pooled:
                        mean = token_mean(hidden(output), batch, marks[task][block])
                        found[task].pooled.setdefault(block, []).append(mean.float())
    for task, stream in streams.items():
        reader = TailReader(network, scores.get(task))
        for batch, state in zip(stream.batches, stream.states, strict=True):
            _read_end(found[task], reader, batch, state, marks[task][network.order[-1]])
        if found[task].kind == OWN_HEAD:
            _check_place(network.model, reader)
        if not found[task].values_RD.isfinite().all():
            raise InputError(f"task '{task}': the features of {network.label} are not finite")
    return found


def _read_end(rows: Features, reader: TailReader, batch: Any, state: State, readout: Readout) -> None:
    size = batch_size(batch)
    for part in passes(reader.network, state, size):
        own = pick(batch, part, size)
        tail = reader(own, pick(state, part, size), readout)
        values, counts = select(tail.feature, own, readout)
        rows.kind = tail.kind
        rows.parts.append(values.float().cpu())
        rows.counts += counts


def select(feature: Tensor, batch: Any, readout: Readout) -> tuple[Tensor, list[int]]:
    """The rows of a feature (B, D) or (B, tokens, D) that count, and how many of each sample."""
    keep = keep_mask(feature, batch, readout)
    if feature.dim() != 3:
        return feature.reshape(len(feature), -1), [1] * len(feature)
    if keep is None:
        return feature.flatten(0, 1), [feature.shape[1]] * len(feature)
    return feature[keep.to(feature.device)], keep.sum(1).tolist()


def token_mean(x_BTD: Tensor, batch: Any, readout: Readout) -> Tensor:
    """(B, D): each sample's mean over its real tokens."""
    keep = keep_rows(batch, readout.mask)
    if x_BTD.dim() != 3:
        return x_BTD
    if keep is None or keep.shape != x_BTD.shape[:2]:
        return x_BTD.mean(1)
    weight_BT1 = keep.to(x_BTD)[..., None]
    return (x_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp_min(1)


def _check_place(model: nn.Module, reader: TailReader) -> None:
    """The feature must be what the layer reads at which `featcal evaluate` puts the adapter."""
    last = reader._last
    if last is not None and last[0] is not output_layer(model):
        raise InputError(
            f"{type(model).__name__} has a head of more than one layer; adapters on its input are not supported, "
            "give the task a fixed head"
        )


@dataclass
class Pairs:
    """The merged model's and the expert's features of one task, row by row."""

    merged_RD: Tensor
    expert_RD: Tensor
    counts: list[int]
    kind: str

    def __post_init__(self) -> None:
        self._starts = [0]
        for count in self.counts:
            self._starts.append(self._starts[-1] + count)

    @property
    def samples(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        return self.merged_RD.shape[1]

    def rows(self, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """All rows of some samples, on the device: the merged model's and the expert's."""
        places = torch.cat([torch.arange(self._starts[s], self._starts[s + 1]) for s in samples])
        return self.merged_RD[places].to(device), self.expert_RD[places].to(device)


def pair(task: str, merged: Features, expert: Features) -> Pairs:
    """Raises InputError when the two do not fit."""
    a, b = merged.values_RD, expert.values_RD
    if a.shape != b.shape or merged.counts != expert.counts:
        raise InputError(f"task '{task}': the expert has features {tuple(b.shape)}, the merged model {tuple(a.shape)}")
    return Pairs(a, b, merged.counts, merged.kind)
