"""The demo's experts: short seeded fine-tunes of the base's encoder through each task's fixed head, cached on disk."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertModel

from ..evaluate.heads import CentroidHead
from .cache import cache_key, cached_tensors
from .tasks import LOGIT_SCALE, Batch, make_head


@dataclass(frozen=True)
class Training:
    """How an expert is made: AdamW on the cross-entropy of the head's logits, all weights but the embeddings.

    The learning rate rises over `warmup` steps and falls linearly to zero. There is no dropout, hence no randomness
    but the order of the texts, which the task's permutation fixes.
    """

    steps: int = 100
    batch_size: int = 16
    learning_rate: float = 3e-4
    warmup: int = 10
    weight_decay: float = 0.01

    @property
    def texts(self) -> int:
        """Texts that one expert reads."""
        return self.steps * self.batch_size

    def rate(self, step: int) -> float:
        """Learning rate of a step (0 … steps − 1)."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


def train_expert(base: BertModel, head: CentroidHead, rows: Batch, targets: Tensor, training: Training) -> BertModel:
    """A fine-tuned copy of `base`; `base` is left alone.

    Args:
        rows: encoded training texts, read in order, and again from the start when there are too few.
        targets: their class numbers (rows,).
    """
    model = copy.deepcopy(base).eval()
    model.embeddings.requires_grad_(False)
    trained = [parameter for parameter in model.encoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=training.weight_decay)
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        first = step * training.batch_size
        index = torch.arange(first, first + training.batch_size) % len(targets)
        loss = cross_entropy(head(model, {name: value[index] for name, value in rows.items()}), targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.requires_grad_(True)


# -------------------------------------------------------------------------------------------------------- cache


def cached_head(
    folder: Path, task: str, base: BertModel, source: str, rows: Batch, targets: Tensor, classes: int
) -> CentroidHead:
    """The task's head from `folder`, or made from the base's features of `rows` and kept there.

    `source` names the base (its wheel's hash).
    """
    key = cache_key({"base": source, "classes": classes}, {**rows, "targets": targets})
    file = folder / "heads" / f"{task}-{key}.safetensors"
    tensors = cached_tensors(file, lambda: {"centroids": make_head(base, rows, targets, classes).centroid_CD})
    return CentroidHead(tensors["centroids"], LOGIT_SCALE)


def cached_expert(
    folder: Path,
    task: str,
    base: BertModel,
    source: str,
    head: CentroidHead,
    rows: Batch,
    targets: Tensor,
    training: Training,
) -> BertModel:
    """The task's expert from `folder`, or trained and kept there.

    The file holds the encoder; all else is the base's, which `source` names (its wheel's hash).
    """
    key = cache_key({"base": source, **asdict(training)}, {**rows, "targets": targets, "head": head.centroid_CD})
    file = folder / "experts" / f"{task}-{key}.safetensors"
    tensors = cached_tensors(file, lambda: train_expert(base, head, rows, targets, training).encoder.state_dict())
    expert = copy.deepcopy(base)
    expert.encoder.load_state_dict(tensors)
    return expert.eval()
