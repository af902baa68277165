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
from corpus.documents.parts import is_heldout
from corpus.documents.quarantine import Rejected
from corpus.pairs.dialogues import (
    CHAT_ROLES,
    ToolExchange,
    Turn,
    begins_with_system,
    exchange_of_turns,
    has_tools,
    tool_exchange_of,
    tools_of,
    trimmed,
    turns_of,
)
from corpus.pairs.files import (
    CONVERSATIONS,
    PROMPTS,
    Pair,
    given_field,
    has_any,
    prompt_field,
    prompt_of,
    records_of,
    system_of,
    turns_field,
)
from corpus.pairs.references import unusable_reference
from corpus.pairs.split import write_pairs
from corpus.pairs.templates import check_fields, exchange_of
from corpus.readers.config import InstructionOptions
from corpus.readers.formats.json_lines import wrong_field
from corpus.readers.record import MISSING, Record, Unreadable, pick
from infra.io.sources import Place
from infra.run import Result, Run

PROMPT_FIELDS = (*PROMPTS, "inputs")
RESPONSES = ("response", "completion", "answer", "targets")
"""Fields of a prompt and a response where the config names none and there is no `instruction` and no `output`."""


def instructions(config: InstructionsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write train.jsonl and heldout.jsonl with lines {"id", "prompt", "response", "source"}, and "verify" where a rule
    checks answers, with "reference" where it compares them with another field than the response. A conversation of
    several turns has the earlier messages under "history" (`corpus.pairs.files.Pair`), and pairs of a source with a
    weight have it under "weight". One in which the assistant calls functions, in OpenAI's form, has calls and results
    behind the prompt under "steps", those of the answer under "tool_calls", and the record's `tools`.

    A pair from a file has its prompt as group, a conversation the human's first message, since collections hold one
    conversation at several lengths. What has no answer or no prompt, starts with the assistant or has an unknown role
    is put aside.
    Raises StageError as `corpus.pairs.split.write_pairs` and the readers do.
    """
    sources = {f"instructions.read.{index}": source for index, source in enumerate(config.read)}
    figures, headline = write_pairs(config, "instructions", sources, partial(_pairs, config), inputs, out_dir, run)
    return Result(figures, headline)


def _pairs(
    config: InstructionsConfig,
    source: InstructionSource,
    key: str,
) -> Iterator[Pair | Rejected]:
    if isinstance(source, InstructionOptions):
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
    ids = {item.id for item in read if isinstance(item, Pair) and not is_heldout(item.group, heldout_share)}
    kept = set(heapq.nsmallest(most, ids))
    for item in read:
        if isinstance(item, Rejected) or item.id not in ids or item.id in kept:
            yield item


def file_pairs(source: InstructionOptions, files: Iterable[Place], key: str) -> Iterator[Pair | Rejected]:
    """The pairs in these files of a source.

    Args:
        key: its dotted config key.

    Raises StageError as the readers do, and `wrong_field` where already the first record of a file lacks a field.
    """
    for item in records_of(source, files, key, _check_fields):
        if isinstance(item, Rejected):
            yield item
            continue
        try:
            yield pair_of(item, source)
        except Unreadable as why:
            yield Rejected(str(item.file), item.line, str(why))


def _check_fields(record: Record, source: InstructionOptions, key: str) -> None:
    if source.templates:
        check_fields(record, source.templates, f"{key}.templates")
        return
    if _form_of(record, source) == "turns":
        return
    prompts, responses = _names(source.prompt_field, "prompt_field", PROMPT_FIELDS), _response_names(source)
    if has_any(record, CONVERSATIONS) and not (has_any(record, prompts) and has_any(record, responses)):
        return  # conversations, of which the first is null
    fields = (
        given_field(record, prompts) or source.prompt_field,
        given_field(record, responses) or source.response_field,
    )
    if not has_any(record, prompts):
        raise wrong_field(record, source.prompt_field, f"{key}.prompt_field", fields)
    if not has_any(record, responses):
        raise wrong_field(record, source.response_field, f"{key}.response_field", fields)


def _form_of(record: Record, source: InstructionOptions) -> Literal["pair", "turns"]:
    """Return the form of a record: question and answer in two fields, or a list of turns."""
    if prompt_field(record, source, PROMPT_FIELDS) is not None and _response_field(record, source) is not None:
        return "pair"
    return "turns" if turns_field(record) else "pair"


def _response_field(record: Record, source: InstructionOptions) -> str | None:
    return given_field(record, _response_names(source))


def _response_names(source: InstructionOptions) -> tuple[str, ...]:
    return _names(source.response_field, "response_field", RESPONSES)


def _names(name: str, key: str, others: Sequence[str]) -> tuple[str, ...]:
    """The field that the config names or, where it names none, its default and others."""
    is_named = name != InstructionOptions.model_fields[key].default
    return (name, *(() if is_named else others))


def pair_of(record: Record, source: InstructionOptions) -> Pair:
    """Raise Unreadable where a record is no pair."""
    if source.templates:
        exchange = exchange_of(record, source.templates, source.template_seed)
        return _checked(record, source, exchange.prompt, exchange.answer, exchange.group)
    tools = tools_of(record.value.get("tools"))
    messages = _messages(record, source)
    if messages and _is_not_learnt(messages[-1]):
        raise Unreadable("no answer: the last message is marked as one that is not to be learnt")
    if tools or has_tools(messages):
        talk = tool_exchange_of(messages, tools, source.trim_conversations)
        return _checked(record, source, talk.prompt, talk.response, talk.first_turn, with_tools=talk)
    turns = list(_turns(record, source))
    system = system_of(record, source.system_field)
    if system and (not turns or turns[0].role != "system"):
        turns.insert(0, Turn("system", system))
    if turns and turns[0] == ("system", ""):
        turns.pop(0)
    if source.trim_conversations:
        turns = trimmed(turns)
    dialogue = exchange_of_turns(turns)
    return _checked(record, source, dialogue.prompt, dialogue.response, dialogue.first_turn, dialogue.history)


def _is_not_learnt(message: Any) -> bool:
    """Return True for the marks of OpenAI's (`weight`) and Axolotl's (`train`) files."""
    return isinstance(message, Mapping) and (message.get("weight") == 0 or message.get("train") is False)


def _messages(record: Record, source: InstructionOptions) -> list[Any]:
    """Return a record as a list of messages, whatever its form; empty where it lacks a prompt or a response."""
    value = record.value
    if _form_of(record, source) == "turns" and (name := turns_field(record)):
        messages = list(value[name])
    else:
        asked_field, answered = prompt_field(record, source, PROMPT_FIELDS), _response_field(record, source)
        if asked_field is None or answered is None:
            return []
        if any(isinstance(pick(value, field), list | Mapping) for field in (asked_field, answered)):
            messages = [*_spoken(pick(value, asked_field), "user"), *_spoken(pick(value, answered), "assistant")]
        else:
            messages = [{"role": CHAT_ROLES[turn.role], "content": turn.text} for turn in _turns(record, source)]
    system = system_of(record, source.system_field)
    if system and not begins_with_system(messages):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _spoken(value: Any, role: str) -> list[Any]:
    """A list of messages, a message, or a text as one of a role."""
    if isinstance(value, Mapping):
        return [value]
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _checked(
    record: Record,
    source: InstructionOptions,
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
    """Return the reference of a rule, as text. Raises Unreadable where there is none."""
    reference = pick(value, field)
    if reference is MISSING or reference is None:
        raise Unreadable(f"no reference: there is no {field}")
    if isinstance(reference, list) and all(isinstance(item, str) for item in reference):
        return "\n".join(reference).strip()
    return reference.strip() if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)


def _turns(record: Record, source: InstructionOptions) -> Iterator[Turn]:
    value = record.value
    if _form_of(record, source) == "turns" and (name := turns_field(record)):
        yield from turns_of(value[name])
        return
    for exchange in _earlier(value.get("history")):
        yield from (Turn("human", exchange[0]), Turn("assistant", exchange[1]))
    field = prompt_field(record, source, PROMPT_FIELDS)
    if field is None:
        raise _lacks(record, _names(source.prompt_field, "prompt_field", PROMPT_FIELDS))
    prompt = pick(value, field)
    if isinstance(prompt, list | Mapping):
        yield from turns_of(_spoken(prompt, "user"))
    else:
        _text(field, prompt)
        yield Turn("human", prompt_of(record, source.model_copy(update={"prompt_field": field})))
    field = _response_field(record, source)
    if field is None:
        raise _lacks(record, _response_names(source))
    answer = pick(value, field)
    if isinstance(answer, list | Mapping):
        yield from turns_of(_spoken(answer, "assistant"))
    else:
        yield Turn("assistant", _text(field, answer).strip())


def _lacks(record: Record, names: Sequence[str]) -> Unreadable:
    """Return the error to raise for a record that has none of these fields, or only null under them."""
    for name in CONVERSATIONS:
        if isinstance(text := record.value.get(name), str) and text.strip():
            return Unreadable(f"expected a list of messages under {name}, found a text: {text.strip()[:40]!r}")
    null = next((name for name in names if pick(record.value, name) is None), None)
    return Unreadable(f"the field {null} is not a string: it is null" if null else f"no field {names[0]}")


def _earlier(history: Any) -> list[list[str]]:
    """Questions with answers before the instruction, as LLaMA-Factory's Alpaca form has them."""
    if not history:
        return []
    if not isinstance(history, list) or not all(
        isinstance(exchange, list) and len(exchange) == 2 and all(isinstance(text, str) for text in exchange)
        for exchange in history
    ):
        raise Unreadable("expected history to be a list of [question, answer]")
    return [[text.strip() for text in exchange] for exchange in history]


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"the field {field} is not a string")
    return value


if __name__ == "__main__":
    from infra.alone import main

    main(instructions, InstructionsConfig)
