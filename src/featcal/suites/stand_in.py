"""Stand-ins for what a suite takes from the Hub: small random checkpoints and data sets, laid out like the real ones.

The models are of the same classes with the same files; an expert is the base with every weight moved a little (a real
LoRA adapter where the suite has adapters, 64 more rows of vocabulary where MergeBench's experts have them). The data
sets have the real columns, splits and oddities. Scores mean nothing; that every step works on this layout does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import nn

from ..errors import InputError
from ..evaluate.classes import class_names
from .schema import Data, Suite, Task, ZeroShot

ROWS = {"train": 40, "other": 24}
"""Rows per split."""


@dataclass(frozen=True)
class Layout:
    """How a data set of the Hub differs from columns `image`, `label` and splits `train`, `test`."""

    image: str = "image"
    label: str = "label"
    label_kind: str = "class"
    """class (named integers), bool, or int."""
    splits: tuple[str, ...] = ("train", "test")
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, the same in every row."""


_CORRUPTED = ("contrast", "gaussian_noise", "impulse_noise", "jpeg_compression", "motion_blur", "pixelate", "spatter")

IMAGE_LAYOUTS: dict[str, Layout] = {
    "1aurent/PatchCamelyon": Layout(label_kind="bool", splits=("train", "valid", "test")),
    "clip-benchmark/wds_fer2013": Layout("jpg", "cls", "int", extra={"__key__": "s0000000", "__url__": "0.tar"}),
    "tanganke/cifar100": Layout("img", "fine_label", extra={"coarse_label": 0}),
    "tanganke/cifar10": Layout("img"),
    "ethz/food101": Layout(splits=("train", "validation")),
    "dpdl-benchmark/oxford_flowers102": Layout(splits=("train", "validation", "test")),
    "ufldl-stanford/svhn": Layout(splits=("train", "test", "extra")),
    "svhn": Layout(splits=("train", "test", "extra")),
    "timm/oxford-iiit-pet": Layout(extra={"image_id": "abyssinian_1", "label_cat_dog": 0}),
    **{
        f"tanganke/{name}": Layout(splits=("train", "test", *_CORRUPTED))
        for name in ("stanford_cars", "resisc45", "eurosat", "gtsrb")
    },
}

GLUE_COLUMNS = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
}

MERGEBENCH_COLUMNS = {
    "MergeBench/instruction_val": ("instruction", "input", "output"),
    "MergeBench/math_val": ("query", "response"),
    "MergeBench/coding_val": ("instruction", "input", "response"),
    "MergeBench/multilingual_val": ("inputs", "targets"),
    "MergeBench/safety_val": ("prompt", "response"),
}


def build_stand_in(suite: Suite, root: Path) -> Path:
    """Everything the suite needs, as a mirror in `root`; nothing is built twice.

    Raises:
        InputError: the suite's data are not of a layout that is known here.
    """
    done = root / f"{suite.name}.{suite.variant or 'default'}.json"
    if done.is_file():
        return root
    builders: dict[str, Callable[[Suite, Path], None]] = {
        "image": _build_clip,
        "text-to-text": _build_t5,
        "causal": _build_llama,
    }
    if suite.build is not None or suite.family not in builders:
        raise InputError(f"suite '{suite.name}' runs on this machine as it is: it has no stand-in")
    root.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        builders[suite.family](suite, root)
    done.write_text(json.dumps({"suite": suite.name, "variant": suite.variant}), encoding="utf-8")
    return root


def model_folder(root: Path, ref: str) -> Path:
    """Where a mirror keeps a checkpoint."""
    return root / "models" / ref


def data_folder(root: Path, data: Data) -> Path:
    """Where a mirror keeps a data set."""
    return root / "datasets" / data.id / (data.config or "")


def perturbed(model: nn.Module, seed: int, noise: float = 0.3) -> nn.Module:
    """A copy with every float parameter moved by about `noise` of its scale."""
    expert = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in expert.parameters():
            scale = noise * float(p.square().mean().sqrt())
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return expert


def _save(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------ CLIP


def letters_tokenizer(max_length: int = 77) -> Any:
    """CLIP's tokenizer class with letters for a vocabulary: any text is spelt, nothing is merged."""
    from transformers import CLIPTokenizer

    symbols = sorted(_byte_symbols())
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def _byte_symbols() -> list[str]:
    """The printable stand-ins for the 256 bytes in byte-level vocabularies."""
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())


def image_processor(side: int) -> Any:
    """CLIP's image processing at another size."""
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def _build_clip(suite: Suite, root: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, CLIPVisionModel

    tokenizer = letters_tokenizer()
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = {**tower, "vocab_size": len(tokenizer), "bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    vision = {**tower, "image_size": 24, "patch_size": 8}
    base = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).eval()
    folder = model_folder(root, suite.base)
    _save(base, folder)
    tokenizer.save_pretrained(folder)
    image_processor(24).save_pretrained(folder)
    tower_only = CLIPVisionModel.from_pretrained(folder)
    for seed, (name, task) in enumerate(suite.tasks.items(), 1):
        assert task.expert is not None
        _save(perturbed(tower_only, seed), model_folder(root, task.expert))
        _save_images(name, task, data_folder(root, task.data), seed)
    for reference in suite.references.values():
        _save(perturbed(tower_only, 99), model_folder(root, reference))


def _save_images(name: str, task: Task, folder: Path, seed: int) -> None:
    """A data set of small pictures whose colour depends on the class."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

    layout = IMAGE_LAYOUTS.get(task.data.id, Layout())
    assert isinstance(task.head, ZeroShot)
    names, _ = class_names(task.head.classes or name)
    label_type: Any = {"class": ClassLabel(num_classes=len(names)), "bool": Value("bool"), "int": Value("int64")}
    features = Features({layout.image: Image(), layout.label: label_type[layout.label_kind]})
    for column, value in layout.extra.items():
        features[column] = Value("string" if isinstance(value, str) else "int64")
    splits = {}
    for number, split in enumerate(layout.splits):
        generator = np.random.default_rng([seed, number])
        count = ROWS["train" if split == "train" else "other"]
        labels = generator.permutation(count) % len(names)
        kind = bool if layout.label_kind == "bool" else int
        rows = [
            {layout.image: _picture(int(label), generator), layout.label: kind(label), **layout.extra}
            for label in labels
        ]
        splits[split] = Dataset.from_list(rows, features=features)
    DatasetDict(splits).save_to_disk(folder)


def _picture(label: int, generator: np.random.Generator) -> PILImage.Image:
    colour = np.random.default_rng(label).integers(0, 200, 3)
    height, width = generator.integers(20, 33, 2)
    pixels = colour + generator.integers(0, 56, (height, width, 3))
    return PILImage.fromarray(pixels.astype(np.uint8))


# -------------------------------------------------------------------------------------------------------- T5


def word_tokenizer(words: list[str], **special: str) -> Any:
    """A tokenizer of whole words, ids in the given order; what it does not know is <unk>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def _build_t5(suite: Suite, root: Path) -> None:
    from tokenizers import processors
    from transformers import T5Config, T5ForConditionalGeneration

    answers = sorted({word for task in suite.tasks.values() for word in task.words or ()})
    words = ["<pad>", "</s>", "<unk>", *answers, *_WORDS, *(f"{i / 10:.1f}" for i in range(51))]
    tokenizer = word_tokenizer(words, pad_token="<pad>", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 6, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    flan = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "relative_attention_num_buckets": 8}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    settings: dict[str, Any] = {**sizes, **flan, **special}
    config = T5Config(vocab_size=len(words), **settings)
    base = perturbed(T5ForConditionalGeneration(config).eval(), 0)
    folder = model_folder(root, suite.base)
    _save(base, folder)
    tokenizer.save_pretrained(folder)
    for seed, (name, task) in enumerate(suite.tasks.items(), 1):
        assert task.expert is not None
        if "lora" in task.expert:
            _save_lora(base, suite.base, model_folder(root, task.expert), seed)
        else:
            _save(perturbed(base, seed), model_folder(root, task.expert))
        _save_glue(name, task, data_folder(root, task.data), seed)


def _save_lora(base: nn.Module, base_ref: str, folder: Path, seed: int) -> None:
    """An adapter as the published ones: r 16, α 32, dropout 0.1, on q and v."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    adapter = get_peft_model(copy.deepcopy(base), config)
    adapter.peft_config["default"].base_model_name_or_path = base_ref
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in adapter.named_parameters():
            if "lora_B" in name:
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    adapter.save_pretrained(str(folder), save_embedding_layers=False)


_NOUNS = ["cat", "dog", "tree", "mat", "he", "she", "it"]
_WORDS = [
    "the",
    "a",
    "sat",
    "ran",
    "on",
    "under",
    "is",
    "was",
    "not",
    "very",
    "good",
    "bad",
    "why",
    "how",
    *_NOUNS,
    "?",
]


def _sentence(generator: np.random.Generator) -> str:
    return " ".join(generator.choice(_WORDS, int(generator.integers(3, 9))))


def _save_glue(name: str, task: Task, folder: Path, seed: int) -> None:
    """GLUE's splits and columns: MNLI has two of each evaluation split; labels of `test` are −1; STS-B's are floats."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    columns = GLUE_COLUMNS[name]
    held = ("validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
    splits = ("train", *(held if name == "mnli" else ("validation", "test")))
    label: Any = ClassLabel(num_classes=len(task.words)) if task.words else Value("float32")
    features = Features({**{column: Value("string") for column in columns}, "label": label, "idx": Value("int32")})
    saved = {}
    for number, split in enumerate(splits):
        generator = np.random.default_rng([seed, number])
        rows = []
        for index in range(ROWS["train" if split == "train" else "other"]):
            score = round(float(generator.uniform(0, 5)), 3)
            value = int(generator.integers(len(task.words))) if task.words else score
            secret = split.startswith("test")
            texts = {column: _sentence(generator) for column in columns}
            rows.append({**texts, "label": -1 if secret else value, "idx": index})
        saved[split] = Dataset.from_list(rows, features=features)
    DatasetDict(saved).save_to_disk(folder)


# ----------------------------------------------------------------------------------------------------- Llama


def _build_llama(suite: Suite, root: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<pad>", "<|begin_of_text|>", "<|eot_id|>", "<unk>", *_WORDS, "###", "Instruction:", "Response:", "Input:"]
    words += [str(number) for number in range(100)]
    tokenizer = word_tokenizer(
        words, pad_token="<pad>", bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        chat_template="{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <|eot_id|> {% endfor %}",
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings="3.2" in suite.base,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    folder = model_folder(root, suite.base)
    _save(base.bfloat16(), folder)
    tokenizer.save_pretrained(folder)
    for seed, task in enumerate(suite.tasks.values(), 1):
        assert task.expert is not None
        expert: Any = perturbed(base.float(), seed)
        if task.expert.endswith("_math"):
            expert.resize_token_embeddings(len(words) + 64, mean_resizing=False)
        _save(expert.bfloat16(), model_folder(root, task.expert))
        _save_pairs(task, data_folder(root, task.data), seed)
    _save_harness_tasks(suite, root / "lm_eval")


_HARNESS_TASK = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}"""

_HARNESS_CODE = '''\
"""Scoring functions of the stand-in tasks: an answer counts when it is the right word."""


def pass_at_k(references, predictions, k=None):
    return {"pass@1": float(predictions[0][0].strip() == references[0])}


def pass_at_1(references, predictions):
    return float(predictions[0].strip() == references[0])


def build_predictions(responses, docs):
    return [list(own) for own in responses]


def process_results(doc, results):
    return {"prompt_level_strict_acc": float(results[0].strip() == doc["answer"])}
'''

_HARNESS_METRICS = {
    "acc_norm,none": "doc_to_choice: [cat, dog]\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "exact_match,none": "metric_list: [{metric: exact_match}]\n",
    "exact_match,flexible-extract": """\
metric_list: [{metric: exact_match}]
filter_list:
  - name: flexible-extract
    filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]
""",
    "pass@1,create_test": """\
metric_list:
  - metric: !function stand_in_code.pass_at_k
    aggregation: mean
    higher_is_better: true
    k: [1]
filter_list:
  - name: create_test
    filter: [{function: custom, filter_fn: !function stand_in_code.build_predictions}]
""",
    "pass_at_1,none": """\
metric_list:
  - metric: !function stand_in_code.pass_at_1
    aggregation: mean
    higher_is_better: true
""",
    "prompt_level_strict_acc,none": """\
process_results: !function stand_in_code.process_results
metric_list: [{metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}]
""",
}
"""What a task of lm-eval needs for a metric to have that name."""


def _save_harness_tasks(suite: Suite, folder: Path) -> None:
    """Local tasks of lm-eval under the real names: sixteen short questions each, the same metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    generator = np.random.default_rng(7)
    lines = [{"question": _sentence(generator), "answer": ("cat", "dog")[i % 2], "label": i % 2} for i in range(16)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "stand_in_code.py").write_text(_HARNESS_CODE, encoding="utf-8")
    for benchmark in suite.benchmarks.values():
        choice = benchmark.metric == "acc_norm,none"
        more = _HARNESS_METRICS[benchmark.metric]
        if not choice:
            more = "generation_kwargs: {until: ['?'], max_gen_toks: 2, do_sample: false}\n" + more
        if benchmark.shots:
            more = "fewshot_split: test\n" + more
        text = _HARNESS_TASK.format(
            task=benchmark.task,
            rows=rows,
            output="multiple_choice" if choice else "generate_until",
            target="label" if choice else "answer",
            more=more,
        )
        (folder / f"{benchmark.task}.yaml").write_text(text, encoding="utf-8")


def _save_pairs(task: Task, folder: Path, seed: int) -> None:
    """MergeBench's validation sets: one split (240 rows, 200 of them kept apart); two thirds of the inputs empty."""
    from datasets import Dataset, DatasetDict

    generator = np.random.default_rng(seed)
    rows = []
    for index in range(240):
        row = {column: _sentence(generator) for column in MERGEBENCH_COLUMNS[task.data.id]}
        if "input" in row and index % 3:
            row["input"] = ""
        rows.append(row)
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(folder)
