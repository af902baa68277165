"""Sources of the nodes of a training: the common interface of hosts, Slurm, Ray and Kubernetes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.errors import Problem


@dataclass(frozen=True)
class Over:
    """Loss of machines that were ours.

    counts: True if the next start counts towards `launch.restarts`; None if there is no next start, and the attempt at
        the stage fails with the problem.
    """

    problem: Problem
    counts: bool | None


class Machines(Protocol):
    """Source of machines, each with an agent (`infra.launch.agent`), which also takes them back.

    `excluded` maps machines that failed to the reason.
    """

    def request(self, excluded: Mapping[str, str]) -> None:
        """Ensure that there are, or will be, `launch.nodes` agents, none of them on an excluded machine."""

    def is_ours(self, name: str) -> bool:
        """Return True if an agent belongs to the last request."""

    def order_of(self, name: str) -> int:
        """Return the place of an agent among the others; the first of them gathers the ranks."""

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """Return the requested machines that did not come, or left, with the reason."""

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        """Return the reason if no more agents are to be expected; None otherwise."""

    def cancel(self) -> None:
        """Begin to give the machines back."""

    def release(self, leaving_s: float = 0.0) -> None:
        """Give the machines back; return when, as far as can be known, none of our processes runs there.

        Args:
            leaving_s: seconds in which agents that were ordered to leave may end by themselves.
        """

    def pass_on_log(self) -> None:
        """Write the new output of the agents to this process's log."""


class OneJob(ABC):
    """Machines of a scheduler: one job of `launch.nodes` agents at a time, resubmitted once one of them is excluded.

    The id of an agent begins with the job, and ends with a dot and the agent's place in the job.
    """

    _excluded: frozenset[str] = frozenset()
    """Machines that were excluded from the job that was submitted last."""

    def request(self, excluded: Mapping[str, str]) -> None:
        """Submit a job, unless there is one without excluded machines."""
        if self._has_job() and frozenset(excluded) == self._excluded:
            return
        self._excluded = frozenset(excluded)
        self.release()
        self._submit()

    def order_of(self, name: str) -> int:
        return int(name.rpartition(".")[2])

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """Return no machines: the scheduler replaces them itself, or ends the job."""
        return {}

    @abstractmethod
    def release(self, leaving_s: float = 0.0) -> None: ...

    @abstractmethod
    def _has_job(self) -> bool: ...

    @abstractmethod
    def _submit(self) -> None: ...
