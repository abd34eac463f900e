"""Merges from checkpoints: the weights of the in-memory mergers, in a folder with the base's files."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BertModel, CLIPVisionModel, LlamaForCausalLM

import featcal.merging.tensors
import folders
import pico
from children import Doom, command, ranks
from featcal.cli import main
from featcal.errors import InputError, RunError
from featcal.merging import REGISTRY, get_merger, merge_modules, merge_state_dicts
from featcal.merging.command import merge
from featcal.merging.folder import MADE, prepare_merge
from featcal.merging.loading import whole_model
from featcal.merging.wudi import Wudi
from featcal.plan import Model, prepare
from featcal.recipe import MergeSpec, load_recipe
from featcal.run import run

FAMILIES = ["clip", "bert", "t5", "llama"]
FEW = {"samples": 5, "batch_size": 3}
CHEAP: dict[str, dict[str, Any]] = {
    "wudi": {"iterations": 3, "lr": 1e-3},
    "regmean": FEW,
    "regmean_pp": FEW,
    "lot": FEW,
    "fisher": FEW,
    "adamerging": {**FEW, "steps": 2, "lr": 0.05},
}


def job(folder: Path, family: str, spec: dict[str, Any] | None = None, **options: Any) -> Path:
    """A recipe whose merged model is still to be made."""
    recipe = folders.make_job(folder, family, **options)
    shutil.rmtree(folder / "merged")
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "merged": spec or {"method": "average"}}, sort_keys=False))
    return recipe


def setting(method: str, **fields: Any) -> str:
    """The merge as an override."""
    return f"merged={json.dumps({'method': method, **CHEAP.get(method, {}), **fields})}"


def in_memory(recipe: Path, override: str) -> dict[str, Tensor]:
    """The same merge of whole models on the same batches, by key on disk."""
    plan = prepare_merge(load_recipe(recipe, [override]))
    assert isinstance(plan.base, Model) and isinstance(plan.recipe.merged, MergeSpec)
    merged: nn.Module = merge_modules(
        get_merger(plan.recipe.merged.method, plan.recipe.merged.parameters),
        whole_model(plan.base),
        {task: whole_model(model) for task, model in plan.experts.items()},
        data={task: data.learn.batches for task, data in plan.tasks.items()} or None,
        device="cpu",
    )
    keymap = plan.base.keymap
    return {key: p for name, p in merged.named_parameters() if (key := keymap.key(name)) is not None}


@pytest.fixture(scope="module")
def made_jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One recipe per family, for tests that only read it."""
    return {family: job(tmp_path_factory.mktemp(family), family, shard="8KB") for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_every_method_from_the_recipe_equals_the_merge_in_memory(
    method: str, family: str, made_jobs: dict[str, Path], tmp_path: Path
) -> None:
    recipe, override = made_jobs[family], setting(method)
    made = merge(recipe, tmp_path / "out", overrides=[override], progress=False)
    base, got = folders.weights(recipe.parent / "base"), folders.weights(tmp_path / "out")
    assert got.keys() == base.keys() and folders.shards(tmp_path / "out") == folders.shards(recipe.parent / "base")
    changed = 0
    for key, value in in_memory(recipe, override).items():
        assert torch.allclose(got[key], value, rtol=0, atol=2e-6), key
        changed += not torch.equal(got[key], base[key])
    fewest = 20 - (method == "regmean_pp")  # RegMean++ leaves what comes after the blocks (a final norm) at the base
    assert changed >= fewest and made.method == method and made.seconds > 0 and not list(folders.hidden(tmp_path))
    told = json.loads((tmp_path / "out" / MADE).read_text())
    assert told["merged"]["method"] == method and told["notes"] == made.notes
    assert told["samples"] == ({"task0": 5, "task1": 5} if method in CHEAP and method != "wudi" else {})
    assert load_recipe(tmp_path / "out" / "featcal.yaml") == load_recipe(recipe, [override])


@pytest.mark.parametrize(("family", "method"), [("gpt2", "wudi"), ("gpt2", "regmean"), ("qwen3-moe", "ties"),
                                                ("qwen3-moe", "regmean_pp"), ("qwen3-moe", "fisher")])  # fmt: skip
def test_transposed_and_fused_tensors(family: str, method: str, tmp_path: Path) -> None:
    """GPT-2's weights are transposed; a mixture's experts are one tensor in memory and many on disk."""
    recipe, override = job(tmp_path, family), setting(method)
    made = merge(recipe, tmp_path / "out", overrides=[override], progress=False)
    got, expected = folders.weights(tmp_path / "out"), in_memory(recipe, override)
    assert all(torch.allclose(got[key], value, rtol=0, atol=2e-6) for key, value in expected.items())
    plan = prepare_merge(load_recipe(recipe, [override]))
    assert plan.base is not None
    fused = [name for name in plan.base.keymap.parameters if plan.base.keymap.key(name) is None]
    assert bool(fused) == (family == "qwen3-moe")
    if method == "fisher":
        assert sum("the file stores it in another form" in note for note in made.notes) == len(fused)
    base = folders.weights(tmp_path / "base")
    after = 2 if method == "regmean_pp" else 0  # the last norm and the head keep the base's values
    assert sum(not torch.equal(base[key], got[key]) for key in base) == len(base) - after


@pytest.mark.parametrize("method", ["task_arithmetic", "regmean_pp"])
def test_a_calibration_merges_first_and_equals_that_of_the_merged_folder(
    method: str, made_jobs: dict[str, Path], tmp_path: Path
) -> None:
    recipe, override = made_jobs["llama"], setting(method)
    one = run(recipe, tmp_path / "one", overrides=[override], progress=False)
    merge(recipe, tmp_path / "merged", overrides=[override], progress=False)
    two = run(recipe, tmp_path / "two", overrides=[f"merged={tmp_path / 'merged'}"], progress=False)
    first, second = folders.weights(tmp_path / "one"), folders.weights(tmp_path / "two")
    assert all(torch.equal(first[key], second[key]) for key in second) and first.keys() == second.keys()
    assert [(r.module, r.after) for r in one.records] == [(r.module, r.after) for r in two.records]
    assert load_recipe(tmp_path / "one" / "featcal.yaml").merged == load_recipe(recipe, [override]).merged
    assert one.seconds["merge"] > 0 and "merge" not in two.seconds and not list(folders.hidden(tmp_path))
    merged = folders.weights(tmp_path / "merged")
    assert sum(not torch.equal(first[key], merged[key]) for key in merged) >= 14


def test_a_finished_merge_is_taken_by_the_next_run_of_the_same_inputs(
    made_jobs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, made = made_jobs["bert"], []
    real = featcal.merging.folder.make_merge

    def counted(plan: Any, *args: Any, **options: Any) -> Any:
        made.append(plan.recipe.merged.method)
        return real(plan, *args, **options)

    monkeypatch.setattr("featcal.merging.folder.make_merge", counted)
    expected = run(recipe, tmp_path / "whole", overrides=[setting("ties")], progress=False)
    monkeypatch.setattr(sys.modules["featcal.run"], "run_job", lambda job: (_ for _ in ()).throw(RunError("killed")))
    attempts: list[tuple[str, bool, str]] = [
        ("ties", False, "killed"),
        ("ties", False, "killed"),
        ("average", False, "holds an unfinished run with another model merged"),
        ("ties", False, "killed"),
        ("ties", True, "killed"),
    ]
    for method, fresh, message in attempts:
        with pytest.raises((RunError, InputError), match=message):
            run(recipe, tmp_path / "out", overrides=[setting(method)], fresh=fresh, progress=False)
    assert made == ["ties", "ties", "average", "ties", "ties"]
    monkeypatch.undo()
    got = run(recipe, tmp_path / "out", overrides=[setting("ties")], progress=False)
    assert [r.after for r in got.records] == [r.after for r in expected.records]
    assert folders.hashes(tmp_path / "out", skip=("report.json", "report.html", MADE)) == folders.hashes(
        tmp_path / "whole", skip=("report.json", "report.html", MADE)
    )


def test_an_interrupted_merge_goes_on_after_the_last_finished_matrix(
    made_jobs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, override, done = made_jobs["llama"], setting("wudi"), list[str]()
    merge(recipe, tmp_path / "whole", overrides=[override], progress=False)
    real = Wudi.merge_matrix

    def until(limit: int) -> Any:
        def merge_matrix(self: Wudi, deltas: Any) -> Tensor:
            if len(done) == limit:
                raise RunError("killed")
            done.append(deltas.name)
            return real(self, deltas)

        return merge_matrix

    monkeypatch.setattr(Wudi, "merge_matrix", until(5))
    with pytest.raises(RunError, match="killed"):
        merge(recipe, tmp_path / "out", overrides=[override], progress=False)
    assert not (tmp_path / "out").exists() and len(list(folders.hidden(tmp_path))) == 1
    monkeypatch.setattr(Wudi, "merge_matrix", until(1000))
    merge(recipe, tmp_path / "out", overrides=[override], progress=False)
    assert len(done) == len(set(done)) > 10
    assert folders.hashes(tmp_path / "out", skip=(MADE,)) == folders.hashes(tmp_path / "whole", skip=(MADE,))
    # what is finished with other parameters does not count
    done.clear()
    monkeypatch.setattr(Wudi, "merge_matrix", until(5))
    with pytest.raises(RunError, match="killed"):
        merge(recipe, tmp_path / "other", overrides=[setting("wudi", iterations=2)], progress=False)
    monkeypatch.undo()
    merge(recipe, tmp_path / "other", overrides=[override], progress=False)
    assert folders.hashes(tmp_path / "other", skip=(MADE,)) == folders.hashes(tmp_path / "whole", skip=(MADE,))


def test_only_one_tensor_of_each_model_is_asked_for_at_a_time(
    made_jobs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, str]] = []
    get = featcal.merging.tensors.Renamed.get

    def noted(self: Any, key: str) -> Tensor:
        log.append((self.checkpoint.folder.name, key))
        return get(self, key)

    monkeypatch.setattr("featcal.merging.tensors.Renamed.get", noted)
    merge(made_jobs["bert"], tmp_path / "out", overrides=[setting("task_arithmetic")], progress=False)
    keys = list(dict.fromkeys(key for _, key in log))
    assert log == [(model, key) for key in keys for model in ("base", "task0", "task1")]


# ---- names


def test_experts_with_another_head_or_prefix_are_merged_by_the_models_names(tmp_path: Path) -> None:
    """The base is a bare encoder (its keys lack the prefix), the experts are classifiers."""
    setup = pico.family_setup("bert")
    recipe = job(tmp_path, "bert", setup=setup)
    bare = BertModel(setup.base.config)
    bare.load_state_dict(setup.base.bert.state_dict(), strict=False)  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "base")
    folders.save(bare, tmp_path / "base", "bert", torch.float32, "5GB")
    made = merge(recipe, tmp_path / "out", progress=False)
    got = folders.weights(tmp_path / "out")
    assert "embeddings.word_embeddings.weight" in got and not any(key.startswith("bert.") for key in got)
    states = [expert.bert.state_dict() for expert in setup.experts.values()]
    key = "encoder.layer.1.attention.self.query.weight"
    assert torch.allclose(got[key], (states[0][key] + states[1][key]) / 2, atol=1e-7)
    assert any(n.startswith("classifier.") and "'task1' are left out" in n for n in made.notes)


def test_vision_towers_are_merged_into_a_whole_clip_and_calibrated_on_images_alone(tmp_path: Path) -> None:
    setup = pico.family_setup("clip")
    recipe = job(tmp_path, "clip", {"method": "regmean", **FEW}, setup=setup)
    for task, expert in setup.experts.items():
        tower = CLIPVisionModel(expert.vision_model.config)
        tower.load_state_dict(expert.vision_model.state_dict(), strict=False)
        shutil.rmtree(tmp_path / task)
        folders.save(tower, tmp_path / task, "clip-vision", torch.float32, "5GB")
    content = yaml.safe_load(recipe.read_text())
    for task in content["tasks"].values():
        del task["data"]["text"]
    recipe.write_text(yaml.safe_dump(content))
    made = merge(recipe, tmp_path / "out", progress=False)
    base, got = folders.weights(tmp_path / "base"), folders.weights(tmp_path / "out")
    assert got.keys() == base.keys()
    still = {key for key in base if torch.equal(base[key], got[key])}
    assert {key for key in base if key.startswith("text_model.")} <= still
    assert not any(key.startswith("vision_model.encoder") for key in still)
    counted = [note for note in made.notes if "does not have them" in note]
    assert len(counted) == 1 and counted[0].split()[0].isdigit() and "text_model." in counted[0]
    outcome = run(recipe, tmp_path / "calibrated", progress=False)
    assert {r.block.partition(".layers")[0] for r in outcome.records if r.status == "calibrated"} == {"encoder"} or all(
        "vision" in r.block or r.block.startswith("encoder") for r in outcome.records if r.status == "calibrated"
    )
    assert torch.equal(folders.weights(tmp_path / "calibrated")["text_model.embeddings.token_embedding.weight"],
                       base["text_model.embeddings.token_embedding.weight"])  # fmt: skip


@pytest.mark.parametrize("method", ["fisher", "adamerging"])
def test_clip_towers_are_scored_by_known_class_names(method: str, tmp_path: Path) -> None:
    setup = pico.family_setup("clip")
    tasks = dict(zip(("svhn", "mnist"), setup.experts.values(), strict=True))
    setup.experts, setup.data = tasks, dict(zip(tasks, setup.data.values(), strict=True))
    recipe = job(tmp_path, "clip", {"method": method, **CHEAP[method]}, setup=setup)
    content = yaml.safe_load(recipe.read_text())
    for task in content["tasks"].values():
        del task["data"]["text"]
    recipe.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="refuses"):  # a whole CLIP reads texts, too
        merge(recipe, tmp_path / "out", progress=False)
    for task, expert in tasks.items():
        tower = CLIPVisionModel(expert.vision_model.config)
        tower.load_state_dict(expert.vision_model.state_dict(), strict=False)
        shutil.rmtree(tmp_path / task)
        folders.save(tower, tmp_path / task, "clip-vision", torch.float32, "5GB")
    merge(recipe, tmp_path / "out", progress=False)
    merge(recipe, tmp_path / "mean", overrides=[setting("average")], progress=False)
    got, mean = folders.weights(tmp_path / "out"), folders.weights(tmp_path / "mean")
    assert all(torch.equal(got[key], mean[key]) for key in got if key.startswith("text_model."))
    key = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(got[key], mean[key]) and torch.allclose(got[key], mean[key], atol=0.2)
    content["tasks"]["zebras"] = content["tasks"].pop("mnist")
    recipe.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="task 'zebras': CLIP's scores need class names"):
        merge(recipe, tmp_path / "other", progress=False)


def test_tied_tensors_that_the_file_holds_twice_are_merged_once(tmp_path: Path) -> None:
    setup = pico.family_setup("llama")
    for model in (setup.base, *setup.experts.values()):
        model.config.tie_word_embeddings = True  # type: ignore[union-attr]
        model.tie_weights()  # type: ignore[operator]
    recipe = job(tmp_path, "llama", setup=setup)
    for name in ("base", *setup.experts):
        path = tmp_path / name / "model.safetensors"
        state = folders.weights(tmp_path / name)
        head = "lm_head.weight"
        state[head] = state.get(head, state["model.embed_tokens.weight"]).clone()
        if name == "task1":
            state[head] += 1.0
        save_file(state, path, {"format": "pt"})
    made = merge(recipe, tmp_path / "out", overrides=[setting("ties")], progress=False)
    got = folders.weights(tmp_path / "out")
    assert torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert any("'task1' has other values there" in note for note in made.notes)
    states = [{k: v for k, v in folders.weights(tmp_path / n).items() if k != "lm_head.weight"} for n in
              ("base", *setup.experts)]  # fmt: skip
    once = merge_state_dicts(get_merger("ties"), states[0], states[1:])
    assert all(torch.equal(got[key], once[key]) for key in once)


def test_adapters_are_experts(tmp_path: Path) -> None:
    setup = pico.family_setup("llama")
    recipe = job(tmp_path, "llama", setup=setup)
    expected = []
    for number, task in enumerate(setup.experts):
        shutil.rmtree(tmp_path / task)
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
        tuned = get_peft_model(copy.deepcopy(setup.base), config)
        torch.manual_seed(number)
        with torch.no_grad():
            for name, p in tuned.named_parameters():
                if "lora_" in name:
                    p.normal_(0, 0.2)
        tuned.save_pretrained(str(tmp_path / task))
        expected.append(tuned.merge_and_unload().state_dict())
    overrides = [setting("task_arithmetic", scale=0.5)]
    with pytest.raises(InputError, match=r"OUT .* lies inside the input"):
        merge(recipe, tmp_path / "task0" / "inside", overrides=overrides, progress=False)
    merge(recipe, tmp_path / "out", overrides=overrides, progress=False)
    base, got = folders.weights(tmp_path / "base"), folders.weights(tmp_path / "out")
    for key, value in base.items():
        wanted = value + 0.5 * sum(state[key] - value for state in expected)
        assert torch.allclose(got[key], wanted, atol=1e-6), key
    assert not torch.equal(
        got["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("method", ["task_arithmetic", "regmean", "adamerging"])
@pytest.mark.parametrize("glob", ["vit.encoder.layer.0.*", "vit.layers.0.*"])
def test_globs_may_name_tensors_as_the_file_or_as_the_model_does(method: str, glob: str, tmp_path: Path) -> None:
    recipe = job(tmp_path, "vit")
    base = folders.weights(tmp_path / "base")
    inside = {key for key in base if key.startswith("vit.encoder.layer.0.")}
    assert len(inside) == 16
    merge(recipe, tmp_path / "out", overrides=[setting(method, exclude=[glob])], progress=False)
    got = folders.weights(tmp_path / "out")
    assert {key for key in base if torch.equal(got[key], base[key])} == inside


# ---- files


def test_half_precision_shards_and_side_files_stay_the_base_s(tmp_path: Path) -> None:
    recipe = job(tmp_path, "llama", dtype=torch.bfloat16, shard="8KB")
    for method in ("ties", "lot", "fisher"):
        merge(recipe, tmp_path / method, overrides=[setting(method)], progress=False)
        assert folders.shards(tmp_path / method) == folders.shards(tmp_path / "base")
        assert {t.dtype for t in folders.weights(tmp_path / method).values()} == {torch.bfloat16}
        added = set(folders.hashes(tmp_path / method)) - set(folders.hashes(tmp_path / "base"))
        assert added == {"merge.json", "featcal.yaml"}
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            assert (tmp_path / method / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
        model = LlamaForCausalLM.from_pretrained(tmp_path / method)
        assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_data_free_merges_read_no_data(made_jobs: dict[str, Path], tmp_path: Path) -> None:
    override = 'tasks.task0.data={"source": "nowhere.jsonl"}'
    merge(made_jobs["bert"], tmp_path / "out", overrides=[setting("iso_c"), override], progress=False)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    with pytest.raises(InputError, match="nowhere"):
        merge(made_jobs["bert"], tmp_path / "more", overrides=[setting("lot"), override], progress=False)
    assert not (tmp_path / "more").exists() and not list(folders.hidden(tmp_path))


def test_the_plan_of_a_recipe_with_a_merge_needs_no_merged_model(made_jobs: dict[str, Path]) -> None:
    plan = prepare(load_recipe(made_jobs["t5"], [setting("ties")]))
    plan.check()
    assert plan.merged is not None and plan.base is not None and len(plan.blocks) == 4
    assert plan.merged.checkpoint.folder == plan.base.checkpoint.folder
    assert not any("was the merge applied" in note for note in plan.notes)
    wrong = prepare(load_recipe(made_jobs["t5"], ['merged={"method": "ties", "densty": 0.2}']))
    assert wrong.problems == ["merge method 'ties' has no parameter 'densty', did you mean 'density'?"] or (
        "densty" in wrong.problems[0] and "density" in wrong.problems[0]
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("merged=./base", "names a model; to make one, write e.g. merged: {method: task_arithmetic}"),
        ('merged={"method": "tie"}', "unknown merge method 'tie'"),
        ('merged={"method": "task_arithmetic", "scale": [1, 2, 3]}', "lists 3 numbers for 2 experts"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    override: str, message: str, made_jobs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message.replace("{", r"\{").replace("}", r"\}")):
        merge(made_jobs["bert"], tmp_path / "out", overrides=[override], progress=False)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_not_replaced_unasked_and_inputs_never(made_jobs: dict[str, Path], tmp_path: Path) -> None:
    recipe = made_jobs["bert"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        merge(recipe, tmp_path / "out", progress=False)
    merge(recipe, tmp_path / "out", overwrite=True, progress=False)
    assert not (tmp_path / "out" / "mine.txt").exists() and (tmp_path / "out" / MADE).exists()
    with pytest.raises(InputError, match="must stay intact"):
        merge(recipe, recipe.parent / "task0", overwrite=True, progress=False)


def test_the_command_prints_where_the_merge_is(
    made_jobs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(made_jobs["bert"]), "-o", str(tmp_path / "out"), "--set", setting("tsv_m")]
    monkeypatch.setattr(sys, "argv", ["featcal", "-q", "merge", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.replace("\n", "").startswith(f"{tmp_path / 'out'}  (tsv_m, ")
    assert (tmp_path / "out" / MADE).is_file()


# ---- processes


def test_a_killed_merge_leaves_nothing_and_goes_on(made_jobs: dict[str, Path], tmp_path: Path) -> None:
    recipe = made_jobs["llama"]
    merge(recipe, tmp_path / "whole", overrides=[setting("wudi")], progress=False)
    words = ["-q", "merge", recipe, "-o", tmp_path / "out", "--set", setting("wudi")]
    for at in (4, 30, 60):
        assert command(words, tmp_path / "log", doom=Doom(tmp_path, at)).status() == -9
        assert not (tmp_path / "out").exists()
    child = command(words, tmp_path / "log")
    assert child.status() == 0, child.text
    assert folders.hashes(tmp_path / "out", skip=(MADE,)) == folders.hashes(tmp_path / "whole", skip=(MADE,))
    assert not list(folders.hidden(tmp_path))


@pytest.mark.parametrize("method", ["ties", "regmean_pp"])
def test_the_first_of_several_processes_merges(method: str, made_jobs: dict[str, Path], tmp_path: Path) -> None:
    recipe, override = made_jobs["llama"], setting(method)
    run(recipe, tmp_path / "one", overrides=[override], progress=False)
    words = ["-q", "calibrate", recipe, "-o", tmp_path / "two", "--set", override]
    children = ranks(words, tmp_path / "log", 2)
    assert [child.status() for child in children] == [0, 0], [child.text for child in children]
    one, two = folders.weights(tmp_path / "one"), folders.weights(tmp_path / "two")
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=1e-6) for key in one)
    children = ranks(["-q", "merge", recipe, "-o", tmp_path / "merged", "--set", override], tmp_path / "log", 2)
    assert [child.status() for child in children] == [0, 0]
    told = json.loads((tmp_path / "merged" / MADE).read_text())
    assert told["merged"]["method"] == method
