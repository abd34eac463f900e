"""Run a data-free merger over checkpoints or state dicts: one tensor of each model at a time.

Tensors that cannot be merged keep the base's value, and every such tensor is written to `notes`: other
vocabulary or class rows in an expert, or a tensor an expert does not have. Integer tensors, and tensors that
no expert changed, are the base's bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import InputError, RunError
from .base import Deltas, Kind, Merger, add, task_vectors


class Checkpoint(Protocol):
    """What a merge reads from a model: its tensor names, and one tensor or dtype by name."""

    def keys(self) -> Iterable[str]: ...

    def get(self, key: str) -> Tensor: ...

    def dtype(self, key: str) -> torch.dtype: ...


FEW = 3
"""Missing tensors of one expert that are noted one by one; more are counted (a text tower has hundreds)."""

_T = TypeVar("_T")
Experts = Mapping[str, _T] | Sequence[_T]
"""By task name, or in order (then called "expert 1", "expert 2", …)."""


def named(experts: Experts[_T]) -> dict[str, _T]:
    """Experts by name, in order.

    Raises:
        InputError: there are none.
    """
    if not experts:
        raise InputError("a merge needs at least one expert")
    if isinstance(experts, Mapping):
        return dict(experts)
    return {f"expert {i}": expert for i, expert in enumerate(experts, 1)}


def merge_checkpoints(
    method: Merger,
    base: Checkpoint,
    experts: Experts[Checkpoint],
    *,
    kinds: Mapping[str, Kind] | None = None,
    device: torch.device | str = "cpu",
    notes: list[str] | None = None,
    skip: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the merged model but those in `skip`, in the base's order and dtype, on the CPU.

    Memory: one tensor of each model, in float32 (float64 when the base has float64), and the method's own
    work. `kinds` says what each tensor is (`module_kinds`); it matters for Conv1D weights and for DARE's
    `linear_only`.

    Raises:
        InputError: no common tensors, shapes that do not match, or values that are not finite.
        RunError: finite inputs, but a merged tensor that is not (it overflows the base's dtype).
    """
    job = _Job(
        method,
        base,
        named(experts),
        dict(kinds or {}),
        torch.device(device),
        notes if notes is not None else [],
        frozenset(skip),
    )
    return job.run()


def merge_state_dicts(
    method: Merger,
    base: Mapping[str, Tensor],
    experts: Experts[Mapping[str, Tensor]],
    *,
    kinds: Mapping[str, Kind] | None = None,
    device: torch.device | str = "cpu",
    notes: list[str] | None = None,
) -> dict[str, Tensor]:
    """`merge_checkpoints` on state dicts; the result is on the CPU."""
    sources = {name: _Held(expert) for name, expert in named(experts).items()}
    return dict(merge_checkpoints(method, _Held(base), sources, kinds=kinds, device=device, notes=notes))


def module_kinds(model: nn.Module) -> dict[str, Kind]:
    """What each parameter is, by its name in the model (which may be on the meta device)."""
    kinds: dict[str, Kind] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds[f"{prefix}.{name}" if prefix else name] = _kind(module, parameter)
    return kinds


def _kind(module: nn.Module, parameter: Tensor) -> Kind:
    if parameter.ndim == 2 and isinstance(module, nn.Linear):
        return "linear"
    if parameter.ndim == 2 and isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in type(module).__name__.lower() else "other"


@dataclass(frozen=True)
class _Held:
    """A state dict as a checkpoint."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get(self, key: str) -> Tensor:
        return self.tensors[key].detach()

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].dtype


@dataclass
class _Job:
    """One merge.

    Iterating it is one pass over the task vectors of the tensors that are merged (a `Stream`).
    """

    method: Merger
    base: Checkpoint
    experts: dict[str, Checkpoint]
    kinds: dict[str, Kind]
    device: torch.device
    notes: list[str]
    skip: frozenset[str] = frozenset()
    names: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)

    @property
    def tasks(self) -> int:
        return len(self.experts)

    @property
    def dtype(self) -> torch.dtype:
        wide = any(self.base.dtype(name) == torch.float64 for name in self.names)
        return torch.float64 if wide else torch.float32

    def run(self) -> Iterator[tuple[str, Tensor]]:
        assert self.kinds or not self.method.wants_kinds, f"{self.method.method} needs `kinds` for these parameters"
        self.method.check(self.tasks)
        self.names = self._mergeable()
        ready = self.method.prepare(self)
        wanted, work = set(self.names), self.dtype
        for name in self.base.keys():  # noqa: SIM118
            if name in self.skip:
                continue
            start = self.base.get(name)
            deltas = self._read(name, start, work) if name in wanted else None
            if deltas is None or not deltas.tau.any():
                yield name, start.to("cpu", copy=True)
                continue
            try:
                merged = add(start.to(self.device), ready.merge_delta(deltas))
            except torch.linalg.LinAlgError as error:
                self._refuse_non_finite(name, start, deltas)
                raise RunError(f"{self.method.method} failed on tensor '{name}': {error}") from None
            if not merged.isfinite().all():
                self._refuse_non_finite(name, start, deltas)
                raise RunError(f"the merged tensor '{name}' overflows {start.dtype}; use a base in a wider dtype")
            yield name, merged.cpu()

    def __iter__(self) -> Iterator[Deltas]:
        work = self.dtype
        for name in self.names:
            deltas = self._read(name, self.base.get(name), work)
            if deltas is not None:
                yield deltas

    def _mergeable(self) -> list[str]:
        """Floating-point tensors that every model has and the user does not exclude, in the base's order."""
        floats = [name for name in self.base.keys() if self.base.dtype(name).is_floating_point]  # noqa: SIM118
        chosen = [name for name in floats if not self.method.excludes(name)]
        if not chosen:
            raise InputError(f"'exclude' ({', '.join(self.method.exclude)}) leaves no tensor to merge")
        for expert, source in self.experts.items():
            own = set(source.keys())
            missing = [name for name in chosen if name not in own]
            if len(missing) == len(chosen):
                raise InputError(
                    f"'{expert}' has none of the base's tensors (base: '{chosen[0]}', …; '{expert}': "
                    f"'{next(iter(own), 'nothing')}', …); is it a model of the same architecture?"
                )
            self._keep_missing(expert, [name for name in missing if name not in self.kept])
        return [name for name in chosen if name not in self.kept]

    def _read(self, name: str, start: Tensor, work: torch.dtype) -> Deltas | None:
        """The task vectors of one tensor, or None when it has to keep the base's value."""
        if name in self.kept:
            return None
        tensors = []
        for expert, source in self.experts.items():
            tensor = source.get(name)
            if tensor.shape != start.shape:
                self._keep_rows_or_refuse(name, expert, start, tensor)
                return None
            tensors.append(tensor)
        tau = task_vectors(start.to(self.device), tensors, work)
        return Deltas(name, self.kinds.get(name, "other"), tau, note=lambda text: self._note(f"{name}: {text}"))

    def _keep_rows_or_refuse(self, name: str, expert: str, start: Tensor, other: Tensor) -> None:
        if start.ndim != other.ndim or start.ndim == 0 or start.shape[1:] != other.shape[1:]:
            raise InputError(
                f"'{expert}' has shape {tuple(other.shape)} for tensor '{name}', the base "
                f"{tuple(start.shape)}; only models of the same architecture can be merged"
            )
        self._keep(name, f"'{expert}' has {other.shape[0]} rows, the base {start.shape[0]} (vocabulary or classes)")

    def _keep_missing(self, expert: str, names: list[str]) -> None:
        if len(names) <= FEW:
            for name in names:
                self._keep(name, f"'{expert}' does not have it")
            return
        self.kept.update(names)
        self._note(
            f"{len(names)} tensors keep the base's value, '{expert}' does not have them: "
            f"{', '.join(names[:FEW])}, … {names[-1]}"
        )

    def _keep(self, name: str, reason: str) -> None:
        if name not in self.kept:
            self.kept.add(name)
            self._note(f"{name}: keeps the base's value, {reason}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _refuse_non_finite(self, name: str, start: Tensor, deltas: Deltas) -> None:
        if not start.isfinite().all():
            raise InputError(f"tensor '{name}' of the base has values that are not finite")
        for expert, tau in zip(self.experts, deltas.tau, strict=True):
            if not tau.isfinite().all():
                raise InputError(f"tensor '{name}' of '{expert}' has values that are not finite")
