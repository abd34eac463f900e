"""Real folders: mergekit merges pico models, PEFT saves adapters, featcal calibrates what they leave. No recipes."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, CLIPVisionModel, T5ForConditionalGeneration

import folders
import pico
from featcal import cli
from featcal.recipe import load_recipe

pytest.importorskip("mergekit", reason="pip install mergekit")

from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge import MergeOptions, run_merge
from mergekit.scripts.moe import main as mergekit_moe
from mergekit.scripts.multimerge import main as mergekit_multi
from mergekit.scripts.run_yaml import main as mergekit_yaml

pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = ("math", "code")
FAST = ["--set", "calibration.alpha=0.3", "--set", "calibration.samples=12", "--set", "calibration.batch_size=4"]
FAST += ["--data", "math=math.jsonl", "--data", "code=code.jsonl"]


def build(folder: Path, family: str) -> Path:
    """base, math and code of a family, and a data file for each task."""
    base = pico.make(family)
    made = {"base": base, "math": pico.perturbed(base, 1), "code": pico.perturbed(base, 2)}
    for name, model in made.items():
        folders.save(model, folder / name, family, torch.float32, "8KB" if name == "code" else "5GB")
    for number, task in enumerate(TASKS):
        folders.write_data(folder, task, family, 20, seed=number)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def _forget() -> None:
    """mergekit keeps open what it has read, by the path as it was written."""
    LoaderCache().loaders.clear()


@pytest.fixture
def zoo(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of pico Llamas as the working directory, in which all paths below are written."""
    monkeypatch.chdir(llama)
    return llama


# ------------------------------------------------------------------------------------------------------ the commands


def by_command(config: dict[str, Any], out: str, *flags: str, script: Any = mergekit_yaml) -> Path:
    """`mergekit-yaml CONFIG OUT`, as its own command line parses it."""
    Path(f"{out}.yml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(script, [f"{out}.yml", out, "--quiet", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Path(out)


def by_api(config: dict[str, Any], out: str, *flags: str) -> Path:
    """mergekit's Python API, into several shards; it writes the normalised document."""
    options = MergeOptions(out_shard_size=8_000, quiet=True, random_seed=7, lora_merge_cache="cache")
    run_merge(MergeConfiguration.model_validate(config), out, options=options)
    return Path(out)


def featcal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The `featcal` command: exit status, stdout, stderr."""
    status = 0
    logging.getLogger("featcal").handlers.clear()  # which say each thing once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["featcal", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
    text = capsys.readouterr()
    return status, text.out, text.err


def models(method: str, *names: str, base: str | None = "./base", **parameters: Any) -> dict[str, Any]:
    weighted = {"parameters": {"weight": 0.5}} if method not in ("slerp", "model_stock", "sce") else {}
    document = {
        "merge_method": method,
        "models": [{"model": name, **weighted} for name in names or ("./math", "./code")],
    }
    document |= {"parameters": parameters} if parameters else {}
    return document | ({"base_model": base} if base else {})


METHODS: dict[str, dict[str, Any]] = {
    "linear": models("linear", base=None),
    "task_arithmetic": models("task_arithmetic", **{"lambda": 0.8}),
    "ties": models("ties", density=0.6),
    "dare_ties": models("dare_ties", density=0.6),
    "della": models("della", density=0.6, epsilon=0.1),
    "breadcrumbs": models("breadcrumbs", density=0.8, gamma=0.05),
    "slerp": {**models("slerp", t=[0, 0.5, 1]), "base_model": "./math"},
    "model_stock": models("model_stock"),
    "sce": models("sce", select_topk=0.8),
}
NEEDS_BASE = {"linear": "does not name the base of its models", "slerp": "slerp goes from one model to another"}


def check_output(out: Path, merged: Path, load: Callable[..., Any], names: tuple[str, ...] = TASKS) -> None:
    """A drop-in folder, calibrated toward the right models, that transformers loads to the last tensor."""
    recipe = load_recipe(out / "featcal.yaml")
    assert set(recipe.tasks) == set(names) and recipe.merged == str(merged.resolve())
    assert folders.shards(out) == folders.shards(merged)
    before, after = folders.weights(merged), folders.weights(out)
    assert {k: (t.dtype, t.shape) for k, t in before.items()} == {k: (t.dtype, t.shape) for k, t in after.items()}
    report = json.loads((out / "report.json").read_text())
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) >= sum(m["status"] == "calibrated" for m in report["modules"]) > 8
    model, info = load(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("merge", [by_command, by_api])
@pytest.mark.parametrize("method", METHODS)
def test_llamas(zoo: Path, method: str, merge: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{method}-{merge.__name__}"
    merged = merge(METHODS[method], name, "--random-seed", "7")
    assert (merged / "mergekit_config.yml").is_file() and (merge is by_api) == (len(folders.shards(merged)) > 1)
    if method in NEEDS_BASE:
        status, _, text = featcal("calibrate", str(merged), "-o", f"{name}-out", *FAST, capsys=capsys)
        assert status == 2 and NEEDS_BASE[method] in text and "error: add: --base MODEL" in text
    flags = ["--base", "./base"] if method in NEEDS_BASE else []
    status, shown, text = featcal("calibrate", str(merged), "-o", f"{name}-out", *FAST, *flags, capsys=capsys)
    assert status == 0, text
    assert "14 modules calibrated" in shown
    recipe = load_recipe(zoo / f"{name}-out" / "featcal.yaml")
    assert recipe.base == str(zoo / "base")
    assert {t: s.expert for t, s in recipe.tasks.items()} == {t: str(zoo / t) for t in TASKS}
    said = " ".join(text.split())
    if method in ("linear", "task_arithmetic"):
        assert "the merge was recomputed on rows of 14 tensors; what differs is 0.00% of merged − base" in said
    else:
        assert f"not recomputed ({method} is not linear in the weights)" in said
        assert "in the usual range" in said and "but nothing" not in said
    check_output(zoo / f"{name}-out", merged, AutoModelForCausalLM.from_pretrained)


def test_bfloat16_gradients_and_filters(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = models("task_arithmetic")
    config["models"][0]["parameters"] = {"weight": [{"filter": "mlp", "value": [0.1, 0.7]}, {"value": 0.4}]}
    merged = by_command({**config, "dtype": "bfloat16"}, "gradients")
    status, _, text = featcal("plan", str(merged), *FAST, capsys=capsys)
    found = re.search(
        r"recomputed on rows of 14 tensors; what differs is (\d+\.\d+)% of merged − base", " ".join(text.split())
    )
    assert status == 0 and found and float(found[1]) < 10  # one rounding to bfloat16 is a few per cent of the change


# ------------------------------------------------------------------------------------------------ shapes and refusals


def test_slices_and_the_plan_as_a_recipe(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("base", *TASKS)
    sources = [{"model": f"./{name}", "layer_range": [0, 2], "parameters": {"weight": 0.5}} for name in names]
    config = {"merge_method": "task_arithmetic", "base_model": "./base", "slices": [{"sources": sources}]}
    merged = by_command(config, "sliced")
    status, text, said = featcal("plan", str(merged), *FAST, capsys=capsys)
    assert status == 0, said
    Path("saved.yaml").write_text(text)  # as `featcal plan … > saved.yaml` does
    assert text.startswith(
        f"# base and experts from {merged}/mergekit_config.yml (task_arithmetic)\nbase: {zoo}/base\n"
    )
    assert "memory" in said and "memory" not in text  # the tables go elsewhere when the recipe is saved
    status, shown, said = featcal("calibrate", "saved.yaml", "-o", "sliced-out", capsys=capsys)
    assert status == 0 and "14 modules calibrated" in shown, said


def test_a_frankenmerge(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [("./math", [0, 2]), ("./code", [0, 2])]
    slices = [{"sources": [{"model": model, "layer_range": layers}]} for model, layers in parts]
    merged = by_command({"merge_method": "passthrough", "slices": slices}, "stacked")
    status, _, text = featcal("calibrate", str(merged), "-o", "stacked-out", *FAST, capsys=capsys)
    assert status == 2 and "frankenmerge (its layer 2 was made of layer 0 of ./code)" in text
    assert not Path("stacked-out").exists()


def test_a_mixture(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = [{"source_model": f"./{task}", "positive_prompts": [task]} for task in TASKS]
    by_command({"base_model": "./base", "gate_mode": "random", "experts": experts}, "mixture", script=mergekit_moe)
    flags = ["--base", "./base", "--expert", "math=./math", "--expert", "code=./code"]
    status, _, text = featcal("plan", "mixture", *FAST, *flags, capsys=capsys)
    assert status == 2 and text.startswith("error: 'mixture' is a mixture of experts made by mergekit-moe")


def test_merges_of_merges(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mergekit-multi: the experts of the last merge are themselves merges."""
    first = {"name": "both", **models("linear", base=None)}
    last = models("ties", "both", "./code", density=0.9)
    Path("multi.yml").write_text(yaml.safe_dump_all([first, last]))
    flags = ["-I", str(zoo / "intermediate"), "--out-path", "chained"]
    done = CliRunner().invoke(mergekit_multi, ["multi.yml", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    data = [flag.replace("math=", "both=") for flag in FAST]
    status, _, text = featcal("calibrate", "chained", "-o", "chained-out", *data, capsys=capsys)
    assert status == 0, text
    expert = load_recipe(zoo / "chained-out" / "featcal.yaml").tasks["both"].expert
    assert expert == str(zoo / "intermediate" / "both")
    check_output(zoo / "chained-out", zoo / "chained", AutoModelForCausalLM.from_pretrained, ("both", "code"))


def test_the_output_as_base_of_another_merge(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = by_command(METHODS["ties"], "first")
    assert featcal("calibrate", str(merged), "-o", "first-out", *FAST, capsys=capsys)[0] == 0
    again = by_command(models("task_arithmetic", "./math", base="./first-out"), "second")
    base, math, made = (folders.weights(folder) for folder in (Path("first-out"), Path("math"), again))
    key = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(made[key], base[key] + 0.5 * (math[key] - base[key]), atol=1e-6)


def test_a_moved_expert(zoo: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    merged = by_command(METHODS["task_arithmetic"], "moved")
    other = build(tmp_path, "llama")
    folders.save(pico.perturbed(pico.make("llama"), 99), other / "math", "llama", torch.float32, "5GB")
    flags = ["--expert", f"math={other / 'math'}"]
    status, _, text = featcal("calibrate", str(merged), "-o", "moved-out", *FAST, *flags, capsys=capsys)
    assert status == 2 and "is not what moved/mergekit_config.yml describes" in text and "another revision" in text
    status, _, text = featcal("calibrate", str(merged), "-o", "moved-out", *FAST, *flags, "--no-proof", capsys=capsys)
    assert status == 0, text
    assert load_recipe("moved-out/featcal.yaml").tasks["math"].expert == str(other / "math")


# --------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def loras(llama: Path) -> Path:
    """PEFT adapters on the pico Llama: plain for math, rsLoRA with a trained norm for code."""
    options: dict[str, dict[str, Any]] = {
        "math": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        "code": {"target_modules": ["o_proj", "up_proj"], "use_rslora": True, "modules_to_save": ["norm"]},
    }
    for seed, (task, config) in enumerate(options.items()):
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(llama / "base")
            tuned = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **config))
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.1 * torch.randn_like(parameter))
            tuned.save_pretrained(str(llama / "lora" / task))
    return llama


def test_adapters_merged_by_mergekit(zoo: Path, loras: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = models("task_arithmetic", *(f"./base+./lora/{task}" for task in TASKS))
    merged = by_command(config, "from-loras", "--lora-merge-cache", "cache")
    status, _, text = featcal("calibrate", str(merged), "-o", "from-loras-out", *FAST, capsys=capsys)
    assert status == 0, text
    assert "what differs is 0.00% of merged − base" in " ".join(text.split())
    recipe = load_recipe("from-loras-out/featcal.yaml")
    assert recipe.tasks["math"].expert == f"{zoo}/base+{zoo}/lora/math"
    check_output(Path("from-loras-out"), merged, AutoModelForCausalLM.from_pretrained)


def test_an_adapter_that_was_never_applied(zoo: Path, loras: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = models("task_arithmetic", *(f"./base+./lora/{task}" for task in TASKS))
    merged = by_command(
        models("task_arithmetic", "./base+./lora/math", "./base@copy"), "half", "--lora-merge-cache", "cache"
    )
    (merged / "mergekit_config.yml").write_text(yaml.safe_dump(config))
    status, _, text = featcal("calibrate", str(merged), "-o", "half-out", *FAST, capsys=capsys)
    assert status == 2 and f"+{zoo}/lora/code' left no trace in it (was its adapter applied?)" in text


def test_adapters_merged_by_peft(zoo: Path, loras: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No document at all: the adapters' own configs tell the base."""
    base = AutoModelForCausalLM.from_pretrained("base")
    tuned = PeftModel.from_pretrained(base, "lora/math", adapter_name="math")
    tuned.load_adapter("lora/math", adapter_name="twin")
    tuned.add_weighted_adapter(["math", "twin"], [0.3, 0.3], "both", combination_type="linear")
    tuned.set_adapter("both")
    tuned.merge_and_unload().save_pretrained("by-peft")
    status, _, text = featcal("calibrate", "by-peft", "-o", "by-peft-out", *FAST, capsys=capsys)
    assert status == 2 and "does not say what it was merged from" in text
    assert "add: --base MODEL --expert math=MODEL --expert code=MODEL" in text
    flags = [f"--expert={task}=lora/{task}" for task in TASKS]
    status, _, text = featcal("calibrate", "by-peft", "-o", "by-peft-out", *FAST, *flags, capsys=capsys)
    assert status == 0, text
    assert "base: the model that the experts are adapters of" in " ".join(text.split())
    assert load_recipe("by-peft-out/featcal.yaml").base == str(zoo / "base")
    check_output(Path("by-peft-out"), Path("by-peft"), AutoModelForCausalLM.from_pretrained)


def test_a_merged_adapter(zoo: Path, loras: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merge itself left as an adapter: the calibrated model is a full one."""
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "lora/math", adapter_name="math")
    tuned.load_adapter("lora/code", adapter_name="code")
    tuned.add_weighted_adapter(["math", "code"], [0.5, 0.5], "both", combination_type="cat")
    tuned.save_pretrained("adapter", selected_adapters=["both"])
    flags = [f"--expert={task}=lora/{task}" for task in TASKS]
    status, _, text = featcal("calibrate", "adapter/both", "-o", "adapter-out", *FAST, *flags, capsys=capsys)
    assert status == 0, text
    assert load_recipe("adapter-out/featcal.yaml").base == str(zoo / "base")
    _, info = AutoModelForCausalLM.from_pretrained("adapter-out", output_loading_info=True)
    assert not info["missing_keys"] and folders.shards(Path("adapter-out")) == folders.shards(Path("base"))


# ---------------------------------------------------------------------------------------------------- other families


@pytest.mark.parametrize(("family", "kind"), [("t5", T5ForConditionalGeneration), ("clip-vision", CLIPVisionModel)])
def test_other_families(
    family: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(build(tmp_path, family))
    merged = by_command(METHODS["task_arithmetic"], "merged")
    if family == "clip-vision":
        assert not (merged / "preprocessor_config.json").exists()  # read from the base instead
    status, _, text = featcal("calibrate", "merged", "-o", "out", *FAST, capsys=capsys)
    assert status == 0, text
    assert "what differs is 0.00% of merged − base" in " ".join(text.split())
    check_output(Path("out"), merged, kind.from_pretrained)
