"""From a block's output to per-sample numbers: which rows stand for a sample, and how far two models are apart on them.

Shape suffixes: B samples, R rows (tokens of a sample, or its one readout token), D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..targets import CLASS_TOKEN_MODELS, keep_rows, mask_keys, stack_config

CHUNK = 2**22
"""Numbers of one tensor that are compared at once."""


@dataclass(frozen=True)
class Readout:
    """Which rows of a block's output stand for a sample."""

    class_token: bool
    """Only the first token, which is all that the model's output reads; else the mean over all real tokens."""
    mask: str | None
    """Batch key of the padding mask over the block's rows."""

    @property
    def label(self) -> str:
        return "class token" if self.class_token else "mean over real tokens" if self.mask else "mean over all tokens"


def readouts(model: nn.Module, blocks: Sequence[str], batch: Any) -> dict[str, Readout]:
    """Per block: the class token for CLIP's vision tower and ViT, else the mean over real tokens."""
    masks = mask_keys(model, blocks, batch)
    kinds = {name: getattr(stack_config(model, name), "model_type", None) for name in blocks}
    return {name: Readout(kinds[name] in CLASS_TOKEN_MODELS, masks[name]) for name in blocks}


def hidden(output: Any) -> Tensor:
    """The features in a block's output: itself, or the first tensor of a tuple."""
    return output if isinstance(output, Tensor) else next(value for value in output if isinstance(value, Tensor))


def keep_mask(x: Tensor, batch: Any, readout: Readout) -> Tensor | None:
    """Bool (B, rows) of a tensor (B, rows, D): the rows that count. None: all."""
    if x.dim() != 3:
        return None
    if readout.class_token:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 0] = True
        return mask
    keep = keep_rows(batch, readout.mask)
    return None if keep is None or keep.shape != x.shape[:2] else keep


class Rows:
    """The rows that count of one batch, sample by sample, and means over them."""

    def __init__(self, like: Tensor, keep: Tensor | None):
        """`like`: (B, rows, D), (B, D), or anything led by B, which then counts as one row a sample."""
        self.samples = len(like)
        self._tokens = like.dim() == 3
        self._keep = keep
        per_sample = like.shape[1] if self._tokens else 1
        counts = torch.full((self.samples,), per_sample) if keep is None else keep.sum(1)
        self.counts_B = counts
        size = max(1, like[:1].numel())
        self._step = max(1, CHUNK // size)

    def chunks(self) -> Iterator[slice]:
        """Slices of samples, small enough to be compared at once."""
        for start in range(0, self.samples, self._step):
            yield slice(start, min(start + self._step, self.samples))

    def take(self, x: Tensor, part: slice, device: torch.device, *, exact: bool = True) -> Tensor:
        """The rows of some samples as (R, D), float64; not `exact`, or on devices without it: at least float32."""
        x = x[part]
        if not self._tokens:
            x = x.reshape(len(x), -1)
        else:
            x = x.flatten(0, 1) if self._keep is None else x[self._keep[part].to(x.device)]
        wide = (exact or x.dtype == torch.float64) and device.type != "mps"
        return x.to(device, torch.float64 if wide else torch.float32)

    def mean(self, values_R: Tensor, part: slice) -> Tensor:
        """Mean over each sample's rows: (samples in part,), float64 on the CPU; NaN for a sample without rows."""
        counts = self.counts_B[part]
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        totals = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owner, values_R.double().cpu())
        return totals / counts

    def pooled(self, x: Tensor) -> Tensor:
        """Each sample's mean row, (B, D), float32 on the CPU."""
        rows = []
        for part in self.chunks():
            taken = self.take(x, part, torch.device("cpu"))
            counts = self.counts_B[part]
            owner = torch.arange(len(counts)).repeat_interleave(counts)
            total = torch.zeros(len(counts), taken.shape[1], dtype=taken.dtype).index_add_(0, owner, taken)
            rows.append((total / counts.clamp_min(1)[:, None]).float())
        return torch.cat(rows)


def cosine(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """cos(a, b) per row; 1 where both are zero, 0 where one is."""
    norms = a_RD.norm(dim=1) * b_RD.norm(dim=1)
    equal = (a_RD == b_RD).all(1)
    return torch.where(equal, torch.ones_like(norms), (a_RD * b_RD).sum(1) / floored(norms))


def floored(x: Tensor) -> Tensor:
    """x, no smaller than the smallest normal number: safe to divide by."""
    return x.clamp_min(torch.finfo(x.dtype).tiny)


@dataclass
class Sides:
    """What one block gives on one batch, as tensors led by (B, …)."""

    expert: Tensor
    """f^E(h^E)."""
    model: Tensor
    """f^M(h^M)."""
    on_expert: Tensor | None = None
    """f^M(h^E): the model's block on what the expert's block reads."""
    expert_before: Tensor | None = None
    """h^E, the block's input in the expert; None for the first block of a stack."""
    model_before: Tensor | None = None
    """h^M."""


def block_drift(sides: Sides, rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """Per sample that has rows, (B,) each: means over its rows of

    * `drift` ‖e‖₂ with e = h^M_ℓ − h^E_ℓ (Eq. 2), `relative` ‖e‖/‖h^E_ℓ‖ and `cosine` cos(h^M_ℓ, h^E_ℓ);
    * `local` ‖m‖ and `propagated` ‖p‖ of the exact split e = m + p (Eq. 3, Prop. 1);
    * `local_part` ⟨m, e⟩/‖e‖ and `propagated_part` ⟨p, e⟩/‖e‖, which sum to ‖e‖;
    * `skip_part` ⟨e_{ℓ−1}, e⟩/‖e‖: the share of ‖e‖ that a residual block's skip path carries over unchanged.
    """
    made: dict[str, list[Tensor]] = {}
    for part in rows.chunks():
        expert, model = rows.take(sides.expert, part, device), rows.take(sides.model, part, device)
        e = model - expert
        drift = e.norm(dim=1)
        values = {
            "drift": drift,
            "relative": drift / floored(expert.norm(dim=1)),
            "cosine": cosine(model, expert),
        }
        along = e / floored(drift)[:, None]
        if sides.on_expert is not None:
            on_expert = rows.take(sides.on_expert, part, device)
            m, p = on_expert - expert, model - on_expert
            _assert_split(e, m, p, (expert, model, on_expert))
            values |= {"local": m.norm(dim=1), "propagated": p.norm(dim=1)}
            values |= {"local_part": (m * along).sum(1), "propagated_part": (p * along).sum(1)}
        if _same_rows(sides.expert_before, sides.model_before, sides.expert):
            assert sides.expert_before is not None and sides.model_before is not None
            before = rows.take(sides.model_before, part, device) - rows.take(sides.expert_before, part, device)
            values["skip_part"] = (before * along).sum(1)
        for name, value in values.items():
            made.setdefault(name, []).append(rows.mean(value, part))
    return {name: torch.cat(parts)[rows.counts_B > 0] for name, parts in made.items()}


def _same_rows(a: Tensor | None, b: Tensor | None, like: Tensor) -> bool:
    return a is not None and b is not None and a.shape == b.shape == like.shape


def _assert_split(e: Tensor, m: Tensor, p: Tensor, sides: Sequence[Tensor]) -> None:
    """Proposition 1 is an identity: what is left of e − m − p is rounding, whatever the models."""
    scale = max(float(side.abs().max()) for side in sides) if e.numel() else 0.0
    gap = float((e - m - p).abs().max()) if e.numel() else 0.0
    assert not gap > 16 * torch.finfo(e.dtype).eps * scale, f"e = m + p is off by {gap}"
