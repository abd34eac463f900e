"""featcal.calibrate against two literal implementations of the published schedule, on a CLIP-ViT-B/32-sized tower.

    python benchmarks/literal.py                                # 8 tasks, 8, 16 and 32 samples, all 12 layers
    python benchmarks/literal.py --samples 8 --layers 2         # a quick look
    python benchmarks/literal.py --memory                       # also peak memory, each method in its own process

Weights and images are random: no method's work depends on them. All get the same models and batches, in one process,
in turns; the results are compared too.
  whole    what the parity tests do, in float32: for every layer each model runs its full forward on every batch, with
           hooks on that layer's Linears and LayerNorms
  literal  what the authors' code does: hidden states of every task are cached between layers; per layer and task the
           merged layer and the expert's layer run with hooks, then the calibrated layer runs again
Both sum G and C of every Linear on its own in float32 and solve each Linear with one float32 `torch.linalg.solve`.

GFLOP/s are operations by formula (a multiply-add is two), over wall time:
  literal  what it does (whole: likewise): forwards, G and C of each Linear by full products (2 d² each per row),
           C Wᵀ per task and Linear (2 d² m), LU (2/3 d³) and its two triangular solves (2 d² m)
  featcal  the least that the result needs: the same forwards, one triangle of G (d² per row) per distinct input, the
           cheaper way to the cross terms (`least_cross`), Cholesky (d³/3) and two triangular solves (2 d² m)
and are set against the best float32 matmul rate measured here, between the runs. Seconds by phase are each method's
own clock; processor seconds (all threads) tell a busy machine from a slow method.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

import featcal

ALPHA, RHO, RIDGE, EPS = 0.3, 2.0, 0.05, 1e-8
BATCH = 16


# ---- the literal method -------------------------------------------------------------------------------------------


class Literal:
    """The published code's way, on `CLIPVisionModel`s. `seconds` by phase after `run`."""

    def __init__(self, merged: Any, base: Any, experts: dict[str, Any], data: dict[str, list[Any]]):
        self.merged, self.base, self.experts, self.data = copy.deepcopy(merged), base, experts, data
        self.seconds: dict[str, float] = defaultdict(float)

    @torch.no_grad()
    def run(self) -> nn.Module:
        with self.clock("embed"):
            own = {t: [embed(self.merged, b) for b in batches] for t, batches in self.data.items()}
            theirs = {t: [embed(self.experts[t], b) for b in batches] for t, batches in self.data.items()}
        layers = self.merged.encoder.layers
        for depth, layer in enumerate(layers):
            last = depth == len(layers) - 1
            solver = LayerSolver(layer, self.base.encoder.layers[depth])
            for task, expert in self.experts.items():
                teacher = expert.encoder.layers[depth]
                solver.begin()
                for i, (x, x_exp) in enumerate(zip(own[task], theirs[task], strict=True)):
                    with self.clock("forward"):
                        seen, _ = watched(layer, partial(layer, x, attention_mask=None))
                        taught, theirs[task][i] = watched(teacher, partial(teacher, x_exp, attention_mask=None))
                    with self.clock("moments"):
                        solver.add(seen, taught, last)
                with self.clock("solve"):
                    solver.end(teacher)
            with self.clock("solve"):
                solver.write()
            if not last:
                with self.clock("forward"):
                    own = {t: [layer(x, attention_mask=None) for x in batches] for t, batches in own.items()}
        return self.merged

    @torch.no_grad()
    def run_whole(self) -> nn.Module:
        """The same sums and solutions, from full forwards."""
        layers = self.merged.encoder.layers
        for depth, layer in enumerate(layers):
            solver = LayerSolver(layer, self.base.encoder.layers[depth])
            for task, expert in self.experts.items():
                teacher = expert.encoder.layers[depth]
                solver.begin()
                for batch in self.data[task]:
                    with self.clock("forward"):
                        seen, _ = watched(layer, partial(self.merged, **batch))
                        taught, _ = watched(teacher, partial(expert, **batch))
                    with self.clock("moments"):
                        solver.add(seen, taught, last=depth == len(layers) - 1)
                with self.clock("solve"):
                    solver.end(teacher)
            with self.clock("solve"):
                solver.write()
        return self.merged

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.pre_layrnorm(model.embeddings(batch["pixel_values"]))


def targets(layer: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in layer.named_modules() if isinstance(m, (nn.Linear, nn.LayerNorm))}


def watched(layer: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, Tensor], Any]:
    """The input of each Linear and LayerNorm of a layer during `run`, and what that returns."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: seen.update({name: args[0]})

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in targets(layer).items()]
    try:
        return seen, run()
    finally:
        for handle in handles:
            handle.remove()


class LayerSolver:
    """Sums and solutions of one layer; per Linear S = Σ G/‖G‖ and R = Σ Cᵀ Wᵀ/‖G‖, samples as rows."""

    def __init__(self, layer: nn.Module, base: nn.Module):
        self.layer, self.base = targets(layer), targets(base)
        self.total: dict[str, dict[str, Any]] = {name: defaultdict(float) for name in self.layer}

    def begin(self) -> None:
        self.sums: dict[str, dict[str, Any]] = {name: defaultdict(float) for name in self.layer}

    def add(self, own: dict[str, Tensor], expert: dict[str, Tensor], last: bool) -> None:
        """Add one batch to the task's sums; in the last layer tokens but the first weigh 0.01, k and v exempt."""
        for name, module in self.layer.items():
            x, sums = own[name].flatten(0, 1), self.sums[name]
            weights = None
            if last and not name.endswith(("k_proj", "v_proj")):
                weights = torch.full(own[name].shape[:2], 0.01)
                weights[:, 0] = 1.0
                weights = weights.reshape(-1, 1)
            if isinstance(module, nn.LayerNorm):
                z = nn.functional.layer_norm(x, module.normalized_shape, eps=module.eps)
                wz = z if weights is None else weights * z
                sums["mean"] += wz.sum(0)
                sums["energy"] += (wz * z).sum(0)
            else:
                target = ALPHA * expert[name].flatten(0, 1) + (1 - ALPHA) * x
                wx = x if weights is None else weights * x
                sums["G"] += wx.T @ x
                sums["CT"] += wx.T @ target
                sums["mean"] += wx.sum(0)
                sums["target"] += (target if weights is None else weights * target).sum(0)
            sums["n"] += len(x) if weights is None else float(weights.sum())

    def end(self, teacher: nn.Module) -> None:
        """Fold one task into the totals."""
        for name, expert in targets(teacher).items():
            sums, total = self.sums[name], self.total[name]
            mean = sums["mean"] / sums["n"]
            weight, bias = expert.weight, expert.bias
            if isinstance(expert, nn.LayerNorm):
                energy = sums["energy"] / sums["n"]
                total["a11"] += energy
                total["a12"] += mean
                total["tasks"] += 1
                total["gamma"] += energy * weight + mean * bias
                total["beta"] += mean * weight + bias
                continue
            assert isinstance(weight, Tensor)
            G = sums["G"] / sums["n"]
            omega = 1.0 / max(float(G.norm()), EPS)
            total["S"] += omega * G
            total["R"] += omega * (sums["CT"] / sums["n"]) @ weight.T
            total["omega"] += omega
            total["desired"] += omega * (bias + weight @ (sums["target"] / sums["n"]))
            total["mean"] += omega * mean

    def write(self) -> None:
        """Solve every module of the layer, then load all new parameters."""
        new = {name: self.solution(name) for name in self.layer}
        for name, module in self.layer.items():
            module.weight.copy_(new[name][0])  # type: ignore[operator]
            module.bias.copy_(new[name][1])  # type: ignore[operator]

    def solution(self, name: str) -> tuple[Tensor, Tensor]:
        own: Any = self.layer[name]
        base: Any = self.base[name]
        total = self.total[name]
        weight, bias = (RHO * a + (1 - RHO) * b for a, b in ((own.weight, base.weight), (own.bias, base.bias)))
        if isinstance(own, nn.LayerNorm):
            a11, a12, a22 = total["a11"] + RIDGE, total["a12"], total["tasks"] + RIDGE
            r_gamma, r_beta = total["gamma"] + RIDGE * weight, total["beta"] + RIDGE * bias
            det = (a11 * a22 - a12 * a12).clamp_min(EPS)
            return (a22 * r_gamma - a12 * r_beta) / det, (a11 * r_beta - a12 * r_gamma) / det
        S = total["S"] + (RIDGE + EPS) * torch.eye(weight.shape[1])
        W = torch.linalg.solve(S, total["R"] + RIDGE * weight.T).T
        return W, (total["desired"] - W @ total["mean"] + RIDGE * bias) / (total["omega"] + RIDGE)


# ---- operations by formula ----------------------------------------------------------------------------------------


@dataclass
class Size:
    """What the counts depend on. `rows` are tokens per task; (d, [m …]) per distinct input of a layer."""

    tasks: int
    samples: int
    layers: int
    tokens: int = 50
    width: int = 768
    inner: int = 3072

    @property
    def rows(self) -> int:
        return self.samples * self.tokens

    @property
    def inputs(self) -> list[tuple[int, list[int]]]:
        d, f = self.width, self.inner
        return [(d, [d, d, d]), (d, [d]), (d, [f]), (f, [d])]

    def forwards(self) -> float:
        """Merged and expert once per layer, the calibrated layer again except for the last; both embeddings."""
        d, f, t = self.width, self.inner, self.tokens
        per_row = 2 * (4 * d * d + 2 * d * f) + 4 * t * d
        embedding = 2 * (t - 1) / t * 3 * 32 * 32 * d
        return self.tasks * self.rows * (per_row * (3 * self.layers - 1) + 2 * embedding)

    def full_forwards(self) -> float:
        """The merged model and the expert, all layers, once per layer."""
        d, f, t = self.width, self.inner, self.tokens
        per_row = 2 * (4 * d * d + 2 * d * f) + 4 * t * d
        embedding = 2 * (t - 1) / t * 3 * 32 * 32 * d
        return self.tasks * self.rows * 2 * self.layers * (per_row * self.layers + embedding)

    def whole(self) -> float:
        return self.literal() - self.forwards() + self.full_forwards()

    def literal(self) -> float:
        one = 0.0
        for d, outputs in self.inputs:
            for m in outputs:
                one += self.tasks * (4 * self.rows * d * d + 2 * d * d * m)
                one += 2 / 3 * d**3 + 2 * d * d * m
        return self.forwards() + self.layers * one

    def least(self) -> float:
        one = 0.0
        for d, outputs in self.inputs:
            one += self.tasks * (self.rows * d * d + self.least_cross(d, sum(outputs)))
            one += d**3 / 3 + 2 * d * d * sum(outputs)
        return self.forwards() + self.layers * one

    def least_cross(self, d: int, m: int) -> float:
        """Σ W_i C_i − W_anc G_i of one task: by way of C (2 d² per row, then two products of 2 d² m), or by way of the
        m outputs per row (two products of 2 d m per row)."""
        return min(2 * self.rows * d * d + 4 * d * d * m, 4 * self.rows * d * m)


def matmul_rate(size: int = 2048, repeats: int = 5) -> float:
    """Best float32 GFLOP/s of a square product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2e-9 * size**3 / (time.perf_counter() - start))
    return best


# ---- the comparison -----------------------------------------------------------------------------------------------


def random_models(tasks: int, layers: int) -> tuple[Any, Any, dict[str, Any]]:
    """Base, Task Arithmetic merge and experts of the size of CLIP-ViT-B/32, seeded."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=12,
        image_size=224, patch_size=32,
    )  # fmt: skip
    base = CLIPVisionModel(config).eval()
    with torch.no_grad():
        for p in base.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.dim() >= 2 else p + 0.1 * torch.randn_like(p))
        experts = {f"task{i}": copy.deepcopy(base) for i in range(tasks)}
        merged = copy.deepcopy(base)
        for expert in experts.values():
            for p, q in zip(expert.parameters(), merged.parameters(), strict=True):
                step = 0.05 * p.std() * torch.randn_like(p)
                p.add_(step)
                q.add_(0.3 * step)
    return base, merged, experts


def random_data(tasks: Sequence[str], samples: int) -> dict[str, list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(1)
    images = {t: torch.randn(samples, 3, 224, 224, generator=g) for t in tasks}
    return {t: [{"pixel_values": part} for part in x.split(BATCH)] for t, x in images.items()}


Outcome = tuple[nn.Module, dict[str, float]]


def run_literal(base: Any, merged: Any, experts: dict[str, Any], data: dict[str, list[Any]]) -> Outcome:
    method = Literal(merged, base, experts, data)
    return method.run(), dict(method.seconds)


def run_whole(base: Any, merged: Any, experts: dict[str, Any], data: dict[str, list[Any]]) -> Outcome:
    method = Literal(merged, base, experts, data)
    return method.run_whole(), dict(method.seconds)


def run_featcal(base: Any, merged: Any, experts: dict[str, Any], data: dict[str, list[Any]]) -> Outcome:
    samples = sum(len(batch["pixel_values"]) for batch in next(iter(data.values())))
    result = featcal.calibrate(
        merged, base=base, experts=experts, data=data, alpha=ALPHA, rho=RHO, ridge=RIDGE, samples=samples,
        device="cpu", progress=False,
    )  # fmt: skip
    return result.model, {k: v for k, v in result.seconds.items() if k != "total"}


METHODS: dict[str, Callable[..., Outcome]] = {"whole": run_whole, "literal": run_literal, "featcal": run_featcal}


def difference(a: nn.Module, b: nn.Module) -> float:
    """Largest difference of a parameter's entry, relative to the parameter's largest entry."""
    theirs = dict(b.named_parameters())
    with torch.no_grad():
        return max(float((p - theirs[n]).abs().max() / theirs[n].abs().max()) for n, p in a.named_parameters())


def compare(samples: int, options: argparse.Namespace) -> dict[str, float]:
    """Time the methods in turns and print a table; the median seconds of each."""
    base, merged, experts = random_models(options.tasks, options.layers)
    data = random_data(list(experts), samples)
    size = Size(options.tasks, samples, options.layers)
    work = {"whole": size.whole() / 1e9, "literal": size.literal() / 1e9, "featcal": size.least() / 1e9}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    processor: dict[str, list[float]] = {name: [] for name in METHODS}
    phases: dict[str, dict[str, float]] = {}
    models: dict[str, nn.Module] = {}
    rate = matmul_rate()
    for turn in range(options.repeats):
        for name in list(METHODS) if turn % 2 == 0 else list(METHODS)[::-1]:
            start, busy = time.perf_counter(), time.process_time()
            models[name], phases[name] = METHODS[name](base, merged, experts, data)
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - busy)
            rate = max(rate, matmul_rate())
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"\n{options.tasks} tasks x {samples} samples ({size.rows} tokens each), {options.layers} layers; "
        f"float32 matmul {rate:.0f} GFLOP/s on {torch.get_num_threads()} threads"
    )
    print("  method    seconds  processor    GFLOP  GFLOP/s  of matmul  runs; by phase (last run)")
    for name, gflop in work.items():
        speed = gflop / middle[name]
        busy = statistics.median(processor[name])
        cells = f"{middle[name]:9.2f} {busy:10.2f} {gflop:8.0f} {speed:8.0f} {speed / rate:10.0%}"
        runs = " ".join(f"{s:.2f}" for s in seconds[name])
        print(f"  {name:8}{cells}  {runs}; " + ", ".join(f"{k} {v:.2f}" for k, v in phases[name].items()))
    for name in ("whole", "literal"):
        gap = difference(models["featcal"], models[name])
        print(
            f"  featcal is {middle[name] / middle['featcal']:.2f} times as fast as {name}; "
            f"a parameter differs by at most {gap:.1e} of its largest entry"
        )
    return middle


# ---- peak memory --------------------------------------------------------------------------------------------------


def peak_memory(method: str, samples: int, options: argparse.Namespace) -> dict[str, float]:
    """MiB of one run above what the models and the data take, sampled every 5 ms."""
    base, merged, experts = random_models(options.tasks, options.layers)
    data = random_data(list(experts), samples)
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        METHODS[method](base, merged, experts, data)
    finally:
        done.set()
        watcher.join()
    return {"before": before / 2**20, "above": (peak - before) / 2**20}


def print_memory(samples: int, options: argparse.Namespace) -> None:
    """Each method in a process of its own, so that neither inherits the other's heap."""
    for name in METHODS:
        command = [sys.executable, __file__, "--only", name, "--samples", str(samples)]
        command += ["--tasks", str(options.tasks), "--layers", str(options.layers), "--threads", str(options.threads)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(out.splitlines()[-1])
        print(
            f"  {name:8} peak memory {found['above']:6.0f} MiB above the {found['before']:.0f} MiB of models and data"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16, 32], help="per task")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="also measure peak memory")
    parser.add_argument("--only", choices=list(METHODS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("featcal").setLevel(logging.ERROR)  # few samples are the point here
    for samples in options.samples:
        if options.only:
            print(json.dumps(peak_memory(options.only, samples, options)))
            continue
        compare(samples, options)
        if options.memory:
            print_memory(samples, options)


if __name__ == "__main__":
    main()
