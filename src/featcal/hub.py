"""From what the user wrote to a folder on this machine: paths first, then the Hugging Face Hub.

A reference is a folder, one weight file, a Hub id, or `id@revision`; `model+adapter` joins two of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import InputError

WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
    "*.npz",
    "*.mlmodel",
    "*.nemo",
)
"""Globs of files that hold weights in some format; all other files of a repository are small and fetched."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def split_adapter(ref: str) -> tuple[str, str | None]:
    """Split `model+adapter`. An existing path is never split, so folder names may hold a `+`."""
    if _exists(ref) or "+" not in ref:
        return ref, None
    cuts = [i for i, c in enumerate(ref) if c == "+"]
    best = next((i for i in cuts if _exists(ref[:i]) and _exists(ref[i + 1 :])), None)
    best = best if best is not None else next((i for i in cuts if _exists(ref[:i])), cuts[0])
    model, adapter = ref[:best], ref[best + 1 :]
    if not model or not adapter:
        raise InputError(f"'{ref}' is not of the form MODEL+ADAPTER: both sides of the '+' must be given")
    return model, adapter


def locate(ref: str, *, cache_dir: str | Path | None = None) -> Path:
    """The local folder or file that `ref` means, downloaded from the Hub when it is not on this machine.

    `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` are honoured by huggingface_hub itself.

    Raises:
        InputError: no such folder, or the Hub refused or is out of reach; names the repository and the cause.
    """
    if _exists(ref):
        return Path(ref).expanduser()
    name, revision = ref, None
    if "@" in ref:
        name, revision = ref.rsplit("@", 1)
        if _exists(name):
            raise InputError(f"'{name}' is a local path, which has no revision: remove '@{revision}'")
    if not _ID.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git"):
        raise InputError(f"'{ref}' does not exist here and is not a Hub id (org/name or org/name@revision)")
    return _download(name, revision, cache_dir)


def _exists(ref: str) -> bool:
    try:
        return bool(ref) and Path(ref).expanduser().exists()
    except (OSError, RuntimeError):  # too long a name, or ~ of an unknown user
        return False


def _download(repo: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    """Small files first, then only the weights that will be read (never a second format of the same ones)."""

    def fetch(allow: list[str] | None, ignore: list[str] | None, commit: str | None) -> Path:
        try:
            path = snapshot_download(
                repo, revision=commit, cache_dir=cache_dir, allow_patterns=allow, ignore_patterns=ignore
            )
        except LocalEntryNotFoundError as error:
            # No network, and a cache without, say, the README: the reader reports what it really misses.
            cached = getattr(error, "snapshot_path", None)
            if cached is None or not Path(cached).is_dir():
                raise
            path = cached
        return Path(path)

    try:
        folder = fetch(None, list(WEIGHT_FILES), revision)
        if not constants.HF_HUB_OFFLINE:
            # The commit just resolved, so that a push in between cannot mix two versions.
            commit = folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else revision
            fetch(_wanted_weights(folder), None, commit)
            if not _has_weights(folder):
                fetch(["pytorch_model.bin"], None, commit)
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise InputError(_explain(repo, revision, error)) from error
    return folder


def _wanted_weights(folder: Path) -> list[str]:
    if (folder / "adapter_config.json").exists():
        return ["adapter_model.safetensors", "adapter_model.bin"]
    for index in _INDEXES:
        if (folder / index).exists():
            return _shard_names(folder / index)
    return ["model.safetensors"]


def _has_weights(folder: Path) -> bool:
    return any((folder / f).exists() for f in ("model.safetensors", "adapter_config.json", *_INDEXES))


def _shard_names(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return ["*.safetensors"]  # reported by the reader, which names the broken index
    return sorted(str(name) for name in names)


def _explain(repo: str, revision: str | None, error: Exception) -> str:
    """One sentence for each way in which the Hub can say no. Never holds the token."""
    what = f"model '{repo}'" + (f" at revision '{revision}'" if revision else "")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return (
            f"{what} is gated: accept its licence at https://huggingface.co/{repo} with your account, "
            "then log in (hf auth login, or set HF_TOKEN)"
        )
    if isinstance(error, DisabledRepoError):
        return f"{what} has been disabled on the Hub: use another copy of it"
    if isinstance(error, RevisionNotFoundError):
        return f"model '{repo}' has no revision '{revision}': check its branches and tags on the Hub"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"'{repo}' is neither a folder here nor a Hub model that you may see (HTTP {status or 404}): "
            "check the spelling, or, if it is private, log in (hf auth login, or set HF_TOKEN)"
        )
    if status in (401, 403):
        return (
            f"the Hub refused {what} (HTTP {status}): the token is missing, expired or lacks read access; "
            "log in again (hf auth login, or set HF_TOKEN)"
        )
    if isinstance(error, HFValidationError):
        return f"'{repo}' does not exist here and is not a Hub id (org/name or org/name@revision)"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return (
            f"{what} is neither a folder here nor in the local cache, and {why}: "
            f"download it first where there is a network (hf download {repo}), or give a folder"
        )
    if status is not None:
        return f"the Hub failed to serve {what} (HTTP {status}): try again later"
    detail = (str(error).splitlines() or ["no details"])[0]
    return f"{what} could not be downloaded: {type(error).__name__}, {detail}"
