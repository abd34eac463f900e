"""Disk names against module names: transformers' own loader is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPModel,
    CLIPVisionModel,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5ForConditionalGeneration,
    ViTForImageClassification,
    ViTModel,
)

from featcal.errors import InputError
from featcal.names import KeyMap, model_class, skeleton, untie
from featcal.reader import open_checkpoint
from pico import BLOCKS, FAMILIES, make

Rename = Callable[[str], str]


def saved(folder: Path, model: nn.Module) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Change a saved model's tensors on disk."""
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def renamed(folder: Path, rename: Rename) -> Path:
    return rewrite(folder, lambda tensors: {rename(k): v for k, v in tensors.items()})


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def mapped(folder: Path, kind: type[PreTrainedModel] | None = None) -> KeyMap:
    """The key map of a folder's tensors for its own class, or for the skeleton of another class."""
    ckpt = open_checkpoint(folder)
    return KeyMap(skeleton(ckpt, kind=kind), ckpt)


def assert_equals_transformers(keys: KeyMap, folder: Path, kind: type[PreTrainedModel] | None = None) -> None:
    """Every tensor equals what from_pretrained puts under the same name."""
    kind = kind or type(keys.model)  # type: ignore[assignment]
    truth = kind.from_pretrained(folder).state_dict()  # type: ignore[union-attr]
    assert set(truth) == set(keys.model.state_dict())
    for name in keys.sources:
        assert torch.equal(keys.tensor(name), truth[name]), name
    assert set(keys.sources) | set(keys.missing) == set(truth)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mixer"])
def test_every_family_reads_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, make(family))
    keys = mapped(folder)
    assert all(p.is_meta for p in keys.model.parameters())
    assert not any(b.is_meta for b in keys.model.buffers())
    assert not keys.model.training
    assert (keys.missing, keys.unused, keys.mismatched, keys.untied) == ([], [], [], [])
    assert_equals_transformers(keys, folder)
    used = {key for source in keys.sources.values() for key in source.keys}
    assert used == set(keys.checkpoint.keys())


def test_vit_names_differ_between_disk_and_memory(tmp_path: Path) -> None:
    keys = mapped(saved(tmp_path, make("vit")))
    (block,) = BLOCKS["vit"]
    name = f"{block}.1.attention.q_proj.weight"
    assert keys.key(name) == "vit.encoder.layer.1.attention.attention.query.weight"
    assert keys.names("vit.encoder.layer.1.attention.attention.query.weight") == [name]


def nested(key: str) -> str:
    return f"vision_model.{key}"


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_clip_vision_flat_and_nested(layout: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, make("clip-vision"))
    if layout == "nested":
        renamed(folder, nested)
    keys = mapped(folder)
    assert (keys.missing, keys.unused) == ([], [])
    assert_equals_transformers(keys, folder)
    on_disk = "vision_model." * (layout == "nested") + "encoder.layers.0.mlp.fc1.weight"
    assert keys.key("encoder.layers.0.mlp.fc1.weight") == on_disk


def test_clip_vision_out_of_a_full_clip_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("clip"))
    keys = mapped(folder, CLIPVisionModel)
    assert keys.missing == []
    assert keys.unused and all(k.startswith(("text_", "visual_projection", "logit_scale")) for k in keys.unused)
    assert_equals_transformers(keys, folder, CLIPVisionModel)
    full = mapped(folder)
    assert isinstance(full.model, CLIPModel) and (full.missing, full.unused) == ([], [])


@pytest.mark.parametrize(
    ("family", "bare", "headed", "prefix", "block"),
    [
        ("bert", BertModel, BertForSequenceClassification, "bert.", "encoder.layer.0.output.dense.weight"),
        ("bert", BertModel, BertForMaskedLM, "bert.", "encoder.layer.0.output.dense.weight"),
        ("gpt2", GPT2Model, GPT2LMHeadModel, "transformer.", "h.1.mlp.c_fc.weight"),
        ("llama", LlamaModel, LlamaForCausalLM, "model.", "layers.1.mlp.up_proj.weight"),
        ("vit", ViTModel, ViTForImageClassification, "vit.", "layers.0.mlp.fc1.weight"),
    ],
)
def test_bare_and_headed_files_serve_each_other(
    family: str, bare: Any, headed: Any, prefix: str, block: str, tmp_path: Path
) -> None:
    config = make(family).config
    small, large = saved(tmp_path / "bare", bare(config)), saved(tmp_path / "headed", headed(config))
    up, down = mapped(small, headed), mapped(large, bare)
    assert_equals_transformers(down, large, bare)
    for name in set(up.sources) - set(up.tied):
        assert torch.equal(up.tensor(name), bare.from_pretrained(small).state_dict()[name.removeprefix(prefix)])
    assert prefix + block in up and block in down
    assert not [n for n in up.missing if n.startswith(prefix) and "pooler" not in n]
    assert all(not n.startswith(prefix + "encoder") for n in down.unused)


def test_old_bert_norm_names(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("bert"))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed(folder, lambda k: next((k.replace(new, name) for new, name in old.items() if new in k), k))
    keys = mapped(folder)
    assert keys.missing == [] and "bert.embeddings.LayerNorm.gamma" in keys.checkpoint
    assert_equals_transformers(keys, folder)


# ------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_are_fused_from_their_parts(family: str, tmp_path: Path) -> None:
    keys = mapped(saved(tmp_path, make(family)))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert len(keys.keys(name)) == 8 and len(keys.keys("model.layers.1.mlp.experts.down_proj")) == 4
    assert keys.key(name) is None and keys.key("model.layers.1.self_attn.q_proj.weight") is not None
    assert all(keys.names(key) == [name] for key in keys.keys(name))
    assert keys.dtype(name) == torch.float32
    assert torch.equal(keys.rows(name, torch.tensor([2, 0])), keys.tensor(name)[[2, 0]])


def test_ten_experts_keep_their_numeric_order(tmp_path: Path) -> None:
    config: Any = make("mixtral").config
    config.num_local_experts = 12
    folder = saved(tmp_path, transformers.MixtralForCausalLM(config))
    assert_equals_transformers(mapped(folder), folder)


def test_an_absent_expert_is_an_error_not_a_smaller_tensor(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("mixtral"))
    gone = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(
        InputError, match=r"does not hold all parts of 'model.layers.0.mlp.experts.down_proj': 3 tensors"
    ):
        mapped(folder)
    gone = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(InputError, match=r"does not hold all parts of 'model.layers.0.mlp.experts.gate_up_proj'"):
        mapped(folder)


# ------------------------------------------------------------------------------------------------ ties


def test_tied_head_absent_copied_or_different(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("llama"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    keys = mapped(folder)
    assert keys.tied == {head: embedding} and keys.keys(head) == (embedding,)
    rewrite(folder, lambda t: {**t, head: t[embedding].clone()})
    keys = mapped(folder)
    assert keys.tied == {head: embedding} and keys.untied == [] and keys.keys(head) == (head,)
    rewrite(folder, lambda t: {**t, head: t[embedding] + 1})
    keys = mapped(folder)
    assert keys.tied == {} and keys.untied == [head]
    assert_equals_transformers(keys, folder)
    untie(keys.model, keys.untied)
    assert keys.model.get_parameter(head) is not keys.model.get_parameter(embedding)
    assert keys.model.get_parameter(head).is_meta
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != embedding})
    keys = mapped(folder)
    assert keys.tied == {embedding: head} and keys.missing == []
    assert_equals_transformers(keys, folder)


def test_flan_t5_keeps_its_own_head_although_the_config_ties(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("t5"))
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["shared.weight"] * 2})
    keys = mapped(folder)
    assert keys.untied == ["lm_head.weight"]
    assert keys.tied == dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight")
    assert_equals_transformers(keys, folder)
    assert isinstance(keys.model, T5ForConditionalGeneration)


def test_t5_file_with_only_the_encoder_embedding(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("t5"))
    renamed(folder, lambda k: k.replace("shared.weight", "encoder.embed_tokens.weight"))
    keys = mapped(folder)
    assert keys.missing == [] and keys.tied["shared.weight"] == "encoder.embed_tokens.weight"
    assert_equals_transformers(keys, folder)


def test_untied_head_missing_from_the_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("qwen2"))
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    assert mapped(folder).missing == ["lm_head.weight"]


# ------------------------------------------------------------------------------------------------ disagreements


def test_missing_unused_mismatched(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("llama"))

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        longer = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(2, 16)])
        return {**tensors, "model.embed_tokens.weight": longer, "score.weight": torch.ones(3, 16)}

    keys = mapped(rewrite(folder, change))
    assert keys.missing == ["model.layers.1.mlp.up_proj.weight"]
    assert keys.unused == ["score.weight"]
    assert ("model.embed_tokens.weight", (60, 16), (62, 16)) in keys.mismatched
    assert "model.layers.1.mlp.up_proj.weight" not in keys and keys.keys("model.layers.1.mlp.up_proj.weight") == ()
    ids = torch.tensor([61, 3])
    assert torch.equal(keys.rows("lm_head.weight", ids), keys.tensor("model.embed_tokens.weight")[ids])


def test_two_keys_for_one_tensor_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("clip-vision"))
    rewrite(folder, lambda t: {**t, nested("pre_layrnorm.weight"): t["pre_layrnorm.weight"].clone()})
    with pytest.raises(InputError, match=r"both mean 'pre_layrnorm.weight'"):
        mapped(folder)


def test_a_module_that_no_library_knows(tmp_path: Path) -> None:
    model = make("mixer")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    keys = KeyMap(model, open_checkpoint(tmp_path))
    assert set(keys.sources) == set(model.state_dict()) and not keys.missing and not keys.unused
    assert torch.equal(keys.tensor("embed.weight"), model.get_parameter("embed.weight"))


# ------------------------------------------------------------------------------------------------ classes


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bert", "BertForSequenceClassification"),
        ("vit", "ViTForImageClassification"),
        ("clip", "CLIPModel"),
        ("clip-vision", "CLIPVisionModel"),
    ],
)
def test_class_from_architectures_or_from_the_model_type(family: str, expected: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, make(family))
    assert model_class(open_checkpoint(folder)).__name__ == expected
    assert model_class(open_checkpoint(edit_config(folder, architectures=None))).__name__ == expected
    assert mapped(folder).missing == []


def test_unknown_models_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, make("llama"))
    edit_config(folder, architectures=["LamaForCausalLM"])
    with pytest.raises(InputError, match=r"is a LamaForCausalLM, .* did you mean 'LlamaForCausalLM'\?"):
        model_class(open_checkpoint(folder))
    edit_config(folder, architectures=None, model_type="lama")
    with pytest.raises(InputError, match=r"model_type 'lama', .* did you mean 'llama'\?"):
        model_class(open_checkpoint(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config.json: copy it from the base model"):
        skeleton(open_checkpoint(folder))


def test_a_config_that_makes_no_model(tmp_path: Path) -> None:
    folder = edit_config(saved(tmp_path, make("llama")), num_attention_heads="many")
    with pytest.raises(InputError, match=r"config.json does not describe a LlamaForCausalLM"):
        skeleton(open_checkpoint(folder))


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class TwoConfig(PretrainedConfig):
    model_type = "two_layers"
    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class TwoModel(PreTrainedModel):
    config_class = TwoConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config.width, config.width) for _ in range(2))
        self.post_init()
"""


def test_custom_code_runs_only_when_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "modeling_two.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_two.TwoConfig", "AutoModel": "modeling_two.TwoModel"}
    config = {"architectures": ["TwoModel"], "model_type": "two_layers", "width": 6, "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"layers.{i}.{p}": torch.randn(*s) for i in range(2) for p, s in (("weight", (6, 6)), ("bias", (6,)))}
    save_file(tensors, folder / "model.safetensors")
    ckpt = open_checkpoint(folder)
    with pytest.raises(InputError, match=r"needs its own Python code .* --trust-remote-code"):
        skeleton(ckpt)
    keys = KeyMap(skeleton(ckpt, trust_remote_code=True), ckpt)
    assert type(keys.model).__name__ == "TwoModel" and keys.missing == [] and keys.unused == []
    assert torch.equal(keys.tensor("layers.1.weight"), tensors["layers.1.weight"])


def test_native_architecture_wins_over_its_auto_map(tmp_path: Path) -> None:
    """Many Hub configs still carry an auto_map of the time before transformers knew the model."""
    folder = edit_config(saved(tmp_path, make("llama")), auto_map={"AutoModelForCausalLM": "evil.Evil"})
    assert model_class(open_checkpoint(folder)) is LlamaForCausalLM
