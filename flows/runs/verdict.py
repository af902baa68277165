"""Verdict on a run, from the outcome of each of its stages: done only if every one of them has its artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flows.runs.journal import JournalRow
from flows.runs.journal_forms import HAS_ARTIFACT
from infra.errors import Cancelled, Problem, StemmaError

URGENCY = ("failed", "invalid", "refused", "cancelled")
"""Words for how stages ended; the run's is the first of these that occurs."""


def verdict(
    rows: Mapping[str, JournalRow],
    errors: Mapping[str, StemmaError],
    upstream: Mapping[str, Sequence[str]],
    stopped: bool,
) -> tuple[str, tuple[Problem, ...]]:
    """(the word for `status`, its problems). A stage that is neither built nor reused makes the run fail, by its name.

    errors: by stage. upstream: the stages that each stage waits for. A stage that is skipped needs one of them to have
        no artifact, or its skipping is unexplained. stopped: True if the run was asked to stop.
    """
    if stopped:
        return Cancelled.status, Cancelled().problems
    faults = {name: list(error.problems) or [_unexplained(name, "failed")] for name, error in errors.items()}
    without = {name for name, row in rows.items() if row.status not in HAS_ARTIFACT} | set(errors)
    for name, row in rows.items():
        # A blocker outside of the run's rows would have been built before it began.
        waits = row.status == "skipped" and any(up in without for up in upstream.get(name, ()))
        if name in without and name not in faults and not waits:
            faults[name] = [_unexplained(name, row.status)]
    if not faults:
        return "done", ()
    problems = tuple(
        problem if problem.path else Problem(problem.code, name, problem.message, problem.fix)
        for name, message in faults.items()
        for problem in message
    )
    words = {errors[name].status if name in errors else "failed" for name in faults}
    return min(words, key=URGENCY.index), problems


def _unexplained(name: str, status: str) -> Problem:
    return Problem(
        "no_artifact",
        name,
        f"the run ended with this stage {status} and without its artifact, and no error was reported",
        f"run again; stemma logs {name}",
    )
