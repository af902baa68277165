"""Makes prompts with a chosen and a rejected response for the reward model.

python -m corpus.preferences --config preferences.yaml --out DIR
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from corpus.config import PreferencesConfig, PreferenceSource
from corpus.demo.comments import reply_pairs
from corpus.demo.config import CommentReplies, DocstringStyle
from corpus.demo.texts import preference_pairs, style_pairs
from corpus.documents.quarantine import Rejected
from corpus.pairs.dialogues import (
    ASSISTANT,
    NOT_THE_SAME,
    DialoguePair,
    Turn,
    answer_of,
    begins_with_system,
    has_tools,
    pair_of_turns,
    prompt_of_turns,
    split_dialogues,
    tool_exchange_of,
    tools_of,
    trimmed,
    turns_of,
)
from corpus.pairs.files import (
    CONVERSATIONS,
    PROMPTS,
    Pair,
    has_any,
    prompt_field,
    prompt_of,
    records_of,
    system_of,
    turns_field,
)
from corpus.pairs.rankings import (
    Judged,
    RankingTally,
    answers_field,
    by_annotators,
    is_number,
    pairs_of_ranking,
    ranked_answers,
)
from corpus.pairs.split import write_pairs
from corpus.readers.config import PreferenceOptions
from corpus.readers.formats.json_lines import wrong_field
from corpus.readers.record import MISSING, Record, Unreadable, pick
from infra.io.sources import Place
from infra.run import Result, Run


def preferences(config: PreferencesConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write train.jsonl and heldout.jsonl with lines {"id", "prompt", "chosen", "rejected", "source"}, where they are
    known with "votes", "margin", and "ranking" (see `corpus.pairs.files.Pair`). A pair whose assistant may call
    functions has its conversation under "history", "prompt" and "steps", and both answers as messages.

    A pair from a file has its prompt as group, a dialogue its first turn, since collections hold one dialogue at
    several lengths. Records that are not pairs are put aside: equal answers, none, a conversation that starts with the
    assistant or has an unknown role.
    Raises StageError as `corpus.pairs.split.write_pairs` and the readers do.
    """
    seen = RankingTally()
    sources = {f"preferences.read.{index}": source for index, source in enumerate(config.read)}
    read = partial(_pairs, config, seen)
    figures, headline = write_pairs(config, "preferences", sources, read, inputs, out_dir, run)
    return Result({**figures, **seen.figures()}, headline)


def _pairs(
    config: PreferencesConfig, seen: RankingTally, source: PreferenceSource, key: str
) -> Iterator[Pair | Rejected]:
    if isinstance(source, PreferenceOptions):
        return map(seen, file_pairs(source, source.places(), key))
    if isinstance(source, DocstringStyle):
        return style_pairs(source)
    if isinstance(source, CommentReplies):
        return reply_pairs(source, as_preferences=True)
    return preference_pairs(source, config.heldout_share, config.seed)


def file_pairs(source: PreferenceOptions, files: Iterable[Place], key: str) -> Iterator[Pair | Rejected]:
    """The pairs in these files of a source, from its first `limit` records.

    Args:
        key: its dotted config key.

    Raises StageError as the readers do, and `wrong_field` where already the first record of a file lacks a field.
    """
    records = islice(records_of(source, files, key, _check_fields), source.limit)
    if source.annotator_field is None:
        for item in records:
            yield from [item] if isinstance(item, Rejected) else pairs_of(item, source)
        return
    refused: list[Rejected] = []
    for judged in by_annotators(_judgements(records, source, source.annotator_field, refused)):
        yield from refused
        refused.clear()
        yield judged if isinstance(judged, Pair) else _rejected(*judged)
    yield from refused


def _judgements(
    records: Iterable[Record | Rejected], source: PreferenceOptions, annotator_field: str, refused: list[Rejected]
) -> Iterator[Judged]:
    """Each pair with who judged it; what is none goes to `refused`."""
    for item in records:
        if isinstance(item, Rejected):
            refused.append(item)
            continue
        annotator = pick(item.value, annotator_field)
        if not isinstance(annotator, str | int) or annotator == "":
            refused.append(_rejected(item, f"no annotator: there is no {annotator_field}"))
            continue
        for pair in pairs_of(item, source):
            if isinstance(pair, Rejected):
                refused.append(pair)
            else:
                yield Judged(pair, str(annotator), item)


def pairs_of(record: Record, source: PreferenceOptions) -> Iterator[Pair | Rejected]:
    """The pair or the pairs of a record, or what is wrong with it."""
    try:
        answers = answers_field(record, source)
        if answers is None:
            yield _pair(record, source)
            return
        form = "prompt" if prompt_field(record, source) is not None else "conversation"
        prompt, group = _prompt(record, source, form)
        yield from pairs_of_ranking(ranked_answers(record.value, answers), prompt, group, record.file.name)
    except Unreadable as why:
        yield _rejected(record, str(why))


def _rejected(record: Record, why: str) -> Rejected:
    return Rejected(str(record.file), record.line, why)


def _check_fields(record: Record, source: PreferenceOptions, key: str) -> None:
    if answers_field(record, source):
        if not has_any(record, (*PROMPTS, source.prompt_field)) and turns_field(record) is None:
            raise wrong_field(record, source.prompt_field, f"{key}.prompt_field", (source.prompt_field,))
        return
    fields = {"chosen_field": source.chosen_field, "rejected_field": source.rejected_field}
    names = (source.prompt_field, *PROMPTS, *CONVERSATIONS)
    if not source.dialogue and _form_of(record, source) == "prompt" and not has_any(record, names):
        fields = {"prompt_field": source.prompt_field, **fields}
    for setting, field in fields.items():
        if pick(record.value, field) is MISSING:
            raise wrong_field(record, field, f"{key}.{setting}", tuple(fields.values()))


def _form_of(record: Record, source: PreferenceOptions) -> Literal["prompt", "turns", "conversation", "dialogue"]:
    """Return the form of a record: a prompt next to the answers; the same turns at the head of both; a list of turns
    next to the answers; or HH-RLHF's marks within two texts."""
    chosen = pick(record.value, source.chosen_field)
    if source.dialogue:
        return "dialogue"
    if isinstance(chosen, list) and len(chosen) > 1:
        return "turns"
    if prompt_field(record, source) is not None:
        return "prompt"
    if turns_field(record):
        return "conversation"
    return "dialogue" if isinstance(chosen, str) and ASSISTANT in f"\n\n{chosen}" else "prompt"


def _pair(record: Record, source: PreferenceOptions) -> Pair:
    """Raise Unreadable where a record is no pair."""
    value, form = record.value, _form_of(record, source)
    if form != "dialogue" and (found_with_tools := _tool_pair(record, source, form)) is not None:
        return found_with_tools
    chosen, rejected = (pick(value, field) for field in (source.chosen_field, source.rejected_field))
    for field, answer in ((source.chosen_field, chosen), (source.rejected_field, rejected)):
        if answer is MISSING or answer is None:
            raise Unreadable(f"no answer: there is no {field}")
    if form == "dialogue":
        for field, answer in ((source.chosen_field, chosen), (source.rejected_field, rejected)):
            if not isinstance(answer, str):
                raise Unreadable(f"the field {field} is not a string")
        pair = split_dialogues(*(text if text.startswith("\n\n") else f"\n\n{text}" for text in (chosen, rejected)))
    elif form == "turns":
        pair = pair_of_turns(_turns_of(chosen, record, source), _turns_of(rejected, record, source))
    else:
        prompt, group = _prompt(record, source, form)
        pair = DialoguePair(prompt, answer_of(chosen), answer_of(rejected), group)
    for field, answer in ((source.chosen_field, pair.chosen), (source.rejected_field, pair.rejected)):
        if not answer:
            raise Unreadable(f"no answer: {field} is empty")
    if pair.chosen == pair.rejected:
        raise Unreadable("equal answers: chosen and rejected are the same")
    fields = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
    votes, margin = _votes(record, source), _margin(record, source)
    return Pair(fields, record.file.name, pair.first_turn, votes=votes, margin=margin)


def _tool_pair(record: Record, source: PreferenceOptions, form: str) -> Pair | None:
    """The pair of a record whose assistant may call functions; None of any other. Raises Unreadable."""
    tools = tools_of(record.value.get("tools"))
    chosen, rejected = (
        _as_messages(pick(record.value, field), "assistant") for field in (source.chosen_field, source.rejected_field)
    )
    prompt_messages: list[Any] = []
    if form == "conversation" and (name := turns_field(record)):
        prompt_messages = list(record.value[name])
    elif (field := prompt_field(record, source)) is not None:
        prompt_messages = _as_messages(pick(record.value, field), "user")
    if not (tools or has_tools([*prompt_messages, *chosen, *rejected])):
        return None
    system = [{"role": "system", "content": text}] if (text := system_of(record, source.system_field)) else []

    def conversation(answer: list[Any]) -> list[Any]:
        messages = answer if _begins(answer) else [*prompt_messages, *answer]
        return messages if begins_with_system(messages) else [*system, *messages]

    good, bad = (
        tool_exchange_of(conversation(answer), tools, source.trim_conversations) for answer in (chosen, rejected)
    )
    if good[:3] != bad[:3]:
        raise Unreadable(f"{NOT_THE_SAME}: with function calls, only the last message of the assistant may differ")
    if good == bad:
        raise Unreadable("equal answers: chosen and rejected are the same")
    fields = {"prompt": good.prompt, "chosen": good.answer_text, "rejected": bad.answer_text}
    pair = Pair(fields, record.file.name, good.first_turn, votes=_votes(record, source), margin=_margin(record, source))
    return pair._replace(with_tools=good, other=bad)


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping):
        return [value]
    return [{"role": role, "content": value}] if isinstance(value, str) else []


def _begins(messages: Sequence[Any]) -> bool:
    """Return True if messages are a conversation from its beginning, and not the end of one."""
    first = messages[0] if messages else None
    role = (first.get("role") or first.get("from")) if isinstance(first, Mapping) else None
    return str(role).lower() in ("system", "developer", "user", "human")


def _votes(record: Record, source: PreferenceOptions) -> tuple[float, float] | None:
    """Raise Unreadable where the field is there, and no two numbers of which the chosen answer's is the larger or
    both are equal."""
    votes = pick(record.value, source.votes_field) if source.votes_field else MISSING
    if votes is MISSING or votes is None:
        return None
    if (
        not isinstance(votes, list)
        or len(votes) != 2
        or not all(map(is_number, votes))
        or not votes[0] >= votes[1] >= 0
    ):
        raise Unreadable(f"expected votes for the chosen and for the rejected answer, not fewer for the first: {votes}")
    return (float(votes[0]), float(votes[1])) if votes[0] else None


def _margin(record: Record, source: PreferenceOptions) -> float | None:
    margin = pick(record.value, source.margin_field) if source.margin_field else MISSING
    if margin is MISSING or margin is None:
        return None
    if not isinstance(margin, int | float) or not is_number(margin) or margin < 0:
        raise Unreadable(f"expected a margin of at least 0, not {margin!r}")
    return float(margin)


def _turns_of(messages: object, record: Record, source: PreferenceOptions) -> list[Turn]:
    turns = turns_of(messages)
    if turns[:1] and turns[0].role != "system" and (system := system_of(record, source.system_field)):
        turns.insert(0, Turn("system", system))
    return trimmed(turns, ends_with_answer=False) if source.trim_conversations else turns


def _prompt(record: Record, source: PreferenceOptions, form: str) -> tuple[str, str]:
    """The prompt's text and the pair's group."""
    if form == "conversation" and (name := turns_field(record)):
        return prompt_of_turns(_turns_of(record.value[name], record, source))
    field = prompt_field(record, source)
    if field is None:
        raise Unreadable(f"no field {source.prompt_field}")
    prompt_value = pick(record.value, field)
    if isinstance(prompt_value, list):
        return prompt_of_turns(_turns_of(prompt_value, record, source))
    if not isinstance(prompt_value, str):
        raise Unreadable(f"the field {field} is not a string")
    prompt = prompt_of(record, source.model_copy(update={"prompt_field": field}))
    system = system_of(record, source.system_field)
    return f"{system}\n\n{prompt}" if system else prompt, prompt


if __name__ == "__main__":
    from infra.alone import main

    main(preferences, PreferencesConfig)
