"""Whole models from checkpoints, and the scores that live outside them, for the methods that look at predictions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import AutoTokenizer, CLIPModel

from ..errors import InputError
from ..evaluate.classes import class_names, known_classes
from ..evaluate.heads import zero_shot_head
from ..names import model_class
from ..plan import Model, map_model
from ..skeleton import _aliases, _put
from .heads import Scores


def whole_model(model: Model) -> nn.Module:
    """The checkpoint in memory, on the CPU in the file's dtypes, as the class of its key map.

    Raises:
        InputError: the file lacks a tensor of that class.
    """
    made, keymap = copy.deepcopy(model.keymap.model), model.keymap
    for name, names in _aliases(made).items():
        if name not in keymap:
            kind = type(made).__name__
            raise InputError(f"{model.label} ('{keymap.checkpoint.name}') has no tensor for {name} of a {kind}")
        if name == names[0]:
            _put(made, names, keymap.tensor(name).contiguous())
    for name, _ in list(made.named_buffers()):
        if name in keymap:
            _put(made, (name,), keymap.tensor(name).contiguous())
    return made


def head_scores(base: Model, data: Mapping[str, Sequence[Any]]) -> dict[str, Scores]:
    """Zero-shot heads of the tasks whose samples are images for a CLIP; empty for models that score by themselves.

    Raises:
        InputError: no class names are known for a task, or the base is no whole CLIP.
    """
    kind = type(base.keymap.model).__name__
    tasks = [task for task, batches in data.items() if "input_ids" not in batches[0] and kind.startswith("CLIP")]
    if not tasks or "For" in kind:
        return {}
    unknown = [task for task in tasks if task not in known_classes()]
    if unknown:
        raise InputError(
            f"task '{unknown[0]}': CLIP's scores need class names, which are known for {', '.join(known_classes())}; "
            "give the task that name, or merge in Python with scores={…}"
        )
    clip = whole_clip(base)
    tokenizer = AutoTokenizer.from_pretrained(base.checkpoint.folder)
    return {task: zero_shot_head(clip, tokenizer, *class_names(task)) for task in tasks}


def whole_clip(base: Model) -> nn.Module:
    """The base with its text tower and projections.

    Raises:
        InputError: its file holds a vision tower alone.
    """
    if model_class(base.checkpoint) is not CLIPModel:
        raise InputError(
            f"base '{base.checkpoint.name}' has no text tower, which CLIP's scores need; give a whole CLIP"
        )
    return whole_model(map_model("the base", base.checkpoint, CLIPModel))
