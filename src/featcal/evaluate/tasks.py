"""A recipe's tasks as they are scored: which rows, read how, by which score.

The recipe says how the data look, the checkpoint's class says what a score is: a classifier's accuracy, CLIP's
zero-shot accuracy, exact match of text-to-text answers, a language model's perplexity. Rows are those of another split
where the source has one, else the rows of the recipe's split that calibration does not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from ..data import ModelInput, Processor, Table, find_processor, load_samples, open_table
from ..data.samples import choose_columns
from ..errors import InputError, MissingSplit
from ..hub import locate
from ..recipe import DataSpec, Recipe
from .checkpoints import load_model
from .classes import class_names, known_classes
from .heads import Head, OwnHead, zero_shot_head
from .readers import ImageReader, PromptReader, TextReader
from .rows import SampleRows
from .run import EvalTask, choose_rows
from .scorers import Classification, Generation, Likelihood, Scorer

logger = logging.getLogger("featcal")

SPLITS = ("test", "validation", "valid", "dev")
"""Splits to score on, best first."""

LABELS = ("label", "labels", "fine_label")
"""Columns that hold a label when the recipe names none."""

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of causal language models' classes end."""

Classes = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Task name → class names (by label) and templates with a {}."""

TextMetric = Literal["exact_match", "spearman"]


@dataclass
class RecipeTasks:
    """What is the same for all models: every task's rows and scorer, made once, for the class of the first model."""

    recipe: Recipe
    split: str | None = None
    limit: int | None = None
    classes: Classes = field(default_factory=dict)
    metrics: Mapping[str, TextMetric] = field(default_factory=dict)
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Fixed heads of encoders whose classifier lies outside the model."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the rows to score are, when not at the recipe's source; all of them are scored."""

    def __post_init__(self) -> None:
        self._tasks: dict[str, EvalTask] = {}
        self._processor: Processor | None = None

    def task(self, name: str, model: nn.Module) -> EvalTask:
        """The task, as a model of this class is scored on it."""
        if name not in self._tasks:
            self._tasks[name] = self._make(name, model)
        return self._tasks[name]

    def _make(self, name: str, model: nn.Module) -> EvalTask:
        reads = ModelInput.from_config(model.config, getattr(model, "generation_config", None))  # type: ignore[arg-type]
        rows, where = self._rows(name, reads)
        logger.info("%s: scoring %d rows of %s (%s)", name, len(rows), rows.table.name, where)
        return EvalTask(name, self._scorer(name, model, reads, rows), rows)

    # --------------------------------------------------------------------------------------------------- rows

    def _rows(self, name: str, reads: ModelInput) -> tuple[SampleRows, str]:
        """The rows to score. A split whose labels are hidden (all -1 or empty) is only taken when it is asked for."""
        spec = self.recipe.tasks[name].data
        first: tuple[SampleRows, str] | None = None
        for chosen, table, indices in self._splits(name, spec, reads.kind):
            found = self._pick(name, chosen, table, reads, indices)
            if found.label is None or self.split is not None or _labels(found):
                return found, chosen.split
            first = first or (found, chosen.split)
            logger.warning("%s: the labels of split '%s' are hidden; looking for another", name, chosen.split)
        assert first is not None
        return replace(first[0], label=None), first[1]

    def _splits(self, name: str, spec: DataSpec, kind: str) -> Iterator[tuple[DataSpec, Table, Sequence[int]]]:
        """Splits that could be scored, best first, with their rows; last the recipe's own, less what calibration reads.

        Raises:
            InputError: a source that cannot be read, no such split, or calibration reads every row.
        """
        found = 0
        elsewhere = name in self.sources
        for split in (self.split,) if self.split is not None else (*SPLITS, *(["train"] if elsewhere else [])):
            if split == spec.split and not elsewhere:
                continue
            candidate = spec.model_copy(update={"split": split, "source": self.sources.get(name, spec.source)})
            try:
                table = open_table(candidate)
            except MissingSplit:
                if split in (self.split, "train"):
                    raise
                continue
            found += 1
            yield candidate, table, range(table.size)
        if not elsewhere and self.split in (None, spec.split):
            yield from self._unused(name, spec, kind, needed=not found)

    def _unused(
        self, name: str, spec: DataSpec, kind: str, needed: bool
    ) -> Iterator[tuple[DataSpec, Table, Sequence[int]]]:
        """The rows of the recipe's split that calibration does not read, if there are any."""
        settings = self.recipe.calibration
        read = load_samples(spec, self.recipe.seed, settings.samples, task=name, held_out=settings.held_out, kind=kind)
        used = {*read.indices, *read.held_out_indices}
        unused = [index for index in range(read.counts.available) if index not in used]
        if unused:
            yield spec, open_table(spec), unused
        elif needed:
            raise InputError(
                f"task '{name}': calibration reads every row of {spec.source}; name a split to score (--split), other "
                "data (--data), or give the task more rows than samples"
            )

    def _pick(self, name: str, spec: DataSpec, table: Table, reads: ModelInput, indices: Sequence[int]) -> SampleRows:
        """At most `limit` of the rows, without those in which something is empty."""
        columns = choose_columns(spec, table, "image" if reads.kind == "image-text" else reads.kind)
        label = spec.label or next((column for column in LABELS if column in table.columns), None)
        if label is not None and label in columns.values():
            label = None
        rows = SampleRows(table, columns, label, indices)
        chosen = [indices[i] for i in choose_rows(range(len(indices)), self.limit)]
        whole = [index for index in chosen if _complete(rows.read(index))]
        if len(whole) < len(chosen):
            logger.warning(
                "%s: %d of %d rows skipped, a part of them is empty", name, len(chosen) - len(whole), len(chosen)
            )
        if not whole:
            raise InputError(f"task '{name}': no row to score in {table.name} (split '{spec.split}')")
        return SampleRows(table, columns, label, whole)

    # ------------------------------------------------------------------------------------------------- scorers

    def _processors(self, reads: ModelInput, parts: Sequence[str]) -> Processor:
        if self._processor is None:
            merged = self.recipe.merged if isinstance(self.recipe.merged, str) else None
            experts = {task: spec.expert for task, spec in self.recipe.tasks.items()}
            self._processor = find_processor(reads, merged, self.recipe.base, experts, parts=parts)
        return self._processor

    def _scorer(self, name: str, model: nn.Module, reads: ModelInput, rows: SampleRows) -> Scorer:
        parts = tuple(rows.columns)
        length = min(self.recipe.calibration.max_length, reads.max_positions or self.recipe.calibration.max_length)
        processor = self._processors(reads, parts)
        tokenizer = processor.tokenizer
        label = ("label",) if rows.label is not None else ()
        kind = type(model).__name__
        if name in self.metrics and not getattr(model.config, "is_encoder_decoder", False):
            raise InputError(f"task '{name}': --metric is for text-to-text models, not for a {kind}")
        if name in self.heads:
            reads_images = "image" in parts
            reader: Any = (
                ImageReader(processor.image_processor)
                if reads_images
                else TextReader(tokenizer, parts[:1], max_length=length)
            )
            return Classification(reader, self.heads[name], label)
        if "image" in parts:
            if kind.startswith("CLIP") and "For" not in kind:
                names, head = self._clip_head(name)
                return Classification(ImageReader(processor.image_processor), head, label, names=names)
            return Classification(ImageReader(processor.image_processor), OwnHead(), label, names=_own_names(model))
        if getattr(model.config, "is_encoder_decoder", False):
            reader = TextReader(tokenizer, ("input" if "input" in parts else "text",), max_length=length)
            answer = ("target",) if "target" in parts else ()
            metric = self.metrics.get(name, "exact_match")
            return Generation(reader, tokenizer, metric, label=answer, max_length=128, attention_mask=True)
        if kind.endswith(CAUSAL):
            return Likelihood(_prompt_reader(parts, processor, length))
        if kind.endswith("ForSequenceClassification"):
            reader = TextReader(tokenizer, (parts[0],), max_length=length)
            return Classification(reader, OwnHead(), label, names=_own_names(model))
        raise InputError(f"no score is known for a {kind}; see `featcal.evaluate` for scorers and heads of your own")

    def _clip_head(self, name: str) -> tuple[dict[str, int], Head]:
        """Class names by number, and the head that they make."""
        from transformers import AutoTokenizer, CLIPModel

        if name not in self.classes and name not in known_classes():
            raise InputError(
                f"task '{name}': CLIP needs class names and templates; give them (--classes {name}=FILE), or call the "
                f"task as one of: {', '.join(known_classes())}"
            )
        names, templates = self.classes.get(name) or class_names(name)
        base = load_model(self.recipe.base)
        if not isinstance(base, CLIPModel):
            raise InputError(
                f"base {self.recipe.base} is a {type(base).__name__}: zero-shot heads need a whole CLIPModel"
            )
        head = zero_shot_head(base, AutoTokenizer.from_pretrained(locate(self.recipe.base)), names, templates)
        return {text: number for number, text in enumerate(names)}, head


def _complete(row: Mapping[str, Any] | None) -> bool:
    """Nothing that is read or compared is empty. Hidden labels are looked at later."""
    return row is not None and row.get("target", "") is not None


def _labels(rows: SampleRows) -> bool:
    """Whether any row has a label: test sets of competitions have -1 in every row."""
    return any(row["label"] is not None and row["label"] != -1 for row in rows)


def _own_names(model: nn.Module) -> dict[str, int]:
    """A classifier's class names by number."""
    names = getattr(model.config, "label2id", None) or {}
    return {str(name): int(number) for name, number in names.items()}


def _prompt_reader(parts: Sequence[str], processor: Processor, length: int) -> PromptReader:
    tokenizer = processor.tokenizer
    if "messages" in parts:
        template = processor.chat_template
        return PromptReader(tokenizer, messages="messages", max_length=length, chat_template=template)
    if "target" in parts:
        return PromptReader(tokenizer, "{input}\n", "{target}", max_length=length)
    return PromptReader(tokenizer, response=f"{{{parts[0]}}}", max_length=length)
