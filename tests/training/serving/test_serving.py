"""The endpoint over real HTTP: OpenAI's shapes, whole and streamed, to our own callers only."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect, sync_playwright

from infra.servers.asgi_server import Server
from infra.servers.credentials import Credentials
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from infra.servers.settings import Settings
from infra.store.store import Store
from tests.support.artifacts import make_artifact
from tests.support.programs.command import environment, start, stemma
from tests.support.programs.processes import wait_until
from tests.support.services.raw_http import ask as raw_ask
from training.generation.answer_text import AnswerText
from training.generation.session import answer, loaded
from training.serving import app
from training.serving.answer_queue import AT_ONCE, WAITING

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KNOWN = Credentials("ada", "a long password")


@pytest.fixture(scope="module")
def url(base_dir: Path) -> Iterator[str]:
    port = any_free_port()
    served = app({"base": base_dir, "other": base_dir}, Settings().callers(port), KNOWN)
    server = Server(served, "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def ask(url: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    """Status and body; a POST of JSON where there is one."""
    given = {"Authorization": f"Bearer {KNOWN.password}", "Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    data = json.dumps(body).encode() if body is not None else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, given), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def streamed(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def test_chat_and_completions_say_what_the_model_says(url: str, base_dir: Path) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    asked = {"model": "base", "messages": messages, "max_tokens": 12, "temperature": 0}
    said = "".join(answer(base_dir, messages, 12, 0.0))
    status, text = ask(f"{url}/v1/chat/completions", asked)
    found = json.loads(text)
    assert status == 200 and found["object"] == "chat.completion" and found["model"] == "base"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": said, "refusal": None}
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    choices = streamed(ask(f"{url}/v1/chat/completions", {**asked, "stream": True})[1])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == said
    # The role is in the first chunk alone: clients join what chunks hold.
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == found["choices"][0]["finish_reason"] in ("stop", "length")
    asked = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "seed": 3}
    whole = json.loads(ask(f"{url}/v1/completions", asked)[1])
    model, tokenizer = (lm := loaded(base_dir)).model, lm.tokenizer
    ids = torch.tensor([[0, *tokenizer("Once upon").input_ids]])
    written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert whole["choices"][0]["text"] == tokenizer.decode(written, skip_special_tokens=True)
    assert (
        "".join(one["text"] for one in streamed(ask(f"{url}/v1/completions", {**asked, "stream": True})[1]))
        == (whole["choices"][0]["text"])
    )
    assert [one["id"] for one in json.loads(ask(f"{url}/v1/models")[1])["data"]] == ["base", "other"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}, 404, "there are base, other"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "expected a user message"),
        ({"messages": []}, 400, "messages"),
    ],
)
def test_what_it_cannot_do_is_said_in_the_shape_of_an_error(
    url: str, body: dict[str, Any], status: int, said: str
) -> None:
    found, text = ask(f"{url}/v1/chat/completions", body)
    assert found == status and said in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": KNOWN.header}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_only_our_own_callers_are_answered(url: str, headers: dict[str, str], status: int) -> None:
    assert ask(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)[0] == status


def test_the_page_runs_its_own_script_alone(url: str) -> None:
    status, page = ask(url)
    assert status == 200 and page.count("<option selected>") == 2 and "<option selected>other" in page
    assert page.count("<script") == page.count("<script nonce=") == 1 and "http" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_enter_asks_both_models(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        known = {"username": KNOWN.user, "password": KNOWN.password}
        page = browser.new_page(http_credentials=known)  # type: ignore[arg-type]
        page.set_default_timeout(90_000)
        page.goto(url)
        page.locator(".examples button").first.click()
        assert page.locator("textarea").input_value() == "Explain in one sentence what a list is."
        markdown = "**bold** `a<b` <img src=x onerror=alert(1)>\n\n- one\n- two\n\n```\n<script>x</script>\n```"
        shown = page.evaluate(
            "text => { const box = document.createElement('div'); render(text, box); return box.innerHTML }", markdown
        )
        assert shown == (
            "<p><strong>bold</strong> <code>a&lt;b</code> &lt;img src=x onerror=alert(1)&gt;</p>"
            "<ul><li>one</li><li>two</li></ul><pre><code>&lt;script&gt;x&lt;/script&gt;</code></pre>"
        )
        page.locator("textarea").fill("What is a list?")
        page.keyboard.press("Shift+Enter")
        assert page.locator("textarea").input_value() == "What is a list?\n"
        page.keyboard.press("Enter")
        expect(page.locator("textarea")).to_have_value("", timeout=90_000)
        assert page.locator(".turns").count() == 2 and all(box.inner_text() for box in page.locator(".turns").all())
        browser.close()


def test_vllm_whose_key_guards_not_all_of_it_is_no_door_to_other_machines(base_dir: Path) -> None:
    env = environment(STEMMA_AUTH=f"{KNOWN.user}:{KNOWN.password}")
    answer = stemma("serve", base_dir, "--engine", "vllm", "--host", "0.0.0.0", env=env)
    assert answer.code == 2
    (error,) = answer.document["errors"]
    assert "without its API key" in error["message"] and "proxy" in error["message"] + error["fix"]


def test_models_whose_folders_have_one_name_are_all_served(base_dir: Path, tmp_path: Path) -> None:
    """All but the last were left out without a word."""
    folders = [tmp_path / run / "model" for run in ("first", "second")]
    for folder in folders:
        shutil.copytree(base_dir, folder, ignore=shutil.ignore_patterns("manifest.json"))
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        server = start("serve", *folders, "--port", str(any_free_port()), stderr=stderr)
    try:
        wait_until(lambda: "chat page" in log.read_text(), command=server)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(60)
    message = next(line for line in log.read_text().splitlines() if "chat page" in line)
    assert message.startswith("first/model, second/model: ")


@pytest.fixture(scope="module")
def endless_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A small model with room for answers that take minutes, and that no token ends."""
    from training.checkpoint.export import export
    from training.config import ModelConfig
    from training.model.models import build, hf_config

    config = ModelConfig(family="llama", layers=1, width=32, heads=2, positions=1_000_000)
    folder = tmp_path_factory.mktemp("endless") / "model"
    export(build(hf_config(config, 320, {"eos_token_id": None, "pad_token_id": 1}), seed=3), tokenizer_dir, folder)
    return folder


def opened(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    text = json.dumps({"prompt": "a", "temperature": 0, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + text)
    return client


def rest(client: socket.socket) -> str:
    read = b""
    with client:
        while part := client.recv(65_536):
            read += part
    return read.decode()


@pytest.fixture
def endless_port(endless_dir: Path) -> Iterator[int]:
    """The port of a server of the endless model, in this process. Each piece of an answer repeats the model's name, so
    that a few hundred are more than the buffers of a connection hold."""
    port = any_free_port()
    server = Server(app({"n" * 20_000: endless_dir}, Settings().callers(port), None), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield port
    server.should_exit = True
    thread.join()


ENDLESS = {"max_tokens": 500_000, "stream": True}
SHORT = {"max_tokens": 2, "stream": True}


def test_streams_whose_clients_leave_give_back_their_turns(endless_port: int) -> None:
    """Four of them stopped the server until Python's garbage collector happened to run."""
    begun = [opened(endless_port, ENDLESS) for _ in range(AT_ONCE)]
    for stream in begun:
        assert b"text/event-stream" in stream.recv(1000)
    others = [opened(endless_port, ENDLESS) for _ in range(200 - AT_ONCE)]
    wait_until(lambda: " 503 " in rest(opened(endless_port, SHORT)))  # no room for one more
    for stream in others:
        stream.close()
    with contextlib.ExitStack() as stack:  # those that waited have left the queue, while others still hold the turns
        wait_until(lambda: b"text/event-stream" in stack.enter_context(opened(endless_port, SHORT)).recv(1000))
    for stream in begun:
        stream.close()
    assert rest(opened(endless_port, SHORT)).endswith("data: [DONE]\n\n\r\n0\r\n\r\n")


def test_clients_that_do_not_read_hold_no_turn_once_their_answers_are_written(endless_port: int) -> None:
    readers = [opened(endless_port, {"max_tokens": 150, "stream": True}) for _ in range(AT_ONCE)]
    assert "data: [DONE]" in rest(opened(endless_port, SHORT))
    for reader in readers:
        assert "data: [DONE]" in rest(reader)


@pytest.mark.parametrize("cleaned", [True, False])
def test_streamed_pieces_are_the_whole_text(tokenizer_dir: Path, cleaned: bool) -> None:
    """A character was lost wherever the tokens after a space took it away: "one , two" was streamed as "one  two"."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, clean_up_tokenization_spaces=cleaned)
    draw = random.Random(3)
    parts = [" ", "  ", "'", "n't", "s", "re", "ve", "m", ",", ".", "?", "!", "one", "é", "do not"]
    texts = ["one , two", "It can 't be , is n't it ?", "[1 , 2 , 3] .", "a    ' s", "日本語 , 日本語"]
    drawn = ["".join(draw.choices(parts, k=12 if n else 300)) for n in range(200)]
    # Bytes that are no text, and a character that is never finished.
    broken = [draw.choices(range(5, 300), k=200), tokenizer("日").input_ids[:-1]]
    for ids in [*(tokenizer(text, add_special_tokens=False).input_ids for text in [*texts, *drawn]), *broken]:
        text_of_answer = AnswerText(tokenizer)
        pieces = [text_of_answer.add(token) for token in ids]
        assert "".join([*pieces, text_of_answer.end()]) == tokenizer.decode(ids)


def test_light_requests_do_not_wait_for_answers_and_a_signal_ends_them_all(endless_dir: Path, tmp_path: Path) -> None:
    """60 answers that waited held up the list of models, and a SIGTERM waited for streams without end."""
    port = any_free_port()
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        server = start("serve", endless_dir, "--port", str(port), stderr=stderr)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/v1/models"), timeout_s=120)
        endless = ENDLESS
        streams = [opened(port, endless) for _ in range(AT_ONCE)]
        for stream in streams:
            assert b"text/event-stream" in stream.recv(1000)
        waiting = [opened(port, endless | {"stream": number % 2 == 0}) for number in range(WAITING)]
        wait_until(lambda: json.loads(ask(f"http://127.0.0.1:{port}/v1/completions", endless)[1])["error"])
        full = rest(opened(port, endless))
        assert " 503 " in full and "retry-after: 5" in full and '"overloaded"' in full
        assert ask(f"http://127.0.0.1:{port}/v1/models")[0] == ask(f"http://127.0.0.1:{port}/")[0] == 200
        # Those that leave make room, one by one.
        streams.pop().close()
        waiting.pop().close()
        wait_until(lambda: b"text/event-stream" in opened(port, endless).recv(1000))
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 130
        assert all('"server_ending"' in rest(client) for client in [*streams, *waiting])
    finally:
        server.kill()
    assert "Traceback" not in log.read_text()


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-300}, {"temperature": 5e-324}, {"temperature": 1e-39}, {"temperature": 1e-9},
    {"temperature": -0.0}, {"temperature": 2}, {"seed": 10**400}, {"seed": -(2**70)}, {"max_tokens": 10**300},
    {"prompt": ""}, {"prompt": "\0"}, {"top_p": 1.0}, {"top_p": 1e-300}, {"top_p": 0},
]  # fmt: skip
REFUSED = [
    '{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "temperature": Infinity}',
    '{"prompt": "a", "temperature": 1e999}', '{"prompt": "a", "temperature": -1e-300}',
    '{"prompt": "a", "seed": 1e300}', '{"prompt": "a", "seed": NaN}', '{"prompt": "a", "top_p": -1e-300}',
    '{"prompt": "a", "max_tokens": 0}', '{"prompt": "a", "max_tokens": 1e400}', '{"prompt": "\\ud800"}',
    '{"prompt": "a", "seed": ' + "9" * 5000 + "}", "[" * 100_000, "", "\0", '{"prompt": ' + "[" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("asked", EXTREMES, ids=lambda asked: json.dumps(asked)[:30])
def test_extreme_values_are_answered(url: str, asked: dict[str, Any]) -> None:
    """A temperature of 1e-300 gave HTTP 500."""
    status, text = ask(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 2, **asked})
    assert status == 200, text
    chat = {key: value for key, value in asked.items() if key != "prompt"}
    messages = [{"role": "user", "content": asked.get("prompt", "a")}]
    status, text = ask(f"{url}/v1/chat/completions", {"max_tokens": 2, **chat, "messages": messages})
    assert status == 200, text


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body[:30])
def test_values_without_a_meaning_are_refused(url: str, body: str) -> None:
    port = int(url.rpartition(":")[2])
    headers = {"Authorization": KNOWN.header, "Content-Type": "application/json"}
    answer = raw_ask(f"http://127.0.0.1:{port}", "POST", "/v1/completions", headers, body.encode())
    assert answer.status == 400 and json.loads(answer.body)["error"]["message"]
    assert len(answer.body) < 1000


@pytest.mark.parametrize("given", ["nan", "inf", "-1"])
def test_chat_takes_finite_temperatures(base_dir: Path, given: str) -> None:
    answer = stemma("chat", base_dir, "--prompt", "a", "--temperature", given)
    assert answer.code == 2 and "temperature" in answer.document["errors"][0]["message"]


def test_a_body_of_700_mb_is_refused_by_its_head(url: str) -> None:
    headers = {"Authorization": KNOWN.header, "Content-Type": "application/json", "Content-Length": "700000000"}
    assert raw_ask(url, "POST", "/v1/completions", headers).status == 413


def test_clients_that_leave_half_way_leave_no_traceback(url: str, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {KNOWN.header}\r\n"
    head += "Content-Type: application/json\r\n"
    for rest_of_head in ("Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n5\r\nha"):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
            client.sendall((head + rest_of_head).encode())
        assert ask(f"{url}/v1/models")[0] == 200
    # Its answer comes after what became of the two before it.
    assert ask(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


REASON = {"message": "benchmarks_sft.cloze_accuracy is 0.3, expected at least 0.6"}


def test_who_talks_to_a_refused_model_or_gives_it_away_is_told(base_dir: Path, tmp_path: Path) -> None:
    """Its card alone said so: at two in the morning nobody reads it."""
    store = Store(tmp_path / "store")
    model = make_artifact(store, "sft", {path.name: path.read_bytes() for path in base_dir.iterdir() if path.is_file()})
    folder, root = store.path(model), ("--root", str(store.root))
    for by, status, reasons in (("2026-01-01", "registered", []), ("2026-01-02", "rejected", [REASON])):
        record = {"name": "demo", "status": status, "reasons": reasons}
        files = {"registration.json": json.dumps(record), "MODEL_CARD.md": f"---\n---\n{status}\n"}
        make_artifact(store, "register", files, inputs={"model": model}, config={"by": by}, finished=by)
    env = environment()
    unlike = ("serve", folder, "--engine", "vllm", "--host", "0.0.0.0")  # refused before it serves, and after it warned
    for words in (("chat", "sft", "--prompt", "Hi", "--max-new-tokens", "2", *root), unlike):
        told = stemma(*words, env=env | {"STEMMA_AUTH": f"{KNOWN.user}:{KNOWN.password}"})
        assert f"warning: sft/{model.fingerprint[:8]}: a gate rejected it: {REASON['message']}" in told.stderr
    out = tmp_path / "hub"
    refused = stemma("export", folder, out, env=env)
    assert (refused.code, refused.document["status"], out.exists()) == (3, "refused", False)
    (error,) = refused.document["errors"]
    assert REASON["message"] in error["message"] and "--force" in error["fix"]
    forced = stemma("export", "sft", out, "--force", *root, env=env)
    assert forced.code == 0 and REASON["message"] in forced.document["warnings"][0]["message"]
    assert (out / "README.md").read_text().endswith("rejected\n")
    # Where it was judged again and taken, nothing is said.
    again = {"registration.json": json.dumps({"name": "demo", "status": "registered", "reasons": []})}
    make_artifact(store, "register", again, inputs={"model": model}, finished="2026-01-03")
    told = stemma("chat", folder, "--prompt", "Hi", "--max-new-tokens", "2", env=env)
    assert told.code == 0 and "warning" not in told.stderr and told.document["warnings"] == []
