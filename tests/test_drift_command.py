"""`featcal drift` on checkpoints: streamed, and equal to what models in memory and a calibration's report say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import folders
from featcal import InputError, drift
from featcal.drift.command import drift as measure_recipe
from featcal.plan import prepare
from featcal.recipe import labelled, load_recipe
from featcal.report import drift_table
from featcal.run import run
from pico import family_setup


@pytest.mark.parametrize("family", ["llama", "clip-vision", "t5"])
def test_streamed_equals_in_memory(family: str, tmp_path: Path) -> None:
    setup = family_setup(family)
    recipe = folders.make_job(tmp_path, family, setup=setup)
    found = drift.to_dict(measure_recipe(recipe, models=["first=./task0"], progress=False))
    plan = prepare(load_recipe(recipe))
    models = {"base": setup.base, "merged": setup.merged, "first": setup.experts["task0"]}
    data = {task: own.held_out.batches for task, own in plan.tasks.items()}
    expected = drift.to_dict(drift.measure(models, experts=setup.experts, data=data, base=setup.base))
    assert found["models"] == ["base", "merged", "first"]
    for a, b in zip(found["tasks"], expected["tasks"], strict=True):
        assert (a["samples"], a["tokens"], a["readout"]) == (b["samples"], b["tokens"], b["readout"])
        for label, model in a["models"].items():
            other = b["models"][label]
            for one, two in zip(model["blocks"], other["blocks"], strict=True):
                assert one["block"] == two["block"]
                for name in ("drift", "cosine", "local", "propagated"):
                    assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-7)
            assert model["final"]["cosine"] == pytest.approx(other["final"]["cosine"], rel=1e-6)
            vectors = model["task_vector_cosine"], other["task_vector_cosine"]
            assert vectors == (None, None) if label == "base" else vectors[0] == pytest.approx(vectors[1], rel=1e-6)
    assert found["tasks"][0]["models"]["first"]["blocks"][-1]["drift"] == 0


def test_a_report_is_measured_again_number_by_number(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "llama", dtype=torch.bfloat16)
    run(recipe, tmp_path / "out", progress=False)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = measure_recipe(
        tmp_path / "out" / "featcal.yaml", models=[str(tmp_path / "out")], output=tmp_path / "measured", progress=False
    )
    again = json.loads((tmp_path / "measured" / "drift.json").read_text())
    for task, other in zip(report["tasks"], again["tasks"], strict=True):
        for side, label in (("before", "merged"), ("after", "out")):
            model = other["models"][label]
            for block, one in zip(task["drift"], model["blocks"], strict=True):
                assert block[side] == pytest.approx(one["drift"], rel=1e-9)
                assert block["local"][side] == pytest.approx(one["local"], rel=1e-9)
            for name in ("cosine", "agreement", "kl"):
                assert task[name][side] == pytest.approx(model["final"][name], rel=1e-9)
    rows = list(csv.DictReader((tmp_path / "measured" / "drift.csv").open()))
    assert {row["model"] for row in rows} == {"base", "merged", "out"}
    console = Console(width=200, record=True, file=(tmp_path / "table").open("w"))
    console.print(drift_table(found))
    text = console.export_text()
    assert "task1" in text and "out" in text and "same top choice" in text


def test_labels_of_models() -> None:
    assert labelled(["a=./x", "./y/z/", "/p=q/r"], "/nowhere") == {
        "a": "/nowhere/x",
        "z": "/nowhere/y/z",
        "r": "/p=q/r",
    }
    with pytest.raises(InputError, match="there is another model called 'merged'"):
        labelled(["./merged"], ".", taken=["merged"])
    with pytest.raises(InputError, match="expected DIR, or LABEL=DIR"):
        labelled(["a="], ".")


def test_a_merge_to_perform_needs_its_result(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "llama")
    recipe.write_text(recipe.read_text().replace("merged: ./merged", "merged: {method: task_arithmetic, scale: 0.3}"))
    with pytest.raises(InputError, match="featcal merge"):
        measure_recipe(recipe, progress=False)
    found = measure_recipe(recipe, models=["./merged"], split=False, progress=False)
    assert list(found[0].models) == ["base", "merged"]
    with pytest.raises(InputError, match="nothing-here"):
        measure_recipe(recipe, models=["./nothing-here"], progress=False)
