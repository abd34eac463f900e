"""Sources and sampling: every kind of source, odd files, which rows are chosen, and what the errors say."""

# ruff: noqa: E501  (sentences are quoted whole)

from __future__ import annotations

import csv
import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError
from PIL import Image

from featcal.data import load_samples, open_table
from featcal.data import samples as samples_module
from featcal.data.images import open_rgb
from featcal.data.samples import choose_columns, permutation
from featcal.data.tables import Table
from featcal.errors import InputError
from featcal.recipe import DataSpec

TEXTS = [f"sample number {number}" for number in range(20)]


def spec(source: Path | str, **fields: Any) -> DataSpec:
    return DataSpec(source=str(source), **fields)


def texts_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_text(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_image(
    path: Path, color: tuple[int, ...] | int = (255, 0, 0), mode: str = "RGB", size: tuple[int, int] = (6, 4)
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


def refusal(data: DataSpec, n: int = 4, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_samples(data, 0, n, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------- the same rows, any source


def make_source(kind: str, folder: Path) -> DataSpec:
    rows = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    path = folder / f"data{kind}"
    if kind == ".jsonl":
        write_jsonl(path, rows)
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"], delimiter="," if kind == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif kind == ".txt":
        path.write_text("\n".join(TEXTS))
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif kind == "saved splits":
        parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
        datasets.DatasetDict(parts).save_to_disk(str(path))
    elif kind == "folder of parquet":
        (path / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path / "data" / "train-00000-of-00001.parquet")
        write_image(path / "assets" / "logo.png")
    return spec(path)


KINDS = [
    ".jsonl", ".json", ".jsonl.gz", ".csv", ".tsv", ".parquet", ".txt", "saved", "saved splits", "folder of parquet",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_samples(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    samples = load_samples(make_source(kind, tmp_path), 7, 5, task="t", held_out=3)
    order = list(permutation(20, 7, "t"))
    assert samples.indices == order[:5]
    assert samples.held_out_indices == order[5:8]
    assert samples.rows == [{"text": TEXTS[index]} for index in order[:5]]
    assert texts_of(samples.held_out) == [TEXTS[index] for index in order[5:8]]
    assert samples.columns == {"text": "text"}
    assert samples.counts.as_dict() == {
        "available": 20, "samples": 5, "held_out": 3, "empty": 0, "unreadable": 0, "duplicates": 0,
    }  # fmt: skip
    reference = load_samples(
        spec(write_jsonl(tmp_path / "r.jsonl", [{"text": t} for t in TEXTS])), 7, 5, task="t", held_out=3
    )
    assert samples.fingerprint == reference.fingerprint


# -------------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def lines(tmp_path: Path) -> DataSpec:
    return spec(write_text(tmp_path / "lines.txt", "\n".join(f"line {number}" for number in range(200))))


def test_the_choice_is_nested_seeded_and_per_task(lines: DataSpec) -> None:
    small, large = load_samples(lines, 1, 64, task="a"), load_samples(lines, 1, 128, task="a")
    assert large.indices[:64] == small.indices
    assert load_samples(lines, 1, 64, task="a") == small
    assert load_samples(lines, 2, 64, task="a").indices != small.indices
    assert load_samples(lines, 1, 64, task="b").indices != small.indices
    assert len(set(large.indices)) == 128


def test_held_out_rows_are_the_next_ones(lines: DataSpec) -> None:
    samples = load_samples(lines, 1, 64, task="a", held_out=32)
    assert samples.indices + samples.held_out_indices == load_samples(lines, 1, 96, task="a").indices


def test_the_permutation_never_changes() -> None:
    assert sorted(permutation(1000, 3, "x")) == list(range(1000))
    assert list(permutation(8, 42, "cars")) == [4, 2, 3, 7, 6, 5, 0, 1]


@pytest.mark.parametrize(
    ("rows", "n", "held_out", "samples", "kept_apart"),
    [
        (10, 8, 2, 8, 2),  # exactly enough
        (10, 8, 4, 8, 2),  # too few: what is left is already a fifth
        (10, 10, 4, 8, 2),  # nothing left: a fifth of the rows
        (10, 9, 4, 8, 2),  # one left: filled up to a fifth
        (10, 20, 1, 9, 1),
        (10, 20, 0, 10, 0),
        (3, 3, 2, 2, 1),
        (1, 5, 2, 1, 0),
    ],
)
def test_held_out_rows_of_small_sources(
    tmp_path: Path, rows: int, n: int, held_out: int, samples: int, kept_apart: int
) -> None:
    path = write_text(tmp_path / "d.txt", "\n".join(f"row {number}" for number in range(rows)))
    found = load_samples(spec(path), 0, n, held_out=held_out)
    assert (found.counts.samples, found.counts.held_out) == (samples, kept_apart)
    assert found.indices + found.held_out_indices == list(permutation(rows, 0, ""))[: samples + kept_apart]


def test_empty_rows_and_duplicates_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": text} for text in ("a", "", "b", None, "a", "  \n", "c", "a")] + [{"other": "x"}]
    data = spec(write_jsonl(tmp_path / "d.jsonl", rows), text="text")
    with caplog.at_level(logging.INFO, logger="featcal"):
        samples = load_samples(data, 0, 9, task="math")
    assert sorted(texts_of(samples.rows)) == ["a", "a", "a", "b", "c"]
    assert samples.counts.as_dict() == {
        "available": 9, "samples": 5, "held_out": 0, "empty": 4, "unreadable": 0, "duplicates": 2,
    }  # fmt: skip
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "math: 5 samples instead of 9, the source has no more",
        "math: 4 empty rows skipped",
        "math: 2 of 5 samples are duplicates",
    ]


def test_held_out_rows_never_repeat_a_sample(tmp_path: Path) -> None:
    path = write_text(tmp_path / "d.txt", "\n".join(["same"] * 30 + ["other"]))
    samples = load_samples(spec(path), 0, 3, held_out=1)
    assert set(texts_of(samples.rows)) | set(texts_of(samples.held_out)) == {"same", "other"}
    assert not set(texts_of(samples.rows)) & set(texts_of(samples.held_out))


def test_the_fingerprint_is_of_the_rows_that_are_used(tmp_path: Path) -> None:
    rows = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    first = load_samples(spec(write_jsonl(tmp_path / "a.jsonl", rows)), 0, 3, held_out=2)
    unused = [row | {"label": 99} for row in rows]
    unused[list(permutation(20, 0, ""))[10]]["text"] = "changed but not chosen"
    assert (
        load_samples(spec(write_jsonl(tmp_path / "b.jsonl", unused)), 0, 3, held_out=2).fingerprint == first.fingerprint
    )
    for changed in (first.indices[0], first.held_out_indices[1]):
        other = [dict(row) for row in rows]
        other[changed]["text"] += "!"
        path = write_jsonl(tmp_path / "c.jsonl", other)
        assert load_samples(spec(path), 0, 3, held_out=2).fingerprint != first.fingerprint
    assert load_samples(spec(tmp_path / "a.jsonl"), 0, 4, held_out=1).fingerprint != first.fingerprint
    assert len(first.fingerprint) == 64


# ---------------------------------------------------------------------------------------------- no label is read


def test_labels_are_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def read(index: int, columns: Sequence[str]) -> dict[str, Any]:
        asked.update(columns)
        assert "label" not in columns
        return {column: f"{column} {index}" for column in columns}

    table = Table("poisoned", ("text", "label", "answer"), 9, read, lambda index: f"row {index}")
    monkeypatch.setattr(samples_module, "open_table", lambda data: table)
    samples = load_samples(spec("x", label="answer"), 0, 4, held_out=2)
    assert asked == {"text"}
    assert all(row.keys() == {"text"} for row in samples.rows + samples.held_out)


def test_a_poisoned_label_of_a_saved_dataset_is_not_decoded(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Image()})
    good = write_image(tmp_path / "x.png").read_bytes()
    rows = [{"image": {"bytes": good, "path": None}, "label": {"bytes": b"not an image", "path": None}}] * 3
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    table = open_table(spec(tmp_path / "saved"))
    samples = load_samples(spec(tmp_path / "saved"), 0, 3)
    assert [row.keys() for row in samples.rows] == [{"image"}] * 3
    assert samples.rows[0]["image"] == {"path": None, "bytes": good}
    # The poison is real: reading that column gives what no decoder takes.
    with pytest.raises(OSError):
        open_rgb(table.read(0, ["label"])["label"]["bytes"])


def test_a_parquet_label_is_not_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = pa.table({"label": ["L" * 5000] * 50, "text": [f"t{number}" for number in range(50)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    start, end = data.find(b"L" * 5000), data.rfind(b"L" * 5000) + 5000
    data[start:end] = b"\xff" * (end - start)  # no longer UTF-8, nor of sane lengths
    path.write_bytes(data)
    assert load_samples(spec(path), 0, 50).counts.samples == 50
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(path)
    assert "d.parquet: not a readable Parquet file: " in refusal(spec(path, text="label"))


# ---------------------------------------------------------------------------------------------------- odd files


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.txt", "d.parquet"])
def test_empty_files(tmp_path: Path, name: str) -> None:
    path = write_text(tmp_path / name, "")
    assert refusal(spec(path)) == f"{path} is empty"


def test_blank_files(tmp_path: Path) -> None:
    assert refusal(spec(write_text(tmp_path / "a.jsonl", "\n \n"))).endswith("a.jsonl is empty")
    assert refusal(spec(write_text(tmp_path / "a.json", "[]"))).endswith("a.json is empty")
    assert "has no usable row (text from column 'text'; 2 rows, 2 empty, 0 unreadable)" in refusal(
        spec(write_text(tmp_path / "a.txt", "\n \n"))
    )
    assert "has no usable row (text from column 'text'; 0 rows" in refusal(
        spec(write_text(tmp_path / "a.csv", "text,label\n"))
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bom.jsonl", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ("crlf.jsonl", b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["a", "b"]),
        ("array.jsonl", b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
        ("lines.json", b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("one.json", b'{"text": "a"}', ["a"]),
        ("wrapped.json", b'{\n "data": [{"text": "a"}, {"text": "b"}]\n}', ["a", "b"]),
        ("bom.json", b'\xef\xbb\xbf[{"text": "a"}]', ["a"]),
        ("later.jsonl", b'{"x": 1}\n{"text": "a", "x": 2}', ["a"]),
        ("unicode.jsonl", '{"text": "日本 \\u2028 é 🙂\u2028x"}\n'.encode(), ["日本 \u2028 é 🙂\u2028x"]),
        ("breaks.txt", "a\u2028b\x0cc\r\nd\u0085e\n\n".encode(), ["a\u2028b\x0cc", "d\u0085e"]),
        ("bom.txt", b"\xef\xbb\xbfa\nb", ["a", "b"]),
        ("quoted.csv", b'\xef\xbb\xbftext,label\r\n"a, ""b""\r\nc",1\r\n\r\nd,2\r\n', ['a, "b"\r\nc', "d"]),
        ("semicolon.csv", b"text;label\na, b;1\n", ["a, b"]),
        ("tabs.csv", b"text\tlabel\na, b\t1\n", ["a, b"]),
        ("single.csv", b"prompt\nhello\n", ["hello"]),
        ("d.TXT", b"a\n", ["a"]),
    ],
)
def test_odd_but_good_files(tmp_path: Path, name: str, content: bytes, expected: list[str]) -> None:
    samples = load_samples(
        spec(write_text(tmp_path / name, content), text="prompt" if name == "single.csv" else "text"), 0, 9
    )
    assert [texts_of(samples.rows)[samples.indices.index(index)] for index in sorted(samples.indices)] == expected


def test_a_huge_line(tmp_path: Path) -> None:
    huge = "word " * 400_000
    for name, content in {"d.csv": f"text\n{huge}\n", "d.jsonl": json.dumps({"text": huge}), "d.txt": huge}.items():
        assert load_samples(spec(write_text(tmp_path / name, content)), 0, 1).rows[0]["text"].strip() == huge.strip()
    limit = csv.field_size_limit()
    assert limit == 131072, "the csv module's own limit is put back"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', "d.jsonl, line 2: not valid JSON: expecting value"),
        ("d.jsonl", b'{"text": "a"}\n"b"\n', 'd.jsonl, line 2: expected a JSON object such as {"text": "..."}, found str'),
        ("d.jsonl", b"hello\n", "d.jsonl, line 1: not valid JSON: expecting value"),
        ("d.json", b'{\n"a": 1,\n"b": }', "d.json: not valid JSON: expecting value on line 3"),
        ("d.json", b'{"a": 1,\n"b": 2}', "d.json holds one JSON object; expected an array of objects, or one object per line"),
        ("d.json", b'["a"]', 'd.json, item 1: expected a JSON object such as {"text": "..."}, found str'),
        ("d.jsonl", b"[" * 100_000, "d.jsonl: not valid JSON"),
        ("d.jsonl", b'{"text": "\xff"}', "d.jsonl, line 1 is not UTF-8 text (invalid start byte); save it as UTF-8"),
        ("d.jsonl", '{"text": "a"}'.encode("utf-16"), "d.jsonl is UTF-16 text; save it as UTF-8"),
        ("d.csv", "text\na".encode("utf-16"), "d.csv is not UTF-8 text (invalid start byte); save it as UTF-8"),
        ("d.csv", b"text,label\na\n", "d.csv, line 2: 1 fields, but the header names 2 columns"),
        ("d.csv", b'text\n"a\n', "d.csv, line 2: not valid CSV: unexpected end of data"),
        ("d.csv", b"text,text\na,b\n", "d.csv: two columns are called 'text'"),
        ("d.parquet", b"PAR1 not really", "d.parquet: not a readable Parquet file"),
        ("d.jsonl.gz", b"\x1f\x8b broken", "d.jsonl.gz is not a whole gzip file; fetch it again"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], "d.jsonl.gz is not a whole gzip file; fetch it again"),
        ("d.parquet.gz", b"x", "cannot read data from '.parquet.gz' files; known: .jsonl, .json, .csv, .tsv, .txt, .parquet"),
        ("d.xlsx", b"x", "d.xlsx: cannot read data from '.xlsx' files; known: .jsonl"),
        ("data", b"x", "data: cannot read data from 'data' files; known: .jsonl"),
        ("d.jsonl", b'{"text": 3}', "d.jsonl, line 1, column 'text': expected text, found int"),
        ("d.jsonl", b'{"text": ["a"]}', "d.jsonl, line 1, column 'text': expected text, found list"),
    ],
)  # fmt: skip
def test_broken_files_are_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    assert message in refusal(spec(write_text(tmp_path / name, content)))


def test_files_have_no_splits(tmp_path: Path) -> None:
    path = write_text(tmp_path / "d.txt", "a")
    assert (
        refusal(spec(path, split="test"))
        == f"{path} is one file and has no split 'test'; name the file of that split instead"
    )


# ----------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("columns", "kind", "expected"),
    [
        (("text", "label"), None, {"text": "text"}),
        (("Text", "id"), None, {"text": "Text"}),
        (("messages", "prompt", "prompt_id"), None, {"messages": "messages"}),
        (("conversations", "source"), None, {"messages": "conversations"}),
        (("image", "label"), None, {"image": "image"}),
        (("img", "fine_label"), "image", {"image": "img"}),
        (("input", "target"), None, {"input": "input", "target": "target"}),
        (("input", "label"), None, {"input": "input"}),
        (("instruction", "output"), None, {"input": "instruction", "target": "output"}),
        (("inputs", "targets", "template"), "seq2seq", {"input": "inputs", "target": "targets"}),
        (("question", "answer"), None, {"input": "question", "target": "answer"}),
        (("query", "response", "type"), "text", {"input": "query", "target": "response"}),
        (("prompt",), None, {"text": "prompt"}),
        (("sms", "label"), None, {"text": "sms"}),
        (("image", "text"), "image", {"image": "image"}),
        (("image", "text"), "text", {"text": "text"}),
    ],
)
def test_columns_are_guessed(
    columns: tuple[str, ...], kind: str | None, expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    table = Table("d", columns, 0, lambda index, names: {}, str)
    with caplog.at_level(logging.INFO, logger="featcal"):
        assert choose_columns(spec("d"), table, kind) == expected
    said = ", ".join(f"{part} from column '{column}'" for part, column in expected.items())
    assert [record.getMessage() for record in caplog.records] == [f"d: reading {said}"]


def test_templates_join_columns(tmp_path: Path) -> None:
    rows = [{"a": "x{y}", "b": 3, "c": "z"}, {"a": "", "b": 4, "c": "empty, skipped"}, {"a": "u", "b": 1.5, "c": None}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = DataSpec(source=str(tmp_path / "d.jsonl"), input="{{{a}}} is {b}", target="<{c}>")
    found = load_samples(spec, 0, 9)
    assert sorted(map(str, found.rows)) == sorted(
        map(str, [{"input": "{x{y}} is 3", "target": "<z>"}, {"input": "{u} is 1.5", "target": None}])
    )
    assert found.counts.empty == 1


def test_a_column_may_be_called_like_a_template(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"{a}": "itself", "a": "another"}))
    assert load_samples(DataSpec(source=str(tmp_path / "d.jsonl"), text="{a}"), 0, 1).rows == [{"text": "itself"}]


def test_labels_are_not_read_by_way_of_a_template() -> None:
    with pytest.raises(ValueError, match=r"text holds '\{label\}', the column of labels; labels are never read"):
        DataSpec(source="d.jsonl", text="{a} {label}", label="label")


@pytest.mark.parametrize(
    ("columns", "fields", "kind", "message"),
    [
        (("text", "messages"), {}, None, "d: cannot tell which column to read among text, messages; name it in the recipe's data, such as `text: text`"),
        (("instruction", "input", "output"), {}, None, "d: cannot tell which column to read among instruction, input, output; name it"),
        (("a", "b", "label"), {}, None, "such as `text: a`"),
        (("image", "text"), {}, None, "cannot tell which column to read among image, text"),
        (("label",), {}, None, "cannot tell which column to read among label; name it in the recipe's data, such as `text: NAME`"),
        (("context", "question", "answer"), {}, None, "cannot tell which column to read among context, question, answer"),
        ((), {}, "image", "among none; name it in the recipe's data, such as `image: NAME`"),
        (("text",), {"text": "txet"}, None, "d has no column 'txet' (text:); did you mean 'text'?; it has: text"),
        (("q", "a"), {"input": "q", "target": "ans"}, None, "d has no column 'ans' (target:)"),
        (("q", "a"), {"input": "Q: {qq}", "target": "a"}, None, "d has no column 'qq' (input:); did you mean 'q'?"),
        (("q", "a"), {"text": "Q: {q"}, None, "text: 'Q: {q' is neither a column nor a template"),
        (("q", "a"), {"text": "{q.__class__}"}, None, "'{q.__class__}' is not a column; write {column}"),
        (("image", "label"), {}, "text", "d gives images, but the model reads text"),
        (("text",), {}, "image", "d gives text (text from column 'text'), but the model reads images; name `image:`"),
        (("text", "label"), {"label": "text"}, None, "cannot tell which column to read"),
    ],
)  # fmt: skip
def test_open_choices_are_refused(
    columns: tuple[str, ...], fields: dict[str, str], kind: str | None, message: str
) -> None:
    table = Table("d", columns, 0, lambda index, names: {}, str)
    with pytest.raises(InputError) as caught:
        choose_columns(spec("d", **fields), table, kind)
    assert message in str(caught.value)


def test_pairs_may_lack_a_target_but_not_an_input(tmp_path: Path) -> None:
    rows = [{"q": "a", "r": "b"}, {"q": "c", "r": ""}, {"q": "", "r": "d"}, {"q": "e"}]
    samples = load_samples(spec(write_jsonl(tmp_path / "d.jsonl", rows), input="q", target="r"), 0, 9)
    assert sorted((row["input"], row["target"] or "") for row in samples.rows) == [("a", "b"), ("c", ""), ("e", "")]
    assert samples.counts.empty == 1


# ---------------------------------------------------------------------------------------------------- messages

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "cell",
    [
        CHAT,
        json.dumps(CHAT),
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        {"role": ["user", "assistant"], "content": ["hi", "hello"]},
        [{**message, "tool_calls": None} for message in CHAT],
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, CHAT[1]],
    ],
)
def test_messages_in_every_usual_form(tmp_path: Path, cell: Any) -> None:
    samples = load_samples(spec(write_jsonl(tmp_path / "d.jsonl", [{"messages": cell}])), 0, 1)
    assert samples.rows == [{"messages": CHAT}]


@pytest.mark.parametrize("cell", [[], None, "", [{"role": "user", "content": " "}], {}])
def test_empty_messages(tmp_path: Path, cell: Any) -> None:
    rows = [{"messages": cell}, {"messages": CHAT}]
    assert load_samples(spec(write_jsonl(tmp_path / "d.jsonl", rows)), 0, 2).counts.empty == 1


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("hello", "line 1, column 'messages': expected a list of messages, found plain text; use `text:`"),
        (["hello"], "line 1, column 'messages': expected a list of messages with role and content"),
        (3, "expected a list of messages with role and content"),
        ([{"speaker": "a", "content": "b"}], "a message has no role (its keys: speaker, content)"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message holds something other than text"),
    ],
)
def test_wrong_messages(tmp_path: Path, cell: Any, message: str) -> None:
    assert message in refusal(spec(write_jsonl(tmp_path / "d.jsonl", [{"messages": cell}])))


# ------------------------------------------------------------------------------------------------------ images


def test_image_folders_with_and_without_classes(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "a/1.jpg", "a/deep/3.jpeg", ".hidden/x.png", "__MACOSX/y.png", "a/._1.jpg", "a/notes.md"):
        write_image(tmp_path / "c" / name) if not name.endswith(".md") else (tmp_path / "c" / name).touch()
    table = open_table(spec(tmp_path / "c"))
    assert [table.read(index, ["image", "label"]) for index in range(table.size)] == [
        {"image": str(tmp_path / "c" / "a/1.jpg"), "label": "a"},
        {"image": str(tmp_path / "c" / "a/deep/3.jpeg"), "label": "a/deep"},
        {"image": str(tmp_path / "c" / "b/2.PNG"), "label": "b"},
    ]
    samples = load_samples(spec(tmp_path / "c"), 0, 3, kind="image")
    assert samples.columns == {"image": "image"}
    assert all(row.keys() == {"image"} for row in samples.rows)
    write_image(tmp_path / "flat" / "1.png")
    assert load_samples(spec(tmp_path / "flat"), 0, 1).rows == [
        {"image": {"path": str(tmp_path / "flat" / "1.png"), "bytes": None}}
    ]


def test_image_folders_with_splits(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "test/a/3.png"):
        write_image(tmp_path / "d" / name)
    assert open_table(spec(tmp_path / "d")).size == 2
    assert open_table(spec(tmp_path / "d", split="test")).read(0, ["label"]) == {"label": "a"}
    assert (
        refusal(spec(tmp_path / "d", split="val"))
        == f"{tmp_path / 'd'} has no sub-folder 'val'; its sub-folders: test, train"
    )
    write_image(tmp_path / "e" / "test" / "1.png")
    assert "has no sub-folder 'train'; its sub-folders: test" in refusal(spec(tmp_path / "e"))
    write_image(tmp_path / "f" / "cat" / "1.png")
    assert "has no sub-folder 'test'; its sub-folders: cat" in refusal(spec(tmp_path / "f", split="test"))


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    write_image(tmp_path / "real" / "a" / "1.png")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cls").symlink_to(tmp_path / "real" / "a")
    (tmp_path / "real" / "a" / "loop").symlink_to(tmp_path / "d")
    assert open_table(spec(tmp_path / "d")).size == 1


def test_broken_images_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        write_image(tmp_path / "d" / f"{number}.png", (number, 0, 0), size=(64, 64))
    whole = (tmp_path / "d" / "0.png").read_bytes()
    write_text(tmp_path / "d" / "cut.png", whole[: len(whole) // 2])
    write_text(tmp_path / "d" / "text.jpg", "not an image")
    write_text(tmp_path / "d" / "nothing.png", "")
    samples = load_samples(spec(tmp_path / "d"), 0, 9, task="t")
    assert (samples.counts.samples, samples.counts.unreadable) == (4, 3)
    said = [record.getMessage() for record in caplog.records]
    assert any("t: unreadable images skipped: " in line and line.endswith("and 2 more") for line in said)
    for number in range(4):
        (tmp_path / "d" / f"{number}.png").unlink()
    assert "has no usable row (image from column 'image'; 3 rows, 0 empty, 3 unreadable); " in refusal(
        spec(tmp_path / "d")
    )


def test_images_named_in_a_file_or_stored_in_parquet(tmp_path: Path) -> None:
    first = write_image(tmp_path / "pics" / "1.png", (1, 2, 3))
    write_text(tmp_path / "d.csv", "image,label\npics/1.png,0\npics/none.png,1\n,2\n")
    samples = load_samples(spec(tmp_path / "d.csv"), 0, 3)
    assert samples.rows == [{"image": {"path": str(first), "bytes": None}}]
    assert (samples.counts.empty, samples.counts.unreadable) == (1, 1)
    cells = [{"bytes": first.read_bytes(), "path": "1.png"}, {"bytes": None, "path": None}]
    pq.write_table(pa.table({"image": cells, "label": [0, 1]}), tmp_path / "d.parquet")
    stored = load_samples(spec(tmp_path / "d.parquet"), 0, 2)
    assert stored.rows == [{"image": {"path": None, "bytes": first.read_bytes()}}]
    assert stored.fingerprint == load_samples(spec(tmp_path / "pics"), 0, 1).fingerprint
    assert "images behind URLs are not fetched" in refusal(
        spec(write_jsonl(tmp_path / "u.jsonl", [{"image": "https://x/y.png"}]))
    )
    assert "expected an image or a path, found int" in refusal(spec(write_jsonl(tmp_path / "v.jsonl", [{"image": 3}])))


def test_saved_datasets_with_images(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{number}.png", (number, 9, 9)) for number in range(3)]
    data = datasets.Dataset.from_dict({"img": [str(path) for path in paths], "label": [0, 1, 2]})
    data.cast_column("img", datasets.Image()).with_format("torch").save_to_disk(str(tmp_path / "saved"))
    samples = load_samples(spec(tmp_path / "saved"), 0, 3, kind="image")
    for index, row in zip(samples.indices, samples.rows, strict=True):
        data_bytes = row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes()
        assert open_rgb(data_bytes).getpixel((0, 0)) == (index, 9, 9)


def encoded(path: Path) -> bytes:
    return path.read_bytes()


def test_every_colour_mode_becomes_rgb(tmp_path: Path) -> None:
    grey = write_image(tmp_path / "l.png", 77, "L")
    assert open_rgb(encoded(grey)).getpixel((0, 0)) == (77, 77, 77)
    alpha = write_image(tmp_path / "a.png", (10, 20, 30, 0), "RGBA")
    assert open_rgb(encoded(alpha)).getpixel((0, 0)) == (10, 20, 30)
    cmyk = write_image(tmp_path / "c.jpg", (0, 255, 255, 0), "CMYK", (16, 16))
    red, green, blue = open_rgb(encoded(cmyk)).getpixel((8, 8))
    assert red > 240
    assert green < 15 > blue
    one_bit = write_image(tmp_path / "1.png", 1, "1")
    assert open_rgb(encoded(one_bit)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("RGB", (6, 4), (3, 5, 7)).quantize()
    palette.save(tmp_path / "p.png", transparency=b"\x00")
    assert open_rgb(encoded(tmp_path / "p.png")).getpixel((0, 0)) == (3, 5, 7)
    deep = Image.fromarray(np.full((4, 6), 0x8000, np.uint16))
    deep.save(tmp_path / "16.png")
    assert open_rgb(encoded(tmp_path / "16.png")).getpixel((0, 0)) == (128, 128, 128)
    frames = [Image.new("RGB", (6, 4), color) for color in ("lime", "red")]
    frames[0].save(tmp_path / "g.gif", save_all=True, append_images=frames[1:])
    assert open_rgb(encoded(tmp_path / "g.gif")).getpixel((0, 0)) == (0, 255, 0)


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    photo = Image.new("RGB", (6, 4), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photo.save(tmp_path / "x.jpg", exif=exif)
    assert open_rgb(encoded(tmp_path / "x.jpg")).size == (4, 6)


# ------------------------------------------------------------------------------------- saved datasets and the Hub


def test_splits_of_saved_datasets(tmp_path: Path) -> None:
    data = make_source("saved splits", tmp_path)
    assert open_table(spec(data.source, split="test")).size == 2
    assert (
        refusal(spec(data.source, split="tset"))
        == f"{data.source} has no split 'tset'; did you mean 'test'?; it has: train, test"
    )
    single = make_source("saved", tmp_path)
    assert refusal(spec(single.source, split="test")) == f"{single.source} is one split (without a name), not 'test'"
    (Path(single.source) / "data-00000-of-00001.arrow").unlink()
    assert "not a whole dataset saved by `datasets`" in refusal(single)


def test_folders_without_data(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.md").touch()
    assert (
        refusal(spec(tmp_path / "d"))
        == f"{tmp_path / 'd'} holds no data: expected images, data files, or a dataset saved by `datasets`"
    )


@pytest.mark.parametrize("source", ["./none.jsonl", "none.jsonl", "a/b/c", "C:\\data\\x", "~/none", "data.csv"])
def test_missing_files_are_not_looked_for_on_the_hub(source: str) -> None:
    assert refusal(spec(source)) == f"no such data file or folder: {source}"


def test_hub_datasets_are_loaded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(*args: Any, **options: Any) -> datasets.Dataset:
        calls.append((args, options))
        return datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(20))})

    monkeypatch.setattr(datasets, "load_dataset", load)
    samples = load_samples(spec("org/data", split="test[:50%]", config="main", revision="v1"), 0, 4)
    assert calls == [(("org/data", "main"), {"split": "test[:50%]", "revision": "v1"})]
    assert samples.rows[0] == {"text": TEXTS[samples.indices[0]]}
    assert "for a revision of a hub dataset write `revision:` beside it" in refusal(spec("org/data@v1"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "dataset 'org/x' is a Python script, which `datasets` no longer runs; try `revision: refs/convert/parquet`, or give a Parquet or JSONL file"),
        (DatasetNotFoundError("Dataset 'org/x' doesn't exist on the Hub or cannot be accessed."), "dataset 'org/x' is neither a path here nor on the Hub where you may see it: check the spelling, or, if it is private, log in (hf auth login, or set HF_TOKEN)"),
        (DatasetNotFoundError("Dataset 'org/x' is a gated dataset on the Hub. You must be authenticated to access it."), "dataset 'org/x' is gated: accept its terms at https://huggingface.co/datasets/org/x, then log in (hf auth login, or set HF_TOKEN)"),
        (DatasetNotFoundError("Revision 'v9' doesn't exist for dataset 'org/x' on the Hub."), "dataset 'org/x' has no revision 'v9'"),
        (ConnectionError("Couldn't reach 'org/x' on the Hub (OfflineModeIsEnabled)"), "dataset 'org/x' is neither a path here nor in the local cache, and HF_HUB_OFFLINE is set: give a file, or fetch it first"),
        (ValueError("Unknown split \"nope\". Should be one of ['train']."), "dataset 'org/x' has no split 'nope': Unknown split \"nope\". Should be one of ['train']."),
        (ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"), "dataset 'org/x': name one of its configurations with `config:`"),
        (ValueError("BuilderConfig 'zz' not found. Available: ['default']"), "dataset 'org/x': name one of its configurations with `config:`: BuilderConfig 'zz' not found. Available: ['default']"),
        (OSError("disk on fire\nmore"), "dataset 'org/x' could not be read: disk on fire"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert refusal(spec("org/x", revision="v9", split="nope")).startswith(message)


def test_offline_is_real_and_other_failures_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "and HF_HUB_OFFLINE is set: give a file, or fetch it first" in refusal(spec("nobody/nothing-at-all"))

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        load_samples(spec("org/x"), 0, 1)
