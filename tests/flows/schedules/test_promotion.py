"""What `stemma promote` and `stemma rollback` do with registrations: take, refuse, go back."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.results.comparison import Paired
from evaluation.statistics.intervals import Interval
from flows.prefect.execution import refused_by
from flows.prefect.promotion import is_worse, promote, rollback
from infra.errors import ConfigError, GateRefused, StageError
from infra.lineage.outbox import Outbox
from infra.lineage.relay import RELAY
from infra.store.manifest import File, Manifest
from infra.store.promotions import Promotions
from infra.store.store import Store
from tests.evaluation.pipeline import write_pipeline
from tests.support.programs.command import environment, stemma

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
    again = promote(store, f"register/{_taken(store)}")
    assert (again.now, again.before) == (done.now, None), "nothing was promoted before it"
    assert len(Promotions(store.root).history("demo")) == 1
    assert len(Outbox(store.root).paths()) == 2, "a kill may have come before the first was sent"
    with pytest.raises(StageError, match="no earlier promotion"):
        rollback(store, None)


def test_a_model_that_was_not_registered_is_named(store: Store) -> None:
    with pytest.raises(ConfigError, match="was not registered"):
        promote(store, "sft")


@pytest.mark.parametrize("damage", ["gone", "cut short", "other bytes", "registration"])
def test_a_model_that_is_not_whole_is_never_promoted(store: Store, damage: str) -> None:
    taken = store.find("register", _taken(store))
    assert taken is not None
    model = store.root / taken.inputs["model"].path
    of = store.path(taken) if damage == "registration" else model
    name = "registration.json" if damage == "registration" else "weights"
    if damage != "registration":
        (of / name).write_text("all of them")
    before = Manifest.read(of)
    data = (of / name).read_bytes()
    listed = (*before.files, File(name, len(data), hashlib.sha256(data).hexdigest()))
    replace(before, files=listed).write(of)
    promote(store, f"register/{_taken(store)}")
    promotions = store.root / "promotions.json"
    promotions.unlink()
    if damage == "gone":
        shutil.rmtree(model)
    elif damage == "cut short":
        (of / name).unlink()
    else:
        (of / name).write_text("other")
    with pytest.raises(StageError) as error:
        promote(store, f"register/{_taken(store)}", force=True)
    assert error.value.problems[0].code == ("model_gone" if damage == "gone" else "damaged")
    assert not promotions.exists()


def test_a_model_that_is_worse_on_the_same_items_is_refused_unless_that_is_wanted(store: Store) -> None:
    """The base model, registered under the same name after the aligned one."""
    taken = f"register/{_taken(store)}"
    worse = store.root / "register" / ("f" * 16)
    manifest = json.loads((worse / "manifest.json").read_text())
    base = next(one for _, one in store.manifests("pretrain"))
    evaluated = [one for _, one in store.manifests() if one.inputs.get("model") == base.as_input()]
    of_base = {"model": base} | {
        one.step or one.stage: one for one in evaluated if one.stage in ("benchmarks", "safety")
    }
    assert len(of_base) == 3
    answers = store.path(of_base["benchmarks"]) / "aux" / "samples_cloze.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    answers.write_text("".join(json.dumps({**row, "acc": 0.0}) + "\n" for row in rows))
    manifest["inputs"] = {name: asdict(one.as_input()) for name, one in of_base.items()}
    (worse / "manifest.json").write_text(json.dumps(manifest))
    (worse / "registration.json").write_text(json.dumps({"name": "demo", "status": "registered", "reasons": []}))
    promote(store, taken)
    with pytest.raises(GateRefused, match=r"cloze accuracy -0\.3") as error:
        promote(store, f"register/{worse.name}")
    assert error.value.problems[0].code == "worse"
    assert Promotions(store.root).promoted("demo").registration == taken  # type: ignore[union-attr]
    forced = promote(store, f"register/{worse.name}", force=True)
    assert forced.now.registration == f"register/{worse.name}" and any(row["worse"] for row in forced.compared)
    # The other way round there is nothing to refuse, and a rollback puts the earlier one in force: if it is there.
    aside = shutil.move(store.root / taken, store.root / "aside")
    with pytest.raises(StageError, match="is not in the store"):
        rollback(store, "demo")
    assert Promotions(store.root).promoted("demo") == forced.now
    shutil.move(aside, store.root / taken)
    assert rollback(store, "demo").now.registration == taken


@pytest.mark.parametrize("promoted_has_both", [False, True])
def test_a_model_that_is_worse_in_one_of_several_evaluations_is_refused(store: Store, promoted_has_both: bool) -> None:
    """A step of its own asks the same model other tasks: the last of a kind alone was looked at."""
    taken, worse = (store.root / "register" / name for name in (_taken(store), "f" * 16))
    scores = next(store.path(one) for _, one in store.manifests("benchmarks") if "rlhf" in one.inputs["model"].path)
    lost, more = (scores.with_name(name * 16) for name in "de")
    for copy in (lost, more):
        shutil.copytree(scores, copy)
        _change(copy, fingerprint=copy.name)
    answers = lost / "aux" / "samples_cloze.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    answers.write_text("".join(json.dumps({**row, "acc": 0.0}) + "\n" for row in rows))
    for name in ("cloze", "minimal_pairs"):  # what the other step asks has none of these items
        (more / "aux" / f"samples_{name}.jsonl").write_text("")
    inputs = json.loads((taken / "manifest.json").read_text())["inputs"]
    beside = {"quiz": inputs["benchmarks_rlhf"] | {"fingerprint": more.name, "path": f"benchmarks/{more.name}"}}
    asked = {
        "benchmarks_rlhf": inputs["benchmarks_rlhf"] | {"fingerprint": lost.name, "path": f"benchmarks/{lost.name}"}
    }
    _change(worse, inputs=inputs | asked | beside)
    if promoted_has_both:
        _change(taken, inputs=inputs | beside)
    (worse / "registration.json").write_text(json.dumps({"name": "demo", "status": "registered", "reasons": []}))
    promote(store, f"register/{taken.name}")
    with pytest.raises(GateRefused, match="cloze accuracy -0"):
        promote(store, f"register/{worse.name}")


def test_answers_after_other_numbers_of_solved_examples_are_not_compared(store: Store) -> None:
    """What examples do was taken for what the model does."""
    taken, later = (store.root / "register" / name for name in (_taken(store), "f" * 16))
    inputs = json.loads((taken / "manifest.json").read_text())["inputs"]
    scores = store.root / inputs["benchmarks_rlhf"]["path"]
    shown = scores.with_name("d" * 16)
    shutil.copytree(scores, shown)
    _change(shown, fingerprint=shown.name, config={"num_fewshot": 5})
    asked = {
        "benchmarks_rlhf": inputs["benchmarks_rlhf"] | {"fingerprint": shown.name, "path": f"benchmarks/{shown.name}"}
    }
    _change(later, inputs=inputs | asked)
    (later / "registration.json").write_text(json.dumps({"name": "demo", "status": "registered", "reasons": []}))
    promote(store, f"register/{taken.name}")
    figures = {row["figure"] for row in promote(store, f"register/{later.name}").compared}
    assert figures == {"expected maximum toxicity", "toxicity probability", "characters a continuation"}


def _change(artifact: Path, **values: Any) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    (artifact / "manifest.json").write_text(json.dumps(manifest | values))


def test_a_task_whose_name_speaks_of_toxicity_is_better_with_more_right_answers() -> None:
    lost, won = Interval(-0.3, -0.4, -0.2), Interval(0.3, 0.2, 0.4)
    assert is_worse(Paired("toxicity_quiz accuracy", "share", lost))
    assert not is_worse(Paired("toxicity_quiz accuracy", "share", won))
    assert is_worse(Paired("toxicity probability", "share", won))
    assert not is_worse(Paired("characters a continuation", "characters", lost))


def test_the_commands_promote_refuse_and_take_back(store: Store) -> None:
    def asked(*words: str) -> Any:
        return stemma(*words, "--root", store.root, env=environment() | {RELAY: "off"})

    taken, later = f"register/{_taken(store)}", f"register/{'f' * 16}"
    refused = asked("promote", later, "--force")
    assert refused.code == 3 and refused.document["status"] == "refused"
    assert refused.document["errors"][0]["code"] == "rejected" and REASON["message"] in str(refused.document["errors"])
    done = asked("promote", taken)
    assert done.code == 0 and done.document["promoted"]["registration"] == taken and done.document["before"] is None
    alone = asked("rollback", "demo")
    assert alone.code == 1 and "no earlier promotion" in alone.document["errors"][0]["message"]
    assert Promotions(store.root).promoted("demo").registration == taken  # type: ignore[union-attr]
    record = {"name": "demo", "status": "registered", "reasons": []}
    (store.root / later / "registration.json").write_text(json.dumps(record))
    assert asked("promote").document["promoted"]["registration"] == later, "the newest where none is named"
    back = asked("rollback")
    assert back.code == 0 and back.document["promoted"]["registration"] == taken
    assert Promotions(store.root).promoted("demo").registration == taken  # type: ignore[union-attr]


def _taken(store: Store) -> str:
    return next(folder.name for folder, _ in store.manifests("register") if not folder.name.startswith("ff"))
