"""Every kind of source as one thing: a table of rows that are read one at a time, and only in the columns asked for.

Nothing is shuffled, guessed or converted here; a label column is only ever read when somebody asks for it.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, MissingSplit, nearest
from ..recipe import DataSpec

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_DATASET_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing"))
_PEEK = 100  # rows whose keys make the columns of a JSON source


@dataclass(frozen=True)
class Table:
    """Rows of a source.

    Attributes:
        name: the source, for messages.
        columns: what its rows hold.
        size: number of rows.
        read: ``read(index, columns)`` gives these columns of one row; absent ones are None.
        where: names row `index` for a message, e.g. ``data.jsonl, line 7``.
        folder: what relative image paths in the rows start from, if the source is a file.
    """

    name: str
    columns: tuple[str, ...]
    size: int
    read: Callable[[int, Sequence[str]], dict[str, Any]]
    where: Callable[[int], str]
    folder: str | None = None


def open_table(spec: DataSpec) -> Table:
    """The source of `spec`: a file, a folder, or a dataset of the Hub.

    Raises:
        InputError: there is no such source, split or configuration, or it cannot be read; says which and why.
    """
    path = Path(os.path.expanduser(spec.source))
    if os.path.isfile(path):
        return _open_file(path, spec)
    if os.path.isdir(path):
        return _open_folder(path, spec)
    return _open_hub(spec)


# ----------------------------------------------------------------------------------------------------- files


def _open_file(path: Path, spec: DataSpec) -> Table:
    if spec.split != "train":
        raise MissingSplit(f"{path} is one file and has no split '{spec.split}'; name the file of that split instead")
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    openers: dict[str, Callable[[Path], Table]] = {
        ".jsonl": _json_table,
        ".json": _json_table,
        ".csv": _csv_table,
        ".tsv": _csv_table,
        ".txt": _text_table,
        ".parquet": _parquet_table,
    }
    if kind not in openers or (kind == ".parquet" and path.suffix != ".parquet"):
        known = ", ".join(openers)
        raise InputError(f"{path}: cannot read data from '{''.join(path.suffixes) or path.name}' files; known: {known}")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    return openers[kind](path)


def _contents(path: Path) -> bytes | mmap.mmap:
    """The bytes of a file: mapped, so that only the rows that are read cost memory, or unpacked if gzipped."""
    if path.suffix.lower() == ".gz":
        try:
            return gzip.decompress(path.read_bytes())
        except (OSError, EOFError, zlib.error):
            raise InputError(f"{path} is not a whole gzip file; fetch it again") from None
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text ({error.reason}); save it as UTF-8") from None


class _Lines:
    """Lines of a text file by number, split at newlines only (never at the other breaks of Unicode)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _contents(path)
        if self._data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise InputError(f"{path} is UTF-16 text; save it as UTF-8")
        newlines = [_newlines(self._data, start) for start in range(0, len(self._data), _CHUNK)]
        ends = np.concatenate([*newlines, np.empty(0, np.int64)])
        if len(self._data) and self._data[-1:] != b"\n":
            ends = np.append(ends, len(self._data))
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) + 1 if number else 0
        line = self._data[start : int(self._ends[number])].rstrip(b"\r\n")
        return line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line

    def whole(self) -> bytes:
        return bytes(self._data[:])

    def where(self, number: int) -> str:
        return f"{self.path}, line {number + 1}"


_CHUNK = 1 << 26


def _newlines(data: bytes | mmap.mmap, start: int) -> np.ndarray:
    chunk = np.frombuffer(data[start : start + _CHUNK], dtype=np.uint8)
    return np.flatnonzero(chunk == ord("\n")).astype(np.int64) + start


def _text_table(path: Path) -> Table:
    """One sample per line; blank lines are empty rows."""
    lines = _Lines(path)

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        return {column: _decode(lines[index], lines.where(index)) if column == "text" else None for column in columns}

    return Table(str(path), ("text",), len(lines), read, lines.where, str(path.parent))


def _json_table(path: Path) -> Table:
    """One object per line, or one array of objects, whatever the file is called. Blank lines are no rows."""
    lines = _Lines(path)
    numbers = [number for number in range(len(lines)) if lines[number].strip()]
    if not numbers:
        raise InputError(f"{path} is empty")
    first = lines[numbers[0]].lstrip()
    if first[:1] == b"[" or (first[:1] == b"{" and not _is_json(first)):
        return _json_array_table(path, lines.whole())

    def row(index: int) -> dict[str, Any]:
        place = lines.where(numbers[index])
        return _json_object(_parse_json(lines[numbers[index]], place), place)

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        values = row(index)
        return {column: values.get(column) for column in columns}

    columns = dict.fromkeys(key for index in range(min(len(numbers), _PEEK)) for key in row(index))
    return Table(str(path), tuple(columns), len(numbers), read, lambda i: lines.where(numbers[i]), str(path.parent))


def _json_array_table(path: Path, data: bytes) -> Table:
    rows = _parse_json(data, str(path))
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        if len(rows) != 1 or not lists:
            raise InputError(f"{path} holds one JSON object; expected an array of objects, or one object per line")
        rows = lists[0]
    if not rows:
        raise InputError(f"{path} is empty")

    def where(index: int) -> str:
        return f"{path}, item {index + 1}"

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        values = _json_object(rows[index], where(index))
        return {column: values.get(column) for column in columns}

    names = dict.fromkeys(key for index, row in enumerate(rows[:_PEEK]) for key in _json_object(row, where(index)))
    return Table(str(path), tuple(names), len(rows), read, where, str(path.parent))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode("utf-8", errors="replace"))
    except ValueError:
        return False
    return True


def _parse_json(data: bytes, name: str) -> Any:
    try:
        return json.loads(_decode(data, name))
    except json.JSONDecodeError as error:
        line = f" on line {error.lineno}" if error.lineno > 1 else ""
        raise InputError(f"{name}: not valid JSON: {error.msg.lower()}{line}") from None
    except RecursionError:
        raise InputError(f"{name}: not valid JSON: nested too deeply") from None


def _json_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f'{name}: expected a JSON object such as {{"text": "..."}}, found {type(value).__name__}')
    return value


def _csv_table(path: Path) -> Table:
    text = _decode(bytes(_contents(path)[:]), str(path))
    header_line = text.split("\n", 1)[0]
    delimiters = [mark for mark in (",", ";", "\t") if mark in header_line] or [","]
    delimiter = "\t" if ".tsv" in path.suffixes else delimiters[0]
    header: list[str] = []
    rows: list[list[str]] = []
    starts: list[int] = []
    for line, fields in _csv_rows(text, delimiter, path):
        if not header:
            header = [field.strip() for field in fields]
            continue
        if len(fields) != len(header):
            raise InputError(f"{path}, line {line}: {len(fields)} fields, but the header names {len(header)} columns")
        rows.append(fields)
        starts.append(line)
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise InputError(f"{path}: two columns are called '{repeated[0]}'")

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        return {name: rows[index][header.index(name)] if name in header else None for name in columns}

    return Table(str(path), tuple(header), len(rows), read, lambda i: f"{path}, line {starts[i]}", str(path.parent))


def _csv_rows(text: str, delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(last line of the row, its fields), without blank lines. Fields may be of any length."""
    limit = csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _parquet_table(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    def unreadable(error: Exception) -> InputError:
        return InputError(f"{path}: not a readable Parquet file: {_first_line(error)}")

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(error) from None
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    ends = np.cumsum(sizes) if sizes else np.zeros(0, np.int64)
    names = tuple(file.schema_arrow.names)

    @functools.lru_cache(maxsize=4)
    def group_rows(group: int, columns: tuple[str, ...]) -> pyarrow.Table:
        try:
            return file.read_row_group(group, columns=list(columns))
        except (pyarrow.ArrowException, OSError) as error:
            raise unreadable(error) from None

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        group = int(np.searchsorted(ends, index, side="right"))
        known = tuple(column for column in columns if column in names)
        offset = index - int(ends[group] - sizes[group])
        row = group_rows(group, known).slice(offset, 1).to_pylist()[0] if known else {}
        return dict.fromkeys(columns) | row

    where = _row_namer(str(path))
    return Table(str(path), names, file.metadata.num_rows, read, where, str(path.parent))


# --------------------------------------------------------------------------------------------------- folders


def _open_folder(path: Path, spec: DataSpec) -> Table:
    """Saved by `datasets`, else with Parquet files, else with images, else with other data files."""
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _open_saved(path, spec)
    images, data_files = _scan(path)
    if any(suffix in (".parquet", ".arrow") for suffix in data_files) or (data_files and not images):
        return _dataset_table(_load(spec, str(path)), f"{path} ({spec.split})")
    if not images:
        kinds = "images, data files, or a dataset saved by `datasets`"
        raise InputError(f"{path} holds no data: expected {kinds}")
    return _image_table(path, images, spec)


def _scan(folder: Path) -> tuple[list[str], set[str]]:
    """Images below `folder` as sorted relative paths, and the suffixes of its data files."""
    images: list[str] = []
    suffixes: set[str] = set()
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link to a folder that holds it
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            if name[0] != "." and suffix in IMAGE_SUFFIXES:
                images.append(Path(parent, name).relative_to(folder).as_posix())
            elif suffix in _DATASET_SUFFIXES:
                suffixes.add(suffix)
    return sorted(images), suffixes


def _image_table(folder: Path, images: list[str], spec: DataSpec) -> Table:
    """An image folder: a sub-folder with the name of the split if there is one, else all of it.

    The column `label` is the class sub-folder's name, for `featcal evaluate`.
    """
    tops = {image.split("/")[0] for image in images if "/" in image}
    if spec.split in tops:
        folder = folder / spec.split
        images = [image.split("/", 1)[1] for image in images if image.split("/")[0] == spec.split]
    elif spec.split != "train" or (tops and tops <= _SPLITS):
        raise MissingSplit(f"{folder} has no sub-folder '{spec.split}'; its sub-folders: {_some(sorted(tops))}")

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        path = images[index]
        values = {"image": str(folder / path), "label": path.rsplit("/", 1)[0] if "/" in path else None}
        return {column: values.get(column) for column in columns}

    return Table(str(folder), ("image", "label"), len(images), read, lambda i: str(folder / images[i]), str(folder))


def _open_saved(path: Path, spec: DataSpec) -> Table:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a whole dataset saved by `datasets`: {_first_line(error)}") from None
    if isinstance(data, DatasetDict):
        if spec.split not in data:
            known = ", ".join(data)
            raise MissingSplit(f"{path} has no split '{spec.split}'{nearest(spec.split, data)}; it has: {known}")
        data = data[spec.split]
    elif spec.split != "train" and str(data.split) != spec.split:
        raise MissingSplit(f"{path} is one split ({data.split or 'without a name'}), not '{spec.split}'")
    return _dataset_table(data, str(path))


def _dataset_table(data: Dataset, name: str) -> Table:
    from datasets import Image

    data = data.with_format(None)

    @functools.lru_cache(maxsize=8)
    def view(columns: tuple[str, ...]) -> Dataset:
        """Only these columns, images left as they were stored: nothing else is decoded."""
        part = data.select_columns(list(columns))
        for column in columns:
            if isinstance(part.features[column], Image):
                part = part.cast_column(column, Image(decode=False))
        return part

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        known = tuple(column for column in columns if column in data.column_names)
        return dict.fromkeys(columns) | (view(known)[index] if known else {})

    return Table(name, tuple(data.column_names), len(data), read, _row_namer(name))


def _row_namer(name: str) -> Callable[[int], str]:
    return lambda index: f"{name}, row {index + 1}"


# ------------------------------------------------------------------------------------------------------- Hub


def _open_hub(spec: DataSpec) -> Table:
    source = spec.source
    looks_local = source.startswith((".", "/", "~", "\\")) or "\\" in source or source.count("/") > 1
    if looks_local or Path(source).suffix.lower() in (*_DATASET_SUFFIXES, ".tsv", ".txt", ".gz"):
        raise InputError(f"no such data file or folder: {source}")
    if "@" in source:
        raise InputError(f"'{source}' does not exist here; for a revision of a hub dataset write `revision:` beside it")
    return _dataset_table(_load(spec, source), f"{source} ({spec.split})")


def _load(spec: DataSpec, source: str) -> Dataset:
    """`datasets.load_dataset` with its failures in our words. HF_TOKEN and HF_HUB_OFFLINE act as usual."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        data = load_dataset(source, spec.config, split=spec.split, revision=spec.revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ValueError) and "split" in _first_line(error).lower():
            raise MissingSplit(f"dataset '{source}' has no split '{spec.split}': {_first_line(error)}") from error
        problem = _load_problem(spec, source, error)
        if problem is None:
            raise
        raise InputError(problem) from error
    return data


def _load_problem(spec: DataSpec, source: str, error: Exception) -> str | None:
    """One sentence for what `load_dataset` raised; None if it is not the user's to mend."""
    from huggingface_hub import constants

    text, name = _first_line(error), f"dataset '{source}'"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "scripts are no longer supported" in text:
        return (
            f"{name} is a Python script, which `datasets` no longer runs; "
            "try `revision: refs/convert/parquet`, or give a Parquet or JSONL file"
        )
    if "gated" in text:
        link = f"https://huggingface.co/datasets/{source}"
        return f"{name} is gated: accept its terms at {link}, then log in (hf auth login, or set HF_TOKEN)"
    if "Revision" in text:
        return f"{name} has no revision '{spec.revision}'"
    if "on the Hub or cannot be accessed" in text or status in (401, 403, 404):
        return (
            f"{name} is neither a path here nor on the Hub where you may see it: check the spelling, "
            "or, if it is private, log in (hf auth login, or set HF_TOKEN)"
        )
    if isinstance(error, ConnectionError) or "offline mode" in text.lower():
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return f"{name} is neither a path here nor in the local cache, and {why}: give a file, or fetch it first"
    if isinstance(error, ValueError) and "config" in text.lower():
        return f"{name}: name one of its configurations with `config:`: {text}"
    if isinstance(error, RuntimeError):
        return None
    return f"{name} could not be read: {text}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "") or "none"
