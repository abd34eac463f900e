"""Scores of a batch's rows, for the mergers that look at predictions. No label is ever read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import call_model, inputs_of
from ..errors import InputError
from ..stream import MODEL_ERRORS

Scores = Callable[[nn.Module, Any], Tensor]
"""(model, batch) → (rows, classes), for models whose scores live outside them."""


def row_scores(model: nn.Module, batch: Any, device: torch.device, score: Scores | None, task: str) -> Tensor:
    """(rows, classes): the task's own `score`, or what the model's output offers.

    A classifier's logits; CLIP's images against the texts of the batch; the first decoder position of an
    encoder-decoder; the position after each row's last real token of a language model.

    Raises:
        InputError: the model refuses the batch, has no scores, or they are not (rows, classes) with a gradient.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    batch = _placed(batch, device, dtype)
    try:
        logits = _own_scores(model, batch, device, task) if score is None else score(model, batch)
    except InputError:
        raise
    except MODEL_ERRORS as error:
        raise InputError(f"task '{task}': no scores for a batch: {error}") from error
    if logits.ndim != 2:
        raise InputError(f"task '{task}': scores must be (rows, classes), got shape {tuple(logits.shape)}")
    if not logits.requires_grad:
        raise InputError(f"task '{task}': its scores have no gradient; drop torch.no_grad and detach from `scores`")
    return logits


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors on the device, floats in the dtype, inside dicts and tuples."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {key: _placed(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_placed(item, device, dtype) for item in value)
    return value


def _own_scores(model: nn.Module, batch: Any, device: torch.device, task: str) -> Tensor:
    output = call_model(model, batch, device)
    if isinstance(output, Tensor):
        return _of_rows(model, batch, output)
    for key in ("logits", "logits_per_image"):
        if isinstance(output, Mapping) and key in output:
            return _of_rows(model, batch, output[key])
    raise InputError(
        f"task '{task}': {type(model).__name__} gives no class scores; "
        f"pass scores={{'{task}': function of (model, batch)}}"
    )


def _of_rows(model: nn.Module, batch: Any, logits: Tensor) -> Tensor:
    if logits.ndim != 3:
        return logits
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return logits[:, 0]
    mask = inputs_of(batch)[1].get("attention_mask")
    if mask is None:
        return logits[:, -1]
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (places * (mask != 0)).argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), last.to(logits.device)]
