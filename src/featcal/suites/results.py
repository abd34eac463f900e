"""The folder of a benchmark run: one small file per finished row, so that the same command again goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evaluate import Score, average, main_scores
from ..recipe import slug
from ..writer import atomic_write

Scores = dict[str, dict[str, Score]]
"""{task: {metric: score}}; the first metric is the main one."""


@dataclass
class Row:
    """One line of a table: a model and its scores."""

    name: str
    scores: Scores = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Whatever else the row's study reports: samples, seed, condition, setting, memory, energy."""
    notes: list[str] = field(default_factory=list)

    def value(self, column: str) -> float | None:
        """The main score of a column, or None."""
        own = self.scores.get(column)
        return next(iter(own.values())).value if own else None

    def average(self, columns: tuple[str, ...]) -> float | None:
        """The mean over the columns; None when one of them is missing or their units differ."""
        main = main_scores({column: self.scores[column] for column in columns if self.scores.get(column)})
        return average(main) if len(main) == len(columns) else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        scores = {c: {m: one.as_dict() for m, one in own.items()} for c, own in self.scores.items()}
        return {**vars(self), "scores": scores}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Row:
        """The inverse of `as_dict`."""
        scores = {c: {m: Score(**one) for m, one in own.items()} for c, own in plain["scores"].items()}
        return cls(**{**plain, "scores": scores})


class Store:
    """Finished rows by name. `fingerprint` is what all rows of the folder have in common."""

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any]):
        """Open or create the folder.

        Raises:
            InputError: it holds results of another job; names the first field that differs.
        """
        self.folder = Path(folder)
        (self.folder / "rows").mkdir(parents=True, exist_ok=True)
        file = self.folder / "bench.json"
        mine = json.loads(json.dumps(dict(fingerprint)))
        if file.is_file():
            theirs = json.loads(file.read_text(encoding="utf-8"))
            for key in {**mine, **theirs}:
                if mine.get(key) != theirs.get(key):
                    raise InputError(
                        f"{self.folder} holds results with {key}={theirs.get(key)!r}, not {mine.get(key)!r}; "
                        "choose another output folder, or the same options to go on"
                    )
        else:
            write_json(file, mine)

    def get(self, name: str) -> Row | None:
        """A finished row, or None."""
        file = self._file(name)
        return Row.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def put(self, row: Row) -> None:
        """Keep a finished row."""
        write_json(self._file(row.name), row.as_dict())

    def _file(self, name: str) -> Path:
        return self.folder / "rows" / f"{slug(name)}.json"


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file as a whole."""
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file as a whole: never half of it."""
    with atomic_write(file) as stream:
        stream.write(text.encode())
