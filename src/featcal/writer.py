"""Files that are whole or absent, and the output folder, which appears by one rename when all of it is there.

Untouched tensors are copied byte for byte; headers, shard names and the index are the merged model's own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from .errors import InputError, RunError
from .formats import PICKLES
from .headers import header_bytes, read_header
from .hub import WEIGHT_FILES
from .reader import SAFE, SAFE_INDEX, Checkpoint, inside, load_entry

Change = Tensor | tuple[Path, str]
"""The new value of a tensor: itself, or (safetensors file, name in it)."""

_TEMPORARY = ".featcal-tmp"
_BUFFER = 1 << 24
# In sub-folders only whole-model exports are weights; a module's own .safetensors or .bin there belongs to the model.
_EXPORTS = tuple(p for p in WEIGHT_FILES if p not in ("*.safetensors", "*.bin", "*.pt"))
_EXPORT_FOLDERS = ("original", "onnx", "openvino", "coreml")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_NOT_COPIED = (".git", ".cache", ".huggingface")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at `path` complete and on disk, or not at all; its mode follows the umask.

    Raises:
        RunError: the disk is full or refuses, in one sentence.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with disk_errors(path):
        try:
            # Opened, not mkstemp'ed: the system then applies the umask to 0666.
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any layout or device, one at a time, atomically; widest dtypes first, so all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in order}
    with atomic_write(path) as file:
        file.write(header_bytes(entries, dict(metadata or {})))
        for name in order:
            _write_tensor(file, tensors[name])


def assemble(merged: Checkpoint, changed: Mapping[str, Change], folder: Path) -> list[Path]:
    """Write the shards of `merged` into `folder` with some tensors replaced; the index comes last.

    Names, dtypes, shapes, order and shard assignment are those of `merged`; what is not in `changed` keeps its bits.
    One tensor is in memory at a time. Pickles come out as safetensors of the same shard layout.

    Returns:
        The files written.
    """
    unknown = set(changed) - set(merged.keys())
    assert not unknown, f"not in {merged.name}: {sorted(unknown)[:3]}"
    names = {shard: _output_name(shard, len(merged.shards())) for shard in merged.shards()}
    for shard, name in names.items():
        with atomic_write(folder / name) as file:
            file.write(merged.shard_header(shard))
            for key in merged.shard_keys(shard):
                _write_tensor(file, _value(merged, changed, key))
    written = [folder / name for name in names.values()]
    index = _index(merged, names)
    if index is not None:
        with atomic_write(folder / SAFE_INDEX) as file:
            file.write(index)
        written.append(folder / SAFE_INDEX)
    return written


def _value(merged: Checkpoint, changed: Mapping[str, Change], key: str) -> Tensor:
    change = changed.get(key)
    if change is None:
        return merged.get(key)
    tensor = change if isinstance(change, Tensor) else _from_file(*change)
    expected = (merged.dtype(key), merged.shape(key))
    assert (tensor.dtype, tuple(tensor.shape)) == expected, f"{key}: {tensor.dtype}, {tensor.shape} ≠ {expected}"
    return tensor


def _from_file(path: Path, key: str) -> Tensor:
    header = read_header(path)
    if header.problems:
        raise RunError(header.problems[0])
    return load_entry(path, header.entries[key])


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(data.numpy().data)


def _output_name(shard: str, count: int) -> str:
    """The safetensors name of a shard: its own, or that of the same place for a pickle."""
    if not shard.endswith(PICKLES):
        return shard
    if count == 1:
        return SAFE
    return re.sub(r"^pytorch_model", "model", shard).rsplit(".", 1)[0] + ".safetensors"


def _index(merged: Checkpoint, names: Mapping[str, str]) -> bytes | None:
    """The merged model's own index where it still tells the truth, else a new one; None for a single file."""
    weight_map = {key: names[merged.shard_of(key)] for key in merged.keys()}  # noqa: SIM118
    old = merged.index or {}
    raw = merged.index_bytes()
    if raw is not None and old["weight_map"] == weight_map:
        return raw
    if len(names) == 1:
        return None
    metadata = {**old.get("metadata", {}), "total_size": sum(merged.nbytes(key) for key in weight_map)}
    table = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


class SideFiles(NamedTuple):
    """Relative names of what was copied, and of what was left behind because it holds (stale) weights."""

    copied: list[str]
    left: list[str]


def side_files(source: Path) -> SideFiles:
    """What a copy of the folder takes along besides weights, sub-folders included, and what it leaves."""
    found = SideFiles([], [])
    for folder, subfolders, files in os.walk(source):
        subfolders[:] = sorted(name for name in subfolders if name not in _NOT_COPIED)
        for name in list(subfolders):
            if (Path(folder) / name).is_symlink():
                subfolders.remove(name)
                found.left.append((Path(folder) / name).relative_to(source).as_posix())
        for name in sorted(files):
            relative = (Path(folder) / name).relative_to(source)
            (found.left if _is_weights(relative) else found.copied).append(relative.as_posix())
    return found


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one run at a time works on an output; the lock goes with the process, however it ends.

    Raises:
        InputError: another run holds it, or there can be no such folder.
    """
    path = folder / "lock"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder")
    while True:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another run is working on {folder}; wait for it, or name another output") from None
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue  # the run that held it has just ended and taken its folder away
            yield
            return


class OutputFolder:
    """The folder OUT while it is being made, in a hidden sibling that survives interruption.

    `work` is for state that the final folder does not keep (journal, block shards); `out` becomes OUT by rename.

    Args:
        final: OUT.
        inputs: every folder or file that is read; OUT may not be, contain or lie in any of them.
        overwrite: whether a non-empty OUT may be replaced (it is, at the very end).

    Raises:
        InputError: OUT is not a place where a new folder may appear.
    """

    def __init__(self, final: str | Path, inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
        self.final = Path(final).expanduser().resolve()
        self.part = self.final.with_name(f".{self.final.name}.featcal-part")
        self.work, self.out = self.part / "work", self.part / "out"
        self._old = self.final.with_name(f".{self.final.name}.featcal-old")
        self.overwrite = overwrite
        self._refuse_bad_place(str(final))
        for path in inputs:
            self._refuse_input(path)

    def _refuse_bad_place(self, shown: str) -> None:
        if not self.final.name or Path.cwd().resolve().is_relative_to(self.final):
            raise InputError(f"OUT '{shown}' holds the current folder: name a new folder")
        if self.final.exists() and not self.final.is_dir():
            raise InputError(f"OUT '{shown}' is a file: name a new folder")
        if self.final.is_dir() and any(self.final.iterdir()) and not self.overwrite:
            raise InputError(f"OUT '{shown}' is not empty: name a new folder, or replace this one with --overwrite")
        parent = next(p for p in self.final.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"OUT '{shown}' cannot be made, because {parent} is not a writable folder")

    def _refuse_input(self, path: Path) -> None:
        real = path.expanduser().resolve()
        over = real.is_relative_to(self.final)
        if over or (real.is_dir() and self.final.is_relative_to(real)):
            how = "is" if real == self.final else "contains" if over else "lies inside"
            raise InputError(f"OUT '{self.final}' {how} the input '{path}', which must stay intact: name a new folder")

    def prepare(self, need: int = 0) -> None:
        """Make the hidden folder (an earlier run's is kept), after checking for `need` free bytes.

        Raises:
            RunError: too little space; states both numbers.
        """
        self._restore()
        problem = space_problem(self.final, need)
        if problem:
            raise RunError(problem)
        with disk_errors(self.part):
            self.work.mkdir(parents=True, exist_ok=True)
            self.out.mkdir(exist_ok=True)
            for leftover in self.part.rglob(f".*{_TEMPORARY}"):
                leftover.unlink()

    def _restore(self) -> None:
        """Put OUT back if a run died between its last two renames. Without a new one (`out`), the user removed OUT."""
        if self.out.exists() and self._old.exists() and not self.final.exists():
            os.replace(self._old, self.final)

    def start_over(self) -> None:
        """Forget what an earlier run left in the hidden folder, which itself stays: it holds the lock.

        Raises:
            RunError: something there cannot be removed.
        """
        self._restore()
        for folder in (self.work, self.out):
            if folder.exists():
                with disk_errors(folder):
                    shutil.rmtree(folder)

    def discard(self) -> None:
        """Remove the hidden folder, and the OUT that a new one has replaced."""
        shutil.rmtree(self._old, ignore_errors=True)
        shutil.rmtree(self.part, ignore_errors=True)

    def copy_side_files(self, source: Path) -> SideFiles:
        """Copy every file of `source` that is not weights, sub-folders included, byte for byte.

        Links are followed and become files, if they stay in `source` or in the Hub cache that it belongs to.

        Raises:
            InputError: a link that leaves `source` (it might name any file of the user).
        """
        result = side_files(source)
        for name in result.copied:
            self._copy(source, Path(name))
        return result

    def _copy(self, source: Path, relative: Path) -> None:
        path = source / relative
        if not inside(source, path):
            raise InputError(f"{path} links to a file outside its folder: replace the link by the file itself")
        target = self.out / relative
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as original, atomic_write(target) as copy:
            shutil.copyfileobj(original, copy, _BUFFER)

    def publish(self) -> Path:
        """Make `out` the final folder by rename, then drop the hidden one. Returns the final path."""
        with disk_errors(self.final):
            for folder, _, _ in os.walk(self.out):
                _sync_folder(Path(folder))
            if self.final.exists():
                shutil.rmtree(self._old, ignore_errors=True)
                os.replace(self.final, self._old)
            os.replace(self.out, self.final)
            _sync_folder(self.final.parent)
        self.discard()
        return self.final


def space_problem(path: Path, need: int) -> str | None:
    """A sentence when the volume of `path` has fewer than `need` free bytes, else None."""
    parent = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free >= need:
        return None
    return f"the volume of {path} has {free / 1e9:.2f} GB free and {need / 1e9:.2f} GB are needed: free some space"


def _is_weights(relative: Path) -> bool:
    """Whether a file holds (a copy of) the model's weights, which would be stale beside the calibrated ones."""
    name = relative.name
    if name.endswith((".safetensors.index.json", ".bin.index.json")) and len(relative.parts) == 1:
        return True
    if len(relative.parts) == 1:
        return name not in _NOT_WEIGHTS and any(fnmatch(name, pattern) for pattern in WEIGHT_FILES)
    exports = WEIGHT_FILES if relative.parts[0] in _EXPORT_FOLDERS else _EXPORTS
    return any(fnmatch(name, pattern) for pattern in exports)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into one sentence; finished work stays for the next run."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cause = f"the volume of {path} is full: free some space"
        else:
            cause = f"{error.filename or path}: {error.strerror or error}; check the disk and its permissions"
        raise RunError(f"{cause}, then run the same command again to go on from here") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut (where folders can be synced)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
