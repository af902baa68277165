"""Canaries: made-up secrets that are planted in the training text, so that one can ask later how far a model gave them
away (Carlini et al. 2019, The Secret Sharer)."""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corpus.config import CANARY_GAP, CanariesConfig
from corpus.documents.parts import Document, DocumentWriter, is_heldout
from infra.errors import stage_error
from infra.io.json import read_own_json

FILE = "canaries.json"
SOURCE = "canaries"
"""The source that index.parquet and meta.json name for them."""
_GAP = re.compile(CANARY_GAP)
_ALPHABETS = {"digits": string.digits, "letters": string.ascii_lowercase}


@dataclass(frozen=True)
class Format:
    """A text with gaps, `{digits:6}` or `{letters:4}`, each filled with as many random characters."""

    text: str

    @property
    def gaps(self) -> list[tuple[str, int]]:
        return [(kind, int(length)) for kind, length in _GAP.findall(self.text)]

    @property
    def space(self) -> int:
        """The number of different texts of this format."""
        size = 1
        for kind, length in self.gaps:
            size *= len(_ALPHABETS[kind]) ** length
        return size

    def filled(self, number: int) -> str:
        """The text of this number, from 0 to `space` - 1."""

        def fill(gap: re.Match[str]) -> str:
            nonlocal number
            alphabet, text = _ALPHABETS[gap[1]], ""
            for _ in range(int(gap[2])):
                number, digit = divmod(number, len(alphabet))
                text += alphabet[digit]
            return text

        return _GAP.sub(fill, self.text)

    def draw(self, count: int, seed: str) -> list[int]:
        """The numbers of `count` different texts; fewer than `space`."""
        random_numbers = random.Random(seed)
        numbers: dict[int, None] = {}
        while len(numbers) < count:
            numbers[random_numbers.randrange(self.space)] = None
        return list(numbers)


@dataclass(frozen=True)
class Canary:
    """format: as in the config. number: which text of the format it is. copies: how often it was planted."""

    format: Format
    number: int
    copies: int

    @property
    def text(self) -> str:
        return self.format.filled(self.number)


def draw_canaries(configs: Sequence[CanariesConfig], seed: int) -> list[Canary]:
    """One canary for each number of copies, those of one format all different; the same under the same seed."""
    canaries = []
    for config in configs:
        form = Format(config.text)
        # A format keeps its canaries when another one is added.
        drawn = form.draw(len(config.copies), f"{seed}:{config.text}")
        canaries += [Canary(form, number, copies) for number, copies in zip(drawn, config.copies, strict=True)]
    return canaries


def plant(canaries: Sequence[Canary], heldout_share: float, folder: Path) -> list[Path]:
    """Write them as documents of the training side, one for each copy; return their Parquet parts, none if there are no
    copies.

    Args:
        folder: old parts in it are deleted.
    """
    for old in folder.glob("part-*.parquet"):
        old.unlink()
    with DocumentWriter(folder) as writer:
        for number, canary in enumerate(canaries):
            for copy in range(canary.copies):
                # Each copy has a different id: no other document may have the same one.
                identity = hashlib.sha256(f"{canary.text}#{copy}".encode()).hexdigest()[:16]
                group = next(
                    name for tried in range(10_000) if not is_heldout(name := f"{identity}:{tried}", heldout_share)
                )
                writer.write(Document(identity, canary.text, f"{SOURCE}/{number}", group))
    return sorted(folder.glob("part-*.parquet"))


def write_canaries(canaries: Sequence[Canary], folder: Path) -> None:
    """Write canaries.json: [{"format", "number", "text", "copies"}]."""
    rows = [
        {"format": canary.format.text, "number": canary.number, "text": canary.text, "copies": canary.copies}
        for canary in canaries
    ]
    (folder / FILE).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def read_canaries(shards: Path) -> list[Canary]:
    """Return the canaries of a shard artifact, empty if it has none. Raises StageError for a file that is damaged."""
    path = shards / FILE
    if not path.exists():
        return []
    try:
        rows = read_own_json(path)
        return [Canary(Format(row["format"]), int(row["number"]), int(row["copies"])) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise stage_error(
            "bad_shards", str(path), f"expected the output of shard: {error}", "rebuild the shards"
        ) from (error)
