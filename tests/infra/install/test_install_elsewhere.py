"""The files that install Stemma elsewhere: right by their schemas, and right when what they say is started here."""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg2
import pytest
import yaml

from infra.leases import place as lease_place
from infra.leases.lease import Leases
from infra.run import read_journal
from infra.servers.foreground import READERS, spec_for
from infra.servers.http import post
from infra.servers.ports import any_free_port
from infra.store.layout import Layout
from infra.store.store import Store
from tests.support.pipelines import data_config
from tests.support.programs.command import REPOSITORY, environment, finish, start, write_config
from tests.support.programs.processes import running, wait_until
from tests.support.services.postgres import postgres

COMPOSE = REPOSITORY / "infra" / "compose.yaml"
DOCKERFILE = REPOSITORY / "infra" / "Dockerfile"
AUTH = "operator:correct-horse-battery"
PASSWORDS = ("a-password", "s3-password", "metrics-password")
OURS = ("prefect", "mlflow", "worker", "relay", "metrics", "page")


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


def kubernetes(kind: str) -> list[dict[str, Any]]:
    """The documents of a kind in infra/kubernetes/."""
    texts = [path.read_text() for path in sorted((REPOSITORY / "infra" / "kubernetes").glob("*.yaml"))]
    return [found for text in texts for found in yaml.safe_load_all(text) if found["kind"] == kind]


@pytest.mark.parametrize("deployment", kubernetes("Deployment"), ids=lambda found: found["metadata"]["name"])
def test_a_pod_has_no_rights_that_it_does_not_need(deployment: dict[str, Any]) -> None:
    """As the profile `restricted` of Kubernetes' pod security wants it, and with a read-only image."""
    part, pod = deployment["metadata"]["name"], deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] == (part == "runs"), "Prefect's worker alone speaks to the cluster"
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/tmp", "/home/stemma"} <= set(mounted)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounted.values()} == set(volumes)
    assert all("emptyDir" in volumes[mounted[path]["name"]] for path in ("/tmp", "/home/stemma"))
    named = {
        item["name"]: item["valueFrom"]["secretKeyRef"]["key"]
        for item in container["env"]
        if "secretKeyRef" in item.get("valueFrom", {})
    }
    if part == "runs":  # Prefect's own worker knows none of our variables
        assert named == {"PREFECT_API_AUTH_STRING": "auth"}
        return
    database = "metrics-database-url" if part in READERS else "database-url"
    assert named == {"STEMMA_AUTH": "auth", "STEMMA_DATABASE_URL": database}
    assert mounted["/store"].get("readOnly", False) == (part in READERS)


def test_pods_are_reached_by_those_alone_that_a_policy_names() -> None:
    deployments = kubernetes("Deployment")
    parts = {found["spec"]["template"]["metadata"]["labels"]["part"] for found in deployments} | {"training", "run"}
    policies = kubernetes("NetworkPolicy")

    def chosen(policy: dict[str, Any]) -> set[str]:
        selector = policy["spec"]["podSelector"]
        assert selector["matchLabels"]["app"] == "stemma"
        wanted = [set(one["values"]) for one in selector.get("matchExpressions", ())]
        own = selector["matchLabels"].get("part")
        assert not own or own in parts
        return set.intersection({own} if own else parts, *wanted)

    def into(part: str) -> list[Any]:
        return [rule for policy in policies if part in chosen(policy) for rule in policy["spec"].get("ingress", ())]

    closed = [policy for policy in policies if policy["spec"]["policyTypes"] == ["Ingress"]]
    assert set().union(*(chosen(policy) for policy in closed)) == parts
    assert {part for part in parts if into(part)} == {"prefect", "mlflow", "metrics", "page", "training"}
    assert all(rule["from"] for part in parts for rule in into(part)), "no rule lets everybody in"
    listening = {port["port"] for service in kubernetes("Service") for port in service["spec"]["ports"]}
    assert {port["port"] for rule in into("prefect") for port in rule["ports"]} == listening
    bounded = [policy for policy in policies if policy["spec"]["policyTypes"] == ["Egress"]]
    assert set().union(*(chosen(policy) for policy in bounded)) == {"prefect", "mlflow", "relay", "metrics", "page"}


def test_the_compose_file_gives_each_part_what_it_needs_and_no_more() -> None:
    parts = _parts("postgresql://stemma:a-password@postgres/stemma")
    for name, part in parts.items():
        assert part["cap_drop"] == ["ALL"] and part["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in part and "cap_add" not in part
    knowing = {password: {name for name, part in parts.items() if password in str(part)} for password in PASSWORDS}
    assert knowing == {
        "a-password": {"postgres", "prefect", "mlflow", "worker", "relay"},
        "s3-password": {"s3", "worker"},
        "metrics-password": {"postgres", "metrics", "page"},
    }
    for name in OURS:
        assert parts[name]["read_only"] and {"/tmp", "/home/stemma"} <= set(parts[name]["volumes"])
    assert all("store:/store:ro" in parts[name]["volumes"] for name in READERS)


def test_images_are_pinned_by_digest_on_demand(tmp_path: Path) -> None:
    """A stand-in answers for docker; each image of others can be given by digest, none stands fixed in a file."""
    digest = "sha256:" + "5" * 64
    docker = tmp_path / "docker"
    pin = [str(REPOSITORY / "infra" / "pin-images.sh")]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    docker.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo {digest}\n')
    docker.chmod(0o755)
    printed = subprocess.run(pin, capture_output=True, text=True, env=env, check=True).stdout
    pinned = dict(line.split("=", 1) for line in printed.splitlines())
    shown = dict(re.findall(r"^(\w+_IMAGE)=(.*)$", (REPOSITORY / "infra" / "compose.env.example").read_text(), re.M))
    assert pinned == {name: f"{image}@{digest}" for name, image in shown.items()}
    used = dict(re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", COMPOSE.read_text()))
    assert used == shown and f"ARG PYTHON_IMAGE={shown['PYTHON_IMAGE']}" in DOCKERFILE.read_text()
    assert re.findall(r"^ +image: (?!\$\{)(.*)$", COMPOSE.read_text(), re.M) == ["stemma"]
    docker.write_text("#!/bin/sh\necho unknown\n")
    failed = subprocess.run(pin, capture_output=True, text=True, env=env)
    assert failed.returncode and not failed.stdout and "expected a digest" in failed.stderr


def _make_metrics_role(database: str) -> None:
    """Runs infra/metrics-role.sh as the database's owner."""
    parts = urlsplit(database)
    asked = {
        "METRICS_PASSWORD": "metrics-password", "POSTGRES_USER": parts.username, "POSTGRES_DB": parts.path[1:],
        "PGHOST": parts.hostname, "PGPORT": str(parts.port), "PGPASSWORD": parts.password,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value}
    subprocess.run([REPOSITORY / "infra" / "metrics-role.sh"], env={**os.environ, **given}, check=True)


def test_the_role_of_the_metrics_reads_leases_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres() as database:
        _make_metrics_role(database)
        monkeypatch.setenv("STEMMA_DATABASE_URL", database)
        spec_for("prefect", tmp_path, None, None)  # as its part begins: with its schema in the database
        lease = Store(tmp_path).leases.acquire("pretrain/1")
        assert lease is not None
        _make_metrics_role(database)  # said again for a database that is older than the role
        settings = (tmp_path / "servers" / "settings.json").read_bytes()
        role = database.replace("stemma:", "stemma_metrics:", 1).replace(
            str(urlsplit(database).password), "metrics-password"
        )
        monkeypatch.setenv("STEMMA_DATABASE_URL", role)
        assert spec_for("metrics", tmp_path, None, None).name == "metrics"
        assert (tmp_path / "servers" / "settings.json").read_bytes() == settings
        table = lease_place.existing(Layout(tmp_path))
        assert table is not None and Leases(table).living() == ["pretrain/1"]
        with psycopg2.connect(role) as connection:
            for order in ("DELETE FROM leases.held", "SET default_transaction_read_only = off; DELETE FROM leases.held",
                          "CREATE SCHEMA mine", "CREATE TABLE prefect.mine (id int)"):  # fmt: skip
                with connection.cursor() as cursor, pytest.raises(psycopg2.Error):
                    cursor.execute(order)
                connection.rollback()
        lease.release()


@pytest.mark.cluster
@pytest.mark.long
def test_the_parts_of_the_compose_file_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's own command and environment, with loopback for the names that only containers have.

    The risk: an option or variable in the file that a server no longer takes.
    """
    with postgres() as database, ExitStack() as stack:
        parts = _parts(database)
        _make_metrics_role(database)
        ports = {name: any_free_port() for name in ("prefect", "mlflow", "metrics", "page")}

        def here(text: str) -> str:
            text = text.replace("/store", str(tmp_path / "store")).replace("0.0.0.0", "127.0.0.1")
            for name, port in (("prefect", 4200), ("mlflow", 5000), ("metrics", 9464), ("page", 4100)):
                text = re.sub(rf"(127\.0\.0\.1|{name}):{port}", f"127.0.0.1:{ports[name]}", text)
            return text

        def variables(name: str) -> dict[str, str]:
            env = environment(**{key: here(value) for key, value in parts[name]["environment"].items()})
            env["STEMMA_DATABASE_URL"] = env["STEMMA_DATABASE_URL"].replace(
                "postgres:5432", database.rpartition("@")[2].partition("/")[0]
            )
            return env

        env = variables("worker")
        for name in OURS:
            command = [here(word) for word in parts[name]["command"]]
            if name in ports:
                command += ["--port", str(ports[name])]
            stack.enter_context(running(command, variables(name), tmp_path / f"{name}.log"))
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
        run_id = journal.parent.name
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{ports['page']}/run/{run_id}")
        asking = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
        request = urllib.request.Request(f"http://127.0.0.1:{ports['page']}/run/{run_id}", headers=asking)
        assert b"Change a setting and run again" in urllib.request.urlopen(request).read()
        search = f"http://127.0.0.1:{ports['mlflow']}/api/2.0/mlflow/experiments/search"
        wait_until(lambda: "chronicle" in str(post(search, {"max_results": 10})), timeout_s=60)


def _parts(database: str) -> dict[str, Any]:
    """The services of the compose file with the variables of an operator's .env filled in."""
    password = re.search(r":([^:@]+)@", database)
    assert password is not None
    given = {"STEMMA_AUTH": AUTH, "POSTGRES_PASSWORD": password.group(1), "S3_PASSWORD": "s3-password"}
    given["METRICS_PASSWORD"] = "metrics-password"
    text = re.sub(
        r"\$\{(\w+)(?::[?-]([^}]*))?\}", lambda found: given.get(found[1], found[2] or ""), COMPOSE.read_text()
    )
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    program = [sys.executable if word == "python" else word for word in command]
    return subprocess.run(program, env=env, check=False).returncode == 0
