"""Makes prompts with their responses for instruction tuning.

python -m corpus.instructions --config instructions.yaml --out DIR
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from corpus.config import InstructionsConfig, InstructionSource
from corpus.demo.comments import reply_pairs
from corpus.demo.config import CommentReplies, DocstringInstructions
from corpus.demo.texts import instruction_pairs, verifiable_pairs
from corpus.dialogues import ToolExchange, Turn, exchange_of_turns, has_tools, tool_exchange_of, turns_of
from corpus.documents import is_heldout
from corpus.pair_split import write_pairs
from corpus.pairs import CONVERSATIONS, PROMPTS, Pair, prompt_field, prompt_of, records_of
from corpus.quarantine import Rejected
from corpus.readers.config import FileInstructions
from corpus.readers.json_lines import wrong_field
from corpus.readers.record import MISSING, Record, Unreadable, pick
from corpus.references import unusable_reference
from corpus.templates import check_fields, exchange_of
from infra.run import Result, Run
from infra.sources import Place

ASKED = (*PROMPTS, "inputs")
RESPONSES = ("response", "completion", "answer", "targets")
"""Fields of a prompt and a response where the config names none and there is no `instruction` and no `output`."""


def instructions(config: InstructionsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes train.jsonl and heldout.jsonl with lines {"id", "prompt", "response", "source"}, and "verify" where a
    rule tells whether an answer is right, with "reference" where it holds answers against another field than the
    response. A conversation of several turns has what was said before under "history" (`corpus.pairs.Pair`), and pairs
    of a source with a weight have it under "weight". One in which the assistant calls functions, in OpenAI's form, has
    calls and results behind the prompt under "steps", those of the answer under "tool_calls", and the record's `tools`.

    A pair from a file has its prompt as group, a conversation what the human said first, since collections hold one
    conversation at several lengths. What has no answer or no prompt, starts with the assistant or has a role that
    nobody knows is put aside.
    Raises StageError as `corpus.pair_split.write_pairs` and the readers do.
    """
    figures, headline = write_pairs(config, "instructions", partial(_pairs, config), inputs, out_dir, run)
    return Result(figures, headline)


def _pairs(
    config: InstructionsConfig,
    source: InstructionSource,
    key: str,
) -> Iterator[Pair | Rejected]:
    if isinstance(source, FileInstructions):
        read = islice(file_pairs(source, source.places(), key), source.limit)
        return _capped(read, source.max_examples, config.heldout_share) if source.max_examples else read
    if isinstance(source, DocstringInstructions):
        return instruction_pairs(source)
    if isinstance(source, CommentReplies):
        return reply_pairs(source, as_preferences=False)
    return verifiable_pairs(source)


def _capped(pairs: Iterable[Pair | Rejected], most: int, heldout_share: float) -> Iterator[Pair | Rejected]:
    """The pairs, of those that train the `most` with the least ids, which are hashes."""
    read = list(pairs)
    ids = {one.id for one in read if isinstance(one, Pair) and not is_heldout(one.group, heldout_share)}
    kept = set(heapq.nsmallest(most, ids))
    for one in read:
        if isinstance(one, Rejected) or one.id not in ids or one.id in kept:
            yield one


def file_pairs(source: FileInstructions, places: Iterable[Place], key: str) -> Iterator[Pair | Rejected]:
    """The pairs in these files of a source. key: its dotted config key. Raises StageError as the readers do, and
    `wrong_field` where already the first record of a file lacks a field."""
    for item in records_of(source, places, key, _check_fields):
        if isinstance(item, Rejected):
            yield item
            continue
        try:
            yield _pair(item, source)
        except Unreadable as why:
            yield Rejected(str(item.file), item.line, str(why))


def _check_fields(record: Record, source: FileInstructions, key: str) -> None:
    if source.templates:
        check_fields(record, source.templates, f"{key}.templates")
        return
    if _form_of(record, source) == "turns":
        return
    asked, answer = prompt_field(record, source, ASKED), _response_field(record, source)
    wanted = (asked or source.prompt_field, answer or source.response_field)
    if asked is None:
        raise wrong_field(record, source.prompt_field, f"{key}.prompt_field", wanted)
    if answer is None:
        raise wrong_field(record, source.response_field, f"{key}.response_field", wanted)


def _form_of(record: Record, source: FileInstructions) -> Literal["pair", "turns"]:
    """How a record says what was asked and answered: in two fields, or as a list of turns."""
    if prompt_field(record, source, ASKED) is not None and _response_field(record, source) is not None:
        return "pair"
    return "turns" if any(isinstance(record.value.get(name), list) for name in CONVERSATIONS) else "pair"


def _response_field(record: Record, source: FileInstructions) -> str | None:
    is_named = source.response_field != FileInstructions.model_fields["response_field"].default
    names = (source.response_field, *(() if is_named else RESPONSES))
    return next((name for name in names if pick(record.value, name) is not MISSING), None)


def _pair(record: Record, source: FileInstructions) -> Pair:
    """Raises Unreadable where a record is no pair."""
    if source.templates:
        found = exchange_of(record, source.templates, source.template_seed)
        return _checked(record, source, found.prompt, found.answer, found.group)
    if (messages := _messages_with_tools(record, source)) is not None:
        talk = tool_exchange_of(messages, record.value.get("tools"))
        return _checked(record, source, talk.prompt, talk.response, talk.first_turn, with_tools=talk)
    turns = list(_turns(record, source))
    system = record.value.get("system")
    if isinstance(system, str) and system.strip() and (not turns or turns[0].role != "system"):
        turns.insert(0, Turn("system", system.strip()))
    if turns and turns[0] == ("system", ""):
        turns.pop(0)
    said = exchange_of_turns(turns)
    return _checked(record, source, said.prompt, said.response, said.first_turn, said.history)


def _messages_with_tools(record: Record, source: FileInstructions) -> list[Any] | None:
    """The messages of a record whose assistant may call functions, None for any other."""
    value = record.value
    if _form_of(record, source) == "turns":
        messages = next(value[name] for name in CONVERSATIONS if isinstance(value.get(name), list))
    else:
        fields = prompt_field(record, source, ASKED), _response_field(record, source)
        parts = [pick(value, field) if field else None for field in fields]
        lists = [part for part in parts if isinstance(part, list)]
        if len(lists) < len(parts):
            return None
        messages = [message for part in lists for message in part]
    if not has_tools(messages) and not value.get("tools"):
        return None
    system = value.get("system")
    if isinstance(system, str) and system.strip() and not _begins_with_system(messages):
        return [{"role": "system", "content": system}, *messages]
    return list(messages)


def _begins_with_system(messages: Sequence[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer")


def _checked(
    record: Record,
    source: FileInstructions,
    prompt: str,
    response: str,
    group: str,
    history: Sequence[Turn] = (),
    with_tools: ToolExchange | None = None,
) -> Pair:
    """The pair with its rule. Raises Unreadable where the rule has no use for what it is to hold answers against."""
    reference = _reference(record.value, source.reference_field) if source.reference_field else ""
    held_against = reference if source.reference_field else response
    if source.verify and (why := unusable_reference(source.verify, held_against)):
        raise Unreadable(f"verify: {source.verify} has no use for this reference: {why}")
    fields = {"prompt": prompt, "response": response}
    pair = Pair(fields, record.file.name, group, source.verify, history, source.weight)
    return pair._replace(reference=reference, with_tools=with_tools)


def _reference(value: Mapping[str, Any], field: str) -> str:
    """What a rule holds answers against, as text. Raises Unreadable where there is none."""
    found = pick(value, field)
    if found is MISSING or found is None:
        raise Unreadable(f"no reference: there is no {field}")
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        return "\n".join(found).strip()
    return found.strip() if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _turns(record: Record, source: FileInstructions) -> Iterator[Turn]:
    value = record.value
    if _form_of(record, source) == "turns":
        name = next(name for name in CONVERSATIONS if isinstance(value.get(name), list))
        yield from turns_of(value[name])
        return
    for said in _earlier(value.get("history")):
        yield from (Turn("human", said[0]), Turn("assistant", said[1]))
    field = prompt_field(record, source, ASKED)
    if field is None:
        raise Unreadable(f"no field {source.prompt_field}")
    asked = pick(value, field)
    if isinstance(asked, list):
        yield from turns_of(asked)
    else:
        _text(field, asked)
        yield Turn("human", prompt_of(record, source.model_copy(update={"prompt_field": field})))
    field = _response_field(record, source)
    if field is None:
        raise Unreadable(f"no field {source.response_field}")
    answer = pick(value, field)
    if isinstance(answer, list):
        yield from turns_of(answer)
    else:
        yield Turn("assistant", _text(field, answer).strip())


def _earlier(history: Any) -> list[list[str]]:
    """Questions with answers before the instruction, as LLaMA-Factory's Alpaca form has them."""
    if not history:
        return []
    if not isinstance(history, list) or not all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(text, str) for text in one) for one in history
    ):
        raise Unreadable("expected history to be a list of [question, answer]")
    return [[text.strip() for text in one] for one in history]


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"the field {field} is not a string")
    return value


if __name__ == "__main__":
    from infra.alone import main

    main(instructions, InstructionsConfig)
