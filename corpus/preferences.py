"""Makes prompts with a chosen and a rejected response for the reward model.

python -m corpus.preferences --config preferences.yaml --out DIR
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from corpus.config import PreferencesConfig
from corpus.demo.config import DocstringPreferences, DocstringStyle
from corpus.demo.texts import preference_pairs, style_pairs
from corpus.pairs import Pair, prompt_of, records_of_files, write_pairs
from corpus.quarantine import Rejected
from corpus.readers.config import FilePreferences
from corpus.readers.record import Record
from infra.run import Result, Run
from infra.sources import Place

# The marks of Anthropic's HH-RLHF (Bai et al., 2022): a turn opens with a blank line and one of them.
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def preferences(config: PreferencesConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes train.jsonl and heldout.jsonl with lines {"id", "prompt", "chosen", "rejected", "source"}.

    A pair from a file has its prompt as group, a dialogue its first turn, since collections hold one dialogue at
    several lengths.
    Raises StageError as `corpus.pairs.write_pairs` and the readers do.
    """
    read = partial(_pairs, config)
    figures = write_pairs(
        config.read, "preferences", read, config.heldout_share, config.max_quarantine_share, out_dir, run
    )
    return Result(figures, f"{figures['train_pairs']:,} pairs, {figures['heldout_pairs']:,} held out")


def _pairs(
    config: PreferencesConfig, source: DocstringPreferences | DocstringStyle | FilePreferences, key: str
) -> Iterator[Pair | Rejected]:
    if isinstance(source, FilePreferences):
        return islice(file_pairs(source, source.places(), key), source.limit)
    if isinstance(source, DocstringStyle):
        return style_pairs(source)
    return preference_pairs(source, config.heldout_share, config.seed)


def file_pairs(source: FilePreferences, places: Iterable[Place], key: str) -> Iterator[Pair | Rejected]:
    """The pairs in these files of a source. key: its dotted config key. Raises StageError as the readers do."""
    fields = {"chosen_field": source.chosen_field, "rejected_field": source.rejected_field}
    if not source.dialogue:
        fields = {"prompt_field": source.prompt_field, **fields}
    for item in records_of_files(source, places, fields, key):
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


class DialoguePair(NamedTuple):
    """Two answers to one dialogue.

    prompt: all before the last Assistant turn, with its "Human:" and "Assistant:" marks; a single turn goes without.
    first_turn: what the human said first.
    """

    prompt: str
    chosen: str
    rejected: str
    first_turn: str


def split_dialogues(chosen: str, rejected: str) -> DialoguePair | str:
    """Two dialogues with the same beginning as a prompt and two responses, or the reason why they are not that."""
    prompt, mark, good = chosen.rpartition(ASSISTANT)
    other_prompt, other_mark, bad = rejected.rpartition(ASSISTANT)
    if not mark or not other_mark:
        return 'expected dialogues with an "Assistant:" turn'
    if HUMAN not in prompt:
        return 'expected dialogues that open with a "Human:" turn'
    if prompt != other_prompt:
        return "chosen and rejected are not two answers to the same dialogue"
    turns = prompt.removeprefix(HUMAN)
    first_turn = turns.partition(ASSISTANT)[0].strip()
    is_single = prompt.startswith(HUMAN) and ASSISTANT not in turns and HUMAN not in turns
    return DialoguePair((turns if is_single else prompt).strip(), good.strip(), bad.strip(), first_turn)


if __name__ == "__main__":
    from infra.alone import main

    main(preferences, PreferencesConfig)
