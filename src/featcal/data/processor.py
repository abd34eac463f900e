"""What a model reads, and whose tokenizer or image processor turns samples into it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError
from ..hub import locate, split_adapter

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger("featcal")

Kind = Literal["text", "seq2seq", "image", "image-text"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ModelInput:
    """What a model's forward takes.

    Attributes:
        kind: text, seq2seq (encoder text and decoder text), image, or image-text (both towers of a CLIP).
        max_positions: the longest token sequence that its position embeddings allow, if they set a limit.
        decoder_start: the token id a seq2seq decoder starts with.
        tokens_per_image: patches and class token of one image, or 0 if the configuration does not tell.
        width: the hidden width, below which that many tokens make singular moments.
    """

    kind: Kind
    max_positions: int | None = None
    decoder_start: int | None = None
    tokens_per_image: int = 0
    width: int = 0

    @classmethod
    def from_config(cls, config: PretrainedConfig, generation: Any = None) -> ModelInput:
        """Read off a transformers configuration, by its attributes and never by a table of models.

        `generation` is the model's generation configuration, where newer checkpoints keep the decoder's start token.
        """
        vision = getattr(config, "vision_config", None)
        text = getattr(config, "text_config", None) or config
        # Models that generate text about images name the token that stands for one; CLIP-like ones have none.
        generates = any(getattr(config, f"image_token_{suffix}", None) is not None for suffix in ("id", "index"))
        kind: Kind = "text"
        if vision is not None and text is not config and not generates:
            kind = "image-text"
        elif getattr(config, "is_encoder_decoder", False):
            kind = "seq2seq"
        elif not getattr(text, "vocab_size", None) and _first(config, "image_size", "num_channels"):
            kind = "image"
        positions = getattr(text, "max_position_embeddings", None) if kind != "image" else None
        if positions and "roberta" in str(getattr(text, "model_type", "")):
            positions -= (getattr(text, "pad_token_id", None) or 0) + 1  # their positions start after the pad id
        start = _first(config, "decoder_start_token_id")
        if start is None:
            start = _first(generation, "decoder_start_token_id")
        if start is None:
            start = _first(config, "bos_token_id", "pad_token_id")
        return cls(
            kind=kind,
            max_positions=positions,
            decoder_start=start if kind == "seq2seq" else None,
            tokens_per_image=_tokens_per_image(vision or config) if kind in ("image", "image-text") else 0,
            width=_first(vision or text if kind.startswith("image") else text, "hidden_size", "d_model") or 0,
        )


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that is set (0 is)."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _tokens_per_image(config: Any) -> int:
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    return (size // patch) ** 2 + 1 if isinstance(size, int) and isinstance(patch, int) else 0


@dataclass(frozen=True)
class Processor:
    """A tokenizer, an image processor, or both, and whose they are ("merged", "base", "expert 'math'").

    The tokenizer is used as it was loaded: nothing is ever set on it, and it is never saved.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    image_processor: BaseImageProcessor | None = None
    chat_template: str | None = None
    origins: tuple[str, ...] = ()


def find_processor(
    reads: ModelInput,
    merged: str | Path | None,
    base: str | Path | None,
    experts: Mapping[str, str | Path],
    *,
    override: str | Path | None = None,
    parts: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> Processor:
    """The tokenizer and / or image processor of the merged model, else of the base, else of an expert.

    Which one was used is logged at INFO, and as a warning when it is not the merged model's. A chat template that the
    tokenizer's folder lacks is looked for in the same order.

    Args:
        reads: what the model takes.
        merged, base, experts: folders or hub references; experts may be ``model+adapter``.
        override: look here and nowhere else.
        parts: the parts of the samples (`Samples.columns`): "messages" makes a chat template worth a search, and
            an image-text model needs a tokenizer only for "text".
        trust_remote_code: allow a processor to run code of its repository.

    Raises:
        InputError: nobody has one, or the first one found cannot be loaded; says which.
    """
    sources = _sources(merged, base, experts) if override is None else [("given", str(override))]
    wanted = set(parts) if parts is not None else {"image"} if reads.kind in ("image", "image-text") else {"text"}
    tokenizer = image_processor = template = None
    origins = []
    if wanted - {"image"}:
        origin, folder = _first_with(sources, _TOKENIZER_FILES, "tokenizer")
        tokenizer = _load_tokenizer(folder, trust_remote_code)
        origins.append(origin)
        _announce("tokenizer", origin, folder)
        template = template_of(tokenizer)
        if "messages" in wanted and template is None:
            template = _other_template(sources, folder, trust_remote_code)
    if "image" in wanted:
        origin, folder = _first_with(sources, _IMAGE_FILES, "image processor")
        image_processor = _load_image_processor(folder, trust_remote_code)
        origins.append(origin)
        _announce("image processor", origin, folder)
    return Processor(tokenizer, image_processor, template, tuple(origins))


def _sources(
    merged: str | Path | None, base: str | Path | None, experts: Mapping[str, str | Path]
) -> list[tuple[str, str]]:
    named = [("merged", merged), ("base", base), *((f"expert '{name}'", ref) for name, ref in experts.items())]
    halves = [(name, split_adapter(str(ref))) for name, ref in named if ref is not None]
    # An adapter's own tokenizer is the one it was trained with.
    return [(name, part) for name, (model, adapter) in halves for part in (adapter, model) if part]


def _folder(ref: str) -> Path:
    path = locate(ref)
    return path if path.is_dir() else path.parent


def _has(folder: Path, files: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in files)


def _first_with(sources: Sequence[tuple[str, str]], files: Sequence[str], what: str) -> tuple[str, Path]:
    # Checked by file: without them AutoTokenizer invents one (a T5 configuration alone gives 104 tokens).
    for origin, ref in sources:
        folder = _folder(ref)
        if _has(folder, files):
            return origin, folder
    looked = ", ".join(ref for _, ref in sources) or "no folder"
    raise InputError(f"no {what} found in {looked}; copy its files into the merged folder, or name a folder with them")


def _announce(what: str, origin: str, folder: Path) -> None:
    level = logging.INFO if origin in ("merged", "given") else logging.WARNING
    logger.log(level, "%s: from %s (%s)", what, origin, folder)


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, folder, "tokenizer", trust_remote_code)


def _load_image_processor(folder: Path, trust_remote_code: bool) -> BaseImageProcessor:
    from transformers import AutoImageProcessor

    return _loaded(AutoImageProcessor, folder, "image processor", trust_remote_code)


def _loaded(auto: Any, folder: Path, what: str, trust_remote_code: bool) -> Any:
    try:
        return auto.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises bare Exceptions for files it does not understand.
        if type(error) is not Exception and not isinstance(error, _UNLOADABLE):
            raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error):
            text = "it runs code of its own, which needs --trust-remote-code (read that code first)"
        raise InputError(f"the {what} in {folder} cannot be loaded: {text}") from error


def _other_template(sources: Sequence[tuple[str, str]], own: Path, trust_remote_code: bool) -> str | None:
    """The first chat template of another folder's tokenizer."""
    for origin, ref in sources:
        folder = _folder(ref)
        if folder != own and _has(folder, _TOKENIZER_FILES):
            template = template_of(_load_tokenizer(folder, trust_remote_code))
            if template is not None:
                logger.warning("chat template: from %s (%s)", origin, folder)
                return template
    return None


def template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's chat template; of several, the one called "default"."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template
