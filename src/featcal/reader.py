"""Checkpoints on disk, opened lazily: headers first, then single tensors or single rows of them.

`open_checkpoint` finds the weights of a folder, a file or a Hub id; nothing is loaded until a tensor is asked for.
Quantised, pickled-object and damaged files are recognised from the files themselves and refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .errors import InputError, RunError
from .formats import PICKLES, format_problem, pointer_problem, quantised_tensors, refuse_quantised_config, unpickle
from .headers import NAMES, Entry, Header, header_bytes, read_header
from .hub import locate

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}\.(safetensors|bin)")
_SAMPLE = 4096  # bytes hashed at the start, middle and end of each tensor
_MAP_FROM = 1 << 20  # smaller tensors are read: a mapping costs a file descriptor and at least a page
_MAX_MAPS = 256  # live mappings; beyond, tensors are read, so that file descriptors never run out
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Checkpoint(ABC):
    """Named tensors of one model on disk; they come on the CPU, in the file's dtype.

    Attributes:
        name: the reference as the user wrote it, for messages.
        folder: where config.json and the tokenizer lie.
    """

    name: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or an empty dict when there is none."""
        return read_json(self.folder / "config.json") if (self.folder / "config.json").exists() else {}

    @abstractmethod
    def keys(self) -> list[str]:
        """Tensor names, shard by shard in file order."""

    @abstractmethod
    def shape(self, key: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, key: str) -> torch.dtype: ...

    @abstractmethod
    def shard_of(self, key: str) -> str:
        """Name of the file, relative to `folder`, that holds `key`."""

    @abstractmethod
    def shard_metadata(self, shard: str) -> dict[str, str]:
        """The `__metadata__` of that file's header; empty for pickles."""

    def shard_keys(self, shard: str) -> list[str]:
        """The names in that file, in file order."""
        return [key for key in self.keys() if self.shard_of(key) == shard]

    def shard_header(self, shard: str) -> bytes:
        """The first bytes of a safetensors file that holds the shard's tensors in the order of `shard_keys`."""
        entries = {key: (self.dtype(key), self.shape(key)) for key in self.shard_keys(shard)}
        return header_bytes(entries, self.shard_metadata(shard) or {"format": "pt"})

    @property
    def index(self) -> dict[str, Any] | None:
        """The parsed index file (`weight_map`, `metadata`), or None for a single file."""
        return None

    def index_bytes(self) -> bytes | None:
        """The safetensors index file as it is, or None when there is none."""
        return None

    @abstractmethod
    def get(self, key: str) -> Tensor:
        """The whole tensor, as a private memory map where possible: unused pages cost nothing, writes stay local."""

    @abstractmethod
    def rows(self, key: str, index: Tensor) -> Tensor:
        """`get(key)[index]` for a 1-D `index`, touching only those rows of the file (for embeddings)."""

    @abstractmethod
    def check(self) -> list[str]:
        """Every problem that headers, names and sizes show, one full sentence each; no weights are read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of names, sizes, headers and a few KiB of every tensor: another model, or an edited one, differs.

        Not a checksum of all bytes: reading every byte of every expert would cost more than calibrating.
        """

    def __contains__(self, key: object) -> bool:
        return key in self._key_set

    @cached_property
    def _key_set(self) -> frozenset[str]:
        return frozenset(self.keys())

    def nbytes(self, key: str) -> int:
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def shards(self) -> list[str]:
        """Names of the weight files in the order in which `keys` meets them."""
        return list(dict.fromkeys(self.shard_of(key) for key in self.keys()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def open_checkpoint(ref: str | Path, *, cache_dir: str | Path | None = None) -> FileCheckpoint:
    """Open the full model that `ref` names: a folder, a weight file, a Hub id or `id@revision`.

    An existing path wins over a Hub id of the same spelling. For adapters see `adapters.open_model`.

    Raises:
        InputError: nothing there, no access, or weights in a form that cannot be calibrated.
    """
    name = str(ref)
    path = locate(name, cache_dir=cache_dir)
    return FileCheckpoint(path, name)


class _Layout(NamedTuple):
    """Which files hold the weights of a folder."""

    files: list[str]
    index_path: Path | None


class FileCheckpoint(Checkpoint):
    """A model in safetensors (one file or indexed shards) or in weights-only pickles (`pytorch_model*.bin`)."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name if name is not None else str(path)
        if path.is_dir():
            self.folder = path
            refuse_quantised_config(self.name, self.config)
            self._layout = _find_weights(path, self.name, self.config)
        else:
            self.folder = path.parent
            problem = format_problem(path)
            if problem:
                raise InputError(problem)
            refuse_quantised_config(self.name, self.config)
            self._layout = _Layout([path.name], None)
        self._pickles: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The parsed index file (`weight_map`, `metadata`), or None for a single file."""
        return read_json(self._layout.index_path) if self._layout.index_path else None

    @property
    def index_path(self) -> Path | None:
        return self._layout.index_path

    @property
    def is_pickle(self) -> bool:
        return self._layout.files[0].endswith(PICKLES) if self._layout.files else False

    def path_of(self, key: str) -> Path:
        return self.folder / self.shard_of(key)

    def entry(self, key: str) -> Entry:
        """Where `key` lies in its file; the offset is -1 in pickles."""
        return self._table[key][1]

    def keys(self) -> list[str]:
        return list(self._table)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self.entry(key).dtype

    def shard_of(self, key: str) -> str:
        return self._table[key][0]

    def shards(self) -> list[str]:
        return list(self._layout.files)

    def shard_metadata(self, shard: str) -> dict[str, str]:
        return dict(self._scan.headers[shard].metadata) if shard in self._scan.headers else {}

    def shard_header(self, shard: str) -> bytes:
        if self.is_pickle:
            return super().shard_header(shard)
        with (self.folder / shard).open("rb") as file:
            length = file.read(8)
            return length + file.read(int.from_bytes(length, "little"))

    def index_bytes(self) -> bytes | None:
        path = self.index_path
        return path.read_bytes() if path is not None and not self.is_pickle else None

    def get(self, key: str) -> Tensor:
        if self.is_pickle:
            return self._unpickled(self.shard_of(key))[key].contiguous()
        return load_entry(self.path_of(key), self.entry(key))

    def rows(self, key: str, index: Tensor) -> Tensor:
        entry = self.entry(key)
        wanted, back = index.reshape(-1).unique(return_inverse=True)
        if wanted.numel() and not (int(wanted[0]) >= 0 and int(wanted[-1]) < entry.shape[0]):
            raise IndexError(f"row {int(wanted[-1])} of '{key}', which has {entry.shape[0]} rows")
        if self.is_pickle or 4 * len(wanted) > entry.shape[0]:
            return self.get(key)[index.reshape(-1)]
        # A gather from a map would fault in a megabyte around every row, so seek and read instead.
        step = entry.nbytes // entry.shape[0]
        buffer = torch.empty(len(wanted), step, dtype=torch.uint8)
        with _opened(self.path_of(key)) as file:
            for row, into in zip(wanted.tolist(), buffer.numpy(), strict=True):
                _read_into(file, entry.start + row * step, into)
        return buffer.view(entry.dtype).view(len(wanted), *entry.shape[1:])[back]

    def check(self) -> list[str]:
        problems = list(self._scan.problems)
        try:
            _ = self.config
        except InputError as error:
            problems.append(str(error))
        return problems

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for shard in self.shards():
            path = self.folder / shard
            digest.update(f"{shard} {path.stat().st_size}\n".encode())
            header = self._scan.headers.get(shard)
            digest.update(header.digest.encode() if header else b"")
        for key in self.keys():
            digest.update(key.encode())
            for sample in self._samples(key):
                digest.update(sample)
        return digest.hexdigest()

    def _samples(self, key: str) -> list[bytes]:
        entry = self.entry(key)
        starts = sorted({0, max(0, entry.nbytes // 2), max(0, entry.nbytes - _SAMPLE)})
        if self.is_pickle:
            data = self.get(key).reshape(-1).view(torch.uint8)
            return [data[at : at + _SAMPLE].numpy().tobytes() for at in starts]
        with _opened(self.path_of(key)) as file:
            samples = []
            for at in starts:
                file.seek(entry.start + at)
                samples.append(file.read(min(_SAMPLE, entry.nbytes - at)))
        return samples

    @cached_property
    def _scan(self) -> _Scan:
        return _Scan(self)

    @cached_property
    def _table(self) -> dict[str, tuple[str, Entry]]:
        problems = self._scan.problems
        if problems:
            more = f" (and {len(problems) - 1} more problems in '{self.name}')" if len(problems) > 1 else ""
            raise InputError(problems[0] + more)
        return self._scan.table

    def _unpickled(self, shard: str) -> dict[str, Tensor]:
        """The state dict of one pickle, memory-mapped; the two last used ones stay open."""
        if shard not in self._pickles:
            self._pickles[shard] = unpickle(self.folder / shard)
            while len(self._pickles) > 2:
                self._pickles.popitem(last=False)
        self._pickles.move_to_end(shard)
        return self._pickles[shard]


class _Scan:
    """One pass over all headers: the table of tensors, and everything that is wrong."""

    def __init__(self, checkpoint: FileCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.table: dict[str, tuple[str, Entry]] = {}
        self.headers: dict[str, Header] = {}
        self.problems: list[str] = []
        self.quantised: dict[str, str] = {}
        for shard in checkpoint.shards():
            self._read(shard)
        if checkpoint.index_path is not None:
            self._compare_index(checkpoint.index_path)
        sign = quantised_tensors({k: e.dtype for k, (_, e) in self.table.items()}, self.quantised)
        if sign:
            self.problems.append(f"'{checkpoint.name}' {sign}")

    def _read(self, shard: str) -> None:
        problem = _escape_problem(self.checkpoint.folder, shard) if self.checkpoint.index_path else None
        path = self.checkpoint.folder / shard
        if not problem and not path.is_file():
            by = f" (named by {self.checkpoint.index_path.name})" if self.checkpoint.index_path else ""
            problem = f"{path} is missing{by}: download it again"
        if problem:
            self.problems.append(problem)
            return
        entries: dict[str, Entry] = {}
        if self.checkpoint.is_pickle:
            try:
                for key, tensor in self.checkpoint._unpickled(shard).items():
                    nbytes = tensor.numel() * tensor.dtype.itemsize
                    entries[key] = Entry(tensor.dtype, tuple(tensor.shape), -1, nbytes)
                    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                        self.quantised[key] = str(tensor.dtype)
                    elif tensor.dtype not in NAMES:
                        self.problems.append(f"{path}: '{key}' is {tensor.dtype}, which safetensors cannot hold")
            except InputError as error:
                self.problems.append(str(error))
        else:
            header = read_header(path)
            self.headers[shard] = header
            self.problems += header.problems
            self.quantised |= header.quantised
            entries = dict(sorted(header.entries.items(), key=lambda item: item[1].start))
        for key, entry in entries.items():
            if key in self.table:
                self.problems.append(f"tensor '{key}' is in both {self.table[key][0]} and {path}: remove one of them")
            self.table[key] = (shard, entry)

    def _compare_index(self, index: Path) -> None:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        sound = {shard for shard, header in self.headers.items() if not header.problems}
        sound |= set(self.checkpoint._pickles)
        absent: dict[str, list[str]] = {}
        for key, shard in weight_map.items():
            if shard in sound and self.table.get(key, ("",))[0] != shard and key not in self.quantised:
                absent.setdefault(shard, []).append(key)
        for shard, keys in absent.items():
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            self.problems.append(f"{index} places '{keys[0]}'{more} in {shard}, which lacks it: download both again")
        named = set(weight_map.values())
        families = {(m[1], m[2]) for m in map(_SHARD.fullmatch, named) if m}
        for path in sorted(self.checkpoint.folder.iterdir()):
            match = _SHARD.fullmatch(path.name)
            if match and (match[1], match[2]) in families and path.name not in named:
                self.problems.append(f"{path} is left from another save ({index.name} does not name it): move it away")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table from an untrusted file.

    Raises:
        InputError: unreadable, not JSON, or not a table.
    """
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        problem = pointer_problem(path, raw[:32]) or f"{path} is not valid JSON ({error}): download it again"
        raise InputError(problem) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON table: download it again")
    return value


def load_entry(path: Path, entry: Entry) -> Tensor:
    """One tensor of a safetensors file: a private map of just its bytes, or a copy when small or unaligned.

    A map of its own, rather than of the whole file, leaves the resident set as soon as the tensor is freed.
    """
    with _opened(path) as file:
        if entry.nbytes < _MAP_FROM or len(_maps) >= _MAX_MAPS or entry.start % entry.dtype.itemsize:
            buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
            _read_into(file, entry.start, buffer.numpy())
            return buffer.view(entry.dtype).view(entry.shape)
        skip = entry.start % mmap.ALLOCATIONGRANULARITY
        length, offset = entry.nbytes + skip, entry.start - skip
        view = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=offset)
    _maps.add(view)
    count = math.prod(entry.shape)
    return torch.frombuffer(view, dtype=entry.dtype, count=count, offset=skip).view(entry.shape)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """An input file whose header was read before: if it fails now, it was moved, changed or its disk is gone."""
    try:
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can no longer be read ({error}): run again when it is back in place") from error


def _read_into(file: Any, start: int, buffer: Any) -> None:
    file.seek(start)
    if file.readinto(buffer) != buffer.nbytes:
        raise RunError(f"{file.name} changed while it was read: run again without touching the input files")


def _find_weights(folder: Path, name: str, config: dict[str, Any]) -> _Layout:
    """The files that transformers would load, in its order of preference."""
    explicit = config.get("transformers_weights")
    candidates = [explicit] if isinstance(explicit, str) else [SAFE, SAFE_INDEX, BIN, BIN_INDEX]
    for candidate in candidates:
        problem = _escape_problem(folder, candidate) if candidate is explicit else None
        if problem:
            raise InputError(problem)
        path = folder / candidate
        if path.is_file() or path.is_symlink():
            if candidate.endswith(".index.json"):
                return _Layout(_indexed_files(path), path)
            return _Layout([candidate], None)
    found = sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors")
    found = [n for n in found if not n.startswith("adapter_")]
    if len(found) == 1:
        return _Layout(found, None)
    raise InputError(_no_weights(folder, name, found))


def _no_weights(folder: Path, name: str, found: list[str]) -> str:
    if (folder / "adapter_config.json").exists():
        return f"'{name}' is a PEFT adapter, not a full model: give it as MODEL+ADAPTER or as an expert"
    if any(_SHARD.fullmatch(n) for n in found):
        return f"'{name}' has shards but no {SAFE_INDEX}: download the index too"
    if found:
        return f"'{name}' holds {len(found)} safetensors files and no {SAFE_INDEX}: name the file to read"
    others = sorted({p.suffix for p in folder.iterdir() if p.suffix in (".gguf", ".h5", ".msgpack", ".onnx", ".pth")})
    if ".gguf" in others:
        return f"'{name}' holds only GGUF files (quantised, for llama.cpp): give the safetensors model they come from"
    if others:
        return f"'{name}' holds weights only as {', '.join(others)}: save it with transformers' save_pretrained"
    return f"'{name}' holds no weights ({SAFE}, {SAFE_INDEX} or {BIN}): is it the right folder, fully downloaded?"


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map: download it again")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{index} has a weight_map with values that are not file names: download it again")
    return sorted(set(weight_map.values()))


def _escape_problem(folder: Path, name: str) -> str | None:
    """Names come from files that others made: they must stay inside the folder (or the Hub cache's own blobs)."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or PureWindowsPath(name).drive or "\0" in name:
        return f"{folder} names a weight file outside itself ({name!r}): do not trust this checkpoint"
    if not inside(folder, folder / name):
        return f"{folder / name} links to a file outside its folder: replace the link by the file itself"
    return None


def inside(folder: Path, path: Path) -> bool:
    """Whether `path`, links followed, stays in `folder`; links of the Hub cache into its blobs count as inside."""
    root, real = folder.resolve(), path.resolve()
    if real.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
