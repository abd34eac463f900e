"""The same command on several processes: the same weights, one voice, and an end whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import featcal.dist
import folders
from children import Child, Doom, ranks
from featcal.dist import shares
from featcal.errors import InputError
from featcal.run import run

Before = Callable[[], None]


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["featcal.run"], "write_report", lambda folder: (folder / "report.html").touch())


def calibrate(
    job: Path, world: int, *extra: str, out: str = "out", before: dict[int, Before] | None = None, doom: Any = None
) -> list[Child]:
    """The command as `world` processes; `before`: what a rank does first; `doom`: rank → its Doom."""
    arguments = ["calibrate", job / "recipe.yaml", "-o", job / out, *extra]
    hooks = {"before": lambda rank: (before or {}).get(rank, impatient), "doom": lambda rank: (doom or {}).get(rank)}
    return ranks(arguments, job / f"{out}.log", world, **hooks)


def impatient() -> None:
    featcal.dist.GRACE = 0.5


def assert_close(job: Path, out: str, reference: str = "single") -> None:
    mine, wanted = folders.weights(job / out), folders.weights(job / reference)
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def statuses(processes: list[Child]) -> list[int]:
    return [process.status() for process in processes]


@pytest.mark.parametrize(
    ("family", "tasks", "world", "fields"),
    [
        ("llama", 2, 2, {"norm": "on"}),
        ("llama", 3, 2, {"schedule": "group"}),  # one rank has two tasks
        ("t5", 2, 3, {"norm": "on"}),  # the batches of one task are split
        ("clip-vision", 2, 5, {}),  # two ranks share each task, one has a third of one
        ("bert", 1, 4, {"samples": 4, "batch_size": 2}),  # more ranks than batches: some are empty
    ],
)
def test_weights_equal_those_of_one_process(
    family: str, tasks: int, world: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    recipe = folders.make_job(tmp_path, family, tasks=tasks, **fields)
    folders.write_data(tmp_path, "task0", family, rows=7, seed=9)  # tasks of unequal size
    single = run(recipe, tmp_path / "single", progress=False)
    processes = calibrate(tmp_path, world)
    assert statuses(processes) == [0] * world, processes[0].text
    assert_close(tmp_path, "out")
    assert processes[0].text.count("modules calibrated") == 1 and "calibrating: 1/" in processes[0].text
    assert [process.text for process in processes[1:]] == [""] * (world - 1)
    calibrated = sum(record.status == "calibrated" for record in single.records)
    assert f"{calibrated} modules calibrated" in processes[0].text
    assert not list(folders.hidden(tmp_path))


def test_settings_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """A model without scores is tuned by who resembles whom among all held-out samples, not those of one rank."""
    recipe = folders.make_job(tmp_path, "clip-vision", tune="auto", samples=6, rows=44)
    single = run(recipe, tmp_path / "single", progress=False).report["tuning"]
    assert single["kind"] == "feature neighbourhoods"
    assert statuses(calibrate(tmp_path, 3)) == [0] * 3
    several = json.loads((tmp_path / "out" / "report.json").read_text())["tuning"]
    for mine, wanted in zip(several["candidates"], single["candidates"], strict=True):
        assert mine["chosen"] == wanted["chosen"] and mine["kl"] == pytest.approx(wanted["kl"], rel=1e-4)
    assert_close(tmp_path, "out")


def test_activations_of_every_rank_on_disk(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    run(recipe, tmp_path / "single", progress=False)
    assert statuses(calibrate(tmp_path, 3, "--max-memory", "0")) == [0, 0, 0]
    assert_close(tmp_path, "out")
    assert not list(folders.hidden(tmp_path))


def test_shares_of_ranks() -> None:
    assert shares({"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0}, 2) == {"a": [0], "b": [1], "c": [1], "d": [1]}
    assert shares({"a": 1.0, "b": 1.0}, 5) == {"a": [0, 2, 4], "b": [1, 3]}
    assert shares({"a": 1.0}, 1) == {"a": [0]}


@pytest.mark.parametrize("later", [1, 2, 3])
def test_a_run_of_two_ranks_resumes_on_any_number(later: int, tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "t5", norm="on")
    run(recipe, tmp_path / "single", progress=False)
    doom = {0: Doom(tmp_path, 1, ".block-00002.safetensors.featcal-tmp")}
    died = calibrate(tmp_path, 2, "--max-memory", "0", doom=doom)
    assert died[0].status() == -9
    assert died[1].status() == 1 and "lost another process" in died[1].text
    assert len((tmp_path / ".out.featcal-part/work/journal.jsonl").read_text().splitlines()) == 3
    assert statuses(calibrate(tmp_path, later)) == [0] * later
    assert_close(tmp_path, "out")
    assert not list(folders.hidden(tmp_path))


def test_an_interrupted_run_of_ranks_gives_the_same_bytes(tmp_path: Path) -> None:
    folders.make_job(tmp_path, dtype=torch.bfloat16, shard="8KB")
    assert statuses(calibrate(tmp_path, 2, out="single")) == [0, 0]
    died = calibrate(tmp_path, 2, doom={0: Doom(tmp_path, 1, ".block-00001.safetensors.featcal-tmp")})
    assert statuses(died) == [-9, 1]
    assert statuses(calibrate(tmp_path, 2)) == [0, 0]
    assert folders.hashes(tmp_path / "out") == folders.hashes(tmp_path / "single")


def die_in_the_second_block() -> None:
    impatient()
    algorithm = sys.modules["featcal.calibrate"]
    learn = algorithm.learn_task

    def learn_task(job: Any, info: Any, *rest: Any, **more: Any) -> None:
        if info.name.endswith(".1"):
            os.kill(os.getpid(), signal.SIGKILL)
        learn(job, info, *rest, **more)

    algorithm.learn_task = learn_task  # type: ignore[attr-defined]


def refuse_in_the_second_block() -> None:
    impatient()
    algorithm = sys.modules["featcal.calibrate"]
    learn = algorithm.learn_task

    def learn_task(job: Any, info: Any, *rest: Any, **more: Any) -> None:
        if info.name.endswith(".1"):
            raise InputError("task 'task1', batch 0: the model refuses it")
        learn(job, info, *rest, **more)

    algorithm.learn_task = learn_task  # type: ignore[attr-defined]


def miss_a_file() -> None:
    impatient()

    def prepare(*_: Any, **__: Any) -> None:
        raise InputError("/data/task1.jsonl does not exist")

    sys.modules["featcal.run"].prepare = prepare  # type: ignore[attr-defined]


def see_another_seed() -> None:
    impatient()
    os.environ["FEATCAL_TEST"] = "1"
    module = sys.modules["featcal.run"]
    fingerprint = module.fingerprint
    module.fingerprint = lambda plan: fingerprint(plan) | {"model base": "f00"}  # type: ignore[attr-defined]


def test_a_rank_that_dies_ends_the_job_with_a_message(tmp_path: Path) -> None:
    folders.make_job(tmp_path)
    processes = calibrate(tmp_path, 3, before={1: die_in_the_second_block})
    assert processes[1].status() == -9
    assert [processes[rank].status(30) for rank in (0, 2)] == [1, 1]
    assert "failed: rank 0 lost another process of the job" in processes[0].text
    assert "the same command goes on from the last finished block" in processes[0].text
    assert "Traceback" not in processes[0].text + processes[2].text


def test_what_one_rank_cannot_read_ends_the_job(tmp_path: Path) -> None:
    folders.make_job(tmp_path)
    processes = calibrate(tmp_path, 2, before={1: refuse_in_the_second_block})
    assert statuses(processes) == [1, 2]
    assert processes[1].text == "error: task 'task1', batch 0: the model refuses it\n"
    assert "lost another process" in processes[0].text


def test_a_wrong_input_is_reported_once(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    (tmp_path / "task1.jsonl").unlink()
    recipe.write_text(recipe.read_text().replace("task0.jsonl\n", "task0.jsonl\n      split: nowhere\n"))
    processes = calibrate(tmp_path, 3)
    assert statuses(processes) == [2, 1, 1]
    assert [process.text for process in processes[1:]] == ["", ""]
    errors = [line for line in processes[0].text.splitlines() if line.startswith("error: ")]
    assert any("task1.jsonl" in line for line in errors) and len(errors) == len(set(errors))
    recipe.write_text("bases: x\n")
    processes = calibrate(tmp_path, 2)
    assert statuses(processes) == [2, 1]
    assert "bases" in processes[0].text and processes[1].text == ""


def test_what_only_one_machine_lacks_names_the_rank(tmp_path: Path) -> None:
    folders.make_job(tmp_path)
    processes = calibrate(tmp_path, 2, before={1: miss_a_file})
    assert statuses(processes) == [1, 2]
    assert processes[0].text.count("error") == 0
    assert processes[1].text.startswith("error: rank 1 on ") and "/data/task1.jsonl does not exist" in processes[1].text


def test_machines_that_see_different_models_are_told_apart(tmp_path: Path) -> None:
    folders.make_job(tmp_path)
    processes = calibrate(tmp_path, 2, before={1: see_another_seed})
    assert statuses(processes) == [2, 1]
    assert "error: rank 1 sees another model base than rank 0" in processes[0].text and processes[1].text == ""


def test_an_output_that_is_refused_on_rank_0_ends_all(tmp_path: Path) -> None:
    folders.make_job(tmp_path)
    processes = calibrate(tmp_path, 2, out="merged")
    assert statuses(processes) == [2, 1]
    assert "error: OUT" in processes[0].text and processes[1].text == ""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["torchrun"], ["python", "-m", "torch.distributed.run"]])
def test_under_torchrun(launcher: list[str], tmp_path: Path) -> None:
    """The launcher itself: once as its own command, once as a module; a fresh interpreter per process."""
    recipe = folders.make_job(tmp_path)
    run(recipe, tmp_path / "single", progress=False)
    program = [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:], "--nproc-per-node", "2"]
    job = [*program, "-m", "featcal", "calibrate", str(recipe), "-o"]

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*job, *arguments], capture_output=True, text=True, timeout=300, check=False)

    done = launch(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path, "out")
    assert done.stdout.count("modules calibrated") == 1 and done.stderr.count("calibrating: 1/2") == 1
    refused = launch(str(tmp_path / "out"))
    assert refused.returncode != 0 and refused.stderr.count("is not empty") == 1
    assert "exitcode  : 2" in refused.stderr
