"""What is promoted bears on a registration's identity only where a gate asks for it, and never a model on its own."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.config import RegisterConfig
from infra.store.manifest import Manifest
from infra.store.promotions import Promotion, Promotions
from infra.store.store import Store
from tasks.building.build import build_request, ensure
from tasks.building.context import BuildContext
from tasks.building.explain import changes
from tasks.building.promoted import held_against
from tasks.stage import Node
from tasks.stages import STAGES
from tests.evaluation.pipeline import write_pipeline

GATE = {"figure": "model.reward_gain", "at_least": 0, "against": "promoted"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    folders = write_pipeline(tmp_path / "store", ["pretrain", "sft", "rlhf", "register"])
    (tmp_path / "store" / "format").write_text("1\n")
    for name in ("first", "second"):
        other = folders["register"].with_name(name)
        other.mkdir()
        (other / "registration.json").write_text(json.dumps({"name": name}))
    return Store(tmp_path / "store")


def test_another_promoted_model_is_a_source_and_the_own_is_not(store: Store) -> None:
    model = next(one for _, one in store.manifests("rlhf"))
    node = Node("register", STAGES["register"], RegisterConfig.model_validate({"name": "demo", "gates": [GATE]}))
    promotions = Promotions(store.root)

    def promote(registration: str, digest: str) -> None:
        one = Promotion(f"register/{registration}", "rlhf/x", digest, 0.0)
        promotions.promote("demo", one, promotions.promoted("demo"))

    def asked(of: Node, model: Manifest = model) -> tuple[str, list[str]]:
        held = held_against(of, {"model": model}, store)
        found = build_request(held, {"model": model}, store)
        return found.fingerprint, sorted(found.sources)

    nothing = asked(node)
    assert nothing[1] == []
    promote("first", "a" * 64)
    first = asked(node)
    assert first[1] == ["register.gates"] and first[0] != nothing[0]
    promote("second", model.digest)
    assert asked(node) == first, "the model itself is promoted: it is held against the one before it"
    own = Manifest(**{**vars(model), "digest": "b" * 64})
    second = asked(node, own)
    assert second[1] == ["register.gates"]
    assert asked(replace(node, path="steps.release", id="release"), own) == second, "steps share artifacts"
    promotions.rollback("demo")
    assert asked(node) == first
    plain = replace(node, config=RegisterConfig.model_validate({"gates": [{**GATE, "against": None}]}))
    assert asked(plain)[1] == []

    (store.root / "register/first/registration.json").unlink()
    assert asked(node) == nothing, "what is gone can be compared with no more"


def test_why_names_the_gates(store: Store) -> None:
    model = next(one for _, one in store.manifests("rlhf"))
    config = RegisterConfig.model_validate({"name": "demo", "gates": [GATE]})
    node = Node("register", STAGES["register"], config)
    before = build_request(node, {"model": model}, store)
    built = next(one for _, one in store.manifests("register"))
    built = Manifest(
        **{**vars(built), "identity": before.identity, "version": before.version, "inputs": {"model": model.as_input()}}
    )
    Promotions(store.root).promote("demo", Promotion("register/first", "rlhf/x", "a" * 64, 0.0), None)
    after = build_request(held_against(node, {"model": model}, store), {"model": model}, store)
    (change,) = changes(after, [replace(built, sources=())])
    assert change.key == "register.gates" and "source" in str(change)


def test_a_build_is_given_the_record_and_kept_as_it_was_judged(store: Store) -> None:
    """A gain of 0.62 against one of 0.5, in the process of the stage."""
    record = {"name": "demo", "figures": {"model.reward_gain": 0.5}}
    (store.root / "register/first/registration.json").write_text(json.dumps(record))
    model = next(one for _, one in store.manifests("rlhf"))
    config = RegisterConfig.model_validate({"name": "demo", "gates": [GATE]})
    node = Node("register", STAGES["register"], config)
    Promotions(store.root).promote("demo", Promotion("register/first", "rlhf/x", "a" * 64, 0.0), None)
    context = BuildContext(store, "demo", "r")
    built, again = (ensure(node, {"model": model}, {}, context) for _ in range(2))
    assert (built.status, again.status) == ("built", "reused")
    assert [one.key for one in built.manifest.sources] == ["register.gates"] and set(built.manifest.inputs) == {"model"}
    (gate,) = json.loads((built.path / "registration.json").read_text())["gates"]
    assert gate["passed"] and gate["difference"]["registration"] == "register/first"
    assert gate["difference"]["value"] == pytest.approx(0.12) and gate["difference"]["by"] == "values"


def test_a_clock_that_is_set_back_while_a_stage_works_gives_it_no_time_below_zero(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = next(one for _, one in store.manifests("rlhf"))
    node = Node("register", STAGES["register"], RegisterConfig.model_validate({"name": "demo"}))
    now, since = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now - 1000 * (time.monotonic() - since))
    built = ensure(node, {"model": model}, {}, BuildContext(store, "demo", "r"))
    assert built.manifest.finished < built.manifest.started
    assert 0 < built.manifest.seconds < 600
