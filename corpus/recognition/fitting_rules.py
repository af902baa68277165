"""The cleaning rules that fit a corpus: the default ones, without those that would drop much of a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.quality import QualityRules
from corpus.cleaning.rules import CleaningRule
from corpus.documents.quarantine import Rejected
from corpus.readers.config import TextOptions
from corpus.readers.plan import FilePart, format_of
from corpus.readers.texts import read_texts
from corpus.validation.rows import is_language_like
from infra.errors import StageError
from infra.io.sources import Place, size_of

MOST_BY_A_RULE, MOST_OF_A_SOURCE, MOST_IN_ALL = 0.2, 0.5, 0.35
"""Largest shares of the sampled documents that one rule may drop: of all, and of one source; and all rules together."""
FEWEST = 20
"""Sampled documents of a source below which its own share counts for nothing."""
SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 300, 3_000_000
"""Most documents, and most characters, that are read of a source."""
SAMPLED_FILES, SAMPLED_SLOW_FILES = 300, 20
"""Most files of a source that are opened; the second of formats that take long to read."""
_QUICK = ("text", "markdown", "tex", "jsonl", "csv", "parquet", "arrow", "notebook", "subtitles", "email")


@dataclass(frozen=True)
class LeftOutRule:
    """A rule that a config turns off, and the share of the sampled documents that it would have dropped."""

    rule: CleaningRule
    share: float


@dataclass(frozen=True)
class FittingRules:
    """Result of a trial on a sample.

    keys: of `clean`, what differs from the default. dropped: share of the documents that the other rules drop.
    language_like, language_like_kept: shares of the documents, and of the kept ones, that look like language to
        `validate`.
    """

    documents: int
    keys: dict[str, Any]
    left_out: tuple[LeftOutRule, ...]
    dropped: float
    language_like: float
    language_like_kept: float


def fitting_rules(samples: Sequence[Sequence[str]], languages: Sequence[str] = ()) -> FittingRules:
    """Try the default rules on a sample of each source, and leave out one after another those that drop too much.

    A rule is judged by the documents that the rules before it keep, as in the stage.

    Args:
        languages: of the sources, ISO 639-1 codes; "" where not known.
    """
    texts = [text for sample in samples for text in sample]
    owners = [source for source, sample in enumerate(samples) for _ in sample]
    declared = [languages[source] if languages else "" for source in owners]
    config, left_out = CleanConfig(personal_data=None), list[LeftOutRule]()
    is_like = list(map(is_language_like, texts))
    while True:
        verdicts, _ = QualityRules(config)(texts, declared)
        broken = [broken.rule if broken else None for broken in verdicts.broken]
        dropped = Counter(rule for rule in broken if rule)
        in_sources = Counter((rule, source) for rule, source in zip(broken, owners, strict=True) if rule)
        of_a_source = {
            rule: max(
                in_sources[rule, source] / len(sample) if len(sample) >= FEWEST else 0.0
                for source, sample in enumerate(samples)
            )
            for rule in dropped
        }
        shares = {rule: count / len(texts) for rule, count in dropped.items()}
        excess = {rule: max(shares[rule] / MOST_BY_A_RULE, of_a_source[rule] / MOST_OF_A_SOURCE) for rule in shares}
        beyond = {rule: share for rule, share in excess.items() if share > 1}
        if not beyond and sum(shares.values()) > MOST_IN_ALL:
            # All together drop too much. Stubs of less than min_characters are no loss.
            beyond = {rule: share for rule, share in excess.items() if rule.name != "min_characters"}
        if not beyond:
            kept = [like for like, rule in zip(is_like, broken, strict=True) if rule is None]
            return FittingRules(
                len(texts),
                _changed_keys(config),
                tuple(left_out),
                sum(shares.values()),
                sum(is_like) / max(1, len(is_like)),
                sum(kept) / max(1, len(kept)),
            )
        worst = max(beyond, key=lambda rule: beyond[rule])
        left_out.append(LeftOutRule(worst, shares[worst]))
        config = _without(config, worst.name)


def _without(config: CleanConfig, name: str) -> CleanConfig:
    """The config with one rule turned off, by the name that the rule has in reports."""
    keys = config.model_dump()
    family, _, key = name.rpartition(".")
    if family.count("."):  # e.g. gopher_repetition.repeated_ngrams.5
        family, _, pairs = family.partition(".")
        keys[family][pairs] = [pair for pair in keys[family][pairs] if str(pair[0]) != key]
    else:
        (keys[family] if family else keys)[key] = None
    return CleanConfig.model_validate(keys)


def _changed_keys(config: CleanConfig) -> dict[str, Any]:
    default, changed = CleanConfig(personal_data=None).model_dump(), config.model_dump()
    keys: dict[str, Any] = {}
    for name, value in changed.items():
        if isinstance(value, dict):
            if differing := {key: item for key, item in value.items() if item != default[name][key]}:
                keys[name] = differing
        elif value != default[name]:
            keys[name] = value
    return keys


def sample_texts(source: TextOptions, files: Sequence[Place]) -> list[str]:
    """Texts of a source, read as `ingest` reads them: of files at equal distances, the first ones of each. Files that
    cannot be read are passed over."""
    is_quick = bool(files) and format_of(source, files[0]) in _QUICK
    most = SAMPLED_FILES if is_quick else SAMPLED_SLOW_FILES
    steps = max(1, min(most, len(files)) - 1)
    chosen = list(dict.fromkeys(files[round(n * (len(files) - 1) / steps)] for n in range(steps + 1))) if files else []
    per_file = -(-SAMPLED_DOCUMENTS // max(1, len(chosen)))
    texts: list[str] = []
    characters = 0
    for file in chosen:
        if characters > SAMPLED_CHARACTERS or (isinstance(file, Path) and not file.exists()):
            continue
        try:
            for item in islice(read_texts(source, FilePart(file, size_of(file)), "ingest.read"), per_file):
                if not isinstance(item, Rejected):
                    texts.append(item.text)
                    characters += len(item.text)
        except StageError:
            continue  # reported by `source_problems`
    return texts
