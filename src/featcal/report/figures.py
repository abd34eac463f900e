"""Figures as images: one panel as inline SVG, or all panels of a chart side by side as SVG and PNG files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..writer import atomic_write
from .panels import Chart, charts
from .schema import Report
from .svg import DARK, LIGHT, Palette, marked, standalone, style, to_svg


@contextmanager
def _quiet() -> Iterator[None]:
    """A name in a script that the font lacks is drawn as boxes in a PNG; that needs no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        yield


def panel_svg(chart: Chart, place: int) -> str:
    """One panel as inline SVG."""
    from matplotlib.figure import Figure

    panel, name = chart.panels[place], f"{chart.name}{place}"
    with _quiet(), marked(name) as palette:
        figure = Figure(figsize=(panel.width, panel.height))
        left, bottom, right, top = panel.margins
        width, height = panel.width - left - right, panel.height - bottom - top
        box = (left / panel.width, bottom / panel.height, width / panel.width, height / panel.height)
        panel.draw(figure.add_axes(box), palette)
        return to_svg(figure, name, panel.label)


def _sheet(chart: Chart, palette: Palette, columns: int = 3) -> Any:
    """All panels of a chart side by side."""
    from matplotlib.figure import Figure

    wide = min(columns, len(chart.panels))
    tall = math.ceil(len(chart.panels) / wide)
    first = chart.panels[0]
    figure = Figure(figsize=(first.width * wide, first.height * tall), layout="constrained")
    grid = figure.subplots(tall, wide, squeeze=False).flatten()
    for panel, ax in zip(chart.panels, grid, strict=False):
        panel.draw(ax, palette)
    for ax in grid[len(chart.panels) :]:
        ax.set_axis_off()
    return figure


def save_figures(folder: str | Path, report: Report, *, dpi: int = 150) -> list[Path]:
    """Every chart as NAME.svg (light and dark in one), NAME.png and NAME-dark.png in `folder`; the files' paths."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {}
    for chart in charts(report):
        with _quiet():
            with marked(chart.name) as palette:
                svg = to_svg(_sheet(chart, palette), chart.name, chart.title)
            files[f"{chart.name}.svg"] = standalone(svg).encode()
            for suffix, colours in (("", LIGHT), ("-dark", DARK)):
                with style(colours):
                    buffer = io.BytesIO()
                    _sheet(chart, colours).savefig(buffer, format="png", dpi=dpi)
                files[f"{chart.name}{suffix}.png"] = buffer.getvalue()
    for name, content in files.items():
        with atomic_write(where / name) as file:
            file.write(content)
    return [where / name for name in files]
