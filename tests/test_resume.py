"""A run may be killed at any moment: the same command then gives the same bytes as a run that was left alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import children
import folders
from children import Doom, command
from featcal.errors import InputError, RunError
from featcal.plan import prepare
from featcal.recipe import load_recipe
from featcal.run import run


@pytest.fixture(autouse=True, scope="module")
def _without_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["featcal.run"], "write_report", lambda folder: (folder / "report.html").touch())
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block Llama in bf16 and two shards, with its undisturbed result in `whole`."""
    folder = tmp_path_factory.mktemp("llama")
    recipe = folders.make_job(folder, dtype=torch.bfloat16, shard="8KB", norm="on", tasks=1, samples=4)
    run(recipe, folder / "whole", progress=False)
    return folder


def calibrate(job: Path, out: Path, *extra: str, doom: Doom | None = None) -> children.Child:
    return command(["calibrate", job / "recipe.yaml", "-o", out, *extra], out.with_name(f"{out.name}.log"), doom=doom)


def same_bytes(job: Path, out: Path) -> None:
    assert folders.hashes(out) == folders.hashes(job / "whole")
    mine, whole = (json.loads((folder / "report.json").read_text()) for folder in (out, job / "whole"))
    for report in (mine, whole):
        for record in report["modules"]:
            del record["seconds"]
    assert mine["modules"] == whole["modules"] and mine["kept"] == whole["kept"]
    assert not list(folders.hidden(out.parent))


def test_killed_before_every_change_to_the_disk(job: Path, tmp_path: Path) -> None:
    """Run after run on one output, each dying one change later than the one before, until one comes through."""
    out, trace = tmp_path / "out", tmp_path / "trace"
    for at in range(1, 60):
        child = calibrate(job, out, doom=Doom(tmp_path, at, trace=trace))
        if child.status() != -9:
            break
    assert child.status() == 0, child.text
    same_bytes(job, out)
    changed = {line.split()[1] for line in trace.read_text().splitlines()}
    assert {"journal.jsonl", ".block-00001.safetensors.featcal-tmp", ".report.json.featcal-tmp", "out"} <= changed
    assert at > 20


def test_killed_between_the_last_renames(job: Path, tmp_path: Path) -> None:
    """The folder has appeared, but its hidden twin has not gone yet."""
    trace, out = tmp_path / "trace", tmp_path / "out"
    assert calibrate(job, out, doom=Doom(tmp_path, trace=trace)).status() == 0
    lines = trace.read_text().splitlines()
    published = max(number for number, line in enumerate(lines, 1) if line == "os.rename out")
    assert published < len(lines)
    for at in range(published, len(lines) + 1):
        shutil.rmtree(out)
        assert calibrate(job, out, doom=Doom(tmp_path, at)).status() == -9
        again = calibrate(job, out)
        assert again.status() == 0, again.text
        assert "18 modules calibrated" in again.text
        same_bytes(job, out)


def test_killed_while_replacing_an_old_output(job: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out"

    def old_output() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / "precious.txt").write_text("old")

    old_output()
    assert calibrate(job, out, "--overwrite", doom=Doom(tmp_path, trace=trace)).status() == 0
    lines = trace.read_text().splitlines()
    retired = next(number for number, line in enumerate(lines, 1) if line == "os.rename out")
    for at in (retired, retired + 1):
        old_output()
        assert calibrate(job, out, "--overwrite", doom=Doom(tmp_path, at)).status() == -9
        assert calibrate(job, out, "--overwrite").status() == 0
        same_bytes(job, out)


@pytest.mark.parametrize("largest", [1500, 7000])
def test_killed_inside_a_write(job: Path, tmp_path: Path, largest: int) -> None:
    """The system kills the process in the middle of the first file that outgrows the limit: a block, a shard."""
    sizes = {path.name: path.stat().st_size for path in (job / "whole").iterdir()}
    assert max(sizes.values()) > 7000 > 1500
    out = tmp_path / "out"
    child = calibrate(job, out, doom=Doom(tmp_path, largest=largest))
    assert child.status() == -25, child.text
    cut = [path for path in next(folders.hidden(tmp_path)).rglob("*.featcal-tmp") if path.stat().st_size]
    assert cut and not out.exists()
    assert calibrate(job, out).status() == 0
    same_bytes(job, out)


def test_two_towers_resume_at_every_block(tmp_path: Path) -> None:
    """Encoder and decoder: finished blocks are replayed on both, also with activations on disk."""
    recipe = folders.make_job(tmp_path, "t5", norm="on", schedule="group")
    run(recipe, tmp_path / "whole", progress=False)
    out = tmp_path / "out"
    for block in range(4):
        extra = ["--max-memory", "0"] if block % 2 else []
        child = calibrate(tmp_path, out, *extra, doom=Doom(tmp_path, 1, f".block-{block:05d}.safetensors.featcal-tmp"))
        assert child.status() == -9, child.text
        assert len(journal_of(out).read_text().splitlines()) == 1 + block
        assert bool(list(tmp_path.glob(".out.featcal-activations-0/*/expert/task0/*.pt"))) == bool(extra)
    child = calibrate(tmp_path, out, "--max-memory", "0")
    assert child.status() == 0, child.text
    same_bytes(tmp_path, out)


@pytest.fixture()
def half(tmp_path: Path) -> Path:
    """A job in `tmp_path` whose run into `out` died after the first of two blocks; `whole` is a run left alone."""
    recipe = folders.make_job(tmp_path, norm="on")
    run(recipe, tmp_path / "whole", progress=False)
    die_in_block(tmp_path, 1)
    return tmp_path


def die_in_block(job: Path, block: int) -> None:
    name = f".block-{block:05d}.safetensors.featcal-tmp"
    assert calibrate(job, job / "out", doom=Doom(job, 1, name)).status() == -9


def journal_of(out: Path) -> Path:
    return out.parent / f".{out.name}.featcal-part" / "work" / "journal.jsonl"


def change_recipe(job: Path) -> None:
    recipe = yaml.safe_load((job / "recipe.yaml").read_text())
    recipe["calibration"]["alpha"] = 0.2
    (job / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def change_data(job: Path) -> None:
    lines = (job / "task1.jsonl").read_text().splitlines()
    (job / "task1.jsonl").write_text("\n".join(line.replace("w1", "w2") for line in lines) + "\n")


def change_model(job: Path) -> None:
    path = job / "task0" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(job: Path) -> None:
    path = job / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))


def change_tokenizer(job: Path) -> None:
    path = job / "merged" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w10": 14', '"w10": 15').replace('"w11": 15', '"w11": 14'))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (change_recipe, "calibration.alpha"),
        (change_data, "data of 'task1'"),
        (change_model, "model expert 'task0'"),
        (change_config, "config of base"),
        (change_tokenizer, "batches of 'task0'"),
    ],
)
def test_a_changed_job_is_refused_by_the_name_of_the_field(half: Path, change: Any, field: str) -> None:
    change(half)
    before = journal_of(half / "out").read_bytes()
    with pytest.raises(InputError, match=re.escape(field)) as caught:
        run(half / "recipe.yaml", half / "out", progress=False)
    assert "--fresh" in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert journal_of(half / "out").read_bytes() == before
    run(half / "recipe.yaml", half / "out", fresh=True, progress=False)
    run(half / "recipe.yaml", half / "whole", overwrite=True, progress=False)
    same_bytes(half, half / "out")


def count_fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the blocks that are fitted from now on."""
    fitted: list[str] = []
    algorithm = sys.modules["featcal.calibrate"]
    original = algorithm.fit

    def fit(job: Any, info: Any, block: Any) -> Any:
        fitted.append(info.name)
        return original(job, info, block)

    monkeypatch.setattr(algorithm, "fit", fit)
    return fitted


def test_finished_blocks_are_not_fitted_again(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = count_fits(monkeypatch)
    outcome = run(half / "recipe.yaml", half / "out", progress=False)
    assert fitted == ["model.layers.1"]
    assert [r.block for r in outcome.records if r.status == "calibrated"] == 9 * ["model.layers.0"] + 9 * [
        "model.layers.1"
    ]
    same_bytes(half, half / "out")


def test_a_journal_line_cut_off_by_a_crash_is_dropped(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(half / "out")
    whole = journal.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40):
        journal.write_bytes(whole[:cut])
        fitted = count_fits(monkeypatch)
        run(half / "recipe.yaml", half / "out", progress=False)
        assert fitted == ["model.layers.0", "model.layers.1"]
        same_bytes(half, half / "out")
        shutil.rmtree(half / "out")
        die_in_block(half, 1)


def test_a_lost_block_file_is_made_again(half: Path) -> None:
    (journal_of(half / "out").parent / "block-00000.safetensors").unlink()
    run(half / "recipe.yaml", half / "out", progress=False)
    same_bytes(half, half / "out")


def test_fresh_forgets_an_interrupted_run(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = count_fits(monkeypatch)
    run(half / "recipe.yaml", half / "out", fresh=True, progress=False)
    assert fitted == ["model.layers.0", "model.layers.1"]
    same_bytes(half, half / "out")


def test_two_runs_on_one_output(half: Path) -> None:
    part = half / ".out.featcal-part"
    with (part / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = folders.hashes(part)
        for fresh in (False, True):
            with pytest.raises(InputError, match="another run is working on"):
                run(half / "recipe.yaml", half / "out", fresh=fresh, progress=False)
        assert folders.hashes(part) == before
    run(half / "recipe.yaml", half / "out", progress=False)
    same_bytes(half, half / "out")


def test_two_runs_started_at_once(job: Path, tmp_path: Path) -> None:
    children_ = [
        command(["calibrate", job / "recipe.yaml", "-o", tmp_path / "out"], tmp_path / f"log{i}") for i in "12"
    ]
    statuses = [child.status() for child in children_]
    assert sorted(statuses) in ([0, 2], [0, 0]), [child.text for child in children_]
    for child, status in zip(children_, statuses, strict=True):
        if status == 2:
            assert "another run is working on" in child.text or "is not empty" in child.text
    same_bytes(job, tmp_path / "out")


@pytest.mark.parametrize("name", ["block-00001.safetensors", "journal.jsonl", "model.safetensors", "report.json"])
def test_a_full_disk_ends_the_run_in_a_sentence_and_it_goes_on_later(
    half: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.strip(".").startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="is full: free some space, then run the same command again"):
            run(half / "recipe.yaml", half / "out", progress=False)
    run(half / "recipe.yaml", half / "out", progress=False)
    same_bytes(half, half / "out")


def test_activations_that_do_not_fit_on_the_disk(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # torch's own words

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(RunError, match=r"activations cannot be kept in .* free some space"):
            run(half / "recipe.yaml", half / "out", max_memory=0, progress=False)
    run(half / "recipe.yaml", half / "out", max_memory=0, progress=False)
    same_bytes(half, half / "out")


def test_space_is_checked_first_and_what_is_there_counts(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(load_recipe(half / "recipe.yaml"))
    assert plan.cost is not None
    there = sum(path.stat().st_size for path in (half / ".out.featcal-part").rglob("*") if path.is_file())
    assert 0 < there < plan.cost.disk_bytes
    free = plan.cost.disk_bytes - there
    usage = shutil.disk_usage(half)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free - 1))
    with pytest.raises(RunError, match=r"GB free and .* GB are needed"):
        run(half / "recipe.yaml", half / "out", progress=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    run(half / "recipe.yaml", half / "out", progress=False)
    same_bytes(half, half / "out")


def test_an_emptied_journal_takes_its_notes_along(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, tune="auto", rows=60)
    run(recipe, tmp_path / "whole", progress=False)
    die_in_block(tmp_path, 1)
    journal = journal_of(tmp_path / "out")
    note = journal.with_name("tuning.json")
    assert json.loads(note.read_text())["table"]["candidates"]
    note.write_text(json.dumps({"chosen": None, "table": {}}))  # of another run: nothing would be calibrated
    journal.write_bytes(b"")
    run(recipe, tmp_path / "out", progress=False)
    assert folders.hashes(tmp_path / "out") == folders.hashes(tmp_path / "whole")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"fingerprint": 3}', "\xff"])
def test_a_report_of_something_else_in_an_old_output(text: str, half: Path) -> None:
    out = half / "out"
    out.mkdir()
    (out / "report.json").write_bytes(text.encode("latin-1"))
    run(half / "recipe.yaml", out, overwrite=True, progress=False)
    same_bytes(half, out)


def test_a_replaced_output_does_not_come_back(job: Path, tmp_path: Path) -> None:
    """Killed once the new folder was there, with the old one still hidden beside it."""
    out, old = tmp_path / "out", tmp_path / ".out.featcal-old"
    out.mkdir()
    (out / "precious.txt").write_text("old")
    assert calibrate(job, out, "--overwrite", doom=Doom(tmp_path, 2, old.name)).status() == -9
    assert (out / "report.json").exists() and old.exists()
    assert calibrate(job, out, "--overwrite").status() == 0
    same_bytes(job, out)
    old.mkdir()  # as an older version may have left it
    shutil.rmtree(out)
    assert calibrate(job, out).status() == 0
    same_bytes(job, out)
