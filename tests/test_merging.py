"""Data-free mergers against literal transcriptions of their definitions, in float64, and examples done by hand."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from featcal.errors import InputError, RunError
from featcal.merging import (
    REGISTRY,
    get_merger,
    merge_checkpoints,
    merge_modules,
    merge_state_dicts,
    merger_from,
    module_kinds,
)
from featcal.merging.base import Deltas, InMemory
from featcal.merging.iso_cts import specific_directions
from featcal.merging.spectral import directions, polar
from featcal.merging.ties import global_thresholds
from pico import family_setup, make, perturbed

DATA_FREE = ["average", "task_arithmetic", "ties", "dare", "dare_ties", "wudi", "iso_c", "iso_cts", "tsv_m"]
State = dict[str, Tensor]


def states(tasks: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[State, list[State]]:
    """A base and `tasks` experts with matrices of several shapes, vectors, a 4-d tensor and an integer buffer."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"up": (9, 6), "down": (6, 9), "square": (6, 6), "norm": (6,), "patch": (5, 3, 2, 2)}
    base = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    base["ids"] = torch.arange(4)
    experts = []
    for _ in range(tasks):
        expert = {n: t + 0.1 * torch.randn(t.shape, generator=g).to(dtype) for n, t in base.items() if n != "ids"}
        experts.append({**expert, "ids": torch.arange(4) + 7})
    return base, experts


def taus(base: State, experts: list[State], name: str) -> list[Tensor]:
    return [expert[name].double() - base[name].double() for expert in experts]


def merged(method: str, base: State, experts: list[State], **params: object) -> State:
    return merge_state_dicts(get_merger(method, params), base, experts)


def floats(state: State) -> list[str]:
    return [name for name, tensor in state.items() if tensor.is_floating_point()]


# ---- examples by hand


def test_average_and_task_arithmetic_by_hand():
    base, a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]), torch.tensor([1.0, -2.0])
    assert get_merger("average").merge_tensor("w", base, [a, b]).tolist() == [2.0, 0.0]
    assert get_merger("linear", {"weights": [3, 1]}).merge_tensor("w", base, [a, b]).tolist() == [2.5, 1.0]
    half = get_merger("task_arithmetic", {"scale": 0.5}).merge_tensor("w", base, [a, b])
    assert half.tolist() == [2.0, 0.0]
    each = get_merger("task_arithmetic", {"scale": [1.0, 0.25]}).merge_tensor("w", base, [a, b])
    assert each.tolist() == [3.0, 1.0]
    assert get_merger("task_arithmetic").merge_tensor("w", base.double(), [a.double()])[0] == 1.0 + 0.3 * 2.0


# d = 5, K = 40%: the third smallest magnitude is the threshold, so int(dK) + 1 = 3 entries survive in each.
A = [1.0, 3.0, 0.1, -0.2, 0.5]  # keeps 1, 3, 0.5
B = [-0.3, -4.0, 0.2, 2.0, 1.0]  # keeps -4, 2, 1


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("sum", [1.0, -4.0, 0.0, 2.0, 1.5]), ("mean", [1.0, -4.0, 0.0, 2.0, 0.75]), ("max", [1.0, -4.0, 0.0, 2.0, 1.0])],
)
def test_ties_by_hand(aggregate: str, expected: list[float]):
    method = get_merger("ties", {"scale": 1.0, "density": 0.4, "aggregate": aggregate})
    got = method.merge_tensor("w", torch.zeros(5), [torch.tensor(A), torch.tensor(B)])
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("others", "expected"), [(1.0, 2.0), (-1.0, -2.0), (0.0, -2.0)])
def test_ties_cancelling_entries_take_the_majority_sign_of_all_tensors(others: float, expected: float):
    base = {"a": torch.zeros(1), "b": torch.zeros(1)}
    experts = [
        {"a": torch.tensor([2.0]), "b": torch.tensor([others])},
        {"a": torch.tensor([-2.0]), "b": torch.tensor([others])},
    ]
    assert merged("ties", base, experts, density=1.0, scale=1.0)["a"].tolist() == [expected]


def test_ties_trims_over_all_tensors_unless_told_otherwise():
    base = {"small": torch.zeros(4), "large": torch.zeros(4)}
    expert = {"small": torch.tensor([1.0, 2.0, 3.0, 4.0]), "large": torch.tensor([10.0, 20.0, 30.0, 40.0])}
    everywhere = merged("ties", base, [expert], density=0.5, scale=1.0)
    assert everywhere["small"].tolist() == [0, 0, 0, 4] and everywhere["large"].tolist() == [10, 20, 30, 40]
    alone = merged("ties", base, [expert], density=0.5, scale=1.0, per_tensor=True)
    assert alone["small"].tolist() == [0, 0, 3, 4] and alone["large"].tolist() == [0, 0, 30, 40]


def test_iso_c_by_hand():
    base, a, b = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, -2.5]])
    # the sum is diag(4, -2): mean singular value 3, signs kept
    got = get_merger("iso_c", {"scale": 0.5}).merge_tensor("w", base, [a, b])
    assert torch.allclose(got, torch.tensor([[1.5, 0.0], [0.0, -1.5]]), atol=1e-6)
    vector = get_merger("iso_c", {"scale": 0.5}).merge_tensor("w", torch.zeros(2), [a[0], b[0]])
    assert vector.tolist() == [1.0, 0.0]


def test_tsv_m_by_hand():
    # Each task keeps one of two directions. They are orthogonal, so making them orthonormal changes nothing.
    base, a, b = torch.zeros(2, 2), torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([0.5, 2.0]))
    got = get_merger("tsv_m").merge_tensor("w", base, [a, b])
    assert torch.allclose(got, torch.diag(torch.tensor([3.0, 2.0])), atol=1e-6)


def test_wudi_by_hand_one_step():
    # Adam's first step moves every entry by lr against the sign of its gradient (eps is far smaller than it).
    tau = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])]
    base = torch.zeros(1, 2, dtype=torch.float64)
    got = get_merger("wudi", {"iterations": 1, "lr": 0.01}).merge_tensor("w", base, [t.double() for t in tau])
    assert torch.allclose(got, torch.tensor([[1.0, 2.0]]).double())  # orthogonal tasks: the sum is the minimum
    tau = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])]
    got = get_merger("wudi", {"iterations": 1, "lr": 0.01}).merge_tensor("w", base, [t.double() for t in tau])
    assert torch.allclose(got, torch.tensor([[1.99, 0.0]]).double(), atol=1e-8)


# ---- literal oracles in float64


def test_average_oracle():
    base, experts = states()
    got = merged("average", base, experts)
    for name in floats(base):
        assert torch.allclose(got[name], sum(e[name] for e in experts) / 3, rtol=0, atol=1e-15)


def test_task_arithmetic_oracle():
    base, experts = states()
    got = merged("task_arithmetic", base, experts)
    for name in floats(base):
        assert torch.allclose(got[name], base[name] + 0.3 * sum(taus(base, experts, name)), rtol=0, atol=1e-15)


def ties_oracle(tau: Tensor, density: float, aggregate: str) -> Tensor:
    """TIES on flattened task vectors (N, d), as published and in the reference implementation."""
    d = tau.shape[1]
    k = d - int(d * density)
    trimmed = torch.stack([t * (t.abs() >= t.abs().sort().values[k - 1]) for t in tau])
    elected = torch.sign(trimmed.sum(0))
    elected[elected == 0] = torch.sign(elected.sum())
    signs = elected.tolist()
    agree = [
        [v if v != 0 and (v > 0) == (sign > 0) else 0.0 for v, sign in zip(row, signs, strict=True)]
        for row in trimmed.tolist()
    ]
    columns = list(zip(*agree, strict=True))
    if aggregate == "sum":
        merged = [sum(c) for c in columns]
    elif aggregate == "mean":
        merged = [sum(c) / max(1, sum(v != 0 for v in c)) for c in columns]
    else:
        merged = [max(map(abs, c)) * sign for c, sign in zip(columns, signs, strict=True)]
    return torch.tensor(merged, dtype=torch.float64)


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max"])
@pytest.mark.parametrize("density", [0.05, 0.2, 0.73])
def test_ties_oracle(aggregate: str, density: float):
    base, experts = states()
    names = floats(base)
    flat = torch.stack([torch.cat([t.flatten() for t in (e[n] - base[n] for n in names)]) for e in experts])
    expected = ties_oracle(flat, density, aggregate)
    got = merged("ties", base, experts, density=density, aggregate=aggregate)
    moved = torch.cat([(got[n] - base[n]).flatten() for n in names])
    assert torch.allclose(moved, 0.3 * expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_streaming_threshold_is_the_exact_kth_value(dtype: torch.dtype):
    g = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, n, generator=g).to(dtype) * scale for n, scale in [(501, 1.0), (77, 1e-6), (1, 3e4)]]
    parts[0][:, :300] = parts[0][:, 300:301]  # many equal magnitudes
    parts[1][:, :40] = 0.0
    deltas = [Deltas(str(i), "other", part) for i, part in enumerate(parts)]
    for density in (0.0016, 0.1, 0.5, 0.9, 1.0):
        flat = torch.cat(parts, 1).abs()
        k = max(flat.shape[1] - int(flat.shape[1] * density), 1)
        expected = flat.kthvalue(k, dim=1).values.tolist()
        assert global_thresholds(InMemory(deltas), density) == expected


def dare_masks(base: State, method: str, seed: int = 42) -> State:
    """Masks of two experts, read off by merging experts that differ from a zero base by one everywhere."""
    dare = get_merger("dare", {"seed": seed, "drop_rate": 0.5})
    return {n: torch.stack([dare.mask(n, i, t.shape) for i in range(3)]) for n, t in base.items() if n != "ids"}


def test_dare_linear_oracle():
    base, experts = states()
    got = merged("dare", base, experts, drop_rate=0.5, scale=0.7)
    for name, mask in dare_masks(base, "dare").items():
        expected = base[name] + 0.7 * sum(t * m / 0.5 for t, m in zip(taus(base, experts, name), mask, strict=True))
        assert torch.allclose(got[name], expected, rtol=0, atol=1e-14)
    average = merged("dare", base, experts, combine="average", rescale=False)
    for name, mask in dare_masks(base, "dare").items():
        expected = base[name] + sum(t * m for t, m in zip(taus(base, experts, name), mask, strict=True)) / 3
        assert torch.allclose(average[name], expected, rtol=0, atol=1e-14)


def test_dare_ties_oracle():
    base, experts = states()
    masks, names = dare_masks(base, "dare_ties"), floats(base)
    flat = torch.stack(
        [torch.cat([((e[n] - base[n]) * masks[n][i] / 0.5).flatten() for n in names]) for i, e in enumerate(experts)]
    )
    got = merged("dare_ties", base, experts)
    moved = torch.cat([(got[n] - base[n]).flatten() for n in names])
    assert torch.allclose(moved, 0.5 * ties_oracle(flat, 0.2, "sum"), rtol=0, atol=1e-14)


def test_dare_masks_keep_the_stated_fraction_and_depend_on_seed_expert_and_tensor_only():
    dare = get_merger("dare", {"drop_rate": 0.9})
    mask = dare.mask("w", 0, torch.Size([100_000]))
    assert float(mask.double().mean()) == pytest.approx(0.1, abs=0.004)
    assert torch.equal(mask, dare.mask("w", 0, torch.Size([100_000])))
    others = [
        dare.mask("w", 1, mask.shape),
        dare.mask("v", 0, mask.shape),
        get_merger("dare", {"seed": 1}).mask("w", 0, mask.shape),
    ]
    assert not any(torch.equal(mask, other) for other in others)
    base, experts = states(dtype=torch.float32)
    backwards = dict(reversed(base.items()))
    first, second = merged("dare_ties", base, experts), merged("dare_ties", backwards, experts)
    assert all(torch.equal(first[n], second[n]) for n in base)


def wudi_oracle(tau: list[Tensor], iterations: int) -> Tensor:
    """The published loop with automatic differentiation."""
    vector = torch.nn.Parameter(sum(tau))
    optimizer = torch.optim.Adam([vector], lr=1e-5, weight_decay=0)
    for _ in range(iterations):
        loss = sum(((vector - t) @ t.T).square().sum() / t.square().sum() for t in tau)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return vector.detach()


def test_wudi_oracle():
    base, experts = states()
    got = merged("wudi", base, experts)
    for name in ("up", "down", "square"):
        expected = wudi_oracle(taus(base, experts, name), 400)
        start = sum(taus(base, experts, name))
        assert (expected - start).abs().max() > 1e-4
        assert torch.allclose(got[name] - base[name], expected, rtol=0, atol=1e-11)
    for name in ("norm", "patch"):
        assert torch.allclose(got[name], base[name] + sum(taus(base, experts, name)) / 3, rtol=0, atol=1e-15)


def test_wudi_leaves_out_tasks_that_did_not_touch_a_matrix():
    base, experts = states()
    experts[1]["up"] = base["up"].clone()  # 0/0 in the published loop
    got = merged("wudi", base, experts)["up"]
    tau = taus(base, experts, "up")
    assert torch.allclose(got, base["up"] + wudi_oracle([tau[0], tau[2]], 400), rtol=0, atol=1e-11)


def iso_c_oracle(tau: list[Tensor]) -> Tensor:
    u, s, v = torch.linalg.svd(sum(tau), full_matrices=False)
    return u @ torch.diag(torch.full_like(s, s.mean())) @ v


def iso_cts_oracle(tau: list[Tensor], fraction: float) -> Tensor:
    n, r = len(tau), min(tau[0].shape)
    common = r - n * round((r - int(fraction * r)) / n)
    each = (r - common) // n
    u, s, v = torch.linalg.svd(sum(tau), full_matrices=False)
    us, ss, vs = [u[:, :common]], [s[:common]], [v[:common]]
    for t in tau:
        ut, st, vt = torch.linalg.svd(t - u[:, :common] @ u[:, :common].T @ t, full_matrices=False)
        us.append(ut[:, :each])
        ss.append(st[:each])
        vs.append(vt[:each])
    a, _, b = torch.linalg.svd(torch.cat(us, 1), full_matrices=False)
    c, _, d = torch.linalg.svd(torch.cat(vs, 0), full_matrices=False)
    return (a @ b) * torch.cat(ss).mean() @ (c @ d)


def tsv_oracle(tau: list[Tensor]) -> Tensor:
    k = int(min(tau[0].shape) / len(tau))
    parts = [torch.linalg.svd(t, full_matrices=False) for t in tau]
    a, _, b = torch.linalg.svd(torch.cat([u[:, :k] for u, _, _ in parts], 1), full_matrices=False)
    c, _, d = torch.linalg.svd(torch.cat([v[:k] for _, _, v in parts], 0), full_matrices=False)
    return a @ b @ torch.diag(torch.cat([s[:k] for _, s, _ in parts])) @ c @ d


@pytest.mark.parametrize(
    ("method", "oracle", "scale"),
    [
        ("iso_c", iso_c_oracle, 1.0),
        ("iso_c", iso_c_oracle, 1.5),
        ("iso_cts", lambda tau: iso_cts_oracle(tau, 0.8), 1.0),
        ("iso_cts", lambda tau: iso_cts_oracle(tau, 0.4), 1.5),
        ("tsv_m", tsv_oracle, 1.0),
    ],
)
@pytest.mark.parametrize("tasks", [2, 3])
def test_spectral_oracles(method: str, oracle, scale: float, tasks: int):
    base, experts = states(tasks)
    fraction = {"common_fraction": 0.4} if (method, scale) == ("iso_cts", 1.5) else {}
    got = merged(method, base, experts, scale=scale, **fraction)
    for name in ("up", "down", "square"):
        assert torch.allclose(got[name] - base[name], scale * oracle(taus(base, experts, name)), rtol=0, atol=1e-12), (
            name
        )
    for name in ("norm", "patch"):
        assert torch.allclose(
            got[name], base[name] + scale * sum(taus(base, experts, name)) / tasks, rtol=0, atol=1e-14
        )


def test_iso_cts_shares_out_no_more_directions_than_there_are():
    assert specific_directions(768, 8, 0.8) == 19  # round(154 / 8)
    assert specific_directions(6, 3, 0.8) == 1
    assert specific_directions(3, 2, 0.0) == 1  # round(1.5) would be 2 for each of two tasks: four of three
    assert specific_directions(4, 8, 0.8) == 0


# ---- low-rank and untouched matrices: no arbitrary singular vectors


def test_rank_and_polar_factor_leave_out_null_directions():
    low = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 0.0]])
    assert directions(low).s.tolist() == pytest.approx([5.0])
    assert torch.allclose(polar(low), torch.tensor([[0.6, 0.0], [0.8, 0.0], [0.0, 0.0]]), atol=1e-6)
    assert len(directions(torch.zeros(3, 2)).s) == 0 and torch.equal(polar(torch.zeros(3, 2)), torch.zeros(3, 2))


@pytest.mark.parametrize("method", ["iso_c", "iso_cts", "tsv_m"])
def test_low_rank_experts_stay_in_their_own_span(method: str):
    g = torch.Generator().manual_seed(3)
    base = torch.zeros(8, 6, dtype=torch.float64)
    left = [torch.randn(8, 1, generator=g).double() for _ in range(2)]
    experts = [u @ torch.randn(1, 6, generator=g).double() for u in left]
    got = get_merger(method).merge_tensor("w", base, experts)
    span, _ = torch.linalg.qr(torch.cat(left, 1))
    assert torch.allclose(span @ span.T @ got, got, atol=1e-12) and got.norm() > 0.1


def test_tsv_m_of_equal_experts_is_their_top_directions():
    tau = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    got = get_merger("tsv_m").merge_tensor("w", torch.zeros_like(tau), [tau, tau])
    assert torch.allclose(got, torch.diag(torch.tensor([4.0, 3.0, 0.0, 0.0])).double(), atol=1e-12)


def test_tsv_m_with_more_tasks_than_rank_takes_the_mean_and_says_so():
    base = {"w": torch.zeros(4, 2)}
    experts = [{"w": torch.full((4, 2), float(i))} for i in range(1, 4)]
    notes: list[str] = []
    got = merge_state_dicts(get_merger("tsv_m"), base, experts, notes=notes)
    assert torch.allclose(got["w"], torch.full((4, 2), 2.0))
    assert notes == ["w: mean of the task vectors, since its rank 2 is smaller than the number of tasks"]


# ---- what every method does alike


@pytest.mark.parametrize("method", DATA_FREE)
def test_dtype_integers_and_untouched_tensors(method: str):
    base, experts = states(dtype=torch.bfloat16)
    for expert in experts:
        expert["square"], expert["norm"] = base["square"].clone(), base["norm"].clone()
    got = merged(method, base, experts)
    assert list(got) == list(base)
    assert torch.equal(got["ids"], base["ids"]) and got["ids"].dtype == torch.int64
    assert torch.equal(got["square"], base["square"]) and torch.equal(got["norm"], base["norm"])
    assert got["up"].dtype == torch.bfloat16 and not torch.equal(got["up"], base["up"])
    wide = merged(method, *_as(torch.float64, base, experts))
    assert torch.allclose(got["up"].double(), wide["up"], rtol=2**-7, atol=1e-3)
    got["square"].add_(1)
    assert not torch.equal(got["square"], base["square"])  # not a view of the base


def _as(dtype: torch.dtype, base: State, experts: list[State]) -> tuple[State, list[State]]:
    cast = [{n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()} for state in [base, *experts]]
    return cast[0], cast[1:]


@pytest.mark.parametrize("method", DATA_FREE)
def test_same_expert_once_and_zero_task_vectors(method: str):
    base, _ = states()
    got = merged(method, base, [base, base])
    assert all(torch.equal(got[name], base[name]) for name in base)
    _, (expert, *_) = states(1)
    got = merged(method, base, [expert, base])
    assert all(t.isfinite().all() for n, t in got.items() if n != "ids")


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties", "wudi", "iso_c", "iso_cts", "tsv_m"])
def test_order_of_experts_does_not_matter(method: str):
    base, experts = states()
    first, second = merged(method, base, experts), merged(method, base, experts[::-1])
    assert all(torch.allclose(first[n], second[n], rtol=0, atol=1e-10) for n in floats(base))


@pytest.mark.parametrize("method", DATA_FREE)
@pytest.mark.parametrize("family", ["clip", "bert", "t5", "llama", "gpt2", "qwen3-moe"])
def test_every_method_on_every_family(method: str, family: str):
    setup = family_setup(family, tasks=2)
    params = {"iterations": 20} if method == "wudi" else {}
    notes: list[str] = []
    model = merge_modules(get_merger(method, params), setup.base, setup.experts, notes=notes)
    assert notes == [] and type(model) is type(setup.base)
    before, after = setup.base.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    changed = [n for n in after if not torch.equal(before[n], after[n])]
    assert (
        set(changed) == {n for n, t in before.items() if t.is_floating_point()} or "dare" in method or method == "ties"
    )
    assert len(changed) > len(after) / 2
    assert all(t.isfinite().all() for t in after.values())


def test_merge_modules_keeps_ties_and_inputs():
    base = make("llama")
    experts = [perturbed(base, 1), perturbed(base, 2)]
    before = copy.deepcopy(base.state_dict())
    model = merge_modules(get_merger("task_arithmetic"), base, experts)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(t, before[n]) for n, t in base.state_dict().items())


def test_tied_tensors_count_once_and_untied_ones_of_an_expert_are_noted():
    base = make("llama")
    experts = [perturbed(base, 1)]
    names = [name for name, _ in base.named_parameters()]
    once = {name: base.state_dict()[name] for name in names}
    expected = merge_state_dicts(get_merger("ties"), once, [experts[0].state_dict()])
    notes: list[str] = []
    got = merge_modules(get_merger("ties"), base, experts, notes=notes).state_dict()
    assert notes == [] and all(torch.equal(got[name], expected[name]) for name in names)
    experts[0].lm_head.weight = nn.Parameter(experts[0].lm_head.weight + 1)
    merge_modules(get_merger("ties"), base, experts, notes=notes)
    assert len(notes) == 1 and notes[0].startswith(
        "lm_head.weight: is model.embed_tokens.weight in the base; 'expert 1'"
    )


def test_conv1d_weights_are_merged_as_the_linear_they_are():
    class Net(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.layer = module

    from transformers.pytorch_utils import Conv1D

    weights = [torch.randn(6, 4) for _ in range(3)]
    for method in ("wudi", "iso_cts"):
        linears, convs = [], []
        for weight in weights:
            linear, conv = Net(nn.Linear(4, 6)), Net(Conv1D(6, 4))
            linear.layer.weight.data, conv.layer.weight.data = weight.clone(), weight.T.clone()
            linear.layer.bias.data.zero_(), conv.layer.bias.data.zero_()
            linears.append(linear), convs.append(conv)
        straight = merge_modules(get_merger(method), linears[0], linears[1:])
        turned = merge_modules(get_merger(method), convs[0], convs[1:])
        assert torch.allclose(straight.layer.weight, turned.layer.weight.T, atol=1e-6)


def test_module_kinds():
    kinds = module_kinds(make("gpt2"))
    assert kinds["transformer.h.0.attn.c_attn.weight"] == "conv1d" and kinds["transformer.wte.weight"] == "embedding"
    assert kinds["transformer.h.0.ln_1.weight"] == "norm" and kinds["transformer.h.0.attn.c_attn.bias"] == "other"
    assert module_kinds(make("llama"))["model.layers.0.mlp.up_proj.weight"] == "linear"


def test_dare_on_linear_weights_only():
    base = make("bert")
    experts = [perturbed(base, 1), perturbed(base, 2)]
    model = merge_modules(get_merger("dare", {"linear_only": True, "drop_rate": 0.9, "scale": 1.0}), base, experts)
    plain = merge_modules(get_merger("task_arithmetic", {"scale": 1.0}), base, experts)
    kinds = module_kinds(base)
    for name, tensor in model.state_dict().items():
        same = torch.allclose(tensor.float(), plain.state_dict()[name].float(), atol=1e-6)
        assert same == (kinds.get(name) != "linear"), name


def test_exclude_and_keep_mean():
    base, experts = states()
    got = merged("iso_c", base, experts, exclude=["up", "pa*"], keep_mean=["down"])
    assert torch.equal(got["up"], base["up"]) and torch.equal(got["patch"], base["patch"])
    assert torch.allclose(got["down"], sum(e["down"] for e in experts) / 3, atol=1e-14)
    # excluded entries do not count for TIES' threshold
    less = merged("ties", base, experts, exclude=["patch"])
    without = {n: t for n, t in base.items() if n != "patch"}
    assert torch.equal(less["up"], merged("ties", without, experts)["up"])
    with pytest.raises(InputError, match="leaves no tensor to merge"):
        merged("average", base, experts, exclude=["*"])


# ---- streaming over checkpoints


class Recording:
    """A checkpoint that counts what is held: every tensor handed out is a fresh copy."""

    def __init__(self, state: State, log: list[str]) -> None:
        self.state, self.log = state, log

    def keys(self):
        return list(self.state)

    def get(self, key: str) -> Tensor:
        self.log.append(key)
        return self.state[key].clone()

    def dtype(self, key: str) -> torch.dtype:
        return self.state[key].dtype


@pytest.mark.parametrize("method", DATA_FREE)
def test_checkpoints_are_read_tensor_by_tensor(method: str):
    base, experts = states(dtype=torch.float32)
    log: list[str] = []
    sources = {f"task{i}": Recording(e, log) for i, e in enumerate(experts)}
    stream = merge_checkpoints(get_merger(method), Recording(base, log), sources)
    first, _ = next(stream)
    passes = log.count("square")
    assert passes == (12 if method in ("ties", "dare_ties") else 0)  # threshold twice, signs once, by four models
    assert first == "up" and log.count("up") == passes + 4
    rest = dict(stream)
    whole = merge_state_dicts(get_merger(method), base, experts)
    assert list(rest) == list(base)[1:] and all(torch.equal(rest[n], whole[n]) for n in rest)


def test_other_vocabulary_rows_keep_the_base_and_are_noted():
    base = {"embed": torch.zeros(4, 3), "w": torch.zeros(3, 3), "extra": torch.zeros(2)}
    a = {"embed": torch.ones(6, 3), "w": torch.ones(3, 3), "extra": torch.ones(2)}
    b = {"embed": torch.ones(4, 3), "w": torch.ones(3, 3)}
    for method in ("task_arithmetic", "ties"):
        notes: list[str] = []
        got = merge_state_dicts(get_merger(method), base, {"math": a, "code": b}, notes=notes)
        assert torch.equal(got["embed"], base["embed"]) and torch.equal(got["extra"], base["extra"])
        assert torch.allclose(got["w"], torch.full((3, 3), 0.6))
        assert sorted(notes) == [
            "embed: keeps the base's value, 'math' has 6 rows, the base 4 (vocabulary or classes)",
            "extra: keeps the base's value, 'code' does not have it",
        ]


def test_merge_refuses_what_cannot_be_merged():
    base = {"w": torch.zeros(3, 3)}
    with pytest.raises(InputError, match=r"'math' has shape \(3, 4\) for tensor 'w', the base \(3, 3\)"):
        merge_state_dicts(get_merger("average"), base, {"math": {"w": torch.ones(3, 4)}})
    with pytest.raises(InputError, match="'math' has none of the base's tensors"):
        merge_state_dicts(get_merger("average"), base, {"math": {"model.w": torch.ones(3, 3)}})
    with pytest.raises(InputError, match="at least one expert"):
        merge_state_dicts(get_merger("average"), base, {})
    with pytest.raises(InputError, match="lists 2 numbers for 1 experts"):
        merge_state_dicts(get_merger("task_arithmetic", {"scale": [0.1, 0.2]}), base, [{"w": torch.ones(3, 3)}])


@pytest.mark.parametrize("method", DATA_FREE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_name_the_expert_and_the_tensor(method: str, bad: float):
    base, experts = states(2, torch.float32)
    experts[1]["up"][2, 3] = bad
    with pytest.raises(InputError, match="tensor 'up' of 'b' has values that are not finite"):
        merge_state_dicts(
            get_merger(method, {"drop_rate": 0.0} if "dare" in method else {}), base, {"a": experts[0], "b": experts[1]}
        )


def test_overflow_of_the_file_dtype_is_an_error():
    base = {"w": torch.zeros(1, 1, dtype=torch.float16)}
    expert = {"w": torch.full((1, 1), 60000.0, dtype=torch.float16)}
    with pytest.raises(RunError, match=r"overflows torch\.float16"):
        merge_state_dicts(get_merger("task_arithmetic", {"scale": 2.0}), base, [expert])


# ---- the registry


def test_defaults_are_the_published_ones():
    assert get_merger("task_arithmetic").scale == 0.3
    ties = get_merger("ties")
    assert (ties.scale, ties.density, ties.aggregate, ties.per_tensor) == (0.3, 0.2, "sum", False)
    dare = get_merger("dare")
    assert (dare.drop_rate, dare.combine, dare.rescale, dare.linear_only) == (0.5, "linear", True, False)
    wudi = get_merger("wudi")
    assert (wudi.iterations, wudi.lr, wudi.scale) == (400, 1e-5, 1.0)
    assert (get_merger("iso_c").scale, get_merger("iso_cts").scale, get_merger("tsv_m").scale) == (1.0, 1.0, 1.0)
    assert get_merger("iso_cts").common_fraction == 0.8
    assert merger_from({"method": "dare_ties", "drop_rate": 0.8}) == get_merger(
        "dare", {"combine": "ties", "drop_rate": 0.8}
    )
    assert merger_from("average") == get_merger("simple_average") == get_merger("linear")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "task_arithmatic"}, "unknown merge method 'task_arithmatic'; did you mean 'task_arithmetic'?"),
        ({"method": "ties", "densty": 0.2}, "merge method 'ties' has no parameter 'densty'; did you mean 'density'?"),
        ({"method": "ties", "density": 20}, r"ties.density: input should be less than or equal to 1 \(got 20\)"),
        ({"method": "wudi", "iterations": "many"}, r"wudi.iterations: .* \(got 'many'\)"),
        ({"scale": 0.3}, "a merge needs 'method', one of .*task_arithmetic"),
        ({"method": "linear", "weights": [1, -1]}, "average.weights sum to zero"),
    ],
)
def test_mistakes_in_a_merge_are_named(spec: dict, message: str):
    with pytest.raises(InputError, match=message):
        merge_state_dicts(merger_from(spec), {"w": torch.zeros(1)}, [{"w": torch.ones(1)}, {"w": torch.ones(1)}])


def test_every_registered_method_has_a_description_and_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, cls in REGISTRY.items():
            assert cls.method == name and cls.__doc__
            assert all(field.description for key, field in cls.model_fields.items()), name
