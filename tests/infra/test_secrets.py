"""Secrets of the environment do not get into what is said, and secrets do not get into configs."""

from __future__ import annotations

import base64
import importlib
import io
import json
import pkgutil
import random
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from detect_secrets import plugins
from detect_secrets.plugins.base import RegexBasedDetector
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.strategies import DataObject, data, from_regex

from flows.config.read import parse
from infra.errors import ConfigError, stage_error
from infra.lineage.messages import PipelineStarted
from infra.lineage.outbox import Outbox
from infra.project import PROJECT as REPOSITORY
from infra.run import Run, read_journal
from infra.secrets import HIDDEN, SHORTEST, Hider, HidingStream, recognised
from tasks.pages.sheet import failed_sheet
from tests.support.guides import guides
from tests.support.pipelines import data_config
from tests.support.programs.command import Answer, stemma, write_config

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
    "name",
    ["DB_PASS", "SSH_PW", "OPENAI_KEY", "GIT_PAT", "MYSQL_PWD", "PGPASSWORD", "SSHPASS", "HF_TOKEN", "API_TOKENS",
     "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "anthropicApiKey", "db-password", "STRIPE_KEY_2", "MYAPIKEY",
     "SLACK_WEBHOOK_URL", "SESSION_COOKIE", "SERVICE_CREDS", "GOOGLE_CREDENTIALS", "REGISTRY_AUTH", "GH_JWT", "PASS",
     "STEMMA_NOTICE_EMAIL", "GITHUBTOKEN_ACCESSTOKEN", "ENCRYPTION_KEYS", "CLIENT_SECRET",
     "AZURE_STORAGE_CONNECTION_STRING", "CONN_STR", "FTP_LOGIN",
     "COOKIES", "MY_PASSCODE", "MYKEY"],
)  # fmt: skip
def test_a_variable_whose_name_says_so_is_a_secret(name: str) -> None:
    assert Hider({name: "hunter-22"}).hide("it is hunter-22") == f"it is {HIDDEN}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("MONKEY", "a-monkey"), ("KEYBOARD", "us-intl"), ("KEYBOARD_LAYOUT", "us-intl"), ("PATH", "/usr/bin:/bin"),
     ("PATTERN", "a-pattern"), ("TOKENIZERS_PARALLELISM", "disabled"), ("max_tokens", "1_000_000"), ("PWD", "/work/a"),
     ("MAX_TOKENS", "2.5e9"), ("OLDPWD", "/work/a"), ("GIT_AUTHOR_NAME", "Ada Lovelace"), ("COMPASS", "to-the-north"),
     ("GIT_ASKPASS", "/usr/bin/ask"), ("SSH_AUTH_SOCK", "/tmp/agent"), ("AUTHORS", "Ada"), ("PUBLIC_KEY", "ed25519"),
     ("SORT_KEY", "document"), ("PAD_TOKEN", "<|endoftext|>"), ("SECRETARY", "Ada Lovelace"), ("PASSENGERS", "hundred"),
     ("AUTH_TYPE", "kerberos"), ("SECRET_NAME", "stemma-secret"), ("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run"),
     ("TURKEY", "ankara"), ("SPARSE", "matrix"), ("TLS_KEY", "/etc/hostname"), ("POWERSHELL", "/bin/pwsh")],
)  # fmt: skip
def test_a_variable_whose_name_only_has_such_letters_is_none(name: str, value: str) -> None:
    assert Hider({name: value}).hide(f"it is {value}.") == f"it is {value}."


LONG = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6"
HEX = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
WAYS = [
    f"gsk_{LONG}", f"nvapi-{LONG}", f"hvs.{LONG}", f"ya29.{LONG}", f"dapi{HEX}", f"SG.{LONG}.{LONG}", f"GOCSPX-{LONG}",
    f"https://discord.com/api/webhooks/123456789/{LONG}", f"AccountName=a;AccountKey={LONG}==;EndpointSuffix=b",
    f"Endpoint=sb://a/;SharedAccessKey={LONG}=", "Server=db;Uid=ada;Pwd=hunter-22;", "Server=db;Password=hunter-22;",
    "password: hunter-22", "  db_password: hunter", "- api_key: 'hunter-22'",
    "ERROR login failed, password: hunter-22 (ada)",
    '"passcode": "hunter-22"', "client --password hunter-22", "client --password=hunter-22",
    "client --api-key hunter-22",
    "['client', '--token', 'hunter-22']", "client --db-password hunter-22 --port 5", "curl -u ada:hunter-22 https://a",
    "curl -s --user ada:hunter-22 https://a", "['curl', '-u', 'ada:hunter-22']", "X-Api-Key: hunter-22",
    "{'x-api-key': 'hunter-22'}", "X-Auth-Token: hunter-22", "PRIVATE-TOKEN: hunter-22", "Cookie: session=hunter-22",
    "Set-Cookie: id=hunter-22; Path=/", "Ocp-Apim-Subscription-Key: hunter-22",
    "ValueError: no access for {'secret_key': 'hunter-22'}", "refresh_token=hunter-22&x=1",
]  # fmt: skip


@pytest.mark.parametrize("text", WAYS)
def test_a_secret_is_hidden_in_the_ways_it_occurs(text: str) -> None:
    hidden = Hider({}).hide(text)
    assert HIDDEN in hidden and "hunter" not in hidden and LONG not in hidden and HEX not in hidden


@pytest.mark.parametrize("text", ['{"PWD": "/work/n1"}', "PWD: /work/n1", "a; OLDPWD: /work/n1"])
def test_the_shells_folder_is_none(text: str) -> None:
    assert Hider({}).hide(text) == text


@pytest.mark.parametrize("before", ["", "a", "ab", "ada:"])
def test_a_known_secret_is_hidden_in_base64(before: str) -> None:
    encoded = base64.b64encode(f"{before}hunter-22-correct".encode()).decode()
    hidden = Hider({"MYKEY": "hunter-22-correct"}).hide(f"sent {encoded}")
    assert HIDDEN in hidden and encoded[8:16] not in hidden


def test_a_stream_hides_what_comes_in_pieces() -> None:
    under = io.StringIO()
    stream = HidingStream(under)
    for piece in ("a glpat-a1B2c3D", "4e5F6g7H8i9J0 b", "\nc"):
        stream.write(piece)
    assert under.getvalue() == f"a {HIDDEN} b\n"
    stream.flush()
    assert under.getvalue() == f"a {HIDDEN} b\nc"


def test_nothing_of_the_guides_and_results_is_hidden() -> None:
    """Digests, commits, fingerprints, commands and settings."""
    hider = Hider({})
    for path in [
        REPOSITORY / "benchmarks" / "RESULTS.md",
        *sorted((REPOSITORY / "benchmarks" / "log").glob("*.md")),
        *guides(),
        *(REPOSITORY / "configs").glob("*.yaml"),
    ]:
        text = path.read_text()
        changed = [
            (a, b)
            for a, b in zip(text.splitlines(), hider.hide(text).splitlines(), strict=False)
            if a != b and "user:password@" not in a
        ]
        assert not changed, path


_LETTERS = "".join(letter for letter in string.printable[:95] if letter not in "<{$*\\()[]")
"""Without what begins a placeholder, or ends a text."""


def _rules_of_detect_secrets() -> Iterator[Any]:
    """The forms that detect-secrets knows. Left out: addresses, which are no secrets; JSON web tokens, which it looks
    at more closely than by their form; first lines of private keys, which are below; an old form of Artifactory that
    every `APARTMENTS` has."""
    left_out = {"IPPublicDetector", "JwtTokenDetector", "PrivateKeyDetector"}
    for module in pkgutil.iter_modules(plugins.__path__, f"{plugins.__name__}."):
        for name, detector in vars(importlib.import_module(module.name)).items():
            if isinstance(detector, type) and issubclass(detector, RegexBasedDetector) and name not in left_out:
                rules = vars(detector).get("denylist", ())
                for number, rule in enumerate(rules if isinstance(rules, Sequence) else ()):
                    if "AP[" not in rule.pattern:
                        yield pytest.param(rule, id=f"{name}-{number}")


@pytest.mark.parametrize("rule", _rules_of_detect_secrets())
@settings(
    max_examples=20, derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(data())
def test_every_form_that_detect_secrets_knows_is_hidden(rule: re.Pattern[str], data: DataObject) -> None:
    found = rule.search(data.draw(from_regex(rule, alphabet=_LETTERS)))
    assert found is not None
    secret = (found[1] if rule.groups and found[1] else found[0]).strip().rstrip("\"'")
    assume(not set(secret.strip("\"' ")) & set("\"'") and found[0].count(secret) == 1)
    assume(not any(map(str.isspace, secret)))  # `npm_.+` takes whatever a line goes on with
    assume(not (found[0].startswith("://") and set(found[0]) & set("\"'")))  # no URL has these
    scheme = "https" if found[0].startswith("://") else ""
    hidden = Hider({}).hide(f"it said {scheme}{found[0]} and ended")
    assert len(secret) < SHORTEST or (HIDDEN in hidden and secret.strip(" \"'=:") not in hidden)


SIGNED = "https://b.s3.example/c.parquet?X-Amz-Date=20261122&X-Amz-Signature=3b1fa9c07d&X-Amz-Expires=60"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA0Z3VS5JJcds3xfn\n-----END RSA PRIVATE KEY-----"
PUTTY = (
    "PuTTY-User-Key-File-2: ssh-rsa\nEncryption: none\nPublic-Lines: 1\nAAAAB3Nz\nPrivate-Lines: 1\nAAAAgQ"
    "\nPrivate-MAC: 0a1b2c"
)
FORMS = [
    (PUTTY, HIDDEN),
    ("sk-abcdefghijklmnopqrstuvwxyzABCDEF", HIDDEN),
    ("sk-proj-a1B2_c3-D4e5F6g7H8i9", HIDDEN),
    ("sk-ant-api03-a1B2c3D4e5F6g7H8", HIDDEN),
    ("sk_live_a1B2c3D4e5F6g7H8", HIDDEN),
    ("glpat-a1B2c3D4e5F6g7H8i9J0", HIDDEN),
    ("ghp_" + "a1B2" * 9, HIDDEN),
    ("github_pat_" + "a1B2" * 10, HIDDEN),
    ("xoxb-123456789012-abcdefghij", HIDDEN),
    ("AKIAIOSFODNN7EXAMPLE", HIDDEN),
    ("hf_" + "a1B2" * 9, HIDDEN),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJlLWhlcmU", HIDDEN),
    (SIGNED, SIGNED.replace("3b1fa9c07d", HIDDEN)),
    ("https://c.blob.example/x?sv=2024&sig=a%2Fb%3Dcdef&se=2027", f"https://c.blob.example/x?sv=2024&sig={HIDDEN}&se=2027"),
    ("https://c.example/x?Expires=1&Signature=abcdef~1", f"https://c.example/x?Expires=1&Signature={HIDDEN}"),
    ("https://c.example/x?token=abcdef12", f"https://c.example/x?token={HIDDEN}"),
    ("postgresql://ada:hunter-22@db/x", f"postgresql://ada:{HIDDEN}@db/x"),
    ("redis://:hunter-22@db/0", f"redis://:{HIDDEN}@db/0"),
    (PEM, HIDDEN),
    (PEM.replace("\n", "\\n"), HIDDEN),
]  # fmt: skip


@pytest.mark.parametrize(("text", "hidden"), FORMS)
def test_a_secret_is_known_by_its_form(text: str, hidden: str) -> None:
    assert Hider({}).hide(f"cannot read {text}, it says") == f"cannot read {hidden}, it says"
    assert json.loads(Hider({}).hide(json.dumps({"a": text, "b": 1}))) == {"a": hidden, "b": 1}
    assert [path for path, _ in recognised({"read": [text]})] == ["read.0"]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("host=db user=ada password=hunter-22 port=5", f"host=db user=ada password={HIDDEN} port=5"),
        ('{"api_key": "hunter-22", "n": 1}', f'{{"api_key": "{HIDDEN}", "n": 1}}'),
        ("Authorization: Basic YWRhOmh1bnRlcg==", f"Authorization: Basic {HIDDEN}"),
        ("-H 'Authorization: Bearer abcdefgh12'", f"-H 'Authorization: Bearer {HIDDEN}'"),
        ("MIIEowIBAAKCAQEA0Z3VS5JJcds3xfnMIIEowIBAAKCAQEA0Z3VS5JJcds3xfn12", HIDDEN),
    ],
)
def test_what_is_said_of_a_secret_is_hidden(text: str, hidden: str) -> None:
    assert Hider({}).hide(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "sk-learn and task-abcdefghijklmnopqrst, risk-averse",
        "postgresql://USER:PASSWORD@HOST:5432/NAME, or sqlite, was expected",
        "loss 3.1, 2,500,000 tokens, pad_token=<|endoftext|>, max_tokens=1000000, key=value",
        "a password of at least 12 characters; set a password: it is easy",
        "https://example.org/a?page=2&sort=key, http://127.0.0.1:4200/runs?token=",
        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "eyJ.x.y glpat-short ghp_short hf_hub AKIA xoxo-kisses",
        "configs/quickstart.yaml: secrets come from the environment; auth=off",
        "Bearer of good news, Basic understanding of authorization: none",
    ],
)
def test_ordinary_words_stay(text: str) -> None:
    assert Hider({}).hide(text) == text


def test_a_random_secret_of_any_letters_is_hidden_and_json_stays_json() -> None:
    draw = random.Random(24)
    for _ in range(300):
        secret = "".join(draw.choice(string.printable[:95]) for _ in range(draw.randrange(6, 40)))
        secret = secret.strip() or "hunter-22"
        if len(secret) < 6:
            continue
        text = Hider({"DB_PASS": secret}).hide(json.dumps({"said": f"cannot connect with {secret} to it"}))
        assert secret not in json.loads(text)["said"], secret


def test_messages_to_mlflow_and_journals_hide_at_any_depth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DB_PASS", "hunter-22")
    outbox = Outbox(tmp_path)
    outbox.send(
        PipelineStarted(
            "a-build", "chronicle", 0.0, config={"a": {"b": ["hunter-22"]}}, tags={"note": "glpat-a1B2c3D4e5F6g7H8i9J0"}
        )
    )
    [message] = outbox.paths()
    assert outbox.read(message).content["config"] == {"a": {"b": [HIDDEN]}}
    assert outbox.read(message).content["tags"] == {"note": HIDDEN}
    with open(tmp_path / "journal", "w") as journal:
        Run(tmp_path, journal=journal).event("asked", "asked", tried=[{"with": "hunter-22"}])
    assert read_journal(tmp_path / "journal")[0]["tried"] == [{"with": HIDDEN}]


def test_a_log_cannot_close_its_fence_in_the_sheet(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["```", "# <b>not a heading</b>", "````python", "a `word`"]
    log.write_text("\n".join(lines))
    sheet = failed_sheet("clean", stage_error("bad_row", "clean", "no text"), log, {})
    assert "`````\n" + "\n".join(lines) + "\n`````\n" in sheet
    assert "\n```\nplain\n```\n" in failed_sheet("clean", stage_error("a", "b", "c"), _written(log, "plain"), {})


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


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
