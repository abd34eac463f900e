"""Class names and prompt templates of the CLIP benchmark tasks (`classes.yaml`)."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from ..errors import InputError, nearest
from ..strict_yaml import parse_yaml


def class_names(task: str) -> tuple[list[str], list[str]]:
    """Class names (by label) and templates of a CLIP task.

    Raises:
        InputError: no such list.
    """
    lists = known_classes()
    if task not in lists:
        raise InputError(f"no class names for '{task}'{nearest(task, lists)}; known: {', '.join(lists)}")
    return list(lists[task]["names"]), list(lists[task]["templates"])


@cache
def known_classes() -> dict[str, Any]:
    """All lists by task."""
    text = (resources.files("featcal.evaluate") / "classes.yaml").read_text(encoding="utf-8")
    lists, _ = parse_yaml(text, "classes.yaml")
    return dict(lists)
