"""`featcal.calibrate` on state dicts: the same weights as on the models they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import featcal
import pico
from featcal.errors import InputError
from featcal.states import as_models

SETTINGS: dict[str, Any] = {"alpha": 0.3, "rho": 2.0, "ridge": 0.05, "progress": False}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def on_disk(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)  # type: ignore[operator]
    return load_file(folder / "model.safetensors")


def expected(setup: pico.Setup, **more: Any) -> dict[str, Tensor]:
    result = featcal.calibrate(
        setup.merged, base=setup.base, experts=setup.experts, data=setup.data, **SETTINGS, **more
    )
    return result.model.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["llama", "vit", "t5", "qwen3-moe"])
@pytest.mark.parametrize("names", ["memory", "disk"])
def test_families(family: str, names: str, tmp_path: Path) -> None:
    setup = pico.family_setup(family)
    models = {"merged": setup.merged, "base": setup.base, **setup.experts}
    states = {n: state(m) if names == "memory" else on_disk(m, tmp_path / n) for n, m in models.items()}
    before = {name: tensor.clone() for name, tensor in states["merged"].items()}
    config: Any = setup.merged.config
    config.architectures = [type(setup.merged).__name__]
    result = featcal.calibrate(
        states["merged"],
        base=states["base"],
        experts={task: states[task] for task in setup.experts},
        data=setup.data,
        config=config if names == "memory" else tmp_path / "merged",
        **SETTINGS,
    )
    assert type(result.model) is type(setup.merged)
    assert same(result.model.state_dict(), expected(setup))
    assert same(states["merged"], before)


def test_a_function_that_makes_the_model() -> None:
    setup = pico.family_setup("mixer")
    result = featcal.calibrate(
        state(setup.merged),
        base=state(setup.base),
        experts={task: state(model) for task, model in setup.experts.items()},
        data=setup.data,
        config=pico.Mixer,
        blocks=["blocks.*"],
        **SETTINGS,
    )
    assert same(result.model.state_dict(), expected(setup, blocks=["blocks.*"]))


@pytest.mark.parametrize("family", ["mixer", "bert"])
def test_experts_as_states_beside_a_merged_model(family: str) -> None:
    setup = pico.family_setup(family)
    more: dict[str, Any] = {"blocks": ["blocks.*"]} if family == "mixer" else {}
    result = featcal.calibrate(
        setup.merged,
        base=state(setup.base),
        experts={task: state(model) for task, model in setup.experts.items()},
        data=setup.data,
        **SETTINGS,
        **more,
    )
    assert same(result.model.state_dict(), expected(setup, **more))


def test_models_pass_untouched() -> None:
    setup = pico.family_setup("mixer")
    merged, base, experts = as_models(setup.merged, setup.base, setup.experts, None)
    assert merged is setup.merged and base is setup.base and experts == setup.experts


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda states: {key: tensor for key, tensor in states.items() if key != name}


def resized(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda states: {**states, name: torch.zeros(3, 3)}


@pytest.mark.parametrize(
    ("family", "spoil", "words"),
    [
        ("llama", without("model.norm.weight"), r"expert 'task1': the state dict lacks 'model.norm.weight'"),
        ("llama", resized("model.layers.0.mlp.up_proj.weight"), "expert 'task1': the state dict is not one of a Llama"),
        ("llama", lambda s: {f"net.{k}": v for k, v in s.items()}, r"lacks '.*' and \d+ more; did you mean"),
        ("mixer", without("norm.bias"), "expert 'task1': the state dict lacks 'norm.bias'"),
        (
            "mixer",
            resized("norm.bias"),
            "the state dict is not the model's: size mismatch for norm.bias",
        ),
        ("mixer", lambda s: {**s, "extra": torch.zeros(1)}, r"is not the model's: Unexpected key\(s\).*extra"),
    ],
)
def test_states_that_do_not_fit(family: str, spoil: Any, words: str) -> None:
    setup = pico.family_setup(family)
    experts = {task: state(model) for task, model in setup.experts.items()}
    experts["task1"] = spoil(experts["task1"])
    with pytest.raises(InputError, match=words):
        featcal.calibrate(setup.merged, base=setup.base, experts=experts, data=setup.data, **SETTINGS)


def test_configs_that_do_not_do(tmp_path: Path) -> None:
    setup = pico.family_setup("llama")
    given: dict[str, Any] = {"base": setup.base, "experts": setup.experts, "data": setup.data, **SETTINGS}
    with pytest.raises(InputError, match="merged is a state dict: give config="):
        featcal.calibrate(state(setup.merged), **given)
    with pytest.raises(InputError, match=r"its architecture is \(none\), which is no transformers model"):
        featcal.calibrate(state(setup.merged), config=setup.merged.config, **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no configuration"):
        featcal.calibrate(state(setup.merged), config=tmp_path, **given)
