"""Responses in the forms in which vLLM, llama.cpp, Ollama, LiteLLM, OpenAI and gateways send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.endpoint import EndpointFailure
from infra.errors import StageError
from tests.corpus.pairs.test_generation import answers_of, at, built, given
from tests.support.services.endpoint import Reply, completion, endpoint

KEY = "opaque7key-of-a-provider"


def message(finish: str | None = "stop", **fields: Any) -> Reply:
    return 200, {"model": "m", "choices": [{"message": {"role": "assistant", **fields}, "finish_reason": finish}]}, {}


def events(*deltas: dict[str, Any], finish: str | None = "stop", end: str = "data: [DONE]\n\n") -> Reply:
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish:
        chunks.append({"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        chunks.append({"model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    body = ": ping\r\n\r\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
    return 200, body, {"Content-Type": "text/event-stream"}


@pytest.mark.parametrize(
    ("reply", "text", "fault"),
    [
        (message(content=[{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]), "One two.", ""),
        (message(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "Two."]), "Two.", ""),
        (message(content="Two.", reasoning_content="Hm."), "Two.", ""),
        (message("length", content=None, reasoning="Hm, hm"), "", "truncated"),
        (message("length", content="<think>Hm, hm"), "", "truncated"),
        (message("MAX_TOKENS", content="Tw"), "Tw", "truncated"),
        (message(content="Hm, hm.\n</think>\n\nTwo."), "Two.", ""),
        (message(content="<think>\n</think>\nA tag </think> ends it."), "A tag </think> ends it.", ""),
        (message(content=None, refusal="I cannot."), "", "failed"),
        (message(None, content="Two."), "Two.", ""),
        (message(content=None), "", "empty"),
        (events({"role": "assistant", "content": ""}, {"content": "Tw"}, {"content": "o."}), "Two.", ""),
        (events({"reasoning_content": "Hm."}, {"content": "Two."}, end=""), "Two.", ""),
        (events({"content": "Tw"}, finish="length"), "Tw", "truncated"),
    ],
)  # fmt: skip
def test_the_answer_is_read_in_every_form_that_servers_give_it(
    tmp_path: Path, reply: Reply, text: str, fault: str
) -> None:
    with endpoint(lambda *_: reply) as (url, calls):
        (answer,) = answers_of(url, tmp_path)
    assert isinstance(answer, EndpointAnswer) and (answer.text, answer.fault) == (text, fault)
    assert calls.bodies[0]["stream"] is False
    if reply[2]:
        assert (answer.prompt_tokens, answer.completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    "broken",
    [
        events({"content": "Tw"}, finish=None, end=""),
        (200, json.dumps(completion("Two.")[1])[:-9], {}),
        (200, json.dumps(completion("Two.")[1])[:-9], {"Content-Length": "400"}),
        (200, "<!doctype html><title>502</title>", {"Content-Type": "text/html"}),
        (200, 'data: {"error": {"message": "out of memory"}}\n\n', {}),
        message("error", content="Tw"),
        (503, "", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    ],
)  # fmt: skip
def test_half_an_answer_is_asked_for_again(tmp_path: Path, broken: Reply) -> None:
    def reply(_: dict[str, Any], number: int) -> Reply:
        return (*broken[:2], {**broken[2], "Connection": "close"}) if number == 0 else completion("Two.")

    with endpoint(reply) as (url, calls):
        (answer,) = answers_of(url, tmp_path)
    assert answer.text == "Two." and len(calls.bodies) == 2


@pytest.mark.parametrize("written", ["", "/", "/v1", "/v1/"])
def test_an_address_is_understood_with_and_without_its_version(tmp_path: Path, written: str) -> None:
    """As vLLM and Ollama do, the endpoint has nothing outside of /v1."""
    with endpoint(lambda *_: completion("Two.")) as (url, calls):
        answers = answers_of(url.removesuffix("/v1") + written, tmp_path, 3, concurrency=1)
    assert [answer.text for answer in answers] == ["Two."] * 3 and len(calls.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "code", "message_part"),
    [
        ((404, {"error": {"message": 'model "m" not found, try pulling it first'}}, {}), "endpoint_refused", "pulling"),
        ((308, "", {"Location": "https://host/v1/"}), "endpoint_refused", "it is at https://host/v1/"),
        ((429, {"error": {"message": "no credit", "code": "insufficient_quota"}}, {}), "rate_limited", "no credit"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["", "/v1"])
def test_what_no_request_could_mend_is_asked_once(
    tmp_path: Path, reply: Reply, code: str, message_part: str, path: str
) -> None:
    with endpoint(lambda *_: reply) as (url, calls), pytest.raises(StageError) as raised:
        answers_of(url.removesuffix("/v1") + path, tmp_path, 500, concurrency=2)
    (problem,) = raised.value.problems
    assert problem.code == code and message_part in problem.message and len(calls.bodies) <= 4


def test_thoughts_without_an_answer_never_become_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a key that an endpoint quotes as it refuses a document get into a file."""
    monkeypatch.setenv("PROVIDER_API_KEY", KEY)
    refused = (400, {"error": {"message": f"the prompt is too long for {KEY}"}}, {})
    replies = {"Chapter 1.": refused, "Chapter 2.": message("length", content="<think>The user wants")}

    def reply(body: dict[str, Any], _: int) -> Reply:
        text = body["messages"][-1]["content"]
        return next((scripted for part, scripted in replies.items() if part in text), completion(f"Well. {text[-60:]}"))

    config = {"keep_truncated": True, "keep_originals": False, "answer_limits": {"failed": 0.2, "truncated": 0.2}}
    with endpoint(reply) as (url, _):
        settings = {**at(url, api_key_variable="PROVIDER_API_KEY"), **config}
        figures = built(settings, given(tmp_path / "in"), tmp_path / "out").figures
    assert [figures[name] for name in ("asked", "failed", "truncated", "empty", "made")] == [12, 1, 1, 0, 10]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in written)
    assert "too long for" in (tmp_path / "out" / "aux" / "unanswered.jsonl").read_text()


def test_only_whole_answers_are_kept(tmp_path: Path) -> None:
    """A later run requests the answers that never came complete."""
    with endpoint(lambda *_: (200, "<html>", {})) as (url, _):
        assert isinstance(answers_of(url, tmp_path, attempts=2)[0], EndpointFailure)
    with endpoint(lambda *_: completion("Two.")) as (url, calls):
        assert [answers_of(url, tmp_path)[0].text for _ in range(2)] == ["Two."] * 2 and len(calls.bodies) == 1
    store = AnswerStore(tmp_path)
    assert store.get("unknown") is None
    store.close()
