"""The forms that instruction files have, seen from their records; what is no conversation is put aside with its reason;
caps and weights of sources."""

from __future__ import annotations

import json

import pytest

from corpus.config import InstructionsConfig, ValidateConfig
from corpus.documents.quarantine import Rejected
from corpus.instructions import file_pairs, instructions
from corpus.readers.config import FileInstructions
from corpus.validate import validate


def _gpt(*texts):
    """ShareGPT: the human and the model in turns."""
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]


def _chat(*texts):
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def _read(record, write, **keys):
    source = FileInstructions(paths=[write("rows.jsonl", json.dumps(record) + "\n")], **keys)
    (found,) = file_pairs(source, source.places(), "instructions.read.0")
    return found


EARLIER = [("human", "Hi."), ("assistant", "Hello.")]
BRIEF = ("system", "Be brief.")


@pytest.mark.parametrize(
    ("record", "history"),
    [
        ({"instruction": "Why?", "input": "", "output": "So."}, []),
        ({"instruction": "Why?", "output": "So.", "history": [["Hi.", "Hello."]]}, EARLIER),
        ({"instruction": "Why?", "output": "So.", "system": "Be brief."}, [BRIEF]),
        ({"prompt": "Why?", "completion": "So."}, []),
        ({"inputs": "Why?", "targets": "So."}, []),
        ({"prompt": _chat("Why?"), "completion": [{"role": "assistant", "content": "So."}]}, []),
        ({"conversations": _gpt("Why?", "So."), "system": ""}, []),
        ({"conversations": _gpt("Hi.", "Hello.", "Why?", "So."), "system": "Be brief."}, [BRIEF, *EARLIER]),
        ({"messages": [{"role": "system", "content": "Be brief."}, *_chat("Why?", "So.")]}, [BRIEF]),
        # UltraChat's prompt is the first turn again.
        ({"prompt": "Hi.", "messages": _chat("Hi.", "Hello.", "Why?", "So.")}, EARLIER),
    ],
    ids="alpaca history system completion flan trl sharegpt turns messages ultrachat".split(),  # noqa: SIM905
)
def test_the_form_of_instructions_is_seen_from_their_records(record, history, write):
    pair = _read(record, write)
    assert dict(pair.fields) == {"prompt": "Why?", "response": "So."}
    assert [tuple(turn) for turn in pair.history] == history
    assert pair.group == ("Hi." if EARLIER[0] in history else "Why?")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"conversations": _gpt("Hi.", "Hello.")[::-1]}, "the conversation starts with the assistant"),
        ({"conversations": _gpt("Hi.", "Hello.", "Why?")}, "no answer: the conversation does not end"),
        ({"conversations": [{"from": "human", "value": "Hi."}, {"from": "narrator", "value": "x"}]}, "unknown role"),
        ({"conversations": _gpt("Hi.", "")}, "no answer: an answer is empty"),
        ({"conversations": [_gpt("Hi.")[0], *_gpt("Hi.", "Hello.")]}, "the human speaks twice in a row"),
        ({"messages": [*_chat("Hi.", "Hello."), {"role": "system", "content": "x"}]}, "the system speaks after"),
        ({"conversations": []}, "the dialogue is empty"),
        ({"instruction": "Why?", "output": " "}, "no answer"),
        ({"instruction": "Why?", "output": None}, "output is not a string"),
        ({"instruction": "", "output": "So."}, "no prompt"),
    ],
)
def test_what_is_no_conversation_is_put_aside_with_its_reason(record, reason, write):
    found = _read(record, write)
    assert isinstance(found, Rejected) and reason in found.reason


def _called(*more, asked="Why?", tools=True, calls=({"function": {"name": "add", "arguments": '{"a": 2}'}},)):
    """OpenAI's form, as a table has it: all keys in all messages."""
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": f"{asked} "},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        *more,
    ]
    rows = [{"tool_calls": None, "tool_call_id": None, **one} for one in said]
    return {
        "messages": rows,
        "tools": [{"type": "function", "function": {"name": "add", "strict": None}}] if tools else None,
    }


RESULT = {"role": "tool", "content": " 5\n", "tool_call_id": "c1"}
ANSWER = {"role": "assistant", "content": "Five."}


def test_calls_of_functions_are_kept_with_their_results(build, write, lines_of):
    """In the line, and valid: the answer may be calls alone."""
    records = [one for n in range(30) for one in (
        _called(RESULT, {**RESULT, "content": "6"}, ANSWER, asked=f"Why {n}?"), _called(tools=False, asked=f"How {n}?")
    )]  # fmt: skip
    path = write("rows.jsonl", "".join(json.dumps(one) + "\n" for one in records))
    read = [{"kind": "files", "paths": [path]}]
    out = build(instructions, InstructionsConfig(read=read, heldout_share=0.5, near_prompts=None))
    build(validate, ValidateConfig(), data=out)
    lines = [row for side in ("train", "heldout") for row in lines_of(out / f"{side}.jsonl")]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    system = [{"role": "system", "content": "Be brief."}]
    by_prompt = {row["prompt"]: {k: row[k] for k in row.keys() - {"id", "source"}} for row in lines}
    assert len(by_prompt) == 60
    assert by_prompt["Why 1?"] == {
        "history": system, "prompt": "Why 1?", "response": "Five.",
        "steps": [{"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, {**RESULT, "content": "6"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }  # fmt: skip
    assert by_prompt["How 1?"] == {"history": system, "prompt": "How 1?", "response": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (_called(ANSWER), "the results of functions after their calls"),
        (_called(RESULT), "does not end with the assistant"),
        (_called(RESULT, {"role": "user", "content": "And?"}, RESULT, ANSWER), "the results of functions after"),
        (_called(RESULT, {"role": "assistant", "content": " "}), "an answer is empty"),
        (_called(RESULT, {"role": "judge", "content": "x"}), "unknown role: judge"),
        (_called(RESULT, ANSWER, calls=({"function": {"name": "add", "arguments": "{"}},)), "arguments: expected"),
        (_called(RESULT, ANSWER, calls=({"arguments": {}},)), "expected a call with function.name"),
        ({**_called(RESULT, ANSWER), "tools": "add"}, "tools: expected JSON"),
        ({**_called(RESULT, ANSWER), "tools": ["add"]}, "expected tools to be a list of descriptions"),
    ],
)
def test_conversations_that_no_template_can_show_are_put_aside(record, reason, write):
    found = _read(record, write)
    assert isinstance(found, Rejected) and reason in found.reason


def test_a_source_may_be_capped_and_weighted(build, write, lines_of):
    """The cap is of training pairs, the same whatever the order of the file; the held-out side stays whole."""
    rows = [{"conversations": _gpt(f"Say {n}.", f"{n}", "And?", "No.")} for n in range(200)]
    found = []
    for order in (rows, rows[::-1]):
        path = write("many.jsonl", "".join(json.dumps(row) + "\n" for row in order))
        few = write("few.json", json.dumps([{"instruction": f"Name {n}.", "output": "So."} for n in range(20)]))
        read = [
            {"kind": "files", "paths": [path], "max_examples": 30, "weight": 0.5},
            {"kind": "files", "paths": [few]},
        ]
        out = build(instructions, InstructionsConfig(read=read, heldout_share=0.2))
        if not found:
            build(validate, ValidateConfig(), data=out)
        train, heldout = (lines_of(out / f"{side}.jsonl") for side in ("train", "heldout"))
        capped = [row for row in train if row["source"] == "many.jsonl"]
        assert len(capped) == 30 and {row["weight"] for row in capped} == {0.5}
        assert len([row for row in heldout if row["source"] == "many.jsonl"]) > 30
        assert all("weight" not in row and "history" not in row for row in train if row["source"] == "few.json")
        assert capped[0]["history"][1]["role"] == "assistant"
        found.append({row["id"] for row in capped})
    assert found[0] == found[1]


def test_an_instruction_file_in_alpaca_s_form(build, real_data, lines_of):
    out = build(
        instructions,
        InstructionsConfig(read=[{"kind": "files", "paths": [f"{real_data('llama_factory_sft')}/*.json"]}]),
    )
    [counts] = json.loads((out / "aux" / "counts.json").read_text())["sources"]
    kept = sum(len(lines_of(out / f"{side}.jsonl")) for side in ("train", "heldout"))
    assert kept == counts["read"] - counts["duplicates"] and counts["quarantined"] <= 10
    assert kept > 1000
