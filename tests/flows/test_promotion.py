"""What `stemma promote` and `stemma rollback` do with registrations: take, refuse, go back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flows.execution import RELAY, refused_by
from flows.promotion import promote, rollback
from infra.errors import ConfigError, GateRefused, StageError
from infra.lineage.outbox import Outbox
from infra.store.promotions import Promotions
from infra.store.store import Store
from tests.evaluation.pipeline import write_pipeline

REASON = {"code": "gate_refused", "path": "register.gates.0", "message": "a.b is 1, expected at most 0", "fix": ""}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A pipeline with its registration, and a later one of the same model that a gate refused."""
    monkeypatch.setenv(RELAY, "off")
    folders = write_pipeline(tmp_path / "store")
    (tmp_path / "store" / "format").write_text("1\n")
    taken = folders["register"]
    refused = taken.with_name("f" * 16)
    shutil.copytree(taken, refused)
    manifest = json.loads((refused / "manifest.json").read_text())
    manifest |= {"fingerprint": refused.name, "finished": "2099-01-01T00:00:00.000+00:00"}
    (refused / "manifest.json").write_text(json.dumps(manifest))
    (taken / "registration.json").write_text(json.dumps({"name": "demo", "status": "registered", "reasons": []}))
    (refused / "registration.json").write_text(json.dumps({"name": "demo", "status": "rejected", "reasons": [REASON]}))
    return Store(tmp_path / "store")


def test_a_refused_model_is_never_promoted(store: Store) -> None:
    with pytest.raises(GateRefused, match="expected at most 0") as error:
        promote(store, "register", force=True)
    assert error.value.exit_code == 3 and Promotions(store.root).all() == {}
    refused, taken = (store.root / "register" / name for name in ("f" * 16, _taken(store)))
    assert [problem.message for problem in refused_by(refused)] == [REASON["message"]] and not refused_by(taken)


def test_a_promotion_is_recorded_and_told(store: Store) -> None:
    done = promote(store, f"register/{_taken(store)}")
    assert done.name == "demo" and done.before is None and done.now.model.startswith("rlhf/")
    assert Promotions(store.root).promoted("demo") == done.now
    assert promote(store, f"register/{_taken(store)}").now == done.now
    assert len(Promotions(store.root).history("demo")) == 1
    assert len(Outbox(store.root).paths()) == 1
    with pytest.raises(StageError, match="no earlier promotion"):
        rollback(store, None)


def test_a_model_that_was_not_registered_is_named(store: Store) -> None:
    with pytest.raises(ConfigError, match="was not registered"):
        promote(store, "sft")


def _taken(store: Store) -> str:
    return next(folder.name for folder, _ in store.manifests("register") if not folder.name.startswith("ff"))
