"""Corruptions of calibration images: Gaussian noise, motion blur, fog, by the recipes of ImageNet-C and its kin.

Hendrycks & Dietterich (arXiv 1903.12261) chose their parameters by eye at three image sizes: 32 (CIFAR-C), 64
(Tiny-ImageNet-C) and 224 (ImageNet-C). An image of another size takes the set of the nearest size on a log scale, with
the radius and width of the blur scaled to its own side. They act on images in [0, 1] after resizing and cropping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ..errors import InputError, nearest

CONDITIONS = ("clean", "gaussian_noise", "motion_blur", "fog")

GAUSSIAN_SIGMA = {
    32: (0.04, 0.06, 0.08, 0.09, 0.10),
    64: (0.04, 0.08, 0.12, 0.15, 0.18),
    224: (0.08, 0.12, 0.18, 0.26, 0.38),
}
"""Standard deviation by image side, severities 1 … 5."""

MOTION_BLUR = {
    32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
}
"""(radius, sigma) in pixels."""

FOG = {
    32: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    64: ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
}
"""(amount c₀, decay of the roughness)."""


def reference_size(side: int) -> int:
    """The size (32, 64 or 224) whose parameters an image of this side takes."""
    return min(GAUSSIAN_SIGMA, key=lambda size: abs(math.log(size / side)))


def parameters(condition: str, side: int, severity: int) -> dict[str, float]:
    """What a condition means at an image size, for the record.

    Raises:
        InputError: an unknown condition or severity.
    """
    if condition not in CONDITIONS:
        raise InputError(f"unknown corruption '{condition}'{nearest(condition, CONDITIONS)}")
    if not 1 <= severity <= 5:
        raise InputError(f"severity must be 1 to 5, got {severity}")
    size = reference_size(side)
    if condition == "gaussian_noise":
        return {"sigma": GAUSSIAN_SIGMA[size][severity - 1]}
    if condition == "motion_blur":
        radius, sigma = MOTION_BLUR[size][severity - 1]
        return {"radius": radius * side / size, "sigma": sigma * side / size}
    if condition == "fog":
        amount, decay = FOG[size][severity - 1]
        return {"amount": float(amount), "decay": float(decay)}
    return {}


@dataclass
class Corrupt:
    """A seeded corruption; called with one image (3, H, W) in [0, 1] after the other."""

    condition: str
    severity: int = 3
    seed: int = 42
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        parameters(self.condition, 224, self.severity)
        self._random = np.random.default_rng(self.seed)

    def __call__(self, image_CHW: Tensor) -> Tensor:
        side = min(image_CHW.shape[-2:])
        chosen = parameters(self.condition, side, self.severity)
        if self.condition == "gaussian_noise":
            return gaussian_noise(image_CHW, chosen["sigma"], self._random)
        if self.condition == "motion_blur":
            angle = float(self._random.uniform(-45, 45))
            return motion_blur(image_CHW, chosen["radius"], chosen["sigma"], angle)
        if self.condition == "fog":
            return fog(image_CHW, chosen["amount"], chosen["decay"], self._random)
        return image_CHW


def gaussian_noise(image_CHW: Tensor, sigma: float, random: np.random.Generator) -> Tensor:
    """clip(x + σ N(0, 1), 0, 1)."""
    noise = torch.from_numpy(random.standard_normal(image_CHW.shape)).to(image_CHW)
    return (image_CHW + sigma * noise).clamp(0, 1)


def motion_blur(image_CHW: Tensor, radius: float, sigma: float, angle: float) -> Tensor:
    """Blur along a line at `angle` degrees: a one-sided Gaussian of 2 · radius + 1 taps, as ImageMagick's.

    Edges are repeated outwards.
    """
    taps = 2 * round(radius) + 1
    weights = np.exp(-(np.arange(taps) ** 2) / (2 * sigma**2))
    kernel_KK = line_kernel(weights / weights.sum(), angle)
    half = kernel_KK.shape[0] // 2
    weight = torch.from_numpy(kernel_KK).to(image_CHW)[None, None]
    padded = pad(image_CHW[:, None], (half, half, half, half), mode="replicate")
    return conv2d(padded, weight)[:, 0].clamp(0, 1)


def line_kernel(weights: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    """Weights along a ray from the centre of a square kernel, each shared among its four nearest pixels."""
    reach = len(weights)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    step = np.array([math.sin(math.radians(angle)), math.cos(math.radians(angle))])
    for distance, weight in enumerate(weights):
        y, x = reach + distance * step
        top, left = math.floor(y), math.floor(x)
        for row, share_y in ((top, 1 - (y - top)), (top + 1, y - top)):
            for column, share_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                if share_y * share_x > 0:
                    kernel[row, column] += weight * share_y * share_x
    return kernel


def fog(image_CHW: Tensor, amount: float, decay: float, random: np.random.Generator) -> Tensor:
    """clip((x + c₀ P) m / (m + c₀), 0, 1), m the image's maximum, P a plasma map shared by the channels."""
    height, width = image_CHW.shape[-2:]
    side = 2 ** math.ceil(math.log2(max(height, width, 2)))
    map_HW = torch.from_numpy(plasma(side, decay, random)[:height, :width]).to(image_CHW)
    most = float(image_CHW.max())
    return ((image_CHW + amount * map_HW) * (most / (most + amount))).clamp(0, 1)


def plasma(side: int, decay: float, random: np.random.Generator) -> NDArray[np.float64]:
    """A fractal map (side, side) in [0, 1] by the diamond-square algorithm on a torus; `side` is a power of two.

    The wobble starts at 100 and shrinks by `decay` with every halving of the step. It enters as w · U(−w, w), twice, as
    in the reference implementation.
    """
    grid = np.zeros((side, side))
    step, wobble = side, 100.0

    def noisy(mean: NDArray[np.float64]) -> NDArray[np.float64]:
        return mean + wobble * random.uniform(-wobble, wobble, mean.shape)

    while step >= 2:
        half = step // 2
        corners = grid[::step, ::step]
        total = corners + np.roll(corners, -1, 0)
        total = total + np.roll(total, -1, 1)
        grid[half::step, half::step] = noisy(total / 4)
        centres, corners = grid[half::step, half::step], grid[::step, ::step]
        across = centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1)
        grid[::step, half::step] = noisy(across / 4)
        down = centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0)
        grid[half::step, ::step] = noisy(down / 4)
        step, wobble = half, wobble / decay
    grid -= grid.min()
    return grid / grid.max()
