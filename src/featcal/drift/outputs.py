"""The end of a model: its final feature, its scores, and how far those are from the expert's.

Shape suffixes: B samples, R rows (samples, or their tokens), C classes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from ..blocks import State
from ..network import Network, to_device
from .rows import Readout, Rows, cosine, floored, hidden, keep_mask

Scores = Callable[[nn.Module, Any], Tensor]
"""(model, batch) → (rows, classes). With methods `features(model, batch)` and `scores(features)` its two steps show."""
LOGITS = 2**26
"""Numbers in the logits of one pass, at most: a batch is cut into passes by this."""
VOCABULARY = 2048
"""Classes up to which scores are compared in float64; beyond, in at least float32, which takes half the time."""
HEAD = 2**25
"""Entries of a linear head up to which its norm is computed for the bound."""


class LinearHead:
    """z = W u + b. `module` is the model's own, resident while the network is open."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._norm: float | None = None

    def __call__(self, u: Tensor) -> Tensor:
        z: Tensor = self.module(u)
        return z

    def lipschitz(self, a_RD: Tensor, b_RD: Tensor) -> Tensor:
        """‖W‖₂ for every row."""
        if self._norm is None:
            weight = self.module.weight
            assert isinstance(weight, Tensor)
            self._norm = spectral_norm(weight)
        return a_RD.new_full((len(a_RD),), self._norm)


@dataclass
class CosineHead:
    """z = s · T u / ‖u‖ with rows T (C, D) as given: CLIP's similarities, or any fixed cosine head."""

    rows_CD: Tensor
    scale: float

    def __call__(self, u: Tensor) -> Tensor:
        return self.scale * linear(normalize(u, dim=-1), self.rows_CD.to(u))

    def lipschitz(self, a_RD: Tensor, b_RD: Tensor) -> Tensor:
        """s ‖T‖₂ / min ‖u‖ over the segment from a to b: the Jacobian of u/‖u‖ has norm 1/‖u‖."""
        return self.scale * spectral_norm(self.rows_CD) / floored(nearest_to_origin(a_RD, b_RD))


Head = LinearHead | CosineHead


def spectral_norm(weight: Tensor) -> float:
    """‖W‖₂ in float64, from the smaller Gram matrix."""
    W = weight.detach().double().cpu()
    gram = W.T @ W if W.shape[0] >= W.shape[1] else W @ W.T
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())


def nearest_to_origin(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """min over t in [0, 1] of ‖a + t (b − a)‖, per row."""
    step = b_RD - a_RD
    t = (-(a_RD * step).sum(1) / floored(step.square().sum(1))).clamp(0, 1)
    return (a_RD + t[:, None] * step).norm(dim=1)


@dataclass
class Tail:
    """What a model's end gives on some samples."""

    feature: Tensor
    """(B, D) or (B, tokens, D)."""
    scores: Tensor | None
    """(B, C) or (B, tokens, C); None when the model has no head and none was given."""
    head: Head | None
    """The map from feature to scores, where it is known."""
    kind: str
    """What the feature is, in words."""


class TailReader:
    """Runs a network's end on finished states: all blocks done, only the final norm, the pooler and the head run."""

    def __init__(self, network: Network, scores: Scores | None = None):
        self.network, self.scores = network, scores
        inside = tuple(f"{name}." for name in network.order)
        modules = network.model.named_modules()
        self._linears = [m for n, m in modules if isinstance(m, nn.Linear) and not n.startswith(inside)]
        self._last: tuple[nn.Module, Tensor, Tensor] | None = None
        self._heads: dict[int, LinearHead] = {}

    def __call__(self, batch: Any, state: State, readout: Readout) -> Tail:
        """`batch` and `state` as a stream holds them (CPU)."""
        device = self.network.device
        state = to_device(state, device)
        with self._watching():
            output = self.network.gate.finish(batch, state, device)
        tail = self._read(output, state)
        if self.scores is None:
            return tail
        return self._scored(tail, batch, state, self.scores)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Remembers what the last linear module outside the blocks read and gave."""
        self._last = None

        def note(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
            self._last = (module, args[0], y)

        handles = [module.register_forward_hook(note) for module in self._linears]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _read(self, output: Any, state: State) -> Tail:
        logits = logits_of(output)
        images, texts = _field(output, "image_embeds"), _field(output, "text_embeds")
        scale = getattr(self.network.model, "logit_scale", None)
        if images is not None and texts is not None and isinstance(scale, Tensor):
            return Tail(images, logits, CosineHead(normalize(texts, dim=-1), float(scale.exp())), "image embedding")
        if images is not None:
            return Tail(images, None, None, "image embedding")
        if logits is not None and self._last is not None:
            module, read, gave = self._last
            known = gave is logits and _known(module)
            head = self._heads.setdefault(id(module), LinearHead(module)) if known else None
            return Tail(read, logits, head, "input of the head")
        for name, kind in (("text_embeds", "text embedding"), ("pooler_output", "pooled output")):
            value = _field(output, name)
            if value is not None:
                return Tail(value, logits, None, kind)
        value = _field(output, "last_hidden_state")
        if value is not None:
            return Tail(value, logits, None, "last hidden state")
        return Tail(hidden(list(state.values())[-1]), logits, None, "output of the last block")

    def _scored(self, tail: Tail, batch: Any, state: State, scores: Scores) -> Tail:
        """Scores (and with a two-step head the feature as well) from the user's function."""
        device = self.network.device
        placed = _placed(batch, self.network)
        with self.network.gate.finished(state):
            features, from_features = getattr(scores, "features", None), getattr(scores, "scores", None)
            if features is None or from_features is None:
                return Tail(tail.feature, scores(self.network.model, placed).to(device), None, tail.kind)
            feature = features(self.network.model, placed)
            values = from_features(feature)
        if values.shape == feature.shape and torch.equal(values, feature):
            return Tail(tail.feature, values, tail.head, tail.kind)  # the head is the model's own
        return Tail(feature, values, fixed_head(scores), "feature of the head")


def fixed_head(scores: Any) -> CosineHead | None:
    """The cosine head inside a scores function that has one (rows of unit length, and a scale)."""
    scale = getattr(scores, "scale", None)
    for name in ("text_CP", "centroid_CD"):
        rows = getattr(scores, name, None)
        if isinstance(rows, Tensor) and scale is not None:
            return CosineHead(normalize(rows, dim=-1), float(scale))
    return None


def _known(module: nn.Module) -> bool:
    """Whether the head's weight is at hand (a big one stays in its file) and small enough for a norm."""
    weight = module.weight
    return isinstance(weight, Tensor) and not weight.is_meta and weight.numel() <= HEAD


def _placed(batch: Any, network: Network) -> Any:
    """The batch as it is, on the network's device, its floats in the model's dtype."""
    dtype = next(
        (p.dtype for p in network.model.parameters() if p.is_floating_point() and not p.is_meta), torch.float32
    )

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {key: place(item) for key, item in value.items()}
        return type(value)(map(place, value)) if isinstance(value, (tuple, list)) else value

    return place(to_device(batch, network.device))


def _field(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def logits_of(output: Any) -> Tensor | None:
    """A model's own scores: a tensor output, or the field `logits` (CLIP: `logits_per_image`)."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "logits_per_image"):
        value = _field(output, name)
        if value is not None:
            return value
    return None


def pick(value: Any, part: slice, size: int) -> Any:
    """Samples `part` of everything in a nested value whose leading dimension is the batch's size."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == size else value
    if isinstance(value, Mapping):
        return {key: pick(item, part, size) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(pick(item, part, size) for item in value)
    return value


def passes(network: Network, state: State, size: int) -> Iterator[slice]:
    """Slices of a batch whose logits fit into memory: a language model's are vocabulary × tokens wide."""
    head = getattr(network.model, "get_output_embeddings", lambda: None)()
    vocabulary = getattr(head, "out_features", 1)
    last = hidden(list(state.values())[-1])
    tokens = last.shape[1] if last.dim() == 3 else 1
    step = max(1, LOGITS // (vocabulary * tokens))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def feature_drift(expert: Tail, model: Tail, batch: Any, readout: Readout, device: torch.device) -> dict[str, Tensor]:
    """Per sample: `cosine` of the final feature to the expert's, and `drift` ‖u^M − u^E‖₂; means over its rows."""
    rows = Rows(expert.feature, keep_mask(expert.feature, batch, readout))
    made: dict[str, list[Tensor]] = {"cosine": [], "drift": []}
    for part in rows.chunks():
        a, b = rows.take(expert.feature, part, device), rows.take(model.feature, part, device)
        made["cosine"].append(rows.mean(cosine(a, b), part))
        made["drift"].append(rows.mean((b - a).norm(dim=1), part))
    return {name: torch.cat(parts) for name, parts in made.items()}


def pooled_feature(tail: Tail, batch: Any, readout: Readout) -> Tensor:
    """The final feature as one row per sample, (B, D) float32 on the CPU: its mean over the rows that count."""
    return Rows(tail.feature, keep_mask(tail.feature, batch, readout)).pooled(tail.feature)


def output_drift(
    expert: Tail, model: Tail, batch: Any, readout: Readout, device: torch.device, bound: bool = False
) -> dict[str, Tensor]:
    """Per sample, means over its rows, for δ = z^M − z^E (Eq. 6); empty when there are no scores.

    `l2` ‖δ‖₂, `linf` ‖δ‖_∞, `kl` KL(softmax z^E ‖ softmax z^M) in nats, `agreement` 1 where the top class is the same.
    With `bound` and a known head: `bound` B ‖u^M − u^E‖ + ‖r‖ of Prop. 3 (Eq. 7) at the final feature u, with
    r = ψ^M(u^E) − ψ^E(u^E), and `bound_ratio` ‖δ‖₂ / bound, at most 1.
    Of vocabularies that were extended on one side the common tokens count; heads of other classes are not compared.
    """
    if expert.scores is None or model.scores is None:
        return {}
    if expert.scores.shape[-1] != model.scores.shape[-1]:
        pairs = ((expert, expert.scores), (model, model.scores))
        if expert.scores.dim() < 3:
            return {}
        common = min(expert.scores.shape[-1], model.scores.shape[-1])
        cut = [replace(tail, scores=scores[..., :common]) for tail, scores in pairs]
        return output_drift(cut[0], cut[1], batch, readout, device)
    rows = Rows(expert.scores, keep_mask(expert.scores, batch, readout))
    exact = expert.scores.shape[-1] <= VOCABULARY
    head = model.head if bound and model.feature.shape[:-1] == model.scores.shape[:-1] else None
    moved = None if head is None else head(expert.feature)
    made: dict[str, list[Tensor]] = {}
    for part in rows.chunks():
        z_expert, z_model = (rows.take(z, part, device, exact=exact) for z in (expert.scores, model.scores))
        values = score_drift(z_expert, z_model)
        if head is not None and moved is not None:
            a, b = rows.take(expert.feature, part, device), rows.take(model.feature, part, device)
            mismatch = rows.take(moved, part, device, exact=exact) - z_expert
            limit = head.lipschitz(a, b) * (b - a).norm(dim=1) + mismatch.norm(dim=1)
            values |= {"bound": limit, "bound_ratio": values["l2"] / floored(limit)}
        for name, value in values.items():
            made.setdefault(name, []).append(rows.mean(value, part))
    return {name: torch.cat(parts) for name, parts in made.items()}


def score_drift(expert_RC: Tensor, model_RC: Tensor) -> dict[str, Tensor]:
    """Per row: l2, linf, kl, agreement; the last two only where there is more than one class."""
    delta = model_RC - expert_RC
    values = {"l2": delta.norm(dim=1), "linf": delta.abs().amax(1)}
    if expert_RC.shape[1] > 1:
        log_p, log_q = expert_RC.log_softmax(1), model_RC.log_softmax(1)
        values["kl"] = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1).clamp_min(0)
        values["agreement"] = (expert_RC.argmax(1) == model_RC.argmax(1)).to(delta)
    return values
