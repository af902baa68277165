"""Docstrings of the installed packages: real English that every machine with the environment has.

Files are parsed, never imported, and come in an order that depends on nothing but their names and mixes the packages,
so that a slice from the start is a fair sample of the whole.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.errors import stage_error

TOPICS = "pydoc_data"
OWN_DISTRIBUTION = "stemma"
# Vendored copies are another package's text again; tests hold next to no prose.
SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "_vendored_packages", "vendor", "vendored", "third_party"}

Kind = Literal["module", "class", "function", "topic"]


@dataclass(frozen=True)
class InstalledFile:
    """A .py file of an installed package: path below its site folder, place on disk, SHA-256 from its RECORD."""

    name: str
    path: Path
    sha256: str
    size: int

    @property
    def package(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Docstring:
    """One docstring, dedented, with what it documents.

    source: "numpy/linalg/_linalg.py:norm". signature: "numpy.linalg.norm(x, ord, axis)", without a private last module,
    whose names are nearly always meant to be reached from the one above; a bare name for classes without __init__ and
    for modules.
    """

    package: str
    source: str
    kind: Kind
    signature: str
    text: str


@dataclass(frozen=True)
class Unparsed:
    """A file that Python cannot parse, with the line and the reason."""

    source: str
    line: int
    reason: str


def installed_files(packages: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> list[InstalledFile]:
    """The .py files that the installed distributions record, without tests, vendored copies and this project itself.

    Raises StageError `missing_package` naming the packages that were asked for and are not installed.
    """
    unwanted = set(exclude)
    requested = None if packages is None else set(packages) - unwanted
    files: dict[str, InstalledFile] = {}
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("RECORD")
        if not record or distribution.name.lower() == OWN_DISTRIBUTION:
            continue
        for row in csv.reader(record.splitlines()):
            if len(row) < 3 or not _is_readable(row[0]):
                continue
            package = row[0].split("/")[0].removesuffix(".py")
            if package in unwanted or (requested is not None and package not in requested) or row[0] in files:
                continue
            path = Path(str(distribution.locate_file(row[0])))
            files[row[0]] = InstalledFile(row[0], path, row[1], int(row[2] or 0))
    if TOPICS not in unwanted and (requested is None or TOPICS in requested):
        files[f"{TOPICS}/topics.py"] = _topics_file()
    missing = sorted(requested - {file.package for file in files.values()}) if requested is not None else []
    if missing:
        raise stage_error(
            "missing_package",
            "packages",
            f"expected top-level names of installed packages; not installed: {', '.join(missing)}",
            "install them or remove them from the list",
        )
    return sorted(files.values(), key=lambda file: hashlib.sha256(file.name.encode()).digest())


def records() -> tuple[Path, ...]:
    """The RECORD file of every installed distribution: what is installed has not changed while these have not."""
    folders = {Path(folder) for folder in sys.path if folder}
    return tuple(sorted(record for folder in folders for record in folder.glob("*.dist-info/RECORD")))


def content_digest(packages: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> str:
    """SHA-256 over the sorted "path,hash" lines of all files that would be read; none but the RECORDs is opened."""
    lines = sorted(f"{file.name},{file.sha256}" for file in installed_files(packages, exclude))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def parse_file(file: InstalledFile) -> list[Docstring | Unparsed]:
    """All docstrings of one file, in the order of the source."""
    try:
        source = file.path.read_bytes()
        if b'"""' not in source and b"'''" not in source and file.package != TOPICS:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError as error:
        return [Unparsed(file.name, error.lineno or 0, f"not Python: {error.msg}")]
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return [Unparsed(file.name, 0, f"cannot be parsed: {error}")]
    if file.package == TOPICS:
        return list(_topics(file, tree))
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    outer, _, last = module.rpartition(".")
    public_module = outer if outer and last.startswith("_") else module
    return [
        Docstring(file.package, f"{file.name}:{name}".rstrip(":"), kind, f"{public_module}{signature}", text)
        for name, kind, signature, text in _walk(tree, "")
        if _is_unicode(text)
    ]


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Kind, str, str]]:
    """Yield (qualified name, kind, ".name(parameters)", docstring) of a module, its classes, functions and methods."""
    if isinstance(node, ast.Module):
        text = ast.get_docstring(node)
        if text:
            yield "", "module", "", text
    for child in getattr(node, "body", []):
        if isinstance(child, (ast.If, ast.Try)):
            yield from _walk(child, prefix)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}.{child.name}"
            text = ast.get_docstring(child)
            if text:
                yield name[1:], "function", f"{name}({_parameters(child)})", text
        elif isinstance(child, ast.ClassDef):
            name = f"{prefix}.{child.name}"
            text = ast.get_docstring(child)
            if text:
                made = [item for item in child.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
                yield name[1:], "class", f"{name}({_parameters(made[-1])})" if made else name, text
            yield from _walk(child, name)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return ", ".join(names)


def _topics(file: InstalledFile, tree: ast.Module) -> Iterator[Docstring | Unparsed]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            try:
                topics = ast.literal_eval(statement.value)
            except ValueError as error:
                yield Unparsed(file.name, statement.lineno, f"not a literal: {error}")
                continue
            for name, text in sorted(topics.items()):
                yield Docstring(TOPICS, f"{file.name}:{name}", "topic", f"Python help on {name}", text.strip())


def _topics_file() -> InstalledFile:
    spec = importlib.util.find_spec(f"{TOPICS}.topics")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    content = path.read_bytes()
    return InstalledFile(f"{TOPICS}/topics.py", path, hashlib.sha256(content).hexdigest(), len(content))


def _is_readable(name: str) -> bool:
    folders = name.split("/")
    return (
        name.endswith(".py")
        and not name.startswith("__editable__")
        and folders[0].removesuffix(".py").isidentifier()
        and not SKIPPED_FOLDERS.intersection(folders[:-1])
    )


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which a literal may hold and UTF-8 may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ROLE = re.compile(r":[\w:+.-]+:`(?:~|!)?([^`<]*?)(?:\s*<([^`>]*)>)?`")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\bcf\.)(?<!\bvs\.)(?<!\betc\.)\s+(?=[^a-z])")
_SIGNATURE_LINE = re.compile(r"^[\w.]+\s?\(.*\)\s*(->\s*\S.*)?\\?$")


def first_sentence(text: str) -> str:
    """The sentence that opens a docstring, on one line, without Sphinx roles and double backticks."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        line = " ".join(paragraph.split())
        # C extensions and overloads open with the call itself; the sentence comes after it.
        if line and not (_SIGNATURE_LINE.match(line) and len(paragraph.strip().splitlines()) == 1):
            line = _ROLE.sub(r"`\1`", line).replace("``", "`").replace("`~.", "`").replace("`~", "`")
            return _SENTENCE_END.split(line, maxsplit=1)[0]
    return ""


def group_of(text: str) -> str:
    """The key that keeps texts with one summary on one side of the split: the first sentence without punctuation."""
    return re.sub(r"[\W_]+", " ", first_sentence(text).lower()).strip()
