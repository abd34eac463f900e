"""What the terminal sees: one logger for the package and one progress bar."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")
console = Console(stderr=True)


class _Once(logging.Filter):
    """Says each thing once: several tasks or models often give rise to the same words."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._said
        self._said.add(message)
        return new


def set_up_logging(verbosity: int = 0) -> None:
    """Messages of the `featcal` logger to stderr: warnings (-1), progress notes (0), details (1 and above).

    Of several processes only the first one talks; the others would say the same.
    """
    level = logging.WARNING if verbosity < 0 else logging.INFO if verbosity == 0 else logging.DEBUG
    logger = logging.getLogger("featcal")
    logger.setLevel(level if int(os.environ.get("RANK", "0")) == 0 else logging.ERROR)
    if not logger.handlers:
        handler = RichHandler(console=console, show_path=False, show_time=False, markup=False)
        handler.addFilter(_Once())
        logger.addHandler(handler)


def progress_bar(label: str, enabled: bool = True) -> Callable[[Sequence[T]], Iterable[T]]:
    """Wraps a sequence: a live bar on a terminal, a plain line per step when piped, nothing when disabled."""

    def wrap(items: Sequence[T]) -> Iterator[T]:
        if not enabled:
            yield from items
        elif console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
                task = bar.add_task(label, total=len(items))
                for item in items:
                    yield item
                    bar.advance(task)
        else:
            for number, item in enumerate(items, 1):
                print(
                    f"{label}: {number}/{len(items)} {getattr(item, 'name', '')}".rstrip(),
                    file=sys.stderr,
                    flush=True,
                )
                yield item

    return wrap
