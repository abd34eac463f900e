"""Feature drift from the experts: `measure` (models in memory), `walk` (networks), `Watcher` (inside a job)."""

from .outputs import CosineHead, LinearHead, Scores
from .results import ModelDrift, Tally, TaskDrift, merge_parts, to_csv, to_dict, to_json
from .walk import measure, walk
from .watcher import Watcher

__all__ = [
    "CosineHead",
    "LinearHead",
    "ModelDrift",
    "Scores",
    "Tally",
    "TaskDrift",
    "Watcher",
    "measure",
    "merge_parts",
    "to_csv",
    "to_dict",
    "to_json",
    "walk",
]
