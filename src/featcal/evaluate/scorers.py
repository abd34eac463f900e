"""What a task asks of a model: one scorer per kind of task, the same for every model that is compared.

A scorer turns rows into a `Batch` once, and a (model, batch) into `Predictions`: per row what was decided (compared
between models without labels) and, where the rows have labels, the outcome that a metric is computed from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ..blocks import call_model
from ..errors import InputError
from .heads import Head, OwnHead
from .outcomes import Outcomes
from .readers import PromptReader, Rows, pick

Adapter = Callable[[Tensor], Tensor]
"""A correction of features that a post-merge baseline has learnt for one task."""


@dataclass
class Batch:
    """Rows as tensors. `labels` never reach a model."""

    inputs: dict[str, Tensor]
    labels: list[Any] | None
    rows: int


@dataclass
class Predictions:
    """Per row: what was decided, and the outcome for the metric (None without labels)."""

    choices: list[Any] = field(default_factory=list)
    outcomes: Outcomes | None = None

    def extend(self, other: Predictions) -> None:
        """Append another batch's."""
        first = not self.choices
        self.choices += other.choices
        if first:
            self.outcomes = other.outcomes
        elif self.outcomes is not None and other.outcomes is not None:
            self.outcomes = np.concatenate([self.outcomes, other.outcomes])


class Scorer(Protocol):
    """One task's data format and metric."""

    @property
    def metric(self) -> str: ...

    def collate(self, rows: Rows) -> Batch:
        """Rows of the dataset as a batch."""
        ...

    def predict(self, model: nn.Module, batch: Batch, adapter: Adapter | None = None) -> Predictions:
        """What the model decides on the batch."""
        ...


@dataclass(frozen=True)
class Classification:
    """Top-1 accuracy of a head's scores. `label` names the columns that may hold it, best first; () when there is none.

    Labels may be integers or booleans (PatchCamelyon), in 0 … classes − 1, or the classes' `names`.
    """

    reader: Callable[[Rows], dict[str, Tensor]]
    head: Head = field(default_factory=OwnHead)
    label: tuple[str, ...] = ("label", "fine_label")
    metric: Literal["accuracy"] = "accuracy"
    names: Mapping[str, int] = field(default_factory=dict)

    def collate(self, rows: Rows) -> Batch:
        labels = [class_number(pick(row, self.label), self.names) for row in rows] if self.label else None
        return Batch(self.reader(rows), labels, len(rows))

    def predict(self, model: nn.Module, batch: Batch, adapter: Adapter | None = None) -> Predictions:
        if isinstance(self.head, OwnHead):
            with adapted(model, adapter):
                scores = self.head(model, batch.inputs)
        else:
            features = self.head.features(model, batch.inputs)
            scores = self.head.scores(features if adapter is None else adapter(features))
        refuse_nan(scores)
        choices = scores.float().argmax(-1).tolist()
        if batch.labels is None:
            return Predictions(choices)
        classes = scores.shape[-1]
        wrong = [label for label in batch.labels if not 0 <= label < classes]
        if wrong:
            raise InputError(f"label {wrong[0]} is out of range: the head has classes 0 to {classes - 1}")
        hits = [[float(a == b)] for a, b in zip(choices, batch.labels, strict=True)]
        return Predictions(choices, np.array(hits))


def class_number(label: Any, names: Mapping[str, int] | None = None) -> int:
    """A label as a number: 2, True, "2", 2.0, or one of the classes' names.

    Raises:
        InputError: anything else.
    """
    if isinstance(label, str) and names and label in names:
        return names[label]
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = float("nan")
    if not value.is_integer():
        known = f" of: {', '.join(list(names)[:5])}{', …' if len(names) > 5 else ''}" if names else ""
        raise InputError(f"label {label!r} is neither a class number (0, 1, …) nor a class name{known}")
    return int(value)


def refuse_nan(scores: Tensor) -> None:
    """Scores that are not numbers decide nothing, though argmax would find something.

    Raises:
        InputError: there is one.
    """
    if scores.isnan().any():
        raise InputError("its outputs are NaN; are its weights finite?")


class _RefuseNaN(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        refuse_nan(scores)
        return scores


@dataclass(frozen=True)
class Generation:
    """Greedy text-to-text answers, scored by exact match or by Spearman's ρ of the numbers they spell.

    The model is given `input_ids` only, unless `attention_mask` is set. Before release 5, transformers then built the
    mask itself from the padding token; since 5 it does not, for encoder-decoders, and padding is read like any token.
    The published numbers are from before 5, so `attention_mask` is what reproduces them. `words` are the answers by
    label; without them the label column's own text is the answer (a number with one decimal for `spearman`).
    """

    reader: Callable[[Rows], dict[str, Tensor]]
    tokenizer: Any
    metric: Literal["exact_match", "spearman"] = "exact_match"
    words: tuple[str, ...] | None = None
    label: tuple[str, ...] = ("label",)
    max_length: int = 10
    attention_mask: bool = False

    def collate(self, rows: Rows) -> Batch:
        labels = [self.answer(row) for row in rows] if self.label else None
        return Batch(self.reader(rows), labels, len(rows))

    def answer(self, row: Mapping[str, Any]) -> str:
        """The right answer of a row as the tokenizer spells it."""
        value = pick(row, self.label)
        if self.metric == "spearman":
            try:
                return f"{float(value):.1f}"
            except (TypeError, ValueError):
                raise InputError(f"label {value!r} is not a number, which Spearman's ρ needs") from None
        if self.words is None:
            text = str(value)
        elif 0 <= class_number(value) < len(self.words):
            text = self.words[class_number(value)]
        else:
            raise InputError(f"label {value} has no answer word: there are {len(self.words)}")
        ids = self.tokenizer(text)["input_ids"]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def generate(self, model: nn.Module, inputs: Mapping[str, Tensor], *, masked: bool) -> Tensor:
        """Token ids of the greedy answers, (rows, at most max_length), the start token first."""
        given = ("input_ids", "attention_mask") if masked else ("input_ids",)
        device = next(p.device for p in model.parameters())
        own: Any = getattr(model, "generation_config", None)
        special = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")
        # A fresh configuration: what a checkpoint or a release prefers (beams, lengths, penalties) must not leak in.
        config = GenerationConfig(
            max_length=self.max_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            **{k: getattr(own, k, None) for k in special},
        )
        output: Tensor = model.generate(  # type: ignore[operator]
            **{k: inputs[k].to(device) for k in given},
            generation_config=config,
            logits_processor=LogitsProcessorList([_RefuseNaN()]),
        )
        return output

    def predict(self, model: nn.Module, batch: Batch, adapter: Adapter | None = None) -> Predictions:
        with adapted(model, adapter):
            ids = self.generate(model, batch.inputs, masked=self.attention_mask)
        texts = [str(text) for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        if batch.labels is None:
            return Predictions(texts)
        if self.metric == "exact_match":
            hits = [[float(a == b)] for a, b in zip(texts, batch.labels, strict=True)]
            return Predictions(texts, np.array(hits))
        pairs = [[number(a), float(b)] for a, b in zip(texts, batch.labels, strict=True)]
        return Predictions(texts, np.array(pairs))


def number(text: str) -> float:
    """The number that a text spells; 0 when it spells none, as in the published evaluation."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0


@dataclass(frozen=True)
class Likelihood:
    """A causal LM's perplexity on texts, or on responses given their prompts: exp(mean loss per counted token)."""

    reader: PromptReader
    metric: Literal["perplexity"] = "perplexity"

    def collate(self, rows: Rows) -> Batch:
        return Batch(self.reader(rows), None, len(rows))

    def predict(self, model: nn.Module, batch: Batch, adapter: Adapter | None = None) -> Predictions:
        inputs = {k: v for k, v in batch.inputs.items() if k != "counted"}
        device = next(p.device for p in model.parameters())
        with adapted(model, adapter):
            logits_BTV = call_model(model, inputs, device).logits[:, :-1]
        refuse_nan(logits_BTV)
        target_BT = batch.inputs["input_ids"][:, 1:].to(device)
        counted_BT = batch.inputs["counted"][:, 1:].bool()
        loss_BT = cross_entropy(logits_BTV.float().flatten(0, 1), target_BT.flatten(), reduction="none")
        loss_BT = loss_BT.view(target_BT.shape).cpu().double()
        best_BT = logits_BTV.argmax(-1).cpu()
        choices = [best[keep].numpy() for best, keep in zip(best_BT, counted_BT, strict=True)]
        outcomes = torch.stack([(loss_BT * counted_BT).sum(1), counted_BT.sum(1)], dim=1)
        return Predictions(choices, outcomes.numpy())


@contextlib.contextmanager
def adapted(model: nn.Module, adapter: Adapter | None) -> Iterator[None]:
    """Meanwhile the model's output layer reads `adapter(features)`."""
    if adapter is None:
        yield
        return
    correct: Adapter = adapter
    handle = output_layer(model).register_forward_pre_hook(lambda _, args: (correct(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def output_layer(model: nn.Module) -> nn.Module:
    """The layer between the last features and the logits.

    Raises:
        InputError: the model has none that is known (a language-modelling head, `classifier`, `score`).
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    found = find() if find is not None else None
    for candidate in (found, getattr(model, "classifier", None), getattr(model, "score", None)):
        if isinstance(candidate, nn.Module):
            return candidate
    raise InputError(f"{type(model).__name__} has no output layer that an adapter could act on")
