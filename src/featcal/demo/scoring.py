"""What the demo measures on the test texts: accuracy, the share of the gap recovered, drift per block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..evaluate.heads import CentroidHead
from .cache import cache_key, cached_tensors
from .tasks import Batch, split_batches


@dataclass(frozen=True)
class Outcome:
    """One model on one task's test texts (R rows, L blocks, width D)."""

    correct_R: Tensor
    """Bool: the head's best class is the text's."""
    pooled_LRD: Tensor
    """Every block's output, averaged over the real tokens of each text."""

    @property
    def accuracy(self) -> float:
        """Per cent."""
        return 100 * self.correct_R.double().mean().item()


def measure(
    model: nn.Module, head: CentroidHead, rows: Batch, targets: Tensor, cache: Path | None = None, batch_size: int = 50
) -> Outcome:
    """What a BERT encoder does on encoded texts; the head reads the last block's pooled output.

    Args:
        rows: encoded test texts.
        targets: their class numbers (rows,).
        cache: folder in which the pooled outputs are looked up, by every bit of the weights and the texts, and kept.
    """
    if cache is None:
        pooled_LRD = pooled_outputs(model, rows, batch_size)
    else:
        file = cache / f"{cache_key({}, {**model.state_dict(), **rows})}.safetensors"
        pooled_LRD = cached_tensors(file, lambda: {"pooled": pooled_outputs(model, rows, batch_size)})["pooled"]
    return Outcome(head.scores(pooled_LRD[-1]).argmax(1) == targets, pooled_LRD)


@torch.no_grad()
def pooled_outputs(model: nn.Module, rows: Batch, batch_size: int) -> Tensor:
    """Every block's output averaged over the real tokens of each text: (blocks, rows, width)."""
    parts = []
    for batch in split_batches(rows, batch_size):
        states = model(**batch, output_hidden_states=True).hidden_states[1:]
        weight_BT1 = batch["attention_mask"].unsqueeze(-1).to(states[0])
        parts.append(torch.stack([(state * weight_BT1).sum(1) / weight_BT1.sum(1) for state in states]))
    return torch.cat(parts, dim=1)


def drift(model: Outcome, expert: Outcome) -> list[float]:
    """Per block, the mean over texts of ‖h(model) − h(expert)‖₂ of the pooled features."""
    return (model.pooled_LRD - expert.pooled_LRD).norm(dim=-1).mean(1).tolist()


def gap_recovered(before: float, after: float, best: float) -> float | None:
    """(after − before) / (best − before), from average accuracies; None when there is no gap to recover."""
    return (after - before) / (best - before) if best > before else None


def gain_interval(before: list[Tensor], after: list[Tensor], seed: int, draws: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the gain in average accuracy, in points, by a paired bootstrap over each task's test texts.

    Args:
        before, after: per task, whether each text is right (rows,), in the same order of texts.
    """
    generator = np.random.default_rng(seed)
    gains = np.zeros(draws)
    for old, new in zip(before, after, strict=True):
        change_R = new.numpy().astype(float) - old.numpy().astype(float)
        drawn = generator.integers(len(change_R), size=(draws, len(change_R)))
        gains += 100 * change_R[drawn].mean(1) / len(before)
    low, high = np.percentile(gains, [2.5, 97.5])
    return float(low), float(high)
