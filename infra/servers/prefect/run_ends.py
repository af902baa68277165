"""End of a flow run according to its journal: written before it is reported to Prefect, and kept if Prefect was away.

A run that ends while its server is away cannot report its state. Its `result.json` is in the store by then, and the
server or the worker, whichever finds the flow run without a process, reports that end in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from infra.errors import Problem
from infra.io.json import read_own_json


@dataclass(frozen=True)
class RunEnd:
    """The final state of a flow run, in Prefect's terms."""

    type: Literal["COMPLETED", "FAILED", "CANCELLED"]
    message: str


def end_of(document: Mapping[str, Any]) -> RunEnd:
    """Return the final state of a run.

    Args:
        document: its result, as `stemma run --json` prints it.
    """
    if document["status"] == "done":
        built = sum(row["status"] == "built" for row in document["stages"])
        return RunEnd("COMPLETED", f"{built} stages built, {len(document['stages']) - built} reused")
    if document["status"] == "cancelled":
        return RunEnd("CANCELLED", "cancelled")
    return RunEnd("FAILED", "; ".join(str(Problem(**error)) for error in document["errors"]))


def recorded_end(runs: Path, flow_run_id: str, since: datetime) -> RunEnd | None:
    """Return the end of a flow run in this store, None if it has none.

    Args:
        runs: The folder of the journals.
        since: Start of its last attempt. Ends of earlier attempts do not count.
    """
    results = runs.glob("*/result.json") if runs.is_dir() else ()
    for path in results:
        # A file that is damaged, or that is being removed, is no result.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            if path.stat().st_mtime < since.timestamp():
                continue
            document = read_own_json(path)
            if document["flow_run_id"] == flow_run_id:
                return end_of(document)
    return None
