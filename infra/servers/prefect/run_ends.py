"""The end of a flow run as its journal has it: written before Prefect is told, and kept when Prefect was not there.

A run that ends while its server is away cannot report its state. Its `result.json` lies in the store by then, and
whoever finds the flow run without a process, the server or the worker, reports that end in its place.
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
    """The state that a run ends in. document: its result, as `stemma run --json` prints it."""
    if document["status"] == "done":
        built = sum(row["status"] == "built" for row in document["stages"])
        return RunEnd("COMPLETED", f"{built} stages built, {len(document['stages']) - built} reused")
    if document["status"] == "cancelled":
        return RunEnd("CANCELLED", "cancelled")
    return RunEnd("FAILED", "; ".join(str(Problem(**error)) for error in document["errors"]))


def recorded_end(runs: Path, flow_run_id: str, since: datetime) -> RunEnd | None:
    """The end that a flow run came to in this store, None if it came to none.

    Args:
        runs: The folder of the journals.
        since: When its last attempt began. An earlier attempt ended otherwise.
    """
    results = runs.glob("*/result.json") if runs.is_dir() else ()
    for path in results:
        # One that is damaged, or that goes just now, is no result.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            if path.stat().st_mtime < since.timestamp():
                continue
            document = read_own_json(path)
            if document["flow_run_id"] == flow_run_id:
                return end_of(document)
    return None
