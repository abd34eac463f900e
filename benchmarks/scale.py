"""Memory and time of `featcal.run` on Llama-shaped checkpoints of random weights, against depth, experts and samples.

    python benchmarks/scale.py --part depth experts samples        # small models, a few minutes
    python benchmarks/scale.py --part 3b --folder /big/disk        # Llama-3.2-3B's shape, 4 experts: 51 GB of disk

Each run is a process of its own. Peak memory is what Linux says of that process (VmHWM): the program itself, blocks,
sums and activations. `estimate` is what `featcal plan` says beforehand. Weights are bfloat16 and random: the work does
not depend on them, and no score is looked at. Settings are given (`preset: llama`), so nothing is tuned.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(4000)]
LOOKED_AT_LEAST = 16
"""Samples per task in the smallest run of the part that counts them."""


@dataclass(frozen=True)
class Size:
    """A model and a calibration."""

    width: int = 768
    inner: int = 2048
    layers: int = 8
    heads: int = 12
    kv_heads: int = 4
    vocabulary: int = 8000
    experts: int = 2
    samples: int = 16
    tokens: int = 64

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.width, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            head_dim=128 if self.width >= 2048 else self.width // self.heads, tie_word_embeddings=True,
            max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )  # fmt: skip


LLAMA_3B = Size(3072, 8192, 28, 24, 8, 128256, experts=4, samples=8, tokens=64)
"""The shape of Llama-3.2-3B: 28 blocks, grouped-query attention, tied head; 3.2 billion parameters."""


# ------------------------------------------------------------------------------------------------------ the inputs


def block(size: Size, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one block's tensors."""
    config = size.config
    kv = config.num_key_value_heads * config.head_dim
    q, d, f = config.num_attention_heads * config.head_dim, size.width, size.inner
    shapes = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    for name, shape in shapes.items():
        yield f"model.layers.{depth}.{name}.weight", shape


def write_models(folder: Path, size: Size) -> None:
    """`base`, `task0` …, and `merged` (the base plus 0.3 of every difference); a shard per block, one for the rest."""
    names = ["base", "merged", *(f"task{i}" for i in range(size.experts))]
    for name in names:
        (folder / name).mkdir(parents=True)
    maps: dict[str, dict[str, str]] = {name: {} for name in names}
    bytes_written = dict.fromkeys(names, 0)
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        """The base's entries: matrices that keep a feature's size, norms near one."""
        noise = torch.randn(shape, generator=generator)
        return noise.div_(shape[-1] ** 0.5) if len(shape) == 2 else noise.mul_(0.1).add_(1)

    def save(shard: int, tensors: dict[str, dict[str, Tensor]]) -> None:
        file = f"model-{shard + 1:05d}-of-{size.layers + 1:05d}.safetensors"
        for name, own in tensors.items():
            save_file(own, folder / name / file, metadata={"format": "pt"})
            maps[name] |= dict.fromkeys(own, file)
            bytes_written[name] += sum(t.nbytes for t in own.values())

    for depth in range(size.layers):
        shards: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for key, shape in block(size, depth):
            base = draw(shape)
            merged = base.clone()
            shards["base"][key] = base.bfloat16()
            for i in range(size.experts):
                step = torch.randn(shape, generator=generator).mul_(0.02 * float(base.std()) + 1e-3)
                shards[f"task{i}"][key] = (base + step).bfloat16()
                merged.add_(step, alpha=0.3)
            shards["merged"][key] = merged.bfloat16()
        save(depth, shards)
    rest = {
        "model.embed_tokens.weight": draw((size.vocabulary, size.width)).bfloat16(),
        "model.norm.weight": torch.ones(size.width, dtype=torch.bfloat16),
    }
    save(size.layers, dict.fromkeys(names, rest))
    tokenizer = word_tokenizer()
    for name in names:
        index = {"metadata": {"total_size": bytes_written[name]}, "weight_map": maps[name]}
        (folder / name / "model.safetensors.index.json").write_text(json.dumps(index))
        size.config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_recipe(folder: Path, size: Size) -> Path:
    """Samples of `size.tokens` words each, and a recipe that reads `size.samples` of them per task."""
    generator = torch.Generator().manual_seed(1)
    lines = ["base: base", "merged: merged", "preset: llama", "tasks:"]
    for i in range(size.experts):
        rows = torch.randint(len(WORDS), (size.samples, size.tokens), generator=generator).tolist()
        texts = [json.dumps({"text": " ".join(WORDS[w] for w in row)}) for row in rows]
        (folder / f"task{i}.jsonl").write_text("\n".join(texts) + "\n")
        lines.append(f"  task{i}: {{expert: task{i}, data: {{source: ./task{i}.jsonl, text: text}}}}")
    fields = f"samples: {size.samples}, batch_size: 4, max_length: {size.tokens}"
    recipe = folder / "recipe.yaml"
    recipe.write_text("\n".join([*lines, f"calibration: {{{fields}}}"]) + "\n")
    return recipe


# ------------------------------------------------------------------------------------------------------ the runs


def measure(recipe: Path, output: Path, threads: int, result: Path) -> None:
    """In a process of its own: what the plan says, then the run."""
    import featcal
    from featcal.plan import prepare
    from featcal.recipe import load_recipe

    torch.set_num_threads(threads)
    logging.getLogger("featcal").setLevel(logging.ERROR)
    plan = prepare(load_recipe(recipe))
    plan.check()
    assert plan.cost is not None
    start = time.perf_counter()
    outcome = featcal.run(recipe, output, progress=False)
    found = {
        "seconds": time.perf_counter() - start,
        "memory": outcome.peak_memory_bytes,
        "planned_seconds": plan.cost.seconds,
        "planned_memory": plan.cost.memory_bytes,
    }
    result.write_text(json.dumps(found))


def row(folder: Path, size: Size, threads: int) -> dict[str, float]:
    """Measure one size on models that lie in `folder`."""
    recipe, result = write_recipe(folder, size), folder / "result.json"
    process = multiprocessing.get_context("spawn").Process(
        target=measure, args=(recipe, folder / "out", threads, result)
    )
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit("the run failed; its message is above")
    shutil.rmtree(folder / "out")
    found: dict[str, float] = json.loads(result.read_text())
    return found


@contextmanager
def made(root: Path | None, size: Size) -> Iterator[Path]:
    """A folder with the models of a size, removed afterwards."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        write_models(Path(folder), size)
        yield Path(folder)


def table(title: str, column: str, rows: list[tuple[int, dict[str, float]]]) -> None:
    print(f"\n{title}\n\n| {column} | peak memory, GiB | estimate | seconds | estimate |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for value, found in rows:
        memory, planned = found["memory"] / 2**30, found["planned_memory"] / 2**30
        print(f"| {value} | {memory:.2f} | {planned:.2f} | {found['seconds']:.0f} | {found['planned_seconds']:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", nargs="+", choices=["3b", "depth", "experts", "samples"], default=["depth", "experts"]
    )
    parser.add_argument("--folder", type=Path, help="where the models are made (default: the temporary folder)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    shape = "width {0.width}, inner {0.inner}, {0.samples} samples of {0.tokens} tokens per task".format(Size())
    if "depth" in options.part:
        rows = []
        for layers in (4, 8, 16, 32):
            size = replace(Size(), layers=layers)
            with made(options.folder, size) as folder:
                rows.append((layers, row(folder, size, options.threads)))
        table(f"Depth ({shape}, 2 experts)", "blocks", rows)
    if "experts" in options.part:
        rows = []
        for experts in (1, 2, 4, 8):
            size = replace(Size(), experts=experts)
            with made(options.folder, size) as folder:
                rows.append((experts, row(folder, size, options.threads)))
        table(f"Experts ({shape}, 8 blocks)", "experts", rows)
    if "samples" in options.part:
        with made(options.folder, Size()) as folder:
            counts = [LOOKED_AT_LEAST * 2**i for i in range(5)]
            rows = [(n, row(folder, replace(Size(), samples=n), options.threads)) for n in counts]
        table(f"Samples per task (width {Size().width}, 8 blocks, 2 experts)", "samples", rows)
    if "3b" in options.part:
        with made(options.folder, LLAMA_3B) as folder:
            rows = [(LLAMA_3B.experts, row(folder, LLAMA_3B, options.threads))]
        table("Llama-3.2-3B's shape, bfloat16, 8 samples of 64 tokens per task", "experts", rows)


if __name__ == "__main__":
    main()
