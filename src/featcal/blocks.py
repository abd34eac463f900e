"""Find a model's blocks and let the model drive itself through them, one live block at a time.

The model's own `forward` runs on every pass: blocks that are done return their stack's last stored output, the live
block runs, and the pass stops there. Masks, rotary tables, position biases and encoder states therefore reach the live
block exactly as in an ordinary forward, on any architecture, without a saved argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .errors import InputError

State = dict[str, Any]
"""Per stack, the output of its last finished block: all that a pass needs besides the batch."""


class _Stop(BaseException):
    """Ends a forward pass on purpose. Not an Exception, so that no model's own handler catches it."""


def stack_of(block: str) -> str:
    """The stack (list of blocks) that `block` belongs to: the dotted name without its last part."""
    return block.rpartition(".")[0]


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Names of the model's blocks, in registration order (`record` gives the order of execution).

    Blocks are the outermost transformers layers (`GradientCheckpointingLayer`), else members of a ModuleList whose
    class is in `_no_split_modules`, else whatever the globs in `patterns` name.

    Raises:
        InputError: nothing was found, or a pattern matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    if patterns:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(f"blocks: no module of {type(model).__name__} matches '{pattern}'")
        return _outermost([name for name in names if any(fnmatchcase(name, p) for p in patterns)])
    modules = dict(model.named_modules())
    found = [name for name in names if isinstance(modules[name], GradientCheckpointingLayer)]
    if not found:
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        found = [
            name
            for name in names
            if type(modules[name]).__name__ in kinds and isinstance(modules.get(stack_of(name)), nn.ModuleList)
        ]
    if not found:
        raise InputError(
            f"no transformer blocks found in {type(model).__name__}; name them, e.g. blocks=['encoder.layers.*']"
        )
    return _outermost(found)


def _outermost(names: list[str]) -> list[str]:
    chosen = set(names)

    def nested(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in chosen for i in range(1, len(parts)))

    return [name for name in names if not nested(name)]


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `model(...)` for a batch: a dict, a tensor, or a tuple led by either.

    Items of a tuple after the first are labels by custom; they are never read.
    """
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise InputError(f"a batch must be a dict, a tensor, or a tuple led by one; got {type(batch).__name__}")


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    args, kwargs = inputs_of(batch)
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    raise InputError("a batch holds no tensor; give dicts of tensors, tensors, or tuples led by either")


def cut(batch: Any, rows: int, start: int = 0) -> Any:
    """The samples `start` to `rows` of a batch."""
    size = batch_size(batch)
    args, kwargs = inputs_of(batch)

    def part(value: Any) -> Any:
        return value[start:rows] if isinstance(value, Tensor) and value.dim() and len(value) == size else value

    return {key: part(value) for key, value in kwargs.items()} if kwargs else part(args[0])


def call_model(model: nn.Module, batch: Any, device: torch.device | None = None) -> Any:
    """The model's own forward on a batch, its tensors moved to `device` and floats cast to the model's dtype."""
    args, kwargs = inputs_of(batch)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and not p.is_meta), torch.float32)

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return model(*map(place, args), **{name: place(value) for name, value in kwargs.items()})


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no key-value cache; everything is put back afterwards."""
    training = {module: module.training for module in model.modules()}
    found = (getattr(module, "config", None) for module in model.modules())
    configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "use_cache")}
    caching = {key: config.use_cache for key, config in configs.items()}
    model.eval()
    for config in configs.values():
        config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for key, config in configs.items():
            config.use_cache = caching[key]


class Gate:
    """Drives a model through its blocks. Use as a context manager: the blocks' forwards are replaced meanwhile."""

    def __init__(self, model: nn.Module, order: Sequence[str]):
        self.model = model
        self.order = list(order)
        self._rank = {name: i for i, name in enumerate(self.order)}
        self._live = -1
        self._state: State = {}
        self._output: Any = None
        self._stem_shapes: dict[tuple[str, torch.Size], torch.Size] = {}
        self.skip_stem: tuple[str, ...] = ()
        """Costly modules ahead of the blocks (a patch embedding's convolution) whose output only the first block reads:
        once that block is done they return a stand-in of the right shape. `proofs.skippable_stem` proves which."""

    def __enter__(self) -> Gate:
        replacements = [(name, self._forward) for name in self.order] + [(name, self._stem) for name in self.skip_stem]
        self._own: list[tuple[nn.Module, Any]] = []
        for name, replacement in replacements:
            module = self.model.get_submodule(name)
            self._own.append((module, vars(module).get("forward")))
            module.forward = partial(replacement, name, module.forward)
        return self

    def __exit__(self, *exc: object) -> None:
        for module, forward in self._own:
            del module.forward  # the class's own method shows again
            if forward is not None:  # or the instance's own: users and libraries (accelerate) set such
                module.forward = forward

    def _stem(self, name: str, real: Callable[..., Any], x: Tensor) -> Tensor:
        if self._live > 0 and (name, x.shape) in self._stem_shapes:
            return x.new_zeros(1).expand(self._stem_shapes[name, x.shape])
        output: Tensor = real(x)
        self._stem_shapes[name, x.shape] = output.shape
        return output

    def _forward(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rank = self._rank[name]
        if rank < self._live:
            return self._state[stack_of(name)]
        assert rank == self._live, f"block {name} ran out of order"
        self._output = real(*map(_no_cache, args), **{key: _no_cache(value) for key, value in kwargs.items()})
        raise _Stop

    def run(self, batch: Any, block: str, state: State, device: torch.device | None = None) -> Any:
        """Output of `block` on a batch, all earlier blocks returning `state`. None when `stop` ended it early."""
        self._live, self._state, self._output = self._rank[block], state, None
        try:
            call_model(self.model, batch, device)
        except _Stop:
            return self._output
        finally:
            self._state = {}
        raise AssertionError(f"block {block} did not run")

    def finish(self, batch: Any, state: State, device: torch.device | None = None) -> Any:
        """The model's output once every block is done: the tail (final norm, head) on the stored outputs."""
        with self.finished(state):
            return call_model(self.model, batch, device)

    @contextmanager
    def finished(self, state: State) -> Iterator[None]:
        """Any forward of the model inside this context takes every block as done."""
        self._live, self._state = len(self.order), state
        try:
            yield
        finally:
            self._state = {}

    @staticmethod
    def stop() -> None:
        """For hooks inside the live block: all that was wanted has been seen."""
        raise _Stop


def _no_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value
