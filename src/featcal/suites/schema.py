"""Benchmark suites as YAML: the strict schema of a file, and a suite with all of its defaults filled in.

One file may hold several suites that differ in size (checkpoints) and list (tasks): `clip-vit-{size}-{list}`. Its
published numbers are in a file of their own beside it (`clip-vit.published.yaml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import nearest
from ..recipe import Text
from ..templates import template_columns

Family = Literal["image", "text", "text-to-text", "causal"]
MetricName = Literal["accuracy", "exact_match", "spearman", "perplexity"]

METRICS: dict[Family, tuple[MetricName, ...]] = {
    "image": ("accuracy",),
    "text": ("accuracy",),
    "text-to-text": ("exact_match", "spearman"),
    "causal": ("perplexity",),
}
"""What the tasks of a family can be scored by; the first is the default."""

FIXED_ROWS = ("pre-trained", "experts")
"""Rows of every table that are no upstream's."""


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def only(pattern: str, *fields: str) -> None:
    """Refuse a pattern with fields other than these."""
    for name in template_columns(pattern):
        if name not in fields:
            raise ValueError(f"'{{{name}}}' stands for nothing here; known: {', '.join(f'{{{f}}}' for f in fields)}")


def changed(part: Any, changes: Mapping[str, Any], where: str) -> Any:
    """A part of a suite with a variant's changes.

    Raises:
        ValueError: an unknown key or a bad value, in one sentence.
    """
    kind = type(part)
    try:
        return kind.model_validate(part.model_dump() | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        known = kind.model_fields
        what = f"unknown key{nearest(key, known)}" if key not in known else first["msg"].lower()
        raise ValueError(f"{where}: {key}: {what}") from None


class Data(Strict):
    """A data set of the Hub (or a folder saved by `datasets`, or a file) and how to read it."""

    id: Text
    config: Text | None = None
    revision: Text | None = None
    train: Text = Field(default="train", description="split that calibration reads")
    test: Text = Field(default="test", description="split that is scored")
    holdout: int | None = Field(default=None, ge=1, description="score so many rows of `train`, kept apart")
    image: tuple[Text, ...] = Field(default=(), description="columns that may hold the image, best first")
    text: tuple[Text, ...] = Field(default=(), description="columns of text; two make a pair")
    label: tuple[Text, ...] = Field(default=("label",), description="columns that may hold the label, best first")
    rows: dict[str, int] = Field(default={}, description="sizes of the splits behind the published numbers")


class ZeroShot(Strict):
    """CLIP text embeddings of class names; `classes` is a list of `classes.yaml`, by default the task's own."""

    kind: Literal["zero-shot"]
    classes: Text | None = None


class Centroid(Strict):
    """A fixed head in a safetensors file: `centroids` (C, D), `logit_scale`; mean pooling."""

    kind: Literal["centroid"]
    file: Text


class Own(Strict):
    """The checkpoint's own classifier."""

    kind: Literal["classifier"]


Head = Annotated[ZeroShot | Centroid | Own, Field(discriminator="kind")]


class PromptIf(Strict):
    """Another prompt for rows in which `column` is not empty."""

    column: Text
    text: Text

    @model_validator(mode="after")
    def _plain_template(self) -> PromptIf:
        template_columns(self.text)
        return self


class Task(Strict):
    """One task: its data, how it is put to the model, and how the answer is scored."""

    data: Data
    expert: Text | None = Field(default=None, description="checkpoint; by default the size's `expert` pattern")
    metric: MetricName | None = None
    head: Head | None = None
    prompt: Text | None = Field(default=None, description="template with {column}s: the input, or a causal LM's prompt")
    prompt_if: PromptIf | None = None
    response: Text | None = Field(default=None, description="template of a causal LM's response (or of its whole text)")
    words: tuple[Text, ...] | None = Field(default=None, description="text-to-text answers by label")

    @model_validator(mode="after")
    def _plain_templates(self) -> Task:
        for template in (self.prompt, self.response):
            template_columns(template or "")
        return self


class Evaluation(Strict):
    """How scores are measured."""

    batch_size: int = Field(default=32, ge=1)
    attention_mask: bool = Field(default=True, description="text-to-text: give `generate` the mask, not only input ids")
    max_length: int = Field(default=512, ge=1, description="tokens: of an answer (text-to-text), else of a text")
    input_length: int = Field(default=512, ge=1, description="text-to-text: tokens of an input")
    padding: Literal["longest", "max_length"] = "longest"


class CalibrationData(Strict):
    """How calibration samples are fed; settings of the method itself are in `preset` and `--set`."""

    samples: int = Field(default=256, ge=1)
    batch_size: int = Field(default=16, ge=1)
    max_length: int = Field(default=512, ge=1)
    decoder: Literal["expert", "start", "target"] = Field(
        default="expert",
        description="text-to-text: the expert's answer, the start token alone, or the label's word",
    )


class Benchmark(Strict):
    """A task of lm-eval (see `featcal.evaluate.HarnessTask`)."""

    task: Text
    metric: Text
    shots: int | None = None
    chat: bool = False
    runs_code: bool = False


class Size(Strict):
    """Checkpoints of one model size; `{task}` in `expert` is the task's name."""

    base: Text
    expert: Text
    preset: Text | None = None

    @model_validator(mode="after")
    def _plain_pattern(self) -> Size:
        only(self.expert, "task")
        return self


class Variant(Strict):
    """What one variant of some suites changes."""

    suites: tuple[Text, ...] | None = Field(default=None, description="suites that have it; by default all of the file")
    preset: Text | None = None
    expert: Text | None = None
    evaluation: dict[str, Any] = {}
    calibration: dict[str, Any] = {}
    data: dict[str, dict[str, Any]] = Field(default={}, description="by task")

    @model_validator(mode="after")
    def _plain_pattern(self) -> Variant:
        only(self.expert or "", "task")
        return self


class Published(Strict):
    """A row of a published table, in percent."""

    row: Text
    source: Text
    average: float | None = None
    scores: tuple[float, ...] | None = Field(default=None, description="in the order of the suite's tasks")
    variant: Text | None = None
    note: Text | None = None


class Curve(Strict):
    """A published sample-efficiency study: averages by method over `n` samples per task."""

    n: tuple[int, ...]
    surgery: tuple[float, ...]
    probsurgery: tuple[float, ...]
    featcal: tuple[float, ...]


class Cost(Strict):
    """A published row of the cost table."""

    seconds: float
    watt_hours: float
    rss_gib: float


class PublishedStudies(Strict):
    """Published results of the studies."""

    samples: Curve | None = None
    corruption: dict[str, float] = {}
    cost: dict[str, Cost] = {}


class PublishedFile(Strict):
    """`NAME.published.yaml`."""

    sources: dict[str, Text]
    published: dict[str, tuple[Published, ...]] = {}
    studies: dict[str, PublishedStudies] = {}


class SuiteFile(Strict):
    """`NAME.yaml`."""

    name: Text = Field(description="name of a suite; with {size} and {list} of many")
    title: Text
    family: Family
    preset: Text | None = None
    metric: MetricName | None = Field(default=None, description="default of the tasks")
    head: Head | None = Field(default=None, description="default of the tasks")
    data_defaults: dict[str, Any] = Field(default={}, description="defaults of the tasks' `data`")
    build: Text | None = Field(default=None, description="builder that makes checkpoints and data on this machine")
    evaluation: Evaluation = Evaluation()
    calibration: CalibrationData = CalibrationData()
    sizes: dict[str, Size] = Field(min_length=1)
    lists: dict[str, tuple[Text, ...]] = {}
    tasks: dict[str, Task] = Field(min_length=1)
    upstreams: dict[str, dict[str, Any]] = Field(min_length=1)
    benchmarks: dict[str, Benchmark] = {}
    references: dict[str, dict[str, Text]] = {}
    variants: dict[str, Variant] = {}

    @model_validator(mode="before")
    @classmethod
    def _fill_data(cls, value: Any) -> Any:
        """`data_defaults` into every task's data."""
        if not isinstance(value, Mapping) or not isinstance(value.get("data_defaults"), Mapping):
            return value
        tasks = value.get("tasks")
        if not isinstance(tasks, Mapping):
            return value
        filled = {}
        for name, task in tasks.items():
            if isinstance(task, Mapping) and isinstance(task.get("data"), Mapping):
                task = {**task, "data": {**value["data_defaults"], **task["data"]}}
            filled[name] = task
        return {**value, "tasks": filled}

    @model_validator(mode="after")
    def _known_tasks(self) -> SuiteFile:
        for name, members in self.lists.items():
            for task in members:
                if task not in self.tasks:
                    raise ValueError(f"list '{name}' names the task '{task}', which is not defined")
        for name, variant in self.variants.items():
            unknown = [task for task in variant.data if task not in self.tasks]
            if unknown:
                raise ValueError(f"variant '{name}' changes the data of '{unknown[0]}', which is not a task")
        return self

    @model_validator(mode="after")
    def _possible(self) -> SuiteFile:
        for pattern in (self.name, self.title):
            only(pattern, "size", "list")
        for name, task in self.tasks.items():
            metric = task.metric or self.metric or METRICS[self.family][0]
            if metric not in METRICS[self.family]:
                known = ", ".join(METRICS[self.family])
                raise ValueError(f"task '{name}': a {self.family} task is scored by {known}, not by {metric}")
        for name, variant in self.variants.items():
            changed(self.evaluation, variant.evaluation, f"variant '{name}', evaluation")
            changed(self.calibration, variant.calibration, f"variant '{name}', calibration")
            for task_name, changes in variant.data.items():
                changed(self.tasks[task_name].data, changes, f"variant '{name}', data of '{task_name}'")
        return self

    @model_validator(mode="after")
    def _distinct_rows(self) -> SuiteFile:
        for name, spec in self.upstreams.items():
            if "method" not in spec:
                raise ValueError(f"upstream '{name}' names no method")
        references = {name for own in self.references.values() for name in own}
        for name in (*self.upstreams, *references):
            if name in FIXED_ROWS or (name in self.upstreams and name in references):
                raise ValueError(f"'{name}' is the name of two rows of the table")
        return self


class Suite(Strict):
    """One suite, all defaults filled in."""

    name: str
    title: str
    variant: str | None
    family: Family
    preset: str | None
    base: str
    tasks: dict[str, Task]
    """With `expert`, `metric` and (for classification) `head` set."""
    upstreams: dict[str, dict[str, Any]]
    evaluation: Evaluation
    calibration: CalibrationData
    benchmarks: dict[str, Benchmark]
    references: dict[str, str]
    build: str | None
    published: tuple[Published, ...]
    studies: PublishedStudies
    sources: dict[str, str]

    def published_row(self, row: str) -> Published | None:
        """The published row to compare a result with: one of the same variant first, never one of another variant."""
        rows = [one for one in self.published if one.row == row]
        for wanted in dict.fromkeys((self.variant, None)):
            for one in rows:
                if one.variant == wanted:
                    return one
        return None

    def published_scores(self, row: str) -> dict[str, float]:
        """Published score by task (of a row that has them), `average` included."""
        one = self.published_row(row)
        if one is None:
            return {}
        named = dict(zip(self.columns, one.scores, strict=True)) if one.scores else {}
        return named if one.average is None else {**named, "average": one.average}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the scores that make the average: benchmarks where there are some, else tasks."""
        return tuple(self.benchmarks or self.tasks)
