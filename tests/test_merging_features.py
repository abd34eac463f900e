"""Mergers that use samples, against literal transcriptions of their definitions in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal.api import survey
from featcal.blocks import call_model
from featcal.calibrate import Task
from featcal.errors import InputError
from featcal.merging import get_merger, merge_blocks, merge_checkpoints, merge_modules
from featcal.merging.features import solve_pseudo, solve_regular
from featcal.merging.models import after_the_stem
from featcal.names import KeyMap, skeleton
from featcal.reader import open_checkpoint
from featcal.settings import make_settings
from featcal.skeleton import DiskNetwork
from featcal.stream import Stream
from pico import Setup, family_setup, perturbed

FAMILIES = ["clip-vision", "bert", "t5", "llama", "gpt2", "mixer"]
NEED_DATA = ["regmean", "regmean_pp", "lot", "fisher", "adamerging"]


def setup_of(family: str, tasks: int = 2, dtype: torch.dtype = torch.float64) -> Setup:
    return family_setup(family, tasks=tasks, dtype=dtype, noise=0.2)


def run(method: str, setup: Setup, **params: Any) -> dict[str, Tensor]:
    notes = params.pop("notes", None)
    blocks = ["blocks.*"] if hasattr(setup.base, "blocks") else None
    model = merge_modules(
        get_merger(method, params), setup.base, setup.experts, data=setup.data, blocks=blocks, device="cpu", notes=notes
    )
    return model.state_dict()


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def matrix(module: nn.Module, weight: Tensor) -> Tensor:
    return weight.T if isinstance(module, Conv1D) else weight


def linears(setup: Setup, inside: list[str] | None = None) -> list[str]:
    """Linear modules of the blocks that the merger may touch."""
    prefixes = tuple(f"{name}." for name in (inside or setup.blocks))
    return [n for n, m in setup.base.named_modules() if is_linear(m) and n.startswith(prefixes)]


def real_rows(name: str, x: Tensor, batch: Any) -> Tensor:
    """The rows of a module's input that are not padding, (rows, width)."""
    if not isinstance(batch, dict) or "attention_mask" not in batch or name.startswith("vision_model"):
        return x.reshape(-1, x.shape[-1])
    own = name.startswith("decoder.") and not name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    mask = batch["decoder_attention_mask" if own else "attention_mask"]
    return x.reshape(-1, x.shape[-1])[mask.reshape(-1).bool()]


def inputs(model: nn.Module, names: list[str], batches: list[Any]) -> dict[str, Tensor]:
    """What each module reads over all batches, padding left out, (rows, width)."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in batches:
        handles = []
        for name in names:

            def hook(_: nn.Module, args: Any, name: str = name, batch: Any = batch) -> None:
                seen[name].append(real_rows(name, args[0].detach(), batch))

            handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
        with torch.no_grad():
            call_model(model, batch)
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def mean_state(setup: Setup) -> dict[str, Tensor]:
    states = [expert.state_dict() for expert in setup.experts.values()]
    return {n: sum(s[n] for s in states) / len(states) if t.is_floating_point() else t for n, t in states[0].items()}


def regress(grams: list[Tensor], weights: list[Tensor], gamma: float) -> Tensor:
    """RegMean as in its paper: (Σ G̃)^{-1} Σ G̃ Wᵀ, transposed."""
    scaled = [g * gamma + torch.diag(g.diag()) * (1 - gamma) for g in grams]
    return (torch.linalg.inv(sum(scaled)) @ sum(g @ w.T for g, w in zip(scaled, weights, strict=True))).T


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0.95, 0.1])
def test_regmean(family: str, gamma: float):
    setup = setup_of(family)
    expected = mean_state(setup)
    names = linears(setup)
    features = [inputs(expert, names, setup.data[task]) for task, expert in setup.experts.items()]
    for name in names:
        module = setup.base.get_submodule(name)
        weights = [matrix(module, e.get_submodule(name).weight.detach()) for e in setup.experts.values()]
        grams = [f[name].T @ f[name] / len(f[name]) for f in features]
        expected[f"{name}.weight"] = matrix(module, regress(grams, weights, gamma))
    got = run("regmean", setup, off_diagonal=gamma)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-9), name


@pytest.mark.parametrize("family", FAMILIES)
def test_regmean_pp(family: str):
    """Block by block: each expert's block put into the model merged so far, which then runs as a whole."""
    setup = setup_of(family)
    mean, merged = mean_state(setup), copy.deepcopy(setup.base)
    prefixes = tuple(f"{block}." for block in setup.blocks)
    stem = ("embed", "shared", "wte", "wpe", "pre_layrnorm")
    for name, p in merged.named_parameters():
        if name.startswith(prefixes) or any(part in name for part in stem):
            p.data = mean[name].clone()
    for block in setup.blocks:
        names = linears(setup, [block])
        features = []
        for task, expert in setup.experts.items():
            trial = copy.deepcopy(merged)
            trial.get_submodule(block).load_state_dict(expert.get_submodule(block).state_dict())
            features.append(inputs(trial, names, setup.data[task]))
        for name in names:
            module = merged.get_submodule(name)
            weights = [matrix(module, e.get_submodule(name).weight.detach()) for e in setup.experts.values()]
            grams = [f[name].T @ f[name] / len(f[name]) for f in features]
            module.weight.data = matrix(module, regress(grams, weights, 0.95))
    got = run("regmean_pp", setup)
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-9), name


def lot_norms(setup: Setup) -> list[str]:
    prefixes = tuple(f"{name}." for name in setup.blocks)
    return [n for n, m in setup.base.named_modules() if "norm" in type(m).__name__.lower() and n.startswith(prefixes)]


@pytest.mark.parametrize("family", FAMILIES)
def test_lot(family: str):
    setup, rtol = setup_of(family), 1e-7
    expected, base = mean_state(setup), setup.base.state_dict()
    names, norms = linears(setup), lot_norms(setup)
    features = [inputs(expert, names + norms, setup.data[task]) for task, expert in setup.experts.items()]
    for name in names:
        module, start = setup.base.get_submodule(name), base[f"{name}.weight"]
        grams = [f[name].T @ f[name] for f in features]
        pulls = [
            g @ matrix(module, e.get_submodule(name).weight.detach() - start).T
            for g, e in zip(grams, setup.experts.values(), strict=True)
        ]
        inverse = torch.linalg.pinv(sum(grams), rtol=rtol, hermitian=True)
        expected[f"{name}.weight"] = start + matrix(module, (inverse @ sum(pulls)).T)
    for name in norms:
        start, top, bottom = base[f"{name}.weight"], 0.0, 0.0
        for f, expert in zip(features, setup.experts.values(), strict=True):
            module = expert.get_submodule(name)
            eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
            x = f[name] - f[name].mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else f[name]
            energy = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).square().sum(0)
            top, bottom = top + energy * (module.weight.detach() - start), bottom + energy
        expected[f"{name}.weight"] = start + top / bottom
    got = run("lot", setup, rtol=rtol)
    for name, tensor in expected.items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-6), (name, float((got[name] - tensor).abs().max()))


def test_a_single_expert_comes_back_where_its_features_reach():
    setup = setup_of("bert", tasks=1)
    setup.data["task0"] = setup.data["task0"] * 20
    (expert,) = setup.experts.values()
    for method in ("regmean", "regmean_pp"):
        got = run(method, setup)
        for name in linears(setup):
            assert torch.allclose(got[f"{name}.weight"], expert.get_submodule(name).weight, atol=1e-8)


def test_solvers_on_singular_moments():
    G, R = torch.diag(torch.tensor([2.0, 1.0, 0.0])).double(), torch.tensor([[2.0, 3.0, 0.0]]).double()
    for solve in (solve_regular, solve_pseudo):
        got, regular = solve(R, G)
        assert got.tolist() == [[1.0, 3.0, 0.0]] and not regular
    got, regular = solve_regular(R, G + torch.eye(3))
    assert torch.allclose(got, R @ torch.linalg.inv(G + torch.eye(3))) and regular


def test_an_input_that_never_occurs_keeps_the_mean_and_is_noted():
    setup = setup_of("mixer")
    for model in (setup.base, *setup.experts.values()):
        model.blocks[0].channel_norm.weight.data[3] = 0.0
        model.blocks[0].channel_norm.bias.data[3] = 0.0
    notes: list[str] = []
    got = run("regmean", setup, notes=notes)
    mean = mean_state(setup)["blocks.0.channel_in.weight"]
    assert torch.allclose(got["blocks.0.channel_in.weight"][:, 3], mean[:, 3], atol=1e-12)
    assert not torch.allclose(got["blocks.0.channel_in.weight"][:, 2], mean[:, 2], atol=1e-3)
    assert notes == ["blocks.0: the features of channel_in do not span all inputs (pseudo-inverse)"]


def test_features_that_are_not_finite_leave_the_mean_and_are_noted():
    setup, notes = setup_of("vit"), []
    setup.data["task1"][0]["pixel_values"][0, 0, 0, 0] = float("nan")
    mean = mean_state(setup)
    got = run("regmean", setup, notes=notes)
    assert all(torch.allclose(got[n], mean[n], atol=1e-12) for n in mean)
    assert len(notes) == 8 and notes[0].endswith("get the experts' mean, their features are not finite")


# ---- predictions


def scores_of(family: str) -> Callable[[nn.Module, Any], Tensor]:
    def last(model: nn.Module, batch: Any) -> Tensor:
        logits = call_model(model, batch).logits
        if family == "t5":
            return logits[:, 0]
        if family in ("llama", "gpt2"):
            ends = [int(row.nonzero().max()) for row in batch["attention_mask"]]
            return logits[range(len(ends)), ends]
        return logits

    return last


def fisher_oracle(setup: Setup, score: Callable[[nn.Module, Any], Tensor]) -> dict[str, Tensor]:
    """As in the reference implementation, all factors written out."""
    n, fishers = len(setup.experts), []
    for task, expert in setup.experts.items():
        total, count = {name: torch.zeros_like(p) for name, p in expert.named_parameters()}, 0
        for batch in setup.data[task]:
            logits = score(expert, batch)
            loss = (logits.softmax(-1).detach().sqrt() * logits.log_softmax(-1)).sum(-1).sum(0)
            grads = torch.autograd.grad(loss, list(expert.parameters()), allow_unused=True)
            for (name, _), grad in zip(expert.named_parameters(), grads, strict=True):
                total[name] += 0 if grad is None else grad**2
            count += len(logits)
        fishers.append({name: t / count for name, t in total.items()})
    norms = [torch.sqrt(sum((f**2).sum() for f in fisher.values())) for fisher in fishers]
    inverse = [1 / (norm + 1e-6) for norm in norms]
    merged = {}
    for name, _ in setup.base.named_parameters():
        weights = [(f[name] + 1e-6) / n * v / sum(inverse) for f, v in zip(fishers, inverse, strict=True)]
        values = [dict(e.named_parameters())[name].detach() for e in setup.experts.values()]
        merged[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return merged


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "gpt2", "vit"])
def test_fisher(family: str):
    setup = setup_of(family, tasks=3)
    got = run("fisher", setup)
    for name, tensor in fisher_oracle(setup, scores_of(family)).items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-10), name


class Functional(nn.Module):
    """A model with other parameters, through which gradients flow to them."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = lambda batch: torch.func.functional_call(model, state, (), batch)
        self.anchor = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, **batch: Any) -> Any:
        return self.call(batch)


def adamerging_oracle(
    setup: Setup, score: Callable, layer: bool, steps: int, order: list[list[int]]
) -> dict[str, Tensor]:
    """Automatic differentiation through the merged weights, as in the reference implementation."""
    base = {name: p.detach() for name, p in setup.base.named_parameters()}
    taus = [{name: p.detach() - base[name] for name, p in e.named_parameters()} for e in setup.experts.values()]
    free = torch.full((len(taus), len(base) if layer else 1), 0.3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=1e-2)

    def merged() -> dict[str, Tensor]:
        columns = free.expand(-1, len(base)).T
        return {
            n: base[n] + sum(w * t[n] for w, t in zip(c, taus, strict=True)) for n, c in zip(base, columns, strict=True)
        }

    for step in range(steps):
        state = merged()
        for i, task in enumerate(setup.experts):
            logits = score(Functional(setup.base, state), setup.data[task][order[i][step]])
            p = logits.softmax(-1)
            (-(p * (p + 1e-8).log()).sum(-1).mean()).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in merged().items()}


@pytest.mark.parametrize("family", ["bert", "vit", "t5", "llama"])
@pytest.mark.parametrize("level", ["layer", "task"])
def test_adamerging(family: str, level: str, monkeypatch: pytest.MonkeyPatch):
    from featcal.merging import adamerging

    setup = setup_of(family)
    order = [[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]]
    queue = iter(order)
    monkeypatch.setattr(adamerging, "shuffled", lambda batches, seed: iter([batches[i] for i in next(queue)]))
    got = run("adamerging", setup, level=level, steps=5, lr=1e-2)
    expected = adamerging_oracle(setup, scores_of(family), level == "layer", 5, order)
    for name, tensor in expected.items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-10), name
    start = run("task_arithmetic", setup)
    assert max(float((start[n] - t).abs().max()) for n, t in expected.items()) > 1e-4


def test_adamerging_lowers_the_entropy_and_reports_its_coefficients():
    setup, notes = setup_of("bert", dtype=torch.float32), []
    from featcal.merging.adamerging import entropy

    def total(state: dict[str, Tensor]) -> float:
        model = copy.deepcopy(setup.base)
        model.load_state_dict(state)
        with torch.no_grad():
            return sum(float(entropy(call_model(model, b).logits)) for batches in setup.data.values() for b in batches)

    start, end = run("task_arithmetic", setup), run("adamerging", setup, steps=30, lr=0.04, notes=notes)
    assert total(end) < 0.97 * total(start)
    assert len(notes) == 2 and notes[0].startswith("adamerging: 'task0' has coefficients ")
    same = run("adamerging", setup, steps=30, lr=0.04)
    assert all(torch.equal(same[n], end[n]) for n in end)


def test_scores_from_outside_the_model_and_mistakes_in_them():
    setup = family_setup("clip-vision")
    text = torch.randn(5, 16)

    def zero_shot(model: nn.Module, batch: Any) -> Tensor:
        features = call_model(model, batch).pooler_output
        return 10 * nn.functional.normalize(features, dim=-1) @ nn.functional.normalize(text, dim=-1).T

    scores = dict.fromkeys(setup.experts, zero_shot)
    for method in ("fisher", "adamerging"):
        merger = get_merger(method, {"steps": 3} if method == "adamerging" else {})
        merge_modules(merger, setup.base, setup.experts, data=setup.data, scores=scores)
        with pytest.raises(InputError, match="task 'task0': CLIPVisionModel gives no class scores; pass scores="):
            merge_modules(merger, setup.base, setup.experts, data=setup.data)
        cut = dict.fromkeys(setup.experts, torch.no_grad()(zero_shot))
        with pytest.raises(InputError, match="task 'task0': its scores have no gradient"):
            merge_modules(merger, setup.base, setup.experts, data=setup.data, scores=cut)
        flat = dict.fromkeys(setup.experts, lambda model, batch: zero_shot(model, batch).sum(1))
        with pytest.raises(InputError, match=r"scores must be \(rows, classes\), got shape \(3,\)"):
            merge_modules(merger, setup.base, setup.experts, data=setup.data, scores=flat)


# ---- alike


@pytest.mark.parametrize("method", NEED_DATA)
@pytest.mark.parametrize("family", ["clip", "bert", "t5", "llama", "qwen3-moe", "gemma2"])
def test_every_method_on_every_family(method: str, family: str):
    setup = family_setup(family)
    params = {"steps": 2} if method == "adamerging" else {}
    before = copy.deepcopy(setup.base.state_dict())
    model = merge_modules(get_merger(method, params), setup.base, setup.experts, data=setup.data)
    after = model.state_dict()
    assert all(t.isfinite().all() for t in after.values())
    assert all(torch.equal(t, before[n]) for n, t in setup.base.state_dict().items())
    assert sum(not torch.equal(t, before[n]) for n, t in after.items()) > len(after) / 2
    call_model(model, setup.data["task0"][0])


@pytest.mark.parametrize("method", NEED_DATA)
def test_half_precision_exclude_and_untouched(method: str):
    setup = setup_of("bert", dtype=torch.float32)
    for model in (setup.base, *setup.experts.values()):
        model.to(torch.bfloat16)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    for expert in setup.experts.values():
        expert.get_parameter(name).data = setup.base.get_parameter(name).data.clone()
    params = {"steps": 2} if method == "adamerging" else {}
    got = run(method, setup, exclude=["*.output.dense.*"], **params)
    base = setup.base.state_dict()
    assert all(t.dtype == torch.bfloat16 for t in got.values() if t.is_floating_point())
    assert torch.equal(got[name], base[name])
    for key in got:
        assert torch.equal(got[key], base[key]) or ".output.dense." not in key
    assert not torch.equal(
        got["bert.encoder.layer.1.intermediate.dense.weight"], base["bert.encoder.layer.1.intermediate.dense.weight"]
    )


@pytest.mark.parametrize("method", NEED_DATA)
def test_samples_are_needed_for_every_task_and_cut(method: str):
    setup = setup_of("bert", dtype=torch.float32)
    with pytest.raises(InputError, match=rf"merge method '{method}' needs unlabelled samples of every task"):
        merge_modules(get_merger(method), setup.base, setup.experts)
    with pytest.raises(InputError, match=r"give data=\{'task1': batches\}"):
        merge_modules(get_merger(method), setup.base, setup.experts, data={"task0": setup.data["task0"]})
    with pytest.raises(InputError, match="data: task 'tusk0' has no expert; did you mean 'task0'"):
        merge_modules(get_merger(method), setup.base, setup.experts, data={"tusk0": []})
    few = {"samples": 3} | ({"steps": 2} if method == "adamerging" else {})
    merger = get_merger(method, few)
    first = {task: batches[:1] for task, batches in setup.data.items()}
    a = merge_modules(merger, setup.base, setup.experts, data=setup.data).state_dict()
    b = merge_modules(merger, setup.base, setup.experts, data=first).state_dict()
    assert len(first["task0"][0]["input_ids"]) == 3 and all(torch.equal(a[n], b[n]) for n in a)


def test_other_vocabulary_rows_keep_the_base():
    setup = family_setup("llama")
    setup.experts["task1"].resize_token_embeddings(66, mean_resizing=False)
    for method in NEED_DATA:
        params, notes = {"steps": 2} if method == "adamerging" else {}, []
        model = merge_modules(get_merger(method, params), setup.base, setup.experts, data=setup.data, notes=notes)
        assert torch.equal(model.model.embed_tokens.weight, setup.base.model.embed_tokens.weight)
        assert "model.embed_tokens.weight: keeps the base's value, 'task1' has 66 rows" in notes[0]


def test_stem_is_what_runs_before_the_first_block():
    cases = {
        "clip-vision": {"post_layernorm.weight", "post_layernorm.bias"},
        "bert": {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"},
        "t5": {"encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"},
        "llama": {"model.norm.weight"},
    }
    for family, tail in cases.items():
        setup = family_setup(family)
        first = setup.data["task0"][0]
        assert set(after_the_stem(setup.base, setup.blocks, first, torch.device("cpu"))) == tail, family


def test_the_same_expert_for_two_tasks():
    setup = setup_of("bert")
    expert = perturbed(setup.base, 5, 0.2)
    setup.experts = {"a": expert, "b": expert}
    setup.data = {"a": setup.data["task0"], "b": setup.data["task1"]}
    for method in ("regmean", "regmean_pp", "fisher"):
        got = run(method, setup)
        assert torch.allclose(
            got["bert.encoder.layer.0.output.dense.bias"], expert.bert.encoder.layer[0].output.dense.bias
        )


# ---- checkpoints on disk


@pytest.mark.parametrize("method", ["regmean", "regmean_pp", "lot"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_blocks_can_stay_on_disk(method: str, family: str, tmp_path: Path):
    """The same walk with one block of each model resident gives the same weights."""
    setup = family_setup(family, noise=0.2)
    merger = get_merger(method)
    expected = merge_modules(merger, setup.base, setup.experts, data=setup.data, device="cpu").state_dict()
    tail = after_the_stem(setup.base, setup.blocks, setup.data["task0"][0], torch.device("cpu"))
    start = merge_modules(
        get_merger("average", {"exclude": tail if merger.sequential else []}), setup.base, setup.experts
    )
    models = {"base": setup.base, "merged": start, **setup.experts}
    settings = make_settings(norm="on", token_weights="uniform", tune="off")
    infos, _ = survey(start, setup.data["task0"][0], None, settings, torch.device("cpu"))
    order = [info.name for info in infos]
    got = {}
    with ExitStack() as stack:
        networks = {}
        for name, model in models.items():
            model.save_pretrained(tmp_path / name)
            checkpoint = open_checkpoint(tmp_path / name)
            networks[name] = DiskNetwork(name, KeyMap(skeleton(checkpoint), checkpoint), order, torch.device("cpu"))
            if name != "base":
                stack.enter_context(networks[name].open())
        tasks = []
        for task, batches in setup.data.items():
            source = networks["merged"] if merger.sequential else networks[task]
            tasks.append(Task(task, networks[task], Stream(source, batches, task), range(len(batches)), 7))
        for info, new in merge_blocks(merger, infos, tasks, networks["merged"], networks["base"]):
            got |= {f"{info.name}.{name}": value for name, value in new.items()}
    assert len(got) > 10
    for name, value in got.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name


def test_data_free_methods_stream_from_files(tmp_path: Path):
    setup = family_setup("llama")
    for name, model in {"base": setup.base, **setup.experts}.items():
        model.to(torch.bfloat16).save_pretrained(tmp_path / name, max_shard_size="20KB")
    base = open_checkpoint(tmp_path / "base")
    experts = {task: open_checkpoint(tmp_path / task) for task in setup.experts}
    for method in ("average", "ties", "wudi"):
        expected = merge_modules(get_merger(method), setup.base, setup.experts, device="cpu").state_dict()
        got = dict(merge_checkpoints(get_merger(method), base, experts))
        assert list(got) == list(base.keys())
        assert all(torch.equal(got[name], expected[name]) for name in got)
