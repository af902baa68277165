"""A pipeline with documents that a model writes, through the real command: built, repeated, and in its lineage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from corpus.documents.parts import read_documents
from infra.store.manifest import Manifest
from tests.support.programs.command import Answer
from tests.support.services.endpoint import completion, endpoint

Run = Callable[..., Answer]


def manifest_of(store: Path, stage: str) -> tuple[Path, Manifest]:
    (folder,) = (store / stage).iterdir()
    return folder, Manifest.read(folder)


@pytest.mark.slow
def test_generated_documents_go_into_the_tokenizer_and_are_paid_for_once(run: Run, data_pipeline: Path) -> None:
    path, store = data_pipeline / "config.yaml", data_pipeline / "store"
    config = yaml.safe_load(path.read_text())
    with endpoint(lambda body, _: completion(f"It was told again as number {body['seed']}.")) as (url, calls):
        config["generate"] = {"endpoint": {"url": url, "model": "teller"}, "max_documents": 9, "licence": "cc0-1.0"}
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        answer = run("run", path, "--root", store)
        assert answer.code == 0, answer.document["errors"]
        assert {"generate", "tokenizer"} <= answer.with_status("built")
        assert len(calls.bodies) == 9 and (store / "answers" / "answers.sqlite").exists()
    folder, manifest = manifest_of(store, "generate")
    made = [one for one in read_documents(folder) if one.source.startswith("generated/")]
    assert len(made) == 9 == manifest.result["figures"]["made"]
    assert manifest.identity["endpoint"] == {"model": "teller"}
    forced = run("run", path, "--root", store, "--force", "generate")
    assert forced.code == 0, "the endpoint is gone; all answers are kept"
    assert forced.rows()["generate"]["digest"] == manifest.digest and forced.rows()["tokenizer"]["status"] == "reused"
    assert "answers" not in {
        row["artifact"].partition("/")[0] for row in run("ls", "artifacts", "--root", store).document["artifacts"]
    }
