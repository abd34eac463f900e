"""Find and read suites: by name from the package, or from a file of one's own."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import InputError, nearest
from ..merging import get_merger
from ..recipe import Recipe, make_recipe
from ..settings import PRESETS
from ..strict_yaml import dotted, parse_yaml
from .schema import (
    FIXED_ROWS,
    METRICS,
    Data,
    Own,
    PublishedFile,
    PublishedStudies,
    Strict,
    Suite,
    SuiteFile,
    Task,
    Variant,
    ZeroShot,
    changed,
)

_PACKAGE = resources.files("featcal.suites") / "files"


def suite_names() -> list[str]:
    """Every suite of the package."""
    return list(_index())


def load_suite(name: str, variant: str | None = None) -> Suite:
    """A suite of the package by its name, or the one suite of a YAML file.

    Args:
        name: e.g. `clip-vit-b32-ta8`, or a path that ends in .yaml.
        variant: one of the suite's variants, e.g. `demo`.

    Raises:
        InputError: an unknown name or variant (the nearest is named), or a file that breaks the schema.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise InputError(f"no suite file {path}")
        return _only_suite(path, variant)
    known = _index()
    if name not in known:
        raise InputError(f"unknown suite '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    stem, size, list_name = known[name]
    return _resolve(_suite_file(stem), name, size, list_name, variant, _published_file(stem))


@cache
def _suite_file(stem: str) -> SuiteFile:
    file = _PACKAGE / f"{stem}.yaml"
    made: SuiteFile = _validated(SuiteFile, file.read_text(encoding="utf-8"), file.name)
    return made


@cache
def _published_file(stem: str) -> PublishedFile:
    file = _PACKAGE / f"{stem}.published.yaml"
    if not file.is_file():
        return PublishedFile(sources={})
    made: PublishedFile = _validated(PublishedFile, file.read_text(encoding="utf-8"), file.name)
    return made


@cache
def _index() -> dict[str, tuple[str, str, str]]:
    """Suite name → (file, size, list)."""
    found = {}
    for entry in sorted(_PACKAGE.iterdir(), key=lambda item: item.name):
        stem = entry.name.removesuffix(".yaml")
        if "." in stem:
            continue
        file = _suite_file(stem)
        for list_name in file.lists or {"": ()}:
            for size in file.sizes:
                found[file.name.format(size=size, list=list_name)] = (stem, size, list_name)
    return found


def _only_suite(path: Path, variant: str | None) -> Suite:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    file = _validated(SuiteFile, text, path.name)
    if len(file.sizes) != 1 or len(file.lists) > 1:
        raise InputError(f"{path.name}: a file of your own holds one suite: one size, at most one list")
    size, list_name = next(iter(file.sizes)), next(iter(file.lists), "")
    name = file.name.format(size=size, list=list_name)
    return _resolve(file, name, size, list_name, variant, PublishedFile(sources={}))


def _validated(kind: Any, text: str, name: str) -> Any:
    """The document as `kind`.

    Raises:
        InputError: every mistake, one a line, with the place where it was written.
    """
    raw, places = parse_yaml(text, name)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            loc = tuple(part for part in detail["loc"] if part not in ("zero-shot", "centroid", "classifier"))
            place = next((places[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in places), name)
            if detail["type"] == "extra_forbidden":
                message = f"unknown key{nearest(str(loc[-1]), _keys())}"
            elif detail["type"] == "missing":
                message = "required, but missing"
            elif detail["type"] == "value_error":
                message = str(detail["ctx"]["error"])
            else:
                message = f"{detail['msg'].lower()}, got {detail['input']!r}"
            lines.append(f"{place}: {dotted(loc) or 'file'}: {message}")
        raise InputError("\n".join(dict.fromkeys(lines))) from None


def _keys() -> set[str]:
    """All keys of the schema, for hints."""
    kinds: list[type[Strict]] = [SuiteFile, Task, Data, Variant]
    return {key for kind in kinds for key in kind.model_fields}


def _resolve(
    file: SuiteFile, name: str, size_name: str, list_name: str, variant_name: str | None, numbers: PublishedFile
) -> Suite:
    variant = _variant(file, name, variant_name)
    size = file.sizes[size_name]
    pattern = variant.expert or size.expert
    preset = variant.preset or size.preset or file.preset
    if preset is not None and preset not in PRESETS:
        raise InputError(f"suite '{name}': unknown preset '{preset}'{nearest(preset, PRESETS)}")
    for upstream, spec in file.upstreams.items():
        try:
            get_merger(str(spec["method"]), {key: value for key, value in spec.items() if key != "method"})
        except InputError as error:
            raise InputError(f"suite '{name}', upstream '{upstream}': {error}") from None
    tasks = {}
    for task_name in file.lists.get(list_name) or file.tasks:
        task = file.tasks[task_name]
        data = changed(task.data, variant.data.get(task_name, {}), task_name)
        expert = task.expert or pattern.format(task=task_name)
        tasks[task_name] = _complete(file, task_name, task).model_copy(update={"data": data, "expert": expert})
    return Suite(
        name=name,
        title=file.title.format(size=size_name, list=list_name),
        variant=variant_name,
        family=file.family,
        preset=preset,
        base=size.base,
        tasks=tasks,
        upstreams=file.upstreams,
        evaluation=changed(file.evaluation, variant.evaluation, name),
        calibration=changed(file.calibration, variant.calibration, name),
        benchmarks=file.benchmarks,
        references=file.references.get(name, {}),
        build=file.build,
        published=tuple(
            row
            for row in numbers.published.get(name, ())
            # A variant with experts of its own has nothing but the base in common with the suite.
            if not variant.expert or row.variant == variant_name or row.row == FIXED_ROWS[0]
        ),
        studies=numbers.studies.get(name, PublishedStudies()),
        sources=numbers.sources,
    )


def _variant(file: SuiteFile, name: str, variant: str | None) -> Variant:
    if variant is None:
        return Variant()
    mine = {key: one for key, one in file.variants.items() if one.suites is None or name in one.suites}
    if variant not in mine:
        known = ", ".join(mine) or "none"
        raise InputError(f"suite '{name}' has no variant '{variant}'{nearest(variant, mine)}; it has: {known}")
    return mine[variant]


def _complete(file: SuiteFile, name: str, task: Task) -> Task:
    """The task with its metric and head, by the file's defaults and its family."""
    metric = task.metric or file.metric or METRICS[file.family][0]
    head = task.head or file.head
    if metric == "accuracy":
        head = head or Own(kind="classifier")
        if isinstance(head, ZeroShot) and head.classes is None:
            head = ZeroShot(kind="zero-shot", classes=name)
    return task.model_copy(update={"metric": metric, "head": head if metric == "accuracy" else None})


def suite_recipe(suite: Suite, upstream: str = "task_arithmetic") -> Recipe:
    """The suite as a recipe: what `featcal plan` and `featcal calibrate` would make of it.

    Prompts of text-to-text and causal tasks become templates in `input` and `target`.
    """
    tasks: dict[str, Any] = {}
    for name, task in suite.tasks.items():
        data = {"source": task.data.id, "split": task.data.train}
        data |= {key: value for key in ("config", "revision") if (value := getattr(task.data, key)) is not None}
        if suite.family == "image":
            data["image"] = task.data.image[0] if task.data.image else "image"
        elif suite.family == "text-to-text":
            assert task.prompt is not None
            data["input"] = task.prompt
        elif suite.family == "causal" and task.prompt is not None:
            data |= {"input": task.prompt, "target": task.response or ""}
        else:
            data["text"] = task.response or (task.data.text[0] if task.data.text else "text")
        tasks[name] = {"expert": task.expert, "data": data}
    fed = suite.calibration
    calibration = {"samples": fed.samples, "batch_size": fed.batch_size, "max_length": fed.max_length}
    raw = {"base": suite.base, "merged": suite.upstreams[upstream], "tasks": tasks, "calibration": calibration}
    if suite.preset is not None:
        raw["preset"] = suite.preset
    return make_recipe(raw, name=suite.name)


def downloads(suite: Suite) -> list[tuple[str, str]]:
    """What a run would take from the Hub: (kind, id), each once."""
    needs = [("model", suite.base)]
    needs += [("model", task.expert) for task in suite.tasks.values() if task.expert is not None]
    needs += [("model", ref) for ref in suite.references.values()]
    for task in suite.tasks.values():
        config = f" ({task.data.config})" if task.data.config else ""
        needs.append(("data set", f"{task.data.id}{config}: {task.data.train}, {task.data.test}"))
    return list(dict.fromkeys(needs))
