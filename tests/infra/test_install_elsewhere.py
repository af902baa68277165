"""The files that install Stemma elsewhere: right by their schemas, and right when what they say is started here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.run import read_journal
from infra.servers.http import post
from infra.servers.ports import any_free_port
from tests.command import REPOSITORY, environment, finish, start, write_config
from tests.pipelines import data_config
from tests.postgres import postgres
from tests.processes import running, wait_until

COMPOSE = REPOSITORY / "infra" / "compose.yaml"
DOCKERFILE = REPOSITORY / "infra" / "Dockerfile"
AUTH = "operator:a-password-for-tests"
OURS = ("prefect", "mlflow", "worker", "relay", "metrics")


@pytest.mark.parametrize(
    "command",
    [
        ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        ["kubernetes_validate", "--strict", *map(str, sorted((REPOSITORY / "infra" / "kubernetes").glob("*.yaml")))],
    ],
    ids=["compose", "kubernetes"],
)
def test_the_files_keep_to_their_schemas(command: list[str]) -> None:
    found = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=REPOSITORY)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_image_runs_as_an_ordinary_user_and_copies_what_is_there() -> None:
    steps = re.sub(r"\\\n", " ", DOCKERFILE.read_text()).splitlines()
    users = [step.split()[1] for step in steps if step.startswith("USER")]
    assert users
    assert users[-1] not in ("root", "0")
    for step in steps:
        assert not step.startswith("ADD"), "ADD fetches and unpacks; COPY does not"
        if step.startswith("COPY"):
            *sources, _ = [word for word in shlex.split(step)[1:] if not word.startswith("--")]
            for source in sources:
                assert (REPOSITORY / source).exists(), source


def test_kubernetes_runs_nothing_as_root_and_keeps_secrets_out_of_the_files() -> None:
    for path in (REPOSITORY / "infra" / "kubernetes").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Deployment":
                continue
            pod = document["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            (container,) = pod["containers"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            named = {item["name"]: item for item in container["env"]}
            # Prefect's own worker knows none of our variables.
            secret = {"STEMMA_AUTH", "STEMMA_DATABASE_URL"} if path.name != "runs.yaml" else {"PREFECT_API_AUTH_STRING"}
            assert all("secretKeyRef" in named[name]["valueFrom"] for name in secret)


@pytest.mark.cluster
@pytest.mark.long
def test_the_parts_of_the_compose_file_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's own command and environment, with loopback for the names that only containers have.

    The risk: an option or variable in the file that a server no longer takes.
    """
    with postgres() as database, ExitStack() as stack:
        parts = _parts(database)
        ports = {name: any_free_port() for name in ("prefect", "mlflow", "metrics")}

        def here(text: str) -> str:
            text = text.replace("/store", str(tmp_path / "store")).replace("0.0.0.0", "127.0.0.1")
            for name, port in (("prefect", 4200), ("mlflow", 5000), ("metrics", 9464)):
                text = re.sub(rf"(127\.0\.0\.1|{name}):{port}", f"127.0.0.1:{ports[name]}", text)
            return text

        env = environment(**{key: here(value) for key, value in parts["worker"]["environment"].items()})
        env["STEMMA_DATABASE_URL"] = database
        for name in OURS:
            command = [here(word) for word in parts[name]["command"]]
            if name in ports:
                command += ["--port", str(ports[name])]
            stack.enter_context(running(command, env, tmp_path / f"{name}.log"))
            if check := parts[name].get("healthcheck"):
                asked = [here(word) for word in check["test"][1:]]
                wait_until(lambda asked=asked: _succeeds(asked, env))
        config = write_config(tmp_path / "config.yaml", data_config(tmp_path))
        command = start("run", config, "--root", tmp_path / "store", env=env)
        answer = finish(command)
        assert answer.code == 0, (answer.document["errors"], answer.stderr)
        journal = next((tmp_path / "store" / "runs").glob("*/journal.jsonl"))
        assert read_journal(journal)[0]["pid"] != command.pid, "it ran in the command's own process, not on the worker"
        monkeypatch.setenv("STEMMA_AUTH", AUTH)
        search = f"http://127.0.0.1:{ports['mlflow']}/api/2.0/mlflow/experiments/search"
        wait_until(lambda: "chronicle" in str(post(search, {"max_results": 10})), timeout_s=60)


def _parts(database: str) -> dict[str, Any]:
    """The services of the compose file with the variables of an operator's .env filled in."""
    password = re.search(r":([^:@]+)@", database)
    assert password is not None
    given = {"STEMMA_AUTH": AUTH, "POSTGRES_PASSWORD": password.group(1), "S3_PASSWORD": "unused-here"}
    text = re.sub(
        r"\$\{(\w+)(?::[?-]([^}]*))?\}", lambda found: given.get(found[1], found[2] or ""), COMPOSE.read_text()
    )
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    program = [sys.executable if word == "python" else word for word in command]
    return subprocess.run(program, env=env, check=False).returncode == 0
