"""The folder of a benchmark run: one small file per finished row, so that the same command again goes on from there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import InputError
from ..evaluate import Score, average, main_scores
from ..recipe import slug
from ..writer import atomic_write

logger = logging.getLogger("featcal")

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


_ROW = TypeAdapter(Row)


def check_folder(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuse an output folder in which these results would be out of place.

    Raises:
        InputError: it is a file, holds something else, or results of another job (the first field that differs).
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder")
    file = folder / "bench.json"
    if not file.is_file():
        if folder.is_dir() and any(path.name != "lock" for path in folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no bench.json: choose another output folder")
        return
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict):
        raise InputError(f"{file} is damaged: choose another output folder")
    mine = _plain(fingerprint)
    for key in {**mine, **theirs}:
        if mine.get(key) != theirs.get(key):
            values = f"{_short(theirs.get(key))}, not {_short(mine.get(key))}"
            raise InputError(
                f"{folder} holds results with {key}={values}; choose another output folder, or the same to go on"
            )


def _plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(dict(fingerprint)))
    return made


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


class Store:
    """Finished rows by name. `fingerprint` is what all rows of the folder have in common."""

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any]):
        """Open or create the folder.

        Raises:
            InputError: as `check_folder`.
        """
        self.folder = Path(folder)
        check_folder(self.folder, fingerprint)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "bench.json").is_file():
            write_json(self.folder / "bench.json", _plain(fingerprint))
        (self.folder / "rows").mkdir(exist_ok=True)

    def get(self, name: str, scored: Iterable[str] = ()) -> Row | None:
        """A finished row, or None. One that is damaged, or lacks a score that it should have, is not finished.

        Args:
            scored: columns that the row must have scores for.
        """
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            row = _ROW.validate_json(file.read_bytes(), strict=True)
        except ValidationError:
            logger.warning("%s is damaged: it is made again", file)
            return None
        if row.name != name or not all(row.scores.get(column) for column in scored):
            logger.warning("%s is not whole: it is made again", file)
            return None
        return row

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
