"""Closed-form updates of one module (facts: arXiv 2605.13030, Eq. 9-17 and Appendix G). Pure tensor maths.

Shape suffixes: T tasks, M outputs, D inputs, C channels. Weights are (out, in) as in `torch.nn.Linear`.
Everything here works in the dtype it is given; callers pass float64 unless memory forbids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-8
"""ε of the paper: floor of ‖G‖ in ω, and added to λ in the ridge matrix."""
LADDER = (1.0, 10.0, 100.0, 1000.0)
"""Factors tried on λ + ε when the Cholesky factorisation fails."""


class NotPositiveDefinite(ArithmeticError):
    """Σ ω_i G_i + (λ+ε) I has no Cholesky factor, not even with 1000 times the ridge."""


@dataclass(frozen=True)
class Factor:
    """Cholesky factor of Σ ω_i G_i + ridge·I."""

    lower_DD: Tensor
    ridge: float
    """The ridge that worked, λ+ε times a factor of LADDER."""
    tries: int


def task_weights(G_TDD: Tensor, eps: float = EPS) -> Tensor:
    """ω_i = 1 / max(‖G_i‖_F, ε), Eq. 14; shape (T,), float64."""
    return G_TDD.double().flatten(1).norm(dim=1).clamp_min(eps).reciprocal()


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """W^anc = W^base + ρ (W^M − W^base), Eq. 11. Exactly the merged tensor at ρ = 1."""
    return merged.clone() if rho == 1 else torch.lerp(base, merged, rho)


def factor(G_DD: Tensor, ridge: float, eps: float = EPS) -> Factor:
    """Cholesky factor of G + (λ+ε) I, raising λ+ε tenfold at most three times.

    Raises:
        NotPositiveDefinite: the last rung failed too, or G is not finite.
    """
    diagonal = G_DD.diagonal()
    for tries, times in enumerate(LADDER):
        total = (max(ridge, 0.0) + eps) * times
        system = G_DD.clone()
        system.diagonal().copy_(diagonal + total)
        lower_DD, info = torch.linalg.cholesky_ex(system)
        if int(info) == 0 and bool(lower_DD.diagonal().isfinite().all()):
            return Factor(lower_DD, total, tries)
    raise NotPositiveDefinite(f"a {len(G_DD)}x{len(G_DD)} moment matrix is not positive definite")


def solve_right(R_MD: Tensor, system: Factor) -> Tensor:
    """R (Σ ω_i G_i + ridge I)^{-1}, shape (M, D), contiguous."""
    return torch.cholesky_solve(R_MD.T, system.lower_DD).T.contiguous()


def linear_weight(
    G_TDD: Tensor,
    C_TDD: Tensor,
    W_experts_TMD: Tensor,
    W_merged_MD: Tensor,
    W_base_MD: Tensor,
    ridge: float,
    rho: float,
    eps: float = EPS,
) -> Tensor:
    """The minimiser of Eq. 15, from the moments of Eq. 13: G_i = E[x_cali x_caliᵀ], C_i = E[x_tgt x_caliᵀ].

    Solved for the change from the anchor, W* = W^anc + [Σ ω_i (W_i C_i − W^anc G_i)] (Σ ω_i G_i + (λ+ε) I)^{-1}:
    the same solution as Eq. 17, far less rounding, and inputs that are always zero keep the anchor exactly.
    (Here ε pulls to the anchor as λ does; Eq. 17 as printed lets it pull to zero, a relative difference of ε/λ.)

    Raises:
        NotPositiveDefinite: see `factor`.
    """
    W_anchor = anchor(W_merged_MD, W_base_MD, rho)
    omega_T = task_weights(G_TDD, eps).to(G_TDD)
    R_MD = torch.einsum("t,tmd,tde->me", omega_T, W_experts_TMD, C_TDD)
    R_MD = R_MD - torch.einsum("t,md,tde->me", omega_T, W_anchor, G_TDD)
    G_DD = torch.einsum("t,tde->de", omega_T, G_TDD)
    return W_anchor + solve_right(R_MD, factor(G_DD, ridge, eps))


def linear_bias(
    mean_target_TD: Tensor,
    mean_calibrated_TD: Tensor,
    W_experts_TMD: Tensor,
    b_experts_TM: Tensor,
    W_new_MD: Tensor,
    b_merged_M: Tensor,
    b_base_M: Tensor,
    omega_T: Tensor,
    ridge: float,
    rho: float,
) -> Tensor:
    """b* = [Σ ω_i (b_i + W_i μ_tgt − W* μ_cali) + λ b^anc] / (Σ ω_i + λ), the best bias for a given W* (Appendix G)."""
    omega_T1 = omega_T.to(mean_target_TD)[:, None]
    desired_TM = b_experts_TM + torch.einsum("tmd,td->tm", W_experts_TMD, mean_target_TD)
    reached_TM = mean_calibrated_TD @ W_new_MD.T
    return bias_from_sums(
        (omega_T1 * (desired_TM - reached_TM)).sum(0),
        float(omega_T.sum()),
        anchor(b_merged_M, b_base_M, rho),
        ridge,
    )


def bias_from_sums(gap_M: Tensor, omega: float, b_anchor_M: Tensor, ridge: float) -> Tensor:
    """The bias update from its sums: `gap` = Σ ω_i (b_i + W_i μ_tgt − W* μ_cali), `omega` = Σ ω_i."""
    ridge = max(ridge, 0.0)
    return (gap_M + ridge * b_anchor_M) / max(omega + ridge, torch.finfo(gap_M.dtype).eps)


def norm_affine(
    mean_TC: Tensor,
    energy_TC: Tensor,
    gammas_TC: Tensor,
    betas_TC: Tensor | None,
    gamma_merged_C: Tensor,
    gamma_base_C: Tensor,
    beta_merged_C: Tensor | None,
    beta_base_C: Tensor | None,
    ridge: float,
    rho: float,
    eps: float = EPS,
) -> tuple[Tensor, Tensor | None]:
    """Scale and shift of a LayerNorm, or the scale of an RMSNorm (all β None), per channel (Appendix G).

    `mean` = E[z] and `energy` = E[z²] per task, z the merged model's normalised input before the affine. The targets
    are the experts' own affines on that z; tasks are summed without ω (as in the published code).
    """
    ridge = max(ridge, 0.0)
    gamma_anchor = anchor(gamma_merged_C, gamma_base_C, rho)
    a11 = energy_TC.sum(0) + ridge
    if betas_TC is None:
        return ((energy_TC * gammas_TC).sum(0) + ridge * gamma_anchor) / a11.clamp_min(eps), None
    assert beta_merged_C is not None and beta_base_C is not None
    beta_anchor = anchor(beta_merged_C, beta_base_C, rho)
    a12 = mean_TC.sum(0)
    a22 = len(mean_TC) + ridge
    r_gamma = (energy_TC * gammas_TC + mean_TC * betas_TC).sum(0) + ridge * gamma_anchor
    r_beta = (mean_TC * gammas_TC + betas_TC).sum(0) + ridge * beta_anchor
    det = (a11 * a22 - a12 * a12).clamp_min(eps)
    return (a22 * r_gamma - a12 * r_beta) / det, (a11 * r_beta - a12 * r_gamma) / det


def norm_objective(
    mean_TC: Tensor,
    energy_TC: Tensor,
    dgamma_TC: Tensor,
    dbeta_TC: Tensor | None,
) -> float:
    """Σ_i E‖(γ−γ_i) z + (β−β_i)‖², summed over channels, without the ridge term."""
    total = (energy_TC * dgamma_TC**2).sum()
    if dbeta_TC is not None:
        total = total + (2 * mean_TC * dgamma_TC * dbeta_TC + dbeta_TC**2).sum()
    return float(total)
