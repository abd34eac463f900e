"""Figures as inline SVG whose colours are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

SIZE = 9
"""Font size, points."""


@dataclass(frozen=True)
class Palette:
    """Colours by role. Every role also has its own marker, dash or hatch, so that none is told by colour alone."""

    ink: str
    paper: str
    grid: str
    before: str
    after: str
    expert: str


LIGHT = Palette("#1a1a1a", "#ffffff", "#d9d9d9", "#b34700", "#0062a8", "#5f6b62")
DARK = Palette("#ececec", "#16181c", "#3d4148", "#ffa366", "#74bdff", "#a9b8ad")
_MARKED = Palette("#010203", "#010204", "#010205", "#010206", "#010207", "#010208")
"""Stand-ins that no drawing contains by chance; they become variables."""


def css_variables(palette: Palette) -> str:
    """`--ink: …; --paper: …; …` for a style sheet."""
    return " ".join(f"--{field.name}: {getattr(palette, field.name)};" for field in fields(palette))


@contextmanager
def style(palette: Palette, salt: str = "featcal") -> Iterator[None]:
    """matplotlib's settings for a palette; whatever a name holds, `$` is no mathematics in it."""
    import matplotlib

    settings: Any = {  # Any: its keys are a literal type of matplotlib's
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.size": SIZE,
        "axes.titlesize": SIZE + 1,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": SIZE - 1,
        "hatch.linewidth": 0.8,
        "axes.formatter.useoffset": False,
    }
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings |= dict.fromkeys(inked, palette.ink)
    papered = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    settings |= dict.fromkeys(papered, palette.paper) | {"grid.color": palette.grid}
    with matplotlib.rc_context(settings):
        yield


@contextmanager
def marked(salt: str) -> Iterator[Palette]:
    """The palette to draw with for `to_svg`."""
    with style(_MARKED, salt):
        yield _MARKED


def to_svg(figure: Any, name: str, label: str) -> str:
    """A figure drawn under `marked` as an `<svg>` element: ids led by `name`, an accessible `label`, few digits."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<[^>]+>", lambda tag: _tidied(tag[0], name), re.sub(r">\s+<", "><", text))
    return _opened(_RUN.sub(_hoisted, text), label)


def _tidied(tag: str, name: str) -> str:
    """One tag: colours as variables, ids led by `name`, no fonts, few digits. Text between tags stays as it is."""
    for field in fields(_MARKED):
        tag = tag.replace(getattr(_MARKED, field.name), f"var(--{field.name})")
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag).replace("url(#", f"url(#{name}-")
    tag = re.sub(r" font-family: [^;\"]*;?", "", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag)
    tag = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), tag)
    return re.sub(r"\s*\n\s*", " ", tag)


_RUN = re.compile(r'<use [^>]*? style="([^"]*)"/>(?:<use [^>]*? style="\1"/>)+')


def _hoisted(found: re.Match[str]) -> str:
    """Markers of one style, one after the other: the style goes to a group around them."""
    style = f' style="{found[1]}"'
    return f"<g{style}>{found[0].replace(style, '')}</g>"


def _opened(text: str, label: str) -> str:
    """The opening tag without a fixed size, so that the page decides, and with a role and a label."""
    end = text.index(">")
    box = re.search(r'viewBox="[^"]*"', text[:end])
    assert box is not None
    described = f'role="img" aria-label="{html.escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} {described}{text[end:]}'.strip()


def standalone(svg: str, light: Palette = LIGHT, dark: Palette = DARK) -> str:
    """An SVG file of its own: the variables defined inside, following the viewer's colour scheme."""
    end = svg.index(">") + 1
    rules = (
        f"svg {{ {css_variables(light)} background: var(--paper); font-family: sans-serif }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {css_variables(dark)} }} }}"
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg[:end]}<style>{rules}</style>{svg[end:]}\n'


def shown(name: str, length: int = 22) -> str:
    """A name as a figure can print it: one line, no control characters, cut in the middle when it is long."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    if len(name) <= length:
        return name
    head = (length - 1) // 2
    return f"{name[:head]}…{name[len(name) - (length - 1 - head) :]}"
