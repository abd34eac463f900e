"""The recipe of a job: one strict schema for YAML files, `--set` overrides and Python.

    recipe = load_recipe("recipe.yaml", ["calibration.alpha=0.2", 'tasks."my.task".data.split=test'])

A recipe names the base, the merged model, one expert and one data source per task, and the calibration
settings. Every mistake in a file is reported at once, with its line and the nearest known key.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import InputError, nearest
from .settings import PRESETS, Calibration, make_settings
from .strict_yaml import Loc, dotted, dump_yaml, parse_yaml
from .templates import template_columns

_DEVICE = re.compile(r"(auto|cpu|mps)|(cuda|xpu)(:\d+)?")
_DEVICES = ("auto", "cpu", "cuda", "cuda:N", "xpu")


# ---------------------------------------------------------------------------------------------------- schema


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Text = Annotated[str, Field(min_length=1)]


class DataSpec(_Strict):
    """Where the samples of a task come from. Columns that are not named are guessed from their names."""

    source: Text = Field(description="file, image folder, folder saved by `datasets`, or hub dataset id")
    split: Text = Field("train", description="split of a dataset, or sub-folder of an image folder")
    config: Text | None = Field(None, description="configuration (subset) of a hub dataset")
    revision: Text | None = Field(None, description="branch, tag or commit of a hub dataset")
    text: Text | None = Field(None, description="column of plain text, or a template with {column}s")
    messages: Text | None = Field(None, description="column of chat messages; the chat template is applied")
    image: Text | None = Field(None, description="column of images, or of paths to images")
    input: Text | None = Field(None, description="column of inputs (prompts, encoder texts), or a template")
    target: Text | None = Field(None, description="column of target texts, which feed the decoder, or a template")
    label: Text | None = Field(None, description="column of labels; only `featcal evaluate` ever reads it")

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_kind(self) -> DataSpec:
        texts = [name for name in ("text", "messages", "input") if getattr(self, name)]
        kinds = [*texts, "image"] if self.image and texts != ["text"] else texts
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} are both named; name the one column to read")
        if self.target and not self.input:
            raise ValueError("target needs input, the column it answers")
        for part in ("text", "input", "target"):
            if self.label and self.label in template_columns(getattr(self, part) or ""):
                raise ValueError(f"{part} holds '{{{self.label}}}', the column of labels; labels are never read")
        if self.label and self.label in self.columns.values():
            raise ValueError(f"column '{self.label}' is both label and input; labels are never read")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """The named input columns by their part, e.g. ``{"text": "body"}``. The label is not among them."""
        named = {part: getattr(self, part) for part in ("text", "messages", "image", "input", "target")}
        return {part: column for part, column in named.items() if column}


class Task(_Strict):
    """One task: its expert and its data."""

    expert: Text = Field(description="model, PEFT adapter or model+adapter: folder or hub id[@revision]")
    data: DataSpec


class MergeSpec(BaseModel):
    """A merge to perform: the method's name and its own parameters, which `featcal.merging` checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: Text

    @property
    def parameters(self) -> dict[str, Any]:
        """Every key but `method`."""
        return dict(self.model_extra or {})


def _task_name(name: str) -> str:
    if not name.strip() or name != name.strip() or len(name) > 100 or not name.isprintable():
        raise ValueError("a task name is 1 to 100 printable characters, with no space at its ends")
    return name


def _merged_kind(value: Any) -> str:
    return "<merge>" if isinstance(value, (Mapping, MergeSpec)) else "<reference>"


Merged = Annotated[
    Annotated[Text, Tag("<reference>")] | Annotated[MergeSpec, Tag("<merge>")],
    Discriminator(_merged_kind),
]


class Recipe(_Strict):
    """The whole job. `calibration` is resolved: preset, then single values (`settings.make_settings`)."""

    base: Text = Field(description="common ancestor: folder, hub id, hub id@revision")
    merged: Merged = Field(description="merged model, or a merge to perform: {method: ..., scale: 0.3}")
    tasks: dict[Annotated[str, AfterValidator(_task_name)], Task] = Field(min_length=1)
    preset: str | None = Field(None, description=f"published values: {', '.join(PRESETS)}")
    calibration: Calibration = Field(make_settings(), validate_default=True)
    device: str = Field("auto", description=", ".join(_DEVICES))
    seed: int = Field(42, ge=0, lt=2**32, description="seed of the sample choice")
    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """The file that it was read from, if any."""
        return self._file

    def __eq__(self, other: object) -> bool:
        """Whether it is the same job, wherever it was read from."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    @field_validator("tasks")
    @classmethod
    def _distinct_names(cls, tasks: dict[str, Task]) -> dict[str, Task]:
        seen: dict[str, str] = {}
        for name in tasks:
            twin = seen.setdefault(name.casefold(), name)
            if twin != name:
                raise ValueError(f"'{twin}' and '{name}' differ only in case; rename one")
        return tasks

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"unknown preset '{preset}'{nearest(preset, PRESETS)}; known: {known}")
        return preset

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            known = ", ".join(_DEVICES)
            raise ValueError(f"unknown device '{device}'; known: {known}")
        return device

    @field_validator("calibration", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        """Booleans for on/off switches, one glob for a list of globs."""
        if not isinstance(value, Mapping):
            return value
        spelt = dict(value)
        for name, words in {"tune": ("off", "auto"), "norm": ("off", "on")}.items():
            if isinstance(spelt.get(name), bool):
                spelt[name] = words[spelt[name]]
        for name in ("include", "exclude"):
            if isinstance(spelt.get(name), str):
                spelt[name] = (spelt[name],)
        return spelt

    @field_validator("calibration")
    @classmethod
    def _resolved(cls, value: Calibration, info: ValidationInfo) -> Calibration:
        """Preset first, then the fields that were named; naming ridge, rho or alpha turns the tuner off."""
        named = {name: getattr(value, name) for name in value.model_fields_set}
        return make_settings(info.data.get("preset"), **named)


def slug(name: str) -> str:
    """A file name for a task: distinct for distinct names, safe on every file system.

    Plain names stay as they are; others keep what is safe and get six hex digits of their SHA-256.
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", ascii_name).strip("-.")[:60]
    reserved = re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", safe)
    if safe == name and not reserved:
        return name
    return f"{safe or 'task'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


# --------------------------------------------------------------------------------------------------- reading


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read, override, check and resolve a recipe file.

    Args:
        path: the YAML file.
        overrides: ``dotted.key=value`` each, as after `--set`. The value is YAML; a name that holds dots is
            quoted: ``tasks."a.b".expert=./x``.

    Relative paths are looked up in the recipe's folder, then in the working directory (`resolve_reference`).

    Raises:
        InputError: the file is missing, is not YAML, or breaks the schema (every mistake, one a line).
    """
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        raise InputError(f"{file} is a folder, not a recipe file")
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        raise InputError(f"no recipe file {file}{nearest(file.name, siblings)}")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; save it as UTF-8") from None
    raw, places = parse_yaml(text, file.name)
    if raw is None:
        raise InputError(f"{file} is empty; a recipe needs base, merged and tasks")
    if not isinstance(raw, dict):
        raise InputError(f"{file}: a recipe is a mapping with base, merged and tasks, not {_shown(raw)}")
    recipe = make_recipe(raw, overrides, folder=file.parent, name=file.name, places=places)
    recipe._file = file
    return recipe


def make_recipe(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folder: str | os.PathLike[str] = ".",
    name: str = "recipe",
    places: Mapping[Loc, str] | None = None,
) -> Recipe:
    """A recipe from a mapping: `overrides` applied, checked, and its paths resolved against `folder`.

    `name` and `places` (where each value was written) only serve the wording of errors.

    Raises:
        InputError: every mistake, one a line.
    """
    tree: dict[str, Any] = _plain(raw)
    where = dict(places or {})
    for text in overrides:
        _override(tree, text, where)
    mistakes = _odd_numbers(tree)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        reported = {loc for loc, _ in mistakes}
        explained = [_explain(detail, tree) for detail in error.errors()]
        mistakes += [mistake for mistake in explained if mistake[0] not in reported]
    if mistakes:
        lines = [f"{_place(loc, where, name)}: {dotted(loc)}: {text}" for loc, text in mistakes]
        raise InputError("\n".join(sorted(dict.fromkeys(lines), key=_line)))
    return _with_resolved_paths(recipe, Path(folder))


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json", exclude_none=True))


def _plain(value: Any) -> Any:
    """A deep copy in dicts and lists, which overrides may change."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------- overrides

_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^.="']+?))\s*([.=])""")


def _override(tree: dict[str, Any], text: str, where: dict[Loc, str]) -> None:
    """Sets one ``dotted.key=value`` in `tree` and notes in `where` that the value came from `--set`."""
    place = f"--set {text}"
    loc, value_text = _split_override(text)
    # A leading `*` or `@` is YAML markup, which nobody means on a command line (`exclude=*.fc2`).
    value = value_text if value_text[:1] in tuple("*&!%@`") else parse_yaml(value_text, place)[0]
    node = tree
    for depth, part in enumerate(loc[:-1], 1):
        child = node.get(part)
        if isinstance(child, str) and loc[0] == "tasks" and loc[2:depth] == ("data",):
            child = node[part] = {"source": child}
        elif child is None:
            child = node[part] = {}
        elif not isinstance(child, dict):
            raise InputError(f"{place}: {dotted(loc[:depth])} is {_shown(child)} and has no '{loc[depth]}'")
        node = child
    node[loc[-1]] = value
    for old in [known for known in where if known[: len(loc)] == loc]:
        del where[old]
    where[loc] = place


def _split_override(text: str) -> tuple[Loc, str]:
    parts: list[str] = []
    at = 0
    while match := _PART.match(text, at):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        at = match.end()
        if match[4] == "=":
            return tuple(parts), text[at:].strip()
    example = 'such as calibration.alpha=0.2 or tasks."a.b".data.split=test'
    raise InputError(f"--set {text}: expected key=value, {example}")


# ------------------------------------------------------------------------------------------------ explaining


def _place(loc: Loc, where: Mapping[Loc, str], name: str) -> str:
    """Where `loc` was written, or else something inside it, or else what is around it."""
    for end in range(len(loc), 0, -1):
        if loc[:end] in where:
            return where[loc[:end]]
        for known, place in where.items():
            if known[:end] == loc[:end]:
                return place
    return name


def _line(message: str) -> int:
    found = re.search(r", line (\d+): ", message)
    return int(found[1]) if found else 0


def _odd_numbers(tree: Mapping[str, Any]) -> list[tuple[Loc, str]]:
    """Numbers that pydantic would take but nobody means: true for 1, infinities, not-a-number."""
    numeric = [name for name, field in Calibration.model_fields.items() if field.annotation in (int, float)]
    settings = tree.get("calibration")
    values: dict[Loc, Any] = {("seed",): tree.get("seed")}
    if isinstance(settings, dict):
        values |= {("calibration", name): settings.get(name) for name in numeric}
    return [
        (loc, f"expected a finite number, got {_shown(value)}")
        for loc, value in values.items()
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))
    ]


def _explain(error: Any, tree: Mapping[str, Any]) -> tuple[Loc, str]:
    """One schema error of pydantic as (where, sentence)."""
    loc = tuple(part for part in error["loc"] if part not in ("<merge>", "<reference>", "[key]"))
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    expected = {"string_type": "text", "tuple_type": "a list", "int_from_float": "a whole number"}
    expected |= dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping (key: value lines)")
    if kind == "extra_forbidden":
        return loc, f"unknown key{_belongs(loc)}"
    if kind == "missing":
        return loc, f"required, but missing{_task_hint(loc, tree)}"
    if kind == "value_error":
        return loc, str(context["error"])
    if kind in ("string_too_short", "too_short"):
        return loc, "must not be empty"
    if kind in expected:
        is_number = kind == "string_type" and isinstance(value, (int, float))
        return loc, f"expected {expected[kind]}, got {_shown(value)}{'; put it in quotes' if is_number else ''}"
    if kind == "literal_error":
        choices = [str(choice) for choice in get_args(Calibration.model_fields[loc[-1]].annotation)]
        return loc, f"expected {context['expected']}, got {_shown(value)}{nearest(str(value), choices)}"
    return loc, f"{error['msg'].lower()}, got {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None:
        return "nothing"
    return repr(value) if isinstance(value, str) else str(value).lower()


def _belongs(loc: Loc) -> str:
    """The nearest key of the section at `loc`, or the section in which this key would be right."""
    sections: dict[str, Iterable[str]] = {
        "": Recipe.model_fields,
        "calibration": Calibration.model_fields,
        "tasks.NAME": Task.model_fields,
        "tasks.NAME.data": DataSpec.model_fields,
    }
    parent = ("tasks", "NAME", *loc[2:-1]) if loc[0] == "tasks" else loc[:-1]
    here, key = ".".join(str(part) for part in parent), str(loc[-1])
    owners = [section for section, keys in sections.items() if key in keys]
    if owners:
        return f"; it belongs {f'under {owners[0]!r}' if owners[0] else 'at the top level'}"
    known = list(sections.get(here, ()))
    return nearest(key, known) or f"; known here: {', '.join(known)}"


def _task_hint(loc: Loc, tree: Mapping[str, Any]) -> str:
    """An override with a misspelt task name makes a half-empty task: name the task it meant."""
    tasks = tree.get("tasks")
    if len(loc) < 3 or loc[0] != "tasks" or not isinstance(tasks, dict):
        return ""
    whole = [name for name, task in tasks.items() if isinstance(task, dict) and {"expert", "data"} <= task.keys()]
    return nearest(str(loc[1]), whole) if loc[1] not in whole else ""


# ----------------------------------------------------------------------------------------------------- paths


def resolve_reference(reference: str, folder: str | os.PathLike[str] = ".") -> str:
    """A model reference with its local parts as absolute paths.

    An existing path beats a hub id; it is looked up in `folder`, then in the working directory; `~` expands.
    Both halves of ``model+adapter`` are resolved. What is not found stays as it was written (a hub id, a path
    of another machine), except that paths such as ``./x`` become absolute, so that errors name the full path.
    """
    if found := _existing(reference, folder):
        return found
    cuts = [at for at, char in enumerate(reference) if char == "+" and 0 < at < len(reference) - 1]
    if cuts:
        cut = next((at for at in cuts if _existing(reference[:at], folder)), cuts[0])
        halves = (reference[:cut], reference[cut + 1 :])
        return "+".join(resolve_reference(half, folder) for half in halves)
    return _absolute(reference, folder)


def labelled(models: Sequence[str], folder: str | Path, taken: Sequence[str] = ()) -> dict[str, str]:
    """`DIR` or `LABEL=DIR` each → label → reference; without a label the folder's name is one.

    Raises:
        InputError: two models of one label, or a label that the recipe uses itself.
    """
    made: dict[str, str] = {}
    for text in models:
        label, sign, reference = text.partition("=")
        if not sign or "/" in label:
            label, reference = Path(text.rstrip("/")).name, text
        if not label or not reference:
            raise InputError(f"--model {text}: expected DIR, or LABEL=DIR")
        if label in made or label in taken:
            raise InputError(f"--model {text}: there is another model called '{label}'; write LABEL={reference}")
        made[label] = resolve_reference(reference, folder)
    return made


def resolve_source(source: str, folder: str | os.PathLike[str] = ".") -> str:
    """A data source by the rules of `resolve_reference`, where a '+' has no meaning."""
    return _existing(source, folder) or _absolute(source, folder)


def _existing(text: str, folder: str | os.PathLike[str]) -> str | None:
    # A recipe written on Windows may be read elsewhere: its backslashes are tried as slashes, too.
    for spelling in dict.fromkeys((text, text.replace("\\", "/"))):
        for parent in (folder, "."):
            path = os.path.join(parent, os.path.expanduser(spelling))
            if os.path.exists(path):
                return os.path.abspath(path)
    return None


def _absolute(text: str, folder: str | os.PathLike[str]) -> str:
    expanded = os.path.expanduser(text)
    is_path = expanded.startswith(("/", "./", "../"))
    return os.path.abspath(os.path.join(folder, expanded)) if is_path else text


def _with_resolved_paths(recipe: Recipe, folder: Path) -> Recipe:
    tasks = {}
    for name, task in recipe.tasks.items():
        data = task.data.model_copy(update={"source": resolve_source(task.data.source, folder)})
        tasks[name] = task.model_copy(update={"expert": resolve_reference(task.expert, folder), "data": data})
    merged = resolve_reference(recipe.merged, folder) if isinstance(recipe.merged, str) else recipe.merged
    base = resolve_reference(recipe.base, folder)
    return recipe.model_copy(update={"base": base, "merged": merged, "tasks": tasks})
