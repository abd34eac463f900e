"""The tensors of a merge by their keys on disk: what the experts call them, and the merged ones on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..headers import read_header
from ..plan import Model
from ..reader import Checkpoint
from ..writer import Change, write_safetensors
from .base import Merger
from .drive import Kind, module_kinds

ROUNDS = 40
"""Signs of progress in a pass over all tensors, at most."""
FIELDS = ("exclude", "keep_mean")
"""Parameters of methods that are globs on tensor names."""


@dataclass(frozen=True)
class Renamed:
    """A checkpoint under other names; what is not named is not there."""

    checkpoint: Checkpoint
    names: Mapping[str, str]

    def keys(self) -> Iterable[str]:
        return self.names.keys()

    def get(self, key: str) -> Tensor:
        return self.checkpoint.get(self.names[key])

    def dtype(self, key: str) -> torch.dtype:
        return self.checkpoint.dtype(self.names[key])


class Names:
    """The base's tensors by their keys on disk.

    Attributes:
        own: keys to merge, in the order in which the file needs them.
        shared: further keys of tied tensors that the file holds twice → the one that is merged, the embedding's.
    """

    def __init__(self, base: Model) -> None:
        self.base = base
        self._names = _names_by_key(base)
        self.shared: dict[str, str] = {}
        for name, anchor in base.keymap.tied.items():
            one, other = base.keymap.key(name), base.keymap.key(anchor)
            if one is not None and other is not None and one != other:
                self.shared[one] = other
        self.own = list(dict.fromkeys(map(self.first, base.checkpoint.keys())))

    def first(self, key: str) -> str:
        """The key under which a tied tensor is merged."""
        return self.shared.get(key, key)

    def kinds(self) -> dict[str, Kind]:
        """What each tensor is, as far as the model knows it by one key."""
        kinds = module_kinds(self.base.keymap.model)
        named = {self.base.keymap.key(name): kind for name, kind in kinds.items()}
        return {key: kind for key, kind in named.items() if key is not None}

    def in_file(self, task: str, expert: Model, notes: list[str]) -> Renamed:
        """An expert under the base's keys. What it has and the base has not is left out, with a note."""
        found = {}
        for key in self.own:
            keys = (expert.keymap.key(name) for name in self._names.get(key, ()))
            own = key if key in expert.checkpoint else next((k for k in keys if k is not None), None)
            if own is not None:
                found[key] = own
        self._note_rest(task, expert, found, notes)
        return Renamed(expert.checkpoint, found)

    def _note_rest(self, task: str, expert: Model, found: Mapping[str, str], notes: list[str]) -> None:
        used, theirs, extra = set(found.values()), _names_by_key(expert), []
        for key in expert.checkpoint.keys():  # noqa: SIM118
            if key in used:
                continue
            keys = [self.base.keymap.key(name) for name in theirs.get(key, ())]
            home = next((self.first(k) for k in keys if k is not None), None)
            if home is None:
                extra.append(key)
            elif home in found and not torch.equal(expert.checkpoint.get(key), expert.checkpoint.get(found[home])):
                notes.append(f"{key}: is {home} in the base; '{task}' has other values there, which are left out")
        if extra:
            more = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
            notes.append(f"{extra[0]}{more} of '{task}' are left out, the base has none such")

    def spelt_out(self, method: Merger) -> Merger:
        """The method with its globs replaced by keys. A glob may name a tensor as the file or as the model calls it."""
        update = {}
        for field in set(FIELDS) & set(type(method).model_fields):
            patterns = getattr(method, field)
            keys = [key for key in self.own if _matches(patterns, key, *self._names.get(key, ()))]
            update[field] = tuple(map(escape, keys))
        return method.model_copy(update=update)


def excluded_parameters(method: Merger, base: Model) -> tuple[str, ...]:
    """The globs of `exclude`, which may name keys of the file, spelt out as names of the model's parameters."""
    chosen = [n for n in base.keymap.parameters if _matches(method.exclude, n, *base.keymap.keys(n))]
    return tuple(map(escape, chosen))


def _matches(patterns: Sequence[str], *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _names_by_key(model: Model) -> dict[str, list[str]]:
    """Names in the model of the tensors that it takes from the file as they are."""
    names: dict[str, list[str]] = {}
    for name in model.keymap.sources:
        key = model.keymap.key(name)
        if key is not None:
            names.setdefault(key, []).append(name)
    return names


class MergedTensors(Mapping[str, Change]):
    """Every tensor of a merge, to be asked for once each in the base's order: computed then, one at a time.

    Args:
        stream: (key, tensor) for all of `names.own` that are not in `ready`, in order.
        ready: what needs no computing.
        folder: where matrices are kept, so that an interrupted merge can go on; None: nowhere.
    """

    def __init__(
        self,
        stream: Iterator[tuple[str, Tensor]],
        names: Names,
        ready: Mapping[str, Change],
        folder: Path | None = None,
    ) -> None:
        self._stream, self._names, self._ready, self._folder = stream, names, dict(ready), folder
        self._tied = set(names.shared.values())
        self._kept = 0 if folder is None else len(list(folder.glob("*.safetensors")))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.base.checkpoint.keys())

    def __len__(self) -> int:
        return len(self._names.own) + len(self._names.shared)

    def get(self, key: str, default: Any = None) -> Any:
        # Not the inherited one, which would take a KeyError from inside a merge for "unchanged".
        return self[key]

    def __getitem__(self, key: str) -> Change:
        first = self._names.first(key)
        if first in self._ready:
            return self._ready[first]
        name, tensor = next(self._stream)
        assert name == first, f"{first} was asked for, {name} is next"
        if first in self._tied:
            self._ready[first] = tensor
        if self._folder is not None and tensor.dim() == 2:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(self._folder / f"{self._kept:06d}.safetensors", {name: tensor})
            self._kept += 1
        return tensor


def finished_tensors(folder: Path) -> dict[str, Change]:
    """What an interrupted merge has kept in a folder."""
    found: dict[str, Change] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {key: (path, key) for key in read_header(path).entries}
    return found


def in_rounds(
    stream: Iterator[tuple[str, Tensor]], count: int, bar: Callable[[Sequence[range]], Iterable[range]]
) -> Iterator[tuple[str, Tensor]]:
    """The `count` items of a stream, with a sign of progress now and then."""
    step = max(1, -(-count // ROUNDS))
    for part in bar([range(start, min(start + step, count)) for start in range(0, count, step)]):
        for _ in part:
            yield next(stream)
