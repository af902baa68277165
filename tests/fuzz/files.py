"""Targets: the other files from outside, by the kinds that `tests/test_foreign_files.py` damages one by one."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from functools import cache
from pathlib import Path

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

from corpus.cleaning.people.neutral import neutral_words
from infra.errors import StemmaError
from tests import test_foreign_files as foreign
from tests.fuzz import damage
from tests.fuzz.harness import Target, Violation

GROUPS: dict[str, tuple[str, ...]] = {
    "benchmarks": ("multiple choice", "minimal pairs", "text", "cloze", "cloze in two", "failure class", "mirror*"),
    "safety": ("WinoBias", "Winogender", "BBQ", "StereoSet", "prompts", "plain prompts", "prompts of text", "BOLD",
               "CrowS-Pairs", "labelled", "lexicon", "word list", "neutral words"),
    "feedback": ("judgements", "Label Studio", "pairs of an export", "key of an export", "documents of a review",
    "key of a review"),
    "models": ("config of a model", "index of weights", "imported*", "scaling law", "training rows"),
    "datasets": ("state of a dataset", "splits of a dataset", "README of a dataset", "suite", "kubeconfig"),
}  # fmt: skip


@cache
def _seeds(name: str) -> bytes:
    """The valid file of a kind."""
    [content] = [text for what, text in itertools.islice(foreign.KINDS[name].mutations(), 1)]
    return content


def _members(group: str) -> list[str]:
    named = GROUPS[group]
    return [
        name
        for name in foreign.KINDS
        if name in named or any(part.endswith("*") and name.startswith(part[:-1]) for part in named)
    ]


@cache
def _contents(name: str) -> SearchStrategy[bytes]:
    content, suffix = _seeds(name), Path(foreign.KINDS[name].name).suffix
    # A file may be of another form than that of its suffix: then its bytes are damaged.
    with suppress(ValueError):
        if name == "README of a dataset":
            front = yaml.safe_load(content.split(b"---\n")[1])
            return damage.yaml_files([front]).map(lambda text: b"---\n" + text + b"\n---\n")
        if name == "imported weights":
            header = json.loads(content[8:-4])
            return damage.json_files([header]).map(lambda text: len(text).to_bytes(8, "little") + text + b"data")
        if suffix == ".jsonl":
            return damage.line_files([json.loads(content.splitlines()[0])])
        if suffix == ".json":
            return damage.json_files([json.loads(content)])
        if suffix == ".yaml":
            return damage.yaml_files([yaml.safe_load(content)])
        if suffix in (".csv", ".tsv"):
            delimiter = "\t" if suffix == ".tsv" else ","
            return damage.tables([line.split(delimiter) for line in content.decode().splitlines()], delimiter)
    return damage.byte_files([content])


@composite
def inputs(draw: DrawFn, group: str) -> tuple[str, bytes]:
    name = draw(st.sampled_from(_members(group)))
    return name, draw(_contents(name))


def check(value: tuple[str, bytes], folder: Path) -> None:
    name, content = value
    kind = foreign.KINDS[name]
    folder = folder / name.replace(" ", "-")
    path = folder / kind.name
    for other, text in kind.others.items():
        if not (folder / other).exists():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    neutral_words.cache_clear()
    try:
        misfits = [
            item for item in foreign._misfits(kind.read(path)) if not (kind.keeps_halves and "surrogate" in item)
        ]
        if misfits:
            raise Violation(f"{name} of a wrong type: {misfits[:3]}")
    except StemmaError as error:
        if path.name not in str(error) and not (kind.names_folder and str(folder) in str(error)):
            raise Violation(f"{name}, an error that names no file: {str(error)[:300]}") from error
        raise
    finally:
        neutral_words.cache_clear()


TARGETS = tuple(
    Target(f"files-{group}", lambda group=group: inputs(group), check)  # type: ignore[misc]
    for group in GROUPS
)
