"""docs/guide.md does what it says: every block of its five recipes runs, in order, on pico models."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import folders
import pico
from featcal import cli

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def sections() -> dict[str, list[tuple[str, str]]]:
    """Language and text of every block, by the number of its recipe."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]:
        number = part.partition(".")[0]
        if number.isdigit():
            found[number] = re.findall(r"^```(\w+)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    return found


def command(line: str) -> None:
    """One line of a shell, in this process."""
    program, *arguments = shlex.split(line)
    logging.getLogger("featcal").handlers.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        try:
            if program == "mergekit-yaml":
                from mergekit.io.tasks import LoaderCache
                from mergekit.scripts.run_yaml import main

                LoaderCache().loaders.clear()  # by relative path, from other tests
                main([*arguments, "--quiet"], standalone_mode=False)
            else:
                assert program == "featcal", line
                cli.main()
        except SystemExit as stop:
            assert not stop.code, f"{line} ended with {stop.code}"


def follow(blocks: list[tuple[str, str]]) -> Iterator[str]:
    """Do what the blocks say, in the working directory; yields the commands that ran."""
    names: dict[str, object] = {"__name__": "guide"}
    for language, text in blocks:
        if language == "yaml":
            name = re.match(r"# (\S+)\n", text)
            assert name, text
            Path(name[1]).write_text(text)
        elif language == "python":
            exec(compile(text, "guide.md", "exec"), names)
        else:
            assert language == "bash", language
            for line in text.splitlines():
                command(line)
                yield line


def stage(family: str, *experts: str) -> None:
    """A base, its experts and their data in the working directory."""
    base = pico.make(family)
    folders.save(base, Path("base"), family, torch.float32, "5GB")
    for number, name in enumerate(experts):
        folders.save(pico.perturbed(base, number), Path(name), family, torch.float32, "5GB")
        folders.write_data(Path("."), name, family, 24, seed=number)


def adapters(*tasks: str) -> None:
    for seed, task in enumerate(tasks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_pretrained("base")
            tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.1 * torch.randn_like(parameter))
            tuned.save_pretrained(f"lora/{task}")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def outputs(lines: list[str]) -> set[str]:
    return {line.split(" -o ")[1].split()[0] for line in lines if " -o " in line}


def test_mergekit() -> None:
    pytest.importorskip("mergekit", reason="pip install mergekit")
    stage("llama", "math", "code")
    done = list(follow(sections()["1"]))
    assert [line.split()[0] for line in done] == ["mergekit-yaml", "featcal", "featcal", "featcal"]
    report = json.loads(Path("calibrated/report.json").read_text())
    assert [task["name"] for task in report["tasks"]] == ["math", "code"]


@pytest.mark.parametrize(
    ("number", "family", "tasks"),
    [
        ("2", "llama", ("math", "code")),
        ("3", "clip-vision", ("cars", "dtd")),
        ("4", "t5", ("cola", "rte")),
        ("5", None, ("cars", "dtd")),
    ],
)
def test_recipes(number: str, family: str | None, tasks: tuple[str, ...]) -> None:
    if family:
        stage(family, *tasks)
    if number == "2":
        adapters(*tasks)
    done = list(follow(sections()[number]))
    assert bool(outputs(done)) == (family is not None)
    for folder in outputs(done):
        report = json.loads((Path(folder) / "report.json").read_text())
        assert {task["name"] for task in report["tasks"]} == set(tasks)
        assert any(module["status"] == "calibrated" for module in report["modules"])


def test_every_recipe_is_tried() -> None:
    assert list(sections()) == ["1", "2", "3", "4", "5"]
    assert all(blocks for blocks in sections().values())
