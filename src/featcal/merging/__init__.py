"""Upstream mergers: one small file per method.

`merge_modules(get_merger("ties", {"scale": 0.3}), base, experts)` for models in memory, by any method;
`merge_checkpoints` streams the data-free ones, `merge_blocks` the regression ones. Parameters: `docs/mergers.md`.
"""

from .adamerging import AdaMerging
from .average import Average
from .base import ALIASES, REGISTRY, Deltas, Kind, MatrixMerger, Merger, get_merger, merger_from
from .dare import Dare
from .drive import Checkpoint, merge_checkpoints, merge_state_dicts, module_kinds
from .features import FeatureMerger, merge_blocks
from .fisher import Fisher
from .iso_c import IsoC
from .iso_cts import IsoCTS
from .lot import Lot
from .models import merge_modules
from .regmean import RegMean
from .regmean_pp import RegMeanPP
from .task_arithmetic import TaskArithmetic
from .ties import Ties
from .tsv_m import TSVM
from .whole import ModelMerger
from .wudi import Wudi

__all__ = [
    "ALIASES",
    "REGISTRY",
    "TSVM",
    "AdaMerging",
    "Average",
    "Checkpoint",
    "Dare",
    "Deltas",
    "FeatureMerger",
    "Fisher",
    "IsoC",
    "IsoCTS",
    "Kind",
    "Lot",
    "MatrixMerger",
    "Merger",
    "ModelMerger",
    "RegMean",
    "RegMeanPP",
    "TaskArithmetic",
    "Ties",
    "Wudi",
    "get_merger",
    "merge_blocks",
    "merge_checkpoints",
    "merge_modules",
    "merge_state_dicts",
    "merger_from",
    "module_kinds",
]
