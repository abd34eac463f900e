"""`featcal.run` on folders: the weights of the in-memory engine, in a folder that can take the merged one's place."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPVisionModel, LlamaModel

import folders
import pico
from featcal.api import Result, calibrate
from featcal.errors import InputError
from featcal.plan import Plan, prepare
from featcal.recipe import load_recipe
from featcal.run import Outcome, run


def tokenizer_of(folder: Path, family: str) -> str | None:
    return str(folder / folders.OWN_TOKENIZER[family]) if family in folders.OWN_TOKENIZER else None


def in_memory(recipe: Path, tokenizer: str | None = None) -> tuple[dict[str, Tensor], Result]:
    """Calibrated parameters by their key on disk, from whole models in memory on the plan's own batches."""
    plan = prepare(load_recipe(recipe), tokenizer=tokenizer)
    plan.check()
    assert plan.merged is not None and plan.base is not None

    def load(model: Any) -> nn.Module:
        loaded: nn.Module = type(plan.merged.keymap.model).from_pretrained(model.checkpoint.folder)  # type: ignore
        for name, parameter in loaded.named_parameters():
            parameter.data = parameter.data.to(model.keymap.dtype(name))  # some classes load parts of bf16 as float32
        return loaded

    result = calibrate(
        load(plan.merged),
        base=load(plan.base),
        experts={task: load(model) for task, model in plan.experts.items()},
        data={task: data.learn.batches for task, data in plan.tasks.items()},
        progress=False,
        **plan.recipe.calibration.model_dump(),
    )
    keymap = plan.merged.keymap
    return {keymap.key(name): p for name, p in result.model.named_parameters() if keymap.key(name)}, result


@pytest.mark.parametrize(
    ("dtype", "shard", "schedule"), [(torch.float32, "5GB", "block"), (torch.bfloat16, "8KB", "group")]
)
@pytest.mark.parametrize("family", folders.CHECKPOINTS)
def test_weights_equal_the_in_memory_engine(
    family: str, dtype: torch.dtype, shard: str, schedule: str, tmp_path: Path
) -> None:
    recipe = folders.make_job(tmp_path, family, dtype=dtype, shard=shard, norm="on", schedule=schedule)
    tokenizer = tokenizer_of(tmp_path, family)
    outcome = run(recipe, tmp_path / "out", tokenizer=tokenizer, progress=False)
    expected, result = in_memory(recipe, tokenizer)
    merged, written = folders.weights(tmp_path / "merged"), folders.weights(tmp_path / "out")
    changed = 0
    for key, parameter in expected.items():
        assert torch.equal(written[key], parameter), key
        changed += not torch.equal(written[key], merged[key])
    calibrated = [r for r in outcome.records if r.status == "calibrated"]
    assert changed >= len(calibrated) > 8
    assert [(r.block, r.module, r.rows, r.before, r.after) for r in calibrated] == [
        (r.block, r.module, r.rows, r.before, r.after) for r in result.records if r.status == "calibrated"
    ]
    assert (len(folders.shards(tmp_path / "out")) > 1) == (shard == "8KB")
