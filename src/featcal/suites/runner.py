"""A suite end to end: score the base and the experts; merge, score, calibrate, score; beside the published numbers.

    result = bench("clip-vit-b32-ta8", "out/b32", upstreams=["task_arithmetic"], methods=["featcal"])
    print(result.markdown())

Every finished row is a file in the output folder; the same call goes on after the last one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api import calibrate
from ..baselines import Corrected, train_surgery
from ..blocks import batch_size
from ..errors import InputError, nearest
from ..evaluate import Adapted, HarnessTask, evaluate, run_harness
from ..evaluate.harness import is_installed
from ..evaluate.readers import Corruption
from ..evaluate.run import Candidate
from ..merging import get_merger, merge_modules
from ..network import pick_device
from ..recipe import slug
from ..settings import make_settings
from ..writer import locked
from .build import build_suite
from .corrupt import Corrupt
from .load import load_suite
from .materials import Materials, Mirror, pick_tasks
from .results import Row, Scores, Store, check_folder
from .schema import Suite
from .stand_in import build_stand_in
from .tables import BenchResult

logger = logging.getLogger("featcal")

METHODS = ("surgery", "probsurgery", "surgery_v2", "featcal", "featcal-tuned")
"""Post-merge methods by name. `featcal` has the suite's published settings, `featcal-tuned` chooses them label-free."""

DEFAULT_METHODS = ("surgery", "probsurgery", "featcal")


@dataclass(frozen=True)
class Options:
    """What all rows of a run have in common."""

    limit: int | None = None
    """Test rows per task (a seeded choice); None: all."""
    samples: int | None = None
    """Calibration samples per task; None: the suite's."""
    seed: int = 42
    device: str = "auto"
    workers: int = 0
    resamples: int = 1000
    allow_code: bool = False
    progress: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Calibration settings over the suite's preset."""


@dataclass
class Made:
    """A model on its way to a row of the table."""

    model_for: Callable[[str], Candidate]
    """The model that stands for the row on a task."""
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Session:
    """One run over a suite's rows. Models and data are loaded when a missing row needs them."""

    def __init__(self, materials: Materials, store: Store, options: Options):
        self.materials, self.suite, self.store, self.options = materials, materials.suite, store, options
        self.benchmarks = self.suite.benchmarks
        self.rows: dict[str, Row] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the scores that make a row's average."""
        return tuple(self.benchmarks or self.suite.tasks)

    # ------------------------------------------------------------------------------------------------- scores

    def fill(self, makers: Mapping[str, Callable[[], Made]], *, alone: bool = False) -> None:
        """Make and score the rows that are not finished yet, all in one pass over the test data (or one by one)."""
        found: dict[str, Any] = {name: self.store.get(name, self.suite.tasks) for name in makers}
        missing = [name for name, row in found.items() if row is None]
        one_by_one = alone or self.suite.family == "causal"
        for group in [[name] for name in missing] if one_by_one else [missing] if missing else []:
            made = {name: makers[name]() for name in group}
            start = time.perf_counter()
            scores = self.score({name: one.model_for for name, one in made.items()})
            seconds = (time.perf_counter() - start) / len(group)
            for name, one in made.items():
                found[name] = Row(name, scores[name], {**one.seconds, "evaluate": seconds}, one.facts, one.notes)
                self.store.put(found[name])
        self.rows |= found

    def score(self, models: Mapping[str, Callable[[str], Candidate]]) -> dict[str, Scores]:
        """Scores of several rows; each is a function from a task to the model that stands for it there."""
        scores: dict[str, Scores] = {name: {} for name in models}
        options = self.options
        for task in self.suite.tasks:
            candidates = {name: model_for(task) for name, model_for in models.items()}
            found = evaluate(
                {**candidates, **self._teacher(task)},
                self.materials.eval_task(task),
                expert=_TEACHER if self._teacher(task) else None,
                batch_size=self.suite.evaluation.batch_size,
                limit=options.limit,
                device=options.device,
                workers=options.workers,
                progress=options.progress,
                resamples=options.resamples,
            )
            for name in models:
                scores[name][task] = found[name]
        if self.benchmarks:
            for name, model_for in models.items():
                candidate = model_for(next(iter(self.suite.tasks)))
                if name != "experts" and not isinstance(candidate, Adapted):
                    scores[name] |= self._harness(candidate)
        return scores

    def _teacher(self, task: str) -> dict[str, Candidate]:
        """Language models are also compared with their expert, token by token."""
        return {_TEACHER: self.materials.expert(task)} if self.suite.family == "causal" else {}

    def _harness(self, model: nn.Module) -> Scores:
        tasks = {name: HarnessTask(**one.model_dump()) for name, one in self.benchmarks.items()}
        include = self.materials.mirror.file("lm_eval") if self.materials.mirror.root is not None else None
        with resident(model, pick_device(self.options.device)):
            return run_harness(
                model,
                self.materials.tokenizer,
                tasks,
                batch_size=self.suite.evaluation.batch_size,
                limit=self.options.limit,
                include_path=include if include is not None and include.is_dir() else None,
                allow_code=self.options.allow_code,
                seed=self.options.seed,
            )

    # ------------------------------------------------------------------------------------------------- models

    def merged(self, upstream: str) -> tuple[nn.Module, dict[str, float], list[str]]:
        """The merged model of an upstream, its cost and its notes; kept in the output folder, so merged once."""
        folder = self.store.folder / "models" / slug(upstream)
        if folder.is_dir():
            try:
                return self.materials.load(folder), {}, []
            except InputError as error:
                logger.warning("%s; it is merged again", error)
                shutil.rmtree(folder)
        spec = {key: value for key, value in self.suite.upstreams[upstream].items() if key != "method"}
        merger = get_merger(str(self.suite.upstreams[upstream]["method"]), spec)
        base, experts = self.materials.base, self.materials.experts
        notes: list[str] = []
        start = time.perf_counter()
        given: dict[str, Any] = {}
        if merger.needs == "scores":  # test-time methods learn on unlabelled test inputs, as published
            size = int(getattr(merger, "batch_size", 16))
            given["data"] = {task: self.materials.unlabelled_test(task, size) for task in self.suite.tasks}
            given["scores"] = self.materials.scores()
        elif merger.needs == "inputs":
            given["data"] = {task: self.calibration_data(task) for task in self.suite.tasks}
        model = merge_modules(
            merger, base, experts, device=self.options.device, notes=notes, progress=self.options.progress, **given
        )
        seconds = {"merge": time.perf_counter() - start}
        temporary = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)  # type: ignore[operator]
        temporary.rename(folder)
        return model, seconds, notes

    def calibration_data(
        self, task: str, samples: int | None = None, seed: int | None = None, condition: str = "clean"
    ) -> list[dict[str, torch.Tensor]]:
        """A task's calibration batches; corrupted when a condition is given."""
        chosen = self.options.seed if seed is None else seed
        corrupt: Corruption | None = None if condition == "clean" else Corrupt(condition, seed=chosen)
        count = samples if samples is not None else self.options.samples
        return self.materials.calibration(task, count, chosen, corrupt)

    def calibrated(
        self,
        merged: nn.Module,
        method: str,
        *,
        samples: int | None = None,
        seed: int | None = None,
        condition: str = "clean",
        settings: Mapping[str, Any] | None = None,
    ) -> Made:
        """A merged model after a post-merge method."""
        clock = time.perf_counter()
        used_seed = self.options.seed if seed is None else seed
        wanted = samples if samples is not None else self.options.samples
        used = wanted if wanted is not None else self.suite.calibration.samples
        data = {task: self.calibration_data(task, used, used_seed, condition) for task in self.suite.tasks}
        ready = time.perf_counter()
        facts: dict[str, Any] = {"samples": used, "seed": used_seed, "condition": condition}
        read = {task: sum(map(batch_size, batches)) for task, batches in data.items()}
        fewer = [f"{task}: {count} samples instead of {used}" for task, count in read.items() if count < used]
        for note in fewer:
            logger.warning("%s, its data has no more", note)
        if method.startswith("featcal"):
            made = self._featcal(merged, data, method, used_seed, {"samples": used, **(settings or {})})
        else:
            made = self._surgery(merged, data, method, used_seed)
        seconds = {"samples": ready - clock, "calibrate": time.perf_counter() - ready, **made.seconds}
        return Made(made.model_for, seconds, facts | made.facts, [*fewer, *made.notes])

    def _featcal(
        self, merged: nn.Module, data: Mapping[str, Any], method: str, seed: int, settings: Mapping[str, Any]
    ) -> Made:
        fields = {**self.options.settings, **settings}
        fields["tune"] = "auto" if method == "featcal-tuned" else fields.get("tune", "off")
        result = calibrate(
            merged,
            base=self.materials.base,
            experts=self.materials.experts,
            data=data,
            scores=self.materials.scores(),
            preset=self.suite.preset,
            device=self.options.device,
            seed=seed,
            progress=self.options.progress,
            **fields,
        )
        model = result.model
        seconds = {phase: value for phase, value in result.seconds.items() if phase != "total"}
        facts = result.settings.model_dump(include={"ridge", "rho", "alpha", "schedule"}) | {"extra_parameters": 0}
        kept = [f"{r.block}.{r.module}: {r.reason}" for r in result.records if r.status == "kept" and r.kind != "other"]
        if result.tuning is not None and result.tuning.chosen is None:
            kept.append("no settings bring the merged model closer to its experts: it is left as it is")
        return Made(lambda task: model, seconds, facts, kept)

    def _surgery(self, merged: nn.Module, data: Mapping[str, Any], method: str, seed: int) -> Made:
        """Surgery and its kin: per task a learnt correction of features, which stays in the inference path."""
        adapters = train_surgery(
            method,
            merged,
            self.materials.experts,
            data,
            heads=self.materials.heads(),
            device=self.options.device,
            seed=seed,
            progress=self.options.progress,
        )
        corrected = Corrected(method, merged, adapters)
        notes = ["benchmarks belong to no task, so that no adapter is right for them"] if self.benchmarks else []
        return Made(corrected.candidate, {}, {"extra_parameters": corrected.parameters}, notes)


_TEACHER = "the expert"


def bench(
    suite: str | Suite,
    output: str | Path,
    *,
    variant: str | None = None,
    tasks: Sequence[str] | None = None,
    upstreams: Sequence[str] | None = None,
    methods: Sequence[str] = DEFAULT_METHODS,
    references: bool = False,
    stand_in: bool = False,
    mirror: str | Path | None = None,
    benchmarks: Sequence[str] | None = None,
    options: Options | None = None,
) -> BenchResult:
    """Run a suite (see the module's docstring) and return its table.

    Args:
        suite: a name (`featcal.suites.suite_names()`), the path of a suite file, or a loaded suite.
        output: folder of finished rows, merged models and tables.
        variant: a variant of the suite, such as `demo`.
        tasks: only these tasks are merged, calibrated and scored.
        upstreams: mergers to start from, by their names in the suite; by default all of them.
        methods: post-merge methods (`METHODS`).
        references: also score the suite's reference checkpoints (jointly trained models).
        stand_in: run on small stand-ins made in `output` instead of the Hub's checkpoints and data.
        mirror: a folder laid out like the Hub to read from instead.
        benchmarks: which of the suite's lm-eval tasks to run; by default all of them.

    Raises:
        InputError: unknown names, an output folder of another job, checkpoints or data that cannot be had.
    """
    options = options or Options()
    with quiet_libraries(), open_session(
        suite, output, variant=variant, tasks=tasks, stand_in=stand_in, mirror=mirror,
        benchmarks=benchmarks, options=options, upstreams=upstreams, methods=methods,
    ) as session:  # fmt: skip
        materials = session.materials
        session.fill(
            {
                "pre-trained": lambda: Made(lambda task: materials.base),
                "experts": lambda: Made(materials.expert),
                **({name: _reference(materials, ref) for name, ref in session.suite.references.items()}
                   if references else {}),
            }
        )  # fmt: skip
        for upstream in upstreams if upstreams is not None else session.suite.upstreams:
            fill_upstream(session, upstream, methods)
    result = BenchResult(session.suite, session.columns, list(session.rows.values()), Path(output))
    result.write()
    return result


def _reference(materials: Materials, ref: str) -> Callable[[], Made]:
    def make() -> Made:
        model = materials.load(ref)
        return Made(lambda task: model)

    return make


def fill_upstream(session: Session, upstream: str, methods: Sequence[str]) -> None:
    """The rows of one upstream: merged, and after each method."""
    cache: list[tuple[nn.Module, dict[str, float], list[str]]] = []

    def merged() -> tuple[nn.Module, dict[str, float], list[str]]:
        if not cache:
            cache.append(session.merged(upstream))
        return cache[0]

    def plain() -> Made:
        model, seconds, notes = merged()
        return Made(lambda task: model, seconds, {}, notes)

    def after(method: str) -> Callable[[], Made]:
        return lambda: session.calibrated(merged()[0], method)

    session.fill({upstream: plain, **{f"{upstream} + {method}": after(method) for method in methods}})


@contextlib.contextmanager
def open_session(
    suite: str | Suite,
    output: str | Path,
    *,
    upstreams: Sequence[str] | None,
    methods: Sequence[str],
    variant: str | None = None,
    tasks: Sequence[str] | None = None,
    stand_in: bool = False,
    mirror: str | Path | None = None,
    benchmarks: Sequence[str] | None = None,
    options: Options,
) -> Iterator[Session]:
    """Load a suite, open and lock the folder of its results, and build what has to be built.

    Whatever can be known to be wrong is refused before the folder is touched.
    """
    loaded = load_suite(suite, variant) if isinstance(suite, str) else suite
    folder = Path(output)
    if stand_in and mirror is not None:
        raise InputError("give --stand-in or --mirror, not both")
    chosen = pick_benchmarks(pick_tasks(loaded, None if tasks is None else list(tasks)), benchmarks, stand_in, options)
    check_names(chosen, upstreams, methods)
    check_settings(chosen, options)
    mirrored = None if mirror is None else Path(mirror).resolve()
    fingerprint = _fingerprint(chosen, options, stand_in, mirrored)
    check_folder(folder, fingerprint)
    with locked(folder):
        store = Store(folder, fingerprint)
        root = mirrored
        if stand_in:
            root = build_stand_in(loaded, folder / "stand-in")
            options = replace(options, allow_code=True)  # its code benchmarks compare words
        elif loaded.build is not None:
            root = build_suite(loaded, root, progress=options.progress)
        yield Session(Materials(chosen, Mirror(root), options.device), store, options)


def _fingerprint(suite: Suite, options: Options, stand_in: bool, mirror: Path | None) -> dict[str, Any]:
    """What all rows of a folder have in common: the options, and all that the suite's file says."""
    named = {"name", "variant", "preset", "tasks", "benchmarks", "upstreams"}
    said = suite.model_dump(mode="json", exclude={*named, "title", "published", "studies", "sources"})
    return {
        "suite": suite.name,
        "variant": suite.variant,
        "tasks": list(suite.tasks),
        "benchmarks": list(suite.benchmarks),
        "limit": options.limit,
        "samples": options.samples if options.samples is not None else suite.calibration.samples,
        "seed": options.seed,
        "stand_in": stand_in,
        "mirror": None if mirror is None else str(mirror),
        "settings": dict(options.settings),
        "preset": suite.preset,
        "resamples": options.resamples,
        "version": importlib.metadata.version("featcal"),
        **{f"the suite's {key}": value for key, value in said.items()},
        **{f"the suite's task {name}": task.model_dump(mode="json") for name, task in suite.tasks.items()},
        **{f"the suite's upstream {name}": spec for name, spec in suite.upstreams.items()},
        **{f"the suite's benchmark {name}": one.model_dump(mode="json") for name, one in suite.benchmarks.items()},
    }


def pick_benchmarks(suite: Suite, names: Sequence[str] | None, stand_in: bool, options: Options) -> Suite:
    """The suite with some of its lm-eval tasks (all by default).

    Raises:
        InputError: an unknown name, lm-eval is missing, or a task that runs the model's programs without consent.
    """
    for name in names or ():
        if name not in suite.benchmarks:
            raise InputError(f"suite '{suite.name}' has no benchmark '{name}'{nearest(name, suite.benchmarks)}")
    kept = {name: one for name, one in suite.benchmarks.items() if names is None or name in names}
    if kept and not is_installed():
        if not stand_in:
            raise InputError(
                f"suite '{suite.name}' is scored by lm-eval: pip install 'featcal[eval]', or --benchmarks none"
            )
        logger.warning("lm-eval is not installed: the benchmarks are left out")
        kept = {}
    code = [name for name, one in kept.items() if one.runs_code]
    if code and not (options.allow_code or stand_in):
        raise InputError(
            f"{', '.join(code)} run programs that the model writes: add --allow-code inside a sandbox, "
            "or choose others with --benchmarks"
        )
    if len(kept) == len(suite.benchmarks):
        return suite
    return suite.model_copy(update={"benchmarks": kept, "published": ()})


def check_names(suite: Suite, upstreams: Sequence[str] | None, methods: Sequence[str]) -> None:
    """Refuse unknown upstreams and methods before anything is loaded."""
    for upstream in upstreams or ():
        if upstream not in suite.upstreams:
            hint = nearest(upstream, suite.upstreams)
            known = ", ".join(suite.upstreams)
            raise InputError(f"suite '{suite.name}' has no upstream '{upstream}'{hint}; it has: {known}")
    for method in methods:
        if method not in METHODS:
            raise InputError(f"unknown method '{method}'{nearest(method, METHODS)}; known: {', '.join(METHODS)}")


def check_settings(suite: Suite, options: Options) -> None:
    """Refuse calibration settings that cannot be, and those that are said elsewhere."""
    elsewhere = {
        "samples": "--samples",
        "batch_size": "`calibration:` of the suite",
        "max_length": "`calibration:` of the suite",
    }
    for key, place in elsewhere.items():
        if key in options.settings:
            raise InputError(f"--set {key}: it is set by {place}")
    make_settings(suite.preset, **options.settings)
    pick_device(options.device)


@contextlib.contextmanager
def resident(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on the device, in evaluation mode, and back on the CPU afterwards."""
    model.to(device).eval()
    try:
        yield
    finally:
        model.to("cpu")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Meanwhile transformers and datasets show no progress bars and loading reports of their own."""
    import datasets
    from transformers.utils import logging as transformers_logging

    bars = datasets.utils.logging.is_progress_bar_enabled(), transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars[0]:
            datasets.utils.logging.enable_progress_bar()
        if bars[1]:
            transformers_logging.enable_progress_bar()
