"""Which stage gets its turn first where fewer may run than are ready."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest

from infra.errors import Cancelled
from tasks import semaphore
from tasks.semaphore import PrioritySemaphore
from tests.support.programs.processes import wait_until

WEIGHTS = {"page": 0, "light": 1, "heavy": 9}
SOON_S = 10.0


class Turns:
    """Stages that ask for their turns in threads of their own, and the order in which they got them."""

    def __init__(self, at_once: int, coming: Collection[str], scarce: Collection[str] = ()) -> None:
        self.got: list[str] = []
        self.stopped = False
        self._go_on = threading.Event()
        self._changed = threading.Condition()
        self._looks = 0
        self._coming = coming
        self._threads: list[threading.Thread] = []
        self._turn = PrioritySemaphore(at_once, WEIGHTS, lambda: self.stopped, self._look, scarce)

    def ask(self, node: str) -> None:
        """Returns when the stage waits or has its turn."""
        self._threads.append(threading.Thread(target=self._work, args=(node,)))
        self._threads[-1].start()
        wait_until(lambda: node in self._turn._asked)

    def _look(self) -> Collection[str]:
        """What is coming, which a stage asks for before it takes a turn or gives way."""
        with self._changed:
            self._looks += 1
            self._changed.notify_all()
        return self._coming

    def after_giving_way(self) -> list[str]:
        """What has had its turn, once whoever waits has looked twice, and so has given way once."""
        with self._changed:
            before = self._looks
            assert self._changed.wait_for(lambda: self._looks >= before + 2, SOON_S), self._looks
        return list(self.got)

    def _work(self, node: str) -> None:
        try:
            with self._turn(node):
                with self._changed:
                    self.got.append(node)
                    self._changed.notify_all()
                self._go_on.wait(SOON_S)
        except Cancelled:
            self.got.append(f"{node} cancelled")

    def wait_for(self, count: int) -> list[str]:
        """What has had its turn, once so many have."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, SOON_S), self.got
        return list(self.got)

    def end(self) -> list[str]:
        self._go_on.set()
        for thread in self._threads:
            thread.join(SOON_S)
        return self.got


def test_a_stage_that_asks_first_gives_way_to_one_that_more_wait_for() -> None:
    turns = Turns(1, ["light", "heavy"])
    turns.ask("light")
    assert turns.after_giving_way() == []
    turns.ask("heavy")
    assert turns.wait_for(1) == ["heavy"]
    assert turns.end() == ["heavy", "light"]


def test_it_gives_way_no_further_than_to_one_place() -> None:
    turns = Turns(2, ["page", "light", "heavy"])
    turns.ask("light")
    assert turns.wait_for(1) == ["light"], "one place is for it, the other is kept"
    turns.ask("page")
    assert turns.after_giving_way() == ["light"]
    turns.ask("heavy")
    assert turns.wait_for(2) == ["light", "heavy"]
    assert turns.end() == ["light", "heavy", "page"]


def test_of_stages_on_a_gpu_one_works_and_others_pass_those_that_wait_for_it() -> None:
    turns = Turns(2, [], scarce=("heavy", "light"))
    turns.ask("heavy")
    assert turns.wait_for(1) == ["heavy"]
    turns.ask("light")
    turns.ask("page")
    assert turns.wait_for(2) == ["heavy", "page"], "what needs no GPU passes what waits for it"
    assert turns.end() == ["heavy", "page", "light"]


def test_the_gpu_is_kept_for_a_stage_that_more_wait_for() -> None:
    turns = Turns(2, ["heavy"], scarce=("heavy", "light"))
    turns.ask("light")
    assert turns.after_giving_way() == []
    turns.ask("heavy")
    assert turns.wait_for(1) == ["heavy"]
    assert turns.end() == ["heavy", "light"]


def test_no_place_is_kept_for_a_stage_that_waits_for_the_gpu() -> None:
    turns = Turns(2, ["light"], scarce=("heavy", "light"))
    turns.ask("heavy")
    assert turns.wait_for(1) == ["heavy"]
    turns.ask("page")
    assert turns.wait_for(2) == ["heavy", "page"]
    turns.end()


def test_what_is_coming_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphore, "PATIENCE_S", 0.1)
    turns = Turns(1, ["heavy"])
    turns.ask("light")
    assert turns.wait_for(1) == ["light"]
    turns.end()


def test_a_run_that_is_cancelled_ends_the_waiting_for_a_turn() -> None:
    turns = Turns(1, ["heavy"])
    turns.ask("light")
    turns.stopped = True
    assert turns.end() == ["light cancelled"]
