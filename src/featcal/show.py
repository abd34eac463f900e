"""Tables for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .cost import available_memory
from .plan import Plan
from .report.schema import Report
from .report.terminal import print_summary
from .run import Outcome
from .targets import BlockInfo, Group
from .tune import Tuning


def show_plan(plan: Plan, console: Console) -> None:
    """Models, tasks, blocks with their groups, what is kept and why, notes, costs."""
    assert plan.merged is not None and plan.base is not None and plan.cost is not None
    models = Table("model", "checkpoint", "class", title="Models", title_justify="left")
    for model in (plan.base, plan.merged, *plan.experts.values()):
        models.add_row(model.label, str(model.checkpoint.name), type(model.keymap.model).__name__)
    console.print(models)
    tasks = Table("task", "samples", "held out", "tokens", "empty", "duplicates", title="Data", title_justify="left")
    for task, data in plan.tasks.items():
        counts = data.samples.counts
        cells = (counts.samples, counts.held_out, data.learn.tokens, counts.empty, counts.duplicates)
        tasks.add_row(task, *map(str, cells))
    console.print(tasks)
    blocks = Table("blocks", "calibrated (modules that share an input in one bracket)", "kept", title_justify="left")
    for names, units, kept in _alike(plan.blocks):
        blocks.add_row(names, escape(units), escape(kept))
    console.print(blocks)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    cost, free = plan.cost, available_memory(plan.device)
    console.print(
        f"about {cost.memory_bytes / 1e9:.1f} GB of memory ({free / 1e9:.1f} GB free), "
        f"{cost.disk_bytes / 1e9:.2f} GB of disk, {_duration(cost.seconds)} on {plan.device}"
    )


def _alike(blocks: list[BlockInfo]) -> list[tuple[str, str, str]]:
    """Runs of blocks with the same units in one row."""
    rows: list[tuple[list[str], str, str]] = []
    for info in blocks:
        brackets = ["[" + ", ".join(u.modules) + "]" if isinstance(u, Group) else u.module for u in info.units]
        units = " ".join(brackets)
        kept = "; ".join(f"{name or '(block)'}: {reason}" for name, reason in info.kept.items())
        if rows and rows[-1][1:] == (units, kept) and rows[-1][0][-1].rpartition(".")[0] == info.stack:
            rows[-1][0].append(info.name)
        else:
            rows.append(([info.name], units, kept))
    return [(f"{n[0]} … {n[-1].rpartition('.')[2]}" if len(n) > 1 else n[0], u, k) for n, u, k in rows]


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Settings, what was calibrated and kept, drift and agreement on held-out samples, and where the result is."""
    done = [r for r in outcome.records if r.status == "calibrated"]
    before, after = sum(r.before or 0.0 for r in done), sum(r.after or 0.0 for r in done)
    share = 0.0 if not before else 100 * (1 - after / before)
    chosen = next((c for c in outcome.report.get("tuning", {}).get("candidates", ()) if c["chosen"]), None)
    if chosen:
        values = ", ".join(f"{name} {chosen[name]:.3g}" for name in ("ridge", "rho", "alpha"))
        console.print(f"settings chosen without labels: {values} (criterion {chosen['criterion']:.3f}, merged is 1)")
    if done:
        console.print(f"{len(done)} modules calibrated; their objective (Eq. 15) fell by {share:.1f} %")
    held = Counter(r.reason for r in outcome.records if r.status == "kept" and r.kind != "other")
    for reason, count in held.items():
        console.print(f"{count} modules keep the merged weights: {reason}", markup=False)
    print_summary(Report.model_validate(outcome.report), console)
    total = outcome.seconds.get("total", 0.0)
    peak = f"peak {outcome.peak_memory_bytes / 1e9:.2f} GB"
    console.print(f"{outcome.output}  ({_duration(total)}, {peak}; report.html shows more)", markup=False)


def show_tuning(tuning: Tuning, console: Console) -> None:
    """Every candidate, best first; the merged model is 1."""
    table = Table(
        "λ ridge", "ρ rho", "α alpha", "criterion", "", title=f"Criterion: {tuning.kind}", title_justify="left"
    )
    for candidate in sorted(tuning.candidates, key=lambda c: c.criterion):
        s, best = candidate.settings, candidate is tuning.best and tuning.chosen is not None
        table.add_row(*(f"{v:.4g}" for v in (s.ridge, s.rho, s.alpha, candidate.criterion)), "chosen" if best else "")
    console.print(table)
    if tuning.chosen is None:
        console.print("no candidate comes closer to the experts than the merged model as it is")
    elif tuning.worse:
        console.print(f"no better than the merged model on: {', '.join(tuning.worse)}", markup=False)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
