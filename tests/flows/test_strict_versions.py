"""Artifacts of other package versions or precisions: what is reported, what is rebuilt, what is another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flows.config import parse
from flows.graph import graph
from tasks.explain import identity_of
from tests.command import Answer
from tests.infra.store.pin import SAMPLE

Run = Callable[..., Answer]
HERE = metadata.version("tokenizers")
TOLD = f"tokenizers 0.0.1 made it, tokenizers {HERE} is here"


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
