"""The closed forms: golden vectors, limits, invariances, and random cases against the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from featcal import moments, solve

RIDGE, RHO, ALPHA = 0.05, 2.0, 0.3


def t(*rows: object) -> Tensor:
    return torch.tensor(list(rows) if len(rows) > 1 else rows[0], dtype=torch.float64)


@dataclass
class Case:
    """One module and its tasks: raw features; weights (m, d) and biases (m,) of experts, merged and base."""

    features: list[oracle.Features]
    W_experts: Tensor
    W_merged: Tensor
    W_base: Tensor
    b_experts: Tensor
    b_merged: Tensor
    b_base: Tensor

    def moments(self, alpha: float = ALPHA) -> list[oracle.Moments]:
        return [oracle.moments(f, alpha) for f in self.features]

    def stacked(self, alpha: float = ALPHA, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        tasks = self.moments(alpha)
        return torch.stack([m.G for m in tasks]).to(dtype), torch.stack([m.C for m in tasks]).to(dtype)

    def weight(
        self, alpha: float = ALPHA, ridge: float = RIDGE, rho: float = RHO, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """The package's answer."""
        weights = (W.to(dtype) for W in (self.W_experts, self.W_merged, self.W_base))
        return solve.linear_weight(*self.stacked(alpha, dtype), *weights, ridge, rho)

    def expected(self, alpha: float = ALPHA, ridge: float = RIDGE, rho: float = RHO, **options: bool) -> Tensor:
        """The oracle's answer."""
        return oracle.linear_weight(
            self.moments(alpha), list(self.W_experts), self.W_merged, self.W_base, ridge, rho, **options
        )

    def expected_bias(self, W_new: Tensor, alpha: float = ALPHA, ridge: float = RIDGE, rho: float = RHO) -> Tensor:
        """The oracle's bias for a given weight."""
        experts = list(self.W_experts), list(self.b_experts)
        return oracle.linear_bias(self.moments(alpha), *experts, W_new, self.b_merged, self.b_base, ridge, rho)

    def objective(self, W: Tensor, alpha: float = ALPHA, ridge: float = RIDGE, rho: float = RHO) -> float:
        return oracle.objective(self.features, W, list(self.W_experts), self.W_merged, self.W_base, ridge, rho, alpha)

    def bias(self, W_new: Tensor, alpha: float = ALPHA, ridge: float = RIDGE, rho: float = RHO) -> Tensor:
        tasks = self.moments(alpha)
        return solve.linear_bias(
            torch.stack([m.mean_target for m in tasks]),
            torch.stack([m.mean_calibrated for m in tasks]),
            self.W_experts,
            self.b_experts,
            W_new,
            self.b_merged,
            self.b_base,
            solve.task_weights(torch.stack([m.G for m in tasks])),
            ridge,
            rho,
        )


@pytest.fixture
def golden() -> Case:
    """Two tasks of four samples, three inputs, two outputs."""
    cali1 = t([1, 0, 2], [0, 1, 1], [1, 1, 0], [2, -1, 1])
    exp1 = t([1, 1, 2], [0, 2, 1], [1, 0, 0], [2, -1, 0])
    cali2 = t([0, 1, -1], [1, 2, 0], [-1, 0, 1], [0, 1, 2])
    exp2 = t([0, 1, 0], [1, 1, 0], [-1, 1, 1], [1, 1, 2])
    return Case(
        [oracle.Features(cali1, exp1), oracle.Features(cali2, exp2)],
        W_experts=t([[1, 0, 0.5], [-0.5, 1, 0]], [[0.5, 1, 0], [0, 0.5, 1]]),
        W_merged=t([0.8, 0.4, 0.2], [-0.2, 0.7, 0.5]),
        W_base=t([0.7, 0.3, 0.1], [-0.1, 0.6, 0.4]),
        b_experts=t([0.1, -0.2], [0.3, 0]),
        b_merged=t([0.2, -0.1]),
        b_base=t([0.1, -0.05]),
    )


GOLDEN_W = t([1.05271041, 0.49552354, 0.35045850], [-0.82522821, 0.85542578, 0.58681232])


def random_case(
    seed: int = 0,
    tasks: int = 3,
    rows: int = 40,
    d: int = 6,
    m: int = 4,
    scale: float = 1.0,
    dead: int = 0,
    twins: bool = False,
    drift: float = 0.3,
) -> Case:
    """Features of size `scale`; the first `dead` inputs always zero; `twins` makes the last two inputs equal."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    features = []
    for _ in range(tasks):
        cali = randn(rows, d) @ randn(d, d)
        exp = cali + drift * randn(rows, d)
        cali[:, :dead] = 0
        if twins and d >= 2:
            cali[:, -1] = cali[:, -2]
        features.append(oracle.Features(cali * scale, exp * scale, 0.1 + torch.rand(rows, generator=g)))
    W_base, b_base = randn(m, d), randn(m)
    return Case(
        features,
        W_experts=W_base + 0.3 * randn(tasks, m, d),
        W_merged=W_base + 0.1 * randn(m, d),
        W_base=W_base,
        b_experts=b_base + 0.3 * randn(tasks, m),
        b_merged=b_base + 0.1 * randn(m),
        b_base=b_base,
    )


# ---- golden vectors ------------------------------------------------------------------------------


def test_golden_task_weights(golden: Case) -> None:
    G, _ = golden.stacked()
    torch.testing.assert_close(solve.task_weights(G), 1 / t([2.68095136, 2.34520793]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_weight(golden: Case, dtype: torch.dtype) -> None:
    W = golden.weight(dtype=dtype)
    assert W.dtype == dtype and W.shape == (2, 3)
    torch.testing.assert_close(W.double(), GOLDEN_W, rtol=0, atol=1e-6)


def test_golden_bias(golden: Case) -> None:
    torch.testing.assert_close(golden.bias(GOLDEN_W), t([0.36793476, -0.19978382]), rtol=0, atol=1e-6)


def test_golden_norm() -> None:
    z = torch.stack([t([1, -1, 0], [0.5, 0.5, -1]), t([-1, 1, 0], [0, 1, -1])])
    gamma, beta = solve.norm_affine(
        z.mean(1),
        z.square().mean(1),
        t([1, 0.5, 1.5], [0.8, 1.2, 1]),
        t([0.1, 0, -0.1], [0, 0.2, 0.1]),
        t([0.9, 0.9, 1.2]),
        torch.ones(3).double(),
        t([0.05, 0.1, 0]),
        torch.zeros(3).double(),
        RIDGE,
        RHO,
    )
    assert beta is not None
    torch.testing.assert_close(gamma, t([0.94757593, 0.91558558, 1.26334071]), rtol=0, atol=1e-6)
    torch.testing.assert_close(beta, t([0.10639319, 0.29185894, 0.00650764]), rtol=0, atol=1e-6)


def test_golden_objective_and_oracle(golden: Case) -> None:
    """The oracle itself is held to the golden vectors; it judges everything below."""
    torch.testing.assert_close(golden.expected(), GOLDEN_W, rtol=0, atol=1e-6)
    assert golden.objective(GOLDEN_W) == pytest.approx(0.26963368, abs=1e-6)
    assert golden.objective(golden.W_merged) == pytest.approx(0.69348821, abs=1e-6)
    torch.testing.assert_close(golden.expected_bias(GOLDEN_W), t([0.36793476, -0.19978382]), rtol=0, atol=1e-6)


# ---- sanity cases --------------------------------------------------------------------------------


def test_identity_moments_return_the_expert() -> None:
    eye, W = torch.eye(3).double()[None], t([1, 2, 3], [4, 5, 6])
    merged, base = torch.zeros(2, 3).double(), -torch.ones(2, 3).double()
    torch.testing.assert_close(solve.linear_weight(eye, eye, W[None], merged, base, 0.0, 2.0, 0.0), W)


def test_zero_means_return_the_experts_bias() -> None:
    eye, zero, b = torch.eye(2).double(), torch.zeros(1, 2).double(), t([0.3, -0.7])
    bias = solve.linear_bias(zero, zero, eye[None], b[None], eye, -b, 5 * b, torch.ones(1).double(), 0.0, 2.0)
    torch.testing.assert_close(bias, b)


def test_white_norm_inputs_return_the_experts_affine() -> None:
    zero, one = torch.zeros(1, 2).double(), torch.ones(1, 2).double()
    gamma, beta = t([1.5, 0.5]), t([0.1, -0.2])
    anchor = torch.full((2,), 9.0).double()
    new = solve.norm_affine(zero, one, gamma[None], beta[None], anchor, anchor, anchor, anchor, 0.0, 2.0)
    torch.testing.assert_close(new, (gamma, beta))
    torch.testing.assert_close(
        solve.norm_affine(zero, one, gamma[None], None, anchor, anchor, None, None, 0.0, 2.0), (gamma, None)
    )


# ---- the solution minimises Eq. 15 ---------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-5, 0.05, 3.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_solution_is_the_minimum(ridge: float, alpha: float) -> None:
    case = random_case(1)
    W = case.weight(alpha, ridge).requires_grad_()
    best = case.objective(W.detach(), alpha, ridge)
    for seed in range(5):
        step = torch.randn(W.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ahead, behind = (case.objective(W.detach() + s * step, alpha, ridge) for s in (1e-3, -1e-3))
        assert ahead > best and behind > best
        assert abs(ahead - behind) / 2e-3 < 1e-6 * (1 + best)  # the slope along the step
    assert best < case.objective(case.W_merged, alpha, ridge)


def test_bias_is_the_minimum_given_the_weight() -> None:
    case = random_case(2)
    W = case.weight()
    omegas = [oracle.omega(m.G) for m in case.moments()]
    b_anc = oracle.anchor(case.b_merged, case.b_base, RHO)
    b = case.bias(W).requires_grad_()
    loss = RIDGE * (b - b_anc).square().sum()
    for f, w, W_i, b_i in zip(case.features, omegas, case.W_experts, case.b_experts, strict=True):
        gap = f.calibrated @ W.T + b - f.target(ALPHA) @ W_i.T - b_i
        loss = loss + w * (f.share @ gap.square().sum(1))
    loss.backward()
    assert b.grad is not None and float(b.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("with_beta", [True, False])
def test_norm_is_the_minimum(with_beta: bool) -> None:
    g = torch.Generator().manual_seed(3)
    z = torch.randn(3, 50, 4, generator=g, dtype=torch.float64) + 0.3
    gammas, betas, own, base = (
        torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (3, 3, 2, 2)
    )  # own, base: merged and base rows of γ, β
    gamma, beta = solve.norm_affine(
        z.mean(1), z.square().mean(1), gammas, betas if with_beta else None, own[0], base[0],
        own[1] if with_beta else None, base[1] if with_beta else None, RIDGE, RHO,
    )  # fmt: skip
    gamma.requires_grad_()
    loss = RIDGE * (gamma - oracle.anchor(own[0], base[0], RHO)).square().sum()
    if beta is None:
        gap = z * (gamma - gammas[:, None])
    else:
        beta.requires_grad_()
        loss = loss + RIDGE * (beta - oracle.anchor(own[1], base[1], RHO)).square().sum()
        gap = z * (gamma - gammas[:, None]) + beta - betas[:, None]
    (loss + gap.square().mean(1).sum()).backward()
    for part in (gamma, beta):
        assert part is None or (part.grad is not None and float(part.grad.abs().max()) < 1e-12)


# ---- limits --------------------------------------------------------------------------------------


def test_anchor_blends_base_and_merged() -> None:
    merged, base = t([1.0, 3.0]), t([0.0, 2.0])
    assert torch.equal(solve.anchor(merged, base, 1.0), merged)
    assert torch.equal(solve.anchor(merged, base, 0.0), base)
    assert torch.equal(solve.anchor(merged, base, 2.0), t([2.0, 4.0]))


def test_infinite_ridge_gives_the_anchor() -> None:
    case = random_case(4)
    torch.testing.assert_close(
        case.weight(ridge=1e12), oracle.anchor(case.W_merged, case.W_base, RHO), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(
        case.bias(case.W_merged, ridge=1e12),
        oracle.anchor(case.b_merged, case.b_base, RHO),
        rtol=0,
        atol=1e-10,
    )
    z, affine = torch.randn(2, 9, 3).double(), torch.randn(2, 3).double()
    gamma, beta = solve.norm_affine(
        z.mean(1), z.square().mean(1), affine, affine, affine[0], affine[1], affine[1], affine[0], 1e12, RHO
    )
    assert beta is not None
    torch.testing.assert_close(gamma, oracle.anchor(affine[0], affine[1], RHO), rtol=0, atol=1e-10)
    torch.testing.assert_close(beta, oracle.anchor(affine[1], affine[0], RHO), rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_one_task_without_drift_gives_its_expert(alpha: float) -> None:
    case = random_case(5, tasks=1, drift=0.0)
    expert = case.W_experts[0]
    gaps = [float((case.weight(alpha, ridge) - expert).norm()) for ridge in (1e-1, 1e-4, 1e-7, 0.0)]
    assert gaps[0] > 1e-3 and gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-5  # what is left is ε
    torch.testing.assert_close(case.bias(expert, alpha, 0.0), case.b_experts[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ridge", [0.0, 1e-5, 0.05, 3.0])
@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0])
def test_dead_inputs_keep_exactly_the_anchor(dtype: torch.dtype, ridge: float, rho: float) -> None:
    case = random_case(6, d=9, dead=4)
    case.W_merged, case.W_base = (torch.round(W * 256) / 256 for W in (case.W_merged, case.W_base))
    W = case.weight(ridge=ridge, rho=rho, dtype=dtype)
    anchor = oracle.anchor(case.W_merged, case.W_base, rho).to(dtype)  # exact: multiples of 1/256
    assert torch.equal(W[:, :4], anchor[:, :4])
    assert not torch.isclose(W[:, 4:], anchor[:, 4:]).any(dim=0).all()


def test_one_dead_task_does_not_hold_back_the_others() -> None:
    """A task whose inputs are all zero has ω = 1/ε and no moments: it changes nothing."""
    case, other = random_case(7, tasks=2), random_case(7, tasks=2)
    case.features.append(oracle.Features(torch.zeros(5, 6), torch.ones(5, 6)))
    case.W_experts = torch.cat([case.W_experts, torch.full((1, 4, 6), 77.0).double()])
    torch.testing.assert_close(case.weight(), other.weight(), rtol=0, atol=1e-12)


# ---- invariances ---------------------------------------------------------------------------------


def test_order_of_tasks_does_not_matter() -> None:
    case = random_case(8, tasks=4)
    W, b = case.weight(), case.bias(case.W_merged)
    order = [2, 0, 3, 1]
    case.features = [case.features[i] for i in order]
    case.W_experts, case.b_experts = case.W_experts[order], case.b_experts[order]
    torch.testing.assert_close(case.weight(), W, rtol=0, atol=1e-10)
    torch.testing.assert_close(case.bias(case.W_merged), b, rtol=0, atol=1e-10)


def test_order_of_samples_does_not_matter() -> None:
    case = random_case(9)
    W, b = case.weight(), case.bias(case.W_merged)
    for i, f in enumerate(case.features):
        order = torch.randperm(len(f.calibrated), generator=torch.Generator().manual_seed(i))
        case.features[i] = oracle.Features(f.calibrated[order], f.expert[order], f.weights[order])
    torch.testing.assert_close(case.weight(), W, rtol=0, atol=1e-10)
    torch.testing.assert_close(case.bias(case.W_merged), b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_scale_of_one_tasks_features_does_not_matter(factor: float) -> None:
    """ω makes the weights independent of how large a task's features are, hence λ scale-free."""
    case = random_case(10)
    W = case.weight()
    f = case.features[0]
    case.features[0] = oracle.Features(f.calibrated * factor, f.expert * factor, f.weights)
    torch.testing.assert_close(case.weight(), W, rtol=0, atol=1e-9)


# ---- the λ ladder --------------------------------------------------------------------------------


def test_factor_is_the_cholesky_of_the_ridged_matrix() -> None:
    G = random_case(11).stacked()[0][0]
    found = solve.factor(G, 0.05, 1e-8)
    L = found.lower_DD
    torch.testing.assert_close(L @ L.T, G + (0.05 + 1e-8) * torch.eye(6).double())
    assert torch.equal(L, L.tril()) and found.tries == 0
    assert found.ridge == pytest.approx(0.05 + 1e-8)


@pytest.mark.parametrize(("shift", "rungs"), [(0.02, 0), (0.2, 1), (2.0, 2), (20.0, 3)])
def test_ladder_multiplies_the_ridge_by_ten(shift: float, rungs: int) -> None:
    G = -shift * torch.eye(3).double()
    found = solve.factor(G, 0.05, 1e-8)
    assert found.tries == rungs
    assert found.ridge == pytest.approx(0.05 * 10**rungs, rel=1e-6)
    L = found.lower_DD
    torch.testing.assert_close(L @ L.T, (found.ridge - shift) * torch.eye(3).double())


def test_ladder_ends_with_an_error() -> None:
    with pytest.raises(solve.NotPositiveDefinite):
        solve.factor(-60 * torch.eye(3).double(), 0.05, 1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_factor_refuses_what_is_not_finite(bad: float) -> None:
    G = torch.eye(3).double()
    G[1, 1] = bad
    with pytest.raises(solve.NotPositiveDefinite):
        solve.factor(G, 0.05, 1e-8)


def test_factor_leaves_its_argument_alone() -> None:
    G = torch.eye(3).double()
    solve.factor(G, 0.05, 1e-8)
    assert torch.equal(G, torch.eye(3).double())


def test_no_ridge_still_solves_with_fewer_samples_than_inputs() -> None:
    """Directions that no sample has keep the anchor; the others fit the samples."""
    case = random_case(12, tasks=1, rows=3, d=8, drift=0.0)
    W = case.weight(ridge=0.0)
    X = case.features[0].calibrated
    torch.testing.assert_close(X @ W.T, X @ case.W_experts[0].T, rtol=0, atol=1e-5)
    unseen = torch.linalg.svd(X).Vh[3:]  # rows orthogonal to every sample
    anchor = oracle.anchor(case.W_merged, case.W_base, RHO)
    torch.testing.assert_close(W @ unseen.T, anchor @ unseen.T, rtol=0, atol=1e-6)


def test_float32_with_more_inputs_than_samples_and_a_tiny_ridge() -> None:
    """Rounding makes such a G slightly indefinite; the ridge (or the ladder) must absorb it."""
    case = random_case(13, tasks=2, rows=8, d=48)
    W = case.weight(ridge=1e-5, dtype=torch.float32).double()
    start = case.objective(case.W_merged, ridge=1e-5)
    assert case.objective(W, ridge=1e-5) < start


# ---- random cases against the oracle -------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    d = draw(st.integers(1, 12))
    return random_case(
        seed=draw(st.integers(0, 10**6)),
        tasks=draw(st.integers(1, 4)),
        rows=draw(st.sampled_from([1, 2, 5, 40])),
        d=d,
        m=draw(st.integers(1, 7)),
        scale=10.0 ** draw(st.integers(-12, 12)),
        dead=draw(st.integers(0, d)),
        twins=draw(st.booleans()),
        drift=draw(st.sampled_from([0.0, 0.3, 3.0])),
    )


@given(
    case=cases(),
    ridge=st.sampled_from([1e-5, 1e-3, 0.05, 3.0]),
    rho=st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.2]),
    alpha=st.sampled_from([0.0, 0.15, 0.3, 1.0]),
)
def test_weight_and_bias_equal_the_oracle(case: Case, ridge: float, rho: float, alpha: float) -> None:
    W, expected = case.weight(alpha, ridge, rho), case.expected(alpha, ridge, rho, eps_on_anchor=True)
    assert W.shape == expected.shape
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(W, expected, rtol=0, atol=1e-8 * scale)
    printed = case.expected(alpha, ridge, rho)  # ε in the matrix only: apart by a share ε / λ of the anchor
    gap = 2 * 1e-8 / ridge * float(oracle.anchor(case.W_merged, case.W_base, rho).norm())
    torch.testing.assert_close(W, printed, rtol=0, atol=gap + 1e-8 * scale)
    b_expected = oracle.linear_bias(
        case.moments(alpha),
        list(case.W_experts),
        list(case.b_experts),
        W,
        case.b_merged,
        case.b_base,
        ridge,
        rho,
    )
    torch.testing.assert_close(case.bias(W, alpha, ridge, rho), b_expected, rtol=1e-8, atol=1e-8)


@given(case=cases(), ridge=st.sampled_from([1e-3, 0.05]))
def test_objective_never_rises(case: Case, ridge: float) -> None:
    W = case.weight(ridge=ridge)
    assert torch.isfinite(W).all()
    before = case.objective(case.W_merged, ridge=ridge)
    assert case.objective(W, ridge=ridge) <= before * (1 + 1e-6)


@given(case=cases())
def test_float32_stays_finite_and_near_the_oracle(case: Case) -> None:
    """Features up to 1e12 make G up to 1e24: within float32, but not its square, which ‖G‖_F needs."""
    W = case.weight(dtype=torch.float32)
    expected = case.expected()
    torch.testing.assert_close(W.double(), expected, rtol=0, atol=2e-3 * (1 + float(expected.abs().max())))


@given(
    seed=st.integers(0, 10**6),
    tasks=st.integers(1, 4),
    channels=st.integers(1, 9),
    rows=st.sampled_from([1, 2, 30]),
    ridge=st.sampled_from([1e-5, 0.05, 3.0]),
    rho=st.sampled_from([0.0, 1.0, 2.0]),
    beta=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    scale=st.integers(-12, 12),
)
def test_norm_equals_the_oracle(
    seed: int,
    tasks: int,
    channels: int,
    rows: int,
    ridge: float,
    rho: float,
    beta: bool,
    offset: float,
    scale: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    kind = "layer" if beta else "rms"
    raw = 10.0**scale * torch.randn(tasks, rows, channels, generator=g, dtype=torch.float64)
    zs = [oracle.normalised(x, kind, 1e-6) for x in raw]
    weights: list[Tensor | None] = [0.01 + torch.rand(rows, generator=g) for _ in range(tasks)]
    gammas, betas = (torch.randn(tasks, channels, generator=g, dtype=torch.float64) for _ in range(2))
    merged, base, merged_b, base_b = torch.randn(4, channels, generator=g, dtype=torch.float64)
    expected = oracle.norm_affine(
        zs, weights, list(gammas), list(betas) if beta else None, merged, base, merged_b if beta else None,
        base_b if beta else None, ridge, rho, offset=offset,
    )  # fmt: skip
    tasks_f = [oracle.Features(z, z, w) for z, w in zip(zs, weights, strict=True)]
    gamma, new_beta = solve.norm_affine(
        torch.stack([f.share @ f.calibrated for f in tasks_f]),
        torch.stack([f.share @ f.calibrated.square() for f in tasks_f]),
        gammas + offset, betas if beta else None, merged + offset, base + offset, merged_b if beta else None,
        base_b if beta else None, ridge, rho,
    )  # fmt: skip
    torch.testing.assert_close(gamma - offset, expected[0], rtol=1e-8, atol=1e-8)
    if beta:
        assert new_beta is not None and expected[1] is not None
        torch.testing.assert_close(new_beta, expected[1], rtol=1e-8, atol=1e-8)
    else:
        assert new_beta is None


def test_scale_that_only_multiplies_by_one_plus_w_needs_no_special_case() -> None:
    """The anchor's shares sum to one, so solving for 1 + w and taking 1 off is solving for w."""
    z, w = torch.randn(2, 30, 3).double(), torch.randn(4, 3).double()
    moments = (z.mean(1), z.square().mean(1))
    shifted, _ = solve.norm_affine(*moments, 1 + w[:2], None, 1 + w[2], 1 + w[3], None, None, RIDGE, RHO)
    plain, _ = solve.norm_affine(*moments, w[:2], None, w[2], w[3], None, None, RIDGE, RHO)
    torch.testing.assert_close(shifted - 1, plain)


# ---- the same through streamed sums --------------------------------------------------------------


def streamed(case: Case, form: str, batches: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, float]:
    """W*, b* and the objective at W*, from batch by batch sums in the way the engine forms them."""
    W_anc = oracle.anchor(case.W_merged, case.W_base, RHO)
    sums = moments.GroupSums.zeros(W_anc.shape[1], {"m": len(W_anc)}, moments.Pool(torch.device("cpu")))
    for i, f in enumerate(case.features):
        module = moments.Module(case.W_experts[i].to(dtype), W_anc.to(dtype), case.b_experts[i].to(dtype))
        task = moments.TaskMoments(W_anc.shape[1], {"m": module}, ALPHA, form, moments.Pool(torch.device("cpu")))
        parts = [x.chunk(batches) for x in (f.calibrated, f.expert, f.weights)]
        for cali, exp, weights in zip(*parts, strict=True):
            outputs = exp @ case.W_experts[i].T + case.b_experts[i]
            task.add(cali.to(dtype), exp.to(dtype), weights, {"m": outputs.to(dtype)})
        task.fold(sums, f"task{i}")
    assert not sums.broken
    change = solve.solve_right(sums.R_MD["m"], solve.factor(sums.G_DD, RIDGE))
    W = W_anc + change
    b_anc = oracle.anchor(case.b_merged, case.b_base, RHO)
    b = solve.bias_from_sums(sums.desired_M["m"] - W @ sums.mean_D, sums.omega, b_anc, RIDGE)
    return W, b, sums.objective("m", change, RIDGE)


@pytest.mark.parametrize("form", ["inputs", "residuals"])
def test_streamed_golden(golden: Case, form: str) -> None:
    W, b, objective = streamed(golden, form, batches=2)
    torch.testing.assert_close(W, GOLDEN_W, rtol=0, atol=1e-6)
    torch.testing.assert_close(b, t([0.36793476, -0.19978382]), rtol=0, atol=1e-6)
    assert objective == pytest.approx(0.26963368, abs=1e-6)


@pytest.mark.parametrize("form", ["inputs", "residuals"])
@pytest.mark.parametrize("chunk", [1, 4096])
def test_splitting_batches_does_not_matter(form: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CHUNK", chunk)
    case = random_case(14, rows=37, d=7)
    W, objective = case.weight(), case.objective(case.weight())
    for batches in (1, 5, 37):
        found = streamed(case, form, batches)
        torch.testing.assert_close(found[0], W, rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], case.bias(W), rtol=0, atol=1e-9)
        assert found[2] == pytest.approx(objective, rel=1e-9)
        single = streamed(case, form, batches, torch.float32)
        torch.testing.assert_close(single[0], W, rtol=0, atol=2e-5)


@given(case=cases(), form=st.sampled_from(["inputs", "residuals"]))
def test_streamed_sums_equal_the_oracle(case: Case, form: str) -> None:
    W, b, objective = streamed(case, form, batches=1)
    expected = case.expected(eps_on_anchor=True)
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(W, expected, rtol=0, atol=1e-7 * scale)
    torch.testing.assert_close(b, case.bias(expected), rtol=1e-6, atol=1e-6 * scale)
    assert objective == pytest.approx(case.objective(expected), rel=1e-6, abs=1e-7 * scale**2)


@pytest.mark.parametrize("width", [3, 255, 256, 257, 700])
def test_gram_by_block_triangles_is_the_whole_gram(width: int) -> None:
    x = torch.randn(20, width, dtype=torch.float64)
    G = torch.zeros(width, width, dtype=torch.float64)
    for part in x.chunk(3):
        moments.add_gram(G, part)
    torch.testing.assert_close(moments.mirror(G), x.T @ x)


@pytest.mark.parametrize("form", ["inputs", "residuals"])
@pytest.mark.parametrize("where", ["calibrated", "expert"])
def test_a_task_with_features_that_are_not_finite_is_left_out(form: str, where: str) -> None:
    case = random_case(15, tasks=2)
    f = case.features[1]
    getattr(f, where)[3, 2] = float("nan")
    W_anc = oracle.anchor(case.W_merged, case.W_base, RHO)
    sums = moments.GroupSums.zeros(6, {"m": 4}, moments.Pool(torch.device("cpu")))
    task = moments.TaskMoments(
        6, {"m": moments.Module(case.W_experts[1], W_anc, None)}, ALPHA, form, moments.Pool(torch.device("cpu"))
    )
    task.add(f.calibrated, f.expert, None, {"m": f.expert @ case.W_experts[1].T})
    task.fold(sums, "bad")
    assert sums.broken == ["bad"]
    assert sums.omega == 0 and not sums.G_DD.any() and not sums.R_MD["m"].any()
