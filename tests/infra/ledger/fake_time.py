"""A clock for simulated histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeTime:
    """A clock that only `pass_time` moves. `jump` sets the wall clock, which must not matter."""

    now: float = 1000.0
    offset: float = 1.7e9
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.offset

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            for listen in self.listeners:
                listen()
