"""What can be calibrated inside a block, found by running the model once: input groups, norms, and what is kept.

Linear modules that read the same tensor form one group and share their moments. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .blocks import Gate, batch_size, call_model, inputs_of, stack_of
from .errors import InputError
from .settings import Calibration

CLASS_TOKEN_MODELS = ("clip_vision_model", "vit")
"""Model types whose output reads the class token alone: in their last block the other tokens weigh 0.01 (facts A.5)."""
OTHER_TOKENS = 0.01
EXEMPT = ("k_proj", "v_proj", "key", "value")
"""Modules of a class-token block that still see every token alike: attention reads all keys and values."""


@dataclass(frozen=True)
class Group:
    """Linear modules of a block (names within the block) that read the same tensor."""

    modules: tuple[str, ...]
    width: int
    outputs: tuple[int, ...]
    mask: str | None = None
    """Batch key of the padding mask over this group's rows."""
    readout: bool = False
    """Whether the class-token weights of the last block apply."""
    rows_per_sample: float = 1.0
    copied: bool = False
    """Whether the block changes in place what was read or given (`x += …`), so that it is copied when it is seen."""


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or RMSNorm of a block. The effective scale is weight + offset (Gemma stores γ − 1)."""

    module: str
    channels: int
    centred: bool
    eps: float
    offset: float = 0.0
    bias: bool = False
    mask: str | None = None
    readout: bool = False
    copied: bool = False


Unit = Group | Norm


def unit_modules(unit: Unit) -> tuple[str, ...]:
    """The modules of a unit, by their names in the block."""
    return unit.modules if isinstance(unit, Group) else (unit.module,)


@dataclass
class BlockInfo:
    """One block: its units (groups and norms) in order of execution, and the modules that are kept, with reasons."""

    name: str
    units: list[Unit] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def stack(self) -> str:
        return stack_of(self.name)


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear module's weight as (out, in), or back: GPT-2's Conv1D stores it transposed."""
    return weight.T if isinstance(module, Conv1D) else weight


def weight_view(module: nn.Module) -> Tensor:
    """The module's weight as (out, in), a view."""
    return as_matrix(module, tensor_of(module, "weight"))


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """The data of a parameter that the module is known to have."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.data


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def _norm_eps(module: nn.Module) -> float:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return torch.finfo(torch.float32).eps


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """z: the norm's output before its affine, in at least float32."""
    x = x if x.dtype == torch.float64 else x.float()
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)


def _as_norm(name: str, module: nn.Module, x: Tensor, y: Any) -> Norm | None:
    """Recognise a norm by what it computes: z·w + b, z·w, or z·(1+w), on its own input."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or x.shape[-1:] != weight.shape or not isinstance(y, Tensor):
        return None
    if list(module.children()) or y.shape != x.shape:
        return None
    eps = _norm_eps(module)
    if isinstance(module, nn.LayerNorm):
        return Norm(name, len(weight), True, eps, bias=module.bias is not None)
    if len(list(module.parameters())) != 1:
        return None
    norm = Norm(name, len(weight), False, eps)
    z = normalise(x, norm)
    for offset in (0.0, 1.0):
        if torch.allclose((z * (weight.to(z) + offset)).to(y.dtype), y, rtol=2e-2, atol=1e-3):
            return Norm(name, len(weight), False, eps, offset=offset)
    return None


@dataclass
class _Call:
    module: str
    x: Tensor
    norm: Norm | None
    y: Tensor | None
    """What a linear module gave."""

    def __post_init__(self) -> None:
        self._seen = [(t, version(t)) for t in (self.x, self.y) if t is not None]
        self.read = id(self.x), version(self.x)
        """Equal for two modules that read the same values."""

    @property
    def changed(self) -> bool:
        """Whether its input or output has been changed in place since."""
        return any(t.is_inference() or version(t) != before for t, before in self._seen)


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


class _Recorder:
    """Hooks for one recorded forward: order of the blocks, and what each of their modules read."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], mask_keys: Mapping[str, str | None], batch_size: int):
        self.model, self.blocks, self.mask_keys, self.batch_size = model, blocks, mask_keys, batch_size
        self.order: list[str] = []
        self.infos: dict[str, BlockInfo] = {}
        self.calls: list[_Call] = []
        self.arguments: list[Tensor] = []

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.order.append(name)
        self.calls = []
        values = [*args, *kwargs.values()]
        self.arguments = [v for v in values if isinstance(v, Tensor) and v.dim() >= 2 and v.is_floating_point()]

    def note(self, name: str, module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        if args and isinstance(args[0], Tensor):
            norm = None if _is_linear(module) else _as_norm(name, module, args[0], y)
            if norm is not None or _is_linear(module):
                self.calls.append(_Call(name, args[0], norm, y if norm is None else None))

    def leave(self, name: str) -> None:
        if name not in self.infos:
            self.infos[name] = self._describe(name)
        self.calls, self.arguments = [], []

    def _describe(self, name: str) -> BlockInfo:
        info, block = BlockInfo(name), self.model.get_submodule(name)
        modules = dict(block.named_modules())
        times: dict[str, int] = {}
        for call in self.calls:
            times[call.module] = times.get(call.module, 0) + 1
        groups: dict[tuple[int, int], list[_Call]] = {}
        for call in self.calls:
            if times[call.module] > 1:
                info.kept[call.module] = f"runs {times[call.module]} times in one pass of its block"
            elif _is_linear(modules[call.module]):
                groups.setdefault(call.read, []).append(call)
        done: set[tuple[int, int]] = set()
        for call in self.calls:
            if times[call.module] > 1:
                continue
            key, reason = self._rows(name, call.x)
            if reason:
                info.kept[call.module] = reason
            elif call.norm is not None:
                info.units.append(replace(call.norm, mask=key, copied=call.changed))
            elif call.read in groups and call.read not in done:
                done.add(call.read)
                info.units.append(self._group(groups[call.read], modules, key))
        self._keep_the_rest(info, modules, times)
        return info

    def _group(self, calls: list[_Call], modules: dict[str, nn.Module], key: str | None) -> Group:
        names, x = [call.module for call in calls], calls[0].x
        outputs = tuple(weight_view(modules[n]).shape[0] for n in names)
        rows = x.numel() / x.shape[-1] / self.batch_size
        copied = any(call.changed for call in calls)
        return Group(tuple(names), x.shape[-1], outputs, key, rows_per_sample=rows, copied=copied)

    def _rows(self, block: str, x: Tensor) -> tuple[str | None, str]:
        """The mask key that covers the rows of `x`, or why its rows cannot be told."""
        hidden = self.arguments[0] if self.arguments else x
        if any(x is other for other in self.arguments[1:]):
            return ("attention_mask" if self.mask_keys.get("encoder") else None), ""  # the encoder's states
        key = self.mask_keys[block]
        if hidden.dim() == 3 and x.dim() == 2:
            if x.shape[0] == hidden.shape[0] * hidden.shape[1]:
                return key, ""
            return None, "reads routed rows, which differ between models"
        if key is not None and (x.dim() < 3 or x.shape[:2] != hidden.shape[:2]):
            return None, "reads routed or re-ordered rows that the padding mask does not describe"
        if x.shape[0] % self.batch_size:
            return None, "reads routed rows, which differ between models"
        return key, ""

    def _keep_the_rest(self, info: BlockInfo, modules: dict[str, nn.Module], times: dict[str, int]) -> None:
        chosen = {m for u in info.units for m in unit_modules(u)}
        for name, module in modules.items():
            if name in chosen or name in info.kept:
                continue
            own = [n for n, _ in module.named_parameters(recurse=False)]
            if not own:
                continue
            if any(p.dim() == 3 for p in module.parameters(recurse=False)):
                info.kept[name] = "packed expert tensors of a mixture of experts"
            elif _is_linear(module) and name not in times:
                info.kept[name] = "never ran in the recorded pass"
            else:
                info.kept[name] = f"{type(module).__name__} is not a linear module or a known norm"


def probe(model: nn.Module, blocks: Sequence[str], batch: Any, device: torch.device | None = None) -> list[BlockInfo]:
    """Run the model once on a batch; the blocks in order of execution, with their units and kept modules.

    Raises:
        InputError: a block never ran, or ran more than once (weights shared across depth).
    """
    recorder = _Recorder(model, blocks, mask_keys(model, blocks, batch), batch_size(batch))
    with recording(recorder, model, blocks):
        call_model(model, batch, device)
    for name in blocks:
        times = recorder.order.count(name)
        if times == 0:
            raise InputError(
                f"block '{name}' never ran on the first batch; give batches that reach it, or name the blocks wanted"
            )
        if times > 1:
            raise InputError(
                f"block '{name}' runs {times} times in one forward (weights shared across depth): not supported"
            )
    return [recorder.infos[name] for name in recorder.order]


@contextmanager
def recording(recorder: _Recorder, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    handles = []
    for name in blocks:
        block = model.get_submodule(name)
        handles.append(
            block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: recorder.enter(name, args, kwargs), with_kwargs=True
            )
        )
        for inner, module in block.named_modules():
            if inner and next(module.parameters(recurse=False), None) is not None:
                handles.append(
                    module.register_forward_hook(lambda mod, args, y, inner=inner: recorder.note(inner, mod, args, y))
                )
        handles.append(block.register_forward_hook(lambda *_, name=name: recorder.leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stack_config(model: nn.Module, block: str) -> Any:
    """Config of the block's nearest ancestor that has one."""
    parts = block.split(".")
    for depth in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None:
            return config
    return None


def mask_keys(model: nn.Module, blocks: Sequence[str], batch: Any) -> dict[str, str | None]:
    """Per block, the batch key of the padding mask over its own rows; under 'encoder', the encoder's."""
    _, kwargs = inputs_of(batch)
    two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    encoder = "attention_mask" if "attention_mask" in kwargs else None
    decoder = next((k for k in ("decoder_attention_mask", "labels") if k in kwargs), None)
    keys: dict[str, str | None] = {"encoder": encoder if two_sided else None}
    for name in blocks:
        if hasattr(stack_config(model, name), "patch_size"):
            keys[name] = None  # images have no padding
        elif two_sided and "decoder" in name.split("."):
            keys[name] = decoder
        else:
            keys[name] = encoder
    return keys


def keep_rows(batch: Any, key: str | None) -> Tensor | None:
    """Which rows are real (bool, (batch, sequence)), from the batch's own mask; None: all of them."""
    if key is None:
        return None
    mask = inputs_of(batch)[1].get(key)
    if mask is None:
        return None
    keep = mask != -100 if key == "labels" else mask != 0
    return None if bool(keep.all()) else keep


def select_rows(x: Tensor, keep: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Real rows of a captured input as (rows, width), and their token weights (rows,) or None for all one.

    `weights` is per sequence position; extra leading dimensions (heads of a q/k norm) repeat a token's weight.
    """
    width = x.shape[-1]
    lead = keep if keep is not None else weights
    if lead is None:
        return x.reshape(-1, width), None
    if keep is None:
        assert weights is not None
        per_token = weights.expand(x.shape[0], -1)
    else:
        per_token = keep.to(x.device) if weights is None else keep.to(x.device) * weights
    tokens = x.reshape(per_token.numel(), -1, width)
    flat = per_token.reshape(-1)
    chosen = flat.nonzero().squeeze(1)
    kept = tokens[chosen]
    if weights is None:
        return kept.reshape(-1, width), None
    return kept.reshape(-1, width), flat[chosen].repeat_interleave(kept.shape[1]).to(x)


def with_readout(infos: list[BlockInfo], model: nn.Module, token_weights: str) -> list[BlockInfo]:
    """Mark the units of each class-token stack's last block; its k and v become a group of their own."""
    last = {info.stack: info for info in infos}
    for info in last.values():
        kind = getattr(stack_config(model, info.name), "model_type", None)
        if token_weights == "uniform" or (token_weights == "auto" and kind not in CLASS_TOKEN_MODELS):
            continue
        units: list[Unit] = []
        for unit in info.units:
            if isinstance(unit, Norm):
                units.append(Norm(**{**vars(unit), "readout": True}))
                continue
            exempt = [n.rpartition(".")[2] in EXEMPT for n in unit.modules]
            units += _subset(unit, [not e for e in exempt], True) + _subset(unit, exempt, False)
        info.units = units
    return infos


def _subset(group: Group, chosen: list[bool], readout: bool) -> list[Group]:
    if not any(chosen):
        return []
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda values: tuple(  # noqa: E731
        v for v, c in zip(values, chosen, strict=True) if c
    )
    return [
        Group(
            **{
                **vars(group),
                "modules": pick(group.modules),
                "outputs": pick(group.outputs),
                "readout": readout,
            }
        )
    ]


def choose(infos: list[BlockInfo], model: nn.Module, settings: Calibration) -> list[BlockInfo]:
    """Apply include / exclude, the norm switch and tied weights; what falls out is kept, with its reason.

    Raises:
        InputError: nothing is left.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def reason(info: BlockInfo, module: str, norm: Norm | None) -> str:
        parameter = model.get_submodule(f"{info.name}.{module}").weight
        if owners.get(id(parameter), 0) > 1:
            return "its weight is shared with another module"
        if not settings.selects(f"{info.name}.{module}.weight"):
            return "left out by include / exclude"
        if norm is not None and (settings.norm == "off" or (settings.norm == "auto" and not norm.centred)):
            return "RMSNorm (norm: auto)" if settings.norm == "auto" else "norms are off"
        return ""

    for info in infos:
        units: list[Unit] = []
        for unit in info.units:
            names = unit_modules(unit)
            reasons = [reason(info, n, unit if isinstance(unit, Norm) else None) for n in names]
            info.kept |= {n: r for n, r in zip(names, reasons, strict=True) if r}
            if isinstance(unit, Group):
                units += _subset(unit, [not r for r in reasons], unit.readout)
            elif not reasons[0]:
                units.append(unit)
        info.units = units
    if not any(info.units for info in infos):
        found = Counter(why for info in infos for why in info.kept.values())
        shown = "; ".join(f"{count} × {why}" for why, count in found.most_common(3))
        raise InputError(f"nothing is left to calibrate in {len(infos)} blocks ({shown}); see include, exclude, norm")
    return infos


class Capture:
    """Inputs of a block's units (and outputs of its linears), caught by hooks while the context is open."""

    def __init__(self, block: nn.Module, units: Sequence[Unit], *, expert: bool, stop: bool):
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.wanted = {key for unit in units if (key := capture_key(unit, expert))}
        self._answers = {name for unit in units if expert and isinstance(unit, Group) for name in unit.modules}
        self._stop = stop
        self._handles: list[Any] = []
        modules = dict(block.named_modules())
        for unit in units:
            key = capture_key(unit, expert)
            if not key:
                continue
            self._handles.append(modules[key].register_forward_pre_hook(self._reader(key, unit.copied)))
            if expert and isinstance(unit, Group):
                for name in unit.modules:
                    self._handles.append(modules[name].register_forward_hook(self._writer(name, unit.copied)))

    def _reader(self, key: str, copied: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.inputs[key] = args[0].clone() if copied else args[0]
            self._stop_if_complete()

        return hook

    def _writer(self, name: str, copied: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
            self.outputs[name] = y.clone() if copied else y
            self._stop_if_complete()

        return hook

    def _stop_if_complete(self) -> None:
        if self._stop and self.inputs.keys() == self.wanted and self.outputs.keys() == self._answers:
            Gate.stop()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def capture_key(unit: Unit, expert: bool) -> str:
    """The module whose input stands for the unit; of an expert, a norm's input is not needed (empty)."""
    if isinstance(unit, Group):
        return unit.modules[0]
    return "" if expert else unit.module
