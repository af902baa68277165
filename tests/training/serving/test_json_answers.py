"""Answers that are JSON by construction: of a schema, of any object, and calls of functions that were demanded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from infra.servers.settings import Settings
from tests.support.chat_templates import tokenizer_in
from tests.support.open_models import tokenizer_of
from tests.training.serving.test_openai_protocol import ask, chat, chunks, running
from tests.training.serving.test_tool_calls import ASKED, HERMES, TOOLS, parrot
from training.chat.tool_calls import AnswerFormat, CallReader, ParsedToolCall
from training.generation.constraint import ConstrainedText, Constraint, Vocabulary
from training.generation.json_grammar import Unsupported, call_grammar, json_grammar
from training.serving import app

TREE = {
    "type": "object",
    "properties": {"next": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["next"],
}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "any object": None,
    "an object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "title": "Name"},
            "größe": {"type": "number"},
            "count": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"enum": ["a", "é", 3, None]}, "minItems": 1, "maxItems": 3},
            "tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
        },
        "required": ["name", "größe", "tags"],
        "additionalProperties": False,
        "$defs": {"tree": TREE},
    },
    "optional alone": {"properties": {"a": {"type": "boolean"}, "b": {"const": [1, {"c": "\n"}]}}},
    "required, undescribed": {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    "a map": {"type": "object", "additionalProperties": {"type": "number"}},
    "nothing": {"type": "object", "additionalProperties": False},
    "a tuple": {"prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "at least two": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    "none": {"type": "array", "maxItems": 0},
    "any list": {"type": "array"},
    "one of two": {
        "oneOf": [
            {"properties": {"kind": {"const": kind}, "value": {"type": kind}}, "required": ["kind", "value"]}
            for kind in ("string", "integer")
        ]
    },
    "a reference alone": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    vocabulary = Vocabulary(tokenizer_of("llama3"))
    assert not vocabulary.missing
    return vocabulary


def written(constraint: Constraint, seed: int, most: int = 300) -> str | None:
    """A text of tokens that were allowed, drawn with a liking for short values; None where it is too long."""
    draws, texts = random.Random(seed), constraint.vocabulary.texts
    answer, text = ConstrainedText(constraint), ""
    for _ in range(most):
        logits = torch.zeros(len(texts) + 3)
        answer.restrict(logits, [0])
        allowed = (logits == 0).nonzero()[:, 0].tolist()
        assert allowed and max(allowed) < len(texts)
        closing = [token for token in allowed if token == 0 or texts[token][0] in '"}],']
        token = draws.choice(closing if closing and draws.random() < 0.6 else allowed)
        if token == 0:
            return text
        text += texts[token]
        answer.take(token)
        if answer.is_complete:
            return text
        assert not answer.is_stuck
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_of_a_grammar_is_a_value_of_its_schema(name: str, vocabulary: Vocabulary) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    constraint = Constraint(json_grammar(SCHEMAS[name]), vocabulary)
    texts = [text for seed in range(25) if (text := written(constraint, seed)) is not None]
    assert len(texts) > 15 and (len(set(texts)) > 3 or name in ("nothing", "none"))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name] or {"type": "object"})


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": [true, null, -0.5e-3]}',
        '{\n  "a": {\n    "b": "x\\u00e4\\n\\" é"\n  }\n}',
        '{"a":[],"b":{}}',
        "{}",
    ],
)
def test_what_programs_write_is_in_the_grammar_whatever_its_tokens(text: str, vocabulary: Vocabulary) -> None:
    grammar = json_grammar()
    assert grammar.advance(grammar.begin, text) == {()}
    # Masks and states say the same of each token at each place.
    answer, state = ConstrainedText(constraint := Constraint(grammar, vocabulary)), grammar.begin
    for letter in text.replace("é", "e"):
        logits = torch.zeros(len(vocabulary.texts))
        answer.restrict(logits, [])
        for token, shown in enumerate(vocabulary.texts):
            assert (logits[token] == 0) == bool(shown and grammar.advance(state, shown)), shown
        state = grammar.advance(state, letter)
        answer.take(vocabulary.texts.index(letter))
    assert answer.is_complete and not constraint.allowed(state).any()


@pytest.mark.parametrize(
    "text", ['{"a": 01', '{"a": "\t', '{"a" 1', "{a", '{"a": 1,}', '{"a": "\\ud800', '{"a": NaN', "[", "{}}"]
)
def test_what_is_no_json_object_is_not(text: str) -> None:
    grammar = json_grammar()
    assert not grammar.advance(grammar.begin, text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern: this keyword"),
        ({"properties": {"a": {"type": "integer", "minimum": 1}}}, r"properties\.a\.minimum"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, r"anyOf\.1\.not"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf: alternatives that differ"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"$ref": "https://a.b/c"}, "https://a.b/c"),
        ({"enum": []}, "enum"),
        ({"enum": list(range(2000))}, "enum"),
        ({"type": "text"}, "object, array"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems"),
        ({"required": ["a"], "additionalProperties": False}, "a is not among"),
        ({"items": 3}, "items: expected a schema"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "only refers to itself"),
    ],
)  # fmt: skip
def test_a_schema_without_a_grammar_is_refused_by_its_keyword(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        json_grammar(schema)


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"]}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral"])
def test_a_call_is_written_in_a_form_that_its_reader_knows(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(family)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    form = (answer_format := AnswerFormat(tokenizer)).form
    assert bool(form.before) == (family == "qwen3") and form.arguments == (
        "parameters" if family == "llama3" else "arguments"
    )
    functions = {"weather": CITY, "time": {}}
    with pytest.raises(Unsupported, match="minimum"):
        call_grammar(functions, {"weather"}, form.arguments, form.before, form.after)
    grammar = call_grammar(functions, (), form.arguments, form.before, form.after)
    constraint, called = Constraint(grammar, Vocabulary(tokenizer, answer_format.marks)), set()
    for seed in range(12):
        if (text := written(constraint, seed)) is None:
            continue
        reader = CallReader(functions)
        (call,) = [*reader.add(text), *reader.end()]
        assert isinstance(call, ParsedToolCall)
        called.add(call.name)
        if call.name == "weather":
            assert json.loads(call.arguments)["city"] in ("Rome", "Bonn")
    assert called == set(functions)


@pytest.fixture(scope="module")
def urls(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model of random weights, one that would write a call, one that would write text, and one in channels."""
    root = tmp_path_factory.mktemp("json")
    folders = {
        "random": base_dir,
        "calls": parrot(root / "calls", "qwen3", HERMES),
        "llama3": parrot(root / "llama3", "llama3", "Sunny.", room=80),
        "channels": parrot(root / "channels", "harmony", "Sunny."),
    }
    with running(app(folders, Settings().callers(0), None)) as url:
        yield url


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "given", "schema": schema, "strict": True}}
    }


def test_an_answer_keeps_to_its_schema_whole_and_streamed(urls: str) -> None:
    """Several at once, beside one without a schema; the end of the value ends the answer."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Bonn"]}, "is_warm": {"type": "boolean"}},
        "required": ["city", "is_warm"],
    }
    body = {"model": "random", "max_tokens": 100, "temperature": 1.5, "seed": 3, "n": 4, **json_schema(schema)}
    answer = chat(urls, **body)
    values = [json.loads(choice["message"]["content"]) for choice in answer["choices"]]
    assert all(set(value) == {"city", "is_warm"} and value["city"] in ("Rome", "Bonn") for value in values)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks(urls, "/v1/chat/completions", {"messages": ASKED, **body}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert all(json.loads(text)["city"] in ("Rome", "Bonn") for text in texts.values())
    cut = chat(urls, **body | {"max_tokens": 3})["choices"]
    assert {choice["finish_reason"] for choice in cut} == {"length"}
    cut = chat(urls, model="random", response_format={"type": "json_object"}, max_tokens=8, temperature=1)
    assert cut["choices"][0]["message"]["content"].lstrip()[:1] == "{"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("model", ["calls", "llama3"])
def test_a_call_that_is_demanded_is_written(urls: str, model: str, choice: Any) -> None:
    """By a model that would have written this one, which it writes as before, and by one that would have answered."""
    city = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "weather", "parameters": city, "strict": True}}
    tools = TOOLS if model == "calls" else [weather]
    body = {
        "model": model,
        "messages": ASKED,
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": None,
    }
    (answer,) = chat(urls, **body)["choices"]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    streamed = [part["choices"][0]["delta"] for part in chunks(urls, "/v1/chat/completions", body)]
    calls = [call["function"] for part in streamed for call in part.get("tool_calls", ())]
    assert calls == [call["function"]]


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        (json_schema({"type": "string", "format": "date"}), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "model": "channels"}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "erase"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_no_answer_keeps_to_is_refused_by_name(urls: str, keys: dict[str, Any], param: str) -> None:
    answer = ask(urls, "/v1/chat/completions", {"model": "calls", "messages": ASKED, **keys})
    error = json.loads(answer.body)["error"]
    assert answer.status == 400 and error["param"] == param and param in error["message"]
