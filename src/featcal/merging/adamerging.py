"""AdaMerging: task-arithmetic coefficients that minimise the entropy of predictions (Yang et al. 2024, 2310.02575)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import register
from .heads import row_scores
from .whole import ModelMerger, WholeModels, trainable_copy

ROUND = 50
"""Steps between two signs of progress."""


@register("adamerging", layer_wise_adamerging={"level": "layer"}, task_wise_adamerging={"level": "task"})
class AdaMerging(ModelMerger):
    """θ = θ_0 + Σ_i λ_i τ_i, one λ per task, or one per task and parameter tensor, learned without labels.

    Each step adds up, over the tasks, the mean entropy of one batch of predictions, and takes one Adam step on λ.
    The models are in evaluation mode.
    """

    level: Literal["layer", "task"] = Field("layer", description="one coefficient per tensor and task, or per task")
    samples: int = Field(256, ge=1, description="unlabelled samples per task, used over and over in shuffled order")
    batch_size: int = Field(16, ge=1, description="samples of each task per step")
    steps: int = Field(1000, ge=0, description="Adam steps")
    lr: float = Field(1e-3, gt=0, description="Adam's learning rate")
    init: float = Field(0.3, description="initial value of every coefficient")
    clamp: bool = Field(False, description="keep coefficients within 0 and 1")
    batch_mean: bool = Field(False, description="entropy of the batch's mean logits (published for FLAN-T5)")
    seed: int = Field(42, description="seed of the order of samples")

    def merge_models(self, models: WholeModels) -> dict[str, Tensor]:
        coefficients = self.learn(models)
        for row, task in zip(coefficients, models.experts, strict=True):
            low, high = float(row.min()), float(row.max())
            models.notes.append(f"adamerging: '{task}' has coefficients {low:.3f} to {high:.3f}, mean {row.mean():.3f}")
        return combine(models, coefficients)

    def learn(self, models: WholeModels) -> Tensor:
        """The coefficients (tasks, tensors), in the order of `models.names`."""
        columns = len(models.names) if self.level == "layer" else 1
        tasks = list(models.experts)
        free = torch.full((len(tasks), columns), self.init, dtype=models.dtype, device=models.device)
        free.requires_grad_()
        optimizer = torch.optim.Adam([free], lr=self.lr)
        batches = [shuffled(models.data[task], self.seed + i) for i, task in enumerate(tasks)]
        rounds = [range(s, min(s + ROUND, self.steps)) for s in range(0, self.steps, ROUND)]
        with trainable_copy(models.base, models.device, models.names) as model:
            parameters = dict(model.named_parameters())
            for steps in models.progress(rounds):
                for _ in steps:
                    with torch.no_grad():
                        for name, value in combine(models, self._effective(free)).items():
                            parameters[name].copy_(value)
                    model.zero_grad(set_to_none=True)
                    for task, source in zip(tasks, batches, strict=True):
                        logits = row_scores(model, next(source), models.device, models.scores.get(task), task)
                        entropy(logits.mean(0, keepdim=True) if self.batch_mean else logits).backward()
                    self._effective(free).backward(self._slope(models, parameters, free))
                    optimizer.step()
                    optimizer.zero_grad()
        return self._effective(free).detach().expand(-1, len(models.names))

    def _effective(self, free: Tensor) -> Tensor:
        return free.clamp(0, 1) if self.clamp else free * 1

    @staticmethod
    def _slope(models: WholeModels, parameters: dict[str, torch.nn.Parameter], free: Tensor) -> Tensor:
        """∂loss/∂λ from ∂loss/∂θ: the inner product of each tensor's gradient with each task vector."""
        slope = free.new_zeros(len(models.experts), len(models.names))
        for column, name in enumerate(models.names):
            grad = parameters[name].grad
            if grad is not None:
                for row, task in enumerate(models.experts):
                    slope[row, column] = (grad * models.tau(task, name)).sum()
        return slope if slope.shape == free.shape else slope.sum(1, keepdim=True)


def combine(models: WholeModels, coefficients: Tensor) -> dict[str, Tensor]:
    """θ_0 + Σ_i λ_i τ_i; `coefficients` is (tasks, tensors) or (tasks, 1)."""
    columns = coefficients.expand(-1, len(models.names)).T
    merged: dict[str, Tensor] = {}
    for name, column in zip(models.names, columns.tolist(), strict=True):
        value = models.base_value(name).clone()
        for task, weight in zip(models.experts, column, strict=True):
            value.add_(models.tau(task, name), alpha=weight)
        merged[name] = value
    return merged


def entropy(logits: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean over rows of −Σ p log(p + ε)."""
    p = logits.softmax(-1)
    return -(p * (p + eps).log()).sum(-1).mean()


def shuffled(batches: Sequence[Any], seed: int) -> Iterator[Any]:
    """The batches without end, in a new seeded order each time around."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]
