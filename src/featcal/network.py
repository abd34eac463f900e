"""A model as the engine sees it: its blocks become resident, in the compute dtype and on the device, one at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Gate, State, inference
from .errors import InputError


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """`auto` is the local rank's GPU when there is one, else the CPU.

    Raises:
        InputError: there is no such device.
    """
    if str(device) != "auto":
        return _existing(str(device))
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _existing(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device '{name}': torch knows no such device; write auto, cpu, cuda or cuda:N") from None
    if device.type == "mps":
        raise InputError("device 'mps': sums are kept in float64, which Apple GPUs cannot; write cpu")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device '{name}': torch sees {count or 'no'} CUDA GPUs here; write auto or cpu")
    return device


def compute_dtype(stored: Iterable[torch.dtype], device: torch.device) -> torch.dtype:
    """The one dtype in which all models of a job compute: the narrowest that holds every stored one without loss.

    One for all, because the models read each other's states, and because a file may mix dtypes (bfloat16 matrices with
    float32 norms) that PyTorch does not multiply with each other. On a CPU at least float32: products of half precision
    can be 500 times slower there.
    """
    dtypes = [dtype for dtype in stored if dtype.is_floating_point and dtype.itemsize > 1]
    if not dtypes:
        return torch.float32
    return functools.reduce(torch.promote_types, dtypes, torch.float32 if device.type == "cpu" else dtypes[0])


def common_dtype(models: Iterable[nn.Module], device: torch.device) -> torch.dtype:
    """`compute_dtype` of models in memory."""
    return compute_dtype([p.dtype for model in models for p in model.parameters()], device)


class Network:
    """A whole model in memory. Parameters that must move or change dtype do so only while they are resident.

    `dtype` is the one that all networks of a job compute in; by default what holds this model's own parameters.
    """

    def __init__(
        self,
        label: str,
        model: nn.Module,
        order: Sequence[str],
        device: torch.device,
        skip_stem: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
    ):
        self.label, self.model, self.order, self.device = label, model, list(order), device
        self.dtype = dtype or common_dtype([model], device)
        self.gate = Gate(model, order)
        self.gate.skip_stem = skip_stem
        self._stored = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}

    @contextmanager
    def open(self) -> Iterator[Network]:
        """Everything outside the blocks resident, the gate in place; all is put back afterwards."""
        inside = {id(p) for name in self.order for p in _tensors(self.model.get_submodule(name))}
        outside = [t for t in _tensors(self.model) if id(t) not in inside]
        with ExitStack() as stack:
            stack.enter_context(inference(self.model))
            stack.enter_context(_placed(outside, self.device, self.dtype))
            stack.enter_context(self.gate)
            yield self

    @contextmanager
    def block(self, name: str) -> Iterator[nn.Module]:
        """The block with its weights resident."""
        module = self.model.get_submodule(name)
        with _placed(_tensors(module), self.device, self.dtype):
            yield module

    def parameters(self, block: str) -> Mapping[str, Tensor]:
        """The block's parameters by their names in it, on the device in the compute dtype; for reading."""
        named = self.model.get_submodule(block).named_parameters()
        return {name: p.data.to(self.device, resident_dtype(p.dtype, self.dtype)) for name, p in named}

    def stored_dtype(self, parameter: str) -> torch.dtype:
        """The dtype in which a parameter (full name) is kept when it is not resident."""
        return self._stored[parameter]

    def forward(self, batch: Any, block: str, state: State) -> Any:
        """The block's output on a batch; `state` holds the outputs of earlier blocks (any device)."""
        own = to_device(state, self.device, copy=True)  # a block may change its input in place
        return to_device(self.gate.run(batch, block, own, self.device), torch.device("cpu"))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def _placed(tensors: list[Tensor], device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Tensors on the device and floats in the compute dtype; the very same storage is put back afterwards."""
    originals = [(t, t.data) for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(
                device, resident_dtype(tensor.dtype, dtype, parameter=isinstance(tensor, nn.Parameter))
            )
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def resident_dtype(stored: torch.dtype, dtype: torch.dtype, *, parameter: bool = True) -> torch.dtype:
    """The dtype that a parameter or buffer has while its model computes in `dtype`.

    Parameters have that one. Buffers wider than half precision stay as they are: rotary tables are kept in float32
    beside bfloat16 weights on purpose.
    """
    if not stored.is_floating_point or stored.itemsize == 1:
        return stored
    return dtype if parameter or stored.itemsize < 4 else stored


def to_device(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Tensors inside tuples, lists and dicts moved (or with `copy` copied) to the device; other values as they are."""
    if isinstance(value, Tensor):
        return value.to(device, copy=copy)
    if isinstance(value, dict):
        return {key: to_device(v, device, copy=copy) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device, copy=copy) for v in value)
    return value
