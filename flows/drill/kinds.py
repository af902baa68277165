"""The faults of a drill: what each does, to which process, and how a run that it hits may end."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

from flows.config.graph import graph
from flows.config.read import PipelineConfig
from flows.drill import layer

ROLES = {
    "orchestrator": "the process that runs the pipeline",
    "stage": "the process of a stage, and the launcher of its ranks",
    "rank": "one of several training processes of a stage",
    "loader": "a data loader's process",
    "imports": "the server from which stages are forked",
    "grader": "a process that grades answers",
    "sampler": "a process or server that samples answers",
    "relay": "the process that delivers lineage to MLflow",
    "prefect": "Prefect's server",
    "mlflow": "MLflow's server",
    "worker": "Prefect's worker",
}
SERVERS = ("mlflow", "worker")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        name: action and target, such as `kill-stage`.
        role: a key of ROLES whose process it hits; "" for faults of the machine.
        ends: how the run may end because of it, besides going on to its end: `killed`, `cancelled`, or the code of an
            error that it may report.
        what: for the table and the documentation.
    """

    name: str
    role: str
    ends: frozenset[str]
    what: str

    @property
    def ends_run(self) -> bool:
        """True if the run ends by this fault, unless it was just about to end."""
        return self.name in ("kill-orchestrator", "term-orchestrator", "power-loss", "two-operators")


def _kinds() -> list[Kind]:
    kinds = []
    for role, what in ROLES.items():
        for action, verb in (("kill", "SIGKILL to"), ("stop", "SIGSTOP, later SIGCONT to"), ("term", "SIGTERM to")):
            ends = set()
            if action == "kill":
                ends = {"killed", "run_lost"} if role == "orchestrator" else {"killed"}
            if action == "term":
                ends = {"cancelled"} if role == "orchestrator" else {"killed"}
            if role in ("worker", "prefect") and action != "stop":
                ends |= {"run_lost", "cancelled", "service_failed"}
            if action == "stop":
                ends = {"lease_lost"}
            kinds.append(Kind(f"{action}-{role}", role, frozenset(ends), f"{verb} {what}"))
    disk = {"disk_full"}
    return [
        *kinds,
        Kind("full-disk", "", frozenset(disk), "writes below the store fail for want of room (ENOSPC)"),
        Kind("read-only-disk", "", frozenset({*disk, *_DISK}), "changes below the store are refused (EROFS)"),
        Kind("broken-disk", "", frozenset({*disk, *_DISK}), "reads and writes below the store fail (EIO)"),
        Kind("clock-ahead", "", frozenset(), "the clock jumps an hour ahead, and later back"),
        Kind("clock-behind", "", frozenset(), "the clock jumps an hour back, and later ahead"),
        Kind("network-cut", "", frozenset({"run_lost", "service_failed"}), "no connection over IP works, to no server"),
        Kind("power-loss", "", frozenset({"killed"}), "all processes are gone at once, unsynced writes with them"),
        Kind("two-operators", "", frozenset({"cancelled"}), "a second run, a forced one, and a cancelled one at once"),
        Kind("object-store", "", frozenset(), "the object store answers 503, breaks off, and flips bits"),
    ]


_DISK = ("disk_failed", "not_permitted", "unwritable")
KINDS = {kind.name: kind for kind in _kinds()}
_LAYERED = ("full-disk", "read-only-disk", "broken-disk", "clock-ahead", "clock-behind", "network-cut", "power-loss")


def not_possible(pipeline: PipelineConfig, with_servers: bool) -> dict[str, str]:
    """Return the kinds that this machine or this config cannot have, each with the reason."""
    launch = pipeline.launch
    rlhf: Any = pipeline.section("rlhf")
    reasons: dict[str, str] = {}
    if not any(node.stage.trains for node in graph(pipeline).values()):
        reasons |= dict.fromkeys(("rank", "loader"), "no stage of this config trains")
    elif launch.ranks == 1:
        reasons["rank"] = "this config trains in one process: launch.processes is 1"
    if launch.loader_workers == 0:
        reasons["loader"] = "this config has no loader workers: launch.loader_workers is 0"
    if not getattr(rlhf, "reward_processes", 0):
        reasons["grader"] = "no stage of this config has graders: rlhf.reward_processes is 0"
    if getattr(rlhf, "async_", None) is None and getattr(rlhf, "sampler", "own") == "own":
        reasons["sampler"] = "no stage of this config samples in other processes: rlhf.async is not set"
    if os.environ.get("STEMMA_RELAY") == "off":
        reasons["relay"] = "STEMMA_RELAY is off"
    if not with_servers:
        reasons |= dict.fromkeys(SERVERS, "only with --servers, which drills under `stemma up`")
        if os.environ.get("PREFECT_API_URL"):
            reasons["prefect"] = "PREFECT_API_URL names a server that is not the drill's"
    missing = {name: reasons[kind.role] for name, kind in KINDS.items() if kind.role in reasons}
    if without := layer.missing():
        missing |= dict.fromkeys(_LAYERED, without)
    missing["object-store"] = (
        "a drill's store is a folder; tests/flows/elsewhere/test_object_store_root.py has these faults"
    )
    return missing


@dataclass(frozen=True)
class Fault:
    """One fault of a campaign, as its seed draws it.

    Args:
        after_s: seconds of work before it.
        lasts_s: for faults that end again.
        choice: in [0, 1), which of several targets.
    """

    number: int
    seed: str
    kind: Kind
    after_s: float
    lasts_s: float
    choice: float


def draw(seed: int, number: int, mtbf_s: float, kinds: list[str]) -> Fault:
    """Return fault `number` of the campaign with this seed: the same whatever came before it."""
    chance = random.Random(f"{seed}/{number}")
    kind = KINDS[chance.choice(sorted(kinds))]
    after_s, lasts_s = chance.expovariate(1 / mtbf_s), chance.uniform(1.0, 6.0)
    return Fault(number, f"{seed}/{number}", kind, after_s, lasts_s, chance.random())
