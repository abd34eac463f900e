"""From samples to batches: tokenised, grouped by length, padded as little as possible, always with a mask.

Rows of like length share a batch and are padded on the right to the longest of them, whatever side the tokenizer
prefers: the tokens of a causal model then sit where they would without padding. Without a pad token only rows of
equal length share a batch. The order is a function of the samples alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from .images import image_bytes, open_rgb
from .processor import ModelInput, Processor, template_of
from .samples import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("featcal")

Batch = dict[str, Tensor]
_MAX_CHARS_PER_TOKEN = 1000  # no tokenizer has longer tokens; keeps a 100 MB line from being tokenised whole


@dataclass(frozen=True)
class Batches:
    """Model-ready batches of one task.

    Attributes:
        batches: keyword arguments of the model's forward; token tensors are (rows, tokens) int64.
        order: for every batch, which of the given rows it holds.
        tokens: real tokens that the model (its encoder, for seq2seq) reads; patches and class token for images.
        decoder_tokens: real tokens that a seq2seq decoder reads.
        truncated: rows that were cut at the maximum length.
        blank: rows that gave no token at all and were dropped.
    """

    batches: list[Batch]
    order: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    decoder_tokens: int = 0
    truncated: int = 0
    blank: int = 0

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def warn_if_few(self, task: str, width: int) -> None:
        """Warns when there are fewer tokens than the model is wide: such moments are singular, λ decides."""
        if 0 < self.tokens < width:
            logger.warning(
                "%s: %d tokens, fewer than the model's width %d; give more samples or a larger ridge",
                task,
                self.tokens,
                width,
            )


def make_batches(
    rows: Sequence[Row], processor: Processor, reads: ModelInput, *, batch_size: int, max_length: int
) -> Batches:
    """Tokenise or process `rows` and group them into batches.

    * `text`, `messages` (by the chat template), or `input` and `target` joined by a newline, feed a decoder-only or an
      encoder-only model.
    * seq2seq: `text`, `messages` or `input` feeds the encoder. `target`, when given, feeds the decoder, shifted right
      behind the start token as in training; otherwise the decoder gets the start token alone.
    * `image` feeds a vision model, upright and in RGB.

    Args:
        rows: samples by part, see `load_samples`.
        batch_size: rows per batch, at most.
        max_length: tokens per row, at most; also cut at what the model's positions allow.

    Raises:
        InputError: no chat template, a template that refuses a conversation, rows the model cannot read.
    """
    if not rows:
        return Batches([])
    limit = _length_limit(max_length, processor, reads)
    features: list[dict[str, Any]] = [{} for _ in rows]
    truncated: set[int] = set()
    if any(part != "image" for part in rows[0]):
        truncated = _add_text(features, rows, processor, reads, limit)
    if "image" in rows[0]:
        _add_images(features, rows, processor)
    kept = [index for index, feature in enumerate(features) if feature.get("input_ids", True)]
    if not kept:
        raise InputError(f"the tokenizer makes no token of any of the {len(rows)} samples")
    batches, order = _group(features, kept, processor, batch_size)
    if "input_ids" in features[0]:
        tokens = sum(len(feature["input_ids"]) for feature in features)
    else:
        tokens = len(rows) * reads.tokens_per_image
    decoder_tokens = sum(len(feature.get("decoder_input_ids", ())) for feature in features)
    return Batches(batches, order, tokens, decoder_tokens, len(truncated), len(rows) - len(kept))


def take_batches(data: Iterable[Any], samples: int, task: str = "data") -> list[Any]:
    """Model-ready batches of a Python iterable, unchanged, until `samples` rows are reached (or it ends).

    A batch is a dict of tensors, a tensor, or a tuple or list whose first item is the model's input.

    Raises:
        InputError: not an iterable of such batches, or an empty one.
    """
    if isinstance(data, (str, bytes, Mapping, Tensor)) or not isinstance(data, Iterable):
        raise InputError(f"{task}: expected an iterable of batches (a list or a DataLoader), got {type(data).__name__}")
    taken: list[Any] = []
    rows = 0
    for batch in data:
        first = next(iter(batch.values()), None) if isinstance(batch, Mapping) else batch
        first = first[0] if isinstance(first, (tuple, list)) and first else first
        if not isinstance(first, Tensor) or first.ndim == 0:
            raise InputError(
                f"{task}: batch {len(taken) + 1} is {type(batch).__name__}; "
                "expected a dict of tensors, a tensor, or a tuple whose first item is one"
            )
        taken.append(batch)
        rows += first.shape[0]
        if rows >= samples:
            break
    if not rows:
        raise InputError(f"{task}: the iterable gave no batches (a generator can be read only once)")
    return taken


def check_vocab(batches: Iterable[Mapping[str, Any]], vocab_size: int, name: str) -> None:
    """Refuse token ids that `name`'s embedding table of `vocab_size` rows does not hold.

    Raises:
        InputError: with the largest id and the size of the table.
    """
    ids = [batch[key] for batch in batches for key in ("input_ids", "decoder_input_ids") if key in batch]
    largest = max((int(tensor.max()) for tensor in ids if tensor.numel()), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"the samples hold token id {largest}, but {name} knows only {vocab_size} tokens; "
            "take the tokenizer of the smallest vocabulary, or samples without its added tokens"
        )


# ------------------------------------------------------------------------------------------------------ text


def _length_limit(max_length: int, processor: Processor, reads: ModelInput) -> int:
    if reads.max_positions is None or processor.tokenizer is None:
        return max_length
    # A tokenizer's own limit is only to be trusted where positions do set one (T5's says 512 and has none).
    limit = min(max_length, reads.max_positions, processor.tokenizer.model_max_length)
    if limit < max_length:
        logger.info("max_length: %d instead of %d, the model has no more positions", limit, max_length)
    return limit


def _add_text(
    features: list[dict[str, Any]], rows: Sequence[Row], processor: Processor, reads: ModelInput, limit: int
) -> set[int]:
    """Adds token lists to `features`; returns which rows were cut."""
    tokenizer = processor.tokenizer
    if reads.kind == "image" or tokenizer is None:
        raise InputError(f"the samples hold text ({', '.join(rows[0])}), but the model reads images")
    is_seq2seq = reads.kind == "seq2seq"
    texts = [_source_text(row, processor, is_seq2seq, number) for number, row in enumerate(rows, 1)]
    # A chat template writes the special tokens itself.
    encoded, truncated = _tokenise(tokenizer, texts, limit, special="messages" not in rows[0])
    for feature, tokens in zip(features, encoded, strict=True):
        feature.update(tokens)
    if is_seq2seq:
        targets = [row.get("target") or "" for row in rows]
        decoder, cut = _decoder_ids(tokenizer, targets, reads, limit)
        for feature, ids in zip(features, decoder, strict=True):
            feature |= {"decoder_input_ids": ids, "decoder_attention_mask": [1] * len(ids)}
        truncated |= cut
    return truncated


def _source_text(row: Row, processor: Processor, is_seq2seq: bool, number: int) -> str:
    if "messages" in row:
        return _render(row["messages"], processor, number)
    if "input" not in row:
        return str(row["text"])
    target = row.get("target")
    if is_seq2seq or not target:
        return str(row["input"])
    gap = "" if row["input"][-1:].isspace() else "\n"
    return f"{row['input']}{gap}{target}"


def _render(messages: Sequence[Mapping[str, Any]], processor: Processor, number: int) -> str:
    from jinja2 import TemplateError

    assert processor.tokenizer is not None
    template = processor.chat_template or template_of(processor.tokenizer)
    if template is None:
        raise InputError(
            "the samples are chat messages, but no tokenizer of merged, base or experts has a chat template; "
            "add chat_template.jinja to the merged folder, or give plain `text:`"
        )
    conversation = [dict(message) for message in messages]
    try:
        return str(processor.tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"the chat template refuses sample {number}: {str(error).splitlines()[0]}") from error


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int, *, special: bool, target: bool = False
) -> tuple[list[dict[str, list[int]]], set[int]]:
    """Unpadded tokens of every text, cut to `limit` the tokenizer's own way, and which texts were cut."""
    most = limit * _MAX_CHARS_PER_TOKEN
    given = [text[:most] for text in texts]

    def call(part: list[str], **options: Any) -> list[dict[str, list[int]]]:
        options |= {"text_target" if target else "text": part, "add_special_tokens": special, "verbose": False}
        found = tokenizer(padding=False, **options)
        names = [name for name in ("input_ids", *tokenizer.model_input_names) if name in found]
        rows = [{name: list(found[name][index]) for name in names} for index in range(len(part))]
        return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]

    encoded = call(given, truncation=False)
    cut = [index for index, row in enumerate(encoded) if len(row["input_ids"]) > limit]
    if cut:
        shorter = call([given[index] for index in cut], truncation=True, max_length=limit)
        for index, row in zip(cut, shorter, strict=True):
            encoded[index] = row
    return encoded, set(cut)


def _decoder_ids(
    tokenizer: PreTrainedTokenizerBase, targets: Sequence[str], reads: ModelInput, limit: int
) -> tuple[list[list[int]], set[int]]:
    """The start token, then all but the last token of the target: what the decoder reads in training."""
    if reads.decoder_start is None:
        raise InputError("the model's configuration has no decoder_start_token_id, so its decoder cannot be fed")
    encoded, cut = _tokenise(tokenizer, targets, limit, special=True, target=True)
    ids = [row["input_ids"] if text else [] for text, row in zip(targets, encoded, strict=True)]
    return [[reads.decoder_start, *row[:-1]] for row in ids], cut


# ---------------------------------------------------------------------------------------------------- images


def _add_images(features: list[dict[str, Any]], rows: Sequence[Row], processor: Processor) -> None:
    if processor.image_processor is None:
        raise InputError("the samples are images, but the model reads text")
    for feature, row in zip(features, rows, strict=True):
        image = open_rgb(image_bytes(row["image"]))
        made = processor.image_processor(images=[image], return_tensors="pt")
        feature.update({name: value for name, value in made.items() if isinstance(value, Tensor)})


# -------------------------------------------------------------------------------------------------- grouping


def _group(
    features: Sequence[dict[str, Any]], kept: Sequence[int], processor: Processor, batch_size: int
) -> tuple[list[Batch], list[list[int]]]:
    """Rows of like lengths and equal image sizes, `batch_size` at a time, shortest first."""
    pad = getattr(processor.tokenizer, "pad_token_id", None)

    def shelf(index: int) -> tuple[Any, ...]:
        values = features[index].values()
        lengths = (len(value) for value in values if isinstance(value, list))
        shapes = (tuple(value.shape) for value in values if isinstance(value, Tensor))
        return tuple(length if pad is None else _edge(length) for length in lengths), tuple(shapes)

    def length(index: int) -> tuple[int, ...]:
        return tuple(len(value) for value in features[index].values() if isinstance(value, list))

    shelves: dict[tuple[Any, ...], list[int]] = {}
    for index in sorted(kept, key=lambda index: (length(index), index)):
        shelves.setdefault(shelf(index), []).append(index)
    order = [
        members[start : start + batch_size]
        for _, members in sorted(shelves.items(), key=lambda item: item[0])
        for start in range(0, len(members), batch_size)
    ]
    return [_collate([features[index] for index in members], pad or 0) for members in order], order


def _edge(length: int) -> int:
    """The upper edge of the shelf for this length: steps of 8, growing to an eighth of the length."""
    edge = 8
    while edge < length:
        edge += max(8, edge // 64 * 8)
    return edge


def _collate(features: Sequence[Mapping[str, Any]], pad: int) -> Batch:
    batch: Batch = {}
    for name, first in features[0].items():
        values = [feature[name] for feature in features]
        if isinstance(first, Tensor):
            batch[name] = torch.cat(values)
            continue
        fill = pad if name in ("input_ids", "decoder_input_ids") else 0
        longest = max(len(value) for value in values)
        batch[name] = torch.tensor([value + [fill] * (longest - len(value)) for value in values])
    return batch
