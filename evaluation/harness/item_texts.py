"""Texts that reveal a test item, from its raw fields: a copy of an item rarely has the prompt's template around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from corpus.decontaminate.items import Item, ItemAnswer, words_of

LONGEST_NGRAM = 50
"""Largest `decontaminate.ngram`: more words of a question before an answer add nothing."""
WORDS_BETWEEN = 16
"""Words that a record may have between a question and its answers: names of fields, an id, a topic."""
WORDS_OF_A_CHOICE = 4
"""Words that a record may have for each choice besides its text: a letter, the name of a field."""
SHORT_WORDS = 8
"""A question of fewer words is found together with what follows it, which labels and names of fields come before."""
_LABEL = re.compile(r"\s*(?:(?:[^\W_]+ ){0,2}[^\W_]+ ?:|\(?[^\W_]{1,2}[.)])\s+")
"""`Question: `, `Reading passage: ` or `1. ` at the beginning of a line."""
_BARE_LABEL = re.compile(r"\s*(?:[^\W_]+ ){0,2}[^\W_]+ ?:\s*")
_LISTED = re.compile(r"\s*[(\[]?([A-Za-z]|\d{1,2})[.):\]]\s*(\S.*?)\s*")


def question_item(
    task: str,
    number: int,
    question: str,
    right: Sequence[str],
    choices: Sequence[str] = (),
    *,
    delimiter: str = " ",
    further: Iterable[str] = (),
) -> Item:
    """Return the item of a question with its answers.

    Args:
        question: the question as the model sees it: raw, or with a template and lettered choices around it.
        right: the answers that count as right.
        choices: all answers; empty if any text may be an answer.
        delimiter: text between the question and an answer in the prompt.
        further: raw fields of the item that belong to the question, such as a passage.
    """
    stem, options = _split_choices(question)
    if options and all(choice.strip() in options for choice in (*choices, *right)):
        right, choices = [options[answer.strip()] for answer in right], list(options.values())
    lines = _without_labels(stem)
    stem = "\n".join(lines)
    tail = " ".join(stem.split()[-LONGEST_NGRAM:])
    texts = [f"{stem} {answer}".strip() for answer in right] or [stem]
    texts += [f"{question}{delimiter}{answer}" for answer in right]
    parts = [stem, *lines, *further, *choices, *right]
    if words_of(stem).number < SHORT_WORDS:
        texts += [f"{stem}\n{label}: {answer}" for label in ("A", "Answer") for answer in right]
        parts += [" ".join((tail, name, *choices)) for name in ("choices", "options") if choices]
    parts += [f"{tail} {choice}" for choice in choices]
    if choices:
        parts += [
            " ".join((tail, *choice_texts))
            for choice_texts in (choices, _labelled(choices, "ABC"), _labelled(choices, "123"))
        ]
    max_distance = WORDS_BETWEEN + sum(words_of(choice).hashes.size + WORDS_OF_A_CHOICE for choice in choices)
    questions = [line for line in lines[-1:] if len(line.split()) < LONGEST_NGRAM]
    answers = [ItemAnswer(line, answer, max_distance) for line in questions for answer in right]
    return Item(task, str(number), _distinct(texts), _distinct(parts), answers)


def plain_item(task: str, number: int, texts: Sequence[str], parts: Sequence[str] = ()) -> Item:
    """Return the item of texts that each reveal it unchanged: a passage, or the sentences of a pair."""
    return Item(task, str(number), _distinct(texts), _distinct(parts), [])


def raw_fields(row: Mapping[str, object], shown: Iterable[str]) -> list[str]:
    """Return the strings of a record, at any depth, shown to the model: their words occur in a text of `shown`."""
    texts = [f" {_words(text)} " for text in shown]
    return [field for field in _strings(row) if any(f" {_words(field)} " in text for text in texts)]


def _split_choices(question: str) -> tuple[str, dict[str, str]]:
    """Return a question without the choices that its last lines list, and these choices by their labels."""
    lines = question.split("\n")
    options: dict[str, str] = {}
    first = len(lines)
    for number, line in enumerate(lines):
        match = _LISTED.fullmatch(line)
        if match is None:
            continue
        label = match.group(1)
        if not options and label not in ("A", "a", "1", "0"):
            continue
        if options and label != chr(ord(list(options)[-1]) + 1) and label != str(len(options) + 1):
            continue
        first = min(first, number)
        options[label] = match.group(2)
    return ("\n".join(lines[:first]), options) if len(options) > 1 else (question, {})


def _without_labels(text: str) -> list[str]:
    """Return the lines of a text without labels such as `Question:`, and without lines that contain only a label."""
    lines = [line for line in text.split("\n") if line.strip() and not _BARE_LABEL.fullmatch(line)]
    return [line[match.end() :] if (match := _LABEL.match(line)) else line.strip() for line in lines]


def _labelled(choices: Sequence[str], labels: str) -> list[str]:
    """Return the choices with the labels A, B, C, … or 1, 2, 3, …"""
    return [f"{chr(ord(labels[0]) + index)}. {choice}" for index, choice in enumerate(choices)]


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text.strip()]
