"""Pipelines that run by themselves: when, one at a time, after a pause, by the code and config they were made with; and
who hears of a failure; and runs whose process is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingConcurrencySlot, Cancelling, Pending, Running, Scheduled

import flows.deployment.deploy
import flows.prefect.admission
from flows.config.read import load
from flows.deployment.deploy import deploy_pipeline, deploy_stages
from flows.prefect.admission import GRACE, _missed
from flows.prefect.schedules import CATCH_UP_TAG, Schedule, next_dates
from flows.runs.journal import latest
from infra.errors import ConfigError
from infra.process.lifetime import signal_group
from infra.servers.ports import any_free_port
from infra.servers.state import recorded
from tests.support.pipelines import data_config
from tests.support.programs.command import (
    REPOSITORY,
    Answer,
    environment,
    finish,
    start,
    start_new,
    stemma,
    write_config,
)
from tests.support.programs.processes import COLD, running_stage, wait_until
from tests.support.services.receivers import mail_server, webhook


@pytest.mark.parametrize(
    ("cron", "code", "told"),
    [
        ("0 0 30 2 *", "never_fires", "asks for day 30, and February has at most 29 days"),
        ("0 0 31 4,6 *", "never_fires", "asks for day 31, and April, June has at most 30 days"),
        ("0 2 * *", "bad_cron", "has 4 fields"),
        ("0 0 2 * * *", "bad_cron", "has 6 fields"),
        ("61 * * * *", "bad_cron", "61"),
        ("every day at noon please", "bad_cron", "every day"),
        ("", "bad_cron", "has 0 fields"),
    ],
)
def test_a_cron_that_never_fires_is_refused_naming_why(cron: str, code: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        next_dates(cron, "UTC")
    [problem] = caught.value.problems
    assert (problem.code, problem.path) == (code, "--cron")
    assert told in problem.message


def test_a_time_zone_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        next_dates("0 2 * * *", "Europe/Berlim")
    assert [problem.code for problem in caught.value.problems] == ["bad_timezone"]


@pytest.mark.parametrize(
    ("cron", "timezone", "start", "expected"),
    [
        # Berlin's clock goes from 2:00 to 3:00 on 28 March 2027, and from 3:00 to 2:00 on 31 October.
        ("0 2 * * *", "Europe/Berlin", "2027-03-27T12:00Z", ["03-28 03:00+0200", "03-29 02:00+0200"]),
        ("0,30 2,3 * * *", "Europe/Berlin", "2027-03-27T12:00Z", ["03-28 03:00+0200", "03-28 03:30+0200"]),
        ("0 2 * * *", "Europe/Berlin", "2027-03-28T01:00Z", ["03-28 03:00+0200", "03-29 02:00+0200"]),
        ("0 */2 * * *", "Europe/Berlin", "2027-03-28T00:00:00.5Z", ["03-28 03:00+0200", "03-28 04:00+0200"]),
        ("30 * * * *", "Europe/Berlin", "2027-03-28T00:00Z", ["03-28 01:30+0100", "03-28 03:30+0200"]),
        ("30 2 * * *", "Europe/Berlin", "2027-10-30T12:00Z", ["10-31 02:30+0200", "11-01 02:30+0100"]),
        ("30 2 * * *", "Europe/Berlin", "2027-10-31T01:00Z", ["11-01 02:30+0100", "11-02 02:30+0100"]),
        ("30 * * * *", "Europe/Berlin", "2027-10-31T00:00Z", ["10-31 02:30+0200", "10-31 02:30+0100"]),
        # Chile's goes from midnight to 1:00 on 5 September 2027.
        ("0 0 * * *", "America/Santiago", "2027-09-04T12:00Z", ["09-05 01:00-0300", "09-06 00:00-0300"]),
        # The hour behind the looking: 0:10 had passed (Prefect skipped the day of the next change).
        ("10 0 * * *", "America/Montreal", "2027-11-07T04:30:02Z", ["11-08 00:10-0500", "11-09 00:10-0500"]),
        # Days of the month and of the week are alternatives, and `*/2` names some.
        ("0 2 15 * 1", "UTC", "2027-01-12T00:00Z", ["01-15 02:00+0000", "01-18 02:00+0000"]),
        ("0 2 */10 * 1", "UTC", "2027-01-12T00:00Z", ["01-18 02:00+0000", "01-21 02:00+0000"]),
        ("0 2 * * FRI-MON", "UTC", "2027-01-12T00:00Z", ["01-15 02:00+0000", "01-16 02:00+0000"]),
        ("0 2 * * 5#2", "UTC", "2027-01-12T00:00Z", ["02-12 02:00+0000", "03-12 02:00+0000"]),
        ("0 2 L * *", "UTC", "2027-01-12T00:00Z", ["01-31 02:00+0000", "02-28 02:00+0000"]),
    ],
)
def test_dates_when_clocks_change_are_cron_s(cron: str, timezone: str, start: str, expected: list[str]) -> None:
    """2:00 in Berlin came at 1:00, and midnight in Santiago at 23:00 of the day before."""
    dates = next_dates(cron, timezone, 2, datetime.fromisoformat(start))
    assert [date.strftime("%m-%d %H:%M%z") for date in dates] == expected


def test_the_server_runs_a_skipped_hour_after_the_gap(prefect_url: str) -> None:
    start, end = datetime(2027, 3, 27, 12, tzinfo=UTC), datetime(2027, 3, 29, 12, tzinfo=UTC)
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        flow = client.create_flow_from_name(f"clocks {uuid4()}")
        night = {"schedule": {"cron": "0 2 * * *", "timezone": "Europe/Berlin"}}
        made = client.request(
            "POST", "/deployments/", json={"name": "nightly", "flow_id": str(flow), "schedules": [night]}
        )
        made.raise_for_status()
        deployment = UUID(made.json()["id"])
        try:
            window = {"start_time": start.isoformat(), "end_time": end.isoformat()}
            client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=window)
            runs = client.read_flow_runs(
                deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])), limit=200
            )
            due = sorted(run.expected_start_time for run in runs if start < run.expected_start_time < end)  # type: ignore[operator, type-var]
            assert [f"{date:%m-%d %H:%M}" for date in due] == ["03-28 01:00", "03-29 00:00"]  # type: ignore[str-bytes-safe]
        finally:
            client.delete_deployment(deployment)


def test_dates_follow_the_clocks_of_their_time_zone() -> None:
    leap_day, _ = next_dates("0 12 29 2 *", "UTC", 2)
    assert (leap_day.month, leap_day.day) == (2, 29)
    offsets = {date.utcoffset() for date in next_dates("0 2 1 * *", "Europe/Berlin", 12)}
    assert offsets == {timedelta(hours=1), timedelta(hours=2)}


SILENCE = {"STEMMA_LOST_AFTER_S": "8"}
"""Of a server all of whose runs are dead, or get their heartbeats from the test: others send them every 30 s."""


@dataclass
class House:
    """Servers with a worker that tell three receivers, and a data pipeline whose stages are all built."""

    folder: Path
    client: SyncPrefectClient
    env: dict[str, str]
    api_url: str
    hooks: list[tuple[str, Any]]
    mails: list[str]
    is_impatient: bool = False

    @property
    def root(self) -> Path:
        return self.folder / "store"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    def named(self, name: str) -> Path:
        """A config of its own for a pipeline of this name, with the same built stages."""
        config = {**data_config(self.folder), "name": name}
        return write_config(self.folder / f"{name}.yaml", config)

    def deploy(self, name: str, schedule: Schedule | None = None) -> UUID:
        path = self.named(name)
        return deploy_pipeline(load(path), self.root, str(path), schedule)

    def ended(self, *runs: FlowRun) -> list[FlowRun]:
        def all_final() -> list[FlowRun] | None:
            now = [self.client.read_flow_run(run.id) for run in runs]
            return now if all(run.state and run.state.is_final() for run in now) else None

        return wait_until(all_final, timeout_s=400)  # type: ignore[return-value]  # each starts as a new process

    def ask(self, *arguments: str | Path) -> Answer:
        return stemma(*arguments, "--root", self.root, env=self.env)

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

    def end_of(self, run: UUID) -> str:
        """The name of the state that the run ends in, with its message."""
        state: Any = wait_until(lambda: (state_now := self.state(run)).is_final() and state_now)
        return f"{state.name}: {state.message}"


@pytest.fixture(scope="module")
def house(built_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("scheduled") / "data"
    shutil.copytree(built_data, folder, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    write_config(folder / "config.yaml", data_config(folder))
    with webhook() as (address, hooks), mail_server() as (port, mails):
        env = environment(
            STEMMA_NOTICE_SLACK=f"{address}/slack",
            STEMMA_NOTICE_WEBHOOK=f"{address}/hook",
            STEMMA_NOTICE_EMAIL=f"mailto://127.0.0.1:{port}/?from=stemma@lab.example&to=night@lab.example",
            **COLD,
        )
        ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
        try:
            answer = stemma("up", "--root", folder / "store", *ports, env=env)
            assert answer.code == 0, answer.document["errors"]
            again = stemma("up", "--root", folder / "store", env=env)
            assert again.document["automations"] == answer.document["automations"]
            assert len(again.document["automations"]) == 3
            url = f"{answer.document['services'][0]['url']}/api"
            with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
                yield House(folder, client, env, url, hooks, mails)
        finally:
            stemma("down", "--root", folder / "store", env=env)


def told(run: FlowRun) -> tuple[str, str]:
    assert run.state is not None
    return run.state.name or "", run.state.message or ""


@pytest.mark.long
@pytest.mark.cluster
def test_a_schedule_stays_through_deploys_and_runs_and_can_be_paused_and_resumed(house: House) -> None:
    config = house.named("kept")
    options = ["--cron", "0 2 * * *", "--timezone", "Europe/Berlin", "--overlap", "skip", "--catch-up", "none"]
    first = house.ask("deploy", config, *options)
    assert first.code == 0, first.document["errors"]
    [schedule] = first.document["schedules"]
    assert (schedule["overlap"], schedule["catch_up"], schedule["active"]) == ("skip", "none", True)
    assert len(schedule["next"]) == 3
    assert {date[11:16] for date in schedule["next"]} == {"02:00"}
    paused = house.ask("pause-schedule", config)
    assert paused.code == 0, paused.document["errors"]
    assert (paused.document["schedules"][0]["active"], paused.document["schedules"][0]["next"]) == (False, [])
    again = house.ask("deploy", config)
    assert again.document["schedules"] == paused.document["schedules"]
    assert house.ask("resume-schedule", config).document["schedules"] == first.document["schedules"]
    assert house.ask("schedule", config).document["schedules"] == first.document["schedules"]


@pytest.mark.cluster
def test_the_server_itself_plans_the_runs_of_a_schedule(house: House) -> None:
    deployment = house.deploy("planned", Schedule("0 2 * * *", timezone="Europe/Berlin"))
    of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    planned: Any = wait_until(lambda: house.client.read_flow_runs(deployment_filter=of_it))
    assert all(run.auto_scheduled for run in planned)
    dates = sorted(run.expected_start_time for run in planned if run.expected_start_time)
    assert dates == next_dates("0 2 * * *", "Europe/Berlin", len(planned))


@pytest.mark.cluster
def test_the_command_refuses_a_schedule_that_is_none_and_deploys_nothing(house: House) -> None:
    config = house.named("refused")
    for options, code in (
        (["--cron", ""], "bad_cron"),  # as of a variable that is not set: it was deployed without a schedule
        (["--overlap", "skip"], "bad_usage"),
    ):
        answer = house.ask("deploy", config, *options)
        assert (answer.code, answer.document["errors"][0]["code"]) == (2, code), options
    assert house.ask("schedule", config).document["errors"][0]["code"] == "not_deployed"


@pytest.mark.cluster
def test_what_has_no_schedule_cannot_be_paused_and_says_so(house: House) -> None:
    config = house.named("unscheduled")
    answer = house.ask("pause-schedule", config)
    assert (answer.code, answer.document["errors"][0]["code"]) == (2, "not_deployed")
    house.deploy("unscheduled")
    answer = house.ask("pause-schedule", config)
    assert (answer.code, answer.document["errors"][0]["code"]) == (2, "no_schedule")
    assert house.ask("schedule", config).document["schedules"] == []


@pytest.fixture
def missed(house: House) -> Callable[[UUID, list[datetime]], list[FlowRun]]:
    """Runs that Prefect had scheduled by itself for dates that passed while no worker ran."""

    def make(deployment: UUID, dates: list[datetime]) -> list[FlowRun]:
        house.client.request("PATCH", "/work_pools/{name}", path_params={"name": "stemma"}, json={"is_paused": True})
        try:
            runs = [
                house.client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=date))
                for date in dates
            ]
            with closing(sqlite3.connect(house.root / "servers" / "prefect" / "prefect.db", timeout=60)) as database:
                ids = [(str(run.id),) for run in runs]
                database.executemany("UPDATE flow_run SET auto_scheduled = 1 WHERE id = ?", ids)
                database.commit()
        finally:
            body = {"is_paused": False}
            house.client.request("PATCH", "/work_pools/{name}", path_params={"name": "stemma"}, json=body)
        return runs

    return make


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(
    ("catch_up", "names"),
    [
        ("latest", ["Cancelled", "Completed"]),
        ("none", ["Cancelled", "Cancelled"]),
        ("all", ["Completed", "Completed"]),
    ],
)
def test_dates_that_were_missed_are_made_up_for_by_the_stated_policy(
    house: House, missed: Callable[[UUID, list[datetime]], list[FlowRun]], catch_up: Any, names: list[str]
) -> None:
    deployment = house.deploy(f"missed-{catch_up}", Schedule("0 0 1 1 *", catch_up=catch_up))
    now = datetime.now(UTC)
    dates = [now - timedelta(days=1), now - GRACE - timedelta(minutes=1)]
    runs = house.ended(*missed(deployment, dates))
    assert [told(run)[0] for run in runs] == names
    assert all("skipped: due at" in told(run)[1] for run in runs if told(run)[0] == "Cancelled")


def test_a_run_that_is_retried_is_no_missed_one(prefect_url: str) -> None:
    due = datetime.now(UTC) - GRACE - timedelta(minutes=1)
    facts: dict[str, Any] = {"tags": [f"{CATCH_UP_TAG}none"], "auto_scheduled": True, "expected_start_time": due}
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        first, again = (_missed(client, FlowRun(flow_id=uuid4(), run_count=count, **facts)) for count in (1, 2))
    assert "and missed" in first
    assert again == ""


def test_a_run_that_waited_for_another_to_end_is_no_missed_one(
    prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The risk: with --catch-up none a night's run is left out because the one before it took longer."""
    grace = timedelta(seconds=3)
    monkeypatch.setattr(flows.prefect.admission, "GRACE", grace)
    facts: dict[str, Any] = {"tags": [f"{CATCH_UP_TAG}none"], "auto_scheduled": True, "run_count": 0}
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        made = client.request("POST", "/flow_runs/", json={"flow_id": str(client.create_flow_from_name("a-pipeline"))})
        due = datetime.now(UTC)
        run = FlowRun(id=made.json()["id"], flow_id=made.json()["flow_id"], expected_start_time=due, **facts)
        client.set_flow_run_state(run.id, AwaitingConcurrencySlot(), force=True)
        wait_until(lambda: datetime.now(UTC) - due > grace)
        assert _missed(client, run) == ""
        due -= 2 * grace
        assert "and missed" in _missed(client, run.model_copy(update={"expected_start_time": due}))


@pytest.mark.cluster
@pytest.mark.long
def test_a_missed_date_is_not_made_up_for_once_a_later_one_was(
    house: House, missed: Callable[[UUID, list[datetime]], list[FlowRun]]
) -> None:
    """The risk: dates that arrive out of order are both made up for. Dates in order are in `make test`."""
    deployment = house.deploy("missed-out-of-order", Schedule("0 0 1 1 *"))
    now = datetime.now(UTC)
    [later] = house.ended(*missed(deployment, [now - GRACE - timedelta(minutes=1)]))
    [earlier] = house.ended(*missed(deployment, [now - timedelta(days=1)]))
    assert told(later)[0] == "Completed"
    assert told(earlier)[0] == "Cancelled" and "a later date is due too" in told(earlier)[1]


@pytest.mark.cluster
@pytest.mark.parametrize("overlap", ["queue", pytest.param("skip", marks=pytest.mark.long)])
def test_two_runs_of_a_scheduled_pipeline_never_overlap(house: House, overlap: Any, tmp_path: Path) -> None:
    """The second is started by hand while the first is under way, and its command says what it waits for. The risk of
    skip: a run that gives way is taken for one that failed.
    """
    deployment = house.deploy(f"overlap-{overlap}", Schedule("0 0 1 1 *", overlap=overlap))
    forced = {"selection": {"force": ["clean"]}}
    first = house.client.create_flow_run_from_deployment(deployment, parameters=forced)

    def begun() -> bool:
        state = house.client.read_flow_run(first.id).state
        return bool(state and (state.is_running() or state.is_final()))

    wait_until(begun)
    child = wait_until(lambda: running_stage(house.root, "clean"))
    assert isinstance(child, psutil.Process)
    os.killpg(child.pid, signal.SIGSTOP)  # the first is under way for as long as it must be
    flow = child.parent()
    assert flow is not None
    assert "infra.process.fork_server" in flow.cmdline(), "the worker forks its runs"
    assert os.getpgid(flow.pid) == recorded(house.root)["worker"].pid, "and they end with it"
    said = tmp_path / "second.stderr"
    try:
        with said.open("w") as stderr:
            config = house.folder / f"overlap-{overlap}.yaml"
            process = start("run", config, "--root", house.root, env=house.env, stderr=stderr)
        if overlap == "queue":
            wait_until(lambda: "waiting: another run of this pipeline is active" in said.read_text())
        else:
            wait_until(lambda: process.poll() is not None)
    finally:
        os.killpg(child.pid, signal.SIGCONT)
    second = finish(process)
    [one] = house.ended(first)
    assert told(one)[0] == "Completed"
    if overlap == "skip":
        assert (second.code, second.document["status"]) == (130, "cancelled")
        return
    assert second.code == 0, second.document["errors"]
    two = house.client.read_flow_run(UUID(second.document["flow_run_id"]))
    assert one.end_time is not None and two.start_time is not None
    assert two.start_time >= one.end_time


@pytest.mark.cluster
def test_a_worker_with_other_code_refuses_naming_both(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "0123456789abcdef" * 2
    monkeypatch.setattr(flows.deployment.deploy, "code_state", lambda: {"commit": theirs, "dirty": False})
    run = house.client.create_flow_run_from_deployment(house.deploy("other-code"))
    [run] = house.ended(run)
    name, message = told(run)
    assert name == "Failed"
    assert f"deployed by code {theirs[:12]}" in message
    ours = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"the worker has code {ours.stdout[:12]}" in message
    assert "stemma deploy" in message


@pytest.mark.cluster
def test_a_config_that_vanished_is_named_by_pipeline_and_stage(house: House) -> None:
    path = house.named("vanishing")
    pipeline = load(path)
    made = [deploy_pipeline(pipeline, house.root, str(path)), deploy_stages(pipeline, house.root, str(path))["clean"]]
    path.unlink()
    for run in house.ended(*(house.client.create_flow_run_from_deployment(deployment) for deployment in made)):
        name, message = told(run)
        assert name == "Failed"
        assert f"{path}: the config file that this was deployed from is gone" in message


@pytest.mark.long
@pytest.mark.cluster
def test_prefects_own_deploy_reads_prefect_yaml_and_the_config_at_each_run(house: House) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    env = {**house.env, "PREFECT_HOME": str(house.root / "servers" / "prefect"), "PREFECT_API_URL": house.api_url}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = house.client.read_deployment_by_name("pipeline-file/nightly")
    assert [(item.schedule.cron, item.active) for item in found.schedules] == [("0 2 * * *", True)]  # type: ignore[union-attr]
    assert found.global_concurrency_limit is not None
    assert found.global_concurrency_limit.limit == 1
    assert found.parameters == {"config_path": "configs/quickstart.yaml"}

    wrong = write_config(house.folder / "wrong.yaml", {**data_config(house.folder), "tokenizer": {"vocab_siez": 1}})
    runs = [
        house.client.create_flow_run_from_deployment(
            found.id, parameters={"config_path": str(config), "root": str(house.root)}
        )
        for config in (house.config, wrong)
    ]
    good, bad = house.ended(*runs)
    assert told(good)[0] == "Completed", told(good)
    assert good.name == "config"
    assert told(bad)[0] == "Failed"
    assert "tokenizer.vocab_siez" in told(bad)[1]


@pytest.mark.cluster
def test_a_failure_is_told_by_slack_webhook_and_mail(house: House) -> None:
    gone = {"read": [{"kind": "files", "paths": [str(house.folder / "gone.txt")]}]}
    config = write_config(house.folder / "failing.yaml", {"name": "failing", "ingest": gone})
    answer = house.ask("run", config)
    assert answer.code == 1
    sentence = answer.document["errors"][0]["message"]

    def posted(path: str) -> bool:
        return any(where == path and sentence in str(document) for where, document in house.hooks)

    wait_until(lambda: posted("/slack"), timeout_s=60)
    wait_until(lambda: posted("/hook"), timeout_s=60)
    wait_until(lambda: any("Subject: failing failed" in mail for mail in house.mails), timeout_s=60)
    assert all(set(document) == {"text"} for path, document in house.hooks if path == "/slack")


@pytest.mark.cluster
@pytest.mark.long
def test_trials_of_a_sweep_that_a_command_began_are_runs_of_the_worker(house: House) -> None:
    """The server of `up` is named to Prefect before it is imported, which is to be seen in a new process alone.

    The risk: trials run in the command, beside the worker.
    """
    words = ("sweep", house.named("swept"), "--key", "tokenizer.vocab_size=350", "--measure", "tokenizer.vocab_size")
    answer = finish(start_new(*words, "--root", house.root, env=house.env))
    assert answer.code == 0, (answer.document["errors"], answer.stderr)
    (trial,) = answer.document["trials"]
    assert trial["status"] == "done"
    ended = [run for run in house.client.read_flow_runs() if run.parameters.get("run_id") == trial["run_id"]]
    assert len(ended) == 1 and ended[0].deployment_id


# The last tests of this file, since they kill the servers and start them with less patience: flow runs whose process is
# gone, however young they were, end and leave the slot of their schedule.


@pytest.mark.long
@pytest.mark.cluster
def test_a_schedule_goes_on_after_a_run_ended_and_died_without_its_server(house: House) -> None:
    """The first run never sends a second heartbeat, and its end is in its journal alone."""
    path = house.named("killed")
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
    assert house.end_of(first.id) == "Completed: 1 stages built, 3 reused"
    wait_until(lambda: house.state(second.id).name == "Completed")
    assert house.slots_in_use(deployment) == 0


@pytest.mark.long
@pytest.mark.cluster
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
    for name, flow_run_id, long_ago in (("done", done, False), ("earlier", earlier, True)):
        result = house.root / "runs" / name / "result.json"
        result.parent.mkdir(parents=True)
        document = {"flow_run_id": str(flow_run_id), "status": "done", "errors": [], "stages": [{"status": "built"}]}
        result.write_text(json.dumps(document))
        if long_ago:
            os.utime(result, (0, 0))
    path = house.named("slots")
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
        return all(
            house.state(flow_run_id).is_final() for flow_run_id in (dead, waiting, cancelled, done, earlier, scheduled)
        )

    wait_until(all_ended, timeout_s=120)
    crashed = "Crashed: no sign of life from its process for 8 s; run it again"
    assert [house.end_of(flow_run_id) for flow_run_id in (dead, waiting, earlier, scheduled)] == [crashed] * 4
    assert house.end_of(cancelled).startswith("Cancelled")
    assert house.end_of(done) == "Completed: 1 stages built, 0 reused"
    assert (house.state(living).name, house.state(pod).name) == ("Running", "Pending")
    assert house.slots_in_use(deployment) == 0
