"""FeatCal as a method of FusionBench, for its CLIP vision pools (`pip install fusion-bench`).

    fusion_bench modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA8 \\
        method._target_=featcal.integrations.fusion_bench.FeatCalAlgorithm \\
        taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8 merged_model_save_path=out

Its arguments follow as `+method.samples=64`, `+method.merge.scale=0.4`, `+method.calibration.alpha=0.2`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fusion_bench.method import BaseAlgorithm
from fusion_bench.mixins import auto_register_config
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

import featcal
from featcal.errors import InputError
from featcal.merging import merge_modules, merger_from
from featcal.settings import make_settings

logger = logging.getLogger("featcal")


@auto_register_config
class FeatCalAlgorithm(BaseAlgorithm):
    """Merge the models of a pool, then calibrate the result toward them.

    Args:
        merge: how to merge first: a method of `featcal.merging` ({method: ties, scale: 0.3}), or a FusionBench method
            with its `_target_`. A `_merged_` model in the pool comes before either.
        preset: published settings; `clip` unless any are named in `calibration`.
        samples: images per task, drawn from the pool's training sets of the tasks' names.
        batch_size: images per forward pass.
        calibration: fields of `featcal.Calibration`, e.g. {alpha: 0.2, tune: auto}.
        device: `auto`, `cpu`, `cuda`, …
        seed: of the draw.
    """

    def __init__(
        self,
        merge: Mapping[str, Any] | None = None,
        preset: str | None = "clip",
        samples: int = 256,
        batch_size: int = 16,
        calibration: Mapping[str, Any] | None = None,
        device: str = "auto",
        seed: int = 42,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)

    def run(self, modelpool: Any) -> nn.Module:
        """The calibrated model of a pool with `_pretrained_` and training sets.

        Raises:
            InputError: no pretrained model, or no training set for a task.
        """
        if not modelpool.has_pretrained:
            raise InputError("the model pool has no _pretrained_ model, which is the experts' common base")
        settings = make_settings(
            self.preset, **{"samples": self.samples, "batch_size": self.batch_size, **_plain(self.calibration)}
        )
        base = modelpool.load_pretrained_model().eval()
        experts = {name: modelpool.load_model(name).eval() for name in modelpool.model_names}
        wanted = settings.samples + settings.held_out
        data = {name: _batches(modelpool, name, wanted, settings.batch_size, self.seed) for name in experts}
        merged = self._merged(modelpool, base, experts, data)
        result = featcal.calibrate(
            merged,
            base=base,
            experts=experts,
            data=data,
            device=self.device,
            seed=self.seed,
            inplace=True,
            **settings.model_dump(),
        )
        done = sum(record.status == "calibrated" for record in result.records)
        logger.info("%d modules calibrated toward %d experts", done, len(experts))
        return result.model

    def _merged(
        self, modelpool: Any, base: nn.Module, experts: Mapping[str, nn.Module], data: Mapping[str, list[Any]]
    ) -> nn.Module:
        if modelpool.has_merged:
            found: nn.Module = modelpool.load_model("_merged_").eval()
            return found
        merge = _plain(self.merge)
        if "_target_" in merge:
            made: nn.Module = instantiate(self.merge).run(modelpool).eval()
            return made
        merger = merger_from({"method": "task_arithmetic", **merge})
        return merge_modules(merger, base, experts, data=data, device=self.device)


def _plain(config: Any) -> dict[str, Any]:
    """A DictConfig (or nothing) as a dict."""
    found = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    return dict(found or {})


def _batches(modelpool: Any, name: str, wanted: int, batch_size: int, seed: int) -> list[dict[str, Tensor]]:
    """At most `wanted` images of a task, as the model takes them."""
    if name not in (modelpool._train_datasets or {}):
        raise InputError(
            f"the model pool has no training set for '{name}': add it to train_datasets (no label is read)"
        )
    rows = modelpool.load_train_dataset(name)
    processor = modelpool.load_processor()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()

    def made() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(order), batch_size):
            images = [_image(rows[i], name).convert("RGB") for i in order[start : start + batch_size]]
            yield {"pixel_values": processor(images=images, return_tensors="pt")["pixel_values"]}

    return list(made())


def _image(row: Any, name: str) -> Any:
    """The picture of a row: `image` or `img`, or the first of a pair."""
    if isinstance(row, Mapping):
        found = next((row[key] for key in ("image", "img") if key in row), None)
    else:
        found = row[0] if isinstance(row, (tuple, list)) else None
    if not hasattr(found, "convert"):
        raise InputError(f"training set '{name}': its rows hold no picture under 'image'; only CLIP vision pools work")
    return found
