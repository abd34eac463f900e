"""The engine against the literal whole-model reference, on every family, both schedules."""

from __future__ import annotations

import pytest
import torch

import featcal
import literal
import pico

FIELDS = {"alpha": 0.3, "rho": 2.0, "ridge": 0.05}


def calibrated(setup: pico.Setup, **fields: object) -> featcal.Result:
    return featcal.calibrate(
        setup.merged,
        base=setup.base,
        experts=setup.experts,
        data=setup.data,
        blocks=setup.blocks,
        progress=False,
        **{**FIELDS, **fields},
    )


@pytest.mark.parametrize("schedule", ["block", "group"])
@pytest.mark.parametrize("family", pico.FAMILIES)
def test_weights_and_objectives_equal_the_literal_reference(family: str, schedule: str) -> None:
    setup = pico.family_setup(family)
    fields = {"norm": "on", "schedule": schedule}
    expected, objectives = literal.calibrate(
        setup.merged, setup.base, setup.experts, setup.data, setup.blocks, eps_on_anchor=True, **FIELDS, **fields
    )
    result = calibrated(setup, **fields)
    wanted, merged = dict(expected.named_parameters()), dict(setup.merged.named_parameters())
    changed = 0
    for name, parameter in result.model.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        changed += not torch.equal(parameter, merged[name])
    assert changed >= len(objectives)
    records = {f"{r.block}.{r.module}": r for r in result.records if r.status == "calibrated"}
    assert records.keys() == objectives.keys()
    for name, (before, after) in objectives.items():
        assert records[name].before == pytest.approx(before, rel=1e-3, abs=1e-7)
        assert records[name].after == pytest.approx(after, rel=1e-3, abs=1e-7)
        assert after <= before or records[name].kind != "linear"


@pytest.mark.parametrize("family", ["llama", "clip-vision", "t5"])
def test_float64_models_agree_to_nine_digits(family: str) -> None:
    setup = pico.family_setup(family, dtype=torch.float64)
    expected, _ = literal.calibrate(
        setup.merged, setup.base, setup.experts, setup.data, setup.blocks, eps_on_anchor=True, norm="on", **FIELDS
    )
    result = calibrated(setup, norm="on")
    wanted = dict(expected.named_parameters())
    for name, parameter in result.model.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
