"""The report: what it says, that hostile names cannot break it, and that a browser shows it without complaint."""

from __future__ import annotations

import base64
import functools
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from featcal import InputError, drift
from featcal.drift.results import ModelDrift
from featcal.report import (
    Report,
    headline,
    make_report,
    parse_scores,
    print_summary,
    read_report,
    render,
    save_figures,
    worse_tasks,
    write_report,
    write_report_json,
)
from featcal.report.build import paired_gain, task_entry, verdict
from featcal.report.figures import panel_svg
from featcal.report.panels import charts, gains, phases
from featcal.report.svg import shown
from featcal.report.words import checks, duration, number, percent, size, tiles, where
from pico import family_setup
from reports import HOSTILE, sample_report, task_drift

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def both(before: list[float], after: list[float], measure: str = "kl") -> tuple[ModelDrift, ModelDrift]:
    return ModelDrift(samples={measure: before}), ModelDrift(samples={measure: after})


# --------------------------------------------------------------------------------------------------- report.json


def test_report_of_a_real_measurement_holds_the_contract() -> None:
    s = family_setup("vit", tasks=2)
    models = {"merged": s.merged, "calibrated": s.experts["task0"]}
    found = drift.measure(models, experts=s.experts, data=s.data)
    report = make_report(
        recipe={"calibration": {"alpha": 0.3}}, tasks=[{"name": "task0", "samples": 9, "tokens": 90, "empty": 1}],
        drift=found, records=[], seconds={"total": 1.0}, environment={"torch": torch.__version__},
    )  # fmt: skip
    json.dumps(report, allow_nan=False)
    assert {"version", "recipe", "environment", "seconds", "peak_memory_bytes", "tasks", "modules", "kept"} <= set(
        report
    )
    task = report["tasks"][0]
    assert (task["name"], task["samples"], task["tokens"], task["empty"]) == ("task0", 9, 90, 1)
    assert [b["block"] for b in task["drift"]] == s.blocks
    expected = found[0].models["merged"]
    assert task["drift"][1]["before"] == expected.blocks[s.blocks[1]].mean("drift")
    assert task["drift"][1]["after"] == 0 and task["cosine"]["after"] == 1
    assert task["cosine"]["before"] == expected.mean("cosine")
    assert task["agreement"] == {"before": expected.mean("agreement"), "after": 1.0}
    assert task["held_out"]["samples"] == found[0].samples == len(task["view"]["expert"])
    assert task["verdict"] == "better"


def test_gain_is_paired_and_its_error_is_the_standard_error() -> None:
    before, after = [0.5, 0.7, 0.9, 0.4], [0.4, 0.5, 0.8, 0.35]
    gain = paired_gain(*both(before, after))
    assert gain is not None
    saved = np.array(before) - np.array(after)
    assert gain["mean"] == pytest.approx(saved.mean())
    assert gain["error"] == pytest.approx(saved.std(ddof=1) / 2)
    assert (gain["measure"], gain["samples"], gain["broken"]) == ("kl", 4, 0)
    won = paired_gain(*both([0.5, 0.6], [0.7, 0.9], "cosine"))
    assert won is not None and won["mean"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([0.5, 0.6, 0.7], [0.3, 0.41, 0.5], "better"),
        ([0.3, 0.41, 0.5], [0.5, 0.6, 0.7], "worse"),
        ([0.5, 0.6, 0.7], [0.1, 1.0, 0.6], "no clear change"),
        ([0.5, 0.5], [0.5, 0.5], "no clear change"),
        ([0.5], [0.1], "no clear change"),
        ([0.5, 0.6, 0.7], [0.3, float("nan"), 0.5], "worse"),
        ([float("nan"), 0.6, 0.5], [0.1, 0.2, 0.1], "better"),
        ([], [], "not measured"),
    ],
)
def test_verdicts(before: list[float], after: list[float], expected: str) -> None:
    assert verdict(paired_gain(*both(before, after))) == expected


def test_view_keeps_distances() -> None:
    result = task_drift("a", ["layers.0"], 0.4, samples=20)
    view = task_entry(result)["view"]
    points = {side: np.array(view[side]) for side in ("expert", "merged", "calibrated")}
    assert all(p.shape == (20, 8) for p in points.values())
    expected = (result.models["merged"].features[0] - result.expert_features[0]).norm(dim=1)
    assert np.linalg.norm(points["merged"] - points["expert"], axis=1) == pytest.approx(expected.numpy(), rel=1e-2)
    assert sum(view["explained"]) == pytest.approx(1, abs=1e-3) and view["explained"][0] >= view["explained"][1]


def test_numbers_that_are_not_finite_become_null() -> None:
    report = sample_report(extra={"odd": float("nan"), "list": [float("inf"), 1.0]})
    assert report["extra"] == {"odd": None, "list": [None, 1.0]}
    result = task_drift("a", ["layers.0"], 0.4)
    result.models["calibrated"].samples["cosine"][0] = float("nan")
    entry = task_entry(result)
    assert entry["sample_cosines"]["after"][0] is None and entry["cosine"]["after"] < 1


def test_a_task_without_held_out_samples_is_not_measured(tmp_path: Path) -> None:
    report = make_report(
        recipe={}, tasks=[{"name": "a", "samples": 3, "tokens": 9}], drift=[], records=[], seconds={}, environment={}
    )
    assert report["tasks"][0]["verdict"] == "not measured"
    write_report_json(tmp_path, report)
    page = write_report(tmp_path).read_text()
    assert "Nothing was measured" in page and "No held-out samples" in page


def test_written_and_read_back(tmp_path: Path) -> None:
    report = sample_report(scores=False)
    path = write_report_json(tmp_path, report)
    assert json.loads(path.read_text()) == report
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert not read_report(tmp_path).scores
    (tmp_path / "scores.json").write_text(
        json.dumps({"cars": {"metric": "accuracy", "value": 81.5, "n": 40, "low": 80, "high": 83}, "average": 81.5})
    )
    assert read_report(tmp_path).scores["calibrated"]["cars"].value == 81.5
    labelled = parse_scores({"merged": {"cars": {"metric": "accuracy", "value": 70, "n": 40}, "average": 70}})
    assert labelled["merged"]["cars"].n == 40


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no report.json; give the output folder"),
        ("{", "is not valid JSON"),
        ('{"version": "1"}', "recipe: field required"),
        ('{"version": "1", "recipe": {}, "tasks": []}', "tasks: list should have at least 1 item"),
        ("[]", "the top level"),
    ],
)
def test_a_folder_without_a_report_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


# --------------------------------------------------------------------------------------------------------- words


def test_headline_names_what_got_worse() -> None:
    helped = Report.model_validate(sample_report())
    assert headline(helped) == ("good", "It helped on all 4 tasks.")
    mixed = Report.model_validate(sample_report(worse="gtsrb"))
    assert headline(mixed) == ("bad", "It helped on 3 of 4 tasks; 'gtsrb' got worse.")
    assert worse_tasks(mixed) == ["gtsrb"] and worse_tasks(helped) == []
    assert mixed.tuning is not None
    untouched = Report.model_validate(mixed.model_dump())
    assert untouched.tuning is not None
    for candidate in untouched.tuning.candidates:
        candidate.chosen = False
    assert headline(untouched)[1].startswith("Nothing was changed")
    mixed.tasks[0].verdict = "no clear change"
    assert headline(mixed)[1] == "It helped on 2 of 4 tasks; 'gtsrb' got worse; no clear change on 'cars'."


def test_tiles_are_means_over_tasks() -> None:
    report = Report.model_validate(sample_report())
    made = {tile.label: tile for tile in tiles(report)}
    before = np.mean([task.drift[-1].before for task in report.tasks])
    after = np.mean([task.drift[-1].after for task in report.tasks])
    drifted = made["drift after the last block"]
    assert (drifted.before, drifted.after) == (number(before), number(after))
    assert drifted.change == f"{after / before - 1:+.0%}" and drifted.mark == "good"
    assert made["mean accuracy"].after == "85.00" and made["mean accuracy"].change == "+12.00"
    without = {tile.label for tile in tiles(Report.model_validate(sample_report(scores=False, outputs=False)))}
    assert without == {"drift after the last block", "cosine of the final features"}


def test_where_names_the_block_that_gained_most() -> None:
    report = Report.model_validate(sample_report(depth=3))
    for task in report.tasks:
        for block, factor in zip(task.drift, (0.9, 0.5, 1.2), strict=True):
            block.after = (block.before or 0) * factor
    assert where(report) == (
        "Drift fell in 2 of 3 blocks, most in block 2 (encoder.layers.1, -50%); it rose most in block 3 "
        "(encoder.layers.2, +20%)."
    )


def test_checks_say_what_stands_out() -> None:
    report = Report.model_validate(sample_report())
    texts = {check.text: check.mark for check in checks(report)}
    assert any("chose the settings" in t and mark == "note" for t, mark in texts.items())
    assert texts["1 of 72 modules kept their merged weights; reasons are below."] == "note"
    assert texts["Measuring took 8% of the calibration's time."] == "good"
    assert texts["The objective of the fit fell in 71 of 71 calibrated modules."] == "good"
    assert texts["No task's score fell."] == "good"
    report.scores["calibrated"]["dtd"].value = 60.0
    fell = "The score fell on 'dtd' (72 → 60)."
    assert {c.text: c.mark for c in checks(report)}[fell] == "note"
    report.scores["calibrated"]["dtd"].high, report.scores["merged"]["dtd"].low = 65.0, 66.0
    assert {c.text: c.mark for c in checks(report)}[fell] == "bad"
    report.modules[0].ridge = 0.5
    report.tasks[0].drift[0].not_finite = 2
    marks = {check.text: check.mark for check in checks(report)}
    assert marks["1 modules needed a larger ridge than asked for before they could be solved."] == "note"
    assert [m for t, m in marks.items() if "not finite" in t] == ["bad"]


def test_numbers_read_well() -> None:
    assert [number(v) for v in (None, 0.0, 1.0, 0.83, 123.456, 1e-5, 2e6)] == [
        "–", "0", "1", "0.830", "123", "1.00e-05", "2.00e+06"
    ]  # fmt: skip
    assert (percent(2, 1), percent(0, 1), percent(None, 1)) == ("-50%", "–", "–")
    assert [duration(v) for v in (1.234, 12, 200, 7500)] == ["1.2 s", "12 s", "3 min 20 s", "2 h 5 min"]
    assert (size(999), size(1_234_567_890)) == ("999 bytes", "1.23 GB")
    assert (
        shown("abc") == "abc" and shown("x" * 50) == "x" * 10 + "…" + "x" * 11 and shown("a\nb\x00") == "a\ufffdb\ufffd"
    )


def test_terminal_table() -> None:
    report = Report.model_validate(sample_report(("cars", "[red]odd[/red]"), worse="cars"))
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(report, console)
    text = console.export_text()
    first = report.tasks[0]
    assert f"{number(first.drift[-1].before)} → {number(first.drift[-1].after)}" in text
    assert "[red]odd[/red]" in text and "It helped on 1 of 2 tasks; 'cars' got worse." in text


# ------------------------------------------------------------------------------------------------------- figures


def test_figures_draw_the_data() -> None:
    from matplotlib.figure import Figure

    from featcal.report.svg import LIGHT

    report = Report.model_validate(sample_report())
    made = {chart.name: chart for chart in charts(report)}
    assert {"drift", "cosine", "split", "samples", "view", "gain", "tuning", "time"} <= set(made)

    def drawn(name: str, place: int = 0) -> Any:
        ax = Figure().subplots()
        made[name].panels[place].draw(ax, LIGHT)
        return ax

    task = report.tasks[1]
    merged, calibrated = drawn("drift", 1).lines[:2]
    assert list(merged.get_ydata()) == [b.before for b in task.drift]
    assert list(calibrated.get_ydata()) == [b.after for b in task.drift]
    assert (merged.get_linestyle(), merged.get_marker()) != (calibrated.get_linestyle(), calibrated.get_marker())
    split = drawn("split", 1)
    local, propagated = split.containers[:2]
    tops = [bar.get_y() + bar.get_height() for bar in propagated]
    assert tops == pytest.approx([b.before for b in task.drift])
    assert [bar.get_height() for bar in local] == pytest.approx([b.local_part.before for b in task.drift])
    assert propagated[0].get_hatch() and not local[0].get_hatch()
    assert [len(made[name].panels) for name in ("drift", "cosine", "tuning", "time")] == [4, 1, 3, 1]
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in (drawn("drift"), split, drawn("samples"), drawn("view")))


def test_parts_of_opposite_sign_start_at_zero() -> None:
    from matplotlib.figure import Figure

    from featcal.report.panels import draw_split
    from featcal.report.svg import LIGHT

    report = Report.model_validate(sample_report(depth=2))
    block = report.tasks[0].drift[1]
    block.local_part.before, block.propagated_part.before = -0.5, 2.0
    ax = Figure().subplots()
    draw_split(ax, LIGHT, report.tasks[0])
    local, propagated = ax.containers[:2]
    found = (propagated[1].get_y(), propagated[1].get_height(), local[1].get_height())
    assert found == pytest.approx((0, 2.0, -0.5))


def test_gain_uses_scores_and_falls_back_on_agreement() -> None:
    what, found = gains(Report.model_validate(sample_report()))
    assert what == "score (points)" and [g[2] for g in found] == [12.0] * 4
    report = Report.model_validate(sample_report(scores=False))
    what, found = gains(report)
    agreement = report.tasks[0].agreement
    assert what == "agreement with the expert (points)" and agreement.after is not None and agreement.before is not None
    assert found[0][2] == pytest.approx(100 * (agreement.after - agreement.before))


def test_phases_add_up_to_the_total() -> None:
    report = Report.model_validate(sample_report())
    assert dict(phases(report)) == pytest.approx(
        {"plan": 1.2, "tune": 20.0, "calibrate": 37.9, "measure": 3.1, "write": 2.5, "other": 0.7}
    )


def test_a_name_that_looks_like_svg_is_drawn_as_it_is() -> None:
    name = 'a id="x" 1.23456'
    report = Report.model_validate(sample_report((name, "url(#b) #010203"), depth=2))
    chart = next(chart for chart in charts(report) if chart.name == "drift")
    for place, shown_name in enumerate((name, "url(#b) #010203")):
        root = ElementTree.fromstring(panel_svg(chart, place))
        assert shown_name in [e.text for e in root.iter() if e.tag.endswith("text")]


def test_many_tasks_show_those_that_gained_least() -> None:
    names = tuple(f"task{i}" for i in range(20))
    report = Report.model_validate(sample_report(names, depth=2, worse="task19"))
    chart = next(chart for chart in charts(report) if chart.name == "drift")
    assert len(chart.panels) == 12 and chart.panels[-1].label.endswith("task19")
    assert "12 of 20 tasks are drawn" in chart.caption


def test_saved_figures_are_images_in_light_and_dark(tmp_path: Path) -> None:
    report = Report.model_validate(sample_report(HOSTILE[:3], depth=3, tuned=False))
    paths = save_figures(tmp_path / "figures", report, dpi=60)
    names = {path.name for path in paths}
    assert {"drift.svg", "drift.png", "drift-dark.png", "time.png"} <= names
    light, dark = (np.asarray(Image.open(tmp_path / f"figures/drift{s}.png").convert("L")) for s in ("", "-dark"))
    assert light.shape == dark.shape and np.median(light) > 240 and np.median(dark) < 40
    for path in paths:
        if path.suffix == ".svg":
            root = ElementTree.fromstring(path.read_text())
            assert root.tag.endswith("svg") and "prefers-color-scheme" in path.read_text()
    texts = [e.text or "" for e in ElementTree.parse(tmp_path / "figures/drift.svg").iter() if e.tag.endswith("text")]
    assert any(text.startswith("<script>") for text in texts)


def test_svg_is_themed_compact_and_has_ids_of_its_own() -> None:
    report = Report.model_validate(sample_report(depth=3))
    chart = next(chart for chart in charts(report) if chart.name == "split")
    one, two = panel_svg(chart, 0), panel_svg(chart, 1)
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    for svg, own in zip((one, two), ids, strict=True):
        references = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
        assert references and references <= own
        assert "var(--before)" in svg and "var(--ink)" in svg and "#0102" not in svg
        assert not re.search(r"\d\.\d{3,}", svg) and "<metadata" not in svg
    assert panel_svg(chart, 0) == one


# ---------------------------------------------------------------------------------------------------------- page


@functools.cache
def render_hostile() -> str:
    raw = sample_report(HOSTILE, depth=3, worse=HOSTILE[0])
    raw["modules"][0]["reason"] = "<b onmouseover=alert(4)>bold</b>"
    raw["kept"][0]["module"] = "<svg/onload=alert(5)>"
    raw["environment"]["<i>key</i>"] = "</pre><script>alert(6)</script>"
    raw["recipe"]["merged"] = "</title><script>alert(7)</script>"
    return render(Report.model_validate(raw))


def test_hostile_names_are_only_text() -> None:
    text = render_hostile()
    page = Page(text)
    counts = {tag: sum(t == tag for t, _ in page.tags) for tag in ("script", "img", "iframe", "i", "title", "object")}
    assert counts == {"script": 1, "img": 0, "iframe": 0, "i": 0, "title": 1, "object": 0}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    shown_text = "".join(page.texts)
    for name in HOSTILE:
        assert name in shown_text
    assert "49" not in page.texts  # {{ 7 * 7 }} stayed as it was
    cells = [text for text in page.texts if text in HOSTILE]
    assert len(cells) >= 3 * len(HOSTILE)  # tasks, blocks, samples


def test_page_reaches_for_nothing_outside_itself() -> None:
    text = render_hostile()
    page = Page(text)
    for tag, attrs in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
    assert "@import" not in text and "url(http" not in text
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script is not None and policy is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")


def test_page_says_the_numbers() -> None:
    raw = sample_report(worse="gtsrb")
    text = "".join(Page(render(Report.model_validate(raw))).texts)
    task = raw["tasks"][0]
    assert "It helped on 3 of 4 tasks; 'gtsrb' got worse." in text
    assert f"{number(task['drift'][-1]['before'])} → {number(task['drift'][-1]['after'])}" in text
    assert "non-finite features in task 'dtd'" in text and "outside the blocks" in text
    assert "0.05, chosen without labels (the search began at 0.05)" in text
    assert "featcal calibrate recipe.yaml -o out" in text and "ridge: 0.05" in text and "1.23 GB" in text


def test_page_stays_small(tmp_path: Path) -> None:
    names = tuple(f"task {i}" for i in range(30))
    report = sample_report(names, depth=48)
    report["modules"] = report["modules"] * 8
    write_report_json(tmp_path, report)
    path = write_report(tmp_path)
    assert 300_000 < path.stat().st_size < 2_000_000
    deep = [block for _ in range(4) for block in report["tasks"][0]["drift"]]
    for task in report["tasks"]:
        task["drift"] = deep
    made = charts(Report.model_validate(report))
    assert len(next(chart for chart in made if chart.name == "split").panels) == 4


@pytest.fixture(scope="module")
def browser() -> str:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    return CHROMIUM


def visit(browser: str, page: Path, *options: str) -> tuple[str, str]:
    """The page's DOM after its scripts ran, and what the console said."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    done = subprocess.run(
        [*command, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_browser_shows_hostile_names_and_complains_about_nothing(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_hostile(), encoding="utf-8")
    dom, console = visit(browser, page)
    assert console == ""
    assert "alert(" in dom and sum(tag == "script" for tag, _ in Page(dom).tags) == 1
    assert dom.count("<button") > 8  # the script ran: headers became buttons


def test_browser_sorts_tables(browser: str, tmp_path: Path) -> None:
    report = sample_report(("b", "c", "a"), depth=3)
    for task, after in zip(report["tasks"], (0.3, 0.9, 0.6), strict=True):
        task["cosine"]["after"] = task["cosine"]["before"] + after
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", render(Report.model_validate(report)))
    script = """<script>
      const table = document.querySelector("table.sortable"), said = [];
      const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent).join("");
      const heads = [...table.tHead.rows[0].cells];
      const cosine = heads.findIndex((head) => head.textContent === "cosine");
      for (const column of [0, 0, cosine, cosine]) { heads[column].firstChild.click(); said.push(names()); }
      said.push(document.documentElement.scrollWidth <= innerWidth);
      document.title = said.join(" ");
    </script></body>"""
    page = tmp_path / "report.html"
    page.write_text(text.replace("</body>", script), encoding="utf-8")
    dom, _ = visit(browser, page, "--window-size=500,900")
    assert "<title>abc cba bac cab true</title>" in dom
