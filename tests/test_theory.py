"""The paper's propositions on real (tiny) architectures in float64: Eq. 1-8, 18, 21 and the companions in its appendix.

Here a layer is a function of one tensor, h ↦ f_ℓ(h): a block called with everything else that it reads held fixed.
Symbols: E expert, M merged, e drift, m local mismatch, p propagation, A path-averaged Jacobian of the merged layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from featcal.blocks import call_model
from featcal.drift.operator import averaged_operator
from pico import family_setup

Layer = Callable[[Tensor], Tensor]
FAMILIES = ["llama", "clip-vision", "gpt2", "gemma2", "bert"]


def layers_of(model: nn.Module, blocks: list[str], batch: Any) -> tuple[list[Layer], Tensor, list[Tensor]]:
    """f_1 … f_L of a model on one batch, the first layer's input h_0, and h_1 … h_L of an ordinary forward."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    outputs: list[Tensor] = []
    handles = []
    for name in blocks:
        block = model.get_submodule(name)
        handles.append(
            block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: calls.__setitem__(name, (args, kwargs)), with_kwargs=True
            )
        )
        handles.append(block.register_forward_hook(lambda _, args, output: outputs.append(output)))
    model.config.use_cache = False
    with torch.no_grad():
        call_model(model, batch)
    for handle in handles:
        handle.remove()

    def layer(name: str) -> Layer:
        args, kwargs = calls[name]
        return lambda h: model.get_submodule(name)(h, *args[1:], **kwargs)

    return [layer(name) for name in blocks], calls[blocks[0]][0][0], outputs


class Pair:
    """One expert and the merged model on one batch, walked from the same input, as in Eq. 1."""

    def __init__(self, family: str) -> None:
        s = family_setup(family, dtype=torch.float64)
        batch = s.data["task0"][0]
        self.expert_model, self.merged_model, self.batch, self.blocks = s.experts["task0"], s.merged, batch, s.blocks
        self.f_E, self.x, _ = layers_of(s.experts["task0"], s.blocks, batch)
        self.f_M, _, _ = layers_of(s.merged, s.blocks, batch)
        with torch.no_grad():
            self.h_E, self.h_M = self.walk(self.f_E), self.walk(self.f_M)
            self.e = [b - a for a, b in zip(self.h_E, self.h_M, strict=True)]
            self.m = [f(h) - g(h) for f, g, h in zip(self.f_M, self.f_E, self.h_E[:-1], strict=True)]
            self.p = [f(b) - f(a) for f, a, b in zip(self.f_M, self.h_E[:-1], self.h_M[:-1], strict=True)]

    def walk(self, layers: list[Layer]) -> list[Tensor]:
        """h_0 … h_L."""
        states = [self.x]
        for layer in layers:
            states.append(layer(states[-1]))
        return states

    def A(self, layer: int, v: Tensor, nodes: int = 24) -> Tensor:
        """A_ℓ v (Eq. 18) for layer ℓ = 1 … L: the mean over the segment h^E → h^M of the Jacobian, applied to v."""
        start, step, f = self.h_E[layer - 1], self.e[layer - 1], self.f_M[layer - 1]
        points, weights = np.polynomial.legendre.leggauss(nodes)
        total = torch.zeros_like(v)
        for t, w in zip((points + 1) / 2, weights / 2, strict=True):
            with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                total = total + float(w) * torch.func.jvp(f, (start + float(t) * step,), (v,))[1]
        return total


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return float((a - b).norm()) <= tolerance * float(b.norm())


def test_layers_composed_are_the_model(pair: Pair) -> None:
    """Eq. 1 as written here is the model's own forward."""
    with torch.no_grad():
        _, x, outputs = layers_of(pair.merged_model, pair.blocks, pair.batch)
        f_M, _, _ = layers_of(pair.merged_model, pair.blocks, pair.batch)
        for f, h, y in zip(f_M, [x, *outputs], outputs, strict=False):
            assert torch.equal(f(h), y)


def test_proposition_1_drift_is_local_mismatch_plus_propagation(pair: Pair) -> None:
    """Eq. 3: e_ℓ = m_ℓ + p_ℓ, exactly; p_1 = 0 because both walk from the same input; e_0 = 0."""
    assert not pair.e[0].any() and not pair.p[0].any()
    for e, m, p in zip(pair.e[1:], pair.m, pair.p, strict=True):
        assert float((e - m - p).abs().max()) <= 1e-14 * max(float(e.abs().max()), 1.0)
    assert float(pair.p[-1].norm()) > 0.1 * float(pair.e[-1].norm())  # not a trivial statement


def test_proposition_2_propagation_is_the_path_averaged_jacobian(pair: Pair) -> None:
    """Eq. 18 and 4: p_ℓ = A_ℓ e_{ℓ−1}, so e_ℓ = m_ℓ + A_ℓ e_{ℓ−1}."""
    for layer in range(2, len(pair.f_M) + 1):
        moved = pair.A(layer, pair.e[layer - 1])
        assert near(moved, pair.p[layer - 1], 1e-5)
        assert near(pair.m[layer - 1] + moved, pair.e[layer], 1e-5)


def test_the_package_computes_the_same_operator(pair: Pair) -> None:
    """`averaged_operator` (forward-mode derivatives) against `torch.func.jvp`."""
    with torch.no_grad():
        for layer in range(2, len(pair.f_M) + 1):
            f = pair.f_M[layer - 1]
            found = averaged_operator(
                lambda s, f=f: f(s["h"]), {"h": pair.h_E[layer - 1]}, {"h": pair.h_M[layer - 1]}, 24
            )
            assert near(found, pair.A(layer, pair.e[layer - 1]), 1e-9)


def test_equation_5_the_last_drift_is_a_sum_over_local_mismatches(pair: Pair) -> None:
    """e_L = Σ_ℓ A_L … A_{ℓ+1} m_ℓ, and Eq. 21: e_t = P_{s→t} e_s + Σ_{ℓ>s} P_{ℓ→t} m_ℓ."""
    depth = len(pair.f_M)

    def carried(v: Tensor, start: int, end: int) -> Tensor:
        for layer in range(start + 1, end + 1):
            v = pair.A(layer, v)
        return v

    total = sum(carried(pair.m[layer - 1], layer, depth) for layer in range(1, depth + 1))
    assert isinstance(total, Tensor) and near(total, pair.e[depth], 1e-5)
    for s in range(depth):
        for t in range(s + 1, depth + 1):
            parts = [carried(pair.m[layer - 1], layer, t) for layer in range(s + 1, t + 1)]
            value = carried(pair.e[s], s, t) + sum(parts)
            assert near(value, pair.e[t], 1e-5)


def test_operator_of_an_affine_layer_is_its_matrix() -> None:
    """A of f(h) = W h + b is W, whatever the segment: also with one node."""
    W, b, start, end = torch.randn(5, 5).double(), torch.randn(5).double(), *torch.randn(2, 3, 5).double()
    with torch.no_grad():
        found = averaged_operator(lambda s: s["h"] @ W.T + b, {"h": start}, {"h": end}, nodes=1)
    assert torch.allclose(found, (end - start) @ W.T, rtol=1e-13)


def test_proposition_3_output_drift_under_a_shared_and_an_own_head(pair: Pair) -> None:
    """Eq. 7: ‖δ‖ ≤ B ‖e_L‖ + ‖r‖ for linear heads ψ; r = 0 and the bound is B ‖e_L‖ when the head is shared."""
    h_E, h_M = pair.h_E[-1].flatten(0, 1), pair.h_M[-1].flatten(0, 1)
    width = h_E.shape[1]
    W_E = torch.randn(9, width).double()
    W_M = W_E + 0.05 * torch.randn(9, width).double()
    e = (h_M - h_E).norm(dim=1)
    shared = (h_M @ W_E.T - h_E @ W_E.T).norm(dim=1)
    assert bool((shared <= torch.linalg.matrix_norm(W_E, 2) * e * (1 + 1e-12)).all())
    delta = (h_M @ W_M.T - h_E @ W_E.T).norm(dim=1)
    r = (h_E @ W_M.T - h_E @ W_E.T).norm(dim=1)
    assert bool((delta <= (torch.linalg.matrix_norm(W_M, 2) * e + r) * (1 + 1e-12)).all())
    top = torch.linalg.svd(W_E).Vh[0]
    tight = (W_E @ (0.3 * top)).norm()
    assert float(tight) == pytest.approx(float(torch.linalg.matrix_norm(W_E, 2)) * 0.3)  # B cannot be smaller


def test_residual_layers_carry_drift_unchanged_and_grow_it_when_it_is_fed(pair: Pair) -> None:
    """f(h) = h + g(h): A = I + Ā^g, so e_ℓ = e_{ℓ−1} + (m_ℓ + Ā^g e_{ℓ−1}); ‖e_ℓ‖² grows by 2⟨e, s⟩ + ‖s‖²."""
    for layer in range(2, len(pair.f_M) + 1):
        before, e, m = pair.e[layer - 1], pair.e[layer], pair.m[layer - 1]
        f = pair.f_M[layer - 1]
        with torch.no_grad():
            branch = averaged_operator(
                lambda s, f=f: f(s["h"]) - s["h"], {"h": pair.h_E[layer - 1]}, {"h": pair.h_M[layer - 1]}, 24
            )
        step = m + branch
        assert near(pair.A(layer, before) - before, branch, 1e-8)
        assert near(before + step, e, 1e-5)
        growth = float(e.square().sum() - before.square().sum())
        assert growth == pytest.approx(float(2 * (before * step).sum() + step.square().sum()), rel=1e-4)
        assert (growth > 0) == (float(2 * (before * step).sum() + step.square().sum()) > 0)


def test_module_drift_splits_like_block_drift() -> None:
    """Eq. 8: D(W) = W X_cali − W_i X_exp = (W − W_i) X_exp + W (X_cali − X_exp)."""
    W, W_i = torch.randn(2, 4, 6).double()
    X_cali, X_exp = torch.randn(2, 6, 30).double()
    D = W @ X_cali - W_i @ X_exp
    assert torch.allclose(D, (W - W_i) @ X_exp + W @ (X_cali - X_exp), rtol=1e-12, atol=1e-12)


def test_weights_fitted_on_an_uncalibrated_prefix_see_an_extra_error() -> None:
    """App. F: fitted on X^M but run on X^cali, the output moves by W (X^cali − X^M); fitted on X^cali by nothing."""
    W = torch.randn(4, 6).double()
    X_M, X_cali, target = torch.randn(6, 30).double(), torch.randn(6, 30).double(), torch.randn(4, 30).double()
    fitted, deployed = W @ X_M - target, W @ X_cali - target
    assert torch.allclose(deployed - fitted, W @ (X_cali - X_M), rtol=1e-12, atol=1e-12)


numbers = st.lists(st.floats(-20, 20), min_size=2, max_size=8)


@given(numbers, st.data())
def test_scores_move_no_more_than_their_logits(logits: list[float], data: st.DataObject) -> None:
    """App. E: ‖softmax(z+δ) − softmax(z)‖₁ ≤ ‖δ‖_∞, |CE(z+δ, y) − CE(z, y)| ≤ 2 ‖δ‖_∞, top class safe below half
    the margin."""
    z = torch.tensor(logits, dtype=torch.float64)
    delta = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=len(z), max_size=len(z))), dtype=torch.float64)
    limit = float(delta.abs().max())
    assert float(((z + delta).softmax(0) - z.softmax(0)).abs().sum()) <= limit + 1e-12
    change = (z + delta).log_softmax(0) - z.log_softmax(0)
    assert float(change.abs().max()) <= 2 * limit + 1e-12
    top = z.topk(2).values
    if 2 * limit < float(top[0] - top[1]):
        assert int((z + delta).argmax()) == int(z.argmax())


def test_clip_scores_are_lipschitz_along_the_segment() -> None:
    """z = s T u/‖u‖ with u = P h: ‖δ‖ ≤ s ‖T‖₂ ‖P‖₂ / min ‖u‖ · ‖e‖ over the segment between the two features."""
    P, T = torch.randn(8, 16).double(), nn.functional.normalize(torch.randn(5, 8).double(), dim=1)
    scale = 100.0
    h_E = torch.randn(200, 16).double()
    e = 0.2 * torch.randn(200, 16).double()

    def psi(h: Tensor) -> Tensor:
        return scale * nn.functional.normalize(h @ P.T, dim=1) @ T.T

    delta = (psi(h_E + e) - psi(h_E)).norm(dim=1)
    t = torch.linspace(0, 1, 2001).double()[:, None, None]
    nearest = ((h_E + t * e) @ P.T).norm(dim=2).amin(0)
    bound = scale * torch.linalg.matrix_norm(T, 2) * torch.linalg.matrix_norm(P, 2) / nearest * e.norm(dim=1)
    assert bool((delta <= bound * (1 + 1e-9)).all())
    assert float((delta / bound).max()) > 0.05  # the bound says something
