"""Calls of functions that a model writes, as OpenAI's `tool_calls`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from infra.servers.settings import Settings
from tests.support.chat_templates import tokenizer_in
from tests.training.serving.test_openai_protocol import ask, chat, chunks, running
from training.chat.channels import Reasoning
from training.chat.tool_calls import CallReader, ChannelCallReader, ParsedToolCall
from training.generation.session import answer, chat_prompt
from training.serving import app

WEATHER = ParsedToolCall("weather", '{"city": "Rome"}')
TIME = ParsedToolCall("time", "{}")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CASES: dict[str, tuple[str, list[str | ParsedToolCall]]] = {
    "Hermes": (f"Let me see.\n{HERMES}", ["Let me see.", WEATHER]),
    "two": (f'{HERMES}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>', [WEATHER, TIME]),
    "without its end": (HERMES.removesuffix("</tool_call>"), [WEATHER]),
    "text behind": (f"{HERMES} Done.", [WEATHER, " Done."]),
    "Llama 3": ('{"name": "weather", "parameters": {"city": "Rome"}}', [WEATHER]),
    "python tag": (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time"}', [WEATHER, TIME],
    ),
    "Mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]', [WEATHER, TIME]),
    "Mistral's newer": ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time{}', [WEATHER, TIME]),
    "arguments as text": ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', [WEATHER]),
    "braces in a text": (
        '{"name": "weather", "arguments": {"city": "a } \\" b"}}', [ParsedToolCall("weather", '{"city": "a } \\" b"}')],
    ),
    "another function": ('{"name": "erase", "parameters": {}}', ['{"name": "erase", "parameters": {}}']),
    "another in Hermes": ('<tool_call>{"name": "erase"}</tool_call>', ['<tool_call>{"name": "erase"}</tool_call>']),
    "JSON that is no call": ('{"a": [1, 2]}', ['{"a": [1, 2]}']),
    "cut short": ('{"name": "weather", "param', ['{"name": "weather", "param']),
    "deep": ("{" * 5000, ["{" * 5000]),
    "plain": ("  If a < b, [T] is <tool> {x}.  ", ["  If a < b, [T] is <tool> {x}.  "]),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_are_read_however_the_text_comes(name: str, size: int) -> None:
    text, expected = CASES[name]
    reader = CallReader({"weather", "time"})
    found: list[str | ParsedToolCall] = []
    for start in range(0, len(text), size):
        found += reader.add(text[start : start + size])
    found += reader.end()
    joined: list[str | ParsedToolCall] = []
    for part in found:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    assert joined == expected


THOUGHT = "<|channel|>analysis<|message|>Rome? <b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Sunny."
CALLING = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
IN_CHANNELS: dict[str, tuple[str, list[str | Reasoning | ParsedToolCall]]] = {
    "thought and answer": (f"{THOUGHT}{FINAL}", [Reasoning("Rome? <b>."), "Sunny."]),
    "answer alone": ("<|channel|>final<|message|>Sunny.", ["Sunny."]),
    "thought alone": ("<|channel|>analysis<|message|>Rome", [Reasoning("Rome")]),
    "preamble": (
        f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALLING}", ["Let me see.", WEATHER],
    ),
    "call": (f"{THOUGHT}<|start|>assistant{CALLING}<|call|>", [Reasoning("Rome? <b>."), WEATHER]),
    "recipient with the role": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', [WEATHER],
    ),
    "two": (f'{CALLING}<|call|><|start|>assistant to=functions.time<|message|>{{}}', [WEATHER, TIME]),
    "another function": (
        "<|channel|>commentary to=functions.erase<|message|>{}<|end|>" + FINAL, ["to=functions.erase {}Sunny."],
    ),
    "a call without JSON": (CALLING.replace("}", "") , ['to=functions.weather {"city": "Rome"']),
    "cut in a header": (f"{THOUGHT}<|start|>assistant<|channel|>fin", [Reasoning("Rome? <b>.")]),
    "no channels": ("to be <|or not.", ["to be <|or not."]),
    "white space": (" \n", [" \n"]),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_CHANNELS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_channels_are_read_however_the_text_comes(name: str, size: int) -> None:
    text, expected = IN_CHANNELS[name]
    reader = ChannelCallReader({"weather", "time"})
    joined: list[str | Reasoning | ParsedToolCall] = []
    parts = [part for start in range(0, len(text), size) for part in reader.add(text[start : start + size])]
    for part in [*parts, *reader.end()]:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    assert joined == expected


def test_text_is_not_held_back_longer_than_it_may_become_a_call() -> None:
    reader = CallReader({"weather"})
    assert "".join(map(str, reader.add("The answer is a <"))) == "The answer is a"
    assert "".join(map(str, reader.add("b"))) == " <b"
    in_channels = ChannelCallReader(())
    assert list(in_channels.add("<|channel|>analysis<|message|>Hm <|")) == [Reasoning("Hm ")]
    assert list(in_channels.add("a")) == [Reasoning("<|a")]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
ASKED = [{"role": "user", "content": "the weather?"}]


def parrot(folder: Path, family: str, answer: str, tools: list[dict[str, Any]] = TOOLS, room: int = 0) -> Path:
    """A GPT-2 that writes one answer to the question above: each place has a token that it likes best.

    room: places after the answer.
    """
    tokenizer = tokenizer_in(family)
    tokenizer.save_pretrained(folder)
    prompt, _ = chat_prompt(AutoTokenizer.from_pretrained(folder), ASKED, tools)
    ids = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    places = len(prompt) + len(ids)
    width = places + places % 2
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=places + room, n_embd=width, n_layer=1, n_head=2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.wpe.weight[:places].copy_(torch.eye(places, width))
        model.transformer.ln_f.weight.fill_(1)
        for place, token in enumerate(ids, len(prompt) - 1):
            model.lm_head.weight[token, place] = 1
    model.save_pretrained(folder)
    return folder


WRITTEN = {
    "qwen3": f"Let me see.\n{HERMES}",
    "llama3": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS]weather{"city": "Rome"}',
    "harmony": f"{THOUGHT}<|start|>assistant{CALLING.replace('<|constrain|>', '')}<|call|>",
}


@pytest.fixture(scope="module")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("parrots")
    folders = {family: parrot(root / family, family, answer) for family, answer in WRITTEN.items()}
    folders["reasons"] = parrot(root / "reasons", "harmony", f"{THOUGHT}{FINAL}", [], 200)
    with running(app(folders, Settings().callers(0), None)) as url:
        yield url


@pytest.mark.parametrize("family", WRITTEN)
def test_what_a_model_writes_becomes_calls_whole_and_streamed(parrots: str, family: str) -> None:
    body: dict[str, Any] = {"model": family, "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": None}
    (choice,) = chat(parrots, **body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == ("Let me see." if family == "qwen3" else None)
    assert message.get("reasoning_content") == ("Rome? <b>." if family == "harmony" else None)
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and len(call["id"]) == 9
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    parts = [one["choices"][0] for one in chunks(parrots, "/v1/chat/completions", body)]
    called = [part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"]]
    assert [[(one["index"], one["function"]) for one in calls] for calls in called] == [[(0, call["function"])]]
    assert "".join(part["delta"].get("content") or "" for part in parts) == (message["content"] or "")
    thoughts = "".join(part["delta"].get("reasoning_content") or "" for part in parts)
    assert thoughts == (message.get("reasoning_content") or "")
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]
    # A request that shows no functions gets what is written, as text.
    (plain,) = chat(parrots, **body | {"tool_choice": "none"})["choices"]
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] in ("stop", "length")
    (cut,) = chat(parrots, **body | {"max_tokens": 3})["choices"]
    assert cut["finish_reason"] == "length" and "tool_calls" not in cut["message"]
    # And what the client sends back is read by the template.
    sent_back = [*ASKED, message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    answer = ask(parrots, "/v1/chat/completions", {**body, "messages": sent_back})
    assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "context_length_exceeded"


def test_reasoning_is_apart_from_the_answer(parrots: str, tmp_path: Path) -> None:
    """The text of all channels came as one: `analysisRome? <b>.assistantfinalSunny.`"""
    body: dict[str, Any] = {"model": "reasons", "messages": ASKED, "temperature": 0, "max_tokens": 200}
    (choice,) = chat(parrots, **body)["choices"]
    message = {"role": "assistant", "content": "Sunny.", "refusal": None, "reasoning_content": "Rome? <b>."}
    assert (choice["message"], choice["finish_reason"]) == (message, "stop")
    parts = [one["choices"][0]["delta"] for one in chunks(parrots, "/v1/chat/completions", body)]
    assert not any(len(part) > 1 for part in parts[1:])
    for key in ("content", "reasoning_content"):
        assert "".join(part.get(key) or "" for part in parts) == message[key]
    (cut,) = chat(parrots, **body | {"max_tokens": 14})["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length") and cut["message"]["reasoning_content"]
    # What a client sends back, and how much the model reasons.
    assert chat(parrots, **body | {"messages": [*ASKED, message, *ASKED]})["choices"]
    low = chat(parrots, **body | {"reasoning_effort": "low"})["usage"]["prompt_tokens"]
    assert (
        low == chat(parrots, **body | {"chat_template_kwargs": {"reasoning_effort": "low"}})["usage"]["prompt_tokens"]
    )
    assert low != chat(parrots, **body)["usage"]["prompt_tokens"]

    folder = parrot(tmp_path / "reasons", "harmony", f"{THOUGHT}{FINAL}", [], 200)
    pieces = list(answer(folder, ASKED, 100, 0.0))
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Sunny."
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "Rome? <b>."


def test_reasoning_before_a_call_is_sent_back(tmp_path: Path) -> None:
    """gpt-oss's template refuses a message that has both reasoning and text before a call."""
    from training.serving.requests import ChatRequest

    tokenizer = tokenizer_in("harmony")
    tokenizer.save_pretrained(tmp_path)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Rome?", "tool_calls": [call]}
    request = ChatRequest.model_validate({"messages": [*ASKED, said, {"role": "tool", "content": "sunny"}]})
    (prompt,) = request.prompts(AutoTokenizer.from_pretrained(tmp_path))
    assert "analysis<|message|>Rome?\n\nLet me see.<|end|>" in tokenizer.decode(prompt.ids)


def test_arguments_that_a_client_sends_back_are_written_once(tmp_path: Path) -> None:
    """As an object: templates that write JSON put a text in quotes."""
    from training.serving.requests import ChatRequest

    tokenizer = tokenizer_in("llama3")
    tokenizer.save_pretrained(tmp_path)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    sent = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    request = ChatRequest.model_validate({"messages": sent, "tools": TOOLS})
    (prompt,) = request.prompts(AutoTokenizer.from_pretrained(tmp_path))
    assert '"parameters": {"city": "Rome"}}' in tokenizer.decode(prompt.ids)


def test_calls_by_the_openai_client(parrots: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{parrots}/v1", api_key="none")
    asked = {"model": "qwen3", "messages": ASKED, "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Rome"}
