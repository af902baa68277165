"""Training in several ranks for tests: forked from a process that has imported everything, since importing Composer
takes longer than the training."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE_S = 240
TRAINER = "STEMMA_TEST_TRAINER"
"""Names the loop (`launch.trainer`) for tests that name none; `make test-newer` sets it."""
WITH_IMPORTS_DONE = multiprocessing.get_context("forkserver")
WITH_IMPORTS_DONE.set_forkserver_preload(["training.pretrain", "training.backends.composer", "tests.ranked"])
"""Its processes are forked from one that has imported what a training needs."""

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
) -> list[dict[str, Any]]:
    """Trains a stage as `count` ranks, each its own process, and returns what rank 0 told; raises RankFailed.

    stage: pretrain, sft or reward_model; its module and function in training/ have that name.
    nodes: over how many machines the ranks believe to be spread, all with the one work folder.

    Its work folder lies beside `out`, so that another call continues there.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[tuple[BaseProcess, Connection]] = []
    for rank in range(count):
        ours, theirs = WITH_IMPORTS_DONE.Pipe()
        arguments = (
            theirs,
            stage,
            rank,
            count,
            nodes,
            port,
            dict(settings),
            dict(inputs),
            out,
            dict(launch or {}),
            prepare,
            dict(environment or {}),
        )
        process = WITH_IMPORTS_DONE.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    errors: dict[int, str] = {}
    told: list[dict[str, Any]] = []
    try:
        for rank, (process, pipe) in enumerate(ranks):
            errors[rank], lines = pipe.recv() if pipe.poll(PATIENCE_S) else ("no answer", [])
            told = told or lines
            process.join(PATIENCE_S)
    except EOFError:
        errors[len(errors)] = "died"
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    if any(errors.values()):
        raise RankFailed(errors)
    return told


def pretrain_in_ranks(count: int, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    """`train_in_ranks` for pretraining."""
    return train_in_ranks("pretrain", count, *arguments, **options)


def _rank(
    pipe: Connection,
    stage: str,
    rank: int,
    count: int,
    nodes: int,
    port: int,
    settings: dict[str, Any],
    inputs: dict[str, Path],
    out: Path,
    launch: dict[str, Any],
    prepare: Prepare | None,
    environment: dict[str, str],
) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    processes = count // nodes
    journal = Told()
    try:
        from infra.launch.config import LaunchConfig
        from infra.launch.ranks import Node
        from infra.run import Run
        from training import config as configs

        function = getattr(importlib.import_module(f"training.{stage}"), stage)
        config_class = getattr(configs, "".join(word.capitalize() for word in stage.split("_")) + "Config")

        where = {"device": "cpu", "threads": 1, "precision": "fp32", "processes": processes, "nodes": nodes}
        if trainer := os.environ.get(TRAINER):
            where["trainer"] = trainer
        config = LaunchConfig(**{**where, **launch})
        if count > 1:
            node = Node(rank // processes, "127.0.0.1", port)
            os.environ |= node.rank_environment(config, rank % processes)
        if prepare is not None:
            prepare(rank)
        run = Run(out.parent / f"{out.name}.work", config, journal=journal if rank == 0 else None)  # type: ignore[arg-type]
        place = out if rank == 0 else out.parent / f"{out.name}.rank{rank}"
        place.mkdir(parents=True, exist_ok=True)
        function(config_class.model_validate(settings), inputs, place, run)
        pipe.send(("", journal.lines))
    except BaseException:
        pipe.send((traceback.format_exc(), journal.lines))


class Told:
    """Stands where a run's journal file stands, and remembers the lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, text: str) -> None:
        import json

        self.lines.append(json.loads(text))

    def flush(self) -> None:
        """A file has this method."""
