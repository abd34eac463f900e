"""A merge recomputed from its document: mergekit's parameters, rounding, and every way in which it can be wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaModel

import featcal.provenance as provenance
from featcal.discover import Discovery, find
from featcal.errors import InputError
from featcal.provenance import Proof, prove
from pico import make, perturbed

Weights = dict[str, Tensor]
MODELS = ("base", "math", "code")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    base = make("llama")
    made = {"base": base, "math": perturbed(base, 1), "code": perturbed(base, 2), "other": make("llama", seed=5)}
    for name, model in made.items():
        model.save_pretrained(folder / name)  # type: ignore[operator]
    return folder


def load(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def merged(zoo: Path, tmp_path: Path, rule: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Path:
    """A folder with `rule(base, math, code, name)` for every tensor."""
    states = [load(zoo / name) for name in MODELS]
    out = tmp_path / "merged"
    make("llama").save_pretrained(out)  # type: ignore[operator]
    weights = {key: rule(*(state[key] for state in states), key).to(dtype) for key in states[0]}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def document(zoo: Path, method: str, weights: Any = (0.4, 0.8), base: bool = True, **parameters: Any) -> dict[str, Any]:
    models = [
        {"model": str(zoo / name), "parameters": {"weight": weight}}
        for name, weight in zip(MODELS[1:], weights, strict=True)
    ]
    made = {"models": models, "merge_method": method, "parameters": parameters}
    return {**made, "base_model": str(zoo / "base")} if base else made


def discovered(zoo: Path, folder: Path, doc: dict[str, Any], **flags: Any) -> Discovery:
    (folder / "mergekit_config.yml").write_text(yaml.safe_dump(doc))
    return find(folder, {"math": "m.jsonl", "code": "c.jsonl"}, **{"base": str(zoo / "base"), **flags})


def proof(zoo: Path, folder: Path, doc: dict[str, Any], **flags: Any) -> Proof:
    return prove(discovered(zoo, folder, doc, **flags))


def depth(name: str) -> float:
    """t of mergekit's gradients: the models have two layers, at depth 0 and 1."""
    return float(name.split(".")[2])


def on(name: str, word: str, yes: float, no: float) -> float:
    return yes if word in name else no


CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "linear": ("linear", {}, lambda b, m, c, n: (0.4 * m + 0.8 * c) / 1.2),
    "not-normalised": ("linear", {"normalize": False}, lambda b, m, c, n: 0.4 * m + 0.8 * c),
    "task-arithmetic": ("task_arithmetic", {}, lambda b, m, c, n: b + 0.4 * (m - b) + 0.8 * (c - b)),
    "lambda": ("task_arithmetic", {"lambda": 0.5}, lambda b, m, c, n: b + 0.2 * (m - b) + 0.4 * (c - b)),
    "normalised": (
        "task_arithmetic",
        {"normalize": True},
        lambda b, m, c, n: b + (0.4 * (m - b) + 0.8 * (c - b)) / 1.2,
    ),
    "text-number": ("task_arithmetic", {"lambda": "1e-1"}, lambda b, m, c, n: b + 0.04 * (m - b) + 0.08 * (c - b)),
    "global-filter": (
        "task_arithmetic",
        {"lambda": [{"filter": "mlp", "value": 2}, {"value": 1.0}]},
        lambda b, m, c, n: b + on(n, "mlp", 2, 1) * (0.4 * (m - b) + 0.8 * (c - b)),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recomputed(zoo: Path, tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    method, parameters, rule = CASES[case]
    folder = merged(zoo, tmp_path, lambda *a: rule(*a) if ".layers." in a[-1] else a[0], dtype)
    found = proof(zoo, folder, document(zoo, method, base=method != "linear", **parameters))
    assert found.residual is not None and found.residual < (1e-4 if dtype == torch.float32 else 1e-3)
    assert found.tensors == 14
    assert f"rows of 14 tensors; what differs is {found.residual:.2%}" in found.text


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        (([0.0, 1.0], 0.5), lambda b, m, c, n: b + depth(n) * (m - b) + 0.5 * (c - b)),
        (([1, 0.5, 0], 0.5), lambda b, m, c, n: b + (1 - depth(n)) * (m - b) + 0.5 * (c - b)),
        (
            ([{"filter": "q_proj", "value": [0.2, 0.6]}, {"filter": "*", "value": 0.1}], 0.5),
            lambda b, m, c, n: b + on(n, "q_proj", 0.2 + 0.4 * depth(n), 0.1) * (m - b) + 0.5 * (c - b),
        ),
        (({"filter": "mlp", "value": 0.7}, 0.5), None),
    ],
    ids=["gradient", "three-steps", "filter-of-gradient", "filter-without-default"],
)
def test_gradients_and_filters(zoo: Path, tmp_path: Path, weights: Any, rule: Any) -> None:
    if rule is None:
        found = proof(zoo, merged(zoo, tmp_path, lambda b, m, c, n: m), document(zoo, "task_arithmetic", weights))
        assert found.residual is None and "gives no weight for 'model.layers.0.self_attn" in found.text
        return
    folder = merged(zoo, tmp_path, lambda *a: rule(*a) if ".layers." in a[-1] else a[0])
    found = proof(zoo, folder, document(zoo, "task_arithmetic", weights))
    assert found.residual is not None and found.residual < 1e-5


def test_slices_modules_and_their_scopes(zoo: Path, tmp_path: Path) -> None:
    """Layer 0 of one slice, layer 1 of another; the inner parameter counts."""
    rule = CASES["task-arithmetic"][2]
    folder = merged(zoo, tmp_path, lambda *a: rule(*a) if ".layers.1." in a[-1] else a[0] + 0.3 * (a[1] - a[0]))
    sources = [{"model": str(zoo / name)} for name in MODELS[1:]]

    def part(layer: int, *weights: float, **more: Any) -> dict[str, Any]:
        made = [
            {**s, "layer_range": [layer, layer + 1], "parameters": {"weight": w}}
            for s, w in zip(sources, weights, strict=True)
        ]
        return {"sources": made, **more}

    slices = [part(0, 0.6, 0.0, parameters={"lambda": 0.5}), part(1, 0.4, 0.8)]
    doc = {"merge_method": "task_arithmetic", "base_model": str(zoo / "base"), "parameters": {"lambda": 1.0}}
    for shape in ({"slices": slices}, {"modules": {"default": {"slices": slices, "parameters": {"lambda": 7}}}}):
        if "modules" in shape:
            slices[1]["parameters"] = {"lambda": 1.0}
        found = proof(zoo, folder, {**doc, **shape})
        assert found.residual is not None and found.residual < 1e-5


def test_inputs_cast_before_the_merge(zoo: Path, tmp_path: Path) -> None:
    def rule(b: Tensor, m: Tensor, c: Tensor, name: str) -> Tensor:
        b, m, c = (x.bfloat16() for x in (b, m, c))
        return (b + (0.4 * (m - b) + 0.8 * (c - b))).float()  # in bfloat16 throughout, as mergekit does

    folder = merged(zoo, tmp_path, rule)
    doc = {**document(zoo, "task_arithmetic"), "dtype": "bfloat16"}
    found = proof(zoo, folder, doc)
    assert found.residual is not None and 0 < found.residual < 0.1


# ----------------------------------------------------------------------------------------------------------- wrong


def wrong(zoo: Path, folder: Path, doc: dict[str, Any], **flags: Any) -> str:
    with pytest.raises(InputError) as caught:
        proof(zoo, folder, doc, **flags)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_that_was_never_applied(zoo: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = merged(zoo, tmp_path, lambda b, m, c, n: b + 0.4 * (m - b), dtype)
    text = wrong(zoo, folder, document(zoo, "task_arithmetic"))
    assert "/code' left no trace in it (was its adapter applied?)" in text and "/math'" not in text
    assert re.search(r"differs by (19|20)\d% of merged − base", text)
    assert text.endswith("add --no-proof if it was changed on purpose")


def test_a_lost_expert_shows_through_rounding(zoo: Path, tmp_path: Path) -> None:
    """Fine-tuning that moved the weights by less than one step of bfloat16."""
    base = load(zoo / "base")
    for number, name in enumerate(("math", "code")):
        make("llama").save_pretrained(tmp_path / name)  # type: ignore[operator]
        moved = {k: w + 0.005 * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(number))
                 for k, w in base.items()}  # fmt: skip
        save_file(moved, tmp_path / name / "model.safetensors", {"format": "pt"})
    math, code = load(tmp_path / "math"), load(tmp_path / "code")
    doc = document(zoo, "task_arithmetic", weights=(0.5, 0.5))
    for entry, name in zip(doc["models"], MODELS[1:], strict=True):
        entry["model"] = str(tmp_path / name)

    def rule(b: Tensor, m: Tensor, c: Tensor, name: str, both: float) -> Tensor:
        return b + 0.5 * (math[name] - b) + both * (code[name] - b)

    folder = merged(zoo, tmp_path, lambda *a: rule(*a, 0.5), torch.bfloat16)
    assert proof(zoo, folder, doc).residual is not None
    folder = merged(zoo, tmp_path, lambda *a: rule(*a, 0.0), torch.bfloat16)
    text = wrong(zoo, folder, doc)
    assert "/code' left no trace" in text or re.search(r"/code' counts -?0\.[01]\d in it, not 0\.50", text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_than_stated(zoo: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = merged(zoo, tmp_path, CASES["task-arithmetic"][2], dtype)
    text = wrong(zoo, folder, document(zoo, "task_arithmetic", weights=(0.4, 0.5)))
    assert "/code' counts 0.80 in it, not 0.50" in text
    text = wrong(zoo, folder, document(zoo, "linear", weights=(0.9, 0.1)))
    assert re.search(r"/math' counts 0\.4\d? in it, not 0\.90; .*/code' counts 0\.8\d? in it, not 0\.10", text)


def test_another_revision(zoo: Path, tmp_path: Path) -> None:
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    moved = tmp_path / "math"
    perturbed(make("llama"), 77).save_pretrained(moved)  # type: ignore[operator]
    text = wrong(zoo, folder, document(zoo, "linear"), experts={"math": str(moved)})
    assert "as if a model were another revision or the result had been edited" in text


def test_an_edit_of_one_tensor_is_named(zoo: Path, tmp_path: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    folder = merged(
        zoo,
        tmp_path,
        lambda b, m, c, n: CASES["linear"][2](b, m, c, n) + (0.1 * torch.randn_like(b) if n == key else 0),
    )
    assert f"most in {key}: " in wrong(zoo, folder, document(zoo, "linear"))


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "slerp"])
def test_a_base_that_is_not_theirs(zoo: Path, tmp_path: Path, method: str) -> None:
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    text = wrong(zoo, folder, document(zoo, method, base=method != "slerp"), base=str(zoo / "other"))
    assert "/math' is as far from the base '" in text and "/other' as an unrelated model" in text


@pytest.mark.parametrize("method", ["ties", "model_stock"])
def test_merges_that_are_not_linear_must_lie_in_range(zoo: Path, tmp_path: Path, method: str) -> None:
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    found = proof(zoo, folder, document(zoo, method))
    assert found.residual is None and found.text.startswith(f"not recomputed ({method} is not linear in the weights); ")
    assert "is 0.7" in found.text and "in the usual range" in found.text and "but" not in found.text
    folder = merged(zoo, tmp_path, lambda b, m, c, n: b)
    assert "it equals the base" in wrong(zoo, folder, document(zoo, method))
    folder = merged(zoo, tmp_path, lambda b, m, c, n: b + 40 * (m - b))
    assert "far more unlike the base" in wrong(zoo, folder, document(zoo, method))


def test_a_model_without_a_trace_is_mentioned(zoo: Path, tmp_path: Path) -> None:
    folder = merged(zoo, tmp_path, lambda b, m, c, n: m)
    text = proof(zoo, folder, document(zoo, "ties")).text
    assert "but nothing in it resembles" in text and "/code: was that model merged?" in text and "/math" not in text


# --------------------------------------------------------------------------------------------------- not checkable


def test_no_document(zoo: Path, tmp_path: Path) -> None:
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    flags = {"math": str(zoo / "math"), "code": str(zoo / "code")}
    discovery = find(folder, {"math": "m", "code": "c"}, str(zoo / "base"), flags)
    assert prove(discovery).text.startswith("not checked where the merged model comes from: nothing in its folder")


def test_names_of_a_bare_model(zoo: Path, tmp_path: Path) -> None:
    """An expert saved without its head calls the tensors otherwise."""
    bare = tmp_path / "math"
    LlamaModel.from_pretrained(zoo / "math").save_pretrained(bare)
    assert "layers.0.mlp.up_proj.weight" in load(bare)
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    doc = document(zoo, "linear")
    doc["models"][0]["model"] = str(bare)
    found = proof(zoo, folder, doc)
    assert found.residual is not None and found.residual < 1e-5 and found.tensors == 14


def test_another_architecture(zoo: Path, tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path / "math")  # type: ignore[operator]
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    doc = copy.deepcopy(document(zoo, "linear"))
    doc["models"][0]["model"] = str(tmp_path / "math")
    for name in ("math", "code"):
        (tmp_path / name / "config.json").unlink(missing_ok=True)
    assert "its tensors have other names or shapes" in proof(zoo, folder, doc).text


def test_only_some_rows_are_read(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "TENSORS", 3)
    monkeypatch.setattr(provenance, "ROWS", 2)
    folder = merged(zoo, tmp_path, CASES["linear"][2])
    seen: list[int] = []
    original = provenance._Sums.add

    def add(self: Any, key: str, rows: Tensor, *rest: Any) -> None:
        seen.append(len(rows))
        original(self, key, rows, *rest)

    monkeypatch.setattr(provenance._Sums, "add", add)
    assert proof(zoo, folder, document(zoo, "linear")).tensors == 3
    assert seen == [2, 2, 2]
