"""Names in the file ↔ names in the model, and the model without its weights.

transformers renames tensors between disk and memory (ViT, CLIP, prefixes of bare and headed models) and fuses some
(experts of a mixture). Its own conversion tables, which are not a documented API, are used in this file only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .errors import InputError, nearest
from .reader import Checkpoint


@dataclass(frozen=True)
class Source:
    """Where a tensor of the model comes from: one key as it is, or several keys through a converter."""

    keys: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = None
    first: str = ""  # the converter's first target, by which transformers calls the group


class KeyMap:
    """The tensors of `model` in terms of the keys of `checkpoint`.

    Args:
        model: any module; its parameters may be on the meta device. For a transformers model its conversion tables
            apply; for others names must agree.
        checkpoint: only names and shapes are read, plus the values of tied tensors that the file holds twice.

    Attributes:
        sources: by name in the model. Tied names share the source of the name that the file holds.
        unused: keys that nothing in the model asks for, e.g. the text tower for a vision model, or another head.
        missing: parameters that the file lacks, even under a tied name.
        mismatched: (name, shape in the model, shape in the file), e.g. after a vocabulary was extended.
        tied: name → name whose tensor it shares.
        untied: names that the model ties although the file holds different values for them: see `untie`.

    Raises:
        InputError: two keys mean the same tensor.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._state = model.state_dict()
        self.sources: dict[str, Source] = {}
        self.unused: list[str] = []
        self._map_keys()
        self.tied: dict[str, str] = {}
        self.untied: list[str] = []
        self._resolve_ties()
        self.missing = [name for name in self.parameters if name not in self.sources]
        self.mismatched = self._mismatched()

    def keys(self, name: str) -> tuple[str, ...]:
        """The keys that the model's tensor `name` is made of; empty when the file lacks it."""
        return self.sources[name].keys if name in self.sources else ()

    def key(self, name: str) -> str | None:
        """The one key whose tensor is `name` as it is (so that it can be written back), else None."""
        source = self.sources.get(name)
        return source.keys[0] if source and source.converter is None else None

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file."""
        return self.checkpoint.dtype(self.sources[name].keys[0])

    def rows(self, name: str, index: Tensor) -> Tensor:
        """`tensor(name)[index]`, reading only those rows where the file holds the tensor as it is."""
        key = self.key(name)
        return self.checkpoint.rows(key, index) if key is not None else self.tensor(name)[index]

    def tensor(self, name: str) -> Tensor:
        """The model's tensor `name`, on the CPU in the file's dtype; fused from its parts as transformers does.

        Raises:
            InputError: the parts do not give the shape that the model expects (e.g. an expert is missing).
        """
        source = self.sources[name]
        if source.converter is None:
            return self.checkpoint.get(source.keys[0])
        tensors = _convert(source, {key: self.checkpoint.get(key) for key in source.keys}, self.model)
        self._check_whole(name, source, tensors.get(name))
        return tensors[name]

    def _check_whole(self, name: str, source: Source, tensor: Tensor | None) -> None:
        if tensor is None or tensor.shape != self._state[name].shape:
            got = list(tensor.shape) if tensor is not None else "nothing"
            raise InputError(
                f"'{self.checkpoint.name}' does not hold all parts of '{name}': {len(source.keys)} tensors such as "
                f"'{source.keys[0]}' make {got}, the model expects {list(self._state[name].shape)}"
            )

    def names(self, key: str) -> list[str]:
        """The reverse: names in the model that are made of `key`, tied ones included."""
        return [name for name, source in self.sources.items() if key in source.keys]

    def _map_keys(self) -> None:
        """Follow transformers' own loading loop: rename every key, then collect those that share a converter."""
        _, converters, _ = _tables(self.model)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, list[tuple[str, str]]] = {}
        keys = sorted(self.checkpoint.keys(), key=dot_natural_key)
        for key, (name, pattern) in _renamed(self.model, self._state, keys).items():
            if name not in self._state:
                self.unused.append(key)
            elif pattern is not None:
                groups.setdefault(name, []).append((key, pattern))
            elif name in self.sources:
                raise InputError(
                    f"'{self.checkpoint.name}' holds '{self.sources[name].keys[0]}' and '{key}', which both mean "
                    f"'{name}': remove one of them"
                )
            else:
                self.sources[name] = Source((key,))
        for first, members in groups.items():
            self._add_group(first, members, by_pattern[members[0][1]])

    def _add_group(self, first: str, members: list[tuple[str, str]], converter: WeightConverter) -> None:
        source = Source(tuple(k for k, _ in members), tuple(p for _, p in members), converter, first)
        # On the meta device the operations cost nothing and tell every name that comes out.
        parts = {k: torch.empty(self.checkpoint.shape(k), device="meta") for k in source.keys}
        try:
            made = _convert(source, parts, self.model)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"'{self.checkpoint.name}' does not hold all parts of '{first}': {len(source.keys)} tensors such as "
                f"'{source.keys[0]}' cannot be put together ({error})"
            ) from error
        for name, tensor in made.items():
            if name in self._state:
                self.sources[name] = source
                self._check_whole(name, source, tensor)

    def _resolve_ties(self) -> None:
        """Share sources inside each tied group, unless the file's own values say that the tensors differ."""
        order = {name: i for i, name in enumerate(self.parameters)}
        for group in find_tied_parameters(self.model):
            names = sorted(group, key=order.__getitem__)
            held = [name for name in names if name in self.sources]
            if not held:
                continue
            anchor = held[0]
            for name in names:
                if name == anchor:
                    continue
                if name in held and not self._same(anchor, name):
                    self.untied.append(name)
                    continue
                self.tied[name] = anchor
                self.sources.setdefault(name, self.sources[anchor])

    def _same(self, one: str, other: str) -> bool:
        a, b = self.sources[one].keys, self.sources[other].keys
        if a == b:
            return True
        if self.checkpoint.shape(a[0]) != self.checkpoint.shape(b[0]):
            return False
        return torch.equal(self.checkpoint.get(a[0]), self.checkpoint.get(b[0]))

    def _mismatched(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        found = []
        for name, source in self.sources.items():
            expected = tuple(self._state[name].shape)
            if source.converter is None and (got := self.checkpoint.shape(source.keys[0])) != expected:
                found.append((name, expected, got))
        return found


def _tables(model: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter], str | None]:
    """transformers' renamings, converters and base-model prefix for `model`; nothing for other modules."""
    if not isinstance(model, PreTrainedModel):
        return [], [], None
    table = get_model_conversion_mapping(model)
    renamings = [t for t in table if isinstance(t, WeightRenaming)]
    converters = [t for t in table if isinstance(t, WeightConverter)]
    return renamings, converters, model.base_model_prefix


def _renamed(model: nn.Module, state: dict[str, Tensor], keys: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """By key: its name in the model, and the pattern of the converter that it feeds, as transformers would load it."""
    renamings, converters, prefix = _tables(model)
    renamed = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # renamed by mistake: at most the prefix differs
            name, pattern = rename_source_key(key, [], [], prefix, state)
        renamed[key] = (name, pattern)
    return renamed


def module_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Names in `model` of tensors that are called `keys` on disk or were in another release; unknown ones left out."""
    state = model.state_dict()
    return {key: name for key, (name, _) in _renamed(model, state, keys).items() if name in state}


@torch.no_grad()
def _convert(source: Source, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a group of keys makes, by its name in the model."""
    converter = copy.deepcopy(source.converter)
    assert converter is not None and isinstance(model, PreTrainedModel)
    for key, pattern in zip(source.keys, source.patterns, strict=True):
        converter.add_tensor(source.first, key, pattern, tensors[key])  # type: ignore[arg-type]
    made = converter.convert(source.first, model=model, config=model.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def untie(model: nn.Module, names: Iterable[str]) -> None:
    """Give each of `names` a parameter of its own (on the meta device), as the checkpoint's values demand."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        old = getattr(module, leaf)
        setattr(module, leaf, nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False))


def skeleton(
    checkpoint: Checkpoint, *, kind: type[PreTrainedModel] | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The checkpoint's model in eval mode with every parameter on the meta device; buffers are real.

    Its class is `kind` when given (a bare base as the merged model's headed class, say), else what its config names.

    Raises:
        InputError: no config.json, an unknown architecture, or custom code that was not allowed to run.
    """
    if not checkpoint.config:
        raise InputError(f"'{checkpoint.name}' has no config.json: copy it from the base model's folder")
    kind = kind or model_class(checkpoint, trust_remote_code=trust_remote_code)
    assert kind.config_class is not None
    try:
        model_config = kind.config_class.from_pretrained(str(checkpoint.folder))
        with init_empty_weights(include_buffers=False):
            model = kind(model_config)
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        path = checkpoint.folder / "config.json"
        raise InputError(f"{path} does not describe a {kind.__name__}: {reason}") from error
    model.tie_weights()  # inside the context every assignment made a parameter of its own
    return model.eval().requires_grad_(False)


def model_class(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> type[PreTrainedModel]:
    """The transformers class of a checkpoint: `architectures` of its config, else by `model_type` and its keys.

    Custom code (`auto_map`) counts only where transformers does not know the architecture itself.
    """
    config = checkpoint.config
    architectures = config.get("architectures") or [None]
    kind = getattr(transformers, str(architectures[0]), None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    remote = config.get("auto_map")
    if isinstance(remote, Mapping) and any(name.startswith("AutoModel") for name in remote):
        if not trust_remote_code:
            raise InputError(
                f"'{checkpoint.name}' needs its own Python code to run ({architectures[0]}): read that code in its "
                "folder, then allow it with --trust-remote-code"
            )
        return _remote_class(remote, checkpoint)
    if architectures[0] is not None:
        raise InputError(
            f"'{checkpoint.name}' is a {architectures[0]}, which transformers {transformers.__version__} does not "
            f"know{nearest(str(architectures[0]), dir(transformers))}: update transformers"
        )
    return _class_by_type(config, checkpoint)


def _remote_class(remote: Mapping[str, str], checkpoint: Checkpoint) -> type[PreTrainedModel]:
    headed = [name for name in remote if name.startswith("AutoModelFor")]
    reference = remote[headed[0] if headed else "AutoModel"]
    return get_class_from_dynamic_module(reference, str(checkpoint.folder))


def _class_by_type(config: Mapping[str, Any], checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """For configs without `architectures`: a class with the head that the keys show, else the bare model."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        hint = nearest(str(kind), CONFIG_MAPPING_NAMES)
        raise InputError(
            f"'{checkpoint.name}' has model_type {kind!r}, which transformers {transformers.__version__} does not "
            f"know{hint}: check its config.json or update transformers"
        )
    tops = {key.partition(".")[0] for key in checkpoint.keys()}  # noqa: SIM118 (keys() is a list in file order)
    heads: list[str] = []
    if tops & {"classifier", "score"}:
        heads += ["MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"]
    elif "lm_head" in tops or config.get("tie_word_embeddings"):
        language = "SEQ_TO_SEQ_CAUSAL_LM" if config.get("is_encoder_decoder") else "CAUSAL_LM"
        heads.append(f"MODEL_FOR_{language}_MAPPING_NAMES")
    for table in [*heads, "MODEL_MAPPING_NAMES"]:
        name = getattr(modeling_auto, table).get(kind)
        name = name[0] if isinstance(name, (tuple, list)) else name
        if name is not None and hasattr(transformers, name):
            return getattr(transformers, name)
    raise InputError(f"'{checkpoint.name}' ({kind}) names no model class: add \"architectures\" to its config.json")
