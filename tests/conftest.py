"""Every test runs offline, quietly, on one thread, and from a fixed seed."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "featcal",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("featcal")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """A test's random numbers do not depend on the tests before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
