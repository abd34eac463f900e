"""The one schema of calibration settings, shared by recipes, `--set` and the Python API.

Defaults and presets are the published ones (arXiv 2605.13030; λ is `ridge`, ρ is `rho`, α is `alpha`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import InputError, nearest

PRESETS: dict[str, dict[str, Any]] = {
    "clip": {"ridge": 0.05, "rho": 2.0, "alpha": 0.3, "norm": "auto", "bias": True, "tune": "off"},
    "clip-demo": {"ridge": 0.05, "rho": 2.2, "alpha": 0.25, "norm": "auto", "bias": True, "tune": "off"},
    "flan-t5": {"ridge": 1e-5, "rho": 2.0, "alpha": 0.6, "norm": "off", "bias": True, "tune": "off"},
    "llama": {"ridge": 1e-5, "rho": 0.5, "alpha": 0.15, "norm": "off", "bias": True, "tune": "off"},
    "llama-8b": {"ridge": 3.0, "rho": 0.5, "alpha": 0.15, "norm": "off", "bias": True, "tune": "off"},
}
"""Published values by model family. `clip-demo` is the variant of the authors' own demo."""

FEWEST_TO_MEASURE, FEWEST_TO_RANK = 16, 32
"""Held-out samples per task at least, with given settings and with chosen ones (docs/tuning.md says why 32)."""


class Calibration(BaseModel):
    """Everything that decides what a calibration computes. See `docs/theory.md` for the symbols."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    samples: int = Field(256, ge=1, description="samples per task")
    batch_size: int = Field(16, ge=1, description="samples per forward pass")
    max_length: int = Field(512, ge=1, description="tokens per sample, longer ones are cut")
    alpha: float = Field(0.3, ge=0, le=1, description="target interpolation α (Eq. 10)")
    rho: float = Field(2.0, description="anchor blend ρ (Eq. 11): 0 base, 1 merged, above 1 extrapolates")
    ridge: float = Field(0.05, ge=0, description="ridge λ (Eq. 12), scale-free")
    tune: Literal["auto", "off"] = Field("auto", description="choose ridge, rho, alpha without labels")
    schedule: Literal["block", "group"] = Field(
        "block", description="block: one snapshot per block; group: each input group in turn"
    )
    bias: bool = Field(True, description="update the biases of linear modules")
    norm: Literal["auto", "on", "off"] = Field("auto", description="auto: LayerNorm on, RMSNorm off")
    token_weights: Literal["auto", "uniform", "class_token"] = Field(
        "auto",
        description="weights of the last block's tokens; auto: class token 1, others 0.01, on CLIP and ViT",
    )
    include: tuple[str, ...] = Field(("*",), description="globs on parameter names to calibrate")
    exclude: tuple[str, ...] = Field((), description="globs on parameter names to keep")

    @property
    def held_out(self) -> int:
        """Samples per task beside `samples`, to measure on and to tune by."""
        return max(self.samples // 8, FEWEST_TO_RANK if self.tune == "auto" else FEWEST_TO_MEASURE)

    def selects(self, name: str) -> bool:
        """Whether the parameter or module called `name` may be calibrated under include / exclude."""
        return any(fnmatchcase(name, p) for p in self.include) and not any(fnmatchcase(name, p) for p in self.exclude)


def make_settings(preset: str | None = None, base: Calibration | None = None, **fields: Any) -> Calibration:
    """Settings from defaults (or `base`), then a preset, then single fields.

    Naming ridge, rho or alpha turns the tuner off unless `tune` is given too.

    Raises:
        InputError: an unknown preset or field (the nearest known one is named), or a value out of range.
    """
    known = Calibration.model_fields
    for name in fields:
        if name not in known:
            raise InputError(f"unknown calibration setting '{name}'{nearest(name, known)}")
    values = base.model_dump() if base else {}
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"unknown preset '{preset}'{nearest(preset, PRESETS)}; known: {', '.join(PRESETS)}")
        values |= PRESETS[preset]
    if {"ridge", "rho", "alpha"} & fields.keys():
        values["tune"] = "off"
    values |= fields
    try:
        return Calibration(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"calibration.{where}: {first['msg'].lower()} (got {first['input']!r})") from None
