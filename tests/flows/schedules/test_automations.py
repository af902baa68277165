"""What the servers do by themselves: tell people, and mark a run whose processes are gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.runs.journal import latest
from infra.servers.http import post
from tests.support.pipelines import DOCSTRING_RULES, data_config, short_config
from tests.support.programs.command import environment, start, stemma, write_config
from tests.support.programs.processes import COLD, running_stage, wait_until
from tests.support.services.prefect_page import tables
from tests.support.services.receivers import webhook

pytestmark = pytest.mark.cluster


class Told:
    """A store whose servers are up and tell a receiver."""

    def __init__(self, folder: Path, page: str, hooks: list[tuple[str, Any]]) -> None:
        self.folder, self.page, self.hooks = folder, page, hooks
        self.root = folder / "store"

    def posted(self, path: str, text: str) -> bool:
        return any(where == path and text in str(document) for where, document in self.hooks)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("told")
    with webhook() as (address, hooks):
        env = environment(STEMMA_NOTICE_SLACK=f"{address}/slack", **COLD)
        try:
            answer = stemma("up", "--root", folder / "store", env=env)
            assert answer.code == 0, answer.document["errors"]
            page = next(service["url"] for service in answer.document["services"] if service["name"] == "prefect")
            yield Told(folder, page, hooks)
        finally:
            stemma("down", "--root", folder / "store")


@pytest.mark.long
def test_drift_a_correction_and_a_refusal_are_told_and_stand_in_both_pages(told: Told) -> None:
    """The text of a source changes, the learning rate is far too high, and a gate asks for more than there is.

    The risk: a notice whose text Prefect cannot fill in is sent to nobody. One of a failure is in `make test`
    (test_scheduled_runs.py).
    """
    folder = told.folder / "drifting"
    folder.mkdir()
    settings = {**data_config(folder, documents=200), "name": "drifting", "clean": DOCSTRING_RULES}
    config = write_config(folder / "config.yaml", settings)
    assert stemma("run", config, "--root", told.root).code == 0
    text = folder / "text.jsonl"
    text.write_text(text.read_text().replace("Chapter", "Once more and at length, chapter " * 8))
    training = {
        "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
        "duration": "60 batches",
        "global_batch_tokens": 256,
        "optimizer": {"learning_rate": 6.0},
        "schedule": {"warmup": "5 batches"},
        "guard": {"rollback_every": 10, "healthy_after": 5, "window_least": 10},
    }
    gates = {"gates": [{"figure": "pretrain.validation_loss", "at_most": 0.01}]}
    write_config(config, {**settings, "shard": {"sequence_length": 64}, "pretrain": training, "register": gates})
    answer = stemma("run", config, "--root", told.root, env=environment(STEMMA_RELAY="on"))
    assert answer.code == 3, answer.document["errors"]
    for title in ("drifting: validate drifted", "drifting: pretrain corrected", "drifting refused"):
        wait_until(lambda title=title: told.posted("/slack", title), timeout_s=60)
    found = tables(told.page, answer.document["flow_run_id"])
    made = json.loads((Path(answer.rows()["pretrain"]["path"]) / "aux" / "corrections.json").read_text())
    shown = [(row["batch"], row["alarm by"], row["learning rate ×"]) for row in found["corrections-pretrain"]]
    assert shown == [(one["alarm"]["batch"], one["alarm"]["cause"], one["factor"]) for one in made]
    assert made[0]["factor"] < 1
    wait_until(lambda: list((told.root / "mlflow").rglob("corrections.json")), timeout_s=60)


@pytest.mark.long
def test_a_run_whose_worker_and_processes_died_is_marked_told_and_can_be_run_again(told: Told) -> None:
    """The risk: a run that nobody works on any more shows as running for ever, and nobody is told."""
    config = write_config(told.folder / "dying.yaml", {**short_config(told.folder), "name": "dying"})
    follower = start("run", config, "--root", told.root)
    wait_until(lambda: running_stage(told.root, "clean"))
    journal = next(latest(told.root / "runs", "dying"))
    flow = psutil.Process(journal.read()[0]["pid"])
    worker = psutil.Process(int(_service(told, "worker")["pid"]))
    for process in (worker, *worker.children(recursive=True), flow):
        with suppress(psutil.NoSuchProcess):  # the run is one of the worker's
            process.kill()
    run_id = journal.start_record()["flow_run_id"]
    try:
        wait_until(lambda: _state(told.page, run_id) == "CRASHED", timeout_s=240)
        wait_until(lambda: told.posted("/slack", "crashed"), timeout_s=60)
    finally:
        follower.kill()
        follower.communicate()
    assert stemma("up", "--root", told.root).code == 0
    assert stemma("run", config, "--root", told.root).code == 0


def _service(told: Told, name: str) -> dict[str, Any]:
    services = stemma("status", "--root", told.root).document["services"]
    return next(service for service in services if service["name"] == name)


def _state(page: str, run_id: str) -> str:
    (found,) = post(f"{page}/api/flow_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}}, timeout_s=60)
    return str(found["state_type"])
