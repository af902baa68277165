"""All callbacks of a fit as one of Composer's, which each hears only the events that it listens to.

Composer asks every callback at each of a batch's 13 events, and before each builds a line for a log that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer.core import Callback, Event, State
from composer.loggers import Logger


class Callbacks(Callback):
    """`members` in their order; their states are kept by their classes' names."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self._members = list(members)
        self._listening = {event: [one for one in members if _listens(one, event)] for event in Event}

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._members)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        for one in self._listening[event]:
            one.run_event(event, state, logger)

    def state_dict(self) -> dict[str, Any]:
        return {type(one).__qualname__: one.state_dict() for one in self._members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self._members:
            one.load_state_dict(state.get(type(one).__qualname__, {}))


def _listens(one: Callback, event: Event) -> bool:
    mine = type(one)
    return any(getattr(mine, name) is not getattr(Callback, name) for name in ("run_event", event.value))
