"""The tuner: deterministic, label-free, guarded; candidates side by side equal candidates one by one."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import featcal
import folders
import pico
from featcal import tune
from featcal.api import open_bench, take_samples
from featcal.bench import Bench
from featcal.blocks import batch_size
from featcal.calibrate import calibrate
from featcal.errors import InputError
from featcal.recipe import load_recipe
from featcal.run import choose
from featcal.settings import Calibration, make_settings


def bench_of(setup: pico.Setup, stack: ExitStack, settings: Calibration) -> Bench:
    data = {task: [*batches, *batches] for task, batches in setup.data.items()}
    return open_bench(stack, setup.merged, setup.base, setup.experts, data, settings, setup.blocks, torch.device("cpu"))


@pytest.fixture
def setup() -> pico.Setup:
    return pico.family_setup("bert", noise=0.3)


def settings_of(setup: pico.Setup, **fields: Any) -> Calibration:
    return make_settings(tune="auto", samples=4, **fields)


def test_candidates_side_by_side_equal_candidates_one_by_one(setup: pico.Setup) -> None:
    wanted = [settings_of(setup, rho=rho, ridge=ridge) for rho, ridge in ((1.0, 0.05), (3.0, 0.01), (0.5, 1.0))]
    with ExitStack() as stack:
        bench = bench_of(setup, stack, wanted[0])
        together = bench.job(wanted, onlooker=True)
        calibrate(together)
        rows, _ = tune.divergences(together, {})
        for one, expected in zip(wanted, rows, strict=False):
            alone = bench.job([one], onlooker=True)
            calibrate(alone)
            assert tune.divergences(alone, {})[0] == [expected, rows[-1]]


def test_the_onlooker_is_the_merged_model(setup: pico.Setup) -> None:
    """Its divergence equals that of whole-model forwards."""
    with ExitStack() as stack:
        bench = bench_of(setup, stack, settings_of(setup))
        job = bench.job([settings_of(setup)], onlooker=True)
        calibrate(job)
        rows, kind = tune.divergences(job, {})
        held_out = bench.held_out
    assert kind == "scores"
    for task, expert in setup.experts.items():
        divergences = []
        for batch in held_out[task]:
            with torch.no_grad():
                log_p = expert(**batch).logits.log_softmax(-1)
                log_q = setup.merged(**batch).logits.log_softmax(-1)
            divergences += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
        assert rows[-1][task] == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)


def test_same_inputs_same_choice_and_weights(setup: pico.Setup) -> None:
    data = {task: [*batches, *batches] for task, batches in setup.data.items()}
    results = [
        featcal.calibrate(
            setup.merged, base=setup.base, experts=setup.experts, data=data, samples=4, tune="auto", progress=False
        )
        for _ in range(2)
    ]
    assert results[0].tuning is not None and results[1].tuning is not None
    assert results[0].settings == results[1].settings
    assert [c.criterion for c in results[0].tuning.candidates] == [c.criterion for c in results[1].tuning.candidates]
    for a, b in zip(results[0].model.parameters(), results[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_better_than_the_merged_model_returns_it(monkeypatch: pytest.MonkeyPatch, setup: pico.Setup) -> None:
    monkeypatch.setattr(tune, "criterion", lambda kl, merged: 1.5)
    data = {task: [*batches, *batches] for task, batches in setup.data.items()}
    result = featcal.calibrate(
        setup.merged, base=setup.base, experts=setup.experts, data=data, samples=4, tune="auto", progress=False
    )
    assert result.tuning is not None and result.tuning.chosen is None
    assert set(result.tuning.worse) == set(setup.experts)
    for a, b in zip(result.model.parameters(), setup.merged.parameters(), strict=True):
        assert torch.equal(a, b)


class Poisoned:
    """A label that may not even be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("a label was read")


def test_labels_are_never_read(setup: pico.Setup) -> None:
    data = {task: [(batch, Poisoned()) for batch in [*batches, *batches]] for task, batches in setup.data.items()}
    result = featcal.calibrate(
        setup.merged, base=setup.base, experts=setup.experts, data=data, samples=4, tune="auto", progress=False
    )
    assert result.tuning is not None


def test_held_out_samples_never_enter_a_moment(setup: pico.Setup) -> None:
    with ExitStack() as stack:
        bench = bench_of(setup, stack, settings_of(setup))
        job = bench.job([settings_of(setup)], onlooker=True)
        calibrate(job)
        plain = {k: v.clone() for k, v in job.students[0].overrides.items()}
        bench.held_out = {task: [{**b, "input_ids": b["input_ids"] * 0 + 5} for b in bs]
                          for task, bs in bench.held_out.items()}  # fmt: skip
        other = bench.job([settings_of(setup)], onlooker=True)
        calibrate(other)
        assert all(torch.equal(plain[name], value) for name, value in other.students[0].overrides.items())


def test_without_held_out_samples_it_says_so(setup: pico.Setup) -> None:
    with ExitStack() as stack:
        bench = bench_of(setup, stack, settings_of(setup))
        bench.held_out = {task: [] for task in bench.held_out}
        with pytest.raises(InputError, match="held-out"):
            tune.tune(bench, settings_of(setup))


def test_the_criterion_weighs_tasks_alike_and_caps_a_bad_head() -> None:
    merged = {"a": 0.1, "b": 100.0}
    assert tune.criterion({"a": 0.05, "b": 50.0}, merged) == pytest.approx(0.5)
    assert tune.criterion({"a": 0.05, "b": math.inf}, merged) == pytest.approx((0.5 + tune.CAP) / 2)
    assert tune.criterion({"a": 0.05, "b": math.nan}, merged) == pytest.approx((0.5 + tune.CAP) / 2)
    assert tune.criterion(merged, merged) == 1.0


def test_parabola() -> None:
    assert tune.parabola_bottom({-1.0: 3.0, 0.0: 1.0, 1.0: 3.0}, 0.0) == 0.0
    points = {x: (x - 0.3) ** 2 + 2 for x in (-1.0, 0.0, 2.0)}
    assert tune.parabola_bottom(points, 0.0) == pytest.approx(0.3)
    assert tune.parabola_bottom({0.0: 2.0, 1.0: 1.0}, 1.0) == 1.0
    assert tune.parabola_bottom({0.0: 1.0}, 0.0) == 0.0
    assert tune.parabola_bottom({0.0: 1.0, 1.0: 1.0, 2.0: 1.0}, 1.0) == 1.0
    edge = {x: (x - 0.8) ** 2 for x in (-1.0, 0.0, 1.0)}
    assert tune.parabola_bottom(edge, 1.0) == pytest.approx(0.8)
    far = {x: (x - 9.0) ** 2 for x in (-1.0, 0.0, 1.0)}
    assert tune.parabola_bottom(far, 1.0) == 1.5 and tune.parabola_bottom({-x: y for x, y in far.items()}, -1.0) == -1.5
    assert tune.parabola_bottom({0.0: 3.0, 1.0: 2.0, 2.0: 0.5}, 2.0) == 2.5


def test_neighbourhoods_agree_for_equal_features_and_rank_noise() -> None:
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    exact = tune.neighbourhood_kl(features, features)
    little, much = (tune.neighbourhood_kl(features, features + s * noise).mean() for s in (0.1, 1.0))
    assert exact.abs().max() < 1e-12 and 0 < little < much


def test_a_model_without_scores_is_tuned_by_neighbourhoods() -> None:
    setup = pico.family_setup("clip-vision", noise=0.3)
    with ExitStack() as stack:
        bench = bench_of(setup, stack, settings_of(setup))
        bench.held_out = {task: [*bench.held_out[task], *bench.learn[task]] for task in bench.held_out}
        found = tune.tune(bench, settings_of(setup))
        bench.held_out = {task: batches[:1] for task, batches in bench.held_out.items()}
        with pytest.raises(InputError, match="needs 4 held-out samples"):
            tune.tune(bench, settings_of(setup))
    assert found.kind == "feature neighbourhoods"
    assert len(found.candidates) >= 6 and all(c.criterion > 0 for c in found.candidates)


def test_the_choice_does_not_depend_on_how_many_fit_side_by_side(setup: pico.Setup) -> None:
    settings = settings_of(setup)
    found = []
    for most in (1, 2, 8):
        with ExitStack() as stack:
            bench = bench_of(setup, stack, settings)
            bench.side_by_side = most
            found.append(tune.tune(bench, settings).as_dict() | {"seconds": 0.0})
    assert found[0] == found[1] == found[2]
    assert len(found[0]["candidates"]) >= 6


def test_a_step_along_the_valley_does_not_move_across_it() -> None:
    here = Calibration(ridge=0.05, rho=4.0)
    there = tune.along_valley(here, 0.01)
    assert (there.ridge, there.rho) == (0.01, pytest.approx(4 * 5**tune.VALLEY))
    assert tune.across_valley(there) == pytest.approx(tune.across_valley(here), rel=1e-9)
    assert tune.along_valley(there, 0.05).rho == pytest.approx(4.0)


@pytest.mark.parametrize(("ridge", "across", "alpha"), [(0.006, 1.4, 0.2), (0.05, 1.0, 0.5), (0.02, 0.4, 0.3)])
def test_the_search_ends_near_the_bottom_of_a_bowl(
    monkeypatch: pytest.MonkeyPatch, setup: pico.Setup, ridge: float, across: float, alpha: float
) -> None:
    """A made-up criterion with its bottom at (λ, ρ λ^VALLEY, α), in place of calibrations."""

    def bowl(s: Calibration) -> float:
        along, beside = math.log(s.ridge / ridge), math.log(tune.across_valley(s) / across)
        return 0.3 + 0.01 * along**2 + 0.2 * beside**2 + 0.1 * (s.alpha - alpha) ** 2

    def try_all(search: Any, wanted: list[Calibration]) -> None:
        search.rounds += 1
        search.merged_kl = {"t": 1.0}
        search.candidates += [tune.Candidate(s, {"t": bowl(s)}, bowl(s), search.rounds) for s in wanted]

    monkeypatch.setattr(tune._Search, "try_all", try_all)
    with ExitStack() as stack:
        found = tune.tune(bench_of(setup, stack, settings_of(setup)), settings_of(setup))
    assert found.best.criterion - 0.3 < min(0.5 * (bowl(settings_of(setup)) - 0.3), 0.02)
    assert len(found.candidates) <= 7


def test_learning_keeps_its_samples_when_the_source_has_more() -> None:
    batches = [{"input_ids": torch.arange(8)[:, None] + 8 * i} for i in range(8)]
    learn, held_out = take_samples("t", batches, make_settings(samples=20, tune="auto"))
    assert torch.cat([b["input_ids"] for b in learn]).flatten().tolist() == list(range(20))
    assert torch.cat([b["input_ids"] for b in held_out]).flatten().tolist() == list(range(20, 52))
    learn, held_out = take_samples("t", batches, make_settings(samples=60, tune="auto"))
    assert [sum(len(b["input_ids"]) for b in part) for part in (learn, held_out)] == [52, 12]
    learn, held_out = take_samples("t", batches, make_settings("clip", samples=20))
    assert [sum(len(b["input_ids"]) for b in part) for part in (learn, held_out)] == [20, 0]


def test_held_out_counts() -> None:
    assert [make_settings(samples=n, tune="auto").held_out for n in (16, 128, 256, 512)] == [32, 32, 32, 64]
    assert [make_settings("clip", samples=n).held_out for n in (16, 128, 256, 512)] == [16, 16, 32, 64]


def test_the_search_shows_its_rounds(capsys: pytest.CaptureFixture[str], setup: pico.Setup) -> None:
    with ExitStack() as stack:
        tune.tune(bench_of(setup, stack, settings_of(setup)), settings_of(setup), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == [f"choosing settings, round {n} of 3" for n in (1, 2, 3)]


def test_a_search_holds_out_enough_when_the_recipe_names_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values in a recipe turn its tuner off; `featcal tune` searches around them all the same."""
    recipe = load_recipe(folders.make_job(tmp_path, rows=60))
    assert recipe.calibration.tune == "off"
    counts: list[int] = []

    def search(bench: Bench, settings: Calibration, **options: Any) -> tune.Tuning:
        counts.extend(sum(map(batch_size, own)) for own in bench.held_out.values())
        return tune.Tuning(None, [], {}, "scores")

    monkeypatch.setattr(sys.modules["featcal.run"], "tune", search)
    choose(recipe, progress=False)
    assert counts == [32, 32]
