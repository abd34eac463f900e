"""What is proven about a model before it is trusted: that the walk from block to block sees what one forward sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Gate, call_model, cut, stack_of
from .errors import InputError
from .network import to_device

CLOSE = 1e-3
"""Largest difference, relative to the largest entry, that rounding may make between the two."""


def prove(model: nn.Module, order: Sequence[str], batch: Any, device: torch.device | None = None) -> tuple[str, ...]:
    """Walk two samples from block to block for `check_walk` and `skippable_stem`; returns what the latter does.

    Raises:
        InputError: the model cannot be walked from block to block.
    """
    samples = cut(batch, 2)
    walked = _walk(model, order, samples, (), device)
    check_walk(model, order, samples, walked, device)
    return skippable_stem(model, order, samples, walked, device)


def check_walk(
    model: nn.Module, order: Sequence[str], batch: Any, walked: Sequence[Any], device: torch.device | None
) -> None:
    """Compare every block's output in a walk, and the model's, with one plain forward.

    A finished block hands on only its stack's last output, so they differ where later parts read earlier blocks (skip
    connections, weighted sums of layers).

    Raises:
        InputError: they differ; names the first place.
    """
    plain: dict[str, Any] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, y, name=name: plain.update({name: _first(y)}))
        for name in order
    ]
    try:
        end = _first(call_model(model, batch, device))
    finally:
        for handle in handles:
            handle.remove()
    *outputs, walked_end = walked
    for name, output in zip(order, outputs, strict=True):
        if not _alike(plain[name], _first(output)):
            raise InputError(
                f"block '{name}' of {type(model).__name__} reads more than the output of the block before it (a skip "
                "connection?): such models cannot be calibrated block by block; name larger blocks that can"
            )
    if not _alike(end, _first(walked_end)):
        raise InputError(
            f"the end of {type(model).__name__} reads more than its last block's output (a sum over layers?): such "
            "models cannot be calibrated block by block; calibrate the model inside it and put the end back"
        )


def skippable_stem(
    model: nn.Module, order: Sequence[str], batch: Any, walked: Sequence[Any], device: torch.device | None
) -> tuple[str, ...]:
    """Convolutions outside the blocks that need not run again once the first block is done, proven on one batch.

    Proof: with stand-ins for their outputs, the second block, the last block and the model's output are bit-equal.
    """
    inside = tuple(f"{name}." for name in order)
    convolutions = tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not name.startswith(inside)
    )
    if not convolutions or len(order) < 2:
        return ()
    skipping = _walk(model, order, batch, convolutions, device)
    return convolutions if all(_equal(a, b) for a, b in zip(walked, skipping, strict=True)) else ()


def _walk(
    model: nn.Module, order: Sequence[str], batch: Any, skip: tuple[str, ...], device: torch.device | None
) -> list[Any]:
    """Every block's output, then the model's."""
    gate = Gate(model, order)
    gate.skip_stem = skip
    state: dict[str, Any] = {}
    seen: list[Any] = []

    def copied(states: dict[str, Any]) -> Any:
        """As `Network.forward` hands them over: a block may change its input in place."""
        return to_device(states, device or torch.device("cpu"), copy=True)

    with gate:
        for name in order:
            state[stack_of(name)] = gate.run(batch, name, copied(state), device)
            seen.append(state[stack_of(name)])
        seen.append(gate.finish(batch, copied(state), device))
    return seen


def _first(value: Any) -> Any:
    """A copy of the first tensor in an output: the hidden state, logits, or the last hidden state."""
    if isinstance(value, Tensor):
        return value.clone()  # models may change it in place afterwards
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := _first(part)) is not None), None)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    if not a.isfinite().all():
        return torch.equal(a.isfinite(), b.isfinite())
    return float((a - b).abs().max()) <= CLOSE * float(a.abs().max()) if a.numel() else True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
