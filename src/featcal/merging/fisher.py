"""Fisher merging: a mean weighted by each expert's diagonal Fisher information (Matena & Raffel 2022, 2111.09832)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from .base import register
from .heads import Scores, row_scores
from .whole import ModelMerger, WholeModels, trainable_copy


@register("fisher")
class Fisher(ModelMerger):
    """θ = Σ w_i θ_i / Σ w_i per entry, w_i = (F_i + ε) / (‖F_i‖ + ε), ‖F_i‖ over all parameters.

    F_i is the average over samples of g², g the gradient of Σ_rows Σ_c √p_c log p_c (p constant under the root) over
    one batch of expert i's own samples, as published; so the batch size matters. Scores with one column (regression)
    have g = ∇ Σ_rows score. Tensors without a gradient get the ε-weighted mean.
    """

    samples: int = Field(256, ge=1, description="unlabelled samples per task")
    batch_size: int = Field(32, ge=1, description="samples per gradient")
    normalize: bool = Field(True, description="divide each expert's weights by their norm")
    minimum: float = Field(1e-6, gt=0, description="ε")

    def merge_models(self, models: WholeModels) -> dict[str, Tensor]:
        top: dict[str, Tensor] = {}
        bottom: dict[str, Tensor] = {}
        for task, expert in models.experts.items():
            fisher = fisher_information(expert, models.data[task], models.device, models.scores.get(task), task)
            norm = float(torch.stack([f.double().square().sum() for f in fisher.values()]).sum().sqrt())
            scale = 1.0 / (norm + self.minimum) if self.normalize else 1.0
            for name in models.names:
                weight = (fisher[name] + self.minimum).double() * scale
                pull = weight * models.tau(task, name).double()
                top[name] = top[name] + pull if name in top else pull
                bottom[name] = bottom[name] + weight if name in bottom else weight
        return {name: models.base_value(name).double() + top[name] / bottom[name] for name in models.names}


def fisher_information(
    expert: nn.Module, batches: Sequence[Any], device: torch.device, score: Scores | None, task: str
) -> Mapping[str, Tensor]:
    """F of every parameter: Σ_batches g² / number of samples. One extra copy of the model in memory."""
    with trainable_copy(expert, device) as model:
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        samples = 0
        for batch in batches:
            logits = row_scores(model, batch, device, score, task)
            model.zero_grad(set_to_none=True)
            _expected_gradient(logits).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] += p.grad.square()
            samples += len(logits)
    return {name: total.detach() / samples for name, total in sums.items()}


def _expected_gradient(logits: Tensor) -> Tensor:
    """The scalar whose gradient is squared."""
    if logits.shape[1] == 1:
        return logits.sum()
    root = logits.softmax(-1).detach().sqrt()
    return (root * logits.log_softmax(-1)).sum()
