"""Runs and checks of pipelines: the commands `stemma run` and `stemma check`, with typed results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma.home import add_home, variables


@dataclass(frozen=True)
class StageRow:
    """One stage of a run, or of what a run would do.

    status: built, reused, failed or skipped; in a check build or reuse. because: the reasons to build it.
    """

    stage: str
    status: str
    because: tuple[str, ...]
    headline: str
    fingerprint: str | None
    path: Path | None
    seconds: float | None


@dataclass(frozen=True)
class RunResult:
    """Result of a run. document: all that `stemma run --json` prints."""

    run_id: str
    root: str
    seconds: float
    stages: tuple[StageRow, ...]
    document: Mapping[str, Any]

    def __getitem__(self, stage: str) -> StageRow:
        return _row_of(self.stages, stage)


@dataclass(frozen=True)
class CheckResult:
    """Result of a check. document: all that `stemma check --json` prints."""

    root: str
    stages: tuple[StageRow, ...]
    document: Mapping[str, Any]

    def __getitem__(self, stage: str) -> StageRow:
        return _row_of(self.stages, stage)

    @property
    def to_build(self) -> tuple[str, ...]:
        return tuple(row.stage for row in self.stages if row.status == "build")


def run(
    config: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    from_: Sequence[str] = (),
    until: Sequence[str] = (),
    force: Sequence[str] = (),
    root: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Run a pipeline to its end: build what is missing, reuse the rest.

    It runs as `stemma run` does: on the worker of `stemma up` if that runs, else in a separate process, which an
    interrupt of this one cancels.

    Args:
        config: path of the YAML file.
        settings: values by dotted key, such as {"pretrain.duration": "100 batches"}.
        only, from_, until, force: stages, as the options of `stemma run`.
        root: folder or URL of the store; by default that of the command.

    Raises:
        StemmaError: with all problems, if anything failed, the config is wrong, or a gate refused the model.
    """
    selection = {"only": only, "from": from_, "until": until, "force": force}
    document = _command("run", config, settings, selection, root)
    return RunResult(
        str(document.get("run_id", "")),
        str(document["root"]),
        float(document["seconds"]),
        tuple(map(_row, document["stages"])),
        document,
    )


def check(
    config: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    from_: Sequence[str] = (),
    until: Sequence[str] = (),
    force: Sequence[str] = (),
    root: str | os.PathLike[str] | None = None,
) -> CheckResult:
    """Return what `run` with the same arguments would build and reuse, and why. Starts nothing.

    Raises:
        StemmaError: with everything that is wrong in the config or with its sources.
    """
    selection = {"only": only, "from": from_, "until": until, "force": force}
    document = _command("check", config, settings, selection, root)
    return CheckResult(str(document["root"]), tuple(map(_row, document["stages"])), document)


def _command(
    name: str,
    config: str | os.PathLike[str],
    settings: Mapping[str, Any] | None,
    selection: Mapping[str, Sequence[str]],
    root: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    words = [name, os.fspath(config), "--json"]
    for key, value in (settings or {}).items():
        # JSON is YAML; a text is given unquoted, so that it is read as the same text in the file would be.
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    for option, stages in selection.items():
        words += [f"--{option}={stage}" for stage in ([stages] if isinstance(stages, str) else stages)]
    words += ["--root", os.fspath(root)] if root is not None else []
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables()}
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    add_home()
    from infra import errors
    from infra.io.json import BadJson, parse_json

    try:
        document: dict[str, Any] = parse_json(output, expected="the result of the command")
    except BadJson:
        message = f"stemma {name} ended with code {process.returncode} and no result"
        raise errors.stage_error("crashed", os.fspath(config), message, "its log is above") from None
    if document["status"] != "done":
        kinds = {"invalid": errors.ConfigError, "refused": errors.GateRefused, "cancelled": errors.Cancelled}
        raised = kinds.get(document["status"], errors.StageError)
        raise raised(*(errors.Problem(**problem) for problem in document["errors"]))
    return document


def _row(row: Mapping[str, Any]) -> StageRow:
    return StageRow(
        row["stage"],
        row["status"],
        tuple(row.get("because") or ()),
        row.get("headline") or "",
        row.get("fingerprint") or None,
        Path(row["path"]) if row.get("path") else None,
        row.get("seconds"),
    )


def _row_of(rows: Sequence[StageRow], stage: str) -> StageRow:
    for row in rows:
        if row.stage == stage:
            return row
    raise KeyError(f"no stage {stage}; there are {', '.join(row.stage for row in rows)}")
