"""Freed memory back to the system: glibc keeps what block after block leaves behind, some megabytes each time."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Give freed pages of this process back; nothing where the C library has no way to."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    return found
