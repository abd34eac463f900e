"""Whole checkpoints in memory, for scoring: the class that the checkpoint names, adapters folded in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import InputError
from ..hub import locate, split_adapter
from ..network import compute_dtype

_REFUSALS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
"""What transformers and peft raise on folders that they cannot load."""


def load_model(ref: str | Path, *, base: str | Path | None = None, kind: Any = None) -> nn.Module:
    """A checkpoint in evaluation mode, in the dtype of its files.

    Args:
        ref: folder, Hub id, or either with `+adapter`; an adapter alone is folded into `base`.
        kind: the transformers class to load; by default the one that the checkpoint's configuration names.

    Raises:
        InputError: no such checkpoint, files that cannot be read, tensors that are missing, an adapter without a base,
            or a class that transformers does not have.
    """
    folder, adapter = _parts(ref, base)
    chosen = kind or _class(folder)
    with _quiet(), _refused(folder):
        model, info = chosen.from_pretrained(folder, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{folder}: its files lack '{missing[0]}'{more} of a {chosen.__name__}; they would be random numbers"
        )
    return fold_adapter(model, locate(adapter)) if adapter is not None else model.eval()


def named_class(ref: str | Path, *, base: str | Path | None = None) -> Any:
    """The transformers class of a checkpoint (of the base of an adapter); nothing but configurations are read.

    Raises:
        InputError: as `load_model`, as far as that shows without the weights.
    """
    return _class(_parts(ref, base)[0])


def checkpoint_bytes(ref: str | Path, *, base: str | Path | None, device: torch.device) -> int:
    """About the memory that a checkpoint takes on a device, from the sizes of its files."""
    folder, _ = _parts(ref, base)
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    widened = compute_dtype([torch.bfloat16], device) != torch.bfloat16
    return sum(file.stat().st_size for file in files) * (2 if widened else 1)


def _parts(ref: str | Path, base: str | Path | None) -> tuple[Path, str | None]:
    """The folder of the model, and the reference of the adapter to fold in."""
    model_ref, adapter = split_adapter(str(ref))
    folder = locate(model_ref)
    if adapter is None and (folder / "adapter_config.json").is_file():
        if base is None:
            raise InputError(f"{ref} is an adapter; give it as MODEL+ADAPTER")
        return locate(str(base)), model_ref
    return folder, adapter


def _class(folder: Path) -> Any:
    import transformers

    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no checkpoint: it has no config.json")
    with _quiet(), _refused(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise InputError(f"{folder}: config.json names no class of transformers under 'architectures' ({names})")
    return found


def fold_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model with a PEFT adapter folded in.

    Raises:
        InputError: the adapter cannot be read, or changes no tensor of the model.
    """
    from peft import PeftModel

    before: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _quiet(), _refused(folder):
        folded: nn.Module = PeftModel.from_pretrained(model, folder).merge_and_unload()
    if all(torch.equal(p, before[name]) for name, p in folded.named_parameters()):
        raise InputError(f"the adapter {folder} changes nothing; is it of this base model?")
    return folded.eval()


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """What a library raises on a folder, in one sentence."""
    try:
        yield
    except InputError:
        raise
    except _REFUSALS as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = "it needs code of its own, which is not run here" if "trust_remote_code" in str(error) else lines[0]
        raise InputError(f"{folder} cannot be loaded: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Meanwhile transformers shows no bars and no report of its own: what it would say is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
