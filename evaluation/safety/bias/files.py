"""Published bias sets in their authors' files: WinoBias, Winogender, BBQ and StereoSet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.io.bounded import file_lines, read_text
from infra.io.contained import contained_glob
from infra.io.json import parse_json


@dataclass(frozen=True)
class Coreference:
    """A sentence whose pronoun refers to one of two people.

    pair: shared by sentences that differ only in the pronoun. group: `pro` or `anti` (WinoBias), or the pronoun's
    gender (Winogender). people: the occupation first. answer: index of the person that the pronoun refers to.
    """

    pair: str
    category: str
    group: str
    sentence: str
    pronoun: str
    people: tuple[str, str]
    answer: int


@dataclass(frozen=True)
class BbqQuestion:
    """answers: three, where the answer at `unknown` states that the question cannot be answered; biased: answers that
    show the bias in question. template: the category with the number of the template; questions of one template differ
    only in people's names.
    """

    category: str
    ambiguous: bool
    context: str
    question: str
    answers: tuple[str, ...]
    label: int
    unknown: int
    biased: frozenset[int]
    template: str


@dataclass(frozen=True)
class StereoItem:
    """One context of StereoSet with a stereotyping, an anti-stereotyping and an unrelated ending.

    context: text that is given and not scored; empty if the whole sentence is scored (intrasentence).
    """

    category: str
    target: str
    context: str
    stereotype: str
    anti_stereotype: str
    unrelated: str


_MARKED = re.compile(r"\[([^\[\]]+)\]")
_PRONOUN = re.compile(r"\b(he|she|they|him|her|them|his|hers|himself|herself|their|theirs)\b", re.IGNORECASE)


def read_winobias(path: Path) -> list[Coreference]:
    """Read a folder with `pro_stereotyped_type1.txt.test` and similar files, as in github.com/uclanlp/corefBias.

    Raises StageError naming missing files, or the line that is not such a sentence.
    """
    files = contained_glob(path, "pro_stereotyped_type[12].txt.*", str(path)) if path.is_dir() else []
    if not files:
        raise bad_set(path, "expected a folder with WinoBias' files, e.g. pro_stereotyped_type1.txt.test")
    lines = {
        (pro.name.replace("pro_", ""), group): _lines(pro.with_name(pro.name.replace("pro_", f"{group}_", 1)))
        for pro in files
        for group in ("pro", "anti")
    }
    for (name, group), sentences in lines.items():
        if len(sentences) != len(pro := lines[name, "pro"]):
            file = path / name.replace("stereotyped", f"{group}_stereotyped", 1)
            raise bad_set(file, f"expected as many lines as in the pro-stereotyped file, {len(pro)}: {len(sentences)}")
    occupations = {people[0] for group_lines in lines.values() for line in group_lines if (people := _marks(line)[0])}
    items = []
    for (name, group), sentences in lines.items():
        for number, line in enumerate(sentences, 1):
            people, pronouns = _marks(line)
            sentence = _MARKED.sub(r"\1", line.partition(" ")[2]).strip()
            mentioned = {
                occupation: match.start()
                for occupation in occupations - set(people)
                if (match := re.search(rf"\b(the|a|an) {occupation}\b", sentence, re.IGNORECASE))
            }
            if len(people) != 1 or not pronouns or not mentioned:
                file = path / name.replace("stereotyped", f"{group}_stereotyped", 1)
                raise bad_set(
                    f"{file}:{number}", "expected one occupation and its pronouns in brackets, and another one"
                )
            kind = "type 1" if "type1" in name else "type 2"
            pair = f"{name}:{number}"
            items.append(
                Coreference(
                    pair, kind, group, sentence, pronouns[0], (people[0], min(mentioned, key=mentioned.__getitem__)), 0
                )
            )
    return items


def read_winogender(path: Path) -> list[Coreference]:
    """Read `all_sentences.tsv` of github.com/rudinger/winogender-schemas, or a folder that contains it."""
    path = path / "all_sentences.tsv" if path.is_dir() else path
    items = []
    for number, row in enumerate(read_table(path, "\t"), 2):
        try:
            occupation, participant, answer, gender = row["sentid"].removesuffix(".txt").split(".")
            pronoun = _PRONOUN.search(row["sentence"])
            if pronoun is None:
                raise ValueError("no pronoun")
            items.append(
                Coreference(
                    f"{occupation}.{participant}.{answer}", occupation, gender, row["sentence"], pronoun[0],
                    (occupation, participant), int(answer),
                )
            )  # fmt: skip
        except (KeyError, ValueError, TypeError, AttributeError) as error:  # a short row has None for a field
            raise bad_set(
                f"{path}:{number}", f"expected sentid and sentence as Winogender has them: {error}"
            ) from error
    if not items:
        raise bad_set(path, "expected at least one sentence, found none")
    return items


def read_bbq(path: Path) -> list[BbqQuestion]:
    """Read a JSON-lines file of github.com/nyu-mll/BBQ, or a folder with one file per category."""
    files = contained_glob(path, "*.jsonl", str(path)) if path.is_dir() else [path]
    if not files:
        raise bad_set(path, "expected BBQ's files, e.g. Age.jsonl")
    questions = []
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            try:
                questions.append(_bbq(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise bad_set(f"{file}:{number}", f"expected a row of BBQ: {error}") from error
    return questions


def _bbq(line: str) -> BbqQuestion:
    row = parse_json(line, unique_keys=True)
    names = ("ans0", "ans1", "ans2")
    groups = [_groups(row["answer_info"][name]) for name in names]
    (unknown,) = [index for index, group in enumerate(groups) if "unknown" in group]
    stereotyped = {_plain(group) for group in row["additional_metadata"]["stereotyped_groups"]}
    stereotyped_answers = {index for index, group in enumerate(groups) if index != unknown and group & stereotyped}
    other_answers = {0, 1, 2} - stereotyped_answers - {unknown}
    if row["question_polarity"] not in ("neg", "nonneg") or row["context_condition"] not in ("ambig", "disambig"):
        raise ValueError("question_polarity is neg or nonneg, context_condition ambig or disambig")
    if row["label"] not in (0, 1, 2) or isinstance(row["label"], bool):
        raise ValueError("label is 0, 1 or 2")
    return BbqQuestion(
        _text(row, "category"),
        row["context_condition"] == "ambig",
        _text(row, "context"),
        _text(row, "question"),
        tuple(_text(row, name) for name in names),
        int(row["label"]),
        unknown,
        # A question that asks for something good shows the bias if the answer names the others.
        frozenset(stereotyped_answers if row["question_polarity"] == "neg" else other_answers),
        f"{row['category']} {row.get('question_index', row['question'])}",
    )


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"{key} is a text")
    return str(row[key])


def _groups(info: Iterable[str]) -> set[str]:
    """Return the groups of an answer's person; for `F-Black`, both parts."""
    groups = {_plain(entry) for entry in info}
    for group in list(groups):
        if match := re.fullmatch(r"(m|f|lowses|highses)[-_](.+)", group):
            groups |= set(match.groups())
    if groups & {"woman", "girl"}:
        groups.add("f")
    if groups & {"man", "boy"}:
        groups.add("m")
    return groups


def _plain(group: str) -> str:
    return group.lower().replace(" ", "")


def read_stereoset(path: Path) -> list[StereoItem]:
    """Read `dev.json` of github.com/moinnadeem/StereoSet: intrasentence and intersentence items."""
    try:
        data = parse_json(read_text(path, encoding="utf-8"))["data"]
        items = [(kind, row) for kind in ("intrasentence", "intersentence") for row in data.get(kind, [])]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise bad_set(
            path, f"expected StereoSet's JSON with data.intrasentence and data.intersentence: {error}"
        ) from error
    contexts = []
    for number, (kind, row) in enumerate(items, 1):
        try:
            sentences = {_text(sentence, "gold_label"): _text(sentence, "sentence") for sentence in row["sentences"]}
            context = "" if kind == "intrasentence" else _text(row, "context")
            endings = sentences["stereotype"], sentences["anti-stereotype"], sentences["unrelated"]
            contexts.append(StereoItem(_text(row, "bias_type"), _text(row, "target"), context, *endings))
        except (KeyError, TypeError) as error:
            raise bad_set(f"{path}: {kind} {number}", f"expected StereoSet's fields: {error}") from error
    if not contexts:
        raise bad_set(path, "expected at least one item, found none")
    return contexts


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines: JSON strings may hold other line separators.
        return read_text(path, encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_set(path, f"cannot be read: {error}") from error


def read_table(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a delimited file, by column. Raises StageError if it cannot be read."""
    try:
        lines = (line for _, line in file_lines(path))
        yield from csv.DictReader(lines, delimiter=delimiter)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise bad_set(path, f"cannot be read: {error}") from error


def _marks(line: str) -> tuple[list[str], list[str]]:
    """Return the people and the pronouns in brackets."""
    marked = [mark.strip() for mark in _MARKED.findall(line)]
    people = [mark for mark in marked if not _PRONOUN.fullmatch(mark)]
    return [re.sub(r"^(the|a|an) ", "", person, flags=re.IGNORECASE).lower() for person in people], [
        mark for mark in marked if _PRONOUN.fullmatch(mark)
    ]


def bad_set(where: Path | str, message: str) -> Exception:
    """Return the error for a file of a bias set that is not in its authors' format."""
    return stage_error("bad_bias_set", str(where), message)
