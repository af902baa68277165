"""Calls to a server that may be away: in order, the newest of a kind, none lost by another's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from flows.prefect import page_queue
from flows.prefect.page_queue import PageQueue


class Server:
    """Takes calls while it is there."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.tried = threading.Event()
        self.took: list[str] = []

    def call(self, what: str) -> Callable[[], None]:
        def make() -> None:
            self.tried.set()
            if not self.there.is_set():
                raise httpx.ConnectError("nobody there")
            self.took.append(what)

        return make


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_queue, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(page_queue, "LONGEST_PAUSE_S", 0.01)


def test_what_was_missed_is_told_in_order_and_the_newest_of_a_kind_wins() -> None:
    told: list[str] = []
    server, queue = Server(), PageQueue(told.append)
    for percent in range(50):
        queue.tell(server.call(f"{percent} %"), "progress")
        queue.tell(server.call(f"sheet {percent}"), "" if percent in (0, 49) else "sheet")
    assert server.tried.wait(30)
    assert queue.flush(0) == 4
    server.there.set()
    assert queue.flush(60) == 0
    assert server.took == ["49 %", "sheet 0", "sheet 48", "sheet 49"]
    assert len(told) == 2
    assert "does not answer" in told[0] and "answers again" in told[1]
    queue.close()


def test_a_call_that_is_refused_is_told_once_and_keeps_nobody() -> None:
    told: list[str] = []
    server, queue = Server(), PageQueue(told.append)
    server.there.set()

    def refused() -> None:
        raise ValueError("no such flow run")

    for _ in range(3):
        queue.tell(refused, "table")
        queue.tell(server.call("sheet"))
        assert queue.flush(60) == 0
    assert server.took == ["sheet"] * 3
    assert told == ["the page does not show table: ValueError: no such flow run"]
    assert not queue.was_lost
    queue.close()


def test_what_waits_is_bounded_and_what_was_given_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_queue, "LIMIT", 10)
    server, queue = Server(), PageQueue(lambda message: None)
    for number in range(25):
        queue.tell(server.call(str(number)))
    assert server.tried.wait(30)
    server.there.set()
    assert queue.flush(60) == 15
    assert server.took == [str(number) for number in range(15, 25)]
    queue.close()
