"""The promises that a drill checks after each fault, and at the end of a pipeline. Each returns its violations."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from flows.drill.watch import wait_for
from flows.runs.ledger import read_ledger, total
from infra.io.json import read_own_json
from infra.lineage.ledger import ledger_path
from infra.lineage.outbox import Outbox
from infra.lineage.tracking import database_path
from infra.run import read_journal
from infra.store.left_memory import MEMORY, NUMBERS
from infra.store.store import Store

CLOCKED = re.compile(
    r"/(tokens_per_s|time_left_s|tflops|mfu|memory_gb|generated_tokens_per_s|generating_share|(trainer|sampler)_idle_share"
    r"|samplers_replaced)$|seconds|_s$"
)
"""Metrics in which a process measures itself, or counts faults: another run has other values."""
EXIT_CODES = {"done": 0, "failed": 1, "invalid": 2, "refused": 3, "cancelled": 130}


def artifacts_true(root: Path) -> list[str]:
    """Every artifact has a manifest, and every byte is the one that it names."""
    store = Store(root, reading=True)
    violations = []
    for stage in store.stages():
        for folder in sorted(path for path in (store.root / stage).iterdir() if path.is_dir()):
            manifest = store.read(folder)
            if manifest is None:
                violations.append(f"{stage}/{folder.name[:12]} is an artifact without a readable manifest")
                continue
            differences = store.verify(folder, manifest)
            violations += [f"{stage}/{folder.name[:12]}: {Path(item.path).name} {item.what}" for item in differences]
    return violations


def digests(root: Path) -> dict[str, str]:
    """The digest of each artifact, by step or stage and address."""
    manifests = Store(root, reading=True).manifests()
    return {f"{made.step or made.stage}/{made.fingerprint}": made.digest for _, made in manifests}


def digests_equal(root: Path, expected: Mapping[str, str], *, all_of_them: bool) -> list[str]:
    """Check that the artifacts have the bits of a run without faults. all_of_them: everything is built."""
    built = digests(root)
    wrong = [
        f"{name.partition('/')[0]} has other bits than a run without faults"
        if name in expected
        else f"{name[:40]} is an artifact that a run without faults does not make"
        for name, digest in built.items()
        if expected.get(name) != digest
    ]
    missing = sorted(expected.keys() - built.keys()) if all_of_them else []
    return wrong + [f"{name.partition('/')[0]} is missing at the end" for name in missing]


def points(root: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points of each metric of each step, in the order in which the journal has them."""
    by_step: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for folder, manifest in Store(root, reading=True).manifests():
        journal = folder / "aux" / "journal.jsonl"
        of_step: dict[str, list[tuple[int, float]]] = {}
        for line in read_journal(journal) if journal.exists() else ():
            for name, value in line["values"].items() if line.get("kind") == "metric" else ():
                if not CLOCKED.search(name):
                    of_step.setdefault(name, []).append((line["step"], value))
        by_step[manifest.step or manifest.stage] = of_step
    return by_step


def metrics_once(root: Path, expected: Mapping[str, Any]) -> list[str]:
    """Every metric was recorded once, in order, and with the value of a run without faults."""
    violations = []
    for step, metrics in points(root).items():
        of_reference = expected.get(step, {})
        for name in sorted(metrics.keys() | of_reference.keys()):
            recorded, expected_points = metrics.get(name, []), [tuple(point) for point in of_reference.get(name, [])]
            if recorded == expected_points:
                continue
            steps = [number for number, _ in recorded]
            if len(set(steps)) < len(steps):
                kind = "is recorded twice"
            elif steps != sorted(steps):
                kind = "is out of order"
            elif len(recorded) != len(expected_points):
                kind = f"has {len(recorded)} points instead of {len(expected_points)}"
            else:
                kind = "has other values than in a run without faults"
            violations.append(f"{step}: metric {name} {kind}")
    return violations


def undelivered(root: Path) -> int:
    """Messages for MLflow that wait."""
    return Outbox(root).pending()


def lineage_whole(root: Path) -> list[str]:
    """MLflow has the run of each artifact, ended, with each point of its metrics once."""
    waiting = undelivered(root)
    violations = [f"{waiting} messages for MLflow are not delivered"] if waiting else []
    database = database_path(root)
    if database is None or not ledger_path(root).exists() or not database.exists():
        return [*violations, "MLflow knows nothing of the run"]
    with (
        closing(sqlite3.connect(f"{ledger_path(root).as_uri()}?mode=ro", uri=True)) as ledger,
        closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as mlflow,
    ):
        for folder, manifest in Store(root, reading=True).manifests():
            step = manifest.step or manifest.stage
            row = ledger.execute("SELECT run_id FROM runs WHERE build_id = ?", (manifest.build_id,)).fetchone()
            state = mlflow.execute("SELECT status FROM runs WHERE run_uuid = ?", row or ("",)).fetchone()
            if not row or not state:
                violations.append(f"{step}: MLflow has no run of its build")
            elif state[0] != "FINISHED":
                violations.append(f"{step}: MLflow calls the run of its build {state[0]}, and it is built")
            else:
                violations += _mlflow_metrics(mlflow, row[0], step, folder)
    return violations


def _mlflow_metrics(mlflow: sqlite3.Connection, run_id: str, step: str, folder: Path) -> Iterable[str]:
    journal = folder / "aux" / "journal.jsonl"
    expected_points: dict[str, list[int]] = {}
    for line in read_journal(journal) if journal.exists() else ():
        for name in line["values"] if line.get("kind") == "metric" else ():
            expected_points.setdefault(name, []).append(line["step"] or 0)
    query = "SELECT step FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step"
    for name, steps in expected_points.items():
        there = [row[0] for row in mlflow.execute(query, (run_id, name)).fetchall()]
        if there != sorted(steps):
            yield f"{step}: MLflow has {len(there)} points of {name} instead of {len(steps)}"


def answer_true(code: int, document: Mapping[str, Any] | None, stderr: str, ends: Collection[str]) -> list[str]:
    """The exit code, the document and the messages agree, and are those that the fault may have.

    Args:
        ends: what the fault may cause, see `flows.drill.kinds.Kind.ends`.
    """
    violations = ["stderr has a traceback"] if "Traceback (most recent call last)" in stderr else []
    if code < 0:
        return violations if "killed" in ends else [*violations, f"the run was killed by signal {-code}"]
    if document is None:
        return [*violations, f"the run ended with {code} and printed no document"]
    status = document.get("status", "")
    if EXIT_CODES.get(status) != code:
        violations.append(f"exit code {code} with status {status!r}")
    if status == "cancelled" and "cancelled" not in ends:
        violations.append("the run calls itself cancelled, and nothing cancelled it")
    errors = document.get("errors", [])
    if status in ("failed", "invalid", "refused"):
        if not errors:
            violations.append(f"the run is {status} and names no error")
        violations += [
            f"error {error.get('code')} at {error.get('path')}: {str(error.get('message'))[:160]}"
            for error in errors
            if error.get("code") not in ends
        ]
    return violations


def ledger(root: Path) -> tuple[dict[str, Any], list[str]]:
    """The account of all runs in a store, and whether its parts add up to its devices' time."""
    folder = root / "runs"
    runs = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    account = total([book for name in runs if (book := read_ledger(root, name)) is not None])
    wrong = abs(account.unaccounted_s) > max(1.0, 0.01 * account.device_s)
    text = f"the ledger leaves {account.unaccounted_s:.1f} s of {account.device_s:.1f} device-seconds unaccounted for"
    return account.as_json(), [text] if wrong else []


def no_shared_memory(before: Collection[str], pids: Collection[int]) -> list[str]:
    """No shared memory is left of the processes of the drill, which are gone."""
    left = []
    for path in MEMORY.iterdir() if MEMORY.is_dir() else ():
        if path.name in before:
            continue
        numbers = [int(text) for text in re.findall(r"\d+", path.name)[:2]]
        if any(number in pids or number // NUMBERS in pids for number in numbers):
            left.append(path.name)
    return [f"shared memory is left: {', '.join(sorted(left)[:5])}"] if left else []


def no_leases(root: Path, patience_s: float) -> list[str]:
    """No lease is held once the runs have ended. patience_s: a killed process with much memory takes time to end."""
    store = Store(root, reading=True)
    if wait_for(lambda: not store.being_built(), patience_s):
        return []
    return [f"a lease is held by no run: {', '.join(store.being_built())}"]


def check_true(document: Mapping[str, Any] | None, built: Collection[str]) -> list[str]:
    """`stemma check` reports `reuse` for each stage that has a finished artifact, and for no other.

    built: fingerprints of the artifacts.
    """
    if document is None or document.get("status") != "done":
        reasons = [f"{error['code']}: {error['message']}"[:200] for error in (document or {}).get("errors", [])]
        return [f"stemma check fails: {'; '.join(reasons) or 'no document'}"]
    violations = []
    for row in document["stages"]:
        fingerprint = row.get("fingerprint") or ""
        is_built = bool(fingerprint) and any(name.startswith(fingerprint) for name in built)
        if is_built != (row["status"] == "reuse"):
            answer = "is" if is_built else "is not"
            violations.append(f"stemma check reports {row['status']} for {row['stage']}, which {answer} built")
    return violations


def read_record(path: Path) -> dict[str, Any] | None:
    content: dict[str, Any] | None = read_own_json(path) if path.exists() else None
    return content
