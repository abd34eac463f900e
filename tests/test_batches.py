"""From samples to batches: whose tokenizer, which tokens, which rows together, and what the errors say."""

# ruff: noqa: E501  (sentences are quoted whole)

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPVisionConfig,
    ConvNextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTImageProcessor,
)

from featcal.data import (
    Batches,
    ModelInput,
    Processor,
    check_vocab,
    find_processor,
    load_samples,
    make_batches,
    take_batches,
)
from featcal.errors import InputError
from featcal.recipe import DataSpec

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<user>", "<bot>"]
WORDS = ["w" + str(number) for number in range(26)]
VOCAB = {token: number for number, token in enumerate(SPECIAL + WORDS)}
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} {% endfor %}</s>"
)
TEXT = ModelInput("text")
SEQ2SEQ = ModelInput("seq2seq", decoder_start=0)
IMAGE = ModelInput("image", tokens_per_image=5, width=16)


def tokenizer(
    bos: bool = False, eos: bool = False, pad: bool = True, template: str | None = None, **options: Any
) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = " ".join([*(["<s>"] if bos else []), "$A", *(["</s>"] if eos else [])])
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", VOCAB["<s>"]), ("</s>", VOCAB["</s>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<bot>"],
        **({"pad_token": "<pad>"} if pad else {}),
        **options,
    )
    fast.chat_template = template
    return fast


def words(count: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + step) % len(WORDS)] for step in range(count))


def ids(text: str) -> list[int]:
    return [VOCAB[token] for token in text.split()]


def batch(
    rows: list[dict[str, Any]],
    processor: Processor | PreTrainedTokenizerFast,
    reads: ModelInput = TEXT,
    size: int = 4,
    length: int = 64,
) -> Batches:
    if isinstance(processor, PreTrainedTokenizerFast):
        processor = Processor(processor, chat_template=processor.chat_template)
    return make_batches(rows, processor, reads, batch_size=size, max_length=length)


def real_rows(batches: Batches, prefix: str = "") -> dict[int, list[int]]:
    """The unpadded ids of every row, by the number of the row."""
    found = {}
    for tensors, order in zip(batches.batches, batches.order, strict=True):
        mask = tensors[f"{prefix}attention_mask"].bool()
        for number, row, keep in zip(order, tensors[f"{prefix}input_ids"], mask, strict=True):
            found[number] = row[keep].tolist()
    return found


# ---------------------------------------------------------------------------------------------------- grouping


def test_rows_of_like_length_share_a_batch_and_nothing_is_lost() -> None:
    lengths = [3, 40, 3, 41, 9, 40, 3, 64, 3, 3, 17]
    rows = [{"text": words(length, start)} for start, length in enumerate(lengths)]
    batches = batch(rows, tokenizer())
    assert real_rows(batches) == {number: ids(row["text"]) for number, row in enumerate(rows)}
    assert batches.order == [[0, 2, 6, 8], [9], [4], [10], [1, 5], [3], [7]]
    assert (batches.tokens, batches.truncated, batches.blank) == (sum(lengths), 0, 0)
    assert all(tensor.dtype == torch.int64 for tensors in batches for tensor in tensors.values())
    assert sorted(batches.batches[0]) == ["attention_mask", "input_ids"]
    assert batch(rows, tokenizer()).order == batches.order


def test_padding_is_little_and_only_on_the_right() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 64, (200,), generator=generator).tolist()
    rows = [{"text": words(length)} for length in lengths]
    batches = batch(rows, tokenizer(padding_side="left"), size=16)
    padded = 0
    for tensors in batches:
        mask = tensors["attention_mask"]
        assert torch.equal(mask, mask.sort(descending=True).values), "real tokens come first"
        assert (tensors["input_ids"][mask == 0] == VOCAB["<pad>"]).all()
        assert int(mask.shape[1] - mask.sum(1).min()) < 8
        padded += int((mask == 0).sum())
    assert 0 < padded < 0.1 * batches.tokens
    assert len(batches) < 25


def test_padding_side_makes_no_difference() -> None:
    rows = [{"text": words(length)} for length in (3, 5, 4, 8)]
    left, right = batch(rows, tokenizer(padding_side="left")), batch(rows, tokenizer(padding_side="right"))
    assert len(left) == 1
    assert all(torch.equal(left.batches[0][name], right.batches[0][name]) for name in right.batches[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padded_rows_give_the_features_of_unpadded_ones(family: str) -> None:
    torch.manual_seed(0)
    if family == "llama":
        config: Any = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        model: Any = LlamaForCausalLM(config).eval()
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()
    rows = [{"text": words(length, length)} for length in (3, 8, 5)]
    [tensors] = batch(rows, tokenizer(padding_side="left"))
    with torch.no_grad():
        together = model(**tensors).logits
        for row, keep, logits in zip(tensors["input_ids"], tensors["attention_mask"].bool(), together, strict=True):
            alone = model(input_ids=row[keep][None]).logits[0]
            torch.testing.assert_close(logits[keep], alone, rtol=1e-5, atol=1e-6)


def test_without_a_pad_token_only_equal_lengths_share_a_batch(tmp_path: Path) -> None:
    bare = tokenizer(pad=False, eos=True)
    bare.save_pretrained(tmp_path / "before")
    rows = [{"text": words(length)} for length in (3, 4, 3, 5, 4, 3)]
    batches = batch(rows, bare)
    assert batches.order == [[0, 2, 5], [1, 4], [3]]
    assert all(bool(tensors["attention_mask"].all()) for tensors in batches)
    assert bare.pad_token is None
    bare.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()


def test_pad_and_end_token_may_be_the_same() -> None:
    same = tokenizer(pad=False, eos=True)
    same.pad_token = "</s>"
    [tensors] = batch([{"text": words(2)}, {"text": words(4)}], same)
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert tensors["input_ids"][0].tolist() == [*ids(words(2)), 3, 3, 3]


def test_rows_without_tokens_are_dropped_and_counted() -> None:
    silent = tokenizer()
    silent.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    rows = [{"text": "---"}, {"text": "w1-w2"}, {"text": "-"}]
    batches = batch(rows, silent)
    assert (batches.order, batches.blank, batches.tokens) == ([[1]], 2, 2)
    with pytest.raises(InputError, match="the tokenizer makes no token of any of the 2 samples"):
        batch(rows[::2], silent)
    assert len(batch([], silent)) == 0


# ------------------------------------------------------------------------------------------------------ lengths


def test_long_rows_are_cut_by_tokens_and_keep_their_special_tokens() -> None:
    rows = [{"text": words(20)}, {"text": words(6)}, {"text": words(7)}]
    batches = batch(rows, tokenizer(bos=True, eos=True), length=8)
    assert real_rows(batches) == {
        0: [2, *ids(words(6)), 3],
        1: [2, *ids(words(6)), 3],
        2: [2, *ids(words(6)), 3],
    }
    assert (batches.truncated, batches.tokens) == (2, 24)
    kept_end = batch(rows[:1], tokenizer(truncation_side="left"), length=4)
    assert real_rows(kept_end) == {0: ids(words(4, 16))}


def test_a_very_long_line_is_not_tokenised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    original = PreTrainedTokenizerFast.__call__

    def call(self: PreTrainedTokenizerFast, text: list[str], **options: Any) -> Any:
        lengths.extend(len(part) for part in text)
        return original(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", call)
    batches = batch([{"text": words(3) + " w1" * 100_000}], tokenizer(), length=8)
    assert real_rows(batches) == {0: [*ids(words(3)), *[VOCAB["w1"]] * 5]}
    assert batches.truncated == 1
    assert max(lengths) == 8000


def test_position_embeddings_limit_the_length(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": words(30)}]
    with caplog.at_level(logging.INFO, logger="featcal"):
        assert batch(rows, tokenizer(), ModelInput("text", max_positions=10)).tokens == 10
        assert batch(rows, tokenizer(model_max_length=7), ModelInput("text", max_positions=10)).tokens == 7
        # Without position embeddings, a tokenizer's habitual limit (T5: 512) says nothing about the model.
        assert batch(rows, tokenizer(model_max_length=7), TEXT).tokens == 30
    assert [record.getMessage() for record in caplog.records] == [
        f"max_length: {limit} instead of 64, the model has no more positions" for limit in (10, 7)
    ]


# -------------------------------------------------------------------------------------------- texts, pairs, chats


def test_special_tokens_are_the_tokenizers_own() -> None:
    assert real_rows(batch([{"text": "w1"}], tokenizer(bos=True))) == {0: [2, VOCAB["w1"]]}
    assert real_rows(batch([{"text": "w1"}], tokenizer())) == {0: [VOCAB["w1"]]}


def test_pairs_are_one_text_for_a_decoder_only_model() -> None:
    lines = tokenizer()
    lines.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    lines.add_tokens(["w1\nw2"])
    rows = [{"input": "w1", "target": "w2"}, {"input": "w1 ", "target": "w2"}, {"input": "w1", "target": None}]
    assert real_rows(batch(rows, lines)) == {0: [len(VOCAB)], 1: ids("w1 w2"), 2: ids("w1")}


CHAT = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


def test_messages_go_through_the_chat_template_without_doubled_special_tokens() -> None:
    batches = batch([{"messages": CHAT}], tokenizer(bos=True, eos=True, template=TEMPLATE.replace("<s>", "<s> ")))
    assert real_rows(batches) == {0: ids("<s> <user> w1 w2 <bot> w3 </s>")}


def test_a_template_of_another_folder_is_used_without_touching_the_tokenizer() -> None:
    plain = tokenizer()
    batches = batch([{"messages": CHAT}], Processor(plain, chat_template="{{ messages[0].content }}"))
    assert real_rows(batches) == {0: ids("w1 w2")}
    assert plain.chat_template is None


def test_several_templates_mean_the_default_one() -> None:
    many = tokenizer()
    many.chat_template = {"default": "{{ messages[1].content }}", "tool_use": "w9"}
    assert real_rows(batch([{"messages": CHAT}], Processor(many))) == {0: ids("w3")}


def test_chat_problems_are_one_sentence() -> None:
    with pytest.raises(InputError) as caught:
        batch([{"messages": CHAT}], tokenizer())
    assert str(caught.value) == (
        "the samples are chat messages, but no tokenizer of merged, base or experts has a chat template; "
        "add chat_template.jinja to the merged folder, or give plain `text:`"
    )
    system = [{"role": "system", "content": "w1"}]
    with pytest.raises(InputError, match="the chat template refuses sample 2: only user and assistant"):
        batch([{"messages": CHAT}, {"messages": system}], tokenizer(template=TEMPLATE))
    with pytest.raises(InputError, match="the chat template refuses sample 1: "):
        batch([{"messages": CHAT}], tokenizer(template="{% if %}"))


# ------------------------------------------------------------------------------------------------------ seq2seq


def test_targets_feed_the_decoder_shifted_right_as_in_training() -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    rows = [
        {"input": words(5), "target": words(3, 7)},
        {"input": words(4), "target": words(1)},
        {"input": words(6), "target": None},
    ]
    [tensors] = batch(rows, tokenizer(eos=True), ModelInput.from_config(config))
    order = [1, 0, 2]
    labels = torch.full((3, 4), -100)
    for place, number in enumerate(order):
        target = rows[number]["target"]
        if target:
            tokens = [*ids(target), VOCAB["</s>"]]
            labels[place, : len(tokens)] = torch.tensor(tokens)
    expected = model._shift_right(labels)
    mask = tensors["decoder_attention_mask"]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert torch.equal(tensors["decoder_input_ids"] * mask, expected * mask)
    assert sorted(tensors) == ["attention_mask", "decoder_attention_mask", "decoder_input_ids", "input_ids"]
    with torch.no_grad():
        assert model(**tensors).logits.shape == (3, 4, 32)


def test_without_targets_the_decoder_reads_its_start_token_alone() -> None:
    batches = batch(
        [{"text": words(3)}, {"text": words(4)}], tokenizer(eos=True), ModelInput("seq2seq", decoder_start=7)
    )
    assert batches.batches[0]["decoder_input_ids"].tolist() == [[7], [7]]
    assert (batches.tokens, batches.decoder_tokens) == (9, 2)


def test_long_targets_are_cut_and_lengths_of_both_sides_count() -> None:
    rows = [{"input": words(3), "target": words(60)}, {"input": words(3), "target": words(2)}]
    batches = batch(rows, tokenizer(eos=True), SEQ2SEQ, length=40)
    assert [tensors["decoder_input_ids"].shape[1] for tensors in batches] == [3, 40]
    assert (batches.truncated, batches.decoder_tokens) == (1, 43)


def test_a_decoder_without_start_token_is_refused() -> None:
    with pytest.raises(InputError, match="has no decoder_start_token_id"):
        batch([{"text": "w1"}], tokenizer(), ModelInput("seq2seq"))


# ------------------------------------------------------------------------------------------------------- images


def write_images(folder: Path) -> None:
    folder.mkdir()
    for name, mode, color in (
        ("a.png", "L", 0),
        ("b.png", "RGBA", (255, 255, 255, 9)),
        ("c.jpg", "CMYK", (0, 0, 0, 0)),
    ):
        Image.new(mode, (20, 12), color).save(folder / name)


def clip_processor() -> Any:
    return CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def test_images_of_every_mode_become_pixel_values(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    samples = load_samples(DataSpec(source=str(tmp_path / "d")), 0, 3, kind="image")
    processor = Processor(image_processor=clip_processor())
    batches = make_batches(samples.rows, processor, IMAGE, batch_size=2, max_length=4)
    assert [tensors["pixel_values"].shape for tensors in batches] == [(2, 3, 8, 8), (1, 3, 8, 8)]
    assert batches.order == [[0, 1], [2]]
    assert (batches.tokens, batches.truncated) == (15, 0)
    pixels = torch.cat([tensors["pixel_values"] for tensors in batches])
    mean, std = torch.tensor(processor.image_processor.image_mean), torch.tensor(processor.image_processor.image_std)
    for index, values in zip(samples.indices, pixels, strict=True):
        color = 0.0 if index == 0 else 1.0  # black, then white, then white
        torch.testing.assert_close(values, ((color - mean) / std)[:, None, None].expand(3, 8, 8), rtol=0, atol=0.02)


def test_images_of_different_sizes_do_not_share_a_batch(tmp_path: Path) -> None:
    for number, size in enumerate(((8, 8), (16, 8), (8, 8))):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    rows = [{"image": {"path": str(tmp_path / f"{number}.png"), "bytes": None}} for number in range(3)]
    processor = Processor(image_processor=ViTImageProcessor(do_resize=False))
    assert make_batches(rows, processor, IMAGE, batch_size=4, max_length=4).order == [[0, 2], [1]]


def test_captions_and_images_feed_both_towers(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    rows = [{"text": words(length), "image": {"path": str(tmp_path / "x.png"), "bytes": None}} for length in (2, 3)]
    processor = Processor(tokenizer(), clip_processor())
    [tensors] = make_batches(rows, processor, ModelInput("image-text", max_positions=77), batch_size=4, max_length=8)
    assert sorted(tensors) == ["attention_mask", "input_ids", "pixel_values"]
    assert tensors["pixel_values"].shape[0] == tensors["input_ids"].shape[0] == 2


def test_samples_that_the_model_cannot_read() -> None:
    with pytest.raises(InputError, match=r"the samples hold text \(text\), but the model reads images"):
        batch([{"text": "w1"}], tokenizer(), IMAGE)
    with pytest.raises(InputError, match="the samples are images, but the model reads text"):
        batch([{"image": {"path": "x", "bytes": None}}], tokenizer())


# ------------------------------------------------------------------------------------------- what a model reads


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(hidden_size=64, max_position_embeddings=128), ModelInput("text", 128, None, 0, 64)),
        (GPT2Config(n_embd=48, n_positions=32), ModelInput("text", 32, None, 0, 48)),
        (RobertaConfig(max_position_embeddings=514, pad_token_id=1), ModelInput("text", 512, None, 0, 768)),
        (T5Config(d_model=64, decoder_start_token_id=0), ModelInput("seq2seq", None, 0, 0, 64)),
        (T5Config(d_model=64, bos_token_id=None, pad_token_id=5), ModelInput("seq2seq", None, 5, 0, 64)),
        (BartConfig(decoder_start_token_id=2, max_position_embeddings=99), ModelInput("seq2seq", 99, 2, 0, 1024)),
        (ViTConfig(image_size=32, patch_size=8, hidden_size=24), ModelInput("image", None, None, 17, 24)),
        (CLIPVisionConfig(image_size=224, patch_size=32), ModelInput("image", None, None, 50, 768)),
        (ConvNextConfig(), ModelInput("image", None, None, 3137, 0)),
        (CLIPConfig(), ModelInput("image-text", 77, None, 50, 768)),
    ],
)
def test_what_a_configuration_says(config: Any, expected: ModelInput) -> None:
    assert ModelInput.from_config(config) == expected


def test_start_tokens_may_live_in_the_generation_config() -> None:
    config = T5Config(bos_token_id=None, pad_token_id=5)
    assert ModelInput.from_config(config, GenerationConfig(decoder_start_token_id=9)).decoder_start == 9
    assert ModelInput.from_config(LlavaConfig(image_token_index=3)).kind == "text"


# ------------------------------------------------------------------------------------------------ whose processor


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """merged without anything, base with a tokenizer, expert `a` with a template, expert `b` with an image processor."""
    made = {name: tmp_path / name for name in ("merged", "base", "a", "b")}
    for folder in made.values():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    tokenizer().save_pretrained(made["base"])
    tokenizer(template=TEMPLATE).save_pretrained(made["a"])
    clip_processor().save_pretrained(made["b"])
    return made


def find(reads: ModelInput, folders: dict[str, Path], **options: Any) -> Processor:
    experts = {"a": folders["a"], "b": folders["b"]}
    return find_processor(reads, folders["merged"], folders["base"], experts, **options)


def test_the_merged_models_own_tokenizer_comes_first(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer(eos=True).save_pretrained(folders["merged"])
    with caplog.at_level(logging.INFO, logger="featcal"):
        found = find(TEXT, folders)
    assert found.origins == ("merged",)
    assert batch([{"text": "w1"}], found).tokens == 2
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", f"tokenizer: from merged ({folders['merged']})")


def test_then_the_base_then_the_experts_and_it_is_said(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert find(TEXT, folders).origins == ("base",)
    shutil.rmtree(folders["base"])
    folders["base"].mkdir()
    assert find(SEQ2SEQ, folders).origins == ("expert 'a'",)
    assert find(IMAGE, folders).origins == ("expert 'b'",)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"tokenizer: from base ({folders['base']})"),
        ("WARNING", f"tokenizer: from expert 'a' ({folders['a']})"),
        ("WARNING", f"image processor: from expert 'b' ({folders['b']})"),
    ]
    assert find(TEXT, folders, override=folders["a"]).origins == ("given",)


def test_a_chat_template_is_looked_for_where_the_tokenizer_has_none(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert find(TEXT, folders, parts=("text",)).chat_template is None
    found = find(TEXT, folders, parts=("messages",))
    assert (found.origins, found.chat_template) == (("base",), TEMPLATE)
    assert found.tokenizer is not None
    assert found.tokenizer.chat_template is None
    assert caplog.records[-1].getMessage() == f"chat template: from expert 'a' ({folders['a']})"
    (folders["base"] / "chat_template.jinja").write_text("own")
    assert find(TEXT, folders, parts=("messages",)).chat_template == "own"


def test_adapters_and_pairs_of_folders(folders: dict[str, Path]) -> None:
    experts = {"x": f"{folders['b']}+{folders['a']}"}
    assert find_processor(TEXT, folders["merged"], None, experts).origins == ("expert 'x'",)
    assert find_processor(IMAGE, None, None, experts).image_processor is not None


def test_both_parts_for_captioned_images(folders: dict[str, Path]) -> None:
    found = find(ModelInput("image-text"), folders, parts=("text", "image"))
    assert found.origins == ("base", "expert 'b'")
    only_images = find(ModelInput("image-text"), folders)
    assert only_images.tokenizer is None
    assert only_images.image_processor is not None


def test_nobody_has_one(folders: dict[str, Path]) -> None:
    for name in ("base", "a"):
        shutil.rmtree(folders[name])
        folders[name].mkdir()
    with pytest.raises(InputError) as caught:
        find(TEXT, folders)
    looked = ", ".join(str(folders[name]) for name in ("merged", "base", "a", "b"))
    assert str(caught.value) == (
        f"no tokenizer found in {looked}; copy its files into the merged folder, or name a folder with them"
    )


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_is_named(folders: dict[str, Path], content: str) -> None:
    shutil.copytree(folders["base"], folders["merged"], dirs_exist_ok=True)
    (folders["merged"] / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as caught:
        find(TEXT, folders)
    assert str(caught.value).startswith(f"the tokenizer in {folders['merged']} cannot be loaded: ")
    assert "\n" not in str(caught.value)


def test_a_broken_image_processor_is_named(folders: dict[str, Path]) -> None:
    (folders["merged"] / "preprocessor_config.json").write_text("{")
    with pytest.raises(InputError, match=r"the image processor in .*merged cannot be loaded: "):
        find(IMAGE, folders)


def test_code_of_a_repository_is_not_run_unasked(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["base"], folders["merged"], dirs_exist_ok=True)
    path = folders["merged"] / "tokenizer_config.json"
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (folders["merged"] / "own.py").write_text(code)
    (folders["merged"] / "config.json").unlink()
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
        )
    )
    with pytest.raises(InputError, match="needs --trust-remote-code"):
        find(TEXT, folders)
    assert not ran.exists()


def test_old_and_fast_image_processor_names_load_without_torchvision(folders: dict[str, Path]) -> None:
    path = folders["b"] / "preprocessor_config.json"
    config = json.loads(path.read_text())
    for name in ("CLIPImageProcessorFast", "CLIPFeatureExtractor"):
        key = "feature_extractor_type" if name.endswith("Extractor") else "image_processor_type"
        others = {k: v for k, v in config.items() if k != "image_processor_type"}
        path.write_text(json.dumps(others | {key: name}))
        assert find(IMAGE, folders).image_processor is not None


# ------------------------------------------------------------------------------------------- guards and iterables


def test_ids_outside_a_vocabulary_are_refused() -> None:
    batches = batch([{"text": "w25 w1"}], tokenizer())
    check_vocab(batches, 32, "base")
    with pytest.raises(InputError, match="the samples hold token id 31, but expert 'math' knows only 31 tokens"):
        check_vocab(batches, 31, "expert 'math'")
    decoder = batch([{"input": "w1", "target": "w25 w1"}], tokenizer(), SEQ2SEQ)
    with pytest.raises(InputError, match="token id 31"):
        check_vocab(decoder, 20, "base")
    check_vocab([{"pixel_values": torch.zeros(1)}], 1, "base")


def test_few_tokens_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    batches = batch([{"text": words(10)}], tokenizer())
    batches.warn_if_few("math", 10)
    assert not caplog.records
    batches.warn_if_few("math", 11)
    assert caplog.records[0].getMessage() == (
        "math: 10 tokens, fewer than the model's width 11; give more samples or a larger ridge"
    )


def test_iterables_are_passed_through_until_there_are_enough_rows() -> None:
    made = [{"x": torch.zeros(3, 2)}, torch.ones(3), (torch.ones(3, 1), "label"), {"x": torch.zeros(1)}]
    taken = take_batches(iter(made), 7)
    assert len(taken) == 3
    assert all(one is other for one, other in zip(taken, made, strict=False))
    assert take_batches(made, 100) == made

    def endless() -> Any:
        while True:
            yield torch.zeros(2, 2)

    assert len(take_batches(endless(), 5)) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("path.jsonl", "t: expected an iterable of batches (a list or a DataLoader), got str"),
        ({"x": torch.zeros(1)}, "got dict"),
        (torch.zeros(2, 2), "got Tensor"),
        (3, "got int"),
        ([], "t: the iterable gave no batches (a generator can be read only once)"),
        (["text"], "t: batch 1 is str; expected a dict of tensors, a tensor, or a tuple whose first item is one"),
        ([torch.zeros(1), {}], "t: batch 2 is dict"),
        ([torch.tensor(1.0)], "t: batch 1 is Tensor"),
    ],
)
def test_what_is_no_iterable_of_batches(data: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        take_batches(data, 9, "t")
    assert message in str(caught.value)
