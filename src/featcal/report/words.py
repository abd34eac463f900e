"""What a report says in words: did it help, where, and can it be trusted. Shared by the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..drift.results import mean_of
from .schema import Pair, Report, Task

Mark = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Check:
    """One line of the answer to 'can I trust it?'."""

    mark: Mark
    text: str


@dataclass(frozen=True)
class Tile:
    """One number of the first screen."""

    label: str
    before: str
    after: str
    change: str
    mark: Mark


def worse_tasks(report: Report) -> list[str]:
    """Names of the tasks that got worse, for `--strict`."""
    return [task.name for task in report.tasks if task.verdict == "worse"]


def headline(report: Report) -> tuple[Mark, str]:
    """Did it help? One sentence."""
    by_verdict: dict[str, list[str]] = {}
    for task in report.tasks:
        by_verdict.setdefault(task.verdict, []).append(task.name)
    if report.tuning is not None and not any(c.chosen for c in report.tuning.candidates):
        return "note", "Nothing was changed: no settings brought the merged model closer to its experts."
    total, better, worse = len(report.tasks), by_verdict.get("better", []), by_verdict.get("worse", [])
    if set(by_verdict) == {"not measured"}:
        return "note", "Nothing was measured: there were no held-out samples."
    parts = []
    if len(better) == total:
        parts.append("It helped" if total == 1 else f"It helped on all {total} tasks")
    else:
        parts.append(f"It helped on {len(better)} of {total} tasks")
    if worse:
        parts.append(f"{_listed(worse)} got worse")
    if "no clear change" in by_verdict:
        parts.append(f"no clear change on {_listed(by_verdict['no clear change'])}")
    if "not measured" in by_verdict:
        parts.append(f"not measured: {_listed(by_verdict['not measured'])}")
    mark: Mark = "bad" if worse else "good" if len(better) == total else "note"
    return mark, "; ".join(parts) + "."


def _listed(names: Sequence[str], most: int = 4) -> str:
    """'a', 'b' and 3 more."""
    quoted = [f"'{short(name)}'" for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(quoted)} and {len(names) - most} more"
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def short(name: str, length: int = 60) -> str:
    """A name that fits into a sentence."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def what_was_done(report: Report) -> str:
    """The job in one sentence."""
    blocks = len({module.block for module in report.modules})
    done = sum(module.status == "calibrated" for module in report.modules)
    merged = report.recipe.get("merged")
    if isinstance(merged, dict):
        merged = f"a {merged.get('method')} merge"
    samples = sorted({task.samples for task in report.tasks})
    count = f"{samples[0]}" if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    experts = "one expert" if len(report.tasks) == 1 else f"{len(report.tasks)} experts"
    total = report.seconds.get("total")
    return (
        f"featcal {report.version} calibrated {merged or 'the merged model'} toward {experts}, with {count} unlabelled "
        f"samples per task: {done} modules in {blocks} blocks got new weights"
        + (f", in {duration(total)}." if total is not None else ".")
    )


def last_block(task: Task) -> Pair:
    """Drift after the last block."""
    return task.drift[-1] if task.drift else Pair()


def tiles(report: Report) -> list[Tile]:
    """Means over tasks, before and after."""
    last = [last_block(task) for task in report.tasks]
    made = [
        _tile("drift after the last block", last, "ratio", lower=True),
        _tile("cosine of the final features", [task.cosine for task in report.tasks], "plain"),
        _tile("KL of the outputs (nats)", [task.kl for task in report.tasks], "ratio", lower=True),
        _tile("same top choice as the expert", [task.agreement for task in report.tasks], "share"),
        _score_tile(report),
    ]
    return [tile for tile in made if tile is not None]


def _tile(label: str, pairs: Sequence[Pair], kind: str, lower: bool = False) -> Tile | None:
    both = [(p.before, p.after) for p in pairs if p.before is not None and p.after is not None]
    before, after = mean_of(b for b, _ in both), mean_of(a for _, a in both)
    if before is None or after is None:
        return None
    good = after < before if lower else after > before
    mark: Mark = "note" if after == before else "good" if good else "bad"
    if kind == "share":
        return Tile(label, f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points", mark)
    change = percent(before, after) if kind == "ratio" else f"{after - before:+.3f}"
    return Tile(label, number(before), number(after), change, mark)


def _score_tile(report: Report) -> Tile | None:
    """The mean score, where every task has one of the same metric on both sides."""
    merged, calibrated = report.scores.get("merged", {}), report.scores.get("calibrated", {})
    names = [task.name for task in report.tasks]
    if not names or not all(name in merged and name in calibrated for name in names):
        return None
    metrics = {side[name].metric for side in (merged, calibrated) for name in names}
    if len(metrics) != 1:
        return None
    metric = metrics.pop()
    before, after = (sum(side[name].value for name in names) / len(names) for side in (merged, calibrated))
    good = after < before if metric == "perplexity" else after > before
    mark: Mark = "note" if before == after else "good" if good else "bad"
    return Tile(f"mean {metric}", f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}", mark)


def where(report: Report) -> str:
    """Where did it help? The blocks in which drift, averaged over tasks, changed most."""
    totals: dict[str, list[tuple[float, float]]] = {}
    for task in report.tasks:
        for block in task.drift:
            if block.before and block.after is not None:
                totals.setdefault(block.block, []).append((block.before, block.after))
    if not totals:
        return ""
    changes = {b: sum(after / before for before, after in pairs) / len(pairs) - 1 for b, pairs in totals.items()}
    best, worst = min(changes, key=lambda b: changes[b]), max(changes, key=lambda b: changes[b])
    order = list(changes)
    fell = sum(change < 0 for change in changes.values())
    text = f"Drift fell in {fell} of {len(order)} blocks"
    if changes[best] < 0:
        text += f", most in block {order.index(best) + 1} ({best}, {changes[best]:+.0%})"
    if changes[worst] > 0:
        text += f"; it rose most in block {order.index(worst) + 1} ({worst}, {changes[worst]:+.0%})"
    return text + "."


def checks(report: Report) -> list[Check]:
    """Can it be trusted? What was looked at, and what stands out."""
    return [c for c in (_held_out(report), _noise(report), _scores(report), _modules(report), _objectives(report),
                        _ridge(report), _finite(report), _cost(report)) if c is not None]  # fmt: skip


def _held_out(report: Report) -> Check:
    counts = [task.held_out.samples for task in report.tasks if task.held_out is not None]
    if not counts:
        return Check("bad", "No held-out samples: drift before and after was not measured.")
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    text = f"Measured on {span} held-out samples per task; none of them entered a fit, no label was read."
    if report.tuning is not None:
        return Check("note", f"{text} The same samples chose the settings, so the gains are a little optimistic.")
    return Check("good", text)


def _noise(report: Report) -> Check | None:
    measured = [task for task in report.tasks if task.gain is not None]
    if not measured:
        return None
    what = {"kl": "KL of the outputs to the expert's", "cosine": "cosine of the final features to the expert's"}
    names = " or ".join(what[m] for m in dict.fromkeys(t.gain.measure for t in measured if t.gain))
    return Check("good", f"A verdict needs a mean change of two standard errors, sample by sample, in the {names}.")


def _scores(report: Report) -> Check | None:
    """Tasks whose score fell; bad when the two intervals do not even touch."""
    merged, calibrated = report.scores.get("merged", {}), report.scores.get("calibrated", {})
    fell, clear = [], False
    for name, old in merged.items():
        new = calibrated.get(name)
        if new is None or new.metric != old.metric:
            continue
        sign = -1 if old.metric == "perplexity" else 1
        if sign * (new.value - old.value) >= 0:
            continue
        fell.append(f"'{short(name)}' ({old.value:.4g} → {new.value:.4g})")
        edges = (new.high, old.low) if sign > 0 else (old.high, new.low)
        clear |= edges[0] is not None and edges[1] is not None and edges[0] < edges[1]
    if not fell:
        return Check("good", "No task's score fell.") if merged and calibrated else None
    return Check("bad" if clear else "note", f"The score fell on {', '.join(fell)}.")


def _modules(report: Report) -> Check | None:
    kept = [module for module in report.modules if module.status == "kept"]
    if not report.modules:
        return None
    done = len(report.modules) - len(kept)
    if not kept:
        return Check("good", f"All {done} modules that were to be calibrated were.")
    return Check("note", f"{len(kept)} of {len(report.modules)} modules kept their merged weights; reasons are below.")


def _objectives(report: Report) -> Check | None:
    pairs = [(m.before, m.after) for m in report.modules if m.status == "calibrated"]
    both = [(b, a) for b, a in pairs if b is not None and a is not None]
    if not both:
        return None
    fell = sum(a <= b for b, a in both)
    text = f"The objective of the fit fell in {fell} of {len(both)} calibrated modules."
    return Check("good" if fell == len(both) else "note", text)


def _ridge(report: Report) -> Check | None:
    """Modules whose factorisation needed more ridge than was asked for."""
    used = [m.ridge for m in report.modules if m.ridge is not None and m.kind == "linear"]
    raised = sum(ridge > 2 * min(used) for ridge in used) if used else 0
    if not raised:
        return None
    return Check("note", f"{raised} modules needed a larger ridge than asked for before they could be solved.")


def _finite(report: Report) -> Check | None:
    count = sum(block.not_finite for task in report.tasks for block in task.drift)
    broken = sum(task.gain.broken for task in report.tasks if task.gain)
    if not count and not broken:
        return None
    return Check("bad", "Some features were not finite (overflow or NaN); the numbers of those samples are left out.")


def _cost(report: Report) -> Check | None:
    measure, calibrate = report.seconds.get("measure"), report.seconds.get("calibrate")
    if measure is None or not calibrate:
        return None
    share = measure / calibrate
    return Check("good" if share < 0.15 else "note", f"Measuring took {share:.0%} of the calibration's time.")


# ------------------------------------------------------------------------------------------------------ numbers


def number(value: float | None, digits: int = 3) -> str:
    """A few significant digits; a dash where nothing was measured."""
    if value is None:
        return "–"
    if value == 0 or abs(value) == 1:
        return f"{value:.0f}"
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e" in text else text.rstrip(".")


def percent(before: float | None, after: float | None) -> str:
    """Relative change."""
    if before is None or after is None or before == 0:
        return "–"
    return f"{after / before - 1:+.0%}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """1.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def setting(value: Any) -> str:
    """A setting as a recipe spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
