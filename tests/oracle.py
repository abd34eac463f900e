"""The published equations, written out in float64 on raw features: the judge of the package's own maths.

Nothing here is fast or clever, on purpose. Rows of a feature matrix are tokens, `n` of them; a linear module has `d`
inputs and `m` outputs, a norm `c` channels. Weights are (m, d), as `torch.nn.Linear` keeps them: y = x Wᵀ.
`ω, λ, ρ, α, ε` are `omega, ridge, rho, alpha, eps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-8


class Features:
    """Inputs of one module on one task: calibrated and expert (n, d), and token weights (n,), by default all one."""

    def __init__(self, calibrated: Tensor, expert: Tensor, weights: Tensor | None = None) -> None:
        self.calibrated, self.expert = calibrated.double(), expert.double()
        self.weights = torch.ones(len(calibrated)) if weights is None else weights
        self.weights = self.weights.double()

    @property
    def share(self) -> Tensor:
        """Token weights that sum to one, (n,)."""
        return self.weights / self.weights.sum()

    def target(self, alpha: float) -> Tensor:
        """Eq. 10: X_tgt = α X_exp + (1 − α) X_cali, (n, d)."""
        return alpha * self.expert + (1 - alpha) * self.calibrated


@dataclass
class Moments:
    """Eq. 13 and the means: G = E[x xᵀ] (d, d), C = E[x_tgt xᵀ] (d, d), E[x_tgt] (d,), E[x] (d,)."""

    G: Tensor
    C: Tensor
    mean_target: Tensor
    mean_calibrated: Tensor


def moments(features: Features, alpha: float) -> Moments:
    """Token-weighted averages of one task's features (Eq. 13)."""
    X, T, p = features.calibrated, features.target(alpha), features.share
    G = sum(p[t] * torch.outer(X[t], X[t]) for t in range(len(X)))
    C = sum(p[t] * torch.outer(T[t], X[t]) for t in range(len(X)))
    assert isinstance(G, Tensor) and isinstance(C, Tensor)
    return Moments(G, C, p @ T, p @ X)


def omega(G: Tensor, eps: float = EPS) -> float:
    """Eq. 14 as the authors' code has it: ω = 1 / max(‖G‖_F, ε). `hypot`-like scaling keeps huge G finite."""
    top = float(G.abs().max()) or 1.0
    return 1.0 / max(float((G / top).square().sum().sqrt()) * top, eps)


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """Eq. 11: ρ merged + (1 − ρ) base."""
    return rho * merged.double() + (1 - rho) * base.double()


def linear_weight(
    tasks: Sequence[Moments],
    W_experts: Sequence[Tensor],
    W_merged: Tensor,
    W_base: Tensor,
    ridge: float,
    rho: float,
    eps: float = EPS,
    eps_on_anchor: bool = False,
) -> Tensor:
    """Eq. 17: W* = (Σ ω_i W_i C_i + λ W_anc)(Σ ω_i G_i + (λ + ε) I)^{-1}, (m, d).

    The publication has ε in the matrix only. `eps_on_anchor` puts it on the anchor as well, as any solver of the
    residual form does; the two differ by ε W_anc (·)^{-1}, at most a share ε / (λ + ε) of the anchor.
    """
    W_anc = anchor(W_merged, W_base, rho)
    S = (ridge + eps) * torch.eye(W_merged.shape[1], dtype=torch.float64)
    R = (ridge + (eps if eps_on_anchor else 0.0)) * W_anc
    for task, W in zip(tasks, W_experts, strict=True):
        w = omega(task.G, eps)
        S = S + w * task.G
        R = R + w * W.double() @ task.C
    return torch.linalg.solve(S, R.T).T


def linear_bias(
    tasks: Sequence[Moments],
    W_experts: Sequence[Tensor],
    b_experts: Sequence[Tensor],
    W_new: Tensor,
    b_merged: Tensor,
    b_base: Tensor,
    ridge: float,
    rho: float,
    eps: float = EPS,
) -> Tensor:
    """b* = [Σ ω_i (b_i + W_i μ_tgt − W* μ_cali) + λ b_anc] / (Σ ω_i + λ), (m,)."""
    numerator = ridge * anchor(b_merged, b_base, rho)
    denominator = ridge
    for task, W, b in zip(tasks, W_experts, b_experts, strict=True):
        w = omega(task.G, eps)
        numerator = numerator + w * (b.double() + W.double() @ task.mean_target - W_new.double() @ task.mean_calibrated)
        denominator += w
    return numerator / denominator


def objective(
    tasks: Sequence[Features],
    W: Tensor,
    W_experts: Sequence[Tensor],
    W_merged: Tensor,
    W_base: Tensor,
    ridge: float,
    rho: float,
    alpha: float,
    eps: float = EPS,
) -> float:
    """Eq. 15 at W: Σ ω_i E‖W x − W_i x_tgt‖² + λ‖W − W_anc‖_F²."""
    total = ridge * float((W.double() - anchor(W_merged, W_base, rho)).square().sum())
    for f, W_i in zip(tasks, W_experts, strict=True):
        gap = f.calibrated @ W.double().T - f.target(alpha) @ W_i.double().T
        G = moments(f, alpha).G
        total += omega(G, eps) * float(f.share @ gap.square().sum(1))
    return total


def normalised(x: Tensor, kind: str, eps: float) -> Tensor:
    """A norm without its affine: `layer` removes the mean and divides by the deviation, `rms` by the RMS."""
    x = x.double()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def norm_affine(
    z_tasks: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    gammas: Sequence[Tensor],
    betas: Sequence[Tensor] | None,
    gamma_merged: Tensor,
    gamma_base: Tensor,
    beta_merged: Tensor | None,
    beta_base: Tensor | None,
    ridge: float,
    rho: float,
    eps: float = EPS,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """γ*, β* of the 2×2 system per channel (β absent: the one equation for γ), from normalised z (n, c).

    With z's mean m_i and energy s_i per task: a11 = Σ s_i + λ, a12 = Σ m_i, a22 = N + λ,
    r_γ = Σ (s_i γ_i + m_i β_i) + λ γ_anc, r_β = Σ (m_i γ_i + β_i) + λ β_anc. `offset` is 1 for norms that scale
    by 1 + weight: it is added to every weight that comes in and taken off the one that goes out.
    """
    channels = gamma_merged.numel()
    gamma_anc = anchor(gamma_merged + offset, gamma_base + offset, rho)
    zero = torch.zeros(channels, dtype=torch.float64)
    a11, a22, a12, r_beta = zero + ridge, zero + ridge + len(z_tasks), zero, zero
    r_gamma = ridge * gamma_anc
    if betas is not None:
        assert beta_merged is not None and beta_base is not None
        r_beta = ridge * anchor(beta_merged, beta_base, rho)
    for i, z in enumerate(z_tasks):
        f = Features(z, z, weights[i])
        mean, energy = f.share @ f.calibrated, f.share @ f.calibrated.square()
        gamma = gammas[i].double() + offset
        a11 = a11 + energy
        r_gamma = r_gamma + energy * gamma
        if betas is not None:
            a12 = a12 + mean
            r_gamma = r_gamma + mean * betas[i].double()
            r_beta = r_beta + mean * gamma + betas[i].double()
    if betas is None:
        return r_gamma / a11.clamp_min(eps) - offset, None
    det = (a11 * a22 - a12 * a12).clamp_min(eps)
    return (a22 * r_gamma - a12 * r_beta) / det - offset, (a11 * r_beta - a12 * r_gamma) / det


def norm_objective(
    z_tasks: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    gammas: Sequence[Tensor],
    betas: Sequence[Tensor] | None,
    gamma: Tensor,
    beta: Tensor | None,
    gamma_anc: Tensor,
    beta_anc: Tensor | None,
    ridge: float,
) -> float:
    """What `norm_affine` minimises: Σ_i E‖γ z + β − γ_i z − β_i‖² + λ(‖γ − γ_anc‖² + ‖β − β_anc‖²)."""
    total = ridge * float((gamma.double() - gamma_anc).square().sum())
    if beta is not None:
        assert beta_anc is not None
        total += ridge * float((beta.double() - beta_anc).square().sum())
    for i, z in enumerate(z_tasks):
        f = Features(z, z, weights[i])
        gap = f.calibrated * (gamma.double() - gammas[i].double())
        if beta is not None and betas is not None:
            gap = gap + (beta.double() - betas[i].double())
        total += float(f.share @ gap.square().sum(1))
    return total
