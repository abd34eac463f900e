"""What a run has finished, so that the same command goes on after any interruption.

A run's folder holds `journal.jsonl`: first the fingerprint of all that decides the result, then a line per finished
block. A block's line is written (and synced) after its weights, so that a line always has its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from .errors import InputError
from .update import Record
from .writer import write_safetensors

NAME = "journal.jsonl"


class Journal:
    """The journal of one run. Only one process (rank 0) opens it."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], *, fresh: bool = False):
        """Go on with the journal in `folder`, or start one.

        Raises:
            InputError: the folder holds a run of something else; the differing field is named.
        """
        self.folder, self.path = folder, folder / NAME
        self._blocks: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        lines = [] if fresh else self._read()
        if not lines:
            self.path.write_text("")
            self._append({"fingerprint": dict(fingerprint)})
            return
        self._compare(lines[0].get("fingerprint", {}), json.loads(json.dumps(dict(fingerprint))))
        self._blocks = {line["block"]: line for line in lines[1:] if (folder / line["file"]).exists()}
        self._rewrite(lines)

    def _read(self) -> list[dict[str, Any]]:
        """Complete lines; a last line that was cut off by a crash is dropped."""
        if not self.path.exists():
            return []
        lines = []
        for text in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        return lines

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Without the cut-off line, so that the next one starts on a line of its own."""
        if len(lines) != self.path.read_text().count("\n") or not self.path.read_text().endswith("\n"):
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _compare(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for field in [*was, *(name for name in now if name not in was)]:
            if was.get(field) != now.get(field):
                raise InputError(
                    f"{self.folder} holds an unfinished run with another {field} "
                    f"({_short(was.get(field))}, now {_short(now.get(field))}); add --fresh to start over"
                )

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
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

    def tensors(self, block: str) -> dict[str, Tensor]:
        """The new parameters of a finished block by full name."""
        return load_file(self.folder / self._blocks[block]["file"])

    def file(self, block: str) -> Path:
        return self.folder / str(self._blocks[block]["file"])

    def records(self) -> list[Record]:
        return [Record(**record) for line in self._blocks.values() for record in line["records"]]

    @property
    def seconds(self) -> float:
        """Time spent on the finished blocks, over all runs."""
        return sum(float(line["seconds"]) for line in self._blocks.values())


def _short(value: Any, most: int = 40) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[: most - 1] + "…"
