"""Base and experts found in a merged folder: every document shape, every method, every way to be wrong. No weights."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from featcal.discover import discover, find, parse_pairs
from featcal.documents import Reference, front_matter, read_merge
from featcal.errors import InputError
from featcal.intake import Given
from featcal.recipe import load_recipe

DATA = {"math": "math.jsonl", "code": "code.jsonl"}
TASK_VECTORS = "task_arithmetic ties dare_linear dare_ties della della_linear breadcrumbs breadcrumbs_ties sce ram"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """base, math, code beside merged, seen from a working directory elsewhere."""
    for name in ("base", "math", "code", "merged", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def write(place: Path, document: Any, name: str = "mergekit_config.yml") -> Path:
    text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False)
    (place / "merged" / name).write_text(textwrap.dedent(text))
    return place / "merged"


def models(method: str = "ties", base: str | None = "./base", **more: Any) -> dict[str, Any]:
    named = [{"model": f"./{name}", "parameters": {"weight": 0.5}} for name in ("math", "code")]
    return {"models": named, "merge_method": method, **({"base_model": base} if base else {}), **more}


def sliced(*ranges: tuple[int, int], base: str | None = "./base", method: str = "ties") -> dict[str, Any]:
    slices = [{"sources": [{"model": f"./{m}", "layer_range": list(r)} for m in ("math", "code")]} for r in ranges]
    return {"slices": slices, "merge_method": method, **({"base_model": base} if base else {})}


def found(merged: Path, **more: Any) -> tuple[str, dict[str, str]]:
    """Base and experts, as paths relative to the merged folder's parent."""
    recipe = discover(merged, **{"data": DATA, **more})
    experts = {task: spec.expert for task, spec in recipe.tasks.items()}

    def short(ref: str) -> str:
        return ref.replace(f"{merged.parent}/", "")

    return short(recipe.base), {task: short(ref) for task, ref in experts.items()}


EXPECTED = ("base", {"math": "math", "code": "code"})

# ---------------------------------------------------------------------------------------------- shapes of documents

NORMALISED = """
    base_model: ./base
    merge_method: ties
    modules:
      default:
        slices:
        - sources:
          - layer_range: [0, 4]
            model: ./math
            parameters: {weight: 0.5}
          - layer_range: [0, 4]
            model: ./code
            parameters: {weight: 0.5}
          - layer_range: [0, 4]
            model: ./base
    """


@pytest.mark.parametrize(
    "document",
    [
        models(),
        {**models(), "models": [{"model": "./base"}, *models()["models"]]},  # the base listed, as it once had to be
        {**models(), "models": [*models()["models"], {"model": "base"}]},  # … in another spelling
        sliced((0, 4), (4, 8)),
        {k: v for k, v in {**models(), "modules": {"a": {"models": models()["models"]}}}.items() if k != "models"},
        NORMALISED,
        {**models(), "tokenizer_source": "union", "dtype": "bfloat16", "chat_template": "auto", "surprise": [1]},
    ],
    ids=["models", "base-listed", "base-respelt", "slices", "modules", "normalised", "more-keys"],
)
def test_shapes(place: Path, document: Any) -> None:
    assert found(write(place, document)) == EXPECTED


def test_modules_of_two_towers_are_put_together(place: Path) -> None:
    towers = {"encoder": {"models": [{"model": "./math"}]}, "decoder": {"slices": sliced((0, 2))["slices"]}}
    assert found(write(place, {"modules": towers, "merge_method": "ties", "base_model": "./base"})) == EXPECTED


def test_base_of_single_slices(place: Path) -> None:
    document = sliced((0, 4), (4, 8), base=None)
    for part in document["slices"]:
        part["base_model"] = "./base"
    assert found(write(place, document)) == EXPECTED
    document["slices"][1]["base_model"] = "./code"
    with pytest.raises(InputError, match=r"names several bases: .*/base, .*/code"):
        found(write(place, document))
    assert found(write(place, document), base=str(place / "base"), experts={"code": "../code"}) == EXPECTED


@pytest.mark.parametrize("where", ["README.md", "both"])
def test_card(place: Path, where: str) -> None:
    card = "---\nbase_model: []\ntags: [merge]\n---\n# m\n\nbla `x`\n\n```python\n1\n```\n\n"
    card += f"```yaml\n{yaml.safe_dump(models())}\n```\n"
    merged = write(place, card, "README.md")
    assert found(merged) == EXPECTED
    if where == "both":  # the file counts, not the card
        other = models(base="./code")
        write(place, {**other, "models": [{"model": "./math"}]})
        assert discover(merged, {"math": "m.jsonl"}).base == str(place / "code")


def test_fusion_bench_card(place: Path) -> None:
    card = f"""
    ---
    library_name: transformers
    ---
    # Deep Model Fusion
    ### Algorithm Configuration
    ```yaml
    _target_: fusion_bench.method.TaskArithmeticAlgorithm
    scaling_factor: 0.3
    ```
    ### Model Pool Configuration
    ```yaml
    _target_: fusion_bench.modelpool.CausalLMPool
    models:
      _pretrained_: {place}/base
      code:
        _target_: transformers.AutoModelForCausalLM.from_pretrained
        pretrained_model_name_or_path: {place}/code
      math:
        _target_: fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model
        base_model_path: {place}/base
        peft_model_path: {place}/math
      _merged_: somewhere
    ```
    """
    merged = write(place, card, "README.md")
    base, experts = found(merged)
    assert base == "base" and experts == {"math": "base+math", "code": "code"}
    merge = read_merge(merged)
    assert merge is not None and (merge.method, merge.parameters) == ("task_arithmetic", {"weight": 0.3})


def test_sd_mecha_recipe_in_the_header(place: Path) -> None:
    lines = ["version 0.1.0"]
    lines += [f'model "{place}/{m}" model_config="x" merge_space="weight"' for m in ("math", "base", "code")]
    lines += ['merge "subtract" &0 &1', 'merge "subtract" &2 &1', 'merge "add_difference" &1 &3 alpha=1.0']
    save_file({"w": torch.zeros(1)}, place / "merged" / "m.safetensors", {"mecha_recipe": "\n".join(lines)})
    assert found(place / "merged") == EXPECTED
    two = "\n".join([*lines[:4], 'merge "weighted_sum" &0 &2 alpha=0.5'])
    save_file({"w": torch.zeros(1)}, place / "merged" / "m.safetensors", {"mecha_recipe": two})
    with pytest.raises(InputError, match="sd-mecha weighted_sum does not name the base"):
        found(place / "merged")


# -------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("method", [*TASK_VECTORS.split(), "ramplus_tl", "model_stock", "multislerp", "nuslerp"])
def test_methods_on_task_vectors(place: Path, method: str) -> None:
    assert found(write(place, models(method))) == EXPECTED


@pytest.mark.parametrize(
    ("method", "base", "reason"),
    [
        ("linear", None, "linear does not name the base of its models"),
        ("karcher", None, "karcher does not name the base"),
        ("multislerp", None, "multislerp does not name the base"),
        ("invented", "./base", "what invented takes as its base is not known"),
    ],
)
def test_methods_without_a_base_ask_for_it(place: Path, method: str, base: str | None, reason: str) -> None:
    merged = write(place, models(method, base))
    with pytest.raises(InputError, match=reason) as caught:
        found(merged)
    assert f"add: --base {place / 'base' if base else 'MODEL'}" in str(caught.value)
    assert found(merged, base=str(place / "base")) == EXPECTED


@pytest.mark.parametrize("method", ["slerp", "nearswap", "arcee_fusion"])
def test_endpoint_methods_make_both_models_experts(place: Path, method: str) -> None:
    document = {"models": [{"model": "./math"}, {"model": "./code"}], "merge_method": method, "base_model": "./math"}
    for shape in (document, {**document, "models": document["models"][1:]}):
        merged = write(place, shape)
        with pytest.raises(InputError, match=f"{method} goes from one model to another") as caught:
            found(merged)
        assert str(caught.value).endswith("add: --base MODEL")
        base, experts = found(merged, base="../base")
        assert base == "base" and sorted(experts.items()) == [("code", "code"), ("math", "math")]


def test_linear_with_the_pretrained_model_among_its_inputs(place: Path) -> None:
    document = models("linear", None)
    document["models"].append({"model": "./base", "parameters": {"weight": 0.2}})
    assert found(write(place, document), base=str(place / "base")) == EXPECTED


def test_the_base_is_suggested_from_cards_only_where_they_agree(place: Path) -> None:
    for name in ("math", "code"):
        (place / name / "README.md").write_text("---\nbase_model: org/pretrained\n---\n")
    with pytest.raises(InputError, match="may be org/pretrained, as a model card says\nadd: --base org/pretrained"):
        found(write(place, models("linear", None)))
    (place / "code" / "README.md").write_text("---\nbase_model: [org/other]\n---\n")
    with pytest.raises(InputError, match="may be one of: org/pretrained, org/other"):
        found(write(place, models("linear", None)))


def test_linear_merge_of_adapters_on_one_model_needs_no_base(place: Path) -> None:
    document = models("linear", None)
    document["models"] = [{"model": f"./base+./{name}"} for name in ("math", "code")]
    assert found(write(place, document)) == ("base", {"math": "base+math", "code": "base+code"})


# ------------------------------------------------------------------------------------------------------- refusals


def test_frankenmerges_are_refused_with_the_reason(place: Path) -> None:
    stacked = sliced((0, 4), (2, 6))
    with pytest.raises(InputError, match=r"frankenmerge \(its layer 4 was made of layer 2 of ./math\)"):
        found(write(place, stacked))
    skewed = sliced((0, 4))
    skewed["slices"][0]["sources"][1]["layer_range"] = [4, 8]
    with pytest.raises(InputError, match=r"its layer 0 was made of layer (0|4)"):
        found(write(place, skewed), base=str(place / "base"), experts={"math": "../math", "code": "../code"})


def test_copies_are_refused(place: Path) -> None:
    with pytest.raises(InputError, match=r"a copy of ./base\+./math: there is nothing to calibrate"):
        found(write(place, {"merge_method": "passthrough", "models": [{"model": "./base+./math"}]}))


def test_layers_passed_through_in_place_are_fine(place: Path) -> None:
    parts = [{"sources": [{"model": f"./{m}", "layer_range": r}]} for m, r in (("math", [0, 4]), ("code", [4, 8]))]
    merged = write(place, {"merge_method": "passthrough", "slices": parts})
    assert found(merged, base="../base") == EXPECTED


@pytest.mark.parametrize("name", ["mergekit_moe_config.yml", "README.md"])
def test_mixtures_are_refused_whatever_flags_say(place: Path, name: str) -> None:
    moe = {"base_model": "./base", "gate_mode": "hidden", "experts": [{"source_model": "./math"}]}
    text = yaml.safe_dump(moe)
    merged = write(place, text if name.endswith("yml") else f"# m\n```yaml\n{text}```\n", name)
    with pytest.raises(InputError, match="mixture of experts made by mergekit-moe"):
        found(merged, base="../base", experts={"math": "../math", "code": "../code"})


def test_a_calibrated_folder_is_not_a_merge(place: Path) -> None:
    merged = write(place, models())
    (merged / "featcal.yaml").touch()
    with pytest.raises(InputError, match="was calibrated already"):
        found(merged)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("merge_method: [", "line 1: not valid YAML"),
        ("", "holds no merge_method"),
        ("- 1", "holds no merge_method"),
        ("merge_method: ties", "one of models, slices and modules, this one none of them"),
        ({**models(), **sliced((0, 2))}, "this one models and slices"),
        ("merge_method: ties\nmodels: 3", "models: expected a list"),
        ("merge_method: ties\nmodels: [math]", r"models\[0\]: expected key: value"),
        ("merge_method: ties\nmodels: [{modle: math}]", r"models\[0\].model: None is not a model reference"),
        ("merge_method: ties\nslices: [{sources: [{model: m, layer_range: [0, x]}]}]", "layer_range: expected"),
        ("merge_method: ties\nmodels: [{model: m, parameters: 3}]", "parameters: expected key"),
        ("---\nmerge_method: ties\nname: a\n---\nmerge_method: linear", "describes 2 merges"),
    ],
)
def test_damaged_documents(place: Path, document: Any, complaint: str) -> None:
    merged = write(place, document)
    with pytest.raises(InputError, match=complaint):
        found(merged)
    flags = {"base": str(place / "base"), "experts": {"math": "../math", "code": "../code"}}
    discovery = find(merged, DATA, **flags)
    assert discovery.merge is None and any("not used" in note for note in discovery.notes)


# ------------------------------------------------------------------------------------------------ nothing to go by


def test_no_evidence_asks_for_everything(place: Path) -> None:
    with pytest.raises(InputError, match="does not say what it was merged from") as caught:
        found(place / "merged")
    last = str(caught.value).splitlines()[-1]
    assert last == "add: --base MODEL --expert math=MODEL --expert code=MODEL"
    assert found(place / "merged", base="../base", experts={"math": "../math", "code": "../code"}) == EXPECTED
    with pytest.raises(InputError, match=r"--base MODEL --expert TASK=MODEL --data TASK=SOURCE"):
        found(place / "merged", data={})


def test_adapters_tell_their_base(place: Path) -> None:
    """LoRA experts merged by PEFT itself leave no document."""
    for name in ("math", "code"):
        config = {"base_model_name_or_path": "./base", "revision": None, "peft_type": "LORA"}
        (place / name / "adapter_config.json").write_text(json.dumps(config))
    flags = {"math": "../math", "code": "../code"}
    discovery = find(place / "merged", DATA, None, flags)
    assert discovery.recipe.base == str(place / "base") and "adapters of" in discovery.notes[0]
    config = {"base_model_name_or_path": "org/other", "revision": "v1"}
    (place / "code" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="--base MODEL"):
        find(place / "merged", DATA, None, flags)
    (place / "merged" / "adapter_config.json").write_text(json.dumps(config))
    assert find(place / "merged", DATA, None, flags).recipe.base == "org/other@v1"


# ----------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("org/name", Reference("org/name")),
        ("org/name@v2", Reference("org/name", "v2")),
        ("base+lora", Reference("base", None, "lora")),
        ("base@v1+org/lora@v2", Reference("base", "v1", "org/lora", "v2")),
        ({"path": "a b/c+d", "revision": "x"}, Reference("a b/c+d", "x")),
        ({"model": {"path": "a", "revision": None}, "lora": None, "override_architecture": "X"}, Reference("a")),
        ({"model": {"path": "a"}, "lora": {"path": "l", "revision": "r"}}, Reference("a", None, "l", "r")),
        ({"model": "a@b", "lora": "c@d"}, Reference("a", "b", "c", "d")),
    ],
)
def test_reference_grammar(written: Any, expected: Reference) -> None:
    assert Reference.parse(written, "here") == expected
    assert Reference.parse(str(expected), "here") == expected or "+" in expected.path


@pytest.mark.parametrize("written", [None, "", 3, {"lora": "x"}, ["a"]])
def test_what_is_no_reference(written: Any) -> None:
    with pytest.raises(InputError, match=r"^here: .* is not a model reference"):
        Reference.parse(written, "here")


def test_relative_paths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the working directory, else beside the merged folder, else further up; then a Hub id."""
    document = models(base="models/base")
    merged = write(place, document)
    assert discover(merged, DATA).base == "models/base"  # nothing here is called so
    (place / "models" / "base").mkdir(parents=True)
    assert discover(merged, DATA).base == str(place / "models" / "base")
    (place / "elsewhere" / "models" / "base").mkdir(parents=True)
    assert discover(merged, DATA).base == str(place / "elsewhere" / "models" / "base")
    deep = place / "out" / "today" / "merged"
    deep.mkdir(parents=True)
    (deep / "mergekit_config.yml").write_text(yaml.safe_dump(models()))
    assert discover(deep, DATA).base == str(place / "base")


def test_local_models_have_no_revision(place: Path) -> None:
    document = models(base="./base@main")
    document["models"][0]["model"] = "./math@abc+./lora@def"
    (place / "lora").mkdir()
    recipe = discover(write(place, document), {"lora": "x.jsonl", "code": "y.jsonl"})
    assert recipe.base == str(place / "base")
    assert recipe.tasks["lora"].expert == f"{place / 'math'}+{place / 'lora'}"
    hub = models(base="org/base@main")
    assert discover(write(place, hub), DATA).base == "org/base@main"


def test_odd_names(place: Path) -> None:
    """Folders with '+', '@' and spaces, in the mapping form and after flags."""
    odd = "a+b @c"
    (place / odd).mkdir()
    document = models()
    document["models"][0]["model"] = {"model": {"path": f"./{odd}"}, "lora": None}
    merged = write(place, document)
    assert discover(merged, {odd: "m.jsonl", "code": "c.jsonl"}).tasks[odd].expert == str(place / odd)
    recipe = discover(merged, DATA, f"../{odd}", {"math": f"../{odd}+org/lora"})
    assert recipe.base == str(place / odd) and recipe.tasks["math"].expert == f"{place / odd}+org/lora"


def test_windows_paths(place: Path) -> None:
    (place / "models" / "math").mkdir(parents=True)
    document = models()
    document["models"][0]["model"] = "models\\math"
    assert discover(write(place, document), DATA).tasks["math"].expert == str(place / "models" / "math")
    document["models"][0]["model"] = "D:\\m\\math"
    with pytest.raises(InputError, match=r"D:\\m\\math is not on this machine \(anymore\)\nadd: --expert math=.*/math"):
        discover(write(place, document), DATA)


def test_a_moved_path_is_named_with_the_flag(place: Path) -> None:
    document = models(base="/old/place/base")
    document["models"][0]["model"] = "/old/place/gone"
    with pytest.raises(InputError) as caught:
        discover(write(place, document), {"gone": "g.jsonl", "code": "c.jsonl"})
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["/old/place/gone is not on this machine (anymore)", lines[1].replace("gone", "base")]
    assert lines[2] == f"add: --expert gone=MODEL --base {place / 'base'}"
    recipe = discover(place / "merged", {"gone": "g", "code": "c"}, "../base", {"gone": "../math"})
    assert recipe.tasks["gone"].expert == str(place / "math") and recipe.tasks["code"].expert == str(place / "code")


# ------------------------------------------------------------------------------------------------ names and data


def names(place: Path, *experts: str) -> Path:
    document = models()
    document["models"] = [{"model": name} for name in experts]
    return write(place, document)


def test_data_names_match_by_case_and_by_word(place: Path) -> None:
    merged = names(place, "org/Llama-3-8B-Math-v2", "org/llama3_Coder", "me/DTD")
    discovery = find(merged, {"math": "m", "dtd": "d", "coder": "c"})
    assert {t: s.expert for t, s in discovery.recipe.tasks.items()} == {
        "dtd": "me/DTD",
        "math": "org/Llama-3-8B-Math-v2",
        "coder": "org/llama3_Coder",
    }
    assert "task 'math' is the expert Llama-3-8B-Math-v2" in discovery.notes
    assert list(find(merged, {"math": "m", "coder": "c", "dtd": "d"}).recipe.tasks) == ["math", "coder", "dtd"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"math": "m"}, r"expert 'code' \(code\) has no data\nadd: --data code=SOURCE"),
        ({"mth": "m", "code": "c"}, r"^data 'mth': no expert is called so; did you mean 'math'\?$"),
        ({"math": "m", "code": "c", "law": "l"}, "data 'law': no expert was found for it\nadd: --expert law=MODEL"),
        ({}, "'math' .*\nexpert 'code' .*\nadd: --data math=SOURCE --data code=SOURCE"),
    ],
)
def test_unmatched_names(place: Path, data: dict[str, str], complaint: str) -> None:
    document = models(base="org/base")
    document["models"] = [{"model": "math"}, {"model": "code"}]
    for name in ("math", "code"):
        (place / name).rmdir()
    with pytest.raises(InputError, match=complaint):
        discover(write(place, document), data)


def test_ambiguous_words_are_not_guessed(place: Path) -> None:
    merged = names(place, "org/math-small", "org/math-large")
    with pytest.raises(InputError, match="data 'math': no expert is called so; did you mean 'math-"):
        discover(merged, {"math": "m", "large": "l"})
    merged = names(place, "org/code-math")
    with pytest.raises(InputError, match="data 'code': no expert"):
        discover(merged, {"math": "m", "code": "c"})
    with pytest.raises(
        InputError, match=r"'law': no expert was found for it \(there are: code-math\)\nadd: --expert law="
    ):
        discover(merged, {"law": "l"})


def test_flags_win(place: Path) -> None:
    merged = write(place, models())
    (place / "new").mkdir()
    recipe = discover(merged, DATA, "../elsewhere", {"math": "../new"})  # moved: the same name elsewhere
    assert recipe.base == str(place / "elsewhere")
    assert {t: s.expert for t, s in recipe.tasks.items()} == {"math": str(place / "new"), "code": str(place / "code")}
    recipe = discover(merged, {"gsm": "m", "code": "c"}, None, {"gsm": "../math"})  # a name for a model found
    assert recipe.tasks["gsm"].expert == str(place / "math") and set(recipe.tasks) == {"gsm", "code"}
    discovery = find(merged, {"math": "m"}, None, {"math": "../math"})  # on purpose without the other
    assert discovery.notes == ["without data, so not calibrated toward: code"]
    with pytest.raises(InputError, match=r"expert 'law' has no data\n(.*\n)*add: .*--data law=SOURCE"):
        discover(merged, DATA, None, {"law": "../new"})


def test_what_stands_for_the_models_of_the_merge(place: Path) -> None:
    discovery = find(write(place, models()), DATA, "../elsewhere", {"math": "../base"})
    assert discovery.merge is not None
    places = {str(ref): Path(p).name for ref, p in discovery.places.items()}
    assert places == {"./math": "base", "./code": "code", "./base": "elsewhere"}


def test_equal_folder_names_are_told_apart_by_the_folder_above(place: Path) -> None:
    for name in ("math", "code"):
        (place / "runs" / name / "final").mkdir(parents=True)
    merged = names(place, "runs/math/final", "runs/code/final", "org/dtd")
    recipe = discover(merged, {"math": "m", "code": "c", "dtd": "d"})
    assert recipe.tasks["code"].expert == str(place / "runs" / "code" / "final")
    assert set(discover(merged, {"math-final": "m", "code-final": "c", "dtd": "d"}).tasks) == {
        "math-final",
        "code-final",
        "dtd",
    }


def test_recipe_text_is_ready_to_save(place: Path) -> None:
    (place / "elsewhere" / "math.jsonl").touch()
    discovery = find(write(place, models()), DATA, overrides=["calibration.alpha=0.2", "tasks.code.data.text=body"])
    text = discovery.text
    assert text.startswith(f"# base and experts from {place}/merged/mergekit_config.yml (ties)\n")
    tree = yaml.safe_load(text)
    assert tree["base"] == str(place / "base") and tree["merged"] == str(place / "merged")
    assert tree["tasks"]["math"]["data"] == {"source": str(place / "elsewhere" / "math.jsonl")}
    assert tree["calibration"] == {"alpha": 0.2, "tune": "off"}
    (place / "recipe.yaml").write_text(text)
    assert load_recipe(place / "recipe.yaml") == discovery.recipe


def test_pairs() -> None:
    assert parse_pairs(["a=b=c", " x = y "], "--data", "SOURCE") == {"a": "b=c", "x": "y"}
    assert parse_pairs(None, "--data", "SOURCE") == {}
    with pytest.raises(InputError, match=r"--data ./math.jsonl: expected TASK=SOURCE, e.g. --data math=./math.jsonl"):
        parse_pairs(["./math.jsonl"], "--data", "SOURCE")
    with pytest.raises(InputError, match="--expert a is given twice; one model for each task"):
        parse_pairs(["a=b", "a=c"], "--expert", "MODEL")


def test_what_commands_are_given(place: Path) -> None:
    """A recipe file or a merged model; the flags of the latter do not go with the former."""
    merged = write(place, models())
    (place / "recipe.yaml").write_text(find(merged, DATA).text)
    file = str(place / "recipe.yaml")
    assert Given(str(merged)).is_model and Given("org/merged", data=["math=m"]).is_model
    assert not Given(file).is_model and not Given("org/merged").is_model
    flags = [f"{task}={source}" for task, source in DATA.items()]
    assert (
        Given(str(merged), data=flags, check_origin=False).recipe() == Given(file).recipe() == find(merged, DATA).recipe
    )
    assert Given(file, ["calibration.alpha=0.1"]).recipe().calibration.alpha == 0.1
    for more in ({"data": flags}, {"base": "x"}, {"experts": ["math=x"]}):
        with pytest.raises(InputError, match=r"^--(data|base|expert) goes with a merged model; .*recipe.yaml is a"):
            Given(file, **more).recipe()
    with pytest.raises(InputError, match="no recipe file nothing"):
        Given("nothing.yaml").recipe()


def test_no_such_folder(place: Path) -> None:
    with pytest.raises(InputError, match="does not exist here and is not a Hub id"):
        discover(place / "nowhere", DATA)
    (place / "elsewhere" / "my-merge").mkdir()
    with pytest.raises(InputError, match="there is no folder 'my-mrge' here; did you mean 'my-merge'"):
        discover("my-mrge", DATA)


def test_nesting_without_end_in_a_card(tmp_path: Path) -> None:
    """YAML that is nested too deeply to be read counts as YAML that cannot be read."""
    deep = "[" * 20_000
    (tmp_path / "README.md").write_text(f"---\nx: {deep}\n---\n```yaml\nmodels: {deep}\n```\n")
    assert front_matter(tmp_path / "README.md") == {}
    assert read_merge(tmp_path) is None
    (tmp_path / "mergekit_config.yml").write_text(f"merge_method: {deep}\n")
    with pytest.raises(InputError, match="not valid YAML"):
        read_merge(tmp_path)
