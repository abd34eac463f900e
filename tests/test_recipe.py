"""Recipes: YAML traps, overrides, presets, paths, and what the errors say."""

# ruff: noqa: E501  (sentences are quoted whole)

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from featcal.errors import InputError
from featcal.recipe import (
    DataSpec,
    MergeSpec,
    Recipe,
    Task,
    load_recipe,
    make_recipe,
    recipe_to_yaml,
    resolve_reference,
    resolve_source,
    slug,
)
from featcal.settings import Calibration

GOOD = """\
base: org/base
merged: org/merged@main
tasks:
  cars: {expert: org/cars, data: {source: org/cars-data, split: train}}
  math:
    expert: org/base+org/adapter
    data: {source: org/math-data, messages: messages}
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(folder, text), overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).split("\n")


# ------------------------------------------------------------------------------------------- schema, defaults


def test_a_recipe_is_read_with_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.base == "org/base"
    assert recipe.merged == "org/merged@main"
    assert list(recipe.tasks) == ["cars", "math"]
    assert recipe.tasks["math"] == Task(
        expert="org/base+org/adapter", data=DataSpec(source="org/math-data", messages="messages")
    )
    assert recipe.tasks["cars"].data.split == "train"
    assert recipe.calibration == Calibration()
    assert (recipe.preset, recipe.device, recipe.seed) == (None, "auto", 42)


def test_data_may_be_a_plain_string(tmp_path: Path) -> None:
    recipe = load(tmp_path, "base: a\nmerged: b\ntasks: {t: {expert: c, data: org/d}}")
    assert recipe.tasks["t"].data == DataSpec(source="org/d")


def test_a_merge_keeps_its_own_parameters(tmp_path: Path) -> None:
    merge = "{method: ties, scale: 1e-1, weights: [0.5, 1], density: {cars: 0.2}}"
    recipe = load(tmp_path, GOOD.replace("org/merged@main", merge))
    assert isinstance(recipe.merged, MergeSpec)
    assert recipe.merged.method == "ties"
    assert recipe.merged.parameters == {"scale": 0.1, "weights": [0.5, 1], "density": {"cars": 0.2}}
    assert recipe.merged != MergeSpec(method="ties", scale=0.2)


def test_models_are_frozen_and_the_label_is_no_input_column() -> None:
    spec = DataSpec(source="x", input="q", target="a", label="y")
    assert spec.columns == {"input": "q", "target": "a"}
    with pytest.raises(ValueError, match="frozen"):
        spec.source = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "a", "messages": "b"}, "text and messages are both named; name the one column to read"),
        ({"input": "a", "image": "b"}, "input and image are both named; name the one column to read"),
        ({"target": "a"}, "target needs input, the column it answers"),
        ({"text": "a", "label": "a"}, "column 'a' is both label and input; labels are never read"),
    ],
)
def test_column_choices_that_contradict(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    data = {"source": "d", **columns}
    lines = problems(
        tmp_path, yaml.safe_dump({"base": "a", "merged": "b", "tasks": {"t": {"expert": "c", "data": data}}})
    )
    assert len(lines) == 1
    assert lines[0].endswith(f"tasks.t.data: {message}")


def test_text_beside_images_is_allowed() -> None:
    assert DataSpec(source="x", text="caption", image="img").columns == {"text": "caption", "image": "img"}


# -------------------------------------------------------------------------------------------------- YAML traps


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    for text, value in {"1e-5": 1e-5, "1E-5": 1e-5, "1.e-5": 1e-5, ".5": 0.5, "3": 3.0, "1e+1": 10.0}.items():
        recipe = load(tmp_path, GOOD + f"calibration: {{ridge: {text}}}\n")
        assert recipe.calibration.ridge == value
        assert type(recipe.calibration.ridge) is float


@pytest.mark.parametrize(
    ("text", "norm", "tune"),
    [
        ("{norm: off, tune: off}", "off", "off"),
        ("{norm: on, tune: auto}", "on", "auto"),
        ("{norm: false, tune: false}", "off", "off"),
        ("{norm: true, tune: true}", "on", "auto"),
        ("{norm: 'off', tune: \"off\"}", "off", "off"),
    ],
)
def test_switches_are_words(tmp_path: Path, text: str, norm: str, tune: str) -> None:
    calibration = load(tmp_path, GOOD + f"calibration: {text}\n").calibration
    assert (calibration.norm, calibration.tune) == (norm, tune)


@pytest.mark.parametrize(("word", "value"), [("off", False), ("no", False), ("yes", True), ("false", False)])
def test_bias_takes_every_spelling_of_a_boolean(tmp_path: Path, word: str, value: bool) -> None:
    assert load(tmp_path, GOOD + f"calibration: {{bias: {word}}}\n").calibration.bias is value


def test_words_that_yaml_1_1_would_change_stay_text(tmp_path: Path) -> None:
    text = "base: yes\nmerged: 1:30\ntasks:\n  on: {expert: 2024-01-01, data: {source: off, revision: 0123456}}\n  12: {expert: 1e, data: n}"
    recipe = load(tmp_path, text)
    assert (recipe.base, recipe.merged, list(recipe.tasks)) == ("yes", "1:30", ["on", "12"])
    assert recipe.tasks["on"].expert == "2024-01-01"
    assert recipe.tasks["on"].data == DataSpec(source="off", revision="0123456")


def test_bom_crlf_anchors_and_json(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + GOOD.replace("\n", "\r\n")) == load(tmp_path, GOOD)
    shared = "base: a\nmerged: b\ntasks:\n  x: &x {expert: c, data: d}\n  y: {<<: *x, expert: e}\n"
    assert load(tmp_path, shared).tasks["y"] == Task(expert="e", data=DataSpec(source="d"))
    as_json = '{"base": "a", "merged": "b", "tasks": {"t": {"expert": "c", "data": "d"}}}'
    assert load(tmp_path, as_json).tasks["t"].expert == "c"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yaml is empty; a recipe needs base, merged and tasks"),
        ("# nothing\n", "recipe.yaml is empty; a recipe needs base, merged and tasks"),
        ("- a\n- b\n", "recipe.yaml: a recipe is a mapping with base, merged and tasks, not a list"),
        (
            "base: a\n\tmerged: b\n",
            "recipe.yaml, line 2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
        ),
        ('base: "D:\\models"\n', "in double quotes a backslash starts an escape: put Windows paths in single quotes"),
        ("base: a\n---\nbase: b\n", "recipe.yaml, line 2: not valid YAML: but found another document"),
        ("? [a, b]\n: c\n", "recipe.yaml, line 1: not valid YAML: a key must be plain text"),
        (
            "".join(f"k{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 10)}]\n" for i in range(9)),
            "recipe.yaml: not valid YAML: more than 100,000 values (aliases count as what they stand for)",
        ),
        ("tasks: &t {x: *t}\n", "recipe.yaml, line 1: not valid YAML: an anchor contains itself"),
        ("base: !!python/object:os.system {}\n", "could not determine a constructor for the tag"),
        ("base: a\x00b\n", "recipe.yaml: not valid YAML: special characters are not allowed"),
    ],
)
def test_broken_yaml_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    lines = problems(tmp_path, text)
    assert len(lines) == 1
    assert message in lines[0]


def test_duplicate_keys_are_all_reported(tmp_path: Path) -> None:
    text = "base: a\nmerged: b\nbase: c\ntasks:\n  cars: {expert: x, data: d}\n  cars: {expert: y, data: d}\n"
    assert problems(tmp_path, text) == [
        "recipe.yaml, line 3: base is given twice; the first is on line 1",
        "recipe.yaml, line 6: tasks.cars is given twice; the first is on line 5",
    ]


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(GOOD.encode("utf-16"))
    with pytest.raises(InputError, match=r"r\.yaml is not UTF-8 text; save it as UTF-8"):
        load_recipe(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(InputError, match=r"no recipe file .*recipe\.yml; did you mean 'recipe\.yaml'\?"):
        load_recipe(tmp_path / "recipe.yml")
    with pytest.raises(InputError, match="is a folder, not a recipe file"):
        load_recipe(tmp_path)
    with pytest.raises(InputError, match="no recipe file"):
        load_recipe(tmp_path / "none" / "recipe.yaml")


# ------------------------------------------------------------------------------------------------ schema errors


def test_all_mistakes_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = """\
bas: org/base
merged: {scale: 0.3}
alpha: 0.3
tasks:
  cars:
    expart: org/cars
    data: {source: 12, splitt: test, name: x}
  "a.b": [1]
calibration:
  alhpa: 0.2
  samples: 0
  alpha: 2
  norm: of
  ridge: .nan
  rho: yes please
  batch_size: true
  include: {a: b}
device: gpu
preset: clipp
seed: -1
"""
    assert problems(tmp_path, text) == [
        "recipe.yaml: base: required, but missing",
        "recipe.yaml, line 1: bas: unknown key; did you mean 'base'?",
        "recipe.yaml, line 2: merged.method: required, but missing",
        "recipe.yaml, line 3: alpha: unknown key; it belongs under 'calibration'",
        "recipe.yaml, line 5: tasks.cars.expert: required, but missing",
        "recipe.yaml, line 6: tasks.cars.expart: unknown key; did you mean 'expert'?",
        "recipe.yaml, line 7: tasks.cars.data.source: expected text, got 12; put it in quotes",
        "recipe.yaml, line 7: tasks.cars.data.splitt: unknown key; did you mean 'split'?",
        "recipe.yaml, line 7: tasks.cars.data.name: unknown key; known here: source, split, config, revision, text, messages, image, input, target, label",
        'recipe.yaml, line 8: tasks."a.b": expected a mapping (key: value lines), got a list',
        "recipe.yaml, line 10: calibration.alhpa: unknown key; did you mean 'alpha'?",
        "recipe.yaml, line 11: calibration.samples: input should be greater than or equal to 1, got 0",
        "recipe.yaml, line 12: calibration.alpha: input should be less than or equal to 1, got 2",
        "recipe.yaml, line 13: calibration.norm: expected 'auto', 'on' or 'off', got 'of'; did you mean 'off'?",
        "recipe.yaml, line 14: calibration.ridge: expected a finite number, got nan",
        "recipe.yaml, line 15: calibration.rho: input should be a valid number, unable to parse string as a number, got 'yes please'",
        "recipe.yaml, line 16: calibration.batch_size: expected a finite number, got true",
        "recipe.yaml, line 17: calibration.include: expected a list, got a mapping",
        "recipe.yaml, line 18: device: unknown device 'gpu'; known: auto, cpu, cuda, cuda:N, xpu",
        "recipe.yaml, line 19: preset: unknown preset 'clipp'; did you mean 'clip'?; known: clip, clip-demo, flan-t5, llama, llama-8b",
        "recipe.yaml, line 20: seed: input should be greater than or equal to 0, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base:\nmerged: b\ntasks: {t: {expert: c, data: d}}", "line 1: base: expected text, got nothing"),
        ("base: ''\nmerged: b\ntasks: {t: {expert: c, data: d}}", "line 1: base: must not be empty"),
        ("base: a\nmerged: b\ntasks: {}", "line 3: tasks: must not be empty"),
        ("base: a\nmerged: b\ntasks: [x]", "line 3: tasks: expected a mapping (key: value lines), got a list"),
        ("base: a\nmerged: [b]\ntasks: {t: {expert: c, data: d}}", "line 2: merged: expected text, got a list"),
        ("base: a\nmerged: b\ntasks: {t: {expert: c}}", "line 3: tasks.t.data: required, but missing"),
        ("base: a\nmerged: b\ntasks: {t: {expert: c, data: }}", "expected a mapping (key: value lines), got nothing"),
        ("base: a\nmerged: b\ntasks: {Cars: {expert: c, data: d}, cars: {expert: c, data: d}}", "tasks: 'Cars' and 'cars' differ only in case; rename one"),
        ("base: a\nmerged: b\ntasks: {'a ': {expert: c, data: d}}", "a task name is 1 to 100 printable characters"),
        ("base: a\nmerged: b\ntasks: {\"a\\nb\": {expert: c, data: d}}", "a task name is 1 to 100 printable characters"),
        ("base: a\nmerged: b\nsource: x\ntasks: {t: {expert: c, data: d}}", "source: unknown key; it belongs under 'tasks.NAME.data'"),
        ("base: a\nmerged: b\ntasks: {t: {expert: c, data: d, base: x}}", "tasks.t.base: unknown key; it belongs at the top level"),
        (GOOD + "calibration:\n", "calibration: expected a mapping (key: value lines), got nothing"),
        (GOOD + "calibration: {rho: .inf}\n", "calibration.rho: expected a finite number, got inf"),
        (GOOD + "calibration: {samples: 1.5}\n", "calibration.samples: expected a whole number, got 1.5"),
        (GOOD + "seed: 1e99\n", "seed:"),
        (GOOD + "seed: true\n", "seed: expected a finite number, got true"),
        (GOOD + "device: cpu:1\n", "device: unknown device 'cpu:1'; known"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    lines = problems(tmp_path, text)
    assert len(lines) == 1
    assert message in lines[0]


# --------------------------------------------------------------------------------------- presets and the tuner


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"tune": "auto", "alpha": 0.3}),
        ("calibration: {samples: 8}", {"tune": "auto", "samples": 8}),
        ("calibration: {alpha: 0.2}", {"tune": "off", "alpha": 0.2, "rho": 2.0}),
        ("calibration: {alpha: 0.2, tune: auto}", {"tune": "auto", "alpha": 0.2}),
        ("preset: llama", {"tune": "off", "alpha": 0.15, "rho": 0.5, "ridge": 1e-5, "norm": "off"}),
        ("preset: llama\ncalibration: {tune: auto}", {"tune": "auto", "alpha": 0.15}),
        ("preset: llama\ncalibration: {rho: 1, samples: 3}", {"tune": "off", "rho": 1.0, "alpha": 0.15, "samples": 3}),
    ],
)
def test_presets_and_tune(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    calibration = load(tmp_path, f"{text}\n{GOOD}").calibration
    assert {name: getattr(calibration, name) for name in expected} == expected


# --------------------------------------------------------------------------------------------------- overrides


def test_overrides_parse_values_as_yaml(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        GOOD,
        "calibration.ridge=1e-5",
        "calibration.norm=off",
        "calibration.exclude=*.fc2",
        'calibration.include=["*.fc1", "*.q_proj"]',
        "tasks.cars.data.split=test",
        "tasks.cars.expert=org/other@v=1",
        "seed = 7",
        "preset=",
    )
    calibration = recipe.calibration
    assert (calibration.ridge, calibration.norm, calibration.tune) == (1e-5, "off", "off")
    assert (calibration.include, calibration.exclude) == (("*.fc1", "*.q_proj"), ("*.fc2",))
    assert recipe.tasks["cars"].data.split == "test"
    assert recipe.tasks["cars"].expert == "org/other@v=1"
    assert (recipe.seed, recipe.preset) == (7, None)


def test_overrides_reach_names_with_dots_and_shorthand_data(tmp_path: Path) -> None:
    text = "base: a\nmerged: b\ntasks: {'v1.0=x': {expert: c, data: d}, t: {expert: c, data: d}}"
    recipe = load(tmp_path, text, 'tasks."v1.0=x".expert=e', "tasks.'v1.0=x'.data.split=test", "merged={method: ties}")
    task = recipe.tasks["v1.0=x"]
    assert (task.expert, task.data) == ("e", DataSpec(source="d", split="test"))
    assert recipe.merged == MergeSpec(method="ties")
    assert recipe.tasks["t"].data == DataSpec(source="d")


def test_overrides_add_tasks_and_sections(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD, "tasks.new.expert=org/new", "tasks.new.data=org/d", "calibration.samples=4")
    assert recipe.tasks["new"] == Task(expert="org/new", data=DataSpec(source="org/d"))
    assert recipe.calibration.samples == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("calibration.alhpa=0.2", "--set calibration.alhpa=0.2: calibration.alhpa: unknown key; did you mean 'alpha'?"),
        ("calibration.alpha=x", "--set calibration.alpha=x: calibration.alpha: input should be a valid number, unable to parse string as a number, got 'x'"),
        ("tasks.carz.data.split=test", "--set tasks.carz.data.split=test: tasks.carz.expert: required, but missing; did you mean 'cars'?"),
        ("tasks.carz.data.split=test", "--set tasks.carz.data.split=test: tasks.carz.data.source: required, but missing; did you mean 'cars'?"),
        ("base.x=1", "--set base.x=1: base is 'org/base' and has no 'x'"),
        ("alpha", "--set alpha: expected key=value, such as calibration.alpha=0.2 or tasks.\"a.b\".data.split=test"),
        ("=3", "--set =3: expected key=value"),
        ("calibration..alpha=3", "--set calibration..alpha=3: expected key=value"),
        ("calibration.exclude=[a", "--set calibration.exclude=[a, line 1: not valid YAML"),
    ],
)  # fmt: skip
def test_wrong_overrides_say_so(tmp_path: Path, override: str, message: str) -> None:
    assert any(line.startswith(message) for line in problems(tmp_path, GOOD, override))


# ------------------------------------------------------------------------------------------------------- paths


def test_paths_are_found_beside_the_recipe_then_here(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for folder in (job / "models" / "base", job / "both", tmp_path / "elsewhere" / "both"):
        folder.mkdir(parents=True)
    (tmp_path / "elsewhere" / "here").mkdir()
    (job / "data.jsonl").touch()
    text = "base: ./models/base\nmerged: both\ntasks: {t: {expert: here, data: data.jsonl}}"
    recipe = load(job, text)
    assert recipe.base == str(job / "models" / "base")
    assert recipe.merged == str(job / "both")
    assert recipe.tasks["t"].expert == str(tmp_path / "elsewhere" / "here")
    assert recipe.tasks["t"].data.source == str(job / "data.jsonl")


def test_an_existing_path_beats_a_hub_id(tmp_path: Path) -> None:
    assert resolve_reference("org/model", tmp_path) == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_reference("org/model", tmp_path) == str(tmp_path / "org" / "model")
    assert resolve_reference("org/model@main", tmp_path) == "org/model@main"


def test_odd_but_legal_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("expert a", "x+y", "x@1", "ad", "ünï"):
        (tmp_path / name).mkdir()
        assert resolve_reference(f"./{name}", tmp_path) == str(tmp_path / name)
    assert resolve_reference("x+y+ad", tmp_path) == f"{tmp_path / 'x+y'}+{tmp_path / 'ad'}"
    assert resolve_reference("org/m@v1+ad", tmp_path) == f"org/m@v1+{tmp_path / 'ad'}"
    assert resolve_reference("org/m+org/ad@v1", tmp_path) == "org/m+org/ad@v1"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_reference("~/expert a") == str(tmp_path / "expert a")
    assert resolve_source("~/x+y") == str(tmp_path / "x+y")


@pytest.mark.skipif(os.sep != "/", reason="what a Windows path means elsewhere")
def test_windows_paths_are_not_mangled(tmp_path: Path) -> None:
    for path in ("D:\\m\\expert a", "models\\base", ".\\x", "\\\\server\\share\\m"):
        assert resolve_reference(path, tmp_path) == path
    (tmp_path / "models" / "base").mkdir(parents=True)
    assert resolve_reference("models\\base", tmp_path) == str(tmp_path / "models" / "base")
    recipe = load(tmp_path, "base: D:\\m\\expert a\nmerged: 'D:\\m'\ntasks: {t: {expert: c, data: d}}")
    assert (recipe.base, recipe.merged) == ("D:\\m\\expert a", "D:\\m")


def test_missing_local_paths_are_named_in_full(tmp_path: Path) -> None:
    assert resolve_reference("./none", tmp_path) == str(tmp_path / "none")
    assert resolve_source("../none.jsonl", tmp_path / "a") == str(tmp_path / "none.jsonl")
    assert resolve_source("none.jsonl", tmp_path) == "none.jsonl"
    assert resolve_reference("x" * 5000, tmp_path) == "x" * 5000


# --------------------------------------------------------------------------------------------------- round trip


def test_round_trip(tmp_path: Path) -> None:
    text = GOOD.replace("org/merged@main", "{method: ties, scale: 1e-7, note: 'off', n: '010', d: '1e-5'}")
    overrides = ("calibration.ridge=1e-5", "calibration.exclude=*.fc2", 'tasks."a.b: ü #1".expert=yes', "preset=clip")
    recipe = load(tmp_path, text, *overrides, 'tasks."a.b: ü #1".data={source: "null", revision: "12345"}')
    dumped = recipe_to_yaml(recipe)
    assert load(tmp_path, dumped) == recipe
    assert recipe_to_yaml(load(tmp_path, dumped)) == dumped
    # A plain YAML 1.1 reader sees the same values.
    tree = yaml.safe_load(dumped)
    assert tree["calibration"]["ridge"] == 1e-5
    assert tree["calibration"]["norm"] == "auto"
    assert tree["merged"] == {"method": "ties", "scale": 1e-7, "note": "off", "n": "010", "d": "1e-5"}
    assert tree["tasks"]["a.b: ü #1"] == {
        "expert": "yes",
        "data": {"source": "null", "split": "train", "revision": "12345"},
    }


def test_a_written_recipe_holds_resolved_settings_and_absolute_paths(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    recipe = load(tmp_path, "base: base\nmerged: b\npreset: llama\ntasks: {t: {expert: c, data: d}}")
    tree = yaml.safe_load(recipe_to_yaml(recipe))
    assert tree["base"] == str(tmp_path / "base")
    assert tree["calibration"] == Calibration(alpha=0.15, rho=0.5, ridge=1e-5, norm="off", tune="off").model_dump(
        mode="json"
    )


def test_python_and_yaml_share_the_schema(tmp_path: Path) -> None:
    raw = {
        "base": "org/base",
        "merged": MergeSpec(method="ties", scale=1),
        "tasks": {"t": {"expert": "e", "data": "d"}},
    }
    recipe = make_recipe(raw, ["calibration.alpha=0.5"])
    assert recipe.merged == MergeSpec(method="ties", scale=1)
    assert (recipe.calibration.alpha, recipe.calibration.tune) == (0.5, "off")
    direct = Recipe(
        base="org/base",
        merged=MergeSpec(method="ties", scale=1),
        tasks={"t": Task(expert="e", data=DataSpec(source="d"))},
        calibration=Calibration(alpha=0.5),
    )
    assert direct == recipe
    assert raw["tasks"] == {"t": {"expert": "e", "data": "d"}}
    with pytest.raises(InputError, match="recipe: tasks: required, but missing"):
        make_recipe({"base": "a", "merged": "b"})


# --------------------------------------------------------------------------------------------------------- slugs


def test_slugs_are_safe_and_distinct() -> None:
    assert [slug(name) for name in ("cars", "sun-397", "v1.0_x")] == ["cars", "sun-397", "v1.0_x"]
    names = ["a/b", "a\\b", "a b", "..", "con", "NUL.txt", "日本", "日本語", "é", "e", "-", "x" * 100, "x" * 99, ".a"]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    for text in slugs:
        assert 0 < len(text) <= 67
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert text[0] not in ".-"
        assert text.lower() not in ("con", "nul.txt")
    assert slug("a/b") == "a-b-c14cdd"
