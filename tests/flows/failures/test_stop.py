"""How long the stages of a stopped run have to save: as long as whoever stops it will wait."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Running

from flows.runs.journal import RunJournal
from flows.runs.stop import Stop
from infra.process.lifetime import GRACE_S


@pytest.mark.parametrize(("number", "patience_s"), [(signal.SIGINT, GRACE_S), (signal.SIGTERM, 60.0)])
def test_a_person_waits_less_long_than_a_scheduler(number: signal.Signals, patience_s: float) -> None:
    stop = Stop("", 60.0)
    before = signal.getsignal(number)
    with stop.on_signals():
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
    assert stop.patience_s() == patience_s
    assert signal.getsignal(number) == before


def test_a_person_who_wants_to_keep_what_the_stages_have_waits_as_long(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny")
    stop = Stop("", 60.0, is_to_keep=journal.is_to_keep)
    assert not stop.is_set() and stop.patience_s() == GRACE_S
    journal.ask_to_keep()
    assert stop.is_set() and stop.patience_s() == 60.0
    journal.begin(pipeline="tiny")
    assert not stop.is_set(), "a retry is another attempt"


def test_cancel_in_the_page_is_a_persons_although_it_comes_as_sigterm(prefect_url: str) -> None:
    @flow
    def pipeline() -> None: ...

    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        run = client.create_flow_run(pipeline, state=Running())
        stop = Stop(str(run.id), 60.0)
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.patience_s() == 60.0
        client.set_flow_run_state(run.id, Cancelling(), force=True)
        assert stop.patience_s() == GRACE_S
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert stop.patience_s() == 60.0, "no server answers"
