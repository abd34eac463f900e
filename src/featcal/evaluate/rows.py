"""A data source as rows for scoring: read one at a time, only in the columns that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ..data.samples import read_row
from ..data.tables import Table
from ..errors import InputError, nearest


@dataclass(frozen=True)
class TableRows(Sequence[Mapping[str, Any]]):
    """Rows of a table under their new names: `columns` maps a name in the rows to a column of the table.

    Raises:
        InputError: (on construction) the table lacks a column.
    """

    table: Table
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column in self.columns.values():
            if column not in self.table.columns:
                hint = nearest(column, self.table.columns)
                known = ", ".join(self.table.columns)
                raise InputError(f"{self.table.name} has no column '{column}'{hint}; it has: {known}")

    def __len__(self) -> int:
        return self.table.size

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        names = self.columns or {column: column for column in self.table.columns}
        cells = self.table.read(index, tuple(dict.fromkeys(names.values())))
        return {name: cells[column] for name, column in names.items()}


@dataclass(frozen=True)
class SampleRows(Sequence[Mapping[str, Any]]):
    """Chosen rows of a table, read as calibration reads them (templates, image paths, chats), each with its `label`."""

    table: Table
    columns: Mapping[str, str]
    """Part → column or template."""
    label: str | None
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.read(self.indices[index])
        assert row is not None
        return row

    def read(self, index: int) -> Mapping[str, Any] | None:
        """A row of the table; None when a part that is read is empty."""
        row = read_row(self.table, index, self.columns)
        if row is None or self.label is None:
            return row
        return {**row, "label": self.table.read(index, (self.label,))[self.label]}
