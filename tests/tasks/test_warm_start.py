"""Stages that are forked with their imports done come to the same as new processes, whatever becomes of the server."""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tasks.stages import STAGES
from tests.support.programs.command import finish, start_new, stemma
from tests.support.programs.processes import COLD, gone, wait_until

FORKED = "forked from a server"


def began(folder: str) -> str:
    """The head of a stage's log: how its process was started."""
    return (Path(folder) / "aux" / "stage.log").read_text(encoding="utf8").partition("\n")[0]


def servers_of(pid: int) -> list[psutil.Process]:
    """The fork servers of a run."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            found += [child] if "infra.process.fork_server" in child.cmdline() else []
    return found


def test_what_is_imported_early_is_there() -> None:
    for name in {name for stage in STAGES.values() for name in stage.imports_later}:
        # Asking for a submodule imports its package, which takes long for those of others.
        known = name if name.partition(".")[0] in ("corpus", "evaluation", "training") else name.partition(".")[0]
        assert importlib.util.find_spec(known) is not None, name


def test_stages_that_one_server_forks_agree_on_memory_and_none_of_the_corpus_keeps_it() -> None:
    """Where they did not, the second would be a new process: glibc is told when a process starts."""
    told = {(stage.package, stage.keeps_memory) for stage in STAGES.values()}
    assert told == {("corpus", False), ("training", True), ("evaluation", True)}


@pytest.mark.long
def test_a_forked_training_ends_with_the_same_bits_as_a_new_process(
    env: dict[str, str], built_full: Path, tmp_path: Path
) -> None:
    """The risk: what a fork server imported or set changes what its children compute."""
    store = tmp_path / "store"
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    rows = []
    for variables in ({}, COLD):
        # Not --force: what comes to the same digest keeps the earlier folder, with its log.
        shutil.rmtree(store / "pretrain")
        command = ("run", built_full / "config.yaml", "--root", store, "--only", "pretrain")
        answer = stemma(*command, env={**env, **variables})
        assert answer.with_status("built") == {"pretrain", "measure_pretrain"}, answer.document["errors"]
        rows.append((answer.rows()["pretrain"]["digest"], began(answer.rows()["pretrain"]["path"])))
    (forked, how_forked), (new, how_new) = rows
    assert how_forked.startswith(FORKED) and how_new == "a new process: STEMMA_WARM_START is off"
    assert forked == new


def test_a_run_whose_fork_server_is_killed_goes_on_with_new_processes(env: dict[str, str], data_pipeline: Path) -> None:
    for stage in ("clean", "tokenizer"):
        shutil.rmtree(data_pipeline / "store" / stage)
    command = start_new("run", data_pipeline / "config.yaml", "--root", data_pipeline / "store", env=env)

    (found,) = wait_until(lambda: servers_of(command.pid))  # type: ignore[misc]
    found.kill()
    answer = finish(command)
    assert answer.code == 0, answer.document["errors"]
    assert began(answer.rows()["tokenizer"]["path"]) == "a new process: the fork server has ended"


def test_the_servers_end_with_the_run(env: dict[str, str], data_pipeline: Path) -> None:
    force = ("--force", "clean", "--force", "tokenizer")
    command = start_new("run", data_pipeline / "config.yaml", "--root", data_pipeline / "store", *force, env=env)
    seen = wait_until(lambda: servers_of(command.pid))
    answer = finish(command)
    assert answer.code == 0, answer.document["errors"]
    assert isinstance(seen, list) and all(map(gone, seen))
    assert all(began(answer.rows()[stage]["path"]).startswith(FORKED) for stage in ("clean", "tokenizer"))
