"""Docstrings: found by parsing, in an order of their own, never imported, never twice."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from corpus.config import IngestConfig
from corpus.demo import parsing
from corpus.demo.docstrings import (
    Docstring,
    InstalledFile,
    Unparsed,
    content_digest,
    first_sentence,
    group_of,
    installed_files,
    parse_file,
)
from corpus.demo.parsing import read_docstrings
from corpus.documents.parts import read_documents
from corpus.ingest import ingest

MODULE = '''"""The module."""
class Reader(Base):
    """Reads."""
    def __init__(self, path, *, mode="r", **rest): ...
    def close(self):
        """Closes it."""
async def fetch(url: str, *more, retries=3):
    r"""Fetches \\d.

    More:
        Indented.
    """
'''


def parse(tmp_path: Path, content: bytes, name: str = "pack/_inner.py") -> list[Docstring | Unparsed]:
    path = tmp_path / "module.py"
    path.write_bytes(content)
    return parse_file(InstalledFile(name, path, "", len(content)))


def test_finds_everything_that_has_a_docstring_with_its_signature(tmp_path):
    found = [item for item in parse(tmp_path, MODULE.encode()) if isinstance(item, Docstring)]
    assert [(item.source, item.kind, item.signature) for item in found] == [
        ("pack/_inner.py", "module", "pack"),
        ("pack/_inner.py:Reader", "class", "pack.Reader(path, mode, **rest)"),
        ("pack/_inner.py:Reader.close", "function", "pack.Reader.close()"),
        ("pack/_inner.py:fetch", "function", "pack.fetch(url, *more, retries)"),
    ]
    assert found[-1].text == "Fetches \\d.\n\nMore:\n    Indented."


@pytest.mark.parametrize(
    "content",
    [b'"""Doc."""\nprint "python 2"\n', b'"""a\0b"""\n', b'# coding: no-such-codec\n"""Doc."""\n', b'"""caf\xe9"""\n'],
)
def test_what_python_cannot_parse_is_said_and_harms_nothing(tmp_path, content):
    [item] = parse(tmp_path, content)
    assert isinstance(item, Unparsed) and item.reason and "\n" not in item.reason


def test_declared_encodings_are_honoured(tmp_path):
    [item] = parse(tmp_path, '# -*- coding: latin-1 -*-\n"""Café."""\n'.encode("latin-1"))
    assert isinstance(item, Docstring) and item.text == "Café."


def test_a_lone_surrogate_in_a_literal_does_not_stop_the_reading(tmp_path):
    assert parse(tmp_path, b'"""Lone \\ud800."""\n') == []


def test_packages_are_not_imported():
    before = "altair" in sys.modules
    assert next(iter(read_docstrings(["altair"])))
    assert ("altair" in sys.modules) == before


def test_two_processes_give_what_one_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "one"))
    alone = list(read_docstrings(["click", "jinja2"]))
    monkeypatch.setenv("HOME", str(tmp_path / "two"))
    monkeypatch.setattr(parsing, "SEQUENTIAL_BYTES", 0)
    monkeypatch.setattr(parsing, "CHUNK_BYTES", 100_000)
    assert list(read_docstrings(["click", "jinja2"])) == alone


def test_what_was_parsed_is_kept_and_what_is_damaged_is_parsed_again(tmp_path, monkeypatch):
    def fails(file):
        raise AssertionError(f"{file.name} was parsed again")

    monkeypatch.setenv("HOME", str(tmp_path))
    first = list(read_docstrings(["click"]))
    with monkeypatch.context() as patched:
        patched.setattr(parsing, "parse_file", fails)
        assert list(read_docstrings(["click"])) == first
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text("[[")
    assert list(read_docstrings(["click"])) == first
    home = tmp_path / "file"
    home.write_text("a home that nothing can be kept in")
    monkeypatch.setenv("HOME", str(home))
    assert list(read_docstrings(["click"])) == first


def test_no_text_comes_twice_and_order_does_not_follow_the_request():
    first = list(read_docstrings(["click", "jinja2"]))
    texts = [item.text for item in first if isinstance(item, Docstring)]
    assert len(texts) == len(set(texts)) > 200
    assert list(read_docstrings(["jinja2", "click"])) == first


def test_digest_follows_the_selection():
    assert content_digest(["click"]) == content_digest(("click",)) != content_digest(["jinja2"])
    assert content_digest(["click", "jinja2"], ["jinja2"]) == content_digest(["click"])


def test_a_package_on_the_path_counts_and_its_bytes_are_in_the_digest(tmp_path, monkeypatch):
    def install(text: str) -> None:
        (tmp_path / "stemma_probe.py").write_text(f'"""{text}"""\n')
        info = tmp_path / "stemma_probe-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stemma-probe\nVersion: 1.0\n")
        digest = hashlib.sha256(text.encode()).hexdigest()
        (info / "RECORD").write_text(f"stemma_probe.py,sha256={digest},20\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    install("A first text.")
    digest = content_digest(["stemma_probe"])
    assert [item.text for item in read_docstrings(["stemma_probe"]) if isinstance(item, Docstring)] == ["A first text."]
    install("Another text.")
    assert content_digest(["stemma_probe"]) != digest


def test_tests_and_vendored_copies_are_left_out():
    names = [file.name for file in installed_files(["networkx", "pip"])]
    assert names and not [name for name in names if "/tests/" in name or "/_vendor/" in name]


def test_topics_of_the_python_help_are_documents():
    topics = [item for item in read_docstrings(["pydoc_data"]) if isinstance(item, Docstring)]
    assert len(topics) > 50 and any("lambda" in item.text for item in topics)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Return the norm. It may fail.", "Return the norm."),
        ("Return the\n    norm\n\nParameters\n------", "Return the norm"),
        ("Accept names, e.g. Alice. Then stop.", "Accept names, e.g. Alice."),
        ("norm(x, ord=None) -> float\n\nReturn the norm.", "Return the norm."),
        ("Wrap :class:`~torch.Tensor` in ``x``.", "Wrap `torch.Tensor` in `x`."),
        ("", ""),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


def test_group_ignores_spelling_that_does_not_matter():
    assert group_of("Return the ``norm``.\n\nMore.") == group_of("return  the norm") == "return the norm"


def test_slice_ends_at_the_limit(build):
    config = IngestConfig(read=[{"kind": "docstrings", "packages": ["networkx"], "limit_mb": 0.1}])
    sizes = [len(document.text.encode()) for document in read_documents(build(ingest, config))]
    assert 100_000 <= sum(sizes) < 100_000 + max(sizes)
