"""The published schedule, to the letter, on whole models: the reference that the engine is compared with.

Nothing is shared, streamed, cached or skipped: for every block (or every input group) each model runs its full
forward on every batch, hooks record the raw inputs of the modules at hand, and `oracle` computes the updates in
float64. It imports nothing of the package. Only for models of a few thousand parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import oracle

Records = dict[str, tuple[float, float]]
"""Per module, the objective at the merged and at the calibrated parameters: Eq. 15, or `oracle.norm_objective`."""


@dataclass
class Options:
    """The settings, as published. `eps_on_anchor`: see `oracle.linear_weight`."""

    alpha: float = 0.3
    rho: float = 2.0
    ridge: float = 0.05
    bias: bool = True
    norm: str = "auto"
    token_weights: str = "auto"
    schedule: str = "block"
    eps_on_anchor: bool = False


def calibrate(
    merged: nn.Module,
    base: nn.Module,
    experts: dict[str, nn.Module],
    data: dict[str, list[Any]],
    blocks: Sequence[str],
    **options: Any,
) -> tuple[nn.Module, Records]:
    """A calibrated copy of `merged` and the objectives; `blocks` are names in forward order."""
    o = Options(**options)
    model, records = copy.deepcopy(merged).eval(), Records()
    first = next(iter(data.values()))[0]
    for block in blocks:
        names = [n for n in modules_called(model, block, first) if wanted(model.get_submodule(n), o)]
        rounds = [names] if o.schedule == "block" else groups(model, names, first)
        for members in rounds:
            features = {
                task: record(model, experts[task], data[task], members, blocks, o) for task in experts
            }  # one snapshot: nothing is written before everything is solved
            solved = {}
            for name in members:
                tasks = [features[task][name] for task in experts]
                own = [m.get_submodule(name) for m in (model, base, *experts.values())]
                solved[name], records[name] = solve(own, tasks, o)
            for name, values in solved.items():
                write(model.get_submodule(name), values)
    return model, records


# ---- which modules, in which order --------------------------------------------------------------------------------


def kind(module: nn.Module) -> str:
    """`linear`, `layer` (LayerNorm), `rms` (RMSNorm), or nothing."""
    if isinstance(module, (nn.Linear, Conv1D)):
        return "linear"
    if isinstance(module, nn.LayerNorm):
        return "layer"
    name = type(module).__name__
    return "rms" if name.endswith("RMSNorm") or name == "T5LayerNorm" else ""


def wanted(module: nn.Module, o: Options) -> bool:
    """Linears always; LayerNorms unless switched off; RMSNorms only when switched on."""
    return {"linear": True, "layer": o.norm != "off", "rms": o.norm == "on", "": False}[kind(module)]


def modules_called(model: nn.Module, block: str, batch: Any) -> list[str]:
    """Names of the block's linears and norms in order of execution."""
    inside = [n for n, m in model.named_modules() if n.startswith(block + ".") and kind(m)]
    return list(inputs(model, batch, inside))


def groups(model: nn.Module, names: list[str], batch: Any) -> list[list[str]]:
    """Linears that read the same tensor are solved together; every norm by itself; in order of first execution."""
    read = inputs(model, batch, names)
    found: list[list[str]] = []
    for name in names:
        linear = kind(model.get_submodule(name)) == "linear"
        for group in found:
            if linear and kind(model.get_submodule(group[0])) == "linear" and read[name] is read[group[0]]:
                group.append(name)
                break
        else:
            found.append([name])
    return found


# ---- features -----------------------------------------------------------------------------------------------------


def run(model: nn.Module, batch: Any) -> None:
    with torch.no_grad():
        if isinstance(batch, dict):
            model(**batch)
        else:
            model(batch[0] if isinstance(batch, tuple) else batch)


def inputs(model: nn.Module, batch: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """What each named module reads in one full forward, in order of execution."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        return lambda module, args: seen.update({name: args[0]})

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def record(
    model: nn.Module, expert: nn.Module, batches: list[Any], names: list[str], blocks: Sequence[str], o: Options
) -> dict[str, oracle.Features]:
    """Both models' inputs of every named module over one task's batches, padding dropped, with token weights."""
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in names}
    for batch in batches:
        own, theirs = inputs(model, batch, names), inputs(expert, batch, names)
        for name in names:
            mask = padding_mask(name, batch)
            rows, weights = real_rows(own[name], mask, reads_class_token(model, name, blocks, o))
            parts[name].append((rows, real_rows(theirs[name], mask, False)[0], weights))
    return {name: oracle.Features(*(torch.cat(p) for p in zip(*parts[name], strict=True))) for name in names}


def padding_mask(name: str, batch: Any) -> Tensor | None:
    """The mask over the rows that the module reads: an image tower has none, a decoder its own, except that
    cross-attention's keys and values are the encoder's rows."""
    if not isinstance(batch, dict) or name.startswith("vision_model."):
        return None
    if name.startswith("decoder.block.") and not name.endswith(("EncDecAttention.k", "EncDecAttention.v")):
        return batch["decoder_attention_mask"]
    return batch.get("attention_mask")


def reads_class_token(model: nn.Module, name: str, blocks: Sequence[str], o: Options) -> bool:
    """Whether tokens after the first weigh 0.01: the last block of an image tower, keys and values exempt."""
    if o.token_weights == "uniform" or name.endswith(("k_proj", "v_proj", "key", "value")):
        return False
    if o.token_weights == "auto":
        whole = type(model).__name__ in ("CLIPVisionModel", "ViTForImageClassification")
        blocks = [b for b in blocks if whole or b.startswith("vision_model.")]
    stack_ends = {b.rpartition(".")[0]: b for b in blocks}
    return any(name.startswith(last + ".") for last in stack_ends.values())


def real_rows(x: Tensor, mask: Tensor | None, class_token: bool) -> tuple[Tensor, Tensor]:
    """x (batch, tokens, ..., d) as real rows (n, d) with their token's weight (n,)."""
    weights = torch.ones(x.shape[:2], dtype=torch.float64)
    if class_token:
        weights[:, 1:] = 0.01
    keep = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    rows = x[keep]
    per_row = weights[keep].reshape(-1, *[1] * (rows.dim() - 2)).expand(rows.shape[:-1])
    return rows.reshape(-1, x.shape[-1]), per_row.reshape(-1)


# ---- updates ------------------------------------------------------------------------------------------------------

Values = dict[str, Tensor]


def solve(modules: list[Any], tasks: list[oracle.Features], o: Options) -> tuple[Values, tuple[float, float]]:
    """New parameters of one module, and its objective before and after; `modules`: merged, base, then the experts."""
    return (solve_linear if kind(modules[0]) == "linear" else solve_norm)(modules, tasks, o)


def solve_linear(modules: list[Any], tasks: list[oracle.Features], o: Options) -> tuple[Values, tuple[float, float]]:
    W_merged, W_base, *W_experts = [(m.weight.T if isinstance(m, Conv1D) else m.weight).detach() for m in modules]
    moments = [oracle.moments(f, o.alpha) for f in tasks]
    W = oracle.linear_weight(moments, W_experts, W_merged, W_base, o.ridge, o.rho, eps_on_anchor=o.eps_on_anchor)
    values = {"weight": W.T if isinstance(modules[0], Conv1D) else W}
    b_merged, b_base, *b_experts = [m.bias for m in modules]
    if o.bias and b_merged is not None:
        bias = oracle.linear_bias(moments, W_experts, b_experts, W, b_merged, b_base, o.ridge, o.rho)
        values["bias"] = bias.detach()
    before, after = (
        oracle.objective(tasks, w, W_experts, W_merged, W_base, o.ridge, o.rho, o.alpha) for w in (W_merged, W)
    )
    return values, (before, after)


def solve_norm(modules: list[Any], tasks: list[oracle.Features], o: Options) -> tuple[Values, tuple[float, float]]:
    own = modules[0]
    offset = 1.0 if type(own).__name__.startswith("Gemma") else 0.0
    eps = getattr(own, "variance_epsilon", None) or own.eps
    zs = [oracle.normalised(f.calibrated, kind(own), eps) for f in tasks]
    weights: list[Tensor | None] = [f.weights for f in tasks]
    g_merged, g_base, *g_experts = [m.weight.detach() for m in modules]
    shifts: list[Any] = [None if getattr(m, "bias", None) is None else m.bias.detach() for m in modules]
    b_merged, b_base, *b_experts = shifts
    betas = None if b_merged is None else b_experts
    gamma, beta = oracle.norm_affine(
        zs, weights, g_experts, betas, g_merged, g_base, b_merged, b_base, o.ridge, o.rho, offset=offset
    )
    g_anc = oracle.anchor(g_merged, g_base, o.rho)
    b_anc = None if b_merged is None else oracle.anchor(b_merged, b_base, o.rho)
    before, after = (
        oracle.norm_objective(zs, weights, g_experts, betas, g, b, g_anc, b_anc, o.ridge)
        for g, b in ((g_merged, b_merged), (gamma, beta))
    )
    return {"weight": gamma} | ({} if beta is None else {"bias": beta}), (before, after)


def write(module: nn.Module, values: Values) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(value)
