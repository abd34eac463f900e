"""What merging tools write down about their own work, read back into one form.

mergekit leaves `mergekit_config.yml` and a YAML block in README.md, in four shapes (`models`, `slices`, `modules`, and
the normalised one of its Python API); FusionBench a card with its model pool; sd-mecha a recipe in the header of the
safetensors file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import InputError
from .headers import read_header

Role = Literal["ancestor", "endpoint", "none", "unknown"]
"""What the model that a document calls its base is: what the experts were tuned from, one of the merged models, …"""

_ON_TASK_VECTORS = (
    "task_arithmetic", "ties", "dare_linear", "dare_ties", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties",
    "sce", "ram", "ramplus_tl", "model_stock", "multislerp", "nuslerp",
)  # fmt: skip
_ROLES: dict[str, Role] = {
    **dict.fromkeys(_ON_TASK_VECTORS, "ancestor"),
    **dict.fromkeys(("slerp", "nearswap", "arcee_fusion"), "endpoint"),
    **dict.fromkeys(("linear", "karcher", "passthrough"), "none"),
}
"""By mergekit method."""


@dataclass(frozen=True)
class Reference:
    """A model as a merge names it: a path or Hub id, maybe at a revision, maybe with an adapter on top."""

    path: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None

    def __str__(self) -> str:
        model = f"{self.path}@{self.revision}" if self.revision else self.path
        if not self.adapter:
            return model
        return f"{model}+{self.adapter}@{self.adapter_revision}" if self.adapter_revision else f"{model}+{self.adapter}"

    @property
    def name(self) -> str:
        """Name of the folder, file or repository of what was fine-tuned: of the adapter, if there is one."""
        return _parts(self.adapter or self.path)[-1].removesuffix(".safetensors")

    @classmethod
    def parse(cls, value: Any, place: str) -> Reference:
        """From mergekit's text `PATH[@REV][+LORA[@REV]]` or one of its two mappings.

        Raises:
            InputError: neither of them.
        """
        if isinstance(value, str) and value.strip():
            model, _, adapter = value.strip().partition("+")
            return cls(*_split_revision(model), *(_split_revision(adapter) if adapter else (None, None)))
        if isinstance(value, Mapping) and isinstance(value.get("path"), str):
            return cls(value["path"], value.get("revision"))
        if isinstance(value, Mapping) and "model" in value:
            model_part = cls.parse(value["model"], place)
            if not value.get("lora"):
                return model_part
            lora = cls.parse(value["lora"], place)
            return replace(model_part, adapter=lora.path, adapter_revision=lora.revision)
        raise InputError(f"{place}: {value!r} is not a model reference (a path or Hub id)")


@dataclass(frozen=True)
class Source:
    """One model of one slice."""

    model: Reference
    layers: tuple[int, int] | None
    """First and past-the-last layer; none: all of them."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """A run of output layers with the models that it was merged from."""

    sources: tuple[Source, ...]
    base: Reference | None = None
    """Instead of the document's own base."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """One tower of the model; most have only one."""

    slices: tuple[Slice, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Merge:
    """A merge as its document tells it."""

    origin: str
    """Where that was read, for messages."""
    method: str
    modules: Mapping[str, Module]
    base: Reference | None = None
    role: Role = "unknown"
    """Of `base`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    """In which the inputs were cast before they were merged; none: as they are."""
    names: Mapping[Reference, str] = field(default_factory=dict)
    """Task names, where the document gives them."""

    @property
    def models(self) -> tuple[Reference, ...]:
        """Every model that was merged, in order; a base that is listed among them included."""
        sources = (source.model for module in self.modules.values() for s in module.slices for source in s.sources)
        return tuple(dict.fromkeys(sources))

    @property
    def bases(self) -> tuple[Reference, ...]:
        """The document's base and those that single slices name instead."""
        own = (s.base for module in self.modules.values() for s in module.slices)
        return tuple(dict.fromkeys(base for base in (self.base, *own) if base is not None))

    def out_of_place(self) -> str | None:
        """Why the output's layers are not those of its sources, one by one, if so (a frankenmerge)."""
        for module in self.modules.values():
            at = 0
            for part in module.slices:
                ranges = {source.layers for source in part.sources if source.layers is not None}
                for source in part.sources:
                    if source.layers is not None and (source.layers[0] != at or len(ranges) > 1):
                        return f"its layer {at} was made of layer {source.layers[0]} of {source.model}"
                at = next((end for _, end in ranges), at)
        return None


def read_merge(folder: Path) -> Merge | None:
    """What the files of a merged model's folder say about its making; None when they say nothing.

    The order of trust: mergekit_config.yml, then README.md (mergekit's block or FusionBench's), then the recipe that
    sd-mecha puts into safetensors headers.

    Raises:
        InputError: a document that cannot be read.
    """
    config = folder / "mergekit_config.yml"
    if config.is_file():
        return _mergekit(_only_document(_text(config), config), str(config))
    card = folder / "README.md"
    blocks = list(_yaml_blocks(_text(card))) if card.is_file() else []
    for block in blocks:
        if "merge_method" in block:
            return _mergekit(block, str(card))
    pool = next((block for block in blocks if isinstance(block.get("models"), Mapping)), None)
    if pool is not None:
        algorithm = next((block for block in blocks if "models" not in block and "_target_" in block), {})
        return _fusion_bench(pool, algorithm, str(card))
    return _sd_mecha(folder)


def front_matter(card: Path) -> dict[str, Any]:
    """The metadata at the top of a model card; empty when there is none that can be read."""
    match = (
        re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", _text(card), re.DOTALL) if card.is_file() else None
    )
    try:
        data = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def refuse_moe(folder: Path) -> None:
    """Stop at a mixture of experts made by mergekit-moe, whatever flags say."""
    card = folder / "README.md"
    blocks = _yaml_blocks(_text(card)) if card.is_file() else ()
    in_card = any("gate_mode" in block and isinstance(block.get("experts"), list) for block in blocks)
    if not in_card and not (folder / "mergekit_moe_config.yml").is_file():
        return
    raise InputError(
        f"'{folder}' is a mixture of experts made by mergekit-moe, which holds several models side by side: no layer "
        "of it corresponds to one layer of an expert, so it cannot be calibrated; merge into one model of their shape"
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[/\\]", path) if part not in ("", ".")] or [path]


def _split_revision(text: str) -> tuple[str, str | None]:
    path, _, revision = text.partition("@")
    return path, revision or None


def _only_document(text: str, path: Path) -> Mapping[str, Any]:
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{where}: not valid YAML; repair it, or give --base and --expert TASK=MODEL") from None
    if len(documents) > 1:
        raise InputError(f"{path} describes {len(documents)} merges; say which models: --base and --expert TASK=MODEL")
    if not documents or not isinstance(documents[0], Mapping) or "merge_method" not in documents[0]:
        raise InputError(f"{path} holds no merge_method; repair it, or give --base and --expert TASK=MODEL")
    return documents[0]


def _yaml_blocks(card: str) -> Iterator[Mapping[str, Any]]:
    """The mappings in fenced YAML blocks; blocks that are something else are passed over."""
    for fence in re.finditer(r"^(```|~~~)[ \t]*ya?ml[^\n]*\n(.*?)^\1[ \t]*$", card, re.DOTALL | re.MULTILINE):
        try:
            block = yaml.safe_load(fence[2])
        except (yaml.YAMLError, RecursionError):
            continue
        if isinstance(block, Mapping):
            yield block


# ------------------------------------------------------------------------------------------------------ mergekit


def _mergekit(document: Mapping[str, Any], origin: str) -> Merge:
    method = str(document["merge_method"])
    shapes = [key for key in ("models", "slices", "modules") if document.get(key)]
    if len(shapes) != 1:
        got = " and ".join(shapes) or "none of them"
        raise InputError(f"{origin}: a merge has one of models, slices and modules, this one {got}")
    if shapes == ["modules"]:
        modules = {
            str(name): _module(_mapping(part, f"{origin}: modules.{name}"), f"{origin}: modules.{name}")
            for name, part in _mapping(document["modules"], f"{origin}: modules").items()
        }
    else:
        modules = {"default": _module({shapes[0]: document[shapes[0]]}, origin)}
    base = document.get("base_model")
    return Merge(
        origin=origin,
        method=method,
        modules=modules,
        base=None if base is None else Reference.parse(base, f"{origin}: base_model"),
        role=_ROLES.get(method, "unknown"),
        parameters=_mapping(document.get("parameters") or {}, f"{origin}: parameters"),
        dtype=document.get("dtype"),
    )


def _module(part: Mapping[str, Any], place: str) -> Module:
    parameters = _mapping(part.get("parameters") or {}, f"{place}: parameters")
    if part.get("models"):
        models = _list(part["models"], f"{place}: models")
        return Module((Slice(tuple(_source(m, f"{place}: models[{i}]") for i, m in enumerate(models))),), parameters)
    slices = []
    for i, entry in enumerate(_list(part.get("slices"), f"{place}: slices")):
        where = f"{place}: slices[{i}]"
        made = _mapping(entry, where)
        sources = _list(made.get("sources"), f"{where}.sources")
        base = made.get("base_model")
        slices.append(
            Slice(
                tuple(_source(s, f"{where}.sources[{j}]", sliced=True) for j, s in enumerate(sources)),
                None if base is None else Reference.parse(base, f"{where}.base_model"),
                _mapping(made.get("parameters") or {}, f"{where}.parameters"),
            )
        )
    return Module(tuple(slices), parameters)


def _source(entry: Any, place: str, sliced: bool = False) -> Source:
    made = _mapping(entry, place)
    layers = made.get("layer_range") if sliced else None
    if layers is not None and not (
        isinstance(layers, (list, tuple)) and len(layers) == 2 and all(type(n) is int for n in layers)
    ):
        raise InputError(f"{place}.layer_range: expected [first, past the last], got {layers!r}")
    parameters = _mapping(made.get("parameters") or {}, f"{place}.parameters")
    pair = None if layers is None else (layers[0], layers[1])
    return Source(Reference.parse(made.get("model"), f"{place}.model"), pair, parameters)


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: expected key: value lines, got {value!r}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{place}: expected a list, got {value!r}")
    return value


# ------------------------------------------------------------------------------------ FusionBench and sd-mecha

_MODEL_KEYS = ("pretrained_model_name_or_path", "model_name", "model_path", "base_model_path", "base_model_name")
_ADAPTER_KEYS = ("peft_model_path", "peft_name", "peft_model_id")


def _fusion_bench(pool: Mapping[str, Any], algorithm: Mapping[str, Any], origin: str) -> Merge:
    """A FusionBench card: `models` by task, with the base as `_pretrained_`."""
    models = {str(name): _pool_model(entry, f"{origin}: models.{name}") for name, entry in pool["models"].items()}
    base = models.get("_pretrained_")
    experts = {name: model for name, model in models.items() if not (name.startswith("_") and name.endswith("_"))}
    kind = str(algorithm.get("_target_", "unknown")).rpartition(".")[-1]
    method, parameters = kind, {}
    if kind == "SimpleAverageAlgorithm":
        method, parameters = "linear", {"weight": 1.0}
    elif kind == "TaskArithmeticAlgorithm" and isinstance(algorithm.get("scaling_factor"), (int, float)):
        method, parameters = "task_arithmetic", {"weight": float(algorithm["scaling_factor"])}
    return Merge(
        origin=origin,
        method=method,
        modules={"default": Module((Slice(tuple(Source(model, None) for model in experts.values())),))},
        base=base,
        role="none" if base is None else "ancestor",
        parameters=parameters,
        names={model: name for name, model in experts.items()},
    )


def _pool_model(entry: Any, place: str) -> Reference:
    if isinstance(entry, str):
        return Reference(entry)
    settings = _mapping(entry, place)
    model, adapter = (
        next((settings[key] for key in keys if isinstance(settings.get(key), str)), None)
        for keys in (_MODEL_KEYS, _ADAPTER_KEYS)
    )
    if model is None:
        raise InputError(f"{place} does not say where the model is; give --base and --expert TASK=MODEL")
    return Reference(model, adapter=adapter)


def _sd_mecha(folder: Path) -> Merge | None:
    """A recipe in a safetensors header: one instruction a line, which later lines call &0, &1, …"""
    for path in sorted(folder.glob("*.safetensors")):
        text = read_header(path).metadata.get("mecha_recipe")
        if text:
            return _mecha_recipe(text, str(path))
    return None


def _mecha_recipe(text: str, origin: str) -> Merge:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("version", "#"))]
    models: dict[str, Reference] = {}
    bases: list[str] = []
    method = "unknown"
    for number, line in enumerate(lines):
        try:
            command, *arguments = shlex.split(line)
        except ValueError:
            raise InputError(f"{origin}: its sd-mecha recipe cannot be read: {line!r}") from None
        if command == "model" and arguments:
            models[f"&{number}"] = Reference(arguments[0])
        elif command in ("merge", "call") and arguments:
            method = arguments[0]
            if method == "subtract" and len(arguments) > 2:
                bases.append(arguments[2])  # a − b: the difference of a from the base b
    found = {models[name] for name in bases if name in models}
    base = found.pop() if len(found) == 1 and len(set(bases)) == 1 else None
    return Merge(
        origin=origin,
        method=f"sd-mecha {method}",
        modules={"default": Module((Slice(tuple(Source(model, None) for model in models.values())),))},
        base=base,
        role="none" if base is None else "ancestor",
    )
