"""Rounds of feedback that begin by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy import WORK_POOL
from tests.command import Answer, write_config
from tests.pipelines import full_config

pytestmark = pytest.mark.cluster
Ask = Callable[..., Answer]


@pytest.fixture
def client(prefect_url: str) -> Iterator[SyncPrefectClient]:
    """Of the session's server, which has the pool of `stemma up` and no worker."""
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as found:
        with suppress(ObjectAlreadyExists):
            found.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        yield found


@pytest.fixture
def ask(run: Ask, prefect_url: str) -> Ask:
    """The command, for which the session's server is the one of `stemma up`."""
    return lambda *words: run("feedback", *words, STEMMA_PREFECT_URL=prefect_url.removesuffix("/api"))


def test_rounds_begin_by_a_schedule(ask: Ask, client: SyncPrefectClient, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", full_config() | {"name": "weekly-rounds"})
    words = ("round", config, "--root", tmp_path / "store", "--pairs", "7")
    assert ask(*words, "--cron", "0 6 * *").document["errors"][0]["code"] == "bad_cron"
    answer = ask(*words, "--cron", "0 6 * * 1")
    assert answer.code == 0, answer.document["errors"]
    assert (answer.document["flow_run_id"], answer.document["last_round"]) == ("", None)
    found = client.read_deployment(answer.document["deployment"])
    (planned,) = found.schedules
    assert (planned.active, planned.schedule.cron, planned.schedule.timezone) == (True, "0 6 * * 1", "UTC")  # type: ignore[union-attr]
    assert (found.parameters["pairs"], found.parameters["config_path"]) == (7, str(config))
