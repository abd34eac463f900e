"""What a run has finished, so that the same command goes on after any interruption.

A run's folder holds `journal.jsonl`: first the fingerprint of all that decides the result, then a line per finished
block. A block's line is written (and synced) after its weights, so that a line always has its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from .errors import InputError
from .headers import read_header
from .update import Record
from .writer import atomic_write, disk_errors, write_safetensors

NAME = "journal.jsonl"


class Journal:
    """The journal of one run. Only one process (rank 0) opens it."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]):
        """Go on with the journal in `folder`, or start one.

        Raises:
            InputError: the folder holds a run of something else; the differing field is named.
        """
        self.folder, self.path = folder, folder / NAME
        self._blocks: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        lines = self._read()
        if not lines:
            for note in folder.glob("*.json"):  # of another run, whose journal was lost
                note.unlink()
            self._rewrite([{"fingerprint": dict(fingerprint)}])
            return
        was, now = lines[0].get("fingerprint", {}), json.loads(json.dumps(dict(fingerprint)))
        field = difference(was, now)
        if field:
            raise InputError(
                f"{self.folder.parent} holds an unfinished run with another {field} ({_short(was.get(field))}, "
                f"now {_short(now.get(field))}); add --fresh to start over"
            )
        whole = list(takewhile(lambda line: (folder / line["file"]).exists(), lines[1:]))
        self._blocks = {line["block"]: line for line in whole}
        self._rewrite([lines[0], *whole])

    def _read(self) -> list[dict[str, Any]]:
        """Complete lines; a last line that was cut off by a crash is dropped."""
        if not self.path.exists():
            return []
        lines = []
        for text in self.path.read_text().splitlines(keepends=True):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break
            if not text.endswith("\n"):
                break
            lines.append(line)
        return lines

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        """These lines and no others, so that the next one starts on a line of its own."""
        with atomic_write(self.path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def _append(self, line: Mapping[str, Any]) -> None:
        with disk_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def __contains__(self, block: str) -> bool:
        return block in self._blocks

    def commit(self, block: str, tensors: Mapping[str, Tensor], records: list[Record], seconds: float) -> None:
        """Save a finished block: its new parameters by full name, then the line."""
        name = f"block-{len(self._blocks):05d}.safetensors"
        write_safetensors(self.folder / name, {key: value.cpu().contiguous() for key, value in tensors.items()})
        line = {"block": block, "file": name, "records": [asdict(record) for record in records], "seconds": seconds}
        self._blocks[block] = line
        self._append(line)

    def write_note(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a small result of the run besides its blocks."""
        with atomic_write(self.folder / f"{name}.json") as file:
            file.write(json.dumps(value).encode())

    def note(self, name: str) -> Any:
        """What `write_note` kept, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def tensors(self, block: str) -> dict[str, Tensor]:
        """The new parameters of a finished block by full name."""
        return load_file(self.folder / self._blocks[block]["file"])

    def names(self, block: str) -> list[str]:
        """The full names of those parameters."""
        return list(read_header(self.file(block)).entries)

    def file(self, block: str) -> Path:
        """The safetensors file that holds them."""
        return self.folder / str(self._blocks[block]["file"])

    def records(self) -> list[Record]:
        return [Record(**record) for line in self._blocks.values() for record in line["records"]]


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first field of two fingerprints that differs."""
    fields = [*was, *(name for name in now if name not in was)]
    return next((field for field in fields if was.get(field) != now.get(field)), None)


def _short(value: Any, most: int = 40) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[: most - 1] + "…"
