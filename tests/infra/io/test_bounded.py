"""Files from outside take memory for a record, or for as many bytes as they have on disk."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus.config import InstructionsConfig, PreferencesConfig
from corpus.instructions import instructions
from corpus.preferences import preferences
from evaluation.config import BenchmarkTask
from evaluation.harness.task_file import check_rows
from evaluation.mirror.rows import read_rows
from infra.errors import StageError
from infra.io.bounded import RECORD_BYTES, SMALL_BYTES, SMALL_VALUES, file_lines, read_bounded, read_text
from infra.run import Run
from training.chat.base import read_rows as read_pairs

LONG = b'{"text": "' + b"a" * RECORD_BYTES + b'"}\n'


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize(("stage", "config"), [(instructions, InstructionsConfig), (preferences, PreferencesConfig)])
def test_a_record_that_is_too_long_is_put_aside(stage, config, suffix, pack, tmp_path: Path) -> None:
    rows = [
        json.dumps({"prompt": f"Ask {i}", "response": "a", "chosen": f"a {i}", "rejected": f"b {i}"})
        for i in range(200)
    ]
    path = tmp_path / f"pairs.jsonl{suffix}"
    path.write_bytes(pack("\n".join(rows).encode() + b"\n" + LONG))
    read = [{"kind": "files", "paths": [str(path)]}]
    stage(config(read=read, heldout_share=0.2), {}, tmp_path / "out", Run(tmp_path / "work"))
    [aside] = [json.loads(line) for line in (tmp_path / "out" / "aux" / "quarantine.jsonl").read_text().splitlines()]
    assert (aside["file"], aside["line"]) == (str(path), 201)
    assert aside["reason"] == "longer than a record may be: a line of over 16 MB"


def test_a_long_line_is_an_error_where_every_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "two words"}\n' + LONG)
    readers = (
        lambda: list(file_lines(path)),
        lambda: read_pairs(path, ["text"]),
        lambda: check_rows(BenchmarkTask(name="mine", kind="cloze", path=str(path))),
    )
    for read in readers:
        with pytest.raises(StageError, match=r"rows\.jsonl:2: longer than a record may be"):
            read()


@pytest.mark.parametrize(
    "text",
    [b'{"a": "' + b"a" * 2 * SMALL_BYTES + b'"}', b"{}\n" * (SMALL_VALUES + 1), b'{"a": [' + b"[]," * SMALL_VALUES],
    ids=["a long text", "rows", "values"],
)
def test_an_archive_that_grows_too_much_is_not_mirrored(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    with pytest.raises(StageError, match="compressed 25 times at most") as caught:
        read_rows(path)
    assert caught.value.problems[0].code == "too_big"


def test_a_table_that_grows_too_much_is_not_mirrored_and_others_are(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    rows = [{"question": f"{i}?", "choices": ["a", "b"], "answer": {"label": i % 2}} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_rows(path) == rows
    pq.write_table(pa.table({"a": pa.array(["word"] * (SMALL_VALUES + 1)).dictionary_encode()}), path)
    with pytest.raises(StageError, match="values"):
        read_rows(path)
    pq.write_table(pa.table({"a": ["a" * 90_000_000]}), path, compression="zstd")
    with pytest.raises(StageError, match=r"row 1.*longer"):
        read_rows(path)
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    with pytest.raises(StageError, match="at least one row"):
        read_rows(path)


def test_a_device_is_no_file() -> None:
    for read in (read_bounded, read_text, lambda path: list(file_lines(path))):
        with pytest.raises(StageError, match="found a device"):
            read(Path("/dev/zero"))


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(tmp_path / "a.txt") == "a\nb"
    assert read_bounded(tmp_path / "a.txt", 7) == b"\xef\xbb\xbfa\r\nb"
    with pytest.raises(StageError, match=r"a\.txt: expected a file of at most"):
        read_bounded(tmp_path / "a.txt", 6)
    assert list(file_lines(tmp_path / "a.txt")) == [(1, "a\r\n"), (2, "b")]
    (tmp_path / "a.txt").write_bytes(b"a\n\xff")
    with pytest.raises(StageError, match=r"a\.txt:2: expected UTF-8"):
        list(file_lines(tmp_path / "a.txt"))
