"""Task-vector cosine: do a model's weights point where an expert's do? Streamed over parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..network import Network


def task_vector_cosines(
    base: Network, experts: Mapping[str, Network], models: Mapping[str, Network], blocks: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Per task and model label: ⟨θ − θ₀, θ_i − θ₀⟩ / (‖θ − θ₀‖ ‖θ_i − θ₀‖), over every float parameter, in float64.

    All networks are open. None where a difference is zero (the base itself).
    """
    dots = {(task, label): 0.0 for task in experts for label in models}
    squares: dict[str, dict[str, float]] = {"expert": dict.fromkeys(experts, 0.0), "model": dict.fromkeys(models, 0.0)}
    for block in [*blocks, None]:
        start, others = _parameters(base, block, blocks), {m: _parameters(n, block, blocks) for m, n in models.items()}
        own = {task: _parameters(network, block, blocks) for task, network in experts.items()}
        for name in start:
            origin = start[name].double()
            moved = {label: found[name].double() - origin for label, found in others.items()}
            for label, delta in moved.items():
                squares["model"][label] += float(delta.square().sum())
            for task, found in own.items():
                vector = found[name].double() - origin
                squares["expert"][task] += float(vector.square().sum())
                for label, delta in moved.items():
                    dots[task, label] += float((vector * delta).sum())
    return {
        task: {label: _cosine(dots[task, label], squares["expert"][task], squares["model"][label]) for label in models}
        for task in experts
    }


def _cosine(dot: float, a: float, b: float) -> float | None:
    scale = (a * b) ** 0.5
    return dot / scale if scale else None


def _parameters(network: Network, block: str | None, blocks: Sequence[str]) -> Mapping[str, Tensor]:
    """The float parameters of a block, or (None) of what lies outside all blocks and is in memory."""
    if block is not None:
        return network.parameters(block)
    return dict(_outside(network, blocks))


def _outside(network: Network, blocks: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    inside = tuple(f"{name}." for name in blocks)
    for name, parameter in network.model.named_parameters():
        if not name.startswith(inside) and parameter.is_floating_point() and not parameter.is_meta:
            yield name, parameter.data
