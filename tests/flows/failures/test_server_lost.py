"""A Prefect server that dies, and may come back: the run that it shows goes on, is kept, and is told of in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import prefect
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed

from flows.config.graph import Selection
from flows.config.read import PipelineConfig
from flows.deployment.start import RunRequest, _follow
from flows.prefect.page import RunPage
from flows.runs.journal import RunJournal
from infra.process.lifetime import signal_group
from infra.servers.environment import server_environ
from infra.servers.http import answers
from infra.servers.ports import HOST, any_free_port
from infra.servers.specs import prefect_server_variables
from tests.support.pipelines import data_config, short_config
from tests.support.programs.command import REPOSITORY, environment, finish, start, stemma, write_config
from tests.support.programs.processes import COLD, running_stage, wait_until


class Server:
    """A Prefect server that can be killed and started again, with its past and on its port."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = any_free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.env = environment(PREFECT_API_URL=f"{self.url}/api", PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false", **COLD)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        with open(self.home / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "infra.servers.prefect.server", "--host", HOST, "--port", str(self.port)],
                env=server_environ(prefect_server_variables(self.home, self.url)),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: answers(f"{self.url}/api/health"), timeout_s=180)

    def kill(self) -> None:
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def servers_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    yield server
    server.kill()


@pytest.fixture
def server(servers_home: Server) -> Server:
    """It answers, whatever the test before did to it."""
    if not servers_home.runs:
        servers_home.start()
    return servers_home


@pytest.mark.long
@pytest.mark.cluster
def test_a_server_that_comes_back_is_told_what_it_missed(server: Server, tmp_path: Path, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    force = ("--force", "clean", "--force", "tokenizer")
    process = start("run", data_pipeline / "config.yaml", "--root", store, *force, env=server.env)
    wait_until(lambda: running_stage(store, "clean"))
    server.kill()
    child = wait_until(lambda: running_stage(store, "tokenizer"))
    assert isinstance(child, psutil.Process)
    os.killpg(child.pid, signal.SIGSTOP)
    try:
        server.start()
    finally:
        os.killpg(child.pid, signal.SIGCONT)
    answer = finish(process)

    assert answer.code == 0, (answer.document["errors"], answer.stderr)
    assert answer.with_status("built") == {"clean", "tokenizer"}
    assert "warnings" not in answer.document, answer.stderr
    with temporary_settings({PREFECT_API_URL: f"{server.url}/api"}), get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs()
        assert run.state is not None
        assert run.state.is_completed()
        assert {"clean", "tokenizer"} <= completed_tasks(client)
        assert {"stage-clean", "stage-tokenizer", "stages"} <= keys(client)


@pytest.mark.cluster
@pytest.mark.long
def test_a_server_that_dies_takes_no_training_with_it(server: Server, tmp_path: Path) -> None:
    """The risk: a run waits at its end for a server that never comes back. One that comes back is in `make test`."""
    store = tmp_path / "store"
    config = write_config(tmp_path / "config.yaml", short_config(tmp_path))
    process = start("run", config, "--root", store, "--until", "clean", env=server.env)
    wait_until(lambda: running_stage(store, "ingest"))
    server.kill()
    answer = finish(process)
    assert (answer.code, answer.document["status"]) == (0, "done"), (answer.document["errors"], answer.stderr)
    assert answer.with_status("built") == {"ingest", "clean"}
    assert [warning["code"] for warning in answer.document["warnings"]] == ["page_lost"]
    assert "does not answer" in answer.stderr
    assert len(list(store.glob("*/*/manifest.json"))) == 2


@pytest.mark.long
def test_a_worker_s_run_ends_well_without_its_server_and_says_so_when_it_is_back(tmp_path: Path) -> None:
    """Proves that Prefect's worker, too, takes no run for dead whose server died under it."""
    store, env = tmp_path / "store", environment(**COLD)
    config = write_config(tmp_path / "config.yaml", data_config(tmp_path))
    ports = ("--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port()))
    try:
        services = stemma("up", "--root", store, *ports, env=env).document["services"]
        (server,) = [service for service in services if service["name"] == "prefect"]
        process = start("run", config, "--root", store, env=env)
        wait_until(lambda: running_stage(store, "ingest"), timeout_s=300)
        signal_group(os.getpgid(server["pid"]), signal.SIGKILL)
        answer = finish(process)
        assert (answer.code, answer.document["status"]) == (0, "done"), (answer.document["errors"], answer.stderr)
        assert len(answer.with_status("built")) == 4
        assert [warning["code"] for warning in answer.document["warnings"]] == ["page_lost"]

        assert stemma("up", "--root", store, env=env).code == 0
        with temporary_settings({PREFECT_API_URL: f"{server['url']}/api"}), get_client(sync_client=True) as client:
            run = UUID(answer.document["flow_run_id"])
            wait_until(lambda: (state := client.read_flow_run(run).state) and state.is_final(), timeout_s=200)
            state = client.read_flow_run(run).state
            assert state is not None
            assert state.is_completed(), state
            assert {"stage-ingest", "stage-tokenizer", "stages"} <= keys(client)
    finally:
        stemma("down", "--root", store, env=env)


@pytest.mark.parametrize(
    ("begins", "interrupted", "code", "status"),
    [("gone", False, "run_lost", "failed"), ("never", True, "not_cancelled", "cancelled")],
)
def test_who_follows_a_run_without_a_server_is_not_left_waiting(
    tmp_path: Path, begins: str, interrupted: bool, code: str, status: str
) -> None:
    """The server and the run's process are gone: nobody will say how it ended, and Ctrl-C is heard."""
    journal = RunJournal(tmp_path, "run")
    if begins == "gone":
        begin = f"from flows.runs.journal import *; RunJournal(Path({str(tmp_path)!r}), 'run').begin()"
        subprocess.run([sys.executable, "-c", begin], check=True, cwd=REPOSITORY)
    answer = followed_without_server(journal, tmp_path, interrupted)
    assert (answer["status"], [error["code"] for error in answer["errors"]]) == (status, [code])


def test_a_run_that_begins_without_an_answer_of_its_server_is_no_crash(tmp_path: Path) -> None:
    variables = environment(PREFECT_API_URL=f"http://{HOST}:{any_free_port()}/api", **COLD)
    config = write_config(tmp_path / "config.yaml", short_config(tmp_path))
    answer = stemma("run", config, "--root", tmp_path / "store", env=variables)
    (problem,) = answer.document["errors"]
    assert (answer.code, problem["code"]) == (1, "service_failed")
    assert "Failed to reach API" in problem["message"]


def test_ctrl_c_reaches_a_run_whose_server_is_gone(tmp_path: Path) -> None:
    program = f"""if True:
        import signal
        from flows.runs.journal import *
        journal = RunJournal(Path({str(tmp_path)!r}), 'run')
        signal.signal(signal.SIGTERM, lambda *_: journal.end({{"status": "cancelled", "stages": [], "errors": []}}))
        journal.begin()
        signal.pause()
    """
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    try:
        journal = RunJournal(tmp_path, "run")
        wait_until(journal.works)
        assert followed_without_server(journal, tmp_path, interrupted=True)["status"] == "cancelled"
        assert process.wait(60) == 0
    finally:
        process.kill()


def followed_without_server(journal: RunJournal, root: Path, interrupted: bool) -> dict[str, Any]:
    request = RunRequest(PipelineConfig(name="alone"), Selection(), root, False, "alone.yaml")
    nobody = f"http://{HOST}:{any_free_port()}/api"
    with temporary_settings({PREFECT_API_URL: nobody}), get_client(sync_client=True) as client:
        return _follow(request, journal, client, uuid4(), lambda: interrupted, lambda text: None)


def test_a_slot_that_cannot_be_renewed_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    from prefect.concurrency._leases import maintain_concurrency_lease

    from flows.prefect.admission import LOST, keep_slots

    keep_slots()
    nobody = f"http://{HOST}:{any_free_port()}/api"
    with (
        temporary_settings({PREFECT_API_URL: nobody}),
        maintain_concurrency_lease(uuid4(), 300, raise_on_lease_renewal_failure=True),
    ):
        assert wait_until(lambda: LOST in caplog.text)


def test_a_run_whose_signs_of_life_came_late_is_followed_to_its_end(prefect_url: str, tmp_path: Path) -> None:
    """Of a server that has too much to do some never come: it takes the run for dead."""
    living, dead = RunJournal(tmp_path, "living"), RunJournal(tmp_path, "dead")
    living.begin()
    begin = f"from flows.runs.journal import *; RunJournal(Path({str(tmp_path)!r}), 'dead').begin()"
    subprocess.run([sys.executable, "-c", begin], check=True, cwd=REPOSITORY)
    request = RunRequest(PipelineConfig(name="late"), Selection(), tmp_path, False, "late.yaml")
    told: list[str] = []

    def followed(journal: RunJournal) -> dict[str, Any]:
        with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
            run = client.create_flow_run(prefect.Flow(print, name="late"), state=Crashed(message="no sign of life"))
            return _follow(request, journal, client, run.id, lambda: False, told.append)

    assert [error["code"] for error in followed(dead)["errors"]] == ["run_lost"] and not told
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(followed, living)
        wait_until(lambda: told)
        living.end({"status": "done", "stages": []})
        assert answer.result(60)["status"] == "done"
    assert len(told) == 1 and "its process is still working" in told[0]


def test_a_task_of_which_the_server_heard_nothing_is_there_in_the_end(prefect_url: str, tmp_path: Path) -> None:
    """Prefect gives up the events of a server that is away for longer than its own tries take."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        flow_run = pool.submit(run_whose_events_are_lost, prefect_url, tmp_path).result()
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        (run,) = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))
    assert run.name == "clean"
    assert run.state is not None
    assert (run.state.is_completed(), run.state.message) == (True, "told late")


def run_whose_events_are_lost(prefect_url: str, folder: Path) -> UUID:
    """In a process of its own: Prefect's threads of one that ran a flow make every process that is forked from it
    later, such as a data loader's, end with 1."""
    page = RunPage("lost", "", prefect_url, RunJournal(folder, "lost"), print)

    @prefect.task(name="clean", task_run_name="clean")
    def clean() -> None:
        page.ended("clean", Completed(message="told late"))

    @prefect.flow(name="lost")
    def lost() -> UUID:
        clean()
        here = FlowRunContext.get()
        assert here is not None
        assert here.flow_run is not None
        page.queue.was_lost = True
        assert page.close(60) == 0
        return here.flow_run.id

    EventsWorker.set_client_override(NullEventsClient)
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        return lost()


def completed_tasks(client: SyncPrefectClient) -> set[str]:
    return {task.name for task in client.read_task_runs() if task.state_type == "COMPLETED"}


def keys(client: SyncPrefectClient) -> set[str]:
    return {artifact.key for artifact in client.read_artifacts() if artifact.key}
