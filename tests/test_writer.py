"""The output folder: byte-equal where nothing was calibrated, whole or absent, never over an input."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from featcal import writer
from featcal.errors import InputError, RunError
from featcal.reader import Checkpoint, FileCheckpoint, open_checkpoint
from featcal.writer import OutputFolder, assemble, atomic_write, space_problem, write_safetensors
from pico import make

Q = "model.layers.1.self_attn.q_proj.weight"


def merged_folder(folder: Path, shard_size: str = "4KB", family: str = "llama") -> Path:
    make(family).to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard_size)  # type: ignore[operator]
    (folder / "tokenizer.json").write_bytes(b'{"odd":  "spacing\\u00e9"}\r\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_custom.py").write_text("# code\n")
    (folder / "README.md").write_text("---\nbase_model: []\n---\n")
    (folder / "mergekit_config.yml").write_text("merge_method: ties # a comment\n")
    return folder


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            found[key] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.fixture()
def umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


# ------------------------------------------------------------------------------------------------ single files


@pytest.mark.usefixtures("umask")
def test_atomic_write_is_whole_or_absent_and_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"half")
        _ = 1 / 0
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("umask")
def test_write_safetensors_takes_any_layout_and_is_read_by_safetensors(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {
        "transposed": base.T,
        "slice": base[::2, 1:3],
        "tied": base,
        "same": base,
        "bf16": torch.randn(3).bfloat16(),
        "odd": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "grad": torch.nn.Parameter(torch.randn(2)),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors, {"block": "model.layers.0"})
    got = load_file(path)
    assert set(got) == set(tensors)
    assert all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in tensors.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"block": "model.layers.0"}
    assert path.stat().st_mode & 0o777 == 0o640


# ------------------------------------------------------------------------------------------------ assembly


@pytest.mark.parametrize("shard_size", ["4KB", "5GB"])
def test_assembled_folder_differs_in_the_changed_bytes_only(shard_size: str, tmp_path: Path) -> None:
    merged = open_checkpoint(merged_folder(tmp_path / "merged", shard_size))
    new = torch.randn(merged.shape(Q)).to(torch.bfloat16)
    norm = torch.randn(16).to(torch.bfloat16)
    write_safetensors(tmp_path / "block.safetensors", {"n": norm})
    out = tmp_path / "out"
    out.mkdir()
    changed: dict[str, Any] = {Q: new.T.contiguous().T, "model.norm.weight": (tmp_path / "block.safetensors", "n")}
    written = assemble(merged, changed, out)
    assert {p.name for p in written} == {p.name for p in out.iterdir()}
    before, after = tensor_bytes(merged.folder), tensor_bytes(out)
    assert after.keys() == before.keys()
    assert {k for k in before if before[k] != after[k]} == {Q, "model.norm.weight"}
    result = open_checkpoint(out)
    assert torch.equal(result.get(Q), new) and torch.equal(result.get("model.norm.weight"), norm)
    assert {k: result.shard_of(k) for k in result.keys()} == {k: merged.shard_of(k) for k in merged.keys()}  # noqa: SIM118
    assert result.check() == []
    touched = {merged.shard_of(Q), merged.shard_of("model.norm.weight")}
    for shard in merged.shards():
        assert (out / shard).stat().st_size == (merged.folder / shard).stat().st_size
        assert (file_hash(out / shard) == file_hash(merged.folder / shard)) == (shard not in touched)
        assert result.shard_header(shard) == merged.shard_header(shard)
    if merged.index_path:
        assert written[-1].name == merged.index_path.name
        assert written[-1].read_bytes() == merged.index_path.read_bytes()


def test_assembly_keeps_one_tensor_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = open_checkpoint(merged_folder(tmp_path / "merged", "5GB"))
    alive, most = 0, 0

    class Counted(FileCheckpoint):
        def get(self, key: str) -> Tensor:
            nonlocal alive, most
            tensor = super().get(key)
            alive += 1
            most = max(most, alive)

            def gone() -> None:
                nonlocal alive
                alive -= 1

            weakref.finalize(tensor, gone)
            return tensor

    (tmp_path / "out").mkdir()
    assemble(Counted(merged.folder), {}, tmp_path / "out")
    assert most <= 2 and alive <= 1
    assert file_hash(tmp_path / "out" / "model.safetensors") == file_hash(merged.folder / "model.safetensors")


def test_header_metadata_and_odd_file_names_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "merged"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "merge v1.safetensors", metadata={"mecha_recipe": "x", "format": "pt"})
    (tmp_path / "out").mkdir()
    assemble(open_checkpoint(source), {"w": torch.zeros(2)}, tmp_path / "out")
    with safe_open(tmp_path / "out" / "merge v1.safetensors", "pt") as file:
        assert file.metadata() == {"mecha_recipe": "x", "format": "pt"}
        assert torch.equal(file.get_tensor("w"), torch.zeros(2))


def test_a_wrong_shape_or_dtype_is_a_programmer_error(tmp_path: Path) -> None:
    merged = open_checkpoint(merged_folder(tmp_path / "merged"))
    for wrong in (torch.zeros(3, 3).bfloat16(), torch.zeros(merged.shape(Q))):
        with pytest.raises(AssertionError, match="q_proj"):
            assemble(merged, {Q: wrong}, tmp_path)
    with pytest.raises(AssertionError, match="ghost"):
        assemble(merged, {"ghost": torch.zeros(1)}, tmp_path)


def test_pickles_come_out_as_safetensors_of_the_same_layout(tmp_path: Path) -> None:
    source = tmp_path / "merged"
    model = LlamaForCausalLM(make("llama").config)  # type: ignore[arg-type]
    model.save_pretrained(source)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    (source / "model.safetensors").unlink()
    keys = sorted(state)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": keys[i::2] for i in range(2)}
    for name, members in shards.items():
        torch.save({k: state[k] for k in members}, source / name)
    weight_map = {k: name for name, members in shards.items() for k in members}
    index = {"metadata": {"total_size": 1, "by": "me"}, "weight_map": weight_map}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    out = OutputFolder(tmp_path / "out", [source])
    out.prepare()
    files = out.copy_side_files(source)
    assemble(open_checkpoint(source), {Q: state[Q] + 1}, out.out)
    out.publish()
    assert "config.json" in files.copied and not any(name.startswith("pytorch_model") for name in files.copied)
    written = json.loads((out.final / "model.safetensors.index.json").read_text())
    renamed = {k: v.replace("pytorch_model", "model").replace(".bin", ".safetensors") for k, v in weight_map.items()}
    total = sum(v.numel() * v.element_size() for v in state.values())
    assert written == {"metadata": {"total_size": total, "by": "me"}, "weight_map": renamed}
    loaded = LlamaForCausalLM.from_pretrained(out.final).state_dict()
    assert torch.equal(loaded[Q], state[Q] + 1)
    assert all(torch.equal(loaded[k], v) for k, v in state.items() if k != Q)


# ------------------------------------------------------------------------------------------------ the folder


@pytest.mark.usefixtures("umask")
def test_drop_in_folder(tmp_path: Path) -> None:
    source = merged_folder(tmp_path / "merged")
    (source / "2_Dense").mkdir()
    save_file({"d": torch.ones(1)}, source / "2_Dense" / "model.safetensors")
    (source / "onnx").mkdir()
    stale = ["onnx/model.onnx", "onnx/weights.bin", "model.fp16.safetensors", "pytorch_model.bin", "tf_model.h5"]
    for name in stale:
        (source / name).write_bytes(b"stale weights")
    (source / "training_args.bin").write_bytes(b"args")
    (source / ".gitattributes").write_text("*.bin filter=lfs\n")
    for name in (".git", ".cache"):
        (source / name).mkdir()
        (source / name / "junk").write_text("x")
    merged = open_checkpoint(source)
    folder = OutputFolder(tmp_path / "deep" / "out", [source])
    folder.prepare(need=sum(merged.nbytes(k) for k in merged.keys()))  # noqa: SIM118
    (folder.work / "journal").write_text("state")
    files = folder.copy_side_files(source)
    assemble(merged, {Q: torch.zeros(merged.shape(Q)).bfloat16()}, folder.out)
    assert not folder.final.exists()
    final = folder.publish()
    assert final == tmp_path / "deep" / "out" and [p.name for p in final.parent.iterdir()] == ["out"]
    expected = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "modeling_custom.py"}
    expected |= {"README.md", "mergekit_config.yml", "training_args.bin", ".gitattributes", "2_Dense/model.safetensors"}
    assert set(files.copied) == expected
    assert set(files.left) == {*stale, *merged.shards(), "model.safetensors.index.json"}
    for name in expected:
        assert (final / name).read_bytes() == (source / name).read_bytes()
    made = {p.relative_to(final).as_posix() for p in final.rglob("*") if p.is_file()}
    assert made == expected | set(merged.shards()) | {"model.safetensors.index.json"}
    assert all(p.stat().st_mode & 0o777 == (0o750 if p.is_dir() else 0o640) for p in final.rglob("*"))
    (final / "README.md").write_text("# card\n")
    loaded: Any = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.get_parameter(Q).abs().max() == 0 and model.dtype == torch.bfloat16


def test_links_of_the_hub_cache_become_files_and_others_are_refused(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to(Path("..") / ".." / "blobs" / "1")
    folder = OutputFolder(tmp_path / "out", [snapshot])
    folder.prepare()
    assert folder.copy_side_files(snapshot).copied == ["config.json"]
    assert (folder.out / "config.json").read_text() == "{}" and not (folder.out / "config.json").is_symlink()
    (tmp_path / "id_rsa").write_text("secret")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(InputError, match=r"tokenizer.json links to a file outside its folder"):
        folder.copy_side_files(snapshot)
    assert not (folder.out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("merged", "is the input"),
        ("merged/calibrated", "lies inside the input"),
        ("link", "is the input"),
        ("link/deeper/out", "lies inside the input"),
        (".", "holds the current folder"),
        ("..", "holds the current folder"),
        ("note.txt", "is a file"),
        ("full", "is not empty"),
        ("note.txt/out", "not a writable folder"),
    ],
)
def test_places_where_out_may_not_be(out: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "merged")
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    monkeypatch.chdir(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=words):
        OutputFolder(out, [Path("merged")])
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_out_may_not_swallow_an_input_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "models" / "merged").mkdir(parents=True)
    with pytest.raises(InputError, match="contains the input"):
        OutputFolder(tmp_path / "models", [tmp_path / "models" / "merged"], overwrite=True)
    with pytest.raises(InputError, match="is the input"):
        OutputFolder(tmp_path / "models" / "merged", [tmp_path / "models" / "merged"], overwrite=True)


def test_a_single_input_file_does_not_forbid_its_whole_folder(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("x")
    assert OutputFolder(tmp_path / "out", [tmp_path / "a.safetensors"]).final == tmp_path / "out"
    with pytest.raises(InputError, match="contains the input"):
        OutputFolder(tmp_path, [tmp_path / "a.safetensors"], overwrite=True)


def test_overwrite_replaces_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "out"
    final.mkdir()
    (final / "old").write_text("old")
    folder = OutputFolder(final, overwrite=True)
    folder.prepare()
    (folder.out / "new").write_text("new")
    assert [p.name for p in final.iterdir()] == ["old"]
    folder.publish()
    assert [p.name for p in final.iterdir()] == ["new"] and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_death_between_the_last_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "out"
    final.mkdir()
    (final / "old").write_text("old")
    folder = OutputFolder(final, overwrite=True)
    folder.prepare()
    (folder.out / "new").write_text("new")
    real, calls = os.replace, 0

    def die_at_second(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(writer.os, "replace", die_at_second)
    with pytest.raises(KeyboardInterrupt):
        folder.publish()
    monkeypatch.undo()
    assert not final.exists()
    again = OutputFolder(final, overwrite=True)
    again.prepare()
    assert [p.name for p in final.iterdir()] == ["old"]
    assert (again.publish() / "new").read_text() == "new"


def test_state_of_an_earlier_run_is_kept_until_told_otherwise(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    folder.prepare()
    (folder.work / "journal").write_text("block 3 done")
    (folder.out / ".model.safetensors.featcal-tmp").write_text("half a shard of a killed run")
    again = OutputFolder(tmp_path / "out")
    again.prepare()
    assert (again.work / "journal").read_text() == "block 3 done" and list(again.out.iterdir()) == []
    again.start_over()
    assert not again.work.exists() and not again.out.exists()


def _finish(source: Path, final: Path, die_at: int) -> None:
    """One run, which kills itself while it writes tensor number `die_at` (0: never)."""
    merged, folder = open_checkpoint(source), OutputFolder(final, [source])
    folder.prepare()
    count, real = 0, writer._write_tensor

    def write(file: Any, tensor: Tensor) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        real(file, tensor)

    writer._write_tensor = write
    folder.copy_side_files(source)
    assemble(merged, {Q: torch.zeros(merged.shape(Q)).bfloat16()}, folder.out)
    folder.publish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_kill_in_the_middle_of_a_shard_leaves_no_folder_and_the_next_run_finishes(tmp_path: Path) -> None:
    source, final = merged_folder(tmp_path / "merged"), tmp_path / "out"
    before = {p.name: file_hash(p) for p in source.iterdir()}
    for die_at, expected in ((1, -9), (7, -9), (20, -9), (0, 0)):
        child = multiprocessing.get_context("fork").Process(target=_finish, args=(source, final, die_at))
        child.start()
        child.join()
        assert child.exitcode == expected
        assert final.exists() == (expected == 0)
    assert open_checkpoint(final).check() == []
    assert float(open_checkpoint(final).get(Q).abs().max()) == 0
    assert {p.name for p in final.iterdir()} == set(before)
    assert {p.name: file_hash(p) for p in source.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"merged", "out"}


# ------------------------------------------------------------------------------------------------ full disks


def test_full_disk_is_one_sentence_and_keeps_finished_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = open_checkpoint(merged_folder(tmp_path / "merged"))
    folder = OutputFolder(tmp_path / "out")
    folder.prepare()
    real, written = writer._write_tensor, 0

    def fill_up(file: Any, tensor: Tensor) -> None:
        nonlocal written
        written += 1
        if written > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, tensor)

    monkeypatch.setattr(writer, "_write_tensor", fill_up)
    with pytest.raises(RunError) as caught:
        assemble(merged, {}, folder.out)
    message = str(caught.value)
    assert "is full: free some space, then run the same command again" in message and "\n" not in message
    whole = sorted(folder.out.iterdir())
    assert whole and all(file_hash(p) == file_hash(merged.folder / p.name) for p in whole)
    monkeypatch.undo()
    assemble(merged, {}, folder.out)
    assert open_checkpoint(folder.publish()).check() == []


def test_space_is_checked_first(tmp_path: Path) -> None:
    assert space_problem(tmp_path / "not" / "yet" / "there", 10) is None
    with pytest.raises(RunError, match=r"GB free and 1000000000.00 GB are needed: free some space"):
        OutputFolder(tmp_path / "out").prepare(need=10**18)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_place(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="not a writable folder"):
        OutputFolder(tmp_path / "locked" / "out")


def test_default_headers_describe_any_checkpoint(tmp_path: Path) -> None:
    """Checkpoints that are not safetensors files themselves get a header made from their own description."""
    merged = open_checkpoint(merged_folder(tmp_path / "merged", "5GB"))
    made = Checkpoint.shard_header(merged, "model.safetensors")
    path = tmp_path / "again.safetensors"
    keys = merged.shard_keys("model.safetensors")
    path.write_bytes(made + b"".join(merged.get(k).view(torch.uint8).numpy().tobytes() for k in keys))
    assert all(torch.equal(v, merged.get(k)) for k, v in load_file(path).items())
