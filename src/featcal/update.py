"""From a unit's sums to its new parameters and record:"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from . import solve
from .moments import GroupSums
from .settings import Calibration


@dataclass
class Record:
    """What happened to one module."""

    block: str
    module: str
    kind: str
    """`linear`, `layernorm` or `rmsnorm`; `other` for what is never calibrated."""
    status: str
    """`calibrated` or `kept`."""
    reason: str = ""
    rows: int = 0
    before: float | None = None
    """The module's objective (Eq. 15; norms: Appendix G) at the merged weights."""
    after: float | None = None
    ridge: float | None = None
    """λ + ε as used; larger than asked when the factorisation needed it."""
    seconds: float = 0.0


@dataclass
class LinearParameters:
    """A linear module of the merged model and its anchor: weights (out, in); biases or None; float32 or float64."""

    merged_MD: Tensor
    anchor_MD: Tensor
    merged_bias_M: Tensor | None
    anchor_bias_M: Tensor | None


@dataclass
class NormPart:
    """One task's share in a norm's update; γ is the effective scale (weight + offset)."""

    mean_C: Tensor
    energy_C: Tensor
    gamma_C: Tensor
    beta_C: Tensor | None
    rows: int


def update_group(
    block: str,
    modules: dict[str, LinearParameters],
    dtypes: dict[str, torch.dtype],
    sums: GroupSums,
    settings: Calibration,
    with_bias: set[str],
) -> tuple[dict[str, Tensor], list[Record]]:
    """New `{module}.weight` (out, in) and `{module}.bias` for the modules of one input group, and their records.

    `dtypes` are those of the file, by the names of what is returned: results are rounded to them, and so is the weight
    whose objective counts.
    """
    start = time.perf_counter()
    new: dict[str, Tensor] = {}
    records = [Record(block, name, "linear", "kept", rows=sums.rows) for name in modules]
    problem = _problem(sums)
    system = None
    peak = float(sums.G_DD.diagonal().abs().max())
    scaled = (sums.G_DD / peak).float() if peak > 0 and not problem else None
    if not problem:
        try:
            system = solve.factor(sums.G_DD, settings.ridge)
        except solve.NotPositiveDefinite as error:
            problem = str(error)
    for record in records:
        if system is None:
            record.reason = problem
            continue
        gram = (scaled, peak)
        weight = _update_weight(
            modules[record.module], dtypes[f"{record.module}.weight"], sums, system, gram, settings.ridge, record
        )
        if weight is None:
            continue
        new[f"{record.module}.weight"] = weight
        if record.module in with_bias:
            bias = _update_bias(modules[record.module], weight, sums, settings.ridge, record.module)
            new[f"{record.module}.bias"] = bias.to(dtypes[f"{record.module}.bias"])
    seconds = (time.perf_counter() - start) / max(len(records), 1)
    for record in records:
        record.seconds = seconds
    return new, records


def _problem(sums: GroupSums) -> str:
    if sums.broken:
        return f"non-finite features in task {', '.join(repr(t) for t in sums.broken)}"
    if sums.rows == 0:
        return "no calibration row reached it"
    return ""


def _update_weight(
    module: LinearParameters,
    dtype: torch.dtype,
    sums: GroupSums,
    system: solve.Factor,
    gram: tuple[Tensor | None, float],
    ridge: float,
    record: Record,
) -> Tensor | None:
    """The new weight in the file's dtype, or None when the merged one is kept; fills the record.

    The objective is a quadratic with its minimum at W*, so at any other W it is the minimum plus
    tr[(W−W*)(Σω_iG_i + λI)(W−W*)ᵀ]: no cancellation, even where the drift is tiny.
    """
    R_MD = sums.R_MD[record.module]
    change_MD = solve.solve_right(R_MD, system)
    best_MD = module.anchor_MD.double() + change_MD
    weight = best_MD.to(dtype)
    extra = system.ridge - ridge  # ε and the ladder's part of the ridge are not in Eq. 15
    minimum = sums.floor[record.module] - float((change_MD * R_MD).sum())
    minimum = max(minimum - extra * float(change_MD.square().sum()), 0.0)

    def objective(W_MD: Tensor) -> float:
        gap = W_MD.double() - best_MD
        value = minimum + quadratic(gap, *gram) + system.ridge * float(gap.square().sum())
        shift = W_MD.double() - module.anchor_MD.double()
        return value - extra * float(shift.square().sum() - change_MD.square().sum())

    record.ridge = system.ridge
    record.before = max(objective(module.merged_MD), 0.0)
    record.after = minimum if dtype.itemsize >= 4 else max(objective(weight), 0.0)
    if not bool(weight.isfinite().all()):
        record.reason = f"the solution is not finite in {str(dtype).removeprefix('torch.')}"
    elif not record.after <= record.before:
        record.reason = f"rounding to {str(dtype).removeprefix('torch.')} outweighs the gain"
    else:
        record.status = "calibrated"
        return weight
    record.after = record.before
    return None


def quadratic(gap_MD: Tensor, scaled_DD: Tensor | None, peak: float) -> float:
    """tr(A G Aᵀ) for G = peak · scaled, in float32 products; A is scaled too, so that no tiny or huge entry is lost."""
    scale = float(gap_MD.abs().max())
    if scale == 0.0 or scaled_DD is None:
        return 0.0
    gap = (gap_MD / scale).float()
    return float(((gap @ scaled_DD) * gap).sum(dtype=torch.float64)) * scale * scale * peak


def _update_bias(module: LinearParameters, weight: Tensor, sums: GroupSums, ridge: float, name: str) -> Tensor:
    assert module.anchor_bias_M is not None
    gap = sums.desired_M[name] - weight.double() @ sums.mean_D
    return solve.bias_from_sums(gap, sums.omega, module.anchor_bias_M.double(), ridge)


def update_norm(
    block: str,
    module: str,
    centred: bool,
    offset: float,
    merged: tuple[Tensor, Tensor | None],
    base: tuple[Tensor, Tensor | None],
    dtypes: dict[str, torch.dtype],
    parts: list[NormPart],
    settings: Calibration,
) -> tuple[dict[str, Tensor], Record]:
    """New `{module}.weight` and `{module}.bias` of a norm, each (C,) and rounded to the file's `dtypes`; its record.

    `merged`, `base` and the experts' `parts` hold effective scales (weight + offset) and shifts, (C,) each.
    """
    start = time.perf_counter()
    kind = "layernorm" if centred else "rmsnorm"
    record = Record(block, module, kind, "kept", rows=sum(p.rows for p in parts))
    mean, energy = torch.stack([p.mean_C for p in parts]), torch.stack([p.energy_C for p in parts])
    gammas = torch.stack([p.gamma_C for p in parts]).double()
    shifts = [p.beta_C for p in parts]
    betas = None if any(b is None for b in shifts) else torch.stack([b for b in shifts if b is not None]).double()
    (g_merged, b_merged), (g_base, b_base) = (
        tuple(None if t is None else t.double() for t in p) for p in (merged, base)
    )
    assert g_merged is not None and g_base is not None
    gamma, beta = solve.norm_affine(
        mean, energy, gammas, betas, g_merged, g_base, b_merged, b_base, settings.ridge, settings.rho
    )
    new = {f"{module}.weight": (gamma - offset).to(dtypes[f"{module}.weight"])}
    if beta is not None:
        new[f"{module}.bias"] = beta.to(dtypes[f"{module}.bias"])
    anchors = (
        solve.anchor(g_merged, g_base, settings.rho),
        (None if b_merged is None or b_base is None else solve.anchor(b_merged, b_base, settings.rho)),
    )

    def objective(gamma_C: Tensor, beta_C: Tensor | None) -> float:
        dbeta = None if betas is None or beta_C is None else beta_C - betas
        value = solve.norm_objective(mean, energy, gamma_C - gammas, dbeta)
        value += settings.ridge * float((gamma_C - anchors[0]).square().sum())
        if beta_C is not None and anchors[1] is not None:
            value += settings.ridge * float((beta_C - anchors[1]).square().sum())
        return value

    record.ridge = settings.ridge
    record.before = objective(g_merged, b_merged)
    coarse = any(value.dtype.itemsize < 4 for value in new.values())
    if coarse:
        gamma = new[f"{module}.weight"].double() + offset
        beta = None if beta is None else new[f"{module}.bias"].double()
    record.after = objective(gamma, beta)
    record.seconds = time.perf_counter() - start
    if not all(bool(value.isfinite().all()) for value in new.values()):
        record.reason = "non-finite features or solution"
        record.before = record.after = None
        return {}, record
    if coarse and not record.after <= record.before:
        record.reason = f"rounding to {str(dtypes[f'{module}.weight']).removeprefix('torch.')} outweighs the gain"
        record.after = record.before
        return {}, record
    record.status = "calibrated"
    return new, record
