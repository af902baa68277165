"""Rehearse the ranks of a layout: `python -m training.rehearsal < rehearsal.json`.

The input is a `Rehearsal`. The output is one JSON document: `ranks`, a `RankRecord` of each position that is rehearsed,
or `problems`, why a rank cannot be set up.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from infra.errors import Problem, StageError
from training.rehearsal.job import Rehearsal
from training.rehearsal.step import rehearse_rank


def main() -> None:
    job = Rehearsal.model_validate_json(sys.stdin.read())
    document: dict[str, Any] = {"ranks": []}
    for position in job.positions:
        answer = _in_a_process(job, position)
        if "problems" in answer:
            document = answer
            break
        document["ranks"].append(answer)
    print(json.dumps(document))


def _in_a_process(job: Rehearsal, position: int) -> dict[str, Any]:
    """Rehearse a rank in a process of its own, since torch keeps groups of ranks for the life of a process."""
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    process = forked.Process(target=_answer, args=(job, position, sender))
    process.start()
    sender.close()
    try:
        answer: dict[str, Any] = receiver.recv()
    except EOFError:
        message = f"the process that rehearses rank {job.rank_at(position)} of {job.launch.ranks} ended without a result"
        answer = {"problems": [Problem("rehearsal_failed", "launch", message).as_json()]}
    process.join()
    return answer


def _answer(job: Rehearsal, position: int, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        answer = rehearse_rank(job, position).model_dump(mode="json")
    except StageError as error:
        answer = {"problems": [problem.as_json() for problem in error.problems]}
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        message = (
            f"rank {job.rank_at(position)} of {job.launch.ranks} cannot be set up, or cannot take a step: "
            f"{type(cause).__name__}: {reason}"
        )
        fix = "change the degrees of parallelism in launch:, or the model's sizes, so that the one divides the other"
        answer = {"problems": [Problem("cannot_be_set_up", "launch", message, fix).as_json()]}
    sender.send(answer)


if __name__ == "__main__":
    main()
