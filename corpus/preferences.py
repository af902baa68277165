"""Makes prompts with a chosen and a rejected response for the reward model.

python -m corpus.preferences --config preferences.yaml --out DIR
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from corpus.config import DocstringPreferences, FilePreferences, PreferencesConfig
from corpus.dialogue import split_dialogues
from corpus.docstrings import Unparsed
from corpus.pairs import Pair, prompt_of, records_of_files, write_pairs
from corpus.quarantine import Rejected
from corpus.readers.record import Record
from corpus.split import is_heldout
from corpus.summaries import Summary, read_summaries
from infra.run import Result, Run

# A wrong summary comes from among this many of the nearest in length.
WINDOW = 16


def preferences(config: PreferencesConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes train.jsonl and heldout.jsonl with lines {"id", "prompt", "chosen", "rejected", "source"}.

    A docstring's pair has the group of its prompt's docstring; a pair from a file has its prompt as group, a dialogue
    its first turn, since collections hold one dialogue at several lengths.
    Raises StageError as `corpus.pairs.write_pairs` and the readers do.
    """
    read = partial(_pairs, config)
    figures = write_pairs(
        config.read, "preferences", read, config.heldout_share, config.max_quarantine_share, out_dir, run
    )
    return Result(figures, f"{figures['train_pairs']:,} pairs, {figures['heldout_pairs']:,} held out")


def _pairs(
    config: PreferencesConfig, source: DocstringPreferences | FilePreferences, key: str
) -> Iterator[Pair | Rejected]:
    if isinstance(source, FilePreferences):
        return islice(_file_pairs(source, key), source.limit)
    return _docstring_pairs(config, source)


def _docstring_pairs(config: PreferencesConfig, source: DocstringPreferences) -> Iterator[Pair | Rejected]:
    summaries = []
    for item in read_summaries(source):
        if isinstance(item, Unparsed):
            yield Rejected(item.source, item.line, item.reason)
        else:
            summaries.append(item)
    wrong = wrong_summaries(summaries, config.heldout_share, config.seed)
    for summary, other in zip(summaries, wrong, strict=True):
        if other is not None:
            fields = {"prompt": summary.prompt, "chosen": summary.response, "rejected": other.response}
            yield Pair(fields, summary.source, summary.group)


def wrong_summaries(summaries: list[Summary], heldout_share: float, seed: int) -> list[Summary | None]:
    """For each summary another of the same package, the same side of the split and similar length.

    Each serves at most once as a wrong one, so neither a text by itself nor its length tells right from wrong. None
    for a summary that is alone on its side of its package.
    """
    alike: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, summary in enumerate(summaries):
        alike[summary.package, is_heldout(summary.group, heldout_share)].append(index)
    wrong: list[Summary | None] = [None] * len(summaries)
    for (package, heldout), indices in sorted(alike.items()):
        generator = random.Random(f"{seed}:{package}:{heldout}")
        indices.sort(key=lambda index: (len(summaries[index].response), summaries[index].source))
        for window in _windows(indices):
            generator.shuffle(window)
            for index, other in zip(window, [*window[1:], window[0]], strict=True):
                if index != other:
                    wrong[index] = summaries[other]
    return wrong


def _windows(indices: list[int]) -> Iterator[list[int]]:
    """Neighbours in groups of WINDOW; a last one that would hold a single index joins the one before."""
    start = 0
    while start < len(indices):
        end = start + WINDOW
        if len(indices) - end <= 1:
            end = len(indices)
        yield indices[start:end]
        start = end


def _file_pairs(source: FilePreferences, key: str) -> Iterator[Pair | Rejected]:
    fields = {"chosen_field": source.chosen_field, "rejected_field": source.rejected_field}
    if not source.dialogue:
        fields = {"prompt_field": source.prompt_field, **fields}
    for item in records_of_files(source, fields, key):
        if isinstance(item, Rejected):
            yield item
        else:
            yield _dialogue_pair(item, source) if source.dialogue else _plain_pair(item, source)


def _plain_pair(record: Record, source: FilePreferences) -> Pair:
    prompt = prompt_of(record, source)
    chosen = record.value[source.chosen_field].strip()
    rejected = record.value[source.rejected_field].strip()
    return Pair({"prompt": prompt, "chosen": chosen, "rejected": rejected}, record.file.name, prompt)


def _dialogue_pair(record: Record, source: FilePreferences) -> Pair | Rejected:
    split = split_dialogues(record.value[source.chosen_field], record.value[source.rejected_field])
    if isinstance(split, str):
        return Rejected(str(record.file), record.line, split)
    fields = {"prompt": split.prompt, "chosen": split.chosen, "rejected": split.rejected}
    return Pair(fields, record.file.name, split.first_turn)


if __name__ == "__main__":
    from infra.alone import main

    main(preferences, PreferencesConfig)
