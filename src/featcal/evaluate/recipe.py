"""`featcal evaluate`: task scores of a recipe's checkpoints, and of any others.

The recipe says how the data look, the checkpoint's class says what a score is: a classifier's accuracy, CLIP's
zero-shot accuracy, exact match of text-to-text answers, a language model's perplexity. Rows are those of another split
where the source has one, else the rows of the recipe's split that calibration does not read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Subset

from ..data import ModelInput, Processor, find_processor, load_samples, open_table
from ..data.samples import choose_columns
from ..errors import InputError
from ..recipe import DataSpec, Recipe, load_recipe
from .checkpoints import load_model
from .classes import class_names, known_classes
from .heads import Head, OwnHead, zero_shot_head
from .readers import ImageReader, PromptReader, TextReader
from .rows import TableRows
from .run import EvalTask, predict, score_predictions
from .scorers import Classification, Generation, Likelihood, Predictions, Scorer
from .table import write_scores

logger = logging.getLogger("featcal")

SPLITS = ("test", "validation", "valid", "dev")
"""Splits to score on, best first."""

LABELS = ("label", "labels", "fine_label")
"""Columns that hold a label when the recipe names none."""

Classes = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Task name → class names (by label) and templates with a {}."""


def evaluate_recipe(
    recipe: Recipe | str | Path,
    models: Mapping[str, str] | Sequence[str] = (),
    *,
    own: bool = True,
    split: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    classes: Classes | None = None,
    output: str | Path | None = None,
    workers: int = 0,
    progress: bool = True,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores of checkpoints on a recipe's tasks, {model: {task: {metric: Score}}}; every checkpoint in turn.

    Each model's agreement with the task's expert is added, which needs no labels. Without labels it is all there is.

    Args:
        models: further checkpoints to score: folders, Hub ids, or a mapping from names to them.
        own: score the recipe's own base, merged model (when it is a checkpoint) and experts, too.
        split: the split to score on; by default the first that exists of `SPLITS`, else unused rows of the recipe's.
        limit: a seeded choice of that many rows per task.
        classes: class names and templates for CLIP, by task; the published tasks' are known.
        output: a folder for `NAME.scores.json` files.

    Raises:
        InputError: a broken recipe, a checkpoint that cannot be had, data or a class that no score is known for.
    """
    made = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    named = dict(models) if isinstance(models, Mapping) else {Path(ref).name: ref for ref in models}
    if own:
        merged = {"merged": made.merged} if isinstance(made.merged, str) else {}
        named = {"base": made.base, **merged, **named}
    elif not named:
        raise InputError("no model to evaluate: name one")
    setting = _Setting(made, split, dict(classes or {}))
    options: dict[str, Any] = {"batch_size": batch_size, "limit": limit, "device": made.device, "workers": workers}
    taught: dict[str, Predictions] = {}
    scores: dict[str, dict[str, dict[str, Any]]] = {"experts": {}}
    for task, spec in made.tasks.items():
        expert = load_model(spec.expert, base=made.base)
        found = predict({"experts": expert}, setting.task(task, expert), progress=progress, **options)["experts"]
        taught[task] = found
        scores["experts"][task] = score_predictions(setting.task(task, expert).scorer.metric, found)
    for name, ref in named.items():
        model = load_model(ref, base=made.base)
        scores[name] = {}
        for task in made.tasks:
            job = setting.task(task, model)
            found = predict({name: model}, job, progress=progress, **options)[name]
            scores[name][task] = score_predictions(job.scorer.metric, found, taught[task])
    if not own:
        del scores["experts"]
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        for name, own_scores in scores.items():
            write_scores(own_scores, Path(output) / f"{name}.scores.json")
    return scores


@dataclass
class _Setting:
    """What is the same for all models: tasks' rows and scorers, made once."""

    recipe: Recipe
    split: str | None
    classes: dict[str, tuple[Sequence[str], Sequence[str]]]

    def __post_init__(self) -> None:
        self._tasks: dict[str, EvalTask] = {}
        self._processor: Processor | None = None

    def task(self, name: str, model: nn.Module) -> EvalTask:
        """The task, as a model of this class is scored on it."""
        if name not in self._tasks:
            self._tasks[name] = self._make(name, model)
        return self._tasks[name]

    def _make(self, name: str, model: nn.Module) -> EvalTask:
        spec = self.recipe.tasks[name].data
        reads = ModelInput.from_config(model.config, getattr(model, "generation_config", None))  # type: ignore[arg-type]
        chosen, unused = self._pick_split(name, spec, reads.kind)
        table = open_table(chosen)
        kind = "image" if reads.kind == "image-text" else reads.kind
        columns = choose_columns(chosen, table, kind)
        label = spec.label or next((column for column in LABELS if column in table.columns), None)
        if label is not None and label in columns.values():
            label = None
        rows: Any = TableRows(table, {**columns, **({"label": label} if label else {})})
        if unused is not None:
            rows = Subset(rows, unused)
        logger.info("%s: scoring %d rows of %s (%s)", name, len(rows), table.name, chosen.split)
        return EvalTask(name, self._scorer(name, model, tuple(columns), label is not None), rows)

    def _pick_split(self, name: str, spec: DataSpec, kind: str) -> tuple[DataSpec, list[int] | None]:
        """The split to score, or the recipe's own with the rows that calibration leaves alone."""
        wanted = (self.split,) if self.split is not None else tuple(s for s in SPLITS if s != spec.split)
        problem: InputError | None = None
        for split in wanted:
            candidate = spec.model_copy(update={"split": split})
            try:
                open_table(candidate)
            except InputError as error:
                problem = problem or error
                continue
            return candidate, None
        if self.split is not None and problem is not None:
            raise problem
        settings = self.recipe.calibration
        read = load_samples(spec, self.recipe.seed, settings.samples, task=name, held_out=settings.held_out, kind=kind)
        used = {*read.indices, *read.held_out_indices}
        unused = [index for index in range(read.counts.available) if index not in used]
        if not unused:
            raise InputError(
                f"task '{name}': calibration reads every row of {spec.source}; name a split to score (--split), "
                "or give the task more rows than samples"
            )
        return spec, unused

    def _processors(self, model: nn.Module, parts: Sequence[str]) -> Processor:
        if self._processor is None:
            reads = ModelInput.from_config(model.config, getattr(model, "generation_config", None))  # type: ignore[arg-type]
            merged = self.recipe.merged if isinstance(self.recipe.merged, str) else None
            experts = {task: spec.expert for task, spec in self.recipe.tasks.items()}
            self._processor = find_processor(reads, merged, self.recipe.base, experts, parts=parts)
        return self._processor

    def _scorer(self, name: str, model: nn.Module, parts: Sequence[str], labelled: bool) -> Scorer:
        length = self.recipe.calibration.max_length
        processor = self._processors(model, parts)
        tokenizer = processor.tokenizer
        label = ("label",) if labelled else ()
        kind = type(model).__name__
        if "image" in parts:
            head: Head = self._clip_head(name) if kind.startswith("CLIP") and "For" not in kind else OwnHead()
            return Classification(ImageReader(processor.image_processor), head, label)
        if getattr(model.config, "is_encoder_decoder", False):
            source = "input" if "input" in parts else "text"
            answer = ("target",) if "target" in parts else ()
            reader = TextReader(tokenizer, (source,), max_length=length)
            return Generation(reader, tokenizer, label=answer, max_length=128, attention_mask=True)
        if kind.endswith(("ForCausalLM", "LMHeadModel")):
            return Likelihood(self._prompt_reader(parts, tokenizer, length))
        if kind.endswith("ForSequenceClassification"):
            return Classification(TextReader(tokenizer, (parts[0],), max_length=length), OwnHead(), label)
        raise InputError(f"no score is known for a {kind}; see `featcal.evaluate` for scorers and heads of your own")

    @staticmethod
    def _prompt_reader(parts: Sequence[str], tokenizer: Any, length: int) -> PromptReader:
        if "messages" in parts:
            return PromptReader(tokenizer, messages="messages", max_length=length)
        if "target" in parts:
            return PromptReader(tokenizer, "{input}\n", "{target}", max_length=length)
        return PromptReader(tokenizer, response=f"{{{parts[0]}}}", max_length=length)

    def _clip_head(self, name: str) -> Head:
        from transformers import AutoTokenizer, CLIPModel

        from ..hub import locate

        if name not in self.classes and name not in known_classes():
            raise InputError(
                f"task '{name}': CLIP needs class names and templates; give them (--classes {name}=FILE), or call the "
                f"task as one of: {', '.join(known_classes())}"
            )
        names, templates = self.classes.get(name) or class_names(name)
        folder = locate(self.recipe.base)
        base = load_model(self.recipe.base)
        if not isinstance(base, CLIPModel):
            raise InputError(
                f"base {self.recipe.base} is a {type(base).__name__}: zero-shot heads need a whole CLIPModel"
            )
        return zero_shot_head(base, AutoTokenizer.from_pretrained(folder), names, templates)
