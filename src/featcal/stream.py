"""The activations of one network on one task's batches, carried from block to block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import State, stack_of
from .errors import InputError
from .network import Network

MODEL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What a model's forward raises on data that it cannot read."""


class Stream:
    """Per batch, the output of the last finished block of each stack (on the CPU)."""

    def __init__(self, network: Network, batches: Sequence[Any], task: str):
        self.network, self.batches, self.task = network, batches, task
        self.states: list[State] = [{} for _ in batches]

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
