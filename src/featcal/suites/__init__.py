"""Published benchmark suites, end to end: `load_suite`, `bench`, and the studies of the paper."""

from .bench import DEFAULT_METHODS, METHODS, Options, bench
from .load import load_suite, suite_names, suite_recipe
from .schema import Suite
from .tables import BenchResult

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "BenchResult",
    "Options",
    "Suite",
    "bench",
    "load_suite",
    "suite_names",
    "suite_recipe",
]
