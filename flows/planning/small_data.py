"""The split of small data: a held-out share, and a length of sequences, with which both sides have something.

The side of a document or pair depends on its own hash alone (`corpus.documents.parts.is_heldout`). Of 10 documents the
default share of 5 % holds out none three times in five, and no stage could go on. The hashes are known in advance, so
a share that works is found by trying the shares on the texts themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from corpus.config import (
    HELDOUT_SHARE,
    READS_RECORDS,
    IngestConfig,
    InstructionsConfig,
    PreferencesConfig,
    ShardConfig,
    TokenizerConfig,
)
from corpus.documents.parts import is_heldout, make_document
from corpus.documents.quarantine import Rejected
from corpus.pairs.files import Pair
from corpus.pairs.split import Spool
from corpus.readers.config import DatasetSelection, FileSelection, InstructionOptions, PreferenceOptions, TextOptions
from corpus.readers.plan import FilePart
from flows.config.graph import Graph
from infra.errors import ConfigError, Problem, StageError
from infra.io.sources import Place, by_name, size_of

SHARES = (HELDOUT_SHARE, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares that are tried; one beyond the fifth only where no shorter sequences help."""
USUAL_SHARES = 5
LEAST_HELDOUT = 2
"""Documents and pairs that are held out if possible; otherwise one."""
SHORTEST = 64
"""Shortest sequences, in tokens."""
TRAINED_SEQUENCES, HELDOUT_SEQUENCES = 6, 1.5
"""Least sequences of each side by the estimate of their tokens. A batch of a first config has 4 sequences, and a side
needs one full sequence."""
BYTES_A_TOKEN = 3.5
MOST_INSPECTED, LARGEST_LOOK = 300, 50_000_000
"""Most documents or pairs, and most bytes of files, that `stemma check` looks at."""
KINDS_OF_FILES = (FileSelection, DatasetSelection)
FEWEST_ENTRIES, SURE_OF_ENTRIES = 300, 0.85
"""Least entries of a tokenizer, and the part of those that a text gives that a config asks for."""
LEAST_KILOBYTES, LEAST_PAIRS = 10, 10
"""Amounts that are enough, rounded up."""


@dataclass(frozen=True)
class SmallDocuments:
    """Documents of a small corpus.

    read: their number. kept: those that cleaning keeps, each text once, by their group.
    """

    read: int
    kept: Mapping[str, str]


@dataclass(frozen=True)
class SidesOfPairs:
    """Pairs of one kind on each side."""

    trained: int
    heldout: int

    @property
    def all(self) -> int:
        return self.trained + self.heldout


@dataclass(frozen=True)
class SmallSplit:
    """Result of the trial.

    sequence_length: at most the one that was asked for. read, kept, heldout: documents; 0 if there are none, or many.
    trained_sequences: an estimate; None, as `documents`, if there are none, or many. pairs: by section.
    """

    heldout_share: float
    sequence_length: int
    read: int = 0
    kept: int = 0
    heldout: int = 0
    trained_sequences: int | None = None
    documents: SmallDocuments | None = None
    pairs: Mapping[str, SidesOfPairs] = field(default_factory=dict)


SmallPairs = InstructionsConfig | PreferencesConfig


def fitting_split(
    documents: SmallDocuments | None, pairs: Mapping[str, SmallPairs], sequence_length: int
) -> SmallSplit:
    """Return the split with the longest sequences, then the smallest share, that leaves each side enough.

    Args:
        documents: None if there are none, or enough for any split.
        pairs: configs of the few pairs, by section.
        sequence_length: of a large corpus.

    Raises ConfigError with what is too little, and how much is enough.
    """
    lengths = [sequence_length]
    while documents is not None and lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    read_pairs = {section: list(_pairs_of(config)) for section, config in pairs.items()}
    tried: dict[float, dict[str, SidesOfPairs]] = {}
    for shares in (SHARES[:USUAL_SHARES], SHARES):
        for least in range(LEAST_HELDOUT, 0, -1):
            for length, share in product(lengths, shares):
                split = SmallSplit(share, length) if documents is None else _of_documents(documents, share, length)
                if split is None or (documents is not None and split.heldout < least):
                    continue
                if share not in tried:
                    tried[share] = {name: _sides_of(pairs[name], read, share) for name, read in read_pairs.items()}
                if all(sides.heldout >= least and sides.trained >= sides.heldout for sides in tried[share].values()):
                    return replace(split, pairs=tried[share])
    raise ConfigError(*_too_little(documents, read_pairs, list(tried.values())))


def heldout_notes(nodes: Graph) -> dict[str, str]:
    """A line for each step whose few documents or pairs are all on the training side, so that a later step would stop.

    Documents and pairs are read until one is held out, which in more than a few is soon.
    """
    shares = [node.config.heldout_share for node in nodes.values() if isinstance(node.config, ShardConfig)]
    notes: dict[str, str] = {}
    for name, node in nodes.items():
        config = node.config
        if not isinstance(config, READS_RECORDS):
            continue
        if not all(isinstance(source, KINDS_OF_FILES) for source in config.read):
            continue
        if sum(size_of(file) for source in config.read for file in _files_of(source)) > LARGEST_LOOK:
            continue
        if isinstance(config, IngestConfig):
            share, what = shares[0] if shares else 0.0, "documents"
            groups = (make_document(text, "").group for source in config.read for text in _texts_of(source))
        else:
            share, what = config.heldout_share, "pairs"
            groups = (pair.group for pair in _pairs_of(config))
        inspected = list(islice(_until_heldout(groups, share), MOST_INSPECTED)) if share else []
        if inspected and len(inspected) < MOST_INSPECTED and not inspected[-1]:
            notes[name] = (
                f"{name}: heldout_share {share:g} holds out none of its {len(inspected):,} {what}, and the steps that "
                "need some will stop: raise it in all stages, or let stemma init choose it"
            )
    return notes


def _until_heldout(groups: Iterable[str], share: float) -> Iterator[bool]:
    """Yield for each group whether it is held out, up to the first one that is."""
    for group in groups:
        yield (is_held := is_heldout(group, share))
        if is_held:
            return


def small_documents(config: IngestConfig, clean_keys: Mapping[str, Any]) -> SmallDocuments:
    """Read the documents of a small corpus, as `ingest` reads them, and leave out what cleaning drops.

    Args:
        clean_keys: of `clean`, what differs from the default.
    """
    from corpus.cleaning.config import CleanConfig
    from corpus.cleaning.quality import QualityRules

    texts = [text for source in config.read if isinstance(source, TextOptions) for text in _texts_of(source)]
    rules = QualityRules(CleanConfig.model_validate({"personal_data": None, **clean_keys}))
    verdicts, _ = rules(texts, [""] * len(texts))
    kept = [text for text, broken in zip(texts, verdicts.broken, strict=True) if broken is None]
    return SmallDocuments(len(texts), {make_document(text, "").group: text for text in kept})


def fitting_vocabulary(documents: SmallDocuments, heldout_share: float, entries: int) -> int:
    """Return the entries of a tokenizer that the training side gives, at most `entries`; some are left out, since later
    stages may drop text."""
    from corpus.tokens.training import entries_of

    texts = [text for group, text in documents.kept.items() if not is_heldout(group, heldout_share)]
    available = entries_of(TokenizerConfig(vocab_size=entries), texts)
    return entries if available == entries else max(FEWEST_ENTRIES, int(SURE_OF_ENTRIES * available))


def _texts_of(source: Any) -> Iterator[str]:
    from corpus.readers.texts import read_texts

    for file in _files_of(source):
        with suppress(StageError):  # the trial of first records reports it
            for item in read_texts(source, FilePart(file, size_of(file)), "ingest.read"):
                if not isinstance(item, Rejected):
                    yield item.text


def _pairs_of(config: SmallPairs) -> Iterator[Pair]:
    from corpus.instructions import file_pairs as instruction_pairs
    from corpus.preferences import file_pairs as preference_pairs

    seen: set[str] = set()
    for source in config.read:
        items: Iterator[Pair | Rejected] = iter(())
        if isinstance(source, InstructionOptions):
            items = instruction_pairs(source, _files_of(source), "instructions.read")
        elif isinstance(source, PreferenceOptions):
            items = preference_pairs(source, _files_of(source), "preferences.read")
        with suppress(StageError):
            for item in items:
                if isinstance(item, Pair) and item.id not in seen:
                    seen.add(item.id)
                    yield item


def _files_of(source: Any) -> list[Place]:
    there = (file for file in by_name(source.places()) if not isinstance(file, Path) or file.exists())
    return [file for file in there if size_of(file)]


def _sides_of(config: SmallPairs, pairs: Sequence[Pair], share: float) -> SidesOfPairs:
    """Count the pairs of each side by the code of the stage, near duplicates of the other side left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Spool(folder / "pairs.jsonl", config.model_copy(update={"heldout_share": share})) as spool:
            spool.add(0, pairs, None)
        counts = spool.write(folder)
    return SidesOfPairs(counts["train"], counts["heldout"])


def _of_documents(documents: SmallDocuments, share: float, length: int) -> SmallSplit | None:
    """Return the split of the documents; None if a side has too few tokens."""
    heldout = [text for group, text in documents.kept.items() if is_heldout(group, share)]
    heldout_tokens = _tokens(heldout)
    trained_tokens = _tokens(documents.kept.values()) - heldout_tokens
    if trained_tokens < TRAINED_SEQUENCES * length or heldout_tokens < HELDOUT_SEQUENCES * length:
        return None
    return SmallSplit(
        share, length, documents.read, len(documents.kept), len(heldout), trained_tokens // length, documents
    )


def _tokens(texts: Iterable[str]) -> int:
    return int(sum(len(text.encode()) for text in texts) / BYTES_A_TOKEN)


def _too_little(
    documents: SmallDocuments | None, pairs: Mapping[str, Sequence[Pair]], tried: Sequence[Mapping[str, SidesOfPairs]]
) -> Iterator[Problem]:
    """Yield what is too little: the documents if no split of them alone is enough, else the pairs."""
    splits = [_of_documents(documents, share, SHORTEST) for share in SHARES] if documents else []
    if documents is not None and not any(split and split.heldout for split in splits):
        tokens = _tokens(documents.kept.values())
        yield Problem(
            "too_little_text",
            "",
            f"too little text to train on one part and to hold out another: about {tokens:,} tokens; different "
            f"documents after cleaning: {len(documents.kept):,} of {documents.read:,}",
            f"add text: about {LEAST_KILOBYTES} kB in ten documents, or in one file with blank lines, are enough",
        )
        return
    never_split = [name for name in pairs if not any(sides[name].trained and sides[name].heldout for sides in tried)]
    for section in never_split or pairs:
        yield Problem(
            "too_few_pairs",
            "",
            f"too few {section} to train on some and to hold out others: {len(pairs[section]):,} different pairs",
            f"add pairs: {LEAST_PAIRS} with different prompts are enough",
        )
