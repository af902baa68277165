"""A campaign: run a pipeline repeatedly in a scratch store, inject faults, and check every promise after each one."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.drill import invariants, layer
from flows.drill.actions import inject
from flows.drill.kinds import KINDS, Fault, draw, not_possible
from flows.drill.layer import FaultLayer
from flows.drill.site import ORPHANS_GONE_S, Site
from flows.drill.watch import targets, wait_for
from infra.errors import stage_error
from infra.io.files import write_whole
from infra.io.json import parse_own_json

RECORD = "drill.json"
RESTARTS = 4
LINEAGE_S = 300.0
REPORTS_S = 0.3
"""Seconds in which the run's journal has what a stage reported before it was hit."""
STAGES_NEEDED = ("", "orchestrator", "stage", "rank", "loader", "imports", "grader", "sampler")


@dataclass(frozen=True)
class DrillRequest:
    """A drill that is asked for.

    Args:
        config: the pipeline's file; settings: as `--set` takes them.
        folder: scratch folder; a campaign that was broken off there is continued.
        kinds: the faults to draw from; none: all that are possible.
        minutes: no new fault after these; None: until all faults have hit.
        repeat: the number of the only fault, None for all; at: the stage and the second of it at which it hits.
    """

    config: Path
    folder: Path
    faults: int = 20
    mtbf_s: float = 60.0
    seed: int = 0
    settings: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    servers: bool = False
    minutes: float | None = None
    repeat: int | None = None
    at: tuple[str, float] | None = None
    say: Callable[[str], None] = field(default=print, compare=False)


class Drill:
    """One campaign and its record, `drill.json` in its folder."""

    def __init__(self, wish: DrillRequest, pipeline: Any) -> None:
        self.wish = wish
        self.impossible = not_possible(pipeline, wish.servers)
        requested = wish.kinds or tuple(KINDS)
        self.kinds = sorted(set(requested) - set(self.impossible))
        if not self.kinds:
            reasons = "; ".join(f"{name}: {self.impossible[name]}" for name in requested)
            raise stage_error("no_faults", "--only", f"none of these faults is possible here: {reasons}")
        self.about = _plain(
            {
                "config": str(wish.config.absolute()),
                "settings": list(wish.settings),
                "seed": wish.seed,
                "mtbf_s": wish.mtbf_s,
                "kinds": self.kinds,
                "servers": wish.servers,
                "content": wish.config.read_text(encoding="utf8"),
            }
        )
        wish.folder.mkdir(parents=True, exist_ok=True)
        self._path = wish.folder / RECORD
        record = invariants.read_record(self._path)
        if record is None or record["about"] != self.about or wish.repeat is not None:
            record = {
                **_reference_of(record, self.about),
                "about": self.about,
                "not_possible": self.impossible,
                "faults": [],
                "cycles": [],
            }
        self.record: dict[str, Any] = record
        self._began = time.monotonic()
        self._waited_s = 0.0
        self._checks_s = 0.0
        self._misses = 0
        self._late_ends: frozenset[str] = frozenset()

    def run(self) -> dict[str, Any]:
        """Run the campaign to its end, and return its record."""
        self._reference()
        while self._next() is not None:
            self._cycle()
        return self.record

    def _next(self) -> Fault | None:
        """The next fault, None when there is to be no more."""
        rows = self.record["faults"]
        done = sum(not row["missed"] for row in rows)
        if self.wish.repeat is not None:
            return None if rows else self._drawn(self.wish.repeat)
        late = self.wish.minutes is not None and time.monotonic() - self._began > self.wish.minutes * 60
        return None if done >= self.wish.faults or late else self._drawn(len(rows) + 1)

    def _drawn(self, number: int) -> Fault:
        return draw(self.wish.seed, number, self.wish.mtbf_s, self.kinds)

    def _save(self) -> None:
        write_whole(self._path, json.dumps(self.record, indent=1) + "\n")

    # The run that all others are compared with.

    def _reference(self) -> None:
        if "reference" in self.record:
            return
        self.wish.say("a run without faults, to compare with")
        site = Site(self.wish.folder / "reference", self.wish.config, self.wish.settings, servers=self.wish.servers)
        try:
            began = time.monotonic()
            run = site.start_run()
            run.process.wait()
            seconds = time.monotonic() - began
            document = run.document()
            if run.code != 0:
                reasons = [error["message"] for error in (document or {}).get("errors", [])]
                reason = "; ".join(reasons) or run.stderr()[-500:]
                raise stage_error("no_reference", str(self.wish.config), f"the run without faults failed: {reason}")
            self._wait_for_lineage(site)
            self.record["reference"] = {
                "seconds": round(seconds, 1),
                "ettr": invariants.ledger(site.root)[0]["ettr"],
                "digests": invariants.digests(site.root),
                "points": _plain(invariants.points(site.root)),
            }
        finally:
            self._close(site)
        shutil.rmtree(self.wish.folder / "reference")
        self._save()
        self.wish.say(f"done in {seconds:.0f} s")

    def _close(self, site: Site) -> None:
        if site.servers:
            site.ask("down")
        site.kill_everything()

    def _wait_for_lineage(self, site: Site) -> None:
        """Wait until MLflow has every message. The relay of a run ends then; that of `stemma up` stays."""
        if site.servers:
            wait_for(lambda: not invariants.undelivered(site.root), LINEAGE_S)
        elif _delivers():
            wait_for(site.relay_ended, LINEAGE_S)

    # One pipeline from nothing to its end, however many faults hit it.

    def _cycle(self) -> None:
        number = len(self.record["cycles"]) + 1
        folder = self.wish.folder / f"cycle{number}"
        network = None if layer.missing() else FaultLayer(self.wish.folder / "layer", folder / "store")
        site = Site(folder, self.wish.config, self.wish.settings, network, self.wish.servers)
        began, self._checks_s, self._late_ends = time.monotonic(), 0.0, frozenset()
        first = len(self.record["faults"])
        site.start_run()
        try:
            violations = self._faults_of(site)
            wall_s = time.monotonic() - began - self._checks_s
            violations += self._at_the_end(site)
            account, unbalanced = invariants.ledger(site.root)
            violations += unbalanced
        finally:
            self._close(site)
        numbers = [fault["number"] for fault in self.record["faults"][first:]]
        cycle = {"faults": numbers, "wall_s": round(wall_s, 1), "ledger": account, "violations": violations}
        self.record["cycles"].append(cycle)
        self._save()
        for violation in violations:
            self.wish.say(f"VIOLATION at the end, after faults {numbers}: {violation}")
        if not violations:
            shutil.rmtree(folder)

    def _faults_of(self, site: Site) -> list[str]:
        """Hit the pipeline until it is done; violations that belong to no single fault."""
        patience_s = max(600.0, 5 * self.record["reference"]["seconds"])
        while True:
            fault = self._next()
            if fault is None:
                if not wait_for(lambda: self._ended(site), patience_s):
                    return [f"the run did not end in {patience_s:.0f} s"]
            elif (moment := self._moment(site, fault, patience_s)) is not None:
                self._hit(site, fault, moment)
                self._waited_s, self._misses = 0.0, 0
                continue
            assert site.run
            if site.run.code is None:
                return [f"the run made no progress for {patience_s:.0f} s"]
            if site.run.code == 0:
                self._miss(fault)
                return []
            late = self._ended_late(site)
            if late:
                return late

    def _miss(self, fault: Fault | None) -> None:
        """Give a fault up whose process was not there while a whole pipeline ran."""
        is_due = fault is not None and self._waited_s >= fault.after_s
        if fault is None or not is_due or not fault.kind.role or self._misses < 1:
            self._misses += bool(is_due)
            return
        empty = {"where": "", "at": "", "what": "no such process ran", "ends": [], "reported": "", "bits": "equal"}
        row = {"number": fault.number, "seed": fault.seed, "kind": fault.kind.name, "missed": True}
        self.record["faults"].append({**row, **empty, "recovered_s": None, "violations": []})
        self._waited_s, self._misses = 0.0, 0

    def _ended_late(self, site: Site) -> list[str]:
        """Start a run again that ended because of the last fault, after it had made progress."""
        assert site.run
        start = time.monotonic()
        document = site.run.document()
        violations = invariants.answer_true(site.run.code or 0, document, site.run.stderr(), self._late_ends)
        violations += self._after_a_run(site)
        self._checks_s += time.monotonic() - start
        if self._late_ends:
            self.record["faults"][-1]["ends"].append(f"later {_ending(site.run.code or 0, document)}")
            self._late_ends = frozenset()
            site.start_run()
            return violations
        return violations or [f"the run ended with {site.run.code}"]

    def _ended(self, site: Site) -> bool:
        site.look()
        return site.run is not None and site.run.code is not None

    def _moment(self, site: Site, fault: Fault, patience_s: float) -> tuple[Any, list[str]] | None:
        """Wait for the moment of a fault: its target (a process and its stage, or None), and the stages that run. None
        where the run ends before."""
        deadline = time.monotonic() + patience_s + fault.after_s
        before = time.monotonic()
        while time.monotonic() < deadline:
            site.look()
            now = time.monotonic()
            self._waited_s += now - before
            before = now
            if site.run is None or site.run.code is not None:
                return None
            stages = site.watch.running()
            if self._is_due(site, fault, stages):
                if not fault.kind.role:
                    return None, stages
                there = targets(fault.kind.role, site.root, site.mark)
                if there:
                    return there[int(fault.choice * len(there))], stages
            time.sleep(0.1)
        return None

    def _is_due(self, site: Site, fault: Fault, stages: list[str]) -> bool:
        if self.wish.at is not None:
            stage, offset_s = self.wish.at
            return stage in stages and time.monotonic() - site.watch.stages[stage].began >= offset_s
        needs_stage = fault.kind.role in STAGES_NEEDED
        return self._waited_s >= fault.after_s and bool(stages or not needs_stage)

    def _hit(self, site: Site, fault: Fault, moment: tuple[Any, list[str]]) -> None:
        target, stages = moment
        stage = target[1] if target and target[1] else ""
        hit = [stage] if stage in stages else stages
        farthest = {name: site.watch.stages[name].farthest for name in hit}
        offsets = {name: max(0.0, time.monotonic() - site.watch.stages[name].began) for name in hit}
        moments = "+".join(f"{name} {offset:.1f} s" for name, offset in offsets.items()) or "between stages"
        self.wish.say(f"fault {fault.number}: {fault.kind.name} at {moments}")
        heard = len(site.watch.events)
        began = time.monotonic()
        what = inject(fault, site, target, stages)
        # Progress that a stage reported just before it was hit is no recovery.
        wait_for(lambda: self._ended(site), REPORTS_S)
        farthest = {name: max(done, self._farthest(site, name)) for name, done in farthest.items()}
        row: dict[str, Any] = {
            "number": fault.number,
            "seed": fault.seed,
            "kind": fault.kind.name,
            "missed": False,
            "where": moments,
            "at": f"{hit[0]}+{offsets[hit[0]]:.1f}" if hit else "",
            "what": what,
        }
        violations, ends, recovered_s = self._recover(site, fault, farthest, began)
        bits = invariants.digests_equal(site.root, self.record["reference"]["digests"], all_of_them=False)
        row["ends"] = ends
        row["reported"] = self._words(site, heard, ends)
        row["recovered_s"] = recovered_s
        row["bits"] = "differ" if bits else "equal"
        row["violations"] = violations + bits
        self.record["faults"].append(row)
        self._save()
        for violation in row["violations"]:
            self.wish.say(f"VIOLATION by fault {fault.number}: {violation}; repeat it: {self.repeat(row)}")

    def _farthest(self, site: Site, stage: str) -> float:
        progress = site.watch.stages.get(stage)
        return progress.farthest if progress else 0.0

    def repeat(self, row: Mapping[str, Any]) -> str:
        """The command that repeats one fault."""
        settings = " ".join(f"--set '{pair}'" for pair in self.wish.settings)
        kinds = f" --only {','.join(self.wish.kinds)}" if self.wish.kinds else ""
        at = f" --at {row['at']}" if row["at"] else ""
        servers = " --servers" if self.wish.servers else ""
        start = f"stemma drill {self.wish.config} --seed {self.wish.seed} --mtbf {self.wish.mtbf_s:g}s"
        return f"{start}{kinds}{servers} --repeat {row['number']}{at} {settings}".strip()

    def _words(self, site: Site, heard: int, ends: Sequence[str]) -> str:
        words = [f"{stage}: {message}" for stage, message in site.watch.events[heard:]]
        return "; ".join([*ends, *words[:2]])[:300]

    def _recover(
        self, site: Site, fault: Fault, farthest: Mapping[str, float], began: float
    ) -> tuple[list[str], list[str], float | None]:
        """Wait until each stage that was hit is farther than before; runs that end are checked and started again."""
        violations: list[str] = []
        ends: list[str] = []
        checked_s = 0.0
        patience_s = max(600.0, 5 * self.record["reference"]["seconds"])
        allowed = fault.kind.ends
        changes = sum(len(progress.changes) for progress in site.watch.stages.values())
        while True:
            site.look()
            assert site.run
            if site.run.code is not None:
                start = time.monotonic()
                for other in site.others:
                    other.process.wait()
                    violations += invariants.answer_true(other.code or 0, other.document(), other.stderr(), allowed)
                site.others.clear()
                document = site.run.document()
                violations += invariants.answer_true(site.run.code, document, site.run.stderr(), allowed)
                ends.append(_ending(site.run.code, document))
                violations += self._after_a_run(site)
                took = time.monotonic() - start
                checked_s += took
                self._checks_s += took
                if site.run.code == 0:
                    break
                if len(ends) >= RESTARTS:
                    return [*violations, f"{RESTARTS} runs in a row ended: {', '.join(ends)}"], ends, None
                allowed = frozenset()  # nothing hits the next one
                site.start_run()
            waits_for = dict(farthest)
            if waits_for:
                over = all(site.watch.now_beyond(stage, done) for stage, done in waits_for.items())
            else:
                over = sum(len(progress.changes) for progress in site.watch.stages.values()) > changes
            if over and not site.others and (ends or not fault.kind.ends_run):
                break
            if time.monotonic() - began > patience_s:
                return [*violations, f"no progress in {patience_s:.0f} s after the fault"], ends, None
            time.sleep(0.1)
        self._late_ends = allowed
        recovered_s = round(time.monotonic() - began - checked_s, 1)
        start = time.monotonic()
        violations += invariants.artifacts_true(site.root)
        if site.servers and fault.kind.role in ("prefect", "mlflow", "worker"):
            site.ask("up")
        self._checks_s += time.monotonic() - start
        return violations, ends, recovered_s

    def _after_a_run(self, site: Site) -> list[str]:
        """Check the promises about a run that has ended, however it did."""
        violations = [f"process {name} outlives its run" for name in site.orphans()]
        violations += invariants.no_leases(site.root, ORPHANS_GONE_S)
        built = [address.partition("/")[2] for address in invariants.digests(site.root)]
        return violations + invariants.check_true(site.ask("check", *site.config), built)

    def _at_the_end(self, site: Site) -> list[str]:
        """Check the promises about a pipeline that is done, when nothing runs."""
        reference = self.record["reference"]
        self._wait_for_lineage(site)
        violations = invariants.artifacts_true(site.root)
        violations += invariants.digests_equal(site.root, reference["digests"], all_of_them=True)
        violations += invariants.metrics_once(site.root, reference["points"])
        if _delivers():
            violations += invariants.lineage_whole(site.root)
        if site.servers:
            site.ask("down")
            site.servers = False
        violations += self._after_a_run(site)
        violations += invariants.no_shared_memory(site.memory_before, site.pids)
        if left := site.left_files():
            violations.append(f"temporary files are left: {', '.join(left[:5])}")
        return violations


def _delivers() -> bool:
    return os.environ.get("STEMMA_RELAY") != "off"


def _reference_of(record: Mapping[str, Any] | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The run without faults of an earlier campaign with the same pipeline."""
    same = ("config", "settings", "servers", "content")
    if record is None or "reference" not in record or any(record["about"][key] != about[key] for key in same):
        return {}
    return {"reference": record["reference"]}


def _plain(value: Any) -> Any:
    """Return a value as JSON returns it."""
    return parse_own_json(json.dumps(value))


def _ending(code: int, document: Mapping[str, Any] | None) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    codes = [error["code"] for error in (document or {}).get("errors", [])]
    status = (document or {}).get("status", "no document")
    return f"{status}{' ' + ', '.join(codes) if codes else ''} ({code})"


def figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a campaign: faults, violations, effective time ratio, median seconds to recover by kind.

    ettr: useful share of the devices' time, by the ledger. without_faults: the time of a run without faults, as a share
        of the time with them.
    """
    wall_s = sum(cycle["wall_s"] for cycle in record["cycles"])
    by_kind: dict[str, list[float]] = {}
    for fault in record["faults"]:
        if fault["recovered_s"] is not None:
            by_kind.setdefault(fault["kind"], []).append(fault["recovered_s"])
    rows = [*record["faults"], *record["cycles"]]
    without_faults_s = record["reference"]["seconds"] * len(record["cycles"])
    accounts = [cycle["ledger"] for cycle in record["cycles"]]
    device_s = sum(account["device_s"] for account in accounts)
    return {
        "faults": sum(not row["missed"] for row in record["faults"]),
        "pipelines": len(record["cycles"]),
        "violations": sum(len(row["violations"]) for row in rows),
        "ettr": round(sum(account["useful_s"] for account in accounts) / device_s, 3) if device_s else None,
        "without_faults": round(without_faults_s / wall_s, 3) if wall_s else None,
        "recovery_s": {kind: round(sorted(values)[len(values) // 2], 1) for kind, values in sorted(by_kind.items())},
    }


def table(record: Mapping[str, Any]) -> str:
    """The campaign as Markdown."""
    numbers = figures(record)
    lines = [
        f"{numbers['faults']} faults hit {numbers['pipelines']} pipelines; {numbers['violations']} violations; "
        f"effective time ratio {numbers['ettr']}, and in a run without faults {record['reference']['ettr']}. "
        f"A run without faults takes {record['reference']['seconds']:.0f} s, which is {numbers['without_faults']} of "
        "the time with them.",
        "",
        "| # | fault | where | reported | recovered | bits | violations |",
        "|---:|---|---|---|---:|---|---|",
    ]
    hits = [row for row in record["faults"] if not row["missed"]]
    for row in hits:
        seconds = "not" if row["recovered_s"] is None else f"{row['recovered_s']:.1f} s"
        reported = row["reported"].replace("|", "/")[:60] or "nothing: it went on"
        violations = "; ".join(row["violations"]).replace("|", "/")[:60] or "none"
        cells = (row["number"], row["kind"], row["where"][:60], reported, seconds, row["bits"], violations)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| after faults | violations at the end of the pipeline |", "|---|---|"]
    for cycle in record["cycles"]:
        numbers_hit = ", ".join(map(str, cycle["faults"])) or "none"
        lines.append(f"| {numbers_hit[:60]} | {'; '.join(cycle['violations'])[:200] or 'none'} |")
    missed = sorted({row["kind"] for row in record["faults"] if row["missed"]})
    if missed:
        lines += ["", f"Given up, since no such process was seen while a pipeline ran: {', '.join(missed)}."]
    if record["not_possible"]:
        lines += ["", "Not possible here:", ""]
        by_reason: dict[str, list[str]] = {}
        for kind, reason in sorted(record["not_possible"].items()):
            by_reason.setdefault(reason, []).append(kind)
        lines += [f"- {', '.join(kinds)}: {reason}" for reason, kinds in by_reason.items()]
    return "\n".join(lines) + "\n"
