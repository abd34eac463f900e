"""Safetensors headers, read with suspicion: every number in them comes from a file that someone else made.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .formats import pointer_problem

MAX_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bits per element of the formats that only quantised checkpoints use; recognised in order to be refused.
_QUANTISED_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}


class Entry(NamedTuple):
    """Where one tensor lies: `nbytes` bytes at offset `start` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass
class Header:
    """What a safetensors file says of itself. `problems` holds full sentences; empty means that it is sound."""

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    problems: list[str] = field(default_factory=list)
    quantised: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """The checked header of `path`. Never raises for a bad file: the problems are listed in the result."""
    header = Header(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(32)
            length = int.from_bytes(head[:8], "little")
            file.seek(8)
            raw = b"" if length > min(MAX_HEADER, size - 8) else file.read(length)
    except OSError as error:
        header.problems.append(f"{path} cannot be read: {error.strerror or error}")
        return header
    header.digest = hashlib.sha256(raw).hexdigest()
    problem = pointer_problem(path, head) or _length_problem(path, size, length)
    if problem:
        header.problems.append(problem)
    else:
        _parse(header, raw, 8 + length, size - 8 - length)
    return header


def _length_problem(path: Path, size: int, length: int) -> str | None:
    if size < 8:
        return f"{path} is cut short ({size} bytes): download it again"
    if length > MAX_HEADER:
        return f"{path} is not a safetensors file, or it is damaged (its header would be {length} bytes long)"
    if length > size - 8:
        return f"{path} is cut short inside its header ({size} bytes): download it again"
    return None


def _parse(header: Header, raw: bytes, origin: int, data: int) -> None:
    """Fill `header` from its JSON `raw`, for a file whose tensors fill `data` bytes from offset `origin`."""

    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twin = Counter(name for name, _ in pairs).most_common(1)[0][0]
            header.problems.append(f"{header.path} has a damaged header: it names '{twin}' twice; save it again")
        return table

    try:
        table = json.loads(raw, object_pairs_hook=no_twins)
    except (ValueError, RecursionError):
        header.problems.append(f"{header.path} has a damaged header (not JSON): download it again")
        return
    if not isinstance(table, dict):
        header.problems.append(f"{header.path} has a damaged header (not a table): download it again")
        return
    metadata = table.pop("__metadata__", {})
    if isinstance(metadata, dict):
        header.metadata = {str(k): str(v) for k, v in metadata.items()}
    spans: list[tuple[int, int]] = []
    for name, value in table.items():
        problem = _parse_entry(header, name, value, origin, spans)
        if problem:
            header.problems.append(f"{header.path} has a damaged header: tensor '{name}' {problem}; get it again")
    if not header.problems:
        _check_spans(header, spans, data)


def _parse_entry(header: Header, name: str, value: Any, origin: int, spans: list[tuple[int, int]]) -> str | None:
    try:
        kind, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return "lacks its dtype, shape or offsets"
    if not isinstance(shape, list) or not all(_natural(n) for n in [*shape, begin, end]):
        return "has a shape or an offset that is not a natural number"
    if not isinstance(kind, str) or (kind not in DTYPES and kind not in _QUANTISED_BITS):
        return f"has the unknown dtype {kind!r}"
    if begin > end:
        return f"lies at bytes {begin} to {end}"
    bits = _QUANTISED_BITS.get(kind) or DTYPES[kind].itemsize * 8
    if math.prod(shape) * bits != 8 * (end - begin):
        return f"of shape {shape} and dtype {kind} does not fill its {end - begin} bytes"
    spans.append((begin, end))
    if kind in DTYPES:
        header.entries[name] = Entry(DTYPES[kind], tuple(shape), origin + begin, end - begin)
    else:
        header.quantised[name] = kind
    return None


def _natural(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63


def _check_spans(header: Header, spans: list[tuple[int, int]], data: int) -> None:
    """Tensors must fill the file without holes or overlaps, or a bad header could alias or leak bytes."""
    path, promised = header.path, max((end for _, end in spans), default=0)
    if promised != data:
        what = "is cut short" if promised > data else "is too long"
        header.problems.append(
            f"{path} {what}: its header promises {promised} bytes of tensors and {data} are there; download it again"
        )
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            what = "overlap" if begin < at else "leave a hole"
            header.problems.append(f"{path} has a damaged header: tensors {what} at byte {begin}; save it again")
            return
        at = end


def header_bytes(entries: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The first bytes of a safetensors file (length and JSON, padded to 8) that holds `entries` in this order."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape) in entries.items():
        nbytes = math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
