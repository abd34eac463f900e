"""Five text classification tasks, which split each step reads, and the fixed heads that score an encoder on them.

    training split   calibration  the first texts of a seeded permutation; their labels are never used
                     train        all others, last first: they train the experts; the first of them make the heads
    test split       test         a seeded sample, read for the table, the gap and the drift plot, and nowhere else

Nothing (training length, merge scale, calibration settings) is chosen by the test split. The tasks are the four groups
of 20 newsgroups (comp.*, rec.*, sci.*, and the rest: alt, misc, soc, talk) and the eight largest Reuters classes (R8).

A task's logits are scale · cos(feature, centroid) with mean-pooled features and the normalised class centroids of the
base's features: the head is the same for every model, so only the encoder is merged, as with CLIP.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from ..evaluate.heads import CentroidHead
from .sources import Example

Batch = dict[str, Tensor]

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "comp": ("20newsgroups", ("comp.",)),
    "rec": ("20newsgroups", ("rec.",)),
    "sci": ("20newsgroups", ("sci.",)),
    "rest": ("20newsgroups", ("alt.", "misc.", "soc.", "talk.")),
    "reuters": ("reuters-r8", ("",)),
}
"""Task → table (its `-train` and `-test` files) and the prefixes of its classes."""

MAX_TOKENS = 32
"""Every model reads the first 32 tokens of a text, in training, calibration and scoring."""

MAX_CHARACTERS = 600
"""Texts are cut here: far more than 32 tokens need, and much less to tokenize and to store."""

LOGIT_SCALE = 20.0
"""The heads' fixed scale. It sets how sharp the training loss is; no ranking of classes depends on it."""

HEAD_TEXTS = 400
"""Training texts per task whose features make the centroids (at least one per class)."""


@dataclass(frozen=True)
class Task:
    """The texts of one task by use; `calibration`, `train` and `test` have no row in common by construction.

    A few texts stand in the sources twice: at most 5 per task are in two of the three (2 of 300 test texts).
    """

    name: str
    classes: tuple[str, ...]
    train: tuple[Example, ...]
    calibration: tuple[Example, ...]
    test: tuple[Example, ...]

    def targets(self, examples: Sequence[Example]) -> Tensor:
        """Class numbers (rows,)."""
        return torch.tensor([self.classes.index(example.label) for example in examples])


def make_tasks(tables: Mapping[str, Sequence[Example]], calibration: int, test: int, seed: int = 42) -> list[Task]:
    """The tasks from tables called `{table}-train` and `{table}-test`.

    Args:
        calibration: texts per task that are set apart from the training split for calibration.
        test: texts per task that are sampled from the test split.
    """
    tasks = []
    for name, (table, prefixes) in GROUPS.items():
        splits = {}
        for split in ("train", "test"):
            rows = [Example(e.label, cut(e.text)) for e in tables[f"{table}-{split}"] if e.label.startswith(prefixes)]
            # A string seeds Python's generator by its hash function SHA-512: the same on every machine.
            random.Random(f"{seed}/{name}/{split}").shuffle(rows)
            splits[split] = tuple(rows)
        classes = tuple(sorted({example.label for example in splits["train"]}))
        # Training texts count from the other end: the experts stay the same, whatever the number of samples.
        train, apart = splits["train"][calibration:][::-1], splits["train"][:calibration]
        tasks.append(Task(name, classes, train, apart, splits["test"][:test]))
    return tasks


def cut(text: str) -> str:
    """The text's first `MAX_CHARACTERS`, up to a word's end."""
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS].rsplit(" ", 1)[0]


def encode(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> Batch:
    """`input_ids` and `attention_mask` (rows, at most `MAX_TOKENS`), padded on the right to the longest."""
    encoded = tokenizer(
        [example.text for example in examples],
        truncation=True,
        max_length=MAX_TOKENS,
        padding=True,
        return_tensors="pt",
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def split_batches(rows: Batch, size: int) -> Iterator[Batch]:
    """Consecutive batches of at most `size` rows, each without columns that are padding only."""
    for start in range(0, len(rows["input_ids"]), size):
        part = {name: value[start : start + size] for name, value in rows.items()}
        length = int(part["attention_mask"].sum(1).max())
        yield {name: value[:, :length] for name, value in part.items()}


def make_head(model: nn.Module, rows: Batch, targets: Tensor, classes: int, batch_size: int = 32) -> CentroidHead:
    """The fixed head: the normalised mean, per class, of the model's unit-length features.

    Args:
        model: the base.
        rows: encoded training texts.
        targets: their class numbers (rows,); every class occurs.
    """
    head = CentroidHead(torch.empty(0), LOGIT_SCALE)
    with torch.no_grad():
        features = torch.cat([head.features(model, batch) for batch in split_batches(rows, batch_size)])
    units_RD = normalize(features, dim=-1)
    assert all((targets == c).any() for c in range(classes)), "a class has no text"
    means_CD = torch.stack([units_RD[targets == c].mean(0) for c in range(classes)])
    return CentroidHead(normalize(means_CD, dim=-1), LOGIT_SCALE)


def head_rows(task: Task, most: int = HEAD_TEXTS) -> list[int]:
    """Indices into `task.train` of the head's texts: the first `most`, and the first text of each class they lack."""
    labels = [example.label for example in task.train]
    chosen = list(range(min(most, len(labels))))
    seen = {labels[index] for index in chosen}
    return chosen + [labels.index(label) for label in task.classes if label not in seen]
