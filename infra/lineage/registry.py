"""Logged models and registered versions in MLflow, each made once, regardless of the number of requests.

Their files are put where its page looks for them, without sending bytes through its server.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.io.files import link_or_copy
from infra.io.json import parse_own_json
from infra.lineage import page
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.messages import PromoteModel, RegisterModel
from infra.lineage.tracking import artifacts_folder


def artifact_folder(root: Path, uri: str) -> Path:
    """The folder behind an address such as `mlflow-artifacts:/quickstart/1a2b/artifacts`.

    Raises ValueError for an address that lies anywhere else.
    """
    parsed = urlparse(uri)
    base = artifacts_folder(root)
    folder = base.joinpath(parsed.path.lstrip("/"))
    if parsed.scheme != "mlflow-artifacts" or base not in folder.parents or ".." in folder.parts:
        raise ValueError(f"{uri} does not lie among the artifacts of this store")
    return folder


def put_copies(paths: Iterable[str], folder: Path) -> None:
    """Copy small files; a file that has disappeared in the meantime is left out."""
    for path in map(Path, paths):
        if path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _replace(path, folder / path.name, shutil.copyfile)


def put_links(source: Path, folder: Path) -> None:
    """Give each payload file of an artifact a second name, or make a copy on another file system.

    Raises FileNotFoundError if the artifact is gone.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"no such artifact: {source}")
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and relative.parts[0] != "aux":
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, target, link_or_copy)


def _replace(source: Path, target: Path, put: Callable[[Path, Path], object]) -> None:
    hidden = target.with_name(f".{target.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)
    put(source, hidden)
    hidden.replace(target)


VERSIONS_TAG = "mlflow.modelVersions"
NEWEST = "newest"
"""The alias of the version that was registered last: `models:/NAME@newest`. MLflow keeps `latest` for itself."""
PROMOTED = "promoted"
"""The alias of the version that `stemma promote` chose: `models:/NAME@promoted`."""
CARD = "README.md"
"""The model card's name among a model's files, as the Hugging Face hub has it."""


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if path and Path(path).is_file() else ""


class Registry:
    """The models of one tracking store."""

    def __init__(self, root: Path, client: MlflowClient, ledger: Ledger) -> None:
        self._root = root
        self._client = client
        self._ledger = ledger

    def register(self, run: DeliveredRun, message: RegisterModel) -> None:
        """A version of a registered model, made once, whose files lie where MLflow's page looks for them."""
        model_id = self.logged_model(run, message.digest, message.name)
        model = self._client.get_logged_model(model_id)
        folder = artifact_folder(self._root, model.artifact_location)
        put_links(Path(message.path), folder)
        card = _read(message.card)
        if card:
            (folder / CARD).write_text(card, encoding="utf-8")
        self._ensure(message.name)
        versions = self._client.search_model_versions(f"name = '{quoted(message.name)}'")
        existing = [version for version in versions if version.tags.get("stemma.digest") == message.digest]
        tags = {
            **message.tags,
            "stemma.digest": message.digest,
            "stemma.build_id": message.build_id,
            "stemma.fingerprint": str(run.about.get("fingerprint", "")),
        }
        description = page.description(message.description, card)
        if existing:
            version = existing[0]
            if card and version.description != description:  # measured again since
                self._client.update_model_version(message.name, str(version.version), description)
            for key in ("status", "reason", "gates"):  # judged again since, by other gates
                if (value := message.tags.get(key)) is not None and version.tags.get(key) != value:
                    self._client.set_model_version_tag(message.name, str(version.version), key, value)
        else:
            version = self._client.create_model_version(
                message.name,
                f"models:/{model_id}",
                run.run_id,
                tags=tags,
                description=description or None,
                model_id=model_id,
                await_creation_for=0,
            )
        if message.tags.get("status") != "rejected":
            self._client.set_registered_model_alias(message.name, NEWEST, str(version.version))
        # MLflow's server writes this link by itself; without a server it is missing.
        linked = parse_own_json(self._client.get_logged_model(model_id).tags.get(VERSIONS_TAG, "[]"))
        if not any(str(link["version"]) == str(version.version) and link["name"] == message.name for link in linked):
            linked.append({"name": message.name, "version": version.version})
            self._client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps(linked)})

    def promote(self, message: PromoteModel) -> None:
        """Move the alias `promoted` to the version of these bytes, in one call; do nothing if MLflow has none."""
        versions = self._client.search_model_versions(f"name = '{quoted(message.name)}'")
        existing = [version for version in versions if version.tags.get("stemma.digest") == message.digest]
        if existing:
            self._client.set_registered_model_alias(message.name, PROMOTED, str(existing[0].version))

    def delete_twin_versions(self, pipeline: DeliveredRun) -> None:
        """Of versions that a request which timed out made twice, one that has an alias stays, else the first.

        Looks at the models that a pipeline run made or used.
        """
        for row in self._ledger.rows(pipeline.build_id).values():
            builder = self._ledger.run(row.get("build_id", ""))
            built_versions = self._client.search_model_versions(f"run_id = '{builder.run_id}'") if builder else []
            twins: dict[tuple[str, str], list[Any]] = {}
            for version in built_versions:
                if digest := version.tags.get("stemma.digest"):
                    twins.setdefault((version.name, digest), []).append(version)
            for (name, _), versions in twins.items():
                if len(versions) > 1:
                    # A number from a database, a text from a server.
                    aliases = self._client.get_registered_model(name).aliases
                    aliased = {str(number) for alias, number in aliases.items() if alias != NEWEST}
                    versions.sort(key=lambda version: (str(version.version) not in aliased, int(version.version)))
                    for twin in versions[1:]:
                        if str(twin.version) not in aliased:
                            self._client.delete_model_version(name, twin.version)
                            if str(aliases.get(NEWEST)) == str(twin.version):
                                self._client.set_registered_model_alias(name, NEWEST, str(versions[0].version))

    def logged_model(self, run: DeliveredRun, digest: str, name: str) -> str:
        """The logged model of a payload, made without opening a single weight."""
        model_id = self._ledger.model_id(digest)
        if model_id:
            return model_id
        models = self._client.search_logged_models([run.experiment_id], f"tags.`stemma.digest` = '{quoted(digest)}'")
        if models:
            model = models[0]
        else:
            tags = {"stemma.digest": digest, "stemma.build_id": run.build_id, "stemma.stage": run.about["stage"]}
            model = self._client.create_logged_model(
                run.experiment_id, page.slug(name), run.run_id, tags, model_type="language model"
            )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._ledger.model_made(digest, run.experiment_id, model.model_id)
        return str(model.model_id)

    def _ensure(self, name: str) -> None:
        try:
            self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._client.create_registered_model(name)


def quoted(text: str) -> str:
    """Return a text in single quotes for MLflow's search language."""
    return text.replace("'", "''")
