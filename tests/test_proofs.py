"""Models that do more than hand one tensor from block to block: refused when that matters, right when it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featcal
from featcal.errors import InputError
from featcal.proofs import prove

WIDTH, DEPTH = 12, 3


class Block(nn.Module):
    """A norm, an MLP and a residual; `in_place` writes over what its modules have read and given."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        if not self.in_place:
            gate = torch.relu(self.gate(read))
            return x + self.down(gate * self.up(read * 0.5))
        gate = self.gate(read).relu_()
        read *= 0.5  # `up` reads the same tensor with other values: it must not join `gate`'s group
        x += self.down(gate.mul_(self.up(read)))
        return x


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Block(kind == "in place") for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = x * 1.0, []
        for place, layer in enumerate(self.layers):
            x = layer(x + seen[0] if self.kind == "skip" and place == 2 else x)
            seen.append(x)
        logits: Tensor = self.head(sum(seen) if self.kind == "sum" else x)
        return logits


def setup(kind: str) -> dict[str, Any]:
    """Models of one kind; the same weights and data for all kinds."""
    torch.manual_seed(0)
    base = Net(kind)

    def tuned(models: int, scale: float) -> nn.Module:
        model = copy.deepcopy(base)
        generator = torch.Generator().manual_seed(models)
        for parameter in model.parameters():
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
        return model

    experts = {f"task{i}": tuned(i, 0.1) for i in (1, 2)}
    merged = copy.deepcopy(base)
    for parameter, *others in zip(merged.parameters(), *(e.parameters() for e in experts.values()), strict=True):
        parameter.data = sum(p.data for p in others) / 2
    data = {task: [torch.randn(8, 5, WIDTH) for _ in range(2)] for task in experts}
    return {"merged": merged, "base": base, "experts": experts, "data": data}


@pytest.mark.parametrize("schedule", ["block", "group"])
def test_blocks_that_write_in_place_are_calibrated_alike(schedule: str) -> None:
    def calibrated(kind: str) -> dict[str, Tensor]:
        given = setup(kind)
        merged = given.pop("merged")
        options = {"blocks": ["layers.*"], "norm": "on", "schedule": schedule, "samples": 16, "progress": False}
        result = featcal.calibrate(merged, **given, tune="off", ridge=0.01, **options)
        assert sum(record.status == "calibrated" for record in result.records) == 4 * DEPTH
        return dict(result.model.named_parameters())

    plain, in_place = calibrated("plain"), calibrated("in place")
    for name, value in plain.items():
        assert torch.equal(in_place[name], value), name


@pytest.mark.parametrize(
    ("kind", "words"), [("skip", "block 'layers.2' of Net reads more"), ("sum", "the end of Net reads more")]
)
def test_what_a_walk_cannot_see_is_refused(kind: str, words: str) -> None:
    given = setup(kind)
    with pytest.raises(InputError, match=words):
        featcal.calibrate(given.pop("merged"), **given, blocks=["layers.*"], progress=False)


def test_a_forward_of_the_instance_is_run_and_put_back() -> None:
    """As accelerate's hooks and patched models have it; the caller's random state is put back as well."""
    given = setup("plain")
    merged, calls = given.pop("merged"), []
    own = merged.layers[1].forward

    def patched(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return own(x)

    merged.layers[1].forward = patched
    state = torch.get_rng_state()
    featcal.calibrate(
        merged, **given, blocks=["layers.*"], tune="off", inplace=True, samples=8, progress=False, device="cpu"
    )
    assert calls and merged.layers[1].forward is patched and "forward" not in vars(merged.layers[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.expand(1, -1, -1)])
def test_one_sample_is_enough(change: Callable[[Tensor], Tensor]) -> None:
    model = Net().eval()
    with torch.no_grad():
        assert prove(model, [f"layers.{i}" for i in range(DEPTH)], change(torch.randn(1, 5, WIDTH))) == ()
