"""The two kinds of failure a user can meet. Programmer errors stay `assert`s."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What the user gave is wrong: one sentence with what, where and what to do (exit status 2)."""


class MissingSplit(InputError):
    """The source is there, but not the split that was asked for."""


class RunError(RuntimeError):
    """The input was fine but the job could not finish, e.g. a full disk or a dead rank (exit status 1)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt key: ``; did you mean 'alpha'?``, or an empty string when nothing is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""
