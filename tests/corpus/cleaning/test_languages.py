"""Prose of other languages than English passes clean and validate; what is no prose does not."""

from __future__ import annotations

import importlib
import random
import re
from collections import Counter

import pytest

from corpus.cleaning.config import CleanConfig, GopherQualityConfig
from corpus.cleaning.languages.measured import measure
from corpus.cleaning.languages.rows import repeated_rows
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
    broken = rules(["这是重复的广告，" * 60])[0].broken[0]
    assert broken.rule.name.startswith("gopher_repetition.")


def test_noise_of_a_script_without_spaces_is_dropped(rules):
    generator = random.Random(0)
    noise = ["".join(chr(generator.randrange(0x4E00, 0x9FFF)) for _ in range(30)) + "。" for _ in range(10)]
    assert rules(["".join(noise)])[0].broken[0].rule.name == "gopher_quality.min_stop_words"


def plain_rows(text, per_word, n):
    """The rows of n words of a text: units as (text, weight), each row the one nearest to n words."""
    units = [
        (unit, per_word if re.match(r"[a-z0-9]", unit) else 1) for unit in re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text)
    ]
    total = sum(weight for _, weight in units)
    rows = []
    for start in range(len(units)):
        sizes = [sum(weight for _, weight in units[start:end]) for end in range(start + 1, len(units) + 1)]
        if sizes and sizes[-1] >= round(n * per_word):
            end = min(range(len(sizes)), key=lambda i: (abs(sizes[i] - round(n * per_word)), -i))
            rows.append((start, start + end + 1, tuple(units[start : start + end + 1]), sizes[end]))
    return rows, total


@pytest.mark.parametrize(
    ("letters", "per_word"),
    [("的一是不了在人有", 1.5), ("のにをはたてがと", 2), ("ดกสนรทยก", 4)],
    ids=["zh", "ja", "th"],
)
def test_rows_of_words_are_rows_of_characters_where_no_space_separates_words(letters, per_word):
    generator = random.Random(11)
    for _ in range(20):
        units = generator.choices([*letters, *letters, *letters, "。", " ", " git ", " config "], k=200)
        text = "".join(units) + "".join(units[:40])
        for n in (2, 3, 5):
            rows, total = plain_rows(text, per_word, n)
            counts = Counter(row for _, _, row, _ in rows)
            most = max(counts.values())
            common = next(size * most for _, _, row, size in rows if counts[row] == most)
            repeated, met, at = 0, set(), 0
            for start, end, row, size in rows:
                if start < at:
                    continue
                if row in met:
                    repeated, at = repeated + size, end
                met.add(row)
            (of_common,), (of_repeated,) = repeated_rows(text, [n], [n])
            assert of_repeated == pytest.approx(repeated / total)
            assert of_common in [pytest.approx(size * most / total) for _, _, row, size in rows if counts[row] == most]
            assert common <= total


def test_a_formula_in_each_sentence_weighs_in_japanese_what_it_weighs_in_english(rules):
    """Six articles of a law, each of which begins with three words for "everyone"."""
    subjects = [
        "平和的な集会及び結社の自由を他の者とともに享有し、かつ、これを守る",
        "自国においてひとしく公の職務につき、その仕事にふさわしい報酬を受ける",
        "労働時間の合理的な制限及び定期的な有給休暇を含む休息と余暇とをもつ",
        "自己及び家族の健康のために十分な食料、衣服、住居及び医療を求める",
        "初等の学校では費用を払わずに学び、才能に応じて高等の教育に進む",
        "芸術を鑑賞し、科学の進歩とそのもたらす恩恵とにひとしくあずかる",
    ]
    ends = [
        "権利を有する。",
        "ことができる。",
        "自由がある。",
        "ことを妨げられない。",
        "ものとする。",
        "機会を与えられる。",
    ]
    law = "\n".join(f"すべて人は、{subject}{end}" for subject, end in zip(subjects, ends, strict=True))
    assert rules([law])[0].broken == [None]
    assert rules([law + law])[0].broken[0].rule.name.startswith("gopher_repetition.")


def test_a_latin_word_in_chinese_prose_is_a_word_and_not_its_letters(rules):
    prose = (
        "要查看设置，可以运行 git config 命令。如果没有写明范围，git config 会先读仓库里的文件，再读用户目录下的文件。"
        "管理员也能用 git config 为整台机器写入默认的值，这样每个人都不必重复同样的工作。想知道某个值来自哪里的时候，"
        "给 git config 加上一个选项，它就把文件的名字和那一行一起打印出来。"
    )
    assert rules([prose])[0].broken == [None]
