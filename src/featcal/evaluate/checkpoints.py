"""Whole checkpoints in memory, for scoring: the class that the checkpoint names, adapters folded in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..hub import locate, split_adapter


def load_model(ref: str | Path, *, base: str | Path | None = None, kind: Any = None) -> nn.Module:
    """A checkpoint in evaluation mode, in the dtype of its files.

    Args:
        ref: folder, Hub id, or either with `+adapter`; an adapter alone is folded into `base`.
        kind: the transformers class to load; by default the one that the checkpoint's configuration names.

    Raises:
        InputError: no such checkpoint, an adapter without a base, or a class that transformers does not have.
    """
    model_ref, adapter = split_adapter(str(ref))
    folder = locate(model_ref)
    if adapter is None and (folder / "adapter_config.json").is_file():
        if base is None:
            raise InputError(f"{ref} is an adapter; give it as MODEL+ADAPTER")
        folder, adapter = locate(str(base)), model_ref
    model: nn.Module = (kind or named_class(folder)).from_pretrained(folder)
    return fold_adapter(model, locate(adapter)) if adapter is not None else model.eval()


def named_class(folder: Path) -> Any:
    """The transformers class that a checkpoint's configuration names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise InputError(f"{folder}: config.json names no class of transformers under 'architectures' ({names})")
    return found


def fold_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model with a PEFT adapter folded in.

    Raises:
        InputError: the adapter changes no tensor of the model.
    """
    from peft import PeftModel

    before: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    folded: nn.Module = PeftModel.from_pretrained(model, folder).merge_and_unload()
    if all(torch.equal(p, before[name]) for name, p in folded.named_parameters()):
        raise InputError(f"the adapter {folder} changes nothing; is it of this base model?")
    return folded.eval()
