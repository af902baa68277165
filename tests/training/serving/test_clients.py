"""Real clients of OpenAI's protocol, which are not among the pinned packages."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.servers.settings import Settings
from tests.support.services import openai_clients
from tests.training.serving.test_openai_protocol import chat, chunks, running
from tests.training.serving.test_tool_calls import ASKED, HERMES, TOOLS, parrot
from training.serving import app

PYTHON = "STEMMA_CLIENTS_PYTHON"
"""An interpreter with them: `python -m venv DIR && DIR/bin/pip install openai langchain-openai litellm`."""


def test_openai_langchain_and_litellm_understand_the_server(base_dir: Path, tmp_path: Path) -> None:
    python = os.environ.get(PYTHON) or (sys.executable if find_spec("openai") else "")
    if not python:
        pytest.skip(f"no client of OpenAI's protocol is installed, and ${PYTHON} names no environment with one")
    folders = {"base": base_dir, "calls": parrot(tmp_path / "calls", "qwen3", HERMES)}
    with running(app(folders, Settings().callers(0), None)) as url:
        command = [python, "-I", openai_clients.__file__, f"{url}/v1", "base", "calls"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "openai" in ended.stdout.split(), ended.stderr[-3000:]


def test_one_call_at_a_time_is_the_first(tmp_path: Path) -> None:
    folders = {"calls": parrot(tmp_path / "calls", "qwen3", f"{HERMES}\n{HERMES}")}
    body = {"model": "calls", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": None}
    with running(app(folders, Settings().callers(0), None)) as url:
        for several, count in ((True, 2), (False, 1)):
            (choice,) = chat(url, **body, parallel_tool_calls=several)["choices"]
            assert len(choice["message"]["tool_calls"]) == count and choice["finish_reason"] == "tool_calls"
            parts = [
                part["choices"][0]["delta"]
                for part in chunks(url, "/v1/chat/completions", body | {"parallel_tool_calls": several})
            ]
            calls = [call["index"] for part in parts for call in part.get("tool_calls", ())]
            assert calls == list(range(count))
