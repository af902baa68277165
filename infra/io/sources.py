"""Files outside the store that a stage reads: named in its config, known to identity by their bytes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from infra.errors import stage_error
from infra.io.contained import COPY_IN, check_inside, homes
from infra.io.s3 import SCHEME, S3Object, list_objects, open_object

FOLDER = "folder"


class _SourcePathMark:
    """Marks a config field as a path outside the store: identity counts its bytes, not its name."""


SOURCE_PATH = _SourcePathMark()


class LocatedText(str):
    """Text from a config file in another folder than the config's: a relative path in it is relative to `folder`."""

    folder: Path

    @classmethod
    def of(cls, text: str, folder: Path) -> LocatedText:
        located = cls(text)
        located.folder = folder
        return located


_VARIABLE = re.compile(r"\$\{([^}]*)\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _with_variables(value: str) -> str:
    """The path with `${NAME}` replaced by that environment variable. Raises ValueError for one that is not set."""
    is_pattern = glob.has_magic(_VARIABLE.sub("", value))

    def content(match: re.Match[str]) -> str:
        if not _NAME.fullmatch(match[1]) or not match[0].endswith("}"):
            raise ValueError(f"expected the name of an environment variable in {match[0]}, as in ${{DATA}}")
        text = os.environ.get(match[1])
        if not text:
            raise ValueError(f"the environment variable {match[1]} is {'not set' if text is None else 'empty'}")
        return glob.escape(text) if is_pattern else text

    return _VARIABLE.sub(content, value)


def _folder_of(value: str, info: ValidationInfo) -> Path | None:
    """The folder of the file that the text is from; None if it is from no file."""
    return value.folder if isinstance(value, LocatedText) else (info.context or {}).get(FOLDER)


def absolute(value: str, info: ValidationInfo) -> str:
    """Paths in a config are relative to the config file's folder, which the loader gives as validation context.

    `${NAME}` in them stands for an environment variable, if they are from a file.
    """
    folder = _folder_of(value, info)
    if folder:
        value = _with_variables(value)
    try:
        expanded = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a path; there is no user {value.split('/')[0]!r}") from None
    path = Path(folder or "") / expanded
    if folder and not expanded.is_absolute() and glob.has_magic(value) and not path.exists():
        return str(Path(glob.escape(str(folder))) / expanded)  # brackets in the folder's own name are no pattern
    return str(path)


def _absolute_or_url(value: str, info: ValidationInfo) -> str:
    if "://" not in value:
        return absolute(value, info)
    url = _with_variables(value) if _folder_of(value, info) else value
    if not url.startswith(SCHEME) or not url.removeprefix(SCHEME).partition("/")[0]:
        raise ValueError(f"expected a local path or s3://bucket/key, not {url}")
    return url


def _absolute_if_there(value: str, info: ValidationInfo) -> str:
    path = absolute(value, info)
    return path if Path(path).exists() or value.startswith((".", "/", "~", "${")) else str(value)


def _resolved_by(resolve: Callable[[str, ValidationInfo], str]) -> WrapValidator:
    """Validates a text, then resolves it as it was given: pydantic makes a plain text of a LocatedText."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
        text = handler(value)
        return resolve(value if isinstance(value, LocatedText) else text, info)

    return WrapValidator(validate)


Place = Path | S3Object
"""Location of the bytes of a source; both kinds have a `name`."""

SourcePath = Annotated[str, SOURCE_PATH, _resolved_by(absolute)]
SourceLocation = Annotated[str, SOURCE_PATH, _resolved_by(_absolute_or_url)]
"""A path or an s3:// URL."""
SourceDataset = Annotated[str, SOURCE_PATH, _resolved_by(_absolute_if_there)]
"""A folder, or the name of a dataset on the hub."""


@dataclass(frozen=True)
class Source:
    """One thing that a stage reads from outside the store.

    key: the dotted config key that names it, for error messages, e.g. `ingest.sources.0`.
    paths: its files; a path that does not exist is kept, so that its reader can report it.
    objects: its objects on S3.
    derive: finds the content digest of a source that has no own files (the docstrings of installed packages).
    recipe: what `derive` does, in words that change when its answer may.
    watched: files that stay the same, in size and times, as long as the answer of `derive` does.
    fix: what to do where a file is not there.
    """

    key: str
    paths: tuple[Path, ...] = ()
    derive: Callable[[], str] | None = None
    recipe: str = ""
    watched: tuple[Path, ...] = ()
    objects: tuple[S3Object, ...] = ()
    fix: str = "correct the path in the config"


FOLLOW = "set the link's target as the path in the config, or follow_links: true next to paths if you trust the links"


def expand(patterns: Iterable[str], follow_links: bool = False, fix: str = COPY_IN) -> tuple[Path, ...]:
    """Return the files behind paths, folders and globs, sorted; a pattern that matches nothing is returned as is. URLs
    are left out.

    Args:
        patterns: paths, folders and globs. One that is itself a link is followed.
        follow_links: follow links in a folder, or among the matches of a glob, to files elsewhere.
        fix: what to do about such a link, for the error.

    Raises:
        StageError: `unsafe_file` for a link that leads out of its folder, unless `follow_links`.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        if pattern.startswith(SCHEME):
            continue
        path = Path(pattern)
        if path.is_dir():
            paths.update(files_below(path, follow_links, fix))
        elif path.exists():
            paths.add(path)
        else:
            matches = [Path(name) for name in glob.glob(pattern, recursive=True)]
            if not follow_links:
                check_inside(matches, homes(glob_root(path)), pattern, fix)
            paths.update(matches or [path])
    return tuple(sorted(paths))


def glob_root(pattern: Path) -> Path:
    """Return the folder that a glob searches: the path before its first wildcard."""
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def files_below(folder: Path, follow_links: bool = False, fix: str = COPY_IN) -> Iterator[Path]:
    """Yield all files in a folder and those in it; with `follow_links` also where a link leads to another disk. A
    folder that several links lead to is gone through once.

    Raises:
        StageError: `unsafe_file` for a link that leads out of the folder, unless `follow_links`. A folder from outside
            may hold links to private files.
    """
    visited = {os.path.realpath(folder)}
    root_prefix = os.path.join(os.path.realpath(folder), "")
    allowed = homes(folder)

    def check(paths: Iterable[str]) -> None:
        if not follow_links:
            check_inside((Path(path) for path in paths if os.path.islink(path)), allowed, str(folder), fix)

    for directory, folders, files in os.walk(folder, followlinks=True):
        kept_folders = []
        for name in sorted(folders):
            path = os.path.join(directory, name)
            real = os.path.realpath(path)
            # Content of the folder is read there, and folders that contain it are not part of it.
            is_nested = os.path.islink(path) and (
                real.startswith(root_prefix) or root_prefix.startswith(os.path.join(real, ""))
            )
            if real not in visited and not is_nested:
                check([path])
                visited.add(real)
                kept_folders.append(name)
        folders[:] = kept_folders
        check(os.path.join(directory, name) for name in files)
        yield from (child for child in (Path(directory, name) for name in files) if child.is_file())


def expand_objects(patterns: Iterable[str]) -> tuple[S3Object, ...]:
    """The objects behind the s3:// URLs among the patterns, sorted.

    Raises StageError `missing_source` for a URL with nothing behind it, and what `infra.io.s3.list_objects` raises.
    """
    matched_objects: set[S3Object] = set()
    for url in patterns:
        if url.startswith(SCHEME):
            objects = list_objects(url)
            if not objects:
                raise stage_error("missing_source", url, f"no such object: {url}", "correct the path in the config")
            matched_objects.update(objects)
    return tuple(sorted(matched_objects))


def open_place(file: Place, buffering: int = -1) -> BinaryIO:
    """The bytes of a file or object. Raises StageError `missing_source`; reading an object, what `infra.io.s3` raises.

    buffering: bytes of a file that are read at once; -1 for a block of its file system.
    """
    if isinstance(file, S3Object):
        return open_object(file)
    try:
        return file.open("rb", buffering)
    except FileNotFoundError:
        raise stage_error("missing_source", str(file), "no such file", "correct the path in the config") from None
    except IsADirectoryError:
        raise stage_error("missing_source", str(file), "expected a file, found a folder") from None


def size_of(file: Place) -> int:
    """Return the bytes of a file or object; 0 for a file that does not exist."""
    if isinstance(file, S3Object):
        return file.size
    return file.stat().st_size if file.is_file() else 0


def by_name(files: Iterable[Place]) -> list[Place]:
    """Files in the order in which they are read, which does not change when the folder around all of them moves."""
    return sorted(files, key=lambda file: (file.name, str(file)))
