"""The table of chunks gives the ids of the tokenizers package, whatever the tokenizer and the text."""

from __future__ import annotations

import io
import json
import random
from functools import cache, partial
from itertools import chain, islice

import pyarrow as pa
import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import (
    BertPreTokenizer,
    ByteLevel,
    Digits,
    Metaspace,
    Split,
    Whitespace,
    WhitespaceSplit,
)

from corpus.documents.parts import read_documents
from corpus.tokens.chunks import ChunkTable
from corpus.tokens.cutting import EXPRESSIONS, cutting_of
from corpus.tokens.encode import PartlyPlain, PlainEncoder, TableEncoder, encoder_of, load_tokenizer

CLOSING = 0
# Letters and marks of several scripts, numbers that are no digits, every kind of space, what contractions are made of.
CHARACTERS = (
    "abstmdrvelSTé你ßʼаम्😀👩🏽\u0301019²½Ⅷ٣'’\"!?.-_#=<|>\u200b\x00\x1c\x7f \t\n\r\x0b\x85\u00a0\u2003\u2028\u3000"
)
# What a tokenizer may have whole tokens for.
PIECES = ["some", "words", "It's", "b2b", "(x)", "12345", "…", ", ", ".\n", "\n\n", "\t", "/", "' ", " ", "é", "!!"]
PIECES += ["क़", "\u00a0  ", "\u3000 ", " \u2028", "\x1c ", "\x85 ", "\u180e ", "\u200b ", "\ufffd ", "▁", "▁ ", "  "]


@pytest.fixture(scope="module")
def model(trained_tokenizer) -> Tokenizer:
    return load_tokenizer(trained_tokenizer)


def ids_of(encoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(pa.array(texts, pa.string()))
    assert lengths.sum() == len(ids)
    rest = iter(ids.tolist())
    return [[next(rest) for _ in range(length)] for length in lengths]


def expected(model: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [[*encoding.ids, CLOSING] for encoding in model.encode_batch_fast(texts, add_special_tokens=False)]


def made(splitter, *, normalizer=None, added=(), dropout=None, wordpiece=False) -> Tokenizer:
    """A tokenizer of some hundred tokens, whose merges go over as many kinds of neighbours as its splitter allows."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="?") if wordpiece else models.BPE(dropout=dropout))
    if splitter:
        tokenizer.pre_tokenizer = splitter
    if normalizer:
        tokenizer.normalizer = normalizer
    settings = {"vocab_size": 700, "initial_alphabet": ByteLevel.alphabet(), "show_progress": False, "min_frequency": 2}
    trainer = (trainers.WordPieceTrainer if wordpiece else trainers.BpeTrainer)(**settings)
    chance = random.Random(0)
    tokenizer.train_from_iterator(["".join(chance.choices(PIECES, k=40)) for _ in range(400)], trainer)
    tokenizer.add_tokens(list(added))
    tokenizer.encode_special_tokens = True
    return tokenizer


def split_by(name: str, behavior: str = "isolated", *, invert: bool = False) -> Split:
    return Split(Regex(EXPRESSIONS[name]), behavior, invert)


def unsplit(*, normalizer=None, splitter=None) -> Tokenizer:
    """Merges learned within words, but given texts as a whole, as SentencePiece's BPE does."""
    parts = json.loads(made(Metaspace()).to_str())
    parts["normalizer"] = parts["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    if normalizer:
        tokenizer.normalizer = normalizer
    if splitter:
        tokenizer.pre_tokenizer = splitter
    tokenizer.encode_special_tokens = True
    return tokenizer


def unigram() -> Tokenizer:
    """As transformers makes T5's: words split at spaces, after SentencePiece's own form of NFKC."""
    model = io.BytesIO()
    chance = random.Random(0)
    lines = ["".join(chance.choices(PIECES, k=40)).replace("\n", " ") for _ in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=150, minloglevel=2, hard_vocab_limit=False
    )
    read = ModelProto.FromString(model.getvalue())
    tokenizer = Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in read.pieces], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(read.normalizer_spec.precompiled_charsmap),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    tokenizer.pre_tokenizer = Metaspace()
    return tokenizer


TO_SIGN = normalizers.Replace(" ", "▁")
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = ByteLevel(add_prefix_space=False)


def _cut_by(name: str) -> Tokenizer:
    return made(pre_tokenizers.Sequence([split_by(name), BYTES]))


def _at_spaces(scheme: str) -> Tokenizer:
    return made(Metaspace(prepend_scheme=scheme))


FAST = {
    "byte level": lambda: made(GPT_2),
    **{name: partial(_cut_by, name) for name in EXPRESSIONS},
    "inverted": lambda: made(pre_tokenizers.Sequence([split_by("gpt-4, llama 3", "removed", invert=True), BYTES])),
    "digits apart": lambda: made(pre_tokenizers.Sequence([Digits(individual_digits=True), GPT_2])),
    "nfc": lambda: made(pre_tokenizers.Sequence([split_by("qwen 2"), BYTES]), normalizer=normalizers.NFC()),
    "lower case": lambda: made(GPT_2, normalizer=normalizers.Lowercase()),
    "bert": lambda: made(BertPreTokenizer(), normalizer=normalizers.BertNormalizer(), wordpiece=True),
    "bert, cased": lambda: made(
        BertPreTokenizer(), normalizer=normalizers.BertNormalizer(lowercase=False), wordpiece=True
    ),
    "t5": unigram,
    **{f"metaspace, {scheme}": partial(_at_spaces, scheme) for scheme in ("always", "first", "never")},
    "white space apart": lambda: made(pre_tokenizers.Sequence([WhitespaceSplit(), Metaspace()])),
    "llama 2": lambda: unsplit(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), TO_SIGN])),
    "mistral": lambda: unsplit(splitter=Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: unsplit(normalizer=TO_SIGN, splitter=Split(" ", "merged_with_previous")),
}
"""Trained when they are asked for: each test worker reads this file, and one of them runs it."""


@cache
def fast(name: str) -> Tokenizer:
    return FAST[name]()


@pytest.mark.parametrize("name", FAST)
def test_any_text_gets_the_same_ids(name):
    chance = random.Random(name)
    texts = ["".join(chance.choices([*CHARACTERS, *PIECES], k=chance.randrange(60))) for _ in range(3000)]
    encoder = encoder_of(fast(name), CLOSING)
    assert isinstance(encoder, TableEncoder)
    assert ids_of(encoder, texts) == expected(fast(name), texts)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAST)
def test_every_character_gets_the_same_ids(name, every):
    """Each stands between letters, digits, signs and spaces, and twice; of ideographs, syllables and what lies beyond
    the first plane, which are alike, every 61st.

    Of five tokenizers each is given another fifth of the characters, so that none is left out. The risk of the long
    ones: a character that one of the tokenizers alone cuts otherwise.
    """
    alike = [range(*ends, 61) for ends in ((0x3400, 0xA000), (0xAC00, 0xD800), (0xE000, 0xF900), (0x10000, 0x30000))]
    points = map(chr, chain(range(0x3400), range(0xA000, 0xAC00), range(0xF900, 0x10000), *alike))
    points = islice(points, list(FAST).index(name) % every, None, every)
    probes = [f"a{c}1{c}! {c}.{c}{c}\n{c} b{c}/" for c in points]
    texts = ["".join(probes[at : at + 4096]) for at in range(0, len(probes), 4096)]
    assert ids_of(encoder_of(fast(name), CLOSING), texts) == expected(fast(name), texts)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_single_character_gets_the_same_ids(model, every):
    """For the tokenizer that is trained here none is left out. The risk: one that stands alone among others."""
    points = [chr(point) for point in range(0, 0x30000, every) if not 0xD800 <= point < 0xE000]
    probes = [f"a{c}1{c}! {c}{c}\n" for c in points]
    texts = ["".join(probes[at : at + 4096]) for at in range(0, len(probes), 4096)]
    assert ids_of(encoder_of(model, CLOSING), texts) == expected(model, texts)


def test_real_text_gets_the_same_ids(model, documents):
    texts = [document.text for document in read_documents(documents)]
    encoder = encoder_of(model, CLOSING)
    assert ids_of(encoder, texts) == expected(model, texts)
    assert ids_of(encoder, texts[::-1]) == expected(model, texts[::-1])


def test_a_table_that_is_full_is_begun_anew(model, documents):
    texts = [document.text for document in read_documents(documents)]
    long = " ".join(map(str, range(1000)))
    texts.insert(len(texts) // 2, long)
    encoder = TableEncoder(PlainEncoder(model, CLOSING), cutting_of(model), ChunkTable(size=512))
    assert ids_of(encoder, texts) == expected(model, texts)


def test_a_slice_of_a_column_is_that_slice(model):
    texts = ["one", "two, three", "", "four's"]
    ids, lengths = encoder_of(model, CLOSING).encode(pa.array(texts, pa.string())[1:3])
    assert [ids.tolist()] == [[token for one in expected(model, texts[1:3]) for token in one]]
    assert lengths.tolist() == [len(one) for one in expected(model, texts[1:3])]


def test_nothing_gives_nothing(model):
    assert ids_of(encoder_of(model, CLOSING), []) == []
    assert ids_of(encoder_of(model, CLOSING), [""]) == [[CLOSING]]


@pytest.mark.parametrize(
    "slow",
    [
        lambda: made(GPT_2, normalizer=normalizers.NFD()),
        lambda: made(ByteLevel(add_prefix_space=True)),
        lambda: made(None, normalizer=TO_SIGN),
        lambda: made(Metaspace(), normalizer=normalizers.Strip()),
        lambda: made(Whitespace()),
        lambda: made(BYTES),
        lambda: made(Split(Regex(r"\s+"), "isolated")),
        lambda: made(GPT_2, dropout=0.1),
        lambda: made(GPT_2, normalizer=normalizers.Lowercase(), added=[AddedToken("words", special=False)]),
    ],
    ids=[
        "nfd",
        "prefix space",
        "merges over spaces",
        "stripped",
        "words",
        "not split",
        "other split",
        "dropout",
        "added in lower case",
    ],
)
def test_a_tokenizer_that_cuts_may_change_is_left_to_its_package(slow):
    assert isinstance(encoder_of(slow(), CLOSING), PlainEncoder)


def test_the_package_gives_its_ids():
    texts = ["Some WORDS, 12 of them", "", " words "]
    tokenizer = made(Whitespace())
    assert ids_of(PlainEncoder(tokenizer, CLOSING), texts) == expected(tokenizer, texts)


def test_words_added_to_a_vocabulary_are_never_cut():
    tokenizer = made(GPT_2, added=[AddedToken("so me|", special=False), AddedToken("<call>", special=True)])
    texts = ["some so me| words", "words", "", "<call>", "so me|", "so me", "so me|so me|"]
    encoder = encoder_of(tokenizer, CLOSING)
    assert isinstance(encoder, PartlyPlain)
    assert ids_of(encoder, texts) == expected(tokenizer, texts)
    assert ids_of(encoder, []) == []


def test_tokenizers_trained_here_take_the_fast_way(model):
    assert isinstance(encoder_of(model, CLOSING), TableEncoder)
    parts = json.loads(model.to_str())
    assert parts["pre_tokenizer"]["type"] == "ByteLevel"
