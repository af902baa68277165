"""Counterfactual data augmentation: identity terms swapped, with the grammar that depends on them.

Zhao et al., 2018, Gender Bias in Coreference Resolution; Zmigrod et al., 2019, Counterfactual Data Augmentation for
Mitigating Gender Stereotypes in Languages with Rich Morphology. For English: what agrees with a noun here is a pronoun
(her is him or his by what follows it, his is her or hers) and the article before it (a man, an uncle).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from corpus.cleaning.config import CounterfactualConfig
from corpus.cleaning.rules import Broken, CleaningRule, changed, draw
from corpus.documents.parts import Document

_PAIRS = Path(__file__).parents[1] / "data" / "counterfactual_pairs.tsv"
_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*|[0-9]+|[^\sA-Za-z0-9]")
_VOWELS = "aeiou"
# Words that begin with another sound than their letter.
_SILENT_H = ("hour", "honest", "honor", "honour", "heir")
_YOU_SOUND = ("euro", "uni", "use", "usu", "one", "once", "ewe")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What cannot be the noun or its adjective that "her" would belong to: behind "her" these leave it an object.
_NOT_POSSESSED = _words(
    """
    a an the this that these those my your his its our their to of in on at by for from with without into onto
    upon over under about after before behind during until till since through across against among between
    around as than and or but nor so because if when while where why how who whom which what whether though
    although unless then there here now again too also either instead soon later today tomorrow yesterday
    tonight away back up down out off is was are were be been am do does did has had have will would can could
    may might must shall should not never ever always i you he she it we they me him us them himself herself
    myself yourself itself everything anything something nothing everyone someone anyone no alone very quite how
    yet once twice home
    """
)
# Adjectives and verbs that look like adverbs behind "her": "saw her slowly", but "her early work".
_LY_ADJECTIVES = _words(
    """
    only early elderly friendly lovely lonely daily weekly monthly yearly holy family ugly silly curly deadly
    costly likely unlikely lively orderly heavenly motherly fatherly womanly manly cowardly kindly belly jelly
    bully ally reply supply anomaly assembly fly
    """
)
# Bare infinitives behind an object: "saw her go", "let her in", "made her laugh", "help her find".
_TAKES_INFINITIVE = _words(
    """
    see saw seen sees seeing hear heard hears hearing watch watched watches watching let lets letting make made
    makes making help helped helps helping have had feel felt notice noticed
    """
)
_INFINITIVES = _words(
    """
    go come leave see hear say tell speak talk think know feel find get give take make do be have keep let put
    run walk sit stand stop start stay live die win lose laugh cry sleep wake eat drink read write sing dance
    play work study learn understand believe remember forget try wait watch look turn move fall rise open close
    enter pass pay buy sell become seem succeed fail breathe smile choose decide finish
    """
)
_BEHIND_OF_HIS = _words(
    """
    saw said told came went who which that from in at on had has have did does do will would could can may might must
    should once always never often and or but
    """
)
# Behind "his" these show that nothing is possessed: "the book is his ."
_ENDS = frozenset('.,;:!?)]}"”')
_IS_HIS = _words(
    """
    is was are were be been not also of as than and or but too alone
    """
)


@cache
def pairs(groups: tuple[str, ...]) -> dict[str, str]:
    """Term → counterpart in lower case, both ways; of several counterparts the first in the file counts."""
    swaps: dict[str, str] = {}
    for line in _PAIRS.read_text(encoding="utf8").splitlines():
        group, _, terms = line.partition("\t")
        if group in groups:
            term, counterpart = terms.split("\t")
            swaps.setdefault(term, counterpart)
            swaps.setdefault(counterpart, term)
    regular = {
        term + "s": counterpart + "s"
        for term, counterpart in swaps.items()
        if not term.endswith(("s", "x", "ch", "men"))
    }
    pronouns = {"he", "she", "himself", "herself"}
    return {
        term: counterpart for term, counterpart in regular.items() if term[:-1] not in pronouns and term not in swaps
    } | swaps


def counterfactual(text: str, groups: tuple[str, ...]) -> str:
    """The text with every term of these groups (gender, religion, ethnicity, names) turned into its counterpart.

    Equal to the text if it has none. Text between words is unchanged.
    """
    swaps = pairs(groups)
    return replace_words(text, lambda lower, index: _swap(lower, index, swaps, "gender" in groups))


def split_possessive(word: str, known: Mapping[str, str]) -> tuple[str, str]:
    """Return a word without its ending from the apostrophe on, and the ending; a known word is left unchanged."""
    apostrophe = -1 if word in known else max(word.rfind("'"), word.rfind("’"))
    return (word[:apostrophe], word[apostrophe:]) if apostrophe > 0 else (word, "")


def replace_words(text: str, replacement: Callable[[list[str], int], str | None]) -> str:
    """The text with some words replaced, each in its original case, with the articles before them adjusted.

    Args:
        replacement: of the lower-case words and the place of one of them, returns the new word at that place, or
            None.
    """
    words = [(match.group(), match.start(), match.end()) for match in _WORD.finditer(text)]
    lower = [word.lower() for word, _, _ in words]
    replacements: dict[int, str] = {}
    for index, (word, _, _) in enumerate(words):
        swapped = replacement(lower, index)
        if swapped is not None and swapped != lower[index]:
            replacements[index] = _cased(word, swapped, index, words)
    for index, swapped in list(replacements.items()):
        if index and lower[index - 1] in ("a", "an") and words[index - 1][2] + 1 == words[index][1]:
            article = "an" if _takes_an(swapped) else "a"
            if article != lower[index - 1] and _takes_an(words[index][0]) != _takes_an(swapped):
                replacements[index - 1] = _cased(words[index - 1][0], article, index - 1, words)
    return _join(text, words, replacements)


def _join(text: str, words: list[tuple[str, int, int]], replacements: dict[int, str]) -> str:
    pieces, position = [], 0
    for index, swapped in sorted(replacements.items()):
        pieces += [text[position : words[index][1]], swapped]
        position = words[index][2]
    return "".join([*pieces, text[position:]])


def _swap(lower: list[str], index: int, swaps: dict[str, str], gender: bool) -> str | None:
    word = lower[index]
    if gender:
        if word == "her":
            return "him" if _is_object(lower, index) else "his"
        if word == "hers":
            return "his"
        if word == "him":
            return "her"
        if word == "his":
            return "hers" if _stands_alone(lower, index) else "her"
        if word == "mrs":
            return "mr"
    word, ending = split_possessive(word, swaps)
    counterpart = swaps.get(word)
    if counterpart is None and "-" in word:
        parts = [swaps.get(part, part) for part in word.split("-")]
        counterpart = "-".join(parts) if parts != word.split("-") else None
    if counterpart is None:
        return None
    return counterpart + ending


def _is_object(lower: list[str], index: int) -> bool:
    """Return True if "her" is an object and not a possessive: nothing after it can be possessed."""
    if index + 1 == len(lower):
        return True
    after = lower[index + 1]
    if not after[0].isalpha() and not after[0].isdigit() and after not in ("'", '"', "“", "‘", "("):
        return True
    if after in _NOT_POSSESSED:
        return True
    before = lower[max(0, index - 1)]
    if before in _TAKES_INFINITIVE and after in _INFINITIVES:
        return True
    return after.endswith("ly") and after not in _LY_ADJECTIVES and not _is_adverb_of_adjective(lower, index + 2)


def _is_adverb_of_adjective(lower: list[str], index: int) -> bool:
    """Return True if an adverb belongs to an adjective or participle after it: "her newly painted house"."""
    return index < len(lower) and lower[index].endswith(("ed", "en", "ing", "ful", "ive", "ous", "al", "ic"))


def _stands_alone(lower: list[str], index: int) -> bool:
    """Return True if "his" possesses nothing after it: "that book is his", "a friend of his"."""
    if index + 1 == len(lower) or lower[index + 1] in _ENDS:
        return True
    if index > 1 and lower[index - 1] == "of" and lower[index + 1] in _BEHIND_OF_HIS:
        return True
    return lower[index + 1] in _IS_HIS and index > 0 and lower[index - 1] in ("is", "was", "of", "be", "and", "not")


def _takes_an(word: str) -> bool:
    """Return True if the article before the word is "an"."""
    word = word.lower()
    if word.startswith(_SILENT_H):
        return True
    return word[0] in _VOWELS and not word.startswith(_YOU_SOUND)


def _cased(word: str, swapped: str, index: int, words: list[tuple[str, int, int]]) -> str:
    if len(word) > 1 and word.isupper():
        return swapped.upper()
    if word[0].isupper():
        around = [neighbour for neighbour, _, _ in words[max(0, index - 2) : index + 3] if len(neighbour) > 1]
        if len(word) == 1 and around and all(neighbour.isupper() for neighbour in around):
            return swapped.upper()
        return swapped[0].upper() + swapped[1:]
    return swapped


class Balance:
    """Drawn documents with identity terms get a counterfactual; `counts` has how many."""

    name = "counterfactual"
    rules: Sequence[CleaningRule] = ()

    def __init__(self, config: CounterfactualConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken | list[Document]]:
        return [self._balanced(document) for document in documents]

    def _balanced(self, document: Document) -> Document | list[Document]:
        if draw(document.id, "counterfactual", self._config.seed) >= self._config.share:
            return document
        swapped = changed(document, counterfactual(document.text, self._config.groups))
        if swapped is document:
            return document
        added = self._config.mode == "add"
        self.counts[f"counterfactual.{'added' if added else 'replaced'}"] += 1
        return [document, swapped] if added else swapped
