"""Which rows of a source are used: one seeded permutation, its first n usable rows, and the next ones held out.

The choice is nested: with the same seed and task, the samples for n = 64 are the first 64 of those for n = 128.
Columns are the named ones, or guessed when their names leave no doubt. A label column is never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import InputError, nearest
from ..recipe import DataSpec
from ..templates import fill_template, template_columns
from .images import check_image, image_bytes
from .tables import Table, open_table

logger = logging.getLogger("featcal")

Row = dict[str, Any]
"""One sample by part: `text`, `messages`, `image`, or `input` and `target`; never anything else."""

_GUESSES: tuple[dict[str, str], ...] = (
    {"text": "text"},
    {"text": "sentence"},
    {"text": "content"},
    {"text": "document"},
    {"text": "context"},
    {"messages": "messages"},
    {"messages": "conversations"},
    {"image": "image"},
    {"image": "img"},
    {"input": "input"},
    {"input": "input", "target": "target"},
    {"input": "inputs", "target": "targets"},
    {"input": "prompt", "target": "completion"},
    {"input": "prompt", "target": "response"},
    {"input": "instruction", "target": "output"},
    {"input": "instruction", "target": "response"},
    {"input": "query", "target": "response"},
    {"input": "question", "target": "answer"},
)
_LABELS = frozenset(("label", "labels", "label_text", "class", "idx", "id"))


@dataclass(frozen=True)
class Counts:
    """What happened to the rows that were looked at, for the report.

    Attributes:
        available: rows of the source.
        samples, held_out: rows used to calibrate, and rows kept apart to measure and to tune.
        empty: rows skipped because a needed part was missing or blank.
        unreadable: images skipped because they could not be decoded.
        duplicates: samples equal to an earlier sample (they are kept).
    """

    available: int
    samples: int
    held_out: int
    empty: int = 0
    unreadable: int = 0
    duplicates: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Samples:
    """The chosen rows of one task.

    Attributes:
        rows, indices: samples in the order of the permutation, and their row numbers in the source.
        held_out, held_out_indices: the same for the rows kept apart.
        columns: which column each part was read from.
        counts: see `Counts`.
        fingerprint: SHA-256 over the raw contents of all these rows, in order, and over `columns`.
    """

    rows: list[Row]
    indices: list[int]
    held_out: list[Row]
    held_out_indices: list[int]
    columns: dict[str, str]
    counts: Counts
    fingerprint: str


def load_samples(
    spec: DataSpec,
    seed: int,
    n: int,
    *,
    task: str = "",
    held_out: int = 0,
    kind: str | None = None,
) -> Samples:
    """The first `n` usable rows of the source's permutation, and the next `held_out` ones.

    Args:
        spec: the source and its columns.
        seed, task: together they seed the permutation, so that tasks on one source see different rows.
        n: samples wanted. A source with fewer gives all it has.
        held_out: rows to keep apart, different from every sample. If the source has too few more of them, up to a
            fifth of its rows (at least one, if there are two) is taken from the end of the samples instead.
        kind: what the model reads (`ModelInput.kind`), which settles some guesses of columns.

    Raises:
        InputError: no such source or column, columns that could not be guessed, or no usable row at all.
    """
    table = open_table(spec)
    columns = choose_columns(spec, table, kind)
    chosen: list[_Chosen] = []
    extra: list[_Chosen] = []
    digests: set[str] = set()
    empty, problems = 0, list[str]()
    for index in permutation(table.size, seed, task):
        if len(chosen) >= n and len(extra) >= held_out:
            break
        row = read_row(table, index, columns)
        problem = check_image(row["image"]) if row and "image" in row else None
        if row is None:
            empty += 1
        elif problem:
            problems.append(f"{table.where(index)}: {problem}")
        elif len(chosen) < n:
            chosen.append(_Chosen(index, row, _digest(row)))
            digests.add(chosen[-1].digest)
        elif (digest := _digest(row)) not in digests:
            extra.append(_Chosen(index, row, digest))
    if not chosen:
        counted = f"{table.size} rows, {empty} empty, {len(problems)} unreadable"
        first = f"; {problems[0]}" if problems else ""
        raise InputError(f"{table.name} has no usable row ({_spelt(columns)}; {counted}){first}")
    chosen, extra = _carve(chosen, extra, held_out)
    duplicates = len(chosen) - len({c.digest for c in chosen})
    counts = Counts(table.size, len(chosen), len(extra), empty, len(problems), duplicates)
    _say(task or table.name, n, held_out, counts, problems)
    return Samples(
        rows=[c.row for c in chosen],
        indices=[c.index for c in chosen],
        held_out=[c.row for c in extra],
        held_out_indices=[c.index for c in extra],
        columns=columns,
        counts=counts,
        fingerprint=_fingerprint(columns, chosen, extra),
    )


def permutation(size: int, seed: int, task: str) -> Iterator[int]:
    """The one order in which the rows of a task's source are considered.

    Drawn from numpy's legacy generator, whose stream is the same in every version.
    """
    key = hashlib.sha256(f"{seed}\0{task}".encode()).digest()
    order = np.random.RandomState(np.frombuffer(key, dtype="<u4")).permutation(size)
    return (int(index) for index in order)


@dataclass(frozen=True)
class _Chosen:
    index: int
    row: Row
    digest: str


def _carve(chosen: list[_Chosen], extra: list[_Chosen], held_out: int) -> tuple[list[_Chosen], list[_Chosen]]:
    """Samples and held-out rows, some of the former moved to the latter when those are too few."""
    usable = len(chosen) + len(extra)
    fair = usable // 5 or int(usable > 1)
    keep = len(chosen) - max(0, min(held_out, fair) - len(extra))
    return chosen[:keep], chosen[keep:] + extra


def _say(name: str, n: int, held_out: int, counts: Counts, problems: Sequence[str]) -> None:
    if counts.samples < n:
        logger.warning("%s: %d samples instead of %d, the source has no more", name, counts.samples, n)
    if counts.held_out < held_out:
        logger.warning("%s: %d held-out rows instead of %d", name, counts.held_out, held_out)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        logger.warning("%s: unreadable images skipped: %s%s", name, problems[0], more)
    if counts.empty:
        logger.warning("%s: %d empty rows skipped", name, counts.empty)
    if counts.duplicates:
        logger.warning("%s: %d of %d samples are duplicates", name, counts.duplicates, counts.samples)


# --------------------------------------------------------------------------------------------------- columns


def choose_columns(spec: DataSpec, table: Table, kind: str | None = None) -> dict[str, str]:
    """The column of each part: as named in `spec`, otherwise guessed from the names if only one guess fits.

    Raises:
        InputError: a named column is missing, the named part does not suit the model, or the guess is open.
    """
    columns = spec.columns
    if columns:
        for part, named in columns.items():
            for column in _columns_of(part, named, table.columns):
                if column not in table.columns:
                    known, near = ", ".join(table.columns), nearest(column, table.columns)
                    raise InputError(f"{table.name} has no column '{column}' ({part}:){near}; it has: {known}")
    else:
        columns = _guess_columns(spec, table, kind)
        logger.info("%s: reading %s", table.name, _spelt(columns))
    if kind in ("text", "seq2seq") and "image" in columns:
        raise InputError(f"{table.name} gives images, but the model reads text")
    if kind == "image" and "image" not in columns:
        raise InputError(f"{table.name} gives text ({_spelt(columns)}), but the model reads images; name `image:`")
    return columns


def _guess_columns(spec: DataSpec, table: Table, kind: str | None) -> dict[str, str]:
    names = {name.casefold(): name for name in table.columns if name != spec.label}
    matching = [guess for guess in _GUESSES if set(guess.values()) <= names.keys()]
    # The pair beats its input alone; anything else that also matches leaves the choice open.
    matching = [g for g in matching if not any(set(g.values()) < set(other.values()) for other in matching)]
    suitable = [guess for guess in matching if ("image" in guess) == (kind == "image")] if kind else matching
    fitting = [{part: names[column] for part, column in guess.items()} for guess in suitable or matching]
    others = [name for name in names.values() if name.casefold() not in _LABELS]
    if not fitting and len(others) == 1 and kind != "image":
        fitting = [{"text": others[0]}]
    if len(fitting) != 1:
        example = "image" if kind == "image" else "text"
        column = others[0] if others else "NAME"
        raise InputError(
            f"{table.name}: cannot tell which column to read among {', '.join(table.columns) or 'none'}; "
            f"name it in the recipe's data, such as `{example}: {column}`"
        )
    return fitting[0]


def _columns_of(part: str, named: str, known: Sequence[str]) -> tuple[str, ...]:
    """The columns that make a part: the one that is named, or those of a template.

    Raises:
        InputError: a template with odd braces.
    """
    if named in known or part in ("messages", "image"):
        return (named,)
    try:
        return template_columns(named) or (named,)
    except ValueError as error:
        raise InputError(f"{part}: '{named}' is neither a column nor a template ({error})") from None


def _spelt(columns: Mapping[str, str]) -> str:
    def source(named: str) -> str:
        return f"template '{named}'" if "{" in named else f"column '{named}'"

    return ", ".join(f"{part} from {source(named)}" for part, named in columns.items())


# ------------------------------------------------------------------------------------------------------ rows


def read_row(table: Table, index: int, columns: Mapping[str, str]) -> Row | None:
    """The parts of one row in plain form, or None when a part that the sample needs is empty."""
    parts = {part: _columns_of(part, named, table.columns) for part, named in columns.items()}
    cells = table.read(index, tuple(dict.fromkeys(column for names in parts.values() for column in names)))
    row: Row = {}
    for part, column in columns.items():
        if parts[part] != (column,):
            row[part] = _filled(column, {name: cells[name] for name in parts[part]}, table.where(index))
            continue
        cell = cells[column]
        if part == "image":
            row[part] = _image(cell, table, index)
        elif part == "messages":
            row[part] = _messages(cell, f"{table.where(index)}, column '{column}'")
        else:
            row[part] = _text(cell, f"{table.where(index)}, column '{column}'")
    if any(value is None for part, value in row.items() if part != "target"):
        return None
    return row


def _filled(template: str, cells: Mapping[str, Any], where: str) -> str | None:
    """A template with the row's cells; None when one of them is empty."""
    plain = {}
    for column, cell in cells.items():
        number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
        plain[column] = str(cell) if number else _text(cell, f"{where}, column '{column}'")
    return None if None in plain.values() else fill_template(template, plain)


def _text(cell: Any, where: str) -> str | None:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    if not isinstance(cell, str):
        raise InputError(f"{where}: expected text, found {type(cell).__name__}")
    return cell


def _image(cell: Any, table: Table, index: int) -> dict[str, Any] | None:
    """An image as ``{"path": ..., "bytes": ...}``, one of the two set."""
    if cell is None or cell == "":
        return None
    if isinstance(cell, str):
        if cell.startswith(("http://", "https://", "data:")):
            raise InputError(f"{table.where(index)}: images behind URLs are not fetched; give files")
        return {"path": os.path.join(table.folder or "", os.path.expanduser(cell)), "bytes": None}
    if isinstance(cell, Mapping) and {"path", "bytes"} & cell.keys():
        path, data = cell.get("path"), cell.get("bytes")
        if data is None and path is None:
            return None
        return {"path": None if data else os.path.join(table.folder or "", str(path)), "bytes": data}
    raise InputError(f"{table.where(index)}: expected an image or a path, found {type(cell).__name__}")


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


def _messages(cell: Any, where: str) -> list[dict[str, Any]] | None:
    """Chat messages as role / content pairs; from ShareGPT's from / value pairs and from JSON text, too."""
    if isinstance(cell, str) and cell.strip():
        try:
            cell = json.loads(cell)
        except ValueError:
            raise InputError(f"{where}: expected a list of messages, found plain text; use `text:`") from None
    if isinstance(cell, Mapping) and all(isinstance(values, list) for values in cell.values()):
        # How older versions of `datasets` hand out a list of records.
        cell = [dict(zip(cell, values, strict=True)) for values in zip(*cell.values(), strict=True)]
    if not cell:
        return None
    if not isinstance(cell, (list, tuple)) or not all(isinstance(message, Mapping) for message in cell):
        raise InputError(f"{where}: expected a list of messages with role and content")
    messages = [_message(message, where) for message in cell]
    return messages if any(str(message["content"]).strip() for message in messages) else None


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    # Arrow fills keys that a message lacks with None, which templates take for present.
    kept = {key: value for key, value in message.items() if value is not None}
    if "from" in kept and "value" in kept:
        kept = {"role": _SHAREGPT_ROLES.get(kept["from"], kept["from"]), "content": kept["value"]}
    if "role" not in kept:
        raise InputError(f"{where}: a message has no role (its keys: {', '.join(map(str, message))})")
    content = kept.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise InputError(f"{where}: a message holds something other than text")
        content = "".join(str(part.get("text") or "") for part in content)
    return {**kept, "content": content}


# ----------------------------------------------------------------------------------------------- fingerprint


def _digest(row: Row) -> str:
    """SHA-256 of the raw contents of a row."""
    digest = hashlib.sha256()
    for part, value in row.items():
        data = image_bytes(value) if part == "image" else json.dumps(value, sort_keys=True, default=str).encode()
        digest.update(f"{part}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _fingerprint(columns: Mapping[str, str], chosen: Sequence[_Chosen], extra: Sequence[_Chosen]) -> str:
    contents = [dict(columns), [c.digest for c in chosen], [c.digest for c in extra]]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
