"""Mitigations, and gates against the promoted model, as steps of a pipeline through the real command.

The risk of these: a stage that is right alone does not get what it needs from a run, or is reused when another model
was promoted. What the stages do is in tests/evaluation/, and in `make test`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.prefect.promotion import promote, rollback
from infra.lineage.relay import RELAY
from infra.store.store import Store
from tests.evaluation.conftest import make_model
from tests.support.programs.command import Answer, stemma, write_config

pytestmark = pytest.mark.long

Ask = Callable[..., Answer]
GATE = {"figure": "model.parameters", "at_most": 0, "against": "promoted", "shown": "kept"}


@pytest.fixture(scope="module")
def built(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Ask, Store, Answer]:
    """How to ask the command of a pipeline of two finished models, its store, and what its one run answered."""
    folder = tmp_path_factory.mktemp("weighed")
    models = [str(make_model(folder / name, seed)) for seed, name in enumerate(("one", "two"))]
    sampling = {"limit": 2, "samples_per_prompt": 2, "max_new_tokens": 4}
    tried = [{"kind": "prefix", "text": "Kind words.\n"}, {"kind": "rerank", "candidates": 2}]
    steps: dict[str, Any] = {
        "other": {"uses": "base_model", "path": models[1]},
        "milder": {
            "uses": "mitigations", "inputs": {"model": "base_model", "tuned": "other"}, "tried": tried,
            "tasks": ["cloze"], "limit": 4, "toxicity": sampling,
        },
        "earlier": {"uses": "register", "inputs": {"model": "other"}, "name": "duel"},
        "later": {"uses": "register", "inputs": {"model": "base_model"}, "name": "duel", "gates": [GATE]},
    }  # fmt: skip
    config = write_config(folder / "config.yaml", {"name": "t", "base_model": {"path": models[0]}, "steps": steps})

    def ask(command: str, *arguments: str) -> Answer:
        return stemma(command, config, "--root", folder / "store", *arguments, env=env)

    answer = ask("run")
    assert answer.code == 0, (answer.document["errors"], answer.stderr)
    assert answer.with_status("built") == {"base_model", *steps}
    return ask, Store(folder / "store"), answer


def test_mitigations_are_measured_by_a_run(built: tuple[Ask, Store, Answer]) -> None:
    _, _, answer = built
    folder = Path(answer.rows()["milder"]["path"])
    figures = json.loads((folder / "manifest.json").read_text())["result"]["figures"]
    changes = {"prefix_cloze", "tuned_cloze", "prefix_toxicity", "rerank_toxicity", "tuned_toxicity"}
    assert {f"{name}_change_{bound}" for name in changes for bound in ("low", "high")} <= figures.keys()
    assert "rerank_cloze_change" not in figures, "which answer is kept moves no likelihood"
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["plain", "prefix", "rerank", "tuned"]
    assert rows[2]["drawn_per_kept"] == 2 and len((folder / "aux/continuations.jsonl").read_text().splitlines()) == 2


def test_another_promotion_has_a_model_judged_anew(
    built: tuple[Ask, Store, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RELAY, "off")
    ask, store, answer = built
    rows = answer.rows()
    first, earlier = (rows[name]["fingerprint"] for name in ("later", "earlier"))

    def verdict(path: str) -> dict[str, Any]:
        (found,) = json.loads((Path(path) / "registration.json").read_text())["gates"]
        return dict(found)

    assert verdict(rows["later"]["path"])["difference"] is None, "nothing was promoted"
    promote(store, f"register/{first}")
    assert ask("check").rows()["later"]["status"] == "reuse", "a model is not held against itself"
    promote(store, f"register/{earlier}")
    row = ask("check").rows()["later"]
    assert row["status"] == "build" and "register.gates" in json.dumps(row["because"])
    again = ask("run", "--only", "later")
    assert again.code == 0 and again.with_status("built") == {"later"}, again.document["errors"]
    found = verdict(again.rows()["later"]["path"])
    assert found["passed"] and found["difference"]["registration"] == f"register/{earlier}"
    assert (found["difference"]["value"], found["difference"]["by"]) == (0, "values")
    manifest = json.loads((Path(again.rows()["later"]["path"]) / "manifest.json").read_text())
    assert "register.gates" in {one["key"] for one in manifest["sources"]}
    rollback(store, "duel")
    assert ask("check").rows()["later"]["fingerprint"] == first, "with the promotion the new verdict goes too"
