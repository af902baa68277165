"""Artifacts that an earlier version built are found, though their address would be another one today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.config.graph import graph
from flows.config.read import parse
from infra.fingerprint import canonical, fingerprint
from infra.store.manifest import InputArtifact, Manifest, SourceRecord
from infra.store.store import Store
from tasks.building.explain import BuildRequest, find
from tasks.stage import Node
from tests.infra.store.pin import SAMPLE

# Of SAMPLE's stages without a duration, version 1, when the config came from the file and when it came to the worker as
# JSON, as d080dfe named them.
FROM_FILE = {"pretrain": "0b2b93f121238022", "reward_model": "6e64b5bf46ef2eff"}
BY_WORKER = {"pretrain": "1adc7199833814c8", "reward_model": "f59109759bd978e0"}
SPELLED = {"pretrain": "2500000000 tokens", "reward_model": "1 epochs"}
VERSIONS = {"pretrain": 3, "reward_model": 2}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def node_of(stage: str, **changes: Any) -> Node:
    without = {key: value for key, value in SAMPLE["pretrain"].items() if key != "duration"}
    section = {**(without if stage == "pretrain" else {}), **changes}
    node = graph(parse({**SAMPLE, stage: section}))[stage]
    return replace(node, stage=replace(node.stage, version=VERSIONS[stage]))


def asked_of(node: Node, **spelled: str) -> BuildRequest:
    """What the node asks for; spelled: keys at their default that stand in the identity nevertheless."""
    identity = {**canonical(node.config), **spelled}
    inputs = {key: f"digest of {up}" for key, up in node.inputs.items()}
    sources = {"source": "digest of its bytes"}
    name = fingerprint(node.id, node.stage.version, identity, inputs, sources)
    return BuildRequest(
        node.id, node.stage.version, identity, inputs, sources, name, node.config.model_dump(mode="json")
    )


@pytest.mark.parametrize("stage", ["pretrain", "reward_model"])
def test_the_address_is_that_of_the_file(stage: str) -> None:
    assert asked_of(node_of(stage)).fingerprint == FROM_FILE[stage]
    assert asked_of(node_of(stage, duration=SPELLED[stage])).fingerprint == FROM_FILE[stage]


def build(store: Store, request: BuildRequest, **facts: Any) -> Manifest:
    """An artifact as the version of d080dfe would have built it."""
    inputs = {
        name: InputArtifact("any", "0" * 16, digest, f"any/{'0' * 16}") for name, digest in request.inputs.items()
    }
    sources = tuple(SourceRecord(key, digest) for key, digest in request.sources.items())
    unfinished = store.layout.work(request.stage, request.fingerprint) / "artifact"
    unfinished.mkdir(parents=True)
    (unfinished / "weights").write_text("weights")
    files = store.describe_files(unfinished)
    record = {
        "stage": request.stage,
        "version": request.version,
        "fingerprint": request.fingerprint,
        "digest": store.content_digest(files),
        "build_id": request.fingerprint,
        "config": request.config,
        "identity": request.identity,
        "inputs": inputs,
        "requires": {},
        "sources": sources,
        "files": files,
        "result": {},
    }
    place = store.commit(unfinished, Manifest(**{**record, **facts}))
    return Manifest.read(place)


@pytest.mark.parametrize("stage", ["pretrain", "reward_model"])
def test_what_the_worker_built_is_found_by_the_file_and_what_the_file_built_by_the_worker(
    store: Store, stage: str
) -> None:
    node = node_of(stage)
    by_worker = asked_of(node, duration=SPELLED[stage])
    assert by_worker.fingerprint == BY_WORKER[stage]
    request = asked_of(node)
    assert find(node, request, store) is None
    built = build(store, by_worker)
    assert find(node, request, store) == built
    from_file = build(store, request)
    assert find(node, request, store) == from_file


def test_numbers_that_a_page_wrote_are_the_same_numbers(store: Store) -> None:
    theta = {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True}
    node = node_of("pretrain", model={"transformers": theta})
    built = build(store, asked_of(node))
    page = node_of("pretrain", model={"transformers": {**theta, "rope_theta": 10000}})
    assert find(page, asked_of(page), store) == built
    other = node_of("pretrain", model={"transformers": {**theta, "tie_word_embeddings": 1}})
    assert find(other, asked_of(other), store) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"version": 1},
        {"inputs": {}},
        {"sources": ()},
        {"adopted": {"from": "elsewhere"}},
        {"identity": {"duration": "1 epochs", "max_length": 7}},
        {"identity": {"duration": "2 epochs"}},
        {"config": {"max_length": 7}},
        {"config": {"no_such_key": 1}},
        {"fingerprint": "0" * 16},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_what_was_asked_for_otherwise_or_was_tampered_with_is_not_taken(store: Store, facts: dict[str, Any]) -> None:
    node = node_of("reward_model")
    build(store, asked_of(node, duration=SPELLED["reward_model"]), **facts)
    assert find(node, asked_of(node), store) is None


def test_of_two_former_ones_the_newest_is_taken_and_a_replaced_one_never(store: Store) -> None:
    node = node_of("pretrain", model={"transformers": {"model_type": "llama", "rope_theta": 1, "x": 1}})
    for day, theta in ((1, 1.0), (2, 1)):
        spelled = node_of("pretrain", model={"transformers": {"model_type": "llama", "rope_theta": theta, "x": 1.0}})
        newest = build(store, asked_of(spelled), finished=f"2026-01-0{day}")
    assert find(node, asked_of(node), store) == newest
    place = store.path(newest)
    place.rename(place.with_name(f"{place.name}.{newest.digest[:8]}"))
    found = find(node, asked_of(node), store)
    assert found is not None
    assert found.finished == "2026-01-01"
