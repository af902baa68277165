"""Why a stage would be built: no artifact answers the request, and this config key, input, source or version differs
from the nearest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from corpus.tokens.chat_template import FILES as TEMPLATE_FILES
from corpus.tokens.chat_template import has_other_template
from infra.fingerprint import canonical, changed_settings, same, within
from infra.store.layout import MANIFEST
from infra.store.manifest import Manifest
from infra.store.store import Store, address_of
from tasks.stage import Node
from training.config import BaseModelConfig, ChatTrainerConfig, PretrainConfig

NEVER_BUILT = "never built here"
PRECISION = "launch.precision"
PACKAGE = "package"
"""The key of an identity that names the installed package of a stage, and its version."""
PACKAGES = {
    "corpus": ("tokenizers", "transformers"),
    "training": ("torch", "transformers", "tokenizers", "mosaicml", "mosaicml-streaming", "numpy"),
    "evaluation": ("torch", "transformers", "tokenizers", "lm-eval", "numpy"),
}
"""Packages whose versions affect the artifacts that the stages of a package make."""
RECORDED_PACKAGES = tuple(dict.fromkeys(name for names in PACKAGES.values() for name in names))


@dataclass(frozen=True)
class Change:
    """One reason to build. `what` is config, input, source, version, package, none (nothing to compare with) or forced.

    key: the dotted config key, the input's or source's name. old, new: short forms of both values, None if absent.
    """

    what: str
    key: str
    old: Any = None
    new: Any = None

    def __str__(self) -> str:
        match self.what:
            case "config" if self.old is None:
                return f"{self.key} = {_short(self.new)} was set"
            case "config" if self.new is None:
                return f"{self.key} = {_short(self.old)} was removed"
            case "config":
                return f"{self.key} changed: {_short(self.old)} → {_short(self.new)}"
            case "input":
                return f"the content of its input {self.key} changed"
            case "source":
                return f"the content of the source {self.key} changed"
            case "package":
                return f"it was built with {self.key} {self.old}, but {self.key} {self.new} is installed"
            case "version":
                return f"the stage's version changed from {self.old} to {self.new}"
            case _:
                return self.key


@dataclass(frozen=True)
class BuildRequest:
    """The request for one build: everything that its fingerprint depends on."""

    stage: str
    version: int
    identity: Mapping[str, Any]
    inputs: Mapping[str, str]
    sources: Mapping[str, str]
    fingerprint: str
    config: Mapping[str, Any]
    """All keys, those at their defaults too."""
    key: str = ""
    """Dotted key of this config in the pipeline's config; `stage` where it is empty."""


def identity_of(node: Node, *, keeps_template: bool = False) -> dict[str, Any]:
    """All of a node's config that affects its result, and the values of `launch.precision` that make another model.

    A model computed in bf16 or fp32 has the same identity, as machine and moment have it.

    keeps_template: the result of `keeps_template`. Earlier versions gave such a model this project's chat template and
        tuned it by that, under the same config.
    """
    identity: dict[str, Any] = canonical(node.config, node.key, measuring=node.measures)
    if keeps_template:
        identity = {**identity, "chat_template": "model"}
    if node.stage.installed:
        identity = {**identity, PACKAGE: str(node.stage.installed)}
    if node.precision == "fp16" or (node.precision == "fp8" and isinstance(node.config, PretrainConfig)):
        return {**identity, "launch": {"precision": node.precision}}
    return identity


def keeps_template(node: Node, inputs: Mapping[str, Manifest], store: Store) -> bool:
    """Return True if a node imports a model with a chat template other than ours, or trains on conversations by one."""
    if isinstance(node.config, BaseModelConfig):
        return node.config.chat_template == "model" and has_other_template(Path(node.config.path))
    if not isinstance(node.config, ChatTrainerConfig) or "model" not in inputs:
        return False
    return has_other_template(store.peek(inputs["model"], *TEMPLATE_FILES))


def changes(request: BuildRequest, others: Iterable[Manifest]) -> list[Change]:
    """Differences from the nearest artifact of the same stage: the one with the fewest differences, then the newest."""
    ranked = sorted(((_differences(request, other), other) for other in others), key=lambda pair: pair[1].age_key)
    if not ranked:
        return [Change("none", NEVER_BUILT)]
    fewest = min(reversed(ranked), key=lambda pair: len(pair[0]))
    return fewest[0] or [Change("none", "its artifact is gone")]


def _differences(request: BuildRequest, other: Manifest) -> list[Change]:
    changes = []
    if request.version != other.version:
        changes.append(Change("version", "version", other.version, request.version))
    for key, old, new in changed_settings(other.identity, other.config, request.identity, request.config):
        path = key if key in (PRECISION, PACKAGE) else f"{request.key or request.stage}.{key}"
        changes.append(Change("config", path, old, new))
    before = {name: item.identity for name, item in other.inputs.items()}
    changes += [Change("input", name) for name, digest in request.inputs.items() if before.get(name) != digest]
    sources = {record.key: record.digest for record in other.sources}
    changes += [Change("source", key) for key, digest in request.sources.items() if sources.get(key) != digest]
    return changes


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def find(node: Node, request: BuildRequest, store: Store) -> Manifest | None:
    """The manifest of the artifact, None if there is none; its files are not inspected.

    One config had several addresses once: a default that was spelled otherwise than its normal form (`1 epoch`) was
    part of the identity when the config came as JSON, by way of the worker, and none when it came from the file; and a
    page's form writes 1 for 1.0. So where the address is empty, the artifact of the same stage, version, inputs and
    sources is taken whose recorded config reads as the same today.
    """
    if (manifest := store.find(request.stage, request.fingerprint)) is not None:
        return manifest
    others = (other for folder, other in store.manifests(request.stage) if folder == store.path(other))
    return max(
        (other for other in others if _answers(node, request, other)),
        key=lambda manifest: manifest.age_key,
        default=None,
    )


def made_by_others(node: Node, manifest: Manifest) -> list[Change]:
    """Differences between the versions that made an artifact and those that its stage would be made by now.

    These are versions of packages that its code calls, and for a training the precision, where one is asked for. The
    artifact's address is the same: `--strict-versions` builds it again.
    """
    installed = installed_versions(PACKAGES.get(node.stage.package, ()))
    recorded = manifest.reproduced_with or manifest.versions
    changes = [
        Change("package", name, recorded[name], installed[name])
        for name in installed
        if node.stage.makes not in ("page", "registration") and recorded.get(name, installed[name]) != installed[name]
    ]
    before = manifest.device.rpartition(", ")[2]
    if node.precision in ("bf16", "fp32") and before in ("bf16", "fp32", "fp16") and before != node.precision:
        changes.append(Change("package", "precision", before, node.precision))
    return changes


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def unreadable(request: BuildRequest, store: Store) -> str:
    """Describe the damage of a folder at the address of an artifact whose manifest cannot be read; "" if there is none.

    An object store holds nothing without a manifest.
    """
    folder = store.layout.artifact(request.stage, request.fingerprint)
    if store.remote is not None or not folder.is_dir() or store.read(folder) is not None:
        return ""
    file = folder / MANIFEST
    return f"its artifact is damaged: {file} is {'unreadable' if file.exists() else 'missing'}"


def _answers(node: Node, request: BuildRequest, other: Manifest) -> bool:
    inputs = {name: item.identity for name, item in other.inputs.items()}
    sources = {record.key: record.digest for record in other.sources}
    if (other.adopted, other.version, inputs, sources) != (None, request.version, request.inputs, request.sources):
        return False
    if address_of(other) != other.fingerprint:
        return False  # it was tampered with
    try:
        recorded = replace(node, config=type(node.config).model_validate(dict(other.config)))
        identity = identity_of(recorded, keeps_template=request.identity.get("chat_template") == "model")
    except (ValidationError, TypeError):
        return False  # keys that no longer exist, or values that are no longer valid
    # Apart from what is requested, its identity may hold only values that its config has and that are today's defaults.
    return (
        same(identity, request.identity) and within(identity, other.identity) and within(other.identity, other.config)
    )
