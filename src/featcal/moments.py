"""Sums over calibration rows for modules that read the same input. Pure tensor maths: no hooks, no names of models.

Products are float32 (float64 when the features are), sums are float64. A task's own sums live in a `TaskMoments`, are
folded into the `GroupSums` of all tasks when the task is done, and then freed: memory does not grow with the tasks.

Shape suffixes: R rows (tokens), D inputs, M outputs, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import solve

CHUNK = 6 * 2**20
"""Numbers of a group's inputs that are gathered before their product is added to the float64 sums."""


class Pool:
    """Float64 sums that are used again: fresh memory costs a page fault per 4 KiB, more than clearing old memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self._free: dict[tuple[int, ...], list[Tensor]] = {}

    def zeros(self, *shape: int) -> Tensor:
        free = self._free.get(shape)
        if free:
            return free.pop().zero_()
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """The caller no longer looks at these tensors, which came from `zeros`."""
        for tensor in tensors:
            self._free.setdefault(tuple(tensor.shape), []).append(tensor)


@dataclass
class Module:
    """What the sums need of one linear module: all weights (M, D), biases (M,) or None."""

    expert_MD: Tensor
    anchor_MD: Tensor
    expert_bias_M: Tensor | None


def cheaper_form(width: int, outputs: list[int], rows: int) -> str:
    """How to form the cross terms of a group with the fewest operations, from shapes alone.

    `inputs`: C = E[x_exp x_caliᵀ] once for the group, then two (M, D, D) products per module.
    `residuals`: the rows W_i x_tgt − W^anc x_cali of each module, then their product with x_cali.
    """
    total = sum(outputs)
    inputs = rows * width * width + 2 * total * width * width
    return "inputs" if inputs < 2 * rows * total * width else "residuals"


def add_gram(G_DD: Tensor, x_RD: Tensor) -> None:
    """G += xᵀx in place, upper block triangle only; `mirror` completes it."""
    width = x_RD.shape[1]
    step = max(256, -(-width // 8))
    for i in range(0, width, step):
        G_DD[i : i + step, i:] += x_RD[:, i : i + step].T @ x_RD[:, i:]


def mirror(G_DD: Tensor) -> Tensor:
    """Copy the upper block triangle of `add_gram` onto the lower one, in place."""
    width = len(G_DD)
    step = max(256, -(-width // 8))
    for i in range(0, width, step):
        G_DD[i + step :, i : i + step] = G_DD[i : i + step, i + step :].T
    return G_DD


@dataclass
class GroupSums:
    """ω-weighted sums over tasks for one input group; what the solver needs, whatever the number of tasks."""

    G_DD: Tensor
    R_MD: dict[str, Tensor]
    """Σ ω_i (W_i C_i − W^anc G_i) per module."""
    floor: dict[str, float]
    """Σ ω_i E‖W^anc x_cali − W_i x_tgt‖² per module: the objective at the anchor."""
    desired_M: dict[str, Tensor]
    """Σ ω_i (b_i + W_i μ_tgt) per module."""
    mean_D: Tensor
    """Σ ω_i μ_cali."""
    omega: float = 0.0
    rows: int = 0
    broken: list[str] = field(default_factory=list)
    """Tasks whose features were not finite."""

    @classmethod
    def zeros(cls, width: int, outputs: dict[str, int], pool: Pool) -> GroupSums:
        return cls(
            G_DD=pool.zeros(width, width),
            R_MD={name: pool.zeros(m, width) for name, m in outputs.items()},
            floor=dict.fromkeys(outputs, 0.0),
            desired_M={name: pool.zeros(m) for name, m in outputs.items()},
            mean_D=pool.zeros(width),
        )

    def objective(self, name: str, change_MD: Tensor, ridge: float) -> float:
        """Eq. 15 at W = W^anc + change, including λ‖W − W^anc‖²."""
        change = change_MD.double()
        linear = float((change * self.R_MD[name]).sum())
        quadratic = float(((change @ self.G_DD) * change).sum())
        return self.floor[name] + quadratic - 2 * linear + ridge * float((change * change).sum())

    def tensors(self) -> list[Tensor]:
        """All sums that are tensors, in a fixed order."""
        return [self.G_DD, *self.R_MD.values(), *self.desired_M.values(), self.mean_D]


class TaskMoments:
    """Sums of one task for one input group. `add` batches, then `fold` once."""

    def __init__(self, width: int, modules: dict[str, Module], alpha: float, form: str, pool: Pool):
        zero = pool.zeros
        self.modules, self.alpha, self.form = modules, alpha, form
        self._chunk = max(CHUNK // width, 1)
        self.G_DD = zero(width, width)
        self.C_DD = zero(width, width) if form == "inputs" else None
        self.R_MD = {n: zero(*m.anchor_MD.shape) for n, m in modules.items()} if form == "residuals" else {}
        self.energy = {name: zero() for name in modules}
        self.mean_cali_D, self.mean_exp_D = zero(width), zero(width)
        self.weight = zero()
        self.rows = 0
        self._pending: list[tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]] = []

    def add(self, x_cali_RD: Tensor, x_exp_RD: Tensor, weights_R: Tensor | None, outputs_RM: dict[str, Tensor]) -> None:
        """Add rows: both models' inputs, token weights (None: all one), the expert modules' outputs with biases."""
        self._pending.append((x_cali_RD, x_exp_RD, weights_R, outputs_RM))
        if sum(len(entry[0]) for entry in self._pending) >= self._chunk:
            self._flush()

    def tensors(self) -> list[Tensor]:
        """All sums, in a fixed order, for adding up the shares of several processes."""
        self._flush()
        cross = [self.C_DD] if self.C_DD is not None else list(self.R_MD.values())
        return [self.G_DD, *cross, *self.energy.values(), self.mean_cali_D, self.mean_exp_D, self.weight]

    def _flush(self) -> None:
        if not self._pending:
            return
        cali, exp, weights, outputs = zip(*self._pending, strict=True)
        self._pending = []
        x_cali, x_exp = _joined(cali), _joined(exp)
        root_R = None if weights[0] is None else _joined(weights).to(x_cali).sqrt()
        self.rows += len(x_cali)
        self.weight += len(x_cali) if root_R is None else (root_R.double() ** 2).sum()
        if root_R is not None:  # rows times √w: every plain sum below is then the weighted one
            x_cali, x_exp = x_cali * root_R[:, None], x_exp * root_R[:, None]
        self.mean_cali_D += _weighted_sum(x_cali, root_R)
        self.mean_exp_D += _weighted_sum(x_exp, root_R)
        add_gram(self.G_DD, x_cali)
        if self.C_DD is not None:
            self.C_DD += x_exp.T @ x_cali
        for name, module in self.modules.items():
            y_exp = _joined([o[name] for o in outputs])
            if module.expert_bias_M is not None:
                y_exp = y_exp - module.expert_bias_M
            if root_R is not None:
                y_exp = y_exp * root_R[:, None]
            if self.form == "inputs":
                self.energy[name] += y_exp.square().sum(dtype=torch.float64)
                continue
            shift_MD = (1 - self.alpha) * module.expert_MD - module.anchor_MD
            residual = torch.addmm(y_exp, x_cali, shift_MD.T, beta=self.alpha)  # W_i x_tgt − W^anc x_cali
            self.R_MD[name] += residual.T @ x_cali
            self.energy[name] += residual.square().sum(dtype=torch.float64)

    def fold(self, sums: GroupSums, task: str) -> None:
        """Divide by the total weight, weigh by ω_i = 1/max(‖G_i‖_F, ε), and add to the sums of all tasks."""
        self._flush()
        scale = 1.0 / max(float(self.weight), torch.finfo(torch.float32).eps)
        G = mirror(self.G_DD.mul_(scale))
        norm = float(G.norm())
        if not _finite(norm) or not all(_finite(float(e)) for e in self.energy.values()):
            sums.broken.append(task)
            return
        omega = 1.0 / max(norm, solve.EPS)
        sums.omega += omega
        sums.rows += self.rows
        sums.G_DD.add_(G, alpha=omega)
        mean_cali, mean_exp = self.mean_cali_D * scale, self.mean_exp_D * scale
        sums.mean_D.add_(mean_cali, alpha=omega)
        mean_target = self.alpha * mean_exp + (1 - self.alpha) * mean_cali
        work = next(iter(self.modules.values())).expert_MD.dtype
        products = None if self.C_DD is None else (self.C_DD.mul_(scale).to(work), G.to(work))
        for name, module in self.modules.items():
            R, floor = self._cross_terms(name, module, products, scale)
            sums.R_MD[name].add_(R, alpha=omega)
            sums.floor[name] += omega * floor
            desired = module.expert_MD.double() @ mean_target
            if module.expert_bias_M is not None:
                desired = desired + module.expert_bias_M.double()
            sums.desired_M[name].add_(desired, alpha=omega)

    def _cross_terms(
        self, name: str, module: Module, products: tuple[Tensor, Tensor] | None, scale: float
    ) -> tuple[Tensor, float]:
        """R_i = W_i C_i − W^anc G_i and E‖W_i x_tgt − W^anc x_cali‖² of one module; `products`: C and G to multiply."""
        if products is None:
            return self.R_MD[name].mul_(scale), float(self.energy[name]) * scale
        C, G = products
        shift_MD = (1 - self.alpha) * module.expert_MD - module.anchor_MD
        cross = (module.expert_MD @ C).double()
        own = (shift_MD @ G).double()
        shift = shift_MD.double()
        floor = self.alpha**2 * float(self.energy[name]) * scale
        floor += 2 * self.alpha * float((cross * shift).sum()) + float((own * shift).sum())
        return cross.mul_(self.alpha).add_(own), floor


class NormMoments:
    """E[z] and E[z²] of one task for one norm; z is the merged model's normalised input, shape (R, C)."""

    def __init__(self, channels: int, pool: Pool):
        self.sum_C, self.square_C, self.weight = pool.zeros(channels), pool.zeros(channels), pool.zeros()
        self.rows = 0

    def add(self, z_RC: Tensor, weights_R: Tensor | None) -> None:
        root_R = None if weights_R is None else weights_R.to(z_RC).sqrt()
        self.rows += len(z_RC)
        self.weight += len(z_RC) if root_R is None else (root_R.double() ** 2).sum()
        if root_R is not None:
            z_RC = z_RC * root_R[:, None]
        self.sum_C += _weighted_sum(z_RC, root_R)
        self.square_C += z_RC.square().sum(0)

    def tensors(self) -> list[Tensor]:
        return [self.sum_C, self.square_C, self.weight]

    def averages(self) -> tuple[Tensor, Tensor]:
        scale = 1.0 / self.weight.clamp_min(torch.finfo(torch.float32).eps)
        return self.sum_C * scale, self.square_C * scale


def _joined(parts: Sequence[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _weighted_sum(rows: Tensor, root_R: Tensor | None) -> Tensor:
    return (rows.sum(0) if root_R is None else root_R @ rows).double()


def _finite(value: float) -> bool:
    return value - value == 0.0
