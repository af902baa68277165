"""The rules of Gopher, C4 and FineWeb over batches of documents, measured natively."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning import c4, measures
from corpus.cleaning.config import C4Config, CleanConfig, FineWebConfig, GopherQualityConfig, GopherRepetitionConfig
from corpus.cleaning.languages.characters import class_table, lower_table, members
from corpus.cleaning.languages.known import (
    MEAN_WORD_LENGTH,
    MIN_LETTER_SHARE,
    Prose,
    unspaced_table,
)
from corpus.cleaning.languages.measured import measure_documents
from corpus.cleaning.languages.rows import repeated_rows
from corpus.cleaning.languages.segment import SegmentedText, Segmenter, code_points
from corpus.cleaning.repeats import repeated_words
from corpus.cleaning.rules import C4, FINEWEB, GOPHER, STEMMA, CleaningRule, Verdicts, at_least, at_most

Array = NDArray[Any]
CITATIONS = ("[edit]", "[citation needed]")
LOREM_IPSUM = "lorem ipsum"
_LINE_FATES = (
    "c4.kept",
    "c4.max_word_length",
    "c4.line_ends",
    "c4.min_words_in_line",
    "c4.line_words",
    "c4.line_phrases",
)


class QualityRules:
    """Applies the families of rules that the config turns on.

    `lines` counts the effects of C4's rules on lines, by the key of the rule.
    """

    def __init__(self, config: CleanConfig) -> None:
        self.config = config
        self.lines: Counter[str] = Counter()
        stop_words = config.gopher_quality.stop_words if config.gopher_quality else ()
        self._segmenter = Segmenter(stop_words)
        self._classes = class_table()
        self._c4 = _C4Lines(config.c4, self._classes) if config.c4 else None

    @property
    def rules(self) -> list[CleaningRule]:
        """All rules that are on, in the order in which they are tried."""
        verdicts = _Names()
        empty = self._segmenter.segment(*code_points([""]))
        self._judge([""], empty, verdicts)
        return verdicts.rules

    def __call__(self, texts: Sequence[str], languages: Sequence[str] = ()) -> tuple[Verdicts, list[str]]:
        """Return the verdict on each text, and the texts with the lines that C4's rules leave.

        Args:
            languages: of the texts, ISO 639-1 codes; "" where not known.
        """
        points, starts = code_points(texts)
        verdicts = Verdicts(len(texts))
        return verdicts, self._judge(texts, self._segmenter.segment(points, starts), verdicts, languages)

    def _judge(
        self, texts: Sequence[str], batch: SegmentedText, verdicts: Verdicts, languages: Sequence[str] = ()
    ) -> list[str]:
        config = self.config
        characters = measures.characters(batch.points, batch.doc_starts, self._classes, unspaced_table())
        sizes = characters[:, measures.VISIBLE]
        for rule in (
            at_least("min_characters", STEMMA, config.min_characters),
            at_most("max_characters", STEMMA, config.max_characters),
        ):
            verdicts.apply(rule, sizes)
        if config.gopher_quality:
            self._gopher_quality(config.gopher_quality, texts, languages, characters, batch, verdicts)
        if config.gopher_repetition:
            self._gopher_repetition(config.gopher_repetition, texts, characters, batch, verdicts)
        edited = list(texts)
        if self._c4:
            batch, edited = self._edit(self._c4, texts, batch, verdicts)
        if config.fineweb:
            self._fineweb(config.fineweb, batch, verdicts)
        return edited

    def _gopher_quality(
        self,
        config: GopherQualityConfig,
        texts: Sequence[str],
        languages: Sequence[str],
        characters: Array,
        batch: SegmentedText,
        verdicts: Verdicts,
    ) -> None:
        counts = measures.gopher_quality(
            batch.points, batch.doc_starts, batch.doc_words, batch.lengths, batch.bits, self._classes
        ).T
        words, lines = np.maximum(counts[measures.WORDS], 1), np.maximum(counts[measures.LINES], 1)
        solid = counts[measures.SOLID_WORDS]
        length = counts[measures.SOLID_LENGTH] / np.maximum(solid, 1)
        prefix = "gopher_quality."
        rules: list[tuple[CleaningRule | None, Array]] = [
            (at_least("min_words", GOPHER, config.min_words), solid),
            (at_most("max_words", GOPHER, config.max_words), solid),
            (at_least("min_mean_word_length", GOPHER, config.min_mean_word_length), length),
            (at_most("max_mean_word_length", GOPHER, config.max_mean_word_length), length),
            (at_most("max_symbol_word_ratio", GOPHER, config.max_symbol_word_ratio), counts[measures.HASHES] / words),
            (at_most("max_symbol_word_ratio", GOPHER, config.max_symbol_word_ratio), counts[measures.ELLIPSES] / words),
            (
                at_most("max_bullet_line_share", GOPHER, config.max_bullet_line_share),
                counts[measures.BULLET_LINES] / lines,
            ),
            (
                at_most("max_ellipsis_line_share", GOPHER, config.max_ellipsis_line_share),
                counts[measures.ELLIPSIS_LINES] / lines,
            ),
            (
                at_least("min_alphabetic_word_share", GOPHER, config.min_alphabetic_word_share),
                counts[measures.ALPHABETIC_WORDS] / words,
            ),
            (at_least("min_stop_words", GOPHER, config.min_stop_words), counts[measures.STOP_WORDS]),
        ]
        other_languages = self._in_other_languages(
            config, texts, languages, characters, batch, rules, verdicts.standing
        )
        for rule, values in rules:
            if rule is not None and rule.name in _OF_WORDS and other_languages:
                values = values.astype(float)
                values[list(other_languages)] = np.nan  # keeps every limit
            verdicts.apply(_prefixed(prefix, rule), values)
        _apply_to_others(config, other_languages, verdicts)

    def _in_other_languages(
        self,
        config: GopherQualityConfig,
        texts: Sequence[str],
        languages: Sequence[str],
        characters: Array,
        batch: SegmentedText,
        rules: Sequence[tuple[CleaningRule | None, Array]],
        standing: Array,
    ) -> dict[int, Prose]:
        """The texts that break a rule on English words and are in another language, with their measures."""
        if config.language == "en" or config.stop_words != GopherQualityConfig().stop_words:
            return {}
        broken = np.zeros(len(texts), bool)
        for rule, values in rules:
            if rule is not None and rule.name in _OF_WORDS:
                broken |= (values < rule.low) | (values > rule.high)
        documents = np.flatnonzero(broken & standing).tolist()
        declared = [config.language or (languages[document] if languages else "") for document in documents]
        return measure_documents(documents, texts, declared, batch.points, batch.doc_starts, characters)

    def _gopher_repetition(
        self,
        config: GopherRepetitionConfig,
        texts: Sequence[str],
        characters: Array,
        batch: SegmentedText,
        verdicts: Verdicts,
    ) -> None:
        counts = measures.gopher_repetition(batch.points, batch.doc_starts, verdicts.standing, self._classes).T
        paragraphs, pieces = np.maximum(counts[measures.PARAGRAPHS], 1), np.maximum(counts[measures.PIECES], 1)
        lengths = np.maximum(np.diff(batch.doc_starts), 1)
        prefix = "gopher_repetition."
        for rule, values in (
            (
                at_most("max_repeated_paragraph_share", GOPHER, config.max_repeated_paragraph_share),
                counts[measures.REPEATED_PARAGRAPHS] / paragraphs,
            ),
            (
                at_most(
                    "max_repeated_paragraph_character_share", GOPHER, config.max_repeated_paragraph_character_share
                ),
                counts[measures.PARAGRAPH_CHARACTERS] / lengths,
            ),
            (
                at_most("max_repeated_line_share", GOPHER, config.max_repeated_line_share),
                counts[measures.REPEATED_LINES] / pieces,
            ),
            (
                at_most("max_repeated_line_character_share", GOPHER, config.max_repeated_line_character_share),
                counts[measures.LINE_CHARACTERS] / lengths,
            ),
        ):
            verdicts.apply(_prefixed(prefix, rule), values)
        common, repeated = config.most_common_ngrams, config.repeated_ngrams
        shares = repeated_words(
            batch.hashes, batch.lengths, batch.doc_words, characters[:, measures.VISIBLE], verdicts.standing,
            np.array([n for n, _ in common], np.int64), np.array([limit for _, limit in common], np.float64),
            np.array([n for n, _ in repeated], np.int64), np.array([limit for _, limit in repeated], np.float64),
        )  # fmt: skip
        names = [f"most_common_ngrams.{n}" for n, _ in common] + [f"repeated_ngrams.{n}" for n, _ in repeated]
        for document in np.flatnonzero(verdicts.standing & (characters[:, measures.UNSPACED] > 0)).tolist():
            rows = repeated_rows(texts[document], [n for n, _ in common], [n for n, _ in repeated])
            shares[document] = np.concatenate(rows)
        for name, (_, limit), values in zip(names, (*common, *repeated), shares.T, strict=True):
            verdicts.apply(at_most(prefix + name, GOPHER, limit), values)

    def _edit(
        self, lines: _C4Lines, texts: Sequence[str], batch: SegmentedText, verdicts: Verdicts
    ) -> tuple[SegmentedText, list[str]]:
        points, starts, fates, counts = lines.edit(batch, verdicts.standing)
        self.lines.update(dict(zip(_LINE_FATES, counts.sum(0).tolist(), strict=True)))
        for key, fate in (("drop_lorem_ipsum", c4.LOREM_IPSUM), ("drop_curly_bracket", c4.CURLY_BRACKET)):
            if getattr(lines.config, key):
                verdicts.apply(at_most(f"c4.{key}", C4, 0), fates == fate)
        edited = self._segmenter.segment(points, starts)
        sentences = c4.count_sentences(
            points, starts, edited.bounds, edited.doc_chunks, edited.chunk_words, edited.bits
        )
        verdicts.apply(at_least("c4.min_sentences", C4, lines.config.min_sentences), sentences)
        encoded = points.tobytes()
        spans = zip(starts[:-1].tolist(), starts[1:].tolist(), verdicts.standing.tolist(), texts, strict=True)
        return edited, [
            encoded[4 * start : 4 * end].decode("utf-32-le").strip() if standing else text
            for start, end, standing, text in spans
        ]

    def _fineweb(self, config: FineWebConfig, batch: SegmentedText, verdicts: Verdicts) -> None:
        counts = measures.fineweb(
            batch.points, batch.doc_starts, verdicts.standing, self._classes, config.short_line_length
        ).T
        lines = np.maximum(counts[measures.FULL_LINES], 1)
        characters = np.diff(batch.doc_starts) - counts[measures.NEW_LINES]
        words = np.diff(batch.doc_words)
        prefix = "fineweb."
        for rule, values in (
            (
                at_least("min_ended_line_share", FINEWEB, config.min_ended_line_share),
                counts[measures.ENDED_LINES] / lines,
            ),
            (
                at_most("max_short_line_share", FINEWEB, config.max_short_line_share),
                counts[measures.SHORT_LINES] / lines,
            ),
            (
                at_most("max_repeated_line_character_share", FINEWEB, config.max_repeated_line_character_share),
                counts[measures.REPEATED_CHARACTERS] / np.maximum(characters, 1),
            ),
            (
                at_most("max_lines_per_word", FINEWEB, config.max_lines_per_word),
                counts[measures.NEW_LINES] / np.maximum(words, 1),
            ),
        ):
            verdicts.apply(_prefixed(prefix, rule), values)


_OF_WORDS = {
    "min_words",
    "max_words",
    "min_mean_word_length",
    "max_mean_word_length",
    "min_alphabetic_word_share",
    "min_stop_words",
}
"""Gopher's rules whose measures depend on the language."""


def _apply_to_others(config: GopherQualityConfig, other_languages: Mapping[int, Prose], verdicts: Verdicts) -> None:
    """Gopher's rules for texts that are not in English, by the measures of their language."""
    shortest, longest = MEAN_WORD_LENGTH
    spaced = {document: prose for document, prose in other_languages.items() if prose.word_length is not None}
    unspaced = {document: prose for document, prose in other_languages.items() if prose.word_length is None}
    with_stop_words = {document: prose for document, prose in other_languages.items() if prose.stop_words is not None}
    min_letters = config.min_alphabetic_word_share
    for rule, documents, name in (
        (at_least("min_words", GOPHER, config.min_words), other_languages, "words"),
        (at_most("max_words", GOPHER, config.max_words), other_languages, "words"),
        (at_least("min_mean_word_length", GOPHER, config.min_mean_word_length and shortest), spaced, "word_length"),
        (at_most("max_mean_word_length", GOPHER, config.max_mean_word_length and longest), spaced, "word_length"),
        (at_least("min_alphabetic_word_share", GOPHER, min_letters), spaced, "letters"),
        (at_least("min_alphabetic_word_share", GOPHER, min_letters and MIN_LETTER_SHARE), unspaced, "letters"),
        (at_least("min_stop_words", GOPHER, config.min_stop_words), with_stop_words, "stop_words"),
    ):
        values = np.full(len(verdicts.broken), np.nan)
        for document, prose in documents.items():
            values[document] = getattr(prose, name)
        verdicts.apply(_prefixed("gopher_quality.", rule), values)


class _C4Lines:
    """C4's line rules with their words as arrays."""

    def __init__(self, config: C4Config, classes: Array) -> None:
        self.config = config
        self._classes = classes
        self._lower = lower_table()
        self._ends = members(config.line_ends) if config.line_ends else np.zeros(0, bool)
        self._marks, self._mark_starts = code_points(CITATIONS)
        watched = [LOREM_IPSUM, *config.line_words, *config.line_phrases]
        self._words, self._word_starts = code_points([word.lower() for word in watched])
        self._firsts = np.zeros(int(self._words.max()) + 1, bool)
        self._firsts[self._words[self._word_starts[:-1]]] = True
        self._lorem = int(config.drop_lorem_ipsum)
        self._banned = ((1 << len(config.line_words)) - 1) << 1
        # Without the rule, lorem ipsum is a word that does nothing.
        self._ignored = 1 - self._lorem

    def edit(self, batch: SegmentedText, selected: Array) -> tuple[Array, Array, Array, Array]:
        config = self.config
        return c4.edit(
            batch.points, batch.doc_starts, selected, self._classes, self._lower, self._ends,
            config.remove_citations, self._marks, self._mark_starts,
            -1 if config.max_word_length is None else config.max_word_length,
            -1 if config.min_words_in_line is None else config.min_words_in_line,
            self._lorem, self._banned, self._ignored, config.drop_curly_bracket,
            self._words, self._word_starts, self._firsts,
        )  # fmt: skip


class _Names(Verdicts):
    """Notes which rules are applied."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rules: list[CleaningRule] = []

    def apply(self, rule: CleaningRule | None, values: Array) -> None:
        if rule is not None and rule not in self.rules:
            self.rules.append(rule)


def _prefixed(prefix: str, rule: CleaningRule | None) -> CleaningRule | None:
    return None if rule is None else CleaningRule(prefix + rule.name, rule.paper, rule.low, rule.high)
