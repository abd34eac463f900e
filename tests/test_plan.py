"""`prepare`: what calibrate would refuse is refused from headers and a few rows; what it costs is known before."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import featcal.cost
import folders
import pico
from children import CONTEXT, command, without_pictures
from featcal.blocks import Gate, find_blocks, inference, stack_of
from featcal.errors import InputError
from featcal.output import peak_memory
from featcal.plan import Plan, prepare
from featcal.recipe import load_recipe
from featcal.survey import ROWS, short, survey
from featcal.targets import Group, choose, probe, with_readout
from featcal.writer import OutputFolder


def plan_of(recipe: Path, *overrides: str) -> Plan:
    return prepare(load_recipe(recipe, overrides))


def edit(recipe: Path, **changes: Any) -> None:
    """Set dotted fields of a recipe file."""
    content = yaml.safe_load(recipe.read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = content
        for key in parents:
            place = place[key]
        place[last] = value
    recipe.write_text(yaml.safe_dump(content))


def rewrite(folder: Path, change: Any, **config: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(dict(load_file(path))), path, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))


def without(*names: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if key not in names}


# ------------------------------------------------------------------------------------------------------ problems


def test_five_mistakes_are_found_at_once(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, tasks=5)
    path = tmp_path / "task0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])  # 1: cut off
    shutil.rmtree(tmp_path / "task1")  # 2: no such folder
    (tmp_path / "task2.jsonl").unlink()  # 3: no such file
    edit(recipe, tasks__task3__data={"source": "./task3.jsonl", "text": "txet"})  # 4: a misspelt column
    rewrite(tmp_path / "task4", without("model.layers.1.mlp.up_proj.weight"))  # 5: a tensor is missing
    plan = plan_of(recipe)
    assert len(plan.problems) == 5
    found = "\n".join(plan.problems)
    for words in (
        "task0/model.safetensors",
        "task1' does not exist",
        "task2.jsonl",
        "no column 'txet' .text:.; did you mean 'text'",
        "expert 'task4' .* lacks 1 tensors of the merged model's blocks, e.g. model.layers.1.mlp.up_proj.weight",
    ):
        assert re.search(words, found), (words, found)
    with pytest.raises(InputError) as caught:
        plan.check()
    assert str(caught.value).splitlines() == plan.problems


def test_the_command_lists_them_and_so_does_calibrate(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    shutil.rmtree(tmp_path / "task1")
    (tmp_path / "task0.jsonl").unlink()
    planned = command(["plan", recipe], tmp_path / "plan.log")
    calibrated = command(["calibrate", recipe, "-o", tmp_path / "out"], tmp_path / "calibrate.log")
    assert planned.status() == calibrated.status() == 2
    for child in (planned, calibrated):
        lines = [line for line in child.text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 2 and "task1" in lines[0] and "task0.jsonl" in lines[1], child.text
        assert "Traceback" not in child.text
    assert not (tmp_path / "out").exists() and not list(folders.hidden(tmp_path))


def test_a_broken_merged_model_does_not_hide_the_other_mistakes(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    shutil.rmtree(tmp_path / "merged")
    edit(recipe, tasks__task1__data={"source": "./task1.jsonl", "text": "txet"})
    problems = plan_of(recipe).problems
    assert len(problems) == 2 and "merged" in problems[0] and "txet" in problems[1]


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (without("model.embed_tokens.weight"), {}, "lacks model.embed_tokens.weight, which its blocks' inputs need"),
        (
            lambda t: t | {"model.layers.1.mlp.up_proj.weight": torch.randn(25, pico.WIDTH)},
            {},
            r"model.layers.1.mlp.up_proj.weight has shape \(25, 16\), the merged model \(24, 16\)",
        ),
        (lambda t: t, {"num_hidden_layers": 1}, "lacks 9 tensors of the merged model's blocks"),
        (lambda t: t, {"num_hidden_layers": 3}, "has more blocks than the merged model"),
        (lambda t: t | {"model.embed_tokens.weight": torch.randn(9, pico.WIDTH)}, {}, "knows only 9 tokens"),
    ],
)
def test_an_expert_that_does_not_fit(change: Any, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    rewrite(tmp_path / "task1", change, **config)
    problems = plan_of(recipe).problems
    assert len(problems) == 1 and problems[0].startswith(("expert 'task1'", "the samples hold"))
    assert re.search(words, problems[0]) and "task1" in problems[0]


def test_an_expert_of_another_architecture(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    folders.save(pico.make("bert"), tmp_path / "other", "bert", torch.float32, "5GB")
    edit(recipe, tasks__task1__expert="./other")
    problems = plan_of(recipe).problems
    assert problems and all("task1" in line or "other" in line for line in problems)


def test_an_expert_that_was_never_trained(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    shutil.rmtree(tmp_path / "task0")
    shutil.copytree(tmp_path / "base", tmp_path / "task0")
    assert plan_of(recipe).problems == [
        "expert 'task0' equals the base in every block; was it fine-tuned, or its adapter never applied?"
    ]


def test_a_patch_embedding_of_another_size_is_refused(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "vit")
    name = next(key for key in folders.weights(tmp_path / "task1") if "position" in key)
    rewrite(tmp_path / "task1", lambda t: t | {name: torch.cat([t[name], t[name]], 1)})
    problems = plan_of(recipe).problems
    assert len(problems) == 1 and "position_embeddings is (1, 10, 16) by the config and (1, 20, 16)" in problems[0]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_mixture_that_lacks_a_part_of_an_expert(family: str, tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, family)
    name = next(key for key in folders.weights(tmp_path / "task1") if "experts.2." in key)
    rewrite(tmp_path / "task1", without(name))
    problems = plan_of(recipe).problems
    assert len(problems) == 1 and "task1" in problems[0] and "does not hold all parts" in problems[0]


def test_samples_that_the_model_refuses_name_the_task(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, "clip-vision")
    path = tmp_path / "merged" / "preprocessor_config.json"
    path.write_text(path.read_text().replace('"do_center_crop": true', '"do_center_crop": false'))
    problems = plan_of(recipe).problems
    assert len(problems) == 1 and re.search("task '?task0|first batch", problems[0])


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    count = torch.cuda.device_count()
    problems = plan_of(recipe, f"device=cuda:{count + 3}").problems
    assert problems == [f"device: this machine has no cuda:{count + 3}; write auto, or cpu"]
    assert bool(plan_of(recipe, "device=cuda").problems) == (count == 0)


def test_tuning_needs_held_out_samples(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, rows=1)
    assert not plan_of(recipe).problems
    assert plan_of(recipe, "calibration.tune=auto").problems == [
        "tune: no held-out samples; give more data, or choose the settings with tune: off"
    ]


def test_notes_on_what_is_odd_but_harmless(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    rewrite(tmp_path / "task0", lambda t: t | {"score.weight": torch.zeros(3, 16), "extra": torch.zeros(1)})
    for name in ("merged", "task1"):
        rewrite(tmp_path / name, lambda t: t, tie_word_embeddings=False)
    plan = plan_of(recipe)
    assert not plan.problems
    assert sorted(plan.notes) == [
        "expert 'task0': extra and 1 more are not part of a LlamaForCausalLM",
        "expert 'task1' has no lm_head.weight; it is not needed",
        "merged has no lm_head.weight; it is not needed",
    ]


def test_each_thing_is_said_once(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, tasks=3)
    child = command(["plan", recipe], tmp_path / "log")
    assert child.status() == 0, child.text
    assert child.text.count("max_length: 32 instead of 512") == 1
    assert child.text.count("tokenizer: from merged") == 1


# ------------------------------------------------------------------------------------------------------ the survey


@pytest.mark.parametrize("family", folders.CHECKPOINTS)
def test_two_short_samples_show_what_a_whole_batch_of_the_real_model_shows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcal.survey.LARGE", 1)  # every product is replaced, as in models of real size
    recipe = folders.make_job(tmp_path, family)
    words = str(tmp_path / folders.OWN_TOKENIZER[family]) if family in folders.OWN_TOKENIZER else None
    plan = prepare(load_recipe(recipe), tokenizer=words)
    plan.check()
    assert plan.merged is not None
    model = type(plan.merged.keymap.model).from_pretrained(tmp_path / "merged").eval()  # type: ignore[attr-defined]
    batch = plan.tasks["task0"].batches[0]
    with inference(model):
        infos = probe(model, find_blocks(model), batch)
    settings = plan.recipe.calibration
    expected = choose(with_readout(infos, model, settings.token_weights), model, settings)

    def plain(unit: Any) -> Any:
        return replace(unit, rows_per_sample=0.0) if isinstance(unit, Group) else unit

    for info, wanted in zip(plan.blocks, expected, strict=True):
        assert info.name == wanted.name and info.kept == wanted.kept
        assert [plain(unit) for unit in info.units] == [plain(unit) for unit in wanted.units]


@pytest.mark.parametrize("family", ["llama", "t5", "clip", "clip-vision"])
def test_rows_and_states_are_counted_from_shapes(family: str, tmp_path: Path) -> None:
    """Rows per sample and bytes between blocks, predicted from two short samples, equal those of a real pass."""
    recipe = folders.make_job(tmp_path, family)
    plan = plan_of(recipe)
    assert plan.merged is not None
    kind = type(plan.merged.keymap.model)
    batches = {task: data.batches for task, data in plan.tasks.items()}
    seen = survey(plan.merged.checkpoint, kind, batches, plan.recipe.calibration)  # type: ignore[arg-type]
    model = kind.from_pretrained(tmp_path / "merged").eval()  # type: ignore[attr-defined]
    every = [batch for own in batches.values() for batch in own]
    for batch in every:
        state: dict[str, Any] = {}
        with inference(model), Gate(model, plan.order) as gate:
            for name in plan.order:
                state[stack_of(name)] = gate.run(batch, name, state)
        parts = [part for out in state.values() for part in (out if isinstance(out, tuple) else (out,))]
        assert seen.state_bytes(batch, 4) == sum(p.numel() * 4 for p in parts if isinstance(p, Tensor))
    samples = sum(len(next(iter(batch.values()))) for batch in every)
    for unit in (unit for info in plan.blocks for unit in info.units if isinstance(unit, Group)):
        if unit.mask:
            assert unit.rows_per_sample == sum(int(batch[unit.mask].sum()) for batch in every) / samples
        else:
            assert unit.rows_per_sample == 10  # patches and the class token


def test_short_samples() -> None:
    batch = {"input_ids": torch.arange(120).reshape(3, 40), "pixel_values": torch.zeros(3, 3, 8, 8)}
    cut = short(batch)
    assert cut["input_ids"].shape == (ROWS, 13) and cut["pixel_values"].shape == (ROWS, 3, 8, 8)
    assert cut["input_ids"][1, 0] == 80
    assert short({"input_ids": torch.zeros(1, 4, dtype=torch.long)})["input_ids"].shape == (ROWS, 4)


# ------------------------------------------------------------------------------------------------------ estimates


def sparse_model(folder: Path, config: Any, mark: int) -> None:
    """A checkpoint of zeros that takes no room: headers and holes, and one row that tells it from others."""
    header, start = {}, 0
    for name, shape in folders.llama_shapes(config).items():
        size = 2 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    raw = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        begin = file.tell()
        file.truncate(begin + start)
        file.seek(begin + header["model.layers.0.self_attn.q_proj.weight"]["data_offsets"][0])
        file.write(bytes([mark]) * 64)
    config.save_pretrained(folder)
    folders.tokenizer().save_pretrained(folder)


def plan_big(recipe: Path, result: Path) -> None:
    before = peak_memory()
    plan = prepare(load_recipe(recipe))
    grown = peak_memory() - before
    assert plan.cost is not None or plan.problems
    found = {"problems": plan.problems, "blocks": len(plan.blocks), "grown": grown}
    result.write_text(json.dumps(found | ({"memory": plan.cost.memory_bytes} if plan.cost else {})))


def test_a_model_of_70_billion_parameters_is_planned_without_reading_it(tmp_path: Path) -> None:
    config = folders.llama_config(8192, 28672, 80, 64, 8, 128256)
    for mark, name in enumerate(("base", "merged", "task0")):
        sparse_model(tmp_path / name, config, mark)
    assert (tmp_path / "base" / "model.safetensors").stat().st_size > 130e9
    folders.write_data(tmp_path, "task0", "llama", 30, seed=0)
    recipe = folders.write_recipe(tmp_path, ["task0"])
    process = CONTEXT.Process(target=plan_big, args=(recipe, tmp_path / "result"))
    process.start()
    process.join()
    found = json.loads((tmp_path / "result").read_text())
    assert found["problems"] == [] and found["blocks"] == 80
    assert found["grown"] < 3e9
    assert 20e9 < found["memory"] < 80e9


class Operations(TorchDispatchMode):
    """Counts what matrix products and solves take, float64 ones twice: as `estimate` does, on any machine the same."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet is torch.ops.aten.cholesky_solve:
            size, columns = args[0].shape
            done = 2 * columns * size**2
        elif packet is torch.ops.aten.linalg_cholesky_ex:
            done = len(args[0]) ** 3 / 3
        elif packet in flop_registry:
            done = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            return out
        first = out if isinstance(out, Tensor) else out[0]
        self.total += done * (2 if first.dtype == torch.float64 else 1)
        return out


def measure(recipe: Path, output: Path, result: Path) -> None:
    """Estimates over what a run takes, in this process; time as the operations that it is estimated from."""
    cost = vars(featcal.cost)
    cost |= {"BANDWIDTH": math.inf, "READING": math.inf, "CALL": 0.0, "OVERHEAD": 1.0, "matmul_rate": lambda _: 1.0}
    module = sys.modules["featcal.run"]
    without_pictures(module)
    plan = prepare(load_recipe(recipe))
    plan.check()
    sizes: list[int] = []
    publish = OutputFolder.publish

    def weigh(self: OutputFolder) -> Path:
        sizes.append(sum(path.stat().st_size for path in self.part.rglob("*") if path.is_file()))
        return publish(self)

    OutputFolder.publish = weigh  # type: ignore[method-assign]
    with Operations() as operations:
        outcome = module.run(recipe, output, progress=False)
    assert plan.cost is not None
    estimates = {"memory": plan.cost.memory_bytes, "disk": plan.cost.disk_bytes, "operations": plan.cost.seconds}
    used = {"memory": outcome.peak_memory_bytes, "disk": sizes[0], "operations": operations.total}
    result.write_text(json.dumps({name: estimates[name] / used[name] for name in used}))


def weigh_oneself(result: Path) -> None:
    result.write_text(json.dumps([peak_memory(), psutil.Process().memory_info().rss]))


def test_the_peak_of_a_process_is_its_own(tmp_path: Path) -> None:
    ballast = torch.ones(2**27 + 2**26)  # 768 MiB, which the child's `ru_maxrss` would count
    process = CONTEXT.Process(target=weigh_oneself, args=(tmp_path / "result",))
    process.start()
    process.join()
    peak, now = json.loads((tmp_path / "result").read_text())
    assert abs(peak - now) < ballast.nbytes / 2  # the kernel counts both in batches of pages, the peak may lag


SIZES = {
    "20M": (folders.llama_config(512, 1376, 6, 8, 4, 4000), {}),
    "65M": (folders.llama_config(1024, 2816, 3, 16, 4, 24000), {"samples": 8}),
    "150M": (folders.llama_config(1536, 4096, 3, 16, 8, 48000), {"samples": 4, "schedule": "group"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_estimates_are_within_a_factor_of_one_and_a_half(size: str, tmp_path: Path) -> None:
    config, fields = SIZES[size]
    recipe = folders.make_llama_job(tmp_path, config, **fields)
    process = CONTEXT.Process(target=measure, args=(recipe, tmp_path / "out", tmp_path / "result"))
    process.start()
    process.join()
    ratios = json.loads((tmp_path / "result").read_text())
    print(size, ratios)
    for name in ("memory", "disk", "operations"):
        assert 1 / 1.5 < ratios[name] < 1.5, ratios


def test_what_a_group_schedule_and_tuning_change(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    plain, grouped, tuned = (
        plan_of(recipe, *words).cost for words in ((), ("calibration.schedule=group",), ("calibration.tune=auto",))
    )
    assert plain and grouped and tuned
    assert grouped.seconds > plain.seconds and tuned.seconds > 2 * plain.seconds
    assert grouped.candidate_bytes < plain.candidate_bytes
    assert plain.side_by_side(torch.device("cpu")) > 100
    assert replace(plain, candidate_bytes=10**15).side_by_side(torch.device("cpu")) == 1


def test_the_output_of_the_command(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    child = command(["plan", recipe], tmp_path / "log", environment={"COLUMNS": "160"})
    assert child.status() == 0
    for words in ("LlamaForCausalLM", "model.layers.0 … 1", "RMSNorm (norm: auto)", "GB of memory", "GB of disk"):
        assert " ".join(words.split()) in " ".join(child.text.split()), child.text


def test_an_expert_whose_only_change_is_small(tmp_path: Path) -> None:
    """One entry of a bias, or of a row that no sample looks at: it was trained, if barely."""
    recipe = folders.make_job(tmp_path, "bert")
    for name, place in {"intermediate.dense.bias": (5,), "intermediate.dense.weight": (5, 2)}.items():
        shutil.rmtree(tmp_path / "task0")
        shutil.copytree(tmp_path / "base", tmp_path / "task0")

        def change(tensors: dict[str, Tensor], name: str = name, place: tuple[int, ...] = place) -> dict[str, Tensor]:
            key = next(key for key in tensors if key.endswith(f"layer.1.{name}"))
            changed = tensors[key].clone()
            changed[place] += 1.0
            return tensors | {key: changed}

        rewrite(tmp_path / "task0", change)
        assert plan_of(recipe).problems == []


def test_include_that_selects_nothing(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path, include=["nowhere.*"])
    problems = plan_of(recipe).problems
    assert len(problems) == 1 and problems[0].startswith("nothing is left to calibrate in 2 blocks")
    assert "left out by include / exclude" in problems[0]
