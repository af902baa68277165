"""OpenAI's protocol over plain HTTP, held to the shapes of its API reference, and by its own client."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.generation.decoding import CACHE_BYTES, tokens_in_memory
from evaluation.generation.token_choice import ChosenAnswer, SamplingOptions, TokenBias, choose_tokens
from infra.errors import ConfigError, StageError
from infra.servers.api_keys import RateLimit, api_keys
from infra.servers.asgi_server import Server
from infra.servers.credentials import Credentials
from infra.servers.ports import any_free_port
from infra.servers.settings import Settings
from tests.support.programs.processes import wait_until
from tests.support.services.raw_http import Response
from tests.support.services.raw_http import ask as raw_ask
from training.generation.answer_text import AnswerText
from training.generation.session import chat_prompt, loaded
from training.serving import app
from training.serving.answer_queue import AnswerQueue

KEYS = [Credentials("ada", "key of ada 12345"), Credentials("ben", "key of ben 12345")]
QUESTION = [{"role": "user", "content": "What is a list?"}]
CHAT = {"messages": QUESTION, "max_tokens": 6}


@pytest.fixture(scope="module")
def served(base_dir: Path) -> Iterator[str]:
    with running(app({"sft/base": base_dir}, Settings().callers(0), None)) as url:
        yield url


class running:  # noqa: N801
    """A server of an app in this process, as a context."""

    def __init__(self, served: Any) -> None:
        self._port = any_free_port()
        self._server = Server(served, "127.0.0.1", self._port)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        wait_until(lambda: self._server.started)
        return f"http://127.0.0.1:{self._port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def ask(url: str, path: str, body: dict[str, Any] | None = None, method: str | None = None, key: str = "") -> Response:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    return raw_ask(
        url, method or ("POST" if body is not None else "GET"), path, headers, json.dumps(body or {}).encode()
    )


def chat(url: str, **keys: Any) -> dict[str, Any]:
    answer = ask(url, "/v1/chat/completions", {**CHAT, **keys})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def complete(url: str, **keys: Any) -> dict[str, Any]:
    answer = ask(url, "/v1/completions", {"prompt": "Once", "max_tokens": 6, **keys})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def chunks(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = [
        line.removeprefix("data: ") for line in ask(url, path, {**body, "stream": True}).body.decode().split("\n\n")
    ]
    assert events[-2:] == ["[DONE]", ""]
    return [json.loads(event) for event in events[:-2]]


def text_of(found: dict[str, Any]) -> str:
    (choice,) = found["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_answers_differ_but_under_a_seed(served: str) -> None:
    """Without a seed every answer was the same."""
    assert len({text_of(chat(served, temperature=1)) for _ in range(4)}) > 1
    assert len({text_of(chat(served, temperature=1, seed=5)) for _ in range(3)}) == 1
    several = chat(served, temperature=1, seed=5, n=3)
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == text_of(chat(served, temperature=1, seed=5))
    usage, one = several["usage"], chat(served)["usage"]
    assert usage["prompt_tokens"] == one["prompt_tokens"]  # read once
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "stop": None, "n": 1, "top_p": 1, "user": "u",
    "logprobs": False, "top_logprobs": None, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
    "functions": None, "parallel_tool_calls": True, "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
    "modalities": ["text"], "audio": None, "prediction": None, "reasoning_effort": None, "stream": None,
    "stream_options": None, "seed": None, "max_completion_tokens": 6, "safety_identifier": "u", "verbosity": None,
}  # fmt: skip


def test_an_answer_is_the_same_beside_fifteen_others(served: str) -> None:
    """Token for token, with log-probabilities to the last bit."""
    seeded = [
        {"seed": 3, "temperature": 0.9, "n": 3},
        {"seed": 4, "temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": "e"},
        {"seed": 5, "response_format": {"type": "json_object"}},
    ]
    shared = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12}
    expected = [chat(served, **shared, **keys)["choices"] for keys in seeded]
    others = [{"messages": [{"role": "user", "content": "a" * number}], "max_tokens": 30} for number in range(1, 13)]
    with ThreadPoolExecutor(16) as threads:
        running = [threads.submit(chat, served, **other) for other in others]
        together = list(threads.map(lambda keys: chat(served, **shared, **keys)["choices"], seeded))
        assert all(answer.result() for answer in running)
    assert together == expected


def test_a_cache_bounds_the_context(base_dir: Path) -> None:
    lm = loaded(base_dir)
    of_token = CACHE_BYTES // tokens_in_memory(lm.model)
    queue = AnswerQueue(cache_bytes=20 * of_token)
    with running(app({"m": base_dir}, Settings().callers(0), None, queue)) as url:
        refused = ask(url, "/v1/completions", {"prompt": [5] * 20, "max_tokens": 1})
        assert refused.status == 400
        error = json.loads(refused.body)["error"]
        assert error["code"] == "context_length_exceeded" and "20 tokens" in error["message"]
        answer = complete(url, prompt=[5] * 12, max_tokens=50, logit_bias={"0": -100})
        assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length"


def test_values_that_change_nothing_are_taken(served: str) -> None:
    assert text_of(chat(served, temperature=0, **NEUTRAL)) == text_of(chat(served, temperature=0))
    nulls = chat(served, **dict.fromkeys([*NEUTRAL, "temperature", "model"], None))
    assert nulls["choices"][0]["finish_reason"] in ("stop", "length")
    neutral = {"suffix": None, "best_of": 1, "echo": False, "logprobs": None, "logit_bias": None}
    assert text_of(complete(served, temperature=0, **neutral)) == text_of(complete(served, temperature=0))


@pytest.mark.parametrize(
    ("keys", "param", "code"),
    [
        ({"min_p": 0.1}, "min_p", "unknown_parameter"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "invalid_value"),
        ({"store": True}, "store", "invalid_value"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stop": [""]}, "stop.0", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_token_id"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no_tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", None),
        ({"messages": [{"role": "user"}]}, "messages.0", None),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, "messages", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_what_cannot_be_acted_on_is_refused_by_name(
    served: str, keys: dict[str, Any], param: str, code: str | None
) -> None:
    answer = ask(served, "/v1/chat/completions", {**CHAT, **keys})
    error = json.loads(answer.body)["error"]
    assert answer.status == 400 and error["param"] == param and param.partition(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error" and (code is None or error["code"] == code)


def test_a_prompt_that_fills_the_context_is_refused_and_one_token_less_is_answered(served: str) -> None:
    """It was cut, with status 200."""
    ids = [5] * 128
    answer = ask(served, "/v1/completions", {"prompt": ids})
    assert answer.status == 400 and "maximum context length is 128 tokens" in answer.body.decode()
    found = complete(served, prompt=ids[1:], max_tokens=1000)
    assert found["usage"]["completion_tokens"] <= 1 and found["choices"][0]["finish_reason"] in ("stop", "length")
    assert complete(served, prompt=ids, max_tokens=0, echo=True)["usage"]["completion_tokens"] == 0


def test_prompts_are_read_beside_each_other(base_dir: Path, tmp_path: Path) -> None:
    """A chat by a template of the model's own and a completion encode with different settings: Rust's tokenizers raise
    "Already borrowed" where one thread changes what another reads with."""
    folder = tmp_path / "own"
    shutil.copytree(base_dir, folder)
    own = (
        "{% for message in messages %}{{ '<|user|>' + message['role'] + ': ' + message['content'] + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(own)
    text = "a list of words " * 500
    bodies = [
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("completions", {"prompt": text}),
    ]
    with running(app({"m": folder}, Settings().callers(0), None)) as url, ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, url, f"/v1/{path}", body) for _ in range(12) for path, body in bodies]
        codes = [json.loads(one.result().body)["error"]["code"] for one in asked]
    assert codes == ["context_length_exceeded"] * 24


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405),
     ("GET", "/v1/models/gpt-4", 404), ("POST", "/v1/chat/completions", 400)],
)  # fmt: skip
def test_every_error_is_json(served: str, method: str, path: str, status: int) -> None:
    answer = ask(served, path, None, method)
    error = json.loads(answer.body)["error"]
    assert answer.status == status and answer.headers["content-type"] == "application/json"
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


def test_a_model_is_retrieved_by_its_name(served: str) -> None:
    for path in ("/v1/models/sft/base", "/v1/models/sft%2Fbase"):
        assert json.loads(ask(served, path).body)["id"] == "sft/base"
    assert json.loads(ask(served, "/health").body) == {"status": "ok"}


def test_prompts_in_all_four_forms(served: str, base_dir: Path) -> None:
    ids = loaded(base_dir).tokenizer("Once", add_special_tokens=False).input_ids
    together = complete(served, prompt=["Once", "Sort"], temperature=0, n=2)
    alone = [text_of(complete(served, prompt=text, temperature=0)) for text in ("Once", "Sort")]
    assert [choice["text"] for choice in together["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    by_ids = complete(served, prompt=[[0, *ids], [5, 6]], temperature=0)
    assert by_ids["choices"][0]["text"] == alone[0]
    assert by_ids["usage"]["prompt_tokens"] == 1 + len(ids) + 2


def test_roles_and_parts_are_what_the_template_makes_of_them(served: str) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "ada"}]
    found, same = (chat(served, messages=messages, temperature=0) for messages in (system, developer))
    assert text_of(found) == text_of(same) and found["usage"] == same["usage"]
    assert found["usage"]["prompt_tokens"] > chat(served)["usage"]["prompt_tokens"]
    # What a client sends back of an answer.
    sent_back = {**chat(served)["choices"][0]["message"], "annotations": [], "audio": None, "tool_calls": None}
    assert chat(served, messages=[*QUESTION, sent_back, *QUESTION])["choices"]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_ends_before_a_stop_string(served: str, streamed: bool) -> None:
    whole = text_of(complete(served, temperature=0, max_tokens=24))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]  # over the bounds of tokens, which are a character or two
    wanted = whole[: whole.index(stop)]
    for given in (stop, ["never", stop]):
        body = {"prompt": "Once", "temperature": 0, "max_tokens": 24, "stop": given}
        if streamed:
            choices = [chunk["choices"][0] for chunk in chunks(served, "/v1/completions", body)]
            text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        else:
            found = complete(served, **body)
            text, reason = text_of(found), found["choices"][0]["finish_reason"]
            assert found["usage"]["completion_tokens"] < 24
        assert (text, reason) == (wanted, "stop")


def test_text_that_only_begins_a_stop_string_is_not_lost(tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = AnswerText(tokenizer, ["abcd", "bx"])
    ids = tokenizer("zabcabx", add_special_tokens=False).input_ids
    assert "".join(map(text.add, ids)) + text.end() == "zabca" and text.is_stopped
    text = AnswerText(tokenizer, ["abcd"])
    assert "".join(map(text.add, tokenizer("zabc", add_special_tokens=False).input_ids)) + text.end() == "zabc"


def test_a_stream_says_its_usage_where_asked(served: str) -> None:
    body = {**CHAT, "temperature": 0}
    found = chunks(served, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert found[-1]["choices"] == [] and found[-1]["usage"] == chat(served, temperature=0)["usage"]
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert all("usage" not in chunk for chunk in chunks(served, "/v1/chat/completions", body))
    by_choice: dict[int, str] = {}
    for chunk in chunks(served, "/v1/chat/completions", {**body, "n": 2, "temperature": 1, "seed": 3}):
        for choice in chunk["choices"]:
            by_choice[choice["index"]] = by_choice.get(choice["index"], "") + choice["delta"].get("content", "")
    wanted = chat(served, n=2, temperature=1, seed=3)["choices"]
    assert by_choice == {choice["index"]: choice["message"]["content"] for choice in wanted}


def test_log_probabilities_are_the_models(served: str, base_dir: Path) -> None:
    model, tokenizer = (lm := loaded(base_dir)).model, lm.tokenizer
    found = complete(served, prompt="Once", temperature=0, max_tokens=4, logprobs=2, echo=True)
    (choice,) = found["choices"]
    given = choice["logprobs"]
    prompt = tokenizer("Once", add_special_tokens=False).input_ids
    assert (
        choice["text"].startswith("Once") and len(given["tokens"]) == len(prompt) + found["usage"]["completion_tokens"]
    )
    assert "".join(given["tokens"][: len(prompt)]) == "Once" and given["text_offset"][len(prompt)] == len("Once")
    with torch.no_grad():
        ids = torch.tensor([[0, *prompt]])
        logprobs = model(ids).logits[0].log_softmax(-1)
    wanted = [float(logprobs[place, token]) for place, token in enumerate(prompt)]
    assert given["token_logprobs"][: len(prompt)] == pytest.approx(wanted, abs=2e-2)
    assert all(len(top) in (2, 3) for top in given["top_logprobs"])
    content = chat(served, temperature=0, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)  # the likeliest
    streamed = [
        chunk["choices"][0]["logprobs"]
        for chunk in chunks(served, "/v1/chat/completions", {**CHAT, "temperature": 0, "logprobs": True})
    ]
    assert [entry["token"] for part in streamed if part for entry in part["content"]] == [
        entry["token"] for entry in content
    ]


def test_top_p_draws_from_the_likeliest_alone() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def drawn(top_p: float) -> set[int]:
        return {
            choose_tokens(logits, [ChosenAnswer([0], SamplingOptions(1, top_p=top_p, seed=n))])[0].id
            for n in range(200)
        }

    assert [drawn(top_p) for top_p in (0, 0.5, 0.6, 0.9, 1)] == [{0}, {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_penalties_and_bias_change_the_choice_of_their_answer_alone() -> None:
    logits = torch.tensor([[1.0, 0.8, 0.0]]).repeat(4, 1)
    options = [
        SamplingOptions(9, temperature=0),
        SamplingOptions(9, temperature=0, presence_penalty=0.5),
        SamplingOptions(9, temperature=0, frequency_penalty=0.15),
        SamplingOptions(9, temperature=0, bias=TokenBias({(2,): 100.0})),
    ]
    answers = [ChosenAnswer([3], one) for one in options]
    for _ in range(4):
        for answer, token in zip(answers, choose_tokens(logits, answers), strict=True):
            answer.take(token)
    assert [answer.new for answer in answers] == [[0] * 4, [0, 1, 0, 0], [0, 0, 1, 0], [2] * 4]


def test_tools_reach_a_template_that_shows_them(tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tools = [{"type": "function", "function": {"name": "add_two", "parameters": {}}}]
    with pytest.raises(StageError, match="does not support tools"):
        chat_prompt(tokenizer, QUESTION, tools)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages %}"
        "{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
        "({{ call.function.name }} {{ call.id }}){% endfor %};{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add_two", "arguments": "{}"}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"}]  # fmt: skip
    ids, _ = chat_prompt(tokenizer, messages, tools)
    assert tokenizer.decode(ids) == "[add_two]user: What is a list?;assistant: (add_two c1);tool: 4;"


def test_each_client_has_a_key_and_an_allowance(base_dir: Path) -> None:
    limit = RateLimit(2, lambda: 0.0)
    body = {"prompt": "a", "max_tokens": 1}
    with running(app({"m": base_dir}, Settings().callers(0), None, keys=KEYS, rate_limit=limit)) as url:
        for key in ("", "key of eve 12345"):
            answer = ask(url, "/v1/completions", body, key=key)
            assert answer.status == 401 and json.loads(answer.body)["error"]["code"]
        first, second, third = (ask(url, "/v1/completions", body, key=KEYS[0].password) for _ in range(3))
        assert (first.status, second.status, third.status) == (200, 200, 429)
        assert first.headers["x-ratelimit-remaining-requests"] == "1" and third.headers["retry-after"] == "30"
        assert json.loads(third.body)["error"]["code"] == "rate_limit_exceeded"
        assert ask(url, "/v1/completions", body, key=KEYS[1].password).status == 200
        assert ask(url, "/v1/models", key=KEYS[0].password).status == 200


def test_an_allowance_fills_up_again() -> None:
    now = [0.0]
    limit = RateLimit(60, lambda: now[0])
    assert [limit.take("a").is_allowed for _ in range(61)] == [True] * 60 + [False]
    now[0] = 1.5
    assert [limit.take("a").is_allowed for _ in range(2)] == [True, False]


@pytest.mark.parametrize("given", ["ada", "ada:short", "ada:long enough 1,ada:long enough 2", ":long enough 1"])
def test_keys_that_are_none_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMMA_API_KEYS", given)
    with pytest.raises(ConfigError, match="STEMMA_API_KEYS"):
        api_keys()
    monkeypatch.setenv("STEMMA_API_KEYS", "ada:long enough 1, ben:long enough 2")
    assert [one.user for one in api_keys()] == ["ada", "ben"]


def test_openais_own_client_understands_all_of_it(served: str) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not among the pinned packages")
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list()] == [client.models.retrieve("sft/base").id]
    options = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    *parts, last = client.chat.completions.create(model="sft/base", stream=True, **CHAT, **options)
    assert parts[0].choices[0].delta.role == "assistant" and last.usage.completion_tokens <= 6
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="sft/base", messages=[{"role": "user", "content": "long " * 200}])
    assert error.value.code == "context_length_exceeded"
