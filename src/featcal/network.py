"""A model as the engine sees it: its blocks become resident, in the compute dtype and on the device, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _existing(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device '{name}': torch knows no such device; write auto, cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device '{name}': torch sees {count or 'no'} CUDA GPUs here; write auto or cpu")
    return device


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On a CPU half precision is computed in float32 (bf16 matmul can be 500 times slower there); else as stored."""
    if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


class Network:
    """A whole model in memory. Parameters that must move or change dtype do so only while they are resident."""

    def __init__(
        self,
        label: str,
        model: nn.Module,
        order: Sequence[str],
        device: torch.device,
        skip_stem: tuple[str, ...] = (),
    ):
        self.label, self.model, self.order, self.device = label, model, list(order), device
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
            stack.enter_context(_placed(outside, self.device))
            stack.enter_context(self.gate)
            yield self

    @contextmanager
    def block(self, name: str) -> Iterator[nn.Module]:
        """The block with its weights resident."""
        module = self.model.get_submodule(name)
        with _placed(_tensors(module), self.device):
            yield module

    def parameters(self, block: str) -> Mapping[str, Tensor]:
        """The block's parameters by their names in it, on the device in the compute dtype; for reading."""
        named = self.model.get_submodule(block).named_parameters()
        return {name: p.data.to(self.device, compute_dtype(p.dtype, self.device)) for name, p in named}

    def stored_dtype(self, parameter: str) -> torch.dtype:
        """The dtype in which a parameter (full name) is kept when it is not resident."""
        return self._stored[parameter]

    def forward(self, batch: Any, block: str, state: State) -> Any:
        """The block's output on a batch; `state` holds the outputs of earlier blocks (any device)."""
        return to_device(self.gate.run(batch, block, to_device(state, self.device), self.device), torch.device("cpu"))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def _placed(tensors: list[Tensor], device: torch.device) -> Iterator[None]:
    """Tensors on the device and floats in the compute dtype; the very same storage is put back afterwards."""
    originals = [(t, t.data) for t in tensors]
    try:
        for tensor in tensors:
            dtype = compute_dtype(tensor.dtype, device) if tensor.is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(device, dtype)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and dicts moved to the device; other values as they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(v, device) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    return value
