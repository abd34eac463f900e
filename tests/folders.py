"""Whole jobs on disk: base, merged and experts of any pico family as folders, with a tokenizer, data and a recipe."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import CLIPImageProcessor, LlamaConfig, PreTrainedTokenizerFast

import pico

FIELDS: dict[str, Any] = {"samples": 12, "batch_size": 3, "alpha": 0.3, "rho": 2.0, "ridge": 0.05}
WORDS = [f"w{i}" for i in range(pico.VOCAB - 4)]
CHECKPOINTS = [family for family in pico.FAMILIES if family != "mixer"]
"""Families that transformers can save and load."""
OWN_TOKENIZER = {"qwen2": "words"}
"""Families whose tokenizer class cannot read ours: it lies in a folder of its own."""
READS_IMAGES, READS_PAIRS = ("clip-vision", "vit", "clip"), ("t5",)


def make_job(
    folder: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    tasks: int = 2,
    rows: int = 20,
    setup: pico.Setup | None = None,
    **fields: Any,
) -> Path:
    """Base, merged and experts as folders, data files and `recipe.yaml` in `folder`; returns the recipe's path."""
    setup = setup or pico.family_setup(family, tasks)
    for name, model in {"base": setup.base, "merged": setup.merged, **setup.experts}.items():
        save(model, folder / name, family, dtype, shard)
    for number, task in enumerate(setup.experts):
        write_data(folder, task, family, rows, seed=number)
    return write_recipe(folder, list(setup.experts), **fields)


def save(model: nn.Module, folder: Path, family: str, dtype: torch.dtype, shard: str) -> None:
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    model.float()
    if family not in READS_IMAGES or family == "clip":
        tokenizer().save_pretrained(folder.parent / OWN_TOKENIZER.get(family, folder.name))
    if family in READS_IMAGES:
        size = {"height": 12, "width": 12}
        CLIPImageProcessor(size={"shortest_edge": 12}, crop_size=size).save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, w0 … w55."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def write_data(folder: Path, task: str, family: str, rows: int, seed: int) -> Path:
    """`rows` samples of a task: lines of words of unequal length, pairs of them, pictures, or captioned pictures."""
    chance = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(least, most)))

    def picture(number: int) -> str:
        (folder / f"{task}-images").mkdir(exist_ok=True)
        noise = np.random.default_rng([seed, number]).integers(0, 255, (20, 16, 3), dtype="uint8")
        Image.fromarray(noise).save(folder / f"{task}-images" / f"{number}.png")
        return f"{task}-images/{number}.png"

    def row(number: int) -> dict[str, str]:
        if family in READS_PAIRS:
            return {"input": words(3, 9), "target": words(1, 5)}
        made = {} if family in ("clip-vision", "vit") else {"text": words(3, 12)}
        return made | ({"image": picture(number)} if family in READS_IMAGES else {})

    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(rows)))
    return path


def write_recipe(folder: Path, tasks: list[str], columns: dict[str, str] | None = None, **fields: Any) -> Path:
    first = json.loads((folder / f"{tasks[0]}.jsonl").read_text().splitlines()[0])
    columns = {name: name for name in first} if columns is None else columns
    sections = {task: {"expert": f"./{task}", "data": {"source": f"./{task}.jsonl", **columns}} for task in tasks}
    recipe = {"base": "./base", "merged": "./merged", "tasks": sections, "calibration": {**FIELDS, **fields}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def shards(folder: Path) -> dict[str, list[str]]:
    """Tensor names by file."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[path.name] = sorted(file.keys())
    return found


def hashes(folder: Path, skip: tuple[str, ...] = ("report.json", "report.html")) -> dict[str, str]:
    """SHA-256 of every file by relative name, without those that tell times."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skip)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def hidden(folder: Path) -> Iterator[Path]:
    """What a run left beside its output."""
    return folder.glob(".*featcal*")


def llama_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Llama with a tied head, as its file has them."""
    width, mlp, head = config.hidden_size, config.intermediate_size, config.head_dim
    keys = config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (config.num_attention_heads * head, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, config.num_attention_heads * head),
            "mlp.gate_proj": (mlp, width),
            "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"model.norm.weight": (width,)}


def llama_config(width: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=width // heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def make_llama_job(folder: Path, config: LlamaConfig, rows: int = 24, **fields: Any) -> Path:
    """Random bf16 Llamas of any size, experts a little apart from the base; texts of up to twelve words."""
    for seed, name in enumerate(("base", "merged", "task0", "task1")):
        same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        tensors = {}
        for key, shape in llama_shapes(config).items():
            value = torch.ones(shape)
            if len(shape) == 2:
                value = torch.randn(shape, generator=same) + 0.03 * torch.randn(shape, generator=own)
                value *= shape[1] ** -0.5
            tensors[key] = value.bfloat16()
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    for seed in range(2):
        write_data(folder, f"task{seed}", "llama", rows, seed)
    return write_recipe(folder, ["task0", "task1"], **fields)
