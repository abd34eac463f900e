"""Checkpoints on disk: what is read, how little of it, and every way in which a folder can be wrong."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from featcal import hub, reader
from featcal.errors import InputError, RunError
from featcal.headers import header_bytes, read_header
from featcal.reader import FileCheckpoint, open_checkpoint
from pico import make

httpx: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])  # httpx or httpx2, by version


def saved(folder: Path, family: str = "llama", shard_size: str = "5GB") -> Path:
    make(family).save_pretrained(folder, max_shard_size=shard_size)  # type: ignore[operator]
    return folder


def everything(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def one_problem(folder: Path) -> str:
    problems = open_checkpoint(str(folder)).check()
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_reads_what_safetensors_reads(tmp_path: Path, shard_size: str) -> None:
    ckpt = open_checkpoint(str(saved(tmp_path, shard_size=shard_size)))
    truth = everything(tmp_path)
    assert set(ckpt.keys()) == set(truth)
    assert (len(ckpt.shards()) > 2) == (shard_size == "4KB")
    assert ckpt.check() == []
    for key, tensor in truth.items():
        assert torch.equal(ckpt.get(key), tensor)
        assert (ckpt.shape(key), ckpt.dtype(key)) == (tuple(tensor.shape), tensor.dtype)
        assert ckpt.nbytes(key) == tensor.numel() * tensor.element_size()
        assert key in load_file(tmp_path / ckpt.shard_of(key))
    assert "lm_head.bias" not in ckpt and "model.norm.weight" in ckpt
    assert ckpt.config["model_type"] == "llama"


def test_every_dtype_scalar_and_empty_tensor(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(7).bfloat16(),
        "double": torch.randn(2, 2).double(),
        "long": torch.arange(4),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "by": "me"})
    ckpt = open_checkpoint(tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(ckpt.get(key), tensor) and ckpt.get(key).dtype == tensor.dtype
    assert ckpt.shard_metadata("model.safetensors") == {"format": "pt", "by": "me"}
    assert ckpt.config == {}


def test_large_tensors_are_mapped_not_copied_and_writes_stay_private(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1024, 1024)}, tmp_path / "model.safetensors")
    ckpt = open_checkpoint(tmp_path)
    before = len(reader._maps)
    tensor = ckpt.get("w")
    assert len(reader._maps) == before + 1
    tensor.add_(1)
    assert torch.equal(ckpt.get("w"), torch.ones(1024, 1024))
    del tensor
    assert len(reader._maps) == before


def test_maps_never_exhaust_file_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_MAPS", 2)
    save_file({"w": torch.arange(2**19).float()}, tmp_path / "model.safetensors")
    ckpt = open_checkpoint(tmp_path)
    held = [ckpt.get("w") for _ in range(5)]
    assert len(reader._maps) <= 2
    assert all(torch.equal(t, torch.arange(2**19).float()) for t in held)


def test_unaligned_tensor_is_read(tmp_path: Path) -> None:
    """Old writers did not pad the header, so that a tensor may start at an odd byte."""
    values = torch.arange(2**19).float()
    raw = header_bytes({"w": (torch.float32, (2**19,))}, {})
    raw = (len(raw) - 8 + 1).to_bytes(8, "little") + raw[8:] + b" "
    (tmp_path / "model.safetensors").write_bytes(raw + values.numpy().tobytes())
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.entry("w").start % 4 == 1
    assert torch.equal(ckpt.get("w"), values)


def _resident_file_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_touch_only_their_pages(tmp_path: Path) -> None:
    save_file({"e": torch.randn(16384, 1024)}, tmp_path / "model.safetensors")  # 64 MB
    ckpt = open_checkpoint(tmp_path)
    ckpt.rows("e", torch.tensor([0]))
    index = torch.randint(0, 16384, (100,))
    before = _resident_file_bytes()
    got = ckpt.rows("e", index)
    assert _resident_file_bytes() - before < 4e6
    assert torch.equal(got, load_file(tmp_path / "model.safetensors")["e"][index])


def test_rows_repeat_reorder_and_check_bounds(tmp_path: Path) -> None:
    table = torch.randn(100, 3, 2).bfloat16()
    save_file({"e": table}, tmp_path / "model.safetensors")
    ckpt = open_checkpoint(tmp_path)
    for index in (torch.tensor([5, 99, 5, 0]), torch.arange(100), torch.tensor([], dtype=torch.long)):
        assert torch.equal(ckpt.rows("e", index), table[index])
    with pytest.raises(IndexError, match="row 100 of 'e', which has 100 rows"):
        ckpt.rows("e", torch.tensor([100]))
    with pytest.raises(IndexError):
        ckpt.rows("e", torch.tensor([-1]))


def test_fingerprint_sees_values_names_and_nothing_else(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    print_of = {f: open_checkpoint(f).fingerprint() for f in (one, two)}
    assert print_of[one] == print_of[two]
    tensors = load_file(two / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(two).fingerprint() != print_of[one]


# ------------------------------------------------------------------------------------------------ references


def test_an_existing_path_beats_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name@main", "a+b", "expert a"):
        saved(tmp_path / name, "bert")
        ckpt = open_checkpoint(name)
        assert ckpt.folder == Path(name) and ckpt.check() == []
        assert hub.split_adapter(name) == (name, None)


def test_model_plus_adapter_is_split_at_the_plus_between_existing_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base+v2").mkdir()
    (tmp_path / "lora").mkdir()
    assert hub.split_adapter("base+v2+lora") == ("base+v2", "lora")
    assert hub.split_adapter("base+v2+org/lora@main") == ("base+v2", "org/lora@main")
    assert hub.split_adapter("org/base@v1+org/lora") == ("org/base@v1", "org/lora")
    assert hub.split_adapter("org/base") == ("org/base", None)
    with pytest.raises(InputError, match=r"MODEL\+ADAPTER"):
        hub.split_adapter("org/base+")


@pytest.mark.parametrize("ref", ["./nowhere", "/no/such/dir", "~/nowhere", "D:\\m\\expert", "a--b", "", "x/y/z", "a b"])
def test_what_is_neither_path_nor_id_is_said_so(ref: str) -> None:
    with pytest.raises(InputError, match="does not exist here and is not a Hub id"):
        open_checkpoint(ref)


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no revision: remove '@main'"):
        open_checkpoint(f"{tmp_path}@main")


def test_single_file(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "merge v1.safetensors")
    by_file, by_folder = open_checkpoint(tmp_path / "merge v1.safetensors"), open_checkpoint(tmp_path)
    assert by_file.keys() == by_folder.keys() and by_file.config == by_folder.config
    assert by_file.shards() == ["merge v1.safetensors"] and by_file.folder == tmp_path


def hub_cache(root: Path, family: str = "bert", shard_size: str = "4KB") -> Path:
    """A Hub cache as huggingface_hub lays it out: blobs by hash, snapshots of relative links."""
    repo = root / "models--org--name"
    plain = saved(root / "plain", family, shard_size)
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for i, path in enumerate(sorted(plain.iterdir())):
        shutil.move(path, repo / "blobs" / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{i:040x}")
    return snapshot


def test_hub_cache_is_read_offline_through_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ref in ("org/name", "org/name@main", f"org/name@{snapshot.name}"):
        ckpt = open_checkpoint(ref, cache_dir=tmp_path)
        assert ckpt.folder == snapshot and ckpt.check() == [] and len(ckpt.shards()) > 1
        assert ckpt.get(ckpt.keys()[0]).numel() > 0
    with pytest.raises(
        InputError, match="'org/other' is neither a folder here nor in the local cache, and HF_HUB_OFFLINE"
    ):
        open_checkpoint("org/other", cache_dir=tmp_path)


def _response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/org/name"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("no", response=_response(403)), ["'org/name'", "gated", "accept its licence", "HF_TOKEN"]),
        (RepositoryNotFoundError("no", response=_response(401)), ["'org/name'", "HTTP 401", "spelling", "private"]),
        (RepositoryNotFoundError("no", response=_response(404)), ["'org/name'", "HTTP 404", "spelling"]),
        (RevisionNotFoundError("no", response=_response(404)), ["'org/name'", "no revision 'v9'"]),
        (HfHubHTTPError("no", response=_response(403)), ["'org/name'", "refused", "HTTP 403", "token"]),
        (HfHubHTTPError("no", response=_response(503)), ["'org/name'", "HTTP 503", "later"]),
        (LocalEntryNotFoundError("no"), ["'org/name'", "cannot be reached", "hf download org/name"]),
        (httpx.ProxyError("bad proxy"), ["'org/name'", "ProxyError", "bad proxy"]),
        (OSError(28, "No space left on device"), ["'org/name'", "No space left"]),
    ],
)
def test_each_refusal_of_the_hub_is_one_sentence(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(InputError) as caught:
        open_checkpoint("org/name@v9")
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "hf_secret" not in message


def test_only_the_weights_that_will_be_read_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with indexed shards, a pickle copy, a GGUF and a consolidated copy: one format, one commit."""
    snapshot = hub_cache(tmp_path)
    asked: list[tuple[Any, Any, Any]] = []

    def fake(repo: str, *, revision: Any, cache_dir: Any, allow_patterns: Any, ignore_patterns: Any) -> str:
        asked.append((revision, allow_patterns, ignore_patterns))
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ckpt = open_checkpoint("org/name")
    (first, second) = asked
    assert first[0] is None and first[1] is None and {"*.safetensors", "*.bin", "*.gguf", "*.pth"} <= set(first[2])
    assert second == (snapshot.name, ckpt.shards(), None)


# ------------------------------------------------------------------------------------------------ damage


def test_truncated_data_header_and_pointer(tmp_path: Path) -> None:
    path = saved(tmp_path, "bert") / "model.safetensors"
    whole = path.read_bytes()
    for size, words in (
        (len(whole) - 10, "cut short: its header promises"),
        (50, "cut short inside its header"),
        (3, "cut short (3 bytes)"),
        (0, "cut short (0 bytes)"),
    ):
        path.write_bytes(whole[:size])
        message = one_problem(tmp_path)
        assert words in message and str(path) in message and "download it again" in message
        with pytest.raises(InputError, match="cut short"):
            open_checkpoint(tmp_path).keys()
    path.write_bytes(whole + b"tail")
    assert "is too long" in one_problem(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "git lfs pull" in one_problem(tmp_path)


def _file_with(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {**F32, "shape": [3]}}, "does not fill its 8 bytes"),
        ({"a": {**F32, "shape": [-2]}}, "not a natural number"),
        ({"a": {**F32, "shape": [2.0]}}, "not a natural number"),
        ({"a": {**F32, "shape": [True, 2]}}, "not a natural number"),
        ({"a": {**F32, "shape": "2"}}, "not a natural number"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, "lies at bytes 8 to 0"),
        ({"a": {**F32, "data_offsets": [0, 2**70]}}, "not a natural number"),
        ({"a": {**F32, "dtype": "Q9"}}, "unknown dtype 'Q9'"),
        ({"a": {**F32, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks its dtype, shape or offsets"),
        ({"a": 3}, "lacks its dtype, shape or offsets"),
        ({"a": F32, "b": F32}, "overlap at byte 0"),
        ({"a": {**F32, "shape": [1], "data_offsets": [4, 8]}}, "leave a hole at byte 4"),
        ([1, 2], "not a table"),
        (b"{nope", "not JSON"),
        (b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", "not JSON"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
         "names 'a' twice"),
    ],
)  # fmt: skip
def test_a_lying_header_is_refused(header: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_file_with(header, b"\0" * 8))
    problems = open_checkpoint(tmp_path).check()
    assert words in problems[0], problems
    with pytest.raises(InputError):
        open_checkpoint(tmp_path).keys()


@given(st.binary(max_size=200))
def test_random_bytes_never_crash_the_header_reader(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    assert header.problems or not header.entries


@given(st.data())
def test_one_flipped_header_byte_never_reads_outside_the_file(tmp_path: Path, data: st.DataObject) -> None:
    save_file({"a": torch.ones(4, 4), "b": torch.ones(8).half()}, tmp_path / "model.safetensors")
    raw = bytearray((tmp_path / "model.safetensors").read_bytes())
    at = data.draw(st.integers(0, len(raw) - 81))
    raw[at] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(raw)
    header = read_header(tmp_path / "model.safetensors")
    if not header.problems:
        ends = [entry.start + entry.nbytes for entry in header.entries.values()]
        assert max(ends, default=0) <= len(raw)


def test_index_that_lies(tmp_path: Path) -> None:
    folder = saved(tmp_path, shard_size="4KB")
    index = folder / "model.safetensors.index.json"
    truth = json.loads(index.read_text())
    shards = sorted(set(truth["weight_map"].values()))
    key = next(k for k, v in truth["weight_map"].items() if v == shards[1])

    def write(**changes: str) -> None:
        index.write_text(json.dumps({**truth, "weight_map": {**truth["weight_map"], **changes}}))

    write(ghost=shards[0])
    assert f"places 'ghost' in {shards[0]}, which lacks it" in one_problem(folder)
    write(**{key: shards[2]})
    assert f"places '{key}' in {shards[2]}, which lacks it" in one_problem(folder)
    write(ghost="model-99999-of-99999.safetensors")
    assert "model-99999-of-99999.safetensors is missing (named by model.safetensors.index.json)" in one_problem(folder)
    for outside in ("../secret.safetensors", "/etc/passwd", "a\\..\\b.safetensors", "C:/x.safetensors"):
        write(ghost=outside)
        assert "outside itself" in one_problem(folder)
    (folder / "link.safetensors").symlink_to("/etc/passwd")
    write(ghost="link.safetensors")
    assert "links to a file outside its folder" in one_problem(folder)
    write()
    (folder / "link.safetensors").unlink()
    shutil.copy(folder / shards[0], folder / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors is left from another save" in one_problem(folder)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path, shard_size="4KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    shards[1].unlink()
    with_twin = load_file(shards[2])
    with_twin[next(iter(load_file(shards[3])))] = torch.ones(1)
    save_file(with_twin, shards[2])
    problems = "\n".join(open_checkpoint(folder).check())
    assert f"{shards[0]} is cut short" in problems and f"{shards[1]} is missing" in problems
    assert f"is in both {shards[2].name} and {shards[3]}" in problems
    with pytest.raises(InputError, match=r"and \d more problems"):
        open_checkpoint(folder).keys()


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "\0", '{"x": 1}'])
def test_damaged_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index.json"):
        open_checkpoint(tmp_path)


def test_damaged_config_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(InputError, match=r"config.json is not valid JSON"):
        open_checkpoint(tmp_path)


def test_a_file_that_shrinks_while_in_use_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path, "bert") / "model.safetensors"
    ckpt = open_checkpoint(tmp_path)
    key = ckpt.keys()[-1]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RunError, match="changed while it was read"):
        ckpt.get(key)
    path.unlink()
    with pytest.raises(RunError, match=r"model.safetensors can no longer be read .*No such file"):
        ckpt.get(key)


def test_folders_without_usable_weights(tmp_path: Path) -> None:
    def folder(*names: str) -> str:
        path = tmp_path / "_".join(names or ("empty",))
        path.mkdir()
        for name in names:
            (path / name).write_bytes(b"{}")
        return str(path)

    cases = {
        folder(): "holds no weights",
        folder("adapter_config.json"): "is a PEFT adapter, not a full model",
        folder("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"): "shards but no",
        folder("a.safetensors", "b.safetensors"): "name the file to read",
        folder("model-Q4_K_M.gguf"): "only GGUF files",
        folder("tf_model.h5", "flax_model.msgpack"): "only as .h5, .msgpack",
    }
    for ref, words in cases.items():
        with pytest.raises(InputError, match=words):
            open_checkpoint(ref)


# ------------------------------------------------------------------------------------------------ quantised


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["(bitsandbytes)", "model.dequantize()"]),
        ({"load_in_8bit": True}, ["(bitsandbytes)"]),
        ({"quant_method": "gptq", "bits": 4}, ["(gptq)", "the full-precision model it was made from"]),
        ({"quant_method": "awq"}, ["(awq)"]),
        ({"quant_method": "fp8"}, ["(fp8)"]),
    ],
)
def test_quantised_config_is_refused(config: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": config}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q.weight": torch.zeros(8, 1, dtype=torch.uint8), "q.weight.absmax": torch.ones(1)}, "bitsandbytes"),
        ({"q.weight": torch.zeros(8, 8, dtype=torch.int8), "q.SCB": torch.ones(8)}, "bitsandbytes"),
        (
            {"q.qweight": torch.zeros(8, dtype=torch.int32), "q.qzeros": torch.zeros(2, dtype=torch.int32)},
            "GPTQ or AWQ",
        ),
        ({"q.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(1)}, "fp8"),
        ({"q.weight": torch.ones(4, 4).to(torch.float8_e5m2)}, "fp8"),
        ({"q.weight": torch.zeros(8, 8, dtype=torch.int8)}, "8-bit integers"),
    ],
)
def test_quantised_tensors_are_recognised_without_a_config(
    tensors: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    message = one_problem(tmp_path)
    assert words in message and "is quantised" in message
    with pytest.raises(InputError, match="is quantised"):
        open_checkpoint(tmp_path).keys()


def test_gguf_file_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"GGUF" + b"\0" * 100)
    assert "GGUF" in one_problem(tmp_path)
    with pytest.raises(InputError, match="GGUF"):
        open_checkpoint(tmp_path / "model.safetensors")


# ------------------------------------------------------------------------------------------------ pickles


def test_weights_only_pickle_with_shared_and_strided_tensors(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    state = {"a": weight, "tied": weight, "view": weight.T, "long": torch.arange(3)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.is_pickle and ckpt.keys() == list(state) and ckpt.check() == []
    for key, tensor in state.items():
        assert torch.equal(ckpt.get(key), tensor) and ckpt.get(key).is_contiguous()
    assert torch.equal(ckpt.rows("a", torch.tensor([5, 1])), weight[[5, 1]])
    before = ckpt.fingerprint()
    weight[3, 2] += 1
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).fingerprint() != before


def test_sharded_pickle(tmp_path: Path) -> None:
    weight_map = {}
    for i in range(4):
        name = f"pytorch_model-0000{i + 1}-of-00004.bin"
        torch.save({f"w{i}": torch.full((3,), float(i))}, tmp_path / name)
        weight_map[f"w{i}"] = name
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.keys() == ["w0", "w1", "w2", "w3"] and ckpt.check() == []
    assert [float(ckpt.get(f"w{i}")[0]) for i in (3, 0, 2, 1)] == [3, 0, 2, 1]
    weight_map["w9"] = weight_map["w3"]
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "places 'w9' in pytorch_model-00004-of-00004.bin, which lacks it" in one_problem(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch should-not-exist",)


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    cases: list[tuple[Any, str]] = [
        (nn.Linear(2, 2), "pickles whole objects"),
        ({"w": torch.ones(2), "x": Evil()}, "pickles whole objects"),
        ({"epoch": 3, "w": torch.ones(2)}, "more than a flat table of tensors"),
        ([torch.ones(2)], "more than a flat table of tensors"),
    ]
    for value, words in cases:
        torch.save(value, path)
        message = one_problem(tmp_path)
        assert words in message and "save_file(" in message
    path.write_bytes(pickle.dumps(Evil()))
    assert "pytorch_model.bin" in one_problem(tmp_path)
    assert not (tmp_path / "should-not-exist").exists()


def test_old_or_damaged_pickles(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(300)}, path, _use_new_zipfile_serialization=False)
    assert "old format" in one_problem(tmp_path)
    torch.save({"w": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short?" in one_problem(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1")
    assert "git lfs pull" in one_problem(tmp_path)


def test_safetensors_win_over_pickles_like_in_transformers(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    ckpt = open_checkpoint(tmp_path)
    assert not ckpt.is_pickle and "old" not in ckpt
    assert isinstance(ckpt, FileCheckpoint) and repr(ckpt) == f"FileCheckpoint('{tmp_path}')"
