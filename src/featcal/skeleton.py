"""A checkpoint as a network: the model on the meta device, with only the tensors of the moment loaded.

Resident at any time: the small tensors outside the blocks and one live block. Embeddings and heads stay in the file:
lookups read only the rows of the batch, a head is multiplied a slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import inference
from .errors import InputError
from .heap import trim_heap
from .names import KeyMap
from .network import Network, compute_dtype, resident_dtype

BIG = 2**20
"""Entries from which an embedding or a head outside the blocks stays in its file."""
SLICE = 4096
"""Rows of a head that are multiplied at once."""


class DiskNetwork(Network):
    """A network whose weights stay on disk. The key map's model is on the meta device (its buffers are real)."""

    def __init__(
        self,
        label: str,
        keymap: KeyMap,
        order: Sequence[str],
        device: torch.device,
        skip_stem: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
    ):
        model = keymap.model
        stored = [keymap.dtype(name) for name in keymap.parameters if name in keymap]
        super().__init__(label, model, order, device, skip_stem, dtype or compute_dtype(stored, device))
        self.keymap = keymap
        inside = tuple(f"{name}." for name in self.order)
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in model.named_buffers(remove_duplicate=False) if name in keymap]
        self._inside = {block: [n for n in names if n.startswith(f"{block}.")] for block in self.order}
        self._outside = [name for name in names if not name.startswith(inside)]
        self._aliases = _aliases(model)

    def stored_dtype(self, parameter: str) -> torch.dtype:
        return self.keymap.dtype(parameter)

    def parameters(self, block: str) -> Mapping[str, Tensor]:
        return _Lazy(self, block)

    @contextmanager
    def open(self) -> Iterator[Network]:
        lazy = self._lazy_modules()
        with ExitStack() as stack:
            stack.enter_context(inference(self.model))
            for name, forward in lazy.items():
                module = self.model.get_submodule(name)
                module.forward = forward
                stack.callback(module.__dict__.pop, "forward")
            served = {f"{name}.weight" for name in lazy}
            stack.enter_context(self._loaded([n for n in self._outside if n not in served], missing_is_fine=True))
            stack.enter_context(self.gate)
            yield self

    @contextmanager
    def block(self, name: str) -> Iterator[nn.Module]:
        with self._loaded(self._inside[name]):
            yield self.model.get_submodule(name)
        trim_heap()

    def load(self, name: str) -> Tensor:
        """One tensor on the device in the compute dtype."""
        tensor = self.keymap.tensor(name)
        dtype = resident_dtype(tensor.dtype, self.dtype, parameter=name in self.keymap.parameters)
        return tensor.to(self.device, dtype).contiguous()

    @contextmanager
    def _loaded(self, names: Sequence[str], missing_is_fine: bool = False) -> Iterator[None]:
        """The named tensors in the model; on the meta device again afterwards."""
        put: list[str] = []
        try:
            for name in names:
                if name in self.keymap:
                    self._put(name, self.load(name))
                    put.append(name)
                elif not missing_is_fine:
                    raise InputError(f"{self.label}: the checkpoint has no tensor for {name}, which its block needs")
            yield
        finally:
            for name in put:
                self._put(name, None)

    def _put(self, name: str, value: Tensor | None) -> None:
        """Set a tensor of the model, under all its tied names; None: back to the meta device."""
        if value is None:
            owner, _, leaf = name.rpartition(".")
            value = torch.empty_like(getattr(self.model.get_submodule(owner), leaf), device="meta")
        _put(self.model, self._aliases.get(name, (name,)), value)

    def _lazy_modules(self) -> dict[str, Callable[..., Tensor]]:
        """Stand-in forwards for the big embeddings and heads outside the blocks, which read from the file."""
        lazy: dict[str, Callable[..., Tensor]] = {}
        outside = set(self._outside)
        for name, module in self.model.named_modules():
            weight = f"{name}.weight"
            if weight not in outside or self.keymap.key(weight) is None:
                continue
            if self.model.get_parameter(weight).numel() < BIG:
                continue
            if type(module) is nn.Embedding and module.max_norm is None:
                lazy[name] = partial(self._look_up, weight)
            elif type(module) is nn.Linear and module.bias is None:
                lazy[name] = partial(self._multiply, weight)
        return lazy

    def _look_up(self, weight: str, ids: Tensor) -> Tensor:
        rows = self.keymap.rows(weight, ids.reshape(-1).cpu())
        rows = rows.to(self.device, self.dtype)
        return rows.reshape(*ids.shape, rows.shape[-1])

    def _multiply(self, weight: str, x: Tensor) -> Tensor:
        rows = self.keymap.tensor(weight)
        parts = [F.linear(x, rows[i : i + SLICE].to(x.device, x.dtype)) for i in range(0, len(rows), SLICE)]
        return torch.cat(parts, dim=-1)


class _Lazy(Mapping[str, Tensor]):
    """A block's parameters, each read when asked for."""

    def __init__(self, network: DiskNetwork, block: str):
        self._network, self._block = network, block

    def __getitem__(self, name: str) -> Tensor:
        return self._network.load(f"{self._block}.{name}")

    def __iter__(self) -> Iterator[str]:
        prefix = f"{self._block}."
        return (name.removeprefix(prefix) for name in self._network._inside[self._block])

    def __len__(self) -> int:
        return len(self._network._inside[self._block])


def fill_with_stand_ins(model: nn.Module, seed: int = 0) -> None:
    """Give every meta parameter values that need no memory: overlapping windows of one short random buffer.

    Good for finding out how a model runs (order, groups, rows), from its config alone.
    """
    longest = max((sum(p.shape) * 3 + 3 for p in model.parameters()), default=1)
    buffer = torch.randn(longest, generator=torch.Generator().manual_seed(seed)).mul_(0.05)

    @cache
    def ordinary(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.05)

    for name, names in _aliases(model).items():
        shape = model.get_parameter(name).shape
        if len(shape) == 3:  # packed experts: grouped matmul wants ordinary rows, so only the experts coincide
            _put(model, names, ordinary(shape[1:]).expand(shape))
            continue
        strides = tuple(3 if i + 1 < len(shape) else 1 for i in range(len(shape)))
        _put(model, names, buffer.as_strided(shape, strides))


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter name, all names of the same (tied) parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def _put(model: nn.Module, names: Sequence[str], value: Tensor) -> None:
    """Set a parameter or buffer under all its (tied) names."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = parameter
        else:
            module._buffers[leaf] = value
