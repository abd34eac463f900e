"""Texts made of several columns of a row: "Is '{sentence1}' the same as '{sentence2}'?"."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order; none for a plain column name.

    Raises:
        ValueError: braces that do not pair, or a field that is more than a column's name (`{a.b}`, `{a[0]}`, `{a!r}`).
    """
    columns: dict[str, None] = {}
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion or any(mark in name for mark in ".[]"):
            raise ValueError(f"'{{{name}}}' is not a column; write {{column}}, and {{{{ for a brace")
        columns[name] = None
    return tuple(columns)


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values in place of its columns."""
    return template.format_map(row)
