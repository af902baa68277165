"""Documents and instructions that our own endpoint writes, over real HTTP, from a model of this project."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus.documents.parts import DocumentWriter, make_document, read_documents
from corpus.generation.config import GenerateConfig
from corpus.generation.stage import generate
from infra.errors import StageError
from infra.run import Run
from infra.servers.asgi_server import Server
from infra.servers.credentials import Credentials
from infra.servers.ports import any_free_port
from infra.servers.settings import Settings
from tests.support.programs.processes import wait_until
from training.serving import app

KNOWN = Credentials("ada", "a long password")
TEXTS = ["Sort the list.", "Read the file.", "Close the door of the house."]


@pytest.fixture(scope="module")
def url(base_dir: Path) -> Iterator[str]:
    port = any_free_port()
    server = Server(app({"base": base_dir}, Settings().callers(port), KNOWN), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    with DocumentWriter(tmp_path / "in" / "documents") as writer:
        for number, text in enumerate(TEXTS):
            writer.write(make_document(text, f"orders/{number}"))
    return tmp_path / "in"


@pytest.fixture
def config(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SERVE_API_KEY", KNOWN.password)
    return {
        "endpoint": {"url": url, "model": "base", "api_key_variable": "SERVE_API_KEY"},
        "sampling": {"temperature": 1, "max_tokens": 12},
        "keep_truncated": True,
        "answer_limits": {"truncated": 1, "empty": 1, "unparsable": 1},
    }


def built(config: dict[str, Any], documents: Path, out: Path) -> dict[str, float]:
    out.mkdir()
    run = Run(out.with_suffix(".work"), answers_dir=out.parent / "answers")
    return dict(generate(GenerateConfig(**config), {"documents": documents}, out, run).figures)


def test_documents_are_what_the_served_model_says(tmp_path: Path, documents: Path, config: dict[str, Any]) -> None:
    """Seeds make its answers the same once more, also where none is kept."""
    wanted = {**config, "task": {"kind": "template", "prompt": "{text}"}, "keep_originals": False, "samples": 3}
    figures = built(wanted, documents, tmp_path / "out")
    found = list(read_documents(tmp_path / "out"))
    assert found and all(one.text.strip() and one.source.startswith("generated/orders/") for one in found)
    assert figures["requests"] == 9 and figures["failed"] == 0 and 9 <= figures["completion_tokens"] <= 108
    (tmp_path / "answers").rename(tmp_path / "kept")
    assert built(wanted, documents, tmp_path / "again")["requests"] == 9
    assert list(read_documents(tmp_path / "again")) == found


def test_a_key_or_model_that_it_does_not_know_is_named(
    tmp_path: Path, documents: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**config, "endpoint": {**config["endpoint"], "model": "gpt-4"}}
    with pytest.raises(StageError, match="there are base"):
        built(other, documents, tmp_path / "model")
    monkeypatch.setenv("SERVE_API_KEY", "another long password")
    with pytest.raises(StageError, match="HTTP 401"):
        built(config, documents, tmp_path / "key")
