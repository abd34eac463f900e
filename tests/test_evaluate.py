"""Scores against values done by hand and scikit-learn / transformers as oracles, on pico models."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score
from torch import Tensor, nn
from transformers import CLIPImageProcessor

import featcal.evaluate.recipe
from featcal.blocks import inference
from featcal.data.tables import open_table
from featcal.errors import InputError
from featcal.evaluate import (
    Adapted,
    Classification,
    EvalTask,
    Generation,
    ImageReader,
    Likelihood,
    PromptReader,
    Score,
    TableRows,
    TextReader,
    ZeroShotHead,
    average,
    choose_rows,
    evaluate,
    evaluate_recipe,
    load_centroid_head,
    main_scores,
    predict,
    run_harness,
    score,
    score_table,
    write_scores,
    zero_shot_head,
)
from featcal.evaluate.harness import HarnessTask, is_installed
from featcal.evaluate.tasks import RecipeTasks
from featcal.recipe import DataSpec, load_recipe
from featcal.report import parse_scores
from pico import family_setup, make, perturbed
from words import WORDS, tokenizer


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    g = np.random.default_rng(seed)
    return [Image.fromarray(g.integers(0, 256, (15, 20, 3), dtype=np.uint8)) for _ in range(count)]


def processor() -> Any:
    return CLIPImageProcessor(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})


# ---- metrics


def test_accuracy_with_its_interval():
    outcomes = np.array([[1.0]] * 70 + [[0.0]] * 30)
    result = score("accuracy", outcomes)
    assert (result.value, result.n) == (70.0, 100)
    half = 196 * math.sqrt(0.7 * 0.3 / 100)
    assert result.low == pytest.approx(70 - half, abs=1.5)
    assert result.high == pytest.approx(70 + half, abs=1.5)
    assert score("accuracy", outcomes) == result, "the bootstrap is seeded"


def test_spearman_equals_scipy_with_ties():
    from scipy.stats import spearmanr

    g = np.random.default_rng(0)
    pairs = g.integers(0, 6, (200, 2)).astype(float)
    pairs[:, 1] += pairs[:, 0]
    assert score("spearman", pairs, resamples=0).value == pytest.approx(100 * spearmanr(*pairs.T).statistic, abs=1e-9)
    constant = np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    assert score("spearman", constant).value == 0.0


def test_averages_by_unit():
    percent = {"a": Score("accuracy", 50.0, 9, 0, 0), "b": Score("spearman", 80.0, 9, 0, 0)}
    assert average(percent) == 65.0
    nats = {"a": Score("perplexity", 2.0, 9, 0, 0), "b": Score("perplexity", 8.0, 9, 0, 0)}
    assert average(nats) == pytest.approx(4.0)
    assert average(percent | nats | {"c": percent["a"]}) is None


# ---- CLIP zero-shot


class CharTokenizer:
    """A stand-in whose ids are letters, padded with zeros."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        longest = max(map(len, texts))
        rows = [[3 + ord(c) % 50 for c in text] + [0] * (longest - len(text)) for text in texts]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_zero_shot_head_is_the_published_protocol():
    clip = make("clip")
    names, templates = ["cat", "dog", "a mat"], ["a photo of {}.", "the {}!"]
    head = zero_shot_head(clip, CharTokenizer(), names, templates)
    rows = []
    for name in names:
        units = []
        for template in templates:
            tokens = CharTokenizer()([template.format(name)])
            with torch.no_grad():
                embedding = clip.text_projection(clip.text_model(**tokens).pooler_output)[0]
            units.append(embedding / embedding.norm())
        mean = torch.stack(units).mean(0)
        rows.append(mean / mean.norm())
    torch.testing.assert_close(head.text_CP, torch.stack(rows), atol=1e-6, rtol=1e-5)
    pixels = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        image = clip.visual_projection(clip.vision_model(pixels).pooler_output)
        expected = clip.logit_scale.exp() * (image / image.norm(dim=-1, keepdim=True)) @ torch.stack(rows).T
        torch.testing.assert_close(head(clip, {"pixel_values": pixels}), expected, atol=1e-4, rtol=1e-4)
        own_tower = head(clip.vision_model, pixels)
    torch.testing.assert_close(own_tower, expected, atol=1e-4, rtol=1e-4)


def image_task(head: ZeroShotHead, count: int = 11) -> tuple[EvalTask, list[dict[str, Any]]]:
    rows = [{"img": image, "fine_label": i % 3} for i, image in enumerate(pictures(count))]
    return EvalTask("letters", Classification(ImageReader(processor()), head), rows), rows


def test_images_are_scored_as_by_hand_and_batches_do_not_matter():
    setup = family_setup("clip-vision")
    head = ZeroShotHead(torch.eye(3, 16), torch.eye(16), 10.0)
    task, rows = image_task(head)
    got = evaluate({"base": setup.base, "merged": setup.merged}, task, batch_size=4, device="cpu", progress=False)
    again = evaluate({"base": setup.base}, task, batch_size=11, device="cpu", progress=False)
    assert got["base"] == again["base"]
    for name, model in {"base": setup.base, "merged": setup.merged}.items():
        pixels = processor()(images=[row["img"] for row in rows], return_tensors="pt")["pixel_values"]
        with inference(model):
            guesses = head(model, pixels).argmax(-1)
        truth = [row["fine_label"] for row in rows]
        assert got[name]["accuracy"].value == pytest.approx(100 * accuracy_score(truth, guesses))


def test_booleans_are_labels_and_out_of_range_labels_are_refused():
    model = make("clip-vision")
    head = ZeroShotHead(torch.eye(2, 16), torch.eye(16), 1.0)
    rows = [{"image": image, "label": i % 2 == 0} for i, image in enumerate(pictures(4))]
    task = EvalTask("pcam", Classification(ImageReader(processor()), head), rows)
    found = predict({"m": model}, task, device="cpu", progress=False)["m"]
    assert found.outcomes is not None
    assert found.outcomes[:, 0].tolist() == [
        float(c == int(r["label"])) for c, r in zip(found.choices, rows, strict=True)
    ]
    rows[2]["label"] = 2  # type: ignore[assignment]
    with pytest.raises(InputError, match="label 2 is out of range: the head has classes 0 to 1"):
        predict({"m": model}, task, device="cpu", progress=False)


def test_corruption_acts_before_normalisation():
    seen: list[Tensor] = []

    def invert(image: Tensor) -> Tensor:
        seen.append(image)
        return 1 - image

    images = [{"image": image} for image in pictures(2)]
    clean = ImageReader(processor())(images)["pixel_values"]
    spoilt = ImageReader(processor(), corrupt=invert)(images)["pixel_values"]
    assert all(image.min() >= 0 and image.max() <= 1 and image.shape == (3, 12, 12) for image in seen)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor().image_mean, processor().image_std))
    torch.testing.assert_close(spoilt * std + mean, 1 - (clean * std + mean), atol=1e-5, rtol=0)


def test_limit_is_a_seeded_choice_of_rows():
    rows = [{"i": i} for i in range(100)]
    chosen = [row["i"] for row in choose_rows(rows, 10)]
    assert chosen == sorted(chosen) == [row["i"] for row in choose_rows(rows, 10)]
    assert max(chosen) > 50, "not the first rows: test sets are often sorted by class"
    assert len(choose_rows(rows, 1000)) == 100
    with pytest.raises(InputError, match="at least 1"):
        choose_rows(rows, 0)


# ---- own classifiers, fixed heads


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_models_own_classifier(family: str):
    setup = family_setup(family)
    if family == "vit":
        rows: list[dict[str, Any]] = [{"image": image, "label": i % 2} for i, image in enumerate(pictures(6))]
        reader: Any = ImageReader(processor())
    else:
        rows = [{"text": text, "label": i % 2} for i, text in enumerate(["the cat", "no", "a mat sat .", "1 2 3"])]
        reader = TextReader(tokenizer())
    task = EvalTask("t", Classification(reader), rows)
    got = evaluate({"m": setup.merged, "e": setup.experts["task0"]}, task, expert="e", device="cpu", progress=False)
    with inference(setup.merged), inference(setup.experts["task0"]):
        mine = setup.merged(**reader(rows)).logits.argmax(-1)
        other = setup.experts["task0"](**reader(rows)).logits.argmax(-1)
    labels = torch.tensor([row["label"] for row in rows])
    assert got["m"]["accuracy"].value == pytest.approx(100 * float((mine == labels).double().mean()))
    assert got["m"]["agreement"].value == pytest.approx(100 * float((mine == other).double().mean()))
    assert "agreement" not in got["e"]


def test_agreement_needs_no_labels():
    setup = family_setup("bert")
    task = EvalTask("t", Classification(TextReader(tokenizer()), label=()), [{"text": "the cat"}, {"text": "no"}])
    got = evaluate({"m": setup.merged, "e": setup.experts["task0"]}, task, expert="e", device="cpu", progress=False)
    assert set(got["m"]) == {"agreement"}
    assert got["e"] == {}


def test_a_bare_encoder_has_no_classifier():
    task = EvalTask("t", Classification(ImageReader(processor())), [{"image": pictures(1)[0], "label": 0}])
    with pytest.raises(InputError, match="CLIPVisionModel has no classifier of its own"):
        predict({"m": make("clip-vision")}, task, device="cpu", progress=False)


def test_centroid_head(tmp_path: Any):
    centroids = torch.randn(4, 16)
    save_file({"centroids": centroids, "logit_scale": torch.tensor(7.0)}, tmp_path / "head.safetensors")
    head = load_centroid_head(tmp_path / "head.safetensors")
    model = make("bert").bert
    rows = [{"text": "the cat sat"}, {"text": "no"}]
    inputs = TextReader(tokenizer())(rows)
    assert 0 in inputs["attention_mask"], "the rows differ in length"
    got = head(model, inputs)
    for i, row in enumerate(rows):
        with torch.no_grad():
            hidden = model(**TextReader(tokenizer())([row])).last_hidden_state[0].mean(0)
        expected = 7 * torch.cosine_similarity(hidden, centroids)
        torch.testing.assert_close(got[i], expected, atol=1e-4, rtol=1e-4)
    save_file({"centroids": centroids}, tmp_path / "odd.safetensors")
    with pytest.raises(InputError, match="needs the tensors 'centroids'"):
        load_centroid_head(tmp_path / "odd.safetensors")
    with pytest.raises(InputError, match="no file"):
        load_centroid_head(tmp_path / "absent.safetensors")


def test_adapters_act_between_features_and_scores():
    model = make("bert")
    task = EvalTask("t", Classification(TextReader(tokenizer())), [{"text": "the cat", "label": 0}])
    dead = Adapted(model, {"t": torch.zeros_like})
    flipped = Adapted(model, {"other": torch.zeros_like})
    seen: list[Tensor] = []
    handle = model.classifier.register_forward_hook(lambda m, args, out: seen.append(args[0]))  # type: ignore[union-attr]
    predict({"plain": model, "dead": dead, "other": flipped}, task, device="cpu", progress=False)
    handle.remove()
    assert seen[0].any() and not seen[1].any()
    torch.testing.assert_close(seen[2], seen[0])
    head = ZeroShotHead(torch.eye(2, 16), torch.eye(16), 1.0)
    vision, (images, _) = make("clip-vision"), image_task(head, 3)
    images = EvalTask("t", Classification(ImageReader(processor()), head, label=()), images.rows)
    to_last = Adapted(vision, {"t": lambda z: torch.eye(2, 16)[[1]].expand_as(z)})
    assert predict({"m": to_last}, images, device="cpu", progress=False)["m"].choices == [1, 1, 1]


# ---- text-to-text


class Parrot(nn.Module):
    """Writes a fixed answer whatever it reads; records what it was given."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.text, self.given = text, {}  # type: ignore[var-annotated]

    def generate(self, **given: Any) -> Tensor:
        self.given = given
        ids = tokenizer()(self.text)["input_ids"]
        return torch.tensor([[0, *ids]] * len(given["input_ids"]))


def test_generation_is_greedy_exact_match_from_input_ids_alone():
    rows = [{"sentence": "the cat", "label": 0}, {"sentence": "no mat .", "label": 1}, {"sentence": "1 2", "label": 1}]
    reader = TextReader(tokenizer(), template="Q : is it true {sentence}")
    scorer = Generation(reader, tokenizer(), words=("no", "yes"))
    parrot = Parrot("yes")
    result = evaluate({"m": parrot}, EvalTask("t", scorer, rows), device="cpu", progress=False)["m"]["exact_match"]
    assert result.value == pytest.approx(200 / 3)
    assert set(parrot.given) == {"input_ids", "generation_config", "logits_processor"}
    config = parrot.given["generation_config"]
    assert (config.max_length, config.num_beams, config.do_sample) == (10, 1, False)
    assert parrot.given["input_ids"][0, 0] == 4 + WORDS.index("Q")
    masked = Generation(reader, tokenizer(), words=("no", "yes"), attention_mask=True)
    evaluate({"m": parrot}, EvalTask("t", masked, rows), device="cpu", progress=False)
    assert "attention_mask" in parrot.given
    with pytest.raises(InputError, match="label 2 has no answer word"):
        masked.collate([{"sentence": "no", "label": 2}])


def greedy_by_hand(model: Any, inputs: dict[str, Tensor], steps: int) -> str:
    """One row, decoded with the model's own forward."""
    decoded = torch.zeros(1, 1, dtype=torch.long)
    with inference(model):
        for _ in range(steps):
            logits = model(**inputs, decoder_input_ids=decoded).logits[:, -1]
            decoded = torch.cat([decoded, logits.argmax(-1, keepdim=True)], 1)
            if decoded[0, -1] == 2:
                break
    return str(tokenizer().decode(decoded[0], skip_special_tokens=True))


def test_generation_on_a_real_t5_with_and_without_a_mask():
    """transformers 5 builds no mask for encoder-decoders: with input_ids only, padding is read like any token."""
    model: Any = family_setup("t5").merged
    rows = [{"text": "the cat sat on a mat"}, {"text": "no"}]
    reader = TextReader(tokenizer())
    for masked in (True, False):
        scorer = Generation(reader, tokenizer(), label=(), max_length=4, attention_mask=masked)
        got = predict({"m": model}, EvalTask("t", scorer, rows), device="cpu", progress=False)["m"].choices
        padded = reader(rows)["input_ids"]
        alone = [reader([row])["input_ids"] if masked else padded[i : i + 1] for i, row in enumerate(rows)]
        assert got == [greedy_by_hand(model, {"input_ids": ids}, 3) for ids in alone]
    assert (reader(rows)["attention_mask"] == 0).any()


def test_numbers_are_parsed_with_zero_for_the_rest():
    rows = [{"text": "a", "label": value} for value in (1.0, 2.04, 3.3)]
    scorer = Generation(TextReader(tokenizer()), tokenizer(), metric="spearman")
    found = predict({"m": Parrot("maybe 3")}, EvalTask("t", scorer, rows), device="cpu", progress=False)["m"]
    assert found.outcomes is not None
    assert found.outcomes[:, 0].tolist() == [0.0, 0.0, 0.0]
    found = predict({"m": Parrot("3")}, EvalTask("t", scorer, rows[:1]), device="cpu", progress=False)["m"]
    assert found.outcomes is not None and found.outcomes[0, 0] == 3.0


# ---- causal LMs


def test_perplexity_counts_what_transformers_counts():
    setup = family_setup("llama")
    model: Any = setup.merged
    rows = [{"q": "the cat", "a": "sat on a mat"}, {"q": "is it", "a": "no"}]
    reader = PromptReader(tokenizer(), prompt="Q : {q}", response="{a}")
    task = EvalTask("qa", Likelihood(reader), rows)
    models_ = {"m": model, "e": setup.experts["task0"]}
    got = evaluate(models_, task, expert="e", device="cpu", progress=False)["m"]
    total, tokens, alike = 0.0, 0, 0
    for row in rows:
        head = tokenizer()(f"Q : {row['q']}")["input_ids"][:-1]
        tail = tokenizer()(row["a"])["input_ids"]
        ids = torch.tensor([[*head, *tail]])
        labels = torch.tensor([[-100] * len(head) + tail])
        with inference(model), inference(setup.experts["task0"]):
            total += float(model(input_ids=ids, labels=labels).loss) * len(tail)
            mine, other = (m(input_ids=ids).logits[0, len(head) - 1 : -1].argmax(-1) for m in models_.values())
        tokens += len(tail)
        alike += int((mine == other).sum())
    assert got["perplexity"].value == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert got["agreement"].value == pytest.approx(100 * alike / tokens)
    assert got["perplexity"].n == 2


def test_prompts_with_an_optional_input_and_plain_texts():
    reader = PromptReader(tokenizer(), prompt="Q : {q}", response="{a}", prompt_if=("x", "Q : {q} {x}"))
    ids, head = reader.encode({"q": "the", "x": "cat", "a": "no"})
    assert tokenizer().decode(ids) == "Q : the cat no </s>" and head == 4
    ids, head = reader.encode({"q": "the", "x": "", "a": "no"})
    assert tokenizer().decode(ids) == "Q : the no </s>" and head == 3
    plain = PromptReader(tokenizer(), response="{text}", max_length=2)([{"text": "the cat sat"}])
    assert plain["counted"].tolist() == [[1, 1]]
    with pytest.raises(InputError, match="no column 'txt'; did you mean 'text'"):
        PromptReader(tokenizer(), response="{txt}")([{"text": "a"}])


# ---- rows, files, tables, lm-eval


def test_rows_of_a_table_under_new_names(tmp_path: Any):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"__key__": i, "jpg": f"p{i}", "cls": i}) + "\n" for i in range(3)))
    table = open_table(DataSpec(source=str(file)))
    rows = TableRows(table, {"image": "jpg", "label": "cls"})
    assert [dict(row) for row in rows[1:]] == [{"image": "p1", "label": 1}, {"image": "p2", "label": 2}]
    with pytest.raises(InputError, match="has no column 'image'"):
        TableRows(table, {"image": "image"})


def test_scores_file_and_table(tmp_path: Any):
    scores = {"a": {"accuracy": Score("accuracy", 50.0, 4, 40.0, 60.0), "agreement": Score("agreement", 90, 4, 80, 99)},
              "b": {"spearman": Score("spearman", 70.0, 5, 60.0, 80.0)}}  # fmt: skip
    plain = json.loads(write_scores(scores, tmp_path / "scores.json").read_text())
    assert plain["a"] == {"metric": "accuracy", "value": 50.0, "n": 4, "low": 40.0, "high": 60.0,
                          "also": [{"metric": "agreement", "value": 90, "n": 4, "low": 80, "high": 99}]}  # fmt: skip
    assert plain["average"] == 60.0
    assert list(main_scores(scores)) == ["a", "b"]
    table = score_table({"merged": scores})
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["a accuracy %", "a agreement %", "b spearman %", "average"],
                     ["50.0 ± 10.0", "90.0 ± 9.5", "70.0 ± 10.0", "60.0"]]  # fmt: skip


def test_no_rows_is_an_error():
    with pytest.raises(InputError, match="task 'empty': no row"):
        predict({"m": make("bert")}, EvalTask("empty", Classification(TextReader(tokenizer())), []), progress=False)


def test_lm_eval_is_asked_for_when_absent():
    if is_installed():
        pytest.skip("lm-eval is installed here")
    with pytest.raises(InputError, match=r"pip install 'featcal\[eval\]'"):
        run_harness(make("llama"), tokenizer(), {"x": HarnessTask("gsm8k", "exact_match,strict-match")})


def test_models_are_left_as_they_were():
    model = perturbed(make("bert"), 3)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    predict({"m": model}, EvalTask("t", Classification(TextReader(tokenizer())), [{"text": "no", "label": 0}]),
            device="cpu", progress=False)  # fmt: skip
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# ---- recipes


def save_text_recipe(folder: Any, rows: int) -> Any:
    """A BERT job on disk: base, merged, two experts, and a JSONL file with labels for each task."""
    setup = family_setup("bert")
    models_ = {"base": setup.base, "merged": setup.merged, **setup.experts}
    for name, model in models_.items():
        model.save_pretrained(folder / name)  # type: ignore[operator]
        tokenizer().save_pretrained(folder / name)
    g = np.random.default_rng(0)
    for task in setup.experts:
        lines = [{"text": " ".join(g.choice(WORDS, 4)), "label": int(g.integers(2))} for _ in range(rows)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = "".join(f"  {t}: {{expert: ./{t}, data: {{source: ./{t}.jsonl, text: text}}}}\n" for t in setup.experts)
    file = folder / "recipe.yaml"
    file.write_text(f"base: ./base\nmerged: ./merged\ntasks:\n{tasks}calibration: {{samples: 8}}\ndevice: cpu\n")
    return file


def test_a_recipe_is_scored_on_rows_that_calibration_does_not_read(tmp_path: Any):
    file = save_text_recipe(tmp_path, 50)
    got = evaluate_recipe(file, {"again": str(tmp_path / "merged")}, output=tmp_path / "out", progress=False)
    assert set(got) == {"experts", "base", "merged", "again"}
    assert got["again"] == got["merged"]
    task = got["merged"]["task0"]
    assert task["accuracy"].n == 50 - 8 - 32, "8 samples and 32 held-out rows are left alone"
    assert 0 <= task["agreement"].value <= 100
    assert set(got["experts"]["task0"]) == {"accuracy"}
    saved = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert saved["task0"]["value"] == task["accuracy"].value
    assert saved["average"] == average(main_scores(got["again"]))
    assert set(saved["models"]) == set(got)
    assert saved["models"]["experts"]["task1"]["value"] == got["experts"]["task1"]["accuracy"].value
    assert parse_scores(saved)["merged"]["task0"].value == parse_scores(saved)["calibrated"]["task0"].value
    only = evaluate_recipe(file, [str(tmp_path / "merged")], own=False, limit=5, progress=False)
    assert set(only) == {"merged"} and only["merged"]["task1"]["accuracy"].n == 5


@pytest.fixture(scope="module")
def job(tmp_path_factory: Any) -> Any:
    """A recipe with 50 rows per task; tests read it and write beside it."""
    folder = tmp_path_factory.mktemp("job")
    save_text_recipe(folder, 50)
    return folder


def changed(source: Any, target: Any, change: Any) -> Any:
    """A copy of a checkpoint whose tensors went through `change`."""
    shutil.copytree(source, target)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


def test_models_are_scored_in_one_pass_and_as_alone(job: Any, monkeypatch: pytest.MonkeyPatch):
    passes: list[list[str]] = []
    real = featcal.evaluate.recipe.predict

    def spy(models_: Any, *args: Any, **options: Any) -> Any:
        passes.append(list(models_))
        return real(models_, *args, **options)

    monkeypatch.setattr("featcal.evaluate.recipe.predict", spy)
    models_ = [str(job / "merged"), f"first={job / 'task0'}"]
    together = evaluate_recipe(job / "recipe.yaml", [models_[1]], progress=False)
    assert passes[2:] == [["base", "merged", "first"]] * 2
    alone = evaluate_recipe(job / "recipe.yaml", models_, own=False, progress=False)
    assert alone == {"merged": together["merged"], "first": together["first"]}
    monkeypatch.setattr("featcal.evaluate.recipe.SHARE", 0.0)
    passes.clear()
    assert evaluate_recipe(job / "recipe.yaml", [models_[1]], progress=False) == together
    assert passes[2:] == [["base"]] * 2 + [["merged"]] * 2 + [["first"]] * 2, "one after another without the memory"


def test_names_of_models_do_not_collide(job: Any):
    with pytest.raises(InputError, match="there is another model called 'merged'; write LABEL="):
        evaluate_recipe(job / "recipe.yaml", [str(job / "merged")], progress=False)
    for taken in ("experts", "base"):
        with pytest.raises(InputError, match=f"another model called '{taken}'"):
            evaluate_recipe(job / "recipe.yaml", [f"{taken}={job / 'merged'}"], progress=False)
    with pytest.raises(InputError, match="expected DIR, or LABEL=DIR"):
        evaluate_recipe(job / "recipe.yaml", ["."], progress=False)


def test_weights_that_are_missing_or_not_finite_are_refused(job: Any, tmp_path: Any):
    def scored(folder: Any) -> Any:
        return evaluate_recipe(job / "recipe.yaml", [str(folder)], own=False, progress=False)

    headless = changed(
        job / "merged", tmp_path / "headless", lambda t: {k: v for k, v in t.items() if "classif" not in k}
    )
    with pytest.raises(InputError, match=r"headless: its files lack 'classifier.bias' and 1 more of a Bert\w+"):
        scored(headless)
    renamed = changed(job / "merged", tmp_path / "renamed", lambda t: {f"x.{k}": v for k, v in t.items()})
    with pytest.raises(InputError, match=r"its files lack 'bert.embeddings"):
        scored(renamed)
    nan = changed(job / "merged", tmp_path / "nan", lambda t: t | {"classifier.bias": torch.full((2,), torch.nan)})
    with pytest.raises(InputError, match="task 'task0': nan: its outputs are NaN"):
        scored(nan)
    other = changed(job / "merged", tmp_path / "other", lambda t: t | {"classifier.bias": torch.zeros(3)})
    with pytest.raises(InputError, match="other cannot be loaded: "):
        scored(other)
    (other / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(InputError, match="other cannot be loaded: "):
        scored(other)
    (other / "config.json").write_text("{}")
    with pytest.raises(InputError, match="other cannot be loaded: "):
        scored(other)
    (other / "config.json").unlink()
    with pytest.raises(InputError, match=r"is no checkpoint: it has no config.json"):
        scored(other)


def label_recipe(job: Any, folder: Any, rows: list[dict[str, Any]], **data: str) -> Any:
    """The first task alone, on these rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = json.dumps({"source": str(folder / "rows.jsonl"), "text": "text"} | data)
    file = folder / "recipe.yaml"
    file.write_text(
        f"base: {job / 'base'}\nmerged: {job / 'merged'}\n"
        f"tasks:\n  t: {{expert: {job / 'task0'}, data: {spec}}}\ncalibration: {{samples: 4}}\ndevice: cpu\n"
    )
    return file


def texts(count: int, label: Any) -> list[dict[str, Any]]:
    return [{"text": f"{WORDS[i % 20]} {WORDS[i // 20]}", "label": label(i)} for i in range(count)]


def test_labels_are_numbers_or_class_names(job: Any, tmp_path: Any):
    def accuracy(label: Any) -> Any:
        file = label_recipe(job, tmp_path, texts(60, label))
        return evaluate_recipe(file, progress=False)["merged"]["t"]["accuracy"]

    expected = accuracy(lambda i: i % 2)
    assert expected.n == 60 - 4 - 32
    for spelt in (lambda i: bool(i % 2), lambda i: str(i % 2), lambda i: float(i % 2), lambda i: f"LABEL_{i % 2}"):
        assert accuracy(spelt) == expected
    with pytest.raises(InputError, match=r"task 't': label 0.7 is neither a class number"):
        accuracy(lambda i: 0.7)
    with pytest.raises(InputError, match=r"label 'pos' is neither .* nor a class name of: LABEL_0, LABEL_1"):
        accuracy(lambda i: "pos")
    with pytest.raises(InputError, match=r"label \[1\] is neither"):
        accuracy(lambda i: [1])


def test_hidden_labels_and_empty_cells(job: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture):
    rows = texts(60, lambda i: -1)
    got = evaluate_recipe(label_recipe(job, tmp_path, rows), progress=False)
    assert set(got["merged"]["t"]) == {"agreement"} and got["experts"]["t"] == {}
    out = tmp_path / "out"
    evaluate_recipe(label_recipe(job, tmp_path, rows), output=out, progress=False)
    assert json.loads((out / "scores.json").read_text())["models"]["experts"] == {"average": None}
    splits = {"train": Dataset.from_list(texts(60, lambda i: i % 2)), "test": Dataset.from_list(rows),
              "validation": Dataset.from_list(texts(9, lambda i: 1))}  # fmt: skip
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    file = label_recipe(job, tmp_path, rows, source=str(tmp_path / "saved"))
    assert evaluate_recipe(file, progress=False)["merged"]["t"]["accuracy"].n == 9, "not the test split"
    assert "the labels of split 'test' are hidden" in caplog.text
    assert evaluate_recipe(file, split="train", progress=False)["merged"]["t"]["accuracy"].n == 60 - 4 - 32
    gaps = [{"text": None if i % 3 == 0 else row["text"], "label": 0} for i, row in enumerate(texts(60, lambda i: 0))]
    assert (
        evaluate_recipe(label_recipe(job, tmp_path, gaps), progress=False)["merged"]["t"]["accuracy"].n == 40 - 4 - 32
    )
    assert "rows skipped, a part of them is empty" in caplog.text


def test_templates_are_read_as_calibration_reads_them(job: Any, tmp_path: Any):
    plain = [{"text": f"the {row['text']}", "label": row["label"]} for row in texts(60, lambda i: i % 2)]
    bare = evaluate_recipe(label_recipe(job, tmp_path, plain), progress=False)
    rows = texts(60, lambda i: i % 2)
    templated = evaluate_recipe(label_recipe(job, tmp_path, rows, text="the {text}"), progress=False)
    assert templated["merged"]["t"]["accuracy"].n == bare["merged"]["t"]["accuracy"].n
    job_ = RecipeTasks(load_recipe(label_recipe(job, tmp_path, rows, text="the {text}")))
    scored = job_.task("t", make("bert")).rows
    assert scored[0] == {"text": f"the {rows[scored.indices[0]]['text']}", "label": scored.indices[0] % 2}


def test_image_paths_and_folders(tmp_path: Any):
    setup = family_setup("vit")
    for name, model in {"base": setup.base, "merged": setup.merged, "e": setup.experts["task0"]}.items():
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        processor().save_pretrained(tmp_path / name)
    for i, picture in enumerate(pictures(50)):
        picture.save(tmp_path / f"{i}.png")
    lines = [json.dumps({"image": f"{i}.png", "label": i % 2}) for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    file = tmp_path / "recipe.yaml"
    file.write_text("base: ./base\nmerged: ./merged\ntasks: {t: {expert: ./e, data: {source: ./rows.jsonl}}}\n"
                    "calibration: {samples: 4}\ndevice: cpu\n")  # fmt: skip
    got = evaluate_recipe(file, progress=False)["merged"]["t"]["accuracy"]
    tasks = RecipeTasks(load_recipe(file)).task("t", setup.merged)
    rows = [tasks.rows.indices[i] for i in range(len(tasks.rows))]
    with inference(setup.merged):
        guesses = setup.merged(**ImageReader(processor())([{"image": pictures(50)[i]} for i in rows])).logits.argmax(-1)
    truth = torch.tensor([i % 2 for i in rows])
    assert got.value == pytest.approx(100 * float((guesses == truth).double().mean()))
    (tmp_path / f"{rows[0]}.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=rf"task 't': .*{rows[0]}.png: not a readable image"):
        evaluate_recipe(file, progress=False)


def test_averages_intervals_and_overflow():
    share = {"a": Score("accuracy", 40.0, 9, 0, 0), "b": Score("agreement", 4.0, 9, 0, 0)}
    assert average(share) is None, "being right and agreeing are two things"
    assert average({"a": share["b"], "b": share["b"]}) == 4.0
    sure = score("accuracy", np.ones((10, 1)))
    assert (sure.value, sure.high) == (100.0, 100.0) and sure.low == pytest.approx(100 * 10 / (10 + 1.96**2))
    never = score("exact_match", np.zeros((10, 1)))
    assert (never.value, never.low) == (0.0, 0.0) and never.high == pytest.approx(100 - sure.low)
    huge = score("perplexity", np.array([[9000.0, 2.0], [0.0, 0.0]]), resamples=10)
    assert np.isfinite(huge.value) and huge.n == 1, "rows without a counted token say nothing"
    with pytest.raises(InputError, match="perplexity: nothing to count in any of 2 rows"):
        score("perplexity", np.zeros((2, 2)))


def test_names_of_tasks_and_options_are_checked(job: Any, tmp_path: Any):
    file = job / "recipe.yaml"
    with pytest.raises(InputError, match="the recipe has no task 'taks0'; did you mean 'task0'"):
        evaluate_recipe(file, metrics={"taks0": "spearman"}, progress=False)
    with pytest.raises(InputError, match="--metric is for text-to-text models"):
        evaluate_recipe(file, metrics={"task0": "spearman"}, progress=False)
    with pytest.raises(InputError, match="'task0' is a task of the recipe and a benchmark"):
        evaluate_recipe(file, benchmarks={"task0": HarnessTask("task0")}, progress=False)
    with pytest.raises(InputError, match="lm-eval scores causal language models"):
        evaluate_recipe(file, benchmarks={"gsm8k": HarnessTask("gsm8k")}, progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no folder can be made there"):
        evaluate_recipe(file, output=tmp_path / "file", progress=False)
    other = label_recipe(job, tmp_path, texts(60, lambda i: 0))
    other.write_text(other.read_text().replace("  t: ", "  average: "))
    with pytest.raises(InputError, match="a task called 'average' cannot be scored"):
        evaluate_recipe(other, progress=False)


def test_spearman_of_a_text_to_text_recipe(tmp_path: Any):
    setup = family_setup("t5")
    for name, model in {"base": setup.base, "merged": setup.merged, "e": setup.experts["task0"]}.items():
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        tokenizer().save_pretrained(tmp_path / name)
    lines = [json.dumps({"input": f"{WORDS[i]} {WORDS[i + 1]}", "target": f"{i % 5}.0"}) for i in range(20)] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    file = tmp_path / "recipe.yaml"
    file.write_text("base: ./base\nmerged: ./merged\ntasks: {t: {expert: ./e, data: {source: ./rows.jsonl}}}\n"
                    "calibration: {samples: 4, max_length: 8}\ndevice: cpu\n")  # fmt: skip
    assert set(evaluate_recipe(file, limit=3, progress=False)["merged"]["t"]) == {"exact_match", "agreement"}
    got = evaluate_recipe(file, limit=3, metrics={"t": "spearman"}, progress=False)["merged"]["t"]
    assert set(got) == {"spearman", "agreement"}
    lines[:] = [line.replace('.0"', 'x"') for line in lines]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"label '\dx' is not a number"):
        evaluate_recipe(file, metrics={"t": "spearman"}, progress=False)


def test_tokens_that_a_model_lacks_are_named(job: Any, tmp_path: Any):
    small = job.parent / "small"
    model = make("bert")
    model.resize_token_embeddings(5)  # type: ignore[operator]
    model.save_pretrained(small)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"the samples hold token id .*, but small knows only 5 tokens"):
        evaluate_recipe(job / "recipe.yaml", [str(small)], own=False, progress=False)


def test_benchmarks_of_lm_eval_beside_the_recipes_tasks(tmp_path: Any):
    pytest.importorskip("lm_eval")
    setup = family_setup("llama")
    for name, model in {"base": setup.base, "merged": setup.merged, "e": setup.experts["task0"]}.items():
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        tokenizer().save_pretrained(tmp_path / name)
    lines = [json.dumps({"text": f"{WORDS[i % 20]} {WORDS[i // 20]}", "label": i % 2}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "pets.yaml").write_text(
        f"task: pets\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_target: label\n"
        "doc_to_choice: [cat, mat]\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    file = tmp_path / "recipe.yaml"
    file.write_text("base: ./base\nmerged: ./merged\ntasks: {t: {expert: ./e, data: {source: ./rows.jsonl}}}\n"
                    "calibration: {samples: 4, max_length: 8}\ndevice: cpu\n")  # fmt: skip

    def pets(metric: str | None) -> Any:
        chosen = {"pets": HarnessTask("pets", metric)}
        found = evaluate_recipe(file, benchmarks=chosen, include_path=tmp_path / "own", limit=5, progress=False)
        assert set(found["merged"]) == {"t", "pets"} and set(found["experts"]) == {"t"}
        return found["merged"]["pets"]

    assert list(pets(None)) == ["acc,none"], "the task's first metric"
    assert pets("acc_norm,none")["acc_norm,none"].n == 5
    with pytest.raises(InputError, match="has no metric 'f1,none'; it has: acc,none, acc_norm,none"):
        pets("f1,none")


def test_names_may_hold_markup():
    scores = {"[/red]": {"accuracy": Score("accuracy", 50.0, 4, 40.0, 60.0)}}
    console = Console(record=True, width=80)
    console.print(score_table({"[b]x[/b]": scores}, "[/i]"))
    shown = console.export_text()
    assert "[b]x[/b]" in shown and "[/red]" in shown and "[/i]" in shown


def test_a_recipe_without_spare_rows_says_so(tmp_path: Any):
    file = save_text_recipe(tmp_path, 8)
    with pytest.raises(InputError, match="reads every row"):
        evaluate_recipe(file, progress=False)


def test_the_command_prints_and_saves_scores(tmp_path: Any):
    import typer
    from typer.testing import CliRunner

    from featcal.evaluate.command import by_task, evaluate_command, read_benchmark, read_classes, read_metric

    file = save_text_recipe(tmp_path, 50)
    app = typer.Typer()
    app.command()(evaluate_command)
    words = [str(file), "--model", str(tmp_path / "merged"), "--only", "-o", str(tmp_path / "out"), "--no-progress"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert "accuracy" in ran.output
    assert set(json.loads((tmp_path / "out" / "scores.json").read_text())["models"]) == {"merged"}
    (tmp_path / "names.txt").write_text("cat\n\ndog\nthe {}!\n")
    assert read_classes(f"pets={tmp_path / 'names.txt'}") == ("pets", (["cat", "dog"], ["the {}!"]))
    with pytest.raises(InputError, match="expected TASK=FILE"):
        read_classes("pets")
    (tmp_path / "names.txt").write_text("cat\nthe {x}!\n")
    with pytest.raises(InputError, match=r"template 'the \{x\}!' needs one \{\} and no other brace"):
        read_classes(f"pets={tmp_path / 'names.txt'}")
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_classes(f"pets={tmp_path / 'names.txt'}")
    assert by_task("--head", ["x/{task}.st"], ["a", "b"]) == {"a": "x/a.st", "b": "x/b.st"}
    assert by_task("--head", ["a=x", "b=y"], ["a", "b"]) == {"a": "x", "b": "y"}
    with pytest.raises(InputError, match=r"--head x: expected TASK=FILE, or a FILE with \{task\} in its name"):
        by_task("--head", ["x"], ["a"])
    with pytest.raises(InputError, match=r"--head \{task\}: task 'a' has x already"):
        by_task("--head", ["a=x", "{task}"], ["a", "b"])
    assert read_metric("a=spearman") == ("a", "spearman")
    with pytest.raises(InputError, match="did you mean 'spearman'"):
        read_metric("a=spearmann")
    assert read_benchmark("gsm8k:exact_match,strict-match", 5) == (
        "gsm8k", HarnessTask("gsm8k", "exact_match,strict-match", 5))  # fmt: skip
    assert read_benchmark("arc_easy", None) == ("arc_easy", HarnessTask("arc_easy"))
