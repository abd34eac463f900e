"""Classification heads: from a model's features to class scores.

A head has two steps, so that a post-merge adapter can act between them: `features(model, inputs)` (rows, D), then
`scores(features)` (rows, C). Called as `head(model, inputs)` it is what `featcal.calibrate(scores=...)` expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from ..blocks import call_model
from ..errors import InputError
from ..writer import write_safetensors


class Head(Protocol):
    """What a classification task needs."""

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """(rows, D)."""
        ...

    def scores(self, features: Tensor) -> Tensor:
        """(rows, C) from features (rows, D)."""
        ...

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """(rows, C)."""
        ...


@dataclass(frozen=True)
class ZeroShotHead:
    """CLIP's head: cosine of the projected image to one text embedding per class, times exp(logit_scale).

    The projection, the text embeddings and the scale are the base model's, whichever vision tower is scored.
    """

    text_CP: Tensor
    """One unit row per class."""
    projection_PD: Tensor
    """`visual_projection` of the base."""
    scale: float

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """Projected image embeddings (rows, P), not normalised."""
        tower = getattr(model, "vision_model", model)
        pixels = inputs["pixel_values"] if isinstance(inputs, Mapping) else inputs
        pooled = call_model(tower, pixels, _device(model)).pooler_output
        return linear(pooled, self.projection_PD.to(pooled))

    def scores(self, features: Tensor) -> Tensor:
        """exp(logit_scale) · cos(image, text), (rows, C)."""
        return self.scale * linear(normalize(features, dim=-1), self.text_CP.to(features))

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        return self.scores(self.features(model, inputs))


def zero_shot_head(clip: nn.Module, tokenizer: Any, names: Sequence[str], templates: Sequence[str]) -> ZeroShotHead:
    """The head of class `names`, each put into all `templates` ('a photo of a {}.').

    Every text's projected embedding gets unit length; they are averaged over the templates; the mean gets unit length.

    Args:
        clip: a `CLIPModel` (text tower, both projections, logit scale).
        tokenizer: its tokenizer.
    """
    text_model, projection = clip.get_submodule("text_model"), clip.get_submodule("text_projection")
    device = _device(clip)
    per_pass = max(1, 256 // len(templates))
    rows = []
    with torch.no_grad():
        for start in range(0, len(names), per_pass):
            part = names[start : start + per_pass]
            texts = [template.format(name) for name in part for template in templates]
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            output = text_model(
                input_ids=tokens["input_ids"].to(device), attention_mask=tokens["attention_mask"].to(device)
            )
            units = normalize(projection(output.pooler_output), dim=-1)
            rows.append(normalize(units.view(len(part), len(templates), -1).mean(1), dim=-1))
    scale = float(clip.get_parameter("logit_scale").detach().exp())
    return ZeroShotHead(torch.cat(rows), clip.get_parameter("visual_projection.weight").detach().clone(), scale)


@dataclass(frozen=True)
class CentroidHead:
    """A fixed head: cosine of the mean-pooled last hidden state to one centroid per class, times a scale."""

    centroid_CD: Tensor
    scale: float

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """Mean over unmasked tokens of the last hidden state, (rows, D)."""
        hidden_BTD = call_model(model, inputs, _device(model)).last_hidden_state
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if mask is None:
            return hidden_BTD.mean(1)
        weight_BT1 = mask.to(hidden_BTD).unsqueeze(-1)
        return (hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp(min=1)

    def scores(self, features: Tensor) -> Tensor:
        """scale · cos(feature, centroid), (rows, C)."""
        centroids = normalize(self.centroid_CD.to(features), dim=-1)
        return self.scale * linear(normalize(features, dim=-1), centroids)

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        return self.scores(self.features(model, inputs))


def load_centroid_head(file: str | Path) -> CentroidHead:
    """A fixed head from a safetensors file with `centroids` (C, D) and `logit_scale` (one number, a plain factor).

    Raises:
        InputError: the file is missing, broken, or lacks one of the two.
    """
    if not Path(file).is_file():
        raise InputError(f"head: no file {file}")
    try:
        with safe_open(str(file), "pt") as tensors:
            names = set(tensors.keys())
            if not {"centroids", "logit_scale"} <= names:
                raise InputError(f"head {file}: needs the tensors 'centroids' (classes, width) and 'logit_scale'")
            return CentroidHead(tensors.get_tensor("centroids"), float(tensors.get_tensor("logit_scale")))
    except SafetensorError as error:
        raise InputError(f"head {file} is not a safetensors file: {error}") from error


def save_centroid_head(head: CentroidHead, file: str | Path) -> None:
    """Write a fixed head as `load_centroid_head` reads it."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(Path(file), {"centroids": head.centroid_CD, "logit_scale": torch.tensor(head.scale)})


@dataclass(frozen=True)
class OwnHead:
    """The model's own classifier. Its features are the logits already; adapters reach its input by a hook."""

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """The logits (rows, C)."""
        output = call_model(model, inputs, _device(model))
        logits: Tensor | None = getattr(output, "logits", output if isinstance(output, Tensor) else None)
        if logits is None or logits.dim() != 2:
            raise InputError(
                f"{type(model).__name__} has no classifier of its own; load it with its classification head, or give "
                "the task a head (zero-shot, centroid)"
            )
        return logits

    def scores(self, features: Tensor) -> Tensor:
        """The logits themselves."""
        return features

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        return self.features(model, inputs)


def _device(model: nn.Module) -> torch.device:
    return next(p.device for p in model.parameters())
