"""Surgery, ProbSurgery and SurgeryV2 against their formulas; training, folders, scoring."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import folders
import pico
from featcal.baselines import (
    METHODS,
    Corrected,
    DeepSurgery,
    ProbSurgery,
    Surgery,
    Training,
    open_candidates,
    train_surgery,
)
from featcal.baselines.corrected import is_corrected, load_corrected, shared_copy
from featcal.baselines.features import Pairs, final_rows, pair
from featcal.baselines.run import train_recipe
from featcal.baselines.train import _DeepLesson, _fit, _seed, in_turn, train_in_memory
from featcal.cli import main
from featcal.errors import InputError, RunError
from featcal.evaluate import Adapted, Classification, EvalTask, Generation, Likelihood, ZeroShotHead, evaluate
from featcal.evaluate.scorers import Batch
from featcal.network import Network
from featcal.plan import prepare
from featcal.recipe import load_recipe

CPU = torch.device("cpu")
FAMILIES = ["clip-vision", "bert", "t5", "llama"]
FAST = Training(steps=40, lr=5e-3)


def head_of(family: str) -> dict[str, Any]:
    """A CLIP head for the vision tower; other models have their own."""
    if family != "clip-vision":
        return {}
    g = torch.Generator().manual_seed(3)
    head = ZeroShotHead(torch.randn(5, 8, generator=g), torch.randn(8, pico.WIDTH, generator=g), 10.0)
    return {"task0": head, "task1": head}


def filled(adapter: nn.Module, seed: int = 1) -> Any:
    """With parameters that are not zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return adapter


# ---- formulas


def test_surgery_by_hand():
    adapter = Surgery(2, rank=1)
    with torch.no_grad():
        adapter.down_HD.copy_(torch.tensor([[1.0, -1.0]]))
        adapter.up_DH.copy_(torch.tensor([[2.0], [0.5]]))
    # V z = 3 and -1: the second row is left alone by the ReLU
    assert adapter(torch.tensor([[4.0, 1.0], [0.0, 1.0]])).tolist() == [[-2.0, -0.5], [0.0, 1.0]]
    loss = adapter.loss(torch.tensor([[4.0, 1.0]]), torch.tensor([[0.0, 0.0]]), torch.Generator())
    assert loss.item() == (2.0 + 0.5) / 2


def test_probsurgery_formulas():
    adapter = filled(ProbSurgery(6, rank=4))
    z, expert = torch.randn(5, 6), torch.randn(5, 6)
    a = (z @ adapter.down_HD.T).clamp_min(0)
    mean, log_variance = a @ adapter.mean_DH.T, a @ adapter.log_variance_DH.T
    assert torch.allclose(adapter(z), z - mean, atol=1e-6)  # inference: no sampling
    noise = torch.randn(5, 6, generator=torch.Generator().manual_seed(9))
    sample = mean + torch.exp(0.5 * log_variance) * noise
    kl = torch.stack([-0.5 * sum(1 + lv - m**2 - lv.exp() for lv, m in zip(*rows, strict=True))
                      for rows in zip(log_variance, mean, strict=True)]).mean()  # fmt: skip
    loss = adapter.loss(z, expert, torch.Generator().manual_seed(9))
    assert torch.allclose(loss, (z - sample - expert).abs().mean() + 1e-4 * kl, rtol=1e-6)
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    divergence = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    assert torch.allclose(kl, divergence, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_adapters_start_as_the_identity_with_a_kaiming_trunk(method: str):
    adapter: Any = DeepSurgery(["a", "b"], [6, 6], 6) if method == "surgery_v2" else METHODS[method](6)
    z = torch.randn(4, 3, 6)
    for layer in [*adapter.layers, adapter.final] if method == "surgery_v2" else [adapter]:
        assert torch.equal(layer(z), z) and torch.equal(layer(z.bfloat16()), z.bfloat16())
        reference = nn.Linear(6, len(layer.down_HD), bias=False).weight  # Kaiming-uniform with a = √5
        bound = reference.abs().max().item()
        assert 0.8 * bound < float(layer.down_HD.abs().max()) <= 6**-0.5
    others = [name for name, p in adapter.named_parameters() if not p.any()]
    assert len(others) == {"surgery": 1, "probsurgery": 2, "surgery_v2": 3}[method]


def test_probsurgery_starts_with_unit_noise():
    z, expert = torch.randn(5, 6), torch.randn(5, 6)
    noise = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    loss = ProbSurgery(6).loss(z, expert, torch.Generator().manual_seed(2))
    assert torch.allclose(loss, (z - noise - expert).abs().mean())


def test_published_sizes():
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(Surgery(512)) == 16_384 and count(Surgery(768)) == 24_576
    assert count(ProbSurgery(512)) == 196_608
    assert count(DeepSurgery(list("abcdefghijkl"), [768] * 12, 512)) == 12 * 2 * 16 * 768 + 16_384
    assert vars(Training()) == {"steps": 1000, "batch_size": 16, "lr": 1e-3, "rank": None, "seed": 42}


def test_training_is_adam_on_shuffled_batches_of_the_samples():
    """A literal loop, with samples of one, two or three rows."""
    counts = [1, 3, 2, 1, 2]
    pairs = Pairs(torch.randn(9, 6), torch.randn(9, 6), counts, "")
    training = Training(steps=7, batch_size=2, lr=0.01)
    ours, theirs = filled(Surgery(6, 4)), filled(Surgery(6, 4))
    _fit(ours, pairs, "cars", training, CPU, False)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    seen = []
    turns = in_turn(5, 2, _seed(42, "cars/order"))
    for _ in range(7):
        samples = next(turns)
        seen.append(samples)
        rows = torch.cat([(owner == s).nonzero().flatten() for s in samples])
        z, expert = pairs.merged_RD[rows], pairs.expert_RD[rows]
        corrected = z - (z @ theirs.down_HD.T).relu() @ theirs.up_DH.T
        optimizer.zero_grad()
        (corrected - expert).abs().mean().backward()
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert [len(s) for s in seen] == [2, 2, 1, 2, 2, 1, 2]
    first, second = ([s for samples in seen[i : i + 3] for s in samples] for i in (0, 3))
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4] and first != second


# ---- features


def plain_features(model: nn.Module, family: str, batch: Any) -> Tensor:
    """By an ordinary forward: what the head reads, on real tokens (the decoder's for T5)."""
    if family == "clip-vision":
        return head_of(family)["task0"].features(model, batch)
    seen: list[Tensor] = []
    layer = model.classifier if family == "bert" else model.lm_head
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[union-attr,operator]
    with torch.no_grad():
        model(**batch)
    handle.remove()
    if family == "bert":
        return seen[0]
    mask = batch["decoder_attention_mask" if family == "t5" else "attention_mask"]
    return seen[0][mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_an_ordinary_forward(family: str):
    setup = pico.family_setup(family)
    network = Network("the merged model", setup.merged, setup.blocks, CPU)
    with network.open():
        found = final_rows(network, setup.data, head_of(family), pooled=True)
    for task, batches in setup.data.items():
        expected = torch.cat([plain_features(setup.merged, family, batch) for batch in batches])
        assert torch.allclose(found[task].values_RD, expected, atol=1e-5)
        assert len(found[task].counts) == sum(len(next(iter(b.values()))) for b in batches)
        assert sum(found[task].counts) == len(expected)
        assert list(found[task].pooled) == setup.blocks and len(found[task].pooled[setup.blocks[0]]) == len(batches)


def test_features_that_are_not_finite_name_the_model():
    setup = pico.family_setup("bert")
    with torch.no_grad():
        setup.experts["task1"].bert.pooler.dense.bias.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(InputError, match="task 'task1': the features of expert 'task1' are not finite"):
        train_surgery("surgery", setup.merged, setup.experts, setup.data, training=FAST, device="cpu", progress=False)


def test_heads_of_several_layers_are_refused():
    setup = pico.family_setup("roberta")
    with pytest.raises(InputError, match="RobertaForSequenceClassification has a head of more than one layer"):
        train_surgery("surgery", setup.merged, setup.experts, setup.data, training=FAST, device="cpu", progress=False)


# ---- training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_training_brings_features_closer_and_is_repeatable(method: str, family: str):
    setup, steps = pico.family_setup(family, noise=0.2), 15 if method == "surgery_v2" else 60
    before = {name: p.clone() for name, p in setup.merged.state_dict().items()}

    def trained(seed: int = 42, turned: bool = False) -> Any:
        experts = dict(reversed(setup.experts.items())) if turned else setup.experts
        return train_in_memory(
            method, setup.merged, experts, setup.data, heads=head_of(family), progress=False, device="cpu",
            training=Training(steps, lr=5e-3, batch_size=4, rank=8, seed=seed),
        )  # fmt: skip

    first = trained()
    assert list(first.adapters) == ["task0", "task1"] and first.seconds > 0
    unused = {"probsurgery": "log_variance_DH"}.get(method)
    used = [p for a in first.adapters.values() for name, p in a.named_parameters() if name != unused]
    assert first.parameters == sum(p.numel() for p in used)
    for task in first.adapters:
        assert first.after[task] < 0.95 * first.before[task], (task, first.before, first.after)
    again, other = trained(turned=True), trained(seed=7)
    for task, adapter in first.adapters.items():
        same = again.adapters[task].state_dict()
        assert all(torch.equal(value, same[name]) for name, value in adapter.state_dict().items())
        differs = other.adapters[task].state_dict()
        assert not all(torch.equal(value, differs[name]) for name, value in adapter.state_dict().items())
    assert all(torch.equal(value, setup.merged.state_dict()[name]) for name, value in before.items())
    assert all(p.requires_grad for p in setup.merged.parameters()) and not setup.merged.training


@pytest.mark.parametrize("method", METHODS)
def test_without_steps_the_merged_model_answers(method: str):
    setup = pico.family_setup("bert")
    adapters = train_surgery(
        method, setup.merged, setup.experts, setup.data, training=Training(steps=0), device="cpu", progress=False
    )
    corrected = Corrected(method, setup.merged, adapters)
    batch = setup.data["task0"][0]
    with torch.no_grad():
        assert torch.equal(corrected.logits(batch, "task0"), setup.merged(**batch).logits)


def test_the_loss_of_surgery_v2_sums_over_blocks_and_the_feature():
    """One sample batch, random adapters: the terms by hand, on hooks of our own."""
    setup = pico.family_setup("bert")
    batch = setup.data["task0"][0]
    blocks = setup.blocks
    adapter = filled(DeepSurgery(blocks, [16, 16], 16, rank=3))
    mask = batch["attention_mask"][..., None].float()

    def mean(x: Tensor) -> Tensor:
        return (x * mask).sum(1) / mask.sum(1)

    def run(model: nn.Module, layers: list[Surgery] | None) -> list[Tensor]:
        found: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            layer = None if layers is None else layers[len(found)]
            value = output if layer is None else output - (output @ layer.down_HD.T).relu() @ layer.up_DH.T
            found.append(mean(value))
            return value

        handles = [model.get_submodule(name).register_forward_hook(hook) for name in blocks]
        handles.append(model.classifier.register_forward_pre_hook(lambda _, args: found.append(args[0])))  # type: ignore
        model(**batch)
        for handle in handles:
            handle.remove()
        return found

    layers = list(adapter.layers)
    ours, theirs = run(setup.merged, layers), run(setup.experts["task0"], None)
    final = adapter.final
    ours[-1] = ours[-1] - (ours[-1] @ final.down_HD.T).relu() @ final.up_DH.T
    expected = sum((a - b).abs().mean() for a, b in zip(ours, theirs, strict=True))

    networks = [Network(n, m, blocks, CPU) for n, m in (("m", setup.merged), ("e", setup.experts["task0"]))]
    rows = []
    for network in networks:
        with network.open():
            rows.append(final_rows(network, {"t": [batch]}, {}, pooled=True)["t"])
    whole = Network("m", setup.merged, [], CPU)
    lesson = _DeepLesson(adapter, whole, [batch], pair("t", *rows), rows[1], None)
    with whole.open(), torch.enable_grad():
        loss = lesson.loss(0)
        loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters())


# ---- at inference


def test_deep_adapters_work_inside_a_copy_that_shares_the_weights():
    setup = pico.family_setup("llama")
    adapter = filled(DeepSurgery(setup.blocks, [16, 16], 16, rank=3))
    corrected = Corrected("surgery_v2", setup.merged, {"t": adapter})
    batch = setup.data["task0"][0]
    with torch.no_grad():
        plain = setup.merged(**batch).logits
        with pytest.raises(InputError, match="corrects inside the blocks"):
            adapter(torch.zeros(1, 16))
        got = corrected.logits(batch, "t")
        assert torch.equal(setup.merged(**batch).logits, plain)  # the merged model itself is as it was
        with adapter.inserted(setup.merged):
            states = setup.merged.model(**batch).last_hidden_state
        expected = setup.merged.lm_head(adapter.final(states))
    assert torch.allclose(got, expected, atol=1e-6) and not torch.allclose(got, plain, atol=1e-2)
    inside = corrected.candidate("t").model
    assert {id(p) for p in inside.parameters()} == {id(p) for p in setup.merged.parameters()}
    assert corrected.parameters == 3 * 2 * 3 * 16
    with pytest.raises(InputError, match="no adapter for task 'u'"):
        corrected.candidate("u")


def test_shared_copies_keep_ties_and_buffers():
    setup = pico.family_setup("gpt2")
    copy = shared_copy(setup.base)
    assert copy is not setup.base and copy.lm_head.weight is copy.transformer.wte.weight  # type: ignore[union-attr]
    assert [id(t) for t in copy.buffers()] == [id(t) for t in setup.base.buffers()]


def scored_task(family: str, setup: pico.Setup) -> EvalTask:
    """A task whose rows are batches of one sample of the setup's data."""
    first = setup.data["task0"][0]
    rows = [{name: value[i : i + 1] for name, value in first.items()} for i in range(3)]

    def collate(scorer: Any) -> Any:
        def read(rows: Any) -> Batch:
            inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            if family == "llama":
                inputs["counted"] = inputs["attention_mask"]
            return Batch(inputs, None, len(rows))

        object.__setattr__(scorer, "collate", read)
        return scorer

    if family == "t5":
        return EvalTask("task0", collate(Generation(dict, folders.tokenizer(), attention_mask=True)), rows)
    if family == "llama":
        return EvalTask("task0", collate(Likelihood(None)), rows)  # type: ignore[arg-type]
    heads = head_of(family)
    scorer = Classification(dict, heads["task0"]) if heads else Classification(dict)
    return EvalTask("task0", collate(scorer), rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_candidates_are_scored_like_any_model(method: str, family: str):
    setup = pico.family_setup(family, noise=0.3)
    heads = head_of(family)
    adapters = train_surgery(
        method, setup.merged, setup.experts, setup.data, heads=heads, progress=False, device="cpu",
        training=Training(steps=25, lr=1e-2, rank=8),
    )  # fmt: skip
    corrected = Corrected(method, setup.merged, adapters)
    models = {"expert": setup.experts["task0"], "merged": setup.merged, "corrected": corrected.candidate("task0")}
    scores = evaluate(models, scored_task(family, setup), expert="expert", device="cpu", progress=False, resamples=0)
    assert scores["corrected"]["agreement"].value >= scores["merged"]["agreement"].value
    batch = setup.data["task0"][0]
    head = heads.get("task0")
    with torch.no_grad():
        plain = head(setup.merged, batch) if head else setup.merged(**batch).logits
    logits = corrected.logits(batch, "task0", head)
    assert logits.shape == plain.shape and not torch.allclose(logits, plain)
    if family in ("bert", "clip-vision"):
        feature = plain_features(setup.merged, family, batch)
        if method != "surgery_v2":
            through = adapters["task0"](feature)
            expected = head.scores(through) if head else setup.merged.classifier(through)  # type: ignore[operator]
            assert torch.allclose(logits, expected, atol=1e-5)


# ---- folders


@pytest.mark.parametrize("method", METHODS)
def test_saved_adapters_load_back_to_the_same_answers(method: str, tmp_path: Path):
    setup = pico.family_setup("bert")
    tasks = {"a": setup.experts["task0"], "a/b": setup.experts["task1"]}
    data = {"a": setup.data["task0"], "a/b": setup.data["task1"]}
    adapters = train_surgery(method, setup.merged, tasks, data, training=FAST, device="cpu", progress=False)
    setup.merged.save_pretrained(tmp_path / "out" / "merged")  # type: ignore[operator]
    corrected = Corrected(method, setup.merged, adapters, {"note": "kept"})
    corrected.save(tmp_path / "out", "./merged")
    loaded = load_corrected(tmp_path / "out")
    assert loaded.method == method and loaded.facts == {"note": "kept"} and loaded.parameters == corrected.parameters
    for task, batches in data.items():
        assert torch.equal(loaded.logits(batches[0], task), corrected.logits(batches[0], task))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["featcal_baseline"] == method and config["tasks"] == ["a", "a/b"]
    assert is_corrected(tmp_path / "out") and not is_corrected(tmp_path / "out" / "merged")
    (tmp_path / "out" / "adapters.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="is damaged"):
        load_corrected(tmp_path / "out")
    with pytest.raises(InputError, match="is not a folder of adapters"):
        load_corrected(tmp_path)


def recipe_for(folder: Path, family: str, **content: Any) -> Path:
    recipe = folders.make_job(folder, family)
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **content}, sort_keys=False))
    return recipe


@pytest.mark.parametrize("family", ["clip-vision", "clip", "bert", "t5", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_from_a_recipe(method: str, family: str, tmp_path: Path):
    recipe = recipe_for(tmp_path, family, merged={"method": "task_arithmetic"})
    steps = 10 if method == "surgery_v2" else 100
    fast = Training(steps, lr=1e-2, rank=4)
    outcome = train_recipe(recipe, tmp_path / "out", method, training=fast, progress=False)
    assert all(outcome.after[task] < outcome.before[task] for task in ("task0", "task1"))
    stored = load_file(tmp_path / "out" / "adapters.safetensors")
    assert outcome.parameters == sum(t.numel() for name, t in stored.items() if "log_variance" not in name)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"adapters.safetensors", "config.json", "featcal.yaml", "merged"} and not list(
        folders.hidden(tmp_path)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["merged"] == "./merged" and config["samples"] == {"task0": 12, "task1": 12}
    assert config["l1_after"] == outcome.after and config["training"]["steps"] == steps
    loaded = load_corrected(tmp_path / "out")
    batch = pico.batches(family, 1, 5)[0]
    if family == "clip-vision":
        with pytest.raises(InputError, match="no output layer that an adapter could act on"):
            loaded.logits(batch, "task0")
    elif family == "clip":
        assert not any(name.startswith("text") for name in config["blocks"])
    else:
        assert loaded.logits(batch, "task0").isfinite().all()


def test_adapters_belong_to_one_merged_model(tmp_path: Path):
    recipe = recipe_for(tmp_path, "bert")
    train_recipe(recipe, tmp_path / "out", "surgery", training=FAST, progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["merged"] == str(tmp_path / "merged") and not (tmp_path / "out" / "merged").exists()
    assert load_corrected(tmp_path / "out").method == "surgery"
    batch = pico.batches("bert", 1, 5)[0]
    model, candidate = open_candidates(tmp_path / "out")
    with torch.no_grad():
        assert isinstance(candidate("task1"), Adapted) and torch.isfinite(model(**batch).logits).all()
    plain, itself = open_candidates(tmp_path / "merged")
    assert itself("task1") is plain
    shutil.copy(tmp_path / "task0" / "model.safetensors", tmp_path / "merged" / "model.safetensors")
    with pytest.raises(InputError, match="is not the one that the adapters"):
        load_corrected(tmp_path / "out")


def test_training_from_files_equals_training_in_memory(tmp_path: Path):
    setup = pico.family_setup("llama")
    recipe = folders.make_job(tmp_path, "llama", setup=setup)
    train_recipe(recipe, tmp_path / "out", "surgery", training=FAST, progress=False)
    plan = prepare(load_recipe(recipe))
    data = {task: own.learn.batches for task, own in plan.tasks.items()}
    adapters = train_surgery("surgery", setup.merged, setup.experts, data, training=FAST, device="cpu", progress=False)
    saved = load_file(tmp_path / "out" / "adapters.safetensors")
    for task, adapter in adapters.items():
        for name, value in adapter.state_dict().items():
            assert torch.allclose(saved[f"{task}/{name}"], value, atol=1e-6)


def test_mistakes_are_named(tmp_path: Path):
    setup = pico.family_setup("bert")
    data = {"task0": setup.data["task0"]}
    with pytest.raises(InputError, match="task 'task1' has no data"):
        train_surgery("surgery", setup.merged, setup.experts, data, device="cpu", progress=False)
    with pytest.raises(InputError, match="unknown method 'surgry'; did you mean 'surgery'"):
        train_surgery("surgry", setup.merged, setup.experts, setup.data, device="cpu", progress=False)
    with pytest.raises(RunError, match="the adapter's loss is not finite any more"):
        train_surgery("probsurgery", setup.merged, setup.experts, setup.data, device="cpu", progress=False,
                      training=Training(steps=50, lr=1e30))  # fmt: skip
    recipe = recipe_for(tmp_path, "bert")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        train_recipe(recipe, tmp_path / "out", "surgery", training=FAST, progress=False)


def test_the_command_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr("featcal.baselines.run.Training", lambda: FAST)
    recipe = recipe_for(tmp_path, "bert")
    arguments = ["-q", "calibrate", str(recipe), "-o", str(tmp_path / "out"), "--method", "probsurgery"]
    monkeypatch.setattr(sys, "argv", ["featcal", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and load_corrected(tmp_path / "out").method == "probsurgery"
    assert "extra parameters" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["featcal", *arguments[:-1], "sugery"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "did you mean 'surgery'" in capsys.readouterr().err
    for flag, words in {
        "--strict": "--strict goes with --method featcal",
        "--base=x": "--base goes with a merged model",
        "--max-memory=1G": "--max-memory goes with --method featcal",
    }.items():
        monkeypatch.setattr(sys, "argv", ["featcal", *arguments, "--overwrite", flag])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and words in capsys.readouterr().err
