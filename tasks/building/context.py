"""State shared by all builds of one pipeline run, and the seconds that each spends on bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from infra.launch.config import LaunchConfig
from infra.lineage import messages
from infra.lineage.outbox import Outbox
from infra.process.lifetime import GRACE_S
from infra.store.store import Store, is_of_the_disk
from tasks.processes.warm_start import WarmStart


@dataclass(frozen=True)
class BuildContext:
    """State shared by all builds of one pipeline run.

    say: called with each event and progress line, as (node id, message), see `infra.run`.
    """

    store: Store
    pipeline: str
    run_id: str
    flow_run_id: str = ""
    flow_run_url: str = ""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    read_all: bool = False
    strict_versions: bool = False
    """True to rebuild artifacts that were made by other versions of packages."""
    say: Callable[[str, Mapping[str, Any]], None] = lambda node, message: None
    is_cancelled: Callable[[], bool] = lambda: False
    patience_s: Callable[[], float] = lambda: GRACE_S
    """Seconds that a stage has to save and end, once the run is cancelled."""
    turn: Callable[[str], AbstractContextManager[None]] = lambda node: nullcontext()
    """Held while a node's process runs, so that not too many do at once."""
    before_commit: Callable[[], None] = lambda: None
    """Called on an object store before an artifact is put in force, see `infra.store.at_work`."""
    measured_here: set[str] = field(default_factory=set)
    """Build ids of measurements that trainings of this run took of their models: built, though found in the store."""
    warm_start: WarmStart | None = None
    """Forks the processes of stages; None starts a new process for each."""

    @property
    def outbox(self) -> Outbox:
        return Outbox(self.store.root)

    def event(self, node: str, name: str, message: str) -> None:
        self.say(node, {"kind": "event", "time": time.time(), "name": name, "message": message})

    def tell(self, message: messages.Message) -> None:
        """Send an end message if the disk has room for it; otherwise the relay ends what has no end."""
        try:
            self.outbox.send(message)
        except OSError as error:
            if not is_of_the_disk(error):
                raise


class BuildClock:
    """Seconds of our own bookkeeping, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - started, 4)
