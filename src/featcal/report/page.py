"""`report.html`: one self-contained page. Jinja2 escapes what comes from outside; figures and script are our own."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..strict_yaml import dump_yaml
from ..writer import atomic_write
from . import words
from .figures import panel_svg
from .panels import charts, shown_tasks
from .schema import Pair, Report, Task, read_report
from .svg import DARK, LIGHT, css_variables

MODULES = 800
"""Rows of the table of modules, at most; the JSON has them all."""
BLOCKS = 800
"""Rows of the tables of blocks, at most, over all tasks."""
NAMES = 300
"""Kept modules that are listed by name for each reason, at most."""


def write_report(folder: str | Path) -> Path:
    """`featcal report`: make `report.html` in an output folder from its `report.json` (and `scores.json`).

    Raises:
        InputError: the folder has no readable report.
    """
    path = Path(folder) / "report.html"
    page = render(read_report(folder))
    with atomic_write(path) as file:
        file.write(page.encode())
    return path


def render(report: Report) -> str:
    """The page."""
    script = files(__package__).joinpath("report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("featcal", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": words.number, "share": words.share, "duration": words.duration}
    environment.filters |= {"size": words.size, "setting": words.setting}
    environment.globals |= {"percent": words.percent, "last_block": words.last_block, "order": _order}
    environment.globals |= {"gain": _gain, "score": lambda task: _score(report, task)}
    template = environment.get_template("report.html.j2")
    mark, answer = words.headline(report)
    return template.render(
        report=report,
        mark=mark,
        answer=answer,
        done=words.what_was_done(report),
        tiles=words.tiles(report),
        where=words.where(report),
        checks=words.checks(report),
        outputs=any(task.agreement.before is not None for task in report.tasks),
        scored=any(side in report.scores for side in ("merged", "calibrated")),
        figures=[_figure(chart) for chart in charts(report)],
        modules=report.modules[:MODULES],
        tabled=_tabled(report),
        kept=_kept(report),
        names=NAMES,
        settings=_settings(report),
        recipe=dump_yaml(report.recipe),
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _figure(chart: Any) -> dict[str, Any]:
    panels = [Markup(panel_svg(chart, place)) for place in range(len(chart.panels))]
    return {"name": chart.name, "title": chart.title, "caption": chart.caption, "panels": panels,
            "wide": chart.panels[0].width > 5}  # fmt: skip


def _tabled(report: Report) -> list[Task]:
    """The tasks whose blocks are tabled: those with a figure of their own, while the page stays small."""
    tasks = [task for task in shown_tasks(report)[0] if task.drift]
    rows = 0
    chosen: list[Task] = []
    for task in tasks:
        rows += len(task.drift)
        if rows <= BLOCKS or not chosen:
            chosen.append(task)
    return chosen


def _kept(report: Report) -> list[tuple[str, list[str]]]:
    """Kept modules by reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for kept in report.kept:
        found.setdefault(kept.reason, []).append(kept.module)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _settings(report: Report) -> dict[str, str]:
    """The calibration's settings; where the tuner chose others than the recipe names, both."""
    calibration = report.recipe.get("calibration")
    made = {name: words.setting(v) for name, v in calibration.items()} if isinstance(calibration, dict) else {}
    chosen = next((c for c in report.tuning.candidates if c.chosen), None) if report.tuning else None
    for name in ("ridge", "rho", "alpha") if chosen is not None else ():
        made[name] = f"{getattr(chosen, name):.4g}, chosen without labels (the search began at {made.get(name, '?')})"
    return made


def _gain(pair: Pair, relative: bool = False) -> str:
    """The change a column of pairs is sorted by."""
    if pair.before is None or pair.after is None:
        return ""
    change = pair.after - pair.before
    return _order(change / pair.before if relative and pair.before else change)


def _score(report: Report, task: str) -> dict[str, Any]:
    """A task's scores by side (None: not scored), and what they are."""
    found = {side: report.scores.get(side, {}).get(task) for side in ("merged", "calibrated", "experts")}
    metrics = {f"{one.metric}, {one.n} rows" for one in found.values() if one is not None}
    return {side: None if one is None else one.value for side, one in found.items()} | {"metric": ", ".join(metrics)}


def _order(value: float | None) -> str:
    """What a table sorts a number by."""
    return "" if value is None else f"{value:.6g}"
