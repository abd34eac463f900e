"""How a model runs, found from its config alone: a stand-in without memory reads two short samples of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import Gate, batch_size, find_blocks, inference, stack_of
from .errors import InputError
from .names import skeleton
from .proofs import prove
from .reader import Checkpoint
from .settings import Calibration
from .skeleton import fill_with_stand_ins
from .stream import MODEL_ERRORS
from .targets import BlockInfo, Group, choose, probe, weight_view, with_readout

ROWS, TOKENS, DECODER_TOKENS = 2, 13, 11
"""Size of the samples that are read; odd numbers, so that they are told from widths and heads in a shape."""

LARGE = 2**18
"""Entries from which a weight is not multiplied with."""

Batches = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""Task name → batches."""


@dataclass
class Survey:
    """What one pass shows."""

    blocks: list[BlockInfo]
    stem: tuple[str, ...]
    """Convolutions that need to run only once, see `proofs.skippable_stem`."""
    needed: set[str]
    """Modules outside the blocks that run before the last block does: without their tensors nothing runs."""
    states: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """By stack, the shapes of the tensors that one of its blocks returned for the short samples."""
    lengths: dict[str, int] = field(default_factory=dict)
    """By key, the tokens of the short samples."""

    def state_bytes(self, batch: Mapping[str, Tensor], itemsize: int) -> int:
        """Bytes that the outputs of all stacks take for a batch."""
        lengths = {length: batch[key].shape[1] for key, length in self.lengths.items() if key in batch}
        total = 0
        for shape in (shape for shapes in self.states.values() for shape in shapes):
            entries = batch_size(batch) if shape[0] == ROWS else shape[0]
            for size in shape[1:]:
                entries *= lengths.get(size, size)
            total += entries * itemsize
        return total


def survey(
    checkpoint: Checkpoint, kind: type[PreTrainedModel], batches: Batches, settings: Calibration, *, trust: bool = False
) -> Survey:
    """Blocks in order of execution, their units and kept modules, and what they need, without reading a weight.

    Raises:
        InputError: no blocks, blocks that do not run once, or samples that the model refuses.
    """
    model = skeleton(checkpoint, kind=kind, trust_remote_code=trust)
    fill_with_stand_ins(model)
    names = find_blocks(model)
    first = short(max(next(iter(batches.values())), key=_tokens))
    order: list[str] = []
    states: dict[str, list[tuple[int, ...]]] = {}
    try:
        with inference(model), _cheap_products(model), _watched(model, names, order, states):
            infos = probe(model, names, first)
            last = max(place for place, name in enumerate(order) if name in set(names))
            needed = set(order[:last]) - set(names)
            stem = prove(model, [info.name for info in infos], first)
            check_samples(model, [info.name for info in infos], batches)
    except MODEL_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{kind.__name__} refuses the first batch: {error}") from error
    chosen = choose(with_readout(infos, model, settings.token_weights), model, settings)
    lengths = {key: value.shape[1] for key, value in first.items() if _is_tokens(value)}
    return Survey(with_rows(chosen, batches), stem, needed, states, lengths)


def short(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two samples of a batch with a few tokens each: enough to see how a model runs, however large both are."""

    def cut(key: str, value: Tensor) -> Tensor:
        rows = value[-ROWS:] if len(value) >= ROWS else torch.cat([value] * ROWS)[:ROWS]
        most = DECODER_TOKENS if key.startswith("decoder") else TOKENS
        return rows[:, :most] if _is_tokens(value) else rows

    return {key: cut(key, value) for key, value in batch.items()}


def _is_tokens(value: Tensor) -> bool:
    return value.dim() == 2 and not value.is_floating_point()


def _tokens(batch: Mapping[str, Tensor]) -> int:
    return max((value.shape[1] for value in batch.values() if _is_tokens(value)), default=0)


def check_samples(model: nn.Module, order: Sequence[str], batches: Batches) -> None:
    """Run the first block once for every kind of batch (keys, image sizes) of every task.

    Raises:
        InputError: the model refuses a kind; names the task.
    """
    seen = set()
    with Gate(model, order) as gate, torch.no_grad():
        for task, own in batches.items():
            for batch in own:
                shapes = tuple((key, None if _is_tokens(v) else tuple(v.shape[1:])) for key, v in batch.items())
                if shapes in seen:
                    continue
                seen.add(shapes)
                try:
                    gate.run(short(batch), order[0], {})
                except MODEL_ERRORS as error:
                    raise InputError(f"task '{task}': {type(model).__name__} refuses its samples: {error}") from error


def with_rows(infos: Sequence[BlockInfo], batches: Batches) -> list[BlockInfo]:
    """The blocks with each group's rows per sample as the batches have them: real tokens, not padding."""
    every = [batch for own in batches.values() for batch in own]
    samples = sum(map(batch_size, every))
    means = {
        key: sum(int((batch[key] != 0).sum()) for batch in every) / samples
        for key in ("attention_mask", "decoder_attention_mask")
        if all(key in batch for batch in every)
    }
    for info in infos:
        info.units = [
            replace(unit, rows_per_sample=means[unit.mask]) if isinstance(unit, Group) and unit.mask in means else unit
            for unit in info.units
        ]
    return list(infos)


@contextmanager
def _cheap_products(model: nn.Module) -> Iterator[None]:
    """Large linear modules give their input's first feature plus a ramp instead of a product.

    That has the right shape, depends on the sample, and costs nothing: what runs, in which order, stays as it is.
    """
    large = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m.weight.numel() >= LARGE]
    for module in large:
        module.forward = partial(_ramp, len(weight_view(module)))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in large:
            del module.forward  # the class's own method shows again


def _ramp(width: int, x: Tensor) -> Tensor:
    return x[..., :1] + torch.linspace(-1, 1, width, dtype=x.dtype)


@contextmanager
def _watched(
    model: nn.Module, blocks: Sequence[str], order: list[str], states: dict[str, list[tuple[int, ...]]]
) -> Iterator[None]:
    """Note which modules with parameters run in which order (of the blocks, only their names), and what blocks give."""
    inside = tuple(f"{name}." for name in blocks)
    handles: list[Any] = []

    def returned(block: str, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        states.setdefault(stack_of(block), [tuple(part.shape) for part in parts if isinstance(part, Tensor)])

    for name, module in model.named_modules():
        if name in blocks:
            handles.append(module.register_forward_hook(lambda m, a, y, n=name: returned(n, y)))
        elif name.startswith(inside) or not name or next(module.parameters(recurse=False), None) is None:
            continue
        handles.append(module.register_forward_pre_hook(lambda m, a, n=name: order.append(n)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
