"""The model card of an output, and its upload (no network: the Hub's client is replaced)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from markdown_it import MarkdownIt

import featcal.card as card
import folders
from featcal.card import BEGIN, END, escape, push, write_card
from featcal.errors import InputError, RunError
from featcal.run import run
from reports import HOSTILE, sample_report

OLD = """---
license: llama3
base_model: []
tags:
- mergekit
- merge
library_name: transformers
model-index:
- name: x
  results: []
---
# my-merge

This is a merge.  \n
```yaml
merge_method: ties
```
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder as far as the card sees it."""
    folder = tmp_path / "out"
    folder.mkdir()
    save(folder)
    return folder


def save(folder: Path, **options: Any) -> dict[str, Any]:
    report = sample_report(**options)
    for number, task in enumerate(report["recipe"]["tasks"].values()):
        task["expert"] = f"org/expert-{number}@main" if number else "/home/me/models/cars"
    report["recipe"]["base"] = "org/base"
    (folder / "report.json").write_text(json.dumps(report))
    return report


def read(folder: Path) -> ModelCard:
    """The card as the Hub's own library reads it."""
    return ModelCard.load(folder / "README.md")


def table(text: str) -> list[list[str]]:
    """All table rows as the text that Markdown shows."""
    found: list[list[str]] = []
    inside = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inside = token.type == "tr_open" or (inside and token.type != "tr_close")
        if token.type == "tr_open":
            found.append([])
        elif token.type == "inline" and inside:
            found[-1].append("".join(child.content for child in token.children or []))
    return found


def test_section_after_the_card_that_was_there(out: Path) -> None:
    (out / "README.md").write_text(OLD)
    report = save(out)
    write_card(out)
    made = read(out)
    assert made.data.license == "llama3" and made.data.library_name == "transformers"
    assert made.data.tags == ["mergekit", "merge", "featcal"]
    assert made.data.base_model == ["org/base", "org/expert-1", "org/expert-2", "org/expert-3"]
    assert made.data["base_model_relation"] == "merge"
    assert "model-index:\n- name: x\n  results: []\n" in made.content
    body = made.text
    old_body = OLD.split("---\n", 2)[2].strip("\n")
    assert body.startswith(old_body) and body.index("## Calibrated with featcal") > body.index("merge_method: ties")
    rows = table(body)
    head = ["task", "expert", "samples", "drift after the last block", "cosine to the expert", "same top choice"]
    assert rows[0] == [*head, "verdict"]
    cars = dict(zip(rows[0], rows[1], strict=True))
    assert cars["task"] == "cars" and cars["expert"] == "cars" and cars["samples"] == "256"
    assert rows[2][1] == "org/expert-1@main"
    drift, cosine = report["tasks"][0]["drift"][-1], report["tasks"][0]["cosine"]
    change = drift["after"] / drift["before"] - 1
    assert cars["drift after the last block"].endswith(f"({change:+.0%})") and -0.5 < change < -0.3
    assert cars["cosine to the expert"] == f"{cosine['before']:.3f} → {cosine['after']:.3f}"
    assert cars["verdict"] == "better"
    assert rows[5] == ["task", "metric", "merged", "calibrated", "experts"]
    assert rows[6] == ["cars", "accuracy", "70.00", "82.00", "90.00"]
    assert "71 modules in 12 blocks have new weights" in body
    assert "Settings: ridge λ 0.05, rho ρ 2, alpha α 0.3, samples 256, bias on; ridge, rho" in body
    assert "chosen on held-out samples" in body and "featcal 0." in body and "torch 2.13.0" in body
    assert "arXiv:2605.13030" in body and "/home/me" not in body


def test_writing_again_replaces_the_section(out: Path) -> None:
    (out / "README.md").write_text(OLD)
    save(out, scores=False)
    write_card(out)
    first = (out / "README.md").read_text()
    assert "accuracy" not in first
    write_card(out)
    assert (out / "README.md").read_text() == first
    (out / "README.md").write_text(first + "\nWritten by hand.\n")
    scores = {"cars": {"metric": "accuracy", "value": 81.25, "n": 10}, "average": {"value": 81.25}}
    (out / "scores.json").write_text(json.dumps({"cars": scores["cars"]}))
    write_card(out)
    text = (out / "README.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1 and text.endswith("Written by hand.\n")
    assert ["cars", "accuracy", "81.25"] in table(text)
    assert read(out).data.tags == ["mergekit", "merge", "featcal"]


def test_without_a_card(out: Path) -> None:
    write_card(out)
    made = read(out)
    assert made.data.tags == ["featcal", "merge"] and made.text.startswith("# merged, calibrated\n")
    assert made.content.startswith("---\n") and made.data.base_model[0] == "org/base"


def test_only_local_models_give_no_base_model(out: Path) -> None:
    (out / "report.json").write_text(json.dumps(sample_report()))
    write_card(out)
    assert read(out).data.base_model is None
    (out / "README.md").write_text("---\nbase_model: org/x\ntags: solo\n---\n")
    write_card(out)
    assert read(out).data.base_model == ["org/x"] and read(out).data.tags == ["solo", "featcal", "merge"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_metadata_of_others_stay_byte_for_byte(newline: str, out: Path) -> None:
    """Comments, words that YAML 1.1 takes for something else, line ends, and bytes that are not UTF-8."""
    lines = [
        "---",
        "language: no  # Norwegian",
        "tags:  # mine",
        "- on",
        "# and of the version",
        "version: 1.10",
        "base_model: [org/base]",
        "---",
        "# caf\udce9",
        "",
        "Text.",
        "",
    ]
    (out / "README.md").write_bytes(newline.join(lines).encode(errors="surrogateescape"))
    write_card(out)
    written = (out / "README.md").read_bytes().decode(errors="surrogateescape")
    assert written.count("\n") == written.count(newline)
    front, _, body = written.replace(newline, "\n").removeprefix("---\n").partition("---\n")
    assert front == (
        "language: no  # Norwegian\ntags:\n- 'on'\n- featcal\n- merge\n# and of the version\nversion: 1.10\n"
        "base_model:\n- org/base\n- org/expert-1\n- org/expert-2\n- org/expert-3\nbase_model_relation: merge\n"
    )
    assert body.startswith(f"# caf\udce9\n\nText.\n\n{BEGIN}\n")
    write_card(out)
    assert (out / "README.md").read_bytes().decode(errors="surrogateescape") == written


def test_metadata_in_braces(out: Path) -> None:
    (out / "README.md").write_text("---\n{license: mit, tags: [a]}\n---\n# name\n")
    write_card(out)
    assert read(out).data.license == "mit" and read(out).data.tags == ["a", "featcal", "merge"]


@pytest.mark.parametrize("front", ["---\nkey: [1\n---\n", "---\njust text\n---\n"])
def test_metadata_that_cannot_be_read_are_left_alone(out: Path, front: str) -> None:
    (out / "README.md").write_text(f"{front}# name\n")
    write_card(out)
    text = (out / "README.md").read_text()
    assert text.startswith(f"{front}# name\n\n{BEGIN}\n")


def test_names_are_shown_and_do_nothing(out: Path) -> None:
    odd = (*HOSTILE, "a|b", "**bold** `code`", "[x](http://y)", "<!-- featcal: end -->")
    save(out, names=odd, depth=2)
    write_card(out)
    text = (out / "README.md").read_text()
    assert text.count(END) == 1
    shown = [row[0] for row in table(text)[1 : len(odd) + 1]]
    assert shown == [" ".join(name.split()) for name in odd]
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert (
        "<script" not in html and "<img" not in html and "<strong>bold" not in html and '<a href="http://y' not in html
    )
    assert escape("a\nb") == "a b"


def test_what_was_not_measured_has_no_column(out: Path) -> None:
    report = save(out, scores=False, outputs=False, tuned=False)
    for task in report["tasks"]:
        for name in ("drift", "cosine", "agreement", "kl", "gain"):
            task.pop(name, None)
        task["verdict"] = "not measured"
    (out / "report.json").write_text(json.dumps(report))
    write_card(out)
    rows = table((out / "README.md").read_text())
    assert rows[0] == ["task", "expert", "samples", "verdict"] and len(rows) == 5


def test_a_run_writes_its_card(tmp_path: Path) -> None:
    recipe = folders.make_job(tmp_path)
    (tmp_path / "merged" / "README.md").write_text(OLD)
    run(recipe, tmp_path / "out", progress=False)
    made = read(tmp_path / "out")
    assert "featcal" in made.data.tags and made.data.license == "llama3"
    assert [row[0] for row in table(made.text)] == ["task", "task0", "task1"]
    assert str(tmp_path) not in made.content
    assert (tmp_path / "merged" / "README.md").read_text() == OLD


# -------------------------------------------------------------------------------------------------------- upload


class Hub:
    """Stands for the Hub's client, and remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        if self.error:
            raise self.error

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> Any:
        self.calls.append(("upload_folder", options))
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(card, "HfApi", lambda: made)
    return made


def test_dry_run_writes_nothing(out: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    (out / "model[1].safetensors").write_bytes(b"12345")
    (out / ".cache").mkdir()
    (out / ".cache" / "x").touch()
    with caplog.at_level(logging.WARNING, "featcal"):
        made = push(out, "org/name", dry_run=True)
    assert made.files == {"model[1].safetensors": 5, "report.json": (out / "report.json").stat().st_size}
    assert made.url is None and hub.calls == [] and not (out / "README.md").exists()
    assert "name folders of this machine" in caplog.text


def test_upload(out: Path, hub: Hub) -> None:
    (out / "model[1].safetensors").write_bytes(b"12345")
    made = push(out, "org/name", private=True, revision="v2", message="hello")
    assert made.url == "https://hub/commit" and BEGIN in (out / "README.md").read_text()
    (_, repo), (_, branch), (_, upload) = hub.calls
    assert repo == {"repo_id": "org/name", "private": True, "exist_ok": True}
    assert branch == {"repo_id": "org/name", "branch": "v2", "exist_ok": True}
    assert upload["folder_path"] == out and upload["revision"] == "v2" and upload["commit_message"] == "hello"
    assert set(upload["allow_patterns"]) == {"model[[]1].safetensors", "report.json", "README.md"}


@pytest.mark.parametrize("name", ["name", "a/b/c", "org/na me", "org/../x", ""])
def test_bad_repository_ids(out: Path, hub: Hub, name: str) -> None:
    with pytest.raises(InputError, match="write org/name"):
        push(out, name)
    assert hub.calls == []


def test_not_an_output(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no report.json; give the output folder of a calibration"):
        push(tmp_path, "org/name")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (401, InputError, "hf auth login"),
        (403, InputError, "a token that may write"),
        (503, RunError, r"HTTP 503\); try again later"),
        (OSError("cable cut"), RunError, "cable cut; the same command goes on"),
    ],
)
def test_refusals(out: Path, hub: Hub, error: Any, kind: type[Exception], words: str) -> None:
    if isinstance(error, int):
        response: Any = SimpleNamespace(status_code=error, headers={}, request=None)
        error = HfHubHTTPError("no", response=response)
    hub.error = error
    with pytest.raises(kind, match=words):
        push(out, "org/name")
