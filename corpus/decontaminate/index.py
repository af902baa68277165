"""The hashes of test items that `decontaminate` looks for, and which items have each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.decontaminate.config import MatchConfig
from corpus.decontaminate.forms import write_forms
from corpus.decontaminate.items import Item, words_of
from corpus.decontaminate.kernels import GramIndex, sorted_by_hash
from corpus.documents.words import (
    Bytes,
    Hashes,
    character_table,
    hash_ngrams,
    hash_script_ngrams,
    hash_words,
    words_in,
)
from infra.native import kernel

SHARED_BY_ITEMS = 10
"""An n-gram of more items of one task is of the task's template and no sign of an item; items about one passage count
as one."""
PART_WORDS = 8
"""Parts of an item with fewer words, such as a choice, are common phrases, whatever `min_words` is."""
PASSAGE_WORDS = 50
"""Parts of at least this many words that several items share are a passage that they ask about."""
_BATCH_CHARACTERS = 4 << 20
"""Characters of the texts that are hashed in one call: a call for each text costs several times as much."""


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


def make_index(items: Sequence[Item], config: MatchConfig) -> tuple[GramIndex, Owners]:
    """The n-grams of all items but for those of templates, see SHARED_BY_ITEMS."""
    grams, alone, questions = Grams(), Grams(), ItemAnswers()
    passages = Passages()
    batch = Batch()
    for number, item in enumerate(items):
        batch.add(number, item)
        if batch.characters >= _BATCH_CHARACTERS or number == len(items) - 1:
            batch.enter(config, grams, alone, questions, passages)
            batch = Batch()
    tasks = {task: number for number, task in enumerate(dict.fromkeys(item.task for item in items))}
    task_of = np.array([tasks[item.task] for item in items], np.int64)
    passage_of = passages.of(len(items))
    gram_hashes, owners = grams.grouped(task_of, passage_of)
    others, other_owners = alone.grouped(task_of, passage_of)
    answer_arrays, answer_owners = questions.grouped(task_of, passage_of)
    index = GramIndex(
        config.ngram, grams.lengths(), gram_hashes, others, int(alone.lengths().max(initial=0)), **answer_arrays
    )
    return index, owners.followed_by(other_owners).followed_by(answer_owners)


class HashedTexts(NamedTuple):
    """The words of T texts in F forms, see `corpus.decontaminate.forms.Forms`.

    data: the UTF-8 of all forms. hashes, starts: (W,) of each word, starts in `data`. begins: (F + 1,) the first word
    of each form. numbers: (F,) how many words these are, those of scripts without spaces estimated.
    forms: (T, 5) the forms of each text. given: (T,) the words of each text before `with_spaces`.
    """

    data: Bytes
    hashes: Hashes
    starts: NDArray[np.int64]
    begins: NDArray[np.int64]
    numbers: NDArray[np.float64]
    forms: NDArray[np.int64]
    given: NDArray[np.float64]

    @classmethod
    def of(cls, texts: Sequence[str]) -> HashedTexts:
        data, ends, forms, changed = write_forms(texts)
        hashes = np.empty(data.size, np.uint64)
        starts, word_ends = np.empty(data.size, np.int64), np.empty(data.size, np.int64)
        begins, numbers = np.zeros(ends.size, np.int64), np.empty(ends.size - 1)
        count = _hash_texts(data, ends, character_table(), hashes, starts, word_ends, begins, numbers)
        given = numbers[forms[:, 0]]
        given[changed] = [words_of(texts[text]).number for text in changed.tolist()]
        return cls(data, hashes[:count], starts[:count], begins, numbers, forms, given)

    def distinct_forms(self, texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The forms of texts, (N,), each once for a text, and the number in `texts` of each, ascending."""
        forms = self.forms[texts]
        # The forms of a text are numbered as they were written, so equal ones are neighbours or the text itself.
        is_new = np.ones(forms.shape, np.bool_)
        is_new[:, 1:] = (forms[:, 1:] != forms[:, :-1]) & (forms[:, 1:] != forms[:, :1])
        return forms[is_new], np.nonzero(is_new)[0]

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The hashed words of forms; characters in scripts without spaces."""
        return self.begins[rows + 1] - self.begins[rows]

    def ngrams(
        self, rows: NDArray[np.int64], items: NDArray[np.int64], n: int
    ) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]:
        """The n-grams of forms, (G,), how many words each has, and its item; each n-gram's size is that of its script,
        and a form of fewer words gives one of all.

        An n-gram of several forms comes once for the item.

        Args:
            rows, items: (N,) the forms and the item of each, ascending.
        """
        words = np.bincount(items - items[:1], self.sizes(rows))
        room = int(words.sum())
        grams, sizes, of = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
        # The table has the n-grams of one item at a time: one that stays in the processor's cache.
        slots = 1 << (2 * int(words.max(initial=1))).bit_length()
        seen, last = np.zeros(slots, np.uint64), np.full(slots, -1)
        texts = self.data, self.starts, self.hashes, self.begins
        filled = _hash_ngrams_of(*texts, rows, items, n, seen, last, grams, sizes, of)
        return grams[:filled], sizes[:filled], of[:filled]

    def all_words(self, rows: NDArray[np.int64]) -> Hashes:
        """All words of each form as one n-gram; 0 for a form without words."""
        return _hash_all_words(self.hashes, self.begins, rows)


@kernel
def _hash_texts(
    data: Bytes,
    ends: NDArray[np.int64],
    table: NDArray[np.int32],
    hashes: Hashes,
    starts: NDArray[np.int64],
    word_ends: NDArray[np.int64],
    begins: NDArray[np.int64],
    numbers: NDArray[np.float64],
) -> int:
    count = 0
    for text in range(numbers.size):
        size = hash_words(data, ends[text], ends[text + 1], table, hashes[count:], starts[count:], word_ends[count:])
        largest = np.uint8(0)
        for byte in data[ends[text] : ends[text + 1]]:
            largest = max(largest, byte)
        # Scripts without spaces have characters of three bytes and more.
        numbers[text] = words_in(data, starts[count:], size) if largest >= 0xE0 else size
        count += size
        begins[text + 1] = count
    return count


@kernel
def _hash_ngrams_of(
    data: Bytes,
    starts: NDArray[np.int64],
    hashes: Hashes,
    begins: NDArray[np.int64],
    rows: NDArray[np.int64],
    items: NDArray[np.int64],
    n: int,
    seen: Hashes,
    last: NDArray[np.int64],
    grams: Hashes,
    sizes: NDArray[np.int64],
    of: NDArray[np.int64],
) -> int:
    """Write n-grams as `HashedTexts.ngrams` returns them.

    Args:
        seen, last: a hash table, n-grams and the item that had each; the place of another item is free.
    """
    filled = 0
    for entry in range(rows.size):
        begin, end = begins[rows[entry]], begins[rows[entry] + 1]
        words, at = hashes[begin:end], starts[begin:end]
        added = hash_script_ngrams(data, at, words, end - begin, n, grams[filled:], sizes[filled:])
        # What the item has already is written over by what follows.
        for new in range(filled, filled + added):
            gram = grams[new]
            slot = np.int64(gram & np.uint64(seen.size - 1))
            while last[slot] == items[entry] and seen[slot] != gram:
                slot = (slot + 1) & (seen.size - 1)
            if last[slot] != items[entry]:
                seen[slot], last[slot] = gram, items[entry]
                grams[filled], sizes[filled], of[filled] = gram, sizes[new], items[entry]
                filled += 1
    return filled


@kernel
def _hash_all_words(hashes: Hashes, begins: NDArray[np.int64], rows: NDArray[np.int64]) -> Hashes:
    grams = np.zeros(rows.size, np.uint64)
    for entry in range(rows.size):
        begin, end = begins[rows[entry]], begins[rows[entry] + 1]
        hash_ngrams(hashes[begin:end], end - begin, end - begin, grams[entry:])
    return grams


class Batch:
    """Texts of some items that are hashed together, each text once, and what each of them is to its item."""

    def __init__(self) -> None:
        self.characters = 0
        self._numbers: dict[str, int] = {}
        self._items: list[int] = []
        self._tasks: list[str] = []
        # Of each item the texts and after them the parts, and how many these are.
        self._texts: list[int] = []
        self._counts: list[int] = []
        self._answers: list[tuple[int, int, int, int]] = []

    def add(self, number: int, item: Item) -> None:
        numbers = self._numbers
        for texts in (item.texts, item.parts):
            self._texts += [numbers.setdefault(text, len(numbers)) for text in texts]
            self._counts.append(len(texts))
            self.characters += sum(map(len, texts))
        self._items.append(number)
        self._tasks.append(item.task)
        for question, right, within in item.answers:
            asking = numbers.setdefault(question, len(numbers))
            self._answers.append((asking, numbers.setdefault(right, len(numbers)), within, number))

    def enter(
        self, config: MatchConfig, grams: Grams, alone: Grams, questions: ItemAnswers, passages: Passages
    ) -> None:
        """Add the batch to all that is known of the items before."""
        all_texts = list(self._numbers)
        hashed = HashedTexts.of(all_texts)
        texts = np.array(self._texts, np.int64)
        group_of = np.repeat(np.arange(len(self._counts)), self._counts)
        is_part, item_of = group_of % 2 == 1, group_of // 2
        rows, text_of = hashed.distinct_forms(texts)
        items = np.array(self._items, np.int64)[item_of[text_of]]
        # Long texts give their n-grams; a short one counts where it is alone, and a short part not at all.
        limits = np.where(is_part[text_of], max(config.min_words, PART_WORDS), config.min_words)
        is_long = hashed.numbers[rows] >= limits
        grams.add(*hashed.ngrams(rows[is_long], items[is_long], config.ngram))
        is_alone = ~is_long & ~is_part[text_of] & (hashed.sizes(rows) > 0)
        alone.add(hashed.all_words(rows[is_alone]), hashed.sizes(rows[is_alone]), items[is_alone])
        for entry in np.flatnonzero(is_part & (hashed.given[texts] >= PASSAGE_WORDS)).tolist():
            item = item_of[entry]
            passages.add(self._tasks[item], all_texts[texts[entry]], self._items[item])
        questions.add(hashed, np.array(self._answers, np.int64).reshape(-1, 4), config.min_words)


class Passages:
    """Items that ask about one passage: they share a long part."""

    def __init__(self) -> None:
        self._first_with: dict[tuple[str, str], int] = {}
        self._of: dict[int, int] = {}

    def add(self, task: str, part: str, item: int) -> None:
        first = self._first_with.setdefault((task, part), item)
        self._of[item] = min(first, self._of.get(item, item))

    def of(self, count: int) -> NDArray[np.int64]:
        """The passage of each item, (N,): the number of the first item that shares a long part with it."""
        return np.array([self._of.get(item, item) for item in range(count)], np.int64)


class Grams:
    """Hashes of n-grams, each with the number of an item that has it."""

    def __init__(self) -> None:
        self._grams = [np.zeros(0, np.uint64)]
        self._items = [np.zeros(0, np.int64)]
        self._lengths: set[int] = set()

    def add(self, grams: Hashes, sizes: NDArray[np.int64], items: NDArray[np.int64]) -> None:
        """Add hashes, the words of each n-gram, and its item, all (N,), items in ascending order."""
        self._grams.append(grams)
        self._items.append(items)
        self._lengths.update(np.flatnonzero(np.bincount(sizes)).tolist())

    def lengths(self) -> NDArray[np.int64]:
        return np.array(sorted(self._lengths), np.int64)

    def grouped(self, task_of: NDArray[np.int64], passage_of: NDArray[np.int64]) -> tuple[Hashes, Owners]:
        """The hashes, ascending, and the items of each, without those of templates.

        Args:
            task_of, passage_of: of each item.
        """
        grams, items = np.concatenate(self._grams), np.concatenate(self._items)
        # Items were entered in ascending order, in which a stable sort leaves those of one n-gram.
        grams, items = sorted_by_hash(grams, items)
        fresh = np.append(True, (grams[1:] != grams[:-1]) | (items[1:] != items[:-1]))[: grams.size]
        grams, items = grams[fresh], items[fresh]
        keep = ~_is_template(grams, task_of[items], passage_of[items])
        grams, items = grams[keep], items[keep]
        begins = np.flatnonzero(_begins(grams))
        return grams[begins], Owners(np.append(begins, items.size).astype(np.int64), items)


class ItemAnswers:
    """Short questions with their right answers, each with the number of its item."""

    def __init__(self) -> None:
        self._rows: set[tuple[int, int, int, int, int]] = set()
        self._longest = 0

    def add(self, hashed: HashedTexts, rows: NDArray[np.int64], min_words: int) -> None:
        """Add those where the question alone has too few words, and both together have enough.

        Args:
            rows: (N, 4) texts of question and answer, words between them at most, and the item.
        """
        # Question and answer are written in one form, of five.
        question, answer = (hashed.forms[rows[:, column]].ravel() for column in (0, 1))
        within, items = (np.repeat(rows[:, column], hashed.forms.shape[1]) for column in (2, 3))
        words, more = hashed.numbers[question], hashed.numbers[answer]
        counts = (more > 0) & (words > 0) & (words < min_words) & (words + more >= min_words)
        question, answer = question[counts], answer[counts]
        self._longest = max(self._longest, int(hashed.sizes(question).max(initial=0)))
        columns = (
            hashed.all_words(question),
            hashed.all_words(answer),
            hashed.sizes(answer),
            within[counts],
            items[counts],
        )
        self._rows.update(zip(*(column.tolist() for column in columns), strict=True))

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
    begins = np.flatnonzero(_begins(grams))
    counts = np.diff(np.append(begins, grams.size))
    # Few n-grams are common enough for their passages to be counted.
    common = np.flatnonzero(np.repeat(counts > SHARED_BY_ITEMS, counts))
    is_template = np.zeros(grams.size, np.bool_)
    if not common.size:
        return is_template
    number = np.searchsorted(begins, common, side="right")
    rows = np.stack([number, tasks[common], passages[common]])
    order = np.lexsort(rows[::-1])
    changes = np.append(np.ones((3, 1), np.bool_), np.diff(rows[:, order]) != 0, axis=1)
    of_task = np.cumsum(changes[:2].any(0)) - 1
    is_template[common[order]] = np.bincount(of_task, changes.any(0))[of_task] > SHARED_BY_ITEMS
    return is_template


def _begins(grams: Hashes) -> NDArray[np.bool_]:
    """Return a mask of the first of equal n-grams, (N,), of ascending ones."""
    return np.append(True, grams[1:] != grams[:-1])[: grams.size]
