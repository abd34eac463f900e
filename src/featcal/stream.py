"""The activations of one network on one task's batches, carried from block to block."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .blocks import State, stack_of
from .errors import InputError, RunError
from .network import Network

MODEL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What a model's forward raises on data that it cannot read."""


class DiskStates(MutableSequence[State]):
    """States kept in files, one per batch, for activations that outgrow the memory budget.

    Raises:
        RunError: the disk is full or refuses.
    """

    def __init__(self, folder: Path, count: int):
        self._files = [folder / f"{i:06d}.pt" for i in range(count)]
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            self[index] = {}

    def __getitem__(self, index: Any) -> Any:
        with _disk_errors(self._files[index]):
            return torch.load(self._files[index], weights_only=True)

    def __setitem__(self, index: Any, value: Any) -> None:
        with _disk_errors(self._files[index]):
            torch.save(value, self._files[index])

    def __delitem__(self, index: Any) -> None:
        raise TypeError("states are replaced, not removed")

    def insert(self, index: int, value: State) -> None:
        raise TypeError("one state per batch")

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its archive format
        raise RunError(
            f"activations cannot be kept in {path} ({str(error).splitlines()[0]}): free some space there, or leave out "
            "--max-memory; the same command goes on from the last finished block"
        ) from error


class Stream:
    """Per batch, the output of the last finished block of each stack (on the CPU, or on disk below `folder`)."""

    def __init__(self, network: Network, batches: Sequence[Any], task: str, folder: Path | None = None):
        self.network, self.batches, self.task = network, batches, task
        self.states: MutableSequence[State]
        self.states = [{} for _ in batches] if folder is None else DiskStates(folder, len(batches))

    def forward(self, block: str, index: int, *, keep: bool) -> Any:
        """Run the (resident) block on one batch; with `keep`, its output becomes the batch's state."""
        try:
            output = self.network.forward(self.batches[index], block, self.states[index])
        except InputError:
            raise
        except MODEL_ERRORS as error:
            raise InputError(
                f"task '{self.task}', batch {index}: {self.network.label} refuses it in block {block}: {error}"
            ) from error
        if keep:
            self.states[index] = {**self.states[index], stack_of(block): output}
        return output
