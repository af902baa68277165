"""Pieces of a unigram language model (Kudo, 2018) over bytes, by SentencePiece's trainer."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable

import regex
from tokenizers import pre_tokenizers

LONGEST_PIECE = 16
"""Bytes a piece; SentencePiece's default."""
_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
# What _SPLIT cuts by (Radford et al., 2019).
_PRETOKEN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def train_pieces(texts: Iterable[str], count: int) -> list[tuple[str, float]]:
    """At most `count` pieces, all 256 bytes among them, with their logarithmic probabilities.

    The trainer of the `tokenizers` package gives other scores each time it runs. This one gives the same for the same
    texts in any order: it sees each pre-token once, in one order, with its count, and adds up on one thread. Pre-tokens
    of more than 4,192 bytes are left out. Fewer pieces come back where the texts have no more.
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
        minloglevel=2,
    )
    trained = SentencePieceProcessor(model_proto=model.getvalue())
    return [(trained.id_to_piece(i), trained.get_score(i)) for i in range(1, trained.get_piece_size())]


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each pre-token occurs, its bytes as letters, and each byte once more: a byte that is nowhere gets no
    piece. `regex` cuts first: it is four times as fast."""
    found: Counter[str] = Counter()
    for text in texts:
        found.update(_PRETOKEN.findall(text))
    if not found:
        return found
    words = Counter(_SPLIT.alphabet())
    for text, count in found.items():
        for word, _ in _SPLIT.pre_tokenize_str(text):
            words[word] += count
    return words
