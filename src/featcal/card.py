"""The model card: a section on the calibration in the output's README.md, and the upload to the Hub."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id, yaml_dump

from .errors import InputError, RunError
from .report.schema import Report, Task, read_report
from .report.words import headline, last_block, number, percent
from .writer import atomic_write

logger = logging.getLogger("featcal")
BEGIN, END = "<!-- featcal: start -->", "<!-- featcal: end -->"
TAGS = ("featcal", "merge")
_FRONT = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n?---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[^/]+)?")
_CITATION = """```bibtex
@article{gu2026featcal,
  title   = {FeatCal: Feature Calibration for Post-Merging Models},
  author  = {Gu, Yanggan and Cai, Shuo and Wang, Zihao and Wang, Wenjun and Wang, Yuanyi and Wang, Pengkai and
             Huang, Sirui and Lu, Su and Wu, Jianmin and Yang, Hongxia},
  journal = {arXiv preprint arXiv:2605.13030},
  year    = {2026}
}
```"""


def write_card(folder: str | Path) -> Path:
    """Add the section to README.md of an output folder, or bring it up to date (after `featcal evaluate`, say).

    The merged model's card stays; its metadata keep what was there and gain tags and, for models on the Hub,
    `base_model`. Metadata that are not YAML are left alone.

    Raises:
        InputError: the folder holds no report.
    """
    report = read_report(folder)
    path = Path(folder) / "README.md"
    old = path.read_bytes().decode("utf-8-sig", errors="surrogateescape") if path.is_file() else ""
    newline = "\r\n" if "\r\n" in old else "\n"
    match = _FRONT.match(old)
    body = old[match.end() :] if match else old
    before, _, rest = body.partition(BEGIN)
    after = rest.partition(END)[2] if rest else ""
    parts = [before.strip("\r\n") or _title(report), section(report).replace("\n", newline), after.strip("\r\n")]
    text = (2 * newline).join(part for part in parts if part)
    front = _front_matter(match[0] if match else "", match[1] if match else "", report, newline)
    with atomic_write(path) as file:
        file.write(f"{front}{text}{newline}".encode(errors="surrogateescape"))
    return path


def _title(report: Report) -> str:
    """For a folder without a card: the merged model's name. The output's own may change, and the card with it."""
    merged = report.recipe.get("merged")
    name = f"{merged.get('method')} merge" if isinstance(merged, dict) else _model_name(merged) or "Merged model"
    return f"# {name}, calibrated"


def _front_matter(raw: str, inner: str, report: Report, newline: str) -> str:
    """The metadata block with our tags and base models added; as it was when it cannot be read.

    Only the lines of those keys change: comments, and words that YAML 1.1 reads as something else (`no`), stay.
    """
    data = _as_text(inner) or {}
    if not isinstance(data, dict):
        return raw
    tags, bases = _as_list(data.get("tags")), _as_list(data.get("base_model"))
    wanted: dict[str, Any] = {"tags": tags + [tag for tag in TAGS if tag not in tags]}
    known = bases + [ref for ref in hub_ids(report.recipe) if ref not in bases]
    if known:
        wanted |= {"base_model": known, "base_model_relation": data.get("base_model_relation", "merge")}
    made = inner
    for key, value in wanted.items():
        if data.get(key) != value:
            made = _with_entry(made, key, yaml_dump({key: value}).replace("\n", newline), newline)
    if _as_text(made) != {**data, **wanted}:  # the block is written in braces, say
        made = yaml_dump({**data, **wanted}).replace("\n", newline)
    return f"---{newline}{made.rstrip()}{newline}---{newline}"


def _as_text(inner: str) -> Any:
    """YAML with every scalar as the text that stands there; what cannot be read, as it is."""
    try:
        return yaml.load(inner, yaml.BaseLoader)  # a safe loader
    except (yaml.YAMLError, RecursionError):
        return inner


def _with_entry(inner: str, key: str, entry: str, newline: str) -> str:
    """A YAML mapping's text with one entry replaced in its place, or added at the end."""
    root = yaml.compose(inner, yaml.BaseLoader) if isinstance(_as_text(inner), dict) else None
    for name, node in root.value if isinstance(root, yaml.MappingNode) else ():
        if name.value == key:
            listed = isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value
            last = node.value[-1] if listed else node  # a block list ends only where the next key begins
            return inner[: name.start_mark.index] + entry.rstrip() + inner[last.end_mark.index :]
    return f"{inner.rstrip()}{newline}{entry}".lstrip()


def hub_ids(recipe: Mapping[str, Any]) -> list[str]:
    """The base and the experts that are named by Hub id, without revisions; local folders mean nothing to others."""
    refs = [recipe.get("base"), *(task.get("expert") for task in recipe.get("tasks", {}).values())]
    parts = [part for ref in refs if isinstance(ref, str) for part in ref.split("+")]
    return list(dict.fromkeys(part.partition("@")[0] for part in parts if _HUB_ID.fullmatch(part)))


def section(report: Report) -> str:
    """What was done, with which result, by which settings and versions, and whom to cite. Markdown."""
    environment = report.environment
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "transformers") if name in environment)
    lines = [
        BEGIN,
        "## Calibrated with featcal",
        "",
        _summary(report),
        "",
        *_table(*_task_rows(report)),
        *_score_table(report),
        "Settings: " + _settings(report),
        "",
        f"Made with featcal {report.version}"
        + (f" ({versions})" if versions else "")
        + ". `featcal.yaml` is the recipe, "
        "`report.html` the whole report.",
        "",
        _CITATION,
        END,
    ]
    return "\n".join(lines)


def _summary(report: Report) -> str:
    done = [module for module in report.modules if module.status == "calibrated"]
    blocks = len({module.block for module in report.modules})
    names = ", ".join(f"**{escape(task.name)}**" for task in report.tasks)
    merged = report.recipe.get("merged")
    origin = f"a {escape(str(merged.get('method')))} merge" if isinstance(merged, dict) else "a merged model"
    return (
        f"The weights of {origin} were calibrated toward the features of its experts ({names}) with "
        f"[FeatCal](https://arxiv.org/abs/2605.13030): layer by layer in closed form, without gradients or labels. "
        f"{len(done)} modules in {blocks} blocks have new weights; everything else is as in the merged model. "
        f"{escape(headline(report)[1])}"
    )


def _task_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """One row per task; columns that nobody measured are left out."""
    experts = report.recipe.get("tasks", {})
    columns: dict[str, list[str]] = {
        "task": [escape(task.name) for task in report.tasks],
        "expert": [_model_name(experts.get(task.name, {}).get("expert")) for task in report.tasks],
        "samples": [str(task.samples) for task in report.tasks],
        "drift after the last block": [_drift(task) for task in report.tasks],
        "cosine to the expert": [_arrow(task.cosine.before, task.cosine.after) for task in report.tasks],
        "same top choice": [_arrow(task.agreement.before, task.agreement.after, ".1%") for task in report.tasks],
        "verdict": [task.verdict for task in report.tasks],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _drift(task: Task) -> str:
    pair = last_block(task)
    if pair.before is None or pair.after is None:
        return ""
    return f"{number(pair.before)} → {number(pair.after)} ({percent(pair.before, pair.after)})"


def _arrow(before: float | None, after: float | None, form: str = ".3f") -> str:
    return "" if before is None or after is None else f"{before:{form}} → {after:{form}}"


def _score_table(report: Report) -> list[str]:
    """Scores of whoever was evaluated, one row per task."""
    labels = [label for label in ("merged", "calibrated", "experts") if report.scores.get(label)]
    tasks = [task.name for task in report.tasks if any(task.name in report.scores[label] for label in labels)]
    if not tasks:
        return []
    rows = []
    for name in tasks:
        found = {label: report.scores[label].get(name) for label in labels}
        metric = next(score.metric for score in found.values() if score is not None)
        cells = ["" if score is None else f"{score.value:.2f}" for score in found.values()]
        rows.append([escape(name), escape(metric), *cells])
    return _table(["task", "metric", *labels], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _settings(report: Report) -> str:
    chosen = dict(report.recipe.get("calibration", {}))
    if report.tuning is not None:
        best = next((c for c in report.tuning.candidates if c.chosen), None)
        chosen |= {} if best is None else {"ridge": best.ridge, "rho": best.rho, "alpha": best.alpha}
    named = {"ridge": "ridge λ", "rho": "rho ρ", "alpha": "alpha α"}
    shown = ("ridge", "rho", "alpha", "schedule", "samples", "max_length", "norm", "bias")
    told = [f"{named.get(key, key)} {_spelt(chosen[key])}" for key in shown if key in chosen]
    how = "; ridge, rho and alpha chosen on held-out samples" if report.tuning is not None else ""
    return escape(", ".join(told)) + how + "."


def _spelt(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _model_name(ref: Any) -> str:
    """A Hub id as it is; of a local path the last folder, which tells others as much and no private path."""
    if not isinstance(ref, str):
        return ""
    parts = [part if _HUB_ID.fullmatch(part) else re.split(r"[/\\]", part)[-1] for part in ref.split("+")]
    return escape(" + ".join(parts))


def escape(text: str) -> str:
    """Text of others as Markdown that shows it and does nothing else."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~&$])", r"\\\1", flat)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


# ------------------------------------------------------------------------------------------------------ the upload


@dataclass(frozen=True)
class Upload:
    """What is, or would be, uploaded."""

    repo_id: str
    files: dict[str, int]
    """Size in bytes by name."""
    url: str | None
    """Of the commit; none after a dry run."""


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Merged model calibrated with featcal",
    dry_run: bool = False,
) -> Upload:
    """Upload an output folder to the Hub, its card brought up to date first.

    Args:
        repo_id: `org/name`; made if it does not exist.
        private: whether a new repository is private.
        revision: branch to write to, instead of main.
        dry_run: say what would be uploaded; nothing is written here or there, and no network is used.

    Raises:
        InputError: not an output folder, not a repository id, no access.
        RunError: the upload failed.
    """
    path = Path(folder)
    report = read_report(path)
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise InputError(f"'{repo_id}' is not a repository id; write org/name") from None
    if repo_id.count("/") != 1:
        raise InputError(f"'{repo_id}' does not say whose repository it is; write org/name")
    if _tells_paths(report.recipe):
        logger.warning("featcal.yaml, report.json and report.html name folders of this machine, and will be public")
    if dry_run:
        return Upload(repo_id, _files(path), None)
    write_card(path)
    files = _files(path)
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=path,
            revision=revision,
            commit_message=message,
            allow_patterns=[glob.escape(name) for name in files],
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"the Hub refused to write to '{repo_id}' (HTTP {status}): log in with a token that may write "
                "(hf auth login, or set HF_TOKEN)"
            ) from error
        raise RunError(f"the Hub failed (HTTP {status}); try again later") from error
    except (HTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"the upload to '{repo_id}' failed: {reason}; the same command goes on") from error
    return Upload(repo_id, files, str(commit.commit_url))


def _tells_paths(recipe: Mapping[str, Any]) -> bool:
    tasks = recipe.get("tasks", {}).values()
    named = [recipe.get("base"), recipe.get("merged"), *(task.get("expert") for task in tasks)]
    named += [task.get("data", {}).get("source") for task in tasks]
    return any(isinstance(ref, str) and os.path.isabs(ref) for ref in named)


def _files(root: Path) -> dict[str, int]:
    """Sizes of all files by name; hidden ones stay here."""
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    names = {path.relative_to(root).as_posix(): path.stat().st_size for path in found}
    return {name: size for name, size in names.items() if not any(part.startswith(".") for part in name.split("/"))}
