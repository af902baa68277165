"""Runs in progress on a root on an object store, so that `stemma gc` removes nothing that a run is about to read.

A run holds the lease `runs/<run id>` while it is in progress, and <url>/runs/going/<run id>.json records the run and
the artifacts that it built or reused. `stemma gc` holds the lease `runs/gc` while it looks for runs and removes
artifacts. A run that begins, or is about to commit, renews its own lease, then looks for `runs/gc`, and waits. So one
of the two sees the other, whatever the order. A run that is suspended in between, and taken for dead, checks at its
next commit that what it read still exists.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from infra.errors import Cancelled, StageError, stage_error
from infra.leases import table as lease_table
from infra.leases.lease import Lease
from infra.leases.table import Holder
from infra.store.bucket.runs import RUNS, RemoteRuns
from infra.store.manifest import Manifest
from infra.store.store import Store

_GC = f"{RUNS}/gc"


class GoingRun:
    """A run in progress on an object store, from `begin` to `end`.

    about: facts about the run for other machines. say: called with what the run waits for. stopped: returns True to
    stop waiting.
    """

    def __init__(
        self,
        store: Store,
        runs: RemoteRuns,
        run_id: str,
        about: dict[str, Any],
        say: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._store, self._runs, self._run_id, self._about = store, runs, run_id, about
        self._say, self._stopped = say, stopped
        self._artifacts: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._lease: Lease | None = None

    def begin(self) -> None:
        """Register the run. Raises StageError if the leases are out of reach, Cancelled if stopped while waiting."""
        self._store.leases.check()
        self._acquire_lease()
        self._write_record()
        self._wait_for_gc()

    def came_to(self, made: Manifest) -> None:
        """Record an artifact that the run built or reused: should the run die now, `stemma gc` spares the artifact for
        a day. Raises StageError."""
        with self._lock:
            entry = {"stage": made.stage, "fingerprint": made.fingerprint, "digest": made.digest}
            self._artifacts.append(entry)
            self._write_record()

    def before_commit(self) -> None:
        """Wait for `stemma gc`. Call it before checking once more that the inputs exist: whatever `stemma gc` removes
        is gone by then. Raises StageError and Cancelled as `begin` does."""
        with self._lock:
            if self._lease is not None and not self._lease.still_held():
                self._acquire_lease()
            self._wait_for_gc()

    def end(self) -> None:
        """Unregister the run. Call it once others can read how the run ended. Raises StageError."""
        self._runs.end(self._run_id)
        if self._lease is not None:
            self._lease.release()

    def _acquire_lease(self) -> None:
        key = f"{RUNS}/{self._run_id}"

        def report_holder(holder: Holder) -> None:
            self._say(f"{holder} had this run before; waiting until it ends or gives no more sign of life")

        self._lease = self._store.leases.acquire(key, on_wait=report_holder, stop_if=self._stopped)
        if self._lease is None:
            raise Cancelled

    def _write_record(self) -> None:
        self._runs.begin(self._run_id, {**self._about, "artifacts": self._artifacts})

    def _wait_for_gc(self) -> None:
        if self._store.leases.table.read(_GC) is None:
            return

        def report_holder(holder: Holder) -> None:
            self._say(f"waiting for {holder}, which removes unneeded artifacts (`stemma gc`)")

        gate = self._store.leases.acquire(_GC, on_wait=report_holder, stop_if=self._stopped)
        if gate is None:
            raise Cancelled
        gate.release()


@contextmanager
def nobody_at_work(store: Store, longest_s: float) -> Iterator[None]:
    """Block runs on all machines from beginning or committing within this context.

    Args:
        longest_s: seconds for which a run without a lease, as in earlier versions, counts as in progress.

    Raises StageError `in_use` if a run is in progress: only that run knows what it is about to read.
    """
    if store.remote is None:
        yield
        return
    deadline = time.monotonic() + lease_table.WATCHED_S + 2 * store.leases.table.poll_s  # to see that another one died
    gate = store.leases.acquire(_GC, stop_if=lambda: time.monotonic() > deadline)
    if gate is None:
        raise _in_use(store, "another `stemma gc` is removing artifacts")
    try:
        _refuse_at_work(store, store.remote.runs, longest_s)
        yield
        _forget(store, store.remote.runs, longest_s)
    finally:
        gate.release()


def _refuse_at_work(store: Store, runs: RemoteRuns, longest_s: float) -> None:
    held_keys = [key for key, _ in store.leases.table.rows() if key != _GC]
    dead = store.leases.seem_dead(held_keys)
    living = [key for key in held_keys if key not in dead]
    for run in runs.going():
        key = f"{RUNS}/{run['run_id']}"
        if key in living or (key not in held_keys and time.time() - run["modified"] < longest_s):
            raise _in_use(store, f"a run is active ({run['pipeline']} on {run['host']} since {run['since']})")
    if living:
        raise _in_use(store, f"{living[0]} is working")


def _forget(store: Store, runs: RemoteRuns, longest_s: float) -> None:
    """Remove the records of runs that died long ago."""
    holders = dict(store.leases.table.rows())
    for run in runs.going():
        if time.time() - run["modified"] >= longest_s:
            key = f"{RUNS}/{run['run_id']}"
            if key in holders:
                store.leases.table.delete(key, holders[key].token)
            runs.end(run["run_id"])


def _in_use(store: Store, reason: str) -> StageError:
    fix = "run the command again when it has ended; a killed process counts for a minute"
    return stage_error("in_use", store.place, f"nothing was removed: {reason}", fix)
