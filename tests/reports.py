"""Reports made up from random numbers, with the shape of real ones."""

from __future__ import annotations

from typing import Any

import torch

from featcal.drift import TaskDrift
from featcal.report import make_report
from featcal.update import Record

HOSTILE = (
    "<script>alert(1)</script>",
    "\"quoted\" & 'single' </title>",
    "a very long name " + "x" * 83,
    "مهمة تجريبية",
    "任务 ☃ $\\frac{1}{2}$",
    "javascript:alert(1)\" onload=\"alert(2)",
    "{{ 7 * 7 }}{% raw %}",
    "]]>--><img src=x onerror=alert(3)>",
)  # fmt: skip
"""Names that have broken pages before."""


def task_drift(name: str, blocks: list[str], helped: float, samples: int = 24, outputs: bool = True) -> TaskDrift:
    """Drift that grows with depth; the calibrated model keeps the share 1 − `helped` of it."""
    result = TaskDrift(name, samples, samples * 50, "mean over real tokens", "input of the head")
    direction = torch.randn(3, 8)
    expert = torch.randn(samples, 8) + 2 * direction[0]
    result.expert_features.append(expert)
    for label, scale in (("merged", 1.0), ("calibrated", 1.0 - helped)):
        found = result.model(label)
        for place, block in enumerate(blocks):
            drift = scale * (0.5 + place**1.5 / 6) * (1 + 0.1 * torch.rand(samples).double())
            local = drift * (0.9 - 0.5 * place / len(blocks))
            values = {"drift": drift, "relative": drift / 20, "cosine": 1 - drift / 30, "local": local * 1.2}
            values |= {"propagated": drift * 0.7, "local_part": local, "propagated_part": drift - local}
            if place:
                values["skip_part"] = drift * 0.4
            found.block(block).add(values)
        found.features.append(expert + scale * (0.4 * direction[1] + 0.3 * torch.randn(samples, 8)))
        loss = scale * (0.2 + 0.2 * torch.rand(samples).double())
        found.extend({"cosine": 1 - loss, "drift": loss * 3})
        if outputs:
            agreement = (torch.rand(samples) > 0.4 * scale).double()
            found.extend({"l2": loss * 5, "linf": loss, "kl": loss / 3, "agreement": agreement})
    return result


def sample_report(
    names: tuple[str, ...] = ("cars", "dtd", "eurosat", "gtsrb"),
    depth: int = 12,
    *,
    worse: str | None = None,
    outputs: bool = True,
    scores: bool = True,
    tuned: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """`make_report` of a made-up run."""
    torch.manual_seed(1)
    blocks = [f"encoder.layers.{i}" for i in range(depth)]
    drift = [task_drift(n, blocks, -0.3 if n == worse else 0.4, outputs=outputs) for n in names]
    records = []
    for block in blocks:
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"):
            start = float(torch.rand(()))
            records.append(
                Record(f"{block}", f"mlp.{module}", "linear", "calibrated", "", 2048, start, start * 0.4, 0.05, 0.1)
            )
    records[3] = Record(blocks[0], "mlp.odd", "linear", "kept", "non-finite features in task 'dtd'", 2048)
    records += [Record("", name, "other", "kept", "outside the blocks") for name in ("embeddings", "head", "norm")]
    kinds = {"merged": 70.0, "calibrated": 82.0, "experts": 90.0}
    scored = {
        label: {n: {"metric": "accuracy", "value": value + 2 * i, "n": 500} for i, n in enumerate(names)}
        for label, value in kinds.items()
    }
    candidates = [
        {"ridge": r, "rho": rho, "alpha": a, "criterion": 0.5 + abs(a - 0.3) + abs(rho - 2) / 5, "chosen": False}
        for r in (0.01, 0.05, 0.25) for rho in (1.0, 2.0, 4.0) for a in (0.0, 0.3, 0.6)
    ]  # fmt: skip
    candidates[13]["chosen"] = True
    recipe = {
        "base": "./models/base", "merged": "./models/merged", "seed": 42,
        "tasks": {n: {"expert": f"./models/{i}", "data": {"source": f"./data/{i}"}} for i, n in enumerate(names)},
        "calibration": {"samples": 256, "alpha": 0.3, "rho": 2.0, "ridge": 0.05, "bias": True, "include": ["*"]},
    }  # fmt: skip
    return make_report(
        recipe=recipe,
        tasks=[{"name": n, "samples": 256, "tokens": 256 * 50} for n in names],
        drift=drift,
        records=records,
        seconds={"plan": 1.2, "tune": 20.0, "calibrate": 41.0, "measure": 3.1, "write": 2.5, "total": 65.4},
        environment={"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "threads": 2},
        peak_memory_bytes=1_234_567_890,
        tuning={"candidates": candidates, "kind": "kl", "samples": 32, "seconds": 20.0} if tuned else None,
        scores=scored if scores else None,
        **more,
    )
