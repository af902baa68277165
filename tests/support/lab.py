"""Machines that share a root on an object store, each with a cache of its own, for commands under test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.store.roots import root_folder
from infra.store.store import Store
from tests.support.programs.command import Answer, Command, start, stemma
from tests.support.programs.processes import COLD
from tests.support.services.object_store import bucket

ROOT = "s3://models/lab"


class Lab:
    """Machines that share a bucket. `on("a")` is the environment of one, whose cache is the folder `a`."""

    def __init__(self, folder: Path, env: dict[str, str], variables: dict[str, str], client: Any, proxy: Any) -> None:
        self.folder, self.client, self.proxy = folder, client, proxy
        self.env = {**env, **variables}

    def on(self, host: str) -> dict[str, str]:
        return {**self.env, "STEMMA_CACHE": str(self.folder / host)}

    def cache(self, host: str) -> Path:
        (found,) = (self.folder / host).iterdir()
        return found

    def run(self, host: str, config: Path, *arguments: str) -> Answer:
        return stemma("run", config, "--root", ROOT, *arguments, env=self.on(host))

    def start(self, host: str, config: Path) -> Command:
        return start("run", config, "--root", ROOT, env={**self.on(host), **COLD})

    def objects(self, end: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="models")
        return [row["Key"] for page in pages for row in page.get("Contents", []) if row["Key"].endswith(end)]

    def manifests(self) -> dict[str, dict[str, Any]]:
        """By stage, each of which has one artifact."""
        found = {}
        for key in self.objects("/manifest.json"):
            one = json.loads(self.client.get_object(Bucket="models", Key=key)["Body"].read())
            assert found.setdefault(one["stage"], one) is one, f"two artifacts of {one['stage']}"
        return found

    def downloaded(self) -> set[str]:
        """The stages of whose artifacts files were asked for."""
        return {path.split("/")[4] for path in self.proxy.requests if path.startswith("/models/lab/.files/")}

    def ask(self, host: str, *arguments: str | Path) -> dict[str, Any]:
        """The document of a command that is to succeed."""
        answer = stemma(*arguments, "--root", ROOT, env=self.on(host))
        assert answer.code == 0, (arguments, answer.document["errors"], answer.stderr)
        return answer.document


@contextmanager
def opened_lab(
    port: int, proxy: Any, env: dict[str, str], database: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """An empty bucket, and machines whose caches are below a folder; this process sees both as the commands do."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "6")
    # What a busy machine delays is no fault that a test put there.
    monkeypatch.setenv("STEMMA_S3_READ_TIMEOUT_S", "10")
    monkeypatch.setenv("STEMMA_DATABASE_URL", database)
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_S3"))}
    with bucket(port, "models") as client:
        yield Lab(folder, env, {**variables, "STEMMA_DATABASE_URL": database}, client, proxy)


def publish(built: Path, cache: Path, *stages: str) -> None:
    """Puts artifacts of a store in a folder into the bucket, of these stages or of all, each committed as a build
    commits it; those that are there already stay."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("STEMMA_CACHE", str(cache))
        store = Store(root_folder(ROOT))
    for folder, manifest in Store(built, reading=True).manifests():
        if (stages and manifest.stage not in stages) or store.find(manifest.stage, manifest.fingerprint):
            continue
        unfinished = store.layout.work(manifest.stage, manifest.fingerprint) / "artifact"
        shutil.copytree(folder, unfinished)
        store.commit(unfinished, manifest)
