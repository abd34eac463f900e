"""The side that is calibrated: a merged model's streams, sums and new weights under one choice of settings.

Several students can walk through the blocks side by side (the tuner's candidates); the experts then run only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .dist import Comm
from .moments import GroupSums, Module, NormMoments, Pool, TaskMoments, cheaper_form
from .network import Network
from .settings import Calibration
from .solve import anchor
from .stream import Stream
from .targets import (
    OTHER_TOKENS,
    Capture,
    Group,
    Norm,
    Unit,
    as_matrix,
    keep_rows,
    normalise,
    select_rows,
    tensor_of,
    weight_view,
)
from .update import LinearParameters, NormPart, Record, update_group, update_norm


@dataclass
class Lesson:
    """What an expert shows for one batch: the inputs of its groups (by first module) and its modules' outputs."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass
class Student:
    """One merged model on its way to being calibrated."""

    settings: Calibration
    network: Network
    streams: Mapping[str, Stream]
    """By task; over the same batches as the experts' streams."""
    walks: Mapping[str, Sequence[int]]
    """By task, indices of the batches on which this student walks through the blocks."""
    ends: Mapping[str, Sequence[int]]
    """Of these, the ones whose final features are wanted: they alone pass the last block."""
    comm: Comm = field(default_factory=Comm)
    pool: Pool | None = None
    """Sums to use again; students of one job share theirs."""
    overrides: dict[str, Tensor] = field(default_factory=dict)
    """New parameters of the current block, by their name in it, in the dtype in which they are saved."""

    def begin(self, name: str, units: Sequence[Unit], block: nn.Module, base: Mapping[str, Tensor]) -> None:
        """Empty sums for some units of a block. `base`: the base's parameters of the block, by name."""
        self._name, self._units, self._block, self._base = name, list(units), block, base
        self._pool = self.pool = self.pool or Pool(self.network.device)
        self._linears: dict[str, LinearParameters] = {}
        self._sums: dict[str, GroupSums] = {}
        self._parts: dict[str, dict[str, NormPart]] = {u.module: {} for u in units if isinstance(u, Norm)}
        for unit in units:
            if isinstance(unit, Group):
                self._linears |= {name: self._parameters(name) for name in unit.modules}
                outputs = dict(zip(unit.modules, unit.outputs, strict=True))
                self._sums[unit.modules[0]] = GroupSums.zeros(unit.width, outputs, self._pool)

    def _parameters(self, name: str) -> LinearParameters:
        module, rho = self._block.get_submodule(name), self.settings.rho
        weight = work(weight_view(module))
        base_weight = work(as_matrix(module, self._base[f"{name}.weight"]))
        if module.bias is None:
            return LinearParameters(weight, anchor(weight, base_weight, rho), None, None)
        bias = work(tensor_of(module, "bias"))
        return LinearParameters(
            weight,
            anchor(weight, base_weight, rho),
            bias,
            anchor(bias, work(self._base[f"{name}.bias"]), rho),
        )

    def open_task(self, task: str, expert: nn.Module, samples: int) -> None:
        """Start one task's moments. `expert`: its resident block; `samples`: the task's, over all processes."""
        self._moments: dict[str, TaskMoments | NormMoments] = {}
        for unit in self._units:
            if isinstance(unit, Norm):
                self._moments[unit.module] = NormMoments(unit.channels, self._pool)
                continue
            modules = {}
            for name in unit.modules:
                module = expert.get_submodule(name)
                bias = None if module.bias is None else work(tensor_of(module, "bias"))
                modules[name] = Module(work(weight_view(module)), self._linears[name].anchor_MD, bias)
            form = cheaper_form(unit.width, list(unit.outputs), int(samples * unit.rows_per_sample))
            self._moments[unit.modules[0]] = TaskMoments(unit.width, modules, self.settings.alpha, form, self._pool)

    def observe(self, task: str, index: int, lesson: Lesson) -> None:
        """Run the block on one batch as it stands and add what its units read to the task's moments."""
        if not self._units:
            return
        stream = self.streams[task]
        with self.installed(self._block), Capture(self._block, self._units, expert=False, stop=True) as seen:
            stream.forward(self._name, index, keep=False)
        for unit in self._units:
            key = unit.modules[0] if isinstance(unit, Group) else unit.module
            x = seen.inputs[key]
            keep, weights = (
                keep_rows(stream.batches[index], unit.mask),
                readout_weights(x) if unit.readout else None,
            )
            moments = self._moments[key]
            rows, row_weights = select_rows(work(x), keep, weights)
            if isinstance(moments, NormMoments):
                assert isinstance(unit, Norm)
                moments.add(normalise(rows, unit), row_weights)
                continue
            outputs = {name: select_rows(work(lesson.outputs[name]), keep, weights)[0] for name in moments.modules}
            taught, _ = select_rows(work(lesson.inputs[key]), keep, weights)
            if taught.shape != rows.shape:
                raise AssertionError(
                    f"{self._name}.{key}: the expert read {taught.shape}, the merged model {rows.shape}"
                )
            moments.add(rows, taught, row_weights, outputs)

    def close_task(self, task: str, expert: nn.Module) -> None:
        """Fold the task's moments into the sums over tasks."""
        for unit in self._units:
            key = unit.modules[0] if isinstance(unit, Group) else unit.module
            moments = self._moments.pop(key)
            self.comm.merge_task(task, moments)
            if not self.comm.leads(task):
                pass
            elif isinstance(moments, TaskMoments):
                moments.fold(self._sums[key], task)
            else:
                assert isinstance(unit, Norm)
                module = expert.get_submodule(unit.module)
                mean, energy = moments.averages()
                gamma, beta = _affine_of(module, unit)
                self._parts[key][task] = NormPart(mean, energy, gamma, beta, moments.rows)
            self._pool.give_back(moments.tensors())

    def solve(self) -> list[Record]:
        """New parameters of the units, into `overrides`; one record per module."""
        records: list[Record] = []
        for index, unit in enumerate(self._units):
            owner = self.comm.owner(index)
            if isinstance(unit, Norm):
                new, made = self._solve_norm(unit)
            else:
                self.comm.reduce(self._sums[unit.modules[0]], owner)
                new, made = self._solve_group(unit) if owner == self.comm.rank else ({}, [])
            self.overrides |= self.comm.share(new, self.network.device, owner)
            shared = self.comm.share_object(made, owner)
            assert isinstance(shared, list)
            records += shared
        for sums in self._sums.values():
            self._pool.give_back(sums.tensors())
        self._sums, self._parts, self._linears = {}, {}, {}
        return records

    def _solve_group(self, group: Group) -> tuple[dict[str, Tensor], list[Record]]:
        settings = self.settings
        names = {name: f"{self._name}.{name}" for name in group.modules}
        biased = {
            name
            for name, full in names.items()
            if settings.bias and self._linears[name].merged_bias_M is not None and settings.selects(f"{full}.bias")
        }
        modules = {name: self._linears[name] for name in group.modules}
        dtypes = self._stored_dtypes([f"{name}.weight" for name in modules] + [f"{name}.bias" for name in biased])
        new, records = update_group(self._name, modules, dtypes, self._sums[group.modules[0]], settings, biased)
        for name in group.modules:
            if f"{name}.weight" in new:
                matrix = as_matrix(self._block.get_submodule(name), new[f"{name}.weight"])
                new[f"{name}.weight"] = matrix.contiguous()
        return new, records

    def _solve_norm(self, norm: Norm) -> tuple[dict[str, Tensor], list[Record]]:
        module = self._block.get_submodule(norm.module)
        names = [f"{norm.module}.weight"] + ([f"{norm.module}.bias"] if norm.bias else [])
        merged = _affine_of(module, norm)
        base = _affine(self._base[names[0]], self._base[names[1]] if norm.bias else None, norm)
        dtypes = self._stored_dtypes(names)
        parts = self.comm.gather_parts(self._parts[norm.module], self.network.device)
        new, record = update_norm(
            self._name, norm.module, norm.centred, norm.offset, merged, base, dtypes, parts, self.settings
        )
        return new, [record]

    def _stored_dtypes(self, names: Sequence[str]) -> dict[str, torch.dtype]:
        return {name: self.network.stored_dtype(f"{self._name}.{name}") for name in names}

    @contextmanager
    def installed(self, block: nn.Module) -> Iterator[None]:
        """This student's own parameters in the resident block; the merged ones are put back afterwards."""
        parameters = dict(block.named_parameters())
        merged = {name: parameters[name].data for name in self.overrides}
        try:
            for name, value in self.overrides.items():
                parameters[name].data = value.to(merged[name])
            yield
        finally:
            for name, value in merged.items():
                parameters[name].data = value

    def advance(self, name: str, block: nn.Module, *, last: bool) -> None:
        """Run the finished block on this student's batches: its features are what the next block reads."""
        with self.installed(block):
            for task, indices in (self.ends if last else self.walks).items():
                for index in indices:
                    self.streams[task].forward(name, index, keep=True)


class Onlooker(Student):
    """The merged model as it is, walking along for comparison: it learns nothing and solves nothing."""

    def begin(self, name: str, units: Sequence[Unit], block: nn.Module, base: Mapping[str, Tensor]) -> None: ...

    def open_task(self, task: str, expert: nn.Module, samples: int) -> None: ...

    def observe(self, task: str, index: int, lesson: Lesson) -> None: ...

    def close_task(self, task: str, expert: nn.Module) -> None: ...

    def solve(self) -> list[Record]:
        return []


def readout_weights(x: Tensor) -> Tensor:
    """Token weights of a class-token block's input (batch, sequence, width): 1 for the first, 0.01 for the others."""
    weights = torch.full((1, x.shape[1]), OTHER_TOKENS, device=x.device, dtype=work(x).dtype)
    weights[:, 0] = 1.0
    return weights


def work(x: Tensor) -> Tensor:
    """The dtype of products: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def _affine(weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor | None]:
    """A norm's effective scale and shift, float64."""
    return weight.double() + norm.offset, None if bias is None else bias.double()


def _affine_of(module: nn.Module, norm: Norm) -> tuple[Tensor, Tensor | None]:
    return _affine(tensor_of(module, "weight"), tensor_of(module, "bias") if norm.bias else None, norm)
