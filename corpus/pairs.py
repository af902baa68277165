"""What instructions and preferences share: pair files read, pairs split and written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from corpus.dialogues import CHAT_ROLES, Turn
from corpus.documents import is_heldout
from corpus.quarantine import Quarantine, Rejected
from corpus.readers.config import PairFiles, Verify
from corpus.readers.json_lines import read_records
from corpus.readers.record import MISSING, Record, pick
from infra.errors import stage_error
from infra.run import Run
from infra.sources import Place, by_name

PROGRESS_EVERY = 500
PROMPTS = ("prompt", "question", "query")
"""Fields of a prompt where the config names none and there is no `instruction`."""
CONVERSATIONS = ("conversations", "conversation", "messages")
"""Fields of the turns of a conversation, as in ShareGPT."""


def prompt_field(record: Record, source: PairFiles, others: Sequence[str] = PROMPTS) -> str | None:
    """The field of the prompt: the one that the config names or, where it names none, one of `others`."""
    is_named = source.prompt_field != PairFiles.model_fields["prompt_field"].default
    names = (source.prompt_field, *(() if is_named else others))
    return next((name for name in names if pick(record.value, name) is not MISSING), None)


S = TypeVar("S")
F = TypeVar("F", bound=PairFiles)


def records_of(
    source: F, places: Iterable[Place], key: str, check: Callable[[Record, F, str], None]
) -> Iterator[Record | Rejected]:
    """The records in these files of a source, file after file by name. key: its dotted config key. check: called with
    the first record of each file, the source and the key; raises where it lacks a field."""
    for place in by_name(places):
        is_first = True
        for item in read_records(place, source.encoding, (), key, ()):
            if is_first and not isinstance(item, Rejected):
                check(item, source, key)
                is_first = False
            yield item


class Pair(NamedTuple):
    """One line of train.jsonl or heldout.jsonl.

    fields: prompt and response, or prompt, chosen and rejected. group: pairs of one group lie on the same side.
    verify: the rule that tells whether an answer is right; None where there is none, and the line then lacks the key.
    reference: what the rule holds answers against, where that is not the response; the line then has it.
    history: what was said before the prompt; the line has it as `history`, [{"role", "content"}] with the roles system,
        user and assistant, where there was anything.
    weight: how often the pair is to be seen, as `weight` in the line where it is not once.
    votes: for the chosen and for the rejected answer, margin: by how much the chosen one is better, ranking: the id of
    the ranking that the pair is of, whose pairs follow one another. The line has each where it is known.
    """

    fields: Mapping[str, str]
    source: str
    group: str
    verify: Verify | None = None
    history: Sequence[Turn] = ()
    weight: float = 1.0
    votes: tuple[float, float] | None = None
    margin: float | None = None
    ranking: str = ""
    reference: str = ""

    @property
    def id(self) -> str:
        """The first 16 hex digits of the SHA-256 of the texts, each closed by a zero byte."""
        texts = [*(part for turn in self.history for part in turn), *self.fields.values()]
        joined = "".join(f"{text}\0" for text in texts)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def as_line(self) -> str:
        line: dict[str, Any] = {"id": self.id}
        if self.history:
            line["history"] = [{"role": CHAT_ROLES[one.role], "content": one.text} for one in self.history]
        line |= self.fields
        if self.verify:
            line["verify"] = self.verify
        if self.reference:
            line["reference"] = self.reference
        if self.weight != 1:
            line["weight"] = self.weight
        if self.votes:
            line["votes"] = list(self.votes)
        if self.margin is not None:
            line["margin"] = self.margin
        if self.ranking:
            line["ranking"] = self.ranking
        return json.dumps({**line, "source": self.source}, ensure_ascii=False) + "\n"


def prompt_of(record: Record, source: PairFiles) -> str:
    """The prompt, with the input two lines below it where there is one (Alpaca, Taori et al., 2023)."""
    prompt = str(pick(record.value, source.prompt_field)).strip()
    further = record.value.get(source.input_field) if source.input_field else None
    return f"{prompt}\n\n{further.strip()}" if isinstance(further, str) and further.strip() else prompt


def write_pairs(
    sources: Iterable[S],
    section: str,
    read: Callable[[S, str], Iterator[Pair | Rejected]],
    heldout_share: float,
    max_quarantine_share: float,
    out_dir: Path,
    run: Run,
) -> dict[str, float]:
    """Writes train.jsonl, heldout.jsonl, aux/quarantine.jsonl and aux/counts.json; returns the counts as figures.

    A pair that occurred before is left out and counted as a duplicate. Where a rule can verify answers, the sources lie
    mixed in heldout.jsonl, since what is measured is the first of the file; otherwise they follow one another.
    Raises StageError `too_few_pairs` if either side is empty, besides what the readers raise.
    """
    seen: set[str] = set()
    heldout_of: list[int] = []
    sides = {"train": 0, "heldout": 0}
    rows: list[dict[str, Any]] = []
    is_verifiable = False
    aux = out_dir / "aux"
    with (
        Quarantine(aux / "quarantine.jsonl", max_quarantine_share) as quarantine,
        (out_dir / "train.jsonl").open("w", encoding="utf8") as train,
        (out_dir / "heldout.jsonl").open("w", encoding="utf8") as heldout,
    ):
        for index, source in enumerate(sources):
            key = f"{section}.read.{index}"
            quarantine.start_source(key)
            read_here, duplicates, heldout_before = 0, 0, sides["heldout"]
            for item in read(source, key):
                if isinstance(item, Rejected):
                    quarantine.add(item)
                    continue
                read_here += 1
                if item.id in seen:
                    duplicates += 1
                    continue
                seen.add(item.id)
                side = "heldout" if is_heldout(item.group, heldout_share) else "train"
                (heldout if side == "heldout" else train).write(item.as_line())
                sides[side] += 1
                is_verifiable |= item.verify is not None
                if len(seen) % PROGRESS_EVERY == 0:
                    run.stop_if_cancelled()
                    run.progress(len(seen), None, "pairs")
            quarantined = quarantine.finish_source(read_here)
            heldout_of.append(sides["heldout"] - heldout_before)
            rows.append({"source": key, "read": read_here, "duplicates": duplicates, "quarantined": quarantined})
    if is_verifiable:
        _mix(out_dir / "heldout.jsonl", heldout_of)
    (aux / "counts.json").write_text(json.dumps({**sides, "sources": rows}, indent=1) + "\n", encoding="utf8")
    if not all(sides.values()):
        raise stage_error(
            "too_few_pairs",
            section,
            f"expected pairs on both sides of the split, found {sides['train']:,} for training and "
            f"{sides['heldout']:,} held out",
            f"give it more pairs, or raise {section}.heldout_share ({heldout_share}) in all stages",
        )
    run.progress(len(seen), len(seen), "pairs")
    return {
        "train_pairs": sides["train"],
        "heldout_pairs": sides["heldout"],
        "duplicates": sum(row["duplicates"] for row in rows),
        "quarantined": quarantine.total,
    }


def _mix(path: Path, counts: Sequence[int]) -> None:
    """Puts the lines of so many of each source, one source after the other, so that every stretch has its share of
    each; those of one source keep their order."""
    places = [(place + 0.5) / count for count in counts for place in range(count)]
    with path.open(encoding="utf8") as file:
        lines = list(file)
    with path.open("w", encoding="utf8") as file:
        file.writelines(lines[number] for number in sorted(range(len(lines)), key=places.__getitem__))
