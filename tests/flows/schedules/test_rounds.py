"""What a round of feedback gained: its model held against the one before, without a server."""

from __future__ import annotations

import shutil
from pathlib import Path

from evaluation.people.judgements import Judgement, Judgements
from evaluation.people.outcome import outcome
from evaluation.people.pairs import Export, blind
from evaluation.results.artifacts import read_artifacts
from flows.feedback.gain import as_line, as_markdown, compare_round, last_comparison
from infra.store.store import Store


def test_a_round_s_model_is_held_against_the_one_before(built_full: Path, tmp_path: Path) -> None:
    """The round's folder is made here; its two models are the pipeline's own, before and after RLHF."""
    root = tmp_path / "store"
    shutil.copytree(built_full / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    before, after = (f"{name}/{next((root / name).glob('*/manifest.json')).parent.name}" for name in ("sft", "rlhf"))
    pairs, given = blind([(f"question {n}", [("rlhf", f"one {n}"), ("rlhf", f"two {n}")]) for n in range(4)], seed=1)
    export = Export(pairs, given, {"rlhf": {"artifact": before}}, {"pipeline": "tiny"})
    for name in ("20261101-0600-first", "20261108-0600-second"):
        folder = root / "feedback" / name
        export.write(folder, {})
        said = [Judgement(pair, "ann", choice) for pair, choice in zip(pairs, ("a", "b", "tie", "a"), strict=True)]
        outcome(export, Judgements(used=said)).write(folder / "judged")
    found = compare_round(Store(root, reading=True), folder, "rlhf", after)
    measured = read_artifacts({name: next((root / f"safety_{name}").iterdir()) for name in ("sft", "rlhf")})
    toxicity = [measured[name].figures["expected_max_toxicity"] for name in ("sft", "rlhf")]
    values = {row["figure"]: row["values"] for row in found["figures"]}
    assert values.get("expected_max_toxicity", toxicity[:1] * 2) == toxicity  # left out where it is the same
    assert found["paired"] and {row["name"] for row in found["paired"]} == {after}
    assert [(one["round"], one["ties"]) for one in found["labels"]] == [("20261101-0600-first", 1), (folder.name, 1)]
    assert last_comparison("tiny", root) == found and last_comparison("another", root) is None
    text = as_markdown(found)
    assert f"`{before}` answered, `{after}` learnt" in text and f"| {found['paired'][0]['figure']} |" in text
    same = compare_round(Store(root, reading=True), folder, "rlhf", before)
    assert same["figures"] == [] and "Nothing was learnt" in as_markdown(same) and "is the same" in as_line(same)
