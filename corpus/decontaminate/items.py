"""The benchmarks' test items as hashed word n-grams."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.decontaminate.config import MatchConfig
from corpus.decontaminate.kernels import Index
from corpus.documents.words import Bytes, Hashes, character_table, hash_ngrams, hash_script_ngrams, hash_words, words_in
from infra.io.json import read_own_json_lines

SHARED_BY_ITEMS = 10
"""An n-gram of more items of one task is of the task's template and no sign of an item; items about one passage count
as one."""
PART_WORDS = 8
"""Parts of an item with fewer words, such as a choice, are common phrases, whatever `min_words` is."""
PASSAGE_WORDS = 50
"""Parts of at least this many words that several items share are a passage that they ask about."""
_PUNCTUATION = re.compile(r"[^\w\s]|_")


class Answer(NamedTuple):
    """A question and a right answer to it: together they give the item away where the answer begins at most `within`
    words after the question."""

    question: str
    answer: str
    within: int


class Item(NamedTuple):
    """One test item, a line of items.jsonl.

    texts: each gives the item away; one of fewer than `min_words` words counts where it is alone. The first one is
        shown in reports.
    parts: each gives the item away from `min_words` and PART_WORDS words on: the question alone, choices, what a dump
        may have in a row.
    answers: for questions of fewer than `min_words` words, found in records of any form.
    """

    task: str
    item: str
    texts: list[str]
    parts: Sequence[str] = ()
    answers: Sequence[Answer] = ()

    def as_line(self) -> str:
        return json.dumps(self._asdict(), ensure_ascii=False) + "\n"


class Owners(NamedTuple):
    """The items of the hashes of an Index: items[begins[i]:begins[i + 1]] for hash i, those of `alone` after `grams`
    and those of `answers` last."""

    begins: NDArray[np.int64]
    items: NDArray[np.int64]

    def of(self, number: int) -> NDArray[np.int64]:
        return self.items[self.begins[number] : self.begins[number + 1]]

    def followed_by(self, other: Owners) -> Owners:
        begins = np.concatenate([self.begins[:-1], other.begins + self.items.size])
        return Owners(begins, np.concatenate([self.items, other.items]))


def read_items(folder: Path) -> list[Item]:
    return [_item(**row) for row in read_own_json_lines(folder / "items.jsonl")]


def _item(task: str, item: str, texts: list[str], parts: Sequence[str] = (), answers: Iterable[list] = ()) -> Item:
    return Item(task, item, texts, list(parts), [Answer(*answer) for answer in answers])


def make_index(items: Sequence[Item], config: MatchConfig) -> tuple[Index, Owners]:
    """The n-grams of all items but for those of templates, see SHARED_BY_ITEMS."""
    passage_grams, alone, questions = Grams(), Grams(), Answers()
    for number, item in enumerate(items):
        for text in dict.fromkeys(form for raw in item.texts for form in forms_of(raw)):
            words = words_of(text)
            if words.number >= config.min_words:
                passage_grams.add(words, config.ngram, number)
            else:
                alone.add_whole(words, number)
        for text in dict.fromkeys(form for raw in item.parts for form in forms_of(raw)):
            words = words_of(text)
            if words.number >= max(config.min_words, PART_WORDS):
                passage_grams.add(words, config.ngram, number)
        for answer in item.answers:
            for question, right in zip(forms_of(answer.question), forms_of(answer.answer), strict=True):
                questions.add(words_of(question), words_of(right), answer.within, number, config.min_words)
    tasks = {task: number for number, task in enumerate(dict.fromkeys(item.task for item in items))}
    task_of = np.array([tasks[item.task] for item in items], np.int64)
    passage_of = _passages(items)
    grams, owners = passage_grams.grouped(task_of, passage_of)
    others, other_owners = alone.grouped(task_of, passage_of)
    answer_arrays, answer_owners = questions.grouped(task_of, passage_of)
    index = Index(
        config.ngram, passage_grams.lengths(), grams, others, int(alone.lengths().max(initial=0)), **answer_arrays
    )
    return index, owners.followed_by(other_owners).followed_by(answer_owners)


def _passages(items: Sequence[Item]) -> NDArray[np.int64]:
    """The passage of each item, (N,): the number of the first item that shares a long part with it."""
    first_with: dict[tuple[str, str], int] = {}
    return np.array(
        [
            min(
                (
                    first_with.setdefault((item.task, part), number)
                    for part in item.parts
                    if words_of(part).number >= PASSAGE_WORDS
                ),
                default=number,
            )
            for number, item in enumerate(items)
        ],
        np.int64,
    )


def forms_of(text: str) -> tuple[str, ...]:
    """Return a text unchanged, without its punctuation, so that "read-only" is found as "read only" and as "readonly",
    and as JSON and HTML write it: their escapes are other words."""
    escaped = html.escape(text)
    return text, _PUNCTUATION.sub("", text), json.dumps(text)[1:-1], escaped, escaped.replace("&#x27;", "&#39;")


class Grams:
    """Hashes of n-grams, each with the number of an item that has it."""

    def __init__(self) -> None:
        self._grams = [np.zeros(0, np.uint64)]
        self._items = [np.zeros(0, np.int64)]
        self._lengths: set[int] = set()

    def add(self, words: Words, ngram: int, item: int) -> None:
        """The n-grams of a text, whose size is that of its script; a text of fewer words gives one of all."""
        count = words.hashes.size
        grams, sizes = np.empty(count, np.uint64), np.empty(count, np.int64)
        filled = hash_script_ngrams(words.data, words.starts, words.hashes, count, ngram, grams, sizes)
        self._enter(grams[:filled], sizes[:filled], item)

    def add_whole(self, words: Words, item: int) -> None:
        """All words of a text as one n-gram."""
        if size := words.hashes.size:
            self._enter(np.array([_hash_of_all(words.hashes)], np.uint64), np.array([size]), item)

    def _enter(self, grams: Hashes, sizes: NDArray[np.int64], item: int) -> None:
        self._grams.append(grams)
        self._items.append(np.full(grams.size, item))
        self._lengths.update(sizes.tolist())

    def lengths(self) -> NDArray[np.int64]:
        return np.array(sorted(self._lengths), np.int64)

    def grouped(self, task_of: NDArray[np.int64], passage_of: NDArray[np.int64]) -> tuple[Hashes, Owners]:
        """The hashes, ascending, and the items of each, without those of templates.

        Args:
            task_of, passage_of: of each item.
        """
        grams, items = np.concatenate(self._grams), np.concatenate(self._items)
        # Items were entered in ascending order, in which a stable sort leaves those of one n-gram.
        order = np.argsort(grams, kind="stable")
        grams, items = grams[order], items[order]
        fresh = np.append(True, (grams[1:] != grams[:-1]) | (items[1:] != items[:-1]))[: grams.size]
        grams, items = grams[fresh], items[fresh]
        keep = ~_is_template(grams, task_of[items], passage_of[items])
        grams, items = grams[keep], items[keep]
        begins = np.flatnonzero(_begins(grams))
        return grams[begins], Owners(np.append(begins, items.size).astype(np.int64), items)


class Answers:
    """Short questions with their right answers, each with the number of its item."""

    def __init__(self) -> None:
        self._rows: set[tuple[int, int, int, int, int]] = set()
        self._longest = 0

    def add(self, question: Words, answer: Words, within: int, item: int, min_words: int) -> None:
        """Add them where the question alone has too few words, and both together have enough."""
        if answer.number and 0 < question.number < min_words <= question.number + answer.number:
            self._longest = max(self._longest, question.hashes.size)
            sizes = answer.hashes.size, within, item
            self._rows.add((_hash_of_all(question.hashes), _hash_of_all(answer.hashes), *sizes))

    def grouped(self, task_of: NDArray[np.int64], passage_of: NDArray[np.int64]) -> tuple[dict[str, Any], Owners]:
        """The fields of an Index that are about questions, and the item of each answer.

        Args:
            task_of, passage_of: of each item.
        """
        rows = sorted(self._rows)
        question_grams, answers = (np.array([row[column] for row in rows], np.uint64) for column in (0, 1))
        sizes, within, items = (np.array([row[column] for row in rows], np.int64) for column in (2, 3, 4))
        keep = ~_is_template(question_grams, task_of[items], passage_of[items])
        questions, begins = np.unique(question_grams[keep], return_index=True)
        fields = {
            "questions": questions,
            "longest_question": self._longest,
            "answer_begins": np.append(begins, keep.sum()).astype(np.int64),
            "answers": answers[keep],
            "answer_words": sizes[keep],
            "within": within[keep],
        }
        return fields, Owners(np.arange(int(keep.sum()) + 1), items[keep])


def _is_template(grams: Hashes, tasks: NDArray[np.int64], passages: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the n-grams that more than SHARED_BY_ITEMS passages of their task have.

    Args:
        grams: (N,), ascending.
        tasks, passages: (N,).
    """
    begins = _begins(grams)
    number = np.cumsum(begins) - 1
    # Few n-grams are common enough for their passages to be counted.
    common = np.flatnonzero(np.bincount(number)[number] > SHARED_BY_ITEMS)
    is_template = np.zeros(grams.size, np.bool_)
    if not common.size:
        return is_template
    rows = np.stack([number, tasks, passages])[:, common]
    order = np.lexsort(rows[::-1])
    changes = np.append(np.ones((3, 1), np.bool_), np.diff(rows[:, order]) != 0, axis=1)
    of_task = np.cumsum(changes[:2].any(0)) - 1
    is_template[common[order]] = np.bincount(of_task, changes.any(0))[of_task] > SHARED_BY_ITEMS
    return is_template


def _begins(grams: Hashes) -> NDArray[np.bool_]:
    """Return a mask of the first of equal n-grams, (N,), of ascending ones."""
    return np.append(True, grams[1:] != grams[:-1])[: grams.size]


class Words(NamedTuple):
    """The words of a text, characters in scripts without spaces. data: its UTF-8; hashes, starts: (W,), of each word;
    number: how many words these are, those of scripts without spaces estimated."""

    data: Bytes
    hashes: Hashes
    starts: NDArray[np.int64]
    number: float


def words_of(text: str) -> Words:
    data = np.frombuffer(text.encode(), np.uint8)
    hashes = np.empty(data.size, np.uint64)
    starts, ends = np.empty(data.size, np.int64), np.empty(data.size, np.int64)
    count = hash_words(data, 0, data.size, character_table(), hashes, starts, ends)
    return Words(data, hashes[:count], starts[:count], words_in(data, starts, count))


def _hash_of_all(words: Hashes) -> int:
    gram = np.empty(words.size, np.uint64)
    hash_ngrams(words, words.size, words.size, gram)
    return int(gram[0])
