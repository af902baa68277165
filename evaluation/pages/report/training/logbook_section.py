"""Problems while models were trained, and the reactions to them, in chronological order."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from evaluation.pages.parts import Section, Table
from evaluation.results.pipeline import PipelineResults

EVENTS = "aux/events.jsonl"

TROUBLE = {
    "failed": ("try that ended in a fault", "tries that ended in a fault"),
    "cancelled": ("try that was stopped", "tries that were stopped"),
    "restarted": ("new start of all ranks", "new starts of all ranks"),
    "node_excluded": ("node left out", "nodes left out"),
    "correction": ("correction by the guard", "corrections by the guard"),
    "rate_cut": ("rate cut for good", "rates cut for good"),
    "passed_over": ("checkpoint passed over", "checkpoints passed over"),
    "other_versions": ("training that continued under other versions", "trainings that continued under other versions"),
    "upload_failed": ("upload that failed", "uploads that failed"),
    "slow_node": ("slow node", "slow nodes"),
    "slow_link": ("slow link between nodes", "slow links between nodes"),
    "slow_rank": ("slow rank", "slow ranks"),
    "stuck": ("loss that did not change", "losses that did not change"),
}
"""Events that a build without problems does not have, with their names in the singular and plural."""

AROUND = {"submitted", "nodes", "network", "waiting", "continued", "fetched", "upload_late", "scratch"}
"""Events that are listed with these for context: the start of ranks, and the checkpoint from which work continued."""

_MOST = 200


def logbook(pipeline: PipelineResults) -> Section:
    """Return the log of every stage that had problems, on any try and machine; empty if there were none."""
    entries: list[tuple[dict[str, Any], str]] = []
    for id, artifact in pipeline.artifacts.items():
        events = [event for event in artifact.read_lines(EVENTS) if event.get("name") in {*TROUBLE, *AROUND}]
        if any(event["name"] in TROUBLE for event in events):
            entries += [(event, id) for event in events]
    if not entries:
        return Section("logbook", "Logbook")
    entries.sort(key=lambda row: float(row[0]["time"]))
    counts = Counter(event["name"] for event, _ in entries)
    lead = ", ".join(f"{counts[name]} {words[counts[name] > 1]}" for name, words in TROUBLE.items() if counts[name])
    rows = [[_when(event["time"]), id, str(event["message"])] for event, id in entries[:_MOST]]
    note = "Times are in UTC."
    if len(entries) > _MOST:
        note += f" These are the first {_MOST} of {len(entries):,} lines; aux/events.jsonl of each stage has all."
    table = Table("", ["at", "stage", "what happened"], rows, note, mono=(0,))
    return Section("logbook", "Logbook", f"{lead}.", tables=[table])


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S")
