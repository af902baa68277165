"""Sources of the nodes of a training: the common interface of hosts, Slurm, Ray and Kubernetes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.errors import Problem


@dataclass(frozen=True)
class Over:
    """Machines that were ours are no longer.

    counts: whether what comes next is one of `launch.restarts`; None where nothing is to come: the try of the stage
        fails with the problem.
    """

    problem: Problem
    counts: bool | None


class Machines(Protocol):
    """Gets machines, each with an agent (`infra.launch.agent`), and gives them back.

    `excluded` has machines that failed, with the reason.
    """

    def request(self, excluded: Mapping[str, str]) -> None:
        """Sees to it that there are, or will be, `launch.nodes` agents, none of them on an excluded machine."""

    def is_ours(self, name: str) -> bool:
        """Return True if an agent belongs to the last request."""

    def order_of(self, name: str) -> int:
        """The place of an agent among the others; the first of them gathers the ranks."""

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """Machines that were asked for and did not come, or left, with the reason."""

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        """Return the reason if no more agents are to be expected; None otherwise."""

    def cancel(self) -> None:
        """Begins to give the machines back."""

    def release(self, leaving_s: float = 0.0) -> None:
        """Gives the machines back; returns when nothing of ours runs there, as far as can be known.

        leaving_s: for how long agents that were told to leave may end by themselves.
        """

    def pass_on_log(self) -> None:
        """Writes what the agents printed since to this process's log."""


class OneJob(ABC):
    """Machines of a scheduler: a job of `launch.nodes` agents at a time, resubmitted once one of them is excluded.

    Agents have ids that begin with what tells the job, and end with a dot and their place in it.
    """

    _excluded: frozenset[str] = frozenset()
    """Of the job that was submitted last."""

    def request(self, excluded: Mapping[str, str]) -> None:
        """Submits a job, unless there is one without excluded machines."""
        if self._has_job() and frozenset(excluded) == self._excluded:
            return
        self._excluded = frozenset(excluded)
        self.release()
        self._submit()

    def order_of(self, name: str) -> int:
        return int(name.rpartition(".")[2])

    def refused(self, excluded: Mapping[str, str]) -> dict[str, str]:
        """The scheduler replaces machines itself, or ends the job."""
        return {}

    @abstractmethod
    def release(self, leaving_s: float = 0.0) -> None: ...

    @abstractmethod
    def _has_job(self) -> bool: ...

    @abstractmethod
    def _submit(self) -> None: ...
