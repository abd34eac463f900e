"""FusionBench's own command line runs FeatCal on a local CLIP pool. Needs `pip install fusion-bench`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, Image
from transformers import CLIPImageProcessor, CLIPVisionModel

import featcal
import folders
import pico
from featcal.errors import InputError

# Imported in the tests only: once it is, `find_spec` fails on it, which other tests ask.
if importlib.util.find_spec("fusion_bench") is None:
    pytest.skip("pip install fusion-bench", allow_module_level=True)

TARGET = "featcal.integrations.fusion_bench.FeatCalAlgorithm"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pico towers, two picture sets saved by `datasets`, and `conf/modelpool/local.yaml`."""
    folder = tmp_path_factory.mktemp("pool")
    base = pico.make("clip-vision")
    made = {"base": base, "cars": pico.perturbed(base, 1), "dtd": pico.perturbed(base, 2)}
    for name, model in made.items():
        folders.save(model, folder / name, "clip-vision", torch.float32, "5GB")
    tasks = [name for name in made if name != "base"]
    for number, task in enumerate(tasks):
        folders.write_data(folder, task, "clip-vision", 20, seed=number)
        pictures = sorted(str(path) for path in (folder / f"{task}-images").iterdir())
        rows = Dataset.from_dict({"image": pictures, "label": [0] * len(pictures)}).cast_column("image", Image())
        rows.save_to_disk(str(folder / f"{task}-set"))
    sets = {t: {"_target_": "datasets.load_from_disk", "dataset_path": str(folder / f"{t}-set")} for t in tasks}
    processor = {"_target_": "transformers.CLIPImageProcessor.from_pretrained"}
    config = {
        "_target_": "fusion_bench.modelpool.CLIPVisionModelPool",
        "_recursive_": False,
        "models": {"_pretrained_": str(folder / "base"), **{task: str(folder / task) for task in tasks}},
        "train_datasets": sets,
        "processor": {**processor, "pretrained_model_name_or_path": str(folder / "base")},
    }
    (folder / "conf" / "modelpool").mkdir(parents=True)
    (folder / "conf" / "modelpool" / "local.yaml").write_text(yaml.safe_dump(config))
    return folder


def load(pool: Path, **changes: Any) -> Any:
    from fusion_bench.modelpool import CLIPVisionModelPool
    from omegaconf import OmegaConf

    config = yaml.safe_load((pool / "conf" / "modelpool" / "local.yaml").read_text())
    for key in ("_target_", "_recursive_"):
        del config[key]
    return CLIPVisionModelPool(**OmegaConf.create({**config, **changes}))


def algorithm(**arguments: Any) -> Any:
    from featcal.integrations.fusion_bench import FeatCalAlgorithm

    return FeatCalAlgorithm(**arguments)


def direct(pool: Path, scale: float = 0.3, **settings: Any) -> dict[str, torch.Tensor]:
    """The same job through `featcal.calibrate`."""
    models = {name: CLIPVisionModel.from_pretrained(pool / name) for name in ("base", "cars", "dtd")}
    base = models.pop("base")
    processor = CLIPImageProcessor.from_pretrained(pool / "base")
    data = {}
    for task in models:
        rows = Dataset.load_from_disk(str(pool / f"{task}-set"))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42))[:13].tolist()
        pixels = processor([rows[i]["image"] for i in order], return_tensors="pt")["pixel_values"]
        data[task] = [{"pixel_values": part} for part in pixels.split(16)]
    merged = pico.task_arithmetic(base, list(models.values()), scale)
    made = featcal.calibrate(
        merged, base=base, experts=models, data=data, samples=12, progress=False, preset="clip", **settings
    )
    return made.model.state_dict()


def test_from_the_command_line(pool: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusion_bench.scripts.cli", "--config-dir", str(pool / "conf"), "modelpool=local"]
    command += [f"method._target_={TARGET}", "+method.samples=12", "+method.merge.scale=0.3", "+method.device=cpu"]
    command += [f"merged_model_save_path={tmp_path / 'out'}", "fabric.loggers.root_dir=logs", "print_config=false"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    model, info = CLIPVisionModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = direct(pool)
    assert all(torch.allclose(p, expected[name], atol=1e-6) for name, p in model.state_dict().items())


def test_methods_of_fusion_bench_may_merge_first(pool: Path) -> None:
    merge = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.4}
    calibration = {"alpha": 0.2, "exclude": ["*.fc1*"]}
    made = algorithm(merge=merge, samples=12, calibration=calibration, device="cpu").run(load(pool))
    expected = direct(pool, 0.4, **calibration)
    assert all(torch.allclose(p, expected[name], atol=1e-6) for name, p in made.state_dict().items())


def test_what_is_missing_is_said(pool: Path) -> None:
    with pytest.raises(InputError, match="no _pretrained_ model"):
        algorithm().run(load(pool, models={"cars": str(pool / "cars")}))
    with pytest.raises(InputError, match="no training set for 'cars'"):
        algorithm().run(load(pool, train_datasets=None))
    with pytest.raises(InputError, match="unknown calibration setting 'alhpa'; did you mean 'alpha'"):
        algorithm(calibration={"alhpa": 1}).run(load(pool))
