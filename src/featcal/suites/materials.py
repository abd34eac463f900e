"""What a suite is made of, loaded when needed: checkpoints, data, scorers, calibration batches.

Everything comes from the Hub, or from a *mirror*: a folder laid out like it, `models/ORG/NAME` and
`datasets/ORG/NAME[/CONFIG]` (saved by `datasets`). Stand-ins and suites that are built on this machine are mirrors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from ..blocks import inference
from ..data.samples import permutation
from ..data.tables import Table, open_table
from ..errors import InputError, nearest
from ..evaluate import (
    Classification,
    EvalTask,
    Generation,
    Head,
    ImageReader,
    Likelihood,
    OwnHead,
    PromptReader,
    Scorer,
    TableRows,
    TextReader,
    load_centroid_head,
    zero_shot_head,
)
from ..evaluate.checkpoints import load_model
from ..evaluate.classes import class_names
from ..evaluate.readers import Corruption
from ..hub import locate
from ..network import pick_device
from ..recipe import DataSpec
from .schema import Centroid, Data, PublishedStudies, Suite, Task, ZeroShot

logger = logging.getLogger("featcal")


@dataclass(frozen=True)
class Mirror:
    """A local copy of what a suite needs from the Hub. Without a root, everything is the Hub's."""

    root: Path | None = None

    def model(self, ref: str) -> str:
        """Where the checkpoint `ref` is."""
        return self._find("models", ref, ref)

    def dataset(self, data: Data) -> DataSpec:
        """Where the data set is, without a split."""
        name = f"{data.id}/{data.config}" if data.config else data.id
        source = self._find("datasets", name, data.id)
        config = data.config if source == data.id else None
        return DataSpec.model_validate({"source": source, "config": config, "revision": data.revision})

    def file(self, name: str) -> Path:
        """Any other file, relative to the root."""
        return (self.root or Path.cwd()) / name

    def _find(self, kind: str, name: str, ref: str) -> str:
        if self.root is None:
            return ref
        path = self.root / kind / name
        if not path.is_dir():
            raise InputError(f"the mirror {self.root} has no {kind[:-1]} '{name}' ({path} does not exist)")
        return str(path)


@dataclass
class Materials:
    """The models and data of one suite. Checkpoints stay in memory, on the CPU, once loaded."""

    suite: Suite
    mirror: Mirror = field(default_factory=Mirror)
    device: str = "auto"
    _experts: dict[str, nn.Module] = field(default_factory=dict)
    _scorers: dict[str, Scorer] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------ models

    @cached_property
    def base(self) -> nn.Module:
        """The common base."""
        return self.load(self.suite.base)

    def expert(self, task: str) -> nn.Module:
        """A task's expert; adapters (LoRA) are folded into the base."""
        if task not in self._experts:
            ref = self.suite.tasks[task].expert
            assert ref is not None
            self._experts[task] = self.load(ref)
        return self._experts[task]

    @property
    def experts(self) -> dict[str, nn.Module]:
        """All experts, in the order of the tasks."""
        return {task: self.expert(task) for task in self.suite.tasks}

    def load(self, ref: str | Path) -> nn.Module:
        """A checkpoint of the suite's model class: a folder, a Hub id, or an adapter of the base."""
        place = ref if isinstance(ref, Path) else self.mirror.model(ref)
        return load_model(place, base=self.mirror.model(self.suite.base), kind=model_class(self.suite))

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(locate(self.mirror.model(self.suite.base)))

    @cached_property
    def image_processor(self) -> Any:
        """The base's image processor, on PIL (as in the published runs; torchvision resizes a little differently)."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(locate(self.mirror.model(self.suite.base)), backend="pil")

    @cached_property
    def _clip(self) -> nn.Module:
        """The whole base CLIP: its text tower and projections make the heads."""
        from transformers import CLIPModel

        model: nn.Module = CLIPModel.from_pretrained(locate(self.mirror.model(self.suite.base)))
        return model.eval()

    # -------------------------------------------------------------------------------------------------- data

    def table(self, task: str, split: str) -> Table:
        """One split of a task's data set. A size other than the published one is said aloud."""
        data = self.suite.tasks[task].data
        table = open_table(self.mirror.dataset(data).model_copy(update={"split": split}))
        published = data.rows.get(split)
        if published is not None and published != table.size and self.mirror.root is None:
            logger.warning(
                "%s: split '%s' has %d rows, the published numbers are of %d", task, split, table.size, published
            )
        return table

    def rows(self, task: str, *, test: bool) -> Any:
        """Rows to score (`test`) or to calibrate on: two splits, or two disjoint parts of one (`holdout`)."""
        data = self.suite.tasks[task].data
        if data.holdout is None:
            return TableRows(self.table(task, data.test if test else data.train))
        rows = TableRows(self.table(task, data.train))
        if data.holdout >= len(rows):
            raise InputError(f"task '{task}': holdout {data.holdout} leaves nothing of {len(rows)} rows")
        order = list(permutation(len(rows), 0, task))  # one choice for all seeds: test rows never calibrate
        chosen = order[-data.holdout :] if test else order[: -data.holdout]
        return Subset(rows, sorted(chosen))  # type: ignore[arg-type]

    def eval_task(self, task: str) -> EvalTask:
        """The task's rows and scorer."""
        return EvalTask(task, self.scorer(task), self.rows(task, test=True))

    def scorer(self, task: str) -> Scorer:
        """How the task is put and scored."""
        if task not in self._scorers:
            self._scorers[task] = self._make_scorer(task, self.suite.tasks[task])
        return self._scorers[task]

    def _make_scorer(self, name: str, task: Task) -> Scorer:
        how = self.suite.evaluation
        if task.metric == "accuracy":
            return Classification(self.reader(name), self._head(task), label=task.data.label)
        if task.metric == "perplexity":
            reader = self.reader(name)
            assert isinstance(reader, PromptReader)
            return Likelihood(reader)
        assert task.metric is not None
        return Generation(
            self.reader(name),
            self.tokenizer,
            metric=task.metric,
            words=task.words,
            label=task.data.label,
            max_length=how.max_length,
            attention_mask=how.attention_mask,
        )

    def _head(self, task: Task) -> Head:
        if isinstance(task.head, ZeroShot):
            assert task.head.classes is not None
            names, templates = class_names(task.head.classes)
            return zero_shot_head(self._clip, self.tokenizer, names, templates)
        if isinstance(task.head, Centroid):
            return load_centroid_head(self.mirror.file(task.head.file))
        return OwnHead()

    def reader(self, name: str, corrupt: Corruption | None = None, max_length: int | None = None) -> Any:
        """From rows to the model's inputs; texts are cut at `max_length` tokens."""
        task, how = self.suite.tasks[name], self.suite.evaluation
        if self.suite.family == "image":
            return ImageReader(self.image_processor, task.data.image or ("image", "img"), corrupt)
        if self.suite.family == "causal":
            other = (task.prompt_if.column, task.prompt_if.text) if task.prompt_if else None
            response = task.response or "{%s}" % (task.data.text[0] if task.data.text else "text")
            return PromptReader(self.tokenizer, task.prompt, response, other, max_length=max_length or how.max_length)
        length = max_length or (how.input_length if self.suite.family == "text-to-text" else how.max_length)
        columns = task.data.text or ("text",)
        return TextReader(self.tokenizer, columns, task.prompt, length, how.padding)

    # ------------------------------------------------------------------------------------------- calibration

    def calibration(
        self, task: str, samples: int | None = None, seed: int = 42, corrupt: Corruption | None = None
    ) -> list[dict[str, Tensor]]:
        """Batches of the first `samples` rows of a seeded permutation of the task's training rows; no label is read.

        Nested: with the same seed, fewer samples are the first of more.
        """
        fed = self.suite.calibration
        rows = self.rows(task, test=False)
        order = list(permutation(len(rows), seed, task))[: fed.samples if samples is None else samples]
        reader = self.reader(task, corrupt, fed.max_length)
        batches = []
        for start in range(0, len(order), fed.batch_size):
            part = [rows[i] for i in order[start : start + fed.batch_size]]
            batch = {name: value for name, value in reader(part).items() if name != "counted"}
            if self.suite.family == "text-to-text":
                batch |= self._decoder_inputs(task, part, batch)
            batches.append(batch)
        return batches

    def unlabelled_test(self, task: str, batch_size: int = 16) -> Iterator[dict[str, Tensor]]:
        """Batches of the task's test inputs in a seeded order, no labels: what test-time methods (AdaMerging) learn on.

        Text-to-text decoders read one token of id 1, as in the published runs of AdaMerging on FLAN-T5.
        """
        rows, reader = self.rows(task, test=True), self.reader(task)
        order = list(permutation(len(rows), 42, task))
        for start in range(0, len(order), batch_size):
            part = [rows[i] for i in order[start : start + batch_size]]
            batch = {name: value for name, value in reader(part).items() if name != "counted"}
            if self.suite.family == "text-to-text":
                batch["decoder_input_ids"] = torch.ones(len(part), 1, dtype=torch.long)
            yield batch

    def _decoder_inputs(self, task: str, rows: list[Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the decoder reads: the start token, then (unless that is all) an answer but for its end token."""
        scorer, kind = self.scorer(task), self.suite.calibration.decoder
        assert isinstance(scorer, Generation)
        expert = self.expert(task)
        start = int(expert.config.decoder_start_token_id)  # type: ignore[union-attr,arg-type]
        if kind == "start":
            return {"decoder_input_ids": torch.full((len(rows), 1), start)}
        if kind == "target":
            spelt = self.tokenizer([scorer.answer(row) for row in rows], padding=True, return_tensors="pt")
            first = torch.full((len(rows), 1), start)
            return shift(torch.cat([first, spelt["input_ids"]], 1), self.tokenizer.eos_token_id)
        device = pick_device(self.device)
        with inference(expert.to(device)):
            answers = scorer.generate(expert, batch, masked=True).cpu()
        return shift(answers, self.tokenizer.eos_token_id)

    def heads(self) -> dict[str, Head]:
        """The classification heads by task; empty for other kinds of task."""
        scorers = {task: self.scorer(task) for task in self.suite.tasks}
        return {task: one.head for task, one in scorers.items() if isinstance(one, Classification)}

    def scores(self) -> dict[str, Callable[[nn.Module, Any], Tensor]]:
        """The heads that live outside the models, for `featcal.calibrate(scores=...)`; empty when there are none."""
        return {task: head for task, head in self.heads().items() if not isinstance(head, OwnHead)}


def shift(answer_BT: Tensor, end: int) -> dict[str, Tensor]:
    """Decoder inputs from answers that begin with the start token: without the end token and what follows it."""
    ids_BT = answer_BT[:, :-1]
    mask_BT = ((ids_BT == end).cumsum(1) == 0).long()
    return {"decoder_input_ids": ids_BT, "decoder_attention_mask": mask_BT}


def model_class(suite: Suite) -> Any:
    """The transformers class that loads the suite's checkpoints."""
    import transformers

    heads = {type(task.head) for task in suite.tasks.values()}
    if suite.family == "image":
        return transformers.CLIPVisionModel if ZeroShot in heads else transformers.AutoModelForImageClassification
    if suite.family == "text":
        return transformers.AutoModel if Centroid in heads else transformers.AutoModelForSequenceClassification
    if suite.family == "text-to-text":
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def pick_tasks(suite: Suite, tasks: list[str] | None) -> Suite:
    """The suite reduced to some of its tasks. Of what is published, scores of models that were not merged still apply.

    Raises:
        InputError: a task that the suite does not have.
    """
    if tasks is None:
        return suite
    if not tasks:
        raise InputError(f"--tasks: name at least one of {', '.join(suite.tasks)}")
    for task in tasks:
        if task not in suite.tasks:
            raise InputError(f"suite '{suite.name}' has no task '{task}'{nearest(task, suite.tasks)}")
    kept = {name: task for name, task in suite.tasks.items() if name in tasks}
    if len(kept) == len(suite.tasks):
        return suite
    names = suite.columns
    published = []
    for row in suite.published:
        unmerged = row.row in ("pre-trained", "experts", *suite.references)
        if row.scores and unmerged and not suite.benchmarks:
            scores = tuple(v for name, v in zip(names, row.scores, strict=True) if name in kept)
            published.append(row.model_copy(update={"scores": scores, "average": None}))
    return suite.model_copy(update={"tasks": kept, "published": tuple(published), "studies": PublishedStudies()})
