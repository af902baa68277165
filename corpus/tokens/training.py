"""Trains byte-level tokenizers on an even sample of a corpus, in memory that does not grow with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus.config import TokenizerConfig
from corpus.documents.parts import count_documents, is_heldout, read_documents
from corpus.documents.sources import read_sources
from corpus.tokens.chat_template import SPECIAL_TOKENS
from corpus.tokens.cutting import PIECES_OF_WORDS
from infra.errors import stage_error
from infra.io.json import parse_own_json
from infra.process.pace import Pace
from infra.run import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer


import io
from collections import Counter
from collections.abc import Iterable

import regex
from tokenizers import pre_tokenizers

UNKNOWN = "<|unknown|>"
# Marks a WordPiece entry that does not open a word. BERT writes ##, which among bytes could also be two hash signs.
CONTINUATION = "\u203f"
# Longest pre-token that WordPiece takes apart; BERT has 100. Longer ones are cut by PIECES_OF_WORDS.
MAX_WORD_CHARACTERS = 1000


def special_tokens(kind: str) -> list[str]:
    """The special tokens in the order of their ids. BPE over bytes knows no unknown text."""
    return [*SPECIAL_TOKENS, *([] if kind == "bpe" else [UNKNOWN])]


def train(kind: str, config: TokenizerConfig, documents: Path, run: Run, *, or_fewer: bool = False) -> Tokenizer:
    """A tokenizer of a kind, of `config.vocab_size` entries, that any text comes back whole from.

    The same documents in any order give the same tokenizer.

    Args:
        or_fewer: takes as many entries as the text gives where that is fewer.

    Raises StageError `no_training_text`, `vocab_too_large`.
    """
    counted = _Counted()
    with Pace(run, "documents", count_documents(documents)) as pace:
        tokenizer = _train(kind, config, _training_texts(config, documents, run, pace, counted))
    if not counted.characters:
        raise stage_error("no_training_text", "tokenizer", "expected documents that are not held out, found none")
    if tokenizer.get_vocab_size() < config.vocab_size and not or_fewer:
        raise stage_error(
            "vocab_too_large",
            "tokenizer.vocab_size",
            f"the text of {counted.characters:,} characters gives {tokenizer.get_vocab_size():,} entries, "
            f"not the requested {config.vocab_size:,}",
            "lower it, lower tokenizer.min_frequency, or provide more text",
        )
    return tokenizer


def entries_of(config: TokenizerConfig, texts: Iterable[str]) -> int:
    """Return the number of entries that a BPE learnt from these texts has: at most `config.vocab_size`."""
    return _train("bpe", config, iter(texts)).get_vocab_size()


def _train(kind: str, config: TokenizerConfig, texts: Iterator[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if kind == "unigram":
        tokenizer = _unigram(config.vocab_size, texts)
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD_CHARACTERS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # WordPiece would take a longer word for unknown, and lose it: a sequence of DNA, a line of signs, Chinese.
    pieces = pre_tokenizers.Split(Regex(PIECES_OF_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([byte_level, pieces]) if kind == "wordpiece" else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if kind != "unigram":
        tokenizer.train_from_iterator(texts, _trainer(kind, config))
    if kind == "wordpiece":
        tokenizer.decoder = decoders.Sequence([decoders.Replace(CONTINUATION, ""), decoders.ByteLevel()])
        return _without_added_bytes(tokenizer)
    return tokenizer


def _unigram(vocab_size: int, texts: Iterator[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models

    from corpus.tokens.training import train_pieces

    special = special_tokens("unigram")
    entries = [*((token, 0.0) for token in special), *train_pieces(texts, vocab_size - len(special))]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=special.index(UNKNOWN)))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _trainer(kind: str, config: TokenizerConfig) -> Any:
    from tokenizers import pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "min_frequency": config.min_frequency,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    if kind == "bpe":
        return trainers.BpeTrainer(special_tokens=special_tokens(kind), **common)
    # Each byte inside a word, which the trainer would else add as it meets them, in an order that varies.
    continuations = [CONTINUATION + byte for byte in alphabet]
    return trainers.WordPieceTrainer(
        special_tokens=[*special_tokens(kind), *continuations], continuing_subword_prefix=CONTINUATION, **common
    )


def _without_added_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The bytes inside words were trained as special tokens, which are found in texts; they stay as mere entries."""
    parts = parse_own_json(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if not token["content"].startswith(CONTINUATION)]
    return type(tokenizer).from_str(json.dumps(parts))


class _Counted:
    characters = 0


def _training_texts(config: TokenizerConfig, documents: Path, run: Run, pace: Pace, counted: _Counted) -> Iterator[str]:
    """The documents that are not held out; of more than `train_mb` those whose ids say so, evenly over the corpus."""
    share = _share(config, documents)
    for document in read_documents(documents):
        run.stop_if_cancelled()
        pace.add(1, len(document.text))
        if int(document.id, 16) < share * 2**64 and not is_heldout(document.group, config.heldout_share):
            counted.characters += len(document.text)
            yield document.text


def _share(config: TokenizerConfig, documents: Path) -> float:
    if config.train_mb is None:
        return 1.0
    total = sum(facts.bytes for facts in read_sources(documents).values())
    return min(1.0, config.train_mb * 1e6 / max(1, total))


LONGEST_PIECE = 16
"""Bytes a piece; SentencePiece's default."""
LONGEST_SENTENCE = 4_192
"""Bytes; SentencePiece's default. It passes over longer lines without an error: Chinese without punctuation, DNA."""
LONGEST_PRETOKEN = LONGEST_SENTENCE // 8
"""Characters of which the bytes, at most four each and written as letters of two bytes, fit into a sentence."""
_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
# What _SPLIT cuts by (Radford et al., 2019).
_PRETOKEN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def train_pieces(texts: Iterable[str], count: int) -> list[tuple[str, float]]:
    """Return at most `count` pieces, all 256 bytes among them, with their logarithmic probabilities.

    The trainer of the `tokenizers` package gives other scores each time it runs. This one gives the same for the same
    texts in any order: it sees each pre-token once, in one order, with its count, and adds up on one thread. Fewer
    pieces come back where the texts have no more.
    """
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    words = _count_words(texts)
    if not words:
        return []
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{words[word]}" for word in sorted(words)),
        input_format="tsv",
        model_writer=model,
        model_type="unigram",
        # One more: the entry for what is unknown, which cannot be left out.
        vocab_size=count + 1,
        hard_vocab_limit=False,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        character_coverage=1.0,
        max_sentencepiece_length=LONGEST_PIECE,
        num_threads=1,
        # The pre-tokeniser has cut the text and written its bytes as letters; nothing is to be done to them.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        split_by_number=False,
        split_by_whitespace=False,
        max_sentence_length=LONGEST_SENTENCE,
        minloglevel=2,
    )
    trained = SentencePieceProcessor(model_proto=model.getvalue())
    return [(trained.id_to_piece(i), trained.get_score(i)) for i in range(1, trained.get_piece_size())]


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """Count each pre-token, its bytes as letters, and each byte once more: a byte that occurs nowhere would get no
    piece. `regex` cuts first: it is four times as fast."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_PRETOKEN.findall(text))
    if not counts:
        return counts
    words = Counter(_SPLIT.alphabet())
    for text, count in counts.items():
        for word, _ in _SPLIT.pre_tokenize_str(text):
            if len(word.encode()) <= LONGEST_SENTENCE:
                words[word] += count
                continue
            for start in range(0, len(text), LONGEST_PRETOKEN):
                pieces = _SPLIT.pre_tokenize_str(text[start : start + LONGEST_PRETOKEN])
                words["".join(piece for piece, _ in pieces)] += count
    return words
