"""Suites whose checkpoints and data are made on this machine, from what package registries hold."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..demo.sources import cache_folder
from ..errors import InputError, nearest
from .schema import Suite

BUILDERS = {
    "minilm": "featcal.suites.minilm",
    "vision": "featcal.suites.vision",
    "smollm2": "featcal.suites.smollm2",
}
"""Modules with a function `build(root, progress)` that fills a mirror; what is there already is kept."""


def build_suite(suite: Suite, root: Path | None, *, progress: bool) -> Path:
    """The mirror of a suite that is built here: in `root`, else in the cache, so that it is built once."""
    assert suite.build is not None
    if suite.build not in BUILDERS:
        raise InputError(f"suite '{suite.name}': unknown builder '{suite.build}'{nearest(suite.build, BUILDERS)}")
    folder = root if root is not None else cache_folder() / "suites" / suite.build
    importlib.import_module(BUILDERS[suite.build]).build(folder, progress=progress)
    return folder
