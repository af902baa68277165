"""SHA-256 of files: each file is read once, in parallel, and trusted afterwards while its size and times are equal."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from infra.errors import Problem, StageError, stage_error
from infra.fingerprint import digest_files
from infra.io.sources import Place, Source, by_name
from infra.io.tables import cannot_write, in_words, is_damaged, set_aside

_QUERY_ROWS = 500
_LOST = "delete it: files are rehashed, and nothing else is lost"


T = TypeVar("T")


class HashBook:
    """Remembers the hash of each file with the size, mtime and ctime (ns) it had then.

    A file that still has all three is trusted; any other is read again. Another name gives a file another ctime, so one
    with several names is known by its inode too: it is read once for all of them. Losing the book costs time, nothing
    else: a damaged one is set aside by itself.

    reading: a book that is not there or cannot be written is kept in memory.
    Raises StageError where the book cannot be written and `reading` does not say that it need not be.
    """

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        self._place, self._uri = str(path), False
        self._path = path
        self._deriving = threading.Lock()
        if reading and not _writable(path):
            # Gone with the last connection to it, which is this one.
            self._place, self._uri = f"file:hashes-{id(self)}?mode=memory&cache=shared", True
            self._kept = self._connect()
        with in_words(path, _LOST):
            if not self._uri:
                path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._make_tables()
            except sqlite3.DatabaseError as error:
                if not is_damaged(error):
                    raise
                set_aside(path)
                self._make_tables()

    def _make_tables(self) -> None:
        with closing(self._connect()) as book, book:
            book.execute(
                "CREATE TABLE IF NOT EXISTS files"
                " (path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, sha256 TEXT)"
            )
            book.execute(
                "CREATE TABLE IF NOT EXISTS inodes"
                " (inode TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, sha256 TEXT)"
            )
            book.execute("CREATE TABLE IF NOT EXISTS derived (state TEXT PRIMARY KEY, digest TEXT)")

    def _query(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Return the result of `work`, which reads or writes the book. Return `otherwise` if the book is damaged, which
        sets it aside, or if there is no room to write into it: all of its content can be computed again."""
        try:
            with closing(self._connect()) as book, book:
                return work(book)
        except sqlite3.DatabaseError as error:
            if is_damaged(error) and not self._uri:
                set_aside(self._path)
                self._make_tables()
            elif not cannot_write(error):
                raise
            return otherwise

    def sha256(self, paths: Iterable[Path], *, read_all: bool = False) -> dict[Path, str]:
        """The hash of each file; `read_all` reads every byte even where the times say that nothing changed.

        Raises FileNotFoundError or another OSError for a file that cannot be read.
        """
        stats = {path: os.stat(path) for path in paths}
        trusted = {} if read_all else self._trusted_hashes(stats)
        unknown = {_inode(stat): path for path, stat in stats.items() if path not in trusted}
        with ThreadPoolExecutor(max_workers=min(8, 2 * (os.cpu_count() or 1))) as pool:
            read = dict(zip(unknown, pool.map(hash_file, unknown.values()), strict=True))
        computed = {path: read[_inode(stat)] for path, stat in stats.items() if path not in trusted}
        self._remember({path: (stats[path], sha) for path, sha in computed.items()})
        return {path: trusted.get(path) or computed[path] for path in stats}

    def know(self, hashes: Mapping[Path, str]) -> None:
        """Record hashes that were computed while the files were written."""
        self._remember({path: (os.stat(path), sha) for path, sha in hashes.items()})

    def moved(self, old: Path, new: Path) -> None:
        """Keep the known hashes of a folder's files after it was renamed, which does not change their times."""
        rename = "UPDATE OR REPLACE files SET path = ? || substr(path, ?) WHERE path >= ? AND path < ?"
        values = (str(new), len(str(old)) + 1, f"{old}/", f"{old}0")
        self._query(lambda book: book.execute(rename, values).rowcount, 0)

    def digest(self, source: Source) -> str:
        """The content digest of a source: base names and bytes of its files, wherever they lie, and where several have
        one name the order in which they are read, if that is not the one of their hashes.

        Raises StageError `missing_source`, naming the file.
        """
        if source.derive is not None:
            return self._derived(source, source.derive)
        files = self.source_files(source)
        read = [(file.name, files[file]) for file in by_name(files)]
        if read != sorted(read):
            read = [(f"{name}/{number}", sha) for number, (name, sha) in enumerate(read)]
        return digest_files(read)

    def digests(self, sources: Iterable[Source]) -> dict[str, str]:
        """The digest of each, by its key. Raises StageError `missing_source` naming all that are not there."""
        digests: dict[str, str] = {}
        problems: list[Problem] = []
        for source in sources:
            try:
                digests[source.key] = self.digest(source)
            except StageError as error:
                problems += error.problems
        if problems:
            raise StageError(*problems)
        return digests

    def _derived(self, source: Source, derive: Callable[[], str]) -> str:
        """Return a digest that is expensive to compute, remembered until one of the watched files changes."""
        stats = [(path, os.stat(path)) for path in source.watched]
        signatures = [f"{path}\0{s.st_size}\0{s.st_mtime_ns}\0{s.st_ctime_ns}" for path, s in stats]
        state = hashlib.sha256("\n".join([source.recipe, *signatures]).encode()).hexdigest()
        # Several stages may request the same digest at once: the first one computes it, the others read it.
        with self._deriving:
            query = "SELECT digest FROM derived WHERE state = ?"
            row = self._query(lambda book: book.execute(query, (state,)).fetchone(), None)
            if row is None:
                row = (derive(),)
                write = "INSERT OR REPLACE INTO derived VALUES (?, ?)"
                self._query(lambda book: book.execute(write, (state, row[0])).rowcount, 0)
        return str(row[0])

    def source_files(self, source: Source) -> dict[Place, str]:
        """The files of a source with their hashes, its objects on S3 with what stands for theirs.

        Raises StageError `missing_source`, naming the file.
        """
        for path in source.paths:
            if not path.is_file():
                raise stage_error("missing_source", source.key, f"no such file: {path}", source.fix)
        hashes: dict[Place, str] = {item: item.content_tag for item in source.objects}
        return hashes | dict[Place, str](self.sha256(source.paths).items())

    def _trusted_hashes(self, stats: dict[Path, os.stat_result]) -> dict[Path, str]:
        trusted = self._trusted("files", {str(path): stat for path, stat in stats.items()})
        by_path = {path: trusted[str(path)] for path in stats if str(path) in trusted}
        linked = {path: stat for path, stat in stats.items() if stat.st_nlink > 1 and path not in by_path}
        trusted = self._trusted("inodes", {_inode(stat): stat for stat in linked.values()})
        return by_path | {path: trusted[_inode(stat)] for path, stat in linked.items() if _inode(stat) in trusted}

    def _trusted(self, table: str, stats: dict[str, os.stat_result]) -> dict[str, str]:
        """The hashes of those files, by their key in a table, whose size and times are as they were."""
        names = list(stats)

        def read(book: sqlite3.Connection) -> dict[str, str]:
            rows: dict[str, str] = {}
            for start in range(0, len(names), _QUERY_ROWS):
                part = names[start : start + _QUERY_ROWS]
                marks = ",".join("?" * len(part))
                key = "path" if table == "files" else "inode"
                for name, size, mtime, ctime, sha in book.execute(
                    f"SELECT * FROM {table} WHERE {key} IN ({marks})", part
                ):
                    stat = stats[name]
                    if (size, mtime, ctime) == (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns):
                        rows[name] = sha
            return rows

        return self._query(read, dict[str, str]())

    def _remember(self, hashed: dict[Path, tuple[os.stat_result, str]]) -> None:
        if not hashed:
            return

        def row(key: str, stat: os.stat_result, sha: str) -> tuple:
            return key, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, sha

        files = [row(str(path), stat, sha) for path, (stat, sha) in hashed.items()]
        inodes = [row(_inode(stat), stat, sha) for stat, sha in hashed.values() if stat.st_nlink > 1]

        def write(book: sqlite3.Connection) -> None:
            book.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", files)
            book.executemany("INSERT OR REPLACE INTO inodes VALUES (?, ?, ?, ?, ?)", inodes)

        self._query(write, None)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._place, timeout=60, uri=self._uri)


def _inode(stat: os.stat_result) -> str:
    """Return an id that all names of one file share."""
    return f"{stat.st_dev}:{stat.st_ino}"


def _writable(path: Path) -> bool:
    return path.exists() and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
