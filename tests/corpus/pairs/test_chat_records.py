"""Chat records as programs write them: schemas joined with nulls, content in parts, calls of tools, trimmed ends."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from corpus.documents.quarantine import Rejected
from corpus.instructions import file_pairs
from corpus.pairs.files import Pair
from corpus.pairs.other_forms import EXCHANGES
from corpus.pairs.rankings import TIE
from corpus.preferences import file_pairs as preference_pairs
from corpus.readers.config import FileInstructions, FilePreferences

Write = Callable[..., str]
ASK, ANSWER = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}


def gemini(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


def pair_of(record: dict[str, Any], write: Write, **keys: Any) -> Pair | Rejected:
    source = FileInstructions(paths=[write("rows.jsonl", json.dumps(record) + "\n")], **keys)
    [found] = file_pairs(source, source.places(), "instructions.read.0")
    return found


def preferences_of(record: dict[str, Any], write: Write, **keys: Any) -> list[Pair | Rejected]:
    source = FilePreferences(paths=[write("rows.jsonl", json.dumps(record) + "\n")], **keys)
    return list(preference_pairs(source, source.places(), "preferences.read.0"))


def said(found: Pair | Rejected) -> list[tuple[str, str]]:
    assert isinstance(found, Pair), found
    turns = [(turn.role, turn.text) for turn in found.history]
    return [*turns, ("human", found.fields["prompt"]), ("assistant", found.fields["response"])]


PLAIN = [("human", "Ask"), ("assistant", "Answer")]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{**ASK, "from": None, "value": None}, {**ANSWER, "from": None, "value": None}]},
        {"conversations": [{"from": "human", "value": "Ask", "role": None}, {"from": "gpt", "value": "Answer"}]},
        {"instruction": None, "input": None, "output": None, "messages": [ASK, ANSWER]},
        {"prompt": "Ask", "response": None, "messages": [ASK, ANSWER]},
        {"instruction": "Ask", "output": "Answer", "messages": None, "system": None, "history": None, "tools": None},
        {"instruction": None, "output": None, "question": "Ask", "answer": "Answer"},
        {"messages": None, "conversations": [ASK, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Ask"}]}, ANSWER]},
        {"messages": [{**ASK, "name": "Anna"}, {**ANSWER, "content": ["Answer"], "tool_calls": None}]},
        {"prompt": [ASK], "completion": [ANSWER]},
        {"contents": [gemini("user", "Ask"), gemini("model", "Answer")], "generationConfig": {}},
        {"contents": json.dumps([gemini("user", "Ask"), gemini("model", "Answer")])},
        {"messages": [["Ask", "Answer"]]},
        *({"conversation": [dict(zip(names, ("Ask", "Answer"), strict=True))]} for names in EXCHANGES),
    ],
)
def test_the_pair_is_found_whatever_else_is_null(record: dict[str, Any], write: Write) -> None:
    assert said(pair_of(record, write)) == PLAIN


def test_geminis_system_instruction_opens_the_conversation(write: Write) -> None:
    contents = [gemini("user", "Ask"), gemini("model", "Answer")]
    system = {"role": "system", "parts": [{"text": "Be brief."}]}
    for name in ("systemInstruction", "system_instruction"):
        assert said(pair_of({name: system, "contents": contents}, write)) == [("system", "Be brief."), *PLAIN]
    image = {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png"}}]}
    refused = pair_of({"contents": [image, contents[1]]}, write)
    assert isinstance(refused, Rejected) and "a part of the content is not text" in refused.reason


@pytest.mark.parametrize("between", [", ", "\n "], ids=["Python", "numpy"])
def test_messages_that_pandas_wrote_into_csv_are_read(between: str, tmp_path: Path) -> None:
    ask = {**ASK, "content": "It's 3 o'clock:\n}\n {"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], [1, f"[{ask!r}{between}{ANSWER!r}]"], [2, "[so it goes"]])
    source = FileInstructions(paths=[str(path)])
    pair, other = file_pairs(source, source.places(), "instructions.read.0")
    assert said(pair) == [("human", ask["content"]), PLAIN[1]]
    assert isinstance(other, Rejected) and "a list of messages under messages, found a text" in other.reason


def tree(text: str, *replies: dict[str, Any], role: str = "assistant", **keys: Any) -> dict[str, Any]:
    return {"text": text, "role": role, "replies": list(replies), **keys}


TREE = {
    "message_tree_id": "x",
    "prompt": tree(
        "Ask",
        tree("Worse", rank=1),
        tree("Gone", rank=0, deleted=True),
        tree("Answer", tree("More?", tree("No."), role="prompter"), rank=0),
        role="prompter",
    ),
}


def test_a_tree_of_messages_is_its_best_conversation_and_a_ranking(write: Write) -> None:
    assert said(pair_of(TREE, write)) == [*PLAIN, ("human", "More?"), ("assistant", "No.")]
    [pair] = preferences_of(TREE, write)
    assert isinstance(pair, Pair) and pair.fields == {"prompt": "Ask", "chosen": "Answer", "rejected": "Worse"}


def battle(winner: str, second: str = "Other", history: Sequence[Any] = ()) -> dict[str, Any]:
    conversations = ([ASK, ANSWER], [ASK, *history, {**ANSWER, "content": second}])
    return {
        "winner": winner,
        **{f"conversation_{side}": turns for side, turns in zip("ab", conversations, strict=True)},
    }


@pytest.mark.parametrize(
    ("record", "chosen", "votes"),
    [
        (battle("model_a"), "Answer", None),
        (battle("model_b"), "Other", None),
        (battle("tie (bothbad)"), "Answer", TIE),
        (
            {
                "prompt": '["Ask"]', "response_a": '["Answer"]', "response_b": '["Other"]',
                "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0,
            },
            "Other",
            None,
        ),
    ],
)  # fmt: skip
def test_judgements_of_an_arena_are_pairs(record: dict[str, Any], chosen: str, votes: Any, write: Write) -> None:
    [pair] = preferences_of(record, write)
    assert isinstance(pair, Pair) and pair.votes == votes and pair.fields["prompt"] == "Ask"
    assert (pair.fields["chosen"], {*pair.fields.values()}) == (chosen, {"Ask", "Answer", "Other"})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (battle("model_a", "Answer"), "equal answers"),
        (battle("model_a", history=[ANSWER, ASK]), "not two answers to the same dialogue"),
        (battle("nobody"), "there is no chosen"),
    ],
)
def test_an_arenas_record_that_is_no_pair_says_why(record: dict[str, Any], reason: str, write: Write) -> None:
    [refused] = preferences_of({"chosen": None, "rejected": None, "prompt": None, **record}, write)
    assert isinstance(refused, Rejected) and reason in refused.reason


def test_two_schemas_in_one_file_are_both_read(write: Write) -> None:
    one = {"instruction": None, "output": None, "messages": [ASK, ANSWER]}
    other = {"instruction": "Ask", "output": "Other", "messages": None}
    source = FileInstructions(paths=[write("rows.jsonl", f"{json.dumps(one)}\n{json.dumps(other)}\n")])
    found = list(file_pairs(source, source.places(), "instructions.read.0"))
    assert [pair.fields["response"] for pair in found if isinstance(pair, Pair)] == ["Answer", "Other"]


OTHER_NAMES = [{"role": "USER", "message": "Ask"}, {"role": "CHATBOT", "text": "Answer"}]


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"system_prompt": "Be brief.", "question": "Ask", "response": "Answer"}, {"system_field": "system_prompt"}),
        ({"system": [{"type": "text", "text": "Be brief."}], "messages": [ASK, ANSWER]}, {}),
        ({"system": "Be brief.", "messages": OTHER_NAMES}, {}),
    ],
)  # fmt: skip
def test_a_field_of_the_system_opens_the_conversation(record: dict[str, Any], keys: Any, write: Write) -> None:
    assert said(pair_of(record, write, **keys)) == [("system", "Be brief."), *PLAIN]
    if "system" in record:
        assert said(pair_of(record, write, system_field=None)) == PLAIN


@pytest.mark.parametrize("prompt", ["Ask", [ASK]])
def test_a_field_of_the_system_precedes_the_prompt_of_a_preference(prompt: Any, write: Write) -> None:
    record = {"system": "Be brief.", "prompt": prompt, "chosen": "Answer", "rejected": "No."}
    pairs = [preferences_of(record, write, **keys) for keys in ({}, {"system_field": "system"})]
    assert [pair.fields["prompt"] for [pair] in pairs if isinstance(pair, Pair)] == ["Ask", "Be brief.\n\nAsk"]
    record = {"system": "Be brief.", "chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": "No."}]}
    [pair] = preferences_of(record, write, system_field="system")
    assert isinstance(pair, Pair) and pair.fields["prompt"] == "Be brief.\n\nAsk"


def test_the_developer_speaks_as_the_system(write: Write) -> None:
    found = pair_of({"messages": [{"role": "developer", "content": "Be brief."}, ASK, ANSWER]}, write)
    assert said(found) == [("system", "Be brief."), *PLAIN]


CALL = {"name": "look_up", "arguments": {"topic": "pears"}}
AS_TEXT = {**CALL, "arguments": '{"topic": "pears"}'}
TOOLS = [{"name": "look_up"}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize(
    ("call", "result"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {**CALL}}]},
            {"role": "tool", "content": "Green."},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": AS_TEXT}]},
            {"role": "tool", "content": [{"type": "text", "text": "Green."}]},
        ),
        ({"role": "assistant", "content": None, "function_call": AS_TEXT}, {"role": "function", "content": "Green."}),
        ({"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "Green."}),
        (
            {"from": "function_call", "value": json.dumps({"name": "look_up", "parameters": CALL["arguments"]})},
            {"from": "tool", "value": "Green."},
        ),
    ],
)  # fmt: skip
def test_calls_of_functions_are_read_in_every_form(
    call: dict[str, Any], result: dict[str, Any], tools: Any, write: Write
) -> None:
    found = pair_of({"messages": [ASK, call, result, ANSWER], "tools": tools}, write)
    assert isinstance(found, Pair) and found.with_tools is not None
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    assert found.with_tools.steps == (called, {"role": "tool", "content": "Green."})
    assert (found.fields["prompt"], found.fields["response"]) == ("Ask", "Answer")
    assert list(found.with_tools.tools) == TOOLS


def test_calls_that_follow_one_another_are_one_message(write: Write) -> None:
    call, result = {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "Green."}
    wait = {"from": "gpt", "value": "Wait."}
    found = pair_of({"conversations": [ASK, wait, call, call, result, result, ANSWER], "tools": "[]"}, write)
    assert isinstance(found, Pair) and found.with_tools is not None
    first, *results = found.with_tools.steps
    assert first["content"] == "Wait." and len(first["tool_calls"]) == len(results) == 2


def test_a_pair_beside_tools_is_a_conversation_with_them(write: Write) -> None:
    record = {"instruction": "Ask", "input": "this", "output": "Answer", "system": "Be kind.", "tools": TOOLS}
    found = pair_of(record, write)
    assert isinstance(found, Pair) and found.with_tools is not None
    assert found.with_tools.history == ({"role": "system", "content": "Be kind."},)
    assert found.fields == {"prompt": "Ask\n\nthis", "response": "Answer"} and list(found.with_tools.tools) == TOOLS
    [plain] = [pair_of({**record, "tools": empty}, write) for empty in ("[]",)]
    assert isinstance(plain, Pair) and plain.with_tools is None


def test_conversations_with_functions_are_trimmed_too(write: Write) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
    messages = [ANSWER, ASK, call, {"role": "tool", "content": "Green."}, ANSWER, ASK]
    assert isinstance(pair_of({"messages": messages}, write), Rejected)
    found = pair_of({"messages": messages}, write, trim_conversations=True)
    assert isinstance(found, Pair) and found.with_tools is not None and len(found.with_tools.messages) == 4


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of the content is not text: image_url"),
        ({"role": "assistant", "content": None}, "neither content nor a call"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "expected a call with function.name"),
        ({"role": "narrator", "content": "He left."}, "unknown role: narrator"),
    ],
)  # fmt: skip
def test_what_is_put_aside_says_why(message: dict[str, Any], reason: str, write: Write) -> None:
    found = pair_of({"messages": [ASK, message, ASK, ANSWER]}, write)
    assert isinstance(found, Rejected) and reason in found.reason


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_that_is_marked_as_none_to_learn_is_put_aside(mark: dict[str, Any], write: Write) -> None:
    pair = pair_of({"messages": [ASK, {**ANSWER, **mark}]}, write)
    assert isinstance(pair, Rejected) and "not to be learnt" in pair.reason
    context = pair_of({"messages": [ASK, {**ANSWER, **mark}, ASK, {**ANSWER, "weight": 1}]}, write)
    assert isinstance(context, Pair)


GREETING, THANKS = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Thanks"}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, GREETING, ASK, ANSWER], "the conversation starts with the assistant"),
        ([SYSTEM, ASK, ANSWER, THANKS], "the conversation does not end with the assistant"),
    ],
)
def test_ends_are_trimmed_where_that_is_asked_for(messages: list[Any], reason: str, write: Write) -> None:
    found = pair_of({"messages": messages}, write)
    assert isinstance(found, Rejected) and reason in found.reason
    assert said(pair_of({"messages": messages}, write, trim_conversations=True)) == [("system", "Be kind."), *PLAIN]


def test_a_greeting_before_a_preference_is_trimmed_too(write: Write) -> None:
    bad = {**ANSWER, "content": "Bad"}
    path = write("p.jsonl", json.dumps({"chosen": [GREETING, ASK, ANSWER], "rejected": [GREETING, ASK, bad]}))
    source = FilePreferences(paths=[path], trim_conversations=True)
    [pair] = preference_pairs(source, source.places(), "preferences.read.0")
    assert isinstance(pair, Pair) and dict(pair.fields) == {"prompt": "Ask", "chosen": "Answer", "rejected": "Bad"}


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": AS_TEXT}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "Green."}
BAD = {"role": "assistant", "content": "Bad"}


def preferred(record: dict[str, Any], write: Write) -> Pair | Rejected:
    source = FilePreferences(paths=[write("p.jsonl", json.dumps(record))])
    [found] = preference_pairs(source, source.places(), "preferences.read.0")
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASK, CALLS, RESULT], "chosen": [ANSWER], "rejected": [BAD]},
        {"messages": [ASK, CALLS, RESULT], "chosen": "Answer", "rejected": BAD},
        {"chosen": [ASK, CALLS, RESULT, ANSWER], "rejected": [ASK, CALLS, RESULT, BAD]},
        {"prompt": "Ask", "chosen": [CALLS, RESULT, ANSWER], "rejected": [CALLS, RESULT, BAD]},
        {"prompt": "Ask", "chosen": [ASK, CALLS, RESULT, ANSWER], "rejected": [ASK, CALLS, RESULT, BAD]},
    ],
)
def test_preferences_behind_results_of_functions(record: dict[str, Any], write: Write) -> None:
    found = preferred({**record, "tools": TOOLS}, write)
    assert isinstance(found, Pair), found
    line = json.loads(found.as_line())
    called = {**CALLS, "content": "", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
    assert line["prompt"] == "Ask" and line["steps"] == [called, RESULT] and line["tools"] == TOOLS
    assert (line["chosen"], line["rejected"]) == ("Answer", "Bad")
    assert line["chosen_message"] == {"role": "assistant", "content": "Answer"}
    assert "Green." in found.text and "Bad" in found.text and "tool_calls" not in line


def test_a_call_may_be_preferred(write: Write) -> None:
    found = preferred({"prompt": [ASK], "chosen": [CALLS], "rejected": [ANSWER], "tools": TOOLS}, write)
    assert isinstance(found, Pair), found
    line = json.loads(found.as_line())
    assert line["chosen_message"]["tool_calls"][0]["function"] == CALL and "steps" not in line
    assert json.loads(line["chosen"]) == CALL and line["rejected"] == "Answer"
    other = preferred({"prompt": [ASK], "chosen": [ANSWER], "rejected": [CALLS], "tools": TOOLS}, write)
    assert isinstance(other, Pair) and other.id != found.id


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            {"prompt": [ASK], "chosen": [CALLS, RESULT, ANSWER], "rejected": [ANSWER]},
            "only the last message of the assistant may differ",
        ),
        ({"prompt": [ASK], "chosen": [CALLS], "rejected": [CALLS]}, "equal answers"),
        ({"prompt": [ASK, CALLS], "chosen": [ANSWER], "rejected": [BAD]}, "results of functions after their calls"),
    ],
)
def test_preferences_with_functions_that_are_no_pair_are_put_aside(
    record: dict[str, Any], why: str, write: Write
) -> None:
    found = preferred(record, write)
    assert isinstance(found, Rejected) and why in found.reason


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": None, "messages": [ASK], "chosen": "Answer", "rejected": "Bad"},
        {"prompt": "Ask", "chosen": None, "rejected": None, "answers": ["Answer", "Bad"]},
    ],
)
def test_preferences_with_nulls(record: dict[str, Any], write: Write) -> None:
    source = FilePreferences(paths=[write("p.jsonl", json.dumps(record))])
    [pair] = preference_pairs(source, source.places(), "preferences.read.0")
    assert isinstance(pair, Pair) and dict(pair.fields) == {"prompt": "Ask", "chosen": "Answer", "rejected": "Bad"}
