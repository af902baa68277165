"""The table of pre-tokens gives the ids of the tokenizers package, whatever the text."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from corpus.documents import read_documents
from corpus.encode import PlainEncoder, TableEncoder, encoder_of, load_tokenizer
from corpus.pretokens import Table

CLOSING = 0
# Letters and marks of several scripts, numbers that are no digits, every kind of space, what contractions are made of.
CHARACTERS = (
    "abstmdrvelSTé你ßʼаम्😀👩🏽\u0301019²½Ⅷ٣'’\"!?.-_#=<|>\u200b\x00\x1c\x7f \t\n\r\x0b\x85\u00a0\u2003\u2028\u3000"
)


@pytest.fixture(scope="module")
def model(trained_tokenizer) -> Tokenizer:
    return load_tokenizer(trained_tokenizer)


def ids_of(encoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(pa.array(texts, pa.string()))
    assert lengths.sum() == len(ids)
    rest = iter(ids.tolist())
    return [[next(rest) for _ in range(length)] for length in lengths]


def expected(model: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [[*encoding.ids, CLOSING] for encoding in model.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("seed", range(4))
def test_any_text_gets_the_same_ids(model, seed):
    chance = random.Random(seed)
    texts = ["".join(chance.choices(CHARACTERS, k=chance.randrange(60))) for _ in range(3000)]
    assert ids_of(TableEncoder(model, CLOSING), texts) == expected(model, texts)


def test_every_character_gets_the_same_ids(model):
    """Each code point stands between letters, digits and marks, after a space, and twice."""
    points = [chr(point) for point in range(0x30000) if not 0xD800 <= point < 0xE000]
    probes = [f"a{c}1{c}! {c}{c}\n" for c in points]
    texts = ["".join(probes[at : at + 4096]) for at in range(0, len(probes), 4096)]
    assert ids_of(TableEncoder(model, CLOSING), texts) == expected(model, texts)


def test_real_text_gets_the_same_ids(model, documents):
    texts = [document.text for document in read_documents(documents)]
    encoder = TableEncoder(model, CLOSING)
    assert ids_of(encoder, texts) == expected(model, texts)
    assert ids_of(encoder, texts[::-1]) == expected(model, texts[::-1])


def test_a_table_that_is_full_is_begun_anew(model, documents):
    texts = [document.text for document in read_documents(documents)]
    long = " ".join(map(str, range(1000)))
    texts.insert(len(texts) // 2, long)
    assert ids_of(TableEncoder(model, CLOSING, Table(size=512)), texts) == expected(model, texts)


def test_a_slice_of_a_column_is_that_slice(model):
    texts = ["one", "two, three", "", "four's"]
    ids, lengths = TableEncoder(model, CLOSING).encode(pa.array(texts, pa.string())[1:3])
    assert [ids.tolist()] == [[token for one in expected(model, texts[1:3]) for token in one]]
    assert lengths.tolist() == [len(one) for one in expected(model, texts[1:3])]


def test_nothing_gives_nothing(model):
    assert ids_of(TableEncoder(model, CLOSING), []) == []
    assert ids_of(TableEncoder(model, CLOSING), [""]) == [[CLOSING]]


def other(*, normalizer=None, splitter=None, added=(), dropout=None, alphabet=True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    tokenizer.train_from_iterator(
        ["some words to learn from"], trainers.BpeTrainer(vocab_size=280, initial_alphabet=letters, show_progress=False)
    )
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        other(normalizer=normalizers.Lowercase()),
        other(splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        other(splitter=pre_tokenizers.Metaspace()),
        other(splitter=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
        other(added=[AddedToken("words", special=False)]),
    ],
    ids=["normalises", "prefix space", "metaspace", "digits apart", "added words"],
)
def test_a_tokenizer_that_splits_otherwise_is_left_to_its_package(tokenizer):
    encoder = encoder_of(tokenizer, CLOSING)
    assert isinstance(encoder, PlainEncoder)
    texts = ["Some WORDS, 12 of them", "", " words "]
    assert ids_of(encoder, texts) == expected(tokenizer, texts)


def test_tokenizers_trained_here_take_the_fast_way(model):
    assert isinstance(encoder_of(model, CLOSING), TableEncoder)
    parts = json.loads(model.to_str())
    assert parts["pre_tokenizer"]["type"] == "ByteLevel"
