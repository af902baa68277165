"""When a file's recorded hash is trusted, and when the file is read again."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest

import infra.io.hashing
from infra.errors import StageError
from infra.io.hashing import HashBook, hash_file
from infra.io.sources import Source, expand


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were read."""
    seen: list[Path] = []

    def spy(path: Path) -> str:
        seen.append(path)
        return hash_file(path)

    monkeypatch.setattr(infra.io.hashing, "hash_file", spy)
    return seen


@pytest.fixture
def book(tmp_path: Path) -> HashBook:
    return HashBook(tmp_path / "state" / "hashes.sqlite")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_an_untouched_file_is_read_once(tmp_path: Path, book: HashBook, read: list[Path]) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    assert [book.sha256([path])[path] for _ in range(3)] == [sha("one")] * 3
    assert read == [path]


def test_a_change_with_size_and_mtime_put_back_is_noticed(tmp_path: Path, book: HashBook) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    before = path.stat()
    book.sha256([path])
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert book.sha256([path])[path] == sha("two")


def test_a_touched_file_is_read_again(tmp_path: Path, book: HashBook, read: list[Path]) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    book.sha256([path])
    os.utime(path)
    assert book.sha256([path])[path] == sha("one")
    assert read == [path, path]


def test_read_all_trusts_nothing(tmp_path: Path, book: HashBook) -> None:
    """A book that was written wrong, or a disk that changed a bit without a word."""
    path = tmp_path / "a"
    path.write_text("one")
    book.sha256([path])
    with sqlite3.connect(tmp_path / "state" / "hashes.sqlite") as table:
        table.execute("UPDATE files SET sha256 = ?", (sha("wrong"),))
    assert book.sha256([path])[path] == sha("wrong")
    assert book.sha256([path], read_all=True)[path] == sha("one")
    assert book.sha256([path])[path] == sha("one")


def test_files_are_known_after_their_folder_moved(tmp_path: Path, book: HashBook, read: list[Path]) -> None:
    old, new, beside = tmp_path / "old", tmp_path / "new", tmp_path / "old.kept"
    for folder in (old, beside):
        folder.mkdir()
        (folder / "a").write_text(folder.name)
    book.sha256([old / "a", beside / "a"])
    old.rename(new)
    book.moved(old, new)
    read.clear()
    assert book.sha256([new / "a", beside / "a"]) == {new / "a": sha("old"), beside / "a": sha("old.kept")}
    assert read == []


def test_a_file_with_two_names_is_read_once_for_both(tmp_path: Path, book: HashBook, read: list[Path]) -> None:
    """A second name changes the file's ctime: a name that was hashed before would be read again."""
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    old.write_text("one")
    other.write_text("two")
    book.sha256([old])
    os.link(old, new)
    read.clear()
    assert book.sha256([new, other])[new] == sha("one")
    assert set(read) == {new, other}
    assert HashBook(tmp_path / "state" / "hashes.sqlite").sha256([old, new]) == {old: sha("one"), new: sha("one")}
    assert set(read) == {new, other}
    before = old.stat()
    new.write_text("two")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert book.sha256([old])[old] == sha("two")


def test_a_lost_book_costs_time_only(tmp_path: Path, book: HashBook) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    book.sha256([path])
    (tmp_path / "state" / "hashes.sqlite").unlink()
    assert HashBook(tmp_path / "state" / "hashes.sqlite").sha256([path])[path] == sha("one")


def test_a_source_is_its_files_wherever_they_lie(tmp_path: Path, book: HashBook) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("one")
    here, there = (Source("ingest", (tmp_path / name / "a.txt",)) for name in ("here", "there"))
    assert book.digest(here) == book.digest(there)
    (tmp_path / "there" / "a.txt").write_text("two")
    assert book.digest(here) != book.digest(there)


def test_a_missing_source_is_named(tmp_path: Path, book: HashBook) -> None:
    with pytest.raises(StageError, match=r"ingest\.read\.0.*gone\.txt"):
        book.digest(Source("ingest.read.0", (tmp_path / "gone.txt",)))


def test_a_derived_digest_is_found_once_until_a_watched_file_changes(tmp_path: Path) -> None:
    watched = tmp_path / "RECORD"
    watched.write_text("one")
    calls: list[int] = []

    def derive() -> str:
        calls.append(len(calls))
        return f"digest {len(calls)}"

    source = Source("key", derive=derive, recipe="count", watched=(watched,))
    assert [HashBook(tmp_path / "book.sqlite").digest(source) for _ in range(3)] == ["digest 1"] * 3
    watched.write_text("another")
    assert HashBook(tmp_path / "book.sqlite").digest(source) == "digest 2"
    other = Source("key", derive=derive, recipe="other", watched=(watched,))
    assert HashBook(tmp_path / "book.sqlite").digest(other) == "digest 3"


def test_files_of_one_name_are_a_source_in_the_order_in_which_they_are_read(tmp_path: Path, book: HashBook) -> None:
    def digest(root: str, **texts: str) -> str:
        for folder, text in texts.items():
            (tmp_path / root / folder).mkdir(parents=True)
            (tmp_path / root / folder / "x.txt").write_text(text)
        return book.digest(Source("ingest", paths=expand([str(tmp_path / root)])))

    first = digest("first", a="one", b="two")
    assert digest("elsewhere", a="one", b="two") == first, "the folder around them is not read"
    assert digest("renamed", c="one", d="two") == first
    assert digest("swapped", a="two", b="one") != first
