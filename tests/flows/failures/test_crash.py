"""Killed at any moment: the next run trusts nothing half-built, and continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from infra.lineage.ledger import Ledger
from infra.lineage.messages import from_json
from infra.lineage.outbox import Outbox
from infra.lineage.relay_lock import relay_pid
from infra.lineage.tracking import database_uri
from infra.run import read_journal
from tests.infra.lineage.relay_process import RelayProcess
from tests.support.pipelines import data_config, full_config
from tests.support.points import points_of
from tests.support.programs.command import Answer, environment, finish, start, stemma, write_config
from tests.support.programs.memory import confine, memory_limit
from tests.support.programs.processes import gone, progress_of, running_stage, wait_until


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.yaml", data_config(tmp_path))


def without(pipeline: Path, stage: str) -> tuple[Path, Path]:
    """The config and the store of a built pipeline that lacks the artifact of one stage."""
    shutil.rmtree(pipeline / "store" / stage)
    return pipeline / "config.yaml", pipeline / "store"


def test_a_relay_that_is_killed_while_a_run_goes_on_is_replaced(cold_env: dict[str, str], data_pipeline: Path) -> None:
    """Its later messages waited for the next run, and MLflow had it as running until then."""
    config, store = without(data_pipeline, "clean")
    run = start("run", config, "--root", store, env=cold_env | {"STEMMA_RELAY": "on"})
    wait_until(lambda: running_stage(store, "clean"))
    relay = wait_until(lambda: relay_pid(store))
    os.kill(relay, signal.SIGKILL)
    assert finish(run).code == 0
    wait_until(lambda: Outbox(store).pending() == 0 and relay_pid(store) is None, timeout_s=90)
    with closing(Ledger(store)) as ledger:
        assert not list(ledger.open_runs())


def test_a_killed_orchestrator_leaves_no_orphan_and_nothing_half_built(
    cold_env: dict[str, str], env: dict[str, str], data_pipeline: Path
) -> None:
    stage = "clean"
    config, store = without(data_pipeline, stage)
    first = start("run", config, "--root", store, env=cold_env)
    child = wait_until(lambda: running_stage(store, stage))
    assert isinstance(child, psutil.Process)

    first.kill()
    first.communicate()
    wait_until(lambda: gone(child), timeout_s=60)
    assert not list(store.glob(f"{stage}/*"))
    assert list((store / ".work" / stage).iterdir()), "what was done so far waits for whoever continues it"

    second = stemma("run", config, "--root", store, env=env)
    assert second.code == 0, second.document["errors"]
    assert second.with_status("built") == {stage}
    assert "taking over from" in second.stderr
    assert stemma("run", config, "--root", store, env=env).with_status("built") == set()


def test_a_stopped_builder_is_waited_for_whatever_the_clock_says(
    cold_env: dict[str, str], data_pipeline: Path, tmp_path: Path
) -> None:
    """As a laptop that slept: never two builders in one work folder."""
    config, store = data_pipeline / "config.yaml", data_pipeline / "store"
    first = start("run", config, "--root", store, "--force", "clean", env=cold_env)
    child = wait_until(lambda: running_stage(store, "clean"))
    assert isinstance(child, psutil.Process)
    log = tmp_path / "second.log"
    try:
        with sqlite3.connect(store / ".state" / "leases.sqlite") as table:
            groups = "SELECT work_group FROM leases"
            wait_until(lambda: (child.pid,) in table.execute(groups).fetchall())
            os.killpg(child.pid, signal.SIGSTOP)
            first.send_signal(signal.SIGSTOP)
            assert table.execute("UPDATE leases SET renewed = renewed - 100000").rowcount == 1

        with open(log, "w") as output:
            second = start("run", config, "--root", store, "--force", "clean", env=cold_env, stderr=output)
        ends = ("waiting for it", "taking over", "clean: built")
        wait_until(lambda: any(told in log.read_text() for told in ends))
        assert "waiting for it" in log.read_text()
    finally:
        first.send_signal(signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGCONT)

    one, two = finish(first), finish(second)
    assert (one.code, two.code) == (0, 0), (one.document["errors"], two.document["errors"])
    assert "taking over" not in log.read_text()
    assert one.statuses()["clean"] == "built"


def test_a_line_of_the_journal_that_a_kill_cut_short_is_in_nobodys_way(
    env: dict[str, str], data_pipeline: Path
) -> None:
    (built,) = (data_pipeline / "store" / "clean").iterdir()
    config, store = without(data_pipeline, "clean")
    journal = store / ".work" / "clean" / built.name / "scratch" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    taken_back = '{"kind": "undone", "time": 1.0, "step": 3, "undone": {"a": 1.0}}\n'
    taken_back += '{"kind": "rewind", "time": 1.0, "place": 0, "step": 2}\n'
    journal.write_text(taken_back + '{"kind": "progress", "time": 1.0, "do')

    before = stemma("logs", "clean", "--root", store, env=env)
    assert (before.code, before.document["said"]) == (0, [])
    answer = stemma("run", config, "--root", store, "--until", "clean", env=env)
    assert (answer.code, answer.statuses()["clean"]) == (0, "built"), answer.document["errors"]
    said = stemma("logs", "clean", "--root", store, env=env).document["said"]
    assert {line["kind"] for line in said} == {"progress"}


def killed_once(config: Path, store: Path, cold_env: dict[str, str], *settings: str) -> Answer:
    """A run whose stage `clean` is killed as soon as it runs."""
    first = start("run", config, "--root", store, *settings, env=cold_env)
    child = wait_until(lambda: running_stage(store, "clean"))
    assert isinstance(child, psutil.Process)
    child.kill()
    return finish(first)


def test_a_killed_stage_is_tried_again(cold_env: dict[str, str], data_pipeline: Path) -> None:
    answer = killed_once(*without(data_pipeline, "clean"), cold_env, "--set", "launch.retry_wait_s=0")
    assert answer.code == 0, answer.document["errors"]
    assert "killed by SIGKILL, sent from outside" in answer.stderr
    assert "trying again" in answer.stderr


def test_a_stage_killed_too_often_is_named_and_the_next_run_builds_it(
    cold_env: dict[str, str], env: dict[str, str], data_pipeline: Path
) -> None:
    config, store = without(data_pipeline, "clean")
    answer = killed_once(config, store, cold_env, "--set", "launch.retries=0")
    assert answer.code == 1
    assert answer.statuses() == {"ingest": "reused", "validate": "reused", "clean": "failed", "tokenizer": "skipped"}
    (problem,) = answer.document["errors"]
    assert (problem["code"], problem["path"]) == ("killed", "clean")
    second = stemma("run", config, "--root", store, env=env)
    assert second.with_status("built") == {"clean"}


def test_a_kill_for_want_of_memory_is_named_and_tried_again(cold_env: dict[str, str], data_pipeline: Path) -> None:
    config, store = without(data_pipeline, "validate")
    with memory_limit(16_000_000) as group:
        settings = ("--set", "launch.retry_wait_s=0")
        first = start("run", config, "--root", store, "--until", "validate", *settings, env=cold_env)
        child = wait_until(lambda: running_stage(store, "validate"))
        assert isinstance(child, psutil.Process)
        confine(child, group)
        answer = finish(first)
    assert answer.code == 0, answer.document["errors"]
    assert "out of memory" in answer.stderr
    assert "trying again" in answer.stderr


def test_ctrl_c_cancels_and_ends_every_process(
    cold_env: dict[str, str], env: dict[str, str], config: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    process = start("run", config, "--root", store, env=cold_env)
    child = wait_until(lambda: running_stage(store, "ingest"))
    assert isinstance(child, psutil.Process)

    process.send_signal(signal.SIGINT)
    answer = finish(process, timeout_s=60)

    assert (answer.code, answer.document["status"]) == (130, "cancelled")
    assert gone(child)
    assert stemma("run", config, "--root", store, "--until", "ingest", env=env).code == 0


@pytest.mark.long
def test_ctrl_c_ends_every_rank_and_the_next_run_continues_where_they_saved(
    env: dict[str, str], built_full: Path, tmp_path: Path
) -> None:
    """Each rank gets SIGTERM, as from a scheduler that takes the machine back, and they save if they can in 10 s. One
    process goes on; that as many ranks would is in tests/training/checkpoint/test_checkpoints.py.

    The risk: a signal that reaches the stage and not its ranks. Ctrl-C at one process is in `make test`.
    """
    store, batches = tmp_path / "store", 400
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    settings = full_config() | {"launch": {"processes": 2, "device": "cpu", "threads": 1, "compile": "off"}}
    settings["pretrain"] |= {
        "model": {"family": "llama", "layers": 1, "width": 16, "heads": 2, "positions": 64},
        "duration": f"{batches} batches",
        "global_batch_tokens": 256,
        "checkpoint_every": "90000 batches",
        "evaluate_every": "90000 batches",
        "guard": {"enabled": False},
    }
    command = ("run", write_config(tmp_path / "config.yaml", settings), "--root", store, "--until", "pretrain")
    process = start(*command, env=env)
    launcher = wait_until(lambda: running_stage(store, "pretrain"))
    assert isinstance(launcher, psutil.Process)
    wait_until(lambda: progress_of(store, "pretrain") >= 3, timeout_s=240)
    everyone = [launcher, *launcher.children(recursive=True)]
    assert len(everyone) >= 3

    process.send_signal(signal.SIGINT)
    wait_until(lambda: all(map(gone, everyone)), timeout_s=60)

    assert finish(process, timeout_s=120).code == 130
    (saved,) = (store / ".work" / "pretrain").glob("*/scratch/checkpoints/ba*/manifest.json")
    saved_at = int(saved.parent.name[2:])
    assert 3 <= saved_at < batches

    second = stemma(*command, "--set", "launch.processes=1", env=env)
    assert second.with_status("built") == {"pretrain", "measure_pretrain"}, second.document["errors"]
    assert f"continuing pretrain at batch {saved_at} of {batches}" in second.stderr
    folder = Path(second.rows()["pretrain"]["path"])
    assert (folder / "model.safetensors").exists()
    points = points_of(read_journal(folder / "aux" / "journal.jsonl"))
    assert [step for step, _ in points["train/loss"]] == list(range(1, batches + 1)), "of two ranks, one speaks"


def test_a_private_server_is_started_when_none_runs(config: Path, tmp_path: Path) -> None:
    variables = environment()
    variables.pop("PREFECT_API_URL", None)
    answer = stemma("run", config, "--root", tmp_path / "store", "--until", "ingest", env=variables)
    assert answer.code == 0, answer.document["errors"]
    assert "private server" in answer.stderr


def test_training_killed_midway_continues_from_its_last_checkpoint(
    env: dict[str, str], built_full: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    longer = full_config()
    longer["pretrain"] |= {"duration": "240 batches", "checkpoint_every": "10 batches", "evaluate_every": "240 batches"}
    config = write_config(tmp_path / "config.yaml", longer)
    first = start("run", config, "--root", store, "--until", "pretrain", env=env)
    child = wait_until(lambda: running_stage(store, "pretrain"))
    assert isinstance(child, psutil.Process)
    wait_until(lambda: progress_of(store, "pretrain") >= 30)
    first.kill()
    first.communicate()

    second = stemma("run", config, "--root", store, "--until", "pretrain", env=env)

    assert second.with_status("built") == {"pretrain", "measure_pretrain"}, second.document["errors"]
    assert "continuing pretrain at batch" in second.stderr
    manifest = json.loads((Path(second.rows()["pretrain"]["path"]) / "manifest.json").read_text())
    assert manifest["result"]["figures"]["batches"] == 240

    aux = Path(second.rows()["pretrain"]["path"]) / "aux"
    points = points_of(map(json.loads, (aux / "metrics.jsonl").read_text().splitlines()))
    assert points == points_of(read_journal(aux / "journal.jsonl"))
    assert [step for step, _ in points["train/loss"]] == list(range(1, 241)), "each once, whatever the kill took"
    assert [step for step, _ in points["validation/sample_loss"]] == [240]
    assert RelayProcess(store, "--until-empty").process.wait() == 0
    query = """SELECT step, metrics.value FROM metrics JOIN tags USING (run_uuid)
        WHERE tags.key = 'stemma.build_id' AND tags.value = ? AND metrics.key = ? ORDER BY step"""
    with closing(sqlite3.connect(store / "mlflow" / "mlflow.db")) as database:
        for name, found in points.items():
            assert database.execute(query, (manifest["build_id"], name)).fetchall() == found, f"{name} in MLflow"


def test_a_build_whose_end_lineage_never_heard_is_told_at_its_next_use(
    env: dict[str, str], built_data: Path, data_pipeline: Path
) -> None:
    """Killed between the artifact's rename and the message: it is there, and MLflow took its run for killed."""
    from infra.lineage.delivery import Delivery

    store = data_pipeline / "store"
    shutil.copytree(built_data / "store" / "lineage" / "outbox", store / "lineage" / "outbox")
    outbox, ledger = Outbox(store), Ledger(store)
    delivery = Delivery(store, database_uri(store), ledger)

    def deliver() -> list[tuple[str, str]]:
        """(kind, build) of what was delivered."""
        told = []
        for path in outbox.paths():
            letter = outbox.read(path)
            delivery.deliver(from_json(letter.content), letter.sender)
            told.append((letter.content["kind"], letter.content["build_id"]))
            path.unlink()
        return told

    builds = {json.loads(path.read_text())["stage"]: path for path in store.glob("*/*/manifest.json")}
    manifest = json.loads(builds["clean"].read_text())
    (lost,) = [
        path
        for path in outbox.paths()
        if (content := outbox.read(path).content)["kind"] == "stage_finished"
        and content["build_id"] == manifest["build_id"]
    ]
    lost.unlink()
    deliver()
    (open_run,) = [run for run in ledger.open_runs() if run.build_id == manifest["build_id"]]
    delivery.end_abandoned(open_run)
    assert ledger.rows(manifest["run_id"])["clean"]["outcome"] == "cancelled"

    for expected in ([("stage_finished", manifest["build_id"])], []):
        answer = stemma("run", data_pipeline / "config.yaml", "--root", store, env=env)
        assert answer.with_status("reused") == set(builds), answer.document["errors"]
        assert [told for told in deliver() if told[0] == "stage_finished"] == expected, "once"
    assert ledger.rows(manifest["run_id"])["clean"]["outcome"] == "built"
    ledger.close()
