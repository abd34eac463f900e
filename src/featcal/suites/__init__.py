"""Published benchmark suites, end to end: `load_suite`, `bench`, and the studies of the paper."""

from .load import load_suite, suite_names, suite_recipe
from .runner import DEFAULT_METHODS, METHODS, Options, bench
from .schema import Suite
from .studies import STUDIES, StudyResult, study
from .tables import BenchResult

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "STUDIES",
    "BenchResult",
    "Options",
    "StudyResult",
    "Suite",
    "bench",
    "load_suite",
    "study",
    "suite_names",
    "suite_recipe",
]
