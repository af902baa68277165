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
from training.rehearsal.job import RankRecord, Rehearsal
from training.rehearsal.step import rehearse_rank


def rehearsed(job: Rehearsal) -> dict[str, Any]:
    """Return {"ranks": [RankRecord]} of the positions that hold different layers, or {"problems": [Problem]} of the
    first that cannot be set up. Each rank has a separate process, since torch keeps groups of ranks for its life."""
    forked = multiprocessing.get_context("fork")
    processes, receivers = [], []
    for position in job.positions:
        receiver, sender = forked.Pipe(duplex=False)
        processes.append(forked.Process(target=_answer, args=(job, position, sender), daemon=True))
        receivers.append(receiver)
        processes[-1].start()
        sender.close()
    records: list[RankRecord] = []
    try:
        for position, receiver in zip(job.positions, receivers, strict=True):
            answer = _received(job, position, receiver)
            if not isinstance(answer, RankRecord):
                return {"problems": answer}
            records.append(answer)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return {"ranks": records}


def _received(job: Rehearsal, position: int, receiver: Connection) -> RankRecord | list[Problem]:
    try:
        answer: RankRecord | list[Problem] = receiver.recv()
    except EOFError:
        rank = f"rank {job.rank_at(position)} of {job.launch.ranks}"
        message = f"the process that rehearses {rank} ended without a result"
        return [Problem("rehearsal_failed", "launch", message, "run it again with more free memory")]
    return answer


def _answer(job: Rehearsal, position: int, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    answer: RankRecord | list[Problem]
    try:
        answer = rehearse_rank(job, position)
    except StageError as error:
        answer = list(error.problems)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        message = (
            f"rank {job.rank_at(position)} of {job.launch.ranks} cannot be set up, or cannot take a step: "
            f"{type(cause).__name__}: {reason}"
        )
        fix = "change the degrees of parallelism in launch:, or the model's sizes, so that the degrees divide the sizes"
        answer = [Problem("cannot_be_set_up", "launch", message, fix)]
    sender.send(answer)


def main() -> None:
    document = rehearsed(Rehearsal.model_validate_json(sys.stdin.read()))
    print(json.dumps({name: [_plain(value) for value in values] for name, values in document.items()}))


def _plain(value: RankRecord | Problem) -> dict[str, Any]:
    return value.as_json() if isinstance(value, Problem) else value.model_dump(mode="json")


if __name__ == "__main__":
    main()
