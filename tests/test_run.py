"""`featcal.run` on folders: the weights of the in-memory engine, in a folder that can take the merged one's place."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPVisionModel, LlamaModel

import folders
import pico
from featcal.api import Result, calibrate
from featcal.errors import InputError
from featcal.network import compute_dtype
from featcal.plan import prepare
from featcal.recipe import load_recipe
from featcal.run import run


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the report takes longer than calibrating a pico model; one test does without this."""
    if "place" not in request.node.name:
        module = sys.modules["featcal.run"]
        monkeypatch.setattr(module, "write_report", lambda folder: (folder / "report.html").write_text(""))


def tokenizer_of(folder: Path, family: str) -> str | None:
    return str(folder / folders.OWN_TOKENIZER[family]) if family in folders.OWN_TOKENIZER else None


def in_memory(recipe: Path, tokenizer: str | None = None) -> tuple[dict[str, Tensor], Result]:
    """Calibrated parameters by their key on disk, from whole models in memory on the plan's own batches."""
    plan = prepare(load_recipe(recipe), tokenizer=tokenizer)
    plan.check()
    assert plan.merged is not None and plan.base is not None

    def load(model: Any) -> nn.Module:
        loaded: nn.Module = type(plan.merged.keymap.model).from_pretrained(model.checkpoint.folder)  # type: ignore
        for name, parameter in loaded.named_parameters():
            parameter.data = parameter.data.to(model.keymap.dtype(name))  # some classes load parts of bf16 as float32
        return loaded

    result = calibrate(
        load(plan.merged),
        base=load(plan.base),
        experts={task: load(model) for task, model in plan.experts.items()},
        data={task: data.learn.batches for task, data in plan.tasks.items()},
        progress=False,
        **plan.recipe.calibration.model_dump(),
    )
    keymap = plan.merged.keymap
    return {keymap.key(name): p for name, p in result.model.named_parameters() if keymap.key(name)}, result


@pytest.mark.parametrize(
    ("dtype", "shard", "schedule"), [(torch.float32, "5GB", "block"), (torch.bfloat16, "8KB", "group")]
)
@pytest.mark.parametrize("family", folders.CHECKPOINTS)
def test_weights_equal_the_in_memory_engine(
    family: str, dtype: torch.dtype, shard: str, schedule: str, tmp_path: Path
) -> None:
    recipe = folders.make_job(tmp_path, family, dtype=dtype, shard=shard, norm="on", schedule=schedule)
    tokenizer = tokenizer_of(tmp_path, family)
    outcome = run(recipe, tmp_path / "out", tokenizer=tokenizer, progress=False)
    expected, result = in_memory(recipe, tokenizer)
    merged, written = folders.weights(tmp_path / "merged"), folders.weights(tmp_path / "out")
    changed = 0
    for key, parameter in expected.items():
        assert torch.equal(written[key], parameter), key
        changed += not torch.equal(written[key], merged[key])
    calibrated = [r for r in outcome.records if r.status == "calibrated"]
    assert changed >= len(calibrated) > 8
    assert [(r.block, r.module, r.rows, r.before, r.after) for r in calibrated] == [
        (r.block, r.module, r.rows, r.before, r.after) for r in result.records if r.status == "calibrated"
    ]
    assert (len(folders.shards(tmp_path / "out")) > 1) == (shard == "8KB")


SIDE_FILES = {
    "chat_template.jinja": b"{{ messages }}\r\n",
    "modeling_own.py": b"# code of its own\n",
    "mergekit_config.yml": b"merge_method: ties # as I wrote it\n",
    "assets/notes.txt": b"\xff\x00 not text",
    "pytorch_model.bin.txt": b"not weights",
}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_output_can_take_the_merged_folders_place(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, dtype=torch.bfloat16, shard="8KB")
    merged, out = tmp_path / "merged", tmp_path / "out"
    for name, content in SIDE_FILES.items():
        (merged / name).parent.mkdir(exist_ok=True)
        (merged / name).write_bytes(content)
    old = os.umask(0o027)
    try:
        outcome = run(recipe, out, progress=False)
    finally:
        os.umask(old)
    assert folders.shards(out) == folders.shards(merged) and len(folders.shards(out)) > 1
    before, after = folders.weights(merged), folders.weights(out)
    assert {k: (v.dtype, v.shape) for k, v in before.items()} == {k: (v.dtype, v.shape) for k, v in after.items()}
    changed = {key for key in before if raw(before[key]) != raw(after[key])}
    assert changed == {f"{r.block}.{r.module}.weight" for r in outcome.records if r.status == "calibrated"}
    assert len(changed) == 14
    added = {path.name for path in out.iterdir()} - {path.name for path in merged.iterdir()}
    assert added - {"README.md"} == {"featcal.yaml", "report.json", "report.html"}
    weights = set(folders.shards(merged))
    kept = {name: digest for name, digest in folders.hashes(merged).items() if name not in weights}
    assert {name: digest for name, digest in folders.hashes(out).items() if name in kept} == kept
    assert {"model.safetensors.index.json", "assets/notes.txt", "config.json"} <= kept.keys()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert modes == {0o640} and stat.S_IMODE(out.stat().st_mode) == 0o750
    assert not list(folders.hidden(tmp_path))


def test_the_output_loads_and_generates_without_featcal(tmp_path: Path) -> None:
    run(folders.make_job(tmp_path), tmp_path / "out", progress=False)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    written = folders.weights(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, written[name])
    ids = words("w1 w2 w3", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > 3


def test_the_resolved_recipe_gives_the_same_result_again(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    run(recipe, tmp_path / "out", overrides=["calibration.alpha=0.2", "seed=7"], progress=False)
    resolved = load_recipe(tmp_path / "out" / "featcal.yaml")
    assert (resolved.calibration.alpha, resolved.seed) == (0.2, 7)
    run(tmp_path / "out" / "featcal.yaml", tmp_path / "again", progress=False)
    assert folders.hashes(tmp_path / "again") == folders.hashes(tmp_path / "out")


def test_the_report_names_every_module(tmp_path: Path) -> None:
    outcome = run(folders.make_job(tmp_path), tmp_path / "out", progress=False)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["modules"]) == 14 and {m["status"] for m in report["modules"]} == {"calibrated"}
    kept = {entry["module"]: entry["reason"] for entry in report["kept"]}
    assert kept["model.layers.0.input_layernorm"] == "RMSNorm (norm: auto)"
    assert kept["model.embed_tokens"] == "outside the blocks"
    assert {task["name"]: task["samples"] for task in report["tasks"]} == {"task0": 12, "task1": 12}
    assert report["peak_memory_bytes"] == outcome.peak_memory_bytes > 10**8
    assert report["seconds"]["total"] >= report["seconds"]["calibrate"] > 0


@pytest.mark.parametrize("family", ["t5", "clip", "gemma2", "qwen3-moe"])
def test_activations_on_disk_change_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = folders.make_job(tmp_path, family, norm="on")
    run(recipe, tmp_path / "memory", progress=False)
    written: list[Path] = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, path: (written.append(path), save(value, path)))
    run(recipe, tmp_path / "disk", max_memory=0, progress=False)
    assert folders.hashes(tmp_path / "disk") == folders.hashes(tmp_path / "memory")
    assert len(written) > 4 * 5 and not list(folders.hidden(tmp_path))


def test_big_embeddings_and_heads_stay_in_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every embedding and head counted as big, rows are read one by one and the weights are the same."""
    for family in ("t5", "llama", "gpt2", "clip"):
        recipe = folders.make_job(tmp_path / family, family)
        run(recipe, tmp_path / family / "resident", progress=False)
        with monkeypatch.context() as patch:
            patch.setattr("featcal.skeleton.BIG", 1)
            run(recipe, tmp_path / family / "lazy", progress=False)
        assert folders.hashes(tmp_path / family / "lazy") == folders.hashes(tmp_path / family / "resident")


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_big_embeddings_under_other_names_in_their_file(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert's file without the prefix of the merged model's names (older releases, bare models)."""
    recipe = folders.make_job(tmp_path, family)
    run(recipe, tmp_path / "plain", progress=False)
    known = {"bert": "bert.", "llama": "model."}[family]
    before = folders.weights(tmp_path / "task0")

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix(known): value for name, value in tensors.items()}

    assert renamed(before).keys() != before.keys()
    rewrite(tmp_path / "task0", renamed)
    monkeypatch.setattr("featcal.skeleton.BIG", 1)
    run(recipe, tmp_path / "out", progress=False)
    assert folders.hashes(tmp_path / "out") == folders.hashes(tmp_path / "plain")


def rewrite(folder: Path, change: Any, **config: Any) -> None:
    """Change the tensors and the config of a saved model."""
    path = folder / "model.safetensors"
    save_file(change(dict(load_file(path))), path, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def test_matrices_in_bfloat16_beside_biases_and_norms_in_float32(tmp_path: Path) -> None:
    """Every new parameter is rounded to its own dtype in the file, not to another's."""
    recipe = folders.make_job(tmp_path, "bert", norm="on")

    def mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.bfloat16() if t.dim() > 1 else t for name, t in tensors.items()}

    rewrite(tmp_path / "merged", lambda tensors: {name: t.float() for name, t in mixed(tensors).items()})
    run(recipe, tmp_path / "wide", progress=False)
    rewrite(tmp_path / "merged", mixed)
    run(recipe, tmp_path / "out", progress=False)
    merged, wide, out = (folders.weights(tmp_path / name) for name in ("merged", "wide", "out"))
    assert {name: t.dtype for name, t in out.items()} == {name: t.dtype for name, t in merged.items()}
    first = [name for name in out if ".layer.0." in name and not torch.equal(wide[name], merged[name].float())]
    assert {name.rpartition(".")[2] for name in first if "LayerNorm" in name} == {"weight", "bias"}
    for name in first:
        if out[name].dim() > 1 or "LayerNorm" in name:  # a bias answers to its weight as rounded
            assert torch.equal(out[name], wide[name].to(out[name].dtype)), name
        else:
            torch.testing.assert_close(out[name], wide[name], rtol=0, atol=2e-2)
            assert not torch.equal(out[name], out[name].bfloat16().float()), name


def test_an_expert_in_a_wider_dtype(tmp_path: Path) -> None:
    """All models compute in one dtype: an expert's states are read by the merged model too, for the drift."""
    recipe = folders.make_job(tmp_path, norm="on")
    plain = run(recipe, tmp_path / "plain", progress=False)
    rewrite(tmp_path / "task0", lambda tensors: {name: t.double() for name, t in tensors.items()})
    wide = run(recipe, tmp_path / "out", progress=False)
    for name, value in folders.weights(tmp_path / "plain").items():
        torch.testing.assert_close(folders.weights(tmp_path / "out")[name], value, rtol=0, atol=1e-5)
    drifts = [[block["after"] for block in one.report["tasks"][0]["drift"]] for one in (plain, wide)]
    assert drifts[0] == pytest.approx(drifts[1], rel=1e-3)


@pytest.mark.parametrize(
    ("stored", "cpu", "cuda"),
    [
        (["bfloat16", "bfloat16"], "float32", "bfloat16"),
        (["bfloat16", "float16"], "float32", "float32"),
        (["bfloat16", "float32", "int64"], "float32", "float32"),
        (["float32", "float64"], "float64", "float64"),
        (["float8_e4m3fn", "float16"], "float32", "float16"),
        (["int8"], "float32", "float32"),
    ],
)
def test_one_dtype_holds_what_all_models_store(stored: list[str], cpu: str, cuda: str) -> None:
    dtypes = [getattr(torch, name) for name in stored]
    assert compute_dtype(dtypes, torch.device("cpu")) == getattr(torch, cpu)
    assert compute_dtype(dtypes, torch.device("cuda")) == getattr(torch, cuda)


def test_an_expert_with_64_more_tokens(tmp_path: Path) -> None:
    """Each model looks tokens up in its own table; what is written keeps the merged one's size (issue U02)."""
    recipe = folders.make_job(tmp_path)
    plain = run(recipe, tmp_path / "plain", progress=False)

    def longer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.embed_tokens.weight"
        return tensors | {name: torch.cat([tensors[name], torch.randn(64, tensors[name].shape[1])])}

    rewrite(tmp_path / "task0", longer)
    for rows in (pico.VOCAB + 64, pico.VOCAB):  # resized as transformers does it, and with a config that lags behind
        rewrite(tmp_path / "task0", dict, vocab_size=rows)
        out = tmp_path / f"out{rows}"
        outcome = run(recipe, out, progress=False)
        assert folders.weights(out)["model.embed_tokens.weight"].shape[0] == pico.VOCAB
        assert folders.hashes(out) == folders.hashes(plain.output)
        assert [r.after for r in outcome.records] == [r.after for r in plain.records]


@pytest.mark.parametrize("head", ["tied", "copied", "untied", "absent"])
def test_heads(head: str, tmp_path: Path) -> None:
    """Tied (absent from the file), tied with its copy in the file, a head of its own, and missing though untied."""
    recipe = folders.make_job(tmp_path)
    generator = torch.Generator().manual_seed(3)
    own = torch.randn(pico.VOCAB, pico.WIDTH, generator=generator)
    for name in ("base", "merged", "task0", "task1"):
        if head == "copied":
            rewrite(tmp_path / name, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        elif head == "untied":
            rewrite(tmp_path / name, lambda t: t | {"lm_head.weight": own}, tie_word_embeddings=False)
        elif head == "absent":
            rewrite(tmp_path / name, lambda t: t, tie_word_embeddings=False)
    run(recipe, tmp_path / "out", progress=False)
    merged, written = folders.weights(tmp_path / "merged"), folders.weights(tmp_path / "out")
    assert written.keys() == merged.keys() and ("lm_head.weight" in written) == (head in ("copied", "untied"))
    assert all(torch.equal(written[k], merged[k]) for k in merged if "layers" not in k)
    expected, _ = in_memory(recipe) if head != "absent" else ({}, None)
    assert all(torch.equal(written[key], value) for key, value in expected.items())
    if head == "absent":  # the blocks do not read it: the same as with any head
        rewrite(tmp_path / "merged", lambda t: t | {"lm_head.weight": own})
        run(recipe, tmp_path / "headed", progress=False)
        headed = folders.weights(tmp_path / "headed")
        assert all(torch.equal(written[key], headed[key]) for key in written)


def test_a_bare_base_and_a_classifier_expert_with_a_headed_merge(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    run(recipe, tmp_path / "plain", progress=False)
    LlamaModel.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    assert "layers.0.mlp.up_proj.weight" in folders.weights(tmp_path / "base")
    rewrite(
        tmp_path / "task1",
        lambda t: t | {"score.weight": torch.randn(3, pico.WIDTH)},
        architectures=["LlamaForSequenceClassification"],
    )
    run(recipe, tmp_path / "out", progress=False)
    assert folders.hashes(tmp_path / "out") == folders.hashes(tmp_path / "plain")


def test_nested_and_flat_clip(tmp_path: Path) -> None:
    """Files of older transformers say `vision_model.encoder`, newer ones `encoder`: mixed, the names stay merged's."""
    recipe = folders.make_job(tmp_path, "clip-vision")
    run(recipe, tmp_path / "plain", progress=False)
    plain = folders.weights(tmp_path / "plain")
    nested = next(iter(plain)).startswith("vision_model.")

    def other(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if nested:
            return {name.removeprefix("vision_model."): value for name, value in tensors.items()}
        return {f"vision_model.{name}": value for name, value in tensors.items()}

    rewrite(tmp_path / "task0", other)
    run(recipe, tmp_path / "mixed", progress=False)
    assert folders.hashes(tmp_path / "mixed") == folders.hashes(tmp_path / "plain")
    rewrite(tmp_path / "merged", other)
    run(recipe, tmp_path / "other", progress=False)
    written = folders.weights(tmp_path / "other")
    assert written.keys() == other(plain).keys() != plain.keys()
    assert all(torch.equal(written[name], value) for name, value in other(plain).items())
    _, report = CLIPVisionModel.from_pretrained(tmp_path / "other", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_packed_experts_are_listed_and_left_alone(family: str, tmp_path: Path) -> None:
    outcome = run(folders.make_job(tmp_path, family), tmp_path / "out", progress=False)
    kept = {f"{r.block}.{r.module}": r.reason for r in outcome.records if r.status == "kept"}
    assert kept["model.layers.0.mlp.experts"] == "packed expert tensors of a mixture of experts"
    merged, written = folders.weights(tmp_path / "merged"), folders.weights(tmp_path / "out")
    inside = [key for key in merged if "experts" in key]
    assert len(inside) >= 2 * 4 * 3 and all(torch.equal(merged[key], written[key]) for key in inside)
    assert not torch.equal(
        merged["model.layers.0.self_attn.o_proj.weight"], written["model.layers.0.self_attn.o_proj.weight"]
    )


def test_pickled_inputs_come_out_as_safetensors(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    run(recipe, tmp_path / "plain", progress=False)
    for name in ("merged", "task0"):
        torch.save(load_file(tmp_path / name / "model.safetensors"), tmp_path / name / "pytorch_model.bin")
        (tmp_path / name / "model.safetensors").unlink()
    run(recipe, tmp_path / "out", progress=False)
    plain, written = folders.weights(tmp_path / "plain"), folders.weights(tmp_path / "out")
    assert plain.keys() == written.keys() and all(torch.equal(plain[key], written[key]) for key in plain)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_a_bad_place_for_the_output_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    before = folders.hashes(tmp_path)
    for place in ("merged", "task0/inside", ".", "full", "task0.jsonl"):
        with pytest.raises(InputError, match="OUT"):
            run(recipe, tmp_path / place, overwrite=place != "full", progress=False)
    assert folders.hashes(tmp_path) == before and not list(folders.hidden(tmp_path))
    run(recipe, tmp_path / "full", overwrite=True, progress=False)
    assert not (tmp_path / "full" / "thesis.txt").exists() and folders.weights(tmp_path / "full")


@pytest.mark.parametrize("name", ["recipe", "tokenizer", "images"])
def test_overwrite_spares_whatever_is_read(name: str, tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "clip-vision" if name == "images" else "llama")
    out, tokenizer = tmp_path / "out", None
    out.mkdir()
    if name == "recipe":
        for folder in ("base", "merged", "task0", "task1"):
            recipe.write_text(recipe.read_text().replace(f"./{folder}", f"../{folder}"))
        recipe = recipe.rename(out / "recipe.yaml")
    elif name == "tokenizer":
        tokenizer = str(out / "tokenizer")
        folders.tokenizer().save_pretrained(tokenizer)
    else:
        (tmp_path / "task1-images").rename(out / "task1-images")
        rows = (tmp_path / "task1.jsonl").read_text()
        (tmp_path / "task1.jsonl").write_text(rows.replace("task1-images", "out/task1-images"))
    before = folders.hashes(out)
    with pytest.raises(InputError, match=r"contains the input .* which must stay intact"):
        run(recipe, out, overwrite=True, tokenizer=tokenizer, progress=False)
    assert folders.hashes(out) == before and not list(folders.hidden(tmp_path))


def test_an_output_can_be_made_again_from_its_own_recipe(tmp_path: Path) -> None:
    run(folders.make_job(tmp_path), tmp_path / "out", progress=False)
    before = folders.hashes(tmp_path / "out")
    run(tmp_path / "out" / "featcal.yaml", tmp_path / "out", overwrite=True, progress=False)
    assert folders.hashes(tmp_path / "out") == before
