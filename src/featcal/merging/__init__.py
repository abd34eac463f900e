"""Upstream mergers: one small file per method.

`get_merger("ties", {"scale": 0.3})`, then `merge_modules` and kin.
"""

from .average import Average
from .base import ALIASES, REGISTRY, Deltas, Kind, MatrixMerger, Merger, get_merger, merger_from
from .dare import Dare
from .drive import Checkpoint, merge_checkpoints, merge_modules, merge_state_dicts, module_kinds
from .iso_c import IsoC
from .iso_cts import IsoCTS
from .task_arithmetic import TaskArithmetic
from .ties import Ties
from .tsv_m import TSVM
from .wudi import Wudi

__all__ = [
    "ALIASES",
    "REGISTRY",
    "TSVM",
    "Average",
    "Checkpoint",
    "Dare",
    "Deltas",
    "IsoC",
    "IsoCTS",
    "Kind",
    "MatrixMerger",
    "Merger",
    "TaskArithmetic",
    "Ties",
    "Wudi",
    "get_merger",
    "merge_checkpoints",
    "merge_modules",
    "merge_state_dicts",
    "merger_from",
    "module_kinds",
]
