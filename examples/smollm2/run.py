"""SmolLM2-135M with four LoRA experts through the whole checkpoint path: plan, calibrate, kill, resume, load, score.

    python examples/smollm2/run.py OUT [--samples 16] [--test 32]

Experts (arithmetic, news, tales, slovene) are short seeded fine-tunes, made once and cached (`featcal.suites.smollm2`).
The calibration is killed with SIGKILL once it has finished a few blocks; the same command then goes on. The table is
the mean loss per token (nats) on texts of each domain that no model has seen; for arithmetic, on the answers.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from datasets import load_from_disk
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from featcal.demo.sources import cache_folder
from featcal.evaluate import PromptReader
from featcal.suites.load import load_suite
from featcal.suites.smollm2 import build, loss_of

DOMAINS = ("arithmetic", "news", "tales", "slovene")
KILL_AFTER = 4
"""Finished blocks after which the first run is killed."""


def write_recipe(root: Path, out: Path, samples: int) -> Path:
    """Texts of each domain as JSONL (one column), and a recipe beside them."""
    for name in DOMAINS:
        rows = load_from_disk(str(root / "datasets" / "smollm2" / f"{name}-texts"))["train"]
        lines = [json.dumps({"text": text_of(row)}, ensure_ascii=False) for row in rows]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    models = root / "models" / "smollm2"
    tasks = "".join(
        f"  {name}:\n    expert: {models / 'base'}+{models / name}\n    data: {{source: ./{name}.jsonl, text: text}}\n"
        for name in DOMAINS
    )
    recipe = out / "recipe.yaml"
    recipe.write_text(
        f"base: {models / 'base'}\nmerged: {{method: task_arithmetic, scale: 0.3}}\ntasks:\n{tasks}"
        f"preset: llama\ncalibration: {{samples: {samples}, batch_size: 8, max_length: 64}}\n"
    )
    return recipe


def text_of(row: dict[str, str]) -> str:
    return row["text"] if "text" in row else f"{row['question']}\n{row['answer']}"


def calibrate_killed_and_resumed(recipe: Path, target: Path) -> None:
    """The command, killed after KILL_AFTER blocks, and again to the end."""
    command = [sys.executable, "-m", "featcal", "calibrate", str(recipe), "-o", str(target)]
    part = target.with_name(f".{target.name}.featcal-part")
    first = subprocess.Popen(command)
    while first.poll() is None and len(list(part.glob("work/**/block-*.safetensors"))) < KILL_AFTER:
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    done = len(list(part.glob("work/**/block-*.safetensors")))
    print(f"killed after {done} finished blocks (status {first.wait()}); the same command again:", flush=True)
    subprocess.run(command, check=True)


@torch.no_grad()
def losses(
    model: torch.nn.Module, tokenizer: object, root: Path, test: int, domains: tuple[str, ...]
) -> dict[str, float]:
    """Mean loss per token of each domain's test texts, 64 tokens each; counted as the experts were trained."""
    tasks, found = load_suite("smollm2-domains").tasks, {}
    for name in domains:
        rows = load_from_disk(str(root / "datasets" / "smollm2" / f"{name}-texts"))["test"].select(range(test))
        reader = PromptReader(tokenizer, tasks[name].prompt, tasks[name].response, max_length=64)
        found[name] = float(loss_of(model, reader, list(rows)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=16, help="calibration texts per domain")
    parser.add_argument("--test", type=int, default=32, help="test texts per domain")
    options = parser.parse_args()
    root, out = cache_folder() / "suites" / "smollm2", options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    build(root, progress=True)
    recipe = write_recipe(root, out, options.samples)
    featcal = [sys.executable, "-m", "featcal"]
    subprocess.run([*featcal, "merge", str(recipe), "-o", str(out / "merged"), "--overwrite"], check=True)
    subprocess.run([*featcal, "plan", str(recipe), "--set", f"merged={out / 'merged'}"], check=True)
    calibrate_killed_and_resumed(recipe, out / "calibrated")
    base = root / "models" / "smollm2" / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    table = {}
    for label, folder in {"base": base, "merged": out / "merged", "calibrated": out / "calibrated"}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        table[label] = losses(model, tokenizer, root, options.test, DOMAINS)
    table["experts"] = {}
    for name in DOMAINS:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        expert = PeftModel.from_pretrained(plain, str(root / "models" / "smollm2" / name)).eval()
        table["experts"] |= losses(expert, tokenizer, root, options.test, (name,))
    print("loss per token".ljust(16), *(name.rjust(12) for name in DOMAINS), "mean".rjust(12))
    for label, row in table.items():
        cells = [*row.values(), sum(row.values()) / len(row)]
        print(label.ljust(16), *(f"{value:12.3f}" for value in cells))
    (out / "losses.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
