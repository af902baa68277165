"""Instructions and preferences in every format that documents have, and CSV and TSV as tables in all dialects."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig
from corpus.documents.quarantine import Rejected
from corpus.instructions import file_pairs, instructions
from corpus.pairs.files import Pair
from corpus.preferences import file_pairs as preference_pairs
from corpus.readers.config import FileDocuments, FileInstructions, FilePreferences
from corpus.readers.formats.delimited import read_delimited
from corpus.readers.plan import FilePart
from corpus.readers.record import Record
from corpus.readers.texts import read_texts
from corpus.recognition.first_records import first_record_problems
from corpus.recognition.forms import groups_of
from infra.errors import StageError

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"A number, {n}."},
        ]
    }
    for n in range(4)
]
RANKED = [{"prompt": f"Name {n}.", "chosen": f"Nine {n}", "rejected": f"Ten {n}"} for n in range(4)]


def _parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def _feather(rows: list[dict[str, Any]], path: Path) -> Path:
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path.with_suffix(".arrow"))
    return path.with_suffix(".arrow")


def _csv(rows: list[dict[str, Any]], path: Path) -> Path:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()})
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(out.getvalue().encode()))
    return path.with_suffix(".csv.gz")


def _json_column(rows: list[dict[str, Any]], path: Path) -> Path:
    """As a database exports lists: JSON in a column of strings."""
    return _parquet(
        [{key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows],
        path,
    )


@pytest.mark.parametrize("written", [_parquet, _feather, _csv, _json_column])
def test_pairs_are_read_from_every_format(written: Callable[..., Path], tmp_path: Path) -> None:
    asked = FileInstructions(paths=[str(written(CHATS, tmp_path / "chats"))])
    pairs = list(file_pairs(asked, asked.places(), "instructions.read.0"))
    assert [dict(pair.fields) for pair in pairs if isinstance(pair, Pair)] == [
        {"prompt": f"What is {n}?", "response": f"A number, {n}."} for n in range(4)
    ]
    [group], _ = groups_of(str(asked.places()[0]))
    assert [reading.kind for reading in group.readings] == ["instructions"]
    judged = FilePreferences(paths=[str(written(RANKED, tmp_path / "ranked"))])
    found = list(preference_pairs(judged, judged.places(), "preferences.read.0"))
    assert [dict(pair.fields) for pair in found if isinstance(pair, Pair)] == RANKED


def test_pairs_of_a_hugging_face_dataset(build: Callable[..., Path], tmp_path: Path) -> None:
    Dataset.from_list(CHATS * 10).save_to_disk(tmp_path / "saved")
    source = {"kind": "huggingface", "dataset": str(tmp_path / "saved")}
    config = InstructionsConfig(read=[source], heldout_share=0.4, near_prompts=None)
    assert first_record_problems(config) == []
    out = build(instructions, config)
    lines = [json.loads(line) for side in ("train", "heldout") for line in (out / f"{side}.jsonl").open()]
    assert sorted(line["prompt"] for line in lines) == [f"What is {n}?" for n in range(4)]
    [problem] = first_record_problems(PreferencesConfig(read=[source]))
    assert problem.code == "wrong_field" and "chosen" in problem.message


TEXT = 'First line, with "quotes"; a\ttab | bar.\nSecond line: 5 €.'


@pytest.mark.parametrize(
    ("name", "options", "encoding"),
    [
        ("a.csv", {}, "utf-8"),
        ("a.csv", {"delimiter": ";"}, "utf-8-sig"),
        ("a.csv", {"delimiter": ";"}, "cp1252"),
        ("a.csv", {"delimiter": "|", "lineterminator": "\n"}, "utf-16"),
        ("a.tsv", {"delimiter": "\t"}, "utf-8"),
        ("a.csv", {"delimiter": "\t"}, "utf-8"),
        ("a.csv", {"escapechar": "\\", "doublequote": False}, "utf-8"),
        ("a.csv", {"quoting": csv.QUOTE_ALL}, "utf-8"),
        ("a.csv", {"quoting": csv.QUOTE_ALL, "quotechar": "'"}, "utf-8"),
    ],
)
def test_a_table_is_read_in_its_dialect(
    name: str, options: dict[str, Any], encoding: str, write: Callable[..., str]
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, **options)
    writer.writerows([["id", "text"], *([n, f"{n}: {TEXT} Größe, Straße, über, für, schön."] for n in range(30))])
    source = FileDocuments(paths=[write(name, out.getvalue().encode(encoding))])
    texts = [item for place in source.places() for item in read_texts(source, FilePart(place, 0), "ingest.read.0")]
    assert [getattr(item, "text", item) for item in texts] == [
        f"{n}: {TEXT} Größe, Straße, über, für, schön." for n in range(30)
    ]


LONG = "The captain of the ferry wrote, in short: the mill stands. " * 200


@pytest.mark.parametrize(
    ("before", "delimiter", "names"),
    [
        ("sep=;\r\n", ";", ["id", "text"]),
        ('"sep=,"\n', ",", ["id", "text"]),
        ("# made by a program\n# on Monday\n", ",", ["id", "text"]),
        ("", "\t", ["#id", "text"]),
    ],
)
def test_lines_before_a_table_are_no_records(
    before: str, delimiter: str, names: list[str], write: Callable[..., str]
) -> None:
    """Rows are longer than a block of the file system, which is no reason to see fewer of them."""
    out = io.StringIO(newline="")
    rows = [names, *([str(n), f"{LONG}{n}"] for n in range(5))]
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL).writerows(rows)
    path = Path(write("a.csv", before + out.getvalue()))
    records = [item.value for item in read_delimited(path, "auto", 100_000) if isinstance(item, Record)]
    assert records == [dict(zip(names, row, strict=True)) for row in rows[1:]]


def test_quotes_in_an_unquoted_tsv_are_text(write: Callable[..., str]) -> None:
    place = Path(write("a.tsv", 'id\ttext\n1\t"Well, she said\n2\tA 5" pipe\n'))
    rows = [item.value for item in read_delimited(place, "auto", 1000) if isinstance(item, Record)]
    assert rows == [{"id": "1", "text": '"Well, she said'}, {"id": "2", "text": 'A 5" pipe'}]


def test_a_column_alone_is_a_table_too(write: Callable[..., str]) -> None:
    place = Path(write("a.csv", "text\nOne sentence.\nAnother one.\n"))
    rows = [item.value for item in read_delimited(place, "auto", 1000) if isinstance(item, Record)]
    assert rows == [{"text": "One sentence."}, {"text": "Another one."}]


def test_a_row_that_does_not_fit_is_put_aside_with_its_line(write: Callable[..., str]) -> None:
    place = Path(write("a.csv", 'id,text\n1,"a\nb"\n2,b,c\n3,"d"e\n4,e\n'))
    rows = list(read_delimited(place, "auto", 1000))
    kept = [(item.line, item.value["id"]) for item in rows if isinstance(item, Record)]
    assert kept == [(2, "1"), (6, "4")]
    put_aside = [(item.line, item.kind) for item in rows if isinstance(item, Rejected)]
    assert put_aside == [(4, "a different number of fields"), (5, "not CSV")]


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest(write: Callable[..., str]) -> None:
    place = Path(write("a.csv", "id,text\n1,a\n" + '2,"b\n' + "3,c\n" * 50))
    with pytest.raises(StageError, match=r"a\.csv:3: .*never closed"):
        list(read_delimited(place, "auto", 10_000))


def test_a_missing_column_is_named(write: Callable[..., str]) -> None:
    path = write("a.csv", "id,body\n1,A text.\n")
    source = FileDocuments(paths=[path])
    with pytest.raises(
        StageError, match=r"expected the field text; the fields are: body, id .set ingest.read.0.text_field: body"
    ):
        list(read_texts(source, FilePart(Path(path), 0), "ingest.read.0"))


SENTENCES = [f"The ferry number {n} waits for the tide, and the lamp is lit at six." for n in range(30)]
LABELS = ["good", "bad", "mixed"]


@pytest.mark.parametrize(
    "rows",
    [
        [[n, text] for n, text in enumerate(SENTENCES)],
        [[LABELS[n % 3], text] for n, text in enumerate(SENTENCES)],
        [[text, f"https://a.example/{n}", "2024-01-05"] for n, text in enumerate(SENTENCES)],
        [[f"第{n}号渡轮在等待潮水，灯在六点点亮，守夜人说。", str(n)] for n in range(30)],
        [["", SENTENCES[0]], *([n, text] for n, text in enumerate(SENTENCES[1:]))],
    ],
    ids=["numbers", "labels", "addresses", "Chinese", "an empty field"],
)
def test_the_first_record_of_a_table_without_names_is_no_header(
    rows: list[list[Any]], write: Callable[..., str]
) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    path = Path(write("a.csv", out.getvalue()))
    names = [f"column_{n + 1}" for n in range(len(rows[0]))]
    expected = [dict(zip(names, map(str, row), strict=True)) for row in rows]
    assert [item.value for item in read_delimited(path, "auto", 1000) if isinstance(item, Record)] == expected
    assert len(list(read_delimited(path, "auto", 1000, header="none"))) == len(rows)
    assert len(list(read_delimited(path, "auto", 1000, header="first_row"))) == len(rows) - 1


@pytest.mark.parametrize(
    "names",
    [
        ["id", "text"],
        ["Nr.", "Bemerkung des Lotsen"],
        ["Zeitstempel", "Was hat Ihnen an der Überfahrt mit der Fähre gefallen?"],
        ["编号", "内容"],
        ["2019", "notes"],
    ],
)
def test_names_of_columns_are_no_record(names: list[str], write: Callable[..., str]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([names, *([n, text] for n, text in enumerate(SENTENCES))])
    first = next(read_delimited(Path(write("a.csv", out.getvalue())), "auto", 1000))
    assert isinstance(first, Record) and first.value == dict(zip(names, ["0", SENTENCES[0]], strict=True))


def test_a_fix_names_the_field_with_prose_and_no_embedding(write: Callable[..., str]) -> None:
    row = {"id": "3f" * 200, "embedding": "0.31, -0.2, " * 50, "body": SENTENCES[0]}
    source = FileDocuments(paths=[write("a.jsonl", json.dumps(row) + "\n")])
    [problem] = first_record_problems(IngestConfig(read=[source]))
    assert problem.fix == "set ingest.read.0.text_field: body"


def test_a_table_without_names_says_what_to_write(write: Callable[..., str]) -> None:
    path = write("a.tsv", "".join(f"{n}\t{text}\n" for n, text in enumerate(SENTENCES)))
    [problem] = first_record_problems(IngestConfig(read=[FileDocuments(paths=[path])]))
    assert problem.code == "wrong_field" and "first row is read as a record" in problem.message
    assert "ingest.read.0.text_field: column_2" in problem.fix and "ingest.read.0.header: first_row" in problem.fix
    [group], _ = groups_of(path)
    assert group.readings[0].keys == {"text_field": "column_2"} and "header: first_row" in group.readings[0].why
    source = FileDocuments(paths=[path], text_field="column_2")
    assert len(list(read_texts(source, FilePart(Path(path), 0), "ingest.read.0"))) == len(SENTENCES)
