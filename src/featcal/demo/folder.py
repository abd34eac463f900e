"""The demo's output folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import BertModel
from transformers.utils import logging as transformers_logging

from ..errors import InputError
from ..evaluate import save_centroid_head
from .plot import plot_drift
from .results import DemoResult
from .suite import Options, Suite
from .tasks import MAX_TOKENS

_MARK = "# Made by `featcal demo`."


def check_output(output: Path) -> None:
    """Refuses what is neither a new or empty folder nor one of an earlier demo.

    Raises:
        InputError: it is a file, or a folder with something else in it.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; give a folder with -o")
    recipe = output / "recipe.yaml"
    ours = recipe.is_file() and recipe.read_text(encoding="utf-8").startswith(_MARK)
    if output.is_dir() and any(output.iterdir()) and not ours:
        raise InputError(f"{output} is not empty and was not made by the demo; give another folder with -o")


def save_texts(output: Path, suite: Suite, options: Options) -> None:
    """The recipe, the calibration texts without labels, the test texts with them, and the heads."""
    output.mkdir(parents=True, exist_ok=True)
    # The recipe comes first: it marks the folder as the demo's, should the rest not be finished.
    (output / "recipe.yaml").write_text(recipe_text(suite.tasks, options), encoding="utf-8")
    for name, task in suite.tasks.items():
        write_jsonl(output / "data" / f"{name}.jsonl", [{"text": example.text} for example in task.calibration])
        numbered = zip(task.test, task.targets(task.test).tolist(), strict=True)
        write_jsonl(
            output / "test" / f"{name}.jsonl", [{"text": e.text, "label": n, "class": e.label} for e, n in numbered]
        )
        save_centroid_head(suite.heads[name], output / "heads" / f"{name}.safetensors")


def save_models(output: Path, suite: Suite, models: Mapping[str, Any]) -> None:
    """The base, the experts and `models` (folder → model) as transformers checkpoints, each with the tokenizer."""
    experts = {f"experts/{name}": expert for name, expert in suite.experts.items()}
    with _no_progress_bars():
        for folder, model in {"base": suite.base, **experts, **models}.items():
            assert isinstance(model, BertModel)
            model.save_pretrained(output / folder)
            suite.tokenizer.save_pretrained(output / folder)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Transformers draws one bar per saved shard, which here is one per model."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def recipe_text(tasks: Iterable[str], options: Options) -> str:
    """The recipe of the demo's job on files. `featcal calibrate` draws its own order of the saved texts."""
    recipe = {
        "base": "./base",
        "merged": "./merged",
        "tasks": {
            name: {"expert": f"./experts/{name}", "data": {"source": f"./data/{name}.jsonl", "text": "text"}}
            for name in tasks
        },
        "preset": "clip",
        "calibration": {
            "samples": options.samples,
            "batch_size": options.batch_size,
            "max_length": MAX_TOKENS,
        },
        "seed": options.seed,
    }
    note = "Paths are relative to this file. Try: featcal calibrate recipe.yaml -o out"
    return f"{_MARK} {note}\n{yaml.safe_dump(recipe, sort_keys=False)}"


def save_results(output: Path, result: DemoResult, options: Options) -> None:
    """`scores.json`, and `drift.png` of the first calibration."""
    drifts = {calibrated.label: result.drifts(calibrated.label) for calibrated in result.calibrated}
    plot_drift(drifts[result.calibrated[0].label], output / "drift.png")
    content = {
        "metric": "accuracy, per cent",
        "texts": {task: len(outcome.correct_R) for task, outcome in next(iter(result.rows.values())).outcomes.items()},
        "rows": {label: {"tasks": row.accuracies, "average": row.average} for label, row in result.rows.items()},
        "calibrations": {c.label: _facts(result, c.label, options) for c in result.calibrated},
        "drift": drifts,
        "seconds": result.seconds,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }
    (output / "scores.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _facts(result: DemoResult, label: str, options: Options) -> dict[str, Any]:
    calibrated = next(c for c in result.calibrated if c.label == label)
    gain, low, high = result.gain(label, options.seed)
    return {
        "folder": calibrated.folder,
        "settings": calibrated.settings.model_dump(mode="json"),
        "gap_recovered": result.gap(label),
        "gain": gain,
        "gain_95_percent": [low, high],
        "seconds": calibrated.seconds,
    }
