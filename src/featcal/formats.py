"""Weight formats that cannot be calibrated, told from the files themselves, and the one pickle that can be read."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LFS = b"version https://git-lfs"
_CONVERT = "convert it where its code is at hand, with save_file(model.state_dict(), 'model.safetensors')"
_ORIGINAL = "give the full-precision model it was made from"
_WAY_OUT = {
    "bitsandbytes": "load it with transformers, then model.dequantize() and save_pretrained, or give the original"
}


def pointer_problem(path: Path, head: bytes) -> str | None:
    """The sentence for a file whose first bytes show that it is not weights at all, else None."""
    if head.startswith(_LFS):
        return f"{path} is a git-lfs pointer, not the weights: run 'git lfs pull' in its folder"
    if head.startswith(b"GGUF"):
        return f"{path} is a GGUF file (quantised, for llama.cpp): give the safetensors model it was made from"
    return None


def format_problem(path: Path) -> str | None:
    """Why a single file cannot be a checkpoint, or None."""
    with path.open("rb") as file:
        problem = pointer_problem(path, file.read(32))
    if not problem and path.suffix not in (".safetensors", *PICKLES):
        problem = f"{path} is not a model: give a folder, a .safetensors file or a Hub id"
    return problem


def refuse_quantised_config(name: str, config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if not quantisation:
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if method is None and isinstance(quantisation, dict):
        bits = [k for k in ("load_in_4bit", "load_in_8bit") if quantisation.get(k)]
        method = "bitsandbytes" if bits else "an unnamed method"
    way_out = _WAY_OUT.get(str(method), _ORIGINAL)
    raise InputError(f"'{name}' is quantised ({method}), and rounded weights cannot be calibrated: {way_out}")


def quantised_tensors(dtypes: Mapping[str, torch.dtype], low: Mapping[str, str]) -> str | None:
    """Recognise quantised weights by names and dtypes, for configs that do not say so.

    Args:
        dtypes: by tensor name.
        low: names of tensors in 8 bits or fewer per float, with the format's name.
    """

    def first(*suffixes: str) -> str | None:
        return next((key for key in dtypes if key.endswith(suffixes)), None)

    bnb = first(".absmax", ".nested_absmax", ".quant_map", ".SCB")
    bnb = bnb or next((key for key in dtypes if ".quant_state." in key), None)
    packed = first(".qweight", ".qzeros", ".weight_packed")
    scale = first(".weight_scale_inv", ".weight_scale", ".input_scale") or next(iter(low), None)
    small = (torch.int8, torch.uint8)
    integer = next((key for key, dtype in dtypes.items() if key.endswith("weight") and dtype in small), None)
    if bnb:
        return f"is quantised (bitsandbytes, tensor '{bnb}'): {_WAY_OUT['bitsandbytes']}"
    for sign, method in ((packed, "GPTQ or AWQ"), (scale, "fp8 or smaller"), (integer, "8-bit integers")):
        if sign:
            return f"is quantised ({method}, tensor '{sign}'): {_ORIGINAL}"
    return None


def unpickle(path: Path) -> dict[str, Tensor]:
    """The flat state dict of a PyTorch file, memory-mapped, by the weights-only unpickler (no code can run).

    Raises:
        InputError: damaged, an old format that cannot be mapped, or a pickle of whole objects.
    """
    with path.open("rb") as file:
        problem = pointer_problem(path, file.read(32))
    if problem:
        raise InputError(problem)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{path} pickles whole objects, which could run code when loaded: {_CONVERT}") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        if "mmap can only be used" in str(error):
            raise InputError(f"{path} is in PyTorch's old format, which cannot be read lazily: {_CONVERT}") from error
        raise InputError(f"{path} is not a readable PyTorch file (cut short?): download it again") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} holds more than a flat table of tensors: {_CONVERT}")
    return {str(key): tensor.detach() for key, tensor in state.items()}
