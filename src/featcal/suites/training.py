"""The one training loop of the suites that are made on this machine: AdamW, warm-up, linear decay, seeded order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..log import progress_bar


@dataclass(frozen=True)
class Training:
    """How long and how fast."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: int = 10
    weight_decay: float = 0.01
    seed: int = 42

    def rate(self, step: int) -> float:
        """Learning rate of a step (0 … steps − 1)."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


def train(
    model: nn.Module,
    rows: Sequence[Any],
    loss_of: Callable[[nn.Module, list[Any]], Tensor],
    training: Training,
    label: str,
    progress: bool = True,
) -> nn.Module:
    """Train the parameters of `model` that require a gradient, in place; returns it in evaluation mode.

    Args:
        rows: examples; read in a new seeded order each time around.
        loss_of: (model, examples) → a scalar.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)
    order: list[int] = []
    generator = random.Random(training.seed)
    model.train()
    for step in progress_bar(label, enabled=progress)(range(training.steps)):
        while len(order) < training.batch_size:
            order += generator.sample(range(len(rows)), len(rows))
        batch, order = [rows[i] for i in order[: training.batch_size]], order[training.batch_size :]
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()
