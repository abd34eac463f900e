"""featcal: calibrate a merged model toward its experts, layer by layer, in closed form."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import InputError, RunError
from .version import __version__

if TYPE_CHECKING:
    from .api import Result, calibrate
    from .run import Outcome, run
    from .settings import PRESETS, Calibration

_HOMES = {"calibrate": "api", "Result": "api", "run": "run", "Outcome": "run", "PRESETS": "settings"}
_HOMES |= {"Calibration": "settings"}

__all__ = [
    "PRESETS",
    "Calibration",
    "InputError",
    "Outcome",
    "Result",
    "RunError",
    "__version__",
    "calibrate",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something of theirs is asked for: `featcal --help` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'featcal' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
