"""What every upstream merger shares: typed parameters, a name in the registry, the tensor-by-tensor contract.

A data-free merger maps task vectors τ_i = θ_i − θ_0 to one merged task vector; the merged tensor is θ_0 plus
it. Most look at one tensor of each model at a time. Those that need a number from all tensors first (TIES)
get it in `prepare`, which may read the tensors several times but never holds more than one of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import InputError, nearest

Kind = Literal["linear", "conv1d", "embedding", "norm", "other"]
"""What a tensor is in its module. `conv1d` is GPT-2's linear with a transposed weight (in, out)."""


@dataclass(frozen=True)
class Deltas:
    """The task vectors of one tensor: `tau` is (N, *shape), in the dtype of the mathematics."""

    name: str
    kind: Kind
    tau: Tensor
    note: Callable[[str], None] = lambda _: None
    """Records what a user should know of this tensor, e.g. that the method could not be applied to it."""

    @property
    def is_matrix(self) -> bool:
        return self.tau.ndim == 3


class Stream(Protocol):
    """The task vectors of all tensors that are merged.

    Each iteration is a new pass over them, in the same order.
    """

    @property
    def tasks(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __iter__(self) -> Iterator[Deltas]: ...


@dataclass(frozen=True)
class InMemory:
    """A stream of task vectors that are already there."""

    deltas: list[Deltas]

    @property
    def tasks(self) -> int:
        return len(self.deltas[0].tau)

    @property
    def dtype(self) -> torch.dtype:
        return self.deltas[0].tau.dtype

    def __iter__(self) -> Iterator[Deltas]:
        return iter(self.deltas)


class Ready(Protocol):
    """A merger that has seen what it needs from all tensors and can merge each one alone."""

    def merge_delta(self, deltas: Deltas) -> Tensor:
        """The merged task vector (shape of one tensor) of the task vectors `deltas`."""
        ...


class Merger(BaseModel):
    """Parameters of one method. Subclasses add fields and either `merge_delta` or `prepare`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: ClassVar[str]
    needs: ClassVar[Literal["weights", "inputs", "scores"]] = "weights"
    """weights: nothing but the checkpoints; inputs: unlabelled samples; scores: samples and a head."""

    exclude: tuple[str, ...] = Field((), description="globs on tensor names that keep the base's value")

    def excludes(self, name: str) -> bool:
        """Whether the tensor called `name` keeps the base's value by the user's wish."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    @property
    def wants_kinds(self) -> bool:
        """Whether the result depends on what each tensor is (linear, norm, …), not only on its shape."""
        return False

    def prepare(self, stream: Stream) -> Ready:
        """Whatever the method needs from all tensors. Nothing by default."""
        return self

    def check(self, tasks: int) -> None:
        """Raise `InputError` when the parameters do not fit this number of experts."""

    def merge_delta(self, deltas: Deltas) -> Tensor:
        """The merged task vector (shape of one tensor) of the task vectors `deltas`."""
        raise AssertionError(f"{self.method} does not merge tensor by tensor")

    def merge_tensor(self, name: str, base: Tensor, experts: list[Tensor], *, module_kind: Kind = "other") -> Tensor:
        """One tensor of the merged model, in the base's dtype; float32 or wider inside.

        Tensors that no expert changed, and tensors that are not floating point, are returned as they are in
        the base. Methods that need a global pass take one over this tensor alone.
        """
        if not base.is_floating_point() or all(torch.equal(expert, base) for expert in experts):
            return base.clone()
        self.check(len(experts))
        deltas = Deltas(name, module_kind, task_vectors(base, experts, work_dtype(base.dtype)))
        return add(base, self.prepare(InMemory([deltas])).merge_delta(deltas))


class MatrixMerger(Merger):
    """Methods for matrices: subclasses give `merge_matrix` and `scale`. Other tensors get the mean of τ_i.

    `keep_mean` names matrices that get the mean as well; GPT-2's transposed weights are turned to (out, in)
    first.
    """

    keep_mean: tuple[str, ...] = Field((), description="globs on matrices that get the mean of τ_i")
    scale: float = 1.0

    def merge_delta(self, deltas: Deltas) -> Tensor:
        if not deltas.is_matrix or any(fnmatchcase(deltas.name, pattern) for pattern in self.keep_mean):
            return deltas.tau.mean(0) * self.scale
        if deltas.kind != "conv1d":
            return self.merge_matrix(deltas) * self.scale
        turned = replace(deltas, kind="linear", tau=deltas.tau.mT.contiguous())
        return self.merge_matrix(turned).mT * self.scale

    def merge_matrix(self, deltas: Deltas) -> Tensor:
        """The merged task vector (out, in), before `scale`, of task vectors (N, out, in)."""
        raise NotImplementedError


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the mathematics on tensors of `dtype`: float32, or float64 when they are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def task_vectors(base: Tensor, experts: list[Tensor], work: torch.dtype) -> Tensor:
    """τ_i = θ_i − θ_0 as (N, *shape), computed in `work`."""
    anchor = base.to(work)
    tau = torch.empty((len(experts), *base.shape), dtype=work, device=base.device)
    for i, expert in enumerate(experts):
        torch.sub(expert.to(base.device, work), anchor, out=tau[i])
    return tau


def add(base: Tensor, delta: Tensor) -> Tensor:
    """θ_0 + τ in the wider dtype, then in the base's own."""
    return (base.to(delta.dtype) + delta).to(base.dtype)


REGISTRY: dict[str, type[Merger]] = {}
"""Every method by the name it has in a recipe."""

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {}
"""Other tools' names: the method and the parameters they stand for."""

_M = TypeVar("_M", bound=type[Merger])


def register(name: str, **aliases: dict[str, Any]) -> Callable[[_M], _M]:
    """Class decorator: make a method available as `name`, and as each alias with some parameters preset."""

    def add_to_registry(cls: _M) -> _M:
        cls.method = name
        REGISTRY[name] = cls
        ALIASES.update({alias: (name, preset) for alias, preset in aliases.items()})
        return cls

    return add_to_registry


def get_merger(name: str, params: Mapping[str, Any] | None = None) -> Merger:
    """The method `name` with `params` over its defaults.

    Raises:
        InputError: an unknown method or parameter (the nearest known one is named), or a value out of range.
    """
    params = dict(params or {})
    if name in ALIASES:
        target, preset = ALIASES[name]
        return get_merger(target, {**preset, **params})
    if name not in REGISTRY:
        known = [*REGISTRY, *ALIASES]
        raise InputError(f"unknown merge method '{name}'{nearest(name, known)}; known: {', '.join(sorted(known))}")
    cls = REGISTRY[name]
    for key in params:
        if key not in cls.model_fields:
            hint = nearest(key, cls.model_fields)
            fields = ", ".join(cls.model_fields)
            raise InputError(f"merge method '{name}' has no parameter '{key}'{hint}; it takes: {fields}")
    try:
        return cls(**params)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *(str(part) for part in first["loc"])])
        raise InputError(f"{where}: {first['msg'].lower()} (got {first['input']!r})") from None


def merger_from(spec: str | Mapping[str, Any]) -> Merger:
    """The method of a recipe's `merged:` entry: a name, or a mapping with `method` and its parameters."""
    if isinstance(spec, str):
        return get_merger(spec)
    if "method" not in spec:
        raise InputError(f"a merge needs 'method', one of {', '.join(sorted(REGISTRY))}; got {dict(spec)!r}")
    return get_merger(str(spec["method"]), {key: value for key, value in spec.items() if key != "method"})


def per_task(value: float | tuple[float, ...], tasks: int, what: str) -> list[float]:
    """One number per task from a number for all or a list with one for each.

    Raises:
        InputError: the list is not as long as there are tasks.
    """
    if isinstance(value, tuple):
        if len(value) != tasks:
            raise InputError(
                f"{what} lists {len(value)} numbers for {tasks} experts; give one for each, or one for all"
            )
        return list(value)
    return [value] * tasks
