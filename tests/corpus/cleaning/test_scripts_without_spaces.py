"""dedupe and decontaminate measure scripts that put no space between words as they measure English."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.index import make_index
from corpus.decontaminate.items import Item, words_of
from corpus.decontaminate.kernels import Searcher
from corpus.decontaminate.stage import decontaminate
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.words import hash_ngrams, hash_script_ngrams
from tests.corpus.dedupe.test_decontaminate import items_of, texts_of, written

SCRIPTS = {
    "English": ("abcdefghijklmnopqrstuvwxyz", (3, 4, 5, 6, 7), " "),
    "Chinese": ("".join(chr(code) for code in range(0x4E00, 0x5200)), (1, 2), ""),
    "Japanese": ("".join(chr(code) for code in range(0x3042, 0x3090)), (1, 2, 3), ""),
    "Thai": ("กขคงจฉชซญดตถทธนบปผพฟมยรลวสหอ", (3, 4, 5), ""),
}
"""Letters, lengths of words in equal shares, and what is between words."""


def words_in_script(script, count, seed):
    letters, lengths, _ = SCRIPTS[script]
    generator = random.Random(seed)
    return ["".join(generator.choices(letters, k=generator.choice(lengths))) for _ in range(count)]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("every", "kept"), [(20, 2), (60, 1)])
def test_replaced_words_weigh_the_same_in_every_script(build, tmp_path, script, every, kept):
    """One word in 20 leaves 60 % of the 5-grams alike, one in 60 leaves 85 %: the threshold is 80."""
    words, others = words_in_script(script, 600, 3), words_in_script(script, 600, 4)
    edited = [
        other if place % every == 0 else word for place, (word, other) in enumerate(zip(words, others, strict=True))
    ]
    between = SCRIPTS[script][2]
    documents = written(tmp_path / "in", [between.join(words), between.join(edited)])
    assert len(texts_of(build(dedupe, DedupeConfig(), documents=documents))) == kept


@pytest.mark.parametrize("n", [1, 3, 5, 13])
def test_ngrams_of_scripts_with_spaces_are_those_of_words(n):
    for text in (
        "It is – as “they” say – one of 12 days in the north, by and by, and Мир и труд.",
        "one two",
        "one",
        "",
    ):
        words = words_of(text)
        count = words.hashes.size
        expected, found, sizes = (
            np.zeros(count + 1, np.uint64),
            np.zeros(count + 1, np.uint64),
            np.zeros(count, np.int64),
        )
        filled = hash_ngrams(words.hashes, count, n, expected)
        assert filled == hash_script_ngrams(words.data, words.starts, words.hashes, count, n, found, sizes)
        assert found.tolist() == expected.tolist() and words.number == count


@pytest.mark.parametrize(
    "text", ["中文English中文 and ไทยไทยไทย", "the end ไทยไ", "ไทยไ the end", "漢字かな交じり文 x"]
)
def test_every_word_is_in_an_ngram_where_scripts_meet(text):
    words = words_of(text)
    count = words.hashes.size

    def grams(hashes):
        found, sizes = np.zeros(count, np.uint64), np.zeros(count, np.int64)
        filled = hash_script_ngrams(words.data, words.starts, hashes, count, 5, found, sizes)
        return set(found[:filled].tolist())

    for place in range(count):
        other = words.hashes.copy()
        other[place] += np.uint64(1)
        assert grams(other) != grams(words.hashes)


PHRASE = "我们今天一起去公园散步"
QUESTION = "在冬天的暴风雨到来之前渡船的船长测量了磨坊开裂的轮子是为了什么"


def test_items_of_chinese_count_by_words_and_not_by_characters(build, tmp_path):
    texts = {
        "a phrase of 7 words within a sentence": (f"昨天他说，如果明天不下雨的话，{PHRASE}，然后再回家吃晚饭", True),
        "alone": (f"天气很好。{PHRASE}！大家都很高兴", False),
        "13 characters of a question": (f"报纸上写着：{QUESTION[:13]}，所有的船都要停在港口里面等候通知", True),
        "13 words of it": (f"报纸上写着：{QUESTION[4:23]}，所有的船都要停在港口里面等候通知", False),
    }
    documents = written(tmp_path / "in", [text for text, _ in texts.values()])
    out = build(
        decontaminate,
        DecontaminateConfig(),
        documents=documents,
        benchmark_text=items_of(tmp_path / "items", [PHRASE, QUESTION]),
    )
    assert texts_of(out) == [text for text, is_kept in texts.values() if is_kept]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("水的沸点是多少", "今天有考试。水的沸点是多少？他不知道"),
        ("水の沸点は何度", "試験があった。水の沸点は何度？彼は知らなかった"),
        ("पानी का रंग क्या है", "यह प्रश्न था। पानी का रंग क्या है। वह नहीं जानता था"),
        ("ما هو لون الماء", "كان هذا السؤال؟ ما هو لون الماء؟ لم يعرف"),
        ("ရေသည်အေးသည်", "ဒီနေ့ပူသည်။ ရေသည်အေးသည်။ သူမသိပါ"),
        ("ទឹកមានពណ៌អ្វី", "នេះជាសំណួរ។ ទឹកមានពណ៌អ្វី។ គាត់មិនដឹង"),
    ],
    ids=["Chinese", "Japanese", "Hindi", "Arabic", "Burmese", "Khmer"],
)
def test_a_short_item_stands_alone_between_the_sentence_marks_of_its_script(build, tmp_path, item, text):
    joined = text.translate({ord(mark): "," for mark in "。！？।؟။។"})
    out = build(
        decontaminate,
        DecontaminateConfig(),
        documents=written(tmp_path / "in", [text, joined]),
        benchmark_text=items_of(tmp_path / "items", [item]),
    )
    assert texts_of(out) == [joined]


def test_many_questions_about_one_chinese_passage_are_no_template():
    passage = "".join(words_in_script("Chinese", 80, 5))
    items = [Item("reading", str(number), [f"{passage} 第{number}个问题"], [passage]) for number in range(12)]
    index, _ = make_index(items, DecontaminateConfig())
    assert len(Searcher(index)(pa.chunked_array([pa.array([f"开始 {passage} 结束"], pa.large_string())])))
