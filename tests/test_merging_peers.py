"""The same merges by mergekit and by FusionBench, where they are installed: same inputs, same numbers.

Neither is a dependency. `pip install mergekit fusion-bench` beside featcal makes these tests run.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from featcal.merging import Dare, get_merger, merge_modules
from pico import Setup, family_setup

mergekit = pytest.mark.skipif(importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed")
fusion_bench = pytest.mark.skipif(
    importlib.util.find_spec("fusion_bench") is None, reason="fusion-bench is not installed"
)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], base: dict[str, Tensor], atol: float) -> None:
    """Every tensor within `atol`; the merge must have moved far more than that."""
    assert ours.keys() >= theirs.keys() and len(theirs) > 10
    moved = 0.0
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=atol), name
        moved = max(moved, float((tensor - base[name]).abs().max()))
    assert moved > 100 * atol


# ---- mergekit: whole folders of a pico Llama, through its own command's code path


def run_mergekit(
    tmp_path: Path, method: str, weights: list[float], shared: dict[str, Any], each: dict[str, Any]
) -> Any:
    """A setup of pico models and the tensors that mergekit writes for their merge."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    setup = family_setup("llama", tasks=len(weights))
    models = {"base": setup.base, **setup.experts}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    entries = [
        {"model": str(tmp_path / name), "parameters": {"weight": weight, **each}}
        for name, weight in zip(setup.experts, weights, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": method, "models": entries, "parameters": shared, "dtype": "float32"}
    if method != "linear":
        config["base_model"] = str(tmp_path / "base")
    run_merge(
        MergeConfiguration.model_validate(config),
        str(tmp_path / "out"),
        MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True),
    )
    return setup, load_file(tmp_path / "out" / "model.safetensors")


def ours(method: str, params: dict[str, Any], setup: Setup) -> dict[str, Tensor]:
    return merge_modules(get_merger(method, params), setup.base, setup.experts).state_dict()


@mergekit
def test_mergekit_linear(tmp_path: Path):
    setup, theirs = run_mergekit(tmp_path, "linear", [0.7, 0.2], {"normalize": True}, {})
    assert_same(ours("linear", {"weights": [0.7, 0.2]}, setup), theirs, setup.base.state_dict(), 1e-6)


@mergekit
def test_mergekit_task_arithmetic(tmp_path: Path):
    setup, theirs = run_mergekit(tmp_path, "task_arithmetic", [0.3, 0.5], {"lambda": 1.0}, {})
    assert_same(ours("task_arithmetic", {"scale": [0.3, 0.5]}, setup), theirs, setup.base.state_dict(), 1e-6)


@mergekit
@pytest.mark.parametrize(("normalize", "aggregate"), [(True, "mean"), (False, "sum")])
def test_mergekit_ties(tmp_path: Path, normalize: bool, aggregate: str):
    setup, theirs = run_mergekit(
        tmp_path, "ties", [1.0, 1.0], {"normalize": normalize, "lambda": 0.4}, {"density": 0.3}
    )
    params = {"scale": 0.4, "density": 0.3, "aggregate": aggregate, "per_tensor": True}
    assert_same(ours("ties", params, setup), theirs, setup.base.state_dict(), 1e-6)


@mergekit
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_mergekit_dare_with_fixed_masks(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch):
    def fixed(expert: int, shape: torch.Size) -> Tensor:
        return (torch.arange(shape.numel()) % (3 + expert) != 0).reshape(shape)

    calls: list[torch.Size] = []

    def bernoulli(p: Tensor) -> Tensor:  # one call for each expert in turn, tensor by tensor
        calls.append(p.shape)
        return fixed((len(calls) - 1) % 2, p.shape).to(p.dtype)

    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    monkeypatch.setattr(Dare, "mask", lambda self, name, expert, shape: fixed(expert, shape))
    setup, theirs = run_mergekit(
        tmp_path, method, [1.0, 1.0], {"rescale": False, "normalize": False, "lambda": 0.6}, {"density": 0.5}
    )
    assert len(calls) == 2 * len(theirs)
    # mergekit's dare_ties trims nothing after the random drop
    params = {"scale": 0.6, "rescale": False, "density": 1.0, "per_tensor": True}
    assert_same(ours(method, params, setup), theirs, setup.base.state_dict(), 1e-6)


# ---- FusionBench: its algorithms on models in memory


class CPU:
    """Stands in for the Lightning fabric that its algorithms ask for a device."""

    device = torch.device("cpu")
    _loggers = None


def run_fusion_bench(path: str, family: str, kwargs: dict[str, Any]) -> tuple[Setup, dict[str, Tensor]]:
    """A setup of pico models and the state dict of FusionBench's merge of it."""
    module, _, name = path.rpartition(".")
    algorithm = getattr(importlib.import_module(module), name)(**kwargs)
    algorithm._fabric_instance = CPU()
    from fusion_bench.modelpool import BaseModelPool

    setup = family_setup(family, tasks=3)
    models = {"_pretrained_": setup.base, **setup.experts}
    pool = BaseModelPool({name: copy.deepcopy(model) for name, model in models.items()})
    result = algorithm.run(pool)
    assert isinstance(result, nn.Module)
    return setup, result.state_dict()


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], float]] = {
    "average": ("fusion_bench.method.SimpleAverageAlgorithm", {}, "average", {}, 1e-6),
    "task_arithmetic": (
        "fusion_bench.method.TaskArithmeticAlgorithm", {"scaling_factor": 0.3}, "task_arithmetic", {}, 1e-6,
    ),
    "ties": (
        "fusion_bench.method.TiesMergingAlgorithm",
        {"scaling_factor": 0.3, "threshold": 20, "remove_keys": [], "merge_func": "sum"}, "ties", {}, 1e-6,
    ),
    "ties-mean": (
        "fusion_bench.method.TiesMergingAlgorithm",
        {"scaling_factor": 1.0, "threshold": 40, "remove_keys": [], "merge_func": "mean"},
        "ties", {"scale": 1.0, "density": 0.4, "aggregate": "mean"}, 1e-6,
    ),
    "wudi": ("fusion_bench.method.WUDIMerging", {"iter_num": 400}, "wudi", {}, 2e-5),
    "iso_c": ("fusion_bench.method.ISO_C_Merge", {"scaling_factor": 1.5}, "iso_c", {"scale": 1.5}, 2e-5),
    "iso_cts": (
        "fusion_bench.method.ISO_CTS_Merge", {"scaling_factor": 1.0, "common_space_fraction": 0.8}, "iso_cts", {}, 2e-5,
    ),
    "tsv_m": ("fusion_bench.method.TaskSingularVectorMerging", {"alpha": 1}, "tsv_m", {}, 2e-5),
}  # fmt: skip


@fusion_bench
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["clip-vision", "bert"])
def test_fusion_bench(case: str, family: str):
    path, kwargs, method, params, atol = CASES[case]
    setup, theirs = run_fusion_bench(path, family, kwargs)
    base, merged = setup.base.state_dict(), ours(method, params, setup)
    floats = {name: tensor for name, tensor in theirs.items() if tensor.is_floating_point()}
    if method == "tsv_m":  # its TSV-M drops what the tasks learned where there are fewer directions than tasks
        for name in [n for n, t in floats.items() if t.ndim == 2 and min(t.shape) < len(setup.experts)]:
            assert torch.equal(floats.pop(name), base[name]) and not torch.equal(merged[name], base[name])
    assert_same(merged, floats, base, atol)
