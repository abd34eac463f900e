"""Adapters folded from files against PEFT's own merge_and_unload and forward pass."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel

from featcal.adapters import AdaptedCheckpoint, Adapter, is_adapter, open_adapter, open_model
from featcal.errors import InputError
from featcal.names import KeyMap, skeleton, untie
from featcal.reader import Checkpoint, FileCheckpoint, open_checkpoint
from featcal.writer import assemble
from pico import batches, make

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = ["q_proj", "v_proj", "down_proj"]


def trained(base: Path, out: Path, *, seed: int = 1, untrained: bool = False, **config: Any) -> Path:
    """A PEFT adapter on the model in `base`, with every trainable value moved, saved by PEFT."""
    kind = _class_of(base)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        peft = get_peft_model(kind.from_pretrained(base), LoraConfig(**{"r": 4, "lora_alpha": 6, **config}))
        if not untrained:
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.data.add_(0.1 * torch.randn_like(parameter))
        peft.save_pretrained(str(out))
    return out


def _class_of(folder: Path) -> Any:
    return getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])


def saved(folder: Path, family: str, **config: Any) -> Path:
    model = make(family)
    if config:
        changed = type(model.config).from_dict({**model.config.to_dict(), **config})  # type: ignore[union-attr, operator]
        model = type(model)(changed)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def peft_merged(base: Path, adapter: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(_class_of(base).from_pretrained(base), adapter)
        return peft.merge_and_unload().state_dict()


def folded(base: Path, adapter: Path) -> tuple[AdaptedCheckpoint, KeyMap]:
    ckpt = open_model(f"{base}+{adapter}")
    assert isinstance(ckpt, AdaptedCheckpoint) and ckpt.check() == []
    keys = KeyMap(skeleton(ckpt), ckpt)
    assert keys.missing == [] and keys.unused == [] and keys.mismatched == []
    return ckpt, keys


def everything(ckpt: Checkpoint) -> dict[str, Tensor]:
    return {key: ckpt.get(key).clone() for key in ckpt.keys()}  # noqa: SIM118


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def loaded(keys: KeyMap) -> PreTrainedModel:
    """The model with every tensor of the checkpoint in it."""
    model = keys.model
    untie(model, keys.untied)
    state = {name: keys.tensor(name) for name in keys.sources}
    model.load_state_dict(state, strict=False, assign=True)
    assert isinstance(model, PreTrainedModel)
    return model


def assert_same_as_peft(base: Path, adapter: Path, changed: int) -> AdaptedCheckpoint:
    """Every tensor within 1e-6 of merge_and_unload; exactly `changed` tensors differ from the base."""
    ckpt, keys = folded(base, adapter)
    truth, before = peft_merged(base, adapter), KeyMap(skeleton(ckpt.base), ckpt.base)
    assert set(truth) == set(keys.model.state_dict())
    differing = 0
    for name, tensor in truth.items():
        ours = keys.tensor(name)
        assert ours.dtype == tensor.dtype and ours.is_contiguous()
        assert float((ours - tensor).abs().max()) <= 1e-6, name
        differing += not torch.equal(ours, before.tensor(name))
    assert differing == changed
    return ckpt


# ------------------------------------------------------------------------------------------------ against PEFT

VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 6),
    "rslora": ({"use_rslora": True}, 6),
    "patterns": (
        {"rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7}, "alpha_pattern": {"v_proj": 11}},
        6,
    ),
    "rslora-patterns": (
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"0.mlp.down_proj": 3}},
        6,
    ),
    "dora": ({"use_dora": True}, 6),
    "dora-rslora": ({"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 3}}, 6),
    "gaussian": ({"init_lora_weights": "gaussian"}, 6),
    "head-saved": ({"modules_to_save": ["lm_head"]}, 7),
    "norms-saved": ({"modules_to_save": ["input_layernorm"]}, 8),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_untied(variant: str, tmp_path: Path) -> None:
    config, changed = VARIANTS[variant]
    base = saved(tmp_path / "base", "llama", tie_word_embeddings=False)
    adapter = trained(base, tmp_path / "adapter", target_modules=LLAMA, **config)
    assert_same_as_peft(base, adapter, changed)


@pytest.mark.parametrize(("bias", "changed"), [("lora_only", 8), ("all", 10)])
def test_trained_biases(bias: str, changed: int, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "qwen2")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], bias=bias)
    assert_same_as_peft(base, adapter, changed)


def test_bias_of_the_low_rank_path(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "bert")
    adapter = trained(
        base, tmp_path / "adapter", target_modules=["query", "value"], lora_bias=True, task_type="SEQ_CLS"
    )
    assert_same_as_peft(base, adapter, 10)  # weights and biases of 2 x 2 modules, and the classifier


@pytest.mark.parametrize("dora", [False, True])
def test_embeddings(dora: bool, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", tie_word_embeddings=False)
    targets = ["embed_tokens", "lm_head", "k_proj"]
    adapter = trained(base, tmp_path / "adapter", target_modules=targets, use_dora=dora)
    ckpt = assert_same_as_peft(base, adapter, 4)
    index = torch.tensor([5, 0, 59, 5])
    for key in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"):
        rows = index % ckpt.shape(key)[0]
        torch.testing.assert_close(ckpt.rows(key, rows), ckpt.get(key)[rows], rtol=0, atol=1e-7)


def test_single_trained_tokens(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=[3, 41])
    ckpt = assert_same_as_peft(base, adapter, 4)  # two projections and both ends of the tied embedding
    index = torch.tensor([41, 2, 3, 3])
    assert torch.equal(ckpt.rows("model.embed_tokens.weight", index), ckpt.get("model.embed_tokens.weight")[index])
    assert "lm_head.weight" not in ckpt


@pytest.mark.parametrize("dora", [False, True])
def test_gpt2_stores_its_matrices_transposed_even_square_ones(dora: bool, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "gpt2")
    adapter = trained(base, tmp_path / "adapter", target_modules=["c_attn", "c_proj", "c_fc"], use_dora=dora)
    ckpt = assert_same_as_peft(base, adapter, 8)
    assert ckpt.shape("transformer.h.0.attn.c_proj.weight") == (16, 16)
    # The flag in the file is not to be trusted: PEFT corrects it by the module's type when it loads.
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": False}))
    assert_same_as_peft(base, adapter, 8)


def test_linear_modules_ignore_fan_in_fan_out(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))
    assert_same_as_peft(base, adapter, 2)


@pytest.mark.parametrize("dora", [False, True])
def test_t5(dora: bool, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "t5")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q", "v", "wi_0", "wo"], use_dora=dora)
    assert_same_as_peft(base, adapter, 6 * 2 + 4 * 2)


@pytest.mark.parametrize("dora", [False, True])
def test_clip_with_its_convolution(dora: bool, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "clip-vision")
    targets = ["q_proj", "fc2", "patch_embedding"]
    adapter = trained(base, tmp_path / "adapter", target_modules=targets, use_dora=dora)
    assert_same_as_peft(base, adapter, 5)


@pytest.mark.parametrize(("family", "targets", "changed"), [("vit", ["q_proj", "fc1"], 4), ("mixtral", ["q_proj"], 2)])
def test_families_whose_disk_names_differ(family: str, targets: list[str], changed: int, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", family)
    adapter = trained(base, tmp_path / "adapter", target_modules=targets)
    ckpt = assert_same_as_peft(base, adapter, changed)
    assert set(ckpt.keys()) == set(ckpt.base.keys())


def test_half_precision_is_folded_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    ckpt, _ = folded(base, adapter)
    key = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{key.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
    exact = ckpt.base.get(key).double() + 1.5 * (b.double() @ a.double())
    assert ckpt.dtype(key) == ckpt.get(key).dtype == torch.bfloat16
    assert torch.equal(ckpt.get(key), exact.float().to(torch.bfloat16))


# ------------------------------------------------------------------------------------------------ ties


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [4, 7]},
    ],
    ids=["embedding", "head", "both", "head-saved", "embedding-saved", "tied-adapters", "tokens"],
)
def test_tied_models_compute_what_peft_computes(config: dict[str, Any], tmp_path: Path) -> None:
    """The adapter was trained through PEFT's forward pass, where the other end of the tie is not adapted."""
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", **config)
    _, keys = folded(base, adapter)
    peft = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter).eval()
    (batch,) = batches("llama", 1, seed=0)
    with torch.no_grad():
        truth = peft(**batch).logits
        ours = loaded(keys)(**batch).logits
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


def test_an_adapter_beside_the_embedding_leaves_the_tie(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    ckpt, keys = folded(base, trained(base, tmp_path / "adapter", target_modules=LLAMA))
    assert ckpt.keys() == ckpt.base.keys() and keys.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert len(ckpt.touched) == 6


# ------------------------------------------------------------------------------------------------ names


def test_old_names_and_layouts(tmp_path: Path) -> None:
    """An adapter of a release that called a ViT's modules as on disk; DoRA's .weight; explicit adapter names."""
    base = saved(tmp_path / "base", "vit")
    adapter = trained(
        base, tmp_path / "adapter", target_modules=["q_proj"], use_dora=True, modules_to_save=["classifier"]
    )
    truth = everything(assert_same_as_peft(base, adapter, 4))

    def old(name: str) -> str:
        name = name.replace("vit.layers.", "vit.encoder.layer.")
        name = name.replace("attention.q_proj", "attention.attention.query")
        name = name.replace("lora_A.weight", "lora_A.default.weight")
        name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
        return name.replace("classifier.", "classifier.modules_to_save.default.")

    path = adapter / "adapter_model.safetensors"
    tensors = {old(k): v for k, v in load_file(path).items()}
    tensors["base_model.model.classifier.original_module.weight"] = torch.zeros(2, 16)
    save_file(tensors, path)
    again, _ = folded(base, adapter)
    assert equal(everything(again), truth)


def test_headed_adapter_on_a_bare_base(tmp_path: Path) -> None:
    full, bare = saved(tmp_path / "full", "bert"), tmp_path / "bare"
    adapter = trained(full, tmp_path / "adapter", target_modules=["query"], task_type="SEQ_CLS")
    BertForSequenceClassification.from_pretrained(full).bert.save_pretrained(bare)
    truth = open_model(f"{full}+{adapter}")
    ckpt = open_model(f"{bare}+{adapter}")
    assert isinstance(ckpt, AdaptedCheckpoint)
    name = "encoder.layer.1.attention.self.query.weight"
    assert torch.equal(ckpt.get(name), truth.get(f"bert.{name}"))
    assert torch.equal(ckpt.get("classifier.weight"), truth.get("classifier.weight"))
    assert ckpt.shape("classifier.weight") == truth.shape("classifier.weight") and "classifier.weight" not in ckpt.base


def test_base_from_the_adapter_config_or_given(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    assert is_adapter(adapter) and not is_adapter(base)
    alone = open_model(adapter)
    assert isinstance(alone, AdaptedCheckpoint) and alone.base.folder == base and alone.name == str(adapter)
    both = open_model(f"{base}+{adapter}")
    assert alone.fingerprint() == both.fingerprint() != alone.base.fingerprint()
    truth = everything(both)
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"the base that adapter .* names; another: MODEL\+ADAPTER"):
        open_model(adapter)
    assert equal(everything(open_model(adapter, base=open_checkpoint(moved))), truth)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(InputError, match=r"does not say which model it belongs to: give it as MODEL\+ADAPTER"):
        open_model(adapter)
    assert isinstance(open_model(moved), FileCheckpoint)
    pinned = {**config, "base_model_name_or_path": "org/base", "revision": "v2"}
    (adapter / "adapter_config.json").write_text(json.dumps(pinned))
    assert Adapter(adapter).base_ref == "org/base@v2"


def test_a_base_without_config_matches_names_as_they_are(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    truth = everything(open_model(f"{base}+{adapter}"))
    (base / "config.json").unlink()
    assert equal(everything(open_model(f"{base}+{adapter}")), truth)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.fixture()
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = saved(tmp_path / "base", "llama")
    return base, trained(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(adapter: Path, change: Any) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change({k: v.clone() for k, v in load_file(path).items()}), path)


def test_an_adapter_that_matches_nothing_or_a_part_is_an_error(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    original = load_file(adapter / "adapter_model.safetensors")
    rewrite(adapter, lambda t: {k.replace("layers.1", "layers.7"): v for k, v in t.items()})
    with pytest.raises(InputError, match=r"2 of its 4 tensors .* first is 'model.layers.7.self_attn.q_proj.weight'"):
        open_model(f"{base}+{adapter}")
    rewrite(adapter, lambda t: {k.replace("model.layers", "backbone.blocks"): v for k, v in original.items()})
    with pytest.raises(InputError, match=r"4 of its 4 tensors are not in the model, the first is 'backbone"):
        open_model(f"{base}+{adapter}")


def test_an_adapter_for_another_size_is_an_error_before_any_folding(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    rewrite(adapter, lambda t: {k: torch.zeros(32, 4) if "1.self_attn.q_proj.lora_B" in k else v for k, v in t.items()})
    with pytest.raises(InputError, match=r"a \[32, 16\] tensor at 'model.layers.1.self_attn.q_proj' .* has \[16, 16\]"):
        open_model(f"{base}+{adapter}")


def test_incomplete_adapters(pair: tuple[Path, Path]) -> None:
    _, adapter = pair
    edit(adapter, r=8)
    with pytest.raises(InputError, match=r"has rank 4 at .* says 8"):
        open_adapter(adapter)
    edit(adapter, r=4)
    rewrite(adapter, lambda t: {k: v for k, v in t.items() if "0.self_attn.v_proj.lora_B" not in k})
    with pytest.raises(InputError, match=r"lacks lora_B of 'model.layers.0.self_attn.v_proj'"):
        open_adapter(adapter)
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="holds no tensors"):
        open_adapter(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(InputError, match="cut short"):
        open_adapter(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no adapter_model.safetensors"):
        open_adapter(adapter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "of PEFT type IA3, and only LORA"),
        ({"peft_type": "PREFIX_TUNING"}, "of PEFT type PREFIX_TUNING"),
        ({"peft_type": "ADALORA"}, "of PEFT type ADALORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialised with pissa_niter_4, which changes the base weights too"),
        ({"init_lora_weights": "olora"}, "initialised with olora"),
        ({"init_lora_weights": "loftq"}, "initialised with loftq"),
        ({"use_qalora": True}, "uses use_qalora"),
        ({"alora_invocation_tokens": [1, 2]}, "uses alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "uses layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "uses target_parameters"),
    ],
)
def test_what_cannot_be_folded_is_refused_with_the_way_out(
    changes: dict[str, Any], words: str, pair: tuple[Path, Path]
) -> None:
    _, adapter = pair
    edit(adapter, **changes)
    with pytest.raises(InputError, match=words) as caught:
        open_adapter(adapter)
    assert "merge_and_unload" in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_that_was_never_trained_is_reported(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], untrained=True)
    (problem,) = open_model(f"{base}+{adapter}").check()
    assert "changes nothing (every lora_B is zero)" in problem


def test_swapped_model_and_adapter(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    with pytest.raises(InputError, match="is not a PEFT adapter"):
        open_model(f"{base}+{base}")
    with pytest.raises(InputError, match="is a PEFT adapter, not a full model"):
        open_model(f"{adapter}+{adapter}")


def test_pickled_adapter(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    truth = everything(open_model(f"{base}+{adapter}"))
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert equal(everything(open_model(f"{base}+{adapter}")), truth)


# ------------------------------------------------------------------------------------------------ memory, writing


def test_only_the_tensor_at_hand_is_read(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = pair
    ckpt = open_model(f"{base}+{adapter}")
    read: list[str] = []
    real = FileCheckpoint.get

    def spy(self: FileCheckpoint, key: str) -> Tensor:
        read.append(key)
        return real(self, key)

    monkeypatch.setattr(FileCheckpoint, "get", spy)
    ckpt.get("model.layers.0.self_attn.q_proj.weight")
    assert len(read) == 3 and all("layers.0.self_attn.q_proj" in key for key in read)
    read.clear()
    ckpt.get("model.norm.weight")
    assert read == ["model.norm.weight"]


def test_a_folded_checkpoint_can_be_written_as_a_model(tmp_path: Path) -> None:
    """A merged adapter becomes a full model in the base's layout, its untied head included."""
    base = tmp_path / "base"
    make("llama").save_pretrained(base, max_shard_size="4KB")  # type: ignore[operator]
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    ckpt, keys = folded(base, adapter)
    out = tmp_path / "out"
    out.mkdir()
    assemble(ckpt, {}, out)
    AutoConfig.from_pretrained(base).save_pretrained(out)
    truth: nn.Module = loaded(keys)
    result = LlamaForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in truth.state_dict().items())
    assert open_checkpoint(out).check() == []
