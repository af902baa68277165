"""Artifacts of other package versions or precisions: what is reported, what is rebuilt, what is another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from corpus.tokens.chat_template import CHAT_TEMPLATE, EARLIER_TEMPLATES
from flows.config.graph import graph
from flows.config.read import parse
from infra.store.manifest import SourceRecord
from infra.store.store import Store
from tasks.building.build import build_request
from tasks.building.explain import find, identity_of
from tasks.stage import Node
from tests.infra.store.pin import SAMPLE
from tests.support.artifacts import make_artifact
from tests.support.programs.command import Answer

Run = Callable[..., Answer]
HERE = metadata.version("tokenizers")
TOLD = f"it was built with tokenizers 0.0.1, but tokenizers {HERE} is installed"


def test_what_other_versions_made_is_reused_told_and_built_again_on_demand(run: Run, data_pipeline: Path) -> None:
    config, root = data_pipeline / "config.yaml", data_pipeline / "store"
    place = Path(run("check", config, "--root", root).rows()["tokenizer"]["path"]) / "manifest.json"
    manifest = json.loads(place.read_text())
    manifest["versions"]["tokenizers"] = "0.0.1"
    place.write_text(json.dumps(manifest))

    told = run("check", config, "--root", root)
    assert told.with_status("build") == set() and told.rows()["tokenizer"]["made_by"] == [TOLD]
    assert {name for name, row in told.rows().items() if row["made_by"]} == {"tokenizer"}
    strict = run("check", config, "--root", root, "--strict-versions")
    assert strict.with_status("build") == {"tokenizer"} and strict.rows()["tokenizer"]["because"] == [TOLD]

    assert run("run", config, "--root", root).with_status("built") == set()
    again = run("run", config, "--root", root, "--strict-versions")
    assert again.with_status("built") == {"tokenizer"}
    kept = json.loads(place.read_text())
    assert kept["digest"] == manifest["digest"] and kept["build_id"] == manifest["build_id"]
    assert kept["versions"] == manifest["versions"] and kept["reproduced_with"]["tokenizers"] == HERE
    assert run("check", config, "--root", root, "--strict-versions").with_status("build") == set()


@pytest.mark.parametrize(
    ("precision", "others"),
    [
        ("auto", set()),
        ("bf16", set()),
        ("fp32", set()),
        ("fp8", {"pretrain"}),
        ("fp16", {"pretrain", "sft", "reward_model", "rlhf"}),
    ],
)
def test_precisions_that_make_another_model_are_part_of_its_identity(precision: str, others: set[str]) -> None:
    def identities(**launch: Any) -> dict[str, Any]:
        return {name: identity_of(node) for name, node in graph(parse({**SAMPLE, "launch": launch})).items()}

    usual, found = identities(), identities(precision=precision)
    changed = {name for name in usual if usual[name] != found[name]}
    assert changed == others | {f"measure_{name}" for name in others}
    assert all(found[name]["launch"] == {"precision": precision} for name in changed)


TUNED = ("sft", "reward_model", "rlhf", "measure_sft", "measure_reward_model", "measure_rlhf")


@pytest.mark.parametrize(
    ("files", "is_other"),
    [
        ({"chat_template.jinja": "{{ messages[0].content }}"}, True),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages[0].content }}"}'}, True),
        ({"chat_template.jinja": CHAT_TEMPLATE}, False),
        ({"chat_template.jinja": EARLIER_TEMPLATES[0]}, False),
        ({"tokenizer_config.json": "{}"}, False),
    ],
)
def test_a_model_that_was_tuned_by_our_template_is_not_taken_for_one_by_its_own(
    files: dict[str, str], is_other: bool, tmp_path: Path
) -> None:
    """Versions before replaced a base model's template, and tuned by ours whatever template was there."""
    store, folder = Store(tmp_path / "store"), tmp_path / "downloaded"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    tuning = dict.fromkeys(("instructions", "preferences", "sft", "reward_model", "rlhf"))
    nodes = graph(parse({"name": "tuned", **tuning, "base_model": {"path": str(folder)}}))
    model = make_artifact(store, "base_model", files)
    data = make_artifact(store, "instructions", {"train.jsonl": "", "heldout.jsonl": ""})

    def as_before(node: Node) -> bool:
        """Whether the artifact is taken that an earlier version made, which knew nothing of templates."""
        node = replace(node, stage=replace(node.stage, version=1))  # as of `make_artifact`
        inputs = {name: model if name == "model" else data for name in node.inputs}
        request = build_request(node, inputs, store)
        sources = tuple(SourceRecord(key, digest, {}) for key, digest in request.sources.items())
        config = {key: value for key, value in request.config.items() if not key.startswith("chat_template")}
        made = make_artifact(store, node.folder, {"out": "x"}, inputs=inputs, config=config, sources=sources)
        found = find(node, request, store)
        assert found is None or found.fingerprint == made.fingerprint
        return found is not None

    assert {name: as_before(nodes[name]) for name in ("base_model", *TUNED)} == dict.fromkeys(
        ("base_model", *TUNED), not is_other
    )
    ours = graph(parse({"name": "ours", "base_model": {"path": str(folder), "chat_template": "stemma"}}))["base_model"]
    assert build_request(ours, {}, store).identity["chat_template"] == "stemma"
