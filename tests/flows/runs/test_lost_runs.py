"""Flow runs whose process is gone, however young they were: they end, and leave the slot of their schedule."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Pending, Running, Scheduled

from flows.config.read import load
from flows.deployment.deploy import deploy_pipeline
from flows.prefect.schedules import Schedule
from flows.runs.journal import latest
from infra.process.lifetime import signal_group
from infra.servers.ports import any_free_port
from infra.servers.state import recorded
from tests.support.command import environment, stemma, write_config
from tests.support.pipelines import data_config
from tests.support.processes import COLD, running_stage, wait_until

pytestmark = pytest.mark.cluster

SILENCE = {"STEMMA_LOST_AFTER_S": "8"}
"""Of a server all of whose runs are dead, or get their heartbeats from the test: others send them every 30 s."""


@dataclass
class House:
    """Servers of a store, and a data pipeline whose stages are all built."""

    folder: Path
    client: SyncPrefectClient
    env: Mapping[str, str]
    is_impatient: bool = False

    @property
    def root(self) -> Path:
        return self.folder / "store"

    def up_again(self) -> None:
        """Starts what was killed, with a server that takes runs for lost after eight seconds."""
        answer = stemma("up", "--root", self.root, env={**self.env, **SILENCE})
        assert answer.code == 0, answer.document["errors"]
        self.is_impatient = True

    def kill(self, *services: str) -> None:
        """With all their processes, as by a power cut."""
        for name in services:
            signal_group(recorded(self.root)[name].pid, signal.SIGKILL)
        wait_until(lambda: not any(recorded(self.root)[name].alive for name in services))

    def state(self, run: UUID) -> State[Any]:
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state

    def slots_in_use(self, deployment: UUID) -> float:
        limit = self.client.read_deployment(deployment).global_concurrency_limit
        assert limit is not None
        return limit.active_slots

    def ended(self, run: UUID) -> str:
        """The name of the state that the run ends in, with its message."""
        state: Any = wait_until(lambda: (found := self.state(run)).is_final() and found)
        return f"{state.name}: {state.message}"


@pytest.fixture(scope="module")
def house(built_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("lost") / "data"
    shutil.copytree(built_data, folder, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    env = environment(**COLD)
    ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
    try:
        answer = stemma("up", "--root", folder / "store", *ports, env=env)
        assert answer.code == 0, answer.document["errors"]
        url = f"{answer.document['services'][0]['url']}/api"
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            yield House(folder, client, env)
    finally:
        stemma("down", "--root", folder / "store", env=env)


def test_a_schedule_goes_on_after_a_run_ended_and_died_without_its_server(house: House) -> None:
    """The first run never sends a second heartbeat, and its end is in its journal alone."""
    path = write_config(house.folder / "killed.yaml", {**data_config(house.folder), "name": "killed"})
    deployment = deploy_pipeline(load(path), house.root, str(path), Schedule("0 0 1 1 *"))
    forced = {"selection": {"force": ["clean"]}}
    first = house.client.create_flow_run_from_deployment(deployment, parameters=forced)
    child = wait_until(lambda: running_stage(house.root, "clean"))
    assert isinstance(child, psutil.Process)
    os.killpg(child.pid, signal.SIGSTOP)  # the first is under way for as long as it must be
    second = house.client.create_flow_run_from_deployment(deployment)
    wait_until(lambda: house.state(second.id).name == "AwaitingConcurrencySlot")

    house.kill("prefect")
    os.killpg(child.pid, signal.SIGCONT)
    wait_until(lambda: (result := next(latest(house.root / "runs", "killed")).result()) and result["status"] == "done")
    house.kill("worker")
    house.up_again()
    assert house.ended(first.id) == "Completed: 1 stages built, 3 reused"
    wait_until(lambda: house.state(second.id).name == "Completed")
    assert house.slots_in_use(deployment) == 0


def test_a_run_without_a_sign_of_life_is_ended_whatever_its_state(house: House) -> None:
    """None of them ever sent a heartbeat, but the one that is alive."""
    if not house.is_impatient:
        house.kill("prefect")
        house.up_again()
    client = house.client
    flow = client.create_flow_from_name("lost")

    def run(state: State[Any], **options: Any) -> UUID:
        made = client.request("POST", "/flow_runs/", json={"flow_id": str(flow), **options}).json()["id"]
        client.set_flow_run_state(made, state, force=True)
        return UUID(made)

    client.create_work_pool(WorkPoolCreate(name="pods", type="kubernetes"))
    pod = run(Pending(), work_pool_name="pods")
    living, dead, waiting, cancelled = (run(state) for state in (Running(), Running(), Pending(), Cancelling()))
    done, earlier = run(Running()), run(Running())
    for name, found, long_ago in (("done", done, False), ("earlier", earlier, True)):
        result = house.root / "runs" / name / "result.json"
        result.parent.mkdir(parents=True)
        document = {"flow_run_id": str(found), "status": "done", "errors": [], "stages": [{"status": "built"}]}
        result.write_text(json.dumps(document))
        if long_ago:
            os.utime(result, (0, 0))
    path = write_config(house.folder / "slots.yaml", {**data_config(house.folder), "name": "slots"})
    deployment = deploy_pipeline(load(path), house.root, str(path), Schedule("0 0 1 1 *"))
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))  # no worker takes it
    scheduled = client.create_flow_run_from_deployment(deployment, state=tomorrow).id
    client.set_flow_run_state(scheduled, Pending())
    assert house.slots_in_use(deployment) == 1

    def all_ended() -> bool:
        beat = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{living}"},
        }
        client.request("POST", "/events", json=[beat])
        return all(house.state(one).is_final() for one in (dead, waiting, cancelled, done, earlier, scheduled))

    wait_until(all_ended, timeout_s=120)
    crashed = "Crashed: no sign of life from its process for 8 s; run it again"
    assert [house.ended(one) for one in (dead, waiting, earlier, scheduled)] == [crashed] * 4
    assert house.ended(cancelled).startswith("Cancelled")
    assert house.ended(done) == "Completed: 1 stages built, 0 reused"
    assert (house.state(living).name, house.state(pod).name) == ("Running", "Pending")
    assert house.slots_in_use(deployment) == 0
