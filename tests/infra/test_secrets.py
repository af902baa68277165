"""Secrets of the environment do not get into what is said, and secrets do not get into configs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from flows.config import parse
from infra.errors import ConfigError, stage_error
from infra.run import Run, read_journal
from infra.secrets import HIDDEN, Hider, HidingStream, recognised
from tests.command import Answer, stemma, write_config
from tests.pipelines import data_config

ENVIRON = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "STEMMA_AUTH": "ada:correct-horse-battery",
    "STEMMA_DATABASE_URL": "postgresql://stemma:p%40ss-word@db/stemma",
    "AWS_ENDPOINT_URL": "https://reader:hunter-22@storage.example",
    "HF_TOKEN": "hf_abcdefghijk",
    "GIT_AUTHOR_NAME": "Ada Lovelace",
    "TOKENIZERS_PARALLELISM": "disabled",
    "SSH_AUTH_SOCK": "/tmp/agent.socket",
    "EMPTY_TOKEN": "",
}


@pytest.mark.parametrize(
    "secret",
    [
        "wJalrXUtnFEMI/K7MDENG",
        "wJalrXUtnFEMI%2FK7MDENG",
        "correct-horse-battery",
        "p%40ss-word",
        "p@ss-word",
        "hunter-22",
        "hf_abcdefghijk",
    ],
)
def test_each_form_of_a_secret_is_hidden(secret: str) -> None:
    assert Hider(ENVIRON).hide(f"cannot connect with {secret}!") == f"cannot connect with {HIDDEN}!"


def test_what_only_looks_like_one_by_its_name_stays() -> None:
    text = "Ada Lovelace disabled /tmp/agent.socket"
    assert Hider(ENVIRON).hide(text) == text


def test_errors_and_journals_hide_what_the_environment_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key-1234567")
    problem = stage_error("missing_source", "s3://a?key=key-1234567", "no answer to key-1234567", "try key-1234567")
    assert "key-1234567" not in json.dumps(problem.problems[0].as_json()) + str(problem)
    with open(tmp_path / "journal", "w") as journal:
        run = Run(tmp_path, journal=journal)
        run.event("asked", "asked with key-1234567", url="u?key-1234567")
        run.progress(1, 2, "files", "key-1234567")
    assert "key-1234567" not in (tmp_path / "journal").read_text()
    assert [line["kind"] for line in read_journal(tmp_path / "journal")] == ["event", "progress"]


def test_a_stream_hides_and_is_a_stream_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "key-1234567")
    under = io.StringIO()
    stream = HidingStream(under)
    print("with key-1234567", file=stream, flush=True)
    assert under.getvalue() == f"with {HIDDEN}\n"
    assert not stream.isatty()


@pytest.mark.parametrize(
    "text",
    [
        "https://me:pass-word@storage.example/corpus",
        "AKIAIOSFODNN7EXAMPLE",
        "hf_" + "a1B2" * 9,
        "ghp_" + "a" * 36,
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_in_a_config_is_refused_where_it_stands(tmp_path: Path, text: str) -> None:
    config = {**data_config(tmp_path), "description": text}
    with pytest.raises(ConfigError) as caught:
        parse(config)
    [problem] = caught.value.problems
    assert (problem.code, problem.path) == ("secret_in_config", "description")
    assert text not in str(problem)


def test_the_command_refuses_it_too(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", {**data_config(tmp_path), "description": "u://a:hush-hush@h"})
    answer: Answer = stemma("check", config, "--root", tmp_path / "store")
    assert (answer.code, answer.document["errors"][0]["code"]) == (2, "secret_in_config")
    assert "hush-hush" not in json.dumps(answer.document)


def test_ordinary_addresses_are_no_secrets() -> None:
    assert not list(recognised({"a": ["s3://bucket/key", "https://example.org:8080/@user", "user@example.org"]}))
