"""The demo from download to picture. `tasks` says which split each step reads, `experts` how the experts are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from ..api import calibrate
from ..log import progress_bar
from ..merging import get_merger, merge_modules
from .folder import check_output, save_models, save_results, save_texts
from .results import EXPERTS, MERGED, PRETRAINED, Calibrated, DemoResult, Row, gap_sentence, make_table
from .scoring import measure
from .sources import cache_folder
from .suite import Clock, Options, Suite, prepare
from .tasks import MAX_TOKENS, encode

CALIBRATIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (f"{MERGED} + FeatCal", "calibrated", {"preset": "clip"}),
    (f"{MERGED} + FeatCal, tuned", "tuned", {"tune": "auto"}),
)
"""Row of the table, folder it is saved in, settings given to `featcal.calibrate`. The first one's drift is drawn."""

Models = dict[str, nn.Module | dict[str, nn.Module]]
"""Row of the table → the model, or one model per task."""


def main(output: Path, options: Options | None = None, *, console: Console | None = None) -> DemoResult:
    """Runs the demo, prints its table and fills the folder `output`.

    The folder gets `base/`, `experts/<task>/`, `merged/`, `calibrated/` (checkpoints with tokenizer),
    `data/<task>.jsonl` (calibration texts, without labels), `test/<task>.jsonl`, `heads/<task>.safetensors`,
    `recipe.yaml`, `scores.json` and `drift.png`.

    Raises:
        InputError: `output` is a file, or a folder with something else in it.
        RunError: the package registry cannot be reached.
    """
    options = options or Options()
    output = Path(output)
    check_output(output)
    clock = Clock()
    suite = prepare(options, clock)
    models, calibrated = make_models(suite, options, clock)
    with clock("score"):
        rows = score(suite, models)
    result = DemoResult(rows, calibrated, clock.seconds)
    with clock("save"):
        save_texts(output, suite, options)
        save_models(output, suite, {"merged": models[MERGED], **{c.folder: models[c.label] for c in calibrated}})
        save_results(output, result, options)
    show(result, output, options, console or Console())
    return result


def make_models(suite: Suite, options: Options, clock: Clock) -> tuple[Models, list[Calibrated]]:
    """The models of all rows, and what is known of those that featcal made."""
    models: Models = {PRETRAINED: suite.base, EXPERTS: dict(suite.experts)}
    with clock("merge"):
        models["simple average"] = merge_modules(get_merger("average"), suite.base, suite.experts)
        task_arithmetic = get_merger("task_arithmetic", {"scale": options.scale})
        models[MERGED] = merged = merge_modules(task_arithmetic, suite.base, suite.experts)
    made = []
    for label, folder, settings in CALIBRATIONS:
        with clock("calibrate"):
            result = calibrate(
                merged,
                base=suite.base,
                experts=suite.experts,
                data=suite.batches(options.batch_size),
                scores=suite.heads,
                seed=options.seed,
                samples=options.samples,
                batch_size=options.batch_size,
                max_length=MAX_TOKENS,
                **settings,
            )
        models[label] = result.model
        made.append(Calibrated(label, folder, result.settings, result.seconds))
    return models, made


def score(suite: Suite, models: Models) -> dict[str, Row]:
    """Every row's outcomes on the test texts, looked up where a model with these very weights was scored before."""
    test = {name: (encode(suite.tokenizer, t.test), t.targets(t.test)) for name, t in suite.tasks.items()}
    cache = cache_folder() / "outcomes"
    rows = {}
    for label in progress_bar("scoring")(list(models)):
        model = models[label]
        of_task = model if isinstance(model, dict) else dict.fromkeys(suite.tasks, model)
        outcomes = {name: measure(of_task[name], suite.heads[name], *test[name], cache) for name in suite.tasks}
        rows[label] = Row(label, outcomes)
    return rows


def show(result: DemoResult, output: Path, options: Options, console: Console) -> None:
    """Prints the table, the share of the gap, and the seconds."""
    console.print(make_table(result))
    for calibrated in result.calibrated:
        console.print(gap_sentence(result, calibrated.label, options.seed), soft_wrap=True, highlight=False)
    phases = " · ".join(f"{phase} {seconds:.0f}" for phase, seconds in result.seconds.items())
    total = sum(result.seconds.values())
    console.print(f"Seconds: {phases} · total {total:.0f}. Saved in {output}", soft_wrap=True, highlight=False)
