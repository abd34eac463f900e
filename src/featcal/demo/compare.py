"""`featcal demo --compare`: every merger on the demo's tasks, alone and with FeatCal on top, and what each costs.

Task Arithmetic is also followed by Surgery and ProbSurgery, trained on the same samples. Rows are kept in
`comparison.json` as they are finished; the same call goes on after the last one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..api import calibrate
from ..baselines import Training, train_surgery
from ..bench import first_samples
from ..errors import InputError
from ..log import progress_bar
from ..merging import get_merger, merge_modules
from ..suites.meter import Meter, tree_rss
from ..version import __version__
from ..writer import atomic_write
from .comparison import NAMES, Comparison, Entry
from .folder import check_output, save_texts
from .results import EXPERTS, MERGED, PRETRAINED
from .run import CALIBRATIONS
from .scoring import Outcome, measure
from .suite import Clock, Options, Suite, prepare
from .tasks import MAX_TOKENS, encode

ON_TOP = CALIBRATIONS[0][2]
"""Settings of FeatCal, the demo's own: the same for all mergers."""


@dataclass(frozen=True)
class Budget:
    """What is not the demo's: which methods, and the steps of those that learn."""

    mergers: tuple[str, ...] = tuple(NAMES)
    adamerging_steps: int = 100
    """Published: 1000. Each step runs every task forward and backward."""
    training: Training = field(default_factory=Training)
    """Of Surgery and ProbSurgery."""


def compare(
    output: Path, options: Options | None = None, budget: Budget | None = None, *, console: Console | None = None
) -> Comparison:
    """Run the comparison, print its table and write `comparison.json` and `comparison.md` into the folder `output`.

    Seconds and memory are of the step alone: merging, calibrating, or training adapters. Tables show the processor's
    seconds, which other work on the machine does not lengthen (the JSON has the clock's, too). Memory is the peak
    resident size of the process above that before the step, so models that are loaded anyway do not count.

    Raises:
        InputError: `output` is a file, or a folder with something else in it.
        RunError: the package registry cannot be reached.
    """
    options, budget, output = options or Options(), budget or Budget(), Path(output)
    check_output(output)
    suite = prepare(options, Clock())
    save_texts(output, suite, options)
    file = output / "comparison.json"
    facts = {
        "options": asdict(options), "budget": asdict(budget), "featcal": ON_TOP, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "version": __version__,
    }  # fmt: skip
    bench = _Bench(suite, options, budget, Comparison(json.loads(json.dumps(facts)), _finished(file, facts)))
    for _ in bench.rows():
        with atomic_write(file) as stream:
            stream.write((json.dumps(bench.result.as_dict(), indent=1) + "\n").encode())
    (output / "comparison.md").write_text(bench.result.markdown(options.seed), encoding="utf-8")
    (console or Console()).print(bench.result.table())
    return bench.result


def _finished(file: Path, facts: Mapping[str, Any]) -> list[Entry]:
    """Rows of an earlier call.

    Raises:
        InputError: it had other options; its rows took too long to be thrown away unasked.
    """
    if not file.is_file():
        return []
    known = json.loads(file.read_text(encoding="utf-8"))
    for key, mine in json.loads(json.dumps(facts)).items():
        if known["facts"].get(key) != mine:
            raise InputError(f"{file} is of other {key} ({known['facts'].get(key)}, not {mine}); give another folder")
    return [Entry(**row) for row in known["rows"]]


@dataclass
class _Bench:
    """The comparison under way."""

    suite: Suite
    options: Options
    budget: Budget
    result: Comparison

    def __post_init__(self) -> None:
        suite = self.suite
        batches = suite.batches(self.options.batch_size)
        self.data = {name: first_samples(own, self.options.samples) for name, own in batches.items()}
        self.test = {n: (encode(suite.tokenizer, t.test), t.targets(t.test)) for n, t in suite.tasks.items()}

    def rows(self) -> Iterator[Entry]:
        """Every row that is not finished yet, as it is; in the table's order."""
        yield from self._row(PRETRAINED, "", lambda: Entry(correct=self._correct(self.suite.base)))
        yield from self._row(EXPERTS, "", lambda: Entry(correct=self._correct(self.suite.experts)))
        for method in progress_bar("comparing")(self.budget.mergers):
            made: list[tuple[nn.Module, Entry]] = []
            yield from self._row(method, "", lambda m=method, made=made: self._merged(m, made)[1])  # type: ignore[misc]
            yield from self._row(method, "FeatCal", lambda m=method, made=made: self._calibrated(m, made))  # type: ignore[misc]
            if NAMES.get(method) == MERGED:
                for kind, name in (("surgery", "Surgery"), ("probsurgery", "ProbSurgery")):
                    yield from self._row(method, name, lambda k=kind, m=method, made=made: self._adapted(k, m, made))  # type: ignore[misc]

    def _row(self, upstream: str, step: str, make: Callable[[], Entry]) -> Iterator[Entry]:
        if self.result.find(upstream, step) is None:
            entry = make()
            entry.upstream, entry.step = upstream, step
            self.result.rows.append(entry)
            yield entry

    def _merged(self, method: str, made: list[tuple[nn.Module, Entry]]) -> tuple[nn.Module, Entry]:
        """The merged model, made once."""
        if not made:
            merger = get_merger(method, self._parameters(method))
            entry = Entry(samples=0 if merger.needs == "weights" else self.options.samples)
            suite = self.suite
            with measured(entry):
                model = merge_modules(
                    merger, suite.base, suite.experts, notes=entry.notes,
                    data=None if merger.needs == "weights" else self.data,
                    scores=suite.heads if merger.needs == "scores" else None,
                )  # fmt: skip
            entry.correct = self._correct(model)
            made.append((model, entry))
        return made[0]

    def _parameters(self, method: str) -> dict[str, Any]:
        if method == "task_arithmetic":
            return {"scale": self.options.scale}
        return {"steps": self.budget.adamerging_steps} if "adamerging" in method else {}

    def _calibrated(self, method: str, made: list[tuple[nn.Module, Entry]]) -> Entry:
        merged, entry = self._merged(method, made)[0], Entry(samples=self.options.samples)
        options, suite = self.options, self.suite
        with measured(entry):
            result = calibrate(
                merged, base=suite.base, experts=suite.experts, data=self.data, scores=suite.heads, seed=options.seed,
                samples=options.samples, batch_size=options.batch_size, max_length=MAX_TOKENS, progress=False, **ON_TOP,
            )  # fmt: skip
        entry.correct = self._correct(result.model)
        return entry

    def _adapted(self, kind: str, method: str, made: list[tuple[nn.Module, Entry]]) -> Entry:
        merged, entry = self._merged(method, made)[0], Entry(samples=self.options.samples)
        suite = self.suite
        with measured(entry):
            adapters = train_surgery(
                kind, merged, suite.experts, self.data, heads=suite.heads, training=self.budget.training,
                seed=self.options.seed, progress=False,
            )  # fmt: skip
        entry.parameters = sum(adapter.used for adapter in adapters.values())
        outcomes = self._outcomes(dict.fromkeys(suite.tasks, merged))
        for task, outcome in outcomes.items():
            scores = suite.heads[task].scores(adapters[task](outcome.pooled_LRD[-1]))
            entry.correct[task] = bits(scores.argmax(1) == self.test[task][1])
        return entry

    def _correct(self, model: nn.Module | Mapping[str, nn.Module]) -> dict[str, str]:
        models = model if isinstance(model, Mapping) else dict.fromkeys(self.suite.tasks, model)
        return {task: bits(outcome.correct_R) for task, outcome in self._outcomes(models).items()}

    def _outcomes(self, models: Mapping[str, nn.Module]) -> dict[str, Outcome]:
        return {task: measure(models[task], self.suite.heads[task], *self.test[task]) for task in self.suite.tasks}


def bits(correct_R: Tensor) -> str:
    """One character per test text: 1 where it is right."""
    return "".join("01"[int(value)] for value in correct_R.tolist())


@contextmanager
def measured(entry: Entry) -> Iterator[None]:
    """Note the seconds of what happens inside, and the peak of memory above the start."""
    release_memory()
    before, clock = tree_rss(), time.process_time()  # of the same processes as the meter's peak
    meter = Meter(torch.device("cpu"))
    with meter:
        yield
    entry.cpu_seconds, entry.seconds = time.process_time() - clock, meter.seconds
    entry.memory_bytes = max(meter.peak_rss_bytes - before, 0)


def release_memory() -> None:
    """Give freed memory back to the system, where its C library can, so that steps do not hide in each other's."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
