"""Tiny real models of every supported family, with experts and batches: the test bed. Each builds in no time.

`family_setup("llama")` gives a base, experts that differ from it by a few per cent in every parameter, their Task
Arithmetic merge, batches with real padding, and the names of the blocks in forward order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCAB, PAD, WIDTH, LAYERS = 60, 1, 16, 2
_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
_TEXT: dict[str, Any] = {**_ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": PAD}
_TEXT |= {"bos_token_id": 0, "eos_token_id": 2}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "head_dim": 4}
_IMAGE: dict[str, Any] = {**_ENCODER, "image_size": 12, "patch_size": 4}


def _clip_vision() -> CLIPVisionConfig:
    return CLIPVisionConfig(**_IMAGE, projection_dim=8)


def _clip() -> nn.Module:
    return CLIPModel(CLIPConfig(text_config=CLIPTextConfig(**_TEXT, projection_dim=8).to_dict(),
                                vision_config=_clip_vision().to_dict(), projection_dim=8))  # fmt: skip


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": WIDTH, "d_ff": 24, "d_kv": 6, "num_heads": 4, "vocab_size": VOCAB}
    flan: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    tokens: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": 0}
    depth: dict[str, Any] = {"num_layers": LAYERS, "num_decoder_layers": LAYERS}
    return T5ForConditionalGeneration(T5Config(**sizes, **flan, **tokens, **depth, relative_attention_num_buckets=8))


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_inner": 24, "n_positions": 32}
    tokens: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": PAD}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens))


def _gemma2() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**_DECODER, sliding_window=4, query_pre_attn_scalar=4))


def _qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_DECODER, moe_intermediate_size=12, num_experts=4,
                                              num_experts_per_tok=2, norm_topk_prob=True))  # fmt: skip


class MixerBlock(nn.Module):
    """One MLP-mixer layer: mixes tokens, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_in, self.token_out = nn.Linear(tokens, 10), nn.Linear(10, tokens)
        self.channel_in, self.channel_out = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        mixed_BDT = self.token_out(torch.relu(self.token_in(self.token_norm(x_BTD).transpose(1, 2))))
        x_BTD = x_BTD + mixed_BDT.transpose(1, 2)
        return x_BTD + self.channel_out(torch.relu(self.channel_in(self.channel_norm(x_BTD))))


class Mixer(nn.Module):
    """A plain module that no library knows: patches in (B, T, 6), class scores out (B, 5)."""

    def __init__(self, tokens: int = 7, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(MixerBlock(tokens, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, patches_BTP: Tensor) -> Tensor:
        x_BTD = self.embed(patches_BTP)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD).mean(1))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "clip": _clip,
    "clip-vision": lambda: CLIPVisionModel(_clip_vision()),
    "vit": lambda: ViTForImageClassification(ViTConfig(**_IMAGE)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**_TEXT)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**_TEXT, type_vocab_size=1)),
    "t5": _t5,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_DECODER, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{k: v for k, v in _DECODER.items() if k != "head_dim"}, tie_word_embeddings=False)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**(_DECODER | {"head_dim": 6}))),
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "qwen3-moe": _qwen3_moe,
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4)),
    "mixer": Mixer,
}
"""Builders of random models, by family."""

BLOCKS: dict[str, tuple[str, ...]] = {
    "clip": ("vision_model.encoder.layers", "text_model.encoder.layers"),
    "clip-vision": ("encoder.layers",),
    "vit": ("vit.layers",),
    "bert": ("bert.encoder.layer",),
    "roberta": ("roberta.encoder.layer",),
    "t5": ("encoder.block", "decoder.block"),
    "gpt2": ("transformer.h",),
    "mixer": ("blocks",),
}
"""The stacks of blocks in forward order (decoder-only families not listed here: `model.layers`)."""


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model in eval mode; biases, norms and matrices are all far from their trivial initial values."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() >= 2:
                    p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
                elif p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
    if dtype == torch.float64 and family in ("qwen3-moe", "mixtral"):
        cast(PreTrainedModel, model).set_experts_implementation("eager")  # torch's grouped product has no float64
    return model.double().eval() if dtype == torch.float64 else model.eval()


def perturbed(model: nn.Module, seed: int, noise: float = 0.05) -> nn.Module:
    """A copy with every float parameter moved by about `noise` of its scale; tied parameters stay tied."""
    expert = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in expert.parameters():
            scale = noise * float(p.double().square().mean().sqrt())
            p.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))
    return expert


def task_arithmetic(base: nn.Module, experts: list[nn.Module], scale: float = 0.3) -> nn.Module:
    """θ = θ_base + scale Σ (θ_i − θ_base) over every float tensor."""
    merged = copy.deepcopy(base)
    states = [expert.state_dict() for expert in experts]
    with torch.no_grad():
        for name, tensor in merged.state_dict().items():
            if tensor.is_floating_point():
                start = tensor.clone()
                tensor.copy_(start + scale * sum(state[name] - start for state in states))
    return merged


def blocks_of(family: str, model: nn.Module) -> list[str]:
    """Names of the model's blocks, in forward order."""
    stacks = BLOCKS.get(family, ("model.layers",))
    return [f"{stack}.{i}" for stack in stacks for i in range(len(model.get_submodule(stack)))]  # type: ignore[arg-type]


def _tokens(lengths: list[int], left: list[bool], g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids and mask, (rows, longest); row r has lengths[r] real tokens, padded on the left where left[r]."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(max(lengths) - length, None) if left[row] else slice(0, length)
        ids[row, where] = torch.randint(3, VOCAB, (length,), generator=g)
        mask[row, where] = 1
    return ids, mask


def _batch(family: str, i: int, dtype: torch.dtype, g: torch.Generator) -> Any:
    """Batch i of a task: rows and lengths vary with i; text batches hold left- and right-padded rows."""
    rows, longest = 3 + i % 2, 7 - i
    if family == "mixer":
        patches = torch.randn(rows, 7, 6, generator=g).to(dtype)
        return (patches, torch.zeros(rows)) if i % 2 else patches
    pixels = torch.randn(rows, 3, 12, 12, generator=g).to(dtype)
    if family in ("clip-vision", "vit"):
        return {"pixel_values": pixels}
    lengths, left = (
        [longest, longest - 3, longest - 2, longest - 1][:rows],
        [False, True, False, True][:rows],
    )
    if family == "gemma2" and dtype == torch.float64:
        # transformers' eager attention casts float64's lowest number to -inf: rows without any key become NaN
        left = [False] * rows
    ids, mask = _tokens(lengths, left, g)
    batch = {"input_ids": ids, "attention_mask": mask}
    if family == "clip":
        batch["pixel_values"] = pixels
    if family == "t5":
        target, target_mask = _tokens([5 - i, 2, 4 - i, 3][:rows], [False] * rows, g)
        batch |= {"decoder_input_ids": target, "decoder_attention_mask": target_mask}
    return batch


def batches(family: str, count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """`count` seeded batches for a model of the family."""
    g = torch.Generator().manual_seed(seed)
    return [_batch(family, i, dtype, g) for i in range(count)]


@dataclass
class Setup:
    """Everything a calibration needs. `blocks` are in forward order."""

    base: nn.Module
    merged: nn.Module
    experts: dict[str, nn.Module]
    data: dict[str, list[Any]]
    blocks: list[str]


def family_setup(
    family: str,
    tasks: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.05,
    scale: float = 0.3,
) -> Setup:
    """Base, `tasks` experts, their Task Arithmetic merge, and two or three batches per task."""
    base = make(family, seed, dtype)
    names = [f"task{i}" for i in range(tasks)]
    experts = {name: perturbed(base, 1000 * seed + 7 + i, noise) for i, name in enumerate(names)}
    data = {name: batches(family, 2 + i % 2, 1000 * seed + 77 + i, dtype) for i, name in enumerate(names)}
    merged = task_arithmetic(base, list(experts.values()), scale)
    return Setup(base, merged, experts, data, blocks_of(family, base))
