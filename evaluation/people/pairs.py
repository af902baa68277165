"""Pairs for people to judge: prompts with two answers each, and, in a separate file, the model behind each answer.

An export is a folder:

    pairs.jsonl        {"id", "prompt", "a", "b"}, all that a judge may see
    judge.html         the page on which they are judged, offline
    tasks.json         the same for Label Studio, with its labelling interface in labelling.xml
    key.json           the models behind the answers, and how these were drawn
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from infra.errors import stage_error
from infra.io.bounded import file_lines, read_bounded
from infra.io.json import parse_json

PAIRS, KEY, PREFERENCES, TIES = "pairs.jsonl", "key.json", "preferences.jsonl", "ties.jsonl"
_SCHEMA = 1


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to a prompt; the order is independent of their origin."""

    id: str
    prompt: str
    a: str
    b: str


_PAIR = TypeAdapter(AnswerPair)


@dataclass(frozen=True)
class Export:
    """Pairs, and by pair id the names of the models that gave answers a and b.

    models: by name, metadata of each model, such as its folder and digest. drawn: how the answers were drawn.
    """

    pairs: Mapping[str, AnswerPair]
    given_by: Mapping[str, tuple[str, str]]
    models: Mapping[str, Mapping[str, Any]]
    drawn: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Id of the pairs; judgements name it, so that those of another export are recognized."""
        text = json.dumps([asdict(pair) for pair in self.pairs.values()], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, folder: Path, pages: Mapping[str, str]) -> None:
        """Write pairs and key, and `pages`, texts by file name: all of them or none. Raises as `require_free` does."""
        lines = [json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in self.pairs.values()]
        key = {"schema": _SCHEMA, "export": self.id, "models": self.models, "drawn": self.drawn}
        key |= {"given_by": self.given_by}
        write_whole(folder, {PAIRS: "".join(lines), KEY: json.dumps(key, indent=1), **pages})

    @classmethod
    def read(cls, folder: Path) -> Export:
        """Read an export. Raises StageError `no_export` for a folder that is not an export, `damaged_export` if pairs
        and key differ."""
        if not (folder / PAIRS).is_file() or not (folder / KEY).is_file():
            expected = f"expected {PAIRS} and {KEY}, as stemma feedback export writes them"
            raise stage_error("no_export", str(folder), expected, "give the folder of an export")
        try:
            key = parse_json(read_bounded(folder / KEY), folder / KEY)
            pairs = [_PAIR.validate_python(parse_json(line)) for _, line in file_lines(folder / PAIRS)]
            given_by = {id: (a, b) for id, (a, b) in key["given_by"].items()}
            export = cls({pair.id: pair for pair in pairs}, given_by, key["models"], key["drawn"])
            written_for = key["export"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"{PAIRS} or {KEY} is damaged: {type(error).__name__}: {error}"
            raise stage_error("damaged_export", str(folder), message, "export again") from error
        if export.id != written_for or given_by.keys() != export.pairs.keys():
            raise stage_error(
                "damaged_export", str(folder), f"{PAIRS} is not the one that {KEY} was written for", "export again"
            )
        return export


def write_whole(folder: Path, files: Mapping[str, str]) -> None:
    """Write a new folder, or an empty one, with these texts by file name: all of them or none. Raises as `require_free`
    does."""
    require_free(folder)
    # An existing folder is not replaced: it may be a working directory or a mount point.
    folder_exists = folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = folder if folder_exists else folder.parent
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    moved: list[Path] = []
    try:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf8")
        staging.chmod(0o755)
        if not folder_exists:
            os.replace(staging, folder)
            return
        for name in files:
            os.replace(staging / name, folder / name)
            moved.append(folder / name)
        staging.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        raise


def require_free(folder: Path) -> None:
    """Raise StageError `folder_in_use` for a folder that exists and is not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise stage_error("folder_in_use", str(folder), "expected a new or an empty folder", "choose another")


def blind(
    answered: Iterable[tuple[str, Sequence[tuple[str, str]]]], seed: int
) -> tuple[dict[str, AnswerPair], dict[str, tuple[str, str]]]:
    """Return pairs, and the models of their answers, in an order that does not reveal the models.

    answered: prompts, each with two (model, answer); `seed` decides which of the two is a.
    """
    random = np.random.default_rng(seed)
    pairs, given_by = {}, {}
    for prompt, answers in answered:
        (first, a), (second, b) = (answers[int(index)] for index in random.permutation(2))
        id = hashlib.sha256("\0".join((prompt, *sorted((a, b)))).encode()).hexdigest()[:16]
        pairs[id] = AnswerPair(id, prompt, a, b)
        given_by[id] = (first, second)
    return pairs, given_by
