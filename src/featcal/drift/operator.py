"""The path-averaged operator A of Prop. 2, applied to the incoming drift by quadrature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..blocks import State
from ..errors import InputError
from ..network import Network
from .rows import hidden

NODES = 16


def averaged_operator(function: Callable[[State], Any], start: State, end: State, nodes: int = NODES) -> Tensor:
    """A e = ∫₀¹ J_f(start + t·e) e dt with e = end − start (Eq. 18), by Gauss-Legendre quadrature.

    Each node is one forward-mode derivative of `function`, whose features (`rows.hidden`) count. Where f is smooth
    on the segment, A e = f(end) − f(start); ReLU's kinks leave an error that falls with the number of nodes.
    """
    points, weights = np.polynomial.legendre.leggauss(nodes)
    total: Tensor | None = None
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            value = hidden(function(_on_segment(start, end, float(point))))
            tangent = forward_ad.unpack_dual(value).tangent
            slope = torch.zeros_like(value) if tangent is None else tangent.clone()
        total = float(weight) * slope if total is None else total + float(weight) * slope
    assert total is not None
    return total


def block_operator(network: Network, block: str, batch: Any, start: State, end: State, nodes: int = NODES) -> Tensor:
    """`averaged_operator` of a resident block as a function of all that it is handed.

    Raises:
        InputError: a part of the block has no forward-mode derivative.
    """
    try:
        return averaged_operator(lambda state: network.forward(batch, block, state), start, end, nodes)
    except (NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{network.label}: block {block} has no forward-mode derivative, so A·e cannot be checked ({error}); "
            "measure without the check"
        ) from error


def _on_segment(start: Any, end: Any, t: float) -> Any:
    """start + t (end − start) as dual numbers whose tangent is end − start; equal entries (masks' −∞) do not move."""
    if isinstance(start, Tensor):
        if not start.is_floating_point() or torch.equal(start, end):
            return start
        step = torch.where(start == end, 0.0, end - start)
        return forward_ad.make_dual(start + t * step, step)
    if isinstance(start, dict):
        return {key: _on_segment(value, end[key], t) for key, value in start.items()}
    if isinstance(start, (tuple, list)):
        return type(start)(_on_segment(a, b, t) for a, b in zip(start, end, strict=True))
    return start
