"""State dicts as models: what `featcal.calibrate` does when it is given tensors by name instead of modules."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .errors import InputError, nearest

State: TypeAlias = Mapping[str, Tensor]
ModelOrState: TypeAlias = nn.Module | State
Config: TypeAlias = PretrainedConfig | str | os.PathLike[str] | Callable[[], nn.Module]


def as_models(
    merged: ModelOrState, base: ModelOrState, experts: Mapping[str, ModelOrState], config: Config | None
) -> tuple[nn.Module, nn.Module, dict[str, nn.Module]]:
    """Every state dict as a model in eval mode; modules as they are.

    Args:
        config: how to build them: a transformers config that names its architecture, the folder or Hub id of one, or a
            function that returns the model with any weights. Not needed where `merged` is a module: the others are
            built like it.

    Names may be those of `model.state_dict()` or, for transformers models, those of a checkpoint file.

    Raises:
        InputError: no config, or tensors that are missing or of another shape.
    """
    template = merged if config is None and isinstance(merged, nn.Module) else config
    states = [model for model in (merged, base, *experts.values()) if not isinstance(model, nn.Module)]
    if template is None and states:
        raise InputError("merged is a state dict: give config=, a transformers config, its folder, or a function")

    def built(label: str, model: ModelOrState) -> nn.Module:
        assert template is not None
        return model if isinstance(model, nn.Module) else _build(label, model, template)

    made = {task: built(f"expert '{task}'", expert) for task, expert in experts.items()}
    return built("merged", merged), built("base", base), made


def _build(label: str, state: State, template: Config | nn.Module) -> nn.Module:
    model: nn.Module | None
    if isinstance(template, nn.Module):
        model = template if isinstance(template, PreTrainedModel) else copy.deepcopy(template)
    else:
        model = None if isinstance(template, (PretrainedConfig, str, os.PathLike)) else template()
    if model is not None and not isinstance(model, PreTrainedModel):
        return _load_plain(label, state, model)
    config = _config(template) if model is None else model.config
    kind = _class(config) if model is None else type(model)
    try:
        found: Any = kind.from_pretrained(None, config=config, state_dict=dict(state), output_loading_info=True)
    except RuntimeError as error:
        raise InputError(f"{label}: the state dict is not one of a {kind.__name__}: {_first_line(error)}") from error
    loaded, info = found
    if info["missing_keys"]:
        raise InputError(f"{label}: {_missing(sorted(info['missing_keys']), state)}")
    return loaded.eval()


def _load_plain(label: str, state: State, model: nn.Module) -> nn.Module:
    missing = [name for name in model.state_dict() if name not in state]
    if missing:
        raise InputError(f"{label}: {_missing(missing, state)}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise InputError(f"{label}: the state dict is not the model's: {' '.join(lines[1:2]).strip()}") from error
    return model.eval()


def _config(config: object) -> PretrainedConfig:
    if isinstance(config, PretrainedConfig):
        return config
    assert isinstance(config, (str, os.PathLike))
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(config)
    except (OSError, ValueError) as error:
        raise InputError(f"config: '{os.fspath(config)}' has no configuration: {_first_line(error)}") from error
    return found


def _class(config: PretrainedConfig) -> type[PreTrainedModel]:
    name = (config.architectures or ["(none)"])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise InputError(
            f"config: its architecture is {name}, which is no transformers model; set config.architectures to one, "
            "e.g. ['LlamaForCausalLM'], or give a function that makes the model"
        )
    return kind


def _missing(names: list[str], state: State) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the state dict lacks '{names[0]}'{more}{nearest(names[0], state)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
