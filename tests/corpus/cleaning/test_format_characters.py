"""Characters without a width (joiners, soft hyphens, byte order marks) are neither words nor symbols."""

from __future__ import annotations

import pytest

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.languages.characters import class_table
from corpus.cleaning.languages.measured import measure
from corpus.cleaning.languages.segment import Segmenter, code_points
from corpus.cleaning.quality import QualityRules
from corpus.cleaning.words import ChunkSplitter
from corpus.validation.rows import is_answer_like, is_language_like

PERSIAN = (
    "او می‌گوید که کتاب‌های این کتابخانه را نمی‌توان به خانه برد، اما می‌شود آنها را در همان‌جا خواند. "
    "بچه‌ها هر روز به آن می‌آیند و داستان‌هایی را که دوست دارند می‌خوانند. "
    "کتابدار به آنها گفته‌است که نامه‌ها را از روی میز برندارند و پنجره‌ها را نبندند.\n"
)
HINDI = (
    "राजा ने मंत्री से कहा कि पक्‌का घर बनाने के लिए श‍क्ति और समय दोनों की आवश्यकता है। "
    "उस‌के बाद वे नदी के किनारे गए और वहाँ के लोगों से बात की। "
    "विद्‍यार्थी को यह पुस्तक पढ़नी चाहिए, क्योंकि इसमें बहुत सी बातें लिखी हैं।\n"
)
ENGLISH = (
    "The quiet river of the north bends twice before it reaches the old mill, and the fields that belong to it. "
    "A careful reader will have noticed that the second letter was written with another pen.\n"
)
SOFT, MARK, DIRECTION, JOINER = "\u00ad", "\ufeff", "\u200f", "\u200d"


def plain(text: str) -> str:
    return "".join(character for character in text if character not in "\u200b\u200c\u200d\u200e\u200f\u00ad\ufeff")


def hyphenated(text: str) -> str:
    """With a soft hyphen behind every second letter, as typesetting systems leave them."""
    return "".join(c + SOFT if c.isalpha() and number % 2 else c for number, c in enumerate(text))


def marked(text: str) -> str:
    """With a byte order mark in front, and marks of direction at the ends of words and lines."""
    return MARK + " " + text.replace(" ", f"{DIRECTION} ").replace("\n", f"{DIRECTION}\n") + f"{DIRECTION} {MARK} "


VARIANTS = {
    "Persian": PERSIAN,
    "Hindi": HINDI,
    "Persian with marks": marked(PERSIAN),
    "English with soft hyphens": hyphenated(ENGLISH),
    "English with marks": marked(ENGLISH),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_measures_are_those_of_the_text_without_them(name: str) -> None:
    text = VARIANTS[name]
    assert text != plain(text)
    assert measure(text) == measure(plain(text))
    segmenter = Segmenter(["the", "of", "and"])
    actual, expected = (segmenter.segment(*code_points([variant])) for variant in (text, plain(text)))
    for column in ("lengths", "hashes", "bits"):
        assert getattr(actual, column).tolist() == getattr(expected, column).tolist(), column
    values = []
    for variant in (text, plain(text)):
        lines = {"line_ends": [".", "।"], "min_sentences": 1}
        rules = QualityRules(
            CleanConfig(min_characters=len(plain(text)) - 2, gopher_quality={"min_words": 20}, c4=lines)
        )
        verdicts, [left] = rules([variant])
        assert verdicts.broken == [None], variant
        values.append((dict(rules.lines), plain(left).strip()))
    assert values[0] == values[1] and values[0][0]["c4.kept"] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_validate_takes_them_for_language(name: str) -> None:
    assert is_language_like(VARIANTS[name]) and is_answer_like(VARIANTS[name])


def test_a_word_with_many_of_them_is_no_long_word_and_no_symbol() -> None:
    """Words of 10 letters with as many soft hyphens: 20 characters on average would be no language."""
    words = "Donaudampf Schifffahr Gesellscha Kapitänsmü Auszeichnu "
    text = "".join(c + SOFT if c.isalpha() else c for c in words * 5)
    assert is_language_like(text)
    assert is_answer_like(SOFT.join("yes") + SOFT * 20)
    assert not is_language_like(f"{MARK}{DIRECTION} " * 20) and not is_answer_like(MARK * 5)
    rules = QualityRules(CleanConfig(min_characters=20, gopher_quality=None, gopher_repetition=None, c4=None))
    assert rules([f"{JOINER} " * 5 + JOINER * 50])[0].broken[0].rule.name == "min_characters"


def test_words_are_cut_as_without_them_and_are_the_chunk_together() -> None:
    splitter = ChunkSplitter()
    assert splitter.split(f"({DIRECTION}word{DIRECTION}).{DIRECTION}") == [
        f"({DIRECTION}",
        f"word{DIRECTION}",
        ")",
        f".{DIRECTION}",
    ]
    assert splitter.split(f"{MARK}do{SOFT}n't!") == [f"{MARK}do{SOFT}", "n't", "!"]
    assert splitter.split("نمی‌شود،") == ["نمی‌شود", "،"]


def test_lines_end_where_their_sentence_does() -> None:
    rules = QualityRules(
        CleanConfig(min_characters=5, gopher_quality=None, gopher_repetition=None, c4={"min_sentences": 1})
    )
    line = f"المعلم يكتب الدرس على السبورة كل صباح في المدرسة.{DIRECTION}\n"
    verdicts, [left] = rules([line * 1 + line.replace("كل", "بعد") + line.replace("المعلم", "الطالب")])
    assert verdicts.broken == [None] and left.count("\n") == 2
    assert class_table()[0x200C] & 128
