"""What is costly to make and always comes out the same, kept as safetensors files in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..writer import write_safetensors

logger = logging.getLogger("featcal")


def cache_key(settings: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that change with any setting, any tensor's name, shape or dtype, or any of its bits."""
    value = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        value.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        value.update(tensor.detach().contiguous().numpy().tobytes())
    return value.hexdigest()[:16]


def cached_tensors(file: Path, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of `file`, which is made when it is not there. A damaged file is replaced, with a warning."""
    if file.is_file():
        try:
            return load_file(file)
        except SafetensorError as error:
            logger.warning("%s is damaged (%s) and is made again", file, error)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(file, make())
    # As read back, so that the first run and later ones compute with the same bytes.
    return load_file(file)
