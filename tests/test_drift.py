"""Drift against a brute-force reference: whole forwards with hooks, one sample and one token at a time."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featcal import InputError, drift
from featcal.api import calibrate, survey
from featcal.blocks import batch_size, call_model, stack_of
from featcal.calibrate import Job, Task
from featcal.calibrate import calibrate as run_job
from featcal.drift.outputs import CosineHead, nearest_to_origin, pick, spectral_norm
from featcal.drift.results import ModelDrift, Tally, TaskDrift
from featcal.network import Network
from featcal.settings import make_settings
from featcal.stream import Stream
from featcal.student import Student
from pico import Setup, blocks_of, family_setup, make, perturbed

CPU = torch.device("cpu")


def whole(model: nn.Module, blocks: list[str], batch: Any, forced: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Outputs of every block and of the model ('') in one ordinary forward; `forced` outputs replace a block's own."""
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            seen[name] = forced[name] if forced and name in forced else output
            return seen[name]

        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in blocks]
    with torch.no_grad():
        seen[""] = call_model(model, batch)
    for handle in handles:
        handle.remove()
    return seen


def features(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def real_tokens(family: str, block: str, batch: Any, x: Tensor) -> list[list[int]]:
    """Per sample, the positions that count."""
    if family in ("clip-vision", "vit"):
        return [[0]] * len(x)
    key = "decoder_attention_mask" if block.startswith("decoder") else "attention_mask"
    mask = batch[key] if isinstance(batch, dict) else torch.ones(x.shape[:2])
    return [[t for t in range(x.shape[1]) if mask[b, t]] for b in range(len(x))]


def reference(family: str, s: Setup, task: str) -> dict[str, dict[str, float]]:
    """Block → measure → mean over samples of means over tokens, from whole forwards."""
    totals: dict[str, dict[str, list[float]]] = {}
    for batch in s.data[task]:
        expert = whole(s.experts[task], s.blocks, batch)
        merged = whole(s.merged, s.blocks, batch)
        for place, block in enumerate(s.blocks):
            mixed = whole(s.merged, s.blocks, batch, {name: expert[name] for name in s.blocks[:place]})
            a, b, c = features(expert[block]), features(merged[block]), features(mixed[block])
            previous = s.blocks[place - 1] if place and stack_of(s.blocks[place - 1]) == stack_of(block) else None
            for sample, tokens in enumerate(real_tokens(family, block, batch, a)):
                found: dict[str, list[float]] = {}
                for t in tokens:
                    h_e, h_m, f_e = a[sample, t], b[sample, t], c[sample, t]
                    e, m, p = h_m - h_e, f_e - h_e, h_m - f_e
                    values = {"drift": e.norm(), "relative": e.norm() / h_e.norm(), "local": m.norm()}
                    values |= {"cosine": h_m @ h_e / h_m.norm() / h_e.norm(), "propagated": p.norm()}
                    values |= {"local_part": m @ e / e.norm(), "propagated_part": p @ e / e.norm()}
                    if previous:
                        step = features(merged[previous])[sample, t] - features(expert[previous])[sample, t]
                        values["skip_part"] = step @ e / e.norm()
                    for name, value in values.items():
                        found.setdefault(name, []).append(float(value))
                for name, per_token in found.items():
                    totals.setdefault(block, {}).setdefault(name, []).append(sum(per_token) / len(per_token))
    return {block: {n: sum(v) / len(v) for n, v in values.items()} for block, values in totals.items()}


@pytest.mark.parametrize("family", ["llama", "clip-vision", "t5", "bert", "mixer"])
def test_every_block_measure_equals_whole_forwards(family: str) -> None:
    s = family_setup(family, dtype=torch.float64)
    globs = ["blocks.*"] if family == "mixer" else None
    found = drift.measure({"merged": s.merged}, experts=s.experts, data=s.data, blocks=globs)
    for task in found:
        expected = reference(family, s, task.name)
        assert list(task.models["merged"].blocks) == s.blocks
        for block, values in expected.items():
            tally = task.models["merged"].blocks[block]
            for name, value in values.items():
                assert tally.mean(name) == pytest.approx(value, rel=1e-9, abs=1e-12), (block, name)
            assert set(tally.sums) == set(values)


@pytest.mark.parametrize("family", ["qwen2", "vit", "t5", "gpt2"])
def test_final_feature_scores_and_bound_equal_whole_forwards(family: str) -> None:
    s = family_setup(family, dtype=torch.float64)
    head = {"qwen2": "lm_head", "gpt2": "lm_head", "t5": "lm_head", "vit": "classifier"}[family]
    task = next(iter(s.experts))
    found = drift.measure({"merged": s.merged}, experts={task: s.experts[task]}, data={task: s.data[task]})[0]
    expected: dict[str, list[float]] = {}
    norm = float(torch.linalg.matrix_norm(s.merged.get_submodule(head).weight.detach(), 2))
    for batch in s.data[task]:
        ends = []
        for model in (s.experts[task], s.merged):
            read: list[Tensor] = []
            hook = model.get_submodule(head).register_forward_pre_hook(lambda _, args, read=read: read.append(args[0]))
            with torch.no_grad():
                z = call_model(model, batch).logits
            hook.remove()
            ends.append((read[0], z))
        (u_e, z_e), (u_m, z_m) = ends
        with torch.no_grad():
            mismatch = s.merged.get_submodule(head)(u_e) - z_e
        flat = z_e.dim() == 2
        tokens = [[0]] * len(z_e) if flat else real_tokens(family, s.blocks[-1], batch, z_e)
        for sample, positions in enumerate(tokens):
            found_here: dict[str, list[float]] = {}
            for t in positions:
                a, b, x, y, r = (v[sample] if flat else v[sample, t] for v in (u_e, u_m, z_e, z_m, mismatch))
                delta, p = y - x, x.softmax(0)
                limit = norm * (b - a).norm() + r.norm()
                values = {"cosine": a @ b / a.norm() / b.norm(), "drift": (b - a).norm(), "l2": delta.norm()}
                values |= {"linf": delta.abs().max(), "kl": (p * (x.log_softmax(0) - y.log_softmax(0))).sum()}
                values |= {"agreement": (x.argmax() == y.argmax()).double(), "bound": limit}
                values["bound_ratio"] = delta.norm() / limit
                for name, value in values.items():
                    found_here.setdefault(name, []).append(float(value))
            for name, per_token in found_here.items():
                expected.setdefault(name, []).append(sum(per_token) / len(per_token))
    for name, values_ in expected.items():
        assert found.models["merged"].samples[name] == pytest.approx(values_, rel=1e-8, abs=1e-12), name
    assert max(expected["bound_ratio"]) <= 1
    assert found.feature == "input of the head"


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Equal keys, and equal values to rounding."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, float) and b[name] is not None:
            assert value == pytest.approx(b[name], rel=1e-9, abs=1e-12), name
        else:
            assert value == b[name], name


def test_padding_and_batching_do_not_change_a_number() -> None:
    s = family_setup("llama", dtype=torch.float64)
    singles = []
    for batch in s.data["task0"]:
        for row in range(len(batch["input_ids"])):
            real = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row : row + 1, real]
            singles.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    expert = {"task0": s.experts["task0"]}
    padded = drift.measure({"m": s.merged}, experts=expert, data={"task0": s.data["task0"]})[0].to_dict()
    alone = drift.measure({"m": s.merged}, experts=expert, data={"task0": singles})[0].to_dict()
    assert padded["samples"] == alone["samples"] == len(singles)
    assert padded["tokens"] == alone["tokens"] == sum(b["input_ids"].numel() for b in singles)
    for a, b in zip(padded["models"]["m"]["blocks"], alone["models"]["m"]["blocks"], strict=True):
        for name in ("drift", "cosine", "local", "propagated"):
            assert a[name] == pytest.approx(b[name], rel=1e-6)  # Llama's rotary tables are float32
    assert padded["models"]["m"]["final"] == pytest.approx(alone["models"]["m"]["final"], rel=1e-5)


def test_the_expert_has_no_drift_from_itself() -> None:
    s = family_setup("bert")
    found = drift.measure(
        {"itself": s.experts["task0"], "copy": copy.deepcopy(s.experts["task0"]), "merged": s.merged},
        experts={"task0": s.experts["task0"]}, data={"task0": s.data["task0"]}, base=s.base,
    )[0].to_dict()["models"]  # fmt: skip
    for label in ("itself", "copy"):
        for block in found[label]["blocks"]:
            assert (block["drift"], block["local"], block["propagated"], block["cosine"]) == (0, 0, 0, 1)
        final = found[label]["final"]
        assert (final["cosine"], final["l2"], final["kl"], final["agreement"]) == (1, 0, 0, 1)
        assert found[label]["task_vector_cosine"] == pytest.approx(1)
    assert found["merged"]["blocks"][-1]["drift"] > 0.05


def test_models_are_left_as_they_were() -> None:
    s = family_setup("llama")
    s.merged.train()
    before = {name: value.clone() for name, value in s.merged.state_dict().items()}
    drift.measure({"merged": s.merged, "again": s.merged}, experts=s.experts, data=s.data, base=s.base)
    assert s.merged.training and s.merged.config.use_cache
    assert all("forward" not in module.__dict__ for module in s.merged.modules())
    assert all(torch.equal(before[name], value) for name, value in s.merged.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "clip", "t5"])
def test_path_averaged_operator_reproduces_the_propagation(family: str) -> None:
    s = family_setup(family, dtype=torch.float64)
    found = drift.measure({"m": s.merged}, experts=s.experts, data=s.data, check=1)
    for task in found:
        errors = {name: tally.mean("error") for name, tally in task.models["m"].checks.items()}
        assert set(errors) == set(s.blocks[1:])  # the very first block is handed no drift
        assert max(e for e in errors.values() if e is not None) < 1e-5


def test_task_vector_cosine_over_all_parameters() -> None:
    s = family_setup("qwen2")
    found = drift.measure({"merged": s.merged, "base": s.base}, experts=s.experts, data=s.data, base=s.base)

    def vector(model: nn.Module) -> Tensor:
        pairs = zip(model.parameters(), s.base.parameters(), strict=True)
        return torch.cat([(p.data.double() - q.data.double()).flatten() for p, q in pairs])

    for task in found:
        merged, expert = vector(s.merged), vector(s.experts[task.name])
        expected = float(merged @ expert / merged.norm() / expert.norm())
        assert task.models["merged"].task_vector_cosine == pytest.approx(expected, rel=1e-12)
        assert task.models["base"].task_vector_cosine is None


class TextHead:
    """A fixed cosine head in two steps, as `featcal.evaluate` has them."""

    def __init__(self, classes: int, width: int) -> None:
        self.centroid_CD, self.scale = torch.randn(classes, width).double(), 7.0

    def features(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["pixel_values"]).pooler_output

    def scores(self, feature: Tensor) -> Tensor:
        rows = self.centroid_CD / self.centroid_CD.norm(dim=1, keepdim=True)
        return self.scale * (feature / feature.norm(dim=1, keepdim=True)) @ rows.T

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scores(self.features(model, batch))


def test_scores_outside_the_model_and_their_bound() -> None:
    s = family_setup("clip-vision", dtype=torch.float64)
    head = TextHead(5, 16)
    inputs = {"experts": {"task0": s.experts["task0"]}, "data": {"task0": s.data["task0"]}}
    two_steps = drift.measure({"m": s.merged}, scores={"task0": head}, **inputs)[0]
    plain = drift.measure({"m": s.merged}, scores={"task0": lambda model, batch: head(model, batch)}, **inputs)[0]
    none = drift.measure({"m": s.merged}, **inputs)[0]
    with torch.no_grad():
        z = [torch.cat([head(model, b) for b in s.data["task0"]]) for model in (s.experts["task0"], s.merged)]
    linf = (z[1] - z[0]).abs().amax(1).tolist()
    assert two_steps.models["m"].samples["linf"] == pytest.approx(linf, rel=1e-9)
    assert plain.models["m"].samples["linf"] == pytest.approx(linf, rel=1e-9)
    assert two_steps.feature == "feature of the head" and none.feature == "pooled output"
    ratios = two_steps.models["m"].samples["bound_ratio"]
    assert 0 < max(ratios) <= 1
    assert "bound" not in plain.models["m"].samples and "l2" not in none.models["m"].samples


def test_cosine_head_is_lipschitz_on_the_segment() -> None:
    head = CosineHead(torch.nn.functional.normalize(torch.randn(6, 4).double(), dim=1), 3.0)
    a, b = torch.randn(50, 4).double(), torch.randn(50, 4).double()
    gap = (head(b) - head(a)).norm(dim=1)
    assert bool((gap <= head.lipschitz(a, b) * (b - a).norm(dim=1) * (1 + 1e-9)).all())
    t = torch.linspace(0, 1, 10_001).double()[:, None]
    grid = (a[0] + t * (b[0] - a[0])).norm(dim=1).min()
    assert float(nearest_to_origin(a[:1], b[:1])) == pytest.approx(float(grid), rel=1e-6)
    for shape in ((3, 9), (9, 3)):
        W = torch.randn(shape).double()
        assert spectral_norm(W) == pytest.approx(float(torch.linalg.matrix_norm(W, 2)), rel=1e-9)


def test_logits_pass_by_pass_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    s = family_setup("t5", dtype=torch.float64)
    inputs = {"experts": {"task0": s.experts["task0"]}, "data": {"task0": s.data["task0"]}}
    whole_batches = drift.measure({"m": s.merged}, **inputs)[0].models["m"].samples
    monkeypatch.setattr("featcal.drift.outputs.LOGITS", 1)
    one_by_one = drift.measure({"m": s.merged}, **inputs)[0].models["m"].samples
    assert whole_batches.keys() == one_by_one.keys()
    for name, values in whole_batches.items():
        assert one_by_one[name] == pytest.approx(values, rel=1e-9, abs=1e-12)


def job_of(s: Setup, held: int, schedule: str = "block") -> tuple[Job, dict[str, list[Any]]]:
    """A calibration of the setup whose last `held` batches per task are held out, and those batches."""
    settings = make_settings(alpha=0.3, rho=1.5, ridge=0.01, schedule=schedule)
    infos, stem = survey(s.merged, s.data["task0"][0], None, settings, CPU)
    order = [info.name for info in infos]
    merged = Network("the merged model", s.merged, order, CPU, stem)
    tasks = []
    for name, expert in s.experts.items():
        own = Network(f"expert '{name}'", expert, order, CPU, stem)
        learn = range(len(s.data[name]) - held)
        samples = sum(batch_size(s.data[name][i]) for i in learn)
        tasks.append(Task(name, own, Stream(own, s.data[name], name), learn, samples))
    streams = {name: Stream(merged, s.data[name], name) for name in s.experts}
    everything = {name: range(len(s.data[name])) for name in s.experts}
    ends = {name: everything[name][-held:] for name in s.experts}
    student = Student(settings, merged, streams, walks=everything, ends=ends)
    job = Job(infos, tasks, merged, Network("the base", s.base, order, CPU), [student], schedule)
    return job, {name: s.data[name][len(s.data[name]) - held :] for name in s.experts}


@pytest.mark.parametrize(("family", "schedule"), [("llama", "block"), ("clip-vision", "block"), ("t5", "group")])
def test_watcher_equals_a_measurement_afterwards(family: str, schedule: str) -> None:
    s = family_setup(family, dtype=torch.float64)
    job, held = job_of(s, held=1, schedule=schedule)
    updates: dict[str, Tensor] = {}
    job.finish = lambda info, student, records: updates.update(
        {f"{info.name}.{name}": value for name, value in student.overrides.items()}
    )
    job.watch = watcher = drift.Watcher(job)
    networks = [job.merged, *(task.expert for task in job.tasks)]
    with networks[0].open(), networks[1].open(), networks[2].open():
        run_job(job)
        watched = watcher.finish()
    calibrated = copy.deepcopy(s.merged)
    calibrated.load_state_dict(calibrated.state_dict() | updates)
    later = drift.measure({"merged": s.merged, "calibrated": calibrated}, experts=s.experts, data=held)
    assert len(updates) > 4 and watcher.seconds > 0
    for a, b in zip(drift.to_dict(watched)["tasks"], drift.to_dict(later)["tasks"], strict=True):
        assert (a["samples"], a["tokens"], a["readout"]) == (b["samples"], b["tokens"], b["readout"])
        for label in ("merged", "calibrated"):
            assert len(a["models"][label]["blocks"]) == len(s.blocks)
            for one, two in zip(a["models"][label]["blocks"], b["models"][label]["blocks"], strict=True):
                assert_same(one, two)
            final = b["models"][label]["final"]
            assert_same(a["models"][label]["final"], final | {"bound": None, "bound_ratio": None})
            assert a["models"][label]["sample_cosines"] == pytest.approx(b["models"][label]["sample_cosines"])
    assert len(watched[0].expert_features) == 1 and watched[0].expert_features[0].shape[0] == watched[0].samples


def test_watcher_leaves_the_calibration_as_it_is_and_skips_tasks_without_held_out_rows() -> None:
    s = family_setup("llama")
    made = []
    for watch in (False, True):
        job, _ = job_of(s, held=1)
        job.tasks[0].learn = range(len(s.data["task0"]))
        updates: dict[str, Tensor] = {}
        job.finish = lambda info, student, records, updates=updates: updates.update(
            {f"{info.name}.{name}": value for name, value in student.overrides.items()}
        )
        if watch:
            job.watch = watcher = drift.Watcher(job, samples=1, split=False)
        with job.merged.open(), job.tasks[0].expert.open(), job.tasks[1].expert.open():
            run_job(job)
            found = watcher.finish() if watch else []
        made.append(updates)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert [task.name for task in found] == ["task1"]
    last = found[0].models["calibrated"].blocks[s.blocks[-1]]
    assert last.mean("drift") is not None and last.mean("local") is None


def test_calibration_lowers_the_drift_it_measures() -> None:
    s = family_setup("llama", noise=0.2)
    result = calibrate(
        s.merged, base=s.base, experts=s.experts, data=s.data, alpha=0.5, rho=1.0, ridge=1e-4, progress=False
    )
    found = drift.measure({"before": s.merged, "after": result.model}, experts=s.experts, data=s.data)
    for task in found:
        models = task.models
        last = s.blocks[-1]
        before, after = (models[label].blocks[last].mean("drift") for label in ("before", "after"))
        assert before is not None and after is not None and after < 0.8 * before


def test_json_and_csv_hold_every_number() -> None:
    s = family_setup("vit")
    found = drift.measure({"merged": s.merged, "base": s.base}, experts=s.experts, data=s.data, base=s.base)
    data = json.loads(drift.to_json(found))
    assert data["models"] == ["merged", "base"] and [t["name"] for t in data["tasks"]] == ["task0", "task1"]
    cosines = [t["models"]["merged"]["final"]["cosine"] for t in data["tasks"]]
    assert data["macro"]["merged"]["cosine"] == pytest.approx(sum(cosines) / 2)
    rows = list(csv.DictReader(io.StringIO(drift.to_csv(found))))
    cells = {(r["task"], r["model"], r["block"], r["measure"]): float(r["value"]) for r in rows}
    block = data["tasks"][1]["models"]["base"]["blocks"][1]
    assert cells["task1", "base", block["block"], "drift"] == block["drift"]
    assert cells["task0", "merged", "", "cosine"] == cosines[0]
    assert ("task0", "base", "", "task_vector_cosine") not in cells


def test_shares_of_a_task_add_up() -> None:
    s = family_setup("bert", dtype=torch.float64)
    inputs: dict[str, Any] = {"experts": {"task1": s.experts["task1"]}}
    together = drift.measure({"m": s.merged}, data={"task1": s.data["task1"]}, **inputs)
    parts = [drift.measure({"m": s.merged}, data={"task1": [batch]}, **inputs) for batch in s.data["task1"]]
    merged = drift.merge_parts(parts)
    assert len(parts) == 3 and len(merged) == 1
    one, two = drift.to_dict(merged)["tasks"][0], drift.to_dict(together)["tasks"][0]
    assert one["samples"] == two["samples"] and one["tokens"] == two["tokens"]
    for a, b in zip(one["models"]["m"]["blocks"], two["models"]["m"]["blocks"], strict=True):
        assert_same(a, b)
    assert_same(one["models"]["m"]["final"], two["models"]["m"]["final"])


def test_what_is_not_finite_is_counted_and_never_reaches_the_json() -> None:
    s = family_setup("llama")
    with torch.no_grad():
        s.merged.get_submodule("model.layers.1.mlp.down_proj").weight[0, 0] = float("inf")
    found = drift.measure({"m": s.merged}, experts=s.experts, data=s.data)[0]
    blocks = json.loads(drift.to_json([found]))["tasks"][0]["models"]["m"]["blocks"]
    assert [block["not_finite"] for block in blocks] == [0, found.samples]
    assert blocks[1]["drift"] is None and blocks[0]["drift"] > 0


def test_half_precision_is_measured_in_double() -> None:
    base = make("llama", dtype=torch.float32).to(torch.bfloat16)
    experts = {"a": perturbed(base, 1), "b": perturbed(base, 2)}
    s = family_setup("llama")
    data = {"a": s.data["task0"], "b": s.data["task1"]}
    found = drift.measure({"base": base}, experts=experts, data=data)
    for task in found:
        for block in blocks_of("llama", base):
            tally = task.models["base"].blocks[block]
            parts = [tally.mean(name) for name in ("local_part", "propagated_part", "drift")]
            assert parts[0] is not None and parts[1] is not None
            assert parts[0] + parts[1] == pytest.approx(parts[2], rel=1e-12)
    assert base.get_submodule("lm_head").weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {}}, "task 'task0' has no data"),
        ({"data": {"task0": [], "task1": []}}, "task 'task0': its data holds no sample"),
        ({"experts": {}}, "at least one model and one expert"),
    ],
)
def test_wrong_input_is_named(change: dict[str, Any], message: str) -> None:
    s = family_setup("llama")
    with pytest.raises(InputError, match=message):
        drift.measure({"m": s.merged}, **({"experts": s.experts, "data": s.data} | change))


def test_tally_and_pick() -> None:
    tally = Tally()
    assert tally.mean("drift") is None
    tally.add({"drift": torch.tensor([1.0, 3.0, float("nan")])})
    other = Tally()
    other.add({"drift": torch.tensor([8.0])})
    tally.merge(other)
    assert tally.mean("drift") == 4 and tally.not_finite == 1
    nested = {"a": torch.arange(3), "b": (torch.zeros(1, 3), [torch.arange(6).view(3, 2)]), "c": 5}
    part = pick(nested, slice(1, 2), 3)
    assert part["a"].tolist() == [1] and part["b"][0].shape == (1, 3) and part["b"][1][0].tolist() == [[2, 3]]
    with pytest.raises(AssertionError):
        TaskDrift("a").merge(TaskDrift("b"))
    assert ModelDrift().to_dict()["final"]["cosine"] is None
