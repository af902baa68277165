"""Prose of other languages than English passes clean and validate; what is no prose does not."""

from __future__ import annotations

import importlib
import random

import pytest

from corpus.cleaning.config import CleanConfig, GopherQualityConfig
from corpus.cleaning.languages.measured import measure
from corpus.cleaning.quality import QualityRules
from corpus.validation.rows import is_language_like

LANGUAGES = "ar az ca cs da de el es fi fr gu he hi hu id it ja ko ms nb nl pl pt ro ru sk sl sr sv ta te uk vi zh"


@pytest.fixture(scope="module")
def rules():
    """The defaults, but for the number of words: the sentences that spaCy has of a language are few."""
    return QualityRules(CleanConfig(min_characters=20, gopher_quality={"min_words": 20}))


@pytest.mark.parametrize("language", LANGUAGES.split())
def test_sentences_of_many_languages_are_kept(rules, language):
    sentences = importlib.import_module(f"spacy.lang.{language}.examples").sentences
    text = "\n".join(sentences)
    assert is_language_like(text)
    for declared in ("", language):
        verdicts, _ = rules([text], [declared])
        assert verdicts.broken == [None]


def test_english_measures_for_all_texts_drop_them():
    text = "\n".join(importlib.import_module("spacy.lang.de.examples").sentences)
    rules = QualityRules(CleanConfig(gopher_quality={"min_words": 20, "language": "en"}))
    assert rules([text])[0].broken[0].rule.name == "gopher_quality.min_stop_words"


def test_stop_words_of_the_config_go_before_those_of_the_language():
    text = "\n".join(importlib.import_module("spacy.lang.de.examples").sentences)
    config = GopherQualityConfig(min_words=20, stop_words=("xyz", "zyx"))
    assert QualityRules(CleanConfig(gopher_quality=config))([text])[0].broken[0] is not None


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["cheap pills online casino bonus"] * 30),
        " ".join(f"SKU{number} blue XL" for number in range(60)),
        "".join(f"    self.value_{number} = other.value_{number}[{number}]\n" for number in range(60)),
    ],
    ids=["spam", "list", "code"],
)
def test_what_is_prose_of_no_language_is_dropped_as_before(rules, text):
    assert measure(text) is None
    assert rules([text])[0].broken[0] is not None


def test_text_of_decoded_noise_is_not_language():
    generator = random.Random(5)
    noise = "".join(chr(generator.randrange(0x4E00, 0x9FFF)) for _ in range(3000))
    assert not is_language_like(noise)
    assert is_language_like("尽管说明是用铅笔写的，我们的邻居放弃了上次会议的记录。渡船的船长修理了磨坊的轮子。")


def test_repeated_characters_are_repetition_in_scripts_without_spaces(rules):
    broken = rules(["重复的广告，" * 60])[0].broken[0]
    assert broken.rule.name.startswith("gopher_repetition.")
