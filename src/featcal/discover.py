"""From a merged model's folder to a recipe: which base and experts it was made of, and whose data is whose.

Evidence, the strongest first: flags; what the merging tool wrote (`documents.read_merge`); a PEFT adapter's
config. Cards name models without their roles: they only serve for suggestions. What is missing is asked for with the
flags to type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .documents import Merge, Reference, front_matter, read_merge, refuse_moe
from .errors import InputError, nearest
from .hub import locate, split_adapter
from .reader import read_json
from .recipe import Recipe, make_recipe, resolve_reference
from .strict_yaml import dump_yaml

_ADAPTER = "adapter_config.json"
_OWN = "featcal.yaml"


@dataclass
class Discovery:
    """A recipe, and how it was found."""

    recipe: Recipe
    origin: str
    """Where base and experts came from."""
    merge: Merge | None = None
    places: dict[Reference, str] = field(default_factory=dict)
    """For every model in `merge`, what stands for it here: an absolute path, a Hub id, what a flag says."""
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The recipe as YAML to save, defaults left out."""
        tree = self.recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        lines = [f"base and experts from {self.origin}", *self.notes]
        return "".join(f"# {line}\n" for line in lines) + dump_yaml(tree)


def discover(
    merged: str | os.PathLike[str],
    data: Mapping[str, str],
    base: str | None = None,
    experts: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe for a merged model's folder: see `find`."""
    return find(merged, data, base, experts, overrides).recipe


def find(
    merged: str | os.PathLike[str],
    data: Mapping[str, str],
    base: str | None = None,
    experts: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Discovery:
    """The recipe for a merged model, with base and experts from its own files where flags do not name them.

    Args:
        merged: the merged model's folder (or Hub id).
        data: task → source. A name that an expert's name holds as a whole word (`math` in `Llama-3-math-v2`) is
            enough when it fits no other expert.
        base: the common ancestor, instead of the one found.
        experts: task → model. A name or model that was found too says where it is or what it is called.
        overrides: recipe fields, as after `--set`.

    Raises:
        InputError: everything that is missing, with the flags to type; merges whose layers are not the experts'.
    """
    given = os.path.expanduser(merged)
    hint = nearest(given, os.listdir()) if "/" not in given and not os.path.exists(given) else ""
    if hint:
        raise InputError(f"there is no folder '{given}' here{hint}")
    folder = locate(given)
    folder = folder if folder.is_dir() else folder.parent
    if (folder / _OWN).is_file():
        raise InputError(f"'{merged}' was calibrated already ({_OWN} is in it); give the merged model it was made from")
    refuse_moe(folder)
    search = _Search(folder, data, None if base is None else resolve_reference(base), experts or {})
    found_base, found_experts = search.run()
    tree = {
        "base": found_base,
        "merged": os.path.abspath(given) if os.path.exists(given) else given,
        "tasks": {task: {"expert": model, "data": {"source": data[task]}} for task, model in found_experts.items()},
    }
    recipe = make_recipe(tree, overrides, name=f"the recipe of {merged}")
    return Discovery(recipe, search.origin, search.merge, search.places, search.notes)


def parse_pairs(values: Iterable[str] | None, flag: str, what: str) -> dict[str, str]:
    """`TASK=WHAT` after a flag, as a dict.

    Raises:
        InputError: no `=`, an empty side, or a task given twice.
    """
    pairs: dict[str, str] = {}
    for value in values or ():
        task, equals, text = value.partition("=")
        if not equals or not task.strip() or not text.strip():
            stem = re.sub(r"\W.*", "", os.path.basename(value)) or "TASK"
            raise InputError(f"{flag} {value}: expected TASK={what}, e.g. {flag} {stem}={value.strip('=') or what}")
        if task.strip() in pairs:
            raise InputError(f"{flag} {task.strip()} is given twice; one {what.lower()} for each task")
        pairs[task.strip()] = text.strip()
    return pairs


class _Search:
    """Goes through the evidence in the order in which it counts, and collects what is missing."""

    def __init__(self, folder: Path, data: Mapping[str, str], base: str | None, experts: Mapping[str, str]) -> None:
        self.folder, self.data, self.flag_base = folder, data, base
        self.flag_experts = {task: resolve_reference(model) for task, model in experts.items()}
        self.merge: Merge | None = None
        self.places: dict[Reference, str] = {}
        self.experts: dict[str, str] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.missing: list[str] = []
        """Flags to type."""

    def run(self) -> tuple[str, dict[str, str]]:
        """The base, and the expert of every task in the order of the data.

        Raises:
            InputError: all problems, and a last line with the flags that solve them.
        """
        self.merge = self._read()
        if self.merge is not None:
            models = dict.fromkeys((*self.merge.models, *self.merge.bases))
            self.places = {ref: _place(ref, self.folder) for ref in models}
        named = self._name_experts()
        self._match(named)
        base = self._choose_base([*named.values(), *self.flag_experts.values()])
        self._check_places(base)
        if self.problems or base is None:
            flags = [f"add: {' '.join(self.missing)}"] if self.missing else []
            raise InputError("\n".join([*self.problems, *flags]))
        return base, {task: self.experts[task] for task in self.data}

    @property
    def origin(self) -> str:
        return f"{self.merge.origin} ({self.merge.method})" if self.merge else "the command line"

    def _read(self) -> Merge | None:
        try:
            merge = read_merge(self.folder)
        except InputError as error:
            flags_say_all = self.flag_base is not None and self.data and set(self.data) <= set(self.flag_experts)
            if not flags_say_all:
                raise
            self.notes.append(f"not used: {error}")
            return None
        reason = merge.out_of_place() if merge else None
        if merge and reason:
            raise InputError(
                f"{merge.origin} describes a frankenmerge ({reason}): layers that were moved, repeated or left out "
                "have no counterpart in the experts, so it cannot be calibrated"
            )
        if merge and merge.method == "passthrough" and len(merge.models) == 1:
            raise InputError(f"{merge.origin}: the model is a copy of {merge.models[0]}: there is nothing to calibrate")
        return merge

    def _name_experts(self) -> dict[str, str]:
        """Task name → model, for the experts that the merge names."""
        if self.merge is None:
            return {}
        bases = [self.places[ref] for ref in self.merge.bases] if self.merge.role == "ancestor" else []
        bases += [self.flag_base] if self.flag_base else []
        left_out = {_identity(ref) for ref in bases}
        models: dict[str, Reference] = {}
        both = (*self.merge.models, *(self.merge.bases if self.merge.role == "endpoint" else ()))
        for ref in both:
            models.setdefault(self.places[ref], ref)
        kept = [ref for place, ref in models.items() if _identity(place) not in left_out]
        names = [self.merge.names.get(ref) or ref.name for ref in kept]
        twins = {name for name in names if names.count(name) > 1}
        named: dict[str, str] = {}
        for name, ref in zip(names, kept, strict=True):
            path = ref.adapter or ref.path
            # math/final and code/final: the folder above tells them apart
            named[_unique(name if name not in twins else "-".join(Path(path).parts[-2:]), named)] = self.places[ref]
        return named

    def _match(self, named: Mapping[str, str]) -> None:
        """Give every task of the data its expert: by flag, by name, by a word of the name."""
        rest = dict(named)
        for task, model in self.flag_experts.items():
            self.experts[task] = model
            known = next((n for n, place in rest.items() if _identity(place) == _identity(model)), None)
            known = known or _exact(task, rest) or _exact(_reference(model).name, rest)
            known = known or _by_word([task], rest).get(task)
            if known:
                self._moved(rest.pop(known), model)
        wanted = [task for task in self.data if task not in self.experts]
        pairs = {task: name for task in wanted if (name := _exact(task, rest))}
        others = {name: place for name, place in rest.items() if name not in pairs.values()}
        pairs |= _by_word([task for task in wanted if task not in pairs], others)
        for task in wanted:
            if task in pairs:
                self.experts[task] = rest.pop(pairs[task])
                if task != pairs[task]:
                    self.notes.append(f"task '{task}' is the expert {pairs[task]}")
        self._complain([task for task in wanted if task not in pairs], rest)

    def _complain(self, unmatched: Sequence[str], rest: Mapping[str, str]) -> None:
        """Data without expert, experts without data."""
        for task in unmatched:
            hint = nearest(task, rest)
            if hint:
                self.problems.append(f"data '{task}': no expert is called so{hint}")
                continue
            known = f" (there are: {', '.join(rest)})" if rest else ""
            self.problems.append(f"data '{task}': no expert was found for it{known}")
            self.missing.append(f"--expert {task}=MODEL")
        for task in self.flag_experts:
            if task not in self.data:
                self.problems.append(f"expert '{task}' has no data{nearest(task, self.data)}")
                self.missing.append(f"--data {task}=SOURCE")
        if rest and set(self.data) <= set(self.flag_experts) and self.data:
            self.notes.append(f"without data, so not calibrated toward: {', '.join(rest)}")
        elif not unmatched:
            for name, place in rest.items():
                self.problems.append(f"expert '{name}' ({place}) has no data")
                self.missing.append(f"--data {name}=SOURCE")
        if not self.data and not rest and not self.flag_experts:
            self.missing.append("--expert TASK=MODEL --data TASK=SOURCE (once for each task)")

    def _moved(self, old: str, new: str) -> None:
        self.places |= {ref: new for ref, place in self.places.items() if place == old}

    def _choose_base(self, models: Sequence[str]) -> str | None:
        if self.flag_base:
            if self.merge and self.merge.role == "ancestor":
                self.places |= dict.fromkeys(self.merge.bases, self.flag_base)
            return self.flag_base
        if self.merge and self.merge.role == "ancestor":
            bases = {_identity(self.places[ref]): self.places[ref] for ref in self.merge.bases}
            if len(bases) == 1:
                return next(iter(bases.values()))
            if bases:
                self.problems.append(f"{self.merge.origin} names several bases: {', '.join(bases.values())}")
        base = self._base_of_adapters(models)
        if base is None:
            self._ask_for_base(models)
        return base

    def _base_of_adapters(self, models: Sequence[str]) -> str | None:
        """What all the experts' adapters, or the merged model's own, are adapters of."""
        own = _adapter_base(self.folder)
        if own:
            self.notes.append(f"base: as {self.folder / _ADAPTER} says")
            return own
        bases = [_base_of_adapter(model) for model in models]
        if bases and bases[0] and all(base == bases[0] for base in bases):
            self.notes.append("base: the model that the experts are adapters of")
            return bases[0]
        return None

    def _ask_for_base(self, models: Sequence[str]) -> None:
        if self.merge is None:
            files = "no mergekit_config.yml, no YAML in README.md, no recipe in the weights' header, no adapter config"
            self.problems.insert(0, f"'{self.folder}' does not say what it was merged from ({files})")
        elif self.merge.role == "endpoint":
            self.problems.append(
                f"{self.merge.origin}: {self.merge.method} goes from one model to another, and its base_model is one "
                "of the two: the base that both were fine-tuned from is not in it"
            )
        elif self.merge.role == "none" or not self.merge.bases:
            self.problems.append(f"{self.merge.origin}: {self.merge.method} does not name the base of its models")
        elif self.merge.role == "unknown":
            self.problems.append(f"{self.merge.origin}: what {self.merge.method} takes as its base is not known here")
        suggestions = self._suggest_base(models)
        self.missing.insert(0, f"--base {suggestions[0] if suggestions else 'MODEL'}")
        if len(suggestions) > 1:
            self.problems.append(f"the base may be one of: {', '.join(suggestions)}")
        elif suggestions:
            self.problems.append(f"the base may be {suggestions[0]}, as a model card says")

    def _suggest_base(self, models: Sequence[str]) -> list[str]:
        """What the document and the cards call a base; the merged model's card lists the experts among them."""
        named: list[str] = []
        if self.merge and self.merge.role in ("none", "unknown") and self.merge.base:
            named.append(self.places[self.merge.base])
        for model in models:
            named += _card_bases(Path(model)) if os.path.isdir(model) else []
        known = {_identity(model) for model in models}
        named += [ref for ref in _card_bases(self.folder) if _identity(resolve_reference(ref)) not in known]
        return list(dict.fromkeys(named))

    def _check_places(self, base: str | None) -> None:
        """Local paths that are not there; the rest may be Hub ids, which are looked up later."""
        roles = {f"--expert {task}=": model for task, model in self.experts.items()}
        roles |= {"--base ": base} if base else {}
        for flag, model in roles.items():
            reference = _reference(model)
            for part in filter(None, (reference.path, reference.adapter)):
                if os.path.exists(part) or not _is_path(part):
                    continue
                twin = next((p for p in _parents(self.folder) if (p / reference.name).is_dir()), None)
                self.problems.append(f"{part} is not on this machine (anymore)")
                self.missing.append(f"{flag}{twin / reference.name if twin else 'MODEL'}")


# ------------------------------------------------------------------------------------------------------ references


def _parents(folder: Path) -> list[Path]:
    """Where a merge's relative paths may start: the working directory, beside the folder, or further up.

    They start in the working directory of the merge, which no file records.
    """
    return [Path.cwd(), *folder.resolve().parents]


def _place(reference: Reference, folder: Path) -> str:
    """A document's reference as it is written here: local parts absolute, without a revision that they cannot have."""
    model, local = _part(reference.path, folder)
    made = replace(reference, path=model, revision=None if local else reference.revision)
    if reference.adapter:
        adapter, local = _part(reference.adapter, folder)
        made = replace(made, adapter=adapter, adapter_revision=None if local else reference.adapter_revision)
    return str(made)


def _part(path: str, folder: Path) -> tuple[str, bool]:
    for spelling in dict.fromkeys((os.path.expanduser(path), path.replace("\\", "/"))):
        for parent in _parents(folder):
            if (parent / spelling).exists():
                return os.path.abspath(parent / spelling), True
    return path, False


def _is_path(part: str) -> bool:
    """Whether it can only be meant as a local path: a Hub id is `name` or `org/name`."""
    return part.startswith(("/", ".", "~", "\\")) or part.count("/") > 1 or "\\" in part or part[1:2] == ":"


def _reference(text: str) -> Reference:
    """A reference in featcal's own spelling, where folders that exist may have a '+' or '@' in their names."""
    model, adapter = split_adapter(text)

    def revised(part: str | None) -> tuple[str | None, str | None]:
        if part is None or os.path.exists(part):
            return part, None
        name, _, revision = part.partition("@")
        return name, revision or None

    (path, revision), (adapter, adapter_revision) = revised(model), revised(adapter)
    return Reference(path or "", revision, adapter, adapter_revision)


def _identity(place: str) -> str:
    return os.path.realpath(place) if os.path.exists(place) else place


def _adapter_base(folder: Path) -> str | None:
    """The base that a folder's adapter_config.json names."""
    if not (folder / _ADAPTER).is_file():
        return None
    config = read_json(folder / _ADAPTER)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return _place(Reference(name, revision), folder) if isinstance(name, str) and name else None


def _card_bases(folder: Path) -> list[str]:
    value = front_matter(folder / "README.md").get("base_model")
    values = value if isinstance(value, list) else [value]
    return [name for name in values if isinstance(name, str) and name]


def _base_of_adapter(model: str) -> str | None:
    if os.path.isdir(model):
        return _adapter_base(Path(model))
    reference = _reference(model)
    return str(replace(reference, adapter=None, adapter_revision=None)) if reference.adapter else None


# ----------------------------------------------------------------------------------------------------------- names


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())


def _exact(task: str, names: Iterable[str]) -> str | None:
    return next((name for name in names if name.casefold() == task.casefold()), None)


def _by_word(tasks: Sequence[str], names: Iterable[str]) -> dict[str, str]:
    """Task → the one name that holds it as whole words, where no other task fits that name too."""

    def holds(name: str, task: str) -> bool:
        inner, outer = _words(task), _words(name)
        return bool(inner) and any(outer[i : i + len(inner)] == inner for i in range(len(outer)))

    fits = {task: [name for name in names if holds(name, task)] for task in tasks}
    single = {task: found[0] for task, found in fits.items() if len(found) == 1}
    return {task: name for task, name in single.items() if list(single.values()).count(name) == 1}


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    count, made = 2, name
    while made in taken:
        made, count = f"{name}-{count}", count + 1
    return made
