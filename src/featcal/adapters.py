"""PEFT LoRA adapters as experts: base and adapter read as one checkpoint, tensors folded one at a time in float32.

W' = W + s B A with s = α/r (rsLoRA: α/√r); DoRA: W' = m ⊙ (W + s B A) / ‖W + s B A‖ per output. The arithmetic is
PEFT's own (`merge_and_unload`), without the model: nothing but the tensor at hand is in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .errors import InputError
from .hub import locate, split_adapter
from .names import KeyMap, module_names, skeleton
from .reader import BIN, BIN_INDEX, SAFE, SAFE_INDEX, Checkpoint, FileCheckpoint, open_checkpoint, read_json

_CONFIG = "adapter_config.json"
_FOLD = "fold it with PEFT (merge_and_unload, then save_pretrained) and give that folder"
_PREFIX = "base_model.model."
# Initialisations that leave the base weights alone; the others (PiSSA, OLoRA, ...) need the base that they changed.
_HARMLESS_INIT = (True, False, None, "true", "false", "gaussian", "eva", "orthogonal", "mica")
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_FACTOR = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.(?P<leaf>weight|bias))?"
)
_TOKENS = re.compile(r"(?P<path>.+?)(\.token_adapter)?\.trainable_tokens_delta(\.default)?")


@dataclass
class _Module:
    """What the adapter holds for one module, as names in the adapter's file."""

    factors: dict[str, str] = field(default_factory=dict)  # lora_A, lora_B, lora_embedding_A, ..., magnitude
    bias: str | None = None  # bias of lora_B
    tokens: str | None = None  # new rows of an embedding

    @property
    def is_embedding(self) -> bool:
        return "lora_embedding_A" in self.factors


class Adapter:
    """A PEFT LoRA adapter on disk. Nothing is read but its config and headers until a tensor is folded.

    Raises:
        InputError: not LoRA, a variant that cannot be folded, or an incomplete file.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder, self.name = folder, name if name is not None else str(folder)
        self.config = read_json(folder / _CONFIG)
        self._refuse_unsupported()
        files = [folder / f"adapter_model{suffix}" for suffix in (".safetensors", ".bin")]
        path = next((p for p in files if p.exists()), None)
        if path is None:
            raise InputError(f"adapter '{self.name}' has no adapter_model.safetensors: download it again")
        self.tensors = FileCheckpoint(path, self.name)
        self.modules: dict[str, _Module] = {}
        self.replaced: dict[str, str] = {}
        for key in self.tensors.keys():  # noqa: SIM118
            self._sort_in(key)
        self._check_factors()

    @property
    def base_ref(self) -> str | None:
        """The base model that the adapter was trained on, as its config says."""
        name, revision = self.config.get("base_model_name_or_path"), self.config.get("revision")
        if not isinstance(name, str) or not name:
            return None
        return f"{name}@{revision}" if revision and not Path(name).expanduser().exists() else name

    def rank(self, path: str) -> int:
        return int(_pattern_value(self.config.get("rank_pattern"), path, self.config.get("r", 8)))

    def scaling(self, path: str) -> float:
        """s of the module: α/r, or α/√r with rsLoRA; both may be set per module by patterns."""
        alpha = float(_pattern_value(self.config.get("alpha_pattern"), path, self.config.get("lora_alpha", 8)))
        rank = self.rank(path)
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def token_indices(self, path: str) -> Tensor:
        indices = self.config.get("trainable_token_indices") or []
        if isinstance(indices, dict):
            indices = next((v for k, v in indices.items() if path == k or path.endswith(f".{k}")), [])
        return torch.tensor(indices, dtype=torch.long)

    def get(self, key: str) -> Tensor:
        return self.tensors.get(key).float()

    def changes_nothing(self) -> bool:
        """Whether every factor B is zero and nothing else is set: an adapter that was never trained."""
        modules = self.modules.values()
        if self.replaced or any(m.tokens or m.bias or "lora_magnitude_vector" in m.factors for m in modules):
            return False
        ups = [m.factors.get("lora_B") or m.factors["lora_embedding_B"] for m in modules]
        return not any(bool(self.tensors.get(key).any()) for key in ups)

    def _refuse_unsupported(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise InputError(f"adapter '{self.name}' is of PEFT type {kind}, and only LORA can be folded here: {_FOLD}")
        for option in _VARIANTS:
            if self.config.get(option):
                raise InputError(f"adapter '{self.name}' uses {option}, which cannot be folded here: {_FOLD}")
        init = self.config.get("init_lora_weights", True)
        known = init.lower() if isinstance(init, str) else init
        if known not in _HARMLESS_INIT:
            raise InputError(
                f"adapter '{self.name}' was initialised with {init}, which changes the base weights too: save it with "
                "PEFT's path_initial_model_for_weight_conversion, or fold it with merge_and_unload"
            )

    def _sort_in(self, key: str) -> None:
        name = key.removeprefix(_PREFIX)
        factor, tokens = _FACTOR.fullmatch(name), _TOKENS.fullmatch(name)
        if factor:
            module = self.modules.setdefault(factor["path"].removesuffix(".base_layer"), _Module())
            if factor["leaf"] == "bias":
                module.bias = key
            else:
                module.factors[factor["part"]] = key
        elif tokens:
            self.modules.setdefault(tokens["path"], _Module()).tokens = key
        elif ".original_module." not in name and ".token_adapter." not in name:
            name = re.sub(r"\.modules_to_save(\.default)?\.", ".", name)
            self.replaced[name.replace(".base_layer.", ".")] = key

    def _check_factors(self) -> None:
        if not self.modules and not self.replaced:
            raise InputError(f"adapter '{self.name}' holds no tensors: save it again")
        for path, module in self.modules.items():
            pair = ("lora_embedding_A", "lora_embedding_B") if module.is_embedding else ("lora_A", "lora_B")
            lost = [part for part in pair if part not in module.factors]
            if lost and (module.factors or module.bias):
                raise InputError(f"adapter '{self.name}' lacks {lost[0]} of '{path}': save or download it again")
            if not module.factors:
                continue
            if module.tokens and len(self.token_indices(path)) != self.tensors.shape(module.tokens)[0]:
                raise InputError(f"adapter '{self.name}' does not say which tokens of '{path}' it trained")
            rank = self.tensors.shape(module.factors[pair[0]])[0]
            if rank != self.rank(path):
                raise InputError(
                    f"adapter '{self.name}' has rank {rank} at '{path}' where its {_CONFIG} says {self.rank(path)}: "
                    "the two files do not belong together"
                )


def open_adapter(ref: str | Path, *, cache_dir: str | Path | None = None) -> Adapter:
    """The adapter that `ref` names: a folder, a Hub id or `id@revision`.

    Raises:
        InputError: nothing there, or no adapter that can be folded.
    """
    folder = locate(str(ref), cache_dir=cache_dir)
    if not (folder / _CONFIG).is_file():
        raise InputError(f"'{ref}' is not a PEFT adapter (no {_CONFIG}): give it without a '+' if it is a full model")
    return Adapter(folder, str(ref))


def open_model(
    ref: str | Path,
    *,
    base: Checkpoint | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Open what a recipe may name as a model: a full checkpoint, `model+adapter`, or an adapter alone.

    Args:
        ref: see `reader.open_checkpoint`; an adapter folder or id stands for its base with the adapter folded in.
        base: the base of an adapter given alone; without it, the one that its adapter_config.json names.
        cache_dir: of the Hub, instead of the default.
        trust_remote_code: whether the base's own Python code may run (to map names).
    """
    model, adapter = split_adapter(str(ref))
    if adapter is not None:
        folded = open_adapter(adapter, cache_dir=cache_dir)
        root: Checkpoint = open_checkpoint(model, cache_dir=cache_dir)
        return AdaptedCheckpoint(root, folded, name=str(ref), trust_remote_code=trust_remote_code)
    path = locate(model, cache_dir=cache_dir)
    if not is_adapter(path):
        return FileCheckpoint(path, model)
    alone = Adapter(path, model)
    root = base if base is not None else _base_of(alone, cache_dir)
    return AdaptedCheckpoint(root, alone, name=model, trust_remote_code=trust_remote_code)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no full model."""
    full = (SAFE, SAFE_INDEX, BIN, BIN_INDEX)
    return (folder / _CONFIG).is_file() and not any((folder / name).exists() for name in full)


def _base_of(adapter: Adapter, cache_dir: str | Path | None) -> FileCheckpoint:
    if adapter.base_ref is None:
        raise InputError(f"adapter '{adapter.name}' does not say which model it belongs to: give it as MODEL+ADAPTER")
    try:
        return open_checkpoint(adapter.base_ref, cache_dir=cache_dir)
    except InputError as error:
        raise InputError(f"{error} (the base that adapter '{adapter.name}' names; another: MODEL+ADAPTER)") from error


@dataclass
class _Edit:
    """How one tensor differs from the base's: taken from `source` or `replacement`, then changed by `module`."""

    source: str | None
    replacement: str | None = None
    path: str = ""
    module: _Module | None = None
    is_bias: bool = False


class AdaptedCheckpoint(Checkpoint):
    """`base` with `adapter` folded in, in the base's names and dtypes; only touched tensors are computed.

    An adapter on one end of a tied embedding unties it, as PEFT's forward pass does: the other end keeps the base's
    values under its own name. Trained single tokens stay tied.

    Raises:
        InputError: some of the adapter's modules are not in the base; names the first and counts them.
    """

    def __init__(
        self, base: Checkpoint, adapter: Adapter, *, name: str | None = None, trust_remote_code: bool = False
    ) -> None:
        self.base, self.adapter = base, adapter
        self.name = name or f"{base.name}+{adapter.name}"
        self.folder = base.folder
        self._trust = trust_remote_code
        self._edits: dict[str, _Edit] = {}
        self._extra: dict[str, str] = {}  # keys that the base's file lacks → the base's key in whose shard they go
        self._match()
        self._untie()
        self._flipped = {key for key, edit in self._edits.items() if self._check_shape(key, edit)}

    @property
    def touched(self) -> list[str]:
        """Keys whose tensors the adapter changes or adds."""
        return list(self._edits)

    def keys(self) -> list[str]:
        return [*self.base.keys(), *self._extra]

    def shape(self, key: str) -> tuple[int, ...]:
        edit = self._edits.get(key)
        if edit is None:
            return self.base.shape(key)
        if edit.replacement is not None:
            return self.adapter.tensors.shape(edit.replacement)
        assert edit.source is not None
        return self.base.shape(edit.source)

    def dtype(self, key: str) -> torch.dtype:
        edit = self._edits.get(key)
        if edit is not None and edit.source is None:
            assert edit.replacement is not None
            return self.adapter.tensors.dtype(edit.replacement)
        return self.base.dtype(edit.source if edit is not None and edit.source is not None else key)

    def shard_of(self, key: str) -> str:
        return self.base.shard_of(self._extra.get(key, key))

    def shards(self) -> list[str]:
        return self.base.shards()

    def shard_metadata(self, shard: str) -> dict[str, str]:
        return self.base.shard_metadata(shard)

    @property
    def index(self) -> dict[str, Any] | None:
        return self.base.index

    def index_bytes(self) -> bytes | None:
        return self.base.index_bytes()

    def get(self, key: str) -> Tensor:
        edit = self._edits.get(key)
        if edit is None:
            return self.base.get(key)
        return self._fold(key, self._start(edit)).to(self.dtype(key))

    def rows(self, key: str, index: Tensor) -> Tensor:
        edit = self._edits.get(key)
        if edit is None:
            return self.base.rows(key, index)
        module = edit.module
        if module and module.factors and (not module.is_embedding or "lora_magnitude_vector" in module.factors):
            return self.get(key)[index]
        index = index.reshape(-1)
        if edit.replacement is not None:
            weight = self.adapter.tensors.rows(edit.replacement, index)
        else:
            assert edit.source is not None
            weight = self.base.rows(edit.source, index)
        return self._fold(key, _wide(weight), index).to(self.dtype(key))

    def check(self) -> list[str]:
        problems = self.base.check() + self.adapter.tensors.check()
        if not problems and self.adapter.changes_nothing():
            problems.append(f"adapter '{self.adapter.name}' changes nothing (every lora_B is zero): was it trained?")
        return problems

    def fingerprint(self) -> str:
        parts = [self.base.fingerprint(), self.adapter.tensors.fingerprint()]
        config = {k: v for k, v in self.adapter.config.items() if k != "base_model_name_or_path"}
        parts.append(json.dumps(config, sort_keys=True))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    # ---------------------------------------------------------------------------------------------- matching

    @cached_property
    def _names(self) -> KeyMap | None:
        """The base's own key map; None where it has no config, so that names must agree as they are."""
        if not self.base.config:
            return None
        return KeyMap(skeleton(self.base, trust_remote_code=self._trust), self.base)

    def _match(self) -> None:
        """Find the base's key for every name of the adapter; complain unless all are found."""
        adapter = self.adapter
        wanted = [f"{path}.weight" for path in adapter.modules]
        wanted += [f"{path}.bias" for path, module in adapter.modules.items() if module.bias]
        found = self._find([*wanted, *adapter.replaced])
        lost = [name for name in [*wanted, *adapter.replaced] if name not in found and not self._is_new_head(name)]
        if lost:
            total = len({*wanted, *adapter.replaced})
            raise InputError(
                f"adapter '{adapter.name}' does not fit '{self.base.name}': {len(lost)} of its {total} tensors are "
                f"not in the model, the first is '{lost[0]}'; give the model it was trained on as MODEL+ADAPTER"
            )
        for name, key in adapter.replaced.items():
            self._edit(found, name).replacement = key
        for path, module in adapter.modules.items():
            weight = self._edit(found, f"{path}.weight")
            weight.path, weight.module = path, module
            if module.bias:
                bias = self._edit(found, f"{path}.bias")
                bias.path, bias.module, bias.is_bias = path, module, True

    def _find(self, names: Iterable[str]) -> dict[str, tuple[str, str | None]]:
        """By adapter name: the key it gets here, and the base's key with its start value (None: only the adapter's)."""
        found: dict[str, tuple[str, str | None]] = {}
        rest = []
        for name in names:
            if name in self.base:
                found[name] = (name, name)
            else:
                rest.append(name)
        if rest and self._names is not None:
            for name, module_name in module_names(self._names.model, rest).items():
                key = self._names.key(module_name)
                if key is not None:
                    # A tied name shares the file's one tensor but is edited on its own, under its own name.
                    found[name] = (module_name if module_name in self._names.tied else key, key)
        return found

    def _is_new_head(self, name: str) -> bool:
        """A module that was trained from scratch, e.g. a classifier on a bare base: nothing in the base to match."""
        saved = self.adapter.config.get("modules_to_save") or []
        return name in self.adapter.replaced and any(part in saved for part in name.split("."))

    def _edit(self, found: dict[str, tuple[str, str | None]], name: str) -> _Edit:
        key, source = found.get(name, (name, None))
        if key not in self._edits:
            self._edits[key] = _Edit(source)
            if key not in self.base:
                self._extra[key] = source if source is not None else self.base.keys()[-1]
        return self._edits[key]

    def _untie(self) -> None:
        """Give the other names of an edited tied tensor the base's values, as PEFT does by wrapping one module only."""
        names = self._names
        if names is None or not names.tied:
            return
        for name, anchor in names.tied.items():
            anchor_key = names.key(anchor)
            edit = self._edits.get(anchor_key or "")
            token_only = edit is not None and edit.replacement is None and not (edit.module and edit.module.factors)
            own_copy = names.key(name) != anchor_key
            if edit is None or anchor_key is None or token_only or own_copy or name in self._edits:
                continue
            self._edits[name] = _Edit(anchor_key)
            self._extra[name] = anchor_key

    def _check_shape(self, key: str, edit: _Edit) -> bool:
        """Whether the base stores this matrix as (in, out), as GPT-2's Conv1D does.

        Raises:
            InputError: the factors are for a tensor of another shape.
        """
        if edit.module is None or edit.is_bias or not edit.module.factors:
            return False
        shapes = {part: self.adapter.tensors.shape(name) for part, name in edit.module.factors.items()}
        stored = self.shape(key)
        if edit.module.is_embedding:
            full: tuple[int, ...] = (shapes["lora_embedding_A"][1], shapes["lora_embedding_B"][0])
            flipped = False
        else:
            full = (shapes["lora_B"][0], *shapes["lora_A"][1:])
            flipped = len(full) == 2 and stored == full[::-1]
            flipped = flipped and (stored != full or self._square_is_flipped(edit))
        if stored != full and not flipped:
            raise InputError(
                f"adapter '{self.adapter.name}' is for a {list(full)} tensor at '{edit.path}' where "
                f"'{self.base.name}' has {list(stored)}: give the model it was trained on as MODEL+ADAPTER"
            )
        return flipped

    def _square_is_flipped(self, edit: _Edit) -> bool:
        """A square matrix does not show its orientation: its module does, or else the adapter's config."""
        if self._names is None:
            return bool(self.adapter.config.get("fan_in_fan_out"))
        name = module_names(self._names.model, [f"{edit.path}.weight"])[f"{edit.path}.weight"]
        return isinstance(self._names.model.get_submodule(name.rpartition(".")[0]), Conv1D)

    # ---------------------------------------------------------------------------------------------- folding

    def _start(self, edit: _Edit) -> Tensor:
        if edit.replacement is not None:
            return self.adapter.get(edit.replacement)
        assert edit.source is not None
        return _wide(self.base.get(edit.source))

    def _fold(self, key: str, weight: Tensor, index: Tensor | None = None) -> Tensor:
        """The edited tensor in float32; `weight` holds only the rows `index` of an embedding, if given."""
        edit = self._edits[key]
        module = edit.module
        if module is None:
            return weight
        if edit.is_bias:
            assert module.bias is not None
            return weight + self.adapter.get(module.bias) * self.adapter.scaling(edit.path)
        if module.is_embedding:
            weight = self._fold_embedding(edit.path, module, weight, index)
        elif module.factors:
            weight = weight.T if key in self._flipped else weight
            weight = self._fold_matrix(edit.path, module, weight)
            weight = (weight.T if key in self._flipped else weight).contiguous()
        return self._fold_tokens(edit.path, module, weight, index) if module.tokens else weight

    def _fold_matrix(self, path: str, module: _Module, weight: Tensor) -> Tensor:
        """Linear and ungrouped convolutions, rows as outputs: W' = W + s B A, with DoRA's magnitude per row."""
        a, b = self.adapter.get(module.factors["lora_A"]), self.adapter.get(module.factors["lora_B"])
        rank = a.shape[0]
        weight = weight + (b.reshape(-1, rank) @ a.reshape(rank, -1)).reshape(weight.shape) * self.adapter.scaling(path)
        if "lora_magnitude_vector" in module.factors:
            norm = torch.linalg.vector_norm(weight.flatten(1), dim=1)
            factor = self.adapter.get(module.factors["lora_magnitude_vector"]).flatten() / norm
            weight = factor.reshape(-1, *[1] * (weight.dim() - 1)) * weight
        return weight

    def _fold_embedding(self, path: str, module: _Module, weight: Tensor, index: Tensor | None) -> Tensor:
        """Embeddings: W' = W + s (B A)ᵀ; DoRA's magnitudes are per column there."""
        a = self.adapter.get(module.factors["lora_embedding_A"])
        b = self.adapter.get(module.factors["lora_embedding_B"])
        weight = weight + (b @ (a if index is None else a[:, index])).T * self.adapter.scaling(path)
        if "lora_magnitude_vector" in module.factors:
            magnitude = self.adapter.get(module.factors["lora_magnitude_vector"]).flatten()
            weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=0))
        return weight

    def _fold_tokens(self, path: str, module: _Module, weight: Tensor, index: Tensor | None) -> Tensor:
        """Rows of single trained tokens replace the base's."""
        assert module.tokens is not None
        tokens, values = self.adapter.token_indices(path), self.adapter.get(module.tokens)
        weight = weight.clone()
        if index is None:
            weight[tokens] = values
        else:
            row, place = (index[:, None] == tokens[None, :]).nonzero(as_tuple=True)
            weight[row] = values[place]
        return weight


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _pattern_value(patterns: Any, path: str, default: Any) -> Any:
    """PEFT's rule for rank_pattern and alpha_pattern: the first regular expression that ends the path wins."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default
