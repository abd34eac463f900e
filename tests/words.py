"""A tokenizer of a few words, for pico models."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pico import PAD

_LETTERS = ["1", "2", "3", "4", "5", ".", "0", "Q", ":"]
WORDS = ["yes", "no", "maybe", "the", "cat", "sat", "on", "a", "mat", *_LETTERS, "is", "it", "true", "acceptable"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of `WORDS` as ids 4 and up; every text ends in id 2, as T5's do."""
    vocab = {"<s>": 0, "<pad>": PAD, "</s>": 2, "<unk>": 3} | {word: i + 4 for i, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
