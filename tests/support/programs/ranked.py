"""Training in several ranks for tests: forked from a process that has imported everything, since importing Composer
takes longer than the training."""

from __future__ import annotations

import importlib
import json
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.programs.command import stage_server
from tests.support.programs.forked_call import ForkedCall

TRAINER = "STEMMA_TEST_TRAINER"
"""Names the loop (`launch.trainer`) for tests that name none."""
_IMPORTS = ["training.pretrain", "training.backends.composer", "tests.support.programs.ranked"]

# What a rank does before it trains: anything that a test breaks on purpose.
Prepare = Callable[[int], None]


class RankFailed(Exception):
    """A rank ended with an error. `errors` are the tracebacks by rank, "" for one that ended well or was ended."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__("\n".join(errors.values()))
        self.errors = errors


def train_in_ranks(
    stage: str,
    count: int,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Path],
    out: Path,
    *,
    launch: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    environment: Mapping[str, str] | None = None,
    nodes: int = 1,
    checkpoint_place: str = "",
) -> list[dict[str, Any]]:
    """Trains a stage as `count` ranks, each its own process, and returns what rank 0 told; raises RankFailed.

    stage: pretrain, sft or reward_model; its module and function in training/ have that name.
    nodes: over how many machines the ranks believe to be spread, all with the one work folder.
    checkpoint_place: see `infra.run.Run`.

    Its work folder lies beside `out`, so that another call continues there.
    """
    port = _free_port()
    launch = {**({"trainer": os.environ[TRAINER]} if TRAINER in os.environ else {}), **(launch or {})}
    told: list[dict[str, Any]] = []
    errors: dict[int, str] = {}
    ranks: list[ForkedCall] = []
    try:
        for rank in range(count):
            given = (stage, rank, count, nodes, port, settings, inputs, out, launch, prepare, environment or {})
            ranks.append(training_process(_rank, *given, checkpoint_place))
        for rank, process in enumerate(ranks):
            if process.wait() is None:
                errors[rank] = "no answer"
                continue
            errors[rank], lines = process.returned()
            told = told or lines
    except EOFError:
        errors[len(errors)] = "died"
    finally:
        for process in ranks:
            process.kill()
    if any(errors.values()):
        raise RankFailed(errors)
    return told


def training_process(function: Callable[..., Any], *arguments: Any) -> ForkedCall:
    """The call of a function in a process that has imported what a training needs; whoever starts it kills it."""
    return ForkedCall(stage_server(), _IMPORTS, function, *arguments)


def called_in_ranks(function: Callable[..., str], count: int, *arguments: Any) -> list[str]:
    """Calls `function(rank, count, port, *arguments)` in `count` processes, which may meet at this port of loopback;
    what each said: by the custom of tests, "" where all was well."""
    port = _free_port()
    together = [training_process(function, rank, count, port, *arguments) for rank in range(count)]
    try:
        return [one.returned() if one.wait() is not None else "no answer" for one in together]
    finally:
        for one in together:
            one.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pretrain_in_ranks(count: int, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    """`train_in_ranks` for pretraining."""
    return train_in_ranks("pretrain", count, *arguments, **options)


def _rank(
    stage: str,
    rank: int,
    count: int,
    nodes: int,
    port: int,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Path],
    out: Path,
    launch: Mapping[str, Any],
    prepare: Prepare | None,
    environment: Mapping[str, str],
    checkpoint_place: str,
) -> tuple[str, list[dict[str, Any]]]:
    """The forked process: its traceback, "" where it ended well, and what it told."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    processes = count // nodes
    journal = Told()
    try:
        from infra.launch.config import LaunchConfig
        from infra.launch.ranks import ClusterNode
        from infra.run import Run
        from training import config as configs

        function = getattr(importlib.import_module(f"training.{stage}"), stage)
        config_class = getattr(configs, "".join(word.capitalize() for word in stage.split("_")) + "Config")

        where = {"device": "cpu", "threads": 1, "precision": "fp32", "processes": processes, "nodes": nodes}
        config = LaunchConfig(**{**where, **launch})
        if count > 1:
            node = ClusterNode(rank // processes, "127.0.0.1", port)
            os.environ |= node.rank_environment(config, rank % processes)
        if prepare is not None:
            prepare(rank)
        told_to: Any = journal if rank == 0 else None
        work = out.parent / f"{out.name}.work"
        run = Run(work, config, journal=told_to, checkpoint_place=checkpoint_place)
        place = out if rank == 0 else out.parent / f"{out.name}.rank{rank}"
        place.mkdir(parents=True, exist_ok=True)
        function(config_class.model_validate(settings), inputs, place, run)
    except BaseException:
        return traceback.format_exc(), journal.lines
    return "", journal.lines


class Told:
    """Stands where a run's journal file stands, and remembers the lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, text: str) -> None:
        self.lines.append(json.loads(text))

    def flush(self) -> None:
        """A file has this method."""
