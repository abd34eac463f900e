"""The adapters: ẑ = z − S(z) on a feature z, with S small, per task, and zero at the start.

Shape suffixes: R rows, D width of the feature, H hidden width (rank) of the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import InputError


class Correction(nn.Module):
    """What all adapters share. Called on features (…, D) of any float dtype and device, returns the same."""

    method: ClassVar[str]
    rank: ClassVar[int]
    """Published hidden width."""

    def forward(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, z_RD: Tensor, expert_RD: Tensor, generator: torch.Generator) -> Tensor:
        """What training minimises: mean |ẑ − z^E| over all entries."""
        return (self(z_RD) - expert_RD).abs().mean()

    @property
    def used(self) -> int:
        """Parameters that inference needs."""
        return sum(p.numel() for p in self.parameters())


class Surgery(Correction):
    """Representation Surgery (Yang et al. 2024, arXiv 2402.02705): S(z) = U ReLU(V z), no biases.

    V is Kaiming-uniform with a = √5, U is zero, so ẑ = z at the start.
    """

    method = "surgery"
    rank = 16

    def __init__(self, width: int, rank: int | None = None, seed: int = 0):
        super().__init__()
        hidden = rank or self.rank
        self.down_HD = kaiming(hidden, width, seed)
        self.up_DH = nn.Parameter(torch.zeros(width, hidden))

    def forward(self, z: Tensor) -> Tensor:
        a = linear(z.float(), self.down_HD.to(z.device)).relu()
        return (z.float() - linear(a, self.up_DH.to(z.device))).to(z.dtype)


class ProbSurgery(Correction):
    """ProbSurgery (ICML 2025): S is a Gaussian, N(μ, σ²), with μ = M a, log σ² = L a, a = ReLU(V z), no biases.

    Training subtracts one sample of it and adds κ KL(N(μ, σ²) ‖ N(0, I)); inference subtracts μ. M and L are zero at
    the start, so that μ = 0 and σ = 1: on features of unit length this noise would drown the signal.
    """

    method = "probsurgery"
    rank = 128
    kappa = 1e-4

    def __init__(self, width: int, rank: int | None = None, seed: int = 0):
        super().__init__()
        hidden = rank or self.rank
        self.down_HD = kaiming(hidden, width, seed)
        self.mean_DH = nn.Parameter(torch.zeros(width, hidden))
        self.log_variance_DH = nn.Parameter(torch.zeros(width, hidden))

    def forward(self, z: Tensor) -> Tensor:
        a = linear(z.float(), self.down_HD.to(z.device)).relu()
        return (z.float() - linear(a, self.mean_DH.to(z.device))).to(z.dtype)

    def loss(self, z_RD: Tensor, expert_RD: Tensor, generator: torch.Generator) -> Tensor:
        a_RH = linear(z_RD, self.down_HD).relu()
        mean_RD, log_variance_RD = linear(a_RH, self.mean_DH), linear(a_RH, self.log_variance_DH)
        noise_RD = torch.randn(z_RD.shape, generator=generator).to(z_RD)
        sample_RD = mean_RD + (log_variance_RD / 2).exp() * noise_RD
        kl_R = -0.5 * (1 + log_variance_RD - mean_RD.square() - log_variance_RD.exp()).sum(1)
        return (z_RD - sample_RD - expert_RD).abs().mean() + self.kappa * kl_R.mean()

    @property
    def used(self) -> int:
        return super().used - self.log_variance_DH.numel()


class DeepSurgery(Correction):
    """SurgeryV2 (Yang et al. 2024, arXiv 2410.14389): a `Surgery` after every block, on all tokens, and on the feature.

    Blocks read corrected outputs, so it works only inside the model: `inserted` puts it there, and calling it on
    features elsewhere is an error.
    """

    method = "surgery_v2"
    rank = 16

    def __init__(
        self, blocks: Sequence[str], widths: Sequence[int], width: int, rank: int | None = None, seed: int = 0
    ):
        super().__init__()
        self.order = list(blocks)
        self.layers = nn.ModuleList(Surgery(w, rank or self.rank, seed + i) for i, w in enumerate(widths))
        self.final = Surgery(width, rank or self.rank, seed + len(self.layers))
        self._inside = 0

    def forward(self, z: Tensor) -> Tensor:
        if not self._inside:
            raise InputError(
                "surgery_v2 corrects inside the blocks as well: score featcal.baselines.Corrected(…).candidate(task), "
                "not its adapter on the merged model's features"
            )
        corrected: Tensor = self.final(z)
        return corrected

    @contextmanager
    def inserted(self, model: nn.Module, seen: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Meanwhile the model's blocks return corrected outputs; they are noted by block in `seen`."""
        handles = self.insert(model, seen)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            for handle in handles:
                handle.remove()

    def insert(self, model: nn.Module, seen: dict[str, Tensor] | None = None) -> list[Any]:
        """The same for good; returns the hooks."""

        def correct(name: str, layer: nn.Module, output: Any) -> Any:
            value = layer(first_tensor(output))
            if seen is not None:
                seen[name] = value
            return with_first_tensor(output, value)

        return [
            model.get_submodule(name).register_forward_hook(
                lambda _, args, output, name=name, layer=layer: correct(name, layer, output)
            )
            for name, layer in zip(self.order, self.layers, strict=True)
        ]


METHODS: dict[str, type[Correction]] = {cls.method: cls for cls in (Surgery, ProbSurgery, DeepSurgery)}
"""Every baseline by its name on the command line."""


def kaiming(rows: int, columns: int, seed: int) -> nn.Parameter:
    """A matrix as `nn.Linear` starts with: uniform within ±1/√columns (Kaiming with a = √5)."""
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(columns)
    return nn.Parameter((torch.rand(rows, columns, generator=generator) * 2 - 1) * bound)


def first_tensor(output: Any) -> Tensor:
    """The hidden state in a block's output: itself, or the first tensor of a tuple."""
    return output if isinstance(output, Tensor) else next(value for value in output if isinstance(value, Tensor))


def with_first_tensor(output: Any, new: Tensor) -> Any:
    """The output with another hidden state."""
    if isinstance(output, Tensor):
        return new
    place = next(i for i, value in enumerate(output) if isinstance(value, Tensor))
    return type(output)((*output[:place], new, *output[place + 1 :]))
