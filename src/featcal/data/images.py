"""Images as the source stores them, and as the RGB pictures that image processors take."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

BROKEN = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What PIL raises on files that are not images, or that are cut or damaged."""


def image_bytes(image: dict[str, Any]) -> bytes:
    """The encoded file of ``{"path": ..., "bytes": ...}``."""
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    with open(image["path"], "rb") as file:
        return file.read()


def images_of(rows: Iterable[Mapping[str, Any]]) -> list[Path]:
    """The image files that samples name, each once."""
    images = (row.get("image") for row in rows)
    return [Path(path) for path in dict.fromkeys(i["path"] for i in images if i and i["bytes"] is None)]


def check_image(image: dict[str, Any]) -> str | None:
    """Why this image cannot be used, or None if it decodes."""
    try:
        open_rgb(image_bytes(image))
    except FileNotFoundError:
        return f"there is no image file {image['path']}"
    except BROKEN as error:
        return f"not a readable image ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return None


def open_rgb(data: bytes) -> Image.Image:
    """The picture, upright, in 8-bit RGB: grey is repeated, CMYK converted, transparency dropped, 16 bit scaled.

    Transparent pixels keep the colour stored under them, as in the usual `convert("RGB")`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL warns of odd metadata, and of palettes handled below
        image: Image.Image = Image.open(io.BytesIO(data))
        if image.getexif().get(ExifTags.Base.Orientation):
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits a pixel; PIL would clip instead of scaling
            grey = np.asarray(image).astype(np.int64)
            image = Image.fromarray(np.clip(grey >> 8, 0, 255).astype(np.uint8))
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")
