"""Proof that a merged model was made of what its document says, from some rows of some tensors.

Merges that are linear in the weights are recomputed: M = Σ c_i W_i. Of the others only merged − base is compared with
the experts' task vectors τ_i = W_i − W_base. A wrong base, another revision, an adapter that was never applied or an
edit after the merge show within seconds, before a calibration toward the wrong models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .adapters import AdaptedCheckpoint, open_model
from .discover import Discovery
from .documents import Merge, Module, Reference, Slice
from .errors import InputError
from .names import KeyMap, model_class, skeleton
from .reader import Checkpoint

TENSORS, ROWS = 24, 32
"""How many tensors are looked at, spread over the model's layers, and how many rows of each."""
SHARE = 0.02
"""A merge is reproduced when what is left is below this share of ‖merged − base‖ …"""
ROUNDING = 0.6
"""… or below this multiple of what one rounding in the file's dtype can do to every weight."""
_LAYER = re.compile(r"(.*?\.)(\d+)\.")


@dataclass(frozen=True)
class Proof:
    """What was checked. `text` is one sentence for people."""

    text: str
    residual: float | None = None
    """‖merged − recomputed‖ / ‖merged − base‖; none when nothing was recomputed."""
    tensors: int = 0


def prove(discovery: Discovery, *, trust_remote_code: bool = False) -> Proof:
    """Check the merged model against the base, the experts and the parameters of its document.

    Raises:
        InputError: it cannot have been made so; says what differs.
    """
    merge = discovery.merge
    if merge is None:
        return Proof("not checked where the merged model comes from: nothing in its folder says how it was made")
    models = _Models(discovery, trust_remote_code)
    formula = _Formula(merge, models.merged)
    keys = models.sample()
    if not keys:
        return Proof("not checked where the merged model comes from: its tensors have other names or shapes")
    reason = formula.refuses(keys)
    sums = _Sums(len(merge.models))
    for key in keys:
        merged, base, sources = models.rows(key)
        expected = None if reason else formula.value(key, base, sources)
        sums.add(key, merged, base, list(sources.values()), expected)
    labels = [discovery.places[ref] for ref in merge.models]
    problem = _unrelated(sums, labels, discovery) or (_left_over(sums, formula, labels, keys) if not reason else None)
    if problem:
        raise InputError(
            f"'{models.merged.name}' is not what {merge.origin} describes: {problem}; name the right models with "
            "--base and --expert, or add --no-proof if it was changed on purpose"
        )
    if reason:
        return Proof(f"not recomputed ({reason}); {_range(sums, labels)}", None, len(keys))
    share = sums.residual_share
    text = f"the merge was recomputed on rows of {len(keys)} tensors; what differs is {share:.2%} of merged − base"
    return Proof(text, share, len(keys))


# ------------------------------------------------------------------------------------------------------ the formula


class _Formula:
    """M = Σ c_i W_i + c_base W_base with the coefficients of a mergekit document, tensor by tensor."""

    def __init__(self, merge: Merge, merged: Checkpoint) -> None:
        self.merge = merge
        self.dtype = merged.dtype
        self.cast = getattr(torch, str(merge.dtype or "").removeprefix("torch."), None)
        self.depth: dict[str, int] = {}
        for key in merged.keys():  # noqa: SIM118 (keys() is a list in file order)
            if match := _LAYER.match(key):
                self.depth[match[1]] = max(self.depth.get(match[1], 0), int(match[2]) + 1)

    def refuses(self, keys: Sequence[str]) -> str | None:
        """Why the merge cannot be recomputed, if so."""
        if self.merge.method not in ("linear", "task_arithmetic", "passthrough"):
            return f"{self.merge.method} is not linear in the weights"
        try:
            for key in keys:
                self.coefficients(key)
        except _NotSimple as error:
            return str(error)
        return None

    def value(self, key: str, base: Tensor, sources: Mapping[Reference, Tensor]) -> Tensor:
        """The rows as the merge must have written them, float64, rounded as the file's dtype rounds."""
        coefficients, own_base = self.coefficients(key)
        total = torch.zeros_like(base) if own_base is None else self._as_read(sources.get(own_base, base)).clone()
        for reference, c in coefficients.items():
            rows = self._as_read(sources[reference])
            total += c * (rows if own_base is None else rows - self._as_read(sources.get(own_base, base)))
        return total.to(self.dtype(key)).double()

    def coefficients(self, key: str) -> tuple[dict[Reference, float], Reference | None]:
        """c_i of every model, and the base whose difference from them counts (none: they count themselves)."""
        module, part, t = self._place(key)
        shared = (part.parameters, module.parameters, self.merge.parameters)

        def of(source: Mapping[str, Any], name: str, default: float | None = None) -> float:
            return _lookup(name, (source, *shared), key, t, default)

        if self.merge.method == "passthrough":
            return {s.model: of(s.parameters, "scale", 1.0) for s in part.sources}, None
        base = (part.base or self.merge.base) if self.merge.method == "task_arithmetic" else None
        weights: dict[Reference, float] = {}
        for source in part.sources:
            if source.model != base:
                weights[source.model] = weights.get(source.model, 0.0) + of(source.parameters, "weight")
        total = sum(weights.values())
        if of({}, "normalize", 1.0 if base is None else 0.0):
            weights = {model: w / (total if abs(total) > 1e-8 else 1.0) for model, w in weights.items()}
        scale = 1.0 if base is None else of({}, "lambda", 1.0)
        return {model: w * scale for model, w in weights.items()}, base

    def _place(self, key: str) -> tuple[Module, Slice, float]:
        """Module and slice of a tensor, and its depth in the slice, from 0 to 1."""
        modules = self.merge.modules
        named = [module for name, module in modules.items() if re.search(rf"(^|\.){re.escape(name)}\.", key)]
        alike = all(module == next(iter(modules.values())) for module in modules.values())
        if len(named) != 1 and not alike:
            raise _NotSimple(f"the document does not tell in which of its modules '{key}' is")
        module = named[0] if len(named) == 1 else next(iter(modules.values()))
        match = _LAYER.match(key)
        assert match is not None
        layer, start, count = int(match[2]), 0, self.depth[match[1]]
        for part in module.slices:
            span = part.sources[0].layers
            first, end = span if span is not None else (0, count)
            if first <= layer < end:
                start, count = first, end - first
                return module, part, (layer - start) / (count - 1) if count > 1 else 1.0
        raise _NotSimple(f"the document has no slice with layer {layer}")

    def _as_read(self, rows: Tensor) -> Tensor:
        return rows if self.cast is None else rows.to(self.cast).double()


class _NotSimple(Exception):
    """A document that this reader of mergekit's parameters does not follow."""


def _lookup(name: str, scopes: Sequence[Mapping[str, Any]], key: str, t: float, default: float | None) -> float:
    """A parameter's value for a tensor: the first scope that has one for it."""
    for scope in scopes:
        if name in scope:
            value = _evaluate(scope[name], key, t)
            if value is not None:
                return value
    if default is None:
        raise _NotSimple(f"the document gives no {name} for '{key}'")
    return default


def _evaluate(setting: Any, key: str, t: float) -> float | None:
    """A number, a gradient over depth (numbers at equal steps), or the first {value, filter} that fits the name."""
    entries = [setting] if isinstance(setting, Mapping) else setting
    if not isinstance(entries, list):
        return _number(entries)
    if all(isinstance(entry, Mapping) for entry in entries):
        for entry in entries:
            wanted = entry.get("filter")
            if wanted in (None, "*") or str(wanted) in key:
                return _evaluate(entry.get("value"), key, t)
        return None
    at = t * (len(entries) - 1)
    low = int(at)
    high = min(low + 1, len(entries) - 1)
    return (1 - (at - low)) * _number(entries[low]) + (at - low) * _number(entries[high])


def _number(value: Any) -> float:
    try:
        return float(value)  # YAML reads 1e-5 as text
    except (TypeError, ValueError):
        raise _NotSimple(f"a parameter has the value {value!r}") from None


# ------------------------------------------------------------------------------------------------------- the models


class _Models:
    """Rows of the same tensors in the merged model, the base, and everything that was merged."""

    def __init__(self, discovery: Discovery, trust_remote_code: bool) -> None:
        assert discovery.merge is not None and isinstance(discovery.recipe.merged, str)
        self.trust = trust_remote_code
        self.base = open_model(discovery.recipe.base, trust_remote_code=trust_remote_code)

        def opened(model: str) -> Checkpoint:
            return open_model(model, base=self.base, trust_remote_code=trust_remote_code)

        self.merged = opened(discovery.recipe.merged)
        self.sources = {ref: opened(discovery.places[ref]) for ref in discovery.merge.models}
        self._maps: dict[int, KeyMap] = {}

    def sample(self) -> list[str]:
        """Names of matrices of the layers that all models have in one shape, evenly spread.

        Where adapters were merged, up to half of them are such as an adapter changes.
        """
        every = [key for key in self.merged.keys() if self._is_matrix(key)]  # noqa: SIM118
        touched = {k for s in self.sources.values() if isinstance(s, AdaptedCheckpoint) for k in s.touched}
        first = _spread([key for key in every if key in touched], TENSORS // 2)
        rest = _spread([key for key in every if key not in first], TENSORS - len(first))
        return [key for key in every if key in {*first, *rest} and self._is_common(key)]

    def rows(self, key: str) -> tuple[Tensor, Tensor, dict[Reference, Tensor]]:
        """Some rows of a tensor in the merged model, the base and the sources, float64."""
        index = torch.tensor(_spread(range(self.merged.shape(key)[0]), ROWS))

        def read(checkpoint: Checkpoint) -> Tensor:
            found = self._key(checkpoint, key)
            assert found is not None
            return checkpoint.rows(found, index).double()

        return read(self.merged), read(self.base), {ref: read(source) for ref, source in self.sources.items()}

    def _is_matrix(self, key: str) -> bool:
        is_float = self.merged.dtype(key).is_floating_point
        return is_float and len(self.merged.shape(key)) > 1 and _LAYER.match(key) is not None

    def _is_common(self, key: str) -> bool:
        shape = self.merged.shape(key)
        found = [(model, self._key(model, key)) for model in (self.base, *self.sources.values())]
        return all(name is not None and model.shape(name) == shape for model, name in found)

    def _key(self, checkpoint: Checkpoint, key: str) -> str | None:
        """The merged model's tensor in another checkpoint: by its name, or by what both mean in the model's code."""
        if key in checkpoint or not (checkpoint.config and self.merged.config):
            return key if key in checkpoint else None
        names = self._map(self.merged).names(key)
        return self._map(checkpoint).key(names[0]) if names else None

    def _map(self, checkpoint: Checkpoint) -> KeyMap:
        if id(checkpoint) not in self._maps:
            kind = model_class(self.merged, trust_remote_code=self.trust)
            model = skeleton(checkpoint, kind=kind, trust_remote_code=self.trust)
            self._maps[id(checkpoint)] = KeyMap(model, checkpoint)
        return self._maps[id(checkpoint)]


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]


# --------------------------------------------------------------------------------------------------------- the sums


@dataclass
class _Sums:
    """Squared norms and inner products over all rows that were read; R is merged − recomputed, D merged − base."""

    count: int
    entries: int = 0
    merged2: float = 0.0
    base2: float = 0.0
    change2: float = 0.0
    left2: float = 0.0
    tau: Tensor = field(init=False)  # (N, N) inner products of task vectors
    change_tau: Tensor = field(init=False)  # (N,) of D with them
    left_tau: Tensor = field(init=False)  # (N,) of R with them
    differing: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tau = torch.zeros(self.count, self.count, dtype=torch.float64)
        self.change_tau = torch.zeros(self.count, dtype=torch.float64)
        self.left_tau = torch.zeros(self.count, dtype=torch.float64)

    def add(self, key: str, merged: Tensor, base: Tensor, sources: Sequence[Tensor], expected: Tensor | None) -> None:
        change = (merged - base).flatten()
        tau = torch.stack([(source - base).flatten() for source in sources])
        self.entries += merged.numel()
        self.merged2 += float(merged.square().sum())
        self.base2 += float(base.square().sum())
        self.change2 += float(change.square().sum())
        self.tau += tau @ tau.T
        self.change_tau += tau @ change
        if expected is not None:
            left = (merged - expected).flatten()
            share = float(left.norm() / change.norm().clamp(min=1e-30))
            self.left2 += float(left.square().sum())
            self.left_tau += tau @ left
            self.differing.append((share, key))

    @property
    def residual_share(self) -> float:
        return math.sqrt(self.left2 / self.change2) if self.change2 else float(self.left2 > 0)


def _unrelated(sums: _Sums, labels: Sequence[str], discovery: Discovery) -> str | None:
    """A base that the models were not tuned from, or a merge that cannot come from them."""
    if not (sums.base2 and sums.merged2):
        return None
    sizes = sums.tau.diagonal().sqrt()
    for label, size in zip(labels, sizes.tolist(), strict=True):
        if size > math.sqrt(sums.base2):
            return f"'{label}' is as far from the base '{discovery.recipe.base}' as an unrelated model"
    if float(sizes.max()) and not sums.change2:
        return f"it equals the base '{discovery.recipe.base}'"
    if math.sqrt(sums.change2) > 10 * max(float(sizes.sum()), 1e-30):
        return f"it is far more unlike the base '{discovery.recipe.base}' than all its models together"
    return None


def _left_over(sums: _Sums, formula: _Formula, labels: Sequence[str], keys: Sequence[str]) -> str | None:
    """What recomputing a linear merge leaves over, and which model explains it; None when it is rounding."""
    dtypes = [formula.dtype(keys[0])] + ([formula.cast] if formula.cast is not None else [])
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
    allowed = max(SHARE**2 * sums.change2, ROUNDING**2 * epsilon**2 * sums.merged2)
    weights = torch.zeros(sums.count, dtype=torch.float64)
    for key in keys:
        found, _ = formula.coefficients(key)
        weights += torch.tensor([found.get(ref, 0.0) for ref in formula.merge.models], dtype=torch.float64) / len(keys)
    inverse = torch.linalg.pinv(sums.tau, rtol=1e-9, hermitian=True)
    off = inverse @ sums.left_tau  # by how much every weight must change to explain R
    explained = float(off @ sums.left_tau)
    noise = (max(sums.left2 - explained, 0.0) / max(sums.entries, 1) * inverse.diagonal().clamp(min=0)).sqrt()
    strange = (off.abs() > 0.1 * weights.abs().max()) & (off.abs() > 5 * noise) & (sums.tau.diagonal() > 0)
    if sums.left2 <= allowed and not strange.any():
        return None
    share, worst = max(sums.differing)
    what = (
        f"recomputed from its models, it differs by {sums.residual_share:.0%} of merged − base "
        f"(most in {worst}: {share:.0%})"
    )
    if explained < 0.8 * sums.left2 and sums.left2 > allowed:  # below, the rest is rounding
        return f"{what}, as if a model were another revision or the result had been edited"
    causes = []
    for i in torch.nonzero(strange).flatten().tolist():
        fitted, stated = float(weights[i] + off[i]), float(weights[i])
        trace = abs(fitted) < 0.1 * abs(stated)
        causes.append(
            f"'{labels[i]}' left no trace in it (was its adapter applied?)"
            if trace
            else f"'{labels[i]}' counts {fitted:.2f} in it, not {stated:.2f}"
        )
    return f"{what}: {'; '.join(causes)}" if causes else what


def _range(sums: _Sums, labels: Sequence[str]) -> str:
    """The size of merged − base in words, and models that nothing in it correlates with."""
    sizes = sums.tau.diagonal().sqrt()
    ratio = math.sqrt(sums.change2) / max(float(sizes[sizes > 0].mean()), 1e-30)
    cosine = sums.change_tau / (sizes * math.sqrt(sums.change2)).clamp(min=1e-30)
    lost = [labels[i] for i, c in enumerate(cosine.tolist()) if sizes[i] and abs(c) < 4 / math.sqrt(sums.entries)]
    lost = (
        lost if len(lost) < int((sizes > 0).sum()) else []
    )  # model_stock on unrelated task vectors ends up near the base
    text = f"‖merged − base‖ is {ratio:.2f} times the mean ‖model − base‖, which is in the usual range"
    return text + (f"; but nothing in it resembles {', '.join(lost)}: was that model merged?" if lost else "")
