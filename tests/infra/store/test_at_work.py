"""Runs of several machines on one bucket, and a `stemma gc` that is to remove nothing that one of them reads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from flows.runs.garbage import STALE_S, survey
from infra.errors import StageError
from infra.leases import table as lease_table
from infra.leases.table import LEASE_S, Holder
from infra.store.at_work import GoingRun, nobody_at_work
from infra.store.store import Store
from tests.infra.store.conftest import Host
from tests.support.artifacts import make_artifact
from tests.support.leases import change_leases
from tests.support.programs.processes import wait_until

ABOUT = {"pipeline": "chronicle", "host": "far", "since": "now"}
FAR = "another machine"


@pytest.fixture(autouse=True)
def _short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "WATCHED_S", 1.5)


def _run(store: Store, run_id: str, said: list[str]) -> GoingRun:
    assert store.remote is not None
    return GoingRun(store, store.remote.runs, run_id, ABOUT, said.append, lambda: False)


def _of_another_machine(store: Store, run_id: str, renewed: float) -> Holder:
    """A run whose machine was never heard of again since `renewed`."""
    assert store.remote is not None
    holder = Holder("token", FAR, 1, 1.0, 0, renewed)
    assert store.leases.table.take(f"runs/{run_id}", holder, lambda one: False)[0]
    store.remote.runs.begin(run_id, ABOUT)
    return holder


def _refusal(store: Store) -> str:
    with pytest.raises(StageError) as failure, nobody_at_work(store, STALE_S):
        raise AssertionError("nobody was seen")
    (problem,) = failure.value.problems
    assert problem.code == "in_use"
    return problem.message


def test_a_run_counts_until_it_ends_and_is_no_build(host: Host) -> None:
    one, other = host("a"), host("b")
    run = _run(one, "r1", [])
    run.begin()
    assert "chronicle on far since now" in _refusal(other)
    assert other.being_built() == []
    run.end()
    with nobody_at_work(other, STALE_S):
        assert "another" in _refusal(one), "of two that remove, the second leaves"


def test_a_run_whose_machine_died_counts_no_longer_and_what_it_came_to_is_spared_for_a_day(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = host("a")
    made = make_artifact(store, "clean", {"a": "1"})
    _of_another_machine(store, "dead", time.time() - 5)
    assert "chronicle" in _refusal(store), "it may be heard of yet"
    store.leases.table.delete("runs/dead", "token")
    assert "chronicle" in _refusal(store), "one without a lease is of an earlier version"
    _of_another_machine(store, "dead", time.time() - 2 * LEASE_S)
    assert [one.id for one in survey(store).artifacts] == [f"clean/{made.fingerprint}"]
    assert store.remote is not None
    row = {"stage": made.stage, "fingerprint": made.fingerprint, "digest": made.digest}
    store.remote.runs.begin("dead", {**ABOUT, "artifacts": [row]})
    with nobody_at_work(store, STALE_S):
        assert survey(store).artifacts == []
    monkeypatch.setattr("flows.runs.garbage.STALE_S", 0.0)
    with nobody_at_work(store, 0.0):
        assert [one.id for one in survey(store).artifacts] == [f"clean/{made.fingerprint}"]
    assert (store.remote.runs.going(), store.leases.table.rows()) == ([], []), "nothing of it is left"


def test_a_run_on_a_machine_whose_clock_is_late_lives(host: Host) -> None:
    store = host("a")
    _of_another_machine(store, "late", time.time() - 2 * LEASE_S)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.3):
            change_leases(store.leases.table, "renewed = renewed + 0.3", "runs/late")

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        assert "chronicle" in _refusal(host("b"))
    finally:
        done.set()
        renewing.join()


def test_a_run_neither_begins_nor_commits_while_something_is_removed(host: Host) -> None:
    one, other = host("a"), host("b")
    said: list[str] = []
    run = _run(one, "r1", said)

    def waits_for(call: Any) -> None:
        with nobody_at_work(other, STALE_S):
            thread = threading.Thread(target=call)
            thread.start()
            wait_until(lambda: said)
            assert thread.is_alive()
        thread.join(30)
        assert not thread.is_alive()
        assert "gc" in said.pop()

    waits_for(run.begin)
    # It is suspended, taken for dead, and forgotten; then it goes on.
    assert run._lease is not None
    one.leases.table.delete("runs/r1", run._lease._token)
    assert one.remote is not None
    one.remote.runs.end("r1")
    waits_for(run.before_commit)
    assert "runs/r1" in dict(one.leases.table.rows())
    run.end()
    assert one.leases.table.rows() == []
