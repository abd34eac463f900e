"""Mergers that need whole models in memory, with gradients: what they are given, and the copy they differentiate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..blocks import inference
from .base import Merger, work_dtype
from .heads import Scores


@dataclass
class WholeModels:
    """Base, experts, their unlabelled batches and scores; `names` are the parameters to merge."""

    base: nn.Module
    experts: Mapping[str, nn.Module]
    data: Mapping[str, Sequence[Any]]
    names: Sequence[str]
    device: torch.device
    scores: Mapping[str, Scores] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter

    def __post_init__(self) -> None:
        self._base = dict(self.base.named_parameters())
        self._experts = {task: dict(expert.named_parameters()) for task, expert in self.experts.items()}
        self.dtype = work_dtype(self._base[self.names[0]].dtype)

    def base_value(self, name: str) -> Tensor:
        """A parameter of the base, on the device, float32 or float64."""
        return self._base[name].detach().to(self.device, self.dtype)

    def tau(self, task: str, name: str) -> Tensor:
        """A task vector of one parameter, on the device, float32 or float64."""
        return self._experts[task][name].detach().to(self.device, self.dtype) - self.base_value(name)


class ModelMerger(Merger):
    """Methods that look at predictions."""

    needs: ClassVar = "scores"

    def merge_models(self, models: WholeModels) -> dict[str, Tensor]:
        """New values of `models.names`."""
        raise NotImplementedError


@contextmanager
def trainable_copy(model: nn.Module, device: torch.device, names: Collection[str] | None = None) -> Iterator[nn.Module]:
    """A float32 (or float64) copy on the device, in evaluation mode, gradients for `names` (all when left out)."""
    own = copy.deepcopy(model)
    with inference(own):
        dtype = next((p.dtype for p in own.parameters() if p.is_floating_point()), torch.float32)
        own.to(device, work_dtype(dtype))
        for name, p in own.named_parameters():
            p.requires_grad_(names is None or name in names)
        with torch.enable_grad():
            yield own
