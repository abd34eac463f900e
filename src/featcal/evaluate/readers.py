"""From rows of a dataset to what a model reads. Labels are kept apart: no reader looks at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.images import BROKEN, check_image, image_bytes, open_rgb
from ..errors import InputError, nearest
from ..templates import fill_template

Rows = Sequence[Mapping[str, Any]]
Corruption = Callable[[Tensor], Tensor]
"""From one image (3, H, W) in [0, 1] to a corrupted one."""


def pick(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The first of `columns` that the row has.

    Raises:
        InputError: it has none of them.
    """
    for column in columns:
        if column in row:
            return row[column]
    raise InputError(f"no column '{columns[0]}'{nearest(columns[0], row)}; the data has: {', '.join(row)}")


def fill(template: str, row: Mapping[str, Any]) -> str:
    """A template such as "Is '{sentence}' true?" filled with the row's columns."""
    try:
        return fill_template(template, row)
    except KeyError as error:
        column = str(error.args[0])
        raise InputError(f"no column '{column}'{nearest(column, row)}; the data has: {', '.join(row)}") from None


def rgb(image: Any) -> Any:
    """An 8-bit RGB picture from a PIL image, or from a stored one ({"path": ..., "bytes": ...}).

    Raises:
        InputError: there is no such file, or it cannot be decoded.
    """
    if not isinstance(image, dict):
        return image.convert("RGB")
    try:
        return open_rgb(image_bytes(image))
    except BROKEN as error:
        raise InputError(f"{image['path'] or 'an image'}: {check_image(image) or error}") from error


@dataclass(frozen=True)
class ImageReader:
    """Images by the checkpoint's own processor: RGB, resize, crop, scale to [0, 1], normalise.

    A corruption acts on the cropped image in [0, 1], before normalisation.
    """

    processor: Any
    columns: tuple[str, ...] = ("image", "img")
    corrupt: Corruption | None = None

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        """`pixel_values` (rows, 3, H, W)."""
        images = [rgb(pick(row, self.columns)) for row in rows]
        if self.corrupt is None:
            return {"pixel_values": self.processor(images=images, return_tensors="pt")["pixel_values"]}
        plain = self.processor(images=images, return_tensors="pt", do_normalize=False)["pixel_values"]
        spoilt = torch.stack([self.corrupt(image) for image in plain])
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.processor.image_mean, self.processor.image_std))
        return {"pixel_values": (spoilt - mean) / std}


@dataclass(frozen=True)
class TextReader:
    """Texts, or pairs of texts, for an encoder: `template` (with {column}s) or the named columns."""

    tokenizer: Any
    columns: tuple[str, ...] = ("text",)
    template: str | None = None
    max_length: int = 512
    padding: Literal["longest", "max_length"] = "longest"

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` (rows, tokens) and whatever else the tokenizer makes."""
        if self.template is not None:
            parts = [[fill(self.template, row) for row in rows]]
        else:
            parts = [[str(pick(row, [column])) for row in rows] for column in self.columns]
        tokens = self.tokenizer(
            *parts, truncation=True, max_length=self.max_length, padding=self.padding, return_tensors="pt"
        )
        return dict(tokens)


@dataclass(frozen=True)
class PromptReader:
    """Text for a causal LM: `prompt`, then `response` (templates); or chat messages by the tokenizer's chat template.

    `prompt_if` = (column, template) replaces the prompt in rows where that column is not empty. `counted` marks the
    tokens that a loss counts: those of the response (and its end token) when there is a prompt, else all.
    """

    tokenizer: Any
    prompt: str | None = None
    response: str | None = None
    prompt_if: tuple[str, str] | None = None
    messages: str | None = None
    max_length: int = 512
    chat_template: str | None = None
    """Instead of the tokenizer's own."""

    def encode(self, row: Mapping[str, Any]) -> tuple[list[int], int]:
        """Token ids, and how many of them belong to the prompt."""
        if self.messages is not None:
            return self._chat(pick(row, [self.messages]))[: self.max_length], 0
        assert self.response is not None
        if self.prompt is None:
            return list(self.tokenizer(fill(self.response, row))["input_ids"])[: self.max_length], 0
        template = self.prompt
        if self.prompt_if is not None and row.get(self.prompt_if[0]):
            template = self.prompt_if[1]
        head = list(self.tokenizer(fill(template, row))["input_ids"])
        if head and head[-1] == self.tokenizer.eos_token_id:
            head.pop()  # some tokenizers end every text; the response follows here
        tail = list(self.tokenizer(fill(self.response, row), add_special_tokens=False)["input_ids"])
        ids = [*head, *tail, self.tokenizer.eos_token_id][: self.max_length]
        return ids, min(len(head), len(ids))

    def _chat(self, messages: Any) -> list[int]:
        from jinja2 import TemplateError

        if self.chat_template is None and getattr(self.tokenizer, "chat_template", None) is None:
            raise InputError("the rows are chat messages, but the tokenizer has no chat template; give plain texts")
        try:
            chat = self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, tokenize=True, return_dict=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InputError(f"the chat template refuses a row: {str(error).splitlines()[0]}") from error
        return list(chat["input_ids"])

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, and `counted` (all (rows, tokens), padded on the right)."""
        encoded = [self.encode(row) for row in rows]
        longest = max(len(ids) for ids, _ in encoded)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids_BT = torch.full((len(rows), longest), pad)
        mask_BT, counted_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for i, (ids, prompt) in enumerate(encoded):
            ids_BT[i, : len(ids)] = torch.tensor(ids)
            mask_BT[i, : len(ids)] = 1
            counted_BT[i, prompt : len(ids)] = 1
        return {"input_ids": ids_BT, "attention_mask": mask_BT, "counted": counted_BT}
