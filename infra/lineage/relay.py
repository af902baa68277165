"""The only process that talks to MLflow: takes messages from the outbox and delivers them, once, in order.

python -m infra.lineage.relay ROOT --until-empty
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import Problem, StemmaError
from infra.lineage.also.copies import Copies
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.messages import from_json
from infra.lineage.migrations import is_of_the_database, passes
from infra.lineage.outbox import Outbox
from infra.lineage.relay_lock import (
    RelayLock,
    anyone_registered,
    lineage_folder,
    problem_path,
    process_lives,
    register,
    relay_pid,
)
from infra.lineage.tracking import database_path, database_uri, tracking_uri
from infra.process.interval import GrowingInterval
from infra.servers.environment import server_environ
from infra.servers.http import answers
from infra.servers.state import write_private

if TYPE_CHECKING:
    from infra.lineage.delivery import Delivery

RELAY = "STEMMA_RELAY"
"""Set to `off`, what MLflow should know is kept in the store, to be delivered by a later run or by `stemma up`."""
LOOK_EVERY_S, LONGEST_LOOK_S = 0.2, 1.0
METRICS_EVERY_S = 5.0
"""Seconds between two deliveries of the metrics of a stage that still works; its end brings the last ones at once."""
LONGEST_PAUSE_S = 10.0
ATTEMPTS = 5
LOOK_FOR_ABANDONED_EVERY_S = 5.0
NICENESS = 5

log = logging.getLogger("stemma.relay")


class Unreachable(Exception):
    """MLflow does not answer now; the message is not at fault, and a later attempt may succeed."""


class Unusable(Exception):
    """MLflow's database cannot be used until the user repairs it; waiting does not help, no message is at fault.

    problem: what, where and what to do.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Relay:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.outbox = Outbox(root)
        self.ledger = Ledger(root)
        self.stopped = threading.Event()
        self._delivery: Delivery | None = None
        self._copies = Copies(root, self.ledger)
        self._uri = ""
        self._pause_s = 0.0
        self._looked_for_abandoned = 0.0
        self._metrics_at = float("-inf")
        self.interval = GrowingInterval(LOOK_EVERY_S, LONGEST_LOOK_S)

    def work(self) -> bool:
        """Process the outbox and the followed files once; return False if MLflow could not be reached."""
        try:
            for path in self.outbox.paths():
                if self.stopped.is_set():
                    return True
                self._deliver(path)
                self.interval.changed()
            self._follow_metrics()
            self._end_abandoned()
        except Unreachable as error:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or LOOK_EVERY_S)
            log.warning("%s; %d messages wait, next try in %.1f s", error, self.outbox.pending(), self._pause_s)
            self.stopped.wait(self._pause_s)
            return False
        self._pause_s = 0.0
        return True

    @property
    def has_work(self) -> bool:
        """Return True while messages wait, or a build that was started from this machine has not ended."""
        own_runs = (run for run in self.ledger.open_runs() if run.sender["host"] == os.uname().nodename)
        return self.outbox.pending() > 0 or any(own_runs)

    def _deliver(self, path: Path) -> None:
        """Deliver one message; set it aside if it fails repeatedly and the fault is in the message itself."""
        try:
            envelope = self.outbox.read(path)
            message = from_json(envelope.content)
            delivery = self._connected()
            delivery.deliver(message, envelope.sender)
            self._copies.delivered(message)
        except (Unreachable, Unusable):
            raise
        except Exception as error:
            self._raise_if_database(error)
            attempts = self.ledger.failed(path.name)
            log.warning("%s: attempt %d of %d failed: %s", path.name, attempts, ATTEMPTS, error)
            if attempts >= ATTEMPTS:
                self._set_aside(path, error)
                return
            self.stopped.wait(LOOK_EVERY_S * 2**attempts)
            if not self.stopped.is_set():
                self._deliver(path)
            return
        path.unlink()

    def close(self) -> None:
        """Let copies for other trackers arrive."""
        self._copies.close()

    def _connected(self) -> Delivery:
        uri = tracking_uri(self.root)
        if uri != database_uri(self.root) and not answers(f"{uri}/health"):
            raise Unreachable(f"the MLflow server {uri} does not answer")
        if self._delivery is None or uri != self._uri:
            # MLflow takes seconds to import, so a relay with nothing to do never does.
            from infra.lineage.delivery import Delivery

            try:
                self._delivery = Delivery(self.root, uri, self.ledger, self._copies)
            except Exception as error:
                self._raise_if_database(error)
                raise
            self._uri = uri
            log.info("delivering to %s", uri)
        return self._delivery

    def _raise_if_database(self, error: Exception) -> None:
        """Unreachable for what passes: a server that went away, a locked database, a full disk, an I/O error. Unusable
        for any other fault of the database."""
        if self._uri.startswith("http") and not answers(f"{self._uri}/health"):
            raise Unreachable(f"the MLflow server {self._uri} no longer answers") from error
        if passes(error):
            raise Unreachable(f"the database cannot be written now: {error}") from error
        if is_of_the_database(error):
            raise Unusable(_problem_of(error, self.root)) from error

    def _follow_metrics(self) -> None:
        if time.monotonic() - self._metrics_at < METRICS_EVERY_S or not self.ledger.tails():
            return
        self._metrics_at = time.monotonic()
        try:
            self._connected().follow_metrics()
        except (Unreachable, Unusable):
            raise
        except Exception as error:
            self._raise_if_database(error)
            # The build's end brings all of its metrics once more.
            log.warning("could not follow metrics: %s", error)

    def _set_aside(self, path: Path, error: Exception) -> None:
        folder = lineage_folder(self.root) / "failed"
        folder.mkdir(exist_ok=True)
        path.replace(folder / path.name)
        (folder / f"{path.name}.error").write_text(f"{type(error).__name__}: {error}\n")
        log.error("set %s aside in %s after %d attempts: %s", path.name, folder, ATTEMPTS, error)

    def _end_abandoned(self) -> None:
        """End the runs whose process is gone and left no more messages in the outbox."""
        if time.monotonic() - self._looked_for_abandoned < LOOK_FOR_ABANDONED_EVERY_S or self.outbox.pending():
            return
        self._looked_for_abandoned = time.monotonic()
        for run in self.ledger.open_runs():
            is_local = run.sender["host"] == os.uname().nodename
            # A last look at the outbox: it may have spoken just before it went.
            if is_local and not process_lives(run.sender) and not self.outbox.pending():
                self._end(run)

    def _end(self, run: DeliveredRun) -> None:
        try:
            self._connected().end_abandoned(run)
            log.info("the process of build %s is gone; its run is marked as killed", run.build_id)
        except (Unreachable, Unusable):
            raise
        except Exception as error:
            self._raise_if_database(error)
            log.warning("could not end the run of build %s, whose process is gone: %s", run.build_id, error)
            if self.ledger.failed(f"abandoned {run.build_id}") >= ATTEMPTS:
                self.ledger.ended(run.build_id)


def _problem_of(error: Exception, root: Path) -> Problem:
    if isinstance(error, StemmaError):
        return error.problems[0]
    location = str(database_path(root) or "MLflow's database")
    message = f"MLflow cannot use its database: {str(error).splitlines()[0]}"
    return Problem(
        "broken_database", location, message, f"see {lineage_folder(root) / 'relay.log'}, or that of `stemma up`"
    )


def follow(root: Path, *, until_empty: bool) -> None:
    """Deliver until SIGTERM, or until nothing is left to do and no registered process lives.

    Exits with 1 where the database is unusable, once that is written down for `lineage_problem`; messages stay.
    """
    lock = RelayLock(root)
    relay = None
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not lock.acquire():
        if until_empty or stopped.wait(LOOK_EVERY_S):
            return
    # Training matters more than its diary.
    os.nice(NICENESS)
    relay = Relay(root)
    relay.stopped = stopped
    problem_path(root).unlink(missing_ok=True)
    while not stopped.is_set():
        try:
            relay.work()
        except Unusable as error:
            write_private(problem_path(root), json.dumps(error.problem.as_json()))
            log.error("%s; %d messages wait until then", error, relay.outbox.pending())
            sys.exit(1)
        if until_empty and not relay.has_work and not anyone_registered(root):
            relay.close()
            lock.release()
            # Another process may have seen us alive after we looked, and relied on it.
            if not (relay.has_work or anyone_registered(root)) or not lock.acquire():
                return
        stopped.wait(relay.interval.seconds)
    relay.close()


def ensure_relay(root: Path | str) -> None:
    """Start a relay in the background unless one runs already; it stays while this process lives. Return immediately.

    Does nothing with $STEMMA_RELAY=off. Costs about a millisecond when a relay runs.
    """
    if os.environ.get(RELAY) == "off":
        return
    root = Path(root).absolute()
    with _starting:
        register(root)
        starting = _children.get(root)
        if relay_pid(root) is not None or (starting is not None and starting.poll() is None):
            return
        with open(lineage_folder(root) / "relay.log", "ab") as output:
            _children[root] = subprocess.Popen(
                [sys.executable, "-m", "infra.lineage.relay", str(root), "--until-empty"],
                cwd=root,
                env=server_environ({}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


_starting = threading.Lock()
"""Held by the thread that registers this process or starts a relay."""

_children: dict[Path, subprocess.Popen[bytes]] = {}
"""The last relay of each store that this process has started: it may not hold the lock yet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--follow", action="store_true", help="stay until SIGTERM (the default)")
    mode.add_argument(
        "--until-empty", action="store_true", help="exit once all is delivered and no process needs the relay"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ |= {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    follow(options.root.absolute(), until_empty=options.until_empty)


if __name__ == "__main__":
    main()
