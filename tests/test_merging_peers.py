"""The same merges by mergekit and by FusionBench, where they are installed: same inputs, same numbers.

Neither is a dependency. `pip install mergekit fusion-bench` beside featcal makes these tests run.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
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


# ---- FusionBench: feature-based and test-time mergers on a pico CLIP. Its algorithms as they are; what they leave
# ---- to subclasses (where the samples come from, where the layers are) is filled in for models in memory.


def zero_shot(model: nn.Module, batch: Any, text: Tensor) -> Tensor:
    """CLIP scores against five fixed class embeddings, differentiable in the model."""
    features = model(pixel_values=batch["pixel_values"]).pooler_output
    return 5 * nn.functional.normalize(features, dim=-1) @ text.T


def clip_setup() -> tuple[Setup, Tensor]:
    setup = family_setup("clip-vision", tasks=3, noise=0.2)
    text = torch.randn(5, 16, generator=torch.Generator().manual_seed(5))
    return setup, nn.functional.normalize(text, dim=-1)


def pool_of(setup: Setup) -> Any:
    from fusion_bench.modelpool import BaseModelPool

    class Pool(BaseModelPool):
        def load_train_dataset(self, name: str, *args: Any, **kwargs: Any) -> Any:
            return setup.data[name]

    models = {"_pretrained_": setup.base, **setup.experts}
    return Pool({name: copy.deepcopy(model) for name, model in models.items()})


def hooked_grams(modules: dict[str, nn.Module], forward: Callable[[], object]) -> dict[str, Tensor]:
    """Average of x xᵀ of each linear module's input rows while `forward` runs."""
    rows: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: rows[name].append(args[0].detach().flatten(0, -2)))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        forward()
    for handle in handles:
        handle.remove()
    stacked = {name: torch.cat(parts) for name, parts in rows.items()}
    return {name: x.T @ x / len(x) for name, x in stacked.items()}


def merged_with_data(
    method: str, params: dict[str, Any], setup: Setup, text: Tensor | None = None
) -> dict[str, Tensor]:
    scores = {} if text is None else dict.fromkeys(setup.experts, functools.partial(zero_shot, text=text))
    merger = get_merger(method, params)
    return merge_modules(merger, setup.base, setup.experts, data=setup.data, scores=scores, device="cpu").state_dict()


REGMEAN: dict[str, Any] = {
    "num_regmean_examples": 256, "exclude_param_names_regex": [], "reduce_non_diagonal_ratio": 0.95,
    "weight_transpose": True,
}  # fmt: skip


@fusion_bench
def test_fusion_bench_regmean():
    from fusion_bench.method.regmean.regmean import RegMeanAlgorithm

    class Algorithm(RegMeanAlgorithm):
        def get_regmean_weights(
            self, name: str, model: nn.Module, train_dataset: Any, linear_modules_to_merge: Any
        ) -> Any:
            return hooked_grams(linear_modules_to_merge, lambda: [model(**batch) for batch in train_dataset] and None)

    setup, _ = clip_setup()
    theirs = Algorithm(**REGMEAN).run(pool_of(setup)).state_dict()
    assert_same(merged_with_data("regmean", {}, setup), theirs, setup.base.state_dict(), 2e-4)


@fusion_bench
def test_fusion_bench_regmean_plusplus():
    from fusion_bench.method.regmean_plusplus.regmean_plusplus import RegMeanAlgorithmPlusPlus

    class Algorithm(RegMeanAlgorithmPlusPlus):
        def merge_embedding_layer(self, models_to_merge_dict: dict[str, nn.Module]) -> dict[str, Tensor]:
            states = [model.state_dict() for model in models_to_merge_dict.values()]
            names = [name for name in states[0] if name.startswith(("embeddings.", "pre_layrnorm."))]
            return {name: torch.stack([state[name] for state in states]).float().mean(0) for name in names}

        def get_input_for_first_layer(self, model: nn.Module, train_dataset: Any) -> list[Tensor]:
            return [model.pre_layrnorm(model.embeddings(batch["pixel_values"])).detach() for batch in train_dataset]

        def get_layers(self, model: nn.Module) -> Any:
            return model.encoder.layers

        def get_regmean_weights(
            self, name: str, layer: nn.Module, batches_input: list[Tensor], linear_modules_to_merge: Any
        ) -> Any:
            return hooked_grams(
                linear_modules_to_merge, lambda: self.layer_batches_forward(layer, batches_input) and None
            )

        def layer_batches_forward(self, layer: nn.Module, batches_input: list[Tensor]) -> list[Tensor]:
            outputs = [layer(batch, attention_mask=None) for batch in batches_input]
            return [out[0] if isinstance(out, tuple) else out for out in outputs]

        def update_merged_params_dict(self, merged_params_dict: Any, new_merged_params: Any, layer_idx: int) -> Any:
            return merged_params_dict | {f"encoder.layers.{layer_idx}.{n}": t for n, t in new_merged_params.items()}

    setup, _ = clip_setup()
    theirs = Algorithm(**REGMEAN).run(pool_of(setup)).state_dict()
    floats = {name: tensor for name, tensor in theirs.items() if tensor.is_floating_point()}
    assert_same(merged_with_data("regmean_pp", {}, setup), floats, setup.base.state_dict(), 2e-4)


@fusion_bench
def test_fusion_bench_fisher():
    from fusion_bench.method.fisher_merging.fisher_merging import FisherMergingAlgorithm, get_param_squared_gradients

    setup, text = clip_setup()

    class Algorithm(FisherMergingAlgorithm):
        def get_fisher_weights(
            self, model_name: str, model: nn.Module, train_dataset: Any, param_names_to_merge: Any
        ) -> Any:
            total: dict[str, Tensor] = {}
            count = 0
            for batch in train_dataset:
                logits = zero_shot(model, batch, text)
                model.zero_grad()
                (logits.softmax(-1).detach().sqrt() * logits.log_softmax(-1)).sum(-1).sum(0).backward()
                squares = get_param_squared_gradients(model, param_names_to_merge)
                total = {name: total.get(name, 0) + square for name, square in squares.items()}
                count += len(logits)
            return {name: square / count for name, square in total.items()}

    algorithm = Algorithm(
        exclude_param_names_regex=[], normalize_fisher_weight=True, minimal_fisher_weight=1e-6, num_fisher_examples=256
    )
    theirs = {n: t.detach() for n, t in algorithm.run(pool_of(setup)).state_dict().items()}
    assert_same(merged_with_data("fisher", {}, setup, text), theirs, setup.base.state_dict(), 1e-5)


@fusion_bench
@pytest.mark.parametrize("level", ["layer", "task"])
def test_fusion_bench_adamerging(level: str, monkeypatch: pytest.MonkeyPatch):
    from fusion_bench.method.adamerging.entropy_loss import entropy_loss
    from fusion_bench.models.wrappers import layer_wise_fusion, task_wise_fusion

    from featcal.merging import adamerging

    monkeypatch.setattr(adamerging, "shuffled", lambda batches, seed: itertools.cycle(batches))
    setup, text = clip_setup()
    pool = pool_of(setup)
    base, experts = pool.load_model("_pretrained_"), [pool.load_model(name) for name in setup.experts]
    base.train(False)
    if level == "layer":
        start = layer_wise_fusion.get_layer_wise_weights(3, len(list(base.parameters())), 0.3)
        module: Any = layer_wise_fusion.LayerWiseMergedModel(start, base, experts, clamp_weights=False, strict=False)
    else:
        start = task_wise_fusion.get_task_wise_weights(3, 0.3)
        module = task_wise_fusion.TaskWiseMergedModel(start, base, experts, clamp_weights=False, strict=False)
    optimizer = torch.optim.Adam([module.merge_weight], lr=1e-3)
    sources = {task: itertools.cycle(batches) for task, batches in setup.data.items()}
    module.merge_weights()
    for _ in range(30):  # the loop of its `test_time_adaptation`
        for source in sources.values():
            entropy_loss(zero_shot(module, next(source), text)).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        module.merge_weights()
    assert float((module.merge_weight - 0.3).abs().max()) > 5e-3
    theirs = {n: t.detach() for n, t in module.merge_and_unload().state_dict().items()}
    params = {"level": level, "steps": 30}
    assert_same(merged_with_data("adamerging", params, setup, text), theirs, setup.base.state_dict(), 1e-4)
