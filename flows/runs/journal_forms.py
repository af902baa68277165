"""Forms of what a run's folder holds: a disk or a person may have damaged it, and readers rely on these keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

HAS_ARTIFACT = frozenset({"built", "reused"})
READS = "reads"
"""The kind of the line that `RunJournal.reads` writes."""


def is_whole(start: Mapping[str, Any]) -> bool:
    """Return True for the beginning of a run of a whole pipeline, not of a part of it."""
    selection = start.get("selection")
    return selection is not None and not any(selection[key] for key in ("only", "from_", "until"))


class _JournalForm(BaseModel):
    """Keys that readers rely on; others are not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Line(_JournalForm):
    kind: str
    stage: str = ""
    time: float = 0.0
    ticks: float = 0.0


class _Selection(_JournalForm):
    only: list[str] = []
    from_: list[str] = []
    until: list[str] = []


class _Begin(_Line):
    time: float
    pid: int = 0
    start_ticks: float | None = None
    machine: str = ""
    pipeline: str = ""
    config: str | None = ""
    selection: _Selection | None = None
    flow_run_id: str | None = None
    flow_run_url: str | None = None


class _ResultRow(_JournalForm):
    stage: str
    status: str
    fingerprint: str | None = None
    digest: str | None = None
    path: str | None = None
    seconds: float | None = None
    headline: str = ""
    build_id: str | None = None

    @model_validator(mode="after")
    def _has_address(self) -> _ResultRow:
        if self.status in HAS_ARTIFACT and (self.fingerprint is None or self.digest is None):
            raise ValueError("expected the address of an artifact")
        return self


class _StageLine(_ResultRow, _Line):
    stage: str


class _Progress(_Line):
    stage: str
    done: float
    total: float | None = None
    unit: str = ""


class _Input(_JournalForm):
    stage: str
    fingerprint: str
    digest: str
    path: str
    state: str = ""


class _Reads(_Line):
    artifacts: list[_Input]


class _End(_Line):
    status: str


class _Error(_JournalForm):
    code: str
    path: str
    message: str
    fix: str = ""


class _Result(_JournalForm):
    status: str
    stages: list[_ResultRow]
    seconds: float | None = None
    errors: list[_Error] = []


_LINES: Mapping[str, type[_Line]] = {
    "begin": _Begin,
    "stage": _StageLine,
    "progress": _Progress,
    READS: _Reads,
    "end": _End,
}


def is_line(line: Mapping[str, Any]) -> bool:
    """Return True for a line of a journal, as `flows.runs.journal.RunJournal` writes it."""
    try:
        _LINES.get(str(line["kind"]), _Line).model_validate(line)
    except ValidationError:
        return False
    return True


def fault_of_result(result: Any) -> str:
    """Return what is wrong with the final document of a run; "" for one that readers can rely on."""
    try:
        _Result.model_validate(result)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        return f"not as expected: {key}: {first['msg']}"
    return ""
