"""Promotes a registered model over the last one, unless it was refused or is worse by more than chance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.release.registrations import REGISTER, newest_registration
from evaluation.results.artifacts import Artifact, read_artifacts
from evaluation.results.comparison import Paired, paired_figures
from infra.errors import ConfigError, GateRefused, Problem, stage_error
from infra.io.json import read_own_json
from infra.lineage import messages
from infra.lineage.outbox import Outbox
from infra.lineage.relay import ensure_relay
from infra.store.ancestry import locate
from infra.store.manifest import InputArtifact, Manifest
from infra.store.promotions import Promotion, Promotions
from infra.store.reference import require_whole, resolve
from infra.store.store import Store

_KINDS = ("benchmarks", "safety")
LESS_IS_BETTER = ("expected maximum toxicity", "toxicity probability")


@dataclass(frozen=True)
class Promoted:
    """Outcome of a promotion or rollback. compared: differences to the one before, over the same items."""

    name: str
    now: Promotion
    before: Promotion | None
    compared: list[dict[str, Any]]


def promote(store: Store, text: str, *, force: bool = False) -> Promoted:
    """Promote the registration that `text` names, or the newest one of the model that it names.

    Raises ConfigError `unknown_artifact`, `not_registered`; GateRefused `rejected` for a model that its gates refused,
    which nothing overrides, and `worse` for one that is worse than the promoted one on the same items with 95 %
    confidence, which `force` does; StageError `damaged`, `model_gone` where what it would put in force is not whole.
    """
    folder, manifest = _registration(store, text)
    store.fetch(manifest, folder)
    require_whole(store, folder, manifest)
    record = read_own_json(folder / "registration.json")
    name, address = str(record["name"]), f"{REGISTER}/{folder.name}"
    if record.get("status") == "rejected":
        reasons = "; ".join(reason["message"] for reason in record["reasons"])
        raise GateRefused(Problem("rejected", address, f"gates rejected it: {reasons}", "promote another model"))
    model = manifest.inputs["model"]
    _require_model(store, address, model)
    promotions = Promotions(store.root)
    history = promotions.history(name)
    before = history[-1] if history else None
    now = Promotion(address, model.path, model.digest, round(time.time(), 3))
    if before is not None and before.registration == address:
        _tell(store, name, manifest)  # once more: a kill may have come before it was reported
        return Promoted(name, before, history[-2] if len(history) > 1 else None, [])
    compared = _compared(store, before, manifest) if before else []
    worse = [row for row in compared if row["worse"]]
    if worse and not force:
        details = "; ".join(
            f"{row['figure']} {row['difference']:+.4g} ({row['low']:+.4g} to {row['high']:+.4g})" for row in worse
        )
        message = f"it is worse than {before.registration if before else ''} on the same items: {details}"
        raise GateRefused(Problem("worse", address, message, "--force promotes it anyway"))
    promotions.promote(name, now, before)
    _tell(store, name, manifest)
    return Promoted(name, now, before, compared)


def rollback(store: Store, name: str | None) -> Promoted:
    """Promote the model that was in force before the current one.

    Raises ConfigError `which_name`; StageError `nothing_to_roll_back`, `damaged`, `model_gone` where what it would put
    in force is not whole.

    Args:
        name: may be left out where one name alone is promoted.
    """
    promotions = Promotions(store.root)
    known = sorted(promotions.all())
    if name is None and len(known) > 1:
        raise ConfigError(
            Problem(
                "which_name",
                "NAME",
                f"models of several names are promoted: {', '.join(known)}",
                "give one of these names",
            )
        )
    name = name or (known[0] if known else "")
    if len(history := promotions.history(name)) > 1:
        folder = store.root / history[-2].registration
        if (registered := store.read(folder)) is None:
            message = f"{history[-2].registration}, which was promoted before, is not in the store"
            raise stage_error("model_gone", name, message, "promote another model; stemma run rebuilds it")
        require_whole(store, store.fetch(registered, folder), registered)
        _require_model(store, history[-2].registration, registered.inputs["model"])
    now, before = promotions.rollback(name)
    if (registered := store.read(store.root / now.registration)) is not None:
        _tell(store, name, registered)
    return Promoted(name, now, before, [])


def _registration(store: Store, text: str) -> tuple[Path, Manifest]:
    folder, manifest = resolve(store, text, [REGISTER])
    if manifest.stage == REGISTER:
        return folder, manifest
    if (registration := newest_registration(store, manifest.digest)) is None:
        message = f"{manifest.stage}/{manifest.fingerprint} was not registered"
        raise ConfigError(Problem("not_registered", text, message, "run a pipeline whose config has `register`"))
    return registration


def _require_model(store: Store, address: str, model: InputArtifact) -> None:
    located = locate(store, model)
    if located is None:
        message = f"the registered model {model.path} is no longer in the store, or its bytes have changed"
        raise stage_error("model_gone", address, message, "stemma run CONFIG rebuilds it")
    require_whole(store, *located)


def _compared(store: Store, before: Promotion, manifest: Manifest) -> list[dict[str, Any]]:
    """The candidate's evaluations less those of the promoted model, over the same items."""
    old = store.read(store.root / before.registration)
    if old is None:  # collected since; there is nothing to compare with
        return []
    rows = []
    for step, first, second in _pairs(_evaluations(store, old), _evaluations(store, manifest)):
        for pair in paired_figures(first, second):
            rows.append(
                {
                    "figure": f"{step}: {pair.figure}" if step else pair.figure,
                    "difference": pair.difference.value,
                    "low": pair.difference.low,
                    "high": pair.difference.high,
                    "worse": is_worse(pair),
                }
            )
    return sorted(rows, key=lambda row: str(row["figure"]))


def is_worse(pair: Paired) -> bool:
    """Return True if the whole interval is on the worse side; the length of continuations has no worse side."""
    if pair.unit == "characters":
        return False
    return pair.difference.low > 0 if pair.figure in LESS_IS_BETTER else pair.difference.high < 0


def _evaluations(store: Store, registration: Manifest) -> dict[str, dict[str, Artifact]]:
    """Steps of benchmarks and of safety of the model that was registered, by kind and name."""
    digest = registration.inputs["model"].digest
    evaluations: dict[str, dict[str, Artifact]] = {kind: {} for kind in _KINDS}
    for name, source in registration.inputs.items():
        kind = next((kind for kind in _KINDS if source.stage.startswith(kind)), "")
        manifest = store.read(store.root / source.path) if kind else None
        if manifest and "model" in manifest.inputs and manifest.inputs["model"].digest == digest:
            evaluations[kind][name] = read_artifacts({kind: store.fetch(manifest, store.root / source.path)})[kind]
    return evaluations


def _pairs(
    before: Mapping[str, Mapping[str, Artifact]], now: Mapping[str, Mapping[str, Artifact]]
) -> Iterator[tuple[str, Artifact, Artifact]]:
    """Steps of both models to hold against each other: those of one name, and of those without such a one every two of
    a kind, since the models may come of different pipelines. With the step's name where a kind has several."""
    for kind in _KINDS:
        first, second = before[kind], now[kind]
        both = first.keys() & second.keys()
        pairs = [(name, name) for name in sorted(both)]
        pairs += [(old, new) for old in sorted(first.keys() - both) for new in sorted(second.keys() - both)]
        for old, new in pairs:
            yield new if len(second) > 1 else "", first[old], second[new]


def _tell(store: Store, name: str, registration: Manifest) -> None:
    """MLflow's alias follows; the store's own record is what counts."""
    digest = registration.inputs["model"].digest
    Outbox(store.root).send(messages.PromoteModel(registration.build_id, name, digest, time.time()))
    ensure_relay(store.root)


def as_json(done: Promoted) -> dict[str, Any]:
    return {
        "name": done.name,
        "promoted": asdict(done.now),
        "before": asdict(done.before) if done.before else None,
        "compared": done.compared,
    }
